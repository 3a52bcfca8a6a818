"""What a latents folder says about itself: `manifest.json` and `files.json`.

`files.json` lists the segments of the job, in order, each with its counts and its `files`. A file has a "name", the
rows of each of its "row_groups", and its "buckets": {bucket: number of row groups}. The row groups of the first bucket
come first, then those of the second, and so on. All rows of a bucket have latents in the same columns
(`schema.bucket_name`). Either all of them are trained on, or all are held out. A file of latents also has its "bytes"
and its random "file_id" (`parquet.write_latents_file`).

`manifest.json` holds everything else. It takes a few kilobytes, whatever the number of files. It is written last, so a
folder that has one is complete. Both files end with a checksum of themselves (`storage.write_json`).
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import zlib
from collections.abc import Iterable

import numpy as np

from .. import storage
from . import schema

SCHEMA_VERSION = 5
MANIFEST, FILES = "manifest.json", "files.json"
MADE_AGAIN = (
    "run the notebook that encoded this data again with the same parameters: it writes the file, and encodes nothing"
)
SHAPE = {  # of manifest.json
    **dict.fromkeys(("read", "written", "filtered", "files_crc32"), int),
    **dict.fromkeys(("encoder", "job", "rejected", "buckets", "work"), dict),
    **dict.fromkeys(("id_type", "empty_caption_embedding"), str),
    "resolutions": [int],
    "columns": [{"name": str, "shape": [int]}],
    "scaling_factor": (int, float),
}
FILES_SHAPE = [{"files": [{"name": str, "row_groups": [int], "buckets": dict}]}]  # of files.json
WORK = ("seconds", "encoding_seconds", "transform_seconds", "encode_seconds", "write_seconds", "bytes")
VARYING = ("input_uri", "input_written_crc32", "online", "raw_row_bytes")  # entries of `job`


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a latents folder holds. read = written + sum(rejected) + filtered.

    Args:
        encoder: model, revision, precision (as asked for; a CPU computes in fp32 anyway). If the text encoder is
            another model's, also text_encoder_model and text_encoder_revision. If the classes are not those of Stable
            Diffusion, also vae_class and text_encoder_class.
        resolutions: the sizes that were encoded.
        columns: the tensor columns.
        scaling_factor, shift_factor: of the VAE; stored latents are neither scaled nor shifted.
        id_type: Arrow type of the ids.
        empty_caption_embedding: base64 of fp16, in the shape of the embeddings; without padding if they are ragged.
        job: the parameters that decide what is written, and the counts of the input's files.
        read, written, filtered: rows.
        rejected: reason -> rows, the most frequent first.
        noted: what is wrong with rows that are used -> how many.
        buckets: bucket -> rows.
        files_crc32: of the names and row groups of the files.
        work: sums over the segments, of seconds by stage and of bytes (`job.segment_entry`).
    """

    encoder: dict
    resolutions: list[int]
    columns: list[schema.ColumnSpec]
    scaling_factor: float
    id_type: str
    empty_caption_embedding: str
    job: dict
    read: int
    written: int
    filtered: int
    rejected: dict[str, int]
    buckets: dict[str, int]
    work: dict[str, float]
    files_crc32: int
    schema_version: int = SCHEMA_VERSION
    shift_factor: float = 0.0
    noted: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, segments: list[dict], **description) -> Manifest:
        """The manifest of a job's segments. `description`: the fields that are not sums over them."""
        rows = {count: sum(segment[count] for segment in segments) for count in ("read", "written", "filtered")}
        sums = ("rejected", "noted", "buckets")
        rows |= {count: add_up(segment.get(count, {}) for segment in segments) for count in sums}
        work = {name: sum(segment.get(name, 0) for segment in segments) for name in WORK}
        return cls(**description, **rows, work=work, files_crc32=files_crc32(segments))

    def column(self, name: str) -> schema.ColumnSpec:
        return next(spec for spec in self.columns if spec.name == name)

    def latents(self, resolution: int) -> schema.ColumnSpec:
        """The latents column of square images at a resolution."""
        return self.column(schema.latents_column(resolution))

    def latents_at(self, resolution: int) -> list[schema.ColumnSpec]:
        """The columns of all shapes of a resolution."""
        return [spec for spec in self.columns if spec.resolution == resolution]

    def rows_at(self, resolution: int) -> int | None:
        """Number of rows with latents at a resolution; None if not known before encoding (online, no size columns)."""
        if self.online and not self.online.get("width_column"):
            return None
        names = {spec.name for spec in self.latents_at(resolution)}
        return sum(rows for bucket, rows in self.buckets.items() if not names.isdisjoint(schema.bucket_columns(bucket)))

    @property
    def embeddings(self) -> schema.ColumnSpec:
        return self.column(schema.EMBEDDINGS)

    @property
    def num_captions(self) -> int:
        """Captions of a row."""
        return len(schema.numbers(schema.EMBEDDINGS, (spec.name for spec in self.columns)))

    @property
    def empty_tokens(self) -> np.ndarray:
        """(tokens, width) fp16: the empty caption's embedding as stored, without padding if captions are ragged."""
        values = np.frombuffer(base64.b64decode(self.empty_caption_embedding), schema.DTYPE)
        return values.reshape(-1, self.embeddings.shape[1])

    @property
    def empty_caption(self) -> np.ndarray:
        """(tokens, width) fp16: what replaces a dropped caption. Zeros follow the tokens of the empty caption."""
        missing = self.embeddings.shape[0] - len(self.empty_tokens)
        return np.pad(self.empty_tokens, ((0, missing), (0, 0)))

    @property
    def empty_mask(self) -> np.ndarray | None:
        """(tokens,) bool: True for the tokens of the empty caption; None if captions are padded with tokens."""
        has_token = np.arange(self.embeddings.shape[0]) < len(self.empty_tokens)
        return has_token if self.embeddings.ragged else None

    @property
    def vae_model(self) -> str:
        return self.encoder["model"]

    @property
    def text_encoder_model(self) -> str:
        """The model that the text encoder and the tokenizer are from."""
        return self.encoder.get("text_encoder_model", self.vae_model)

    @property
    def vae_class(self) -> str:
        """The name of the VAE's class in diffusers."""
        return self.encoder.get("vae_class", "AutoencoderKL")

    @property
    def text_encoder_class(self) -> str:
        """The name of the text encoder's class in transformers."""
        return self.encoder.get("text_encoder_class", "CLIPTextModel")

    @property
    def text_cleaning(self) -> str:
        """What was done to captions before tokenization: the value of the parameter of this name."""
        return self.job.get("text_cleaning", "none")

    @property
    def online(self) -> dict | None:
        """The preprocessing parameters of data that is encoded while a run trains on it; None for stored latents."""
        return self.job.get("online")

    @property
    def made_with(self) -> dict:
        """`job` without entries that may differ for the same data (`VARYING`)."""
        return {name: value for name, value in self.job.items() if name not in VARYING}

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest row on its way to the trainers.

        That is a row with latents of one shape and embeddings or, online, a raw row with its pixels if that is larger.
        """
        stored = max(spec.row_bytes for spec in self.columns if spec.resolution) + self.embeddings.row_bytes
        return max(stored, self.job.get("raw_row_bytes", 0))

    @classmethod
    def from_dict(cls, values: dict) -> Manifest:
        return cls(**{**values, "columns": [schema.ColumnSpec(**spec) for spec in values["columns"]]})


def files_crc32(segments: list[dict]) -> int:
    """A checksum of the names and row groups of the segments' files."""
    crc = 0
    for file in (file for segment in segments for file in segment["files"]):
        crc = zlib.crc32(json.dumps([file["name"], file["row_groups"]]).encode(), crc)
    return crc


