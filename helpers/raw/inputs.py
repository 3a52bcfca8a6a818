"""The raw data in any format: its files, how Ray Data reads them, and the one schema of a raw row.

Readers return a file's own columns, to which `row_filter` applies. `to_raw_rows` turns them into raw rows; later stages
do not depend on files, formats or column names.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import math
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import ray

from .. import storage
from ..latents import schema
from ..latents.parquet import check_types, uuids_to_text
from . import filters, readers
from .images import BadImage

ID, CAPTION, IMAGE, ERROR, SOURCE = "id", "caption", "image", "error", "source"  # columns of a raw row
PATH = "path"  # added column: the file of each row
C_LIBRARY = ctypes.CDLL(None)
ROWS_PER_CONVERSION = 256  # pictures given as paths are fetched this many at a time


# ---- files


def list_inputs(input_uri: str, input_format: str = "parquet") -> list[str]:
    """Sorted paths of the files of one format: one file, those in a folder (recursively), or the matches of a glob.

    Raises FileNotFoundError if there are none.
    """
    kind = readers.READERS[input_format]
    if storage.is_file(input_uri):
        return [storage.resolve(input_uri)]
    if is_glob(input_uri):
        pattern, problem = glob_pattern(storage.resolve(input_uri)), "matches no file"
        paths = [path for path in storage.list_files(base_folder(input_uri), recursive=True) if pattern.fullmatch(path)]
    else:
        paths = storage.list_files(input_uri, kind.suffixes, recursive=True)
        problem = f"holds no {kind.what}" if storage.exists(input_uri) else "does not exist"
    if not paths:
        raise FileNotFoundError(
            f"input_uri={input_uri!r} {problem}: give a {kind.what}, a folder of them or a pattern such as "
            f"'{input_uri}/*{kind.suffixes[0]}'."
        )
    return paths


def is_glob(input_uri: str) -> bool:
    """Whether a path has wildcards (`*`, `?`, `[`), and is not the name of a file or folder."""
    has_wildcards = any(character in str(input_uri) for character in "*?[")
    return has_wildcards and ("://" in str(input_uri) or not storage.exists(input_uri))


def glob_pattern(path: str) -> re.Pattern:
    """A path with wildcards as a regular expression: `*` and `?` stay within a folder, `**/` crosses folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", path)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    is_set = re.compile(r"\[.*\]").fullmatch
    return re.compile(
        "".join(known.get(part) or (part.replace("[!", "[^") if is_set(part) else re.escape(part)) for part in parts)
    )


@functools.lru_cache(maxsize=16)
def base_folder(input_uri: str) -> str:
    """The folder that contains all files of the input: for a glob, the part before its wildcards."""
    uri = storage.resolve(input_uri)
    if is_glob(input_uri):
        return re.split(r"[*?[]", uri, maxsplit=1)[0].rpartition("/")[0]
    return uri.rpartition("/")[0] if storage.is_file(uri) else uri


def below(path: str, folder: str) -> str:
    """A path or URI relative to a folder that contains it."""
    return path[len(folder) + 1 :]


def listing(paths: list[str], input_uri: str) -> dict[str, int]:
    """{path below the input's folder: bytes} of all its files (for a glob, the matches), to detect changed input."""
    if is_glob(input_uri):
        folder = base_folder(input_uri)
        sizes = storage.sizes(folder)
        return {below(path, folder): sizes[below(path, folder)] for path in paths}
    return storage.sizes(input_uri)


def count_rows(paths: list[str], config) -> list[int]:
    """Rows of each file, in parallel: by threads here, or by Ray if whole files must be read."""
    if config.input_format == "webdataset" and ray.is_initialized():
        task = ray.remote(num_cpus=0.5)(count_rows_of)
        return ray.get([task.remote(path, config) for path in paths])
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(functools.partial(count_rows_of, config=config), paths))


def count_rows_of(path: str, config) -> int:
    return sum(reader(config).row_groups(path))


def rows_to_read(paths: list[str], config) -> Iterator[tuple[str, int, bool]]:
    """(path, rows to read of it, whether these are fewer than it has) of the files, up to `limit` rows in all."""
    left = math.inf if config.limit is None else config.limit
    for start in range(0, len(paths), 256):  # files are counted in groups, so that a limit stops early
        group = paths[start : start + 256]
        for path, num_rows in zip(group, count_rows(group, config), strict=True):
            taken = min(num_rows, left)
            yield path, taken, taken < num_rows
            left -= taken
            if left == 0:
                return


# ---- columns as the files have them


def reader(config):
    """The reader of `input_format`, with the types of the columns that are used."""
    return readers.READERS[config.input_format](column_types(config))


