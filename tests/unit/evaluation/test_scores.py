"""Scores against answers known in closed form, other ways to compute them, and a computation by hand."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from helpers.production.extras import scores

pytestmark = pytest.mark.usefixtures("one_thread")


def test_cmmd_pair_by_pair(monkeypatch):
    monkeypatch.setattr(scores, "ROWS_AT_A_TIME", 2)
    x, y = np.random.default_rng(0).normal(size=(2, 5, 3))

    def mean(a, b):
        return np.mean([np.exp(-sum((p - q) ** 2) / 200) for p in a for q in b])

    assert scores.cmmd(x, y[:4]) == pytest.approx(1000 * (mean(x, x) + mean(y[:4], y[:4]) - 2 * mean(x, y[:4])))
    assert scores.cmmd(x, x) == pytest.approx(0, abs=1e-9)


def test_clip_score_by_hand():
    """Cosines 1, 0.6 and -1; a negative one counts as 0."""
    images, texts = [[1, 0], [0, 2], [1, 0]], [[3, 0], [4, 3], [-1, 0]]
    assert scores.clip_score(images, texts) == pytest.approx(100 * (1 + 0.6 + 0) / 3)


# ---- CLIP


@pytest.fixture(scope="module")
def clip():
    return scores.CLIP()


def test_embeddings_are_those_of_transformers_own_pipeline(clip):
    """Images of another size are resized to the shorter side and cropped; texts end at their end token."""
    image = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    captions = ["a large red circle at the top on a blue background", "a small white square"]
    side = clip.model.config.vision_config.image_size
    height = 90 * side // 70  # transformers rounds down
    resized = np.asarray(Image.fromarray(image).resize((side, height), Image.Resampling.BICUBIC))
    top = (height - side) // 2
    pixels = torch.from_numpy(resized[top : top + side].copy()).permute(2, 0, 1)[None] / 127.5 - 1
    whole = [clip.tokenizer(c, return_tensors="pt").input_ids for c in captions]
    with torch.no_grad():
        expected = clip.model.get_image_features(pixels).pooler_output
        texts = torch.cat([clip.model.get_text_features(ids).pooler_output for ids in whole])
    seen, said = clip.images([image, image]), clip.texts(captions)
    assert seen.dtype == said.dtype == np.float32 and seen.shape == (2, clip.model.config.projection_dim)
    assert np.linalg.norm(np.concatenate([seen, said]), axis=1) == pytest.approx(1, abs=1e-6)
    assert seen[0] == pytest.approx((expected / expected.norm()).numpy()[0], abs=1e-5)
    assert said == pytest.approx((texts / texts.norm(dim=1, keepdim=True)).numpy(), abs=1e-5)
    assert clip.images([]).shape == clip.texts([]).shape == (0, clip.model.config.projection_dim)


def copy_of(folder, tmp_path, *without):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in without:
        (tmp_path / name).unlink()
    return str(tmp_path)


def test_models_of_other_layouts_are_refused_in_a_sentence(clip, tmp_path):
    folder = clip.model.config.name_or_path
    other = {
        "safetensors": copy_of(folder, tmp_path / "weights", "model.safetensors"),
        "preprocessor": copy_of(folder, tmp_path / "processor", "preprocessor_config.json"),
    }
    for what, model in other.items():
        with pytest.raises(ValueError, match=f"is not a CLIP model in transformers layout .*{what}"):
            scores.CLIP(model)
    with pytest.raises(ValueError, match="is not a CLIP model in transformers layout"):
        scores.CLIP(str(tmp_path))


def test_weights_without_a_tower_are_refused(clip, tmp_path):
    """transformers would fill it with random numbers, and the scores would mean nothing."""
    folder = copy_of(clip.model.config.name_or_path, tmp_path / "half")
    CLIPModel(CLIPConfig.from_pretrained(folder)).text_model.save_pretrained(tmp_path / "text")
    shutil.copy(tmp_path / "text" / "model.safetensors", tmp_path / "half" / "model.safetensors")
    with pytest.raises(ValueError, match="its weights lack"):
        scores.CLIP(folder)
