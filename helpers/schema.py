"""What latents look like on disk: column names, shapes, dtypes and the manifest. The one place that knows them.

A latents folder holds `data/*.parquet` (one row a sample), `rejects/*.parquet` (one row a rejected input row) and
`manifest.json`. Tensors are stored as the plain bytes of fp16 arrays in `fixed_size_binary` columns: no copy and no
conversion when they are read (but for captions in 8-bit floats, where that was asked for).
"""

import base64
import dataclasses
import functools
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import storage

SCHEMA_VERSION = 1
ID, CAPTION, EMBEDDINGS = "id", "caption", "caption_embeddings"
REASON, SOURCE = "reason", "source"
DTYPE = np.float16
SCALE_BYTES, FLOAT8_MAX = 4, 448.0  # of captions' embeddings in 8-bit floats
ROWS_PER_ROW_GROUP = 64  # small row groups shuffle well: training permutes row groups, then rows
MANIFEST = "manifest.json"


def row_groups(num_rows):
    """Rows of each row group of a file of `num_rows` rows."""
    full, rest = divmod(num_rows, ROWS_PER_ROW_GROUP)
    return [ROWS_PER_ROW_GROUP] * full + [rest] * (rest > 0)


def latents_column(resolution):
    return f"image_latents_{resolution}"


def latents_shape(resolution, latent_channels=4, downsampling=8, moments=2):
    """(2, C, H/8, W/8): the VAE posterior's mean and standard deviation, unscaled; (1, ...): the mean alone."""
    return (moments, latent_channels, resolution // downsampling, resolution // downsampling)


def column_bytes(column, shape, text_precision="fp16"):
    """Bytes of one row of a tensor column."""
    numbers = int(np.prod(shape))
    return numbers + SCALE_BYTES if column == EMBEDDINGS and text_precision == "fp8" else numbers * DTYPE().itemsize


def latents_schema(id_type, shapes, text_precision="fp16"):
    """Arrow schema of `data/*.parquet`: `shapes` maps each tensor column to the shape of one row."""
    tensors = [
        pa.field(column, pa.binary(column_bytes(column, shape, text_precision))) for column, shape in shapes.items()
    ]
    return pa.schema([pa.field(ID, id_type), pa.field(CAPTION, pa.string()), *tensors])


def rejects_schema(id_type):
    """Arrow schema of `rejects/*.parquet`: which row, why, and the file that it came from."""
    return pa.schema([pa.field(ID, id_type), pa.field(REASON, pa.string()), pa.field(SOURCE, pa.string())])


def to_binary(array_BX, valid_B=None, dtype=DTYPE):
    """B rows of an array as a `fixed_size_binary` Arrow array of `dtype`; rows where `valid_B` is False become null."""
    array_BX = np.ascontiguousarray(array_BX, dtype=dtype)
    kind = pa.binary(int(np.prod(array_BX.shape[1:])) * array_BX.itemsize)
    validity = None if valid_B is None or np.all(valid_B) else pa.array(valid_B, type=pa.bool_()).buffers()[1]
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(array_BX), [validity, pa.py_buffer(array_BX.reshape(-1))])


def from_binary(column, shape, dtype=DTYPE):
    """`(array_BX, valid_B)`: a `fixed_size_binary` column as an array of shape (B, *shape), without a copy.

    Rows that are null hold arbitrary numbers and have `valid_B` False.
    """
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    width = column.type.byte_width
    start = column.offset * width
    values = np.frombuffer(
        column.buffers()[1], dtype=dtype, count=len(column) * width // np.dtype(dtype).itemsize, offset=start
    )
    return values.reshape(len(column), *shape), pc.is_valid(column).to_numpy(zero_copy_only=False)


