"""Scores against answers known in closed form, other ways to compute them, and a computation by hand."""

import json
import shutil
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel

from helpers.evaluation import scores

pytestmark = pytest.mark.usefixtures("one_thread")


def gaussian(num, mean, deviations, seed=0):
    """Rows whose sample mean is `mean` and whose sample covariance is diag(deviations^2), exactly."""
    rows = np.random.default_rng(seed).normal(size=(num, len(mean)))
    rows -= rows.mean(0)
    rows = rows @ np.linalg.inv(np.linalg.cholesky(np.cov(rows, rowvar=False))).T
    return rows * deviations + mean


# ---- distances


def test_frechet_distance_of_known_gaussians():
    """|difference of means|^2 + sum of (difference of standard deviations)^2, where covariances are diagonal."""
    x, y = gaussian(500, [0, 1, 2], [1, 2, 3]), gaussian(400, [1, 1, 4], [2, 2, 1], seed=1)
    assert scores.frechet_distance(x, y) == pytest.approx((1 + 0 + 4) + (1 + 0 + 4))
    assert scores.frechet_distance(x, x) == pytest.approx(0, abs=1e-8)


def test_frechet_distance_by_the_eigenvalues_of_the_product():
    """tr (S_x S_y)^(1/2) is the sum of the roots of its eigenvalues, for covariances that do not commute."""
    mix = np.random.default_rng(2).normal(size=(2, 8, 8))
    x, y = (gaussian(200, np.zeros(8), np.ones(8), seed) @ mix[seed] + seed for seed in (0, 1))
    product = torch.from_numpy(np.cov(x, rowvar=False) @ np.cov(y, rowvar=False))
    cross = torch.linalg.eigvals(product).sqrt().real.sum().item()
    traces = np.trace(np.cov(x, rowvar=False)) + np.trace(np.cov(y, rowvar=False))
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + traces - 2 * cross
    assert scores.frechet_distance(x, y) == pytest.approx(expected)


def test_cmmd_of_known_gaussians():
    """The expected kernel of two Gaussians of variance v is (1 + 2 v/s^2)^(-d/2), times exp(-|m|^2 / (2 s^2 + 4 v))."""
    width, variance, shift, num = 4, 9.0, 8.0, 1000
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(num, width)) * variance**0.5 for _ in range(2))
    y[:, 0] += shift
    within = (1 + 2 * variance / 100) ** (-width / 2)
    across = within * np.exp(-(shift**2) / (2 * 100 + 4 * variance))
    assert scores.cmmd(x, y) == pytest.approx(1000 * 2 * (within - across), rel=0.1)


def test_cmmd_pair_by_pair():
    x, y = np.random.default_rng(0).normal(size=(2, 5, 3))

    def mean(a, b):
        return np.mean([np.exp(-sum((p - q) ** 2) / 200) for p in a for q in b])

    assert scores.cmmd(x, y[:4]) == pytest.approx(1000 * (mean(x, x) + mean(y[:4], y[:4]) - 2 * mean(x, y[:4])))
    assert scores.cmmd(x, x) == pytest.approx(0, abs=1e-9)


def test_kernel_distance_pair_by_pair():
    x, y = np.random.default_rng(0).normal(size=(2, 6, 3))

    def kernel(p, q):
        return (p @ q / 3 + 1) ** 3

    def within(a):
        return np.mean([kernel(p, q) for i, p in enumerate(a) for j, q in enumerate(a) if i != j])

    across = np.mean([kernel(p, q) for p in x for q in y[:5]])
    assert scores.kernel_distance(x, y[:5]) == pytest.approx(within(x) + within(y[:5]) - 2 * across)


def test_kernel_distance_is_zero_in_the_mean_for_one_distribution():
    """Unbiased: over many draws neither side of zero is preferred, however few pictures there are."""
    random = np.random.default_rng(0)
    found = [scores.kernel_distance(*random.normal(size=(2, 10, 2))) for _ in range(400)]
    assert abs(np.mean(found)) < 3 * np.std(found) / 20 and min(found) < 0


def test_distances_do_not_depend_on_the_blocks_they_are_summed_in(monkeypatch):
    x, y = np.random.default_rng(0).normal(size=(2, 50, 3))
    whole = scores.cmmd(x, y), scores.kernel_distance(x, y)
    monkeypatch.setattr(scores, "ROWS_AT_A_TIME", 7)
    assert (scores.cmmd(x, y), scores.kernel_distance(x, y)) == pytest.approx(whole)


def test_too_few_pictures_are_refused_with_how_many_it_takes():
    features = np.random.default_rng(0).normal(size=(96, 2048))
    with pytest.raises(ValueError, match="at least 2,049 pictures .* singular otherwise; there are 96 and 96"):
        scores.frechet_distance(features, features)
    for distance in (scores.cmmd, scores.kernel_distance):
        with pytest.raises(ValueError, match="at least 2 pictures on each side; there are 96 and 1: give more"):
            distance(features, features[:1])


@pytest.mark.parametrize("distance", [scores.cmmd, scores.kernel_distance, scores.frechet_distance])
def test_features_of_two_networks_are_refused(distance):
    with pytest.raises(ValueError, match=r"shapes are \(9, 3\) and \(9, 2\): make both by the same network"):
        distance(np.ones((9, 3)), np.ones((9, 2)))
    with pytest.raises(ValueError, match="some are NaN"):
        distance(np.full((9, 2), np.nan), np.ones((9, 2)))


