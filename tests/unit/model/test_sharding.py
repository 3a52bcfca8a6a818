import json

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.config.notebook import TrainingConfig
from helpers.model import denoisers, sharding
from helpers.model.denoisers import build_denoiser, load_denoiser_config
from helpers.model.sharding import (
    autocast,
    build_model,
    compile_blocks,
    has_compiler,
    shard_size,
    synchronise_gradients,
)
from helpers.train import setup
from helpers.train.profiling import count_flops

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(batch=2, size=8):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 4, size, size, generator=generator),
        torch.linspace(3, 900, batch).long(),
        torch.randn(batch, 6, 128, generator=generator),
    )


# ---- presets


@pytest.mark.parametrize(
    ("name", "size", "parameters", "gigaflops"),
    [
        ("tiny", 8, 852_580, 0.044),
        ("small", 8, 94_398_084, 2.77),
        ("sd2-base", 32, 865_910_724, 181),
        ("sd2-base", 64, 865_910_724, 804),
    ],
)
def test_presets_have_the_published_size_and_cost(name, size, parameters, gigaflops):
    """Of Stable Diffusion 2 at 256 and at 512 pixels; counted without memory, by the blocks of the forward pass."""
    blocks = count_flops(name, (4, size, size), (77, load_denoiser_config(name)["cross_attention_dim"]))
    assert blocks["parameters"].sum() == parameters
    assert blocks["gflops"].sum() == pytest.approx(gigaflops, rel=0.01)


def test_a_unet_may_come_from_a_config_json(tmp_path):
    denoiser = build_denoiser("tiny")
    denoiser.save_config(tmp_path)
    again = build_denoiser(str(tmp_path / "config.json"))
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in denoiser.named_parameters()
    }


def test_an_unknown_unet_is_refused_in_one_sentence(tmp_path):
    for name in ("huge", str(tmp_path), str(tmp_path / "none.json")):
        with pytest.raises(
            ValueError, match="^unet_config='.*' is unknown: choose 'tiny', .*'transformer-600m', or the path"
        ):
            load_denoiser_config(name)


@pytest.mark.parametrize("text", ["not json", json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4}), "[]"])
def test_a_config_of_another_model_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="^unet_config='.*config.json' configures (no model|AutoencoderKL): give"):
        load_denoiser_config(str(tmp_path / "config.json"))


# ---- weights


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(1)
    first = build_denoiser("tiny", seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = build_denoiser("tiny", seed=3).state_dict(), build_denoiser("tiny", seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


# ---- latents that do not fit the U-Net


@pytest.mark.parametrize(
    ("shapes", "values", "message"),
    [
        ({}, {"resolution": 128}, "resolution=128 is not in /data, which holds 32, 64: choose one of these"),
        (
            {},
            {"unet_config": "sd2-base"},
            "unet_config='sd2-base' takes captions 1024 wide, and /data holds captions 128 wide .encoder_model=",
        ),
        ({"image_latents_64": (2, 16, 8, 8)}, {}, "unet_config='tiny' takes 4 latent channels, and /data holds 16"),
        (
            {"image_latents_72": (2, 4, 9, 9)},
            {"resolution": 72},
            "resolution=72 makes latents of 9 x 9, and unet_config='tiny' takes sides that are multiples of 2: encode "
            "the data with resolutions and a size_multiple that are multiples of 16",
        ),
    ],
)
def test_latents_that_do_not_fit_are_refused_in_one_sentence(build_manifest, shapes, values, message):
    manifest = build_manifest(shapes={**build_manifest().shapes, **shapes}, resolutions=[32, 64, 72][: 2 + len(shapes)])
    with pytest.raises(ValueError, match=rf"^{message}[^\n]*\.$"):
        setup.check_latents(manifest, TrainingConfig(latents_uri="/data", **values), "/data")


# ---- compiled, replicated, in bf16


def gradients(denoiser):
    denoiser.zero_grad()
    prediction = denoiser(*inputs(), return_dict=False)[0]
    prediction.square().mean().backward()
    return prediction.detach(), {name: parameter.grad for name, parameter in denoiser.named_parameters()}


def assert_same_gradients(denoiser, eager):
    expected_output, expected = gradients(eager)
    output, found = gradients(denoiser)
    assert list(found) == list(expected) and (output - expected_output).abs().max() < 1e-5
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name


def test_without_a_compiler_compiling_is_skipped_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    calls = [block._compiled_call_impl for block in compile_blocks(build_denoiser("tiny")).down_blocks]
    assert calls == [None, None] and "compile_unet=True is skipped: there is no C++ compiler" in capsys.readouterr().out


@pytest.fixture
def graphs(monkeypatch):
    """What TorchDynamo captures, in place of compiling it: the U-Net's own blocks with Inductor take minutes."""
    captured, compile_module = [], torch.nn.Module.compile

    def record(graph, arguments):
        sizes = [size for argument in arguments for size in getattr(argument, "shape", [argument])]
        captured.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph.forward

    def compile_by_recording(module, **options):
        compile_module(module, backend=record, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_recording)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield captured
    torch.compiler.reset()


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")


@pytest.fixture
def torch_2_11(graphs, monkeypatch):
    """`torch.compile` without the options that came after PyTorch 2.11, which the GPU images of today have."""
    compile_module = torch.nn.Module.compile

    def compile_by_old_options(module, *, dynamic=None):
        compile_module(module, dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_old_options)
    return graphs


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("version", ["graphs", "torch_2_11"])
def test_every_block_is_compiled_for_every_size_by_itself(version, request, monkeypatch):
    """And not for symbolic sizes, to which TorchDynamo turns when sizes vary."""
    graphs = request.getfixturevalue(version)

    class Block(torch.nn.Conv2d):
        def forward(self, values):
            return super().forward(values).relu()

    blocks = [Block(width, width, 3, padding=1) for width in (2, 3, 4, 5)]
    monkeypatch.setattr(denoisers, "blocks", lambda denoiser: blocks)
    compile_blocks(torch.nn.Sequential(*blocks))
    for number, size in enumerate(((4, 4), (8, 8), (8, 16), (32, 16)), start=1):  # twice as many as the default limit
        for block in blocks:
            values = torch.randn(2, block.in_channels, *size)
            assert torch.equal(block(values), block.forward(values))
        assert len(graphs) == 4 * number and not any(graphs)
    blocks[0](torch.randn(2, 2, 8, 8))
    assert len(graphs) == 16


@needs_compiler
def test_ddp_does_not_cut_compiled_blocks(group_of_one, graphs, monkeypatch):
    """DDP's optimizer for TorchDynamo would, at every bucket: here one for each of a block's three layers."""

    class Block(torch.nn.Sequential):
        def forward(self, values):
            for layer in self:
                values = layer(values).relu()
            return values

    blocks = [Block(*(torch.nn.Linear(600, 600) for _ in range(3))) for _ in range(2)]
    monkeypatch.setattr(denoisers, "blocks", lambda denoiser: blocks)
    compile_blocks(torch.nn.Sequential(*blocks))
    model = DistributedDataParallel(torch.nn.Sequential(*blocks), bucket_cap_mb=1)
    model(torch.randn(2, 600)).sum().backward()
    assert len(graphs) == len(blocks)


@pytest.mark.parametrize(
    ("nodes", "size", "told"),
    [
        ((2, 2), 2, False),
        ((3,), 3, False),
        ((1, 1), 1, False),
        ((4, 2), 2, True),
        ((8, 8, 4), 4, True),
        ((8, 8, 7), 23, True),  # all, as under "fsdp": no number but one divides both
        ((2, 1), 3, True),
    ],
)
def test_hsdp_shards_on_nodes_of_any_sizes_and_says_what_it_shards_over(monkeypatch, capsys, nodes, size, told):
    here = [number for number in nodes for _ in range(number)]  # of each rank
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here[0]))
    monkeypatch.setattr(sharding, "world_size", lambda: len(here))
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda sizes, _: [one.fill_(n) for one, n in zip(sizes, here, strict=True)]
    )
    assert shard_size("cpu") == size
    starts = [sum(nodes[:number]) for number in range(len(nodes))]
    assert size == len(here) or all(start % size == 0 for start in starts)  # so no shard reaches over two nodes
    sentence = (
        f"strategy='hsdp' shards over groups of {size} ranks, as the nodes have {list(nodes)}: give each as many."
    )
    assert capsys.readouterr().out.startswith(sentence) == told


