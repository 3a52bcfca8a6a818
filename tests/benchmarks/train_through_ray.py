"""Images a second: the training step in a bare loop on one batch in memory, against the same step through Ray.

    python -m tests.benchmarks.train_through_ray [--steps 150] [--rounds 3]

Both run the tiny U-Net in one worker with all cores, one unit a step. Through Ray, the rows are read from Parquet
by Ray Data, dealt out by the epoch plan and counted in metrics.jsonl; and a second time, data apart, Ray Train's
worker takes the bare loop's batch at every step. All rates are by the clock over the steps after the first twenty.
The three take turns; the ratios of their medians are printed. The goal is 0.97. Wants an otherwise idle machine.
"""

import functools
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
    """Images a second of `TrainStep` alone, on one batch."""
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
    """Images a second under Ray Train."""
    fit(config, **parts)
    rate, waits = metrics_log.throughput(metrics_log.read_metrics(config.run_uri), skip=WARM_UP)
    print(f"waiting for data {waits:.1%} of the time")
    return rate


def main():
    given = record.options(__doc__, steps=150, rounds=3)
    session.connect()
    with tempfile.TemporaryDirectory() as folder:
        data = PreprocessingConfig(storage=folder, resolutions=[64])
        captioned_shapes.write_parquet(data.raw_uri, 4000)
        encode(data)

        def config(name):
            steps = given.steps
            run = dict(storage=folder, run_name=name, max_steps=steps, checkpoint_every=steps)
            return TrainingConfig(**run, validate_every=0, validation_share=0)

        def without_ray(_):
            return bare(config("bare"), run_setup.open_run(config("bare")))

        loop = functools.partial(train.train_loop_per_worker, steps=same_batch)
        measures = {
            "bare": without_ray,
            "through Ray": lambda number: through_ray(config(f"round-{number}")),
            "data apart": lambda number: through_ray(config(f"apart-{number}"), loop=loop, stream=None),
        }
        rates = record.in_turns(given.rounds, measures)
    names = {"through Ray": "training through Ray against a bare loop", "data apart": "the same, one batch in memory"}
    summary, ratios = {}, {}
    for name, what in names.items():
        ratios[name], summary[what] = record.compare(rates, name, "bare")
        print(f"{what}: {summary[what]}")
    record.write("train_through_ray", summary, images_per_second=rates, ratios=ratios)


if __name__ == "__main__":
    main()
