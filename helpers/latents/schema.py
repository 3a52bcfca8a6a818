"""The columns of latents on disk: their names, shapes and bytes. Nothing else builds a column's name or bytes.

A latents folder holds `data/*.parquet` (one row per sample), `rejects/*.parquet` (one row per rejected input row) and
what `manifest` describes. Tensors are stored as the plain bytes of arrays, in `fixed_size_binary` columns, so reading
copies nothing. Embeddings of captions without padding vary in length and are `large_binary`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ID, CAPTION, EMBEDDINGS = "id", "caption", "caption_embeddings"
REASON, SOURCE, CAPTION_IDS = "reason", "source", "caption_ids"
DTYPE = np.float16
ROWS_PER_ROW_GROUP = 64  # small row groups shuffle well: training permutes row groups, then rows
LATENTS, PIXELS = "image_latents", "pixels"  # LATENTS alone: the column in which several shapes travel to the trainers
FEATURES = "image_features"  # what an image encoder says of each part of an image
HELD_OUT = "held out "  # begins the name of a bucket of held-out rows


def latents_column(width: int, height: int | None = None) -> str:
    """`image_latents_{side}` for squares, `image_latents_{width}x{height}` for other shapes."""
    return f"{LATENTS}_{width}" if height in (None, width) else f"{LATENTS}_{width}x{height}"


def input_column(column: str) -> str:
    """The column from which the encoder makes a stored column: pixels, or a caption's token ids."""
    return column.replace(LATENTS, PIXELS).replace(EMBEDDINGS, CAPTION_IDS)


def numbered(column: str, number: int) -> str:
    """The name of `column` for a row's caption `number`, from 1: `caption`, `caption_2`, ...

    Token ids and embeddings are numbered likewise.
    """
    return column if number == 1 else f"{column}_{number}"


def numbers(column: str, names: Iterable[str]) -> range:
    """The caption numbers, from 1, whose columns are among `names`: `column`, `column_2`, ... (`numbered`)."""
    return range(1, 1 + sum(bool(re.fullmatch(rf"{column}(_\d+)?", name)) for name in names))


def bucket_name(columns: Iterable[str], held_out: bool) -> str:
    """The bucket of rows that have latents in exactly these columns, such as "32+64" or "held out 80x48"."""
    return (HELD_OUT if held_out else "") + "+".join(column.removeprefix(f"{LATENTS}_") for column in columns)


