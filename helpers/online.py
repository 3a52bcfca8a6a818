"""Raw pictures that are transformed and encoded on the way to the trainers: the epoch plan over raw files.

Offline and online differ only in where latents come from. The plan, the transform, the encoder and the training loop
are those of `ingest`, `preprocess`, `encoder` and `train`. This module plans over raw files, and draws each epoch's
augmentation from (seed, epoch, id), so that a run stays exact and resumable.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import ray
from PIL import Image, ImageOps

from . import images, ingest, preprocess, resumable_job, schema, storage
from .config import OnlineConfig, TrainingConfig
from .data_io import filters, inputs
from .runtime import lease

NUM_VALIDATION_ROWS = 512
INDEX = "index"  # beside the manifest: the offsets of each tar's row groups


def prepare(config: OnlineConfig, training: TrainingConfig) -> schema.Manifest:
    """Check the raw data of a run and write a manifest of it at `training.latents_uri`.

    Nothing is encoded but one empty caption and, once, the rows that are held out for validation. Raises
    FileNotFoundError or ValueError with what to change.
    """
    if config.keep_latents and (config.random_crop < 1 or config.horizontal_flip):
        raise ValueError(
            f"keep_latents=True encodes a picture once, and random_crop={config.random_crop}, horizontal_flip="
            f"{config.horizontal_flip} cut it anew in each epoch: use 1 and False, or keep_latents=False."
        )
    uri, found = training.latents_uri, preprocess.check(config)
    files = list(list_row_groups(found.paths, config, storage.join(uri, INDEX)))
    rows = sum(sum(groups) for _, groups in files)
    if rows == 0:
        raise ValueError(f"The input holds no rows ({len(found.paths)} files): give other data.")
    raw_bytes = sum(found.listing.values()) / rows
    check_row_groups(files, raw_bytes)
    parameters = {
        **found.parameters,
        "random_crop": config.random_crop,
        "horizontal_flip": config.horizontal_flip,
        "listing_crc32": zlib.crc32(json.dumps(sorted(found.listing.items())).encode()),
        "raw_row_bytes": round(raw_bytes + pixel_bytes(config)),
        "online": config.to_dict(),
    }
    segment = {
        "index": 0,
        "files": [{"name": name, "row_groups": groups} for name, groups in files],
        "rejects": [],
        "read": rows,
        "written": rows,
        "rejected": {},
        "filtered": 0,
    }
    manifest = schema.Manifest(
        **found.description,
        resolutions=list(config.resolutions),
        id_type=str(found.id_type),
        job=parameters,
        segments=[segment],
    )
    manifest_uri, validation_uri = storage.join(uri, schema.MANIFEST), storage.join(uri, ingest.VALIDATION)
    with lease.hold(uri, f"latents_uri={uri!r}"):
        if not storage.exists(manifest_uri) or not same_data(ingest.read_manifest(uri), manifest):
            storage.delete(validation_uri)
            storage.write_json(manifest_uri, manifest.to_dict())
        if training.validation_share and not storage.exists(storage.join(validation_uri, schema.MANIFEST)):
            write_validation(manifest, config, training)
    return manifest


def check_row_groups(files: list[tuple[str, list[int]]], row_bytes: float) -> None:
    """Print a warning if row groups are much larger than a chunk of the plan: each chunk reads a row group anew."""
    largest = max(rows for _, groups in files for rows in groups)
    if largest * row_bytes > 4 * ingest.CHUNK_BYTES:
        print(
            f"Row groups have up to {largest:,} rows, {largest * row_bytes / 2**20:,.0f} MiB, and the plan reads "
            f"{ingest.CHUNK_BYTES // 2**20} MiB at a time: each will be read several times an epoch. Data "
            f"written again with row_group_size={max(1, int(ingest.CHUNK_BYTES // row_bytes))} would be read once."
        )


def same_data(one: schema.Manifest, other: schema.Manifest) -> bool:
    """Whether two manifests describe the same rows and encoder; how many workers prepare them does not matter."""

    def comparable(manifest):
        job = {name: value for name, value in manifest.job.items() if name != "online"}
        return json.dumps({**manifest.to_dict(), "job": job}, sort_keys=True)

    return comparable(one) == comparable(other)


def pixel_bytes(config: OnlineConfig) -> int:
    """Bytes of a row's pictures between the transform and the encoder."""
    return sum(3 * resolution**2 for resolution in config.resolutions)


def list_row_groups(paths: list[str], config: OnlineConfig, index_uri: str) -> Iterator[tuple[str, list[int]]]:
    """(path below the input's folder, rows of each row group) of the files, up to `limit` rows in all.

    Offsets of row groups, for formats that have them, are kept under `index_uri`.
    """
    left, base = config.limit, inputs.base_folder(config.data_uri)
    for start in range(0, len(paths), 256):
        some = paths[start : start + 256]
        for path, (groups, offsets) in zip(some, inputs.index(some, config), strict=True):
            name = inputs.below(path, base)
            if left is not None:
                ends = np.minimum(np.cumsum([0, *groups]), left)
                groups = [int(rows) for rows in np.diff(ends) if rows > 0]
                left -= sum(groups)
            if offsets is not None:
                inputs.write_index(index_uri, name, offsets)
            yield name, groups
            if left == 0:
                return


def raw_rows(
    plan: ingest.Plan, first_step: int, num_steps: int, *, config: OnlineConfig, validation_share: float
) -> ray.data.Dataset:
    """Raw rows in the plan's order from `first_step` on: a dataset with one block per unit (or `block_steps` of them).

    Columns: those of a raw row (`inputs.to_raw_rows`), `keep` (False: validation owns the row, or `row_filter` drops
    it) and `unit`, the unit's number in the run.
    """
    read = functools.partial(read_raw, config=config, validation_share=validation_share)
    return ingest.build_dataset(plan, first_step, num_steps, read)


