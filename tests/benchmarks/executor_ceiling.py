"""What Ray Data's coordinator can do: units a second through empty stages.

    python -m tests.benchmarks.executor_ceiling [--trainers 32] [--encoders 16] [--seconds 60]

One process, the coordinator of `streaming_split`, schedules every task of a run and hands out every block. Here
the stages of an online run do nothing, with blocks as in the first phase of the full run: a unit of 128 rows of
a global batch of 4,096. A few cores cannot be 32 trainers and their encoders, so what counts is the CPU time of the
scheduling loop, one thread, for each unit: in a second it passes on at most as many units as that goes into. Phase 1
needs 46. The coordinator's other threads mostly wait for trainers, a hundred times a second for each that lacks data.
"""

import json
import pathlib
import sys
import tempfile
import threading
import time

import psutil
import pyarrow as pa
from ray import cloudpickle
from ray.data import ActorPoolStrategy, ExecutionOptions, ExecutionResources, TaskPoolStrategy

from helpers import cluster
from helpers.latents.read import SchedulerCallback, build_dataset
from tests.benchmarks import record
from tests.unit.latents.test_plan import plan_of

BATCH, UNITS_PER_STEP, IMAGES_PER_SECOND = 4096, 32, 5908  # `profiles/full-sd2-256.yaml`
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def watch(rows, file, most_bytes):
    """Have the coordinator append to `file`, every half second, what it has done, holds and took.

    `most_bytes`: how much data is prepared ahead, as `read.execution_options` says it.
    """

    class Watch(SchedulerCallback):
        written = 0.0

        def on_execution_step(self, executor):
            if time.time() < self.written + 0.5:
                return
            self.written, stages, stats, kept = time.time(), [], executor.get_stats(), 0
            while stats.parents:
                stages.append((stats.base_name, stats.extra_metrics))
                kept += sum(map(len, stats.metadata.values()))
                stats = stats.parents[0]
            numbers = next(metrics for name, metrics in stages if name.startswith("StreamingRepartition"))
            line = {
                "time": self.written,
                "units": stages[1][1]["num_task_outputs_generated"],
                "waiting": numbers["num_external_outqueue_blocks"],
                "kept": kept,  # blocks that were made and of which it still knows
                "loop": time.thread_time(),  # the scheduling loop calls this
                "process": sum(psutil.Process().cpu_times()[:2]),
            }
            with open(file, "a") as lines:
                lines.write(json.dumps(line) + "\n")

    rows.context.custom_execution_callback_classes = [*rows.context.custom_execution_callback_classes, Watch]
    limits = ExecutionResources.for_limits(object_store_memory=most_bytes)
    rows.context.execution_options = ExecutionOptions(preserve_order=True, resource_limits=limits)


def seen(file):
    """What `watch` has written."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_nothing(ranges, source):
    num_rows = sum(rows.num_rows for rows in ranges)
    return pa.table({"id": range(num_rows), "keep": [True] * num_rows})


def pass_on(rows):
    return rows


class Encoder:
    def __call__(self, rows):
        return rows


def online_rows(encoders):
    """The stages of `stream` in Online_Preprocessing_and_Training.ipynb; they read, transform and encode nothing."""
    plan = plan_of(["a"], [[64] * 400_000], BATCH // UNITS_PER_STEP, UNITS_PER_STEP, chunk_units=1)
    rows = build_dataset(plan, 0, plan.steps_per_epoch, read_nothing)
    rows = rows.map_batches(pass_on, batch_size=None, batch_format="pyarrow", compute=TaskPoolStrategy(encoders))
    pool = {"compute": ActorPoolStrategy(size=encoders), "num_cpus": 0.01}
    return rows.map_batches(Encoder, batch_size=plan.block_rows, batch_format="pyarrow", **pool)


def read_little(ranges, source):
    rows = read_nothing(ranges, source)
    return rows.append_column("latents", pa.array([bytes(20_000)] * len(rows)))


def small_tasks(num_tasks=100_000):
    """Rows of tasks that read four units of eight rows each."""
    plan = plan_of(["a"], [[64] * (num_tasks // 2)], 8, 1, chunk_units=1)
    return build_dataset(plan, 0, plan.steps_per_epoch, read_little)


def consume(shard, ended):
    for _ in shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        if ended.is_set():
            return


def run(rows, file, trainers, seconds):
    """What the coordinator wrote while `trainers` threads took the rows, without its first ten seconds of blocks."""
    watch(rows, file, most_bytes=2**30)
    ended, shards = threading.Event(), rows.streaming_split(trainers, equal=True)
    threads = [threading.Thread(target=consume, args=(shard, ended)) for shard in shards]
    for thread in threads:
        thread.start()
    while not (lines := [line for line in seen(file) if line["units"]]):
        time.sleep(1)
    time.sleep(seconds + 10)
    ended.set()
    for thread in threads:
        thread.join()
    end = lines[0]["time"] + 10 + seconds
    return [line for line in seen(file) if end - seconds < line["time"] < end]


def main():
    given = record.options(__doc__, trainers=32, encoders=16, seconds=60.0)
    cluster.connect(num_cpus=8)
    # Not `ray.shutdown`, which ends a process whose threads still hold references; coordinators write until the end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lines = run(online_rows(given.encoders), pathlib.Path(folder, "seen"), given.trainers, given.seconds)
    names = ("units", "loop", "process", "time")
    units, loop, process, wall = (lines[-1][name] - lines[0][name] for name in names)
    needed = IMAGES_PER_SECOND / BATCH * UNITS_PER_STEP
    what = f"units/s through empty stages to {given.trainers} trainers, by the CPU time of the loop"
    said = f"at most {units / loop:.0f}, {units / loop / needed:.1f} times what phase 1 needs ({needed:.0f}); "
    said += f"{units / wall:.0f} on these cores"
    details = {"units": units, "loop_seconds": loop, "process_seconds": process, "seconds": wall}
    record.write("executor_ceiling", {what: said}, **details)


if __name__ == "__main__":
    main()
