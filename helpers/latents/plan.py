"""The epoch plan: which rows make which step, on any number of workers, starting at any step. No Ray.

The plan is a pure function of the data sets' row groups, their proportions, the seed and the epoch. For one shape:

    row groups   | a/0   | a/1   | a/2   | b/0   | b/1   |        in the order of the Parquet files
                        shuffled in every epoch, concatenated
    epoch        | b/0   | a/2   | b/1   | a/0   | a/1   |        in a mixture: taken from each data set by proportion
    chunks       | chunk 0           | chunk 1           |        read together; the rows of a chunk are shuffled
    units        | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  |        `unit_rows` rows each
    steps        | step 0  | step 1  | step 2  | step 3  |        unit u belongs to step u // units_per_step (here 2)
    blocks       | 0, 2    | 1, 3    | 4, 6    | 5, 7    |        units sent together (here block_steps=2)
    workers      | w0      | w1      | w0      | w1      |        block b goes to worker b % num_workers (here 2)
    micro-batches                                                 a worker splits a unit into `micro_batch_size` rows

The global batches are the same for any number of workers, and a run can start at any step by starting at that step's
first unit. If `units_per_step` is not a multiple of the number of workers, some workers get one more unit in a step.
Meanwhile the other workers compute a unit of masked rows (`TrainStep.step`). An epoch leaves out the last rows that do
not fill a step. An epoch of a mixture ends with the first data set that runs out; it leaves out the rest of the others.

A step trains on images of one shape. A row group holds rows of one bucket (`manifest.Manifest`). A bucket reaches a
resolution if its rows have latents at this resolution. `allocate_rows` divides the rows of a bucket among the
resolutions that the bucket reaches. An epoch uses each row at one resolution only.

Each shape has its own sequence of row groups. A step's shape depends only on the step's number. Each resolution gets
its share of the steps. Each shape gets steps of its resolution in proportion to its rows. The steps of a shape are
spread evenly over the epoch. An epoch ends when a resolution runs out. It then leaves out at most about a batch of
rows of each shape of this resolution. Another resolution may have more rows than its share of the steps needs; the
epoch leaves out the surplus too. A chunk holds consecutive units, whose steps may have different shapes.

If rows have several captions, each epoch samples one for a whole row group, so a task reads one embedding a row.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from . import schema
from .manifest import DataSets, Files, Manifest, RowRange

CHUNK_BYTES = 64 * 2**20  # each read task holds a few chunks in memory
CHUNK_ROWS = 128 * schema.ROWS_PER_ROW_GROUP  # mixes well enough; a larger chunk only delays the first batch
# Units of consecutive steps are sent together up to this size: Ray Data's loop takes at most two blocks of a task every
# tenth of a second. Online, larger blocks would only wait longer for a transform and an encoder.
BLOCK_BYTES, ONLINE_BLOCK_BYTES, MOST_BLOCK_STEPS = CHUNK_BYTES, 4 * 2**20, 8
NO_GROUPS = np.zeros(0, np.int32)
MIXING_PERIOD = 10_000  # proportions are rounded to multiples of 1 / MIXING_PERIOD


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

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """[(row group, first row, number of rows)] of rows `start` to `stop` of the epoch."""
        if start == stop:
            return []
        first, last = np.searchsorted(self.ends, start, side="right"), np.searchsorted(self.ends, stop, side="left")
        ranges = []
        for position in range(first, last + 1):
            group, group_start = int(self.groups[position]), self.ends[position - 1] if position else 0
            range_start, range_stop = max(start, group_start), min(stop, self.ends[position])
            first_row = self.first_rows.get(group, 0) + range_start - group_start
            ranges.append((group, int(first_row), int(range_stop - range_start)))
        return ranges


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
    proportion: float = 1.0

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
    share: float = 1.0

    @property
    def latents(self) -> schema.ColumnSpec:
        return self.sources[0].latents

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def weight(self) -> float:
        return sum(source.proportion for source in self.sources)

    @functools.cached_property
    def mixing_schedule(self) -> np.ndarray:
        """(MIXING_PERIOD,) the source of each consecutive row: the one that is furthest behind its share."""
        if len(self.sources) == 1:
            return np.zeros(MIXING_PERIOD, dtype=np.int64)
        proportions = np.array([source.proportion for source in self.sources])
        left = np.round(proportions / sum(proportions.tolist()) * MIXING_PERIOD).astype(np.int64)
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
        most_rows = []
        for source, counts in zip(self.sources, self._cumulative_schedule.T, strict=True):
            if counts[-1]:  # else the source's proportion is next to nothing
                periods, rest = divmod(source.num_rows, int(counts[-1]))
                most_rows.append(periods * MIXING_PERIOD + int(np.searchsorted(counts, rest, side="right")) - 1)
        return min(most_rows) // batch_rows


class ShapeRows(NamedTuple):
    """The rows of a chunk that are trained on at one shape.

    Args:
        shape: number of the shape in the plan.
        first_row: number of the first row among the shape's rows in the epoch. The rows are consecutive.
        positions: (rows,) positions of these rows in the chunk, ascending. `chunk_rows` shuffles the rows over these
            positions.
    """

    shape: int
    first_row: int
    positions: np.ndarray


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
    def sources(self) -> list[Source]:
        return [source for shape in self.shapes for source in shape.sources]

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(shape.num_rows for shape in self.shapes)

    # ---- the steps of each shape

    @functools.cached_property
    def by_resolution(self) -> list[np.ndarray]:
        """The numbers of the shapes of each resolution."""
        sizes = [shape.latents.resolution for shape in self.shapes]
        return [np.flatnonzero(np.equal(sizes, size)) for size in dict.fromkeys(sizes)]

    def steps_of_rows(self) -> np.ndarray:
        """(shapes,) limit on the steps of each shape: whole batches of its rows."""
        return np.array([shape.most_steps(self.batch_rows) for shape in self.shapes], dtype=float)

    def steps_of_mixture(self) -> np.ndarray:
        """(shapes,) limit on the steps of each shape, so that a mixture keeps its proportions; inf: no limit.

        A data set has its proportion of a resolution's rows as a whole; its proportion of a single shape may differ. So
        the data set that runs out first limits the steps of all shapes of the resolution. A resolution with one shape
        needs no such limit, because `steps_of_rows` already keeps the proportions there.
        """
        steps = np.full(len(self.shapes), np.inf)
        for numbers in self.by_resolution:
            shapes = [self.shapes[number] for number in numbers]
            if len(shapes) > 1:
                sources = [source for shape in shapes for source in shape.sources]
                room = min(source.num_rows / source.proportion for source in sources) / self.batch_rows
                steps[numbers] = np.ceil(room * np.array([shape.weight for shape in shapes]) - 1e-6)
        return steps

    @functools.cached_property
    def shape_steps(self) -> np.ndarray:
        """(shapes,) steps per epoch of each.

        An epoch ends as soon as any resolution runs out of rows for its share of the steps. The steps of a resolution
        are divided among its shapes in proportion to the lower of the limits `steps_of_rows` and `steps_of_mixture`.
        """
        allowed = np.minimum(self.steps_of_rows(), self.steps_of_mixture())
        shares = [self.shapes[numbers[0]].share for numbers in self.by_resolution]
        available = [allowed[numbers].sum() for numbers in self.by_resolution]
        total = min(int(steps / share + 1e-9) for steps, share in zip(available, shares, strict=True))
        steps = np.zeros(len(self.shapes), np.int64)
        for numbers, count in zip(self.by_resolution, apportion(total, shares), strict=True):
            steps[numbers] = apportion(count, allowed[numbers])
        return steps

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

    # ---- from steps to chunks, units and blocks

    def chunk_of(self, unit: int) -> int:
        """The chunk that a unit belongs to."""
        epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
        return epoch * self.chunks_per_epoch + unit_in_epoch // self.chunk_units

    def chunk_range(self, first_step: int, end_step: int) -> range:
        """The chunks that hold the units of steps `first_step` to `end_step` (exclusive)."""
        if first_step >= end_step:
            return range(0)
        first_unit, end_unit = first_step * self.units_per_step, end_step * self.units_per_step
        return range(self.chunk_of(first_unit), self.chunk_of(end_unit - 1) + 1)

    def unit_range(self, chunk: int) -> range:
        """The units of a chunk."""
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        start = epoch * self.units_per_epoch + index * self.chunk_units
        return range(start, min(start + self.chunk_units, (epoch + 1) * self.units_per_epoch))

    # ---- blocks, and the workers that get them
    #
    # With units_per_step=3, block_steps=2, and 5 steps an epoch:
    #
    #     steps 0 and 1      steps 2 and 3      step 4       the next epoch
    #     block 0: 0, 3      block 3: 6, 9      block 6: 12  block  9: 15, 18
    #     block 1: 1, 4      block 4: 7, 10     block 7: 13  block 10: 16, 19
    #     block 2: 2, 5      block 5: 8, 11     block 8: 14  ...
    #
    # Of two workers, worker 0 gets blocks 0, 2, 4, ...: units 0 and 2 of step 0, unit 7 of step 2.

    def block_table(self, units: np.ndarray | range, first_step: int) -> tuple[np.ndarray, np.ndarray]:
        """`(block, slot)` of each unit, both (units,), in a dataset that starts at `first_step`.

        Block b is the dataset's block number b, and goes to worker b % num_workers. `slot`: the unit's position in it.
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

        The range is `first_step` to `end_step` (exclusive). All blocks have the same number of rows. A unit belongs to
        the same block wherever the run starts. An entry is -1 if the range does not need its unit, or if its position
        is past the end of the epoch.
        """
        units = np.array(self.unit_range(chunk))
        if self.block_steps > 1:
            group = self.block_steps * self.units_per_step  # units of the blocks with the same steps
            units = np.pad(units, (0, -len(units) % group), constant_values=-1)
            units = units.reshape(-1, self.block_steps, self.units_per_step).swapaxes(1, 2)
        blocks = units.reshape(-1, self.block_steps)
        needed = (blocks >= first_step * self.units_per_step) & (blocks < end_step * self.units_per_step)
        return np.where(needed, blocks, -1)[needed.any(axis=1)]

    def block_of(self, unit: int) -> int:
        """The block that holds a unit, numbered through the run."""
        epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
        step, position = divmod(unit_in_epoch, self.units_per_step)
        blocks_per_epoch = -(-self.steps_per_epoch // self.block_steps) * self.units_per_step
        return epoch * blocks_per_epoch + step // self.block_steps * self.units_per_step + position

    def first_unit_of_block(self, unit: int) -> int:
        """The first unit of the block that holds a unit."""
        step = unit % self.units_per_epoch // self.units_per_step
        return unit - step % self.block_steps * self.units_per_step

    def units_of_worker(self, step: int, first_step: int, rank: int, world_size: int) -> range:
        """The units of a step that a worker gets from a dataset that starts at `first_step`."""
        first_unit = step * self.units_per_step
        blocks_before = self.block_of(first_unit) - self.block_of(first_step * self.units_per_step)
        return range(first_unit + (rank - blocks_before) % world_size, first_unit + self.units_per_step, world_size)

    def padding_blocks(self, first_step: int, end_step: int) -> int:
        """Number of padding blocks to append after the blocks of these steps.

        Without them, `streaming_split(equal=True)` would drop the last blocks that do not divide equally.
        """
        first_unit, last_unit = first_step * self.units_per_step, end_step * self.units_per_step - 1
        num_blocks = self.block_of(last_unit) + 1 - self.block_of(first_unit)
        return max(-num_blocks % num_workers for num_workers in self.worker_counts)

    # ---- from chunks to rows

    def epoch_orders(self, epoch: int) -> list[list[EpochOrder]]:
        """The orders of an epoch: for each shape, those of its sources."""
        numbers = iter(range(len(self.sources)))
        return [[source.order(self.seed, epoch, next(numbers)) for source in shape.sources] for shape in self.shapes]

    def shape_rows(self, chunk: int) -> Iterator[ShapeRows]:
        """The rows of a chunk, for each shape that it holds steps of."""
        units = np.array(self.unit_range(chunk)) % self.units_per_epoch
        steps, slots = np.divmod(units, self.units_per_step)
        shape_of_unit, earlier_steps = (values[steps] for values in self.shape_schedule)
        for number in np.unique(shape_of_unit):
            here = np.flatnonzero(shape_of_unit == number)
            first_unit = int(earlier_steps[here[0]]) * self.units_per_step + int(slots[here[0]])
            positions = (here[:, None] * self.unit_rows + np.arange(self.unit_rows)).reshape(-1)
            yield ShapeRows(number, first_unit * self.unit_rows, positions)

    def chunk_rows(
        self, chunk: int, orders: list[list[EpochOrder]] | None = None
    ) -> tuple[list[tuple[Source, list[RowRange]]], np.ndarray]:
        """The rows of a chunk: `([(source, its row ranges)], permutation)`.

        Row i of the chunk is row `permutation[i]` of all these row ranges concatenated. `orders`: what `epoch_orders`
        returns for the chunk's epoch; None: it is computed here, once per process.
        """
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        orders, random = orders or _epoch_orders(self, epoch), np.random.default_rng([self.seed, epoch, index])
        ranges, permutation, num_read = [], np.empty(len(self.unit_range(chunk)) * self.unit_rows, np.int64), 0
        for number, first_row, positions in self.shape_rows(chunk):
            shape, end_row = self.shapes[number], first_row + len(positions)
            source_of_row = np.take(shape.mixing_schedule, np.arange(first_row, end_row), mode="wrap")
            firsts, ends = shape.rows_by_source(first_row).tolist(), shape.rows_by_source(end_row).tolist()
            of_source = zip(shape.sources, orders[number], firsts, ends, strict=True)
            for source_number, (source, order, first, end) in enumerate(of_source):
                found = order.ranges(first, end)
                ranges.append((source, [self.with_caption(source.files.row_range(*one), epoch) for one in found]))
                permutation[positions[source_of_row == source_number]] = num_read + random.permutation(end - first)
                num_read += end - first
        return ranges, permutation

    def with_caption(self, rows: RowRange, epoch: int) -> RowRange:
        """Rows of a row group, with the caption that the epoch samples for it."""
        name = f"{rows.file_name}/{rows.row_group}"
        return rows._replace(caption=draw_caption(self.caption_shares, self.seed, epoch, name))


def draw_caption(shares: Sequence[float], seed: int, epoch: int, name: str) -> int:
    """The number of the caption that an epoch uses for a row or a row group, counted from 1.

    Caption n is sampled with a probability proportional to `shares[n - 1]`. `name`: of the row or the row group.
    """
    if len(shares) == 1:
        return 1
    uniform = np.random.default_rng([seed, epoch, zlib.crc32(name.encode()), 2]).uniform(0, sum(shares))
    return 1 + int(np.searchsorted(np.cumsum(shares[:-1]), uniform, side="right"))


@functools.lru_cache(maxsize=2)
def _epoch_orders(plan: Plan, epoch: int) -> list[list[EpochOrder]]:
    return plan.epoch_orders(epoch)


def apportion(total: int, weights: Sequence[float]) -> np.ndarray:
    """`total` divided into whole numbers in proportion to `weights`, each less than 1 away from its exact quota."""
    exact = total * np.asarray(weights, dtype=float) / (sum(weights) or 1)
    parts = np.floor(exact + 1e-9).astype(np.int64)
    parts[np.argsort(parts - exact, kind="stable")[: total - parts.sum()]] += 1
    return parts


def spread(counts: Sequence[int]) -> np.ndarray:
    """A sequence that holds each number n `counts[n]` times, evenly spread.

    Occurrence j (from 0) of a number that occurs c times is sorted by (j + 1/2) / c.
    """
    times = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(times, kind="stable")]


# ---- the plan of a run


class PlanSettings(Protocol):
    """What a plan depends on besides the data; `config.training.TrainingConfig` is one.

    Args:
        resolution_shares: {resolution: its share of the steps}; they add up to 1.
        unit_rows, units_per_step, seed, worker_counts: as in `Plan`.
        caption_shares: as in `Plan`; None: all captions equally often.
    """

    resolution_shares: dict[int, float]
    unit_rows: int
    units_per_step: int
    seed: int
    worker_counts: range
    caption_shares: Sequence[float] | None


def load_plan(data: DataSets, settings: PlanSettings) -> Plan:
    """The plan of a run, with the rows of each unit. Raises what `plan_run` raises."""
    return plan_run(data, settings, data.read_files())


def plan_run(data: DataSets, settings: PlanSettings, files: dict[str, Files] | None = None) -> Plan:
    """The plan of a run.

    `files`: what `data.read_files` returns. Without them, the plan says which worker gets which units at which shape,
    but not which rows are in them. Raises ValueError if the latents do not fill one step.
    """
    shapes, shares = {}, settings.resolution_shares
    for number, uri in enumerate(data.manifests):
        manifest, proportion = data.manifests[uri], data.proportions[uri]
        for source in sources_by_shape(manifest, number, proportion, shares, files and files[uri]):
            shapes.setdefault(source.latents.name, []).append(source)
    shapes = [Shape(sources, shares[sources[0].latents.resolution]) for sources in shapes.values()]
    num_rows = sum(shape.num_rows for shape in shapes)
    chunk_units, block_steps = chunk_and_block_sizes(data.first, settings, num_rows)
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


def chunk_and_block_sizes(manifest: Manifest, settings: PlanSettings, num_rows: int) -> tuple[int, int]:
    """`(units per chunk, steps per block)`, by the bytes of a row."""
    row_bytes, block_bytes = manifest.row_bytes, ONLINE_BLOCK_BYTES if manifest.online else BLOCK_BYTES
    chunk_rows = max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS, num_rows))
    chunk_units = max(1, chunk_rows // settings.unit_rows)
    chunk_steps = max(1, chunk_units // settings.units_per_step)
    block_steps = max(1, block_bytes // (row_bytes * settings.unit_rows))
    block_steps = min(block_steps, chunk_steps, MOST_BLOCK_STEPS)
    if block_steps > 1:  # chunks of whole blocks
        chunk_units = chunk_steps // block_steps * block_steps * settings.units_per_step
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

    def weight(source: Source) -> float:
        """The source's proportion: such that a shape gets steps of its resolution in proportion to its rows."""
        size = source.latents.resolution
        return proportion * (source.num_rows / resolution_rows[size] * shares[size])

    return [dataclasses.replace(source, proportion=weight(source)) for source in sources]


