"""Raw pictures, transformed and encoded on the way to the trainers: the epoch plan over raw files.

Offline and online differ only in where latents come from. The plan, the transform, the encoder and the training loop
are those of `plan`, `read`, `preprocess`, `encoder` and `train`. This module plans over an index of the raw files
(`data_io.index`), and draws each epoch's augmentation from (seed, epoch, id), so that a run is reproducible and resumes
exactly.

Rows that the index leaves out or holds out are in no batch. Rows that only decoding shows to be unusable are masked and
listed in the run's rejects: broken pictures, pictures whose size contradicts their columns and, without such columns,
pictures that are too small.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from PIL import Image, ImageOps

from . import held_out_rows, hub, images, preprocess, resumable_job, schema, storage
from .data_io import index, inputs
from .manifest import MANIFEST, Manifest, RowRange, add_up, read_manifest, write_manifest
from .plan import CHUNK_BYTES, Plan, Source, draw_caption
from .preprocessing_config import OnlineConfig
from .read import KEEP, UNIT, build_dataset
from .runtime import lease
from .training_config import TrainingConfig

INDEX = "index"  # beside the manifest
SHAPE = "shape"  # column of raw rows: the latents column of the size at which a row is trained on
CAPTION_NUMBER = "caption_number"  # column of the rows of a run that keeps latents: the caption that is trained on
FILLS = "fills up a block"  # why a row is not decoded


def prepare(config: OnlineConfig, training: TrainingConfig) -> Manifest:
    """Check a run's raw data, index it, and write its manifest to `training.latents_uri`.

    Encodes only an empty caption and, once, the rows held out for validation. The index is built by a Ray Data job if
    Ray is connected, else in this process. Pins the models (`hub.pin_encoder`). Raises
    FileNotFoundError or ValueError that says what to change.
    """
    if config.keep_latents and (config.random_crop < 1 or config.horizontal_flip):
        raise ValueError(
            f"keep_latents=True encodes a picture once, and random_crop={config.random_crop}, horizontal_flip="
            f"{config.horizontal_flip} change the crop in every epoch: use 1 and False, or keep_latents=False."
        )
    uri = training.latents_uri
    known = read_manifest(uri).encoder if storage.exists(storage.join(uri, MANIFEST)) else None
    hub.pin_encoder(config, known)
    found = preprocess.check(config)
    parameters = {**found.parameters, "validation_share": training.validation_share, "online": config.to_dict()}
    with lease.hold(uri, f"latents_uri={uri!r}"):
        share = training.validation_share
        key, reports = index.make(storage.join(uri, INDEX), found.paths, found.listing, config, share)
        rows = sum(report["read"] for report in reports)
        if rows == 0:
            raise ValueError(f"The input holds no rows ({len(found.paths)} files): give other data.")
        row_bytes, largest = sum(found.listing.values()) / rows, max(report["largest"] for report in reports)
        parameters["raw_row_bytes"] = round(row_bytes + pixel_bytes(config))
        parameters["raw_group_bytes"] = round(largest * row_bytes)
        segments = [segment_of(key, reports)]
        manifest = Manifest.of(
            segments,
            **found.description,
            resolutions=list(config.resolutions),
            id_type=str(found.id_type),
            job=parameters,
        )
        check_row_groups(manifest, config)
        validation_uri = storage.join(uri, held_out_rows.FOLDER)
        if not storage.exists(storage.join(uri, MANIFEST)) or not same_data(read_manifest(uri), manifest):
            storage.delete(validation_uri)
            write_manifest(uri, manifest, segments)
        if training.validation_share and not storage.exists(storage.join(validation_uri, MANIFEST)):
            write_validation(manifest, config, training)
    return manifest


def check_row_groups(manifest: Manifest, config: OnlineConfig) -> None:
    """Print a warning if row groups are too large for `read_ahead_bytes` to hold one of each bucket."""
    largest = manifest.job["raw_group_bytes"]
    buckets = sum(not name.startswith(schema.HELD_OUT) for name in manifest.buckets)
    if largest > CHUNK_BYTES // 4 and config.read_ahead_bytes < (buckets + 1) * largest:
        print(
            f"Row groups have up to {largest / 2**20:,.0f} MiB, and read_ahead_bytes={config.read_ahead_bytes} keeps "
            f"{config.read_ahead_bytes // largest} of them: each may be read several times an epoch. With "
            f"{(buckets + 1) * largest} it would be read once for each of the {buckets} buckets that it has rows of."
        )


def segment_of(key: str, reports: list[dict]) -> dict:
    """An index as the manifest's segment entry; files are named as in the index."""
    files = [
        {"name": f"{key}/{report['name']}", "row_groups": report["row_groups"], "buckets": report["buckets"]}
        for report in reports
        if report["row_groups"]
    ]
    counts = {name: sum(report[name] for report in reports) for name in ("read", "filtered")}
    buckets, rejected = (add_up(report[name] for report in reports) for name in ("rows", "rejected"))
    counts |= {"written": sum(buckets.values()), "rejected": rejected, "buckets": buckets}
    return {"index": 0, "files": files, "rejects": [], **counts}


