import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPTextModel

from helpers.evaluation import scores
from helpers.lesson import captioned_shapes
from tests.makers import build_tiny_clip, build_tiny_sd

FOLDER = build_tiny_clip.FOLDER
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def clip():
    return scores.CLIP()


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_both_tiny_models_take_at_most_4_2_mb():
    assert size(FOLDER) <= 1_600_000 and size(FOLDER) + size(build_tiny_sd.FOLDER) <= 4_200_000
    kinds = {t.dtype for t in load_file(FOLDER / "model.safetensors").values() if t.is_floating_point()}
    assert kinds == {torch.float16}


def test_transformers_opens_it_with_tiny_sds_text_encoder():
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
def test_the_card_states_the_retrieval_accuracy_of_these_files(clip):
    card = (FOLDER / "README.md").read_text()
    found = build_tiny_clip.retrieval_scores(clip)
    assert {"one object", "two objects", "color", "shape", "size", "position", "relation", "background"} == set(found)
    for name, value in found.items():
        stated = next(line for line in card.splitlines() if f", {name} |" in line).split("|")[2]
        assert float(stated.strip(" %")) == pytest.approx(100 * value, abs=1), name


@pytest.mark.slow
def test_a_build_that_is_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(build_tiny_clip, "NUM_FAMILIES", 40)
    monkeypatch.setattr(build_tiny_clip, "NUM_UNSEEN", 4)
    calls = 1
    while not build_tiny_clip.build(tmp_path / "stopped", seed=1, num_steps=3, seconds=1e-9):
        calls += 1
    assert calls == 3 and build_tiny_clip.build(tmp_path / "straight", seed=1, num_steps=3)
    stopped, straight = (load_file(tmp_path / name / "model.safetensors") for name in ("stopped", "straight"))
    assert stopped.keys() == straight.keys() and all(torch.equal(stopped[name], straight[name]) for name in stopped)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped", "straight"]
    assert {p.name for p in (tmp_path / "straight").iterdir()} == {p.name for p in FOLDER.iterdir()}
