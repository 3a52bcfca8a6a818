"""Latents of pictures, and the nearest rows of a block. No Ray."""

import numpy as np
import pandas as pd
import pytest

from helpers.encode import encoder
from helpers.lesson import captioned_shapes, memorisation

pytestmark = pytest.mark.usefixtures("one_thread")


def test_pictures_become_the_latents_that_are_stored():
    pictures = [np.asarray(captioned_shapes.draw_sample(index)[0]) for index in range(3)]
    latents = memorisation.encode_pictures("tiny-sd", pictures, batch_size=2)
    stored, _ = encoder.Encoder("tiny-sd").encode_images(np.stack(pictures))
    assert latents.shape == (3, 4, 8, 8) and np.allclose(latents, stored[:, 0], atol=2e-2)


def test_a_copy_is_at_distance_zero_among_large_values():
    rows = np.random.default_rng(0).normal(100, 1, size=(50, 4096))
    places = pd.DataFrame({"data_set": 0, "group": 0, "row": range(50)})
    (copy,) = memorisation.nearest_rows(rows[[30]], rows, places).itertuples()
    assert (copy.query, copy.row) == (0, 30) and copy.distance < 1e-3


def test_row_groups_without_a_row_to_search_are_no_obstacle():
    places = pd.DataFrame({"data_set": 0, "group": 0, "row": []})
    assert memorisation.nearest_rows(np.zeros((3, 8)), np.zeros((0, 8)), places).empty


def test_of_blocks_the_nearest_rows_are_kept():
    columns = ["query", "distance", "data_set", "group", "row"]
    frames = [[(1, 0.5, 0, 2, 0), (0, 0.3, 0, 1, 4)], [(0, 0.3, 0, 0, 9), (1, 0.2, 0, 3, 3)]]
    kept = memorisation.keep_nearest([pd.DataFrame(rows, columns=columns) for rows in frames])
    assert kept[["query", "distance", "row"]].values.tolist() == [[0, 0.3, 9], [1, 0.2, 3]]
