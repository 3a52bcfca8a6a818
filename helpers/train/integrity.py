"""Checksums of a checkpoint's stored pieces, and a reader that checks them and runs no code from the files.

`torch.distributed.checkpoint` (DCP) stores each rank's pieces of tensors one after the other in a file of its own, and
describes them in `.metadata`, which is a pickle. No Ray.
"""

from __future__ import annotations

import collections
import io
import itertools
import os
import pathlib
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.storage import WriteResult

from .. import storage

METADATA = ".metadata"
Piece = tuple[int, int, int]  # offset, bytes, CRC-32
Pieces = dict[str, list[Piece]]  # file -> its pieces, in the order of their offsets
AHEAD = 2  # pieces that are checked while one is loaded
THREADS = 8  # that read and check pieces; zlib and reads release the interpreter lock
SPAN_BYTES = 64 * 2**20
CHUNK_BYTES = 4 * 2**20  # read at a time into the same memory: new memory would take as long as the checksum
# What `.metadata` is made of. The unpickler makes nothing else.
KNOWN_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
# What a learning rate that is a NumPy scalar is pickled as.
NUMBERS = [np.float64(0).__reduce__()[0], np.dtype, type(np.dtype(np.float64))]


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint that is not safe to use: its bytes have changed, or its content is not allowed.

    Three kinds of content are not allowed:
        - Metadata that names a class which PyTorch's checkpoints do not contain.
        - Metadata that names a file outside of the checkpoint's folder.
        - Entries that are not tensors and hold more than numbers and texts.
    """


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles only `KNOWN_CLASSES` and dtypes. Raises DamagedCheckpoint for any other name before importing it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN_CLASSES.get(module, ()):
            raise DamagedCheckpoint(f"{METADATA} names {module}.{name}, which no checkpoint holds: do not use it.")
        return super().find_class(module, name)


class SummingWriter(dcp.FileSystemWriter):
    """Writes to a local folder, and remembers which pieces this rank wrote, to compute their checksums."""

    def write_data(self, *args: Any, **kwargs: Any) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(*args, **kwargs)
        self.stored = [result.storage_data for result in written.wait()]
        return written

    def sum_pieces(self) -> Pieces:
        """The checksums of what this rank has written, and of the metadata if this rank wrote it."""
        folder, pieces = pathlib.Path(self.path), {}
        for stored in self.stored:
            pieces.setdefault(stored.relative_path, []).append((stored.offset, stored.length))
        if (folder / METADATA).exists():
            pieces[METADATA] = [(0, (folder / METADATA).stat().st_size)]
        return {
            name: [(*piece, crc32(folder / name, *piece)) for piece in sorted(found)] for name, found in pieces.items()
        }


def crc32(path: str | os.PathLike, offset: int, length: int) -> int:
    """CRC-32 of `length` bytes of a local file, from byte `offset` on; of fewer, if the file ends before."""
    found, buffer = 0, memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while num_read := file.readinto(buffer[:length]):
            found = zlib.crc32(buffer[:num_read], found)
            length -= num_read
    return found


def find_damage(checkpoint_uri: str, pieces: Pieces) -> str | None:
    """The first damaged file of a checkpoint, in a few words; None if all are intact. Reads the whole checkpoint."""
    filesystem, folder = storage.open_filesystem(checkpoint_uri)

    def check(span: tuple[str, list[Piece]]) -> str | None:
        name, of_span = span
        if storage.is_local(checkpoint_uri):
            found = [crc32(f"{folder}/{name}", offset, length) for offset, length, _ in of_span]
        else:
            start, (last, length, _) = of_span[0][0], of_span[-1]
            with filesystem.open_input_file(f"{folder}/{name}") as file:
                file.seek(start)
                data = memoryview(file.read(last + length - start))
            found = [zlib.crc32(data[offset - start : offset - start + length]) for offset, length, _ in of_span]
        for number, (offset, _, expected) in zip(found, of_span, strict=True):
            if number != expected:
                return f"its file {name} is damaged at byte {offset:,}"
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return next(filter(None, pool.map(check, split_spans(pieces))), None)


def split_spans(pieces: Pieces) -> Iterator[tuple[str, list[Piece]]]:
    """`(file, consecutive pieces)`: spans of the files, to be read from an object store by one request each.

    A span has at most `SPAN_BYTES`, unless it is a single larger piece.
    """
    for name, of_file in pieces.items():
        span = []
        for piece in of_file:
            if span and piece[0] + piece[1] - span[0][0] > SPAN_BYTES:
                yield name, span
                span = []
            span.append(piece)
        if span:
            yield name, span


class CheckedReader(dcp.FileSystemReader):
    """Reads a local checkpoint. Raises DamagedCheckpoint for a piece whose bytes have changed, before it is used.

    `pieces`: of the checkpoint; {} for one without checksums, which is read unchecked.
    """

    def __init__(self, folder: str, pieces: Pieces):
        super().__init__(folder)
        self.folder = pathlib.Path(folder)
        self.expected = {(name, offset): crc for name, of_file in pieces.items() for offset, _, crc in of_file}
        # Here, on every rank: DCP would turn what `read_metadata` raises into a text.
        data = (self.folder / METADATA).read_bytes()
        self.check(METADATA, 0, zlib.crc32(data))
        self.metadata = MetadataUnpickler(io.BytesIO(data)).load()
        self.metadata.storage_meta = self.metadata.storage_meta or dcp_metadata.StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id

    def check(self, name: str, offset: int, found: int) -> None:
        """Raises DamagedCheckpoint if `found`, a piece's CRC-32, is not the expected one.

        The piece begins at byte `offset` of the file `name`. Without checksums, nothing is checked.
        """
        if self.expected and found != self.expected.get((name, offset)):
            raise DamagedCheckpoint(f"{self.folder / name} is damaged at byte {offset:,}: use another checkpoint.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        of_file: dict[str, list[Any]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            of_file.setdefault(stored.relative_path, []).append(stored)
        for name in of_file:
            if name != os.path.basename(name):
                raise DamagedCheckpoint(f"{METADATA} of {self.folder} names a file outside of it: {name!r}.")
        in_order = itertools.chain.from_iterable(of_file.values())  # as DCP asks for them
        with ThreadPoolExecutor(AHEAD) as pool:
            self.checked = map_ahead(pool, self.check_piece, in_order)
            return super().read_data(plan, planner)

    def check_piece(self, stored: Any) -> Any:
        """`stored` itself, after a check of the piece. `stored`: the piece's file, offset and length, from DCP."""
        found = crc32(self.folder / stored.relative_path, stored.offset, stored.length) if self.expected else 0
        self.check(stored.relative_path, stored.offset, found)
        return stored

    def _slice_file(self, file: IO[bytes], stored: Any) -> IO[bytes]:
        """A piece's bytes, which have been checked. DCP calls it for each piece."""
        if next(self.checked) is not stored:
            raise RuntimeError("DCP does not load the pieces in the order in which they are checked.")
        return super()._slice_file(file, stored)


def map_ahead(pool: ThreadPoolExecutor, function: Callable, values: Iterable) -> Iterator:
    """`map`, whose next `AHEAD` results are computed by the pool while the caller uses one."""
    coming: collections.deque = collections.deque()
    for value in values:
        coming.append(pool.submit(function, value))
        if len(coming) > AHEAD:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """Loads non-tensor entries, such as a learning rate, only if PyTorch's weights-only unpickler accepts them."""

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        try:
            with torch.serialization.safe_globals(NUMBERS):
                torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            name = read_item.dest_index.fqn
            raise DamagedCheckpoint(
                f"The checkpoint's {name} holds more than numbers and texts: do not use it."
            ) from None
        value.seek(0)
        super().load_bytes(read_item, value)
