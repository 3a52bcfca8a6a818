import json
import types

import pytest
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import run_setup
from helpers import unet as unet_module
from helpers.config import TrainingConfig
from helpers.distributed import num_copies
from helpers.unet import (
    autocast,
    block_names,
    build_model,
    build_unet,
    compile_blocks,
    computes_in_bf16,
    count_flops,
    has_compiler,
    load_unet_config,
    shard_size,
    synchronise_gradients,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(batch=2, size=8):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 4, size, size, generator=generator),
        torch.linspace(3, 900, batch).long(),
        torch.randn(batch, 6, 128, generator=generator),
    )


# ---- presets


def test_the_tiny_unet_has_a_million_parameters():
    unet = build_unet("tiny")
    assert sum(parameter.numel() for parameter in unet.parameters()) == 852_580
    assert unet(*inputs(), return_dict=False)[0].shape == (2, 4, 8, 8)


@pytest.mark.parametrize("size, teraflops", [(32, 0.181), (64, 0.804)])
def test_sd2_base_has_the_published_size_and_cost(size, teraflops):
    """Stable Diffusion 2 at 256 and at 512 pixels, counted without its memory."""
    blocks = count_flops("sd2-base", (4, size, size), (77, 1024))
    assert blocks["parameters"].sum() == 865_910_724
    assert blocks["gflops"].sum() / 1000 == pytest.approx(teraflops, abs=0.0006)


@pytest.mark.parametrize(("name", "parameters", "gigaflops"), [("tiny", 852_580, 0.044), ("small", 94_398_084, 2.77)])
def test_tiny_and_small_have_the_size_and_cost_that_are_shown(name, parameters, gigaflops):
    blocks = count_flops(name, (4, 8, 8), (77, load_unet_config(name)["cross_attention_dim"]))
    assert blocks["parameters"].sum() == parameters and blocks["gflops"].sum() == pytest.approx(gigaflops, rel=0.01)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_blocks_cover_the_unet_in_the_order_of_the_forward_pass(name):
    config = load_unet_config(name)
    blocks = count_flops(name, (4, 16, 16), (6, config["cross_attention_dim"]))
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    assert blocks["parameters"].sum() == sum(parameter.numel() for parameter in unet.parameters())
    called, handles = [], []
    unet = build_unet("tiny")
    names = block_names(unet)
    for block in names:
        module = unet.get_submodule(block)
        handles.append(module.register_forward_hook(lambda *_, block=block: called.append(block)))
    unet(*inputs())
    assert called == names


def test_twice_the_samples_cost_what_one_costs_twice():
    one, four = (count_flops("tiny", (4, size, size), (6, 128)).set_index("block")["gflops"] for size in (8, 16))
    assert four["conv_in"] == pytest.approx(4 * one["conv_in"])


def test_presets_cannot_be_changed_by_their_users():
    load_unet_config("small")["in_channels"] = 9
    assert load_unet_config("small")["in_channels"] == 4


def test_a_unet_may_come_from_a_config_json(tmp_path):
    unet = build_unet("tiny")
    unet.save_config(tmp_path)
    again = build_unet(str(tmp_path / "config.json"))
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in unet.named_parameters()
    }


def test_an_unknown_unet_is_refused_in_one_sentence(tmp_path):
    for name in ("huge", str(tmp_path), str(tmp_path / "none.json")):
        with pytest.raises(
            ValueError, match="^unet_config='.*' is unknown: choose 'tiny', 'small', 'sd2-base', or the path"
        ):
            load_unet_config(name)


@pytest.mark.parametrize("text", ["not json", json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4}), "[]"])
def test_a_config_of_another_model_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="^unet_config='.*config.json' configures no UNet2DConditionModel: give"):
        load_unet_config(str(tmp_path / "config.json"))


