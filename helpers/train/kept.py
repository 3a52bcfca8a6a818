"""Online runs that keep their latents (`keep_latents=True`): the first epoch encodes, later epochs read.

Such a run has two sources of steps, one per `trainer.fit()`. They share the step count, the log and the checkpoints:

    first epoch     raw rows -> transform -> encode -> keep -> trainers
    at its end      rows left over by its plan -> transform -> encode -> write; then manifest.json
    later epochs    runs/{run_name}/latents -> trainers

`keep_block` commits each block before the trainers get it. It writes the block's file, then its entry. The entry has
the format of `encode.job`'s segment entries and is named by the number of the block's first unit. So all rows that a
checkpoint covers are committed before it is saved. A resumed run encodes all blocks after its checkpoint again. It
writes only the blocks that are not committed yet, which is enough because blocks do not depend on the first step or the
number of workers. A file holds one block, a few megabytes; a file from preprocessing holds 1,024 rows or more.

Order: the first epoch has the order of an online run. Later epochs have the order of a run over stored latents,
`runs/{run_name}/latents`. In each of these epochs, the row groups are shuffled, then the rows of each chunk (see
`latents.plan`). The seed and the epoch decide the order. The rows of a row group come from one block. Rows masked in
the first epoch are not kept, so later epochs may have fewer steps. Later epochs use a row only at the sizes at which
the first epoch encoded it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import ray

from .. import storage
from ..config import TrainingConfig
from ..encode import stages
from ..encode.job import JOB, SEGMENTS, Job, Segment, segment_entry
from ..latents import held_out, schema
from ..latents.manifest import MANIFEST, DataSets, Manifest, read_manifest
from ..latents.plan import BucketRows, Plan, Shape, load_plan, plan_run
from ..latents.read import KEEP, UNIT
from ..online.config import OnlineConfig
from ..online.encode import CAPTION_NUMBER
from . import resume
from .sources import StepSource

FOLDER = "latents"  # in a run's folder
WRITER = {"batch_format": "pyarrow", "num_cpus": 0.25}  # options of a writing stage


def run_sources(raw: OnlineConfig, config: TrainingConfig, stream: Callable) -> Iterator[StepSource]:
    """Yield the source of each `trainer.fit()` that a run still needs. Train with one before taking the next.

    Without `keep_latents`, there is one source. `stream`: see `StepSource`; it also encodes the first epoch's leftover
    rows. Raises ValueError if the run was started with another `keep_latents`. Raises RuntimeError if committed blocks
    are missing.
    """
    check_begun(raw, config)
    if not raw.keep_latents:
        yield StepSource(config, stream)
        return
    held_out.of_run(config)  # copies them into the run: all kept latents are trained on
    data = DataSets.open(config.proportions)
    plan = load_plan(data, config)
    job, begin = open_job(config, plan, data.first), plan.steps_per_epoch
    end = min(begin, config.max_steps)
    if resume.last_step(config) < end:
        if not job.finished:  # else only checkpoints are lost
            keep = {"plan": plan_run(data, config), **job.write_arguments()}
            stream_of_epoch = functools.partial(encode_epoch, stream=stream, keep=keep)
        else:
            stream_of_epoch = stream
        yield StepSource(config, stream_of_epoch, end_step=end)
    if resume.last_step(config) < begin:  # the run is shorter, or its workers ended it
        return
    manifest = finish_epoch(job, plan, config, stream)
    if config.max_steps > begin:
        source = StepSource(dataclasses.replace(config, latents_uri=job.latents_uri), first_step=begin)
        steps = plan_run(source.data, source.config).steps_per_epoch
        kept = f"{manifest.written:,} rows are kept in runs/{config.run_name}/{FOLDER}"
        print(f"{kept}: {steps:,} steps per epoch from now on.")
        yield source


def check_begun(raw: OnlineConfig, config: TrainingConfig) -> None:
    """Raises ValueError if the run has kept latents but should not, or has trained without keeping them."""
    files = (MANIFEST, f"{SEGMENTS}/{JOB}")
    keeps = any(storage.exists(storage.join(config.run_uri, FOLDER, file)) for file in files)
    if keeps != raw.keep_latents and (keeps or resume.last_step(config)):
        gone = "" if keeps else f", or its {FOLDER}/ was deleted"
        raise ValueError(
            f"run_name={config.run_name!r} was started with keep_latents={keeps}, not {raw.keep_latents}{gone}: set it "
            "back to resume the run, or give another run_name."
        )


def open_job(config: TrainingConfig, plan: Plan, manifest: Manifest) -> Job:
    """The job of a run's latents, new or resumed. Its segments are the first epoch's leftover rows (`left_over`).

    The blocks of the first epoch are committed beside them. `manifest`: of the online data.
    """
    names = ("encoder", "columns", "scaling_factor", "shift_factor", "empty_caption_embedding")
    rests = left_over(plan)
    segments = [Segment(index, [], rest.num_rows) for index, rest in rests.items()]
    job = Job(
        storage.join(config.run_uri, FOLDER),
        manifest.made_with,
        {name: getattr(manifest, name) for name in names},
        plan=lambda: segments,
        id_type=pa.type_for_alias(manifest.id_type),
        max_failures=config.max_failures,
    )
    if not job.finished:
        job.save()
    return job


# ---- the first epoch


def encode_epoch(plan: Plan, first_step: int, end_step: int, *, stream: Callable, keep: dict) -> ray.data.Dataset:
    """The rows of `stream`, each block committed before it reaches the trainers. `keep`: arguments of `keep_block`."""
    # The last block is kept whole, also of a run that ends within it and may get more steps later.
    end_step = min(-(-end_step // plan.block_steps) * plan.block_steps, plan.steps_per_epoch)
    rows = stream(plan, first_step, end_step)
    return rows.map_batches(keep_block, batch_size=plan.block_rows, fn_kwargs=keep, **WRITER)


def keep_block(rows: pa.Table, *, plan: Plan, **arguments) -> pa.Table:
    """Commit a block's unmasked rows, unless they are committed already; returns the block.

    All captions of a row are kept; the returned block has the one that the epoch has sampled.

    Args:
        rows: a block, which has one unit for each of its `plan.block_steps` steps. Rows with unit number -1 only fill
            up the block and are not kept.
        plan: the run's plan, which gives the number of the block's first unit. Its sources may have empty file lists,
            because no file is read.
        arguments: what `job.Job.write_arguments` returns.
    """
    units = rows[UNIT].to_numpy()
    units = units[units >= 0]
    several = CAPTION_NUMBER in rows.column_names
    chosen = schema.choose_captions(rows, rows[CAPTION_NUMBER].to_numpy()) if several else rows
    if not len(units):
        return chosen
    first = int(units.min())
    segment = Segment(plan.first_unit_of_block(first), [], len(units))
    uri = storage.join(arguments["latents_uri"], SEGMENTS, f"{segment.index:06d}.json")
    # A run that resumes inside a block may lack its first units. They were trained on, so the block is committed.
    if first == segment.index and not storage.exists(uri):
        report = write_unmasked(rows, segment_index=segment.index, **arguments)
        storage.write_json(uri, segment_entry(segment, [report]))
    return chosen


def write_unmasked(rows: pa.Table, **arguments) -> pa.Table:
    """`stages.write_latents` of the unmasked rows."""
    keep = rows[KEEP].to_numpy() & (rows[UNIT].to_numpy() >= 0)
    return stages.write_latents(rows.filter(pa.array(keep)), **arguments)


# ---- its end


def finish_epoch(job: Job, plan: Plan, config: TrainingConfig, stream: Callable) -> Manifest:
    """Encode the first epoch's leftover rows and write the manifest; if the job is finished, only read the manifest.

    Raises RuntimeError if blocks of the first epoch are not committed.
    """
    if job.finished:
        return read_manifest(job.latents_uri)
    firsts = set(plan.first_unit_of_block(np.arange(plan.units_per_epoch)).tolist())
    if missing := len(firsts - job.committed().keys()):
        raise RuntimeError(
            f"{job.latents_uri} has lost {missing} of the {len(firsts)} blocks that the first epoch of run_name="
            f"{config.run_name!r} kept: give another run_name."
        )
    plans = left_over(plan)

    def pipeline(segment: Segment) -> ray.data.Dataset:
        rest = plans[segment.index]
        rows = stream(rest, 0, rest.steps_per_epoch)
        return rows.map_batches(
            write_unmasked, batch_size=rest.block_rows, fn_kwargs=job.write_arguments(segment), **WRITER
        )

    return job.run(pipeline)


def left_over(plan: Plan) -> dict[int, Plan]:
    """{segment number: one-epoch plan} for the rows of each source that the first epoch of `plan` leaves over.

    In these plans a step is one row. A block holds as many rows as a block of `plan`, and the last block is padded.
    """
    plans, block_rows = [], plan.block_rows
    chunk_rows = max(1, plan.chunk_units * plan.unit_rows // block_rows) * block_rows
    for shape, steps, orders in zip(plan.shapes, plan.shape_steps, plan.epoch_orders(0), strict=True):
        num_used = shape.rows_by_source(int(steps) * plan.batch_rows)
        for source, used, order in zip(shape.sources, num_used, orders, strict=True):
            ranges = order.ranges(int(used), source.num_rows)
            buckets = [
                BucketRows(np.array([group]), first_row, first_row + num_rows, (group,))
                for group, first_row, num_rows in ranges
            ]
            if buckets:
                rest = Shape([dataclasses.replace(source, buckets=tuple(buckets))])
                plans.append(Plan([rest], 1, 1, chunk_rows, plan.seed, block_steps=block_rows))
    return {plan.units_per_epoch + number: rest for number, rest in enumerate(plans)}
