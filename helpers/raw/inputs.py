"""The raw data in any format: its files, how Ray Data reads them, and the one schema of a raw row.

Readers return a file's own columns, to which `row_filter` applies. `to_raw_rows` turns them into raw rows; later stages
do not depend on files, formats or column names.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from .. import storage
from ..config import PreprocessingConfig
from ..latents import schema
from ..production.readers.detect import base_folder, is_bytes, is_text, list_inputs, settled
from . import filters, readers
from .images import BadImage
from .readers import PATH, PLACE, texts

ID, CAPTION, IMAGE, ERROR, SOURCE = "id", "caption", "image", "error", "source"  # columns of a raw row
FIRST_ROW, GROUPS = "first_row", "groups"  # of a task that reads a part of a file
C_LIBRARY = ctypes.CDLL(None)
RETRIES = {"max_retries": 3}  # of tasks that read; Ray Data repeats what killed its process without end
ROWS_PER_CONVERSION = 256  # pictures given as paths are fetched this many at a time


# ---- files


def name_of(path: str, config: PreprocessingConfig) -> str:
    """An input file's path below the input's folder; the name of a file that lies elsewhere."""
    folder = base_folder(config.data_uri).rstrip("/") + "/"
    return path.removeprefix(folder) if path.startswith(folder) else storage.name(path)


def count_rows(paths: list[str], config: PreprocessingConfig) -> list[int | None]:
    """The rows of each file, counted in parallel: by threads, or by Ray if whole files must be read.

    None for a file that cannot be read.
    """
    if config.input_format == "webdataset" and ray.is_initialized():
        task = ray.remote(num_cpus=0.5)(count_rows_of)
        try:
            return ray.get([task.remote(path, config) for path in paths])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # without the task's traceback
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(functools.partial(count_rows_of, config=config), paths))


def count_rows_of(path: str, config: PreprocessingConfig) -> int | None:
    with contextlib.suppress(readers.Unreadable):
        return sum(reader(config).row_groups(path))


def rows_to_read(paths: list[str], config: PreprocessingConfig) -> Iterator[tuple[str, int | None, bool]]:
    """Yield `(path, rows to read of the file, whether it has more)`, up to `config.limit` rows in all.

    The rows of a file that cannot be read are None.
    """
    left = math.inf if config.limit is None else config.limit
    for start in range(0, len(paths), 256):  # files are counted in groups, so that a limit stops early
        group = paths[start : start + 256]
        for path, num_rows in zip(group, count_rows(group, config), strict=True):
            if num_rows is None:
                yield path, None, False
                continue
            taken = min(num_rows, left)
            yield path, taken, taken < num_rows
            left -= taken
            if left == 0:
                return


# ---- columns as the files have them


def reader(config: PreprocessingConfig) -> readers.Reader:
    """The reader of `config.input_format`, with the types of the used columns."""
    config = settled(config)
    make, by_line = readers.READERS[config.input_format], config.max_captions > 1
    found = make(column_types(config), config.caption_columns, by_line)
    found.is_found = config.image_column_is_found
    return found


def used_columns(config: PreprocessingConfig) -> list[str]:
    """The columns that a job reads: id, caption, picture, and those of the filter."""
    config = settled(config)
    filtered = filters.filter_columns(config.row_filter)
    return stored([config.id_column, *config.caption_columns, config.image_column, *filtered])


def stored(columns: Iterable[str]) -> list[str]:
    """The columns that files have, each once."""
    return [name for name in dict.fromkeys(columns) if name != PLACE]


def size_columns(config: PreprocessingConfig) -> list[str]:
    """The columns of the pictures' width and height; [] if they are not given, which only online runs may."""
    return [name for name in (getattr(config, "width_column", None), getattr(config, "height_column", None)) if name]


def column_types(config: PreprocessingConfig) -> dict[str, pa.DataType]:
    """Arrow types of the used columns, for formats without types.

    Ids are text, captions text or lists of text. A filter's columns have the type that they are compared with.
    """
    types = filters.filter_types(config.row_filter)
    types |= dict.fromkeys(size_columns(config), pa.float64())
    in_tar = config.input_format == "webdataset" and readers.names_picture(config.image_column)
    types[config.image_column] = pa.binary() if in_tar else pa.string()
    for name in config.caption_columns:  # text if a filter compares it
        types[name] = pa.string() if name in types and config.max_captions == 1 else pa.list_(pa.string())
    return types | dict.fromkeys(stored([config.id_column]), pa.string())


