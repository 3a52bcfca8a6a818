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
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from . import hub, images, resumable_job, schema, storage
from .data_io import checks, inputs
from .manifest import encode_embedding, read_files
from .preprocessing_config import PreprocessingConfig

Crop = Callable[[Image.Image, float], Image.Image]  # a picture and the crop's width over its height -> the crop


def transform(
    rows: pa.Table,
    *,
    config: PreprocessingConfig,
    crops: Iterable[Crop] | None = None,
    only: Iterable[tuple[int, int]] | None = None,
) -> pa.Table:
    """Raw rows (`inputs.to_raw_rows`) -> rows for the encoder; every row stays, bad ones with a `reason`.

    Columns: id, caption, `reason` (empty for good rows), source, `caption_ids` (L int32 token ids; -1 in place of
    padding where `config.maximum_tokens` is given), the same two of each further caption that the raw rows have
    (`schema.numbered`), for each shape of `config.shapes` its pixels (`schema.input_column`, H x W x 3 bytes; null
    where another shape of the resolution is nearer to the picture's, and where the picture is smaller, unless
    `config.upscale`), and `transform_seconds` (of the call, in its first row). Arrays are plain bytes: nothing is
    parsed between the stages. `crops`: a function for each row; None: the largest centre crop. `only`: the shape that
    is wanted of each row; None: all.
    """
    started = time.perf_counter()
    raw = (rows[name].to_pylist() for name in (inputs.IMAGE, inputs.CAPTION, inputs.ID, inputs.ERROR))
    crops, only = crops or itertools.repeat(images.center_crop), only or itertools.repeat(None)
    results = [
        transform_row(data, caption, row_id, config, error, crop, shape)
        for data, caption, row_id, error, crop, shape in zip(*raw, crops, only, strict=False)
    ]
    columns = {
        schema.ID: rows[inputs.ID],
        schema.REASON: pa.array([reason for _, _, reason in results], pa.string()),
        schema.SOURCE: rows[inputs.SOURCE],
    }
    for number in schema.numbers(inputs.CAPTION, rows.column_names):
        captions = [caption or "" for caption in rows[schema.numbered(inputs.CAPTION, number)].to_pylist()]
        caption_ids = schema.to_binary(images.caption_ids(captions, config), dtype=np.int32)
        columns[schema.numbered(schema.CAPTION, number)] = pa.array(captions, pa.string())
        columns[schema.numbered(schema.CAPTION_IDS, number)] = caption_ids
    for shape in itertools.chain.from_iterable(config.shapes.values()):
        pixels = [by_shape[shape].tobytes() if shape in by_shape else None for by_shape, _, _ in results]
        columns[schema.input_column(schema.latents_column(*shape))] = pa.array(pixels, pa.large_binary())
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
    """Write encoded rows as one Parquet file of latents and one of rejects.

    The rows of a row group are of one bucket (`manifest.Manifest`), of which those are held out whose ids hash below
    `validation_share`. File names are new on every try, so a retried task never leaves a half-written file under a
    committed name. Returns one row: `rows`, how many these are, and `report`, for `resumable_job.segment_entry`.
    """
    started = time.perf_counter()
    name = f"{segment.index:06d}-{uuid.uuid4().hex[:12]}.parquet"
    masks = by_bucket(rows, columns, validation_share)
    buckets = {bucket: int(np.count_nonzero(mask)) for bucket, mask in masks.items()}
    files, rejects, size = [], [], 0
    if masks:
        layout = schema.latents_schema(id_type, columns)
        stored = rows.select(layout.names)
        tables = (stored.filter(pa.array(mask)).cast(layout) for mask in masks.values())  # one at a time in memory
        size = write_parquet(tables, storage.join(latents_uri, "data", name))
        groups = {bucket: schema.row_groups(count) for bucket, count in buckets.items()}
        row_groups = list(itertools.chain.from_iterable(groups.values()))
        group_counts = {bucket: len(sizes) for bucket, sizes in groups.items()}
        files = [{"name": name, "row_groups": row_groups, "buckets": group_counts}]
    bad = rows.filter(pc.not_equal(rows[schema.REASON], ""))
    if len(bad):
        layout = schema.rejects_schema(id_type)
        write_parquet([bad.select(layout.names).cast(layout)], storage.join(latents_uri, "rejects", name))
        rejects = [name]
    calls = rows["encoder_call"].drop_null().to_pylist()
    report = {
        "files": files,
        "rejects": rejects,
        "written": sum(buckets.values()),
        "rejected": collections.Counter(bad[schema.REASON].to_pylist()),
        "buckets": buckets,
        "bytes": size,
        "calls": calls,
        "transform_seconds": pc.sum(rows["transform_seconds"]).as_py() or 0.0,
        "encode_seconds": sum(call["ended"] - call["started"] for call in calls),
        "write_seconds": time.perf_counter() - started,
    }
    inputs.release_memory()
    return pa.table({"report": [json.dumps(report)], "rows": [len(rows)]})


