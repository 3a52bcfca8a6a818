"""Raw pictures, transformed and encoded on the way to the trainers: the epoch plan over raw files.

Offline and online differ in where latents come from, nowhere else. The plan, the transform, the encoder and the training
loop are those of `ingest`, `preprocess`, `encoder` and `train`; what is here makes the plan's source of raw files, and
draws each epoch's augmentation from (seed, epoch, id), so that a run stays exact and resumable.
"""

import dataclasses
import functools
import json
import zlib

import numpy as np
import pyarrow as pa
from PIL import ImageOps

from . import encoder, images, ingest, preprocess, resumable_job, schema, storage
from .data_io import filters, inputs

NUM_VALIDATION_ROWS = 512
INDEX = "index"  # beside the manifest: where each tar's groups of samples lie


def prepare(config, training):
    """Check the raw data of a run and describe it as a manifest; `training.latents_uri` is where that is kept.

    `config`: `OnlineConfig`, `training`: `TrainingConfig`. Nothing is encoded but one empty caption and, once, the
    rows that are held out for validation. Raises FileNotFoundError or ValueError with what to change.
    """
    job = preprocess.check(config)
    index_uri = storage.join(training.latents_uri, INDEX)
    files = list(list_row_groups(job["paths"], config, index_uri))
    rows = sum(sum(groups) for _, groups in files)
    if rows == 0:
        raise ValueError(f"The input holds no rows ({len(job['paths'])} files): give other data.")
    raw_bytes = sum(job["listing"].values()) / rows
    check_row_groups(files, raw_bytes)
    parameters = {
        **job["parameters"],
        "random_crop": config.random_crop,
        "horizontal_flip": config.horizontal_flip,
        "listing_crc32": zlib.crc32(json.dumps(sorted(job["listing"].items())).encode()),
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
        **job["description"],
        resolutions=list(config.resolutions),
        id_type=str(job["id_type"]),
        job=parameters,
        segments=[segment],
    )
    uri = training.latents_uri
    earlier = storage.join(uri, schema.MANIFEST)
    if not storage.exists(earlier) or not same_data(schema.Manifest.read(uri), manifest):
        storage.delete(storage.join(uri, ingest.VALIDATION))
        storage.write_json(earlier, manifest.to_dict())
    if training.validation_share and not storage.exists(storage.join(uri, ingest.VALIDATION, schema.MANIFEST)):
        write_validation(manifest, config, training)
    return manifest


def check_row_groups(files, row_bytes):
    """Say it where row groups are much larger than a chunk of the plan: each is read for every chunk that it is part of."""
    largest = max(rows for _, groups in files for rows in groups)
    if largest * row_bytes > 4 * ingest.CHUNK_BYTES:
        print(
            f"Row groups have up to {largest:,} rows, {largest * row_bytes / 2**20:,.0f} MiB, and the plan reads "
            f"{ingest.CHUNK_BYTES // 2**20} MiB at a time: each will be read several times an epoch. Data written again with "
            f"row_group_size={max(1, int(ingest.CHUNK_BYTES // row_bytes))} would be read once."
        )


def same_data(one, other):
    """Whether two manifests describe the same rows and encoder; how many workers prepare them does not matter."""
    ours, theirs = (
        {**dataclasses.asdict(manifest), "job": {k: v for k, v in manifest.job.items() if k != "online"}}
        for manifest in (one, other)
    )
    return ours == theirs


def pixel_bytes(config):
    """Bytes of a row's pictures between the transform and the encoder."""
    return sum(3 * resolution**2 for resolution in config.resolutions)


def list_row_groups(paths, config, index_uri):
    """(path below the input's folder, rows of each row group) of the files, up to `limit` rows in all.

    Where row groups are found by their offsets, these are kept under `index_uri`.
    """
    left, base = config.limit, inputs.base_folder(config.input_uri or config.raw_uri)
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


def raw_rows(plan, first_step, num_steps, *, config, validation_share):
    """Raw rows in the plan's order: a Ray dataset with one block a unit (or `block_steps` of them) from `first_step` on.

    Columns: those of the raw data that are used, `path`, `keep` (False: validation owns the row, or `row_filter` leaves it
    out), `unit`, and `epoch`, for the augmentation.
    """
    read = functools.partial(read_raw, config=config, validation_share=validation_share)
    return ingest.build_dataset(plan, first_step, num_steps, read)


