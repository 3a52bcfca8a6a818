"""The raw data in any format: its files, how Ray Data reads them, and the one schema of a raw row.

Readers return a file's own columns, to which `row_filter` applies. `to_raw_rows` turns them into raw rows; later stages
do not depend on files, formats or column names.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import json
import math
import posixpath
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from fsspec.utils import glob_translate
from pyarrow import fs

from .. import storage
from ..config import PreprocessingConfig
from ..latents import schema
from . import filters, readers
from .readers import PATH, ROW_NUMBER

ID, CAPTION, IMAGE, ERROR, SOURCE, NOTE = "id", "caption", "image", "error", "source", "note"  # of a raw row
CHOSEN = ("input_format", "image_column", "caption_column", "id_column")  # parameters that must be given, or detected
FIRST_ROW, GROUPS = "first_row", "groups"  # of a task that reads a part of a file
PART_ROWS = 2048  # that a task reads of a large Parquet file, or one row group
C_LIBRARY = ctypes.CDLL(None)
RETRIES = {"max_retries": 3}  # of tasks that read; Ray Data repeats what killed its process without end
ROWS_PER_CONVERSION = 256  # images given as paths are fetched this many at a time
WILDCARDS = re.compile(r"[*?[]|\{(?=\d+\.\.\d+\})")
BLANKS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and a symbol that show nothing
MAX_ID_BYTES = 2**16  # of an id that is text
MAX_CAPTIONS = 64  # of a row that are read
MOST_NUMBERS = 100_000  # of a range in a pattern


# ---- files


def list_inputs(config: PreprocessingConfig) -> tuple[list[str], dict[str, int]]:
    """`(paths of what is read as one file each, {path below the input's folder: bytes} of all files)`, sorted.

    The input is a file, a folder (with those in it), or a pattern. Raises FileNotFoundError if nothing can be read.
    """
    listing = visible_files(walk_input(config), config.data_uri)
    return input_paths(listing, config), listing


def input_paths(listing: dict[str, int], config: PreprocessingConfig) -> list[str]:
    """The paths of `list_inputs`."""
    check_settled(config, CHOSEN[:1])
    uri, reader = config.data_uri, readers.reader_class(config.input_format)
    folder = base_folder(uri)
    names = reader.files(listing, uri)
    if not names:
        raise FileNotFoundError(
            f"input_uri={uri!r} holds no {reader.what} (it has {count_suffixes(listing)}): give other data, or another "
            "input_format."
        )
    paths = [storage.join(folder, name) for name in names]
    if config.input_format == "imagefolder" or not storage.is_local(folder):
        return paths
    once = {}
    for path in paths:
        once.setdefault(storage.inode(path), path)
    return list(once.values())  # a file that two links lead to is read once


def count_suffixes(names: Iterable[str]) -> str:
    """Such as "2 .jpg, 1 .txt"."""
    counts = collections.Counter(posixpath.splitext(name)[1].lower() or "without suffix" for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(5)) or "no files"


def visible_files(found: list[tuple[str, int | None]], input_uri: str) -> dict[str, int]:
    """{path below the input's folder: bytes} of what `walk_input` found, without hidden and broken files."""
    is_given = storage.is_file(input_uri)  # whatever its name
    return {name: size for name, size in found if size is not None and (is_given or not is_hidden(name))}


def walk_input(config: PreprocessingConfig) -> list[tuple[str, int | None]]:
    """`storage.walk` of the input, sorted; of a pattern, its matches. What this project writes below it is left out."""
    uri = storage.resolve(config.data_uri)
    folder = base_folder(uri)
    if storage.is_file(uri):
        return [(storage.name(uri), storage.sizes(uri)[""])]
    root = f"{storage.real_path(folder)}/"
    own = [f"{storage.real_path(one)}/" for one in filter(None, (config.storage, config.latents_uri))]
    own = tuple(one for one in own if not root.startswith(one))  # the input may lie below the storage
    is_own = functools.cache(lambda within: f"{storage.real_path(within)}/".startswith(own))
    found = ((name, size, storage.join(folder, name)) for name, size in storage.walk(folder))
    matches = glob_pattern(uri).fullmatch if is_glob(uri) else str
    kept = ((name, size) for name, size, path in found if matches(path) and not is_own(path.rpartition("/")[0]))
    return sorted(kept, key=lambda one: one[0])


def is_hidden(name: str) -> bool:
    """Whether a file, by its path, is what tools leave behind. Cameras begin names of images with "_"."""
    *folders, file = name.split("/")
    in_hidden = any(folder.startswith((".", "_")) for folder in folders)
    is_known = readers.is_image(file) or readers.is_text(file)
    return in_hidden or file.startswith(".") or (file.startswith("_") and not is_known)


def is_glob(input_uri: str) -> bool:
    """Whether a path has wildcards (`WILDCARDS`) and is not the name of a file or folder."""
    return bool(WILDCARDS.search(input_uri)) and not storage.exists(input_uri)


def glob_pattern(path: str) -> re.Pattern:
    """A path with wildcards as a regular expression: `*` and `?` stay within a folder, `**/` crosses folders.

    `{000..123}` stands for each of these numbers.
    """

    def numbers(found: re.Match) -> str:
        first, last = found.groups()
        return "|".join(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)[:MOST_NUMBERS])

    escaped = glob_translate(re.sub(r"(?<=[^/])\*\*+|\*\*+(?=[^/])", "*", path))
    return re.compile(re.sub(r"\\{(\d+)\\.\\.(\d+)\\}", lambda found: f"(?:{numbers(found)})", escaped))


