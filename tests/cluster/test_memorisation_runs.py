"""The nearest training latents of generated pictures, searched through Ray Data."""

import numpy as np
import pytest

from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.latents.held_out import first
from helpers.latents.manifest import read_manifest
from helpers.latents.plan import read_files
from helpers.latents.read import read_row_ranges
from helpers.lesson import memorisation
from tests.benchmarks import made_up

SHAPES = {"image_latents_32": (2, 4, 4, 4), "image_latents_64": (2, 4, 8, 8), "caption_embeddings": (2, 4)}
COLUMN = "image_latents_64"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The config of a run over two data sets, by bucket: a third of the rows have no large latents."""
    folder = str(tmp_path_factory.mktemp("mixture"))
    for number, name in enumerate("ab"):
        rows_per_file = 250 + 50 * number  # other rows in each data set
        made_up.write_latents(f"{folder}/{name}", 400 + 300 * number, SHAPES, rows_per_file, 1 / 3, 0.1)
    return TrainingConfig(storage=folder, latents_uri={f"{folder}/a": 1, f"{folder}/b": 3}, global_batch_size=8)


def stored(uri, spec):
    """(ids, (N, D) means) of the rows that are trained on, read without the manifest's buckets."""
    files = read_files(uri)
    ranges = [files.row_range(group, 0, rows) for group, rows in enumerate(files.group_rows)]
    rows = read_row_ranges(ranges, [schema.ID, spec.name], files)
    rows = rows.filter(rows[spec.name].is_valid())
    keep = ~schema.held_out_mask(rows["id"].to_pylist(), 0.1)
    means = spec.decode(rows[spec.name])[0][:, 0].reshape(len(rows), -1).astype(np.float64)
    return np.array(rows["id"].to_pylist())[keep], means[keep]


def brute_force(config, queries):
    """[(distance, folder, id)] of the nearest rows: by comparing every query with every row."""
    spec = read_manifest(next(iter(config.proportions))).column(COLUMN)
    found = []
    for query in queries.reshape(len(queries), -1).astype(np.float64):
        rows = []
        for uri in config.proportions:
            ids, means = stored(uri, spec)
            distances = np.sqrt(np.mean((means - query) ** 2, axis=1))
            rows += zip(distances, [uri] * len(ids), ids, strict=True)
        found.append(min(rows))
    return found


def test_the_nearest_rows_are_those_of_brute_force(cluster, mixture):
    config, random = mixture, np.random.default_rng(0)
    queries = random.uniform(0, 2, size=(5, 4, 8, 8)).astype(np.float32)
    uri = list(config.proportions)[1]
    ids, means = stored(uri, read_manifest(uri).column(COLUMN))
    queries[3] = means[7].reshape(4, 8, 8)  # a copy
    found, held_out = memorisation.search(config, queries, num_held_out=40)
    assert found["query"].tolist() == [*range(5)]
    distances, folders, neighbours = zip(*brute_force(config, queries), strict=True)
    assert found["distance"].tolist() == pytest.approx(distances, abs=1e-7)
    assert (found["latents_uri"].tolist(), found["id"].tolist()) == (list(folders), list(neighbours))
    copy = found.iloc[3]
    assert (copy["id"], copy["latents_uri"], copy["nearer"]) == (ids[7], uri, 0)
    assert copy["distance"] == pytest.approx(0, abs=1e-7) and (copy["latents"].ravel() == means[7]).all()
    unseen = first(config.proportions, config.largest_resolution, 40)
    unseen = unseen.filter(unseen[COLUMN].is_valid())
    means = read_manifest(uri).column(COLUMN).decode(unseen[COLUMN])[0][:, 0]
    nearest = [distance for distance, _, _ in brute_force(config, means)]
    assert sorted(held_out) == pytest.approx(sorted(nearest), abs=1e-7) and min(held_out) > 0.1