def read_raw(pieces, source, *, config, validation_share):
    """The raw rows of `pieces`, the file that each came from, and `keep`."""
    rows = inputs.read_pieces(pieces, config, storage.join(source.uri, INDEX))
    keep = ~schema.held_out(preprocess.row_ids(rows[config.id_column]).to_pylist(), validation_share)
    return rows.append_column(ingest.KEEP, pa.array(keep & filter_mask(rows, config)))


def filter_mask(rows, config):
    """(B,) bool: which rows `row_filter` leaves in."""
    expression = filters.parse_filter(config.row_filter)
    if expression is None:
        return np.ones(len(rows), dtype=bool)
    numbered = rows.append_column("row number", pa.array(range(len(rows))))
    return np.isin(np.arange(len(rows)), numbered.filter(expression.to_pyarrow())["row number"].to_numpy())


def transform(rows, *, config, units_per_epoch, seed=0):
    """`preprocess.transform` with an augmentation that changes every epoch, and is the same for the same row of it.

    Args:
        rows: Arrow table of raw rows with `unit`.
        config: `OnlineConfig`, of which `random_crop` is the least side of the square that is cut out, as a share of the
            largest (1: the centre square), and `horizontal_flip` says whether every second picture is mirrored.
        units_per_epoch: of the plan.
        seed: of the run.
    """
    epochs = np.maximum(rows[ingest.UNIT].to_numpy(), 0) // units_per_epoch
    ids = preprocess.row_ids(rows[config.id_column]).to_pylist()
    options = {"seed": seed, "random_crop": config.random_crop, "horizontal_flip": config.horizontal_flip}
    cuts = [
        functools.partial(augment_crop, row_id=row_id, epoch=epoch, **options)
        for row_id, epoch in zip(ids, epochs, strict=True)
    ]
    done = preprocess.transform(rows, config=config, augment=cuts)
    return done.append_column(ingest.UNIT, rows[ingest.UNIT]).append_column(ingest.KEEP, rows[ingest.KEEP])


def augment_crop(picture, row_id, epoch, *, seed=0, random_crop=1.0, horizontal_flip=False):
    """The square of a picture that an epoch is trained on: a function of (seed, epoch, id) alone.

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


def write_validation(manifest, config, training):
    """Encode the first held-out rows, without augmentation, into a small latents folder of their own."""
    found, missing = [], NUM_VALIDATION_ROWS
    without_pictures = list(dict.fromkeys([config.id_column, *filters.filter_columns(config.row_filter)]))
    for name, groups in manifest.files:
        for group, num_rows in enumerate(groups):
            read = functools.partial(
                inputs.read_pieces, [(name, group, 0, num_rows)], config, storage.join(training.latents_uri, INDEX)
            )
            rows = read(without_pictures)
            ids = preprocess.row_ids(rows[config.id_column]).to_pylist()
            mine = schema.held_out(ids, training.validation_share) & filter_mask(rows, config)
            if mine.any() or not found:  # one table at least, for its columns
                found.append(read().filter(pa.array(mine))[:missing])
                missing -= found[-1].num_rows
        if missing <= 0:
            break
    rows = pa.concat_tables(found)
    latents_uri = storage.join(training.latents_uri, ingest.VALIDATION)
    segment = resumable_job.Segment(0, [name for name, _ in manifest.files], len(rows))
    entry = resumable_job.new_entry(segment)
    if len(rows):
        encoded = encoder.LatentEncoder(*encoder.arguments(config), batch_size=config.encoder_batch_size)(
            preprocess.transform(rows.combine_chunks(), config=config)
        )
        report = preprocess.write_latents(
            encoded,
            latents_uri=latents_uri,
            segment=segment,
            shapes=manifest.shapes,
            ids=pa.type_for_alias(manifest.id_type),
            text_precision=manifest.text_precision,
        )
        resumable_job.add_report(entry, json.loads(report["report"][0].as_py()))
    del entry["busy"], entry["encoders"]  # of a job's report
    small = dataclasses.replace(manifest, segments=[entry], job={})
    storage.write_json(storage.join(latents_uri, schema.MANIFEST), small.to_dict())
