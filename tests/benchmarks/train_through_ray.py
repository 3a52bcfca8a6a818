"""Images a second: the training step in a bare loop on one batch in memory, against the same step through Ray.

    python -m tests.benchmarks.train_through_ray [--steps 150] [--rounds 3]

Both run the tiny U-Net in one worker with all cores, one unit a step. Through Ray the rows are read from Parquet by Ray
Data, dealt out by the epoch plan and counted in metrics.jsonl; its rate is that of the median step after the first
twenty. The two alternate; the ratio of their medians is printed. Wants an otherwise idle machine.
"""

import argparse
import statistics
import tempfile
import time

from helpers import captioned_shapes, learner, preprocess, runs, session, train
from helpers.config import PreprocessingConfig, TrainingConfig
from tests.pipelines import encode, fit

WARM_UP = 20


def bare(config, manifest):
    """Images a second of the median step of `Learner` alone, on one batch."""
    train.use_cores(1)
    table = preprocess.first_latents(config.latents_uri, config.global_batch_size).combine_chunks()
    batch = learner.Unit.from_arrow(table, manifest, config.resolution, 0)
    alone = learner.Learner(config, manifest)
    seconds = []
    for step in range(config.max_steps):
        started = time.perf_counter()
        alone.step(step, [batch])
        seconds.append(time.perf_counter() - started)
    return config.global_batch_size / statistics.median(seconds[WARM_UP:])


def through_ray(config):
    """Images a second of the median step under Ray Train, fed by Ray Data."""
    fit(config)
    metrics = runs.read_metrics(config.run_uri).iloc[WARM_UP:]
    print(f"    waiting for data: {metrics['data_wait_share'].median():.2%} of the step")
    return metrics["images_per_second"].median()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    session.connect()
    rates = {"bare": [], "ray": []}
    with tempfile.TemporaryDirectory() as folder:
        data = PreprocessingConfig(storage=folder, resolutions=[64])
        captioned_shapes.write_parquet(data.raw_uri, 4000)
        encode(data)
        for number in range(arguments.rounds):
            config = TrainingConfig(
                storage=folder, run_name=f"round-{number}", max_steps=arguments.steps, validate_every=0,
                checkpoint_every=arguments.steps, validation_share=0,
            )  # fmt: skip
            rates["bare"].append(bare(config, train.open_run(config)))
            rates["ray"].append(through_ray(config))
            print(f"round {number + 1}: bare {rates['bare'][-1]:.0f}, through Ray {rates['ray'][-1]:.0f} images/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"medians: bare {medians['bare']:.0f}, through Ray {medians['ray']:.0f} images/s, ratio {medians['ray'] / medians['bare']:.3f}")


if __name__ == "__main__":
    main()
