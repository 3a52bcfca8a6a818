"""What is refused of raw data before any worker starts, in one sentence each: its files, then its columns."""

from __future__ import annotations

import concurrent.futures
import functools
import re
from collections.abc import Iterable, Iterator

import pyarrow as pa

from ... import storage
from ...config import PreprocessingConfig
from ...raw import filters, inputs, readers
from ...raw.inputs import is_bytes, is_list, is_text

COMPRESSED_TAR, BROKEN = "compressed tar", "broken link"  # kinds of files
# {kind of table: (a folder in the table's folder, how names of files in it end)}
TABLES = {"Delta": ("_delta_log", ""), "Hudi": (".hoodie", ""), "Iceberg": ("metadata", ".metadata.json")}
MOST_FILES = 64  # whose first rows are read to find a column, of formats without types


def refuse(sentences: Iterable[str]) -> None:
    """Raises ValueError with the first sentence."""
    for sentence in sentences:
        raise ValueError(sentence)


def folder_problems(config: PreprocessingConfig) -> Iterator[str]:
    """What a job or a run writes must not be found when the input is listed again."""
    folder = inputs.base_folder(config.data_uri)
    below = storage.resolve(config.data_uri).removeprefix(folder).lstrip("/")  # a pattern, or the name of a file
    takes_all_folders = re.match(r"\*+(/|$)|$", below)
    for name in ("storage", "latents_uri") if takes_all_folders else ():
        uri = getattr(config, name)
        if uri and storage.real_path(uri) == storage.real_path(folder):
            yield (
                f"{name}={uri!r} is the folder of input_uri, and what is written there would be read as input: give a "
                "folder of its own."
            )


def files_problems(kinds: dict[str, str], config: PreprocessingConfig) -> Iterator[str]:
    """`kinds`: the kind of each file below the input."""
    reader = readers.reader_class(config.input_format)
    for name, kind in kinds.items():
        if kind == COMPRESSED_TAR and config.input_format == "webdataset":
            yield f"{name} is a compressed tar: decompress it (gunzip, xz -d, zstd -d)."
        if kind == BROKEN and f"/{name}".lower().endswith(reader.suffixes):
            yield f"{name} is a link that leads nowhere, no regular file, or has no name in UTF-8: rename or remove it."
    for what, mark in find_tables(kinds, config) if config.input_format == "parquet" else ():
        yield (
            f"input_uri={config.data_uri!r} holds files of a table ({what}: {mark}), which keep deleted rows: write "
            "the table's present rows to Parquet files, and give these."
        )


def find_tables(kinds: dict[str, str], config: PreprocessingConfig) -> Iterator[tuple[str, str]]:
    """Yield `(kind of table, the folder by which it is known)` of each table that files of the input lie in.

    Tables are below the input's folder, or above: then the input is a part of a table.
    """
    folder = inputs.base_folder(config.data_uri)
    # A pattern may leave out the files by which a table is known.
    names = [name for name, _ in storage.walk(folder)] if inputs.is_glob(config.data_uri) else kinds
    above = dict.fromkeys([*folders_above(folder), *folders_above(storage.real_path(config.data_uri))])
    for what, (within, end) in TABLES.items():
        parts = (f"/{name}".rpartition(f"/{within}/") for name in names)
        for root in sorted({root for root, found, file in parts if found and file.endswith(end)}):
            if any(f"/{name}".startswith(f"{root}/") for name in kinds):
                yield what, f"{folder}{root}/{within}"
        yield from ((what, f"{one}/{within}") for one in above if has_files(f"{one}/{within}", end))


def folders_above(folder: str) -> Iterator[str]:
    """A folder, and all above it but a disk's root."""
    while folder and not folder.endswith(":/"):
        yield folder
        folder = folder.rpartition("/")[0]


def has_files(folder: str, end: str) -> bool:
    """Whether a folder has files whose names end in `end`; False if it may not be listed, as folders above may not."""
    try:
        return bool(storage.list_files(folder, end))
    except OSError as error:
        if "denied" not in str(error).lower():
            raise
        return False


def column_problems(paths: list[str], config: PreprocessingConfig) -> Iterator[str]:
    """Those of `COLUMNS`, of all files; of formats without types, of the first files together."""
    reader = inputs.reader(config)
    if reader.typed:
        found = schemas(paths if config.limit is None else reached(paths, config), config)
    else:
        found = dict([joined_schema(paths, reader, inputs.used_columns(config))])
    yield from missing_columns(found, config)
    for path, columns in found.items():
        for check in COLUMNS:
            yield from check(columns, path, config)


def reached(paths: list[str], config: PreprocessingConfig) -> list[str]:
    """The files that `config.limit` reaches, and that can be read."""
    return [path for path, rows, _ in inputs.rows_to_read(paths, config) if rows]


