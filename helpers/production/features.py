"""Image features beside latents: computed on the encoders' machines, stored in a folder of their own, or on the way.

`features/{model}/` in a latents folder holds `data/`, with a file for each file of latents, of the same name, rows and
row groups, and `files.json`, which lists them. The latents, their manifest and their list do not change.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from .. import storage
from ..config import PreprocessingConfig, TrainingConfig, pool_size
from ..encode import models, prepare, stages
from ..encode.encoder import LatentEncoder
from ..encode.job import Job, Segment
from ..latents import schema
from ..latents.manifest import Manifest, read_manifest, read_segments
from ..latents.parquet import read_parquet, write_latents_file
from ..latents.plan import Files, Plan, RowRange, Source
from ..latents.read import ReadRows, join_blocks, latents_dataset, read_row_ranges
from ..raw import inputs
from . import lease
from .data.exclusions import IsExcluded, mask
from .decode import isolated
from .image_encoder import ImageEncoder, feature_columns

FILES, SEGMENTS, PARTS = "files.json", "segments", "parts"
PART_ROWS = 1024
MADE_AGAIN = "delete its folder, and run Preprocessing.ipynb again with image_encoder_model"
SHAPE = {"model": str, "files_crc32": int, "columns": [{"name": str, "shape": [int]}], "files": [{"name": str}]}


def folder_of(latents_uri: str, model: str) -> str:
    """The folder of a model's features. The model's commit is no part of the name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "--", model.partition("@")[0].strip("/"))
    return storage.join(latents_uri, "features", name)


def read_list(latents_uri: str, model: str) -> dict[str, Any] | None:
    """What `store` listed of a model's features; None if there are none."""
    uri = storage.join(folder_of(latents_uri, model), FILES)
    return storage.read_json(uri, MADE_AGAIN, shape=SHAPE) if storage.exists(uri) else None


def columns_of(latents_uri: str, manifest: Manifest, model: str) -> list[schema.ColumnSpec]:
    """The columns of features of a data set: those that are stored or, online, those that are made on the way."""
    if manifest.online:
        latents = [spec for spec in manifest.columns if spec.resolution]
        return feature_columns(latents, manifest.job["size_multiple"], model)
    return [schema.ColumnSpec(**spec) for spec in read_list(latents_uri, model)["columns"]]


def check_early(config: PreprocessingConfig) -> None:
    """Raises ValueError for an image encoder of an unknown class, and for sizes that it has no features of.

    Reads neither data nor weights.
    """
    if config.image_encoder_model:
        derived = prepare.derive(config)
        latents = [spec for spec in prepare.stored_columns(derived, 1) if spec.resolution]
        feature_columns(latents, derived.size_multiple, config.image_encoder_model)


# ---- on the encoders


class FeatureEncoder(LatentEncoder):
    """A `LatentEncoder` that also makes the column `schema.FEATURES`, from the pixels of each row's one shape.

    Rows of different shapes have features of different length: zeros follow the shorter ones.

    Args:
        image_encoder_model: as of `ImageEncoder`.
        features: the columns of features, one for each shape.
        options: those of `LatentEncoder`.
    """

    def __init__(self, *, image_encoder_model: str, features: list[schema.ColumnSpec], **options: Any):
        super().__init__(**options)
        precision, batch_size = options.get("precision", "fp32"), options.get("batch_size") or 32
        self.features, self.images = features, ImageEncoder(image_encoder_model, precision, batch_size)

    def __call__(self, rows: pa.Table) -> pa.Table:
        widest = max(spec.row_bytes for spec in self.features) // schema.DTYPE().itemsize
        values_BN, has_B = np.zeros((len(rows), widest), schema.DTYPE), np.zeros(len(rows), bool)
        for spec in self.features:
            values, encoded_B = encode_features(self.images, spec, rows)
            values_BN[encoded_B, : values[0].size] = values[encoded_B].reshape(encoded_B.sum(), values[0].size)
            has_B |= encoded_B
        return super().__call__(rows).append_column(schema.FEATURES, schema.to_binary(values_BN, has_B))


class FeatureColumns:
    """The Ray Data actor that turns transformed rows into ids and features, a column for each shape."""

    def __init__(self, model: str, columns: list[schema.ColumnSpec], precision: str, batch_size: int):
        self.columns, self.images = columns, ImageEncoder(model, precision, batch_size)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """The good rows of `rows`."""
        found = {spec.name: spec.encode(*encode_features(self.images, spec, rows)) for spec in self.columns}
        good = pc.equal(rows[schema.REASON], "")
        return pa.table({schema.ID: rows[schema.ID], **found}).filter(good)


