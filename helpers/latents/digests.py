"""Checksums of the values in a latents file, by which a reader detects a file that was replaced or changed. No Ray.

The footer of a file lists the CRC-32 of each column in each row group. `files.json` keeps the CRC-32 of that list, the
file's "digest". So a file that was written again, in another order or with other values, is noticed when it is read.
"""

from __future__ import annotations

import json
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from . import schema

KEY = "digests"  # in a file's key-value metadata
UNKNOWN = -1  # the digest of a file of an earlier version, which is not checked
MEND = "restore the file from a copy, or encode the data again into another latents_uri"


def sum_columns(rows: pa.Table) -> dict[str, int]:
    """{column: CRC-32 of its values} of a row group."""
    return {name: sum_values(rows[name]) for name in rows.column_names}


def sum_values(column: pa.ChunkedArray) -> int:
    """CRC-32 of the values that are not null, in their order, whatever the array's chunks and offset."""
    values = schema.one_array(column.drop_null() if column.null_count else column)
    buffers, start, stop = values.buffers(), values.offset, values.offset + len(values)
    if not len(values):
        return 0
    if pa.types.is_primitive(values.type) or pa.types.is_fixed_size_binary(values.type):
        width = values.type.bit_width // 8
        return zlib.crc32(memoryview(buffers[1])[start * width : stop * width])
    is_large = pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)
    offsets = np.frombuffer(buffers[1], np.int64 if is_large else np.int32)[start : stop + 1]
    lengths = zlib.crc32(np.diff(offsets).tobytes())
    return zlib.crc32(memoryview(buffers[2])[offsets[0] : offsets[-1]], lengths) if buffers[2] else lengths


def read_sums(metadata: pq.FileMetaData, digest: int, uri: str) -> list[dict[str, int]] | None:
    """`sum_columns` of each row group, as the file's footer lists them; None if `digest` is UNKNOWN.

    Raises ValueError if the file is not the one that the job wrote.
    """
    if digest == UNKNOWN:
        return None
    text = (metadata.metadata or {}).get(KEY.encode(), b"")
    if zlib.crc32(text) != digest:
        raise ValueError(f"{uri} is not the file that was encoded under this name: {MEND}.")
    return json.loads(text)


def check_rows(rows: pa.Table, sums: dict[str, int], uri: str) -> None:
    """Raises ValueError if a column of a row group has other values than were written."""
    for name, found in sum_columns(rows).items():
        if found != sums[name]:
            raise ValueError(f"{uri} has other values in the column {name!r} than were encoded: {MEND}.")
