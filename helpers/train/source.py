"""Where the steps of a run come from: stored latents, or raw rows that are encoded on the way.

A process of Ray Train's own builds the dataset, so importing this module loads no PyTorch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import ray.data
import ray.train

from .. import storage
from ..config import TrainingConfig
from ..latents import schema
from ..latents.manifest import DataSets, Manifest
from ..latents.parquet import write_table
from ..latents.plan import Plan, load_plan, plan_run
from ..latents.read import join_blocks, latents_dataset, worker_units
from . import run_folder

if TYPE_CHECKING:
    from .step import Unit

Stream = Callable[[Plan, int, int], ray.data.Dataset]  # a plan, first step, end step -> its blocks


class StepSource:
    """Where the steps of a run come from: stored latents, or raw rows that are encoded on the way.

    The driver gives `datasets` to Ray Train. The workers call `start`, `resume_point` and `steps`, in this order, and
    `write_rejects` before each checkpoint.

    Args:
        config: of the run.
        stream: `stream(plan, first_step, end_step)` returns the plan's blocks of these steps as a Ray dataset; None:
            `latents_dataset`.

    Attributes:
        end_step: the run's last step.
    """

    def __init__(self, config: TrainingConfig, stream: Stream | None = None):
        self.config, self.stream, self.end_step = config, stream or latents_dataset, config.max_steps
        self.rejected: list[pa.Table] = []

    @functools.cached_property
    def data(self) -> DataSets:
        """The data sets that the run trains on."""
        return DataSets.open(self.config.proportions)

    @property
    def datasets(self) -> dict[str, Callable[[], ray.data.Dataset]]:
        """For `TorchTrainer(datasets=...)`."""
        return {"train": self.from_resume_point}

    def from_resume_point(self) -> ray.data.Dataset:
        """The blocks of the run from the step at which it resumes.

        Ray Train calls it for each group of workers, before the group starts. So the checkpoint is chosen here, and the
        workers read the choice (`resume_point`).
        """
        step = run_folder.choose_resume_point(self.config.run_uri)["step"]
        plan = load_plan(self.data, self.config)
        return join_blocks(self.stream(plan, step, self.end_step), plan, self.data.row_bytes)

    def start(self) -> Manifest:
        """The manifest of the data. Call it before building the model: Ray Data starts its processes in parallel."""
        ray.train.get_dataset_shard("train")
        return self.data.first

    def resume_point(self) -> dict[str, Any]:
        """{"checkpoint", "step"}: where this group of workers resumes; for rank 0."""
        shape = {"checkpoint": (str, type(None)), "step": int}
        return storage.read_json(storage.join(self.config.run_uri, run_folder.RESUME), shape=shape)

    def steps(self, step: int) -> Iterator[tuple[list[Unit], float]]:
        """Yield `(this worker's units, seconds that it waited for data)` for each step from `step` on.

        A worker without a unit yields a masked one of the step's shape. A thread makes the next step's tensors while a
        step trains. Raises RuntimeError if the dataset does not start at `step` or is out of order.
        """
        from .step import Unit  # loads PyTorch

        config, manifest, plan = self.config, self.data.first, plan_run(self.data, self.config)
        worker, thread = ray.train.get_context(), ThreadPoolExecutor(1)
        shard = ray.train.get_dataset_shard("train")
        blocks = shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4)
        steps = range(step, self.end_step)
        tables = worker_units(blocks, plan, steps, worker.get_world_rank(), worker.get_world_size())

        def prepare(step: int) -> tuple[list[Unit], list[pa.Table]]:
            received, latents = next(tables), plan.latents_at(step)
            units = []
            for number, rows in received.items():
                first_position = number % config.units_per_step * config.unit_rows
                units.append(Unit.from_arrow(rows, manifest, latents, first_position))
            masked_rows = config.micro_batch_size or config.unit_rows
            return units or [Unit.masked(manifest, latents, masked_rows)], list(received.values())

        coming = thread.submit(prepare, steps.start)
        for step in steps:
            started = time.perf_counter()
            units, received = coming.result()
            if step + 1 < steps.stop:
                coming = thread.submit(prepare, step + 1)
            for rows in received:  # not in `prepare`: the next checkpoint does not cover the rows of a later step
                self.note_rejects(rows)
            yield units, time.perf_counter() - started

    def note_rejects(self, rows: pa.Table) -> None:
        """Remember rows that could not be encoded on the way (online), for `write_rejects`."""
        if schema.REASON in rows.column_names:
            rejected = rows.filter(pc.not_equal(rows[schema.REASON], ""))
            if rejected.num_rows:
                self.rejected.append(rejected.select([schema.ID, schema.REASON, schema.SOURCE]))

    def write_rejects(self, step: int) -> None:
        """Write this worker's rejected rows since the last call to the run's `rejects/`.

        Call it before the checkpoint that covers these rows. A step that is done again writes the same file name.
        """
        if self.rejected:
            name = f"{step:09d}-{ray.train.get_context().get_world_rank():05d}.parquet"
            write_table(storage.join(self.config.run_uri, "rejects", name), pa.concat_tables(self.rejected))
            self.rejected = []
