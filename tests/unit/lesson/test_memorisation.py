"""Latents of pictures, and the nearest rows of a block. No Ray."""

import numpy as np
import pytest

from helpers.encode import encoder
from helpers.lesson import captioned_shapes, memorisation

pytestmark = pytest.mark.usefixtures("one_thread")


def test_pictures_become_the_latents_that_are_stored():
    pictures = [np.asarray(captioned_shapes.draw_sample(index)[0]) for index in range(3)]
    latents = memorisation.encode_pictures("tiny-sd", pictures, batch_size=2)
    stored, _ = encoder.LatentEncoder("tiny-sd").encode_images(np.stack(pictures))
    assert latents.shape == (3, 4, 8, 8) and np.allclose(latents, stored[:, 0], atol=2e-2)
