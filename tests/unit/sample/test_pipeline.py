import pytest

from helpers import sample
from helpers.config import TrainingConfig
from tests.pipelines import untrained_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sampler", ["dpm++", "euler", "unipc"])
def test_a_sampler_of_another_name_draws_otherwise(sampler):
    pipelines = [untrained_pipeline(TrainingConfig(sampler=name)) for name in ("ddim", sampler)]
    one, other = (sample.generate(pipe, ["a large red circle"], resolution=32, steps=3)[0] for pipe in pipelines)
    assert one.shape == other.shape == (32, 32, 3) and (one != other).any()
