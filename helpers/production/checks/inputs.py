"""Checks of the raw data's columns, before any worker starts."""

from __future__ import annotations

import concurrent.futures
import contextlib

import pyarrow as pa

from ...config import PreprocessingConfig
from ...raw import filters, inputs, readers
from ..readers.detect import is_text_or_bytes, picture_type


def check_inputs(paths: list[str], config: PreprocessingConfig) -> pa.DataType:
    """The Arrow type in which all ids can be stored. Raises ValueError as `check_input` does, for any of the files.

    Only Parquet files have types that may differ. With a limit, only the files that it reaches are looked at.
    """
    first, columns = first_readable(paths, config)
    if not inputs.reader(config).typed:
        return inputs.id_type_of(columns, config=config)
    if config.limit is not None:
        paths = [path for path, taken, _ in inputs.rows_to_read(paths, config) if taken is not None]

    def schema_of(path: str) -> pa.Schema | None:
        with contextlib.suppress(readers.Unreadable):
            return inputs.reader(config).schema(path)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        schemas = zip(paths, pool.map(schema_of, paths), strict=True)
        different = {str(columns): (path, columns) for path, columns in schemas if columns is not None}
    for path, columns in different.values():
        try:
            check_columns(columns, path, config)
        except ValueError as error:
            raise ValueError(f"{path} does not go with {first}, which can be read: {error}") from None
    return inputs.id_type_of(*(columns for _, columns in different.values()), config=config)


def first_readable(paths: list[str], config: PreprocessingConfig) -> tuple[str, pa.Schema]:
    """The first file that can be read, and its columns. Raises as `check_input`."""
    *others, last = paths
    for path in others:
        with contextlib.suppress(readers.Unreadable):
            if inputs.reader(config).schema(path).names:
                return path, check_input(path, config)
    return last, check_input(last, config)


def check_input(path: str, config: PreprocessingConfig) -> pa.Schema:
    """The Arrow schema of an input file. Raises ValueError for a column that is missing or of an unusable type."""
    columns = inputs.reader(config).schema(path)
    check_columns(columns, path, config)
    check_no_urls(columns, path, config)
    return columns


def check_columns(columns: pa.Schema, path: str, config: PreprocessingConfig) -> None:
    """Raises ValueError for a column of a file that is missing or of an unusable type."""
    for parameter in USABLE:
        name = getattr(config, parameter, None)
        if name and name != inputs.PLACE:  # width and height may not be given
            check_column(parameter, name, path, columns)
            is_usable, otherwise = USABLE[parameter]
            if not is_usable(kind := columns.field(name).type):
                raise ValueError(f"{parameter}={name!r} holds {kind}, {otherwise}: name the column that does.")
    check_captions(columns, path, config)
    for name in filters.filter_columns(config.row_filter):
        check_column("row_filter", name, path, columns)
    filters.check_filter(config.row_filter, columns)


def check_column(parameter: str, name: str, path: str, columns: pa.Schema) -> None:
    """Raises ValueError if a file lacks a column, or if its name is taken."""
    if name not in columns.names:
        raise ValueError(f"{parameter}={name!r} is not a column of {path}: it has {', '.join(columns.names)}.")
    if name == inputs.PATH:
        raise ValueError(
            "A column called 'path' cannot be used, because readers note the file of each row there: rename it."
        )


def check_captions(columns: pa.Schema, path: str, config: PreprocessingConfig) -> None:
    """Raises ValueError for a caption column that is missing or holds no text, and for unexpected lists."""
    for name in config.caption_columns:
        check_column("caption_column", name, path, columns)
        kind = columns.field(name).type
        in_list = inputs.is_list(kind)
        if not is_text_or_bytes(kind.value_type if in_list else kind):
            raise ValueError(f"caption_column={name!r} holds {kind}, not text: name the column that does.")
        if in_list and len(config.caption_columns) > 1 and inputs.reader(config).typed:
            raise ValueError(f"caption_column names several columns, and {name!r} holds lists: name that one alone.")
        if config.max_captions > 1 and not in_list:
            raise ValueError(
                f"max_captions={config.max_captions}, and caption_column={name!r} holds {kind}, one caption a row: "
                "name a column of lists, or several columns."
            )


def is_picture(kind: pa.DataType) -> bool:
    """Bytes, a path, or a struct that holds one of them, as Hugging Face's data sets do."""
    return is_text_or_bytes(picture_type(kind))


def is_numeric(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


# Parameter -> what the column that it names may hold, and what to say of any other.
USABLE = {
    "image_column": (is_picture, "neither the bytes of encoded pictures nor their paths"),
    "id_column": (lambda kind: not pa.types.is_nested(kind), "neither numbers nor text"),
    "width_column": (is_numeric, "not numbers of pixels"),
    "height_column": (is_numeric, "not numbers of pixels"),
}


def check_no_urls(columns: pa.Schema, path: str, config: PreprocessingConfig) -> None:
    """Raises ValueError if the first rows of a file name their pictures by URL, or hold them in base64."""
    reader = inputs.reader(config)
    if reader.typed or inputs.is_text(columns.field(config.image_column).type):
        rows = next(inputs.stream_file(path, [config.image_column], reader), None)
        names = [] if rows is None else inputs.texts(inputs.picture_fields(rows[config.image_column])[0])
        if url := next((name for name in names if readers.is_url(name)), None):
            raise ValueError(
                f"image_column={config.image_column!r} holds URLs ({url[:60]}): download the pictures first, for "
                "example with img2dataset, whose Parquet and WebDataset output is read here."
            )
        if next(filter(readers.is_base64, names), None):
            raise ValueError(
                f"image_column={config.image_column!r} holds images as base64 text: store their bytes in its place."
            )