def same_data(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests describe the same rows and encoder; how many workers prepare them does not matter."""

    def comparable(manifest):
        job = {name: value for name, value in manifest.job.items() if name != "online"}
        return json.dumps({**dataclasses.asdict(manifest), "job": job}, sort_keys=True)

    return comparable(one) == comparable(other)


def pixel_bytes(config: OnlineConfig) -> int:
    """Maximum bytes of a row's picture between the transform and the encoder."""
    return max(3 * width * height for width, height in itertools.chain.from_iterable(config.shapes.values()))


def raw_rows(plan: Plan, first_step: int, end_step: int, *, config: OnlineConfig) -> ray.data.Dataset:
    """Raw rows in the plan's order from `first_step` on: a dataset with one block per unit (or `block_steps` of them).

    Columns: those of a raw row (`inputs.to_raw_rows`), `shape` (the latents column of the size at which the row is
    trained on) and `unit` (the unit's number in the run).

    If Parquet row groups are larger than a quarter of a chunk, the most recent `config.read_ahead_bytes` of them are
    cached in Ray's object store, so that an epoch reads each only once per bucket of its rows.
    """
    largest = max(read_manifest(source.files.uri).job["raw_group_bytes"] for source in plan.sources)
    if largest <= CHUNK_BYTES // 4:
        return build_dataset(plan, first_step, end_step, functools.partial(read_raw, config=config))
    # One chunk per task, so that concurrent tasks share row groups: one read serves consecutive tasks.
    kept = index.keep_row_groups(max(1, config.read_ahead_bytes // largest))
    read = functools.partial(read_raw, config=config, read_group=kept)
    return build_dataset(plan, first_step, end_step, read, chunks_per_task=1)


def read_raw(
    ranges: list[RowRange], source: Source, *, config: OnlineConfig, read_group: index.ReadGroup | None = None
) -> pa.Table:
    """The raw rows of some row ranges, with `shape`. `read_group`: see `index.read_rows`."""
    rows = index.read_rows(ranges, config, storage.join(source.files.uri, INDEX), read_group)
    rows = inputs.to_raw_rows(rows, config)
    return rows.append_column(SHAPE, pa.repeat(source.latents.name, len(rows)))


def transform(
    rows: pa.Table,
    *,
    config: OnlineConfig,
    units_per_epoch: int,
    seed: int = 0,
    caption_shares: Sequence[float] = (1.0,),
) -> pa.Table:
    """`preprocess.transform` with augmentation that differs between epochs but is fixed for a given row and epoch.

    Rows that only pad a block are not decoded; `keep` is False for them. Of several captions a row, one is drawn for
    the epoch, and the others are not encoded, unless latents are kept: then `caption_number` names it.

    Args:
        rows: raw rows with `shape` and `unit`.
        config: `random_crop` is the smallest side of the crop, as a share of the largest possible (1: the centre crop);
            `horizontal_flip` mirrors half of the pictures.
        units_per_epoch, caption_shares: as in the plan.
        seed: the run's.
    """
    units = rows[UNIT].to_numpy()
    used, epochs = pa.array(units >= 0), np.maximum(units, 0) // units_per_epoch
    ids = rows[inputs.ID].to_pylist()
    crops = [
        functools.partial(augment_crop, row_id=row_id, epoch=epoch, config=config, seed=seed)
        for row_id, epoch in zip(ids, epochs, strict=True)
    ]
    captions = np.array(
        [draw_caption(caption_shares, seed, int(epoch), str(row_id)) for row_id, epoch in zip(ids, epochs, strict=True)]
    )
    sizes = {schema.latents_column(*shape): shape for shapes in config.shapes.values() for shape in shapes}
    errors = pc.if_else(used, rows[inputs.ERROR], FILLS)
    raw = rows.set_column(rows.column_names.index(inputs.ERROR), inputs.ERROR, errors)
    raw = raw if config.captions_encoded > 1 else schema.choose_captions(raw, captions)
    only = map(sizes.__getitem__, rows[SHAPE].to_pylist())
    done = preprocess.transform(raw, config=config, crops=crops, only=only)
    if config.captions_encoded > 1:
        done = done.append_column(CAPTION_NUMBER, pa.array(captions))
    return done.append_column(UNIT, rows[UNIT]).append_column(KEEP, used)


def augment_crop(
    picture: Image.Image, ratio: float, *, row_id: int | str, epoch: int, config: OnlineConfig, seed: int
) -> Image.Image:
    """The crop of a picture for one epoch, which depends only on (seed, epoch, id), the picture's size and `ratio`.

    `ratio`: the crop's width over its height. `config`: see `transform`.
    """
    random = np.random.default_rng([seed, int(epoch), zlib.crc32(str(row_id).encode())])
    if config.random_crop == 1:
        cut = images.center_crop(picture, ratio)
    else:
        share = random.uniform(config.random_crop, 1)
        largest = min(picture.width, picture.height * ratio), min(picture.height, picture.width / ratio)
        width, height = (max(1, round(side * share)) for side in largest)
        left = int(random.integers(0, picture.width - width + 1))
        top = int(random.integers(0, picture.height - height + 1))
        cut = picture.crop((left, top, left + width, top + height))
    return ImageOps.mirror(cut) if config.horizontal_flip and random.random() < 0.5 else cut


def write_validation(manifest: Manifest, config: OnlineConfig, training: TrainingConfig) -> None:
    """Encode the first held-out rows, without augmentation, into a small latents folder of their own."""
    import torch

    from . import encoder  # not at the top: see `preprocess`

    uri, num_rows = training.latents_uri, held_out_rows.NUM_ROWS
    ranges = held_out_rows.first_ranges(manifest, uri, training.largest_resolution, num_rows)
    rows = (
        inputs.to_raw_rows(index.read_rows(ranges, config, storage.join(uri, INDEX))[:num_rows], config)
        if ranges
        else []
    )
    latents_uri = storage.join(uri, held_out_rows.FOLDER)
    segment = resumable_job.Segment(0, [], len(rows) if rows else 0)
    tables, arguments = [], encoder.arguments(config)
    columns = arguments[1]
    if rows:
        # On a CPU, use all threads: nothing else runs in this process yet.
        options = {"num_threads": torch.get_num_threads(), "batch_size": config.encoder_batch_size}
        latent_encoder = encoder.LatentEncoder(*arguments, **options)
        encoded = latent_encoder(preprocess.transform(rows, config=config))
        id_type = pa.type_for_alias(manifest.id_type)
        report = preprocess.write_latents(
            encoded,
            latents_uri=latents_uri,
            segment=segment,
            columns=columns,
            id_type=id_type,
            validation_share=1.0,
        )
        tables.append(report)
    entry = resumable_job.segment_entry(segment, tables)
    names = ("encoder", "resolutions", "scaling_factor", "shift_factor", "id_type", "empty_caption_embedding")
    description = {name: getattr(manifest, name) for name in names}
    write_manifest(latents_uri, Manifest.of([entry], **description, columns=columns, job={}), [entry])
