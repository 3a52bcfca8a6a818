"""The U-Net: presets, FLOPs, compiling, sharding, precision. No Ray."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil

import pandas as pd
import torch
import torch.distributed as dist
from diffusers import Transformer2DModel, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from .config import TrainingConfig
from .distributed import rank, world_size

# "sd2-base" is the published configuration of Stable Diffusion 2 base; "small" has its shape at a tenth of its size,
# for one GPU; "tiny" is tiny-sd/unet/config.json.
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


def load_unet_config(name: str) -> dict:
    """The U-Net's configuration: "tiny", "small", "sd2-base", or the path of a config.json in diffusers layout.

    Raises ValueError for an unknown name and for a file that configures no `UNet2DConditionModel`.
    """
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


def build_unet(name: str, *, seed: int = 0, device: torch.device | str = "cpu") -> UNet2DConditionModel:
    """A U-Net with random weights, the same for the same seed on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel.from_config(load_unet_config(name))
    return unet.to(device)


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which Inductor needs on a CPU and, for its wrappers, on a GPU."""
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def compile_blocks(unet: UNet2DConditionModel, mode: str | None = None) -> UNet2DConditionModel:
    """Compile the down, mid and up blocks in place, one by one; `mode` as `torch.compile` takes it.

    As a whole, the U-Net got wrong gradients on a CPU with torch 2.13; by blocks they agree with eager ones, and
    parameter names do not change. Each block is compiled once for each size of its input, in one piece: TorchDynamo
    would cut blocks within DDP at the ends of its buckets, though DDP reduces gradients beside compiled blocks as well.
    """
    torch._dynamo.config.optimize_ddp = False
    if not has_compiler():
        print("compile_unet=True is skipped: there is no C++ compiler (g++ or clang++) on this machine.")
        return unet
    for block in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        # Blocks of one class share their code. By default TorchDynamo counts their graphs together, stops at eight, and
        # compiles for symbolic sizes, for which Inductor does not use channels last.
        block.compile(mode=mode, dynamic=False, isolate_recompiles=True, recompile_limit=64)
    return unet


def build_model(config: TrainingConfig, device: torch.device | str = "cpu"):
    """The U-Net of a training run with its first weights, as `config` says: `(unet, model)`; call `model` in training.

    - "ddp": every rank holds everything, gradients are averaged.
    - "fsdp": gradients and optimizer state are sharded, weights stay gathered after the forward pass (SHARD_GRAD_OP).
    - "fsdp-full": weights are sharded too and gathered block by block (FULL_SHARD).
    - "hsdp": "fsdp" within a node, replicated across nodes (`shard_size`).

    Every rank describes the U-Net without memory (on the "meta" device), applies activation checkpointing, compilation
    and sharding, and only then allocates its part. Rank 0 draws the weights in its CPU's memory and sends each rank its
    part: the same weights on any number of ranks.
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(load_unet_config(config.unet_config))
    if config.activation_checkpointing:
        unet.enable_gradient_checkpointing()
    if config.compile_unet:
        compile_blocks(unet)
    if is_sharded(config):
        apply_fsdp(unet, config, device)
    allocate_weights(unet, config, device)
    if config.channels_last:
        apply_channels_last(unet, weights_too=not is_sharded(config))
    if world_size() == 1 or is_sharded(config):
        return unet, unet
    return unet, DistributedDataParallel(unet, gradient_as_bucket_view=True)


def is_sharded(config: TrainingConfig) -> bool:
    """Whether the weights are sharded; one rank "shards" over itself only to compute in bf16 beside fp32 weights."""
    return config.strategy != "ddp" and (world_size() > 1 or computes_in_bf16(config))


def computes_in_bf16(config: TrainingConfig) -> bool:
    """Whether FSDP2 casts the U-Net itself to bf16, norms included, so that autocast is not needed."""
    return config.precision == "bf16" and config.strategy != "ddp" and dist.is_initialized()


def allocate_weights(unet: UNet2DConditionModel, config: TrainingConfig, device: torch.device | str) -> None:
    """Give a U-Net on the "meta" device memory on `device` and the first weights of the run, which rank 0 draws."""
    weights = build_unet(config.unet_config, seed=config.seed).state_dict() if rank() == 0 else {}
    unet.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size() > 1)
    set_model_state_dict(unet, weights, options=options)


def apply_channels_last(unet: UNet2DConditionModel, weights_too: bool) -> None:
    """Compute on (B, H, W, C) in memory, which tensor cores are fastest on; made for compiled blocks.

    FSDP2 takes only contiguous weights (`weights_too=False`): each convolution then converts its own. Inputs are
    converted where they have another layout: that of the U-Net, and those that diffusers' upsampling changed. Group
    norms and attention, which would convert to the default layout everywhere, are replaced by the same computation in
    this one; eager, these group norms are slower and keep more memory than PyTorch's.
    """
    if weights_too:
        unet.to(memory_format=torch.channels_last)

    def convert_input(module, arguments):
        return (arguments[0].contiguous(memory_format=torch.channels_last), *arguments[1:])

    for module in unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(convert_input)
        elif isinstance(module, torch.nn.GroupNorm):
            module.__class__ = ChannelsLastGroupNorm
        elif isinstance(module, Transformer2DModel):
            module.__class__ = ChannelsLastTransformer
        elif isinstance(module, ResnetBlock2D) and module.dropout.p == 0:
            module.eval()  # in training diffusers copies the input of 1 x 1 convolutions to (B, C, H, W)


