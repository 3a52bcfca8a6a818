"""The rows that a run is validated on: held-out rows of its latents. No PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from .. import storage
from . import schema
from .manifest import Files, Manifest, RowRange, read_files, read_manifest
from .parquet import read_parquet, write_table
from .read import IsExcluded, read_repeatedly, read_row_ranges, take_ahead

NUM_ROWS = 512  # held-out rows that a run is validated on, at most
FOLDER = "validation"  # of an online run's held-out rows, encoded once before the run; of a run's copy of them
GROUPS_AHEAD = 2  # row groups of a validation set that are read while another one is computed


def of_run(
    run_uri: str, proportions: dict[str, float], resolution: int, is_excluded: IsExcluded | None = None
) -> pa.Table | None:
    """The run's held-out rows: those of `first`, cached in the run's `validation/rows.parquet`.

    The cache holds no excluded rows.
    """
    uri = storage.join(run_uri, FOLDER, "rows.parquet")
    is_cached = storage.exists(uri)  # finding them in a large data set is slow
    found = read_parquet(uri) if is_cached else first(proportions, resolution, NUM_ROWS)
    if found is None:
        return None
    rows = drop_excluded(found, is_excluded)
    if not is_cached or len(rows) < len(found):
        write_table(uri, rows)
    return rows


def first(
    proportions: dict[str, float], resolution: int, num_rows: int, is_excluded: IsExcluded | None = None
) -> pa.Table | None:
    """About the first `num_rows` held-out rows that have latents, in the order of the files; None if there are none.

    Columns: id, caption, the latents of all shapes of the resolution, the embeddings. Excluded rows are missing.

    Args:
        proportions: {URI of a data set: the proportion of the rows that it contributes}.
        resolution: of the latents.
        is_excluded: ids -> (B,) bool.
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
    return drop_excluded(pa.concat_tables(tables), is_excluded) if tables else None


def drop_excluded(rows: pa.Table, is_excluded: IsExcluded | None) -> pa.Table:
    return rows.filter(pa.array(~is_excluded(rows[schema.ID]))) if is_excluded else rows


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


class ValidationSet:
    """The rows of a validation set that have latents at a resolution, streamed while they are validated on.

    A process holds `GROUPS_AHEAD` + 2 row groups of at most 64 rows, for a set of any size. With Stable Diffusion 2
    these take 45 MB at 256 pixels and 57 MB at 512. Each row is validated with eight forward passes, which cost as much
    as training on 2.7 rows. The ranks share this work. A few thousand rows are enough.

    Args:
        uri: a folder of stored latents.
        resolution: the resolution to validate at.
        rank, world_size: of the processes that share the rows.

    Raises FileNotFoundError if the folder holds no latents.
    """

    def __init__(self, uri: str, resolution: int, rank: int = 0, world_size: int = 1):
        self.uri, self.rank, self.world_size = uri, rank, world_size
        self.manifest, self.files = read_manifest(uri), read_files(uri)
        self.num_rows = self.manifest.rows_at(resolution)

    def __call__(self, latents: schema.ColumnSpec) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """Yield `(rows, positions (B,), counts (B,) bool)` for each row group of this rank.

        Positions number the rows that have these latents, in the order of the files. A rank gets every `world_size`-th
        row group, so a row is computed in the same batch on any number of ranks. All ranks compute the same number of
        batches, because they gather sharded weights together. A rank that runs out of row groups repeats the set's last
        one, with `counts` False.
        """
        groups = groups_with(self.files, {latents.name})
        sizes = self.files.group_rows[groups]
        first_rows = np.cumsum(sizes) - sizes
        numbers = np.arange(self.rank, -(-len(groups) // self.world_size) * self.world_size, self.world_size)
        counted, numbers = numbers < len(groups), numbers.clip(max=len(groups) - 1)
        ranges = [self.files.row_range(groups[number], 0, sizes[number]) for number in numbers]
        columns = [schema.ID, latents.name, schema.EMBEDDINGS]
        read = functools.partial(read_row_ranges, columns=columns, files=self.files)
        for rows, number, counts in zip(read_ahead(read, ranges), numbers, counted, strict=True):
            yield rows, first_rows[number] + np.arange(len(rows)), np.full(len(rows), counts)


def read_ahead(read: Callable[[list[RowRange]], pa.Table], ranges: list[RowRange]) -> Iterator[pa.Table]:
    """The rows of each range, in order; threads read the next `GROUPS_AHEAD` ranges meanwhile."""
    with ThreadPoolExecutor(GROUPS_AHEAD) as pool:
        started = (pool.submit(read_repeatedly, functools.partial(read, [one])) for one in ranges)
        for reading in take_ahead(started, GROUPS_AHEAD):
            yield reading.result()
