"""What latents look like on disk: the stored columns and the manifest. Nothing else builds a column's name or bytes.

A latents folder holds `data/*.parquet` (one row per sample), `rejects/*.parquet` (one row per rejected input row) and
`manifest.json`. Tensors are the plain bytes of arrays in `fixed_size_binary` columns, so reading copies nothing.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_VERSION = 2  # version 1 had `shapes` and `text_precision` in place of `columns`; it is still read
ID, CAPTION, EMBEDDINGS = "id", "caption", "caption_embeddings"
REASON, SOURCE, CAPTION_IDS = "reason", "source", "caption_ids"
DTYPE = np.float16
SCALE_BYTES, FLOAT8_MAX = 4, 448.0  # the codec "fp8": an fp32 scale per row; the largest E4M3 number
ROWS_PER_ROW_GROUP = 64  # small row groups shuffle well: training permutes row groups, then rows
MANIFEST = "manifest.json"


def latents_column(resolution: int) -> str:
    return f"image_latents_{resolution}"


def pixels_column(resolution: int) -> str:
    """The column between the transform and the encoder."""
    return f"pixels_{resolution}"


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """A stored tensor column.

    Args:
        name: column name.
        shape: of one row: (2, C, H/8, W/8) latents, (tokens, width) embeddings.
        codec: "fp16", or "fp8" for 8-bit floats (E4M3) and one fp32 scale per row.

    Raises ValueError for an unknown codec.
    """

    name: str
    shape: tuple[int, ...]
    codec: str = "fp16"

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON gives a list
        if self.codec not in ("fp16", "fp8"):
            raise ValueError(f"Column {self.name!r} is stored as {self.codec!r}; this code reads 'fp16' and 'fp8'.")

    @property
    def row_bytes(self) -> int:
        values = math.prod(self.shape)
        return values * DTYPE().itemsize if self.codec == "fp16" else SCALE_BYTES + values

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.binary(self.row_bytes)

    @property
    def resolution(self) -> int | None:
        """Pixels per side of the pictures behind a latents column; None for the embeddings."""
        return None if self.name == EMBEDDINGS else int(self.name.removeprefix(latents_column("")))

    def encode(self, values_BX: np.ndarray, valid_B: np.ndarray | None = None) -> pa.Array:
        """(B, *shape) floats -> a `fixed_size_binary` array; rows where `valid_B` is False become null."""
        if self.codec == "fp8":
            return to_binary(to_float8(values_BX), valid_B, np.uint8)
        return to_binary(values_BX, valid_B)

    def read(self, column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """`(values (B, *shape), scales (B,), valid (B,) bool)`, as they are stored, without a copy.

        fp16 and None, or the bits of E4M3 floats as uint8 and the fp32 scales that they are to be multiplied by. The
        values of null rows are arbitrary.
        """
        if self.codec == "fp8":
            stored_BX, valid_B = from_binary(column, (self.row_bytes,), np.uint8)
            scales_BX, values_BX = np.split(stored_BX, [SCALE_BYTES], axis=1)
            return values_BX.reshape(-1, *self.shape), scales_BX.copy().view(np.float32)[:, 0], valid_B
        values_BX, valid_B = from_binary(column, self.shape)
        return values_BX, None, valid_B

    def decode(self, column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        """`(values (B, *shape) fp16, valid (B,) bool)`; the values of null rows are arbitrary. fp16 is not copied."""
        import torch  # not at the top: the tasks that read latents need no PyTorch

        values_BX, scales_B, valid_B = self.read(column)
        if scales_B is not None:
            floats_BX = torch.from_numpy(values_BX.copy()).view(torch.float8_e4m3fn).float().flatten(1).numpy()
            values_BX = (floats_BX * scales_B[:, None]).astype(DTYPE).reshape(values_BX.shape)
        return values_BX, valid_B


def latents_schema(id_type: pa.DataType, columns: list[ColumnSpec]) -> pa.Schema:
    """Arrow schema of `data/*.parquet`."""
    return pa.schema([(ID, id_type), (CAPTION, pa.string()), *((spec.name, spec.arrow_type) for spec in columns)])


def rejects_schema(id_type: pa.DataType) -> pa.Schema:
    """Arrow schema of `rejects/*.parquet`: which row, why, and the file that it came from."""
    return pa.schema([(ID, id_type), (REASON, pa.string()), (SOURCE, pa.string())])


def row_groups(num_rows: int) -> list[int]:
    """Rows of each row group of a file of `num_rows` rows."""
    full, rest = divmod(num_rows, ROWS_PER_ROW_GROUP)
    return [ROWS_PER_ROW_GROUP] * full + [rest] * (rest > 0)


def once_per_call(value: Any, num_rows: int, arrow_type: pa.DataType) -> pa.Array:
    """A column that holds a call's report in its first row and null elsewhere.

    Ray Data may split and merge blocks between stages; a report stays with its row, so none is lost or counted twice.
    """
    return pa.array([value, *[None] * num_rows][:num_rows], arrow_type)


def to_binary(array_BX: np.ndarray, valid_B: np.ndarray | None = None, dtype: type = DTYPE) -> pa.Array:
    """B rows of an array as `fixed_size_binary` of `dtype`; rows where `valid_B` is False become null."""
    array_BX = np.ascontiguousarray(array_BX, dtype=dtype)
    row_type = pa.binary(math.prod(array_BX.shape[1:]) * array_BX.itemsize)
    validity = None if valid_B is None or np.all(valid_B) else pa.array(valid_B, type=pa.bool_()).buffers()[1]
    return pa.FixedSizeBinaryArray.from_buffers(row_type, len(array_BX), [validity, pa.py_buffer(array_BX.reshape(-1))])


def from_binary(
    column: pa.Array | pa.ChunkedArray, shape: tuple[int, ...], dtype: type = DTYPE
) -> tuple[np.ndarray, np.ndarray]:
    """`(array (B, *shape), valid (B,) bool)` of a `fixed_size_binary` column, without a copy.

    The values of null rows are arbitrary.
    """
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    width, itemsize = column.type.byte_width, np.dtype(dtype).itemsize
    values = np.frombuffer(column.buffers()[1], dtype, len(column) * width // itemsize, column.offset * width)
    return values.reshape(len(column), *shape), pc.is_valid(column).to_numpy(zero_copy_only=False)


def to_float8(values_BX: np.ndarray) -> np.ndarray:
    """(B, ...) floats -> (B, 4 + X) bytes: an fp32 scale per row, and the X E4M3 floats that it multiplies.

    The scale maps a row's largest magnitude to 448, E4M3's largest number, so nothing overflows.
    """
    import torch

    rows = torch.from_numpy(np.array(values_BX, dtype=np.float32)).flatten(1)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / FLOAT8_MAX
    return torch.cat([scales.view(torch.uint8), (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8)], 1).numpy()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a latents folder holds. `manifest.json` is written last, so a folder that has one is complete.

    `segments` are the committed parts of the job, in order: each has its `files` ({"name", "row_groups": rows of each
    row group}) and counts; planning an epoch reads nothing else. read = written + sum(rejected) + filtered.
    """

    encoder: dict  # model, revision, precision (as asked for: a CPU computes in fp32 whatever it is)
    resolutions: list[int]
    columns: list[ColumnSpec]
    scaling_factor: float
    id_type: str
    empty_caption_embedding: str  # base64 of fp16, in the shape of the embeddings
    job: dict  # the parameters that decide what is written
    segments: list[dict]
    report: dict = dataclasses.field(default_factory=dict)  # seconds and rows by stage
    schema_version: int = SCHEMA_VERSION

    def column(self, name: str) -> ColumnSpec:
        return next(spec for spec in self.columns if spec.name == name)

    def latents(self, resolution: int) -> ColumnSpec:
        return self.column(latents_column(resolution))

    @property
    def embeddings(self) -> ColumnSpec:
        return self.column(EMBEDDINGS)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor column -> shape of one row."""
        return {spec.name: spec.shape for spec in self.columns}

    def total(self, count: str) -> int:
        """Sum over the segments of "read", "written" or "filtered"."""
        return sum(segment[count] for segment in self.segments)

    def rows_at(self, resolution: int) -> int | None:
        """Rows that have latents at a resolution; None where that is not known before they are encoded (online)."""
        counts = [s["at"].get(latents_column(resolution), 0) for s in self.segments if "at" in s]
        return sum(counts) if counts else None

    @property
    def rejected(self) -> dict[str, int]:
        """Reason -> rows, the most frequent first."""
        return dict(
            sum((collections.Counter(s["rejected"]) for s in self.segments), collections.Counter()).most_common()
        )

    @property
    def files(self) -> list[tuple[str, list[int]]]:
        """[(name, rows of each row group)] in the order of the job."""
        return [(file["name"], file["row_groups"]) for segment in self.segments for file in segment["files"]]

    @property
    def empty_caption(self) -> np.ndarray:
        """(tokens, width) fp16: what replaces a dropped caption."""
        values = np.frombuffer(base64.b64decode(self.empty_caption_embedding), dtype=DTYPE)
        return values.reshape(self.embeddings.shape)

    @property
    def online(self) -> dict | None:
        """The preprocessing parameters of data that is encoded while a run trains on it; None for stored latents."""
        return self.job.get("online")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on its way to the trainers at its largest: latents and embeddings, or (online) pixels."""
        return max(sum(spec.row_bytes for spec in self.columns), self.job.get("raw_row_bytes", 0))

    def to_dict(self) -> dict:
        """The segments, which are long, come last, so that they need not be read."""
        counts = {count: self.total(count) for count in ("read", "written", "filtered")}
        values = {**dataclasses.asdict(self), **counts, "rejected": self.rejected}
        return {name: values[name] for name in sorted(values, key="segments".__eq__)}

    @classmethod
    def from_dict(cls, values: dict) -> Manifest:
        """Raises ValueError for a schema version that this code does not read."""
        version = values.get("schema_version")
        if version not in (1, SCHEMA_VERSION):
            raise ValueError(
                f"These latents have schema version {version!r}, this code reads 1 and {SCHEMA_VERSION}: encode the "
                "data again with Preprocessing.ipynb."
            )
        if version == 1:
            codecs = {EMBEDDINGS: values.get("text_precision", "fp16")}
            columns = [ColumnSpec(name, shape, codecs.get(name, "fp16")) for name, shape in values["shapes"].items()]
        else:
            columns = [ColumnSpec(**spec) for spec in values["columns"]]
        names = {field.name for field in dataclasses.fields(cls)} & values.keys()
        known = {name: values[name] for name in names}
        return cls(**{**known, "columns": columns, "schema_version": SCHEMA_VERSION})


def encode_embedding(array: np.ndarray) -> str:
    """(tokens, width) -> the text that `Manifest.empty_caption_embedding` holds."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=DTYPE).tobytes()).decode()
