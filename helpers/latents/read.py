"""How the rows of a plan get to the training workers: tasks of Ray Data that read them, and the order of their blocks.

A task reads a few chunks of the plan, and Ray Data delivers their blocks in order (`preserve_order`,
`streaming_split(equal=True)`): block b goes to worker b % num_workers. A block costs a few milliseconds whatever its
size, so several units are sent together: a block holds the units at the same position in `block_steps` consecutive
steps. Ray's documentation does not guarantee this order, so each row carries its unit's number and `worker_units`
checks it.

Downstream stages must preserve the row count: a dropped row would shift every later block to another worker. Rows
that are excluded and, in online runs, broken pictures cannot be used. A stage keeps such rows, and they are masked
out of the loss.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.actor import ActorHandle

from .. import storage
from . import schema
from .parquet import MEND, PlainParquetFile, file_id, open_parquet
from .plan import EpochOrder, Files, Plan, RowRange, Source

UNIT, KEEP = "unit", "keep"
CAPTION_COLUMNS = (schema.CAPTION, schema.EMBEDDINGS)  # stored once for each of a row's captions
# Per read task. A task costs about ten milliseconds whatever it reads. Blocks are used in order, so only tasks that are
# small compared with BACKPRESSURE_BYTES read in parallel.
CHUNKS_PER_TASK, CHUNKS_AHEAD = 4, 2
OWN_ORDER = 2**20  # row groups up to which each reading process computes their order itself, 12 bytes each
READ_THREADS = 32  # concurrent requests of a process
# Ray Data lists tasks before the first one starts, at about a millisecond each, and holds what a task gets, some 7 kB,
# until it starts. The tasks of longer plans are made on the way, this many at a time.
LISTED_TASKS = 2_000
# How much data is prepared ahead of the trainers: the larger of the two. Ray Data reserves 32 MiB per running task,
# whatever its output, so a smaller bound would leave some of sixteen encoders idle.
BACKPRESSURE_STEPS, BACKPRESSURE_BYTES = 32, 2**30
LOCAL_RAY = "PRETRAIN_LOCAL_RAY"  # set in the workers of a Ray on this machine (`cluster.connect`)
STATS_STEPS = 100  # of Ray Data's scheduling loop; each takes a tenth of a second at most

ReadRows = Callable[[list[RowRange], Source], pa.Table]


# ---- the dataset


def latents_dataset(
    plan: Plan,
    first_step: int,
    end_step: int,
    wrap: Callable[[ReadRows], ReadRows] = lambda read: read,
) -> ray.data.Dataset:
    """A Ray dataset of the stored latents for steps `first_step` to `end_step` (exclusive).

    Its blocks are the plan's, in the plan's order.

    Columns: id, caption, the latents of the step's shape, the embeddings, and `unit` (the unit's number in the run).

    `wrap`: given the function that reads rows, returns one to use in its place, such as `production.data.hedged.wrap`.
    It may add columns, such as `keep`: rows in which it is False are masked out of the loss.
    """
    return build_dataset(plan, first_step, end_step, wrap(latents_reader(plan)))


def build_dataset(
    plan: Plan, first_step: int, end_step: int, read: ReadRows, chunks_per_task: int = CHUNKS_PER_TASK
) -> ray.data.Dataset:
    """The rows that `read(row ranges, source)` returns, as a Ray dataset of the plan's blocks, with a column `unit`.

    Reading starts at the chunk that holds `first_step`; earlier data is skipped.
    """
    chunks = plan.chunk_range(first_step, end_step)
    shared = share_plan(plan, chunks)
    steps = {"first_chunk": chunks.start, "first_step": first_step, "end_step": end_step}
    read_planned = functools.partial(read_chunks, plan=shared, read=read, **steps)
    num_tasks = max(1, -(-len(chunks) // chunks_per_task))
    if num_tasks <= LISTED_TASKS:
        ids = ray.data.range(len(chunks), override_num_blocks=num_tasks)
    else:
        ids, position = throttled_chunk_ids(len(chunks), chunks_per_task)
        read_planned = functools.partial(report_and_read, position=position, read_planned=read_planned)
    rows = ids.map_batches(read_planned, batch_size=None).repartition(target_num_rows_per_block=plan.block_rows)
    rows.context.custom_execution_callback_classes = [SchedulerCallback]
    start_processes(shared)
    return rows


def share_plan(plan: Plan, chunks: range) -> ray.ObjectRef:
    """`(plan, {epoch: its orders})` for the tasks that read these chunks.

    The orders of large epochs are computed once, and a node's processes share them in Ray's object store.
    """
    orders = {}
    if chunks and sum(len(bucket.groups) for source in plan.sources for bucket in source.buckets) > OWN_ORDER:
        plan_ref = ray.put(plan)
        for epoch in range(chunks[0] // plan.chunks_per_epoch, chunks[-1] // plan.chunks_per_epoch + 1):
            orders[epoch] = ray.remote(Plan.epoch_orders).remote(plan_ref, epoch)
    return ray.put((plan, orders))


def start_processes(shared: ray.ObjectRef) -> None:
    """Start two processes of a Ray on this machine, and fetch what `share_plan` returned.

    Their imports take seconds, which pass while the trainer starts. On a cluster, nothing is done.
    """

    if LOCAL_RAY in os.environ:
        for _ in range(2):
            ray.remote(fetch).remote([shared])


def fetch(shared: list[ray.ObjectRef]) -> None:
    """`shared`: a list with one reference; Ray would replace a reference that is an argument itself by its value."""
    _fetch(*shared)


@functools.lru_cache(maxsize=4)
def _fetch(shared: ray.ObjectRef) -> Any:
    """The plan, or an epoch's orders, fetched once per process, so that its tasks share the plan's cached values."""
    return ray.get(shared)


def join_blocks(rows: ray.data.Dataset, plan: Plan, row_bytes: int) -> ray.data.Dataset:
    """`rows` in the plan's blocks. Ray Data splits large blocks after a stage; these are joined again."""
    largest = rows.context.target_max_block_size
    if largest is None or plan.block_rows * row_bytes <= largest:
        return rows
    return rows.repartition(target_num_rows_per_block=plan.block_rows, strict=True)


