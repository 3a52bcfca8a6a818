"""What the driver does before an online run: indexes the raw data and encodes the rows held out for validation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable

import pyarrow as pa
import torch

from .. import storage
from ..config import TrainingConfig, first_difference
from ..encode import encoder, prepare, stages
from ..encode.job import Segment, check_rows, finished_manifest, segment_entry
from ..latents import held_out
from ..latents.manifest import Manifest, add_up, read_segments, write_manifest
from ..latents.plan import read_files
from ..raw import inputs
from . import index
from .config import OnlineConfig
from .encode import INDEX


def prepare_run(
    config: OnlineConfig,
    training: TrainingConfig,
    guard: contextlib.AbstractContextManager | None = None,
    transform: Callable[..., pa.Table] = stages.transform,
) -> tuple[Manifest, OnlineConfig]:
    """Check and index a run's raw data; returns its manifest, and `config` with the commits of its models.

    The manifest is written to `training.latents_uri`. The index is built by a Ray Data job if Ray is connected, else in
    this process. Encodes an empty caption and, once, the rows held out for validation. Raises FileNotFoundError or
    ValueError that says what to change.

    Args:
        guard: entered while the folder is written (`production.lease.hold`).
        transform: `stages.transform`, or a partial of it, for the held-out rows.
    """
    uri, share = training.latents_uri, training.validation_share
    earlier = finished_manifest(uri)
    config = prepare.derive(config, earlier and earlier.encoder)
    paths, listing = inputs.list_inputs(config)
    parameters, description = prepare.describe_input(config, listing), prepare.describe_encoder(config)
    with guard or contextlib.nullcontext():
        key, reports = index.build_index(storage.join(uri, INDEX), paths, listing, config, share)
        if earlier:
            key = keep_index(read_segments(uri)[0], key, reports)
        segment = segment_of(key, reports)
        row_bytes = sum(listing.values()) / max(1, segment["read"])
        largest = max(report["largest"] for report in reports)
        pixel_bytes = max(3 * width * height for shapes in config.shapes.values() for width, height in shapes)
        job = {
            **parameters,
            "validation_share": share,
            "online": config.to_dict(),
            "raw_row_bytes": round(row_bytes + pixel_bytes),
            "raw_group_bytes": round(largest * row_bytes),
        }
        fields = {"resolutions": list(config.resolutions), "id_type": str(pa.string()), "job": job}
        manifest = Manifest.of([segment], **description, **fields)
        check_rows(manifest, config, "start again")
        validation_uri = storage.join(uri, held_out.FOLDER)
        if not is_same_data(finished_manifest(uri), manifest):
            storage.delete(validation_uri)
            write_manifest(uri, manifest, [segment])
        if share and finished_manifest(validation_uri) is None:
            write_validation(manifest, config, training, transform)
    return manifest, config


def is_same_data(earlier: Manifest | None, manifest: Manifest) -> bool:
    """Whether two manifests describe the same rows and encoder.

    Parameters that change neither rows nor encoder, such as the number of workers, are not compared.
    """

    def comparable(manifest: Manifest) -> dict:
        job = {name: value for name, value in manifest.job.items() if name != "online"}
        return {**dataclasses.asdict(manifest), "job": job}

    return earlier is not None and first_difference(comparable(earlier), comparable(manifest)) is None


def segment_of(key: str, reports: list[dict]) -> dict:
    """The manifest's only segment entry, made from an index. `index.read_indexed_rows` explains its file names."""
    files = [
        {"name": f"{key}/{report['name']}", "row_groups": report["row_groups"], "buckets": report["buckets"]}
        for report in reports
        if report["row_groups"]
    ]
    counts = {name: sum(report[name] for report in reports) for name in ("read", "filtered")}
    buckets, rejected = (add_up(report[name] for report in reports) for name in ("rows", "rejected"))
    counts |= {"written": sum(buckets.values()), "rejected": rejected, "buckets": buckets}
    counts["rows_crc32"] = zlib.crc32(json.dumps([report.get("rows_crc32") for report in reports]).encode())
    unreadable = [report["name"] for report in reports if report.get("unreadable")]
    return {"index": 0, "files": files, "rejects": [], "unreadable": unreadable, **counts}


def keep_index(before: dict, key: str, reports: list[dict]) -> str:
    """The key of the index that the segment entry `before` lists, if the rows are the same; else `key`.

    So a run goes on where its raw files have been copied anew. If their rows have changed, it does not.
    """
    earlier = before["files"][0]["name"].partition("/")[0] if before["files"] else key
    same = segment_of(earlier, reports)
    if earlier.partition("-")[0] != key.partition("-")[0] or any(same.get(name) != before[name] for name in before):
        return key
    if earlier != key:
        print(
            "Raw files were written again, with the ids and captions of before: index and held-out images stay. If "
            "images have changed, give another storage."
        )
    return earlier


def write_validation(
    manifest: Manifest, config: OnlineConfig, training: TrainingConfig, transform: Callable[..., pa.Table]
) -> None:
    """Encode the first held-out rows, without augmentation, into a small latents folder of their own."""
    uri, num_rows = training.latents_uri, held_out.NUM_ROWS
    latents_uri, arguments = storage.join(uri, held_out.FOLDER), prepare.encoder_arguments(config, num_captions=1)
    segment, reports = Segment(0, [], 0), []
    if ranges := held_out.first_ranges(manifest, read_files(uri), training.largest_resolution, num_rows):
        rows = index.read_indexed_rows(ranges, config, storage.join(uri, INDEX))[:num_rows]
        segment = dataclasses.replace(segment, rows=len(rows))
        # On a CPU, use all threads: nothing else runs in this process yet.
        latent_encoder = encoder.LatentEncoder(**arguments, num_threads=torch.get_num_threads())
        encoded = latent_encoder(transform(rows, config=config))
        report = stages.write_latents(
            encoded,
            latents_uri=latents_uri,
            segment_index=segment.index,
            columns=arguments["columns"],
            validation_share=1.0,
        )
        reports.append(report)
    entry = segment_entry(segment, reports)
    names = ("encoder", "resolutions", "scaling_factor", "shift_factor", "id_type", "empty_caption_embedding")
    description = {name: getattr(manifest, name) for name in names}
    write_manifest(latents_uri, Manifest.of([entry], **description, columns=arguments["columns"], job={}), [entry])
