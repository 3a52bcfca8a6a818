"""`leave_out`: a list of rows that must not be used, by their ids or by the SHA-256 sums of their pictures' bytes.

A text file has one entry a line. A Parquet file has the entries in a column `id` or `sha256`. Ids are compared as text.
A list applies to all data sets of a mixture. In stored latents, rows are found by their ids alone.

The driver adds the file's own SHA-256 to its location (`pin`): `{uri}@{sha256}`. Configs carry this text to all
processes and to a run's `config.json`. A process reads the list once. It keeps a hash of 8 bytes for each entry: two
texts have the same hash with a probability of 2**-64.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from ... import storage
from ...latents import schema
from ...latents.parquet import open_parquet, read_parquet

MOST_BYTES = 2**30  # of a list: 16 million sums as text
COLUMNS = schema.ID, "sha256"  # of a Parquet file; the first that it has is read
BY_ID, BY_PICTURE = "left out by id", "left out by picture"  # why raw rows are rejected
SHA256 = re.compile("[0-9a-f]{64}")
_lock = threading.Lock()


# ---- the list


def split(location: str) -> tuple[str, str]:
    """`(uri, SHA-256 of the file)` of a list's location; the sum is "" if `pin` has not added it."""
    uri, _, sha256 = location.rpartition("@")
    return (uri, sha256) if uri and SHA256.fullmatch(sha256) else (location, "")


def pin(location: str) -> str:
    """A list's location with the file's SHA-256; "" stays "". Raises ValueError for a list that cannot be used."""
    return f"{split(location)[0]}@{_read(location)[0]}" if location else ""


def record(location: str) -> dict[str, str | int] | None:
    """What a job or a run records of its list: the file's "sha256" and the number of "entries"; None without one."""
    return {"sha256": _load(location)[0], "entries": len(load_hashes(location))} if location else None


def load_hashes(location: str) -> np.ndarray:
    """(entries,) int64: the hashes of a list's entries, ascending. Raises ValueError as `pin` does.

    The file is read once per process. Hashes differ between processes.
    """
    with _lock:  # several threads read latents
        return _load(location)[1]


def _read(location: str) -> tuple[str, np.ndarray]:
    """`(SHA-256 of the file, hashes of its entries)`."""
    uri, expected = split(location)
    try:
        if (size := storage.version(uri)[0] or 0) > MOST_BYTES:
            raise ValueError(f"leave_out={uri!r} has {size:,} bytes: give a list of at most {MOST_BYTES:,}.")
        data = storage.read_bytes(uri)
        lines = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig")
        entries = parquet_entries(uri) if data.startswith(b"PAR1") else map(str.strip, lines)
        hashes = np.sort(np.fromiter(map(hash, filter(None, entries)), np.int64))
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(
            f"leave_out={uri!r} cannot be read: give a text file in UTF-8 or a Parquet file. ({error})"
        ) from None
    sha256 = hashlib.sha256(data).hexdigest()
    if expected and sha256 != expected:
        raise ValueError(
            f"leave_out={uri!r} has changed (its SHA-256 is {sha256}, not {expected}): start the same command again to "
            "use the file as it is now."
        )
    if not len(hashes):
        raise ValueError(f"leave_out={uri!r} holds no id: give another list, or none.")
    return sha256, hashes


_load = functools.lru_cache(maxsize=2)(_read)


def parquet_entries(uri: str) -> Iterator[str]:
    """The entries of a Parquet file as text; bytes as hex digits. Raises ValueError for other columns or types."""
    with open_parquet(uri) as file:
        names = file.schema_arrow.names
        column = next((name for name in COLUMNS if name in names), None)
        if column is None:
            raise ValueError(f"leave_out={uri!r} has no column 'id' or 'sha256' but {', '.join(names)}: rename one.")
        kind = file.schema_arrow.field(column).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind):
            raise ValueError(f"leave_out={uri!r} holds {kind} in {column!r}, not ids or sums: give text or integers.")
        for batch in file.iter_batches(columns=[column]):
            for value in batch[column].drop_null().to_pylist():
                yield value.hex() if isinstance(value, bytes) else str(value)


# ---- the rows


def is_listed(location: str, values: pa.ChunkedArray | Sequence[int | str | None]) -> np.ndarray:
    """(B,) bool: whether a list holds each of these ids or sums; all False for the location ""."""
    if not location:
        return np.zeros(len(values), dtype=bool)
    hashes = load_hashes(location)
    hashes_B = np.fromiter(map(hash, map(str, values)), np.int64, len(values))
    return hashes[np.searchsorted(hashes, hashes_B).clip(max=len(hashes) - 1)] == hashes_B


def reject_reasons(location: str, ids: pa.ChunkedArray, pictures: Iterable[bytes | None]) -> list[str]:
    """Why each raw row is left out, by its id or the SHA-256 of its picture; "" for rows that are not listed."""
    if not location:
        return [""] * len(ids)
    sums = [hashlib.sha256(data or b"").hexdigest() for data in pictures]
    by_picture_B = is_listed(location, sums) | is_listed(location, [text.upper() for text in sums])
    return np.select([is_listed(location, ids), by_picture_B], [BY_ID, BY_PICTURE], "").tolist()


def say_if_unused(recorded: dict[str, str | int] | None, reasons: Iterable[str]) -> None:
    """Print a sentence if a list has been given and no raw row was rejected because of it.

    `recorded`: what `record` returns. `reasons`: why raw rows were rejected.
    """
    if recorded and not {BY_ID, BY_PICTURE} & set(reasons):
        print(f"leave_out: none of its {recorded['entries']:,} ids or sums was found in the rows that were read.")


def drop_listed(location: str, rows: pa.Table) -> pa.Table:
    """The rows of a table of latents that are not listed."""
    return rows.filter(pa.array(~is_listed(location, rows[schema.ID])))


def check_found(location: str, latents_uris: Iterable[str]) -> None:
    """Raises ValueError if no row of these stored latents, written or rejected, has an id that is listed.

    Reads the ids of their files until one is found.
    """
    folders = [storage.join(uri, name) for uri in latents_uris for name in ("rejects", "data")]
    files = [file for folder in folders for file in storage.list_files(folder, ".parquet")]
    pool = ThreadPoolExecutor(16)
    for ids in pool.map(lambda file: read_parquet(file, [schema.ID])[schema.ID], files):
        if is_listed(location, ids).any():
            return pool.shutdown(cancel_futures=True)
    raise ValueError(
        f"leave_out={split(location)[0]!r}: none of its {len(load_hashes(location)):,} entries is an id in "
        f"{' or '.join(latents_uris)}, where ids are such as {ids[0].as_py()!r}: give a list of such ids."
    )