@functools.lru_cache(maxsize=16)
def base_folder(input_uri: str) -> str:
    """The folder that contains all files of the input: for a glob, the part before its wildcards."""
    uri = storage.resolve(input_uri)
    if is_glob(input_uri):
        return WILDCARDS.split(uri, maxsplit=1)[0].rpartition("/")[0]
    return uri.rpartition("/")[0] if storage.is_file(uri) else uri


def checksum(listing: dict[str, int]) -> int:
    return zlib.crc32(json.dumps(sorted(listing.items())).encode())


def modified(listing: dict[str, int], config: PreprocessingConfig) -> dict[str, int]:
    """{path below the input's folder: when the file was last changed, in ns} of the files of `list_inputs`.

    A file that was written again with the same size differs in this alone.
    """
    filesystem, folder = storage.open_filesystem(base_folder(config.data_uri))
    paths = {f"{folder.rstrip('/')}/{name}": name for name in listing}
    is_store = not isinstance(filesystem, fs.LocalFileSystem) and len(paths) > 1  # listed by few requests
    found = filesystem.get_file_info(fs.FileSelector(folder, recursive=True) if is_store else list(paths))
    return {paths[item.path]: item.mtime_ns for item in found if item.path in paths}


def name_of(path: str, config: PreprocessingConfig) -> str:
    """An input file's path below the input's folder; the name of a file that lies elsewhere."""
    folder = base_folder(config.data_uri).rstrip("/") + "/"
    return path.removeprefix(folder) if path.startswith(folder) else storage.name(path)


def count_rows(paths: list[str], config: PreprocessingConfig) -> list[int | None]:
    """The rows of each file, counted in parallel: by threads, or by Ray if whole files must be read.

    None for a file that cannot be read.
    """

    def count(path: str) -> int:
        return sum(reader(config).row_groups(path))

    if config.input_format == "webdataset" and ray.is_initialized():
        task = ray.remote(num_cpus=0.5)(unless_damaged)
        try:
            return ray.get([task.remote(count, path) for path in paths])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # without the task's traceback
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(functools.partial(unless_damaged, count), paths))


def unless_damaged(function: Callable[[str], Any], path: str) -> Any:
    """`function(path)`; None for a file that cannot be read."""
    with contextlib.suppress(readers.Unreadable):
        return function(path)


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


def check_settled(config: PreprocessingConfig, names: Iterable[str] = CHOSEN) -> None:
    """Raises ValueError for a format or a column that is left open."""
    for name in names:
        if (value := getattr(config, name)) in (None, "auto"):
            raise ValueError(
                f"{name}={value!r} is left open: give it, or let production.readers.detect.detect(config) find it."
            )