# ---- how far ahead of the trainers data is read


def execution_options(row_bytes: int, batch_rows: int) -> ray.data.ExecutionOptions:
    """Options for Ray Train's `DataConfig(execution_options=...)`: blocks in order, and a bound on data prepared ahead.

    Without the bound, a data pipeline that is faster than the trainers would fill half of the object store.

    Args:
        row_bytes: of a row at its largest (`DataSets.row_bytes`).
        batch_rows: of a global batch.
    """
    ahead = max(BACKPRESSURE_BYTES, BACKPRESSURE_STEPS * batch_rows * row_bytes)
    limits = ray.data.ExecutionResources.for_limits(object_store_memory=ahead)
    return ray.data.ExecutionOptions(preserve_order=True, resource_limits=limits)


def throttled_chunk_ids(num_chunks: int, chunks_per_task: int) -> tuple[ray.data.Dataset, ActorHandle]:
    """`(chunk ids of a long plan, one block per reading task; the position to report to by `report_and_read`)`.

    At most `LISTED_TASKS` blocks are made at a time, shortly before their tasks start (`wait_until_needed`). Ray Data
    bounds its queues in bytes only. A chunk id has eight bytes, so Ray Data would never hold back the tasks that make
    these ids.
    """
    position = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ReadPosition).remote()
    ids = ray.data.range(num_chunks, override_num_blocks=-(-num_chunks // (chunks_per_task * LISTED_TASKS)))
    hold = functools.partial(wait_until_needed, position=position)
    ids = ids.map_batches(hold, batch_size=None, num_cpus=0, compute=ray.data.TaskPoolStrategy(1))
    return ids.repartition(target_num_rows_per_block=chunks_per_task), position


class ReadPosition:
    """An actor that knows the largest chunk id that a reading task has begun with.

    If the actor is lost, Ray restarts it. The next task that begins tells the new actor its chunk id.
    """

    number = 0

    def advance_to(self, number: int = 0) -> int:
        self.number = max(self.number, number)
        return self.number


def wait_until_needed(batch: dict, *, position: ActorHandle) -> dict:
    """For `map_batches`: returns the batch of chunk ids unchanged, but not too early.

    With n ids in the batch, waits until a task has begun to read a chunk at most n before the first one.
    """
    while ray.get(position.advance_to.remote()) < batch["id"][0] - len(batch["id"]):
        time.sleep(1)
    return batch


def report_and_read(batch: dict, *, position: ActorHandle, read_planned: Callable) -> Iterator[pa.Table]:
    """For `map_batches`: tells `position` the batch's last chunk id, and returns `read_planned(batch)`."""
    position.advance_to.remote(int(batch["id"][-1]))
    return read_planned(batch)


class SchedulerCallback:
    """Keeps Ray Data's scheduling loop small; Ray Data calls it at each of the loop's steps.

    If trainers share this machine, the loop pauses while it is backpressured: it would busy-wait on tasks whose output
    must wait, and take a core from a trainer. Steps that return at once, because they wait for no task, double the
    pause up to 50 ms; others halve it.

    The statistics that Ray Data keeps of each block for `Dataset.stats()` are dropped. They take some kilobytes a
    block, and a run of Stable Diffusion's size has tens of millions of blocks.
    """

    def __init__(self):
        self.steps, self.pause, self.resumed = 0, 0.0, 0.0

    def do_nothing(self, executor: Any, error: Exception | None = None) -> None:
        pass

    before_execution_starts = after_execution_succeeds = after_execution_fails = do_nothing

    def on_execution_step(self, executor: Any) -> None:
        self.steps += 1
        if self.steps % STATS_STEPS == 0:
            drop_block_stats(executor)
        if LOCAL_RAY in os.environ:
            self.pause_if_busy()

    def pause_if_busy(self) -> None:
        busy_waiting = time.perf_counter() - self.resumed < 0.01
        self.pause = min(0.05, 2 * self.pause + 0.001) if busy_waiting else self.pause / 2
        time.sleep(self.pause)
        self.resumed = time.perf_counter()


def drop_block_stats(executor: Any) -> None:
    stats = executor.get_stats()
    while stats:
        for blocks in stats.metadata.values():
            blocks.clear()
        stats = next(iter(stats.parents), None)


# ---- a reading task


def read_chunks(
    batch: dict, *, plan: Plan | ray.ObjectRef, first_chunk: int, first_step: int, end_step: int, read: ReadRows
) -> Iterator[pa.Table]:
    """For `map_batches`: one Arrow table for each block of some chunks.

    `batch["id"]`: the chunks' numbers, counted from `first_chunk`. `plan`: a plan, or what `share_plan` returned. While
    one chunk is assembled, threads read the next ones.
    """
    plan, orders = (plan, {}) if isinstance(plan, Plan) else _fetch(plan)

    def start(chunk: int) -> ChunkReader:
        epoch = chunk // plan.chunks_per_epoch
        return ChunkReader(plan, chunk, read, _fetch(orders[epoch]) if orders else None)

    for reader in take_ahead((start(first_chunk + int(number)) for number in batch["id"]), CHUNKS_AHEAD):
        yield from reader.blocks(first_step, end_step)


def take_ahead(items: Iterator, count: int) -> Iterator:
    """The same items. Before an item is yielded, the work of the `count` items after it has been started.

    `items`: an iterator that starts an item's work when it returns the item.
    """
    started = collections.deque(itertools.islice(items, 1 + count))
    while started:
        yield started.popleft()
        started.extend(itertools.islice(items, 1))


class ChunkReader:
    """Reads the rows of a chunk in threads, and cuts them into blocks.

    Args:
        plan: the plan.
        chunk: the chunk's number.
        read: `read(row ranges of a file, source)` -> their rows.
        orders: as for `Plan.chunk_rows`.
    """

    def __init__(self, plan: Plan, chunk: int, read: ReadRows, orders: list[EpochOrder] | None = None):
        self.plan, self.chunk = plan, chunk
        ranges, self.permutation = plan.chunk_rows(chunk, orders)
        self.reading: list[Future] = []
        for source, of_source in ranges:
            for _, of_file in itertools.groupby(of_source, key=lambda rows: rows.file):
                read_file = functools.partial(read, list(of_file), source)
                self.reading.append(threads("reads").submit(read_repeatedly, read_file))

    def blocks(self, first_step: int, end_step: int) -> Iterator[pa.Table]:
        """The blocks of the chunk that these steps need, with a column `unit`; rows of unit -1 are padding."""
        plan = self.plan
        rows = pa.concat_tables(future.result() for future in self.reading)
        blocks = plan.blocks(self.chunk, first_step, end_step)
        if self.chunk == plan.chunk_range(first_step, end_step)[-1]:
            padding = np.full((plan.padding_blocks(first_step, end_step), plan.block_steps), -1)
            blocks = np.concatenate([blocks, padding])
        first_unit = plan.unit_range(self.chunk).start
        for units in blocks:
            first_rows = np.maximum(units - first_unit, 0) * plan.unit_rows
            positions = (first_rows[:, None] + np.arange(plan.unit_rows)).reshape(-1)
            columns = {name: take(rows[name], self.permutation[positions]) for name in rows.column_names}
            yield pa.table({**columns, UNIT: np.repeat(units, plan.unit_rows)})


@functools.cache
def threads(name: str, count: int = READ_THREADS) -> ThreadPoolExecutor:
    """A pool of threads of this process."""
    # Arrow's threads send the requests, and S3 clients opened later allow as many connections.
    pa.set_io_thread_count(max(pa.io_thread_count(), count))
    return ThreadPoolExecutor(count, name)


def read_repeatedly(read: Callable[[], pa.Table]) -> pa.Table:
    """What `read()` returns; after an OSError it is called again, three times in all."""
    return storage.retry(read, pauses=(0, 0))


def latents_reader(plan: Plan) -> ReadRows:
    """`read_latents` for a plan. Latents of several shapes share one column, padded to the bytes of the largest."""
    widest = max(shape.latents.row_bytes for shape in plan.shapes)
    padded_to = widest if len(plan.shapes) > 1 else 0
    return functools.partial(read_latents, padded_to=padded_to)


def read_latents(row_ranges: list[RowRange], source: Source, padded_to: int = 0) -> pa.Table:
    """Rows of a latents folder at the source's shape.

    Only the caption that the plan sampled is read. It comes back in the columns of caption 1.
    """
    columns = [schema.ID, schema.CAPTION, source.latents.name, schema.EMBEDDINGS]
    rows = read_row_ranges(row_ranges, columns, source.files)
    if padded_to:
        rows = rows.set_column(2, schema.LATENTS, schema.pad(rows[source.latents.name], padded_to))
    return rows


def read_row_ranges(row_ranges: list[RowRange], columns: list[str], files: Files) -> pa.Table:
    """Columns of row ranges of latents files, concatenated.

    Consecutive ranges of the same file open it once. Each range gives the number of the caption whose text and
    embedding are read. Raises ValueError that names the file if it is not the one that was encoded, and OSError if it
    is damaged.
    """
    tables = []
    for number, of_file in itertools.groupby(row_ranges, key=lambda rows: rows.file):
        # A row group's columns are contiguous: `pre_buffer` reads them all in one request to an object store.
        with open_parquet(storage.join(files.uri, "data", files.names[number].as_py()), pre_buffer=True) as file:
            check_file(file, files, number)
            for caption, of_caption in itertools.groupby(of_file, key=lambda rows: rows.caption):
                of_caption = list(of_caption)
                stored = [schema.numbered(c, caption) if c in CAPTION_COLUMNS else c for c in columns]
                groups = file.read(stored, [rows.row_group for rows in of_caption], use_threads=False)
                groups, start = groups.select(stored).rename_columns(columns), 0
                for rows in of_caption:
                    tables.append(groups.slice(start + rows.first_row, rows.num_rows))
                    start += file.metadata.row_group(rows.row_group).num_rows
    return pa.concat_tables(tables)


def check_file(file: PlainParquetFile, files: Files, number: int) -> None:
    """Raises ValueError if an open file is not file number `number` of the data set, as it was encoded."""
    planned = (files.ids[number].as_py(), files.groups_in(number).tolist())
    groups = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    if (file_id(file), groups) != planned:
        raise ValueError(f"{file.uri} is not the file that was encoded under this name: {MEND}.")


def take(column: pa.ChunkedArray, rows: np.ndarray) -> pa.Array | pa.ChunkedArray:
    """The same rows as `column.take(rows)`, which would first copy the whole column.

    Only the taken rows of a tensor column are copied.
    """
    is_fixed = pa.types.is_fixed_size_binary(column.type)
    if not is_fixed and not pa.types.is_large_binary(column.type):
        return column.take(rows)
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    chunks = np.searchsorted(ends, rows, side="right")
    positions = zip(chunks.tolist(), (rows - np.concatenate([[0], ends])[chunks]).tolist(), strict=True)
    if not is_fixed:
        return pa.concat_arrays([column.chunk(chunk).slice(row, 1) for chunk, row in positions])
    width = column.type.byte_width
    arrays = [schema.from_binary(chunk, (width,), np.uint8)[0] for chunk in column.chunks]
    # Arrow's memory pool reuses the memory of earlier blocks; new memory would be zeroed page by page.
    values = np.frombuffer(pa.allocate_buffer(len(rows) * width), np.uint8).reshape(-1, width)
    for value, (chunk, row) in zip(values, positions, strict=True):
        value[:] = arrays[chunk][row]
    valid = column.is_valid().to_numpy()[rows] if column.null_count else None
    return schema.to_binary(values, valid, np.uint8)


# ---- a worker


def worker_units(
    blocks: Iterable[pa.Table], plan: Plan, steps: range, rank: int, world_size: int
) -> Iterator[dict[int, pa.Table]]:
    """A worker's units for each of consecutive steps: {unit number: its rows}; {} if other workers have them all.

    Raises RuntimeError if the blocks do not arrive in the plan's order.
    """
    blocks, received = iter(blocks), {}
    for step in steps:
        expected = plan.units_of_worker(step, steps.start, rank, world_size)
        while not received.keys() >= set(expected):
            block = next(blocks, None)
            units = {} if block is None else split_units(block, plan.unit_rows)
            if not units.keys() & set(expected):
                raise RuntimeError(
                    f"Worker {rank} expected units {expected} for step {step} and received {sorted(units)}: the "
                    "data starts at another step than the checkpoint, or Ray Data did not keep the order of its blocks."
                )
            received |= units
        yield {unit: received.pop(unit) for unit in expected}


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
