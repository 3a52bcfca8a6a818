import numpy as np
import pytest
import torch
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