def reader(config: PreprocessingConfig) -> readers.Reader:
    """The reader of `config.input_format`, with the types of the used columns."""
    check_settled(config)
    make = readers.reader_class(config.input_format)
    return make(column_types(config), caption_names(config), config.max_captions > 1)


def used_columns(config: PreprocessingConfig) -> list[str]:
    """The columns that a job reads: id, captions, image, and those of the filter."""
    check_settled(config)
    filtered = filters.filter_columns(config.row_filter)
    return stored([config.id_column, *caption_names(config), config.image_column, *filtered])


def caption_names(config: PreprocessingConfig) -> list[str]:
    """The columns that `caption_columns` name; "a|b" stands for `a` and, in rows without a usable one, `b`."""
    return [part for name in config.caption_columns for part in name.split("|")]


def stored(columns: Iterable[str]) -> list[str]:
    """The columns that files have, each once."""
    return [name for name in dict.fromkeys(columns) if name != ROW_NUMBER]


def size_columns(config: PreprocessingConfig) -> list[str]:
    """The columns of the images' width and height; [] if they are not given, which only online runs may."""
    return [name for name in (getattr(config, "width_column", None), getattr(config, "height_column", None)) if name]


def column_types(config: PreprocessingConfig) -> dict[str, pa.DataType]:
    """Arrow types of the used columns, for formats without types.

    Ids are text, captions text or lists of text. A filter's columns have the type that they are compared with.
    """
    types = filters.filter_types(config.row_filter)
    types |= dict.fromkeys(size_columns(config), pa.float64())
    types[config.image_column] = pa.binary() if config.input_format == "webdataset" else pa.string()
    for name in caption_names(config):  # text if a filter compares it
        types[name] = pa.string() if name in types and config.max_captions == 1 else pa.list_(pa.string())
    return types | dict.fromkeys(stored([config.id_column]), pa.string())


# ---- Ray Data


def read_rows(segment: Any, config: PreprocessingConfig) -> ray.data.Dataset:
    """A lazy Ray dataset of the raw rows (`to_raw_rows`) of an `encode.job.Segment` that `row_filter` keeps.

    A task reads a file, or some row groups (`parts`). `ray.data.read_parquet` sizes what it reads at a time by the
    footer, in which a row group with long captions may look small.
    """
    one = reader(config)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        tasks = list(itertools.chain.from_iterable(pool.map(functools.partial(parts, one), segment.paths)))
    read = functools.partial(read_part, columns=used_columns(config), reader=one)
    rows = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    rows = rows.map_batches(read, batch_size=1, batch_format="pyarrow", **RETRIES)
    if segment.limit is not None:
        rows = rows.limit(segment.limit)
    convert = functools.partial(convert_block, config=config)
    # Whole blocks, because Ray Data does not fuse a map with another batch size into the read.
    return rows.map_batches(convert, batch_size=None, batch_format="pyarrow", **RETRIES)