# ---- weights


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(1)
    first = build_unet("tiny", seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = build_unet("tiny", seed=3).state_dict(), build_unet("tiny", seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


# ---- latents that do not fit the U-Net


def message(manifest, **values):
    config = TrainingConfig(latents_uri="/data/latents", **values)
    with pytest.raises(ValueError) as error:
        run_setup.check_latents(manifest, config, "/data/latents")
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and "/data/latents" in text or "resolution=" in text
    return text


def test_latents_that_fit_pass(build_manifest):
    for resolution in (32, 64):
        run_setup.check_latents(build_manifest(), TrainingConfig(resolution=resolution), "/data")


def test_a_resolution_that_was_not_encoded_is_refused(build_manifest):
    assert message(build_manifest(), resolution=128).startswith(
        "resolution=128 is not in /data/latents, which holds 32, 64: choose one of these"
    )


def test_captions_of_another_width_are_refused(build_manifest):
    text = message(build_manifest(), unet_config="sd2-base")
    assert "unet_config='sd2-base' takes captions 1024 wide" in text
    assert "holds captions 128 wide (encoder_model='made-up')" in text


def test_latents_of_another_number_of_channels_are_refused(build_manifest):
    shapes = {**build_manifest().shapes, "image_latents_64": [2, 16, 8, 8]}
    text = message(build_manifest(shapes=shapes))
    assert text.startswith("unet_config='tiny' takes 4 latent channels, and /data/latents holds 16")


def test_latents_that_the_unet_cannot_halve_are_refused(build_manifest):
    shapes = {**build_manifest().shapes, "image_latents_72": (2, 4, 9, 9)}
    manifest = build_manifest(shapes=shapes, resolutions=[72])
    assert message(manifest, resolution=72) == (
        "resolution=72 makes latents of 9 x 9, which unet_config='tiny' cannot halve 1 times: use a multiple of 16."
    )


# ---- compiled, replicated, in bf16


def gradients(unet, size=8):
    unet.zero_grad()
    prediction = unet(*inputs(size=size), return_dict=False)[0]
    prediction.square().mean().backward()
    return prediction.detach(), {name: parameter.grad for name, parameter in unet.named_parameters()}


def assert_same_gradients(compiled, eager, size=8):
    expected_output, expected = gradients(eager, size)
    output, found = gradients(compiled, size)
    assert list(found) == list(expected) and (output - expected_output).abs().max() < 1e-5
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name


def test_without_a_compiler_compiling_is_skipped_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    calls = [block._compiled_call_impl for block in compile_blocks(build_unet("tiny")).down_blocks]
    assert calls == [None, None] and "compile_unet=True is skipped: there is no C++ compiler" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_give_the_gradients_of_eager_ones():
    """Compiled as a whole, this U-Net gave other gradients with torch 2.13 on a CPU."""
    eager, compiled = build_unet("tiny"), compile_blocks(build_unet("tiny"))
    assert all(block._compiled_call_impl for block in [*compiled.down_blocks, compiled.mid_block, *compiled.up_blocks])
    assert_same_gradients(compiled, eager)


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
@torch.no_grad()
def test_every_block_is_compiled_for_every_size_by_itself(monkeypatch):
    """With symbolic sizes, to which TorchDynamo turns when sizes vary, Inductor would not use channels last.

    Small blocks of one class, and only TorchDynamo: the U-Net's own blocks with Inductor take minutes.
    """
    graphs, compile_module = [], torch.nn.Module.compile

    def record(graph, arguments):
        sizes = [size for argument in arguments for size in getattr(argument, "shape", [argument])]
        graphs.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph.forward

    class Block(torch.nn.Conv2d):
        def forward(self, values):
            return super().forward(values).relu()

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compile_module(module, backend=record, **options)
    )
    torch.compiler.reset()
    first, second, middle, third = blocks = [Block(2, 2, 3, padding=1) for _ in range(4)]
    compile_blocks(types.SimpleNamespace(down_blocks=[first, second], mid_block=middle, up_blocks=[third]))
    for number, size in enumerate(((4, 4), (8, 8), (8, 16), (32, 16)), start=1):  # twice as many as the default limit
        values = torch.randn(2, 2, *size)
        for block in blocks:
            assert torch.equal(block(values), block.forward(values))
        assert len(graphs) == 4 * number and not any(graphs)
    blocks[0](values[:, :, :8, :8].contiguous())
    assert len(graphs) == 16
    torch.compiler.reset()


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_ddp_does_not_cut_compiled_blocks(group_of_one, monkeypatch):
    """DDP's optimizer for TorchDynamo would, at every bucket: here one for each of a block's three layers."""
    graphs, compile_module = [], torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: compile_module(
            module, backend=lambda graph, arguments: (graphs.append(graph), graph.forward)[1], **options
        ),
    )

    class Block(torch.nn.Sequential):
        def forward(self, values):
            for layer in self:
                values = layer(values).relu()
            return values

    torch.compiler.reset()
    blocks = [Block(*(torch.nn.Linear(600, 600) for _ in range(3))) for _ in range(2)]
    compile_blocks(types.SimpleNamespace(down_blocks=blocks[:1], mid_block=blocks[1], up_blocks=[]))
    model = DistributedDataParallel(torch.nn.Sequential(*blocks), bucket_cap_mb=1)
    model(torch.randn(2, 600)).sum().backward()
    assert len(graphs) == len(blocks)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("nodes", "size"), [((2, 2), 2), ((2, 1), 1), ((4, 2), 2), ((8, 8, 4), 4), ((6, 4), 2), ((3,), 3)]
)
def test_hsdp_shards_never_span_two_nodes(monkeypatch, nodes, size):
    here = [number for number in nodes for _ in range(number)]  # of each rank
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here[0]))
    monkeypatch.setattr(unet_module, "world_size", lambda: len(here))
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda found, mine: [one.fill_(n) for one, n in zip(found, here, strict=True)]
    )
    assert shard_size("cpu") == size
    starts = [sum(nodes[:number]) for number in range(len(nodes))]
    assert all(start % size == 0 for start in starts)  # so no shard reaches over two nodes