def first_rows(config: PreprocessingConfig, num_rows: int) -> pa.Table:
    """The first rows as the files store them, with `path`, to look at before any pipeline is built."""
    config = settled(config)
    paths, tables = list_inputs(config.data_uri, config.input_format), []

    def readable() -> Iterator[pa.Table]:
        for path in paths:
            with contextlib.suppress(*[readers.Unreadable] * (len(paths) > 1)):
                yield from stream_file(path, used_columns(config), reader(config))

    for table in readable():
        tables.append(table[:num_rows])
        num_rows -= len(tables[-1])
        if num_rows == 0:
            break
    if not tables:
        raise ValueError(f"The input holds no rows ({config.data_uri}): give other data.")
    return as_shown(join_alike(tables))


def as_shown(table: pa.Table) -> pa.Table:
    """The table with columns of text as bytes if some are not UTF-8, because such text cannot be shown."""
    for number, (field, column) in enumerate(zip(table.schema, table.columns, strict=True)):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            column = column.cast(pa.list_(pa.binary()) if is_list(field.type) else pa.binary())
            table = table.set_column(number, field.name, column)
    return table


def join_alike(tables: list[pa.Table]) -> pa.Table:
    """Rows of several files to look at; those of the first file's types, if the files' types cannot be joined."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.concat_tables([table for table in tables if table.schema == tables[0].schema])


def read_row_group(path: str, group: int, columns: tuple[str, ...], captions: tuple[str, ...]) -> pa.Table:
    """Columns of a row group of a Parquet file, some rows at a time; `captions` as lists of short texts."""
    tables = []
    for table in readers.Parquet().stream(path, list(columns), [group]):
        for name in captions:
            short = pa.array(text_lists(table[name]), pa.list_(pa.string()))
            table = table.set_column(table.column_names.index(name), name, short)
        tables.append(table)
    return pa.concat_tables(tables)


def with_path(table: pa.Table, path: str, first_row: int = 0) -> pa.Table:
    """A table of one file's rows with the columns `PATH` and `PLACE`, where the reader has not added them."""
    if PATH in table.column_names:
        return table
    places = pa.array(np.arange(first_row, first_row + len(table)))
    return table.append_column(PATH, pa.repeat(path, len(table))).append_column(PLACE, places)


# ---- Ray Data


def read_rows(segment: Any, config: PreprocessingConfig) -> ray.data.Dataset:
    """A lazy Ray dataset of the raw rows (`to_raw_rows`) of an `encode.job.Segment` that `row_filter` keeps."""
    config = settled(config)
    rows = read_columns(segment.paths, used_columns(config), config)
    if segment.limit is not None:
        rows = rows.limit(segment.limit)
    expression = filters.parse_filter(config.row_filter)
    if expression is not None:
        rows = rows.filter(expr=expression, **RETRIES)
    typed = reader(config)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        ids = id_type_of(*pool.map(typed.schema, segment.paths if typed.typed else []), config=config)
    convert = functools.partial(convert_block, config=config, id_type=ids)
    # Whole blocks, because Ray Data does not fuse a map with another batch size into the read.
    return rows.map_batches(convert, batch_size=None, batch_format="pyarrow", **RETRIES)


def read_columns(paths: list[str], columns: list[str], config: PreprocessingConfig) -> ray.data.Dataset:
    """A dataset of columns of files, with `path`. A task reads a file, or some row groups of it (`readers.PART_ROWS`).

    `ray.data.read_parquet` sizes what it reads at a time by the footer, in which a row group with long captions may
    look small.
    """
    one = reader(config)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        parts = [
            {PATH: path, FIRST_ROW: first_row, GROUPS: groups}
            for path, of in zip(paths, pool.map(one.parts, paths), strict=True)
            for first_row, groups in of
        ]
    read = functools.partial(read_part, columns=columns, reader=one)
    tasks = ray.data.from_items(parts, override_num_blocks=len(parts))
    return tasks.map_batches(read, batch_size=1, batch_format="pyarrow", **RETRIES)