def parts(reader: readers.Reader, path: str) -> list[dict[str, Any]]:
    """What tasks read of a file, each for itself, as `{PATH, FIRST_ROW, GROUPS}`; None stands for all row groups."""
    if readers.GROUP not in reader.location:
        return [{PATH: path, FIRST_ROW: 0, GROUPS: None}]
    first_rows = np.cumsum([0, *reader.row_groups(path)]).tolist()
    numbers = range(len(first_rows) - 1)
    parts = [list(of) for _, of in itertools.groupby(numbers, key=lambda group: first_rows[group] // PART_ROWS)]
    parts = parts or [[]]  # a file without rows is read too
    return [{PATH: path, FIRST_ROW: first_rows[of[0]] if of else 0, GROUPS: of} for of in parts]


def read_part(part: pa.Table, *, columns: list[str], reader: readers.Reader) -> Iterator[pa.Table]:
    """Columns of the rows of a file's part, which is a row as of `parts`, with `PATH` and `ROW_NUMBER`."""
    (one,) = part.to_pylist()
    first_row = one[FIRST_ROW]
    for table in reader.stream(one[PATH], columns, one[GROUPS]):
        yield with_path(table, one[PATH], first_row)
        first_row += len(table)


def with_path(table: pa.Table, path: str, first_row: int = 0) -> pa.Table:
    """A table of one file's rows with the columns `PATH` and `ROW_NUMBER`, where the reader has not added them."""
    if PATH in table.column_names:
        return table
    numbers = pa.array(np.arange(first_row, first_row + len(table)))
    return table.append_column(PATH, pa.repeat(path, len(table))).append_column(ROW_NUMBER, numbers)


# ---- raw rows


def convert_block(block: pa.Table, *, config: PreprocessingConfig) -> Iterator[pa.Table]:
    """`to_raw_rows` of the rows of a block that `row_filter` keeps.

    Some rows at a time, because images given as paths may be too many to hold.
    """
    block = block.filter(pa.array(filters.kept_rows(block, config.row_filter)))
    for start in range(0, len(block), ROWS_PER_CONVERSION):
        yield to_raw_rows(block.slice(start, ROWS_PER_CONVERSION), config)
    release_memory()


def release_memory() -> None:
    """Return what Arrow's pool and the C library cache to the system, because Ray keeps the process for other tasks."""
    pa.default_memory_pool().release_unused()
    if hasattr(C_LIBRARY, "malloc_trim"):  # glibc's
        C_LIBRARY.malloc_trim(0)


def to_raw_rows(table: pa.Table, config: PreprocessingConfig) -> pa.Table:
    """Rows as a reader returns them -> raw rows. Images given as paths are fetched here.

    Columns:
        id: text (`ids_of`)
        caption: text, or why it cannot be used (`caption_reason`); with several captions a row, caption_2 and so on too
        image: encoded bytes, or null
        error: why an image could not be fetched, or null
        source: the file's path below the input's folder
        note: what was taken in place of something that the row lacks; empty for most
    """
    images, errors = image_bytes(table, config)
    columns = {ID: ids_of(table, config), IMAGE: images, ERROR: errors}
    columns[SOURCE] = source_names(table[PATH], config)
    columns[NOTE] = notes_of(table, config, columns[ID])
    for number, captions in enumerate(zip(*captions_of(table, config), strict=True), start=1):
        columns[schema.numbered(CAPTION, number)] = pa.array(captions, pa.string())
    return pa.table(columns)


def captions_of(table: pa.Table, config: PreprocessingConfig) -> list[list[str | None]]:
    """The captions of each row, `config.num_captions` for all: a row that has fewer repeats its own.

    They are in the order of `caption_columns`, or of a column of lists, without those that `caption_reason` names. A
    row that has no other has those.
    """

    def usable(captions: list[str | None]) -> list[str]:
        return [caption for caption in captions if not caption_reason(caption)]

    def captions_in(name: str) -> Iterator[list[str | None]]:
        rows = zip(*(text_lists(table[part]) for part in name.split("|")), strict=True)
        return (next(filter(usable, parts), next(filter(None, parts), [])) for parts in rows)

    rows = zip(*map(captions_in, config.caption_columns), strict=True)
    rows = (list(itertools.chain.from_iterable(row)) for row in rows)
    return [list(itertools.islice(itertools.cycle(usable(row) or row or [None]), config.num_captions)) for row in rows]


def notes_of(table: pa.Table, config: PreprocessingConfig, ids: pa.Array) -> pa.Array:
    """What was taken in place of an id or of a caption that the row lacks, as text; empty for most rows."""
    notes = [[] for _ in ids]
    if config.id_column != ROW_NUMBER:
        for note, is_made in zip(notes, pc.equal(ids, made_ids(table, config)).to_pylist(), strict=True):
            note.extend([f"no {config.id_column!r}: an id was made"] * bool(is_made))
    for first, *others in (name.split("|") for name in config.caption_columns):
        for note, captions in zip(notes, text_lists(table[first]) if others else [], strict=False):
            if all(map(caption_reason, captions)):
                note.append(f"no usable {first!r}: another caption was taken")
    return pa.array(map("; ".join, notes), pa.string())


def image_bytes(table: pa.Table, config: PreprocessingConfig) -> tuple[pa.ChunkedArray | pa.Array, pa.Array]:
    """`(bytes, errors)` of the image column, which holds bytes, Hugging Face's {"bytes", "path"} structs, or paths.

    If a struct has no bytes, its path is read (`readers.FETCH_IMAGES`).
    """
    column, names = image_fields(table[config.image_column])
    if is_text(names.type) and (is_text(column.type) or column.null_count):
        return readers.load(readers.FETCH_IMAGES)(column, names, table[PATH].to_pylist(), config)
    data = column.cast(pa.large_binary())
    is_sample = config.input_format == "webdataset" and config.image_column == readers.ONLY_IMAGE
    error = pa.scalar("not exactly one image in the sample" if is_sample else None, pa.string())
    return data, pc.if_else(data.is_null(), error, pa.scalar(None, pa.string()))


def image_fields(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """`(bytes or paths, paths if it has them)` of an image column."""
    if not pa.types.is_struct(column.type):
        return column, column
    names = [name for name in ("bytes", "path") if column.type.get_field_index(name) >= 0]
    return pc.struct_field(column, names[0]), pc.struct_field(column, names[-1])


def source_names(paths: pa.ChunkedArray, config: PreprocessingConfig) -> pa.Array:
    """The path of each row's file, relative to the input's folder."""
    short = {path: name_of(path, config) for path in paths.unique().to_pylist()}
    return pa.array([short[path] for path in paths.to_pylist()], pa.string())


def caption_reason(caption: str | None) -> str:
    """Why a caption cannot be used; empty if it can."""
    if caption is None:
        return "no caption"
    if caption in readers.NO_CAPTIONS:
        return caption[1:]
    if len(caption) > readers.MAX_CAPTION_BYTES // 4 and len(caption.encode()) > readers.MAX_CAPTION_BYTES:
        return f"caption of more than {readers.MAX_CAPTION_BYTES} bytes"
    return "" if any(map(is_visible, caption)) else "empty caption"


def is_visible(character: str) -> bool:
    """Whether a character shows something: a letter, a number, punctuation, a symbol, or one of private use."""
    kind = unicodedata.category(character)
    return (kind[0] in "LNPS" or kind == "Co") and character not in BLANKS


def text_lists(column: pa.ChunkedArray | pa.Array) -> list[list[str | None]]:
    """The captions of each row of a column of lists (`readers.as_caption`); of a column of text, lists of one."""
    if is_list(column.type):
        column = pc.list_slice(column.cast(pa.large_list(pa.large_binary())), 0, MAX_CAPTIONS)
        rows = (row.as_py() or [] for row in column)
    else:
        rows = ([value.as_py()] for value in column.cast(pa.large_binary()))  # one by one: each may be large
    return [[readers.as_caption(value) for value in row] for row in rows]


def ids_of(table: pa.Table, config: PreprocessingConfig) -> pa.Array:
    """Ids by their column, as text. A row without one has "{file}:{row number}", and "{file}" if it has no number."""
    made = made_ids(table, config)
    if config.id_column == ROW_NUMBER:
        return made
    column = table[config.id_column]
    if is_text(column.type) or is_bytes(column.type):
        values = (value.as_py() for value in column.cast(pa.large_binary()))  # one by one: each may be large
        ids = pa.array([id_text(value, is_text(column.type)) for value in values], pa.string())
    else:
        ids = column.cast(pa.string())
    return pc.if_else(pc.equal(pc.coalesce(ids, ""), ""), made, ids)


def made_ids(table: pa.Table, config: PreprocessingConfig) -> pa.Array:
    """ "{file}:{row number}" of each row, and "{file}" if it has no number."""
    names, numbers = source_names(table[PATH], config), table[ROW_NUMBER].cast(pa.string())
    return pc.coalesce(pc.binary_join_element_wise(names, numbers, ":"), names)


def id_text(value: bytes | None, is_text: bool) -> str | None:
    """An id as text. Bytes that are no printable text, such as hashes, become hex digits."""
    if value is None or len(value) > MAX_ID_BYTES:
        return None
    text = readers.as_text(value)
    return text if text is not None and (is_text or text.isprintable()) else value.hex()


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
