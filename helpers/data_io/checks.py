"""Checks of the raw data's columns before any worker starts."""

from __future__ import annotations

import pyarrow as pa

from . import filters, inputs, readers


def check_input(path: str, config) -> pa.Schema:
    """The Arrow schema of an input file. Raises ValueError for a column that is missing or of an unusable type."""
    found = inputs.reader(config).schema(path)
    columns = {name: getattr(config, name) for name in ("id_column", "caption_column", "image_column")}
    check_columns(path, columns, found)
    for column in filters.filter_columns(config.row_filter):
        check_columns(path, {"row_filter": column}, found)
    for parameter, column in zip(("width_column", "height_column"), inputs.size_columns(config), strict=False):
        check_columns(path, {parameter: column}, found)
        kind = found.field(column).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise ValueError(f"{parameter}={column!r} holds {kind}, not numbers of pixels: name the column that does.")
    if inputs.PATH in [*inputs.used_columns(config), *inputs.size_columns(config)]:
        raise ValueError(
            "A column called 'path' cannot be used, because readers note the file of each row there: rename it."
        )
    filters.check_filter(config.row_filter, found)
    check_types(found, config)
    check_no_urls(found, config)
    return found


def check_columns(path: str, columns: dict[str, str], found: pa.Schema) -> None:
    """`columns`: parameter name -> column name. Raises ValueError naming the first that the schema `found` lacks."""
    for parameter, column in columns.items():
        if column not in found.names:
            raise ValueError(f"{parameter}={column!r} is not a column of {path}: it has {', '.join(found.names)}.")


def check_types(found: pa.Schema, config) -> None:
    """Raises ValueError for an id, caption or image column of an unusable type."""
    image = found.field(config.image_column).type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not (inputs.is_bytes(image) or inputs.is_text(image)):
        raise ValueError(
            f"image_column={config.image_column!r} holds {image}, neither the bytes of encoded pictures nor their "
            "paths: name the column that does."
        )
    caption = found.field(config.caption_column).type
    if not (inputs.is_text(caption) or inputs.is_bytes(caption)):
        raise ValueError(
            f"caption_column={config.caption_column!r} holds {caption}, not text: name the column that does."
        )
    ids = found.field(config.id_column).type
    if pa.types.is_nested(ids):
        raise ValueError(
            f"id_column={config.id_column!r} holds {ids}, neither numbers nor text: name the column that does."
        )


def check_no_urls(found: pa.Schema, config) -> None:
    """Raises ValueError if the first rows name their pictures by URL."""
    if inputs.is_text(found.field(config.image_column).type):
        names = inputs.texts(inputs.first_rows(config, num_rows=64)[config.image_column])
        if url := next((name for name in names if readers.is_url(name)), None):
            raise ValueError(
                f"image_column={config.image_column!r} holds URLs ({url[:60]}): download the pictures first, for "
                "example with img2dataset, whose Parquet and WebDataset output is read here."
            )
