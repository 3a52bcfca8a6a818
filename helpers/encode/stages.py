"""The CPU stages of the preprocessing pipeline, before and after the encoder: `transform` and `write_latents`.

This module does not import PyTorch. Ray reuses the processes of these stages for later tasks, so each process would
keep PyTorch's 230 MiB.
"""

from __future__ import annotations

import collections
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import storage
from ..config import PreprocessingConfig
from ..latents import schema
from ..latents.parquet import write_latents_file
from ..raw import images, inputs
from .captions import caption_ids

EXCLUDED = "excluded"  # why a row is rejected
Decode = Callable[[Iterable[images.Call], images.Shapes], list[images.DecodedImage]]
Excluded = Callable[[pa.ChunkedArray, list[bytes | None]], np.ndarray]


def transform(rows: pa.Table, *, config: PreprocessingConfig, **options: Any) -> pa.Table:
    """Raw rows (`inputs.to_raw_rows`) -> rows for the encoder: every row stays, a bad one with a `reason`.

    Tensors are plain bytes, so that nothing is parsed between the stages. Columns:
        id, source
        reason: empty for a good row
        caption, caption_ids: the text and the L int32 token ids of each caption (`schema.numbered`). A bad row has an
            empty text, and the ids of an empty text. With `config.maximum_tokens`, ids are filled up with -1, else with
            padding tokens.
        pixels_...: for each shape of `config.shapes` (`schema.input_column`), H x W x 3 bytes. Null if another shape of
            the same resolution fits the image better. Also null if the image is smaller than the shape.
        note: what is wrong with an image that is used, and the note of the raw row; empty for most
        transform_seconds: of the call, in its first row

    `options`: of `decode_rows`.
    """
    started = time.perf_counter()
    done = decode_rows(rows, config, **options)
    columns = {
        schema.ID: rows[inputs.ID],
        schema.REASON: pa.array([image.reason for image in done], pa.string()),
        schema.SOURCE: rows[inputs.SOURCE],
    }
    for number in schema.numbers(inputs.CAPTION, rows.column_names):
        captions = rows[schema.numbered(inputs.CAPTION, number)].to_pylist()
        # A caption that is too long would cost its tokens.
        texts = ["" if image.reason else caption or "" for caption, image in zip(captions, done, strict=True)]
        ids_BL = caption_ids(texts, config)
        columns[schema.numbered(schema.CAPTION, number)] = pa.array(texts, pa.string())
        columns[schema.numbered(schema.CAPTION_IDS, number)] = schema.to_binary(ids_BL, dtype=np.int32)
    for shape in itertools.chain.from_iterable(config.shapes.values()):
        pixels = [image.pixels[shape].data if shape in image.pixels else None for image in done]
        columns[schema.input_column(schema.latents_column(*shape))] = pa.array(pixels, pa.large_binary())
    notes = zip(rows[inputs.NOTE].to_pylist(), (image.note for image in done), strict=True)
    columns[inputs.NOTE] = pa.array(("; ".join(filter(None, both)) for both in notes), pa.string())
    seconds = time.perf_counter() - started
    return pa.table({**columns, "transform_seconds": schema.once_per_call(seconds, len(rows), pa.float64())})


def decode_rows(
    rows: pa.Table,
    config: PreprocessingConfig,
    crops: Iterable[images.Crop] | None = None,
    shapes: Iterable[images.Shape] | None = None,
    decode: Decode = images.decode_all,
    excluded: Excluded | None = None,
) -> list[images.DecodedImage]:
    """The image of each raw row; a row that cannot be used has only a reason.

    Args:
        crops: how each row is cropped (functions that can be pickled); None: to the largest centre crop.
        shapes: the one (width, height) to make of each row; None: one for each resolution.
        decode: a function like `images.decode_all`.
        excluded: `excluded(ids, encoded images)` returns (B,) bool: True for rows that must not be used. They are
            rejected before anything is decoded.
    """
    raw = rows.select([inputs.CAPTION, inputs.IMAGE, inputs.ERROR]).to_pylist()
    excluded_B = excluded(rows[inputs.ID], [row[inputs.IMAGE] for row in raw]) if excluded else [False] * len(raw)
    reasons = [EXCLUDED if out else row_reason(row) for row, out in zip(raw, excluded_B, strict=True)]
    crops, shapes = crops or itertools.repeat(images.center_crop), shapes or itertools.repeat(None)
    calls = [(row[inputs.IMAGE], crop, shape) for row, crop, shape in zip(raw, crops, shapes, strict=False)]
    tried = [call for call, reason in zip(calls, reasons, strict=True) if not reason]
    decoded = iter(decode(tried, config.shapes))
    return [images.DecodedImage({}, reason) if reason else next(decoded) for reason in reasons]


