"""The plan of a run: its shapes and their rows, made from the manifests of its data sets. `order` says what a plan is.

A bucket reaches a resolution if its rows have latents at this resolution. `allocate_rows` divides the rows of a bucket
among the resolutions that the bucket reaches.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from . import schema
from .manifest import DataSets, Manifest, read_segments
from .order import BucketRows, Files, Plan, Shape, Source, exact

CHUNK_BYTES = 64 * 2**20  # each read task holds a few chunks in memory
CHUNK_ROWS = 128 * schema.ROWS_PER_ROW_GROUP  # mixes well enough; a larger chunk only delays the first batch
# Units of consecutive steps are sent together up to this size: Ray Data's loop takes at most two blocks of a task every
# tenth of a second. Online, larger blocks would only wait longer for a transform and an encoder.
BLOCK_BYTES, ONLINE_BLOCK_BYTES, MOST_BLOCK_STEPS = CHUNK_BYTES, 4 * 2**20, 8
NO_GROUPS = np.zeros(0, np.int32)


def read_files(latents_uri: str) -> Files:
    """The files of a finished job, in the order of its segments."""
    return Files.of(latents_uri, [file for segment in read_segments(latents_uri) for file in segment["files"]])


def load_plan(data: DataSets, settings: Any) -> Plan:
    """The plan of a run, with the rows of each unit. Raises what `plan_run` raises.

    For large data sets this takes minutes and gigabytes.
    """
    return plan_run(data, settings, {uri: read_files(uri) for uri in data.manifests})


def plan_run(data: DataSets, settings: Any, files: dict[str, Files] | None = None) -> Plan:
    """The plan of a run.

    `settings`: a `config.TrainingConfig`, or another object with its resolution_shares, unit_rows, units_per_step,
    seed, worker_counts and caption_shares. `files`: URI -> files. Without them, the plan says which worker gets which
    units at which shape, but not which rows are in them. Raises ValueError if the latents do not fill one step.
    """
    shapes, shares = {}, settings.resolution_shares
    for number, uri in enumerate(data.manifests):
        manifest, proportion = data.manifests[uri], data.proportions[uri]
        for source in sources_by_shape(manifest, number, proportion, shares, files and files[uri]):
            shapes.setdefault(source.latents.name, []).append(source)
    shapes = [Shape(sources, shares[sources[0].latents.resolution]) for sources in shapes.values()]
    num_rows = sum(shape.num_rows for shape in shapes)
    chunk_units, block_steps = chunk_and_block_sizes(data.first, settings, num_rows)
    workers, captions = settings.worker_counts, settings.caption_shares or (1.0,) * data.first.num_captions
    sizes = settings.unit_rows, settings.units_per_step, chunk_units
    plan = Plan(shapes, *sizes, settings.seed, block_steps, workers, captions)
    missing = set(shares) - {shape.latents.resolution for shape in shapes}
    if missing or plan.steps_per_epoch < 1:
        rows = {"x".join(map(str, shape.latents.size)): shape.num_rows for shape in shapes}
        rows |= {f"{size}x{size}": 0 for size in sorted(missing)}
        counts = ", ".join(f"{count} of {size}" for size, count in rows.items())
        raise ValueError(
            f"global_batch_size={plan.batch_rows} is more than the rows of {', '.join(data.manifests)} ({counts}) "
            "can fill: make it smaller, or encode more data."
        )
    return plan


def chunk_and_block_sizes(manifest: Manifest, settings: Any, num_rows: int) -> tuple[int, int]:
    """`(units per chunk, steps per block)`, by the bytes of a row."""
    row_bytes, block_bytes = manifest.row_bytes, ONLINE_BLOCK_BYTES if manifest.online else BLOCK_BYTES
    chunk_rows = max(1, min(CHUNK_BYTES // row_bytes, CHUNK_ROWS, num_rows))
    chunk_units = max(1, chunk_rows // settings.unit_rows)
    chunk_steps = max(1, chunk_units // settings.units_per_step)
    block_steps = max(1, block_bytes // (row_bytes * settings.unit_rows))
    block_steps = min(block_steps, chunk_steps, MOST_BLOCK_STEPS)
    if block_steps > 1:  # chunks of whole blocks
        chunk_units = chunk_steps // block_steps * block_steps * settings.units_per_step
    return chunk_units, block_steps


def sources_by_shape(
    manifest: Manifest, number: int, proportion: float, shares: dict[int, float], files: Files | None = None
) -> list[Source]:
    """The training rows of a data set as one source per shape.

    Args:
        manifest: of the data set.
        number: of the data set in the mixture, from 0.
        proportion: of the data set in every batch.
        shares: {resolution: its share of the steps}.
        files: of the data set; None: the sources have their numbers of rows, but not the rows.
    """
    buckets = {name: rows for name, rows in sorted(manifest.buckets.items()) if not name.startswith(schema.HELD_OUT)}
    groups = {bucket: files.groups_of(bucket) if files else NO_GROUPS for bucket in buckets}
    keys = {bucket: (number, position) for position, bucket in enumerate(buckets, start=1)}
    columns = {spec.name: spec for size in sorted(shares) for spec in manifest.latents_at(size)}
    sources, resolution_rows = [], collections.Counter()
    for name, row_spans in allocate_rows(buckets, columns.values(), shares).items():
        rows = (BucketRows(groups[bucket], *span, keys[bucket]) for bucket, span in row_spans.items())
        sources.append(Source(files, columns[name], tuple(rows)))
        resolution_rows[columns[name].resolution] += sources[-1].num_rows

    def weight(source: Source) -> Fraction:
        """The source's proportion: such that a shape gets steps of its resolution in proportion to its rows."""
        size = source.latents.resolution
        return exact(proportion) * exact(shares[size]) * Fraction(source.num_rows, resolution_rows[size])

    return [dataclasses.replace(source, proportion=weight(source)) for source in sources]


