"""How the rows of a plan get to the training workers: tasks of Ray Data that read them, and the order of their blocks.

A task reads a few chunks of the plan, and Ray Data delivers their blocks in order (`preserve_order`,
`streaming_split(equal=True)`): block b goes to worker b % num_workers. A block costs a few milliseconds whatever its
size, so several units are sent together: a block holds the units at the same position in `block_steps` consecutive
steps. Ray's documentation does not guarantee this order, so each row carries its unit's number and `worker_units`
checks it.

Downstream stages must preserve the row count: a dropped row would shift every later block to another worker. Rows that
turn out to be unusable only there, such as broken pictures online, are masked out of the loss instead.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from ray.actor import ActorHandle

from .. import storage
from ..runtime.throttle import BlockStatsCleaner, SchedulerThrottle
from . import schema
from .manifest import RowRange, read_files
from .plan import EpochOrder, Plan, Source

UNIT, KEEP = "unit", "keep"
OF_CAPTION = (schema.CAPTION, schema.EMBEDDINGS)  # columns of which a row has one for each of its captions
# Per read task. A task costs about ten milliseconds whatever it reads, and since blocks are used in order, only tasks
# that are small compared with BACKPRESSURE_BYTES read in parallel.
CHUNKS_PER_TASK, CHUNKS_AHEAD = 4, 2
# Ray Data lists tasks before the first one starts, at about a millisecond each, and holds what a task gets, some 7 kB,
# until it starts. The tasks of longer plans are made on the way, this many at a time.
LISTED_TASKS = 2_000
OWN_ORDER = 2**20  # up to this many row groups, each reading process computes and holds their order, 12 bytes each
READ_THREADS, LATE_SECONDS = 32, 0.25  # concurrent requests of a process; no request is late before that
# How much data is prepared ahead of the trainers: the larger of the two. Ray Data reserves 32 MiB per running task,
# whatever its output, so a smaller bound would leave some of sixteen encoders idle.
BACKPRESSURE_STEPS, BACKPRESSURE_BYTES = 32, 2**30

ReadRows = Callable[[list[RowRange], Source], pa.Table]


# ---- the dataset


def latents_dataset(plan: Plan, first_step: int, end_step: int) -> ray.data.Dataset:
    """Stored latents in the plan's order, of steps `first_step` to `end_step`, as a Ray dataset of the plan's blocks.

    Columns: id, caption, the latents of the step's shape, the embeddings, `keep` (True) and `unit` (the unit's number
    in the run).
    """
    return build_dataset(plan, first_step, end_step, latents_reader(plan))


def build_dataset(
    plan: Plan, first_step: int, end_step: int, read: ReadRows, chunks_per_task: int = CHUNKS_PER_TASK
) -> ray.data.Dataset:
    """The rows that `read(row ranges, source)` returns, as a Ray dataset of the plan's blocks, with a column `unit`.

    Of the data before `first_step`, only the start of that step's chunk is read.
    """
    chunks = plan.chunk_range(first_step, end_step)
    shared, num_tasks = share_plan(plan, chunks), max(1, -(-len(chunks) // chunks_per_task))
    steps = {"first_chunk": chunks.start, "first_step": first_step, "end_step": end_step}
    read_planned = functools.partial(read_chunks, plan=shared, read=read, **steps)
    num_parts = -(-num_tasks // LISTED_TASKS)
    numbers = ray.data.range(len(chunks), override_num_blocks=num_tasks if num_parts == 1 else num_parts)
    numbers.context.custom_execution_callback_classes = [BlockStatsCleaner]
    if os.environ.get("PRETRAIN_LOCAL_RAY"):  # set by `runtime.session.connect`
        numbers.context.custom_execution_callback_classes.append(SchedulerThrottle)
        for _ in range(2):  # start reading processes now, in parallel with the trainer: their imports take seconds
            ray.remote(fetch_plan).remote([shared])
    if num_parts > 1:
        position = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ReadPosition).remote()
        hold = functools.partial(hold_back, position=position)
        numbers = numbers.map_batches(hold, batch_size=None, num_cpus=0, compute=ray.data.TaskPoolStrategy(1))
        numbers = numbers.repartition(target_num_rows_per_block=chunks_per_task)
        read_planned = functools.partial(move_on, position=position, read_planned=read_planned)
    return numbers.map_batches(read_planned, batch_size=None).repartition(target_num_rows_per_block=plan.block_rows)


class ReadPosition:
    """The newest chunk number that a task has begun to read, as an actor.

    Ray Data bounds its queues in bytes only. A chunk number has eight, so nothing else would hold back the tasks that
    make them. If the actor is lost, its successor learns the position from the next task that begins.
    """

    number = 0

    def reach(self, number: int = 0) -> int:
        self.number = max(self.number, number)
        return self.number


def hold_back(batch: dict, *, position: ActorHandle) -> dict:
    """For `map_batches`: the chunk numbers in `batch["id"]`, once a task reads one of as many numbers before them."""
    while ray.get(position.reach.remote()) < batch["id"][0] - len(batch["id"]):
        time.sleep(1)
    return batch


def move_on(batch: dict, *, position: ActorHandle, read_planned: Callable) -> Iterator[pa.Table]:
    """`read_planned(batch)`, of which `hold_back` learns."""
    position.reach.remote(int(batch["id"][-1]))
    return read_planned(batch)


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


def fetch_plan(shared: list[ray.ObjectRef]) -> None:
    """Fetch the shared plan in a list: a process that has done so starts to read without delay.

    In a list, because Ray replaces a reference that is itself an argument by its value.
    """
    _shared_plan(*shared)


@functools.lru_cache(maxsize=2)
def _shared_plan(shared: ray.ObjectRef) -> tuple[Plan, dict[int, ray.ObjectRef]]:
    """Fetched once per process: its tasks then share the plan's cached values."""
    return ray.get(shared)


