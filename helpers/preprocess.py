"""The stages of the preprocessing pipeline around the encoder: `transform` and `write_latents`; checks before a job.

The encoder, PyTorch and diffusers are imported where a job is checked, not at the top: the processes that read,
transform and write, which Ray keeps for the next tasks, would each hold 230 MiB more.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import time
import uuid
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from . import images, ingest, resumable_job, schema, storage
from .config import PreprocessingConfig
from .data_io import checks, inputs

Crop = Callable[[Image.Image, float], Image.Image]  # a picture and the crop's width over its height -> the crop


def transform(
    rows: pa.Table,
    *,
    config: PreprocessingConfig,
    crops: Iterable[Crop] | None = None,
    only: Iterable[tuple[int, int]] | None = None,
) -> pa.Table:
    """Raw rows (`inputs.to_raw_rows`) -> rows for the encoder; every row stays, bad ones with a `reason`.

    Columns: id, caption, `reason` (empty for good rows), source, `caption_ids` (L int32 token ids), for each shape of
    `config.shapes` its pixels (`schema.pixels_column`, H x W x 3 bytes; null where another shape of the resolution is
    nearer to the picture's, and where the picture is smaller, unless `config.upscale`), and `transform_seconds` (of the
    call, in its first row). Arrays are plain bytes: nothing is parsed between the stages. `crops`: a function for each
    row; None: the largest centre crop. `only`: the shape that is wanted of each row; None: all.
    """
    started = time.perf_counter()
    results = [
        transform_row(data, caption, row_id, config, error, crop, shape)
        for data, caption, row_id, error, crop, shape in zip(
            *(rows[name].to_pylist() for name in (inputs.IMAGE, inputs.CAPTION, inputs.ID, inputs.ERROR)),
            crops or itertools.repeat(images.center_crop, len(rows)),
            only or itertools.repeat(None, len(rows)),
            strict=True,
        )
    ]
    captions = [caption for _, caption, _ in results]
    caption_ids = images.tokenize(captions, images.load_tokenizer(config.encoder_model))
    columns = {
        schema.ID: rows[inputs.ID],
        schema.CAPTION: pa.array(captions, pa.string()),
        schema.REASON: pa.array([reason for _, _, reason in results], pa.string()),
        schema.SOURCE: rows[inputs.SOURCE],
        schema.CAPTION_IDS: schema.to_binary(caption_ids, dtype=np.int32),
    }
    for width, height in itertools.chain.from_iterable(config.shapes.values()):
        found = [by_shape.get((width, height)) for by_shape, _, _ in results]
        columns[schema.pixels_column(schema.latents_column(width, height))] = pa.array(
            [None if pixels is None else pixels.tobytes() for pixels in found], pa.large_binary()
        )
    seconds = time.perf_counter() - started
    return pa.table({**columns, "transform_seconds": schema.once_per_call(seconds, len(rows), pa.float64())})


def transform_row(
    data: bytes | None,
    caption: str | None,
    row_id: int | str | None,
    config: PreprocessingConfig,
    error: str | None = None,
    crop: Crop = images.center_crop,
    only: tuple[int, int] | None = None,
) -> tuple[dict[tuple[int, int], np.ndarray], str, str]:
    """`((width, height) -> (H, W, 3) uint8 pixels, caption, reason)` of a raw row; `reason` is empty for a good one.

    `only`: the one shape that is wanted; a picture that another is nearer to, or that is smaller, is a bad one.
    """
    if reason := inputs.text_reason(row_id, caption) or error:
        return {}, caption if caption and caption.strip() else "", reason
    try:
        picture = images.decode(data, config.max_pixels)
    except images.BadImage as bad:
        return {}, caption, str(bad)
    shapes, reason = images.reached_shapes(picture.size, config)
    if only and only not in shapes:
        known = inputs.size_columns(config) and "its width or height column is wrong"
        return {}, caption, known or reason or f"smaller than {only[0]} pixels"
    # One decode for all sizes; a size that the picture does not reach is left out, not upscaled, unless asked for.
    pixels, cropped = {}, {}
    for width, height in [only] if only else shapes:
        ratio = width / height
        cropped[ratio] = cropped.get(ratio) or crop(picture, ratio)
        pixels[width, height] = images.to_pixels(images.resize(cropped[ratio], width, height))
    return pixels, caption, reason


def write_latents(
    rows: pa.Table,
    *,
    latents_uri: str,
    segment: resumable_job.Segment,
    columns: list[schema.ColumnSpec],
    id_type: pa.DataType,
    validation_share: float = 0.0,
) -> pa.Table:
    """Write encoded rows as one Parquet file of latents and one of rejects; returns one row with what was written.

    The rows of a row group are of one bucket (`schema.Manifest`), of which those are held out whose ids hash below
    `validation_share`. File names are new on every try, so a retried task never leaves a half-written file under a
    committed name.
    """
    started = time.perf_counter()
    name = f"{segment.index:06d}-{uuid.uuid4().hex[:12]}.parquet"
    masks = by_bucket(rows, columns, validation_share)
    report = {"files": [], "rejects": [], "rejected": {}, "bytes": 0, "at": {}}
    report["buckets"] = {bucket: int(np.count_nonzero(mask)) for bucket, mask in masks.items()}
    report["written"] = sum(report["buckets"].values())
    if masks:
        layout = schema.latents_schema(id_type, columns)
        stored = rows.select(layout.names)
        tables = (stored.filter(pa.array(mask)).cast(layout) for mask in masks.values())  # one at a time in memory
        report["bytes"] = write_parquet(tables, storage.join(latents_uri, "data", name))
        row_groups = {bucket: schema.row_groups(count) for bucket, count in report["buckets"].items()}
        file = {"name": name, "row_groups": list(itertools.chain.from_iterable(row_groups.values()))}
        report["files"] = [file | {"buckets": {bucket: len(groups) for bucket, groups in row_groups.items()}}]
        for bucket, count in report["buckets"].items():
            for column in schema.bucket_columns(bucket):
                report["at"][column] = report["at"].get(column, 0) + count
    if report["written"] < len(rows):
        layout = schema.rejects_schema(id_type)
        bad = rows.select(layout.names).filter(pc.not_equal(rows[schema.REASON], "")).cast(layout)
        write_parquet([bad], storage.join(latents_uri, "rejects", name))
        report["rejects"] = [name]
        report["rejected"] = collections.Counter(bad[schema.REASON].to_pylist())
    report["calls"] = rows["encoder_call"].drop_null().to_pylist()
    report["stages"] = {
        "transform": pc.sum(rows["transform_seconds"]).as_py() or 0.0,
        "encode": sum(call["ended"] - call["started"] for call in report["calls"]),
        "write": time.perf_counter() - started,
    }
    inputs.release_memory()
    return pa.table({"report": [json.dumps(report)]})


def by_bucket(rows: pa.Table, columns: list[schema.ColumnSpec], validation_share: float) -> dict[str, np.ndarray]:
    """{bucket: (B,) mask of its rows} of good encoded rows: first those trained on, of these squares of all sizes."""
    good_B = pc.equal(rows[schema.REASON], "").to_numpy()
    latents = sorted((spec for spec in columns if spec.resolution), key=lambda spec: spec.size[0] != spec.size[1])
    latents = [spec.name for spec in latents]
    lacks = [rows[name].is_null().to_numpy() for name in latents]
    keys = np.column_stack([schema.held_out(rows[schema.ID].to_pylist(), validation_share), *lacks])
    found = {}
    for key in np.unique(keys[good_B], axis=0):
        name = schema.bucket_name([name for name, lacking in zip(latents, key[1:], strict=True) if not lacking], key[0])
        found[name] = good_B & (keys == key).all(axis=1)
    return found


def write_parquet(tables: Iterable[pa.Table], uri: str) -> int:
    """Write a Parquet file in the layout that reads fastest (`tests/benchmarks/read_layout.py`); returns its bytes.

    Each table begins a row group.
    """
    filesystem, path = storage.open_filesystem(uri)
    if storage.is_local(uri):
        filesystem.create_dir(path.rsplit("/", 1)[0])
    first, *others = tables
    layout = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, first.schema, filesystem=filesystem, **layout) as file:
        for table in (first, *others):
            file.write_table(table, row_group_size=schema.ROWS_PER_ROW_GROUP)
    return filesystem.get_file_info(path).size


def prepare(config: PreprocessingConfig, rows_per_segment: int | None = None) -> resumable_job.Job:
    """Check a preprocessing job and plan it, before any worker starts; encodes nothing but one empty caption.

    Raises FileNotFoundError or ValueError with what to change.
    """
    found = check(config)
    # Encoders start anew with each segment: the more there are, the more rows it takes to make that worth it.
    rows_per_segment = rows_per_segment or resumable_job.ROWS_PER_SEGMENT * config.most_encoders
    return resumable_job.Job(
        config.latents_uri,
        found.parameters,
        found.description,
        plan=functools.partial(resumable_job.plan_segments, found.paths, config, rows_per_segment),
        listing=found.listing,
        id_type=found.id_type,
        dollars_per_hour=config.dollars_per_hour,
        num_encoders=config.num_encoders,
        max_failures=config.max_failures,
    )


@dataclasses.dataclass(frozen=True)
class CheckedInput:
    """What a job is made of.

    Args:
        paths: input files.
        listing: {path below the input: bytes}, by which a rerun detects changed input.
        parameters: those that decide what is written: a rerun must have the same.
        description: the encoder's part of the manifest (`describe`).
        id_type: Arrow type of the stored ids.
    """

    paths: list[str]
    listing: dict[str, int]
    parameters: dict
    description: dict
    id_type: pa.DataType


def check(config: PreprocessingConfig) -> CheckedInput:
    """Check raw data and encoder before any worker starts.

    Raises FileNotFoundError or ValueError with what to change.
    """
    paths = inputs.list_inputs(config.data_uri, config.input_format)
    found = checks.check_input(paths[0], config)
    return CheckedInput(
        paths=paths,
        listing=inputs.listing(paths, config.data_uri),
        parameters={**config.deciding("rows", "stored"), "input_uri": config.data_uri},
        description=describe(config),
        id_type=inputs.id_type(found.field(config.id_column).type),
    )


def describe(config: PreprocessingConfig) -> dict:
    """The encoder's part of the manifest, from the model's configs and one empty caption encoded here, on the CPU.

    Keys: encoder, columns, scaling_factor, empty_caption_embedding. Raises ValueError for a model that is not in
    diffusers layout, or a resolution that its VAE cannot take.
    """
    import torch
    from diffusers import AutoencoderKL

    from . import encoder

    model = config.encoder_model
    try:
        vae_config = AutoencoderKL.load_config(**images.model_source(model), subfolder="vae")
        tokenizer, text_encoder = images.load_tokenizer(model), encoder.load_text_encoder(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"encoder_model={model!r} holds no model in diffusers layout (vae/, text_encoder/, tokenizer/): "
            f"give 'tiny-sd', a folder or a hub id. ({str(error).splitlines()[0]})"
        ) from None
    halvings = len(vae_config["block_out_channels"]) - 1
    check_resolutions(config.resolutions, halvings)
    sides = {side for shapes in config.shapes.values() for shape in shapes for side in shape}
    if any(side % 2**halvings for side in sides):
        raise ValueError(
            f"size_multiple={config.size_multiple}: the VAE halves a picture {halvings} times; use a multiple of "
            f"{2**halvings}."
        )
    with torch.inference_mode():
        empty = text_encoder(torch.from_numpy(images.tokenize([""], tokenizer)).long()).last_hidden_state[0].numpy()
    _, columns, precision = encoder.arguments(config)
    return {
        "encoder": {"model": model, "revision": revision(model, vae_config), "precision": precision},
        "columns": columns,
        "scaling_factor": vae_config["scaling_factor"],
        "empty_caption_embedding": schema.encode_embedding(empty),
    }


def check_resolutions(resolutions: Iterable[int], halvings: int = 3) -> None:
    """Raises ValueError for a resolution that is not a multiple of 2**halvings."""
    for resolution in resolutions:
        if resolution % 2**halvings:
            raise ValueError(
                f"resolutions={list(resolutions)}: the VAE halves a picture {halvings} times, and {resolution} is not "
                f"a multiple of {2**halvings}; use {max(1, round(resolution / 2**halvings)) * 2**halvings} instead."
            )


def revision(model: str, vae_config: dict) -> str:
    """The hub's commit, or for a folder a hash of the files of the VAE, the text encoder and the tokenizer."""
    source = images.model_source(model)
    folder = pathlib.Path(source["pretrained_model_name_or_path"])
    if not folder.is_dir():
        from diffusers import AutoencoderKL

        commit = vae_config.get("_commit_hash")
        return commit or AutoencoderKL.load_config(**source, subfolder="vae", return_commit_hash=True)[1]
    digest = hashlib.sha256()
    for path in sorted(path for part in ("vae", "text_encoder", "tokenizer") for path in folder.glob(f"{part}/*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def first_latents(latents_uri: str, num_rows: int) -> pa.Table:
    """The first rows of a finished job: what the trainer reads."""
    name, row_groups = ingest.read_manifest(latents_uri).files[0]
    filesystem, path = storage.open_filesystem(storage.join(latents_uri, "data", name))
    with pq.ParquetFile(path, filesystem=filesystem) as file:
        return file.read_row_groups(range(min(len(row_groups), -(-num_rows // row_groups[0])))).slice(0, num_rows)
