"""Pictures of many prompts: what is planned, what one actor makes of a part, and what is read back. No Ray."""

import pytest

from helpers import storage
from helpers.lesson import generation
from helpers.sample import export_pipeline
from tests.pipelines import untrained_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [f"a {size} {color} circle" for size in ("small", "large") for color in ("red", "green", "blue")]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """An untrained pipeline, as `pipeline.export_pipeline` leaves it."""
    folder = str(tmp_path_factory.mktemp("pipeline"))
    return export_pipeline(untrained_pipeline(), folder)


@pytest.fixture
def settings(pipeline):
    return generation.Settings(pipeline, resolution=32, steps=2, seed=7, rows_per_part=4)


def test_a_folder_of_other_pictures_is_refused(tmp_path, settings, pipeline):
    job = generation.GenerationJob(PROMPTS, tmp_path, settings)
    storage.write_json(f"{tmp_path}/job.json", job.values)
    assert generation.GenerationJob(list(PROMPTS), tmp_path, settings).pending() == [0, 1]
    for name, prompts, other in [
        ("guidance_scale=2.0, not 5.0", PROMPTS, generation.dataclasses.replace(settings, guidance_scale=5.0)),
        ("prompts=6, not 5", PROMPTS[:5], settings),
        ("prompts_crc32=", PROMPTS[::-1], settings),
    ]:
        with pytest.raises(ValueError, match=name):
            generation.GenerationJob(prompts, tmp_path, other)
    with pytest.raises(ValueError, match="There are no prompts"):
        generation.GenerationJob([], tmp_path, settings)
