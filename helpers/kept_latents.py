"""Online runs that keep their latents (`keep_latents=True`): the first epoch encodes, later epochs read.

Such a run has two `parts`, each a `trainer.fit()`; they share the step count, the log and the checkpoints:

    first epoch     raw rows -> transform -> encode -> keep -> trainers
    at its end      rows left over by its plan -> transform -> encode -> write; then manifest.json
    later epochs    runs/{run_name}/latents -> trainers

`keep_block` commits each block of the plan before passing it on: first its file, then its entry, which is a segment
entry of `resumable_job` named after the block's first unit. So all rows that a checkpoint covers are committed before
it is saved. Blocks depend neither on the step that a run starts at nor on the number of workers: a resumed run encodes
the blocks after its checkpoint again and writes those that are missing. A file holds one block, a few megabytes;
preprocessing writes 1,024 rows or more.

Order: the first epoch has the order of an online run. Later epochs have that of a run over stored latents, here
`runs/{run_name}/latents`: row groups, each from one block, are shuffled by seed and epoch, then the rows of each chunk.
Rows masked in the first epoch are not kept, so later epochs may have fewer steps; a row is trained on only at the sizes
at which the first epoch encoded it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import ray

from . import ingest, preprocess, resumable_job, schema, storage, train
from .config import OnlineConfig, TrainingConfig

FOLDER = "latents"  # in a run's folder
WRITER = {"batch_format": "pyarrow", "num_cpus": 0.25}  # options of a writing stage
Part = tuple[TrainingConfig, Callable, Callable]


def parts(
    raw: OnlineConfig, config: TrainingConfig, stream: Callable, loop: Callable = train.train_loop_per_worker
) -> Iterator[Part]:
    """Yield `(config, loop, stream)` for each `trainer.fit()` that a run still needs; run one before taking the next.

    Without `keep_latents`, yields the arguments once, unchanged. `stream`: as for `train.build_train_dataset`; it also
    encodes the first epoch's leftover rows. Raises ValueError if the run was started with another `keep_latents`, and
    RuntimeError if committed blocks are missing.
    """
    check_begun(raw, config)
    if not raw.keep_latents:
        yield config, loop, stream
        return
    train.validation_rows(config)  # copies them into the run: all kept latents are trained on
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    job, begin = open_job(config, plan), plan.steps_per_epoch
    end = min(begin, config.max_steps)
    if train.last_step(config) < end:
        arguments = None if job.finished else job.write_arguments(None)  # finished: only checkpoints are lost
        yield config, functools.partial(loop, part=(0, end)), functools.partial(encode, stream=stream, keep=arguments)
    if train.last_step(config) < begin:  # the run is shorter, or its workers ended it
        return
    manifest = finish(job, plan, config, stream)
    if config.max_steps > begin:
        config = dataclasses.replace(config, latents_uri=job.latents_uri)
        steps = ingest.plan_run({job.latents_uri: manifest}, config).steps_per_epoch
        kept = f"{manifest.total('written'):,} rows are kept in runs/{config.run_name}/{FOLDER}"
        print(f"{kept}: {steps:,} steps per epoch from now on.")
        yield config, functools.partial(loop, part=(begin, config.max_steps)), functools.partial(read, begin=begin)


def check_begun(raw: OnlineConfig, config: TrainingConfig) -> None:
    """Raises ValueError if the run has kept latents but should not, or has trained without keeping them."""
    files = (schema.MANIFEST, f"{resumable_job.SEGMENTS}/{resumable_job.JOB}")
    keeps = any(storage.exists(storage.join(config.run_uri, FOLDER, file)) for file in files)
    if keeps != raw.keep_latents and (keeps or train.last_step(config)):
        gone = "" if keeps else f", or its {FOLDER}/ was deleted"
        raise ValueError(
            f"run_name={config.run_name!r} was started with keep_latents={keeps}, not {raw.keep_latents}{gone}: set it "
            "back to resume the run, or give another run_name."
        )


class Job(resumable_job.Job):
    """A run's latents as a job: segments are the blocks of the first epoch, and its leftover rows (`left_over`)."""

    def check_counts(self, entry: dict) -> None:
        """Masked rows count as filtered."""


def open_job(config: TrainingConfig, plan: ingest.Plan) -> Job:
    """The job of a run's latents, which is started if needed."""
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
        id_type=pa.type_for_alias(manifest.id_type),
        max_failures=config.max_failures,
    )
    if not job.finished:
        job.save()
    return job


# ---- the first epoch


def encode(
    plan: ingest.Plan, first_step: int, num_steps: int, *, stream: Callable, keep: dict | None
) -> ray.data.Dataset:
    """The rows of `stream` up to the end of the first epoch; with `keep`, each block is committed before it goes on.

    `keep`: arguments of `keep_block`.
    """
    rows = stream(plan, first_step, min(num_steps, plan.steps_per_epoch))
    if keep is None:
        return rows
    arguments = {"steps": plan.block_steps, "units_per_step": plan.units_per_step, **keep}
    return rows.map_batches(keep_block, batch_size=plan.block_rows, fn_kwargs=arguments, **WRITER)