def allocate_rows(
    buckets: dict[str, int], columns: Iterable[schema.ColumnSpec], shares: dict[int, float]
) -> dict[str, dict[str, tuple[int, int]]]:
    """{column: {bucket: (start, stop)}}: an allocation of each bucket's rows, in an epoch's order, to columns.

    A row that reaches several resolutions is trained on at one of them. Resolutions take rows in turn, the largest
    first. A resolution takes its share of `epoch_rows`: the same fraction of the remaining rows of each bucket that
    reaches it. The smallest resolution takes all remaining rows that reach it, because no other will use them.

    Example: buckets {"32": 100, "32+64": 300} and shares {32: 0.5, 64: 0.5}. An epoch can use 400 rows, so 64 pixels
    take 200: two thirds of the 300 rows of "32+64". Then 32 pixels take the last third of "32+64", and all of "32".

    Args:
        buckets: bucket -> rows.
        columns: those that are trained on.
        shares: {resolution: its share of the steps}.
    """
    reaching = {}  # resolution, the largest first -> {bucket that reaches it: column}
    for size in sorted(shares, reverse=True):
        names = {spec.name for spec in columns if spec.resolution == size}
        pairs = ((bucket, name) for bucket in buckets for name in schema.bucket_columns(bucket) if name in names)
        reaching[size] = dict(pairs)
    usable, used = epoch_rows(buckets, reaching, shares), dict.fromkeys(buckets, 0)
    allocated = {spec.name: {} for spec in columns}
    for size, column_of in reaching.items():
        wanted, remaining = usable * exact(shares[size]), sum(buckets[bucket] - used[bucket] for bucket in column_of)
        fraction = 1 if size == min(shares) else min(1, wanted / max(remaining, 1))
        for bucket, column in column_of.items():
            start, stop = used[bucket], used[bucket] + round((buckets[bucket] - used[bucket]) * fraction)
            if stop > start:
                allocated[column][bucket] = (start, stop)
            used[bucket] = stop
    return {column: spans for column, spans in allocated.items() if spans}


def epoch_rows(buckets: dict[str, int], reaching: dict[int, Iterable[str]], shares: dict[int, float]) -> Fraction:
    """The most rows that an epoch can use such that every resolution gets its share of them.

    Each resolution sets a limit, and the smallest limit counts. The example of `allocate_rows`:

        resolution   reached there or above   rows   share of these resolutions   limit: rows / share
        64           "32+64"                  300    0.5                          600
        32           "32+64", "32"            400    1                            400

    `reaching`: resolution, the largest first -> the buckets that reach it.
    """
    limits, reached, share = [], set(), Fraction(0)
    for size, names in reaching.items():
        reached |= set(names)
        share += exact(shares[size])
        limits.append(sum(buckets[bucket] for bucket in reached) / share)
    return min(limits)
