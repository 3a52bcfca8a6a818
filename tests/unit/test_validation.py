import numpy as np
import pytest
import torch

from helpers import diffusion, validation
from helpers.config import TrainingConfig
from helpers.train_step import Unit
from helpers.unet import build_unet

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def unet():
    return build_unet("tiny")


def test_losses_are_those_of_a_row_at_a_time_by_the_plain_objective(unet, build_manifest, build_latents):
    """The same every time, whatever the seed; weighted and not; and `validation_loss` is their mean."""
    manifest, rows = build_manifest(), build_latents(80)
    found = validation.losses_by_noise(unet, manifest, rows, TrainingConfig(), timesteps_per_row=2)
    torch.manual_seed(5)
    again = validation.losses_by_noise(unet, manifest, rows, TrainingConfig(seed=7), timesteps_per_row=2)
    np.testing.assert_array_equal(found, again)
    assert all(parameter.grad is None for parameter in unet.parameters())
    expected, schedule = np.zeros((2, 80, 2)), diffusion.noise_schedule()
    with torch.no_grad():
        for row in range(80):
            unit = Unit.from_arrow(rows.slice(row, 1).combine_chunks(), manifest, 64, row)
            for number, timestep in enumerate((250, 750)):
                draws = diffusion.draw(0, number, unit.positions_U, (4, 8, 8))
                draws.timesteps_B[:] = timestep
                latents = diffusion.sample_latents(unit.moments, draws.posterior_BCHW, manifest.scaling_factor)
                for column, gamma in enumerate((5.0, None)):
                    loss = diffusion.row_losses(unet, schedule, latents, unit.text.float(), draws, gamma)
                    expected[number, row, column] = loss.item()
    assert found[:, 0].tolist() == [250, 750]
    np.testing.assert_allclose(found[:, 1:], expected.mean(axis=1), rtol=1e-4)
    means = validation.validation_loss(unet, manifest, rows, TrainingConfig(), timesteps_per_row=2)
    assert means == tuple(found[:, 1:].mean(axis=0)) and means[0] != means[1]


def test_no_validation_rows_give_zero_not_a_crash(unet, build_manifest, build_latents):
    assert validation.validation_loss(unet, build_manifest(), build_latents(3)[:0], TrainingConfig()) == (0, 0)