@functools.lru_cache(maxsize=2)
def _shared_orders(orders: ray.ObjectRef) -> list[list[EpochOrder]]:
    return ray.get(orders)


def join_blocks(rows: ray.data.Dataset, plan: Plan, row_bytes: int) -> ray.data.Dataset:
    """The plan's blocks, rejoined if they are so large that Ray Data splits a stage's output."""
    largest = rows.context.target_max_block_size
    if largest is None or plan.block_rows * row_bytes <= largest:
        return rows
    return rows.repartition(target_num_rows_per_block=plan.block_rows, strict=True)


def execution_options(row_bytes: int, batch_rows: int) -> ray.data.ExecutionOptions:
    """Options for Ray Train's `DataConfig(execution_options=...)`: blocks in order, and a bound on data prepared ahead.

    Without the bound, a data pipeline faster than the trainers would fill half of the object store before Ray Data
    holds back.

    Args:
        row_bytes: of a row at its largest (`DataSets.row_bytes`).
        batch_rows: of a global batch.
    """
    ahead = max(BACKPRESSURE_BYTES, BACKPRESSURE_STEPS * batch_rows * row_bytes)
    limits = ray.data.ExecutionResources.for_limits(object_store_memory=ahead)
    return ray.data.ExecutionOptions(preserve_order=True, resource_limits=limits)


# ---- a reading task


def read_chunks(
    batch: dict, *, plan: Plan | ray.ObjectRef, first_chunk: int, first_step: int, end_step: int, read: ReadRows
) -> Iterator[pa.Table]:
    """For `map_batches`: one Arrow table for each block of the chunks in `batch["id"]`, counted from `first_chunk`.

    While one chunk is assembled, threads read the next ones. `plan`: a plan, or what `share_plan` returned.
    """
    plan, orders = (plan, {}) if isinstance(plan, Plan) else _shared_plan(plan)
    chunks, reading = [first_chunk + int(number) for number in batch["id"]], {}
    for place, chunk in enumerate(chunks):
        for ahead in chunks[place : place + 1 + CHUNKS_AHEAD]:
            if ahead not in reading:
                epoch = ahead // plan.chunks_per_epoch
                reading[ahead] = ChunkReader(plan, ahead, read, _shared_orders(orders[epoch]) if orders else None)
        yield from reading.pop(chunk).blocks(first_step, end_step)


