"""What the process that coordinates a Ray dataset holds, while many small tasks read."""

import json
import time

import pyarrow as pa
from ray.data import ExecutionOptions, ExecutionResources

from helpers.latents.read import SchedulerCallback, build_dataset
from tests.unit.latents.test_plan import plan_of


def read_little(ranges, source):
    num_rows = sum(rows.num_rows for rows in ranges)
    columns = {"id": range(num_rows), "keep": [True] * num_rows, "latents": [bytes(20_000)] * num_rows}
    return pa.table(columns)


def small_tasks(num_tasks=100_000):
    """Rows of tasks that read four units of eight rows each."""
    plan = plan_of(["a"], [[64] * (num_tasks // 2)], 8, 1, chunk_units=1)
    return build_dataset(plan, 0, plan.steps_per_epoch, read_little)


def watch(rows, file, most_bytes):
    """Have the coordinator append to `file`, every half second, how many chunk numbers wait and blocks it keeps.

    `most_bytes`: how much data is prepared ahead.
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
            with open(file, "a") as lines:
                lines.write(json.dumps({"waiting": numbers["num_external_outqueue_blocks"], "kept": kept}) + "\n")

    rows.context.custom_execution_callback_classes = [*rows.context.custom_execution_callback_classes, Watch]
    limits = ExecutionResources.for_limits(object_store_memory=most_bytes)
    rows.context.execution_options = ExecutionOptions(preserve_order=True, resource_limits=limits)


def seen(file):
    """What `watch` has written."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