def encode_features(images: ImageEncoder, spec: schema.ColumnSpec, rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """`(values (B, *spec.shape) fp16, encoded (B,) bool)` of transformed rows."""
    width, height = spec.size
    pixels = rows[spec.name.replace(schema.FEATURES, schema.PIXELS)]
    pixels_VHWC, has_B = schema.decode_present_rows(pixels, (height, width, 3))
    good_B = pc.equal(rows[schema.REASON], "").to_numpy()
    values_BX, encoded_B = np.zeros((len(rows), *spec.shape), schema.DTYPE), good_B & has_B
    if encoded_B.any():
        values_BX[encoded_B] = images.encode(pixels_VHWC[good_B[has_B]], spec.shape[1:])
    return values_BX, encoded_B


def encoder_arguments(config: PreprocessingConfig) -> dict[str, Any]:
    """The arguments of an online run's encoders, by name: of `FeatureEncoder` if the config names an image encoder."""
    arguments = prepare.encoder_arguments(config, num_captions=1)
    if config.image_encoder_model is None:
        return arguments
    model = models.pin_model(config.image_encoder_model, parameter="image_encoder_model")
    latents = [spec for spec in arguments["columns"] if spec.resolution]
    features = feature_columns(latents, config.size_multiple, model)
    return {**arguments, "image_encoder_model": model, "features": features}


# ---- stored


def store(job: Job) -> None:
    """Add the features of `job.config.image_encoder_model` to the finished latents of a job.

    The raw images are read and decoded again; the VAE and the text encoder do not run. A call that was interrupted is
    gone on with, segment by segment. Raises ValueError if the raw data does not hold the rows of the latents any more.
    """
    config, uri = job.config, job.config.latents_uri
    manifest, segments = read_manifest(uri), read_segments(uri)
    listed, folder = read_list(uri, config.image_encoder_model), folder_of(uri, config.image_encoder_model)
    model = models.pin_model(config.image_encoder_model, listed and listed["model"], "image_encoder_model")
    if listed and listed["files_crc32"] == manifest.files_crc32:
        return print(f"Nothing to do: the image features are at {folder}")
    latents = [spec for spec in manifest.columns if spec.resolution]
    columns, files = feature_columns(latents, config.size_multiple, model), []
    with lease.hold(uri, "latents_uri"):
        for segment in segments:
            # The files' own sum in the name: entries of latents that have been encoded anew do not count.
            entry = storage.join(folder, SEGMENTS, f"{manifest.files_crc32}-{segment['index']:06d}.json")
            if not storage.exists(entry):
                storage.write_json(entry, {"files": store_segment(config, segment, model, columns, folder)})
            files += storage.read_json(entry, MADE_AGAIN)["files"]
        described = {"model": model, "files_crc32": manifest.files_crc32, "files": files}
        described["columns"] = [dataclasses.asdict(spec) for spec in columns]
        storage.write_json(storage.join(folder, FILES), described, indent=None)
        storage.delete(storage.join(folder, SEGMENTS))
    num_bytes = sum(file["bytes"] for file in files) / max(1, manifest.written)
    print(f"image features of {manifest.written:,} rows, {num_bytes:,.0f} bytes a row, at {folder}")


def store_segment(
    config: PreprocessingConfig, segment: dict, model: str, columns: list[schema.ColumnSpec], folder: str
) -> list[dict]:
    """Store the features of a segment of the latents; returns the entries of its files."""
    parts_uri = storage.join(folder, PARTS)
    raw = Segment(segment["index"], segment["sources"], segment["read"], segment["limit"])
    decode = isolated.decoder(storage.join(config.storage, "lost_images"))
    transform = functools.partial(stages.transform, config=config, decode=decode)
    tasks = dict(compute=ray.data.TaskPoolStrategy(config.num_transform_workers), max_retries=3)
    pool = dict(compute=ray.data.ActorPoolStrategy(**pool_size(config.num_encoders)), num_cpus=0.5)
    pool |= dict(num_gpus=config.gpus_per_encoder or None, accelerator_type=config.encoder_accelerator_type)
    arguments = (model, columns, config.encoder_precision, config.encoder_batch_size)
    parts = (
        inputs.read_rows(raw, config)
        .map_batches(transform, batch_size=256, batch_format="pyarrow", **tasks)
        .map_batches(
            FeatureColumns,
            fn_constructor_args=arguments,
            batch_size=8 * config.encoder_batch_size,
            batch_format="pyarrow",
            max_task_retries=3,
            **pool,
        )
        .map_batches(
            functools.partial(write_part, folder=parts_uri),
            batch_size=PART_ROWS,
            batch_format="pyarrow",
            num_cpus=0.25,
            max_retries=3,
        )
    )
    places = pa.concat_tables(parts.iter_batches(batch_size=None, batch_format="pyarrow")).combine_chunks()
    if (again := len(places) - pc.count_distinct(places[schema.ID]).as_py()) > 0:
        raise ValueError(
            f"{again:,} ids of input_uri={config.data_uri!r} occur more than once, and features are matched by id: "
            "encode the data again with an id_column of unique ids."
        )
    shared, collect = ray.put(places), ray.remote(collect_file).options(num_cpus=0.25, max_retries=3)
    options = {"latents_uri": config.latents_uri, "folder": folder, "columns": [spec.name for spec in columns]}
    entries = ray.get([collect.remote(file, shared, **options) for file in segment["files"]])
    storage.delete(parts_uri)
    return entries


def write_part(rows: pa.Table, *, folder: str) -> pa.Table:
    """Write rows of features in the order in which they come; returns where each id is: `id`, `part`, `row`."""
    name = f"{uuid.uuid4().hex}.parquet"
    if len(rows):
        write_latents_file([rows], storage.join(folder, name))
    part = pa.repeat(name, len(rows))
    return pa.table({schema.ID: rows[schema.ID], "part": part, "row": np.arange(len(rows))})


def collect_file(file: dict, places: pa.Table, *, latents_uri: str, folder: str, columns: list[str]) -> dict:
    """Write the features of one file of latents, in its order and row groups; returns the entry for the list."""
    name = file["name"]
    ids = read_parquet(storage.join(latents_uri, "data", name), [schema.ID])[schema.ID]
    found = schema.one_array(pc.index_in(ids, value_set=schema.one_array(places[schema.ID])))
    if found.null_count:
        lost = ids[found.is_null().index(True).as_py()].as_py()
        raise ValueError(
            f"{found.null_count:,} rows of {name} are not in the raw data any more, such as {lost!r}: restore the "
            "images, or encode the data again into another latents_uri."
        )
    chosen = places.take(found)
    tables, positions = [], []
    for part in chosen["part"].unique().to_pylist():
        rows_P = np.flatnonzero(pc.equal(chosen["part"], part).to_numpy())
        tables.append(read_parquet(storage.join(folder, PARTS, part)).take(chosen["row"].take(rows_P)))
        positions.append(rows_P)
    ordered = pa.concat_tables(tables).take(np.argsort(np.concatenate(positions))).combine_chunks()
    starts = np.cumsum([0, *file["row_groups"]])
    groups = (ordered.slice(start, count) for start, count in zip(starts, file["row_groups"], strict=False))
    num_bytes, file_id = write_latents_file(groups, storage.join(folder, "data", name))
    return {**file, "bytes": num_bytes, "file_id": file_id}


# ---- for the trainers


def stored_stream(
    config: TrainingConfig, is_excluded: IsExcluded | None = None
) -> Callable[[Plan, int, int], ray.data.Dataset]:
    """`latents_dataset` for a run, with the column `schema.FEATURES` if the config names an image encoder.

    `is_excluded`: says which rows are masked; None: no row.
    """
    masked = functools.partial(mask, is_excluded=is_excluded) if is_excluded else lambda read: read
    if config.image_encoder_model is None:
        return functools.partial(latents_dataset, wrap=masked)

    def stream(plan: Plan, first_step: int, end_step: int) -> ray.data.Dataset:
        def wrap(read: ReadRows) -> ReadRows:
            return with_features(masked(read), model=config.image_encoder_model, plan=plan)

        rows = latents_dataset(plan, first_step, end_step, wrap)
        row_bytes = max(read_manifest(source.files.uri).row_bytes for source in plan.sources)
        return join_blocks(rows, plan, row_bytes + widest_of(plan, config.image_encoder_model))

    return stream


def widest_of(plan: Plan, model: str) -> int:
    """Bytes of the features of a plan's largest shape."""
    return max(column_for(source, model).row_bytes for source in plan.sources)


def column_for(source: Source, model: str) -> schema.ColumnSpec:
    """The column of features that belongs to a source's latents."""
    name = source.latents.name.replace(schema.LATENTS, schema.FEATURES)
    return next(spec for spec in open_list(source.files.uri, model)[1] if spec.name == name)


def with_features(read: ReadRows, *, model: str, plan: Plan) -> ReadRows:
    """A function that reads rows as `read` does, with their features in the column `schema.FEATURES`."""
    return functools.partial(read_with_features, read=read, model=model, padded_to=widest_of(plan, model))


def read_with_features(
    row_ranges: list[RowRange], source: Source, *, read: ReadRows, model: str, padded_to: int
) -> pa.Table:
    rows, column = read(row_ranges, source), column_for(source, model)
    found = read_row_ranges(row_ranges, [schema.ID, column.name], open_list(source.files.uri, model)[0])
    if not found[schema.ID].equals(rows[schema.ID]):
        raise ValueError(f"{folder_of(source.files.uri, model)} holds the features of other rows: {MADE_AGAIN}.")
    return rows.append_column(schema.FEATURES, schema.pad(found[column.name], padded_to))


@functools.lru_cache(maxsize=16)
def open_list(latents_uri: str, model: str) -> tuple[Files, list[schema.ColumnSpec]]:
    """`(files of features, their columns)`, read once in a process."""
    listed = read_list(latents_uri, model)
    columns = [schema.ColumnSpec(**spec) for spec in listed["columns"]]
    return Files.of(folder_of(latents_uri, model), listed["files"]), columns
