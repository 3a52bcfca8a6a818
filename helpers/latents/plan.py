"""The plan of a run: which rows make which step, on any number of workers, starting at any step. No Ray.

The plan is a pure function of the data sets' row groups, their proportions, the seed and the epoch. For one shape:

    row groups   | a/0   | a/1   | a/2   | b/0   | b/1   |        in the order of the Parquet files
                        shuffled in every epoch, concatenated
    epoch        | b/0   | a/2   | b/1   | a/0   | a/1   |        uses each row at most once
    chunks       | chunk 0           | chunk 1           |        read together; the rows of a chunk are shuffled
    steps        | step 0  | step 1  | step 2  | step 3  |        a global batch each: `units_per_step` units (here 2)
    units        | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  |        what one worker gets of one step: `unit_rows` rows
    blocks       | b0 | b1 | b0 | b1 | b2 | b3 | b2 | b3 |        travel together: `block_steps` units (here 2)
    workers      | w0 | w1 | w0 | w1 | w0 | w1 | w0 | w1 |        block b goes to worker b % num_workers (here 2)
    micro-batches                                                 a worker splits a unit into `micro_batch_size` rows

The global batches are the same for any number of workers, and a run can start at any step by starting at that step's
first unit. If `units_per_step` is not a multiple of the number of workers, some workers get one more unit in a step.
Meanwhile the other workers compute a unit of masked rows (`TrainStep.step`). An epoch leaves out the last rows that do
not fill a step. An epoch of a mixture ends with the first data set that runs out; it leaves out the rest of the others.

A step trains on images of one shape. A row group holds rows of one bucket (`manifest.Manifest`). An epoch uses each row
at one resolution only (`allocate_rows`).

Each shape has its own sequence of row groups. A step's shape depends only on the step's number. Each resolution gets
its share of the steps. Each shape gets steps of its resolution in proportion to its rows. The steps of a shape are
spread evenly over the epoch. An epoch ends when a resolution runs out. It then leaves out at most about a batch of
rows of each shape of this resolution. Another resolution may have more rows than its share of the steps needs; the
epoch leaves out the surplus too. A chunk holds consecutive units, whose steps may have different shapes.

If rows have several captions, each epoch samples one for a whole row group, so a task reads one embedding a row.

`load_plan`, at the end, makes a run's plan from the manifests of its data sets.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from . import schema
from .manifest import DataSets, Manifest, read_segments

MIXING_PERIOD = 10_000  # proportions are rounded to multiples of 1 / MIXING_PERIOD
CHUNK_BYTES = 64 * 2**20  # each read task holds a few chunks in memory
CHUNK_ROWS = 128 * schema.ROWS_PER_ROW_GROUP  # mixes well enough; a larger chunk only delays the first batch
# Units of consecutive steps are sent together up to this size: Ray Data's loop takes at most two blocks of a task every
# tenth of a second. Online, larger blocks would only wait longer for a transform and an encoder.
BLOCK_BYTES, ONLINE_BLOCK_BYTES, MOST_BLOCK_STEPS = CHUNK_BYTES, 4 * 2**20, 8
NO_GROUPS = np.zeros(0, np.int32)


class RowRange(NamedTuple):
    """Consecutive rows of one row group of a file.

    `file`: the file's number in `Files`. `caption`: the number, from 1, of the caption that the rows use.
    """

    file_name: str
    row_group: int
    first_row: int
    num_rows: int
    file: int
    caption: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """The row groups of a data set, numbered through all of its files.

    Args:
        uri: the data set's folder, as `latents_uri`.
        names: Parquet files, relative to its `data/` folder.
        group_rows: (row groups,) int32: rows in each.
        first_group: (files + 1,) number of each file's first row group; the last entry is the number of all row groups.
        bucket_names: the buckets.
        group_buckets: (row groups,) the number in `bucket_names` of each row group's bucket.
        ids: (files,) the files' ids; "" for raw files, which have none.
    """

    uri: str
    names: pa.StringArray  # as an Arrow array, which a node's processes share in Ray's object store
    group_rows: np.ndarray
    first_group: np.ndarray
    bucket_names: list[str]
    group_buckets: np.ndarray
    ids: pa.StringArray

    @classmethod
    def of(cls, uri: str, files: list[dict]) -> Files:
        """The row groups of these files. `files`: the "files" of all segments in `files.json`, in order."""
        bucket_names = sorted({bucket for file in files for bucket in file["buckets"]})
        numbers = {bucket: number for number, bucket in enumerate(bucket_names)}
        bucket_runs = [(numbers[bucket], count) for file in files for bucket, count in file["buckets"].items()]
        bucket_runs = np.array(bucket_runs, dtype=np.int64).reshape(-1, 2)
        return cls(
            uri,
            pa.array([file["name"] for file in files], pa.string()),
            np.fromiter((rows for file in files for rows in file["row_groups"]), dtype=np.int32),
            np.cumsum([0, *(len(file["row_groups"]) for file in files)]),
            bucket_names,
            np.repeat(bucket_runs[:, 0].astype(np.int16), bucket_runs[:, 1]),
            pa.array([file.get("file_id", "") for file in files], pa.string()),
        )

    def groups_of(self, bucket: str) -> np.ndarray:
        """The row groups of a bucket."""
        number = self.bucket_names.index(bucket) if bucket in self.bucket_names else -1
        return np.flatnonzero(self.group_buckets == number).astype(np.int32)

    def row_range(self, group: int, first_row: int, num_rows: int) -> RowRange:
        """Rows of row group number `group`."""
        file = int(np.searchsorted(self.first_group, group, side="right")) - 1
        name, number = self.names[file].as_py(), int(group - self.first_group[file])
        return RowRange(name, number, int(first_row), int(num_rows), file)

    def groups_in(self, file: int) -> np.ndarray:
        """The rows of each row group of file number `file`."""
        return self.group_rows[self.first_group[file] : self.first_group[file + 1]]


class BucketRows(NamedTuple):
    """The rows of a bucket that are trained on at one shape.

    Each epoch shuffles the bucket's row groups, by `key` and the epoch, and concatenates them. Rows `start` to `stop`
    of the result are used. Another shape may use other rows of the same row groups.
    """

    groups: np.ndarray
    start: int
    stop: int
    key: tuple[int, ...]

    def order(self, group_rows: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray, int]:
        """`(row groups, number of rows used in each, first used row of the first row group)` in an epoch."""
        groups = np.random.default_rng([seed, epoch, *self.key]).permutation(self.groups)
        ends = np.cumsum(group_rows[groups])
        first, last = np.searchsorted(ends, self.start, side="right"), np.searchsorted(ends, self.stop)
        groups, ends = groups[first : last + 1], ends[first : last + 1]
        rows = np.diff(np.minimum(ends, self.stop), prepend=self.start)
        skipped = self.start - (ends[0] - group_rows[groups[0]]) if len(groups) else 0
        return groups, rows, int(skipped)


class EpochOrder(NamedTuple):
    """A source's row groups in the order of one epoch.

    Args:
        groups: (G,) their numbers.
        ends: (G,) number of rows that the epoch uses up to the end of each row group.
        first_rows: {row group: its first row that is used}, if that is not row 0.
    """

    groups: np.ndarray
    ends: np.ndarray
    first_rows: dict[int, int]

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(row group, row in the row group)` of rows of the epoch, all (rows,)."""
        positions = np.searchsorted(self.ends, rows, side="right")
        groups, starts = self.groups[positions], np.where(positions > 0, self.ends[positions - 1], 0)
        rows = rows - starts
        for group, first_row in self.first_rows.items():
            rows[groups == group] += first_row
        return groups, rows


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """The rows of one data set that are trained on at one shape.

    Args:
        files: of the data set; None if the plan is not for reading.
        latents: the latents column of that shape.
        buckets: the rows, by bucket.
        proportion: weight in a step of this shape, relative to the other sources.
    """

    files: Files | None
    latents: schema.ColumnSpec
    buckets: tuple[BucketRows, ...]
    proportion: Fraction | float = 1

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(bucket.stop - bucket.start for bucket in self.buckets)

    def order(self, seed: int, epoch: int, number: int) -> EpochOrder:
        """The order of an epoch. `number`: this source's number in the plan."""
        orders = [bucket.order(self.files.group_rows, seed, epoch) for bucket in self.buckets]
        groups = np.concatenate([groups for groups, _, _ in orders])
        rows = np.concatenate([rows for _, rows, _ in orders])
        if len(orders) > 1:
            mixed = np.random.default_rng([seed, epoch, number, 0, 1]).permutation(len(groups))
            groups, rows = groups[mixed], rows[mixed]
        first_rows = {int(groups[0]): skipped for groups, _, skipped in orders if skipped}
        return EpochOrder(groups, np.cumsum(rows), first_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """The rows that are trained on at one shape, mixed from sources in proportion.

    Args:
        sources: at most one of each data set.
        share: the share of an epoch's steps that the shape's resolution gets.
    """

    sources: list[Source]
    share: Fraction | float = 1

    @property
    def latents(self) -> schema.ColumnSpec:
        return self.sources[0].latents

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def weight(self) -> Fraction:
        return sum(exact(source.proportion) for source in self.sources)

    @functools.cached_property
    def mixing_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD,) the source of each consecutive row. The rows of a source are evenly spread."""
        return spread(apportion(MIXING_PERIOD, [source.proportion for source in self.sources]))

    @functools.cached_property
    def _cumulative_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD + 1, sources) row i counts each source's rows among the first i rows of the schedule."""
        is_source = np.arange(len(self.sources)) == self.mixing_schedule[:, None]
        return np.pad(np.cumsum(is_source, axis=0), ((1, 0), (0, 0)))

    def rows_by_source(self, num_rows: int | np.ndarray) -> np.ndarray:
        """(..., sources) how many of an epoch's first `num_rows` (...) rows come from each source."""
        periods, rest = np.divmod(num_rows, MIXING_PERIOD)
        return np.multiply.outer(periods, self._cumulative_schedule[-1]) + self._cumulative_schedule[rest]

    def source_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(source, row of the source)` of some rows of the shape in an epoch, all (rows,)."""
        sources = self.mixing_schedule[rows % MIXING_PERIOD]
        return sources, self.rows_by_source(rows)[np.arange(len(rows)), sources]

    def most_steps(self, batch_rows: int) -> int:
        """Whole steps before the first source runs out."""
        num_rows = [source.num_rows for source in self.sources]

        def runs_out(steps: int) -> bool:
            return bool((self.rows_by_source(steps * batch_rows) > num_rows).any())

        return bisect.bisect_left(range(1, self.num_rows // batch_rows + 1), True, key=runs_out)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of samples in a whole run. Units and chunks are numbered through the run; no chunk spans two epochs.

    Args:
        shapes: the rows of each shape. Shapes of the same resolution have the same `share`.
        unit_rows: rows per unit.
        units_per_step: units per global batch.
        chunk_units: units per chunk; more units shuffle better but take more memory.
        seed: of the shuffle.
        block_steps: steps whose units share a block; above 1, `chunk_units` must be a multiple of
            `block_steps * units_per_step`.
        worker_counts: numbers of workers that the run may have. They decide only how many padding blocks end the data.
        caption_shares: how often each of a row's captions is used.
    """

    shapes: list[Shape]
    unit_rows: int
    units_per_step: int
    chunk_units: int
    seed: int
    block_steps: int = 1
    worker_counts: range = range(1, 2)
    caption_shares: tuple[float, ...] = (1.0,)

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
        return sum(shape.num_rows for shape in self.shapes)

    @functools.cached_property
    def sources(self) -> list[Source]:
        return [source for shape in self.shapes for source in shape.sources]

    # ---- the steps of each shape

    @functools.cached_property
    def by_resolution(self) -> list[np.ndarray]:
        """The numbers of the shapes of each resolution."""
        sizes = [shape.latents.resolution for shape in self.shapes]
        return [np.flatnonzero(np.equal(sizes, size)) for size in dict.fromkeys(sizes)]

    def steps_of_mixture(self, shapes: list[Shape]) -> list[int]:
        """The limit on the steps of each shape of a resolution, so that a mixture keeps its proportions.

        A data set has its proportion of a resolution's rows as a whole; its proportion of a single shape may differ. So
        the data set that runs out first limits the steps of all shapes of the resolution.

        Example: two data sets in equal parts, the first with 2,000 square and 2,000 wide images, the second with 1,000
        square ones. The second runs out after 2,000 rows in all, of which 1,500 are square and 500 wide.
        """
        sources = [source for shape in shapes for source in shape.sources]
        rows_of_weight_1 = min(source.num_rows / exact(source.proportion) for source in sources)
        return [math.ceil(rows_of_weight_1 * shape.weight / self.batch_rows) for shape in shapes]

    def allowed_steps(self, numbers: np.ndarray) -> list[int]:
        """The limit on the steps of each shape of a resolution: whole batches of its rows, and `steps_of_mixture`."""
        shapes = [self.shapes[number] for number in numbers]
        steps = [shape.most_steps(self.batch_rows) for shape in shapes]
        # A single shape keeps the proportions by itself.
        return list(map(min, steps, self.steps_of_mixture(shapes))) if len(shapes) > 1 else steps

    @functools.cached_property
    def shape_steps(self) -> np.ndarray:
        """(shapes,) steps per epoch of each.

        An epoch ends as soon as any resolution runs out of steps for its share. The steps of a resolution are divided
        among its shapes in proportion to `allowed_steps`.
        """
        shares = [exact(self.shapes[numbers[0]].share) for numbers in self.by_resolution]
        allowed = [self.allowed_steps(numbers) for numbers in self.by_resolution]
        total = min(math.floor(sum(steps) / share) for steps, share in zip(allowed, shares, strict=True))
        shape_steps = np.zeros(len(self.shapes), np.int64)
        for numbers, steps, count in zip(self.by_resolution, allowed, apportion(total, shares), strict=True):
            shape_steps[numbers] = apportion(count, steps)
        return shape_steps

    @functools.cached_property
    def shape_schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """`(shape, number of earlier steps of that shape)` for each step of an epoch, both (steps,).

        Resolutions are spread evenly over the epoch, and shapes over the steps of their resolution.
        """
        steps = self.shape_steps
        resolution_of_step = spread([steps[numbers].sum() for numbers in self.by_resolution])
        schedule = np.empty(len(resolution_of_step), np.int16)
        for resolution, numbers in enumerate(self.by_resolution):
            schedule[resolution_of_step == resolution] = numbers[spread(steps[numbers])]
        earlier = np.empty(len(schedule), np.int64)
        for number, count in enumerate(steps):
            earlier[schedule == number] = np.arange(count)
        return schedule, earlier

    def latents_at(self, step: int) -> schema.ColumnSpec:
        """The column that step `step` trains on."""
        return self.shapes[self.shape_schedule[0][step % self.steps_per_epoch]].latents

    # ---- the size of an epoch

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Whole steps of all shapes."""
        return int(self.shape_steps.sum())

    @property
    def units_per_epoch(self) -> int:
        return self.steps_per_epoch * self.units_per_step

    @property
    def chunks_per_epoch(self) -> int:
        return -(-self.units_per_epoch // self.chunk_units)

    # ---- from steps to chunks and units

    def step_units(self, first_step: int, end_step: int) -> range:
        """The units of steps `first_step` to `end_step` (exclusive)."""
        return range(first_step * self.units_per_step, end_step * self.units_per_step)

    def chunk_range(self, first_step: int, end_step: int) -> range:
        """The chunks that hold the units of steps `first_step` to `end_step` (exclusive)."""

        def chunk_of(unit: int) -> int:
            epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
            return epoch * self.chunks_per_epoch + unit_in_epoch // self.chunk_units

        units = self.step_units(first_step, end_step)
        return range(chunk_of(units[0]), chunk_of(units[-1]) + 1) if units else range(0)

    def unit_range(self, chunk: int) -> range:
        """The units of a chunk."""
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        start = epoch * self.units_per_epoch + index * self.chunk_units
        return range(start, min(start + self.chunk_units, (epoch + 1) * self.units_per_epoch))

    # ---- blocks, and the workers that get them

    def block_table(self, units: Sequence[int], first_step: int) -> tuple[np.ndarray, np.ndarray]:
        """`(block, slot)` of each unit, both (units,), in a dataset that starts at `first_step`.

        Block b is the dataset's block number b, and goes to worker b % num_workers. `slot`: the unit's position in it.
        A unit shares its block with the same units wherever the run starts. With units_per_step=3, block_steps=2 and 5
        steps an epoch, the units of each block are:

            steps 0 and 1      steps 2 and 3      step 4       the next epoch
            block 0: 0, 3      block 3: 6, 9      block 6: 12  block  9: 15, 18
            block 1: 1, 4      block 4: 7, 10     block 7: 13  block 10: 16, 19
            block 2: 2, 5      block 5: 8, 11     block 8: 14  ...
        """
        units = np.append(first_step * self.units_per_step, units)
        epochs, units = np.divmod(units, self.units_per_epoch)
        steps, positions = np.divmod(units, self.units_per_step)
        spans, slots = np.divmod(steps, self.block_steps)  # a span: consecutive steps whose units share blocks
        spans_per_epoch = -(-self.steps_per_epoch // self.block_steps)
        blocks = (epochs * spans_per_epoch + spans) * self.units_per_step + positions
        return blocks[1:] - blocks[0], slots[1:]

    def blocks(self, chunk: int, first_step: int, end_step: int) -> np.ndarray:
        """(blocks, block_steps) the units of each block, for the blocks of a chunk that a range of steps needs.

        The range is `first_step` to `end_step` (exclusive). All blocks have the same number of rows: an entry is -1 if
        the range does not need its unit, or if its position is past the end of the epoch.
        """
        needed, chunk_units = self.step_units(first_step, end_step), self.unit_range(chunk)
        units = range(max(needed.start, chunk_units.start), min(needed.stop, chunk_units.stop))
        blocks, slots = self.block_table(units, first_step)
        table = np.full((1 + blocks[-1] - blocks[0], self.block_steps), -1)
        table[blocks - blocks[0], slots] = units
        return table

    def units_of_worker(self, step: int, first_step: int, rank: int, world_size: int) -> list[int]:
        """The units of a step that a worker gets from a dataset that starts at `first_step`."""
        units = self.step_units(step, step + 1)
        blocks, _ = self.block_table(units, first_step)
        return [unit for unit, block in zip(units, blocks, strict=True) if block % world_size == rank]

    def padding_blocks(self, first_step: int, end_step: int) -> int:
        """Number of padding blocks to append after the blocks of these steps.

        Without them, `streaming_split(equal=True)` would drop the last blocks that do not divide equally.
        """
        (last_block,), _ = self.block_table([end_step * self.units_per_step - 1], first_step)
        return max(int(-(last_block + 1) % num_workers) for num_workers in self.worker_counts)

    # ---- from chunks to rows

    def epoch_orders(self, epoch: int) -> list[EpochOrder]:
        """The orders of an epoch, one for each source."""
        return [source.order(self.seed, epoch, number) for number, source in enumerate(self.sources)]

    def chunk_sources(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """`(source, row of the source in the epoch)` of each row of a chunk before it is shuffled, both (rows,)."""
        units = np.array(self.unit_range(chunk)) % self.units_per_epoch
        steps, slots = np.divmod(units, self.units_per_step)
        shapes, earlier_steps = (values[steps] for values in self.shape_schedule)
        first_rows = (earlier_steps * self.units_per_step + slots) * self.unit_rows
        rows = (first_rows[:, None] + np.arange(self.unit_rows)).ravel()  # of the row's shape in the epoch
        shapes, sources = np.repeat(shapes, self.unit_rows), np.empty(len(rows), np.int64)
        num_sources = [len(shape.sources) for shape in self.shapes]
        for number in np.unique(shapes):
            here = shapes == number
            of_shape, rows[here] = self.shapes[number].source_rows(rows[here])
            sources[here] = sum(num_sources[:number]) + of_shape
        return sources, rows

    def chunk_rows(
        self, chunk: int, orders: list[EpochOrder] | None = None
    ) -> tuple[list[tuple[Source, list[RowRange]]], np.ndarray]:
        """The rows of a chunk: `([(source, its row ranges)], permutation)`.

        Row i of the chunk is row `permutation[i]` of all these row ranges concatenated. Row ranges are in the order of
        the files. `orders`: what `epoch_orders` returns for the chunk's epoch; None: it is computed here, once per
        process.
        """
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        orders = orders or _epoch_orders(self, epoch)
        sources, rows = self.chunk_sources(chunk)
        # The shuffle: rows of the same source swap their positions, so batches keep the proportions of a mixture.
        random = np.random.default_rng([self.seed, epoch, index]).random(len(rows))
        rows[np.argsort(sources, kind="stable")] = rows[np.lexsort((random, sources))]
        groups = np.empty(len(rows), np.int64)
        for number in np.unique(sources):
            here = sources == number
            groups[here], rows[here] = orders[number].locate(rows[here])
        # The order of reading: by source, then as they lie in the files.
        reading = np.lexsort((rows, groups, sources))
        permutation = np.argsort(reading)
        sources, groups, rows = sources[reading], groups[reading], rows[reading]
        is_next = (np.diff(sources) != 0) | (np.diff(groups) != 0)
        starts = [0, *np.flatnonzero(is_next) + 1, len(rows)]
        ranges = collections.defaultdict(list)
        for start, stop in itertools.pairwise(starts):
            source = self.sources[sources[start]]
            of_group = source.files.row_range(groups[start], rows[start], stop - start)
            name = f"{of_group.file_name}/{of_group.row_group}"
            caption = draw_caption(self.caption_shares, self.seed, epoch, name)
            ranges[source].append(of_group._replace(caption=caption))
        return list(ranges.items()), permutation


def draw_caption(shares: Sequence[float], seed: int, epoch: int, name: str) -> int:
    """The number of the caption that an epoch uses for a row or a row group, counted from 1.

    Caption n is sampled with a probability proportional to `shares[n - 1]`. `name`: of the row or the row group.
    """
    if len(shares) == 1:
        return 1
    uniform = np.random.default_rng([seed, epoch, zlib.crc32(name.encode()), 2]).uniform(0, sum(shares))
    return 1 + int(np.searchsorted(np.cumsum(shares[:-1]), uniform, side="right"))


@functools.lru_cache(maxsize=2)
def _epoch_orders(plan: Plan, epoch: int) -> list[EpochOrder]:
    return plan.epoch_orders(epoch)


# ---- whole numbers in proportion


def exact(share: Fraction | float) -> Fraction:
    """A share as a fraction: 0.1 becomes 1/10, not the nearest binary number."""
    if isinstance(share, Fraction):
        return share
    return Fraction(share).limit_denominator(10**9) or Fraction(share)


def apportion(total: int, weights: Sequence[Fraction | float]) -> list[int]:
    """`total` divided into whole numbers in proportion to `weights`, each less than 1 away from its exact quota.

    The parts with the largest remainders are rounded up.
    """
    weights = [exact(weight) for weight in weights]
    quotas = [total * weight / (sum(weights) or 1) for weight in weights]
    parts = [math.floor(quota) for quota in quotas]
    largest = sorted(range(len(parts)), key=lambda number: parts[number] - quotas[number])
    for number in largest[: total - sum(parts)]:
        parts[number] += 1
    return parts


def spread(counts: Sequence[int]) -> np.ndarray:
    """A sequence that holds each number n `counts[n]` times, evenly spread.

    Occurrence j (from 0) of a number that occurs c times is sorted by (j + 1/2) / c.
    """
    times = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(times, kind="stable")]


# ---- the plan of a run
#
# A bucket reaches a resolution if its rows have latents at this resolution. `allocate_rows` divides the rows of a
# bucket among the resolutions that the bucket reaches.


def read_files(latents_uri: str) -> Files:
    """The files of a finished job, in the order of its segments."""
    return Files.of(latents_uri, [file for segment in read_segments(latents_uri) for file in segment["files"]])


def load_plan(data: DataSets, settings: Any) -> Plan:
    """The plan of a run, with the rows of each unit. Raises what `plan_run` raises.

    For large data sets this takes minutes and gigabytes.
    """
    return plan_run(data, settings, {uri: read_files(uri) for uri in data.manifests})


def plan_run(data: DataSets, settings: Any, files: dict[str, Files] | None = None) -> Plan:
    """The plan of a run.

    `settings`: a `config.TrainingConfig`, or another object with its resolution_shares, unit_rows, units_per_step,
    seed, worker_counts and caption_shares. `files`: URI -> files. Without them, the plan says which worker gets which
    units at which shape, but not which rows are in them. Raises ValueError if the latents do not fill one step.
    """
    shapes, shares = {}, settings.resolution_shares
    for number, uri in enumerate(data.manifests):
        manifest, proportion = data.manifests[uri], data.proportions[uri]
        for source in sources_by_shape(manifest, number, proportion, shares, files and files[uri]):
            shapes.setdefault(source.latents.name, []).append(source)
    shapes = [Shape(sources, shares[sources[0].latents.resolution]) for sources in shapes.values()]
    num_rows = sum(shape.num_rows for shape in shapes)
    chunk_units, block_steps = chunk_and_block_sizes(data.first, settings.unit_rows, settings.units_per_step, num_rows)
    workers, captions = settings.worker_counts, settings.caption_shares or (1.0,) * data.first.num_captions
    sizes = settings.unit_rows, settings.units_per_step, chunk_units
    plan = Plan(shapes, *sizes, settings.seed, block_steps, workers, captions)
    missing = set(shares) - {shape.latents.resolution for shape in shapes}
    if missing or plan.steps_per_epoch < 1:
        rows = {"x".join(map(str, shape.latents.size)): shape.num_rows for shape in shapes}
        rows |= {f"{size}x{size}": 0 for size in sorted(missing)}
        counts = ", ".join(f"{count} of {size}" for size, count in rows.items())
        raise ValueError(
            f"global_batch_size={plan.batch_rows} is more than the rows of {', '.join(data.manifests)} ({counts}) "
            "can fill: make it smaller, or encode more data."
        )
    return plan


def chunk_and_block_sizes(manifest: Manifest, unit_rows: int, units_per_step: int, num_rows: int) -> tuple[int, int]:
    """`(units per chunk, steps per block)`, by the bytes of a row."""
    row_bytes, block_bytes = manifest.row_bytes, ONLINE_BLOCK_BYTES if manifest.online else BLOCK_BYTES
    chunk_rows = max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS, num_rows))
    chunk_units = max(1, chunk_rows // unit_rows)
    chunk_steps = max(1, chunk_units // units_per_step)
    block_steps = max(1, block_bytes // (row_bytes * unit_rows))
    block_steps = min(block_steps, chunk_steps, MOST_BLOCK_STEPS)
    if block_steps > 1:  # chunks of whole blocks
        chunk_units = chunk_steps // block_steps * block_steps * units_per_step
    return chunk_units, block_steps


def sources_by_shape(
    manifest: Manifest, number: int, proportion: float, shares: dict[int, float], files: Files | None = None
) -> list[Source]:
    """The training rows of a data set as one source per shape.

    Args:
        manifest: of the data set.
        number: of the data set in the mixture, from 0.
        proportion: of the data set in every batch.
        shares: {resolution: its share of the steps}.
        files: of the data set; None: the sources have their numbers of rows, but not the rows.
    """
    buckets = {name: rows for name, rows in sorted(manifest.buckets.items()) if not name.startswith(schema.HELD_OUT)}
    groups = {bucket: files.groups_of(bucket) if files else NO_GROUPS for bucket in buckets}
    keys = {bucket: (number, position) for position, bucket in enumerate(buckets, start=1)}
    columns = {spec.name: spec for size in sorted(shares) for spec in manifest.latents_at(size)}
    sources, resolution_rows = [], collections.Counter()
    for name, row_spans in allocate_rows(buckets, columns.values(), shares).items():
        rows = (BucketRows(groups[bucket], *span, keys[bucket]) for bucket, span in row_spans.items())
        sources.append(Source(files, columns[name], tuple(rows)))
        resolution_rows[columns[name].resolution] += sources[-1].num_rows

    def weight(source: Source) -> Fraction:
        """The source's proportion: such that a shape gets steps of its resolution in proportion to its rows."""
        size = source.latents.resolution
        return exact(proportion) * exact(shares[size]) * Fraction(source.num_rows, resolution_rows[size])

    return [dataclasses.replace(source, proportion=weight(source)) for source in sources]


def allocate_rows(
    buckets: dict[str, int], columns: Iterable[schema.ColumnSpec], shares: dict[int, float]
) -> dict[str, dict[str, tuple[int, int]]]:
    """{column: {bucket: (start, stop)}}: an allocation of each bucket's rows, in an epoch's order, to columns.

    A row that reaches several resolutions is trained on at one of them. Resolutions take rows in turn, the largest
    first. A resolution takes its share of `epoch_rows`: the same fraction of the remaining rows of each bucket that
    reaches it. The smallest resolution takes all remaining rows that reach it, because no other will use them.

    Example: buckets {"32": 100, "32+64": 300} and shares {32: 0.5, 64: 0.5}. An epoch can use 400 rows, so 64 pixels
    take 200: two thirds of the 300 rows of "32+64". Then 32 pixels take the last third of "32+64", and all of "32".

    Args:
        buckets: bucket -> rows.
        columns: those that are trained on.
        shares: {resolution: its share of the steps}.
    """
    reaching = {}  # resolution, the largest first -> {bucket that reaches it: column}
    for size in sorted(shares, reverse=True):
        names = {spec.name for spec in columns if spec.resolution == size}
        pairs = ((bucket, name) for bucket in buckets for name in schema.bucket_columns(bucket) if name in names)
        reaching[size] = dict(pairs)
    usable, used = epoch_rows(buckets, reaching, shares), dict.fromkeys(buckets, 0)
    allocated = {spec.name: {} for spec in columns}
    for size, column_of in reaching.items():
        wanted, remaining = usable * exact(shares[size]), sum(buckets[bucket] - used[bucket] for bucket in column_of)
        fraction = 1 if size == min(shares) else min(1, wanted / max(remaining, 1))
        for bucket, column in column_of.items():
            start, stop = used[bucket], used[bucket] + round((buckets[bucket] - used[bucket]) * fraction)
            if stop > start:
                allocated[column][bucket] = (start, stop)
            used[bucket] = stop
    return {column: spans for column, spans in allocated.items() if spans}


def epoch_rows(buckets: dict[str, int], reaching: dict[int, Iterable[str]], shares: dict[int, float]) -> Fraction:
    """The most rows that an epoch can use such that every resolution gets its share of them.

    Each resolution sets a limit, and the smallest limit counts. The example of `allocate_rows`:

        resolution   reached there or above   rows   share of these resolutions   limit: rows / share
        64           "32+64"                  300    0.5                          600
        32           "32+64", "32"            400    1                            400

    `reaching`: resolution, the largest first -> the buckets that reach it.
    """
    limits, reached, share = [], set(), Fraction(0)
    for size, names in reaching.items():
        reached |= set(names)
        share += exact(shares[size])
        limits.append(sum(buckets[bucket] for bucket in reached) / share)
    return min(limits)
