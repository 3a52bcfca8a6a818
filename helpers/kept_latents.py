"""Latents that an online run keeps (`keep_latents=True`): the first epoch encodes, the epochs after it read.

Such a run has two parts, each a `trainer.fit()` (`parts`), which share the count of steps, the log and the checkpoints:

    first epoch     raw rows -> transform -> encode -> keep -> trainers
    at its end      the rows that its plan left over -> transform -> encode -> write; then manifest.json
    other epochs    runs/{run_name}/latents -> trainers

The stage that keeps commits each block of the plan before it hands it over: its file, then its entry, which is that of
a segment of `resumable_job`, named by the block's first unit. So whatever a checkpoint covers is committed before it is
saved. Blocks depend on neither the step that a run starts at nor the number of workers: a run that is resumed encodes
the blocks after its checkpoint again, and writes those that are missing. A file holds the rows of a block: a few
megabytes, where preprocessing writes 1,024 rows or more.

Order: the first epoch is that of an online run. Each epoch after it is one of a run over stored latents, over
`runs/{run_name}/latents`: row groups, each of rows of one block, are shuffled by the seed and the epoch, and then the
rows of each chunk. Rows that the first epoch masked are not kept, so the other epochs may have fewer steps; a row is
trained on at the sizes at which the first epoch encoded it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import ray

from . import ingest, preprocess, resumable_job, schema, storage, train
from .config import OnlineConfig, TrainingConfig

FOLDER = "latents"  # of a run
WRITER = {"batch_format": "pyarrow", "num_cpus": 0.25}  # of a stage that writes
Part = tuple[TrainingConfig, Callable, Callable]


def parts(
    raw: OnlineConfig, config: TrainingConfig, stream: Callable, loop: Callable = train.train_loop_per_worker
) -> Iterator[Part]:
    """`(config, loop, stream)` of each `trainer.fit()` that a run still needs; fit one before you take the next.

    Without `keep_latents` it is one, as given. `stream`: as `train.build_train_dataset` takes it; it also encodes what
    the first epoch left over. Raises ValueError if the run was started with another `keep_latents`, and RuntimeError if
    blocks that it kept are gone.
    """
    check_begun(raw, config)
    if not raw.keep_latents:
        yield config, loop, stream
        return
    train.validation_rows(config)  # the run's own copy: those that are kept are all trained on
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    job, begin = open_job(config, plan), plan.steps_per_epoch
    end = min(begin, config.max_steps)
    if train.last_step(config) < end:
        arguments = None if job.finished else job.write_arguments(None)  # finished: later checkpoints are lost
        yield config, functools.partial(loop, part=(0, end)), functools.partial(encode, stream=stream, keep=arguments)
    if train.last_step(config) < begin:  # it is shorter, or its workers ended it
        return
    manifest = finish(job, plan, config, stream)
    if config.max_steps > begin:
        config = dataclasses.replace(config, latents_uri=job.latents_uri)
        steps = ingest.plan_run({job.latents_uri: manifest}, config).steps_per_epoch
        kept = f"{manifest.total('written'):,} rows are kept in runs/{config.run_name}/{FOLDER}"
        print(f"{kept}: {steps:,} steps an epoch from now on.")
        yield config, functools.partial(loop, part=(begin, config.max_steps)), functools.partial(read, begin=begin)


def check_begun(raw: OnlineConfig, config: TrainingConfig) -> None:
    """Raises ValueError if the run has latents and should have none, or has done steps without keeping them."""
    files = (schema.MANIFEST, f"{resumable_job.SEGMENTS}/{resumable_job.JOB}")
    keeps = any(storage.exists(storage.join(config.run_uri, FOLDER, file)) for file in files)
    if keeps != raw.keep_latents and (keeps or train.last_step(config)):
        gone = "" if keeps else f", or its {FOLDER}/ was deleted"
        raise ValueError(
            f"run_name={config.run_name!r} was started with keep_latents={keeps}, not {raw.keep_latents}{gone}: set it "
            "back to resume the run, or give another run_name."
        )


class Job(resumable_job.Job):
    """The latents of a run: of each block of the first epoch a segment, and of the rows that it left over."""

    def check_counts(self, entry: dict) -> None:
        """Masked rows count as filtered."""
        entry["filtered"] = entry["read"] - entry["written"] - sum(entry["rejected"].values())


def open_job(config: TrainingConfig, plan: ingest.Plan) -> Job:
    """The job of a run's latents, begun if it was not."""
    (manifest,) = ingest.read_manifests(config).values()
    names = ("encoder", "columns", "scaling_factor", "empty_caption_embedding")
    leave_out = ("online", "input_uri", "raw_row_bytes")  # as `run_setup.describe_data`
    segments = [
        resumable_job.Segment(i, [], rest.steps_per_epoch * rest.batch_rows) for i, rest in left_over(plan).items()
    ]
    job = Job(
        storage.join(config.run_uri, FOLDER),
        {name: value for name, value in manifest.job.items() if name not in leave_out},
        {name: getattr(manifest, name) for name in names},
        plan=lambda: segments,
        listing={},  # `manifest.job` has its CRC
        id_type=pa.type_for_alias(manifest.id_type),
        max_failures=config.max_failures,
    )
    if not job.finished:
        storage.write_json(job.uri(resumable_job.SEGMENTS, resumable_job.JOB), job.parameters)
    return job