class ChunkReader:
    """Reads the rows of a chunk in threads, and cuts them into blocks.

    Args:
        plan: the plan.
        chunk: the chunk's number.
        read: `read(row ranges of a file, source)` -> their rows.
        orders: as for `Plan.chunk_rows`.
    """

    def __init__(self, plan: Plan, chunk: int, read: ReadRows, orders: list[list[EpochOrder]] | None = None):
        self.plan, self.chunk = plan, chunk
        ranges, self.permutation = plan.chunk_rows(chunk, orders)
        self.reading: list[Future] = []
        for source, of_source in ranges:
            for _, of_file in itertools.groupby(of_source, key=lambda rows: rows.file_name):
                read_file = functools.partial(read, list(of_file), source)
                self.reading.append(_threads("reads").submit(read_repeatedly, read_file))

    def blocks(self, first_step: int, end_step: int) -> Iterator[pa.Table]:
        """The blocks of the chunk that these steps need, with a column `unit`; rows of unit -1 are padding."""
        plan = self.plan
        rows = pa.concat_tables(future.result() for future in self.reading)
        blocks = plan.blocks(self.chunk, first_step, end_step)
        if self.chunk == plan.chunk_range(first_step, end_step)[-1]:
            padding = np.full((padding_blocks(plan, first_step, end_step), plan.block_steps), -1)
            blocks = np.concatenate([blocks, padding])
        first_unit = plan.unit_range(self.chunk).start
        for units in blocks:
            first_rows = np.maximum(units - first_unit, 0) * plan.unit_rows
            places = (first_rows[:, None] + np.arange(plan.unit_rows)).reshape(-1)
            columns = {name: take(rows[name], self.permutation[places]) for name in rows.column_names}
            yield pa.table({**columns, UNIT: np.repeat(units, plan.unit_rows)})


def padding_blocks(plan: Plan, first_step: int, end_step: int) -> int:
    """Blocks to append to those of these steps: `streaming_split` drops what it cannot split equally."""
    first_unit, last_unit = first_step * plan.units_per_step, end_step * plan.units_per_step - 1
    num_blocks = block_of(plan, last_unit) + 1 - block_of(plan, first_unit)
    return max(-num_blocks % num_workers for num_workers in plan.worker_counts)


@functools.cache
def _threads(name: str, count: int = READ_THREADS) -> ThreadPoolExecutor:
    # Arrow's threads send the requests, and S3 clients opened later allow as many connections.
    pa.set_io_thread_count(max(pa.io_thread_count(), count))
    return ThreadPoolExecutor(count, name)


_seconds = collections.deque([0.25], maxlen=64)  # durations of this process's recent reads


def read_repeatedly(read: Callable[[], pa.Table]) -> pa.Table:
    """`read()`, called a second time in parallel if the first call takes much longer than usual or fails.

    An object store answers some of many requests only after seconds, in part or not at all. Raises the third failure.
    """

    def timed():
        started = time.perf_counter()
        rows = read()
        _seconds.append(time.perf_counter() - started)
        return rows

    running, num_failed = set(), 0
    while True:
        if len(running) < 2:
            running.add(_threads("tries", 2 * READ_THREADS).submit(timed))
        late = max(LATE_SECONDS, 3 * statistics.median(_seconds))
        done, running = wait(running, late, FIRST_COMPLETED)
        for future in done:
            if future.exception() is None:
                return future.result()
            num_failed += 1
            if num_failed == 3 or not isinstance(future.exception(), (OSError, pa.ArrowException)):
                raise future.exception()


def latents_reader(plan: Plan) -> ReadRows:
    """`read_latents` for a plan: latents of several shapes travel in one column, padded to the widest."""
    widest = max(shape.latents.row_bytes for shape in plan.shapes)
    return functools.partial(read_latents, padded_to=widest if len(plan.shapes) > 1 else 0)


