import numpy as np
import pytest
import torch

from helpers import sample
from helpers.encode import encoder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("resolution", "dtype", "gib", "at_once"),
    [  # 32 images at once take more than an A10G has
        (512, torch.float32, 22, 23),
        (512, torch.float32, 8, 8),
        (512, torch.float16, 22, 32),
        (256, torch.float32, 4, 17),
        (1024, torch.float32, 2, 1),
    ],
)
def test_as_many_images_are_decoded_at_once_as_a_gpus_memory_holds(resolution, dtype, gib, at_once):
    assert sample.decoded_at_once(resolution**2, dtype.itemsize, gib * 2**30) == at_once


def test_images_decoded_in_slices_are_those_decoded_together(monkeypatch):
    vae, latents = encoder.load_vae("tiny-sd"), torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    together, rows, decode = sample.decode_latents(vae, latents), [], vae.decode
    monkeypatch.setattr(vae, "decode", lambda some: rows.append(len(some)) or decode(some))
    monkeypatch.setattr(sample, "MOST_DECODED", 2)
    assert np.abs(sample.decode_latents(vae, latents).astype(int) - together).max() <= 1 and rows == [2, 1]
