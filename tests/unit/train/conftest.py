"""What the tests of training share: a small U-Net's config, its steps, rows, and one process that trains on them."""

import json

import pyarrow as pa
import pytest

from helpers.config import TrainingConfig
from helpers.model.denoisers import load_denoiser_config
from helpers.train.step import TrainStep
from tests.steps import BATCH, KEEP, NAN, STEPS, train, with_bits


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A function that makes a config: a U-Net of one level, the same parts as "tiny" at a third of the time."""
    path = tmp_path_factory.mktemp("unet") / "unet.json"
    one_level = {
        "block_out_channels": [32],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
        "attention_head_dim": [2],
    }
    path.write_text(json.dumps({**load_denoiser_config("tiny"), **one_level}))

    def build(**values):
        small = {"global_batch_size": BATCH, "units_per_step": 4, "warmup_steps": 2, "max_steps": 50}
        return TrainingConfig(**{"unet_config": str(path), "learning_rate": 1e-3, **small, **values})

    return build


@pytest.fixture(scope="module")
def manifest(build_manifest):
    return build_manifest()


@pytest.fixture(scope="module")
def build_step(recipe, manifest):
    """A function that makes a `TrainStep`; keywords change its config."""
    return lambda **values: TrainStep(recipe(**values), manifest)


@pytest.fixture(scope="module")
def rows(build_latents):
    """The run's rows; what is masked has NaN in its latents, as a null may."""
    return with_bits(build_latents(BATCH * STEPS), NAN, ~KEEP).append_column("keep", pa.array(KEEP))


@pytest.fixture(scope="module")
def one(build_step, rows):
    """One process without a process group: the reference. `(lines, state)` after all steps."""
    state = build_step()
    return train(state, rows), state
