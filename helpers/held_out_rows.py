"""Held-out rows of latents, which a run is validated on. No PyTorch: the processes that read latents need none."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from . import schema, storage
from .manifest import Manifest, RowRange, read_files, read_manifest
from .read import read_row_ranges
from .training_config import TrainingConfig

NUM_ROWS = 512  # held-out rows that a run is validated on, at most
FOLDER = "validation"  # of an online run's held-out rows, encoded once before the run; of a run's copy of them


def of_run(config: TrainingConfig) -> pa.Table | None:
    """The run's held-out rows, cached in its `validation/rows.parquet`: finding them in a large data set is slow."""
    uri = storage.join(config.run_uri, FOLDER, "rows.parquet")
    if storage.exists(uri):
        filesystem, path = storage.open_filesystem(uri)
        return pq.read_table(path, filesystem=filesystem)
    rows = first(config, NUM_ROWS)
    if rows is not None:
        file = pa.BufferOutputStream()
        pq.write_table(rows, file, compression="none")
        storage.write_bytes(uri, file.getvalue())
    return rows


def first(config: TrainingConfig, num_rows: int) -> pa.Table | None:
    """About the first `num_rows` held-out rows that have latents, in the order of the files; None if there are none.

    In a mixture, each data set contributes its proportion.
    """
    if config.validation_share == 0:
        return None
    resolution, tables = config.largest_resolution, []
    for uri, proportion in config.proportions.items():
        if read_manifest(uri).online:
            uri = storage.join(uri, FOLDER)
        manifest, wanted = read_manifest(uri), max(1, round(num_rows * proportion))
        latents = [spec.name for spec in manifest.latents_at(resolution)]
        columns = [schema.ID, schema.CAPTION, *latents, schema.EMBEDDINGS]
        read = functools.partial(read_row_ranges, columns=columns, folder_uri=storage.join(uri, "data"))
        ranges = first_ranges(manifest, uri, resolution, wanted)
        with ThreadPoolExecutor(16) as pool:  # a few rows of each file
            parts = list(pool.map(read, ([one] for one in ranges)))
        if parts:
            tables.append(pa.concat_tables(parts)[:wanted])
    return pa.concat_tables(tables) if tables else None


def first_ranges(manifest: Manifest, uri: str, resolution: int, wanted: int) -> list[RowRange]:
    """The first held-out row groups with latents at a resolution: enough for `wanted` rows, or all there are."""
    files, latents = read_files(uri), {spec.name for spec in manifest.latents_at(resolution)}
    buckets = [name for name in files.bucket_names if name.startswith(schema.HELD_OUT)]
    buckets = [name for name in buckets if not latents.isdisjoint(schema.bucket_columns(name))]
    groups = np.sort(np.concatenate([files.groups_of(bucket) for bucket in buckets] or [np.zeros(0, np.int32)]))
    groups = groups[: np.searchsorted(np.cumsum(files.group_rows[groups]), wanted) + 1]
    return [files.row_range(group, 0, files.group_rows[group]) for group in groups]
