"""Parquet files on a disk or an object store: what this package reads from Parquet is opened here."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .. import storage


def open_parquet(uri: str | os.PathLike, **options: Any) -> pq.ParquetFile:
    """A file to read, for a `with` statement. `options`: those of `pyarrow.parquet.ParquetFile`."""
    filesystem, path = storage.open_filesystem(uri)
    return pq.ParquetFile(path, filesystem=filesystem, **options)


def read_parquet(uri: str | os.PathLike, columns: list[str] | None = None) -> pa.Table:
    """All rows of a file. `columns`: None for all."""
    with open_parquet(uri) as file:
        return file.read(columns=columns)


def write_table(uri: str | os.PathLike, table: pa.Table) -> None:
    """Write a small file atomically: a reader sees the whole file or none."""
    data = pa.BufferOutputStream()
    pq.write_table(table, data)
    storage.write_bytes(uri, data.getvalue())
