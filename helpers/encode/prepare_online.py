"""What the driver does before an online run: indexes the raw data and encodes the rows held out for validation."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pyarrow as pa

from .. import storage
from ..config.preprocessing import OnlineConfig
from ..config.training import TrainingConfig
from ..latents import held_out, schema
from ..latents.manifest import MANIFEST, Manifest, add_up, read_manifest, write_manifest
from ..latents.plan import CHUNK_BYTES
from ..raw import index, inputs
from ..runtime import lease
from . import models, stages
from .job import Segment, segment_entry
from .online import INDEX
from .prepare import check


def prepare(config: OnlineConfig, training: TrainingConfig) -> Manifest:
    """Check a run's raw data, index it, and write its manifest to `training.latents_uri`.

    Encodes only an empty caption and, once, the rows held out for validation. The index is built by a Ray Data job if
    Ray is connected, else in this process. Pins the models (`models.pin_encoder`). Raises
    FileNotFoundError or ValueError that says what to change.
    """
    if config.keep_latents and (config.random_crop < 1 or config.horizontal_flip):
        raise ValueError(
            f"keep_latents=True encodes a picture once, and random_crop={config.random_crop}, horizontal_flip="
            f"{config.horizontal_flip} change the crop in every epoch: use 1 and False, or keep_latents=False."
        )
    uri = training.latents_uri
    known = read_manifest(uri).encoder if storage.exists(storage.join(uri, MANIFEST)) else None
    models.pin_encoder(config, known)
    found = check(config)
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
        validation_uri = storage.join(uri, held_out.FOLDER)
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


def write_validation(manifest: Manifest, config: OnlineConfig, training: TrainingConfig) -> None:
    """Encode the first held-out rows, without augmentation, into a small latents folder of their own."""
    import torch

    from . import encoder  # not at the top: see `preprocess`

    uri, num_rows = training.latents_uri, held_out.NUM_ROWS
    ranges = held_out.first_ranges(manifest, uri, training.largest_resolution, num_rows)
    rows = (
        inputs.to_raw_rows(index.read_rows(ranges, config, storage.join(uri, INDEX))[:num_rows], config)
        if ranges
        else []
    )
    latents_uri = storage.join(uri, held_out.FOLDER)
    segment = Segment(0, [], len(rows) if rows else 0)
    tables, arguments = [], encoder.arguments(config)
    columns = arguments[1]
    if rows:
        # On a CPU, use all threads: nothing else runs in this process yet.
        options = {"num_threads": torch.get_num_threads(), "batch_size": config.encoder_batch_size}
        latent_encoder = encoder.LatentEncoder(*arguments, **options)
        encoded = latent_encoder(stages.transform(rows, config=config))
        id_type = pa.type_for_alias(manifest.id_type)
        report = stages.write_latents(
            encoded,
            latents_uri=latents_uri,
            segment=segment,
            columns=columns,
            id_type=id_type,
            validation_share=1.0,
        )
        tables.append(report)
    entry = segment_entry(segment, tables)
    names = ("encoder", "resolutions", "scaling_factor", "shift_factor", "id_type", "empty_caption_embedding")
    description = {name: getattr(manifest, name) for name in names}
    write_manifest(latents_uri, Manifest.of([entry], **description, columns=columns, job={}), [entry])
