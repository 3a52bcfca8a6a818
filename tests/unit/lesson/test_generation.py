"""Pictures of many prompts: what is planned, what one actor makes of a part, and what is read back. No Ray."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from helpers import storage
from helpers.lesson import generation
from helpers.lesson.generation import load_pipeline
from helpers.model.denoisers import build_denoiser
from helpers.production.extras import scores
from helpers.sample import export_pipeline, generate
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


def written(job, number):
    return pq.read_table(job.part(number)["file"])


def test_30000_prompts_killed_half_way_leave_only_what_is_missing(tmp_path):
    prompts = [f"prompt {number}" for number in range(30_000)]
    settings = generation.Settings(f"hub/id@{0:040}", resolution=512)
    job = generation.GenerationJob(prompts, tmp_path, settings)
    parts = [job.part(number) for number in job.pending()]
    assert len(parts) == 235 and [text for part in parts for text in part["prompts"]] == prompts
    for number in range(0, 235, 2):  # actors finish in no order
        storage.write_bytes(parts[number]["file"], b"")
    storage.write_bytes(parts[1]["file"] + ".0123.part", b"")  # of a write that was killed
    left = generation.GenerationJob(prompts, tmp_path, settings).pending()
    assert left == list(range(1, 235, 2))


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


def test_a_retrained_pipeline_in_the_same_folder_is_noticed(pipeline, tmp_path):
    storage.copy_folder(pipeline, tmp_path)
    assert generation.fingerprint(str(tmp_path)) == generation.fingerprint(pipeline)
    build_denoiser("tiny", seed=1).save_pretrained(tmp_path / "unet")
    assert generation.fingerprint(str(tmp_path)) != generation.fingerprint(pipeline)
    assert generation.fingerprint("hub/id@revision") is None


def test_pictures_do_not_depend_on_parts_or_batches(tmp_path, settings, pipeline):
    """Picture i is that of prompt i and seed + i; its embeddings are those of the stored picture and its prompt."""
    loaded = load_pipeline(pipeline)
    straight = generate(loaded, PROMPTS, resolution=32, seed=7, steps=2)
    job = generation.GenerationJob(PROMPTS, tmp_path, settings)
    actor = generation.PartGenerator(settings, generation.Placement(batch_size=3))
    for number in job.pending():
        assert actor(job.part(number)) == {"pictures": len(job.part(number)["prompts"])}
    table = pq.read_table(tmp_path / "parts")
    assert table["index"].to_pylist() == list(range(6)) and table["prompt"].to_pylist() == PROMPTS
    stored = [np.asarray(Image.open(io.BytesIO(data))) for data in table["picture"].to_pylist()]
    for picture, expected in zip(stored, straight, strict=True):
        assert np.abs(picture.astype(int) - expected).max() <= 1  # sums in another order
    clip = scores.CLIP()
    for column, expected in (("image_embedding", clip.images(stored)), ("text_embedding", clip.texts(PROMPTS))):
        found = generation.schema.from_binary(table[column], (-1,), np.float32)[0]
        assert found == pytest.approx(expected, abs=1e-5)


def test_scores_are_read_from_all_parts(tmp_path):
    """Without the images: the parts of this test have none."""
    random, n = np.random.default_rng(0), 40
    made = {name: random.normal(size=(n, 3)).astype(np.float32) for name in ("image_embedding", "text_embedding")}
    real = random.normal(size=(n, 3))
    storage.write_json(f"{tmp_path}/job.json", {"prompts": n, "rows_per_part": 25})
    for number, rows in enumerate((slice(0, 25), slice(25, n))):
        columns = {name: generation.schema.to_binary(v[rows], dtype=np.float32) for name, v in made.items()}
        (tmp_path / "parts").mkdir(exist_ok=True)
        pq.write_table(generation.pa.table(columns), tmp_path / "parts" / generation.part_name(number))
    clip_score = scores.clip_score(made["image_embedding"], made["text_embedding"])
    cmmd = scores.cmmd(made["image_embedding"], real)
    assert generation.score(str(tmp_path), real) == {"pictures": n, "clip_score": clip_score, "cmmd": cmmd}
    (tmp_path / "parts" / generation.part_name(0)).unlink()
    with pytest.raises(ValueError, match="lacks parts, it has 1"):
        generation.score(str(tmp_path))