def test_one_process_trains_an_unwrapped_unet():
    for strategy in ("ddp", "fsdp", "fsdp-full", "hsdp"):
        denoiser, model = build_model("tiny", strategy=strategy)
        assert model is denoiser
    with synchronise_gradients(denoiser, last=False, strategy="ddp"):
        gradients(denoiser)
    assert all(parameter.grad is not None for parameter in denoiser.parameters())


# ---- in a process group of one: precision and layout


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-full", "hsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_run_in_bf16_where_sharded_and_weights_stay_fp32(group_of_one, precision, strategy, device):
    """MosaicML's low precision GroupNorm and LayerNorm. On a GPU, autocast ("ddp") computes norms in fp32."""
    denoiser, model = build_model("tiny", strategy=strategy, precision=precision, device=device)
    norms = [module for module in denoiser.modules() if isinstance(module, (torch.nn.GroupNorm, torch.nn.LayerNorm))]
    seen = set()
    for norm in norms:
        norm.register_forward_hook(lambda module, arguments, made: seen.add((module.weight.dtype, made.dtype)))
    with autocast(model, precision):
        predicted = model(*(values.to(device) for values in inputs()), return_dict=False)[0]
    predicted.float().square().mean().backward()
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    by_autocast = torch.float32, torch.float32 if device == "cuda" else half
    assert len(norms) > 10 and seen == {by_autocast if strategy == "ddp" else (half, half)}
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.float32}  # the master weights
    assert {parameter.grad.dtype for parameter in denoiser.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp", "precision": "bf16"}], ids=str)
def test_channels_last_reaches_every_convolution_and_keeps_the_gradients(group_of_one, options):
    denoiser, _ = build_model("tiny", channels_last=True, **options)
    assert isinstance(denoiser.conv_in.weight, DTensor) == bool(options)
    seen = []
    for module in denoiser.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(
                lambda module, arguments, made: seen.append(made.is_contiguous(memory_format=torch.channels_last))
            )
    if options:
        denoiser(*inputs())
    else:
        assert_same_gradients(denoiser, build_denoiser("tiny"))
    assert len(seen) > 10 and all(seen)


def test_activation_checkpointing_saves_memory_not_gradients():
    kept = {}
    for checkpointing in (False, True):
        denoiser, _ = build_model("tiny", activation_checkpointing=checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.nbytes), t)[1], lambda t: t
        ):
            prediction = denoiser(*inputs(), return_dict=False)[0]
        prediction.square().mean().backward()
        kept[checkpointing] = sum(sizes), {name: parameter.grad for name, parameter in denoiser.named_parameters()}
    assert kept[True][0] < 0.5 * kept[False][0]
    assert all(torch.allclose(gradient, kept[True][1][name], atol=1e-7) for name, gradient in kept[False][1].items())


def test_attention_is_fused(monkeypatch):
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    denoiser = build_denoiser("tiny")
    denoiser(*inputs())
    assert len(calls) == sum(isinstance(module, Attention) for module in denoiser.modules()) > 0