# ---- the first epoch


def encode(
    plan: ingest.Plan, first_step: int, num_steps: int, *, stream: Callable, keep: dict | None
) -> ray.data.Dataset:
    """The rows of `stream` to the end of the first epoch; with `keep`, each block is committed before it goes on.

    `keep`: arguments of `keep_block`.
    """
    rows = stream(plan, first_step, min(num_steps, plan.steps_per_epoch))
    if keep is None:
        return rows
    arguments = {"steps": plan.block_steps, "units_per_step": plan.units_per_step, **keep}
    return rows.map_batches(keep_block, batch_size=plan.block_rows, fn_kwargs=arguments, **WRITER)


def keep_block(rows: pa.Table, *, steps: int, units_per_step: int, **arguments) -> pa.Table:
    """Commit the rows of a block that are trained on, unless they are; returns the block as it came.

    Args:
        rows: one unit of each of the block's steps; -1 in place of a unit that is not needed.
        steps: of a block.
        units_per_step: of the plan.
        arguments: `resumable_job.Job.write_arguments`.
    """
    units = rows[ingest.UNIT].to_numpy()
    units = units[units >= 0]
    if not len(units):
        return rows
    first = int(units.min())
    segment = resumable_job.Segment(first - first // units_per_step % steps * units_per_step, [], len(units))
    uri = storage.join(arguments["latents_uri"], resumable_job.SEGMENTS, f"{segment.index:06d}.json")
    # A run that resumes within a block may not have its first units. They were trained on, so the block is committed.
    if first == segment.index and not storage.exists(uri):
        report = json.loads(write(rows, **{**arguments, "segment": segment})["report"][0].as_py())
        entry = resumable_job.new_entry(segment)
        resumable_job.add_report(entry, report)
        entry["filtered"] = entry["read"] - entry["written"] - sum(entry["rejected"].values())
        entry |= {"seconds": entry["stages"]["encode"], "encoders": 1, "timeline": []}
        storage.write_json(uri, entry)
    return rows


def write(rows: pa.Table, **arguments) -> pa.Table:
    """`preprocess.write_latents` of the rows that are not masked."""
    keep = rows[ingest.KEEP].to_numpy() & (rows[ingest.UNIT].to_numpy() >= 0)
    return preprocess.write_latents(rows.filter(pa.array(keep)), **arguments)


# ---- its end


def finish(job: Job, plan: ingest.Plan, config: TrainingConfig, stream: Callable) -> schema.Manifest:
    """Encode what the first epoch left over, and write the manifest; of a finished job, read it.

    Raises RuntimeError if blocks of the first epoch are not committed.
    """
    if job.finished:
        return ingest.read_manifest(job.latents_uri)
    units = np.arange(plan.units_per_epoch)
    firsts = units[units // plan.units_per_step % plan.block_steps == 0]  # of each block
    if missing := len(set(firsts.tolist()) - job.committed().keys()):
        raise RuntimeError(
            f"{job.latents_uri} has lost {missing} of the {len(firsts)} blocks that the first epoch of run_name="
            f"{config.run_name!r} kept: give another run_name."
        )
    plans = left_over(plan)

    def pipeline(segment: resumable_job.Segment) -> ray.data.Dataset:
        rest = plans[segment.index]
        rows = stream(rest, 0, rest.steps_per_epoch)
        return rows.map_batches(write, batch_size=rest.block_rows, fn_kwargs=job.write_arguments(segment), **WRITER)

    return job.run(pipeline)


def left_over(plan: ingest.Plan) -> dict[int, ingest.Plan]:
    """{number of a segment: a plan of one epoch} of the rows that the first epoch of `plan` leaves over.

    Blocks have as many rows as those of `plan`; the last rows of each source are a smaller block of their own.
    """
    plans = [rest for source in remaining(plan) for rest in whole_blocks(plan, source)]
    return {plan.units_per_epoch + number: rest for number, rest in enumerate(plans)}


def whole_blocks(plan: ingest.Plan, source: ingest.Source) -> Iterator[ingest.Plan]:
    """Plans of one epoch each, which together have all rows of `source`."""
    while source:
        rows = min(source.num_rows, plan.block_rows)
        chunk_units = max(1, plan.chunk_units * plan.unit_rows // rows)
        rest = ingest.Plan([source], rows, units_per_step=1, chunk_units=chunk_units, seed=plan.seed)
        yield rest
        source = next(iter(remaining(rest)), None)


def remaining(plan: ingest.Plan) -> list[ingest.Source]:
    """The rows of each source that the first epoch of a plan does not come to; no source that has none."""
    lines, found = iter(plan.row_group_order(0)), []
    for bucket, steps in zip(plan.buckets, plan.bucket_steps, strict=True):
        for source, used in zip(bucket.sources, bucket.rows_by_source(int(steps) * plan.batch_rows), strict=True):
            order, ends, first_rows = next(lines)
            starts = np.maximum(np.concatenate([[0], ends[:-1]]), used)
            rows = np.maximum(ends - starts, 0)
            whole = (rows > 0) & (rows == source.group_rows[order])
            pools = [ingest.Pool(order[whole], 0, int(rows[whole].sum()), (0,))] if whole.any() else []
            for place in np.flatnonzero((rows > 0) & ~whole):  # the ends of the line
                group = int(order[place])
                skipped = int(starts[place] - (ends[place - 1] if place else 0))
                first = first_rows.get(group, 0) + skipped
                pools.append(ingest.Pool(order[place : place + 1], first, first + int(rows[place]), (1 + group,)))
            if pools:
                found.append(dataclasses.replace(source, pools=tuple(pools)))
    return found


# ---- the epochs after it


def read(plan: ingest.Plan, first_step: int, num_steps: int, *, begin: int) -> ray.data.Dataset:
    """`ingest.latents_dataset` of a run whose step `begin` is the first of the plan.

    Raises RuntimeError if the run would resume before that.
    """
    if first_step < begin:
        raise RuntimeError(
            f"The checkpoints of the epochs that read kept latents are damaged: the run resumes at step {first_step} "
            f"of {begin}, with pictures to be encoded: run it again."
        )
    return ingest.latents_dataset(plan, first_step - begin, num_steps - begin)
