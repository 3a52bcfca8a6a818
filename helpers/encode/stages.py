"""The stages of the preprocessing pipeline around the encoder: `transform` and `write_latents`. No PyTorch.

The processes that read, transform and write are kept by Ray for the next tasks: PyTorch would cost each 230 MiB.
"""

from __future__ import annotations

import collections
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from .. import storage
from ..config.preprocessing import PreprocessingConfig
from ..latents import schema
from ..raw import images, inputs
from . import captions as encode_captions
from . import job

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
        caption_ids = schema.to_binary(encode_captions.caption_ids(captions, config), dtype=np.int32)
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
    segment: job.Segment,
    columns: list[schema.ColumnSpec],
    id_type: pa.DataType,
    validation_share: float = 0.0,
) -> pa.Table:
    """Write encoded rows as one Parquet file of latents and one of rejects.

    The rows of a row group are of one bucket (`manifest.Manifest`), of which those are held out whose ids hash below
    `validation_share`. File names are new on every try, so a retried task never leaves a half-written file under a
    committed name. Returns one row: `rows`, how many these are, and `report`, for `job.segment_entry`.
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
