"""Memorisation: which training rows are nearest to generated pictures, and is that nearer than chance?

    latents = memorisation.encode(model, pictures)
    found, held_out = memorisation.search(config, latents)

The search is exact: one Ray Data pass over the stored latents of all training rows. A generated picture may be a copy
if it is much nearer to a training picture than pictures that the model has never seen are to theirs (Carlini et al.,
2023, section 4). So the same pass finds the nearest training rows of held-out rows.

A distance is the root mean square difference of two latents' scaled means: a data set's latents have a standard
deviation of about 1, so two unrelated ones are about 1.4 apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import ray
import ray.data

from .. import ingest, schema, storage
from ..config import TrainingConfig

TASK_BYTES = 2**30  # read by one task of the pass
STEP_BYTES = 64 * 2**20  # of latents, or of distances, held by a task at a time
PLACE = ["data_set", "group", "row"]


class Part(NamedTuple):
    """The row groups of a data set that hold rows to search."""

    source: ingest.Source
    groups: np.ndarray


def encode(model: str, pictures: Sequence[np.ndarray], batch_size: int = 32) -> np.ndarray:
    """Pictures of one size, (H, W, 3) uint8 -> (N, C, H/8, W/8) unscaled latents, the means of the VAE's posterior."""
    import torch  # not at the top: the tasks that search need no PyTorch and no diffusers

    from .. import encoder, images

    vae, found = encoder.load_vae(model), []
    with torch.inference_mode():
        for start in range(0, len(pictures), batch_size):
            pixels_BHWC = images.normalize(torch.from_numpy(np.stack(pictures[start : start + batch_size])))
            found.append(vae.encode(pixels_BHWC.permute(0, 3, 1, 2)).latent_dist.mean)
    return torch.cat(found).numpy()


def search(
    config: TrainingConfig, latents_NCHW: np.ndarray, k: int = 1, num_held_out: int = 256
) -> tuple[pd.DataFrame, np.ndarray]:
    """The k nearest training rows of each of N latents, and the distances of held-out rows to theirs.

    Args:
        config: all data sets of its `latents_uri` are searched; its `validation_share` applies to latents of earlier
            versions.
        latents_NCHW: unscaled means, as `encode` returns them, of a shape of the config's largest resolution.
        k: rows for each latent.
        num_held_out: held-out rows to compare with, at most.

    Returns `(found, held_out)`. `found` has k rows for each latent, the nearest first, with columns query, distance,
    nearer (the share of the held-out rows that are at least as near to their nearest row), id, caption, latents_uri and
    latents ((C, H, W) means, unscaled). `held_out` (M,) are the held-out rows' distances.

    Needs a connection to Ray. Raises ValueError if no row is trained on in this shape.
    """
    manifests = ingest.read_manifests(config)
    spec = find_column(manifests, config, latents_NCHW)
    scale = next(iter(manifests.values())).scaling_factor / np.sqrt(np.prod(spec.shape[1:]))
    unseen = ingest.validation_rows(config, num_held_out) if num_held_out else None
    queries = latents_NCHW.reshape(len(latents_NCHW), -1).astype(np.float64)
    if unseen is not None and spec.name in unseen.column_names:
        queries = np.concatenate([queries, read_means(unseen.filter(unseen[spec.name].is_valid()), spec)])
    parts = [training_groups(uri, manifest, spec) for uri, manifest in manifests.items()]
    nearest = run_pass(parts, spec, queries, k)
    if nearest.empty:
        raise ValueError(f"No row of {config.latents_uri} is trained on with latents in {spec.name!r}.")
    nearest["distance"] *= scale
    found = nearest[nearest["query"] < len(latents_NCHW)].reset_index(drop=True)
    held_out = nearest[nearest["query"] >= len(latents_NCHW)].groupby("query")["distance"].min().to_numpy()
    if len(held_out):
        found["nearer"] = np.searchsorted(np.sort(held_out), found["distance"], side="right") / len(held_out)
    else:
        found["nearer"] = np.nan
    rows = [
        ingest.read_row_ranges(
            [parts[number].source.row_range(group, row, 1)],
            [schema.ID, schema.CAPTION, spec.name],
            storage.join(parts[number].source.uri, "data"),
        )
        for number, group, row in found[PLACE].itertuples(index=False)
    ]
    rows = pa.concat_tables(rows)
    found["id"], found["caption"] = rows[schema.ID].to_pylist(), rows[schema.CAPTION].to_pylist()
    found["latents_uri"] = [parts[number].source.uri for number in found["data_set"]]
    found["latents"] = list(read_means(rows, spec).reshape(-1, *spec.shape[1:]))
    columns = ["query", "distance", "nearer", "id", "caption", "latents_uri", "latents"]
    return found[columns], held_out


def find_column(
    manifests: dict[str, schema.Manifest], config: TrainingConfig, latents_NCHW: np.ndarray
) -> schema.ColumnSpec:
    """The column that holds latents of this shape. Raises ValueError if there is none."""
    known = next(iter(manifests.values())).latents_at(config.largest_resolution)
    for spec in known:
        if spec.shape[1:] == latents_NCHW.shape[1:]:
            return spec
    shapes = ", ".join(f"{spec.shape[1:]} ({spec.size[0]} x {spec.size[1]} pixels)" for spec in known)
    raise ValueError(
        f"The latents given have the shape {latents_NCHW.shape[1:]}, and those of resolution="
        f"{config.largest_resolution} {shapes}: generate pictures of a size that was trained on."
    )