def schemas(paths: list[str], config: PreprocessingConfig) -> dict[str, pa.Schema]:
    """{path: columns}: of all files that can be read, the first with each set of columns.

    Raises Unreadable if none can be read.
    """
    read = inputs.reader(config).schema
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = dict(zip(paths, pool.map(functools.partial(inputs.unless_damaged, read), paths), strict=True))
    different = {str(columns): path for path, columns in reversed(found.items()) if columns is not None}
    if not different:
        read(paths[0])  # raises
    return {path: columns for path, columns in found.items() if path in different.values()}


def joined_schema(paths: list[str], reader: readers.Reader, wanted: Iterable[str]) -> tuple[str, pa.Schema]:
    """`(the first file with rows, its columns)`, with those of further files until all `wanted` ones are found."""
    first, found, error = paths[-1], pa.schema([]), None
    for path in paths[:MOST_FILES]:
        try:
            columns = reader.schema(path)
        except readers.Unreadable as unreadable:
            error = unreadable
            continue
        first = first if found.names else path
        found = pa.schema([*found, *(field for field in columns if field.name not in found.names)])
        if found.names and set(wanted) <= set(found.names):
            break
    if not found.names and error:
        raise error
    return first, found


def missing_columns(found: dict[str, pa.Schema], config: PreprocessingConfig) -> Iterator[str]:
    """A file may lack ids, and all but one of the columns that captions are taken from."""
    everywhere = {name for columns in found.values() for name in columns.names}
    used = [(parameter, getattr(config, parameter, None)) for parameter in USABLE]
    used += [("caption_column", name) for name in config.caption_columns]
    used += [("row_filter", name) for name in filters.filter_columns(config.row_filter)]
    for path, columns in found.items():
        for parameter, name in used:
            known = {readers.ROW_NUMBER, *columns.names, *(everywhere if parameter == "id_column" else ())}
            if name and known.isdisjoint(name.split("|") if parameter == "caption_column" else [name]):
                yield f"{parameter}={name!r} is not a column of {path}: it has {', '.join(columns.names)}."
            if name == readers.PATH:
                yield "A column called 'path' cannot be used, as readers note the file of each row there: rename it."


def wrong_types(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    for parameter, (is_usable, otherwise) in USABLE.items():
        name = getattr(config, parameter, None)  # width and height may not be given
        if name in columns.names and not is_usable(kind := columns.field(name).type):
            yield f"{parameter}={name!r} holds {kind} in {path}, {otherwise}: name the column that does."


def wrong_captions(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    for name in filter(columns.names.__contains__, inputs.caption_names(config)):
        kind = columns.field(name).type
        in_list, is_one = is_list(kind), len(config.caption_columns) == 1
        if not is_text_or_bytes(kind.value_type if in_list else kind):
            yield f"caption_column={name!r} holds {kind} in {path}, not text: name the column that does."
        if in_list and not is_one and inputs.reader(config).typed:
            yield f"caption_column names several columns, and {name!r} holds lists: name that one alone."
        if config.max_captions > 1 and not in_list:
            yield (
                f"max_captions={config.max_captions}, and caption_column={name!r} holds {kind}, one caption a row: "
                "name a column of lists, or several columns."
            )


def wrong_filter(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    """A filter that compares a column with a value of another type."""
    try:
        filters.kept_rows(columns.empty_table(), config.row_filter)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        names = filters.filter_columns(config.row_filter)
        types = ", ".join(f"{name} holds {columns.field(name).type}" for name in names)
        yield f"row_filter={config.row_filter!r} compares values of different types in {path} ({types}): {error}."


def urls(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    """Images that the first rows name by URL."""
    reader, name = inputs.reader(config), config.image_column
    if is_text(image_type(columns.field(name).type)):
        rows = next(iter(reader.stream(path, [name])), None)
        values = [] if rows is None else readers.texts(inputs.image_fields(rows[name])[0])
        if url := next(filter(is_url, values), None):
            yield (
                f"image_column={name!r} holds URLs ({url[:60]}): download the images first, for example with "
                "img2dataset, whose Parquet and WebDataset output is read here."
            )


def is_url(text: str | None) -> bool:
    return str(text).lower().startswith(("http://", "https://"))


COLUMNS = [wrong_types, wrong_captions, wrong_filter, urls]


def image_type(kind: pa.DataType) -> pa.DataType:
    """The type of a struct's `bytes` or, if it has none, of its `path`; other types as they are."""
    if pa.types.is_struct(kind):
        return next((kind.field(name).type for name in ("bytes", "path") if kind.get_field_index(name) >= 0), kind)
    return kind


def is_text_or_bytes(kind: pa.DataType) -> bool:
    return is_text(kind) or is_bytes(kind) or pa.types.is_null(kind)  # null: no row has a value


def is_numeric(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


# Parameter -> what the column that it names may hold, and what to say of any other.
USABLE = {
    "image_column": (lambda kind: is_text_or_bytes(image_type(kind)), "neither the bytes of images nor their paths"),
    "id_column": (lambda kind: not pa.types.is_nested(kind), "neither numbers nor text"),
    "width_column": (is_numeric, "not numbers of pixels"),
    "height_column": (is_numeric, "not numbers of pixels"),
}
