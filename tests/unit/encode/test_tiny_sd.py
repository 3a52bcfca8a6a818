import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextModel, CLIPTokenizer

from tests.makers import build_tiny_sd

FOLDER = build_tiny_sd.FOLDER


@pytest.fixture(scope="module")
def vae():
    return AutoencoderKL.from_pretrained(FOLDER / "vae", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return CLIPTokenizer.from_pretrained(FOLDER / "tokenizer")


@pytest.fixture(scope="module")
def text_encoder():
    return CLIPTextModel.from_pretrained(FOLDER / "text_encoder", dtype=torch.float32)


def test_reconstructions_have_33_db_and_readable_shapes_as_the_card_says(vae):
    found = build_tiny_sd.reconstruction_scores(vae, num=100)
    least = {"psnr_one_64": 33, "psnr_two_64": 31, "psnr_one_32": 27, "detector_one_64": 0.95, "detector_two_64": 0.95}
    assert all(found[name] >= value for name, value in least.items()), found
    stated = next(line for line in (FOLDER / "README.md").read_text().splitlines() if "PSNR, one object, 64x64" in line)
    assert float(stated.split()[-3]) == pytest.approx(found["psnr_one_64"], abs=0.5)


@pytest.mark.slow
def test_the_text_encoder_separates_every_attribute(text_encoder, tokenizer):
    separation = build_tiny_sd.attribute_separation(text_encoder, tokenizer)
    assert set(build_tiny_sd.ATTRIBUTES) < set(separation)
    assert min(separation.values()) >= 0.95, separation


# ---- how it was made


def test_a_tokenizer_built_again_is_the_committed_one(tmp_path):
    build_tiny_sd.save_tokenizer(build_tiny_sd.build_tokenizer(), tmp_path)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (FOLDER / "tokenizer" / name).read_bytes()
