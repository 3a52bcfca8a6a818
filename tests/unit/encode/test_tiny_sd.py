import json

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


def test_other_pictures_keep_their_colours(vae):
    pixels = build_tiny_sd.draw_textures(50, seed=12345)
    with torch.no_grad():
        back = build_tiny_sd.reconstruct(vae, pixels)
    assert -10 * torch.log10(((back.float() - pixels.float()) / 255).square().mean()) >= 20


def test_scaled_latents_have_unit_variance(vae):
    pixels, _ = build_tiny_sd.draw_shapes(300, 77, 0.5, "all")
    with torch.no_grad():
        latents = vae.encode(pixels.float() / 127.5 - 1).latent_dist.sample(torch.Generator().manual_seed(0))
    assert (latents * vae.config.scaling_factor).std().item() == pytest.approx(1, abs=0.03)


@pytest.mark.slow
def test_the_text_encoder_separates_every_attribute(text_encoder, tokenizer):
    separation = build_tiny_sd.attribute_separation(text_encoder, tokenizer)
    assert set(build_tiny_sd.ATTRIBUTES) < set(separation)
    assert min(separation.values()) >= 0.95, separation


def test_the_end_token_is_found_where_the_tokenizer_puts_it(text_encoder, tokenizer):
    config = text_encoder.config
    assert config.vocab_size == len(tokenizer) and config.max_position_embeddings == tokenizer.model_max_length == 24
    ids = build_tiny_sd.tokenize(tokenizer, ["a red circle", ""])
    with torch.no_grad():
        result = text_encoder(input_ids=ids)
    assert torch.equal(result.pooler_output, result.last_hidden_state[torch.arange(2), torch.tensor([4, 1])])


# ---- how it was made


def test_a_tokenizer_built_again_is_the_committed_one(tmp_path):
    build_tiny_sd.save_tokenizer(build_tiny_sd.build_tokenizer(), tmp_path)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (FOLDER / "tokenizer" / name).read_bytes()


@pytest.mark.slow
def test_a_short_build_replaces_the_old_model(tmp_path, monkeypatch):
    def few(draw):
        return lambda num, *arguments: draw(min(num, 40), *arguments)

    for name in ("draw_shapes", "draw_textures", "draw_families"):
        monkeypatch.setattr(build_tiny_sd, name, few(getattr(build_tiny_sd, name)))
    monkeypatch.setattr(build_tiny_sd, "attribute_separation", lambda *_: {"color": 0.5})
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model_index.json", "left over"):
        (model / name).write_text("{}")
    build_tiny_sd.build(model, seed=1, effort=0)
    assert list(tmp_path.iterdir()) == [model]
    assert {p.relative_to(model) for p in model.rglob("*")} == {p.relative_to(FOLDER) for p in FOLDER.rglob("*")}
    assert "--seed 1" in (model / "README.md").read_text()
    assert json.loads((model / "vae" / "config.json").read_text())["scaling_factor"] != 0.18215