def by_bucket(rows: pa.Table, columns: list[schema.ColumnSpec], validation_share: float) -> dict[str, np.ndarray]:
    """{bucket: (B,) mask of its rows} of good encoded rows: first those trained on, of these squares of all sizes."""
    good_B = pc.equal(rows[schema.REASON], "").to_numpy()
    latents = sorted((spec for spec in columns if spec.resolution), key=lambda spec: spec.size[0] != spec.size[1])
    latents = [spec.name for spec in latents]
    lacks = [rows[name].is_null().to_numpy() for name in latents]
    keys = np.column_stack([schema.held_out_mask(rows[schema.ID].to_pylist(), validation_share), *lacks])
    masks = {}
    for key in np.unique(keys[good_B], axis=0):
        name = schema.bucket_name([name for name, lacking in zip(latents, key[1:], strict=True) if not lacking], key[0])
        masks[name] = good_B & (keys == key).all(axis=1)
    return masks


def write_parquet(tables: Iterable[pa.Table], uri: str) -> int:
    """Write a Parquet file; returns its bytes. Each table begins a row group.

    Without compression, dictionaries and statistics: 16-bit floats hardly shrink, and reading has nothing to decode.
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

    Pins the models (`hub.pin_encoder`). Raises FileNotFoundError or ValueError with what to change.
    """
    hub.pin_encoder(config, (resumable_job.begun_with(config.latents_uri) or {}).get("encoder"))
    checked = check(config)
    # Encoders start anew with each segment: the more there are, the more rows it takes to make that worth it.
    rows_per_segment = rows_per_segment or resumable_job.ROWS_PER_SEGMENT * config.most_encoders
    return resumable_job.Job(
        config.latents_uri,
        checked.parameters,
        checked.description,
        plan=functools.partial(resumable_job.plan_segments, checked.paths, config, rows_per_segment),
        id_type=checked.id_type,
        max_failures=config.max_failures,
    )


