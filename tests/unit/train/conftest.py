"""What the tests of training share: a small U-Net's config, its steps, rows, and one process that trains on them."""

import pyarrow as pa
import pytest

from helpers.train.step import TrainStep
from tests.steps import BATCH, KEEP, NAN, STEPS, one_level_recipe, train, with_bits


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return one_level_recipe(tmp_path_factory.mktemp("unet"))


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
