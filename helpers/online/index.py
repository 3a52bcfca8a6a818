"""An index of raw files: which rows an online run trains on, which it holds out, and where they are.

It is built once, from a few columns only: the id, the captions, those in `row_filter` and, if given, the images'
width and height. Nothing else is read, except that an object store sends tars whole. Without width and height, every
image is assumed to reach all sizes.

Each raw file gets a small Parquet file under `{index}/{key}/`. It lists the rows that are used, sorted by bucket
(`manifest.Manifest`) and position, and split into row groups: those of a Parquet file, or 64 consecutive rows in other
formats. The epoch plan shuffles these row groups. The key is a hash of the input files and of all parameters that
affect the index, then "-" and a checksum of the times at which the files were written.

Later, an image is decoded only if its row is used. The other images of its Parquet row group are read too, because a
row group can only be read whole.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import tarfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from .. import cluster, storage
from ..latents import schema
from ..latents.parquet import read_parquet, write_table
from ..latents.plan import RowRange
from ..raw import filters, images, inputs, readers
from ..raw.readers import GROUP, ROW
from .config import OnlineConfig

REPORT = "index.json"  # written last: an index that has it is complete
ID_CRC32 = "id_crc32"  # column of an index: a checksum of the row's id
REJECTS = "rejects"  # suffix of the folder that lists unusable rows with their reasons
MOST_TASKS = 2_000
ReadGroup = Callable[[str, int, tuple[str, ...], tuple[str, ...]], pa.Table]  # see `read_row_group`


def build_index(
    index_uri: str, paths: list[str], listing: dict[str, int], config: OnlineConfig, validation_share: float
) -> tuple[str, list[dict]]:
    """`(key, one report per file)` of the index. It is built unless it exists: by a Ray Data job, or here without Ray.

    A killed job resumes with the missing files. A report has the file's "name"; its rows "read", "filtered" and, by
    reason, "rejected"; the rows of its "largest" Parquet row group; a checksum of its ids and captions ("rows_crc32");
    the rows of each of its "row_groups" in the index; and for each bucket, in order, the number of row groups
    ("buckets") and of rows ("rows").
    """
    made_of = {**config.fixed("rows"), "validation_share": validation_share}
    made_of |= {"listing": sorted(listing.items()), "version": 1}
    written = inputs.checksum(inputs.modified(listing, config))
    key = f"{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]}-{written:08x}"
    uri = storage.join(index_uri, key)
    with contextlib.suppress(FileNotFoundError, storage.DamagedFile):  # made again from the files of the index
        return key, storage.read_json(storage.join(uri, REPORT), shape=[dict])
    limits = dict.fromkeys(paths, -1)
    if config.limit is not None:
        limits = {path: taken or 0 for path, taken, _ in inputs.rows_to_read(paths, config)}
    files = [{"path": path, "limit": limit} for path, limit in limits.items()]
    index_row = functools.partial(as_row, config=config, validation_share=validation_share, uri=uri)
    if ray.is_initialized():
        tasks = ray.data.from_items(files, override_num_blocks=min(len(files), MOST_TASKS))
        with cluster.one_line_error("The same command resumes the index of the raw data, which failed"):
            done = tasks.map(index_row, **inputs.RETRIES).take_all()
    else:
        done = map(index_row, files)
    reports = {row["path"]: json.loads(row["report"]) for row in done}
    reports = [reports[path] for path in limits]  # tasks end in any order
    storage.write_json(storage.join(uri, REPORT), reports, indent=None)
    return key, reports


def as_row(file: dict[str, Any], **options: Any) -> dict[str, str]:
    """`index_file` as a function of Ray Data's rows."""
    return {"path": file["path"], "report": json.dumps(index_file(**file, **options))}


