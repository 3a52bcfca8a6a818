"""Arrow files as Hugging Face's `save_to_disk` writes them (streams), and Arrow's file format; mapped on a disk.

They are read in their order: finding a row on an object store sends what stands before it.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from ... import storage
from ...latents.parquet import check_types, to_plain
from ...raw import inputs
from ...raw.readers import (
    GROUP_ROWS,
    MAX_CHUNK_BYTES,
    MAX_RATIO,
    PROBLEM,
    ROW,
    Reader,
    naming,
    parse_json,
    plain_schema,
    within_seconds,
)

STATE = "state.json"  # lists the files of a data set that `save_to_disk` wrote
MAGIC = b"ARROW1"  # of the file format: eight bytes, a stream, and a footer


class Arrow(Reader):
    what, suffixes, typed, location = "Arrow file", (".arrow",), True, (ROW,)

    @classmethod
    def files(cls, names: Iterable[str], input_uri: str) -> list[str]:
        """All but the caches of `datasets`; in a folder of its `save_to_disk`, those that its list names."""
        names, root = dict.fromkeys(names), inputs.base_folder(input_uri)
        found = [(name, *posixpath.split(name)) for name in super().files(names, input_uri)]
        found = [one for one in found if not one[2].startswith("cache-")]
        folders = {within for _, within, _ in found if posixpath.join(within, STATE) in names}
        listed = {within: listed_files(posixpath.join(root, within, STATE)) for within in folders}
        return [name for name, within, file in found if file in (listed.get(within) or {file})]

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """`(schema, record batches)`. Raises ValueError naming a file that is not Arrow's, or unpacks to far more."""
        filesystem, inner = storage.open_filesystem(path)
        is_local = storage.is_local(path)
        with naming(path, self.what), pa.memory_map(inner) if is_local else filesystem.open_input_file(inner) as source:
            start = 8 if source.read_at(len(MAGIC), 0) == MAGIC else 0
            if is_local:  # mapped, so that a second pass costs nothing
                source.seek(start)
                for message in pa.ipc.MessageReader.open_stream(source):
                    check_message(message)
            source.seek(start)
            found = pa.ipc.open_stream(source if is_local else io.BufferedReader(CheckedMessages(source)))
            yield found.schema, within_seconds(map(check_batch, found))

    def schema(self, path: str) -> pa.Schema:
        """Raises ValueError as `plain_schema`."""
        with self.open(path) as (stored, _):
            return plain_schema(stored, path, list(self.types))

    def row_groups(self, path: str) -> list[int]:
        """Rows of each record batch."""
        with self.open(path) as (_, batches):
            return [len(batch) for batch in batches]

    def stream(self, path: str, columns: Sequence[str], groups: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some record batches, a few at a time."""
        first = 0
        with self.open(path) as (stored, batches):
            names = [name for name in columns if name in stored.names]
            check_types(stored, path, names)
            for group, batch in enumerate(batches):
                for start in range(0, len(batch) if groups is None or group in groups else 0, GROUP_ROWS):
                    rows = pa.Table.from_batches([batch]).select(names).slice(start, GROUP_ROWS)
                    for column in rows.columns:
                        check_values(column)
                    yield self.add_columns(to_plain(rows), columns, first + start)
                first += len(batch)

    def add_columns(self, table: pa.Table, columns: Sequence[str], first: int) -> pa.Table:
        """The table with `ROW` on request, and with nulls for columns that the file lacks."""
        for name in (name for name in columns if name not in table.column_names):
            numbers = pa.array(np.arange(first, first + len(table)))
            table = table.append_column(name, numbers if name == ROW else pa.nulls(len(table)))
        return table

    def read_rows(self, path: str, pieces: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`, by `location`."""
        pieces = list(pieces)
        wanted = np.unique(np.concatenate([piece[ROW].to_numpy() for piece in pieces]))
        found, first = [], 0
        for table in self.stream(path, columns):
            here = wanted[(wanted >= first) & (wanted < first + len(table))]
            found.append(table.take(here - first))
            first += len(table)
            if first > wanted[-1]:
                break
        rows = pa.concat_tables(found)
        yield from (rows.take(np.searchsorted(wanted, piece[ROW].to_numpy())) for piece in pieces)


class CheckedMessages(io.RawIOBase):
    """The bytes of a file on an object store, which sends it once: each message is checked before it is unpacked."""

    def __init__(self, source: pa.NativeFile):
        self.messages, self.rest = pa.ipc.MessageReader.open_stream(source), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        if not self.rest and (message := next(iter(self.messages), None)):
            check_message(message)
            self.rest = memoryview(message.serialize()).cast("B")
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count


def listed_files(uri: str) -> set[str]:
    """The files that a `state.json` lists; none if it is another tool's. Raises ValueError for one that is damaged."""
    state = parse_json(storage.read_bytes(uri))
    if PROBLEM in state:
        raise ValueError(f"{uri} is no JSON object, and lists the Arrow files to read: save the data set again.")
    found = state.get("_data_files") or []
    return {one.get("filename") for one in found if isinstance(one, dict)}


def check_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Raises ArrowInvalid for buffers that are shorter than they claim, and for more rows than bytes."""
    batch.validate()
    if len(batch) > batch.nbytes:
        raise pa.ArrowInvalid(f"{len(batch):,} rows in fewer bytes")
    return batch


def check_values(column: pa.ChunkedArray) -> None:
    """Raises ArrowInvalid for offsets that lead out of a column. Text need not be UTF-8: its rows are rejected."""
    for chunk in column.chunks:
        is_text = pa.types.is_string(chunk.type), pa.types.is_large_string(chunk.type)
        in_bytes = chunk.view(pa.binary() if is_text[0] else pa.large_binary()) if any(is_text) else chunk
        in_bytes.validate(full=True)


def check_message(message: pa.ipc.Message) -> None:
    """Raises ArrowInvalid if a message's compressed buffers unpack to far more bytes than it has."""
    try:
        unpacked = unpacked_bytes(message)
    except struct.error as error:
        raise pa.ArrowInvalid(f"a header is damaged: {error}") from None
    if unpacked > max(MAX_CHUNK_BYTES, MAX_RATIO * message.body.size):
        raise pa.ArrowInvalid(f"{message.body.size:,} bytes that unpack to {unpacked:,}")


def unpacked_bytes(message: pa.ipc.Message) -> int:
    """What a message's compressed buffers unpack to, by the lengths that stand before them; 0 if none is compressed.

    The header is a FlatBuffer of Arrow's `Message`: pyarrow does not show these fields.
    """
    if message.type not in ("record batch", "dictionary"):
        return 0
    header = memoryview(message.metadata)

    def number(kind: str, position: int) -> int:
        return struct.unpack_from(kind, header, position)[0]

    def field(table: int, index: int) -> int:
        """The position of a table's field; 0 if it is absent."""
        fields, entry = table - number("<i", table), 4 + 2 * index
        offset = number("<H", fields + entry) if entry < number("<H", fields) else 0
        return table + offset if offset else 0

    def follow(position: int) -> int:
        return position + number("<I", position)

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    if not field(batch, 3):  # compression
        return 0
    buffers = follow(field(batch, 2))
    spans = [struct.unpack_from("<qq", header, buffers + 4 + 16 * one) for one in range(number("<I", buffers))]
    return sum(max(0, struct.unpack_from("<q", message.body, start)[0]) for start, length in spans if length)
