"""The epoch plan: which rows make which step, on any number of workers, starting at any step.

A step trains on pictures of one shape. A row group holds rows of one *bucket*: rows that have latents in the same
columns and are trained on, not held out. A step's shape depends only on its number: each resolution gets its share of
the steps and each shape a number in proportion to its rows, evenly spread over the epoch. An epoch ends when a
resolution runs out. It uses a row at one size only, and leaves over less than a batch of each shape, except in
resolutions with more rows than their share needs. So every row of a batch is trained on.

The plan is a pure function of the data sets' row groups, their proportions, the seed and the epoch. For one shape:

    row groups   | a/0   | a/1   | a/2   | b/0   | b/1   |        in the order of the Parquet files
                        shuffled in every epoch, concatenated
    epoch        | b/0   | a/2   | b/1   | a/0   | a/1   |        in a mixture: drawn from each data set by proportion
    chunks       | chunk 0           | chunk 1           |        read together; the rows of a chunk are shuffled
    units        | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  |        `unit_rows` rows each
    steps        | step 0  | step 1  | step 2  | step 3  |        unit u belongs to step u // units_per_step (here 2)
    blocks       | 0, 2    | 1, 3    | 4, 6    | 5, 7    |        units sent together (here block_steps=2)
    workers      | w0      | w1      | w0      | w1      |        block b goes to worker b % num_workers (here 2)
    micro-batches                                                 a worker splits a unit into `micro_batch_size` rows

The global batches are the same for any number of workers, and a run can start at any step by starting at that step's
first unit. If `units_per_step` is not a multiple of the number of workers, some get one unit more than others in a
step; the others compute masked rows meanwhile (`TrainStep.step`). Rows at the end of an epoch that do not fill a whole
step are left out of that epoch; so are the remaining rows of the larger data sets once the first data set of a mixture
runs out. With several shapes, each has its own sequence of row groups; a chunk holds the rows of its steps from all of
them.

A task reads a few chunks, and Ray Data delivers their blocks in order (`preserve_order`,
`streaming_split(equal=True)`). A block costs a few milliseconds whatever its size, so several units are sent together:
a block holds the units at the same position in `block_steps` consecutive steps. Ray's documentation does not guarantee
this order, so each row carries its unit's number and `worker_units` checks it.

Downstream stages must preserve the row count: a dropped row would shift every later block to another worker. Rows that
turn out to be unusable only there, such as broken pictures online, are masked out of the loss instead.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from . import schema, storage
from .config import TrainingConfig
from .runtime import session

UNIT, KEEP = "unit", "keep"
VALIDATION = "validation"  # folder of an online run's held-out rows, encoded once before the run
CHUNK_BYTES = 64 * 2**20  # each read task holds a few chunks in memory
# Per read task. A task costs about ten milliseconds whatever it reads, and since blocks are used in order, only tasks
# that are small compared with BACKPRESSURE_BYTES read in parallel.
CHUNKS_PER_TASK, CHUNKS_AHEAD = 4, 2
LISTED_TASKS = 2_000  # Ray Data lists tasks before the first one starts, at about a millisecond each
OWN_ORDER = 2**20  # up to this many row groups, each reading process computes and holds their order, 12 bytes each
READ_THREADS, LATE_SECONDS = 32, 0.25  # concurrent requests of a process; no request is late before that
CHUNK_ROWS = 128 * schema.ROWS_PER_ROW_GROUP  # mixes well enough; a larger chunk only delays the first batch
# Units of consecutive steps are sent together up to this size: Ray Data's loop takes at most two blocks of a task every
# tenth of a second. Online, larger blocks would only wait longer for a transform and an encoder.
BLOCK_BYTES, ONLINE_BLOCK_BYTES = CHUNK_BYTES, 4 * 2**20
# How much data is prepared ahead of the trainers: the larger of the two. Ray Data reserves 32 MiB per running task,
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


class Pool(NamedTuple):
    """Rows of one bucket of a data set that are trained on at one shape.

    Each epoch shuffles the row groups, by `key` and the epoch, and concatenates them; the pool is rows `start` to
    `stop` of the result. Another shape may use other rows of the same row groups.
    """

    groups: np.ndarray
    start: int
    stop: int
    key: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One data set of a mixture, or its rows that are trained on at one shape.

    Args:
        uri: its folder, as `latents_uri`.
        file_names: Parquet files, relative to its `data/` folder; as an Arrow array, which a node's processes share in
            Ray's object store.
        group_rows: (row groups of all files,) rows in each.
        first_group: (files + 1,) number of each file's first row group; the last entry is the number of all row groups.
        proportion: its weight in every batch, relative to the other sources.
        latents: the latents column that its rows are trained on; None: that of the step's resolution, if a row has it.
        pools: its rows, if not all rows of the data set.
        padded_to: bytes to which a row's latents are padded on the way to the trainers; 0: no padding.
    """

    uri: str
    file_names: pa.StringArray
    group_rows: np.ndarray
    first_group: np.ndarray
    proportion: float = 1.0
    latents: schema.ColumnSpec | None = None
    pools: tuple[Pool, ...] = ()
    padded_to: int = 0

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
        return sum(pool.stop - pool.start for pool in self.pools) if self.pools else int(self.group_rows.sum())

    @property
    def num_groups(self) -> int:
        return sum(len(pool.groups) for pool in self.pools) if self.pools else len(self.group_rows)

    def order(self, seed: int, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
        """`(order, ends, first_rows)`: an epoch's shuffled row groups, the row at which each ends, {group: row}.

        Row groups in `first_rows` count only from that row on. `number`: this source's number in the plan.
        """
        if not self.pools:
            order = np.random.default_rng([seed, epoch, number]).permutation(len(self.group_rows))
            return order.astype(np.int32), np.cumsum(self.group_rows[order]), {}
        parts, first_rows = [], {}
        for pool in self.pools:
            groups = np.random.default_rng([seed, epoch, *pool.key]).permutation(pool.groups)
            ends = np.cumsum(self.group_rows[groups])
            mine = slice(np.searchsorted(ends, pool.start, side="right"), np.searchsorted(ends, pool.stop) + 1)
            groups, bounds = groups[mine], np.minimum(ends[mine], pool.stop)
            if len(groups):
                first_rows[int(groups[0])] = int(pool.start - ends[mine][0] + self.group_rows[groups[0]])
            parts.append((groups, np.diff(bounds, prepend=pool.start)))
        order, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if len(parts) > 1:
            mixed = np.random.default_rng([seed, epoch, number, 0, 1]).permutation(len(order))
            order, rows = order[mixed], rows[mixed]
        return order, np.cumsum(rows), first_rows

    def row_range(self, group: int, first_row: int, num_rows: int) -> RowRange:
        """Rows of the data set's row group `group`, as a range of its file."""
        file = np.searchsorted(self.first_group, group, side="right") - 1
        name, number = self.file_names[file].as_py(), int(group - self.first_group[file])
        return RowRange(name, number, int(first_row), int(num_rows))

    def row_ranges(
        self, order: np.ndarray, ends: np.ndarray, first_rows: dict[int, int], start: int, stop: int
    ) -> list[RowRange]:
        """The row ranges of rows `start` to `stop` in the order that `order` returned."""
        if start == stop:
            return []
        ranges = []
        for position in range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1):
            group, begin = order[position], ends[position - 1] if position else 0
            first, last = max(start, begin), min(stop, ends[position])
            ranges.append(self.row_range(group, first_rows.get(int(group), 0) + first - begin, last - first))
        return ranges


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Rows trained on at one shape, mixed from the sources in proportion. A step's rows all come from one bucket."""

    sources: list[Source]

    @property
    def latents(self) -> schema.ColumnSpec | None:
        return self.sources[0].latents

    @property
    def resolution(self) -> int:
        return self.latents.resolution if self.latents else 0

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @functools.cached_property
    def mixing_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD,) the source of each consecutive row."""
        return mixing_schedule(tuple(source.proportion for source in self.sources))

    @functools.cached_property
    def _cumulative_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD + 1, sources) row i counts each source's rows among the first i rows of the schedule."""
        counts = np.zeros((MIXING_PERIOD + 1, len(self.sources)), dtype=np.int64)
        counts[np.arange(1, MIXING_PERIOD + 1), self.mixing_schedule] = 1
        return np.cumsum(counts, axis=0)

    def rows_by_source(self, num_rows: int) -> np.ndarray:
        """(sources,) how many of an epoch's first `num_rows` rows come from each source."""
        periods, rest = divmod(num_rows, MIXING_PERIOD)
        return periods * self._cumulative_schedule[-1] + self._cumulative_schedule[rest]

    def most_steps(self, batch_rows: int) -> int:
        """Whole steps before the first source runs out."""
        available = np.array([source.num_rows for source in self.sources])
        fits, too_many = 0, int(available.sum()) // batch_rows + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if (self.rows_by_source(middle * batch_rows) <= available).all():
                fits = middle
            else:
                too_many = middle
        return fits


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of samples in a whole run. Units and chunks are numbered through the run; no chunk spans two epochs.

    Args:
        sources: the data sets to mix; those with the same `latents` form a bucket and are adjacent.
        unit_rows: rows per unit.
        units_per_step: units per global batch.
        chunk_units: units per chunk; more units shuffle better but take more memory.
        seed: of the shuffle.
        block_steps: steps whose units share a block; above 1, `chunk_units` must be a multiple of
            `block_steps * units_per_step`.
        worker_counts: how many workers the run may have; only the padding at the end of its data depends on it.
        orders: {epoch: what `row_group_order` returns}, in Ray's object store, if too large for every process.
        shares: {resolution: its share of the steps}, if there are several; they add up to 1.
    """

    sources: list[Source]
    unit_rows: int
    units_per_step: int
    chunk_units: int
    seed: int
    block_steps: int = 1
    worker_counts: range = range(1, 2)
    orders: dict[int, ray.ObjectRef] = dataclasses.field(default_factory=dict)
    shares: dict[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        ordered = [source for bucket in self.buckets for source in bucket.sources]
        object.__setattr__(self, "sources", ordered)

    @property
    def batch_rows(self) -> int:
        return self.unit_rows * self.units_per_step

    @property
    def block_rows(self) -> int:
        """Rows per block, the same for all: with this as its `batch_size`, a stage receives one block at a time."""
        return self.unit_rows * self.block_steps

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(source.num_rows for source in self.sources)

    # ---- buckets

    @functools.cached_property
    def buckets(self) -> list[Bucket]:
        """The sources grouped by shape."""
        by_name = {}
        for source in self.sources:
            by_name.setdefault(source.latents and source.latents.name, []).append(source)
        return list(map(Bucket, by_name.values()))

    @functools.cached_property
    def bucket_steps(self) -> np.ndarray:
        """(buckets,) steps per epoch of each; an epoch ends when the first resolution runs out of whole batches."""
        most = np.array([bucket.most_steps(self.batch_rows) for bucket in self.buckets])
        sizes = np.array([bucket.resolution for bucket in self.buckets])
        weights = np.array([sum(source.proportion for source in bucket.sources) for bucket in self.buckets])
        shares = {int(size): self.shares.get(int(size), 1.0) for size in dict.fromkeys(sizes)}
        for mine in (np.flatnonzero(sizes == size) for size in shares):
            if len(mine) > 1:  # the first data set to run out ends all shapes: a mixture keeps its proportions
                sources = [source for number in mine for source in self.buckets[number].sources]
                room = min(source.num_rows / source.proportion for source in sources) / self.batch_rows
                most[mine] = np.minimum(most[mine], np.ceil(room * weights[mine] - 1e-6))
        steps = {size: int(most[sizes == size].sum()) for size in shares}
        total = min(int(steps[size] / share + 1e-9) for size, share in shares.items())
        for size, count in zip(shares, apportion(total, list(shares.values())), strict=True):
            most[sizes == size] = apportion(count, most[sizes == size])
        return most

    @functools.cached_property
    def bucket_schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """`(bucket, number of earlier steps of that bucket)` for each step of an epoch, both (steps,).

        Resolutions are spread evenly over the epoch, and buckets over the steps of their resolution.
        """
        counts, sizes = self.bucket_steps, np.array([bucket.resolution for bucket in self.buckets])
        of_step = spread([counts[sizes == size].sum() for size in dict.fromkeys(sizes)])
        schedule, before = np.empty(len(of_step), np.int16), np.empty(len(of_step), np.int64)
        for number, size in enumerate(dict.fromkeys(sizes)):
            members = np.flatnonzero(sizes == size)
            schedule[of_step == number] = members[spread(counts[members])]
        for bucket, count in enumerate(counts):
            before[schedule == bucket] = np.arange(count)
        return schedule, before

    def latents_at(self, step: int) -> schema.ColumnSpec | None:
        """The column that step `step` trains on; None if its resolution determines it."""
        return self.buckets[self.bucket_schedule[0][step % self.steps_per_epoch]].latents

    def describe_buckets(self) -> list[dict]:
        """For each bucket {"bucket": picture size, "rows", "steps" per epoch, "left_over": rows not used}."""
        return [
            {
                "bucket": bucket.latents and "x".join(map(str, bucket.latents.size)),
                "rows": bucket.num_rows,
                "steps": int(steps),
                "left_over": bucket.num_rows - int(steps) * self.batch_rows,
            }
            for bucket, steps in zip(self.buckets, self.bucket_steps, strict=True)
        ]

    # ---- the size of an epoch

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Whole steps of all buckets."""
        return int(self.bucket_steps.sum())

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
        """The units of a chunk in the order in which they are sent, `block_steps` per block.

        (N,) unit numbers; -1 pads the blocks of the last steps, so that all blocks have the same number of rows.
        """
        numbers = np.arange(units.start, units.stop)
        if self.block_steps == 1:
            return numbers
        units_per_group = self.block_steps * self.units_per_step  # of the blocks with the same steps
        padded = np.full(-(-len(numbers) // units_per_group) * units_per_group, -1)
        padded[: len(numbers)] = numbers
        return padded.reshape(-1, self.block_steps, self.units_per_step).swapaxes(1, 2).reshape(-1)

    def block_of(self, unit: int) -> int:
        """The block that holds a unit, numbered through the run."""
        epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
        step, place = divmod(unit_in_epoch, self.units_per_step)
        groups_per_epoch = -(-self.steps_per_epoch // self.block_steps)  # of blocks with the same steps
        return (epoch * groups_per_epoch + step // self.block_steps) * self.units_per_step + place

    def units_of_worker(self, step: int, first_step: int, rank: int, world_size: int) -> range:
        """The units of a step that a worker gets from a dataset that starts at `first_step`."""
        first_unit = step * self.units_per_step
        blocks_before = self.block_of(first_unit) - self.block_of(first_step * self.units_per_step)
        return range(first_unit + (rank - blocks_before) % world_size, first_unit + self.units_per_step, world_size)

    def padding_blocks(self, first_step: int, num_steps: int) -> int:
        """Blocks to append to those of these steps: `streaming_split` drops what it cannot split equally."""
        first_unit, last_unit = first_step * self.units_per_step, num_steps * self.units_per_step - 1
        num_blocks = self.block_of(last_unit) + 1 - self.block_of(first_unit)
        return max(-num_blocks % count for count in self.worker_counts)

    def row_group_order(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray, dict[int, int]]]:
        """Each source's row groups as shuffled in this epoch (`Source.order`)."""
        if epoch in self.orders:
            return ray.get(self.orders[epoch])
        return [source.order(self.seed, epoch, number) for number, source in enumerate(self.sources)]

    def shared(self, chunks: range) -> ray.ObjectRef:
        """This plan for the tasks that read these chunks; the orders of large epochs are stored once per node."""
        plan = ray.put(self)
        if not chunks or sum(source.num_groups for source in self.sources) <= OWN_ORDER:
            return plan
        order = ray.remote(Plan.row_group_order)
        epochs = range(chunks[0] // self.chunks_per_epoch, chunks[-1] // self.chunks_per_epoch + 1)
        return ray.put(dataclasses.replace(self, orders={epoch: order.remote(plan, epoch) for epoch in epochs}))

    def chunk_rows(self, chunk: int) -> tuple[list[list[RowRange]], np.ndarray]:
        """The rows of a chunk: `(row ranges of each source, permutation)`.

        Row i of the chunk is row `permutation[i]` of all its row ranges concatenated, one source after another.
        """
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        units = self.unit_range(chunk)
        steps, places = np.divmod(
            np.arange(units.start, units.stop) - epoch * self.units_per_epoch, self.units_per_step
        )
        bucket_of_unit, steps_before = (values[steps] for values in self.bucket_schedule)
        random, orders = np.random.default_rng([self.seed, epoch, index]), iter(_cached_row_group_order(self, epoch))
        ranges, permutation, offset = [], np.empty(len(units) * self.unit_rows, dtype=np.int64), 0
        for number, bucket in enumerate(self.buckets):
            mine = bucket_of_unit == number
            lines = list(itertools.islice(orders, len(bucket.sources)))
            if not mine.any():
                ranges += [[] for _ in lines]
                continue
            rows = np.flatnonzero(np.repeat(mine, self.unit_rows))
            start = (steps_before * self.units_per_step + places)[mine][0] * self.unit_rows  # in rows of the bucket
            stop = start + len(rows)
            source_of_row = np.take(bucket.mixing_schedule, np.arange(start, stop), mode="wrap")
            starts, stops = bucket.rows_by_source(start), bucket.rows_by_source(stop)
            for place, (source, line) in enumerate(zip(bucket.sources, lines, strict=True)):
                count = int(stops[place] - starts[place])
                ranges.append(source.row_ranges(*line, starts[place], stops[place]))
                permutation[rows[source_of_row == place]] = offset + random.permutation(count)
                offset += count
        return ranges, permutation


@functools.lru_cache(maxsize=64)
def mixing_schedule(proportions: tuple[float, ...]) -> np.ndarray:
    """(MIXING_PERIOD,) the source of each row: always the one that is furthest behind its share."""
    if len(proportions) == 1:
        return np.zeros(MIXING_PERIOD, dtype=np.int64)
    left = np.round(np.array(proportions) / sum(proportions) * MIXING_PERIOD).astype(np.int64)
    left[np.argmax(left)] += MIXING_PERIOD - left.sum()
    shares, left, behind = (left / MIXING_PERIOD).tolist(), left.tolist(), [0.0] * len(left)
    schedule = np.empty(MIXING_PERIOD, dtype=np.int64)
    for position in range(MIXING_PERIOD):
        behind = [late + share for late, share in zip(behind, shares, strict=True)]
        chosen = max((number for number, rows in enumerate(left) if rows), key=behind.__getitem__)
        schedule[position] = chosen
        behind[chosen] -= 1
        left[chosen] -= 1
    return schedule


def apportion(total: int, weights: Sequence[float]) -> np.ndarray:
    """`total` split into whole numbers in proportion to `weights`, each less than 1 off."""
    exact = total * np.asarray(weights, dtype=float) / (sum(weights) or 1)
    parts = np.floor(exact + 1e-9).astype(np.int64)
    parts[np.argsort(parts - exact, kind="stable")[: total - parts.sum()]] += 1
    return parts


def spread(counts: Sequence[int]) -> np.ndarray:
    """Each number n `counts[n]` times, evenly spread: occurrence j of c is at (j + 1/2) / c of the way."""
    times = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(times, kind="stable")]


@functools.lru_cache(maxsize=2)
def _cached_row_group_order(plan: Plan, epoch: int):
    return plan.row_group_order(epoch)


@functools.lru_cache(maxsize=2)
def _fetch(plan: ray.ObjectRef) -> Plan:
    """A plan from the object store, fetched once per process: its tasks then share the cached order of an epoch."""
    return ray.get(plan)


def read_manifests(config: TrainingConfig, heads: bool = False) -> dict[str, schema.Manifest]:
    """{URI: manifest} of the latents that are trained on. Raises FileNotFoundError naming a folder that has none.

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
    """A manifest without its files, all counts in one segment; reads only the start of a large manifest."""
    segments, uri = '"segments": [', storage.join(latents_uri, schema.MANIFEST)
    text, found, _ = storage.read_text(uri, segments).partition(segments) if storage.exists(uri) else ("", "", "")
    if not found:
        return read_manifest(latents_uri)
    values = json.loads(text + segments + "]}")
    counts = ("read", "written", "filtered", "rejected", "buckets")
    counts = {count: values[count] for count in counts if values.get(count) is not None}
    return schema.Manifest.from_dict({**values, "segments": [{"files": [], **counts}]})


def check_mixture(manifests: dict[str, schema.Manifest]) -> None:
    """Raises ValueError if data sets of different encoders or layouts are mixed."""
    (first_uri, first), *others = manifests.items()
    for uri, manifest in others:
        for name in ("encoder", "columns", "scaling_factor", "empty_caption_embedding", "id_type"):
            mine, theirs = getattr(manifest, name), getattr(first, name)
            if mine != theirs:
                what = f" ({mine} and {theirs})" if name != "empty_caption_embedding" else ""
                raise ValueError(
                    f"latents_uri mixes {uri} with {first_uri}, which differ in {name}{what}: "
                    "encode both with the same settings."
                )


def plan_run(manifests: dict[str, schema.Manifest], config: TrainingConfig) -> Plan:
    """The plan of a training run over the latents of its manifests (URI -> manifest).

    Made from heads of manifests, it knows which worker gets which units, but not the files of their rows. Raises
    ValueError if the latents do not fill one step.
    """
    first, shares = next(iter(manifests.values())), config.resolution_shares
    row_bytes, block_bytes = first.row_bytes, ONLINE_BLOCK_BYTES if first.online else BLOCK_BYTES
    sources = []
    for number, (uri, manifest) in enumerate(manifests.items()):
        sources += sources_by_shape(manifest, uri, number, config)
    columns = {source.latents.name: source.latents for source in sources}
    if len(columns) > 1:
        widest = max(spec.row_bytes for spec in columns.values())
        sources = [dataclasses.replace(source, padded_to=widest) for source in sources]
    num_rows = sum(source.num_rows for source in sources)
    chunk_units = max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS, num_rows) // config.unit_rows)
    chunk_steps = max(1, chunk_units // config.units_per_step)
    block_steps = min(max(1, block_bytes // (row_bytes * config.unit_rows)), chunk_steps, 8)
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
        shares=shares,
    )
    at = {spec.resolution for spec in columns.values()}
    absent = [size for size in config.resolutions if size not in at]
    if num_rows == 0 or absent or plan.steps_per_epoch < 1:
        rows = [f"the {num_rows} rows"]
        if len(columns) + len(absent) > 1:
            rows = [f"the {one['rows']} rows of {one['bucket']}" for one in plan.describe_buckets()]
        rows = ", ".join([*rows, *(f"the 0 rows of {size} pixels" for size in absent)])
        raise ValueError(
            f"global_batch_size={config.global_batch_size} is more than {rows} of {config.latents_uri} can fill: make "
            "it smaller, or encode more data."
        )
    return plan


def sources_by_shape(manifest: schema.Manifest, uri: str, number: int, config: TrainingConfig) -> list[Source]:
    """The training rows of a data set as one source per shape; `number`: the data set's number.

    In the head of a manifest, each bucket counts as one row group.
    """
    buckets = {name: rows for name, rows in sorted(manifest.buckets.items()) if not name.startswith(schema.HELD_OUT)}
    if manifest.files:
        base, (names, group_buckets) = Source.of(uri, manifest.files), manifest.group_buckets
    else:
        base, names = Source.of(uri, [("", list(buckets.values()))]), list(buckets)
        group_buckets = np.arange(len(buckets))
    groups = {name: np.flatnonzero(group_buckets == names.index(name)).astype(np.int32) for name in buckets}
    columns = {spec.name: spec for size in config.resolutions for spec in manifest.latents_at(size)}
    shares, sources, rows_at = config.resolution_shares, [], collections.Counter()
    for name, lines in deal_out(buckets, columns, shares).items():
        keys = {bucket: (number, 1 + place) for place, bucket in enumerate(buckets)}
        pools = tuple(Pool(groups[bucket], start, stop, keys[bucket]) for bucket, (start, stop) in lines.items())
        sources.append(dataclasses.replace(base, latents=columns[name], pools=pools))
        rows_at[columns[name].resolution] += sources[-1].num_rows
    # A shape gets steps of its resolution in proportion to its rows.
    parts = [source.num_rows / rows_at[source.latents.resolution] for source in sources]
    parts = [part * shares[source.latents.resolution] for part, source in zip(parts, sources, strict=True)]
    return [
        dataclasses.replace(source, proportion=config.proportions[uri] * part)
        for source, part in zip(sources, parts, strict=True)
    ]


def deal_out(
    buckets: dict[str, int], columns: dict[str, schema.ColumnSpec], shares: dict[int, float]
) -> dict[str, dict[str, tuple[int, int]]]:
    """{column: {bucket: (start, stop)}}: which of a bucket's rows, in an epoch's order, are trained on in which column.

    Rows that reach several sizes go to the largest first, as many as its share of the steps needs. The smallest gets
    the rest, because smaller pictures cannot be used elsewhere.

    Args:
        buckets: bucket -> rows.
        columns: name -> column that is trained on.
        shares: {resolution: its share of the steps}.
    """
    used, dealt = dict.fromkeys(buckets, 0), {name: {} for name in columns}
    at = {
        size: {
            bucket: name
            for bucket in buckets
            for name in schema.bucket_columns(bucket)
            if name in columns and columns[name].resolution == size
        }
        for size in sorted(shares, reverse=True)
    }
    # No size gets more rows than its share of the largest total that all sizes can reach.
    seen, share, most = set(), 0.0, []
    for size, names in at.items():
        seen |= set(names)
        share += shares[size]
        most.append(sum(buckets[bucket] for bucket in seen) / share)
    for size, names in at.items():
        rows = sum(buckets[bucket] - used[bucket] for bucket in names)
        part = 1.0 if size == min(shares) else min(1.0, min(most) * shares[size] / max(rows, 1))
        for bucket, name in names.items():
            stop = used[bucket] + round((buckets[bucket] - used[bucket]) * part)
            if stop > used[bucket]:
                dealt[name][bucket] = (used[bucket], stop)
            used[bucket] = stop
    return {name: lines for name, lines in dealt.items() if lines}


# ---- reading what is planned


def latents_dataset(plan: Plan, first_step: int, num_steps: int) -> ray.data.Dataset:
    """Stored latents in the plan's order, from `first_step` on, as a Ray dataset of the plan's blocks.

    Columns: id, caption, the latents of the step's shape, the embeddings, `keep` (True) and `unit` (the unit's number
    in the run).
    """
    return build_dataset(plan, first_step, num_steps, read_latents)


def build_dataset(
    plan: Plan, first_step: int, num_steps: int, read: ReadRows, chunks_per_task: int = CHUNKS_PER_TASK
) -> ray.data.Dataset:
    """The rows that `read(row ranges, source)` returns, as a Ray dataset of the plan's blocks, with a column `unit`.

    Of the data before `first_step`, only the start of that step's chunk is read.
    """
    chunks = plan.chunk_range(first_step, num_steps)
    plan_ref, num_tasks = plan.shared(chunks), max(1, -(-len(chunks) // chunks_per_task))
    read_planned = functools.partial(
        read_chunks, plan=plan_ref, first_chunk=chunks.start, first_step=first_step, num_steps=num_steps, read=read
    )
    numbers = ray.data.range(len(chunks), override_num_blocks=num_tasks if num_tasks <= LISTED_TASKS else 1)
    if os.environ.get("PRETRAIN_LOCAL_RAY"):  # set by `runtime.session.connect`
        numbers.context.custom_execution_callback_classes = [session.SchedulerThrottle]
        for _ in range(2):  # start reading processes now, in parallel with the trainer: their imports take seconds
            ray.remote(Plan.chunk_of).remote(plan_ref, 0)
    if num_tasks > LISTED_TASKS:  # one task generates the chunk numbers, a few tasks ahead
        numbers = numbers.repartition(target_num_rows_per_block=chunks_per_task)
    return numbers.map_batches(read_planned, batch_size=None).repartition(target_num_rows_per_block=plan.block_rows)


def read_chunks(
    batch: dict, *, plan: Plan | ray.ObjectRef, first_chunk: int, first_step: int, num_steps: int, read: ReadRows
) -> Iterator[pa.Table]:
    """For `map_batches`: one Arrow table for each block of the chunks in `batch["id"]`, counted from `first_chunk`.

    While one chunk is assembled, threads read the next ones.
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


def read_blocks(plan: Plan, chunk: int, first_step: int, num_steps: int, reading: list[Future]) -> Iterator[pa.Table]:
    """The blocks of a chunk that the steps need, with a column `unit`; rows of unit -1 are padding.

    `reading`: what `start_reading` returned.
    """
    _, permutation = plan.chunk_rows(chunk)
    rows = pa.concat_tables(future.result() for future in reading)
    units = plan.block_order(plan.unit_range(chunk, first_step, num_steps))
    if chunk == plan.chunk_range(first_step, num_steps)[-1]:
        units = np.append(units, np.full(plan.padding_blocks(first_step, num_steps) * plan.block_steps, -1))
    units[units < first_step * plan.units_per_step] = -1  # earlier steps in the first step's block
    place_in_chunk = np.maximum(units - plan.unit_range(chunk).start, 0)
    for block in range(0, len(units), plan.block_steps):
        places = place_in_chunk[block : block + plan.block_steps, None] * plan.unit_rows + np.arange(plan.unit_rows)
        mine = permutation[places.reshape(-1)]
        columns = {name: take(rows[name], mine) for name in rows.column_names}
        yield pa.table({**columns, UNIT: np.repeat(units[block : block + plan.block_steps], plan.unit_rows)})


def take(column: pa.ChunkedArray, rows: np.ndarray) -> pa.Array | pa.ChunkedArray:
    """`column.take(rows)`, which would copy the whole column first; for tensors, this copies only these rows."""
    if not pa.types.is_fixed_size_binary(column.type):
        return column.take(rows)
    width, ends = column.type.byte_width, np.cumsum([len(chunk) for chunk in column.chunks])
    arrays = [schema.from_binary(chunk, (width,), np.uint8)[0] for chunk in column.chunks]
    # Arrow's memory pool reuses the memory of earlier blocks; new memory would be zeroed page by page.
    values = np.frombuffer(pa.allocate_buffer(len(rows) * width), np.uint8).reshape(-1, width)
    chunks = np.searchsorted(ends, rows, side="right")
    for value, chunk, row in zip(values, chunks.tolist(), (rows - ends[chunks]).tolist(), strict=True):
        value[:] = arrays[chunk][row]  # `row` is negative: it counts from the chunk's end
    valid = column.is_valid().to_numpy()[rows] if column.null_count else None
    return schema.to_binary(values, valid, np.uint8)


def join_blocks(rows: ray.data.Dataset, plan: Plan, row_bytes: int) -> ray.data.Dataset:
    """The plan's blocks, rejoined if they are so large that Ray Data splits a stage's output."""
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
    """A worker's units for each of consecutive steps: {unit number: its rows}; {} if other workers have them all.

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


def read_latents(row_ranges: list[RowRange], source: Source) -> pa.Table:
    """Rows of a latents folder at the source's shape, with `keep` always True: the plan has no masked rows."""
    spec = source.latents
    columns = [schema.ID, schema.CAPTION, spec.name, schema.EMBEDDINGS]
    rows = read_row_ranges(row_ranges, columns, storage.join(source.uri, "data"))
    if source.padded_to:
        rows = rows.set_column(2, schema.LATENTS, schema.pad(rows[spec.name], source.padded_to))
    return rows.append_column(KEEP, pa.array(np.ones(len(rows), dtype=bool)))


def read_row_ranges(row_ranges: list[RowRange], columns: list[str], folder_uri: str) -> pa.Table:
    """Columns of row ranges of a folder's Parquet files, concatenated; each file is opened once."""
    filesystem, folder = storage.open_filesystem(folder_uri)
    tables = [None] * len(row_ranges)
    for file_name in dict.fromkeys(rows.file_name for rows in row_ranges):
        # A row group's columns are contiguous: `pre_buffer` reads them all in one request to an object store.
        with pq.ParquetFile(f"{folder}/{file_name}", filesystem=filesystem, pre_buffer=True) as file:
            for position, rows in enumerate(row_ranges):
                if rows.file_name == file_name:
                    group = file.read_row_group(rows.row_group, columns=columns, use_threads=False)
                    tables[position] = group.slice(rows.first_row, rows.num_rows)
    return pa.concat_tables(tables)


def validation_rows(config: TrainingConfig, num_rows: int) -> pa.Table | None:
    """About the first `num_rows` held-out rows that have latents, in the order of the files; None if there are none.

    In a mixture, each data set contributes its proportion.
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


def held_out_ranges(manifest: schema.Manifest, uri: str, resolution: int, wanted: int) -> list[RowRange]:
    """The first held-out row groups with latents at a resolution: enough for `wanted` rows, or all there are."""
    names, group_buckets = manifest.group_buckets
    latents = {spec.name for spec in manifest.latents_at(resolution)}
    mine = [name.startswith(schema.HELD_OUT) and not latents.isdisjoint(schema.bucket_columns(name)) for name in names]
    source, groups = Source.of(uri, manifest.files), np.flatnonzero(np.array(mine, dtype=bool)[group_buckets])
    groups = groups[: np.searchsorted(np.cumsum(source.group_rows[groups]), wanted) + 1]
    return [source.row_range(group, 0, source.group_rows[group]) for group in groups]


def _held_out_rows(manifest: schema.Manifest, uri: str, config: TrainingConfig, wanted: int) -> list[pa.Table]:
    latents = [spec.name for spec in manifest.latents_at(config.largest_resolution)]
    columns, folder = [schema.ID, schema.CAPTION, *latents, schema.EMBEDDINGS], storage.join(uri, "data")
    ranges = held_out_ranges(manifest, uri, config.largest_resolution, wanted)
    with ThreadPoolExecutor(16) as pool:  # a few rows of each file
        tables = list(pool.map(lambda rows: read_row_ranges([rows], columns, folder), ranges))
    return [pa.concat_tables(tables)[:wanted]] if tables else []


def execution_options(config: TrainingConfig) -> ray.data.ExecutionOptions:
    """Options for Ray Train's `DataConfig(execution_options=...)`: blocks in order, and a bound on data prepared ahead.

    Without the bound, a data pipeline faster than the trainers would fill half of the object store before Ray Data
    holds back.
    """
    row_bytes = max(manifest.row_bytes for manifest in read_manifests(config, heads=True).values())
    ahead = max(BACKPRESSURE_BYTES, BACKPRESSURE_STEPS * config.global_batch_size * row_bytes)
    limits = ray.data.ExecutionResources.for_limits(object_store_memory=ahead)
    return ray.data.ExecutionOptions(preserve_order=True, resource_limits=limits)