def index_file(path: str, limit: int, *, config: OnlineConfig, validation_share: float, uri: str) -> dict:
    """A file's report; its index is written unless it exists. `limit`: rows to take from the file, -1 for all."""
    name = inputs.name_of(path, config)
    target = index_uri_of(uri, name)
    if storage.exists(target):
        return read_report(read_index(target))
    reader, filtered = inputs.reader(config), filters.filter_columns(config.row_filter)
    columns = inputs.stored([config.id_column, *inputs.caption_names(config), *filtered, *inputs.size_columns(config)])
    report = {"name": name, "read": 0, "filtered": 0, "rejected": {}, "largest": 0}
    used, rejects = [], []
    try:
        if GROUP in reader.location:
            report["largest"] = max(reader.row_groups(path), default=0)
        located = reader.stream(path, [*columns, *reader.location])
        tables = itertools.chain([next(located, None)], located)  # the first rows tell whether a file can be read
    except readers.Unreadable:
        report["unreadable"], tables = True, []
    for rows in filter(None, tables):
        rows = inputs.with_path(rows, path, report["read"])
        if limit >= 0:
            rows = rows[: limit - report["read"]]
        kept = filters.kept_rows(rows, config.row_filter)
        report["read"] += len(rows)
        report["filtered"] += int(np.count_nonzero(~kept))
        rows = rows.filter(pa.array(kept))
        buckets, reasons, ids, captions = assess(rows, config, validation_share)
        texts = json.dumps([ids.to_pylist(), captions], default=str)
        report["rows_crc32"] = zlib.crc32(texts.encode(), report.get("rows_crc32", 0))
        is_good = pc.equal(reasons, "")
        sources = inputs.source_names(rows[inputs.PATH], config)
        found = pa.table([ids, reasons, sources], [schema.ID, schema.REASON, schema.SOURCE])
        rejects.append(found.filter(pc.invert(is_good)))
        rows = rows.drop_columns([*columns, inputs.PATH])
        rows = rows.append_column("bucket", buckets).append_column(ID_CRC32, id_checksums(ids))
        used.append(rows.filter(is_good))
        if report["read"] == limit:
            break
    if rejects and (found := pa.concat_tables(rejects)):
        report["rejected"] = dict(sorted(collections.Counter(found[schema.REASON].to_pylist()).items()))
        write_table(index_uri_of(f"{uri}-{REJECTS}", name), found)
    none = pa.table({"bucket": pa.array([], pa.string())})
    table, groups = sort_by_bucket(pa.concat_tables(used or [none]))
    report |= groups
    write_table(target, table.replace_schema_metadata({"report": json.dumps(report)}))
    return report


