import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPTextModel

from helpers.lesson import captioned_shapes
from helpers.production.extras import scores
from tests.makers import build_tiny_clip, build_tiny_sd

FOLDER = build_tiny_clip.FOLDER
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def clip():
    return scores.CLIP()


def test_transformers_opens_its_1_6_mb_with_tiny_sds_text_encoder():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 1_600_000
    model, report = CLIPModel.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    text = CLIPTextModel.from_pretrained(build_tiny_sd.FOLDER / "text_encoder", dtype=torch.float32)
    for name, weight in text.state_dict().items():
        assert torch.equal(model.text_model.state_dict()[name], weight), name


def test_the_right_caption_is_nearest_among_held_out_ones(clip):
    """Pictures and captions that were not trained on."""
    prompts = captioned_shapes.held_out_prompts(100)
    pictures = [
        np.asarray(captioned_shapes.draw_scene(captioned_shapes.parse(p), [9, i])) for i, p in enumerate(prompts)
    ]
    similar = clip.images(pictures) @ clip.texts(prompts).T
    assert (similar.argmax(1) == np.arange(100)).mean() >= 0.9
    assert np.diag(similar).mean() > similar.mean() + 0.3


def test_the_clip_score_falls_with_the_share_of_wrong_pictures(clip):
    """As agreement does, where each wrong picture differs from its prompt in a single attribute."""
    rng, prompts = np.random.default_rng(0), captioned_shapes.held_out_prompts(40)
    scenes = [captioned_shapes.parse(prompt) for prompt in prompts]
    wrong = [build_tiny_sd.change_one_attribute(scene, rng) for scene in scenes]
    right, other = (
        [np.asarray(captioned_shapes.draw_scene(s, i)) for i, s in enumerate(kind)] for kind in (scenes, wrong)
    )
    texts, found = clip.texts(prompts), []
    for number in range(0, 41, 8):
        pictures = other[:number] + right[number:]
        score = scores.clip_score(clip.images(pictures), texts)
        found.append((captioned_shapes.agreement(pictures, prompts)["all"], score))
    assert found == sorted(found, reverse=True) and len(set(found)) == 6


@pytest.mark.slow
def test_a_short_build_gives_the_same_weights_again(tmp_path, monkeypatch):
    monkeypatch.setattr(build_tiny_clip, "NUM_FAMILIES", 40)
    monkeypatch.setattr(build_tiny_clip, "NUM_UNSEEN", 4)
    for name in ("one", "other"):
        build_tiny_clip.build(tmp_path / name, seed=1, num_steps=3)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert {weight.dtype for weight in one.values() if weight.is_floating_point()} == {torch.float16}
    assert {p.name for p in (tmp_path / "one").iterdir()} == {p.name for p in FOLDER.iterdir()}
