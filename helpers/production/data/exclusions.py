"""Rows that must not be used, listed by their ids or by the SHA-256 sums of their images' bytes.

A text file has one entry a line. A Parquet file has the entries in a column `id` or `sha256`. Ids are compared as text.
A list applies to all data sets of a mixture. In stored latents, rows are found by their ids alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ... import storage
from ...config import TrainingConfig
from ...latents import held_out, schema
from ...latents.manifest import read_manifest
from ...latents.parquet import open_parquet, read_parquet, write_table
from ...latents.plan import RowRange, Source
from ...latents.read import KEEP, ReadRows
from ...train.extra import Extra

COLUMNS = schema.ID, "sha256"  # of a Parquet file; the first that it has is read
SEARCHED_FILES = 10_000
IsExcluded = Callable[[pa.ChunkedArray], np.ndarray]  # ids -> (B,) bool: the rows that must not be used
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Exclusions(Extra):
    """A list of excluded rows: `is_excluded` goes to `stages.transform(excluded=...)` and to `features.stored_stream`.

    The driver reads the file and pins its SHA-256. Other processes read it once, and refuse another content. Of each
    entry they keep a hash of 8 bytes: two texts have the same hash with a probability of 2**-64.

    `uri`: of the file; "" for none. Raises ValueError for a file that cannot be used.
    """

    uri: str = ""
    sha256: str = dataclasses.field(default="", init=False)

    def __post_init__(self):
        if self.uri:
            object.__setattr__(self, "uri", storage.resolve(str(self.uri)))
            object.__setattr__(self, "sha256", read_list(self.uri)[0])

    def hashes(self) -> np.ndarray:
        """(entries,) int64: the hashes of the entries, ascending. They differ between processes."""
        with _lock:  # several threads read latents
            sha256, hashes = _load(self.uri, self.sha256)
        if sha256 != self.sha256:
            raise ValueError(f"exclusions={self.uri!r} has changed: start the same command again to use it as it is.")
        return hashes

    def is_excluded(self, ids: Sequence[Any], images: Iterable[bytes | None] | None = None) -> np.ndarray:
        """(B,) bool: whether the list holds a row's id or, if encoded images are given, the SHA-256 of its image."""
        if not self.uri:
            return np.zeros(len(ids), dtype=bool)
        excluded_B = self.holds(list(map(str, ids)))
        if images is not None:
            sums = [hashlib.sha256(data or b"").hexdigest() for data in images]
            excluded_B |= self.holds(sums) | self.holds([text.upper() for text in sums])
        return excluded_B

    def holds(self, texts: list[str]) -> np.ndarray:
        hashes, hashes_B = self.hashes(), np.fromiter(map(hash, texts), np.int64, len(texts))
        return hashes[np.searchsorted(hashes, hashes_B).clip(max=len(hashes) - 1)] == hashes_B

    def record(self, latents_uri: str | None = None) -> dict[str, Any]:
        """What a job or a run records of its list: {} without one.

        A finished job at `latents_uri` keeps its own record, because its rows stay as they are. Training masks those
        that are excluded by now.
        """
        if latents_uri is not None:
            with contextlib.suppress(FileNotFoundError, storage.DamagedFile):
                return {name: of for name, of in read_manifest(latents_uri).job.items() if name == "exclusions"}
        return {"exclusions": {"sha256": self.sha256, "entries": len(self.hashes())}} if self.uri else {}

    def check_found(self, latents_uris: Iterable[str]) -> None:
        """Raises ValueError if no row of these stored latents, written or rejected, has an id that is listed.

        Reads the ids of at most `SEARCHED_FILES` files. Latents that were encoded with the same list, and those of
        online runs, are not searched.
        """
        manifests = {uri: read_manifest(uri) for uri in latents_uris if self.uri}
        if any(one.online or self.record().items() <= one.job.items() for one in manifests.values()):
            return
        folders = [storage.join(uri, name) for uri in manifests for name in ("rejects", "data")]
        files = [file for folder in folders for file in storage.list_files(folder, ".parquet")]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            is_found = any(self.is_excluded(ids).any() for ids in pool.map(read_ids, files[:SEARCHED_FILES]))
        if files and not is_found:
            raise ValueError(
                f"exclusions={self.uri!r}: none of its {len(self.hashes()):,} entries is an id in "
                f"{' or '.join(manifests)}, where ids are such as {read_ids(files[0])[0].as_py()!r}: give such ids."
            )

    def on_driver(self, config: TrainingConfig) -> contextlib.AbstractContextManager:
        self.check_found(config.proportions)
        if self.uri:
            self.drop_held_out(config)
        return contextlib.nullcontext()

    def drop_held_out(self, config: TrainingConfig) -> None:
        """Take the listed rows out of the run's copy of its held-out rows."""
        rows = held_out.of_run(config.run_uri, config.proportions, config.largest_resolution)
        if rows is not None and (excluded_B := self.is_excluded(rows[schema.ID])).any():
            uri = storage.join(config.run_uri, held_out.FOLDER, held_out.COPY)
            write_table(uri, rows.filter(pa.array(~excluded_B)))


def mask(read: ReadRows, is_excluded: IsExcluded) -> ReadRows:
    """The same reader, with the column `keep`: False for excluded rows. It is a `wrap` of `read.latents_dataset`."""
    return functools.partial(read_masked, read=read, is_excluded=is_excluded)


def read_masked(row_ranges: list[RowRange], source: Source, *, read: ReadRows, is_excluded: IsExcluded) -> pa.Table:
    rows = read(row_ranges, source)
    return rows.append_column(KEEP, pa.array(~is_excluded(rows[schema.ID])))


def read_ids(uri: str) -> pa.ChunkedArray:
    return read_parquet(uri, [schema.ID])[schema.ID]


def read_list(uri: str) -> tuple[str, np.ndarray]:
    """`(SHA-256 of the file, hashes of its entries)`."""
    try:
        data = storage.read_bytes(uri)
        entries = parquet_entries(uri) if data.startswith(b"PAR1") else data.decode("utf-8-sig").split("\n")
        hashes = np.sort(np.fromiter(map(hash, filter(None, map(str.strip, entries))), np.int64))
    except (OSError, UnicodeDecodeError, pa.ArrowException, KeyError) as error:
        raise ValueError(
            f"exclusions={uri!r} cannot be read: give a text file in UTF-8, or a Parquet file with a column of text or "
            f"integers, 'id' or 'sha256'. ({error})"
        ) from None
    if not len(hashes):
        raise ValueError(f"exclusions={uri!r} holds no id: give another list, or none.")
    return hashlib.sha256(data).hexdigest(), hashes


@functools.lru_cache(maxsize=2)
def _load(uri: str, sha256: str) -> tuple[str, np.ndarray]:
    return read_list(uri)


def parquet_entries(uri: str) -> Iterator[str]:
    """The entries of a Parquet file as text; bytes as hex digits. Raises for a file with other columns or types."""
    with open_parquet(uri) as file:
        column = next((name for name in COLUMNS if name in file.schema_arrow.names), COLUMNS[0])
        kind = file.schema_arrow.field(column).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind):
            raise pa.ArrowInvalid(f"The column {column!r} holds {kind}.")
        for batch in file.iter_batches(columns=[column]):
            for value in batch[column].drop_null().to_pylist():
                yield value.hex() if isinstance(value, bytes) else str(value)
