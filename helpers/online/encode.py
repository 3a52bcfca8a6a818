"""Raw rows in the order of a plan, transformed for an epoch: what an online run encodes on the way to the trainers.

The plan is made over an index of the raw files (`index`). Each epoch's crop and caption of a row are sampled from
(seed, epoch, id), so that a run is reproducible and resumes exactly. The transform, the encoder and the training loop
are those of stored latents.

Rows that the index leaves out or holds out are in no batch. Some rows prove unusable only when they are decoded: their
image is broken, or its size differs from the size columns. Without size columns, images that are too small are also
found only when they are decoded. Such rows are masked, and listed in the run's rejects.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from .. import storage
from ..encode import stages
from ..latents import schema
from ..latents.manifest import read_manifest
from ..latents.plan import CHUNK_BYTES, Plan, RowRange, Source, draw_caption
from ..latents.read import KEEP, UNIT, build_dataset
from ..raw import images, inputs
from . import index
from .config import OnlineConfig

INDEX = "index"  # beside the manifest
READ_AHEAD_BYTES = 2**31  # of large row groups that are kept in memory, to read each once
SHAPE = "shape"  # column of raw rows: the latents column that the row is trained on
PADS = "fills up a block"  # why a padding row is not decoded


def raw_rows(plan: Plan, first_step: int, end_step: int, *, config: OnlineConfig) -> ray.data.Dataset:
    """A dataset of raw rows in the plan's order from `first_step` on; a block holds `plan.block_steps` units.

    Columns: those of a raw row (`inputs.to_raw_rows`), `shape` (the latents column that the row is trained on) and
    `unit` (the unit's number in the run).

    If Parquet row groups are larger than a quarter of a chunk, Ray's object store caches the most recently read ones,
    up to `READ_AHEAD_BYTES`. With this cache, an epoch reads a row group once for each bucket that the row
    group has rows of.
    """
    manifests = [read_manifest(uri) for uri in {source.files.uri for source in plan.sources}]
    largest = max(manifest.job["raw_group_bytes"] for manifest in manifests)
    read = functools.partial(read_raw, config=config)
    if largest <= CHUNK_BYTES // 4:
        return build_dataset(plan, first_step, end_step, read)
    # One chunk per task, so that concurrent tasks share row groups: one read serves consecutive tasks.
    kept = index.keep_row_groups(max(1, READ_AHEAD_BYTES // largest))
    shared = functools.partial(read, read_group=kept)
    return build_dataset(plan, first_step, end_step, shared, chunks_per_task=1)


def read_raw(ranges: list[RowRange], source: Source, *, config: OnlineConfig, **options: Any) -> pa.Table:
    """The raw rows of some row ranges, with `shape`. `options`: of `index.read_indexed_rows`."""
    rows = index.read_indexed_rows(ranges, config, storage.join(source.files.uri, INDEX), **options)
    return rows.append_column(SHAPE, pa.repeat(source.latents.name, len(rows)))


def transform_for_epoch(
    rows: pa.Table,
    *,
    config: OnlineConfig,
    units_per_epoch: int,
    seed: int = 0,
    caption_shares: Sequence[float] = (1.0,),
    **options: Any,
) -> pa.Table:
    """`stages.transform` with crops and captions that depend on (seed, epoch, id): fixed for a row in one epoch.

    Rows that only pad a block are not decoded, and `keep` is False for them. If rows have several captions, only the
    one that is sampled for the epoch is encoded.

    Args:
        rows: raw rows with `shape` and `unit`.
        config: `random_crop` is the minimum side of a crop, as a share of the side of the largest possible crop. If it
            is 1, every crop is the centre crop. `horizontal_flip` mirrors half of the images.
        units_per_epoch, caption_shares: as in the plan.
        seed: the run's.
        options: `decode` and `excluded` of `stages.transform`.
    """
    units = rows[UNIT].to_numpy()
    is_used, epochs = units >= 0, (np.maximum(units, 0) // units_per_epoch).tolist()
    ids_and_epochs = list(zip(rows[inputs.ID].to_pylist(), epochs, strict=True))
    crops = [augment_crop(row_id, epoch, config, seed) for row_id, epoch in ids_and_epochs]
    numbers = np.array([draw_caption(caption_shares, seed, epoch, str(row_id)) for row_id, epoch in ids_and_epochs])
    sizes = {schema.latents_column(*shape): shape for shapes in config.shapes.values() for shape in shapes}
    shapes = [sizes[column] for column in rows[SHAPE].to_pylist()]
    errors = pc.if_else(pa.array(is_used), rows[inputs.ERROR], PADS)
    raw = rows.set_column(rows.column_names.index(inputs.ERROR), inputs.ERROR, errors)
    raw = choose_captions(raw, numbers)
    done = stages.transform(raw, config=config, crops=crops, shapes=shapes, **options)
    return done.append_column(UNIT, rows[UNIT]).append_column(KEEP, pa.array(is_used))


def choose_captions(rows: pa.Table, numbers_B: np.ndarray) -> pa.Table:
    """Raw rows with several captions -> raw rows with one each: that of number `numbers_B`, from 1."""
    names = [schema.numbered(inputs.CAPTION, number) for number in schema.numbers(inputs.CAPTION, rows.column_names)]
    chosen = pc.choose(pa.array(numbers_B - 1), *(schema.one_array(rows[name]) for name in names))
    return rows.drop_columns(names).append_column(inputs.CAPTION, chosen)


def augment_crop(row_id: int | str, epoch: int, config: OnlineConfig, seed: int) -> images.Crop:
    """The function that crops a row's image in one epoch. The crop depends only on the seed, the epoch and the id.

    `config`: see `transform_for_epoch`.
    """
    seeds = seed, epoch, zlib.crc32(str(row_id).encode())
    options = {"smallest": config.random_crop, "may_mirror": config.horizontal_flip}
    return functools.partial(images.random_crop, seeds=seeds, **options)
