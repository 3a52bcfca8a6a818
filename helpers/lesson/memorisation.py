"""Memorisation: which training rows are nearest to generated images, and is that nearer than chance?

    latents = memorisation.encode_pictures(model, images)
    nearest, held_out = memorisation.search(config, latents)

The search is exact: one Ray Data pass over the stored latents of all training rows. Images that the model has never
seen show how near is normal: the same pass finds the nearest training rows of held-out rows. A generated image that is
much nearer to a training image than these may be a copy (Carlini et al., 2023, section 4).

A distance is the root mean square difference of two latents' scaled means: a data set's latents have a standard
deviation of about 1, so two unrelated ones are about 1.4 apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import ray
import ray.data

from ..config import TrainingConfig
from ..latents import schema
from ..latents.held_out import first, groups_with
from ..latents.manifest import DataSets, Manifest
from ..latents.plan import Files, read_files
from ..latents.read import read_row_ranges

TASK_BYTES = 2**30  # read by one task of the pass
STEP_BYTES = 64 * 2**20  # of latents, or of distances, held by a task at a time
POSITION = ["data_set", "group", "row"]


class DataSet(NamedTuple):
    """A data set, and its row groups that hold rows to search."""

    files: Files
    groups: np.ndarray


def encode_pictures(model: str, pictures: Sequence[np.ndarray], batch_size: int = 32) -> np.ndarray:
    """(N, C, H/8, W/8) latents of N images of one size, (H, W, 3) uint8: the VAE's posterior means, unscaled."""
    import torch  # not at the top: the tasks that search need no PyTorch and no diffusers

    from ..encode import encoder

    vae, means = encoder.load_vae(model), []
    with torch.inference_mode():
        for start in range(0, len(pictures), batch_size):
            pixels_BHWC = encoder.normalize(torch.from_numpy(np.stack(pictures[start : start + batch_size])))
            means.append(encoder.vae_moments(vae, pixels_BHWC.permute(0, 3, 1, 2))[:, 0])
    return torch.cat(means).numpy()


def search(
    config: TrainingConfig, latents_NCHW: np.ndarray, num_held_out: int = 256
) -> tuple[pd.DataFrame, np.ndarray]:
    """The nearest training row of each of N latents, and the distances of held-out rows to theirs.

    Args:
        config: run whose data sets are searched.
        latents_NCHW: unscaled means, as `encode_pictures` returns them, of a shape of the config's largest resolution.
        num_held_out: maximum number of held-out rows to compare with.

    Returns `(nearest, held_out)`. `nearest` has a row for each latent, with columns query, distance, nearer (the share
    of the held-out rows that are at least as near to their nearest row), id, caption, latents_uri and latents
    ((C, H, W) means, unscaled). `held_out` (M,) holds the held-out rows' distances.

    Needs a connection to Ray. Raises ValueError if no row is trained on in this shape.
    """
    manifest = DataSets.open(config.proportions).first
    spec = find_column(manifest, config, latents_NCHW)
    scale = manifest.scaling_factor / np.sqrt(np.prod(spec.shape[1:]))
    queries = latents_NCHW.reshape(len(latents_NCHW), -1).astype(np.float64)
    unseen = first(config.proportions, config.largest_resolution, num_held_out)
    if unseen is not None and spec.name in unseen.column_names:
        queries = np.concatenate([queries, read_means(unseen.filter(unseen[spec.name].is_valid()), spec)])
    data_sets = [training_groups(uri, spec) for uri in config.proportions]
    nearest = run_pass(data_sets, spec, queries)
    if nearest.empty:
        raise ValueError(f"No row of {config.latents_uri} is trained on with latents in {spec.name!r}.")
    nearest["distance"] *= scale
    is_held_out = nearest["query"] >= len(latents_NCHW)
    held_out, nearest = nearest.loc[is_held_out, "distance"].to_numpy(), nearest[~is_held_out].reset_index(drop=True)
    nearest["nearer"] = np.nan
    if len(held_out):
        nearest["nearer"] = np.searchsorted(np.sort(held_out), nearest["distance"], side="right") / len(held_out)
    tables = []
    for number, group, row in nearest[POSITION].itertuples(index=False):
        files, columns = data_sets[number].files, [schema.ID, schema.CAPTION, spec.name]
        tables.append(read_row_ranges([files.row_range(group, row, 1)], columns, files))
    rows = pa.concat_tables(tables)
    nearest["id"], nearest["caption"] = rows[schema.ID].to_pylist(), rows[schema.CAPTION].to_pylist()
    nearest["latents_uri"] = [data_sets[number].files.uri for number in nearest["data_set"]]
    nearest["latents"] = list(read_means(rows, spec).reshape(-1, *spec.shape[1:]))
    return nearest.drop(columns=POSITION), held_out