def read_part(part: pa.Table, *, columns: list[str], reader: readers.Reader) -> Iterator[pa.Table]:
    """`stream_file` of a file's part, which is a row of `PATH`, `FIRST_ROW` and `GROUPS`."""
    (one,) = part.to_pylist()
    yield from stream_file(one[PATH], columns, reader, one[FIRST_ROW], one[GROUPS])


def stream_file(
    path: str, columns: list[str], reader: readers.Reader, first_row: int = 0, groups: list[int] | None = None
) -> Iterator[pa.Table]:
    """Columns of the rows of a file, or of some row groups, with `PATH` and `PLACE`; some rows at a time."""
    for table in reader.stream(path, columns, groups):
        yield with_path(table, path, first_row)
        first_row += len(table)


# ---- raw rows


def convert_block(
    block: pa.Table, *, config: PreprocessingConfig, id_type: pa.DataType | None = None
) -> Iterator[pa.Table]:
    """`to_raw_rows` of a block, some rows at a time, because pictures given as paths may be too many to hold."""
    for start in range(0, len(block), ROWS_PER_CONVERSION):
        yield to_raw_rows(block.slice(start, ROWS_PER_CONVERSION), config, id_type)
    release_memory()


def release_memory() -> None:
    """Return what Arrow's pool and the C library cache to the system, because Ray keeps the process for other tasks."""
    pa.default_memory_pool().release_unused()
    if hasattr(C_LIBRARY, "malloc_trim"):  # glibc's
        C_LIBRARY.malloc_trim(0)


def to_raw_rows(table: pa.Table, config: PreprocessingConfig, id_type: pa.DataType | None = None) -> pa.Table:
    """Rows as a reader returns them -> raw rows. Pictures given as paths are fetched here.

    Columns:
        id: int64 or text, as `id_type` says, or as the column's own type (`ids_of`)
        caption: text, or why it cannot be used (`text_reason`); with several captions a row, caption_2 and so on too
        image: encoded bytes, or null
        error: why a picture could not be fetched, or null
        source: the file's path below the input's folder
    """
    config = settled(config)
    images, errors = picture_bytes(table, config)
    ids = ids_of(table, config)
    columns = {ID: ids.cast(id_type or ids.type), IMAGE: images, ERROR: errors}
    columns[SOURCE] = source_names(table[PATH], config)
    for number, captions in enumerate(zip(*captions_of(table, config), strict=True), start=1):
        columns[schema.numbered(CAPTION, number)] = pa.array(captions, pa.string())
    return pa.table(columns)


def captions_of(table: pa.Table, config: PreprocessingConfig) -> list[list[str | None]]:
    """The captions of each row, `config.num_captions` for all: a row that has fewer repeats its own.

    They are in the order of `caption_columns`, or of a column of lists, without those that `text_reason` names. A row
    that has no other has those.
    """
    columns = [text_lists(table[name]) for name in config.caption_columns]
    rows = [list(itertools.chain.from_iterable(row)) for row in zip(*columns, strict=True)]
    usable = ([caption for caption in row if not text_reason(0, caption)] or row or [None] for row in rows)
    return [list(itertools.islice(itertools.cycle(row), config.num_captions)) for row in usable]


def picture_bytes(table: pa.Table, config: PreprocessingConfig) -> tuple[pa.ChunkedArray | pa.Array, pa.Array]:
    """`(bytes, errors)` of the image column, which holds bytes, Hugging Face's {"bytes", "path"} structs, or paths.

    If a struct has no bytes, its path is read.
    Paths are relative to the input's folder or, in image folders and a metadata.parquet, to the row's table's folder.
    """
    column, names = picture_fields(table[config.image_column])
    if not is_text(column.type):
        column = column.cast(pa.large_binary())
        if not is_text(names.type) or column.null_count == 0:
            is_several = pc.equal(column, pa.scalar(readers.SEVERAL, column.type))
            return column, pc.if_else(is_several, readers.SEVERAL[1:].decode(), pa.scalar(None, pa.string()))
    base = base_folder(config.data_uri)

    def folder_of(path: str) -> str:  # `datasets` takes a metadata.parquet too
        is_beside = config.input_format == "imagefolder" or storage.name(path) == "metadata.parquet"
        return path.rpartition("/")[0] if is_beside else base

    folders = list(map(folder_of, table[PATH].to_pylist()))
    if is_text(column.type):
        pictures = readers.read_pictures(texts(column), folders, base)
    else:
        missing = np.flatnonzero(pc.and_(column.is_null(), names.is_valid()).to_numpy(zero_copy_only=False)).tolist()
        wanted = texts(names.take(missing)), [folders[row] for row in missing], base
        pictures = column.to_pylist()
        for row, picture in zip(missing, readers.read_pictures(*wanted), strict=True):
            pictures[row] = picture
    images = [None if isinstance(picture, BadImage) else picture for picture in pictures]
    errors = [str(picture) if isinstance(picture, BadImage) else None for picture in pictures]
    return pa.array(images, pa.large_binary()), pa.array(errors, pa.string())