def keep_block(rows: pa.Table, *, steps: int, units_per_step: int, **arguments) -> pa.Table:
    """Commit a block's unmasked rows, unless they are committed already; returns the block unchanged.

    Args:
        rows: one unit for each of the block's steps; unit -1 marks rows that are not needed.
        steps: steps per block.
        units_per_step: as in the plan.
        arguments: what `resumable_job.Job.write_arguments` returns.
    """
    units = rows[ingest.UNIT].to_numpy()
    units = units[units >= 0]
    if not len(units):
        return rows
    first = int(units.min())
    segment = resumable_job.Segment(first - first // units_per_step % steps * units_per_step, [], len(units))
    uri = storage.join(arguments["latents_uri"], resumable_job.SEGMENTS, f"{segment.index:06d}.json")
    # A run that resumes inside a block may lack its first units. They were trained on, so the block is committed.
    if first == segment.index and not storage.exists(uri):
        report = write(rows, **{**arguments, "segment": segment})
        storage.write_json(uri, resumable_job.segment_entry(segment, [report]))
    return rows


def write(rows: pa.Table, **arguments) -> pa.Table:
    """`preprocess.write_latents` of the unmasked rows."""
    keep = rows[ingest.KEEP].to_numpy() & (rows[ingest.UNIT].to_numpy() >= 0)
    return preprocess.write_latents(rows.filter(pa.array(keep)), **arguments)


# ---- its end


def finish(job: Job, plan: ingest.Plan, config: TrainingConfig, stream: Callable) -> schema.Manifest:
    """Encode the first epoch's leftover rows and write the manifest; if the job is finished, only read it.

    Raises RuntimeError if blocks of the first epoch are not committed.
    """
    if job.finished:
        return ingest.read_manifest(job.latents_uri)
    units = np.arange(plan.units_per_epoch)
    firsts = units[units // plan.units_per_step % plan.block_steps == 0]  # first unit of each block
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
    """{segment number: one-epoch plan} for the rows that the first epoch of `plan` leaves over.

    Blocks are as large as those of `plan`; the last rows of each source form a smaller block.
    """
    plans = [rest for source in remaining(plan) for rest in whole_blocks(plan, source)]
    return {plan.units_per_epoch + number: rest for number, rest in enumerate(plans)}


def whole_blocks(plan: ingest.Plan, source: ingest.Source) -> Iterator[ingest.Plan]:
    """One-epoch plans that together cover all rows of `source`."""
    while source:
        rows = min(source.num_rows, plan.block_rows)
        chunk_units = max(1, plan.chunk_units * plan.unit_rows // rows)
        rest = ingest.Plan([source], rows, units_per_step=1, chunk_units=chunk_units, seed=plan.seed)
        yield rest
        source = next(iter(remaining(rest)), None)


def remaining(plan: ingest.Plan) -> list[ingest.Source]:
    """The rows of each source that a plan's first epoch does not reach; sources without any are left out."""
    lines, found = iter(plan.row_group_order(0)), []
    for bucket, steps in zip(plan.buckets, plan.bucket_steps, strict=True):
        for source, used in zip(bucket.sources, bucket.rows_by_source(int(steps) * plan.batch_rows), strict=True):
            order, ends, first_rows = next(lines)
            starts = np.maximum(np.concatenate([[0], ends[:-1]]), used)
            rows = np.maximum(ends - starts, 0)
            whole = (rows > 0) & (rows == source.group_rows[order])
            pools = [ingest.Pool(order[whole], 0, int(rows[whole].sum()), (0,))] if whole.any() else []
            for place in np.flatnonzero((rows > 0) & ~whole):  # row groups that are used in part
                group = int(order[place])
                skipped = int(starts[place] - (ends[place - 1] if place else 0))
                first = first_rows.get(group, 0) + skipped
                pools.append(ingest.Pool(order[place : place + 1], first, first + int(rows[place]), (1 + group,)))
            if pools:
                found.append(dataclasses.replace(source, pools=tuple(pools)))
    return found


# ---- later epochs


def read(plan: ingest.Plan, first_step: int, num_steps: int, *, begin: int) -> ray.data.Dataset:
    """`ingest.latents_dataset` for a run whose plan starts at step `begin`.

    Raises RuntimeError if the run would resume before it.
    """
    if first_step < begin:
        raise RuntimeError(
            f"The checkpoints of the epochs that read kept latents are damaged: the run resumes at step {first_step} "
            f"of {begin}, with pictures to be encoded: run it again."
        )
    return ingest.latents_dataset(plan, first_step - begin, num_steps - begin)