def bucket_columns(name: str) -> list[str]:
    """The latents columns of a bucket."""
    return [f"{LATENTS}_{size}" for size in name.removeprefix(HELD_OUT).split("+")]


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """A stored tensor column, in fp16.

    Args:
        name: column name.
        shape: of one row: (2, C, H/8, W/8) latents, (tokens, width) embeddings.
        resolution: nominal resolution in pixels; for squares, the side. None for the embeddings.
        ragged: rows have variable length, at most `shape[0]`: the tokens of a caption, without padding.
    """

    name: str
    shape: tuple[int, ...]
    resolution: int | None = None
    ragged: bool = False

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON gives a list
        if self.resolution is None and self.name.startswith(LATENTS):
            object.__setattr__(self, "resolution", self.size[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; for a ragged column, of the longest."""
        return self.bytes_of(self.shape[0])

    def bytes_of(self, num: Any) -> Any:
        """Bytes of a row whose first dimension is `num` instead of `shape[0]`, such as a caption of `num` tokens.

        `num` may be an array.
        """
        return num * math.prod(self.shape[1:]) * DTYPE().itemsize

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.large_binary() if self.ragged else pa.binary(self.row_bytes)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels of the images behind a column of latents or image features."""
        width, _, height = self.name.rpartition("_")[2].partition("x")
        return int(width), int(height or width)

    def encode(
        self, values_BX: np.ndarray, valid_B: np.ndarray | None = None, num_tokens_B: np.ndarray | None = None
    ) -> pa.Array:
        """(B, *shape) floats -> an array of `arrow_type`; rows where `valid_B` is False become null.

        `num_tokens_B`: how much of each row a ragged column holds; None: all.
        """
        stored = to_binary(values_BX, valid_B)
        if not self.ragged:
            return stored
        num_tokens_B = np.full(len(stored), self.shape[0]) if num_tokens_B is None else num_tokens_B
        rows = zip(stored.to_pylist(), self.bytes_of(num_tokens_B), strict=True)
        return pa.array([row and row[:size] for row, size in rows], pa.large_binary())

    def decode(self, column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        """`(values (B, *shape) fp16, valid (B,) bool)`; the values of null rows are arbitrary.

        Rows of variable length are copied, and zeros follow their tokens (`num_tokens`). Other rows are not copied.
        """
        if not pa.types.is_fixed_size_binary(column.type):
            column = pad(column, self.row_bytes)
        stored_BX, valid_B = from_binary(column, (column.type.byte_width // DTYPE().itemsize,))
        num_values = math.prod(self.shape)  # `pad` may have made rows longer
        return stored_BX[:, :num_values].reshape(-1, *self.shape), valid_B

    def num_tokens(self, column: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """(B,) how much of `shape[0]` each row of a ragged column holds; 0 for null rows."""
        return pc.binary_length(column).fill_null(0).to_numpy() // self.bytes_of(1)


def latents_schema(id_type: pa.DataType, columns: list[ColumnSpec]) -> pa.Schema:
    """Arrow schema of `data/*.parquet`."""
    num_captions = numbers(EMBEDDINGS, (spec.name for spec in columns))
    captions = [(numbered(CAPTION, number), pa.string()) for number in num_captions]
    return pa.schema([(ID, id_type), *captions, *((spec.name, spec.arrow_type) for spec in columns)])


def rejects_schema(id_type: pa.DataType) -> pa.Schema:
    """Arrow schema of `rejects/*.parquet`: which row, why, and the file that it came from."""
    return pa.schema([(ID, id_type), (REASON, pa.string()), (SOURCE, pa.string())])


def held_out_mask(ids: list, share: float) -> np.ndarray:
    """(B,) bool: True for the rows that validation owns, whose ids hash below `share`.

    Only the id decides, so a row is on the same side whatever the seed, the epoch or the data around it.
    """
    if share == 0:
        return np.zeros(len(ids), dtype=bool)
    threshold = share * 2**32
    return np.array([zlib.crc32(str(i).encode()) < threshold for i in ids], dtype=bool)


def row_groups(num_rows: int) -> list[int]:
    """Rows of each row group of a file of `num_rows` rows."""
    full, rest = divmod(num_rows, ROWS_PER_ROW_GROUP)
    return [ROWS_PER_ROW_GROUP] * full + [rest] * (rest > 0)


def once_per_call(value: Any, num_rows: int, arrow_type: pa.DataType) -> pa.Array:
    """A column that holds a call's report in its first row, and null in the others.

    Ray Data may split and merge blocks between stages. A report stays with its row, so none is lost or counted twice.
    """
    return pa.array([value, *[None] * num_rows][:num_rows], arrow_type)


def to_binary(array_BX: np.ndarray, valid_B: np.ndarray | None = None, dtype: type = DTYPE) -> pa.Array:
    """B rows of an array as `fixed_size_binary` of `dtype`; rows where `valid_B` is False become null."""
    array_BX = np.ascontiguousarray(array_BX, dtype=dtype)
    row_type = pa.binary(math.prod(array_BX.shape[1:]) * array_BX.itemsize)
    validity = None if valid_B is None or np.all(valid_B) else pa.array(valid_B, type=pa.bool_()).buffers()[1]
    return pa.FixedSizeBinaryArray.from_buffers(row_type, len(array_BX), [validity, pa.py_buffer(array_BX.reshape(-1))])


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array; several chunks are copied. (`combine_chunks` also copies a single one.)"""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def from_binary(
    column: pa.Array | pa.ChunkedArray, shape: tuple[int, ...], dtype: type = DTYPE
) -> tuple[np.ndarray, np.ndarray]:
    """`(array (B, *shape), valid (B,) bool)` of a `fixed_size_binary` column; only several chunks are copied.

    The values of null rows are arbitrary.
    """
    column = one_array(column)
    width, itemsize = column.type.byte_width, np.dtype(dtype).itemsize
    values = np.frombuffer(column.buffers()[1], dtype, len(column) * width // itemsize, column.offset * width)
    return values.reshape(len(column), *shape), pc.is_valid(column).to_numpy(zero_copy_only=False)


def decode_present_rows(column: pa.Array | pa.ChunkedArray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`(values (V, *shape) uint8, valid (B,) bool)` of a `large_binary` column of B rows, of which V are not null.

    Only several chunks are copied. Null rows take no space in such a column. If images have several shapes, many rows
    are null.
    """
    column = one_array(column)
    valid_B = pc.is_valid(column).to_numpy(zero_copy_only=False)
    starts = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1, column.offset * 8) if len(column) else [0, 0]
    start, size = int(starts[0]), int(starts[-1] - starts[0])
    values = np.frombuffer(column.buffers()[2], np.uint8, size, start) if size else np.zeros(0, np.uint8)
    return values.reshape(valid_B.sum(), *shape), valid_B


def pad(column: pa.Array | pa.ChunkedArray, row_bytes: int) -> pa.Array | pa.ChunkedArray:
    """A binary column as `fixed_size_binary` of `row_bytes`: zeros follow shorter rows; null rows stay null."""
    if column.type == pa.binary(row_bytes):
        return column
    padded_BX = np.zeros((len(column), row_bytes), np.uint8)
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        padded_BX[:, :width], _ = from_binary(column, (width,), np.uint8)
    else:
        for padded, row in zip(padded_BX, column, strict=True):
            if row.is_valid:
                padded[: len(row.as_buffer())] = np.frombuffer(row.as_buffer(), np.uint8)
    return to_binary(padded_BX, column.is_valid().to_numpy(zero_copy_only=False), np.uint8)
