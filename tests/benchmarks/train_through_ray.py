"""Images a second: the training step in a bare loop on one batch in memory, against the same step through Ray.

    python -m tests.benchmarks.train_through_ray [--steps 150] [--rounds 3]

Both run the tiny U-Net in one worker with all cores, one unit a step. Through Ray, the rows are read from Parquet
by Ray Data, dealt out by the epoch plan and counted in metrics.jsonl; and a second time, data apart, Ray Train's
worker takes the bare loop's batch at every step. All rates are by the clock over the steps after the first twenty.
The three take turns; the ratios of their medians are printed. The goal is 0.97. Wants an otherwise idle machine.
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time

from ray import cloudpickle

from helpers import distributed, preprocess, run_setup, train, train_step
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.lesson import captioned_shapes
from helpers.runtime import metrics_log, session
from tests.benchmarks import record
from tests.pipelines import encode, fit

WARM_UP = 20
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def first_batch(config, manifest):
    table = preprocess.first_latents(config.latents_uri, config.global_batch_size).combine_chunks()
    return train_step.Unit.from_arrow(table, manifest, config.resolution, 0)


def bare(config, manifest):
    """Images a second of `Learner` alone, on one batch."""
    distributed.use_cores(1)
    batch, alone = first_batch(config, manifest), train_step.TrainStep(config, manifest)
    for step in range(config.max_steps):
        if step == WARM_UP:
            started = time.perf_counter()
        alone.step(step, [batch])
    return config.global_batch_size * (config.max_steps - WARM_UP) / (time.perf_counter() - started)


def same_batch(config, manifest, steps, rejects):
    """As `train.train_steps`, without data: the same batch at every step."""
    batch = first_batch(config, manifest)
    for _ in steps:
        yield [batch], 0.0


def through_ray(config, **parts):
    """(images a second under Ray Train, share of the time that it waits for data)"""
    fit(config, **parts)
    return metrics_log.throughput(metrics_log.read_metrics(config.run_uri), skip=WARM_UP)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    session.connect()
    rates = {"bare": [], "through Ray": [], "data apart": []}
    with tempfile.TemporaryDirectory() as folder:
        data = PreprocessingConfig(storage=folder, resolutions=[64])
        captioned_shapes.write_parquet(data.raw_uri, 4000)
        encode(data)
        for number in range(arguments.rounds):
            config = TrainingConfig(
                storage=folder,
                run_name=f"round-{number}",
                max_steps=arguments.steps,
                validate_every=0,
                checkpoint_every=arguments.steps,
                validation_share=0,
            )
            apart = TrainingConfig(**{**config.to_dict(), "run_name": f"apart-{number}"})
            rates["bare"].append(bare(config, run_setup.open_run(config)))
            rate, waits = through_ray(config)
            rates["through Ray"].append(rate)
            loop = functools.partial(train.train_loop_per_worker, steps=same_batch)
            rates["data apart"].append(through_ray(apart, loop=loop, stream=None)[0])
            said = ", ".join(f"{name} {found[-1]:.0f}" for name, found in rates.items())
            print(f"round {number + 1}: {said} images/s; waiting for data {waits:.1%} of the time", flush=True)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name in ("through Ray", "data apart"):
        print(
            f"{name}: {medians[name]:.0f} of {medians['bare']:.0f} images/s, "
            f"ratio {medians[name] / medians['bare']:.3f}"
        )
    ratios = {name: medians[name] / medians["bare"] for name in ("through Ray", "data apart")}
    names = {"through Ray": "training through Ray against a bare loop", "data apart": "the same, one batch in memory"}
    record.write(
        "train_through_ray",
        {
            what: f"{medians[name]:.0f} of {medians['bare']:.0f} images/s: {ratios[name]:.2f}"
            for name, what in names.items()
        },
        images_per_second=medians,
        ratios=ratios,
    )


if __name__ == "__main__":
    main()
