import dataclasses
import json

import pytest
import torch
from diffusers import UNet2DConditionModel

from helpers import parallel
from helpers.config import TrainingConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(batch=2):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 4, 8, 8, generator=generator),
        torch.linspace(3, 900, batch).long(),
        torch.randn(batch, 6, 128, generator=generator),
    )


# ---- presets


def test_the_tiny_unet_has_a_million_parameters():
    unet = parallel.build_unet("tiny")
    assert sum(parameter.numel() for parameter in unet.parameters()) == pytest.approx(1.03e6, rel=0.01)
    assert unet(*inputs(), return_dict=False)[0].shape == (2, 4, 8, 8)


@pytest.mark.parametrize("size, teraflops", [(32, 0.181), (64, 0.804)])
def test_sd2_base_has_the_published_size_and_cost(size, teraflops):
    """Stable Diffusion 2 at 256 and at 512 pixels, counted without its memory."""
    blocks = parallel.measure("sd2-base", (4, size, size), (77, 1024))
    assert blocks["parameters"].sum() == 865_910_724
    assert blocks["gflops"].sum() / 1000 == pytest.approx(teraflops, abs=0.0006)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_blocks_are_the_whole_unet_in_the_order_of_its_forward_pass(name):
    config = parallel.load_unet_config(name)
    blocks = parallel.measure(name, (4, 16, 16), (6, config["cross_attention_dim"]))
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    assert blocks["parameters"].sum() == sum(parameter.numel() for parameter in unet.parameters())
    called, handles = [], []
    unet = parallel.build_unet("tiny")
    names = parallel.blocks(unet)
    for block in names:
        module = unet.get_submodule(block)
        handles.append(module.register_forward_hook(lambda *_, block=block: called.append(block)))
    unet(*inputs())
    assert called == names


def test_twice_the_samples_cost_what_one_costs_twice():
    one, four = (parallel.measure("tiny", (4, size, size), (6, 128)).set_index("block")["gflops"] for size in (8, 16))
    assert four["conv_in"] == pytest.approx(4 * one["conv_in"])


def test_presets_cannot_be_spoilt():
    parallel.load_unet_config("small")["in_channels"] = 9
    assert parallel.load_unet_config("small")["in_channels"] == 4


def test_a_unet_may_come_from_a_config_json(tmp_path):
    unet = parallel.build_unet("tiny")
    unet.save_config(tmp_path)
    again = parallel.build_unet(str(tmp_path / "config.json"))
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in unet.named_parameters()
    }


def test_an_unknown_unet_is_one_sentence(tmp_path):
    for name in ("huge", str(tmp_path), str(tmp_path / "none.json")):
        with pytest.raises(
            ValueError, match="^unet_config='.*' is unknown: choose 'tiny', 'small', 'sd2-base', or the path"
        ):
            parallel.load_unet_config(name)


@pytest.mark.parametrize("text", ["not json", json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4}), "[]"])
def test_a_file_that_configures_something_else_is_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="^unet_config='.*config.json' configures no UNet2DConditionModel: give"):
        parallel.load_unet_config(str(tmp_path / "config.json"))


# ---- weights


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    torch.manual_seed(1)
    first = parallel.build_unet("tiny", seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = parallel.build_unet("tiny", seed=3).state_dict(), parallel.build_unet("tiny", seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


# ---- do latents and U-Net fit


def message(manifest, **values):
    config = TrainingConfig(latents_uri="/data/latents", **values)
    with pytest.raises(ValueError) as error:
        parallel.check_latents(manifest, config, "/data/latents")
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and "/data/latents" in text or "resolution=" in text
    return text


def test_latents_that_fit_pass(build_manifest):
    for resolution in (32, 64):
        parallel.check_latents(build_manifest(), TrainingConfig(resolution=resolution), "/data")


def test_a_resolution_that_was_not_encoded_is_named_with_those_that_were(build_manifest):
    assert message(build_manifest(), resolution=128).startswith(
        "resolution=128 is not in /data/latents, which holds 32, 64: choose one of these"
    )


def test_captions_of_another_width_are_named_with_both_widths_and_the_encoder(build_manifest):
    text = message(build_manifest(), unet_config="sd2-base")
    assert "unet_config='sd2-base' takes captions 1024 wide" in text
    assert "holds captions 128 wide (encoder_model='made-up')" in text


def test_latents_of_another_number_of_channels_are_named(build_manifest):
    shapes = {**build_manifest().shapes, "image_latents_64": [2, 16, 8, 8]}
    text = message(build_manifest(shapes=shapes))
    assert text.startswith("unet_config='tiny' takes 4 latent channels, and /data/latents holds 16")


def test_latents_that_the_unet_cannot_halve_are_named_with_a_size_that_it_can(build_manifest):
    manifest = build_manifest()
    shapes = {**manifest.shapes, "image_latents_72": [2, 4, 9, 9]}
    manifest = dataclasses.replace(manifest, shapes=shapes, resolutions=[72])
    assert message(manifest, resolution=72) == (
        "resolution=72 makes latents of 9 x 9, which unet_config='tiny' cannot halve 1 times: use a multiple of 16."
    )


# ---- compiled, replicated, in bf16


def gradients(unet):
    prediction = unet(*inputs(), return_dict=False)[0]
    prediction.square().mean().backward()
    return prediction.detach(), {name: parameter.grad for name, parameter in unet.named_parameters()}


def test_without_a_compiler_compiling_is_skipped_and_said(monkeypatch, capsys):
    monkeypatch.setattr(parallel.shutil, "which", lambda name: None)
    unet = parallel.build_unet("tiny")
    calls = [block._compiled_call_impl for block in parallel.compile_blocks(unet).down_blocks]
    assert calls == [None, None] and "compile_unet=True is skipped: there is no C++ compiler" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not parallel.has_compiler(), reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_give_the_gradients_of_eager_ones_under_the_same_names():
    """Compiled as a whole, this U-Net gave other gradients with torch 2.13 on a CPU."""
    eager, compiled = parallel.build_unet("tiny"), parallel.compile_blocks(parallel.build_unet("tiny"))
    expected_output, expected = gradients(eager)
    output, found = gradients(compiled)
    assert all(block._compiled_call_impl for block in [*compiled.down_blocks, compiled.mid_block, *compiled.up_blocks])
    assert list(found) == list(expected) and (output - expected_output).abs().max() < 1e-5
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name


def test_alone_a_unet_is_neither_wrapped_nor_held_back():
    unet = parallel.build_unet("tiny")
    assert all(parallel.parallelize(unet, strategy) is unet for strategy in ("ddp", "fsdp", "fsdp-full", "hsdp"))
    with parallel.synchronise_gradients(unet, last=False):
        gradients(unet)
    assert all(parameter.grad is not None for parameter in unet.parameters())


def test_bf16_computes_in_half_precision_and_keeps_fp32_weights():
    layer = torch.nn.Linear(8, 8)
    values = torch.randn(4, 8)
    for device in ("cpu", torch.device("cpu")):
        with parallel.autocast("fp32", device):
            exact = layer(values)
        with parallel.autocast("bf16", device):
            half = layer(values)
            half.square().mean().backward()
        assert exact.dtype == layer.weight.grad.dtype == layer.weight.dtype == torch.float32
        assert half.dtype == torch.bfloat16 and 0 < (half - exact).abs().max() < 0.1
