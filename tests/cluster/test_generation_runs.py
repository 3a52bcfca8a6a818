"""Pictures of many prompts on Ray, with processes that are killed."""

import pathlib
import signal
import sys

import numpy as np
import pytest
import ray
from ray import cloudpickle

from helpers import sampling, unet
from helpers.evaluation import generation, scores
from helpers.lesson import captioned_shapes
from tests.faults import die, once, variants
from tests.processes import run_script

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROMPTS = captioned_shapes.held_out_prompts(16)
TWO = generation.Placement(num_generators=2)


@pytest.fixture(scope="module")
def settings(cluster, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("pipeline"))
    sampling.export_pipeline(sampling.build_pipeline(unet.build_unet("tiny", seed=0), "tiny-sd"), folder)
    return generation.Settings(folder, resolution=32, steps=2, rows_per_part=2)


def changed_at(uri):
    return {path.name: path.stat().st_mtime_ns for path in pathlib.Path(uri, "parts").glob("*.parquet")}


@variants
def test_a_killed_generation_makes_only_what_is_missing(settings, tmp_path):
    """The driver is killed (SIGKILL) after half of the pictures."""
    uri = str(tmp_path / "made")
    code, printed = run_script(f"""
import os, signal, ray
from helpers.evaluation import generation
from helpers.runtime import session

def die_half_way(done, total):
    if done >= total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

session.connect({ray.get_runtime_context().gcs_address!r})
generation.generate({PROMPTS!r}, {uri!r}, generation.{settings!r}, progress=die_half_way)
""")
    assert code == -signal.SIGKILL, printed[-3000:]
    # All CPUs at once can only be had when the killed driver's actor is gone.
    assert ray.get(ray.remote(num_cpus=6)(lambda: True).remote(), timeout=300)
    before, reported = changed_at(uri), []
    assert 4 <= len(before) < 8
    missing = len(PROMPTS) - 2 * len(before)
    assert generation.generate(PROMPTS, uri, settings, progress=lambda *at: reported.append(at)) == missing
    assert reported[-1] == (16, 16) and reported[0][0] == 16 - missing + 2
    after = changed_at(uri)
    assert len(after) == 8 and {name: after[name] for name in before} == before
    assert generation.score(uri)["pictures"] == 16
    assert generation.generate(PROMPTS, uri, settings) == 0


class Dying(generation.PartGenerator):
    """Dies (SIGKILL) once, with a part half done."""

    def __init__(self, settings, placement, flag):
        super().__init__(settings, placement)
        self.flag = flag

    def make(self, file, first, prompts, guidance_scale):
        if first >= 6:
            once(self.flag, die)
        return super().make(file, first, prompts, guidance_scale)


@variants
def test_a_sweep_survives_a_killed_actor(settings, tmp_path, monkeypatch):
    """The same scores as those computed in this process from pictures that are made one after the other."""
    clip, loaded = scores.CLIP(), generation.load_pipeline(settings.pipeline)
    real = clip.images([np.asarray(captioned_shapes.sample(number)[0]) for number in range(50)])
    monkeypatch.setattr(generation, "PartGenerator", dying(str(tmp_path / "killed")))
    table = generation.guidance_sweep(PROMPTS, str(tmp_path / "sweep"), settings, [1.0, 3.0], TWO, real=real)
    assert (tmp_path / "killed").exists()
    for row in table.itertuples():
        made = clip.images(
            sampling.generate(loaded, PROMPTS, resolution=32, steps=2, guidance_scale=row.guidance_scale)
        )
        assert row.clip_score == pytest.approx(scores.clip_score(made, clip.texts(PROMPTS)), abs=0.2)
        assert row.cmmd == pytest.approx(scores.cmmd(made, real), rel=0.02)


def dying(flag):
    return type("Dying", (Dying,), {"__init__": lambda self, *given: Dying.__init__(self, *given, flag)})
