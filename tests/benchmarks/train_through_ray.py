"""Images a second: the training step in a bare loop on one batch in memory, against the same step through Ray.

    python -m tests.benchmarks.train_through_ray [--steps 150] [--rounds 3]

Both run the tiny U-Net in one worker with all cores, one unit a step. Through Ray, the rows are read from Parquet
by Ray Data, dealt out by the epoch plan and counted in metrics.jsonl; and a second time, data apart, Ray Train's
worker takes the bare loop's batch at every step. All rates are by the clock over the steps after the first twenty.
The three take turns; the ratios of their medians are printed. The goal is 0.97. Wants an otherwise idle machine.
"""

import sys
import tempfile
import time

from ray import cloudpickle

from helpers import distributed
from helpers.config.notebook import PreprocessingConfig, TrainingConfig
from helpers.latents import read
from helpers.latents.manifest import read_manifest
from helpers.lesson import captioned_shapes
from helpers.runtime import session
from helpers.train import dataset, metrics, profiling, setup, sources
from helpers.train.step import TrainStep, Unit
from tests.benchmarks import record
from tests.pipelines import encode, fit

WARM_UP = 20
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def first_batch(config, manifest):
    table = read.first_latents(config.latents_uri, config.global_batch_size).combine_chunks()
    return Unit.from_arrow(table, manifest, manifest.latents(config.resolution), 0)


def bare(config, manifest):
    """Images a second of `TrainStep` alone, on one batch."""
    distributed.use_cores(1)
    batch, alone = first_batch(config, manifest), TrainStep(config, manifest)
    for step in range(config.max_steps):
        if step == WARM_UP:
            started = time.perf_counter()
        alone.step(step, [batch])
    return config.global_batch_size * (config.max_steps - WARM_UP) / (time.perf_counter() - started)


class SameBatch(sources.StepSource):
    """Without data: the same batch at every step."""

    datasets = None

    def start(self):
        pass

    def resume_point(self):
        return dataset.choose_resume_point(self.config)

    def steps(self, step):
        batch = first_batch(self.config, read_manifest(self.config.latents_uri))
        for _ in range(step, self.end_step):
            yield [batch], 0.0


def through_ray(config, make_source=None):
    """Images a second under Ray Train."""
    fit(config, source=make_source and make_source(config))
    rate, waits = profiling.throughput(metrics.read_metrics(config.run_uri), skip=WARM_UP)
    print(f"waiting for data {waits:.1%} of the time")
    return rate


def main():
    given = record.options(__doc__, steps=150, rounds=3)
    session.connect()
    with tempfile.TemporaryDirectory() as folder:
        data = PreprocessingConfig(storage=folder, resolutions=[64])
        captioned_shapes.write_data_set(data.raw_uri, 4000)
        encode(data)

        def config(name):
            steps = given.steps
            run = dict(storage=folder, run_name=name, max_steps=steps, checkpoint_every=steps)
            return TrainingConfig(**run, validate_every=0, validation_share=0)

        def without_ray(_):
            return bare(config("bare"), setup.open_run(config("bare")).first)

        measures = {
            "bare": without_ray,
            "through Ray": lambda number: through_ray(config(f"round-{number}")),
            "data apart": lambda number: through_ray(config(f"apart-{number}"), SameBatch),
        }
        rates = record.in_turns(given.rounds, measures)
    names = {"through Ray": "training through Ray against a bare loop", "data apart": "the same, one batch in memory"}
    summary, ratios = {}, {}
    for name, what in names.items():
        ratios[name], summary[what] = record.compare(rates, name, "bare")
    record.write("train_through_ray", summary, images_per_second=rates, ratios=ratios)


if __name__ == "__main__":
    main()
