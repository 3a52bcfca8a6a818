"""What is refused of raw data before any worker starts, in one sentence each: its files, then its columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from ...config import PreprocessingConfig
from ...raw import filters, inputs, readers
from ...raw.inputs import is_bytes, is_list, is_text

COMPRESSED_TAR, BROKEN = "compressed tar", "broken link"  # kinds of files


def refuse(sentences: Iterable[str]) -> None:
    """Raises ValueError with the first sentence."""
    for sentence in sentences:
        raise ValueError(sentence)


def files_problems(kinds: dict[str, str], config: PreprocessingConfig) -> Iterator[str]:
    """`kinds`: the kind of each file below the input."""
    reader = readers.reader_class(config.input_format)
    for name, kind in kinds.items():
        if kind == COMPRESSED_TAR and config.input_format == "webdataset":
            yield readers.COMPRESSED_TAR.format(name)
        if kind == BROKEN and f"/{name}".lower().endswith(reader.suffixes):
            yield f"{name} is a link that leads nowhere, no regular file, or has no name in UTF-8: rename or remove it."


def column_problems(paths: list[str], config: PreprocessingConfig) -> Iterator[str]:
    """Those of `COLUMNS`, of all files; of formats without types, of the first file that can be read."""
    reader = inputs.reader(config)
    found = inputs.schemas(inputs.reached(paths, config) if reader.typed else first_readable(paths, reader), config)
    for path, columns in found.items():
        for check in COLUMNS:
            yield from check(columns, path, config)


def first_readable(paths: list[str], reader: readers.Reader) -> list[str]:
    """The first file with rows; the last one if none has."""
    for path in paths[:-1]:
        try:
            if reader.schema(path).names:
                return [path]
        except readers.Unreadable:
            continue
    return paths[-1:]


def missing_columns(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    used = [(parameter, getattr(config, parameter, None)) for parameter in USABLE]
    used += [("caption_column", name) for name in config.caption_columns]
    used += [("row_filter", name) for name in filters.filter_columns(config.row_filter)]
    for parameter, name in used:
        if name and name != readers.ROW_NUMBER and name not in columns.names:
            yield f"{parameter}={name!r} is not a column of {path}: it has {', '.join(columns.names)}."
        if name == readers.PATH:
            yield "A column called 'path' cannot be used, because readers note the file of each row there: rename it."


def wrong_types(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    for parameter, (is_usable, otherwise) in USABLE.items():
        name = getattr(config, parameter, None)  # width and height may not be given
        if name and name != readers.ROW_NUMBER and not is_usable(kind := columns.field(name).type):
            yield f"{parameter}={name!r} holds {kind} in {path}, {otherwise}: name the column that does."


def wrong_captions(columns: pa.Schema, path: str, config: PreprocessingConfig) -> Iterator[str]:
    for name in config.caption_columns:
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
        if url := next(filter(inputs.is_url, values), None):
            yield (
                f"image_column={name!r} holds URLs ({url[:60]}): download the images first, for example with "
                "img2dataset, whose Parquet and WebDataset output is read here."
            )


COLUMNS = [missing_columns, wrong_types, wrong_captions, wrong_filter, urls]


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