def picture_fields(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """`(bytes or paths, paths if it has them)` of an image column."""
    if not pa.types.is_struct(column.type):
        return column, column
    names = [name for name in ("bytes", "path") if column.type.get_field_index(name) >= 0]
    return pc.struct_field(column, names[0]), pc.struct_field(column, names[-1])


def source_names(paths: pa.ChunkedArray, config: PreprocessingConfig) -> pa.Array:
    """The path of each row's file, relative to the input's folder."""
    short = {path: name_of(path, config) for path in paths.unique().to_pylist()}
    return pa.array([short[path] for path in paths.to_pylist()], pa.string())


def text_reason(row_id: int | str | None, caption: str | None) -> str:
    """Why a row without an id or a usable caption cannot be used; empty if it has both."""
    if row_id is None or row_id == "":
        return "no id"
    if caption is None:
        return "no caption"
    if caption in (readers.NOT_UTF8, readers.NOT_TEXT):
        return caption[1:]
    if len(caption) > readers.MAX_CAPTION_BYTES // 4 and len(caption.encode()) > readers.MAX_CAPTION_BYTES:
        return f"caption of more than {readers.MAX_CAPTION_BYTES} bytes"
    return "" if caption.strip() else "empty caption"


def text_lists(column: pa.ChunkedArray | pa.Array) -> list[list[str | None]]:
    """The captions of each row of a column of lists (`readers.as_caption`); of a column of text, lists of one."""
    if is_list(column.type):
        rows = (row.as_py() or [] for row in column.cast(pa.large_list(pa.large_binary())))
    else:
        rows = ([value.as_py()] for value in column.cast(pa.large_binary()))  # one by one: each may be large
    return [[readers.as_caption(value) for value in row] for row in rows]


def ids_of(table: pa.Table, config: PreprocessingConfig) -> pa.ChunkedArray | pa.Array:
    """Ids by their column; else "{file}:{place}" by `PATH` and `PLACE`, and "{file}" of a picture with side-cars."""
    if config.id_column != PLACE:
        return row_ids(table[config.id_column])
    names, places = source_names(table[PATH], config), table[PLACE].cast(pa.string())
    return pc.coalesce(pc.binary_join_element_wise(names, places, ":"), names)


def row_ids(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Ids in the type that they are stored in. Bytes that are no printable text, such as hashes, become hex digits."""
    if not (is_text(column.type) or is_bytes(column.type)):
        return column.cast(id_type(column.type))

    def is_readable(text: str | None) -> bool:
        return text is not None and (is_text(column.type) or text.isprintable())

    pairs = zip(column.cast(pa.large_binary()).to_pylist(), texts(column), strict=True)
    return pa.array([value.hex() if value and not is_readable(text) else text for value, text in pairs], pa.string())


def id_type(*column_types: pa.DataType) -> pa.DataType:
    """The type that ids are stored in: int64 if all are integers, else text. uint64 does not fit: text too."""
    fit = [pa.types.is_integer(kind) and kind != pa.uint64() for kind in column_types]
    return pa.int64() if fit and all(fit) else pa.string()


def id_type_of(*files: pa.Schema, config: PreprocessingConfig) -> pa.DataType:
    """`id_type` by the columns of some files."""
    return id_type(*(columns.field(name).type for columns in files for name in stored([config.id_column])))


def is_list(column_type: pa.DataType) -> bool:
    return pa.types.is_list(column_type) or pa.types.is_large_list(column_type)
