"""The epoch plan: which rows make which step, on any number of workers, starting at any step.

The plan is a pure function of the data sets' row groups, their proportions, the seed and the epoch:

    row groups   | a/0   | a/1   | a/2   | b/0   | b/1   |        as they lie in the Parquet files
                        shuffled anew in each epoch, concatenated
    epoch        | b/0   | a/2   | b/1   | a/0   | a/1   |        of a mixture: drawn from each data set by proportion
    chunks       | chunk 0           | chunk 1           |        read together; the rows of a chunk are shuffled
    units        | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  |        `unit_rows` rows each
    steps        | step 0  | step 1  | step 2  | step 3  |        unit u belongs to step u // units_per_step (here 2)
    blocks       | 0, 2    | 1, 3    | 4, 6    | 5, 7    |        units that travel together (here block_steps=2)
    workers      | w0      | w1      | w0      | w1      |        block b goes to worker b % num_workers (here 2)
    micro-batches                                                 a worker splits a unit into `micro_batch_size` rows

Every number of workers trains on the same global batches, and a run can start at any step by starting at that step's
first unit. If the workers do not divide `units_per_step`, some get a unit more than others in a step; these compute
masked rows meanwhile (`TrainStep.step`). Rows at the end of an epoch that do not fill a whole step are left out of that
epoch; so are the remaining rows of the larger data sets once the first data set of a mixture runs out.

One task reads some chunks, and Ray Data hands their blocks out in order (`preserve_order`,
`streaming_split(equal=True)`). A block costs some milliseconds whatever its size, so small units travel together: one
block holds the units with the same place in `block_steps` consecutive steps. Ray does not promise this order in its
documentation, so each row carries its unit's number and `worker_units` checks it.

Downstream stages must preserve the row count: a dropped row would shift every later block to another worker. Unwanted
rows are masked out of the loss instead.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from . import schema, storage
from .config import TrainingConfig

UNIT, KEEP = "unit", "keep"
VALIDATION = "validation"  # folder of an online run's held-out rows, encoded once before the run
CHUNK_BYTES = 64 * 2**20  # each read task holds a few chunks in memory
# Of a read task. A task costs some ten milliseconds whatever it reads; and only tasks that are small against
# BACKPRESSURE_BYTES read beside each other, since their blocks are used in order.
CHUNKS_PER_TASK, CHUNKS_AHEAD = 4, 2
LISTED_TASKS = 2_000  # Ray Data lists tasks before the first one starts, at about a millisecond each
OWN_ORDER = 2**20  # row groups whose order each reading process computes and holds for itself, 12 bytes each
READ_THREADS, LATE_SECONDS = 32, 0.25  # requests of a process to the store; what is never called late
CHUNK_ROWS = 128 * schema.ROWS_PER_ROW_GROUP  # mixes well enough; a larger chunk only delays the first batch
BLOCK_BYTES = 4 * 2**20  # smaller units travel together
# How much data is made ahead of the trainers: the larger of the two. Ray Data reserves 32 MiB for each running task,
# whatever its output, so a smaller bound would leave some of sixteen encoders idle.
BACKPRESSURE_STEPS, BACKPRESSURE_BYTES = 32, 2**30
MIXING_PERIOD = 10_000  # proportions are rounded to multiples of 1 / MIXING_PERIOD


class RowRange(NamedTuple):
    """Consecutive rows of one row group of a file."""

    file_name: str
    row_group: int
    first_row: int
    num_rows: int


ReadRows = Callable[[list[RowRange], "Source"], pa.Table]


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One data set of a mixture.

    Args:
        uri: its folder, as `latents_uri`.
        file_names: Parquet files, relative to its `data/` folder; like arrays of numbers, processes of a node share
            them in Ray's object store.
        group_rows: (row groups of all files,) rows of each.
        first_group: (files + 1,) number of each file's first row group; the last entry is the number of all row groups.
        proportion: its share of every batch; those of a mixture add up to 1.
    """

    uri: str
    file_names: pa.StringArray
    group_rows: np.ndarray
    first_group: np.ndarray
    proportion: float = 1.0

    @classmethod
    def of(cls, uri: str, files: list[tuple[str, list[int]]], proportion: float = 1.0) -> Source:
        """`files`: [(name, rows of each of its row groups)], as in a manifest."""
        return cls(
            uri,
            pa.array([name for name, _ in files], pa.string()),
            np.fromiter((rows for _, groups in files for rows in groups), dtype=np.int64),
            np.cumsum([0, *(len(groups) for _, groups in files)]),
            proportion,
        )

    @functools.cached_property
    def num_rows(self) -> int:
        return int(self.group_rows.sum())

    def row_range(self, group: int, first_row: int, num_rows: int) -> RowRange:
        """Rows of row group number `group` of the data set, by file."""
        file = np.searchsorted(self.first_group, group, side="right") - 1
        return RowRange(
            self.file_names[file].as_py(), int(group - self.first_group[file]), int(first_row), int(num_rows)
        )

    def row_ranges(self, order: np.ndarray, ends: np.ndarray, start: int, stop: int) -> list[RowRange]:
        """Rows `start` to `stop` of the row groups concatenated in `order`; `ends`: the row at which each one ends."""
        if start == stop:
            return []
        ranges = []
        for position in range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1):
            group, end = order[position], ends[position]
            begin = end - self.group_rows[group]
            first, last = max(start, begin), min(stop, end)
            ranges.append(self.row_range(group, first - begin, last - first))
        return ranges


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of samples in a whole run. Units and chunks are numbered through the run; no chunk spans two epochs.

    Args:
        sources: the data sets that are mixed; usually one.
        unit_rows: rows of a unit.
        units_per_step: units of a global batch.
        chunk_units: units of a chunk; more mix better and take more memory.
        seed: of the shuffle.
        block_steps: steps whose units travel in one block; above 1, `chunk_units` must be a multiple of
            `block_steps * units_per_step`.
        worker_counts: how many workers the run may have; only the padding at the end of its data depends on it.
        orders: {epoch: what `row_group_order` returns}, in Ray's object store, if it is too large for every process.
    """

    sources: list[Source]
    unit_rows: int
    units_per_step: int
    chunk_units: int
    seed: int
    block_steps: int = 1
    worker_counts: range = range(1, 2)
    orders: dict[int, ray.ObjectRef] = dataclasses.field(default_factory=dict)

    @property
    def batch_rows(self) -> int:
        return self.unit_rows * self.units_per_step

    @property
    def block_rows(self) -> int:
        """Rows of a block, the same for all: with this as its `batch_size`, a stage receives one block at a time."""
        return self.unit_rows * self.block_steps

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(source.num_rows for source in self.sources)

    # ---- mixing

    @functools.cached_property
    def mixing_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD,) the source of each consecutive row: always the one that is furthest behind its share."""
        if len(self.sources) == 1:
            return np.zeros(MIXING_PERIOD, dtype=np.int64)
        shares = np.array([source.proportion for source in self.sources])
        left, behind = np.round(shares * MIXING_PERIOD), np.zeros(len(shares))
        left[np.argmax(left)] += MIXING_PERIOD - left.sum()
        shares, schedule = left / MIXING_PERIOD, np.empty(MIXING_PERIOD, dtype=np.int64)
        for position in range(MIXING_PERIOD):
            behind += shares
            chosen = np.argmax(np.where(left > 0, behind, -np.inf))
            schedule[position] = chosen
            behind[chosen] -= 1
            left[chosen] -= 1
        return schedule

    @functools.cached_property
    def _cumulative_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD + 1, sources) rows of each source among the first rows of the schedule."""
        counts = np.zeros((MIXING_PERIOD + 1, len(self.sources)), dtype=np.int64)
        counts[np.arange(1, MIXING_PERIOD + 1), self.mixing_schedule] = 1
        return np.cumsum(counts, axis=0)

    def rows_by_source(self, num_rows: int) -> np.ndarray:
        """(sources,) how many of an epoch's first `num_rows` rows come from each source."""
        periods, rest = divmod(num_rows, MIXING_PERIOD)
        return periods * self._cumulative_schedule[-1] + self._cumulative_schedule[rest]

    # ---- the size of an epoch

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Whole steps before the first source runs out."""
        available = np.array([source.num_rows for source in self.sources])
        fits, too_many = 0, int(available.sum()) // self.batch_rows + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if (self.rows_by_source(middle * self.batch_rows) <= available).all():
                fits = middle
            else:
                too_many = middle
        return fits

    @property
    def units_per_epoch(self) -> int:
        return self.steps_per_epoch * self.units_per_step

    @property
    def chunks_per_epoch(self) -> int:
        return -(-self.units_per_epoch // self.chunk_units)

    # ---- from steps to chunks, units and rows

    def chunk_of(self, unit: int) -> int:
        """The chunk that a unit belongs to."""
        epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
        return epoch * self.chunks_per_epoch + unit_in_epoch // self.chunk_units

    def chunk_range(self, first_step: int, num_steps: int) -> range:
        """The chunks that hold the units of steps `first_step` to `num_steps` (exclusive)."""
        if first_step >= num_steps:
            return range(0)
        first_unit, end_unit = first_step * self.units_per_step, num_steps * self.units_per_step
        return range(self.chunk_of(first_unit), self.chunk_of(end_unit - 1) + 1)

    def unit_range(self, chunk: int, first_step: int = 0, num_steps: int | None = None) -> range:
        """The units of a chunk, clipped to the steps `first_step` to `num_steps` (exclusive; None: no end).

        Blocks do not depend on the step that a run starts at: if `first_step` lies inside a block, so do the units of
        the block's earlier steps, which the worker skips.
        """
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        start = epoch * self.units_per_epoch + index * self.chunk_units
        stop = min(start + self.chunk_units, (epoch + 1) * self.units_per_epoch)
        skipped = max(0, first_step * self.units_per_step - start)
        if self.block_steps > 1:
            skipped -= skipped % (self.block_steps * self.units_per_step)
        return range(start + skipped, stop if num_steps is None else min(stop, num_steps * self.units_per_step))

    def block_order(self, units: range) -> np.ndarray:
        """The units of a chunk in the order in which they travel, `block_steps` of them in each block.

        (N,) unit numbers; -1 fills up the blocks of the last steps, so that all blocks have the same number of rows.
        """
        numbers = np.arange(units.start, units.stop)
        if self.block_steps == 1:
            return numbers
        units_per_group = self.block_steps * self.units_per_step  # of the blocks with the same steps
        padded = np.full(-(-len(numbers) // units_per_group) * units_per_group, -1)
        padded[: len(numbers)] = numbers
        return padded.reshape(-1, self.block_steps, self.units_per_step).swapaxes(1, 2).reshape(-1)

    def block_of(self, unit: int) -> int:
        """The block that a unit travels in, counted through the run."""
        epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
        step, place = divmod(unit_in_epoch, self.units_per_step)
        groups_per_epoch = -(-self.steps_per_epoch // self.block_steps)  # of blocks with the same steps
        return (epoch * groups_per_epoch + step // self.block_steps) * self.units_per_step + place

    def units_of_worker(self, step: int, first_step: int, rank: int, world_size: int) -> range:
        """The units of a step that a worker gets of a dataset that starts at `first_step`."""
        first_unit = step * self.units_per_step
        blocks_before = self.block_of(first_unit) - self.block_of(first_step * self.units_per_step)
        return range(first_unit + (rank - blocks_before) % world_size, first_unit + self.units_per_step, world_size)

    def padding_blocks(self, first_step: int, num_steps: int) -> int:
        """Blocks to add to those of some steps: `streaming_split` drops what it cannot deal out equally."""
        first_unit, last_unit = first_step * self.units_per_step, num_steps * self.units_per_step - 1
        num_blocks = self.block_of(last_unit) + 1 - self.block_of(first_unit)
        return max(-num_blocks % count for count in self.worker_counts)

    def row_group_order(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each source `(order, ends)`: its row groups as shuffled in this epoch, and the row at which each ends."""
        if epoch in self.orders:
            return ray.get(self.orders[epoch])
        orders = []
        for number, source in enumerate(self.sources):
            key = [self.seed, epoch, number] if number else [self.seed, epoch]
            order = np.random.default_rng(key).permutation(len(source.group_rows))
            orders.append((order.astype(np.int32), np.cumsum(source.group_rows[order])))
        return orders

    def shared(self, chunks: range) -> ray.ObjectRef:
        """This plan for the tasks that read these chunks, with the orders of large epochs once a node."""
        plan = ray.put(self)
        if not chunks or sum(len(source.group_rows) for source in self.sources) <= OWN_ORDER:
            return plan
        order = ray.remote(Plan.row_group_order)
        epochs = range(chunks[0] // self.chunks_per_epoch, chunks[-1] // self.chunks_per_epoch + 1)
        return ray.put(dataclasses.replace(self, orders={epoch: order.remote(plan, epoch) for epoch in epochs}))

    def chunk_rows(self, chunk: int) -> tuple[list[list[RowRange]], np.ndarray]:
        """The rows of a chunk: `(row ranges of each source, permutation)`.

        Row i of the chunk is row `permutation[i]` of all its row ranges concatenated, one source after another.
        """
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        start = index * self.chunk_units * self.unit_rows  # in rows of the epoch
        stop = start + len(self.unit_range(chunk)) * self.unit_rows
        source_of_row = np.take(self.mixing_schedule, np.arange(start, stop), mode="wrap")
        starts, stops = self.rows_by_source(start), self.rows_by_source(stop)
        random = np.random.default_rng([self.seed, epoch, index])
        ranges, permutation, offset = [], np.empty(stop - start, dtype=np.int64), 0
        for number, (order, ends) in enumerate(_cached_row_group_order(self, epoch)):
            count = int(stops[number] - starts[number])
            ranges.append(self.sources[number].row_ranges(order, ends, starts[number], stops[number]))
            permutation[source_of_row == number] = offset + random.permutation(count)
            offset += count
        return ranges, permutation


@functools.lru_cache(maxsize=2)
def _cached_row_group_order(plan: Plan, epoch: int):
    return plan.row_group_order(epoch)


@functools.lru_cache(maxsize=2)
def _fetch(plan: ray.ObjectRef) -> Plan:
    """A plan from the object store, once in a process: its tasks then share the cached order of an epoch."""
    return ray.get(plan)


def read_manifests(config: TrainingConfig, heads: bool = False) -> dict[str, schema.Manifest]:
    """{URI: manifest} of the latents that are trained on. Raises FileNotFoundError naming a folder that holds none.

    `heads`: without their files (`read_head`).
    """
    return {uri: read_head(uri) if heads else read_manifest(uri) for uri in config.proportions}


def read_manifest(latents_uri: str) -> schema.Manifest:
    """The manifest of a finished job. Raises FileNotFoundError that says how to make one."""
    try:
        return schema.Manifest.from_dict(storage.read_json(storage.join(latents_uri, schema.MANIFEST)))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"No latents at latents_uri={latents_uri!r} (no {schema.MANIFEST} there): make them first with "
            f"`papermill Preprocessing.ipynb - -p latents_uri {latents_uri} > /dev/null`, or by running "
            "Preprocessing.ipynb."
        ) from None


