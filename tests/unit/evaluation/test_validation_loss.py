import numpy as np
import pytest
import torch

from helpers.config import TrainingConfig
from helpers.evaluate import losses_by_noise, validation_loss
from helpers.latents.manifest import write_manifest
from helpers.model import diffusion
from helpers.model.denoisers import build_denoiser
from helpers.production.data import validation_set
from helpers.train.step import Unit
from tests.latents import SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def denoiser():
    return build_denoiser("tiny")


def test_losses_are_those_of_a_row_at_a_time_by_the_plain_objective(denoiser, build_manifest, build_latents):
    """The same every time, whatever the seed; weighted and not; and `validation_loss` is their mean."""
    manifest, rows = build_manifest(), build_latents(80)
    found = losses_by_noise(denoiser, manifest, rows, TrainingConfig(), timesteps_per_row=2)
    torch.manual_seed(5)
    again = losses_by_noise(denoiser, manifest, rows, TrainingConfig(seed=7), timesteps_per_row=2)
    np.testing.assert_array_equal(found, again)
    assert all(parameter.grad is None for parameter in denoiser.parameters())
    expected, schedule = np.zeros((2, 80, 2)), diffusion.noise_schedule()
    with torch.no_grad():
        for row in range(80):
            unit = Unit.from_arrow(rows.slice(row, 1).combine_chunks(), manifest, manifest.latents(64), row)
            for number, timestep in enumerate((250, 750)):
                draws = diffusion.random_draws(0, number, unit.positions_U, (4, 8, 8))
                draws.timesteps_B[:] = timestep
                latents = diffusion.sample_latents(unit.moments, draws.posterior_BCHW, manifest.scaling_factor)
                for column, gamma in enumerate((5.0, None)):
                    loss = diffusion.row_losses(denoiser, schedule, latents, unit.text.float(), draws, gamma)
                    expected[number, row, column] = loss.item()
    assert found[:, 0].tolist() == [250, 750]
    np.testing.assert_allclose(found[:, 1:], expected.mean(axis=1), rtol=1e-4)
    means = validation_loss(denoiser, manifest, rows, TrainingConfig(), timesteps_per_row=2)
    assert means == tuple(found[:, 1:].mean(axis=0)) and means[0] != means[1]


def test_no_validation_rows_give_zero_not_a_crash(denoiser, build_manifest, build_latents):
    assert validation_loss(denoiser, build_manifest(), build_latents(3)[:0], TrainingConfig()) == (0, 0)


SMALL = {name: shape for name, shape in SHAPES.items() if "64" not in name}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("set", None, "holds no stored latents"),
        ("set", {"shapes": SMALL, "resolutions": [32]}, "holds no latents of resolution=64"),
        ("set", {"scaling_factor": 0.25}, "scaling_factor=0.5, not 0.25"),
        ("latents", {}, "is what the run trains on"),
    ],
)
def test_a_validation_set_unlike_the_data_is_refused(tmp_path, build_manifest, name, changes, said):
    config, uri = TrainingConfig(storage=tmp_path), str(tmp_path / name)
    if changes is not None:
        write_manifest(uri, build_manifest(**changes), [])
    with pytest.raises(ValueError, match=said):
        validation_set.check(uri, config, build_manifest())
