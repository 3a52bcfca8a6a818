"""Images a second: the training step in a bare loop on one batch in memory, against the same step through Ray.

    python -m tests.benchmarks.train_through_ray [--steps 150] [--rounds 3]

Both run the tiny U-Net in one worker with all cores, one unit a step. Through Ray, the rows are read from Parquet
by Ray Data, dealt out by the epoch plan and counted in metrics.jsonl; and a second time, data apart, Ray Train's
worker takes the bare loop's batch at every step. All rates are by the clock over the steps after the first twenty.
The three take turns; the ratios of their medians are printed. The goal is 0.97. Wants an otherwise idle machine.

What Ray's processes take meanwhile is printed and stored: the share of a core, by process.
"""

import collections
import contextlib
import statistics
import sys
import tempfile
import time

import psutil
from ray import cloudpickle

from helpers import cluster, distributed, notebook, storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.latents import read
from helpers.latents.manifest import read_manifest
from helpers.lesson import captioned_shapes
from helpers.train import dataset, metrics, profiling, setup, sources
from helpers.train.step import TrainStep, Unit
from tests.benchmarks import record
from tests.pipelines import encode, fit

WARM_UP = 20
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def first_batch(config, manifest):
    table = read.example_rows(config.latents_uri, config.global_batch_size).combine_chunks()
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


class Shares:
    """Share of a core that each process of Ray's takes between the first steps and the last, by its title."""

    def __init__(self, config):
        self.config, self.seen = config, []  # [(seconds, {process: (command, CPU seconds)})]

    def look(self):
        log = storage.join(self.config.run_uri, "metrics.jsonl")
        steps = storage.read_bytes(log).count(b"\n") if storage.exists(log) else 0
        if WARM_UP <= steps < self.config.max_steps:
            used = {}
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    used[process] = process.cmdline()[:3] or ["ended"], sum(process.cpu_times()[:2])
            self.seen.append((time.monotonic(), used))

    def of_a_core(self):
        (begin, before), (end, after) = self.seen[0], self.seen[-1]
        shares = collections.Counter()
        for process, (command, seconds) in after.items():
            program = next((word for word in command if word.endswith((".py", "raylet", "server"))), command[0])
            shares[program.split("/")[-1]] += (seconds - before.get(process, (None, 0))[1]) / (end - begin)
        return {title: round(share, 3) for title, share in shares.most_common() if share > 0.001}


def through_ray(config, shares_of, make_source=None):
    """Images a second under Ray Train; adds to {run: shares of a core}."""
    shares = Shares(config)
    with notebook.poll_in_background(shares.look, every=2):
        fit(config, source=make_source and make_source(config))
    rate, waits = profiling.throughput(metrics.read_metrics(config.run_uri), skip=WARM_UP)
    shares_of[config.run_name] = shares.of_a_core()
    print(f"waiting for data {waits:.1%} of the time; shares of a core: {shares_of[config.run_name]}", flush=True)
    return rate


def of_processes(shares_of):
    """The medians over the runs that read, largest first; the smallest ones together."""
    runs = [shares for name, shares in shares_of.items() if name.startswith("round")]
    names = dict.fromkeys(name for shares in runs for name in shares)
    medians = {name: statistics.median(shares.get(name, 0) for shares in runs) for name in names}
    largest = sorted(medians, key=medians.get, reverse=True)[:4]
    others = sum(medians.values()) - sum(medians[name] for name in largest)
    parts = [f"{name.removeprefix('ray::')} {medians[name]:.2f}" for name in largest]
    return f"{', '.join(parts)}, {len(medians) - len(largest)} others {others:.2f}"


def main():
    given = record.options(__doc__, steps=150, rounds=3)
    cluster.connect()
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

        shares = {}
        measures = {
            "bare": without_ray,
            "through Ray": lambda number: through_ray(config(f"round-{number}"), shares),
            "data apart": lambda number: through_ray(config(f"apart-{number}"), shares, SameBatch),
        }
        rates = record.in_turns(given.rounds, measures)
    names = {"through Ray": "training through Ray against a bare loop", "data apart": "the same, one batch in memory"}
    summary, ratios = {}, {}
    for name, what in names.items():
        ratios[name], summary[what] = record.compare(rates, name, "bare")
    summary["share of a core that processes take meanwhile"] = of_processes(shares)
    record.write("train_through_ray", summary, images_per_second=rates, ratios=ratios, shares_of_a_core=shares)


if __name__ == "__main__":
    main()