def read_head(latents_uri: str) -> schema.Manifest:
    """A manifest without its files, their counts as one segment; of a large manifest, only the start is read."""
    segments, uri = '"segments": [', storage.join(latents_uri, schema.MANIFEST)
    text, found, _ = storage.read_text(uri, segments).partition(segments) if storage.exists(uri) else ("{}", "", "")
    values = json.loads(text + segments + "]}" if found else text)
    if "written" not in values:  # of an earlier version, with the counts at the end
        values = read_manifest(latents_uri).to_dict()
    counts = {count: values[count] for count in ("read", "written", "filtered", "rejected")}
    return schema.Manifest.from_dict({**values, "segments": [{"files": [], **counts}]})


def check_mixture(manifests: dict[str, schema.Manifest]) -> None:
    """Raises ValueError if data sets of different encoders are mixed."""
    (first_uri, first), *others = manifests.items()
    for uri, manifest in others:
        for name in ("encoder", "columns", "scaling_factor", "empty_caption_embedding", "id_type"):
            mine, theirs = getattr(manifest, name), getattr(first, name)
            if mine != theirs:
                what = f" ({mine} and {theirs})" if name != "empty_caption_embedding" else ""
                raise ValueError(
                    f"latents_uri mixes {uri} with {first_uri}, which differ in {name}{what}: "
                    "encode them in the same way."
                )


