"""The U-Net and how it is spread over workers and compiled: presets, parameters, FLOPs, replicas, precision. No Ray."""

import contextlib
import json
import os
import pathlib
import shutil

import pandas as pd
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

# "tiny" stands in tiny-sd/unet/config.json. "sd2-base" is the published configuration of Stable Diffusion 2 base;
# "small" has its shape at a tenth of its size, for one GPU.
_SD2_SHAPE = dict(
    in_channels=4, out_channels=4, layers_per_block=2, use_linear_projection=True, cross_attention_dim=1024,
    down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
)  # fmt: skip
UNETS = {
    "small": dict(
        _SD2_SHAPE, sample_size=32, block_out_channels=[128, 256, 384, 384], attention_head_dim=[2, 4, 6, 6]
    ),
    "sd2-base": dict(
        _SD2_SHAPE, sample_size=64, block_out_channels=[320, 640, 1280, 1280], attention_head_dim=[5, 10, 20, 20]
    ),
}  # fmt: skip


def load_unet_config(name):
    """The U-Net's configuration: "tiny", "small", "sd2-base", or the path of a config.json in diffusers layout."""
    if name in UNETS:
        return dict(UNETS[name])
    path = pathlib.Path(__file__).parent / "tiny-sd" / "unet" / "config.json" if name == "tiny" else pathlib.Path(name)
    if not path.is_file():
        raise ValueError(f"unet_config={name!r} is unknown: choose 'tiny', 'small', 'sd2-base', or the path of a config.json.")
    try:
        values = json.loads(path.read_text())
    except ValueError:
        values = {}
    if "cross_attention_dim" not in values:
        raise ValueError(f"unet_config={name!r} configures no UNet2DConditionModel: give the unet/config.json of a pipeline.")
    return {key: value for key, value in values.items() if not key.startswith("_")}


def build_unet(name, *, seed=0, device="cpu"):
    """A U-Net with random weights, the same for the same seed on any number of ranks and any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel.from_config(load_unet_config(name))
    return unet.to(device)


def check_latents(manifest, config, latents_uri):
    """Raises ValueError if the U-Net cannot train on these latents, before a worker starts."""
    unet = load_unet_config(config.unet_config)
    if config.resolution not in manifest.resolutions:
        raise ValueError(
            f"resolution={config.resolution} is not in {latents_uri}, which holds "
            f"{', '.join(map(str, manifest.resolutions))}: choose one of these, or encode the data again with it."
        )
    if unet["cross_attention_dim"] != manifest.text_width:
        raise ValueError(
            f"unet_config={config.unet_config!r} takes captions {unet['cross_attention_dim']} wide, and "
            f"{latents_uri} holds captions {manifest.text_width} wide (encoder_model="
            f"{manifest.encoder['model']!r}): choose a U-Net and an encoder that belong together."
        )
    channels = manifest.shapes[f"image_latents_{config.resolution}"][1]
    if unet["in_channels"] != channels:
        raise ValueError(
            f"unet_config={config.unet_config!r} takes {unet['in_channels']} latent channels, and {latents_uri} "
            f"holds {channels} (encoder_model={manifest.encoder['model']!r}): choose ones that belong together."
        )
    size = manifest.shapes[f"image_latents_{config.resolution}"][-1]
    halvings = len(unet["block_out_channels"]) - 1
    if size % 2**halvings:
        raise ValueError(
            f"resolution={config.resolution} makes latents of {size} x {size}, which unet_config={config.unet_config!r} "
            f"cannot halve {halvings} times: use a multiple of {config.resolution // size * 2**halvings}."
        )


def has_compiler():
    """Inductor needs a C++ compiler on a CPU, and for its wrappers on a GPU too."""
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def compile_blocks(unet):
    """Compile the down, mid and up blocks in place, one by one.

    Compiled as a whole, the U-Net gave other gradients than eager on a CPU with torch 2.13; by blocks it agrees, and
    parameter names stay as they are.
    """
    if not has_compiler():
        print("compile_unet=True is skipped: there is no C++ compiler (g++ or clang++) on this machine.")
        return unet
    for block in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        block.compile()
    return unet


def parallelize(unet, strategy, device="cpu"):
    """Spread the U-Net over the process group; returns what the training step calls.

    - "ddp": every rank holds everything, gradients are averaged.
    - "fsdp": gradients and optimizer state are sharded, weights stay gathered after the forward pass (SHARD_GRAD_OP).
    - "fsdp-full": weights are sharded too and gathered block by block (FULL_SHARD).
    - "hsdp": "fsdp" within a node, replicated across nodes.

    A group of one rank needs none of it. The sharded ones are FSDP2 (`fully_shard`), in place, block by block.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return unet
    if strategy == "ddp":
        return DistributedDataParallel(unet, gradient_as_bucket_view=True)
    world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if strategy == "hsdp" and world > here:
        mesh = init_device_mesh(torch.device(device).type, (world // here, here), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(torch.device(device).type, (world,), mesh_dim_names=("shard",))
    for module in [*unet.down_blocks, unet.mid_block, *unet.up_blocks, unet]:
        fully_shard(module, mesh=mesh, reshard_after_forward=strategy == "fsdp-full")
    return unet


def synchronise_gradients(model, last):
    """Reduce gradients in the backward pass of the last micro-batch only; a context manager."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def clip_gradients(model, max_norm):
    """Clip to a total norm, over all shards; returns the norm before as a float."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def autocast(precision, device):
    """bf16: matrix products in bfloat16, weights and sums in fp32."""
    enabled = precision == "bf16"
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=enabled)


def measure(name, latents_shape, text_shape):
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
    for block in blocks(unet):
        module = unet.get_submodule(block)
        rows.append((
            block,
            sum(parameter.numel() for parameter in module.parameters()),
            flops.get(f"{type(unet).__name__}.{block}", 0) / 1e9,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=["block", "parameters", "gflops"])


def blocks(unet):
    """Names of the top-level parts that own parameters, in the order of the forward pass."""
    names = ["time_embedding", "conv_in"]
    names += [f"down_blocks.{i}" for i in range(len(unet.down_blocks))] + ["mid_block"]
    names += [f"up_blocks.{i}" for i in range(len(unet.up_blocks))] + ["conv_norm_out", "conv_out"]
    return names