class ChannelsLastGroupNorm(torch.nn.GroupNorm):
    """`GroupNorm` that keeps the layout: PyTorch copies its input to (B, C, H, W) everywhere but on a CPU."""

    def forward(self, values_BCHW: torch.Tensor) -> torch.Tensor:
        return super().forward(values_BCHW) if values_BCHW.device.type == "cpu" else self.in_layout(values_BCHW)

    def in_layout(self, values_BCHW: torch.Tensor) -> torch.Tensor:
        """Statistics in fp32, as PyTorch's; for (B, C, H, W) that are (B, H, W, C) in memory."""
        grouped = values_BCHW.permute(0, 2, 3, 1).unflatten(-1, (self.num_groups, -1)).float()  # (B, H, W, G, C / G)
        variance, mean = torch.var_mean(grouped, dim=(1, 2, 4), keepdim=True, correction=0)
        normal = ((grouped - mean) * torch.rsqrt(variance + self.eps)).flatten(-2)
        return (normal * self.weight + self.bias).to(values_BCHW.dtype).permute(0, 3, 1, 2)


class ChannelsLastTransformer(Transformer2DModel):
    """diffusers' attention on images, without the copy to (B, C, H, W) in memory that it ends with; takes no masks."""

    def forward(self, hidden_states, encoder_hidden_states=None, **unused):
        images = self.norm(hidden_states)
        size = images.shape[2:]
        if not self.use_linear_projection:
            images = self.proj_in(images)
        tokens = images.permute(0, 2, 3, 1).flatten(1, 2)
        if self.use_linear_projection:
            tokens = self.proj_in(tokens)
        for block in self.transformer_blocks:
            arguments = tokens, None, encoder_hidden_states  # without an attention mask
            if self.gradient_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, *arguments, use_reentrant=False)
            else:
                tokens = block(*arguments)
        if self.use_linear_projection:
            tokens = self.proj_out(tokens)
        images = tokens.unflatten(1, size).permute(0, 3, 1, 2)
        if not self.use_linear_projection:
            images = self.proj_out(images)
        return (images + hidden_states,)


def apply_fsdp(unet: UNet2DConditionModel, config: TrainingConfig, device: torch.device | str) -> None:
    """Shard the U-Net in place with FSDP2: each block, then the rest; see `build_model`.

    In bf16, weights are gathered and used in bf16, by GroupNorm and LayerNorm too (MosaicML's low-precision norms);
    gradients are summed, and weights stored and updated, in fp32.
    """
    world = world_size()
    size = shard_size(device) if config.strategy == "hsdp" else world
    kind = torch.device(device).type
    if size < world:
        mesh = init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if config.precision == "bf16" else {}
    options = dict(mesh=mesh, reshard_after_forward=config.strategy == "fsdp-full")
    for block in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes), **options)
    # The loss takes the prediction in fp32; between blocks activations stay in bf16.
    fully_shard(unet, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32), **options)


def shard_size(device: torch.device | str) -> int:
    """How many ranks hold one copy of the weights between them under "hsdp": the ranks of a node.

    With nodes of different sizes, their greatest common divisor: the ranks of a node are consecutive, so no shard group
    spans two nodes.
    """
    mine = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", world_size())), device=device)
    sizes = [torch.zeros_like(mine) for _ in range(world_size())]
    dist.all_gather(sizes, mine)
    return math.gcd(*map(int, sizes))


def synchronise_gradients(model: torch.nn.Module, last: bool, strategy: str):
    """Context manager for a micro-batch: reduce gradients over the ranks only in the backward pass of the `last` one.

    Under "fsdp" and "hsdp" weights stay gathered until then: one all-gather a step for any number of micro-batches.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        if strategy != "fsdp-full":
            model.set_reshard_after_backward(last)
    return contextlib.nullcontext()


def autocast(precision: str, device: torch.device | str) -> torch.autocast:
    """With "bf16", matrix products in bfloat16; weights and sums stay in fp32. Not if `computes_in_bf16`."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")


def count_flops(name: str, latents_shape: tuple[int, ...], text_shape: tuple[int, ...]) -> pd.DataFrame:
    """Parameters and forward FLOPs of a U-Net by block for one sample, counted on the "meta" device.

    Args:
        name: see `load_unet_config`.
        latents_shape: (C, H, W).
        text_shape: (L, D).

    Returns:
        A frame with columns block, parameters, gflops, in the order of the forward pass. A multiplication and an
        addition are two FLOPs (`torch.utils.flop_counter`).
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(load_unet_config(name))
        inputs = torch.randn(1, *latents_shape), torch.zeros(1, dtype=torch.long), torch.randn(1, *text_shape)
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
        unet(*inputs)
    flops = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    rows = []
    for block in block_names(unet):
        parameters = sum(parameter.numel() for parameter in unet.get_submodule(block).parameters())
        rows.append((block, parameters, flops.get(f"{type(unet).__name__}.{block}", 0) / 1e9))
    return pd.DataFrame(rows, columns=["block", "parameters", "gflops"])


def block_names(unet: UNet2DConditionModel) -> list[str]:
    """Names of the top-level parts that own parameters, in the order of the forward pass."""
    down = [f"down_blocks.{i}" for i in range(len(unet.down_blocks))]
    up = [f"up_blocks.{i}" for i in range(len(unet.up_blocks))]
    return ["time_embedding", "conv_in", *down, "mid_block", *up, "conv_norm_out", "conv_out"]
