"""The U-Net: presets, FLOPs, sharding over workers, compiling, precision. No Ray."""

import contextlib
import json
import math
import os
import pathlib
import shutil

import pandas as pd
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

# "tiny" stands in tiny-sd/unet/config.json. "sd2-base" is the published configuration of Stable Diffusion 2 base;
# "small" has its shape at a tenth of its size, for one GPU.
_SD2_SHAPE = dict(
    in_channels=4,
    out_channels=4,
    layers_per_block=2,
    use_linear_projection=True,
    cross_attention_dim=1024,
    down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
)
UNETS = {
    "small": dict(_SD2_SHAPE, sample_size=32, block_out_channels=[128, 256, 384, 384], attention_head_dim=[2, 4, 6, 6]),
    "sd2-base": dict(
        _SD2_SHAPE, sample_size=64, block_out_channels=[320, 640, 1280, 1280], attention_head_dim=[5, 10, 20, 20]
    ),
}


def load_unet_config(name):
    """The U-Net's configuration: "tiny", "small", "sd2-base", or the path of a config.json in diffusers layout."""
    if name in UNETS:
        return dict(UNETS[name])
    path = pathlib.Path(__file__).parent / "tiny-sd" / "unet" / "config.json" if name == "tiny" else pathlib.Path(name)
    if not path.is_file():
        raise ValueError(
            f"unet_config={name!r} is unknown: choose 'tiny', 'small', 'sd2-base', or the path of a config.json."
        )
    try:
        values = json.loads(path.read_text())
    except ValueError:
        values = {}
    if "cross_attention_dim" not in values:
        raise ValueError(
            f"unet_config={name!r} configures no UNet2DConditionModel: give the unet/config.json of a pipeline."
        )
    return {key: value for key, value in values.items() if not key.startswith("_")}


def build_unet(name, *, seed=0, device="cpu"):
    """A U-Net with random weights, the same for the same seed on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel.from_config(load_unet_config(name))
    return unet.to(device)


def has_compiler():
    """Inductor needs a C++ compiler on a CPU, and for its wrappers on a GPU too."""
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def compile_blocks(unet, mode=None):
    """Compile the down, mid and up blocks in place, one by one; `mode` as `torch.compile` takes it.

    Compiled as a whole, the U-Net gave other gradients than eager on a CPU with torch 2.13; by blocks it agrees, and
    parameter names stay as they are. Each block is compiled once for each size of its input.
    """
    if not has_compiler():
        print("compile_unet=True is skipped: there is no C++ compiler (g++ or clang++) on this machine.")
        return unet
    for block in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        # Blocks of one class share their code. To TorchDynamo they would be one function whose sizes vary: compiled for
        # symbolic sizes, for which Inductor lays nothing out in channels last, and no more than eight times in all.
        block.compile(mode=mode, dynamic=False, isolate_recompiles=True, recompile_limit=64)
    return unet


def build_model(config, device="cpu"):
    """The U-Net of a training run with its first weights: `(unet, model)`, of which the training step calls `model`.

    Compiled and spread over the process group as `config` (a `TrainingConfig`) says:

    - "ddp": every rank holds everything, gradients are averaged.
    - "fsdp": gradients and optimizer state are sharded, weights stay gathered after the forward pass (SHARD_GRAD_OP).
    - "fsdp-full": weights are sharded too and gathered block by block (FULL_SHARD).
    - "hsdp": "fsdp" within a node, replicated across nodes (`ranks_of_a_shard`).

    The sharded ones are FSDP2 (`fully_shard`), in place, block by block. Rank 0 draws the weights; the other ranks build
    the U-Net without memory ("meta") and are sent theirs, so no rank ever holds more than its part of them on its device.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    drawn = build_unet(config.unet_config, seed=config.seed) if world == 1 or dist.get_rank() == 0 else None
    sharded = config.strategy != "ddp" and (world > 1 or computes_in_bf16(config))
    if drawn is not None and not sharded:
        unet = drawn.to(device)
    else:
        with torch.device("meta"):
            unet = UNet2DConditionModel.from_config(load_unet_config(config.unet_config))
    if config.activation_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.compile_unet:
        compile_blocks(unet)
    if sharded:
        shard(unet, config.strategy, config.precision, device)
        unet.to_empty(device=device)
        weights = drawn.state_dict() if drawn is not None else {}
        set_model_state_dict(unet, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    elif drawn is None:
        unet.to_empty(device=device)
    if config.channels_last:
        lay_channels_last(unet, weights_too=not sharded)
    if sharded or world == 1:
        return unet, unet
    return unet, DistributedDataParallel(
        unet, gradient_as_bucket_view=True
    )  # which sends rank 0's weights to the others


def lay_channels_last(unet, weights_too):
    """Compute on (B, H, W, C) in memory, which tensor cores want: convolutions hand the layout of their input on.

    FSDP2 takes only weights in the usual order; then each convolution rearranges its own, and its input where diffusers'
    attention laid it out in the usual order again.
    """
    if weights_too:
        unet.to(memory_format=torch.channels_last)

    def lay(module, arguments):
        return (arguments[0].contiguous(memory_format=torch.channels_last), *arguments[1:])

    for module in unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lay)