def plan_run(manifests: dict[str, schema.Manifest], config: TrainingConfig) -> Plan:
    """The plan of a training run over the latents of its manifests (URI -> manifest).

    From heads of manifests, it says which worker gets which units, but not the files of their rows. Raises ValueError
    if the latents do not fill one step.
    """
    row_bytes = next(iter(manifests.values())).row_bytes
    sources = [
        Source.of(uri, manifest.files or [("", [manifest.total("written")])], config.proportions[uri])
        for uri, manifest in manifests.items()
    ]
    num_rows = sum(source.num_rows for source in sources)
    chunk_units = max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS, num_rows) // config.unit_rows)
    chunk_steps = max(1, chunk_units // config.units_per_step)
    block_steps = min(max(1, BLOCK_BYTES // (row_bytes * config.unit_rows)), chunk_steps, 8)
    if block_steps > 1:  # chunks of whole blocks
        chunk_units = chunk_steps // block_steps * block_steps * config.units_per_step
    plan = Plan(
        sources,
        config.unit_rows,
        config.units_per_step,
        chunk_units,
        config.seed,
        block_steps,
        range(config.fewest_workers, config.most_workers + 1),
    )
    if plan.steps_per_epoch < 1:
        raise ValueError(
            f"global_batch_size={config.global_batch_size} is more than the {plan.num_rows} rows of "
            f"{config.latents_uri} can fill: make it smaller, or encode more data."
        )
    return plan


# ---- reading what is planned


def latents_dataset(
    plan: Plan, first_step: int, num_steps: int, *, resolution: int | dict, validation_share: float
) -> ray.data.Dataset:
    """Stored latents in the plan's order, from `first_step` on, as a Ray dataset of the plan's blocks.

    Columns: id, caption, the latents of `resolution` (of a mapping: of all its sizes), the embeddings, `keep` (False:
    masked out of the loss, because validation owns the row or it has no latents) and `unit`, the unit's number in the
    run.
    """
    read = functools.partial(read_latents, resolution=resolution, validation_share=validation_share)
    return build_dataset(plan, first_step, num_steps, read)


def build_dataset(plan: Plan, first_step: int, num_steps: int, read: ReadRows) -> ray.data.Dataset:
    """The rows that `read(row ranges, source)` returns, with a column `keep`, as a Ray dataset of the plan's blocks.

    Of the data before `first_step`, only the head of that step's chunk is read.
    """
    chunks = plan.chunk_range(first_step, num_steps)
    plan_ref, num_tasks = plan.shared(chunks), max(1, -(-len(chunks) // CHUNKS_PER_TASK))
    read_planned = functools.partial(
        read_chunks, plan=plan_ref, first_chunk=chunks.start, first_step=first_step, num_steps=num_steps, read=read
    )
    numbers = ray.data.range(len(chunks), override_num_blocks=num_tasks if num_tasks <= LISTED_TASKS else 1)
    if os.environ.get("PRETRAIN_LOCAL_RAY"):  # set by `runtime.session.connect`
        numbers.context.custom_execution_callback_classes = [SchedulerThrottle]
        for _ in range(2):  # processes that read start now, beside the trainer: to import what they need takes seconds
            ray.remote(Plan.chunk_of).remote(plan_ref, 0)
    if num_tasks > LISTED_TASKS:  # one task makes the others' numbers, a few ahead of them
        numbers = numbers.repartition(target_num_rows_per_block=CHUNKS_PER_TASK)
    return numbers.map_batches(read_planned, batch_size=None).repartition(target_num_rows_per_block=plan.block_rows)


class SchedulerThrottle:
    """Throttle Ray Data's scheduling loop to 20 Hz; while backpressured it busy-waits on ready tasks.

    On a machine that also trains, this would keep one core from the trainer. Implements Ray Data's execution callbacks.
    """

    def before_execution_starts(self, executor):
        pass

    def on_execution_step(self, executor):
        time.sleep(0.05)

    def after_execution_succeeds(self, executor):
        pass

    def after_execution_fails(self, executor, error):
        pass


def read_chunks(
    batch: dict, *, plan: Plan | ray.ObjectRef, first_chunk: int, first_step: int, num_steps: int, read: ReadRows
) -> Iterator[pa.Table]:
    """For `map_batches`: one Arrow table for each block of the chunks of `batch["id"]`, counted from `first_chunk`.

    While one chunk is put together, threads read the next ones.
    """
    plan = _fetch(plan) if isinstance(plan, ray.ObjectRef) else plan
    chunks, reading = [first_chunk + int(number) for number in batch["id"]], {}
    for place, chunk in enumerate(chunks):
        for ahead in chunks[place : place + 1 + CHUNKS_AHEAD]:
            if ahead not in reading:
                reading[ahead] = start_reading(plan, ahead, read)
        yield from read_blocks(plan, chunk, first_step, num_steps, reading.pop(chunk))


def start_reading(plan: Plan, chunk: int, read: ReadRows) -> list[Future]:
    """Read the row ranges of a chunk in threads: a future of their rows for each file and data set."""
    ranges, _ = plan.chunk_rows(chunk)
    futures = []
    for mine, source in zip(ranges, plan.sources, strict=True):
        for _, of_file in itertools.groupby(mine, key=lambda rows: rows.file_name):
            futures.append(_threads("reads").submit(read_repeatedly, functools.partial(read, list(of_file), source)))
    return futures


@functools.cache
def _threads(name: str, count: int = READ_THREADS) -> ThreadPoolExecutor:
    # Arrow's threads do the requests, and an S3 client that is opened later allows as many connections.
    pa.set_io_thread_count(max(pa.io_thread_count(), count))
    return ThreadPoolExecutor(count, name)


_seconds = collections.deque([0.25], maxlen=64)  # that recent reads of this process took


def read_repeatedly(read: Callable[[], pa.Table]) -> pa.Table:
    """`read()`, which is called once more beside the first call if that takes much longer than others, or fails.

    Of an object store's many requests, some are answered after seconds, in part or not at all. Raises what the third
    failure raised.
    """

    def timed():
        started = time.perf_counter()
        rows = read()
        _seconds.append(time.perf_counter() - started)
        return rows

    running, failed = set(), 0
    while True:
        if len(running) < 2:
            running.add(_threads("tries", 2 * READ_THREADS).submit(timed))
        late = max(LATE_SECONDS, 3 * statistics.median(_seconds))
        done, running = wait(running, late, FIRST_COMPLETED)
        for future in done:
            if future.exception() is None:
                return future.result()
            failed += 1
            if failed == 3 or not isinstance(future.exception(), (OSError, pa.ArrowException)):
                raise future.exception()


def read_chunk(plan: Plan, chunk: int, first_step: int, num_steps: int, read: ReadRows) -> pa.Table:
    """The rows of a chunk that the steps need, in the order in which they travel, with a column `unit`."""
    return pa.concat_tables(read_blocks(plan, chunk, first_step, num_steps, start_reading(plan, chunk, read)))


def read_blocks(plan: Plan, chunk: int, first_step: int, num_steps: int, reading: list[Future]) -> Iterator[pa.Table]:
    """The blocks of a chunk that the steps need, with a column `unit`; rows of unit -1 only fill up a block.

    `reading`: what `start_reading` returned.
    """
    _, permutation = plan.chunk_rows(chunk)
    rows = pa.concat_tables(future.result() for future in reading)
    units = plan.block_order(plan.unit_range(chunk, first_step, num_steps))
    if chunk == plan.chunk_range(first_step, num_steps)[-1]:
        units = np.append(units, np.full(plan.padding_blocks(first_step, num_steps) * plan.block_steps, -1))
    place_in_chunk = np.maximum(units - plan.unit_range(chunk).start, 0)
    for block in range(0, len(units), plan.block_steps):
        places = place_in_chunk[block : block + plan.block_steps, None] * plan.unit_rows + np.arange(plan.unit_rows)
        mine = permutation[places.reshape(-1)]
        columns = {name: take(rows[name], mine) for name in rows.column_names}
        yield pa.table({**columns, UNIT: np.repeat(units[block : block + plan.block_steps], plan.unit_rows)})


def take(column: pa.ChunkedArray, rows: np.ndarray) -> pa.Array | pa.ChunkedArray:
    """`column.take(rows)`, which would copy the whole column first: of tensors, this copies these rows alone."""
    if not pa.types.is_fixed_size_binary(column.type):
        return column.take(rows)
    width, ends = column.type.byte_width, np.cumsum([len(chunk) for chunk in column.chunks])
    arrays = [schema.from_binary(chunk, (width,), np.uint8)[0] for chunk in column.chunks]
    # Arrow's memory pool keeps memory that the last block had; new memory would be zeroed page by page.
    values = np.frombuffer(pa.allocate_buffer(len(rows) * width), np.uint8).reshape(-1, width)
    chunks = np.searchsorted(ends, rows, side="right")
    for value, chunk, row in zip(values, chunks.tolist(), (rows - ends[chunks]).tolist(), strict=True):
        value[:] = arrays[chunk][row]  # rows count from the chunk's end
    valid = column.is_valid().to_numpy()[rows] if column.null_count else None
    return schema.to_binary(values, valid, np.uint8)


def join_blocks(rows: ray.data.Dataset, plan: Plan, row_bytes: int) -> ray.data.Dataset:
    """The plan's blocks, joined again if they are so large that Ray Data splits the output of a stage."""
    largest = rows.context.target_max_block_size
    if largest is None or plan.block_rows * row_bytes <= largest:
        return rows
    return rows.repartition(target_num_rows_per_block=plan.block_rows, strict=True)


def split_units(block: pa.Table, unit_rows: int) -> dict[int, pa.Table]:
    """{unit number: its rows} of a block, without padding. Raises RuntimeError if its rows are not whole units."""
    numbers = block[UNIT].to_numpy().reshape(-1, unit_rows)
    if (numbers != numbers[:, :1]).any():
        raise RuntimeError(
            f"A block of {len(block)} rows holds parts of units: {sorted(set(numbers.ravel().tolist()))}."
        )
    return {
        int(number): block.slice(index * unit_rows, unit_rows)
        for index, number in enumerate(numbers[:, 0])
        if number >= 0
    }


def worker_units(
    blocks: Iterable[pa.Table], plan: Plan, steps: range, rank: int, world_size: int
) -> Iterator[dict[int, pa.Table]]:
    """For each of consecutive steps, a worker's units: {unit number: its rows}; {} if others have them all.

    Raises RuntimeError if the blocks do not arrive in the plan's order.
    """
    blocks, received = iter(blocks), {}
    for step in steps:
        expected = plan.units_of_worker(step, steps.start, rank, world_size)
        while any(unit not in received for unit in expected):
            block = next(blocks, None)
            units = {} if block is None else split_units(block, plan.unit_rows)
            if not units.keys() & set(expected):
                raise RuntimeError(
                    f"Worker {rank} expected units {list(expected)} for step {step} and received {sorted(units)}: the "
                    "data starts at another step than the checkpoint, or Ray Data did not keep the order of its blocks."
                )
            received.update((unit, rows) for unit, rows in units.items() if unit >= expected.start)
        yield {unit: received.pop(unit) for unit in expected}


def read_latents(
    row_ranges: list[RowRange], source: Source, *, resolution: int | Iterable[int], validation_share: float
) -> pa.Table:
    """Rows of a latents folder, and `keep`."""
    columns = [schema.latents_column(one) for one in ([resolution] if isinstance(resolution, int) else resolution)]
    rows = read_row_ranges(
        row_ranges, [schema.ID, schema.CAPTION, *columns, schema.EMBEDDINGS], storage.join(source.uri, "data")
    )
    has_latents = np.any([rows[column].is_valid().to_numpy() for column in columns], axis=0)
    keep = has_latents & ~held_out(rows[schema.ID].to_pylist(), validation_share)
    return rows.append_column(KEEP, pa.array(keep))


def read_row_ranges(row_ranges: list[RowRange], columns: list[str], folder_uri: str) -> pa.Table:
    """Columns of row ranges of a folder's Parquet files, concatenated; each file is opened once."""
    filesystem, folder = storage.open_filesystem(folder_uri)
    tables = [None] * len(row_ranges)
    for file_name in dict.fromkeys(rows.file_name for rows in row_ranges):
        # A row group's columns lie side by side: one request to an object store reads them all (`pre_buffer`).
        with pq.ParquetFile(f"{folder}/{file_name}", filesystem=filesystem, pre_buffer=True) as file:
            for position, rows in enumerate(row_ranges):
                if rows.file_name == file_name:
                    group = file.read_row_group(rows.row_group, columns=columns, use_threads=False)
                    tables[position] = group.slice(rows.first_row, rows.num_rows)
    return pa.concat_tables(tables)


def held_out(ids: list, share: float) -> np.ndarray:
    """(B,) bool: the rows that validation owns, those whose id hashes below `share`.

    It depends on the id alone, so a row is on the same side whatever the seed, the epoch or the data around it.
    """
    if share == 0:
        return np.zeros(len(ids), dtype=bool)
    threshold = share * 2**32
    return np.array([zlib.crc32(str(i).encode()) < threshold for i in ids], dtype=bool)


def validation_rows(config: TrainingConfig, num_rows: int) -> pa.Table | None:
    """About the first `num_rows` held-out rows that have latents, in the order of the files; None if there are none.

    Of a mixture, each data set gives its proportion.
    """
    if config.validation_share == 0:
        return None
    tables = []
    for uri, manifest in read_manifests(config).items():
        wanted = max(1, round(num_rows * config.proportions[uri]))
        if manifest.online:
            uri = storage.join(uri, VALIDATION)
            manifest = read_manifest(uri)
        tables += _held_out_rows(manifest, uri, config, wanted)
    return pa.concat_tables(tables) if sum(table.num_rows for table in tables) else None


def _held_out_rows(manifest: schema.Manifest, uri: str, config: TrainingConfig, missing: int) -> list[pa.Table]:
    columns = [schema.ID, schema.CAPTION, schema.latents_column(config.largest_resolution), schema.EMBEDDINGS]
    tables, folder = [], storage.join(uri, "data")

    def find_held_out(file):
        """[(row group, mask of its held-out rows)] for the row groups that have such rows."""
        name, row_groups = file
        ranges = [RowRange(name, group, 0, rows) for group, rows in enumerate(row_groups)]
        ids = read_row_ranges(ranges, [schema.ID], folder)[schema.ID].to_pylist()
        masks = np.split(held_out(ids, config.validation_share), np.cumsum(row_groups)[:-1])
        return [(row_range, mask) for row_range, mask in zip(ranges, masks, strict=True) if mask.any()]

    with ThreadPoolExecutor(16) as pool:  # few rows are held out: read the ids of many files at once
        for start in range(0, len(manifest.files), 64):
            files = pool.map(find_held_out, manifest.files[start : start + 64])
            for row_range, mask in itertools.chain.from_iterable(files):
                rows = read_row_ranges([row_range], columns, folder).filter(pa.array(mask))
                tables.append(rows.filter(rows[columns[2]].is_valid())[:missing])
                missing -= tables[-1].num_rows
                if missing <= 0:
                    return tables
    return tables


def execution_options(config: TrainingConfig) -> ray.data.ExecutionOptions:
    """Options for Ray Train's `DataConfig(execution_options=...)`: blocks in order, and a bound on data made ahead.

    Without the bound, trainers that are slower than the data pipeline would let half of the object store fill up before
    Ray Data holds back.
    """
    row_bytes = max(manifest.row_bytes for manifest in read_manifests(config, heads=True).values())
    ahead = max(BACKPRESSURE_BYTES, BACKPRESSURE_STEPS * config.global_batch_size * row_bytes)
    limits = ray.data.ExecutionResources.for_limits(object_store_memory=ahead)
    return ray.data.ExecutionOptions(preserve_order=True, resource_limits=limits)
