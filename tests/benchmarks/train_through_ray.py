"""Images a second: the training step in a bare loop on one batch in memory, against the same step through Ray.

    python -m tests.benchmarks.train_through_ray [--rows 4000] [--steps 150] [--rounds 3]

Both run the tiny U-Net in one worker with all cores, one unit a step. Through Ray, the rows are read from Parquet
by Ray Data, sharded by the epoch plan and counted in metrics.jsonl. Rates are by the clock over the steps after the
first twenty. The two take turns; the ratio of their medians is printed. The goal is 0.97. Wants an otherwise idle
machine.

What Ray's processes take meanwhile is printed and stored: the share of a core, by process.
"""

import collections
import contextlib
import statistics
import tempfile
import time

import psutil

from helpers import cluster, distributed, storage
from helpers.config import PreprocessingConfig
from helpers.latents import held_out
from helpers.lesson import captioned_shapes
from helpers.production import monitor
from helpers.train import metrics
from helpers.train.step import TrainStep, Unit
from tests.benchmarks import record
from tests.pipelines import encode, fit, short_run

WARM_UP = 20


def bare(config, manifest):
    """Images a second of `TrainStep` alone, on one batch."""
    distributed.use_cores(1)
    table = held_out.example_rows(config.latents_uri, config.global_batch_size).combine_chunks()
    batch, alone = Unit.from_arrow(table, manifest, manifest.latents(64), 0), TrainStep(config, manifest)
    for step in range(config.max_steps):
        if step == WARM_UP:
            started = time.perf_counter()
        alone.step(step, [batch])
    return config.global_batch_size * (config.max_steps - WARM_UP) / (time.perf_counter() - started)


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
        if len(self.seen) < 2:  # the run was too short
            return {}
        (begin, before), (end, after) = self.seen[0], self.seen[-1]
        shares = collections.Counter()
        for process, (command, seconds) in after.items():
            program = next((word for word in command if word.endswith((".py", "raylet", "server"))), command[0])
            shares[program.split("/")[-1]] += (seconds - before.get(process, (None, 0))[1]) / (end - begin)
        return {title: round(share, 3) for title, share in shares.most_common() if share > 0.001}


def through_ray(config, shares_of):
    """Images a second under Ray Train; adds to {run: shares of a core}."""
    shares = Shares(config)
    with monitor.poll_in_background(shares.look, every=2):
        fit(config)
    rate, waits = metrics.throughput(metrics.read_metrics(config.run_uri), skip=WARM_UP)
    shares_of[config.run_name] = shares.of_a_core()
    print(f"waiting for data {waits:.1%} of the time; shares of a core: {shares_of[config.run_name]}", flush=True)
    return rate


def medians(shares_of):
    """The medians over the runs, largest first; the smallest ones together."""
    names = dict.fromkeys(name for shares in shares_of.values() for name in shares)
    found = {name: statistics.median(shares.get(name, 0) for shares in shares_of.values()) for name in names}
    largest = sorted(found, key=found.get, reverse=True)[:4]
    others = sum(found.values()) - sum(found[name] for name in largest)
    parts = [f"{name.removeprefix('ray::')} {found[name]:.2f}" for name in largest]
    return f"{', '.join(parts)}, {len(found) - len(largest)} others {others:.2f}"


def main():
    given = record.options(__doc__, rows=4000, steps=150, rounds=3)
    cluster.connect()
    with tempfile.TemporaryDirectory() as folder:
        data = PreprocessingConfig(storage=folder, resolutions=[64])
        captioned_shapes.write_data_set(data.raw_uri, given.rows)
        manifest, shares = encode(data), {}

        def config(name):
            size = {"resolution": 64, "max_steps": given.steps, "checkpoint_every": given.steps}
            recipe = {"global_batch_size": 32, "units_per_step": 1, "validation_share": 0}
            return short_run(folder, name, **size, **recipe)

        measures = {
            "bare": lambda _: bare(config("bare"), manifest),
            "through Ray": lambda number: through_ray(config(f"round-{number}"), shares),
        }
        rates = record.in_turns(given.rounds, measures)
    ratio, said = record.compare(rates, "through Ray", "bare")
    summary = {"training through Ray against a bare loop": said}
    summary["share of a core that processes take meanwhile"] = medians(shares)
    record.write("train_through_ray", summary, images_per_second=rates, ratio=ratio, shares_of_a_core=shares)


if __name__ == "__main__":
    main()
