"""Where the steps of a run come from: stored latents, or raw rows that are encoded on the way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import ray.train

from .. import distributed, storage
from ..config import TrainingConfig
from ..latents import schema
from ..latents.manifest import DataSets, Manifest
from ..latents.parquet import write_table
from ..latents.plan import plan_run
from ..latents.read import latents_dataset, worker_units
from ..production.data import exclusions
from .dataset import RESUME, Stream, from_resume_point
from .step import Unit


class StepSource:
    """Where the steps of a run come from: stored latents, or raw rows that are encoded on the way.

    The driver gives `datasets` to Ray Train. The workers call `start`, `resume_point` and `steps`, in this order, and
    `write_rejects` before each checkpoint.

    Args:
        config: of the run.
        stream: `stream(plan, first_step, end_step)` returns the plan's blocks of these steps as a Ray dataset; None:
            `latents_dataset`.
        first_step, end_step: the range of the run's steps that this source yields; `end_step` None means to the last
            step. Step 0 of the plan is step `first_step` of the run.
    """

    def __init__(
        self, config: TrainingConfig, stream: Stream | None = None, first_step: int = 0, end_step: int | None = None
    ):
        is_excluded = functools.partial(exclusions.is_listed, config.leave_out)
        self.stream = stream or functools.partial(latents_dataset, is_excluded=is_excluded)
        self.config, self.first_step = config, first_step
        self.end_step = config.max_steps if end_step is None else end_step
        self.rejected: list[pa.Table] = []

    @functools.cached_property
    def data(self) -> DataSets:
        """The data sets that the run trains on."""
        return DataSets.open(self.config.proportions)

    @property
    def datasets(self) -> dict[str, Callable[[], ray.data.Dataset]]:
        """For `TorchTrainer(datasets=...)`."""
        rows = functools.partial(from_resume_point, self.config, self.data, self.stream, self.first_step, self.end_step)
        return {"train": rows}

    def start(self) -> Manifest:
        """The manifest of the data. Call it before building the model: Ray Data starts its processes in parallel."""
        ray.train.get_dataset_shard("train")
        return self.data.first

    def resume_point(self) -> dict:
        """{"checkpoint", "step"}: where this group of workers resumes; for rank 0."""
        return storage.read_json(storage.join(self.config.run_uri, RESUME))

    def steps(self, step: int) -> Iterator[tuple[list[Unit], float]]:
        """Yield `(this worker's units, seconds that it waited for data)` for each step from `step` on.

        A worker without a unit yields a masked one of the step's shape. A thread makes the next step's tensors while a
        step trains. Raises RuntimeError if the dataset does not start at `step` or is out of order.
        """
        config, manifest, plan = self.config, self.data.first, plan_run(self.data, self.config)
        shard, thread = ray.train.get_dataset_shard("train"), ThreadPoolExecutor(1)
        blocks = shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4)
        steps = range(step - self.first_step, self.end_step - self.first_step)
        tables = worker_units(blocks, plan, steps, distributed.rank(), distributed.world_size())

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
            name = f"{step:09d}-{distributed.rank():05d}.parquet"
            write_table(storage.join(self.config.run_uri, "rejects", name), pa.concat_tables(self.rejected))
            self.rejected = []