def test_one_process_trains_an_unwrapped_unet():
    for strategy in ("ddp", "fsdp", "fsdp-full", "hsdp"):
        unet, model = build_model(TrainingConfig(strategy=strategy))
        assert model is unet
    with synchronise_gradients(unet, last=False, strategy="ddp"):
        gradients(unet)
    assert all(parameter.grad is not None for parameter in unet.parameters())


def test_bf16_computes_in_half_precision_and_keeps_fp32_weights():
    layer = torch.nn.Linear(8, 8)
    values = torch.randn(4, 8)
    for device in ("cpu", torch.device("cpu")):
        with autocast("fp32", device):
            exact = layer(values)
        with autocast("bf16", device):
            half = layer(values)
            half.square().mean().backward()
        assert exact.dtype == layer.weight.grad.dtype == layer.weight.dtype == torch.float32
        assert half.dtype == torch.bfloat16 and 0 < (half - exact).abs().max() < 0.1


# ---- in a process group: precision and layout


@pytest.fixture
def group_of_one(tmp_path):
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(device="cpu", **values):
    """The U-Net, and a function that predicts with it as `TrainStep` does."""
    config = TrainingConfig(**values)
    unet, model = build_model(config, device)
    enabled = "fp32" if computes_in_bf16(config) else config.precision
    return unet, lambda: forward(model, enabled, device)