@dataclasses.dataclass(frozen=True)
class CheckedInput:
    """What a job is made of.

    Args:
        paths: input files.
        listing: {path below the input: bytes}.
        parameters: those that decide what is written, and a checksum of the listing.
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
    input_schema = checks.check_input(paths[0], config)
    listing = inputs.listing(paths, config.data_uri)
    parameters = config.deciding("rows", "stored") | {"input_uri": config.data_uri}
    if config.num_captions > 1:
        parameters["num_captions"] = config.num_captions
    for name, default in (("maximum_tokens", None), ("text_cleaning", "none")):
        if parameters[name] == default:  # data of earlier versions is the same without
            del parameters[name]
    parameters["input_crc32"] = zlib.crc32(json.dumps(sorted(listing.items())).encode())
    id_type = inputs.id_type(input_schema.field(config.id_column).type)
    return CheckedInput(paths, listing, parameters, describe(config), id_type)


def describe(config: PreprocessingConfig) -> dict:
    """The encoder's part of the manifest, from the models' configs and one empty caption encoded here, on the CPU.

    Keys: encoder, columns, scaling_factor, shift_factor, empty_caption_embedding. The encoder's "model" is pinned, and
    its "revision" that commit, or a hash of a folder's files. Raises ValueError for a model that is not in diffusers
    layout or of a class that is not known, and for parameters that its parts cannot take.
    """
    import torch

    from . import encoder

    pinned = dataclasses.replace(config)
    hub.pin_encoder(pinned, None)
    model, text_model = pinned.model_of("vae"), pinned.model_of("text_encoder")
    try:
        _, columns, precision, _ = encoder.arguments(pinned, config.num_captions)
        vae, (text_class, _) = encoder.vae_config(model), encoder.text_config(text_model)
        empty_ids_BL = torch.from_numpy(images.caption_ids([""], pinned))
        text_encoder = encoder.load_text_encoder(text_model)
    except images.Unsupported:
        raise
    except (OSError, ValueError) as error:
        parameters = dict.fromkeys(config.model_parameter(part) for part in ("vae", "text_encoder"))
        names = " or ".join(f"{name}={getattr(config, name)!r}" for name in parameters)
        raise ValueError(
            f"{names} holds no model in diffusers layout (vae/, text_encoder/, tokenizer/): give 'tiny-sd', a folder "
            f"or a hub id. ({str(error).splitlines()[0]})"
        ) from None
    factor = encoder.downsampling(vae)
    for width, height in itertools.chain.from_iterable(config.shapes.values()):
        if width % factor or height % factor:
            raise ValueError(
                f"resolutions={list(config.resolutions)} and size_multiple={config.size_multiple} come to {width} x "
                f"{height} pixels, which the VAE halves {factor.bit_length() - 1} times: use multiples of {factor}."
            )
    if (empty_ids_BL < 0).all():
        raise ValueError(
            f"The tokenizer of {text_model!r} makes no token of an empty caption: give maximum_tokens=None."
        )
    with torch.inference_mode():
        empty_BLD = encoder.last_states(text_encoder, empty_ids_BL)
    return {
        "encoder": {
            **name_models(model, text_model),
            "precision": precision,
            **name_classes(vae["_class_name"], text_class),
        },
        "columns": columns,
        "scaling_factor": vae["scaling_factor"],
        "shift_factor": vae.get("shift_factor") or 0.0,
        "empty_caption_embedding": encode_embedding(empty_BLD[empty_ids_BL >= 0].numpy()),
    }


def name_models(model: str, text_encoder_model: str) -> dict[str, str]:
    """{"model", "revision"}, and where the text encoder is another model's, its two too."""
    parts, text_parts = ("vae",), ("text_encoder", "tokenizer")
    if model == text_encoder_model:
        return {"model": model, "revision": revision_of(model, *parts, *text_parts)}
    names = {
        "text_encoder_model": text_encoder_model,
        "text_encoder_revision": revision_of(text_encoder_model, *text_parts),
    }
    return {"model": model, "revision": revision_of(model, *parts), **names}


def name_classes(vae_class: str, text_encoder_class: str) -> dict[str, str]:
    """The classes that are not those of Stable Diffusion, which earlier versions did not name."""
    names = {"vae_class": vae_class, "text_encoder_class": text_encoder_class}
    usual = {"vae_class": "AutoencoderKL", "text_encoder_class": "CLIPTextModel"}
    return {name: value for name, value in names.items() if value != usual[name]}


def revision_of(model: str, *parts: str) -> str:
    """The commit of a pinned hub id, or a hash of the files of some parts of a model's folder."""
    if images.is_hub_id(model):
        return model.partition("@")[2]
    folder = pathlib.Path(images.model_folder(model))
    digest = hashlib.sha256()
    for path in sorted(path for name in parts for path in folder.glob(f"{name}/*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def first_latents(latents_uri: str, num_rows: int) -> pa.Table:
    """The first rows of a finished job: what the trainer reads."""
    files = read_files(latents_uri)
    filesystem, path = storage.open_filesystem(storage.join(latents_uri, "data", files.names[0].as_py()))
    with pq.ParquetFile(path, filesystem=filesystem) as file:
        num_groups = min(file.num_row_groups, -(-num_rows // int(files.group_rows[0])))
        return file.read_row_groups(range(num_groups)).slice(0, num_rows)
