"""The denoiser, usually a U-Net: presets, compiling, sharding, precision. No Ray."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil

import torch
import torch.distributed as dist
from diffusers import ModelMixin
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..distributed import rank, world_size
from . import denoisers

# "sd2-base" is the published configuration of Stable Diffusion 2 base; "small" has its shape at a tenth of its size,
# for one GPU; "tiny" is the one in helpers. The transformers are PRX's; the larger one is for captions by T5Gemma (2 B)
# and latents of 16 channels.
MODELS = pathlib.Path(__file__).parents[1] / "models"
PRESETS = {
    "tiny": MODELS / "tiny-sd" / "unet" / "config.json",
    "small": MODELS / "unets" / "small.json",
    "sd2-base": MODELS / "unets" / "sd2-base.json",
    "tiny-transformer": MODELS / "unets" / "tiny-transformer.json",
    "transformer-600m": MODELS / "unets" / "transformer-600m.json",
}


def load_unet_config(name: str) -> dict:
    """The denoiser's configuration: one of `PRESETS`, or the path of a config.json in diffusers layout.

    Raises ValueError for an unknown name and for a file that configures no class of `denoisers.ADAPTERS`.
    """
    path = PRESETS.get(name) or pathlib.Path(name)
    if not path.is_file():
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"unet_config={name!r} is unknown: choose {known}, or the path of a config.json.")
    try:
        values = json.loads(path.read_text())
    except ValueError:
        values = {}
    kind = values.get("_class_name") if isinstance(values, dict) else None
    if kind not in denoisers.ADAPTERS:
        raise ValueError(
            f"unet_config={name!r} configures {kind or 'no model'}: give the config.json of a denoiser, which are "
            f"{', '.join(denoisers.ADAPTERS)}."
        )
    adapter = denoisers.ADAPTERS[kind]
    for key, value in adapter.fixed.items():
        if values.get(key) not in (None, value):
            raise ValueError(
                f"unet_config={name!r} has {key}={values[key]!r}, for which {adapter.pipeline} gives no value: set it "
                f"to {value!r}."
            )
    kept = {key: value for key, value in values.items() if key == "_class_name" or not key.startswith("_")}
    return {**kept, **adapter.fixed}


def build_unet(name: str, *, seed: int = 0) -> ModelMixin:
    """A denoiser with random weights on the CPU, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return denoisers.build(load_unet_config(name))


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which Inductor needs on a CPU and, for its wrappers, on a GPU."""
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def compile_blocks(unet: ModelMixin) -> ModelMixin:
    """Compile the blocks (`denoisers.blocks`) in place, one by one.

    As a whole, the U-Net got wrong gradients on a CPU with torch 2.13; by blocks they agree with eager ones, and
    parameter names do not change. Each block is compiled once for each size of its input, in one piece: TorchDynamo
    would cut blocks within DDP at the ends of its buckets, though DDP reduces gradients beside compiled blocks as well.
    """
    torch._dynamo.config.optimize_ddp = False
    if not has_compiler():
        print("compile_unet=True is skipped: there is no C++ compiler (g++ or clang++) on this machine.")
        return unet
    blocks = denoisers.blocks(unet)
    # Blocks of one class share their code. By default TorchDynamo counts their graphs together, stops at eight, and
    # compiles for symbolic sizes, for which Inductor chooses worse memory layouts.
    try:
        for block in blocks:
            block.compile(dynamic=False, isolate_recompiles=True, recompile_limit=64)
    except TypeError:  # PyTorch 2.11 always counts them together
        torch._dynamo.config.recompile_limit = 64 * len(blocks)
        for block in blocks:
            block.compile(dynamic=False)
    return unet


def build_model(
    name: str,
    *,
    seed: int = 0,
    strategy: str = "ddp",
    precision: str = "fp32",
    compile_unet: bool = False,
    channels_last: bool = False,
    activation_checkpointing: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[ModelMixin, torch.nn.Module]:
    """The denoiser of a training run with its first weights: `(unet, model)`; call `model` in training.

    Every rank describes the U-Net without memory (on the "meta" device), applies activation checkpointing, compilation
    and sharding, and only then allocates its part. Rank 0 draws the weights in its CPU's memory and sends each rank its
    part: the same weights on any number of ranks.

    Args:
        name: see `load_unet_config`.
        seed: of the weights.
        strategy: how the U-Net is spread over the ranks.
            - "ddp": every rank holds everything, gradients are averaged.
            - "fsdp": gradients and optimizer state are sharded, weights stay gathered after the forward pass
              (SHARD_GRAD_OP).
            - "fsdp-full": weights are sharded too and gathered block by block (FULL_SHARD).
            - "hsdp": "fsdp" within a node, replicated across nodes (`shard_size`).
        precision: "fp32", or "bf16": see `autocast` and `apply_fsdp`.
        compile_unet: see `compile_blocks`.
        channels_last: see `apply_channels_last`.
        activation_checkpointing: recompute activations in the backward pass instead of keeping them.
        device: this rank's.
    """
    with torch.device("meta"):
        unet = denoisers.build(load_unet_config(name))
    if activation_checkpointing:
        unet.enable_gradient_checkpointing()
    if compile_unet:
        compile_blocks(unet)
    sharded = is_sharded(strategy, precision)
    if sharded:
        apply_fsdp(unet, strategy, precision, device)
    allocate_weights(unet, name, seed, device)
    if channels_last:
        apply_channels_last(unet, sharded)
    if world_size() == 1 or sharded:
        return unet, unet
    return unet, DistributedDataParallel(unet, gradient_as_bucket_view=True)


def is_sharded(strategy: str, precision: str) -> bool:
    """Whether the weights are sharded; one rank "shards" over itself only to compute in bf16 beside fp32 weights."""
    return strategy != "ddp" and (world_size() > 1 or computes_in_bf16(strategy, precision))


def computes_in_bf16(strategy: str, precision: str) -> bool:
    """Whether FSDP2 casts the U-Net itself to bf16, norms included, so that autocast is not needed."""
    return precision == "bf16" and strategy != "ddp" and dist.is_initialized()


def allocate_weights(unet: ModelMixin, name: str, seed: int, device: torch.device | str) -> None:
    """Give a U-Net on the "meta" device memory on `device` and the first weights of the run, which rank 0 draws."""
    weights = build_unet(name, seed=seed).state_dict() if rank() == 0 else {}
    unet.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size() > 1)
    set_model_state_dict(unet, weights, options=options)
    denoisers.rebuild_buffers(unet, load_unet_config(name))


def apply_channels_last(unet: ModelMixin, sharded: bool) -> None:
    """Convolutions compute on (B, H, W, C) in memory, which tensor cores are fastest on, by PyTorch's memory format.

    They take the layout of their weights; sharded ones, which FSDP2 wants contiguous, that of their inputs.
    """
    if not sharded:
        unet.to(memory_format=torch.channels_last)
        return

    def convert_input(module, arguments):
        return (arguments[0].contiguous(memory_format=torch.channels_last),)

    for module in unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(convert_input)


def apply_fsdp(unet: ModelMixin, strategy: str, precision: str, device: torch.device | str) -> None:
    """Shard the U-Net in place with FSDP2: each block, then the rest; see `build_model`.

    In bf16, weights are gathered and used in bf16, by GroupNorm and LayerNorm too (MosaicML's low-precision norms);
    gradients are summed, and weights stored and updated, in fp32.
    """
    world, kind = world_size(), torch.device(device).type
    size = shard_size(device) if strategy == "hsdp" else world
    if size < world:
        mesh = init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else {}
    options = dict(mesh=mesh, reshard_after_forward=strategy == "fsdp-full")
    for block in denoisers.blocks(unet):
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes), **options)
    # The loss takes the prediction in fp32; between blocks activations stay in bf16.
    policy = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(unet, mp_policy=policy, **options)
    if precision == "bf16":
        unet.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def cast_inputs(unet: ModelMixin, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    """Forward pre-hook: inputs in bf16, but for the timestep, of which bf16 would keep 8 bits.

    The timestep is the second argument, or the one of that name.
    """

    def cast(name, value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.bfloat16() if is_float and name not in (1, "timestep") else value

    return tuple(cast(*item) for item in enumerate(arguments)), {name: cast(name, named[name]) for name in named}


def shard_size(device: torch.device | str) -> int:
    """How many ranks hold one copy of the weights between them under "hsdp": the ranks of a node.

    With nodes of different sizes, their greatest common divisor: the ranks of a node are consecutive, so no shard group
    spans two nodes. Where that is 1, all ranks, as under "fsdp": whole weights on each may not fit. Rank 0 says so.
    """
    world = world_size()
    ranks_here = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", world)), device=device)
    ranks_by_rank = [torch.zeros_like(ranks_here) for _ in range(world)]
    dist.all_gather(ranks_by_rank, ranks_here)
    nodes = []  # ranks of each
    while sum(nodes) < world:
        nodes.append(int(ranks_by_rank[sum(nodes)]))
    size = math.gcd(*nodes)
    if len(set(nodes)) > 1:
        size = size if size > 1 else world
        if rank() == 0:
            print(f"strategy='hsdp' shards over groups of {size} ranks, as the nodes have {nodes}: give each as many.")
    return size


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
    """With "bf16", matrix products in bfloat16; weights and sums stay in fp32. Not where `computes_in_bf16`."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")
