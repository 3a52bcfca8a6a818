"""Pictures of many prompts on Ray, with processes that are killed."""

import sys

import numpy as np
import pytest
from ray import cloudpickle

from helpers import sample
from helpers.lesson import captioned_shapes, generation
from helpers.production.extras import scores
from tests.faults import die, once, slow
from tests.pipelines import untrained_pipeline

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROMPTS = captioned_shapes.held_out_prompts(16)
TWO = generation.Placement(num_generators=2)


@pytest.fixture(scope="module")
def settings(cluster, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("pipeline"))
    sample.export_pipeline(untrained_pipeline(), folder)
    return generation.Settings(folder, resolution=32, steps=2, rows_per_part=2)


class Dying(generation.PartGenerator):
    """Dies (SIGKILL) once, with parts done and others not."""

    def __init__(self, settings, placement, flag):
        super().__init__(settings, placement)
        self.flag = flag

    def __call__(self, part):
        if part["first"] >= 6:
            once(self.flag, die)
        return super().__call__(part)


@slow
def test_a_sweep_survives_a_killed_actor(settings, tmp_path, monkeypatch):
    """The same scores as those computed in this process from pictures that are made one after the other."""
    clip, loaded = scores.CLIP(), generation.load_pipeline(settings.pipeline)
    real = clip.images([np.asarray(captioned_shapes.draw_sample(number)[0]) for number in range(50)])
    monkeypatch.setattr(generation, "PartGenerator", dying(str(tmp_path / "killed")))
    table = generation.guidance_sweep(PROMPTS, str(tmp_path / "sweep"), settings, [1.0, 3.0], TWO, real=real)
    assert (tmp_path / "killed").exists()
    for row in table.itertuples():
        made = clip.images(sample.generate(loaded, PROMPTS, resolution=32, steps=2, guidance_scale=row.guidance_scale))
        assert row.clip_score == pytest.approx(scores.clip_score(made, clip.texts(PROMPTS)), abs=0.2)
        assert row.cmmd == pytest.approx(scores.cmmd(made, real), rel=0.02)


def dying(flag):
    return type("Dying", (Dying,), {"__init__": lambda self, *given: Dying.__init__(self, *given, flag)})
