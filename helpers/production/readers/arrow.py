"""Arrow files as Hugging Face's `save_to_disk` writes them (streams), and Arrow's file format; mapped on a disk.

They are read in their order: finding a row on an object store sends what stands before it.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from ... import storage
from ...latents.parquet import check_types, to_plain
from ...raw.readers import GROUP_ROWS, ROW, Reader, naming, parse_json, plain_schema

STATE = "state.json"  # lists the files of a data set that `save_to_disk` wrote


class Arrow(Reader):
    what, suffixes, typed, location = "Arrow file", (".arrow",), True, (ROW,)

    @classmethod
    def files(cls, names: Iterable[str], folder: str) -> list[str]:
        """All but the caches of `datasets`; in a folder of its `save_to_disk`, those that its list names."""
        names = list(names)
        lists = [name for name in names if posixpath.basename(name) == STATE]
        listed = {posixpath.dirname(name): listed_files(storage.join(folder, name)) for name in lists}
        found = [(name, *posixpath.split(name)) for name in super().files(names, folder)]
        return [
            name
            for name, within, file in found
            if not file.startswith("cache-") and file in (listed.get(within) or {file})
        ]

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """`(schema, record batches)`. Raises ValueError naming a file that is not Arrow's."""
        filesystem, inner = storage.open_filesystem(path)
        opened = pa.memory_map(inner) if storage.is_local(path) else filesystem.open_input_file(inner)
        with naming(path, self.what), opened as source:
            is_file = source.read_at(6, 0) == b"ARROW1"
            found = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            yield found.schema, map(found.get_batch, range(found.num_record_batches)) if is_file else iter(found)

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
        first, names = 0, [name for name in columns if name != ROW]
        with self.open(path) as (stored, batches):
            check_types(stored, path, names)
            for group, batch in enumerate(batches):
                table = pa.Table.from_batches([batch])
                table = to_plain(table.select([name for name in names if name in table.column_names]))
                for name in names:
                    if name not in table.column_names:
                        table = table.append_column(name, pa.nulls(len(table)))
                if ROW in columns:
                    table = table.append_column(ROW, pa.array(np.arange(first, first + len(table))))
                first += len(table)
                if groups is None or group in groups:
                    yield from (table.slice(start, GROUP_ROWS) for start in range(0, len(table), GROUP_ROWS))

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


def listed_files(uri: str) -> set[str]:
    """The files that a `state.json` lists; none if it is another tool's."""
    found = parse_json(storage.read_bytes(uri)).get("_data_files") or []
    return {one.get("filename") for one in found if isinstance(one, dict)}
