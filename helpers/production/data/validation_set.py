"""A separate data set that a run is validated on, beside its own held-out rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from ... import storage
from ...config import TrainingConfig, refuse_change
from ...latents import schema
from ...latents.held_out import groups_with
from ...latents.manifest import MANIFEST, Manifest, read_manifest
from ...latents.plan import RowRange, read_files
from ...latents.read import read_repeatedly, read_row_ranges, take_ahead

GROUPS_AHEAD = 2  # row groups that are read while another one is computed


def check(uri: str, config: TrainingConfig, trained_on: Manifest) -> None:
    """Raises ValueError unless `uri` holds stored latents that match those of the run."""
    resolution = config.largest_resolution
    if uri in config.proportions:
        raise ValueError(f"validation_uri={uri!r} is what the run trains on: give another data set, or leave it empty.")
    if not storage.exists(storage.join(uri, MANIFEST)) or read_manifest(uri).online:
        raise ValueError(f"validation_uri={uri!r} holds no stored latents: make them with Preprocessing.ipynb.")
    manifest = read_manifest(uri)
    if not manifest.rows_at(resolution):
        raise ValueError(
            f"validation_uri={uri!r} holds no latents of resolution={resolution}, which the run is validated at: "
            "encode the validation set with that resolution."
        )

    def settings(of: Manifest) -> dict[str, Any]:
        shapes = {spec.name: str(spec.shape) for spec in [*of.latents_at(resolution), of.embeddings]}
        return {"encoder": of.encoder, "scaling_factor": of.scaling_factor, "shift_factor": of.shift_factor, **shapes}

    refuse_change(
        f"The run's data, unlike validation_uri={uri!r},",
        settings(trained_on),
        settings(manifest),
        "encode both with the same settings",
    )


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