def computes_in_bf16(config):
    """Whether the U-Net itself runs in bf16, norms included, and not by autocast: sharded, with a copy of its weights."""
    return config.precision == "bf16" and config.strategy != "ddp" and dist.is_initialized()


def shard(unet, strategy, precision, device):
    """Shard the U-Net's blocks, and then what is left of it, over the process group; see `build_model`.

    bf16: weights are gathered and used in bf16, GroupNorm and LayerNorm too (MosaicML's low precision norms); gradients
    are summed, and weights kept and updated, in fp32.
    """
    world = dist.get_world_size()
    here = ranks_of_a_shard(device) if strategy == "hsdp" else world
    if here < world:
        mesh = init_device_mesh(torch.device(device).type, (world // here, here), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(torch.device(device).type, (world,), mesh_dim_names=("shard",))
    half = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else {}
    for module in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        fully_shard(
            module, mesh=mesh, reshard_after_forward=strategy == "fsdp-full", mp_policy=MixedPrecisionPolicy(**half)
        )
    # The prediction leaves in fp32, for the loss; between blocks it stays as it is.
    whole = MixedPrecisionPolicy(**half, output_dtype=torch.float32)
    fully_shard(unet, mesh=mesh, reshard_after_forward=strategy == "fsdp-full", mp_policy=whole)


def ranks_of_a_shard(device):
    """How many ranks share the weights between them under "hsdp": those of a node.

    Of nodes with 4 and 2 ranks, 2: whatever divides all their numbers, since the ranks of a node follow each other.
    """
    mine = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())), device=device)
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return math.gcd(*map(int, found))


def synchronise_gradients(model, last, strategy):
    """Reduce gradients in the backward pass of the last micro-batch only; a context manager.

    Until then weights that stay gathered after the forward pass stay so after the backward pass too: "fsdp" and "hsdp"
    gather once a step, whatever the number of micro-batches.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        if strategy != "fsdp-full":
            model.set_reshard_after_backward(last)
    return contextlib.nullcontext()


def clip_gradients(model, max_norm):
    """Clip to a total norm, over all shards; returns the norm before as a float."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def autocast(precision, device):
    """bf16: matrix products in bfloat16, weights and sums in fp32. Not for a U-Net that itself computes in bf16."""
    enabled = precision == "bf16"
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=enabled)


def count_flops(name, latents_shape, text_shape):
    """Parameters and forward FLOPs of a U-Net by block for one sample, counted without allocating it.

    Args:
        name: see `load_unet_config`.
        latents_shape: (C, H, W).
        text_shape: (L, D).

    Returns:
        A frame with columns block, parameters, gflops, in the order of the forward pass. FLOPs count a multiplication
        and an addition as two (`torch.utils.flop_counter`).
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(load_unet_config(name))
        inputs = torch.randn(1, *latents_shape), torch.zeros(1, dtype=torch.long), torch.randn(1, *text_shape)
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
        unet(*inputs)
    flops = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    rows = []
    for block in block_names(unet):
        module = unet.get_submodule(block)
        rows.append(
            (
                block,
                sum(parameter.numel() for parameter in module.parameters()),
                flops.get(f"{type(unet).__name__}.{block}", 0) / 1e9,
            )
        )
    return pd.DataFrame(rows, columns=["block", "parameters", "gflops"])


def block_names(unet):
    """Names of the top-level parts that own parameters, in the order of the forward pass."""
    names = ["time_embedding", "conv_in"]
    names += [f"down_blocks.{i}" for i in range(len(unet.down_blocks))] + ["mid_block"]
    names += [f"up_blocks.{i}" for i in range(len(unet.up_blocks))] + ["conv_norm_out", "conv_out"]
    return names