def used_columns(config) -> list[str]:
    """The columns that a job reads: id, caption, picture, and those of the filter."""
    filtered = filters.filter_columns(config.row_filter)
    return list(dict.fromkeys([config.id_column, *config.caption_columns, config.image_column, *filtered]))


def size_columns(config) -> list[str]:
    """The columns of the pictures' width and height, where they are given (online)."""
    return [name for name in (getattr(config, "width_column", None), getattr(config, "height_column", None)) if name]


def column_types(config) -> dict[str, pa.DataType]:
    """Arrow types of the used columns, for formats without types.

    Ids and captions are text, or lists of it; a filter's columns have the type that they are compared with.
    """
    types = filters.filter_types(config.row_filter)
    types |= dict.fromkeys(size_columns(config), pa.float64())
    types[config.image_column] = pa.binary() if config.image_column == "jpg" else pa.string()
    caption = pa.list_(pa.string()) if config.max_captions > 1 else pa.string()
    return {**types, **dict.fromkeys(config.caption_columns, caption), config.id_column: pa.string()}


def first_rows(config, num_rows: int) -> pa.Table:
    """The first rows as stored in the files, with `path`, for a look at the data before any pipeline is built."""
    paths, read = list_inputs(config.data_uri, config.input_format), reader(config)
    tables, left = [], num_rows
    for table in (with_path(table, path) for path in paths for table in read.stream(path, used_columns(config))):
        tables.append(table[:left])
        left -= len(tables[-1])
        if left == 0:
            break
    if not tables:
        raise ValueError(f"The input holds no rows ({config.data_uri}): give other data.")
    return pa.concat_tables(tables, promote_options="permissive")


def with_path(table: pa.Table, path: str) -> pa.Table:
    """A table of one file's rows with the column `path`."""
    return table.append_column(PATH, pa.repeat(path, len(table)))


# ---- Ray Data


def read_rows(segment, config) -> ray.data.Dataset:
    """The raw rows of one segment (see `to_raw_rows`) that `row_filter` keeps, as a lazy Ray dataset."""
    rows = read_columns(segment.paths, used_columns(config), config)
    if segment.limit is not None:
        rows = rows.limit(segment.limit)
    expression = filters.parse_filter(config.row_filter)
    if expression is not None:
        rows = rows.filter(expr=expression)
    # Whole blocks, because Ray Data does not fuse a map with another batch size into the read.
    return rows.map_batches(functools.partial(convert_block, config=config), batch_size=None, batch_format="pyarrow")


def read_columns(paths: list[str], columns: list[str], config) -> ray.data.Dataset:
    """Columns of files, with `path`. Ray Data pushes a filter on them down into the Parquet read (see `explain()`)."""
    if config.input_format == "parquet":
        filesystem = storage.open_filesystem(paths[0])[0]
        rows = ray.data.read_parquet(
            paths, include_paths=True, partitioning=None, file_extensions=None, filesystem=filesystem
        )
        return rows.select_columns([*columns, PATH])
    read = functools.partial(read_file_batch, columns=columns, read=reader(config))
    tasks = ray.data.from_items([{PATH: path} for path in paths], override_num_blocks=len(paths))
    return tasks.map_batches(read, batch_size=1)  # one task per file


def read_file_batch(batch: dict, *, columns: list[str], read):
    """Tables of the rows of a batch of files."""
    for path in batch[PATH].tolist():
        for table in read.stream(path, columns):
            yield with_path(table, path)


# ---- raw rows


def convert_block(block: pa.Table, *, config) -> Iterator[pa.Table]:
    """`to_raw_rows` of a block, some rows at a time: pictures given as paths may be too many to hold at once."""
    if len(block):  # Ray Data has opened the files itself
        check_types(block.schema, block[PATH][0].as_py())
    block = uuids_to_text(block)
    for start in range(0, len(block), ROWS_PER_CONVERSION):
        yield to_raw_rows(block.slice(start, ROWS_PER_CONVERSION), config)
    release_memory()


def release_memory() -> None:
    """Return memory cached by Arrow's pool and the C library to the system: Ray reuses the process for other tasks."""
    pa.default_memory_pool().release_unused()
    if hasattr(C_LIBRARY, "malloc_trim"):  # glibc's
        C_LIBRARY.malloc_trim(0)


def to_raw_rows(table: pa.Table, config) -> pa.Table:
    """Rows as a reader returns them -> raw rows; pictures given as paths are fetched here.

    Columns: `id` (int64 or text, see `id_type`), `caption` (null if it is not UTF-8), `image` (encoded bytes, or null),
    `error` (why a picture could not be fetched, or null), and `source` (the file's path relative to the input); with
    several captions a row, `caption_2` and so on.
    """
    images, errors = picture_bytes(table, config)
    columns = {ID: row_ids(table[config.id_column]), IMAGE: images, ERROR: errors}
    columns[SOURCE] = source_names(table[PATH], config)
    for number, captions in enumerate(zip(*captions_of(table, config), strict=True), start=1):
        columns[schema.numbered(CAPTION, number)] = pa.array(captions, pa.string())
    return pa.table(columns)


