import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from helpers.model import denoisers, sharding
from helpers.model.denoisers import build_denoiser
from helpers.model.sharding import (
    autocast,
    build_model,
    compile_blocks,
    shard_size,
)
from tests.steps import STRATEGIES

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(batch=2, size=8):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, 4, size, size, generator=generator),
        torch.linspace(3, 900, batch).long(),
        torch.randn(batch, 6, 128, generator=generator),
    )


# ---- compiled


def test_without_a_compiler_compiling_is_skipped_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    denoiser = build_denoiser("tiny")
    compile_blocks(denoiser)
    calls = [block._compiled_call_impl for block in denoiser.down_blocks]
    assert calls == [None, None] and "compile_unet=True is skipped: there is no C++ compiler" in capsys.readouterr().out


@pytest.fixture
def torch_2_11(graphs, monkeypatch):
    """`torch.compile` without the options that came after PyTorch 2.11, which the GPU images of today have."""
    compile_module = torch.nn.Module.compile

    def compile_by_old_options(module, *, dynamic=None):
        compile_module(module, dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_old_options)
    return graphs


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


@pytest.mark.parametrize(("version", "reindexes"), [("2.13.0+cu130", False), ("2.14.0", True)])
def test_blocks_are_compiled_without_the_fusion_that_slows_upsampling(graphs, monkeypatch, version, reindexes):
    """PyTorch has a guard from 2.14 on."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with inductor_config.patch(loop_reindexing_after_fusion=True):
        compile_blocks(build_denoiser("tiny"))
        assert inductor_config.loop_reindexing_after_fusion is reindexes


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
    sentence = f"strategy='hsdp' shards over groups of {size} ranks, as nodes have {sorted(set(nodes))} of them: give "
    assert capsys.readouterr().out.startswith(sentence) == told


def test_one_process_trains_an_unwrapped_denoiser():
    for strategy in STRATEGIES:
        denoiser, model = build_model("tiny", strategy=strategy)
        assert model is denoiser


# ---- in a process group of one: precision and layout


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("strategy", STRATEGIES)
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
def test_channels_last_reaches_every_convolution(group_of_one, options):
    denoiser, _ = build_model("tiny", channels_last=True, **options)
    assert isinstance(denoiser.conv_in.weight, DTensor) == bool(options)
    seen = []
    for module in denoiser.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(
                lambda module, arguments, made: seen.append(made.is_contiguous(memory_format=torch.channels_last))
            )
    denoiser(*inputs())
    assert len(seen) > 10 and all(seen)


def test_activation_checkpointing_saves_memory():
    kept = {}
    for checkpointing in (False, True):
        denoiser, _ = build_model("tiny", activation_checkpointing=checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.nbytes), t)[1], lambda t: t
        ):
            denoiser(*inputs())
        kept[checkpointing] = sum(sizes)
    assert kept[True] < 0.5 * kept[False]


def test_attention_is_fused(monkeypatch):
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    denoiser = build_denoiser("tiny")
    denoiser(*inputs())
    assert len(calls) == sum(isinstance(module, Attention) for module in denoiser.modules()) > 0