def index_uri_of(uri: str, name: str) -> str:
    """Where the index of a raw file lies. `name`: its path below the input's folder."""
    return storage.join(uri, f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.parquet")


read_index = functools.lru_cache(maxsize=32)(read_parquet)


def read_report(index: pa.Table) -> dict:
    return json.loads(index.schema.metadata[b"report"])


def assess(rows: pa.Table, config: OnlineConfig, validation_share: float) -> tuple[pa.Array, pa.Array, pa.Array, list]:
    """`(bucket, why the row cannot be used or "", id, captions)` of each row, from its columns alone."""
    ids, captions = inputs.ids_of(rows, config), inputs.captions_of(rows, config)
    held_out_B = schema.held_out_mask(ids.to_pylist(), validation_share)
    names = inputs.size_columns(config)
    sizes = zip(*(rows[name].to_pylist() for name in names), strict=True) if names else [None] * len(rows)
    buckets, reasons = [], []
    for (caption, *_), size, is_held_out in zip(captions, sizes, held_out_B, strict=True):
        columns, reason = columns_of(size, config)
        buckets.append(schema.bucket_name(columns, is_held_out))
        reasons.append(inputs.caption_reason(caption) or reason)
    return pa.array(buckets, pa.string()), pa.array(reasons, pa.string()), ids, captions


def id_checksums(ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    return pa.array([zlib.crc32(row_id.encode()) for row_id in ids.to_pylist()], pa.uint32())


def columns_of(size: tuple | None, config: OnlineConfig) -> tuple[list[str], str]:
    """`(latents columns that an image of this size reaches, why there are none)`. `size`: None if it is unknown."""
    if size is None:
        return [schema.latents_column(resolution) for resolution in config.resolutions], ""
    if not all(side is not None and side > 0 for side in size):  # null, NaN
        return [], "no width or height"
    if size[0] * size[1] > images.MAX_PIXELS:
        return [], "too many pixels"
    shapes, reason = images.reached_shapes(size, config.shapes)
    return [schema.latents_column(*shape) for shape in shapes], reason


def sort_by_bucket(table: pa.Table) -> tuple[pa.Table, dict]:
    """The rows' positions in their file, sorted by `bucket`; and the report's entries about their row groups.

    A new row group begins with each bucket, and where the row group of the Parquet file changes or, in other formats,
    after 64 rows.
    """
    names, codes = np.unique(table["bucket"].to_numpy().astype(str), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    table, codes = table.drop_columns("bucket").take(order), codes[order]
    num_rows = np.bincount(codes, minlength=len(names))
    if GROUP in table.column_names:
        groups = table[GROUP].to_numpy()
    else:
        groups = np.concatenate([codes[:0], *(np.arange(count) // schema.ROWS_PER_ROW_GROUP for count in num_rows)])
    begins = np.flatnonzero(np.diff(codes, prepend=-1) | np.diff(groups, prepend=-1))
    num_groups = np.bincount(codes[begins], minlength=len(names))
    return table, {
        "row_groups": np.diff(begins, append=len(table)).tolist(),
        "buckets": dict(zip(names.tolist(), num_groups.tolist(), strict=True)),
        "rows": dict(zip(names.tolist(), num_rows.tolist(), strict=True)),
    }


def read_indexed_rows(
    ranges: list[RowRange],
    config: OnlineConfig,
    index_uri: str,
    read_group: ReadGroup | None = None,
) -> pa.Table:
    """The raw rows (`inputs.to_raw_rows`) of `ranges`, in their order.

    A range's file is one of the index, `{key}/{name}`. `read_group`: reads a Parquet row group in place of the reader.
    Raises ValueError that names a file whose rows are not those of the index.
    """
    columns = inputs.stored([config.id_column, *inputs.caption_names(config), config.image_column])
    names = tuple(columns), tuple(set(inputs.caption_names(config)) - {config.id_column, config.image_column})
    folder, tables = inputs.base_folder(config.data_uri), [None] * len(ranges)
    for file_name in dict.fromkeys(one.file_name for one in ranges):
        key, _, name = file_name.partition("/")
        path, index = f"{folder}/{name}", read_index(index_uri_of(storage.join(index_uri, key), name))
        first_rows = np.cumsum([0, *read_report(index)["row_groups"]]).tolist()
        positions = [position for position, one in enumerate(ranges) if one.file_name == file_name]
        pieces = [
            index.slice(first_rows[one.row_group] + one.first_row, one.num_rows)
            for one in (ranges[position] for position in positions)
        ]
        if read_group:
            found = (rows_of(read_group(path, piece[GROUP][0].as_py(), *names), piece) for piece in pieces)
        else:
            found = inputs.reader(config).read_rows(path, pieces, columns)
        try:
            for position, piece, rows in zip(positions, pieces, found, strict=True):
                rows = inputs.with_path(rows, path)
                if inputs.ROW_NUMBER in piece.column_names:
                    rows = rows.drop_columns(inputs.ROW_NUMBER)
                    rows = rows.append_column(inputs.ROW_NUMBER, piece[inputs.ROW_NUMBER])
                tables[position] = inputs.to_raw_rows(rows, config)
                check_ids(tables[position], piece)
        except (pa.ArrowInvalid, IndexError, tarfile.TarError) as error:
            remedy = "put back the file that was indexed, or give another storage"
            raise ValueError(f"{path} has other rows than when it was indexed: {remedy}.") from error
    return pa.concat_tables(tables).combine_chunks()


def check_ids(rows: pa.Table, piece: pa.Table) -> None:
    """Raises ArrowInvalid if rows are not those that a piece of the index lists; an earlier index has no checksums."""
    if ID_CRC32 in piece.column_names and not id_checksums(rows[inputs.ID]).equals(schema.one_array(piece[ID_CRC32])):
        raise pa.ArrowInvalid("ids differ")


def read_row_group(path: str, group: int, columns: tuple[str, ...], captions: tuple[str, ...]) -> pa.Table:
    """Columns of a row group of a Parquet file, some rows at a time; `captions` as lists of short texts."""
    tables = []
    for table in readers.Parquet().stream(path, columns, [group]):
        for name in captions:
            short = pa.array(inputs.text_lists(table[name]), pa.list_(pa.string()))
            table = table.set_column(table.column_names.index(name), name, short)
        tables.append(table)
    return pa.concat_tables(tables)


def rows_of(table: pa.Table, piece: pa.Table) -> pa.Table:
    """The rows of a row group that `piece` locates, in rising order.

    `take` would join a column's chunks, whose offsets have only 32 bits.
    """
    rows = piece[ROW].to_numpy()
    first, is_listed = int(rows[0]), np.zeros(rows[-1] + 1 - rows[0], dtype=bool)
    is_listed[rows - first] = True
    return table.slice(first, len(is_listed)).filter(pa.array(is_listed))


class RowGroups:
    """An actor that reads Parquet row groups and keeps the `most` recent ones in Ray's object store.

    Tasks that read consecutive chunks of an epoch ask for the same row groups. Each is then read once.
    """

    def __init__(self, most: int, read: ReadGroup):
        # A read is a task of its own, on any node: no bytes pass through the actor.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "retry_exceptions": [OSError]}
        self.read = functools.lru_cache(most)(ray.remote(**options)(read).remote)

    def get(self, *group: Any) -> list[ray.ObjectRef]:
        """The rows' reference, in a list, because Ray would send the rows otherwise. `group`: see `ReadGroup`."""
        return [self.read(*group)]


def keep_row_groups(most: int, read: ReadGroup = read_row_group) -> ReadGroup:
    """A function that reads row groups through a `RowGroups` actor; the actor lives as long as the function."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RowGroups).remote(most, read)
    return functools.partial(_read_kept, actor)


def _read_kept(actor: Any, *group: Any) -> pa.Table:
    return ray.get(ray.get(actor.get.remote(*group))[0])
