"""Seconds to the first batch when a run starts at a step of an epoch of 1,000,000 samples: at its beginning and later.

    python -m tests.benchmarks.resume_cost [--rows 1000000] [--rounds 3]

Rows are small (0.4 kB), so that what is measured is the plan and Ray Data, not the disk. The starts take turns, and
each begins when nothing is left of the one before.
"""

import contextlib
import statistics
import tempfile
import time

import numpy as np
import ray

from helpers.config.notebook import TrainingConfig
from helpers.latents.manifest import DataSets
from helpers.latents.plan import load_plan
from helpers.latents.read import UNIT, latents_dataset
from helpers.runtime import session
from tests.benchmarks import made_up, record


def first_batch(config, step):
    """Seconds from nothing to the first unit of a step, the plan included."""
    # All CPUs at once can only be had when the last measurement's tasks are gone.
    ray.get(ray.remote(num_cpus=ray.cluster_resources()["CPU"])(lambda: None).remote())
    started = time.perf_counter()
    plan = load_plan(DataSets.open(config.proportions), config)
    data = latents_dataset(plan, step, plan.steps_per_epoch)
    wanted = step * plan.units_per_step
    # Closed, or the rest of the epoch would be read beside the next measurement.
    with contextlib.closing(iter(data.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
        while wanted not in np.asarray(next(batches)[UNIT]):
            pass
        return time.perf_counter() - started


def main():
    given = record.options(__doc__, rows=1_000_000, rounds=3)
    session.connect()
    with tempfile.TemporaryDirectory() as uri:
        made_up.write_latents(uri, given.rows, made_up.SMALL, rows_per_file=20_000)
        config = TrainingConfig(latents_uri=uri, resolution=32, global_batch_size=64)
        steps = given.rows // 64
        starts = [0, steps // 4, steps // 2, 3 * steps // 4, steps - 10]
        found = {step: [] for step in starts}
        for _ in range(given.rounds):
            for step in starts:
                first_batch(config, steps - 1)  # each finds Ray's processes started: a cancelled task ends its own
                found[step].append(first_batch(config, step))
    what = f"from a plan of {given.rows:,} samples to the first batch, from the first step to the last"
    said = ", ".join(f"{statistics.median(seconds):.2f}" for seconds in found.values())
    record.write("resume_cost", {what: f"{said} s"}, seconds=found)


if __name__ == "__main__":
    main()
