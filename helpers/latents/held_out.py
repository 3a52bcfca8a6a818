"""The rows that a run is validated on: held-out rows of its latents. No PyTorch."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from .. import storage
from . import schema
from .manifest import Manifest, read_manifest
from .parquet import read_parquet, write_table
from .plan import Files, RowRange, read_files
from .read import read_row_ranges

NUM_ROWS = 512  # held-out rows that a run is validated on, at most
FOLDER = "validation"  # of an online run's held-out rows, encoded once before the run; of a run's copy of them
COPY = "rows.parquet"


def of_run(run_uri: str, proportions: dict[str, float], resolution: int) -> pa.Table | None:
    """The run's held-out rows: those of `first`, copied to the run's `validation/rows.parquet`."""
    uri = storage.join(run_uri, FOLDER, COPY)
    if storage.exists(uri):  # finding them in a large data set is slow
        return read_parquet(uri)
    rows = first(proportions, resolution, NUM_ROWS)
    if rows is not None:
        write_table(uri, rows)
    return rows


def first(proportions: dict[str, float], resolution: int, num_rows: int) -> pa.Table | None:
    """About the first `num_rows` held-out rows that have latents, in the order of the files; None if there are none.

    Columns: id, caption, the latents of all shapes of the resolution, the embeddings.

    Args:
        proportions: {URI of a data set: the proportion of the rows that it contributes}.
        resolution: of the latents.
    """
    tables = []
    for uri, proportion in proportions.items():
        manifest, wanted = read_manifest(uri), max(1, round(num_rows * proportion))
        if manifest.online:
            if not manifest.job.get("validation_share"):
                continue
            uri = storage.join(uri, FOLDER)
            manifest = read_manifest(uri)
        latents = [spec.name for spec in manifest.latents_at(resolution)]
        files, columns = read_files(uri), [schema.ID, schema.CAPTION, *latents, schema.EMBEDDINGS]
        read = functools.partial(read_row_ranges, columns=columns, files=files)
        ranges = first_ranges(manifest, files, resolution, wanted)
        with ThreadPoolExecutor(16) as pool:  # a few rows of each file
            parts = list(pool.map(read, ([one] for one in ranges)))
        if parts:
            tables.append(pa.concat_tables(parts)[:wanted])
    return pa.concat_tables(tables) if tables else None


def example_rows(latents_uri: str, num_rows: int) -> pa.Table:
    """The first rows of a finished job, with all columns of its latents files."""
    manifest, files = read_manifest(latents_uri), read_files(latents_uri)
    columns = schema.latents_schema(pa.type_for_alias(manifest.id_type), manifest.columns).names
    num_groups = 1 + np.searchsorted(np.cumsum(files.group_rows), num_rows)
    ranges = [files.row_range(group, 0, rows) for group, rows in enumerate(files.group_rows[:num_groups])]
    return read_row_ranges(ranges, columns, files)[:num_rows]


def first_ranges(manifest: Manifest, files: Files, resolution: int, wanted: int) -> list[RowRange]:
    """The first held-out row groups with latents at a resolution: enough for `wanted` rows, or all there are."""
    latents = {spec.name for spec in manifest.latents_at(resolution)}
    groups = groups_with(files, latents, held_out=True)
    groups = groups[: np.searchsorted(np.cumsum(files.group_rows[groups]), wanted) + 1]
    return [files.row_range(group, 0, files.group_rows[group]) for group in groups]


def groups_with(files: Files, columns: set[str], held_out: bool | None = None) -> np.ndarray:
    """The row groups with latents in at least one of `columns`, in order.

    `held_out`: True for held-out rows, False for rows that are trained on, None for both.
    """
    buckets = [name for name in files.bucket_names if held_out in (None, name.startswith(schema.HELD_OUT))]
    buckets = [name for name in buckets if not columns.isdisjoint(schema.bucket_columns(name))]
    return np.sort(np.concatenate([files.groups_of(bucket) for bucket in buckets] or [np.zeros(0, np.int32)]))