def captions_of(table: pa.Table, config) -> list[list[str | None]]:
    """The captions of each row, as many for all (`config.num_captions`): a row that has fewer repeats its own.

    They are those of `caption_columns`, or of a column of lists, in that order, without those that are empty or too
    long. A row without any has None, empty or shortened texts.
    """
    columns = [text_lists(table[name]) for name in config.caption_columns]
    rows = [list(itertools.chain.from_iterable(row)) for row in zip(*columns, strict=True)]
    usable = (
        [caption for caption in row if caption and caption.strip() and not is_too_long(caption)] or row or [None]
        for row in rows
    )
    return [list(itertools.islice(itertools.cycle(row), config.num_captions)) for row in usable]


def picture_bytes(table: pa.Table, config) -> tuple[pa.ChunkedArray | pa.Array, pa.Array]:
    """`(bytes, errors)` of the image column: it holds bytes, Hugging Face's {"bytes", "path"} structs, or paths.

    Paths are relative to the input's folder or, in image folders, to that of the row's table.
    """
    column = table[config.image_column]
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, "bytes")
    if not is_text(column.type):
        return column.cast(pa.large_binary()), pa.nulls(len(column), pa.string())
    base = base_folder(config.data_uri)
    beside_table = config.input_format == "imagefolder"
    folders = [path.rpartition("/")[0] if beside_table else base for path in table[PATH].to_pylist()]
    pictures = readers.read_pictures(texts(column), folders, base)
    images = [None if isinstance(picture, BadImage) else picture for picture in pictures]
    errors = [str(picture) if isinstance(picture, BadImage) else None for picture in pictures]
    return pa.array(images, pa.large_binary()), pa.array(errors, pa.string())


def source_names(paths: pa.ChunkedArray, config) -> pa.Array:
    """Input files' paths relative to the input's folder."""
    folder = storage.open_filesystem(base_folder(config.data_uri))[1].rstrip("/")
    short = {path: path.partition(folder)[2].lstrip("/") or storage.name(path) for path in paths.unique().to_pylist()}
    return pa.array([short[path] for path in paths.to_pylist()], pa.string())


def text_reason(row_id: int | str | None, caption: str | None) -> str:
    """Why a row without an id or a caption cannot be used; empty if it has both."""
    if row_id is None or row_id == "":
        return "no id"
    if caption is None:
        return "no caption"
    if is_too_long(caption):
        return f"caption of more than {readers.MAX_CAPTION_BYTES} bytes"
    return "" if caption.strip() else "empty caption"


def is_too_long(caption: str) -> bool:
    return len(caption) > readers.MAX_CAPTION_BYTES // 4 and len(caption.encode()) > readers.MAX_CAPTION_BYTES


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | None]:
    """A column of text, or of bytes that are text; None for invalid UTF-8, which Parquet readers let through."""
    return [readers.as_text(value) for value in column.cast(pa.large_binary()).to_pylist()]


def text_lists(column: pa.ChunkedArray | pa.Array) -> list[list[str | None]]:
    """The texts of each row of a column of lists, those of a column of text as lists of one; `readers.shorten`ed."""
    if is_list(column.type):
        rows = (row.as_py() or [] for row in column.cast(pa.large_list(pa.large_binary())))
    else:
        rows = ([value.as_py()] for value in column.cast(pa.large_binary()))  # one by one: each may be large
    return [[readers.shorten(readers.as_text(value)) for value in row] for row in rows]


def row_ids(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Ids in the type that they are stored in; bytes that are not UTF-8, such as a raw hash, as hexadecimal digits."""
    if not (is_text(column.type) or is_bytes(column.type)):
        return column.cast(id_type(column.type))
    values = column.cast(pa.large_binary()).to_pylist()
    ids = [value.hex() if value and text is None else text for value, text in zip(values, texts(column), strict=True)]
    return pa.array(ids, pa.string())


def id_type(column_type: pa.DataType) -> pa.DataType:
    """How ids are stored: integers as int64, all else as text (uint64 too: int64 cannot hold its upper half)."""
    return pa.int64() if pa.types.is_integer(column_type) and column_type != pa.uint64() else pa.string()


def is_text(column_type: pa.DataType) -> bool:
    return pa.types.is_string(column_type) or pa.types.is_large_string(column_type)


def is_list(column_type: pa.DataType) -> bool:
    return pa.types.is_list(column_type) or pa.types.is_large_list(column_type)


def is_bytes(column_type: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(column_type) or types.is_large_binary(column_type) or types.is_fixed_size_binary(column_type)