def training_groups(uri: str, manifest: schema.Manifest, spec: schema.ColumnSpec) -> Part:
    """The row groups of a data set whose rows are trained on and have latents in a column."""
    source = ingest.Source.of(uri, manifest.files)
    names, group_buckets = manifest.group_buckets
    mine = [
        number
        for number, name in enumerate(names)
        if not name.startswith(schema.HELD_OUT) and spec.name in schema.bucket_columns(name)
    ]
    return Part(source, np.flatnonzero(np.isin(group_buckets, mine)))


def read_means(rows: pa.Table, spec: schema.ColumnSpec) -> np.ndarray:
    """(B, C * H * W) fp64: the means in a column of latents."""
    return spec.decode(rows[spec.name])[0][:, 0].reshape(len(rows), math.prod(spec.shape[1:])).astype(np.float64)


def run_pass(parts: list[Part], spec: schema.ColumnSpec, queries_QD: np.ndarray, k: int) -> pd.DataFrame:
    """The k nearest rows of each query in all row groups: columns query, distance (plain), data_set, group, row.

    Each task finds the nearest rows in its row groups, and the driver the nearest of these.
    """
    num_groups = sum(len(part.groups) for part in parts)
    if not num_groups:
        return pd.DataFrame(columns=["query", "distance", *PLACE])
    num_bytes = num_groups * schema.ROWS_PER_ROW_GROUP * spec.row_bytes
    num_tasks = min(num_groups, max(2 * int(ray.cluster_resources().get("CPU", 1)), -(-num_bytes // TASK_BYTES)))
    nearest_of_task = functools.partial(
        search_groups, parts=ray.put(parts), spec=spec, queries=ray.put(queries_QD), k=k
    )
    numbers = ray.data.range(num_groups, override_num_blocks=num_tasks)
    best = None
    for block in numbers.map_batches(nearest_of_task, batch_size=None).iter_batches(
        batch_size=None, batch_format="pandas"
    ):
        best = keep_nearest(block if best is None else pd.concat([best, block]), k)
    return best


def search_groups(
    batch: dict[str, np.ndarray], *, parts: ray.ObjectRef, spec: schema.ColumnSpec, queries: ray.ObjectRef, k: int
) -> Iterator[pd.DataFrame]:
    """For `map_batches`: the k nearest rows of each query in the row groups `batch["id"]`, over all `parts`."""
    parts, queries_QD = ray.get([parts, queries])
    starts, best = np.cumsum([0, *(len(part.groups) for part in parts)]), None
    at_once = max(1, STEP_BYTES // (schema.ROWS_PER_ROW_GROUP * max(spec.row_bytes, 8 * len(queries_QD))))
    for number, part in enumerate(parts):
        mine = batch["id"][(batch["id"] >= starts[number]) & (batch["id"] < starts[number + 1])] - starts[number]
        for start in range(0, len(mine), at_once):
            groups = part.groups[mine[start : start + at_once]]
            places, rows_BD = read_groups(part, groups, spec)
            step = keep_nearest(nearest_rows(queries_QD, rows_BD, places.assign(data_set=number), k), k)
            best = step if best is None else keep_nearest(pd.concat([best, step]), k)
    if best is not None:
        yield best


def read_groups(part: Part, groups: np.ndarray, spec: schema.ColumnSpec) -> tuple[pd.DataFrame, np.ndarray]:
    """`(columns group and row, (B, D) means)` of the rows of these row groups that are searched."""
    counts = part.source.group_rows[groups]
    ranges = [part.source.row_range(group, 0, count) for group, count in zip(groups, counts, strict=True)]
    rows = ingest.read_row_ranges(ranges, [spec.name], storage.join(part.source.uri, "data"))
    places = pd.DataFrame(
        {"group": np.repeat(groups, counts), "row": np.concatenate([np.arange(count) for count in counts])}
    )
    return places, read_means(rows, spec)


def nearest_rows(queries_QD: np.ndarray, rows_BD: np.ndarray, places: pd.DataFrame, k: int) -> pd.DataFrame:
    """The k nearest rows of each query, in any order. In fp64: in fp32, a copy's distance would not be 0."""
    squares_QB = (queries_QD**2).sum(axis=1)[:, None] + (rows_BD**2).sum(axis=1) - 2 * queries_QD @ rows_BD.T
    k = min(k, len(rows_BD))
    rows_QK = np.argpartition(squares_QB, max(0, k - 1), axis=1)[:, :k] if k else np.zeros((len(queries_QD), 0), int)
    distances_QK = np.sqrt(np.maximum(np.take_along_axis(squares_QB, rows_QK, axis=1), 0))
    found = places.iloc[rows_QK.ravel()].reset_index(drop=True)
    queries = np.repeat(np.arange(len(queries_QD)), k)
    return found.assign(query=queries, distance=distances_QK.ravel())[["query", "distance", *PLACE]]


def keep_nearest(found: pd.DataFrame, k: int) -> pd.DataFrame:
    """The k nearest rows of each query; ties go to the first row."""
    return found.sort_values(["query", "distance", *PLACE]).groupby("query").head(k)