def row_reason(row: dict[str, Any]) -> str:
    """Why a raw row cannot be used, as far as is known before its image is decoded."""
    reason = inputs.caption_reason(row[inputs.CAPTION]) or row[inputs.ERROR]
    return reason or ("" if row[inputs.IMAGE] else "no image bytes")


def write_latents(
    rows: pa.Table,
    *,
    latents_uri: str,
    segment_index: int,
    columns: list[schema.ColumnSpec],
    validation_share: float = 0.0,
) -> pa.Table:
    """Write encoded rows as one Parquet file of latents and one of rejects; returns one row that reports them.

    All rows of a row group are of one bucket (`manifest.Manifest`). Rows whose ids hash below `validation_share` go to
    held-out buckets. Each try writes files with new names, which begin with `segment_index`. So a retried task never
    leaves a half-written file under a committed name. Columns of the returned row: `rows` (the number of rows)
    and `report` (JSON, for `job.segment_entry`).
    """
    started = time.perf_counter()
    name = f"{segment_index:06d}-{uuid.uuid4().hex[:12]}.parquet"
    masks = bucket_masks(rows, columns, validation_share)
    counts = {bucket: int(np.count_nonzero(mask_B)) for bucket, mask_B in masks.items()}
    files, rejects, num_bytes = [], [], 0
    if masks:
        layout = schema.latents_schema(rows[schema.ID].type, columns)
        stored = rows.select(layout.names)
        tables = (stored.filter(pa.array(mask_B)).cast(layout) for mask_B in masks.values())  # one in memory at a time
        num_bytes, file_id = write_latents_file(tables, storage.join(latents_uri, "data", name))
        groups = {bucket: schema.row_groups(count) for bucket, count in counts.items()}
        row_groups = list(itertools.chain.from_iterable(groups.values()))
        buckets = {bucket: len(sizes) for bucket, sizes in groups.items()}
        file = {"name": name, "row_groups": row_groups, "buckets": buckets, "bytes": num_bytes, "file_id": file_id}
        files = [file]
    good_B = pc.equal(rows[schema.REASON], "")
    bad = rows.filter(pc.invert(good_B))
    if len(bad):
        layout = schema.rejects_schema(bad[schema.ID].type)
        write_latents_file([bad.select(layout.names).cast(layout)], storage.join(latents_uri, "rejects", name))
        rejects = [name]
    calls = rows["encoder_call"].drop_null().to_pylist()
    report = {
        "files": files,
        "rejects": rejects,
        "written": sum(counts.values()),
        "rejected": collections.Counter(bad[schema.REASON].to_pylist()),
        "noted": collections.Counter(filter(None, rows.filter(good_B)[inputs.NOTE].to_pylist())),
        "buckets": counts,
        "bytes": num_bytes,
        "calls": calls,
        "transform_seconds": pc.sum(rows["transform_seconds"]).as_py() or 0.0,
        "encode_seconds": sum(call["ended"] - call["started"] for call in calls),
        "write_seconds": time.perf_counter() - started,
    }
    inputs.release_memory()
    return pa.table({"report": [json.dumps(report)], "rows": [len(rows)]})


def bucket_masks(rows: pa.Table, columns: list[schema.ColumnSpec], validation_share: float) -> dict[str, np.ndarray]:
    """{bucket: (B,) bool mask of its rows}: training buckets, then held-out buckets. Rejected rows are in none."""
    good_B = pc.equal(rows[schema.REASON], "").to_numpy()
    latents = [spec for spec in columns if spec.resolution]
    names = [spec.name for spec in sorted(latents, key=lambda spec: spec.size[0] != spec.size[1])]  # squares first
    held_out_B = schema.held_out_mask(rows[schema.ID].to_pylist(), validation_share)
    # One row of booleans for each row: whether it is held out, and which columns of latents it lacks.
    keys = np.column_stack([held_out_B, *(rows[name].is_null().to_numpy() for name in names)])
    masks = {}
    for key in np.unique(keys[good_B], axis=0):
        held_out, *lacks = key
        has = [name for name, is_lacking in zip(names, lacks, strict=True) if not is_lacking]
        masks[schema.bucket_name(has, held_out)] = good_B & (keys == key).all(axis=1)
    return masks
