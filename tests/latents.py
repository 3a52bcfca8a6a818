"""Latents without a job and without Ray: a finished folder of made-up rows, and the rows of a plan's steps."""

import numpy as np

from helpers.encode import stages
from helpers.encode.job import Segment, segment_entry
from helpers.latents import schema
from helpers.latents.manifest import DataSets, Manifest, encode_embedding, write_manifest
from helpers.latents.plan import load_plan
from helpers.latents.read import read_chunks, worker_units
from helpers.production.checks import training
from helpers.train import start

SHAPES = {"image_latents_32": (2, 4, 4, 4), "image_latents_64": (2, 4, 8, 8), "caption_embeddings": (6, 128)}


def write_job(uri, num_rows, tables, columns, validation_share=0.0, job=None, **fields):
    """Write a finished job of one segment, a file for each of its tables; returns the manifest.

    `columns`: the specs of what is stored, the captions' last; `job`, `fields`: of the manifest.
    """
    where = {"latents_uri": uri, "segment_index": 0, "columns": columns}
    reports = [stages.write_latents(rows, validation_share=validation_share, **where) for rows in tables]
    entry = segment_entry(Segment(0, [], num_rows), reports)
    values = {
        "encoder": {"model": "none", "revision": "0", "precision": "fp32"},
        "resolutions": sorted({spec.resolution for spec in columns if spec.resolution}),
        "columns": columns,
        "scaling_factor": 1.0,
        "id_type": "string",
        "empty_caption_embedding": encode_embedding(np.zeros(columns[-1].shape)),
        "job": {**(job or {}), "validation_share": validation_share},
    }
    manifest = Manifest.of([entry], **{**values, **fields})
    write_manifest(uri, manifest, [entry])
    return manifest


def read_steps(plan, read, first_step=0, end_step=None):
    """The blocks of some steps in their order, as reading tasks hand them out; by default those of an epoch."""
    end_step = end_step or plan.steps_per_epoch
    chunks = plan.chunk_range(first_step, end_step)
    steps = {"first_chunk": chunks.start, "first_step": first_step, "end_step": end_step}
    return read_chunks({"id": range(len(chunks))}, plan=plan, read=read, **steps)


def receive_steps(plan, read, first_step, end_step, num_workers=1):
    """Yield {unit number: its rows} of each step, as so many workers receive the blocks from Ray Data, in order."""
    blocks = list(read_steps(plan, read, first_step, end_step))
    blocks = blocks[: len(blocks) // num_workers * num_workers]
    steps, ranks = range(first_step, end_step), range(num_workers)
    workers = [worker_units(blocks[rank::num_workers], plan, steps, rank, num_workers) for rank in ranks]
    for received in zip(*workers, strict=True):
        units = {number: rows for of_worker in received for number, rows in of_worker.items()}
        yield dict(sorted(units.items()))


def plan_for(config):
    """The plan of a run, with its rows."""
    return load_plan(DataSets.open(config.proportions), config)


def build_segment(files, columns=("image_latents_32", "image_latents_64")):
    """A segment's entry. `files`: [(name, rows of each row group)]; all rows have latents in all columns."""
    bucket, num_rows = schema.bucket_name(columns, held_out=False), sum(sum(groups) for _, groups in files)
    return {
        "index": 0,
        "files": [
            {"name": name, "row_groups": list(groups), "buckets": {bucket: len(groups)}} for name, groups in files
        ],
        "rejects": [],
        "read": num_rows,
        "written": num_rows,
        "buckets": {bucket: num_rows},
        "rejected": {},
        "filtered": 0,
    }


def refuse(manifest, config, uri="/data", checks=(training.parts_fit,)):
    """Check a run on latents that are nowhere; raises ValueError as `monitor.open_run` does."""
    start.refuse(config, DataSets({uri: manifest}, {uri: 1.0}), checks)