@functools.cache
def float8_values():
    """(256,) fp32: what the bytes of 8-bit floats (E4M3: four bits of exponent, three of mantissa, no infinity) stand for."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return (np.where(code & 0x7F == 0x7F, np.nan, size) * np.where(code & 0x80, -1, 1)).astype(np.float32)


def from_float8(bytes_BX, shape):
    """(B, 4 + X) bytes, a fp32 scale and X 8-bit floats that it multiplies (`encoder.to_float8`), -> (B, *shape) fp16."""
    scales = np.ascontiguousarray(bytes_BX[:, :SCALE_BYTES]).view(np.float32)
    return (float8_values()[bytes_BX[:, SCALE_BYTES:]] * scales).astype(DTYPE).reshape(-1, *shape)


def read_embeddings(column, manifest):
    """`(text_BLD, valid_B)`: stored caption embeddings as fp16, from whatever the manifest says they are kept in."""
    shape = manifest.shapes[EMBEDDINGS]
    if manifest.text_precision == "fp16":
        return from_binary(column, shape)
    stored, valid = from_binary(column, (int(np.prod(shape)) + SCALE_BYTES,), np.uint8)
    return from_float8(np.where(valid[:, None], stored, 0), shape), valid


def held_out(ids, share):
    """Boolean mask of the rows that validation owns: those whose id hashes below `share`.

    It depends on the id alone, so a row is on the same side whatever the seed, the epoch or the data around it.
    """
    if share == 0:
        return np.zeros(len(ids), dtype=bool)
    threshold = share * 2**32
    return np.array([zlib.crc32(str(i).encode()) < threshold for i in ids], dtype=bool)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a latents folder holds, complete: `manifest.json` is written last.

    `segments` are the committed pieces of the job, in order: each has its `files` ({"name", "row_groups": rows of each
    row group}) and counts; planning an epoch needs nothing else. read = written + sum(rejected) + filtered.
    """

    encoder: dict  # model, revision, precision
    resolutions: list
    shapes: dict  # tensor column -> shape of one row
    scaling_factor: float
    id_type: str
    empty_caption_embedding: str  # base64 of fp16, the shape of `caption_embeddings`
    job: dict  # the parameters that decide what is written
    segments: list
    report: dict = dataclasses.field(default_factory=dict)  # seconds and rows by stage
    text_precision: str = "fp16"  # of `caption_embeddings`: "fp16", or "fp8": 8-bit floats with a scale a row
    schema_version: int = SCHEMA_VERSION

    def total(self, count):
        """Sum over the segments of "read", "written" or "filtered"."""
        return sum(segment[count] for segment in self.segments)

    def rows_at(self, resolution):
        """Rows that have latents of a size; None where that is not known before they are encoded (online)."""
        column = latents_column(resolution)
        counts = [segment["at"].get(column, 0) for segment in self.segments if "at" in segment]
        return sum(counts) if counts else None

    @property
    def rejected(self):
        """Reason -> rows."""
        reasons = {}
        for segment in self.segments:
            for reason, rows in segment["rejected"].items():
                reasons[reason] = reasons.get(reason, 0) + rows
        return dict(sorted(reasons.items(), key=lambda item: -item[1]))

    @property
    def files(self):
        """[(name, rows of each row group)] in the order of the job."""
        return [(file["name"], file["row_groups"]) for segment in self.segments for file in segment["files"]]

    @property
    def empty_caption(self):
        """(tokens, width) fp16: what a dropped caption is replaced with."""
        values = np.frombuffer(base64.b64decode(self.empty_caption_embedding), dtype=DTYPE)
        return values.reshape(self.shapes[EMBEDDINGS])

    @property
    def online(self):
        """The preprocessing parameters of data that is encoded on the way to the trainers; None for stored latents."""
        return self.job.get("online")

    @property
    def row_bytes(self):
        """Bytes of a row on its way to the trainers, where they are most: latents and text, or pixels."""
        latents = sum(column_bytes(column, shape, self.text_precision) for column, shape in self.shapes.items())
        return max(latents, self.job.get("raw_row_bytes", 0))

    @property
    def text_width(self):
        return self.shapes[EMBEDDINGS][-1]

    def to_dict(self):
        summary = {count: self.total(count) for count in ("read", "written", "filtered")}
        return {**dataclasses.asdict(self), **summary, "rejected": self.rejected}

    @classmethod
    def from_dict(cls, values):
        if values.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"These latents have schema version {values.get('schema_version')!r}, this code reads "
                f"{SCHEMA_VERSION}: encode the data again with Preprocessing.ipynb."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in names})

    @classmethod
    def read(cls, latents_uri):
        """The manifest of a finished job; `FileNotFoundError` says how to make one."""
        try:
            return cls.from_dict(storage.read_json(storage.join(latents_uri, MANIFEST)))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"No latents at latents_uri={latents_uri!r} (no {MANIFEST} there): make them first with "
                f"`papermill Preprocessing.ipynb - -p latents_uri {latents_uri} > /dev/null`, or by running Preprocessing.ipynb."
            ) from None


def encode_embedding(array):
    return base64.b64encode(np.ascontiguousarray(array, dtype=DTYPE).tobytes()).decode()
