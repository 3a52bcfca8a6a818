"""An index of raw files: which rows an online run trains on, which it holds out, and where they are.

It is built once, from a few columns only: the id, the caption, those in `row_filter` and, if given, the pictures' width
and height. Nothing else is read, except that an object store sends tars whole. Without width and height, every picture
is assumed to reach all sizes.

Each raw file gets a small Parquet file under `{index}/{key}/`. It lists the rows that are used, sorted by bucket
(`manifest.Manifest`) and position and split into row groups: those of a Parquet file, or 64 consecutive rows in other
formats. These are the epoch plan's row groups. The key is a hash of the input files and of all parameters that affect
the index. Later, a picture is read only if its row is used; since Parquet row groups can only be read whole, their
other pictures are read too, but not decoded.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from .. import storage
from ..latents import schema
from ..latents.parquet import read_parquet, write_table
from . import filters, images, inputs, readers
from .readers import GROUP, rows_of

REPORT = "index.json"  # written last: an index that has it is complete
REJECTS = "rejects"  # suffix of the folder that lists unusable rows with their reasons
MOST_TASKS = 2_000
ReadGroup = Callable[[str, int, tuple[str, ...]], pa.Table]  # path, row group, columns


def make(
    index_uri: str, paths: list[str], listing: dict[str, int], config, validation_share: float
) -> tuple[str, list[dict]]:
    """Build an index unless it exists, by a Ray Data job or, without Ray, in this process; returns `(key, reports)`.

    A killed job resumes with the missing files. Each report is of one file: its "name", the rows "read", "filtered" and
    (by reason) "rejected", the rows of its "largest" Parquet row group and of each of its "row_groups" in the index,
    and for each of its "buckets", in order, the number of these row groups and of "rows".
    """
    made_of = {**config.fixed("rows"), "validation_share": validation_share}
    made_of |= {"listing": sorted(listing.items()), "version": 1}
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
    uri = storage.join(index_uri, key)
    if storage.exists(storage.join(uri, REPORT)):
        return key, storage.read_json(storage.join(uri, REPORT))
    files = [{"path": path, "rows": rows} for path, rows in files_of(paths, config)]
    one = functools.partial(index_file, config=config, validation_share=validation_share, uri=uri)
    if ray.is_initialized():
        jobs = ray.data.from_items(files, override_num_blocks=min(len(files), MOST_TASKS))
        done = jobs.map_batches(functools.partial(index_files, one=one), batch_size=None).take_all()
        by_name = {report["name"]: report for report in (json.loads(row["report"]) for row in done)}
        reports = [by_name[name_of(file["path"], config)] for file in files]
    else:
        reports = [one(**file) for file in files]
    storage.write_text(storage.join(uri, REPORT), json.dumps(reports))
    return key, reports


def files_of(paths: list[str], config) -> Iterator[tuple[str, int]]:
    """Yield (path, rows to take from it, -1 for all), up to `limit` rows in all."""
    if config.limit is None:
        return ((path, -1) for path in paths)
    return ((path, taken) for path, taken, _ in inputs.rows_to_read(paths, config))


def name_of(path: str, config) -> str:
    return inputs.below(path, inputs.base_folder(config.data_uri))


def index_files(batch: dict, *, one: Callable[..., dict]) -> dict[str, list[str]]:
    """For `map_batches`: the reports of some files."""
    files = zip(batch["path"].tolist(), batch["rows"].tolist(), strict=True)
    return {"report": [json.dumps(one(path, rows)) for path, rows in files]}


def index_file(path: str, rows: int, *, config, validation_share: float, uri: str) -> dict:
    """Write a file's index unless it exists; returns its report. `rows`: to take from the file, -1 for all."""
    name = name_of(path, config)
    target = storage.join(uri, f"{name}.parquet")
    if storage.exists(target):
        return json.loads(_read(target).schema.metadata[b"report"])
    report, used, left_out, left = {"name": name, "read": 0, "filtered": 0, "rejected": {}}, [], [], rows
    report["largest"] = inputs.reader(config).largest_group(path)
    for table in inputs.reader(config).describe(path, deciding_columns(config)):
        table = table if rows < 0 else table[:left]
        left -= len(table)
        kept = filters.kept_rows(table, config.row_filter)
        report["read"] += len(table)
        report["filtered"] += int(np.count_nonzero(~kept))
        table = table.filter(pa.array(kept))
        buckets, reasons, ids = assess(table, config, validation_share)
        good = pc.equal(reasons, "")
        rejects = pa.table([ids, reasons, pa.repeat(name, len(ids))], [schema.ID, schema.REASON, schema.SOURCE])
        left_out.append(rejects.filter(pc.invert(good)))
        places = [column for column in table.column_names if column not in deciding_columns(config)]
        used.append(table.select(places).append_column("bucket", buckets).filter(good))
        if left == 0:
            break
    if left_out and (rejects := pa.concat_tables(left_out)):
        found, counts = np.unique(rejects[schema.REASON].to_numpy(), return_counts=True)
        report["rejected"] = dict(zip(found.tolist(), counts.tolist(), strict=True))
        write_table(storage.join(f"{uri}-{REJECTS}", f"{name}.parquet"), rejects)
    none = pa.table({"bucket": pa.array([], pa.string())})
    table, found = sort_by_bucket(pa.concat_tables(used or [none]))
    write_table(target, table.replace_schema_metadata({"report": json.dumps({**report, **found})}))
    return {**report, **found}