def add_up(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sum of some counts by name, the largest first."""
    total = sum(map(collections.Counter, counts), collections.Counter())
    return dict(total.most_common())


def encode_embedding(array: np.ndarray) -> str:
    """(tokens, width) -> the text that `Manifest.empty_caption_embedding` holds."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=schema.DTYPE).tobytes()).decode()


def write_manifest(latents_uri: str, manifest: Manifest, segments: list[dict]) -> None:
    """Write both files, `manifest.json` last."""
    storage.write_json(storage.join(latents_uri, FILES), segments, indent=None)
    storage.write_json(storage.join(latents_uri, MANIFEST), dataclasses.asdict(manifest))


def read_manifest(latents_uri: str) -> Manifest:
    """The manifest of a finished job.

    Raises FileNotFoundError or DamagedFile that says how to make one, and ValueError for a schema version that this
    code does not read.
    """
    uri = storage.join(latents_uri, MANIFEST)
    try:
        version = storage.read_json(uri, MADE_AGAIN).get("schema_version")
        if version == SCHEMA_VERSION:
            return Manifest.from_dict(storage.read_json(uri, MADE_AGAIN, shape=SHAPE))
        raise ValueError(
            f"The latents of {storage.shown(uri)} have schema version {version!r}, this code reads {SCHEMA_VERSION}: "
            "encode the data again with Preprocessing.ipynb, into another latents_uri."
        )
    except FileNotFoundError:
        raise FileNotFoundError(
            f"No latents at latents_uri={storage.shown(latents_uri)!r} (no {MANIFEST} there): make them first with "
            f"`papermill Preprocessing.ipynb - -p latents_uri {storage.shown(latents_uri)} > /dev/null`, or by running "
            "Preprocessing.ipynb."
        ) from None


def read_segments(latents_uri: str) -> list[dict]:
    """The segments of a finished job, in order. Raises DamagedFile if they are not those that the manifest counts."""
    uri = storage.join(latents_uri, FILES)
    segments = storage.read_json(uri, MADE_AGAIN, shape=FILES_SHAPE)
    if files_crc32(segments) != read_manifest(latents_uri).files_crc32:
        raise storage.DamagedFile(f"{storage.shown(uri)} does not list the files that {MANIFEST} counts: {MADE_AGAIN}.")
    return segments


@dataclasses.dataclass(frozen=True)
class DataSets:
    """The data sets that a run trains on, opened once. The run's plan and batches are made from this object.

    Args:
        manifests: URI -> manifest.
        proportions: URI -> its share of every batch.
    """

    manifests: dict[str, Manifest]
    proportions: dict[str, float]

    @classmethod
    def open(cls, proportions: dict[str, float]) -> DataSets:
        """The data sets at these URIs. Raises FileNotFoundError that names one without a manifest."""
        return cls({uri: read_manifest(uri) for uri in proportions}, proportions)

    @property
    def first(self) -> Manifest:
        """The manifest that stands for all: `checks.training.mixture_fits` requires the same encoder and columns."""
        return next(iter(self.manifests.values()))

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest row on its way to the trainers."""
        return max(manifest.row_bytes for manifest in self.manifests.values())