def forward(model, enabled, device):
    with autocast(enabled, device):
        return model(*(values.to(device) for values in inputs()), return_dict=False)[0]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-full", "hsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_run_in_bf16_where_sharded_and_weights_stay_fp32(group_of_one, precision, strategy, device):
    """MosaicML's low precision GroupNorm and LayerNorm. On a GPU, autocast ("ddp") computes norms in fp32."""
    unet, predict = build(device, strategy=strategy, precision=precision)
    norms = [module for module in unet.modules() if isinstance(module, (torch.nn.GroupNorm, torch.nn.LayerNorm))]
    seen = set()
    for norm in norms:
        norm.register_forward_hook(lambda module, arguments, made: seen.add((module.weight.dtype, made.dtype)))
    predict().float().square().mean().backward()
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    autocast = torch.float32, torch.float32 if device == "cuda" else half
    assert len(norms) > 10 and seen == {autocast if strategy == "ddp" else (half, half)}
    assert {parameter.dtype for parameter in unet.parameters()} == {torch.float32}  # the master weights
    assert {parameter.grad.dtype for parameter in unet.parameters()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_channels_last_reaches_every_convolution(group_of_one, strategy):
    _, plain = build()
    unet, predict = build(strategy=strategy, channels_last=True, precision="fp32")
    seen = []
    for module in unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(
                lambda module, arguments, made: seen.append(made.is_contiguous(memory_format=torch.channels_last))
            )
    assert torch.allclose(predict(), plain(), atol=1e-5)
    assert len(seen) > 10 and all(seen), seen


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


class CountLayoutCopies(TorchDispatchMode):
    """Counts copies of `batch` images from one layout to the other, on "meta" and as on a GPU.

    Everything but convolutions has a GPU's layouts there; cuDNN's convolutions give channels last if they get it.
    """

    def __init__(self, batch):
        super().__init__()
        self.batch, self.number = batch, 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        made, name = operation(*arguments, **(options or {})), operation.overloadpacket.__name__
        if name in ("convolution", "convolution_backward"):
            given = arguments[:2] if name == "convolution" else arguments[1:3]
            if any(is_channels_last(tensor) and not tensor.is_contiguous() for tensor in given):
                return pytree.tree_map_only(
                    torch.Tensor,
                    lambda one: one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one,
                    made,
                )
        elif name in ("clone", "_to_copy", "copy_") and made.dim() == 4 and len(made) == self.batch:
            self.number += is_channels_last(arguments[name == "copy_"]) != is_channels_last(made)
        return made


@pytest.mark.parametrize(("batch", "weights_too"), [(2, True), (65, False)])
def test_layout_copies_of_channels_last_are_a_handful(batch, weights_too):
    """Forward and backward: the input's, where group norms, attention and shortcuts made 189 of them.

    From 64 rows on, diffusers' three upsampling layers convert to the default layout, and next convolutions back.
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(load_unet_config("sd2-base"))
        given = torch.randn(batch, 4, 32, 32), torch.zeros(batch).long(), torch.randn(batch, 77, 1024)
    unet_module.apply_channels_last(unet, weights_too=weights_too)
    with CountLayoutCopies(batch) as copies:
        unet(*given, return_dict=False)[0].sum().backward()
    assert copies.number == (1 if batch < 64 else 1 + 2 * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_group_norm_is_pytorchs(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 12, 5, 3, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)
    norm = unet_module.ChannelsLastGroupNorm(4, 12).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    found = []
    for function in (norm.forward, norm.in_layout):
        leaf = values.clone().requires_grad_()
        made = function(leaf)
        made.float().square().sum().backward()
        assert made.dtype == dtype and made.is_contiguous(memory_format=torch.channels_last)
        found.append([made, leaf.grad, norm.weight.grad, norm.bias.grad])
        norm.zero_grad()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= tolerance * one.norm()


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_channels_last_has_the_gradients_of_the_default(tmp_path, linear, checkpointing):
    (tmp_path / "unet.json").write_text(json.dumps({**load_unet_config("tiny"), "use_linear_projection": linear}))
    name = str(tmp_path / "unet.json")
    unet, _ = build_model(TrainingConfig(unet_config=name, channels_last=True, activation_checkpointing=checkpointing))
    assert_same_gradients(unet, build_unet(name))


def test_activation_checkpointing_saves_memory_not_gradients():
    kept = {}
    for checkpointing in (False, True):
        unet, _ = build_model(TrainingConfig(activation_checkpointing=checkpointing))
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.nbytes), t)[1], lambda t: t
        ):
            prediction = unet(*inputs(), return_dict=False)[0]
        prediction.square().mean().backward()
        kept[checkpointing] = sum(sizes), {name: parameter.grad for name, parameter in unet.named_parameters()}
    assert kept[True][0] < 0.5 * kept[False][0]
    assert all(torch.allclose(gradient, kept[True][1][name], atol=1e-7) for name, gradient in kept[False][1].items())


def test_attention_is_fused(monkeypatch):
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    unet = build_unet("tiny")
    unet(*inputs())
    assert len(calls) == sum(isinstance(module, Attention) for module in unet.modules()) > 0


def test_gradients_are_counted_once_however_they_are_sharded():
    """In the norm that is summed over ranks: `num_copies` of 4 ranks that hold each gradient between them."""
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        for shape, placements, copies in (((4,), [Shard(0)], 1), ((2, 2), [Replicate(), Shard(0)], 2)):
            mesh = init_device_mesh("cpu", shape)
            assert num_copies(DTensor.from_local(torch.zeros(3), mesh, placements)) == copies
        assert num_copies(torch.zeros(3)) == 4
    finally:
        dist.destroy_process_group()