def deciding_columns(config) -> list[str]:
    """The columns that are read to decide whether a row is used."""
    filtered = filters.filter_columns(config.row_filter)
    return list(dict.fromkeys([config.id_column, *config.caption_columns, *filtered, *inputs.size_columns(config)]))


def assess(rows: pa.Table, config, validation_share: float) -> tuple[pa.Array, pa.Array, pa.Array]:
    """`(bucket, why a row cannot be used or "", id)` of each row, judged by its columns alone."""
    column = inputs.row_ids(rows[config.id_column])
    ids = column.to_pylist()
    captions = [of_row[0] for of_row in inputs.captions_of(rows, config)]
    held_out = schema.held_out_mask(ids, validation_share)
    names = inputs.size_columns(config)
    sizes = zip(*(rows[name].to_pylist() for name in names), strict=True) if names else [None] * len(rows)
    buckets, reasons = [], []
    for row_id, caption, size, held in zip(ids, captions, sizes, held_out, strict=True):
        columns, reason = columns_of(size, config)
        buckets.append(schema.bucket_name(columns, held))
        reasons.append(inputs.text_reason(row_id, caption) or reason)
    return pa.array(buckets, pa.string()), pa.array(reasons, pa.string()), column


def columns_of(size: tuple | None, config) -> tuple[list[str], str]:
    """`(latents columns that a picture of this size reaches, why there are none)`; None: the size is unknown."""
    if size is None:
        return [schema.latents_column(resolution) for resolution in config.resolutions], ""
    if not all(side is not None and side > 0 for side in size):  # null, NaN
        return [], "no width or height"
    if size[0] * size[1] > config.max_pixels:
        return [], "too many pixels"
    shapes, reason = images.reached_shapes(size, images.Sizing.of(config))
    return [schema.latents_column(*shape) for shape in shapes], reason


def sort_by_bucket(table: pa.Table) -> tuple[pa.Table, dict]:
    """The rows' positions, sorted by `bucket` and split into row groups, and the report's entries about these."""
    names, codes = np.unique(table["bucket"].to_numpy().astype(str), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    table, codes = table.drop_columns("bucket").take(order), codes[order]
    rows = np.bincount(codes, minlength=len(names))
    groups = table[GROUP].to_numpy() if GROUP in table.column_names else None
    if groups is None:  # any consecutive rows
        groups = np.concatenate([np.arange(count) // schema.ROWS_PER_ROW_GROUP for count in rows] or [codes])
    begins = np.flatnonzero(np.diff(codes, prepend=-1) | np.diff(groups, prepend=-1))
    counts = np.bincount(codes[begins], minlength=len(names))
    return table, {
        "row_groups": np.diff(begins, append=len(table)).tolist(),
        "buckets": dict(zip(names.tolist(), counts.tolist(), strict=True)),
        "rows": dict(zip(names.tolist(), rows.tolist(), strict=True)),
    }


_read = functools.lru_cache(maxsize=32)(read_parquet)


def read_indexed_rows(ranges: list[tuple], config, index_uri: str, read_group: ReadGroup | None = None) -> pa.Table:
    """The rows of `ranges` (`manifest.RowRange` of index files, `{key}/{name}`) as readers return them, plus `path`.

    Columns: id, caption, picture. `read_group`: reads Parquet row groups in place of the reader.
    """
    columns = list(dict.fromkeys([config.id_column, *config.caption_columns, config.image_column]))
    base, tables = inputs.base_folder(config.data_uri), [None] * len(ranges)
    for name in dict.fromkeys(rows[0] for rows in ranges):
        path, table = f"{base}/{name.partition('/')[2]}", _read(storage.join(index_uri, f"{name}.parquet"))
        ends = np.cumsum([0, *json.loads(table.schema.metadata[b"report"])["row_groups"]])
        mine = [place for place, rows in enumerate(ranges) if rows[0] == name]
        pieces = [
            table.slice(int(ends[rows.row_group]) + rows.first_row, rows.num_rows)
            for rows in map(ranges.__getitem__, mine)
        ]
        if read_group:
            found = (rows_of(read_group(path, piece[GROUP][0].as_py(), tuple(columns)), piece) for piece in pieces)
        else:
            found = inputs.reader(config).pick(path, pieces, columns)
        for place, rows in zip(mine, found, strict=True):
            tables[place] = inputs.with_path(rows, path)
    return pa.concat_tables(tables).combine_chunks()


class RowGroups:
    """Reads Parquet row groups, as an actor: keeps the `most` recent ones in Ray's object store.

    Tasks that read consecutive chunks of an epoch ask for the same row groups, each of which is then read once.
    """

    def __init__(self, most: int):
        # A read is a task of its own, on any node: no bytes pass through the actor.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "retry_exceptions": [OSError]}
        self.read = functools.lru_cache(most)(ray.remote(**options)(readers.read_row_group).remote)

    def get(self, *group: Any) -> list[ray.ObjectRef]:
        """The rows' reference, in a list, or Ray would send the rows. `group`: path, number, columns."""
        return [self.read(*group)]

    def reads(self) -> int:
        return self.read.cache_info().misses


def keep_row_groups(most: int) -> ReadGroup:
    """A function that reads row groups through a `RowGroups` actor, which lives as long as the function does."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RowGroups).remote(most)
    return functools.partial(_read_kept, actor)


def _read_kept(actor: Any, *group: Any) -> pa.Table:
    return ray.get(ray.get(actor.get.remote(*group))[0])
