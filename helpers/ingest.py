"""The epoch plan: which rows make which step, on any number of workers, from any step on.

A pure function of (the files' row groups, seed, epoch). All row groups of an epoch are permuted and laid end to end;
that sequence is cut into chunks of `chunk_rows` rows, a chunk's rows are permuted, and it is cut into units of
`unit_rows` rows. Unit number u belongs to step u // units_per_step and to worker u % num_workers, so every worker count
that divides `units_per_step` trains on the same global batches, and a run can start at any step by starting at its
first unit. What does not fill a whole step at the end of an epoch is left out of that epoch.

Ray Data reads a chunk as one task and hands its units out in order (`preserve_order`, `streaming_split(equal=True)`).
That order rests on behaviour which Ray keeps but does not promise: each unit carries its number, and the training loop
checks it. Nothing after the plan may drop a row, or the split would shift: unwanted rows are masked in the loss.
"""

import dataclasses
import functools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from . import schema, storage

UNIT, KEEP = "unit", "keep"
CHUNK_BYTES = 64 * 2**20  # a few chunks are in memory at once, per reading task


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The order of samples of a whole run.

    Args:
        file_names: Parquet files, relative to the `data/` folder.
        row_groups: rows of each row group, all files in order (one array of integers for each file).
        unit_rows: rows of a unit.
        units_per_step: units of a global batch.
        chunk_units: units of a chunk; more mix better and take more memory.
        seed: of the shuffle.
    """

    file_names: list
    row_groups: list
    unit_rows: int
    units_per_step: int
    chunk_units: int
    seed: int

    @functools.cached_property
    def group_rows(self):
        """Rows of every row group, files laid end to end."""
        return np.concatenate([np.asarray(rows, dtype=np.int64) for rows in self.row_groups])

    @functools.cached_property
    def first_group(self):
        """Number of each file's first row group."""
        return np.cumsum([0, *(len(rows) for rows in self.row_groups)])

    @property
    def num_rows(self):
        return int(self.group_rows.sum())

    @property
    def steps_per_epoch(self):
        return self.num_rows // (self.unit_rows * self.units_per_step)

    @property
    def units_per_epoch(self):
        return self.steps_per_epoch * self.units_per_step

    @property
    def chunks_per_epoch(self):
        return -(-self.units_per_epoch // self.chunk_units)

    def order(self, epoch):
        """`(groups, ends)`: the epoch's row groups in order, and the row at which each of them ends."""
        groups = np.random.default_rng([self.seed, epoch]).permutation(len(self.group_rows))
        return groups, np.cumsum(self.group_rows[groups])

    def chunk(self, epoch, index):
        """One chunk: `(pieces, permutation)`.

        `pieces`: [(file name, row group of that file, first row, number of rows)] in order, `permutation`: the order of
        their rows, laid end to end, as they are dealt out to units.
        """
        start = index * self.chunk_units * self.unit_rows
        stop = min(start + self.chunk_units * self.unit_rows, self.units_per_epoch * self.unit_rows)
        groups, ends = _cached_order(self, epoch)
        pieces = []
        for position in range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1):
            group = groups[position]
            begin = ends[position] - self.group_rows[group]
            file = np.searchsorted(self.first_group, group, side="right") - 1
            first, last = max(start, begin), min(stop, ends[position])
            pieces.append((self.file_names[file], int(group - self.first_group[file]), int(first - begin), int(last - first)))
        permutation = np.random.default_rng([self.seed, epoch, index]).permutation(stop - start)
        return pieces, permutation

    def units_from(self, first_step, num_steps):
        """[(epoch, chunk, first unit of it, last unit + 1)] that make the steps `first_step` to `num_steps`."""
        spans = []
        unit, last = first_step * self.units_per_step, num_steps * self.units_per_step
        while unit < last:
            epoch, unit_in_epoch = divmod(unit, self.units_per_epoch)
            index, offset = divmod(unit_in_epoch, self.chunk_units)
            stop = min(self.chunk_units, self.units_per_epoch - index * self.chunk_units, offset + last - unit)
            spans.append((epoch, index, offset, stop))
            unit += stop - offset
        return spans


@functools.lru_cache(maxsize=2)
def _cached_order(plan, epoch):
    return plan.order(epoch)