def allocate_rows(
    buckets: dict[str, int], columns: Iterable[schema.ColumnSpec], shares: dict[int, float]
) -> dict[str, dict[str, tuple[int, int]]]:
    """{column: {bucket: (start, stop)}}: an allocation of each bucket's rows, in an epoch's order, to columns.

    A row that reaches several resolutions is trained on at one of them. Resolutions take rows in turn, the largest
    first. The number of rows that a resolution takes is its share of `most_rows`. They come from all buckets that reach
    the resolution: the same fraction of each bucket's remaining rows. The smallest resolution comes last and takes all
    remaining rows that reach it, because no other resolution will use them.

    Example: with buckets {"32": 100, "32+64": 300} and shares {32: 0.5, 64: 0.5}, `most_rows` is 400. So 64 pixels get
    200 rows, the first two thirds of "32+64". Then 32 pixels get the last third, and all of "32".

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
    total, used = most_rows(buckets, reaching, shares), dict.fromkeys(buckets, 0)
    allocated = {spec.name: {} for spec in columns}
    for size, column_of in reaching.items():
        available = sum(buckets[bucket] - used[bucket] for bucket in column_of)
        part = 1.0 if size == min(shares) else min(1.0, total * shares[size] / max(available, 1))
        for bucket, column in column_of.items():
            start, stop = used[bucket], used[bucket] + round((buckets[bucket] - used[bucket]) * part)
            if stop > start:
                allocated[column][bucket] = (start, stop)
            used[bucket] = stop
    return {column: spans for column, spans in allocated.items() if spans}


def most_rows(buckets: dict[str, int], reaching: dict[int, Iterable[str]], shares: dict[int, float]) -> float:
    """The most rows that an epoch can use such that every resolution gets its share of them.

    Each resolution sets a limit. The limit is the number of rows that reach this resolution or a larger one, divided by
    the sum of the shares of these resolutions. The smallest limit is returned.

    `reaching`: resolution, the largest first -> the buckets that reach it.
    """
    limits, reached, share = [], set(), 0.0
    for size, names in reaching.items():
        reached |= set(names)
        share += shares[size]
        limits.append(sum(buckets[bucket] for bucket in reached) / share)
    return min(limits)