def find_column(manifest: Manifest, config: TrainingConfig, latents_NCHW: np.ndarray) -> schema.ColumnSpec:
    """The column that holds latents of this shape. Raises ValueError if there is none."""
    known = manifest.latents_at(config.largest_resolution)
    for spec in known:
        if spec.shape[1:] == latents_NCHW.shape[1:]:
            return spec
    shapes = ", ".join(f"{spec.shape[1:]} ({spec.size[0]} x {spec.size[1]} pixels)" for spec in known)
    raise ValueError(
        f"The latents given have the shape {latents_NCHW.shape[1:]}, and those of resolution="
        f"{config.largest_resolution} {shapes}: generate pictures of a size that was trained on."
    )


def training_groups(uri: str, spec: schema.ColumnSpec) -> DataSet:
    """The row groups of a data set whose rows are trained on and have latents in a column."""
    files = read_files(uri)
    return DataSet(files, groups_with(files, {spec.name}, held_out=False))


def read_means(rows: pa.Table, spec: schema.ColumnSpec) -> np.ndarray:
    """(B, C * H * W) fp64: the means in a column of latents."""
    return spec.decode(rows[spec.name])[0][:, 0].reshape(len(rows), math.prod(spec.shape[1:])).astype(np.float64)


def run_pass(data_sets: list[DataSet], spec: schema.ColumnSpec, queries_QD: np.ndarray) -> pd.DataFrame:
    """The nearest row of each query in all row groups: columns query, distance (plain), data_set, group, row.

    Each task finds the nearest rows in its row groups, and the driver the nearest of these.
    """
    num_groups = sum(len(data_set.groups) for data_set in data_sets)
    if not num_groups:
        return pd.DataFrame(columns=["query", "distance", *POSITION])
    num_bytes = num_groups * schema.ROWS_PER_ROW_GROUP * spec.row_bytes
    num_tasks = min(num_groups, max(2 * int(ray.cluster_resources().get("CPU", 1)), -(-num_bytes // TASK_BYTES)))
    nearest_of_task = functools.partial(
        search_groups, data_sets=ray.put(data_sets), spec=spec, queries=ray.put(queries_QD)
    )
    numbers = ray.data.range(num_groups, override_num_blocks=num_tasks)
    nearest = numbers.map_batches(nearest_of_task, batch_size=None)
    return keep_nearest(list(nearest.iter_batches(batch_size=None, batch_format="pandas")))


def search_groups(
    batch: dict[str, np.ndarray], *, data_sets: ray.ObjectRef, spec: schema.ColumnSpec, queries: ray.ObjectRef
) -> pd.DataFrame:
    """For `map_batches`: the nearest row of each query in the row groups `batch["id"]`, over all data sets."""
    data_sets, queries_QD = ray.get([data_sets, queries])
    starts, nearest = np.cumsum([0, *(len(data_set.groups) for data_set in data_sets)]), []
    at_once = max(1, STEP_BYTES // (schema.ROWS_PER_ROW_GROUP * max(spec.row_bytes, 8 * len(queries_QD))))
    for number, data_set in enumerate(data_sets):
        mine = batch["id"][(batch["id"] >= starts[number]) & (batch["id"] < starts[number + 1])] - starts[number]
        for start in range(0, len(mine), at_once):
            rows, rows_BD = read_groups(data_set, data_set.groups[mine[start : start + at_once]], spec)
            nearest.append(nearest_rows(queries_QD, rows_BD, rows.assign(data_set=number)))
    return keep_nearest(nearest)


def read_groups(data_set: DataSet, groups: np.ndarray, spec: schema.ColumnSpec) -> tuple[pd.DataFrame, np.ndarray]:
    """`(columns group and row, (B, D) means)` of the rows of these row groups that are searched."""
    counts = data_set.files.group_rows[groups]
    ranges = [data_set.files.row_range(group, 0, count) for group, count in zip(groups, counts, strict=True)]
    rows = read_row_ranges(ranges, [spec.name], data_set.files)
    row_numbers = np.concatenate([np.arange(count) for count in counts])
    return pd.DataFrame({"group": np.repeat(groups, counts), "row": row_numbers}), read_means(rows, spec)


def nearest_rows(queries_QD: np.ndarray, rows_BD: np.ndarray, positions: pd.DataFrame) -> pd.DataFrame:
    """The nearest row of each query, if there is any row. In fp64: in fp32, a copy's distance would not be 0."""
    squares_QB = (queries_QD**2).sum(axis=1)[:, None] + (rows_BD**2).sum(axis=1) - 2 * queries_QD @ rows_BD.T
    queries = np.arange(len(queries_QD) if len(rows_BD) else 0)
    nearest = squares_QB[queries].argmin(axis=1) if len(queries) else queries
    distances = np.sqrt(np.maximum(squares_QB[queries, nearest], 0))
    return positions.iloc[nearest].reset_index(drop=True).assign(query=queries, distance=distances)


def keep_nearest(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """The nearest row of each query of several frames; ties go to the first row."""
    ordered = pd.concat(frames).sort_values(["query", "distance", *POSITION])
    return ordered.drop_duplicates("query").reset_index(drop=True)
