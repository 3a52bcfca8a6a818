import numpy as np
import pytest
import torch

from helpers import sample
from helpers.config import TrainingConfig
from helpers.encode import encoder
from tests.pipelines import untrained_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_sampler_of_another_name_draws_otherwise():
    pipelines = [untrained_pipeline(sampler=name) for name in ("ddim", "dpm++", "euler", "unipc")]
    first, *others = (sample.generate(pipe, ["a large red circle"], resolution=32, steps=3)[0] for pipe in pipelines)
    assert all(other.shape == (32, 32, 3) and (other != first).any() for other in others)


@pytest.mark.parametrize(
    ("changes", "sampler", "steps", "said"),
    [
        ({"prediction_type": "flow"}, "ddim", 20, "sampler='ddim' does not fit prediction_type='flow'"),
        ({"unet_config": "tiny-transformer"}, "euler", 20, "sampler='euler' does not fit"),
        ({}, "euler", 1, "sampling_steps=1"),
        ({"prediction_type": "flow", "timestep_shift": 3.0}, "auto", 333, "takes 1 to 332"),
    ],
)
def test_a_sampler_that_does_not_fit_the_run_is_refused(changes, sampler, steps, said):
    with pytest.raises(ValueError, match=said):
        sample.build_sampler(TrainingConfig(**changes), sampler, steps)


def test_images_decoded_in_slices_are_those_decoded_together(monkeypatch):
    vae, latents = encoder.load_vae("tiny-sd"), torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    together, rows, decode = sample.decode_latents(vae, latents), [], vae.decode
    monkeypatch.setattr(vae, "decode", lambda some: rows.append(len(some)) or decode(some))
    monkeypatch.setattr(sample, "MOST_PIXELS", 2 * 64 * 64)
    assert np.abs(sample.decode_latents(vae, latents).astype(int) - together).max() <= 1 and rows == [2, 1]