def plan_run(manifest, config):
    """The plan of a training run over the latents of a manifest. Raises ValueError if they do not fill one step."""
    row_bytes = sum(int(np.prod(shape)) for shape in manifest.shapes.values()) * schema.DTYPE().itemsize
    chunk_units = max(1, CHUNK_BYTES // (row_bytes * config.unit_rows))
    files = manifest.files
    plan = Plan(
        [name for name, _ in files], [rows for _, rows in files], config.unit_rows, config.units_per_step,
        min(chunk_units, max(1, manifest.total("written") // config.unit_rows)), config.seed,
    )  # fmt: skip
    if plan.steps_per_epoch < 1:
        raise ValueError(
            f"global_batch_size={config.global_batch_size} is more than the {plan.num_rows} rows of {config.latents_uri}: "
            "make it smaller, or encode more data."
        )
    return plan


def stream(plan, first_step, num_steps, *, latents_uri, resolution, validation_share):
    """A Ray dataset with one block a unit, in the plan's order, from `first_step` to `num_steps`.

    Columns: id, caption, the latents of `resolution`, the embeddings, `keep` (False: masked out of the loss, because
    validation owns the row or it has no latents at this resolution) and `unit`, the unit's number in the run.
    Reads nothing before `first_step` but the head of the chunk that the step begins in.
    """
    spans = plan.units_from(first_step, num_steps)
    read = functools.partial(
        read_chunks, plan=ray.put(plan), spans=ray.put(spans), latents_uri=latents_uri, resolution=resolution,
        validation_share=validation_share,
    )  # fmt: skip
    # Eight chunks a task: a task costs some ten milliseconds, whatever it reads.
    num_tasks = max(1, min(len(spans), max(64, len(spans) // 8)))
    return (
        ray.data.range(len(spans), override_num_blocks=num_tasks)
        .map_batches(read, batch_size=1)
        .repartition(target_num_rows_per_block=plan.unit_rows)
    )


def read_chunks(batch, *, plan, spans, latents_uri, resolution, validation_share):
    """Read the chunk of each span and deal its rows to units; one Arrow table a span."""
    plan, spans = ray.get(plan), ray.get(spans)
    for index in batch["id"]:
        epoch, chunk, first, stop = spans[index]
        pieces, permutation = plan.chunk(epoch, chunk)
        columns = [schema.ID, schema.CAPTION, schema.latents_column(resolution), schema.EMBEDDINGS]
        rows = read_pieces(pieces, columns, latents_uri)
        rows = rows.take(permutation[first * plan.unit_rows : stop * plan.unit_rows])
        keep = rows[schema.latents_column(resolution)].is_valid().to_numpy()
        keep &= ~schema.held_out(rows[schema.ID].to_pylist(), validation_share)
        unit = epoch * plan.units_per_epoch + chunk * plan.chunk_units + np.arange(first, stop)
        rows = rows.append_column(KEEP, pa.array(keep)).append_column(UNIT, pa.array(np.repeat(unit, plan.unit_rows)))
        yield rows


def read_pieces(pieces, columns, latents_uri):
    """The rows of `pieces` (see `Plan.chunk`), laid end to end, as one Arrow table; each file is opened once."""
    filesystem, folder = storage.open_filesystem(storage.join(latents_uri, "data"))
    tables = [None] * len(pieces)
    for name in dict.fromkeys(piece[0] for piece in pieces):
        with pq.ParquetFile(f"{folder}/{name}", filesystem=filesystem) as file:
            for position, (piece_name, group, first, num_rows) in enumerate(pieces):
                if piece_name == name:
                    tables[position] = file.read_row_group(group, columns=columns).slice(first, num_rows)
    return pa.concat_tables(tables).combine_chunks()


def validation_rows(manifest, config, num_rows):
    """The first `num_rows` held-out rows that have latents, in the order of the files, as an Arrow table."""
    columns = [schema.ID, schema.CAPTION, schema.latents_column(config.resolution), schema.EMBEDDINGS]
    found, missing = [], num_rows
    for name, row_groups in manifest.files:
        for group in range(len(row_groups)):
            ids = read_pieces([(name, group, 0, row_groups[group])], [schema.ID], config.latents_uri)
            mine = schema.held_out(ids[schema.ID].to_pylist(), config.validation_share)
            if mine.any():
                rows = read_pieces([(name, group, 0, row_groups[group])], columns, config.latents_uri).filter(pa.array(mine))
                found.append(rows.filter(rows[columns[2]].is_valid())[:missing])
                missing -= found[-1].num_rows
            if missing <= 0:
                return pa.concat_tables(found)
    return pa.concat_tables(found) if found else None


def execution_options():
    """Options that keep units in order, for Ray Train's `DataConfig(execution_options=...)`, which would reset them."""
    options = ray.data.ExecutionOptions()
    options.preserve_order = True
    return options