def test_clip_score_by_hand():
    """Cosines 1, 0.6 and -1; a negative one counts as 0."""
    pictures, texts = [[1, 0], [0, 2], [1, 0]], [[3, 0], [4, 3], [-1, 0]]
    assert scores.clip_score(pictures, texts) == pytest.approx(100 * (1 + 0.6 + 0) / 3)
    with pytest.raises(ValueError, match="one text embedding a picture"):
        scores.clip_score(pictures, texts[:2])


# ---- CLIP


@pytest.fixture(scope="module")
def clip():
    return scores.CLIP()


def test_embeddings_are_those_of_transformers_own_pipeline(clip):
    """Pictures of another size are resized to the shorter side and cropped; texts end at their end token."""
    picture = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    captions = ["a large red circle at the top on a blue background", "a small white square"]
    side = clip.model.config.vision_config.image_size
    height = 90 * side // 70  # transformers rounds down
    resized = np.asarray(Image.fromarray(picture).resize((side, height), Image.Resampling.BICUBIC))
    top = (height - side) // 2
    pixels = torch.from_numpy(resized[top : top + side].copy()).permute(2, 0, 1)[None] / 127.5 - 1
    whole = [clip.tokenizer(c, return_tensors="pt").input_ids for c in captions]
    with torch.no_grad():
        expected = clip.model.get_image_features(pixels).pooler_output
        texts = torch.cat([clip.model.get_text_features(ids).pooler_output for ids in whole])
    seen, said = clip.images([picture, picture]), clip.texts(captions)
    assert seen.dtype == said.dtype == np.float32 and seen.shape == (2, clip.model.config.projection_dim)
    assert np.linalg.norm(np.concatenate([seen, said]), axis=1) == pytest.approx(1, abs=1e-6)
    assert seen[0] == pytest.approx((expected / expected.norm()).numpy()[0], abs=1e-5)
    assert said == pytest.approx((texts / texts.norm(dim=1, keepdim=True)).numpy(), abs=1e-5)
    assert clip.images([]).shape == clip.texts([]).shape == (0, clip.model.config.projection_dim)


def test_a_text_that_is_too_long_is_cut_at_the_models_length(clip):
    long = "a red circle " * 50
    assert np.isfinite(clip.texts([long])).all() and clip.max_tokens == 24


def copy_of(folder, tmp_path, *without, **config):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in without:
        (tmp_path / name).unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return str(tmp_path)


def test_models_of_other_layouts_are_refused_in_a_sentence(clip, tmp_path):
    folder = clip.model.config.name_or_path
    other = {
        "siglip": copy_of(folder, tmp_path / "siglip", model_type="siglip"),
        "safetensors": copy_of(folder, tmp_path / "weights", "model.safetensors"),
        "preprocessor": copy_of(folder, tmp_path / "processor", "preprocessor_config.json"),
    }
    for what, model in other.items():
        with pytest.raises(ValueError, match=f"is not a CLIP model in transformers layout .*{what}"):
            scores.CLIP(model)
    with pytest.raises(ValueError, match="is not a CLIP model in transformers layout .*config.json"):
        scores.CLIP(str(tmp_path))


def test_weights_without_a_tower_are_refused(clip, tmp_path):
    """transformers would fill it with random numbers, and the scores would mean nothing."""
    folder = copy_of(clip.model.config.name_or_path, tmp_path / "half")
    CLIPModel(CLIPConfig.from_pretrained(folder)).text_model.save_pretrained(tmp_path / "text")
    shutil.copy(tmp_path / "text" / "model.safetensors", tmp_path / "half" / "model.safetensors")
    with pytest.raises(ValueError, match="its weights lack"):
        scores.CLIP(folder)


# ---- Inception


def test_inception_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="not on disk: download https://github.com/toshas"):
        scores.Inception(str(tmp_path / "absent.pth"))
    (tmp_path / "weights.pth").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ImportError, match="pip install torch-fidelity.*CLIP score and CMMD need neither"):
        scores.Inception(str(tmp_path / "weights.pth"))


def test_inceptions_features_are_taken_in_batches(tmp_path, monkeypatch):
    """The package's extractor is called as its release 0.4 wants it: here with a stand-in."""

    class Extractor(torch.nn.Module):
        def __init__(self, name, features_list, feature_extractor_weights_path):
            super().__init__()
            assert features_list == ["2048"] and feature_extractor_weights_path.endswith("weights.pth")

        def forward(self, x):
            assert x.dtype == torch.uint8 and x.shape[1] == 3
            return (x.float().mean((1, 2, 3))[:, None].expand(-1, 2048),)

    module = types.ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    module.FeatureExtractorInceptionV3 = Extractor
    monkeypatch.setitem(sys.modules, "torch_fidelity", types.ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "weights.pth").write_bytes(b"")
    pictures = [np.full((8, 8, 3), value, np.uint8) for value in range(100)]
    found = scores.Inception(str(tmp_path / "weights.pth")).images(pictures)
    assert found.shape == (100, 2048) and found[:, 0].tolist() == list(range(100))
