"""The epoch plan: which rows make which step, on any number of workers, from any step on.

A pure function of (the data sets' row groups, their proportions, seed, epoch). For each data set, all row groups are
permuted and laid end to end. An epoch draws from these lines in the given proportions, by a fixed pattern, so that they
hold in every window of it; what it draws is cut into chunks of `chunk_rows` rows, the rows of a data set in a chunk are
permuted, and the chunk is cut into units of `unit_rows` rows. Unit number u belongs to step u // units_per_step and to
worker u % num_workers, so every worker count that divides `units_per_step` trains on the same global batches, and a run
can start at any step by starting at its first unit. What does not fill a whole step at the end of an epoch is left out
of that epoch, and so is what another data set of the mixture has too little for.

Ray Data reads a chunk within one task and hands blocks out in order (`preserve_order`, `streaming_split(equal=True)`).
A block is a unit, or, where units are small, the same worker's units of `block_steps` steps: a block costs some
milliseconds, whatever it holds. That order rests on behaviour which Ray keeps but does not promise: each row carries
its unit's number, and the training loop checks it. Nothing after the plan may drop a row, or the split would shift:
unwanted rows are masked in the loss.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback

from . import schema, storage

UNIT, KEEP = "unit", "keep"
VALIDATION = "validation"  # of a run whose pictures are encoded on the way: a latents folder of the held-out rows
CHUNK_BYTES = 64 * 2**20  # a few chunks are in memory at once, per reading task
CHUNK_ROWS = 128 * schema.ROWS_PER_ROW_GROUP  # enough to mix; more only makes the first batch late
BLOCK_BYTES = 4 * 2**20  # units smaller than this travel together
# How far ahead of the trainers data is made: the larger of the two. Ray Data counts 32 MiB for each task in flight, whatever it
# will be, so a smaller bound would leave some of sixteen encoders without work.
BACKPRESSURE_STEPS, BACKPRESSURE_BYTES = 32, 2**30
MIXING_PERIOD = 10_000  # proportions hold to 1 in this many


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """One data set of a mixture.

    Args:
        uri: its folder, as `latents_uri`.
        file_names: Parquet files, relative to its `data/` folder.
        group_rows: rows of every row group, files laid end to end.
        first_group: number of each file's first row group, and at the end the number of all.
        proportion: its share of every batch; those of a mixture add up to 1.
    """

    uri: str
    file_names: list
    group_rows: np.ndarray
    first_group: np.ndarray
    proportion: float = 1.0

    @classmethod
    def of(cls, uri, files, proportion=1.0):
        """`files`: [(name, rows of each of its row groups)], as in a manifest."""
        return cls(
            uri,
            [name for name, _ in files],
            np.fromiter((rows for _, groups in files for rows in groups), dtype=np.int64),
            np.cumsum([0, *(len(groups) for _, groups in files)]),
            proportion,
        )

    @functools.cached_property
    def num_rows(self):
        return int(self.group_rows.sum())

    def piece(self, group, first, num_rows):
        """(file name, row group of that file, first row, number of rows)."""
        file = np.searchsorted(self.first_group, group, side="right") - 1
        return self.file_names[file], int(group - self.first_group[file]), int(first), int(num_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of samples of a whole run.

    Args:
        sources: the data sets that are mixed; usually one.
        unit_rows: rows of a unit.
        units_per_step: units of a global batch.
        chunk_units: units of a chunk; more mix better and take more memory.
        seed: of the shuffle.
        block_steps: steps of which one slot's units travel as one block; more than 1 only if `chunk_units` is a
            multiple of `block_steps * units_per_step`.
    """

    sources: list
    unit_rows: int
    units_per_step: int
    chunk_units: int
    seed: int
    block_steps: int = 1

    @property
    def batch_rows(self):
        return self.unit_rows * self.units_per_step

    @property
    def block_rows(self):
        """Rows of every block that travels: as `batch_size`, a stage is handed one block at a time."""
        return self.unit_rows * self.block_steps

    @functools.cached_property
    def pattern(self):
        """Which source each of `PATTERN` consecutive rows is drawn from: always the one that is furthest behind."""
        if len(self.sources) == 1:
            return np.zeros(MIXING_PERIOD, dtype=np.int64)
        shares = np.array([source.proportion for source in self.sources])
        left, behind = np.round(shares * MIXING_PERIOD), np.zeros(len(shares))
        left[np.argmax(left)] += MIXING_PERIOD - left.sum()
        shares, chosen = left / MIXING_PERIOD, np.empty(MIXING_PERIOD, dtype=np.int64)
        for position in range(MIXING_PERIOD):
            behind += shares
            chosen[position] = np.argmax(np.where(left > 0, behind, -np.inf))
            behind[chosen[position]] -= 1
            left[chosen[position]] -= 1
        return chosen

    @functools.cached_property
    def _drawn(self):
        """(PATTERN + 1, sources): rows of each source among the first rows of the pattern."""
        counts = np.zeros((MIXING_PERIOD + 1, len(self.sources)), dtype=np.int64)
        counts[np.arange(1, MIXING_PERIOD + 1), self.pattern] = 1
        return np.cumsum(counts, axis=0)

    def drawn(self, rows):
        """How many of an epoch's first `rows` rows each source gives."""
        whole, rest = divmod(rows, MIXING_PERIOD)
        return whole * self._drawn[-1] + self._drawn[rest]

    @functools.cached_property
    def steps_per_epoch(self):
        """Whole steps before the first source runs out."""
        rows = np.array([source.num_rows for source in self.sources])
        fewest, most = 0, int(rows.sum()) // self.batch_rows
        while fewest < most:  # the last number of steps that no source is too small for
            middle = (fewest + most + 1) // 2
            fewest, most = (
                (middle, most) if (self.drawn(middle * self.batch_rows) <= rows).all() else (fewest, middle - 1)
            )
        return fewest

    @property
    def num_rows(self):
        """Rows of all sources."""
        return sum(source.num_rows for source in self.sources)

    @property
    def units_per_epoch(self):
        return self.steps_per_epoch * self.units_per_step

    @property
    def chunks_per_epoch(self):
        return -(-self.units_per_epoch // self.chunk_units)

    def order(self, epoch):
        """For each source `(groups, ends)`: its row groups in this epoch's order, and the row at which each ends."""
        orders = []
        for number, source in enumerate(self.sources):
            key = [self.seed, epoch, number] if number else [self.seed, epoch]
            groups = np.random.default_rng(key).permutation(len(source.group_rows))
            orders.append((groups, np.cumsum(source.group_rows[groups])))
        return orders

    def chunk(self, epoch, index):
        """One chunk: `(pieces, permutation)`.

        `pieces`: for each source [(file name, row group of that file, first row, number of rows)] in order;
        `permutation`: the order in which their rows, laid end to end, are dealt out to units.
        """
        start = index * self.chunk_units * self.unit_rows
        stop = min(start + self.chunk_units * self.unit_rows, self.units_per_epoch * self.unit_rows)
        random = np.random.default_rng([self.seed, epoch, index])
        from_source = np.take(self.pattern, np.arange(start, stop), mode="wrap")
        first, last = self.drawn(start), self.drawn(stop)
        pieces, permutation, offset = [], np.empty(stop - start, dtype=np.int64), 0
        for number, (source, (groups, ends)) in enumerate(zip(self.sources, _cached_order(self, epoch), strict=True)):
            pieces.append(list(_row_ranges(source, groups, ends, first[number], last[number])))
            count = int(last[number] - first[number])
            permutation[from_source == number] = offset + random.permutation(count)
            offset += count
        return pieces, permutation

    def span(self, chunk, first_step, num_steps):
        """`(epoch, index, first unit of the chunk, last unit + 1)` of a run's chunk that the steps use."""
        epoch, index = divmod(chunk, self.chunks_per_epoch)
        start = epoch * self.units_per_epoch + index * self.chunk_units
        units = min(self.chunk_units, self.units_per_epoch - index * self.chunk_units)
        first = max(0, first_step * self.units_per_step - start)
        # A block starts where it does whichever step a run starts at: the steps before are skipped by the worker.
        first -= first % (self.block_steps * self.units_per_step) if self.block_steps > 1 else 0
        return epoch, index, first, min(units, num_steps * self.units_per_step - start)

    def chunks(self, first_step, num_steps):
        """`range` of the run's chunks that make the steps `first_step` to `num_steps`."""

        def chunk_of(step):
            epoch, step = divmod(step, self.steps_per_epoch)
            return epoch * self.chunks_per_epoch + step * self.units_per_step // self.chunk_units

        if first_step >= num_steps:
            return range(0)
        last_epoch, last_unit = divmod(num_steps * self.units_per_step - 1, self.units_per_epoch)
        return range(chunk_of(first_step), last_epoch * self.chunks_per_epoch + last_unit // self.chunk_units + 1)

    def blocks(self, first, stop):
        """`(units, rows)` of a chunk's units `first` to `stop` as they are dealt out, one block after another.

        `units` (N,): the number in the chunk of each unit that travels; -1 fills up the last steps' blocks, which all
        have the same number of rows. `rows` (N, unit_rows): where its rows stand in the chunk.
        """
        units = np.arange(first, stop)
        if self.block_steps > 1:
            steps = -(-len(units) // self.units_per_step)
            padded = -(-steps // self.block_steps) * self.block_steps * self.units_per_step
            units = np.concatenate([units, np.full(padded - len(units), -1)])
            units = units.reshape(-1, self.block_steps, self.units_per_step).swapaxes(1, 2).reshape(-1)
        return units, np.maximum(units, 0)[:, None] * self.unit_rows + np.arange(self.unit_rows)


def _row_ranges(source, groups, ends, start, stop):
    """The rows `start` to `stop` of a source's row groups, laid end to end in an epoch's order."""
    if start == stop:
        return
    for position in range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1):
        begin = ends[position] - source.group_rows[groups[position]]
        first, last = max(start, begin), min(stop, ends[position])
        yield source.piece(groups[position], first - begin, last - first)


@functools.lru_cache(maxsize=2)
def _cached_order(plan, epoch):
    return plan.order(epoch)


@functools.lru_cache(maxsize=2)
def _fetched(plan):
    """A plan from the object store, one copy a process: each would order its epochs anew."""
    return ray.get(plan)


def read_manifests(config):
    """{URI: manifest} of the latents that are trained on. Raises FileNotFoundError naming a folder that holds none."""
    return {uri: schema.Manifest.read(uri) for uri in config.proportions}


def check_mixture(manifests):
    """Raises ValueError if data sets of different encoders are mixed."""
    (first_uri, first), *others = manifests.items()
    for uri, manifest in others:
        for name in ("encoder", "columns", "scaling_factor", "empty_caption_embedding", "id_type"):
            mine, theirs = getattr(manifest, name), getattr(first, name)
            if mine != theirs:
                what = f" ({mine} and {theirs})" if name != "empty_caption_embedding" else ""
                raise ValueError(
                    f"latents_uri mixes {uri} with {first_uri}, which differ in {name}{what}: encode them in the same way."
                )


def plan_run(manifests, config):
    """The plan of a training run over the latents of its manifests (URI -> manifest).

    Raises ValueError if they do not fill one step.
    """
    row_bytes = next(iter(manifests.values())).row_bytes
    sources = [Source.of(uri, manifest.files, config.proportions[uri]) for uri, manifest in manifests.items()]
    chunk_units = max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS) // config.unit_rows)
    # No more than the data holds, or one chunk would be all of it; and whole blocks where units travel together.
    chunk_units = min(chunk_units, max(1, sum(source.num_rows for source in sources) // config.unit_rows))
    chunk_steps = chunk_units // config.units_per_step
    block_steps = min(max(1, BLOCK_BYTES // (row_bytes * config.unit_rows)), max(1, chunk_steps), 8)
    if block_steps > 1:
        chunk_units = chunk_steps // block_steps * block_steps * config.units_per_step
    plan = Plan(sources, config.unit_rows, config.units_per_step, chunk_units, config.seed, block_steps)
    if plan.steps_per_epoch < 1:
        raise ValueError(
            f"global_batch_size={config.global_batch_size} is more than the {plan.num_rows} rows of {config.latents_uri} "
            "can fill: make it smaller, or encode more data."
        )
    return plan


def latents_dataset(plan, first_step, num_steps, *, resolution, validation_share):
    """Latents in the plan's order: a Ray dataset with one block a unit (or `block_steps` of them) from `first_step` on.

    Columns: id, caption, the latents of `resolution` (or of several: any of them may be a step's), the embeddings, `keep`
    (False: masked out of the loss, because validation owns the row or it has no latents) and `unit`, the unit's number in
    the run.
    """
    read = functools.partial(read_latents, resolution=resolution, validation_share=validation_share)
    return build_dataset(plan, first_step, num_steps, read)


def build_dataset(plan, first_step, num_steps, read):
    """What `read(pieces, source)` gives, a table of their rows and `keep`, dealt out in the plan's order.

    Reads nothing before `first_step` but the head of the chunk that the step begins in.
    """
    chunks = plan.chunks(first_step, num_steps)
    deal = functools.partial(
        read_chunks, plan=ray.put(plan), first_chunk=chunks.start, first_step=first_step, num_steps=num_steps, read=read
    )
    numbers = ray.data.range(len(chunks), override_num_blocks=num_tasks(len(chunks)))
    numbers.context.custom_execution_callback_classes = [SchedulerThrottle]
    return numbers.map_batches(deal, batch_size=1).repartition(target_num_rows_per_block=plan.block_rows)


class SchedulerThrottle(ExecutionCallback):
    """A pause after each turn of Ray Data's loop.

    Once everything is made that may be made ahead (`execution_options`), the tasks that are held back are ready all the
    time, so the loop waits for nothing and keeps a core busy: on two cores, half of what the trainer has.
    """

    def on_execution_step(self, executor):
        time.sleep(0.05)


def num_tasks(num_chunks):
    """Tasks that read so many chunks.

    Eight chunks a task, because a task costs some ten milliseconds whatever it reads; and at most 20,000 tasks, because
    Ray Data lists them all before the first one starts, at about a millisecond each.
    """
    return max(1, min(num_chunks, max(64, num_chunks // 8), 20_000))


def read_chunks(batch, *, plan, first_chunk, first_step, num_steps, read):
    """Read chunks by their number and deal their rows to units; one Arrow table a chunk, with a column `unit`."""
    plan = _fetched(plan) if isinstance(plan, ray.ObjectRef) else plan
    for number in batch["id"]:
        epoch, index, first, stop = plan.span(first_chunk + int(number), first_step, num_steps)
        pieces, permutation = plan.chunk(epoch, index)
        units, positions = plan.blocks(first, stop)
        rows = pa.concat_tables(read(mine, source) for mine, source in zip(pieces, plan.sources, strict=True) if mine)
        rows = rows.combine_chunks().take(permutation[positions.reshape(-1)])
        start = epoch * plan.units_per_epoch + index * plan.chunk_units
        numbers = np.repeat(np.where(units < 0, -1, start + units), plan.unit_rows)
        yield rows.append_column(UNIT, pa.array(numbers))


def split_units(block, unit_rows):
    """{unit number: its rows} of a block. Raises RuntimeError if its rows are not whole units."""
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


def read_latents(pieces, source, *, resolution, validation_share):
    """The rows of `pieces` of a latents folder, and `keep`."""
    columns = [schema.latents_column(one) for one in ([resolution] if isinstance(resolution, int) else resolution)]
    rows = read_pieces(
        pieces, [schema.ID, schema.CAPTION, *columns, schema.EMBEDDINGS], storage.join(source.uri, "data")
    )
    has_latents = np.any([rows[column].is_valid().to_numpy() for column in columns], axis=0)
    keep = has_latents & ~schema.held_out(rows[schema.ID].to_pylist(), validation_share)
    return rows.append_column(KEEP, pa.array(keep))


def read_pieces(pieces, columns, folder_uri):
    """The rows of `pieces` (see `Plan.chunk`), laid end to end, as one Arrow table; each file is opened once."""
    filesystem, folder = storage.open_filesystem(folder_uri)
    tables = [None] * len(pieces)
    for name in dict.fromkeys(piece[0] for piece in pieces):
        with pq.ParquetFile(f"{folder}/{name}", filesystem=filesystem) as file:
            for position, (piece_name, group, first, num_rows) in enumerate(pieces):
                if piece_name == name:
                    tables[position] = file.read_row_group(group, columns=columns).slice(first, num_rows)
    return pa.concat_tables(tables).combine_chunks()


def validation_rows(config, num_rows):
    """About the first `num_rows` held-out rows that have latents, in the order of the files, as an Arrow table.

    Of a mixture, each data set gives its proportion. None if there are no such rows.
    """
    if config.validation_share == 0:
        return None
    parts = []
    for uri, manifest in read_manifests(config).items():
        wanted = max(1, round(num_rows * config.proportions[uri]))
        if manifest.online:  # its validation rows are encoded once, before the run
            uri = storage.join(uri, VALIDATION)
            manifest = schema.Manifest.read(uri)
        parts.append(_validation_rows(manifest, uri, config, wanted))
    found = pa.concat_tables([table for part in parts for table in part]) if any(parts) else None
    return found if found is not None and found.num_rows else None


def _validation_rows(manifest, uri, config, missing):
    columns = [schema.ID, schema.CAPTION, schema.latents_column(config.largest_resolution), schema.EMBEDDINGS]
    found, folder = [], storage.join(uri, "data")

    def held_out(file):
        """[(piece of a row group that has such rows, which they are)]"""
        pieces = [(file[0], group, 0, rows) for group, rows in enumerate(file[1])]
        mine = schema.held_out(read_pieces(pieces, [schema.ID], folder)[schema.ID].to_pylist(), config.validation_share)
        masks = np.split(mine, np.cumsum(file[1])[:-1])
        return [(piece, mask) for piece, mask in zip(pieces, masks, strict=True) if mask.any()]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:  # the ids of many files at a time: few rows are held out
        for start in range(0, len(manifest.files), 64):
            for piece, mask in itertools.chain.from_iterable(pool.map(held_out, manifest.files[start : start + 64])):
                rows = read_pieces([piece], columns, folder).filter(pa.array(mask))
                found.append(rows.filter(rows[columns[2]].is_valid())[:missing])
                missing -= found[-1].num_rows
                if missing <= 0:
                    return found
    return found


def execution_options(config):
    """Options for Ray Train's `DataConfig(execution_options=...)`: units in order, and a bound on what is made ahead.

    Trainers that are slower than what feeds them would otherwise let half of the object store fill before Ray Data holds
    back. The bound is `AHEAD_STEPS` global batches of `config`'s data, and at least `AHEAD_BYTES`.
    """
    row_bytes = max(manifest.row_bytes for manifest in read_manifests(config).values())
    ahead = max(BACKPRESSURE_BYTES, BACKPRESSURE_STEPS * config.global_batch_size * row_bytes)
    limits = ray.data.ExecutionResources.for_limits(object_store_memory=ahead)
    return ray.data.ExecutionOptions(preserve_order=True, resource_limits=limits)
