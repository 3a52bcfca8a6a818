"""The features of an image encoder of each class, and what is refused before anything starts."""

import json

import numpy as np
import pytest
import torch
import transformers

from helpers.config import PreprocessingConfig
from helpers.encode.models import Unsupported
from helpers.production import features
from helpers.production.image_encoder import ImageEncoder

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WIDE = {**SMALL, "intermediate_size": 64}
NETWORKS = {
    "CLIPVisionModel": WIDE,
    "SiglipVisionModel": WIDE,
    "Dinov2Model": SMALL,
    "Dinov2WithRegistersModel": {**SMALL, "num_register_tokens": 3},
    "DINOv3ViTModel": {**WIDE, "num_register_tokens": 4},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_class_gives_unit_vectors_that_follow_the_image(name, tmp_path):
    """They say where in the image something is, and neither class tokens nor registers are among them."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**NETWORKS[name])).save_pretrained(tmp_path)
    images = ImageEncoder(str(tmp_path))
    pixels = np.full((2, 64, 64, 3), 128, np.uint8)
    pixels[1, 48:, :16] = 255
    values = images.encode(pixels, (4, 4))
    assert values.shape == (2, 32, 4, 4) and values.dtype == np.float16
    np.testing.assert_allclose(np.linalg.norm(values.astype(float), axis=1), 1, atol=2e-3)
    changed = np.abs(values[1] - values[0]).sum(axis=0)
    assert np.unravel_index(changed.argmax(), changed.shape) == (3, 0)
    assert images.encode(pixels[:, :32], (2, 4)).shape == (2, 32, 2, 4)
    assert images.encode(pixels, (8, 8)).shape == (2, 32, 8, 8)  # finer than its patches


def test_the_image_tower_of_the_clip_in_helpers_is_one():
    assert ImageEncoder("tiny-clip").encode(np.zeros((1, 64, 64, 3), np.uint8), (4, 4)).shape == (1, 96, 4, 4)


def test_an_image_encoder_of_another_class_is_refused_before_anything_is_encoded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ResNetModel"]}))
    config = PreprocessingConfig(image_encoder_model=str(tmp_path))
    with pytest.raises(Unsupported, match=r"image_encoder_model=.*of class ResNetModel.*CLIPModel.*give another model"):
        features.check_early(config)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"image_encoder_model=.*holds no model in transformers layout"):
        features.check_early(PreprocessingConfig(image_encoder_model=str(tmp_path)))


def test_sizes_without_a_whole_grid_are_refused():
    with pytest.raises(Unsupported, match=r"40 x 40 pixels .* multiples of 16"):
        features.check_early(PreprocessingConfig(image_encoder_model="tiny-clip", resolutions=[40]))
