"""Parquet files on a disk or an object store: what this package reads from Parquet is opened here.

A column may have an Arrow extension type. Some libraries unpickle the values of such a column, which can run code. So
a column of an extension type is refused before a value is read. UUIDs are the exception: they become text. Columns of
all other types are read as plain types (`plain_type`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .. import storage
from . import schema

FILE_ID = "file_id"  # in a file's key-value metadata
MEND = "restore the file from a copy, or encode the data again into another latents_uri"


class PlainParquetFile:
    """A Parquet file that reads only columns of plain types, for a `with` statement (`open_parquet`).

    Both ways to read raise ValueError for a column of an extension type before anything is read, and OSError that
    names the file if it cannot be read. `columns`: None for all.
    """

    def __init__(self, file: pq.ParquetFile, uri: str):
        self.file, self.uri = file, uri
        self.metadata, self.schema_arrow = file.metadata, file.schema_arrow

    def __enter__(self) -> PlainParquetFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    @contextlib.contextmanager
    def _reading(self, columns: list[str] | None) -> Iterator[None]:
        check_types(self.schema_arrow, self.uri, columns)
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.uri} cannot be read: {error}") from error

    def read(
        self, columns: list[str] | None = None, row_groups: Iterable[int] | None = None, **options: Any
    ) -> pa.Table:
        """Rows of these row groups, None for all. `options`: those of `pq.ParquetFile.read_row_groups`."""
        row_groups = range(self.metadata.num_row_groups) if row_groups is None else row_groups
        with self._reading(columns):
            return to_plain(self.file.read_row_groups(list(row_groups), columns=columns, **options))

    def iter_batches(self, columns: list[str] | None = None, **options: Any) -> Iterator[pa.RecordBatch]:
        """All rows, or those of `row_groups`. `options`: those of `pq.ParquetFile.iter_batches`."""
        with self._reading(columns):
            for batch in self.file.iter_batches(columns=columns, **options):
                yield from to_plain(pa.Table.from_batches([batch])).to_batches()


def check_types(columns: pa.Schema, uri: str, names: list[str] | None = None) -> None:
    """Raises ValueError for a column of an extension type, at any depth. `names`: those that are read; None for all."""
    for field in columns:
        if (names is None or field.name in names) and not is_uuid(field.type) and is_extension(field.type):
            raise ValueError(
                f"{uri}: the column {field.name!r} has the type {field.type}, whose values could run code when they "
                "are read: store it as a plain type, or leave it out."
            )


def is_extension(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return is_extension(kind.value_type)
    nested = any(is_extension(kind.field(number).type) for number in range(kind.num_fields))
    return isinstance(kind, pa.BaseExtensionType) or nested


def is_uuid(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.UuidType)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column is read as.

    Dictionaries and run-end encodings become the type of their values. Views become plain text, bytes or lists, and
    lists of a fixed size become lists. UUIDs become text. Other types stay.
    """
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_uuid(kind):
        return pa.string()
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pa.large_string() if types.is_string_view(kind) else pa.large_binary()
    if hasattr(kind, "value_field"):  # lists: large ones, views and those of a fixed size too
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(plain_type(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind.fields])
    return kind


def to_plain(table: pa.Table) -> pa.Table:
    """The table with its columns as `plain_type`; UUIDs are read through their storage."""
    for number, field in enumerate(table.schema):
        kind, column = plain_type(field.type), table.column(number)
        if is_uuid(field.type):
            values = [value for chunk in column.chunks for value in chunk.storage.to_pylist()]
            column = pa.array([value and str(uuid.UUID(bytes=value)) for value in values], kind)
        elif isinstance(field.type, (pa.ListViewType, pa.LargeListViewType, pa.RunEndEncodedType)):
            column = pa.array(column.to_pylist(), kind)  # Arrow cannot cast them, or loses values
        if kind != field.type:
            table = table.set_column(number, field.name, column.cast(kind))
    return table


def open_parquet(uri: str | os.PathLike, **options: Any) -> PlainParquetFile:
    """A file to read, for a `with` statement. `options`: those of `pyarrow.parquet.ParquetFile`.

    Page checksums are verified if the file has them; files of latents do.
    """
    filesystem, path = storage.open_filesystem(uri)
    try:
        file = pq.ParquetFile(path, filesystem=filesystem, page_checksum_verification=True, **options)
    except pa.ArrowInvalid as error:  # no footer: it was cut short, or is no Parquet file
        raise pa.ArrowInvalid(f"{uri} cannot be read: {error}") from None
    return PlainParquetFile(file, str(uri))


def read_parquet(uri: str | os.PathLike, columns: list[str] | None = None) -> pa.Table:
    """All rows of a file. `columns`: None for all."""
    with open_parquet(uri) as file:
        return file.read(columns)


def write_table(uri: str | os.PathLike, table: pa.Table, **options: Any) -> None:
    """Write a small file atomically: a reader sees the whole file or none. `options`: of `pq.write_table`."""
    data = pa.BufferOutputStream()
    pq.write_table(table, data, write_page_checksum=True, **options)
    storage.write_bytes(uri, data.getvalue())


def write_latents_file(tables: Iterable[pa.Table], uri: str) -> tuple[int, str]:
    """Write a Parquet file, in which each table begins a row group; returns its bytes and its id.

    The id is random. It stands in the file's metadata, so a reader notices another file of the same name
    (`file_id`). Pages have checksums, so a reader notices damage. There are no compression, dictionaries and
    statistics: 16-bit floats hardly shrink, and reading has nothing to decode.
    """
    filesystem, path = storage.open_filesystem(uri)
    if storage.is_local(uri):
        filesystem.create_dir(path.rsplit("/", 1)[0])
    tables, new_id = iter(tables), uuid.uuid4().hex[:16]
    first = next(tables)
    layout = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    with storage.naming(uri), pq.ParquetWriter(path, first.schema, filesystem=filesystem, **layout) as file:
        for table in itertools.chain([first], tables):
            file.write_table(table, row_group_size=schema.ROWS_PER_ROW_GROUP)
        file.add_key_value_metadata({FILE_ID: new_id})
    return filesystem.get_file_info(path).size, new_id


def file_id(file: PlainParquetFile) -> str:
    """The id that `write_latents_file` gave a file; "" for other files."""
    return (file.metadata.metadata or {}).get(FILE_ID.encode(), b"").decode()