def read_raw(pieces: list[tuple], source: ingest.Source, *, config: OnlineConfig, validation_share: float) -> pa.Table:
    """The raw rows of `pieces` (see `ingest.Plan.chunk`), with `keep`."""
    rows = inputs.read_pieces(pieces, config, storage.join(source.uri, INDEX))
    keep = ~ingest.held_out(inputs.row_ids(rows[config.id_column]).to_pylist(), validation_share)
    return inputs.to_raw_rows(rows, config).append_column(ingest.KEEP, pa.array(keep & filter_mask(rows, config)))


def filter_mask(rows: pa.Table, config: OnlineConfig) -> np.ndarray:
    """(B,) bool: which rows `row_filter` keeps."""
    expression = filters.parse_filter(config.row_filter)
    if expression is None:
        return np.ones(len(rows), dtype=bool)
    numbered = rows.append_column("row number", pa.array(range(len(rows))))
    return np.isin(np.arange(len(rows)), numbered.filter(expression.to_pyarrow())["row number"].to_numpy())


def transform(rows: pa.Table, *, config: OnlineConfig, units_per_epoch: int, seed: int = 0) -> pa.Table:
    """`preprocess.transform` with an augmentation that differs between epochs, and is fixed for a row and an epoch.

    Args:
        rows: raw rows with `unit` and `keep`.
        config: `random_crop` is the least side of the square crop, as a share of the largest (1: the centre square);
            `horizontal_flip` mirrors half of the pictures.
        units_per_epoch: of the plan.
        seed: of the run.
    """
    epochs = np.maximum(rows[ingest.UNIT].to_numpy(), 0) // units_per_epoch
    options = {"seed": seed, "random_crop": config.random_crop, "horizontal_flip": config.horizontal_flip}
    crops = [
        lambda picture, ratio, row_id=row_id, epoch=epoch: augment_crop(picture, row_id, epoch, **options)
        for row_id, epoch in zip(rows[inputs.ID].to_pylist(), epochs, strict=True)
    ]
    done = preprocess.transform(rows, config=config, crops=crops)
    return done.append_column(ingest.UNIT, rows[ingest.UNIT]).append_column(ingest.KEEP, rows[ingest.KEEP])


def augment_crop(
    picture: Image.Image,
    row_id: int | str,
    epoch: int,
    *,
    seed: int = 0,
    random_crop: float = 1.0,
    horizontal_flip: bool = False,
) -> Image.Image:
    """The square crop of a picture that an epoch is trained on: a function of (seed, epoch, id) alone.

    `random_crop`, `horizontal_flip`: see `transform`.
    """
    random = np.random.default_rng([seed, int(epoch), zlib.crc32(str(row_id).encode())])
    if random_crop == 1:
        square = images.center_square(picture)
    else:
        side = max(1, round(min(picture.size) * random.uniform(random_crop, 1)))
        left, top = (int(random.integers(0, extent - side + 1)) for extent in picture.size)
        square = picture.crop((left, top, left + side, top + side))
    return ImageOps.mirror(square) if horizontal_flip and random.random() < 0.5 else square


def write_validation(manifest: schema.Manifest, config: OnlineConfig, training: TrainingConfig) -> None:
    """Encode the first held-out rows, without augmentation, into a small latents folder of their own."""
    import torch

    from . import encoder  # not at the top: see `preprocess`

    rows = first_held_out(manifest, config, training)
    latents_uri = storage.join(training.latents_uri, ingest.VALIDATION)
    segment = resumable_job.Segment(0, [name for name, _ in manifest.files], len(rows))
    entry = resumable_job.new_entry(segment)
    if len(rows):
        # On a CPU with all of this process's threads: nothing else runs here yet.
        options = {"num_threads": torch.get_num_threads(), "batch_size": config.encoder_batch_size}
        latent_encoder = encoder.LatentEncoder(*encoder.arguments(config), **options)
        encoded = latent_encoder(preprocess.transform(rows, config=config))
        id_type = pa.type_for_alias(manifest.id_type)
        report = preprocess.write_latents(
            encoded,
            latents_uri=latents_uri,
            segment=segment,
            columns=manifest.columns,
            id_type=id_type,
            validation_share=1.0,
        )
        resumable_job.add_report(entry, json.loads(report["report"][0].as_py()))
    validation = schema.Manifest.from_dict({**manifest.to_dict(), "segments": [entry], "job": {}})
    storage.write_json(storage.join(latents_uri, schema.MANIFEST), validation.to_dict())


def first_held_out(manifest: schema.Manifest, config: OnlineConfig, training: TrainingConfig) -> pa.Table:
    """The first `NUM_VALIDATION_ROWS` raw rows that validation owns and `row_filter` keeps."""
    found, missing = [], NUM_VALIDATION_ROWS
    without_pictures = list(dict.fromkeys([config.id_column, *filters.filter_columns(config.row_filter)]))
    index_uri = storage.join(training.latents_uri, INDEX)
    for name, groups in manifest.files:
        for group, num_rows in enumerate(groups):
            piece = (name, group, 0, num_rows)
            rows = inputs.read_pieces([piece], config, index_uri, without_pictures)
            ids = inputs.row_ids(rows[config.id_column]).to_pylist()
            mine = ingest.held_out(ids, training.validation_share) & filter_mask(rows, config)
            if mine.any() or not found:  # one table at least, for its columns
                rows = inputs.read_pieces([piece], config, index_uri).filter(pa.array(mine))[:missing]
                found.append(inputs.to_raw_rows(rows, config))
                missing -= len(rows)
        if missing <= 0:
            break
    return pa.concat_tables(found)