def read_latents(row_ranges: list[RowRange], source: Source, padded_to: int = 0) -> pa.Table:
    """Rows of a latents folder at the source's shape, with `keep` always True: the plan has no masked rows.

    Of several captions of a row only the one is read that the plan has drawn, as if it were the only one.
    """
    columns = [schema.ID, schema.CAPTION, source.latents.name, schema.EMBEDDINGS]
    rows = read_row_ranges(row_ranges, columns, storage.join(source.files.uri, "data"))
    if padded_to:
        rows = rows.set_column(2, schema.LATENTS, schema.pad(rows[source.latents.name], padded_to))
    return rows.append_column(KEEP, pa.array(np.ones(len(rows), dtype=bool)))


def read_row_ranges(row_ranges: list[RowRange], columns: list[str], folder_uri: str) -> pa.Table:
    """Columns of row ranges of a folder's Parquet files, concatenated; each file is opened once.

    The caption and its embedding are those of the caption that a range names.
    """
    filesystem, folder = storage.open_filesystem(folder_uri)
    tables = [None] * len(row_ranges)
    for file_name in dict.fromkeys(rows.file_name for rows in row_ranges):
        # A row group's columns are contiguous: `pre_buffer` reads them all in one request to an object store.
        with pq.ParquetFile(f"{folder}/{file_name}", filesystem=filesystem, pre_buffer=True) as file:
            for position, rows in enumerate(row_ranges):
                if rows.file_name == file_name:
                    stored = [schema.numbered(c, rows.caption) if c in OF_CAPTION else c for c in columns]
                    group = file.read_row_group(rows.row_group, columns=stored, use_threads=False)
                    group = group.select(stored).rename_columns(columns)
                    tables[position] = group.slice(rows.first_row, rows.num_rows)
    return pa.concat_tables(tables)


def first_latents(latents_uri: str, num_rows: int) -> pa.Table:
    """The first rows of a finished job: what the trainer reads."""
    files = read_files(latents_uri)
    filesystem, path = storage.open_filesystem(storage.join(latents_uri, "data", files.names[0].as_py()))
    with pq.ParquetFile(path, filesystem=filesystem) as file:
        num_groups = min(file.num_row_groups, -(-num_rows // int(files.group_rows[0])))
        return file.read_row_groups(range(num_groups)).slice(0, num_rows)


def take(column: pa.ChunkedArray, rows: np.ndarray) -> pa.Array | pa.ChunkedArray:
    """`column.take(rows)`, which would copy the whole column first; for tensors, this copies only these rows."""
    is_fixed = pa.types.is_fixed_size_binary(column.type)
    if not is_fixed and not pa.types.is_large_binary(column.type):
        return column.take(rows)
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    chunks = np.searchsorted(ends, rows, side="right")
    places = zip(chunks.tolist(), (rows - np.concatenate([[0], ends])[chunks]).tolist(), strict=True)
    if not is_fixed:
        return pa.concat_arrays([column.chunk(chunk).slice(row, 1) for chunk, row in places])
    width = column.type.byte_width
    arrays = [schema.from_binary(chunk, (width,), np.uint8)[0] for chunk in column.chunks]
    # Arrow's memory pool reuses the memory of earlier blocks; new memory would be zeroed page by page.
    values = np.frombuffer(pa.allocate_buffer(len(rows) * width), np.uint8).reshape(-1, width)
    for value, (chunk, row) in zip(values, places, strict=True):
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
        expected = units_of_worker(plan, step, steps.start, rank, world_size)
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


def units_of_worker(plan: Plan, step: int, first_step: int, rank: int, world_size: int) -> range:
    """The units of a step that a worker gets from a dataset that starts at `first_step`."""
    first_unit = step * plan.units_per_step
    blocks_before = block_of(plan, first_unit) - block_of(plan, first_step * plan.units_per_step)
    return range(first_unit + (rank - blocks_before) % world_size, first_unit + plan.units_per_step, world_size)


def block_of(plan: Plan, unit: int) -> int:
    """The block that holds a unit, numbered through the run."""
    epoch, unit_in_epoch = divmod(unit, plan.units_per_epoch)
    step, place = divmod(unit_in_epoch, plan.units_per_step)
    groups_per_epoch = -(-plan.steps_per_epoch // plan.block_steps)  # of blocks with the same steps
    return (epoch * groups_per_epoch + step // plan.block_steps) * plan.units_per_step + place
