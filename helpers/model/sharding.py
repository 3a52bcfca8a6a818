"""The denoiser of a training run: built, compiled, sharded, in fp32 or bf16. No Ray.

Read `build_model` first. Next come the functions that it calls, in the order of the calls. The last two functions
belong to the training step.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os

import diffusers
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..distributed import COMPILED_SHAPES, has_compiler, rank, world_size
from . import denoisers


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
    auxiliary: torch.nn.ModuleDict | None = None,
) -> tuple[diffusers.ModelMixin, torch.nn.Module]:
    """`(denoiser, model)`: the denoiser of a training run with its first weights, and the module to call in training.

    Call it on every rank. The weights are the same on any number of ranks. A rank allocates its own part only, after
    sharding; rank 0 also needs CPU memory for all weights, because it draws them.

    Args:
        name: a preset or a config.json, see `denoisers.load_denoiser_config`.
        seed: of the weights.
        strategy: what is sharded over the ranks.
            - "ddp": the batch alone. Every rank holds all weights and optimizer state, and gradients are averaged.
            - "fsdp": stored weights, gradients and optimizer state. Weights stay gathered between the forward pass and
              the step's last backward pass (SHARD_GRAD_OP).
            - "fsdp-full": the same; weights are gathered block by block in each pass, then freed (FULL_SHARD).
            - "hsdp": "fsdp" within a node, "ddp" across nodes; see `shard_size`.
        precision: "fp32", or "bf16": see `autocast` and `apply_fsdp`.
        compile_unet: see `compile_blocks`.
        channels_last: see `apply_channels_last`.
        activation_checkpointing: recompute activations in the backward pass, in place of keeping them in memory.
        device: the device of this rank.
        auxiliary: further modules, trained and sharded with the denoiser, with their first weights on the CPU. Copies
            of them become the denoiser's `auxiliary`.
    """
    with torch.device("meta"):  # shapes without memory
        denoiser = denoisers.build_denoiser(name)
    if activation_checkpointing:
        denoiser.enable_gradient_checkpointing()
    if compile_unet:
        compile_blocks(denoiser)
    if auxiliary:
        denoiser.add_module(denoisers.AUXILIARY, copy.deepcopy(auxiliary).to("meta"))
    sharded = is_sharded(strategy, precision)
    if sharded:
        apply_fsdp(denoiser, strategy, precision, device)
    allocate_weights(denoiser, name, seed, device, auxiliary)
    if channels_last:
        apply_channels_last(denoiser, sharded)
    if world_size() == 1 or sharded:
        return denoiser, denoiser
    return denoiser, DistributedDataParallel(denoiser, gradient_as_bucket_view=True)


def compile_blocks(denoiser: diffusers.ModelMixin) -> None:
    """Compile each of `denoisers.blocks` in place, once for each size of its input.

    Without a C++ compiler, it prints a sentence and compiles nothing. Parameter names do not change. A U-Net that is
    compiled as a whole got wrong gradients on a CPU with PyTorch 2.13; with compiled blocks, gradients agree with eager
    ones.
    """
    if not has_compiler():
        print("compile_unet=True is skipped: there is no C++ compiler (g++ or clang++) on this machine.")
        return
    # By default TorchDynamo cuts blocks at the ends of DDP's buckets. DDP reduces gradients beside whole ones as well.
    torch._dynamo.config.optimize_ddp = False
    if hasattr(inductor_config, "loop_reindexing_after_fusion") and torch.__version__ < (2, 14):
        # PyTorch 2.13 fuses a GroupNorm with what precedes it even if memory is then read out of order. An upsampling
        # with its convolution and GroupNorm took up to six times as long on a GPU (pytorch#189488). 2.14 has a guard.
        inductor_config.loop_reindexing_after_fusion = False
    blocks = denoisers.blocks(denoiser)
    # By default TorchDynamo counts the graphs of all blocks of a class together, stops at eight, and then compiles for
    # symbolic sizes. Inductor chooses worse memory layouts for those.
    try:
        for block in blocks:
            block.compile(dynamic=False, isolate_recompiles=True, recompile_limit=COMPILED_SHAPES)
    except TypeError:  # PyTorch 2.11 has no `isolate_recompiles`
        torch._dynamo.config.recompile_limit = COMPILED_SHAPES * len(blocks)
        for block in blocks:
            block.compile(dynamic=False)


def is_sharded(strategy: str, precision: str) -> bool:
    """Whether `build_model` applies FSDP2.

    "ddp" never uses FSDP2. With several ranks, all other strategies do. A single rank has nothing to shard. It uses
    FSDP2 only to compute in bf16 with fp32 weights, and only if there is a process group.
    """
    return strategy != "ddp" and (world_size() > 1 or (precision == "bf16" and dist.is_initialized()))


def apply_fsdp(denoiser: diffusers.ModelMixin, strategy: str, precision: str, device: torch.device | str) -> None:
    """Shard the denoiser in place with FSDP2: each block, then the rest.

    In bf16, weights are gathered and used in bf16, also by GroupNorm and LayerNorm (MosaicML's low-precision norms).
    Gradients are summed in fp32; weights are stored and updated in fp32.
    """
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else {}
    options = dict(mesh=build_mesh(strategy, device), reshard_after_forward=strategy == "fsdp-full")
    auxiliary = getattr(denoiser, denoisers.AUXILIARY, {})
    for block in [*denoisers.blocks(denoiser), *auxiliary.values()]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes), **options)
    # The loss takes the prediction in fp32. Between blocks, activations stay in bf16.
    policy = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(denoiser, mp_policy=policy, **options)
    if precision == "bf16":
        denoiser.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def build_mesh(strategy: str, device: torch.device | str) -> DeviceMesh:
    """The ranks' device mesh. It has one dimension, "shard".

    Under "hsdp" with several groups of `shard_size` ranks, it has two, "replicate" and "shard".
    """
    kind, world = torch.device(device).type, world_size()
    size = shard_size(device) if strategy == "hsdp" else world
    if size == world:
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))


def shard_size(device: torch.device | str) -> int:
    """Number of consecutive ranks that share one copy of the weights under "hsdp": the ranks of a node.

    If nodes differ in size, the number is the greatest common divisor of their sizes, so that no copy spans two nodes.
    If the divisor is 1, all ranks share one copy, as under "fsdp", because all weights may not fit on one rank. Rank 0
    prints the choice.
    """
    here = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", world_size())), device=device)
    sizes = [torch.zeros_like(here) for _ in range(world_size())]
    dist.all_gather(sizes, here)
    sizes = sorted({int(size) for size in sizes})
    if len(sizes) == 1:
        return sizes[0]
    size = math.gcd(*sizes)
    size = size if size > 1 else world_size()
    if rank() == 0:
        print(f"strategy='hsdp' shards over groups of {size} ranks, as nodes have {sizes} of them: give each as many.")
    return size


def cast_inputs(denoiser: diffusers.ModelMixin, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    """Forward pre-hook: inputs in bf16, except for the timestep, which bf16 would round to 8 bits.

    The timestep is the second positional argument or the keyword argument `timestep`.
    """

    def cast(name, value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.bfloat16() if is_float and name not in (1, "timestep") else value

    arguments = tuple(cast(position, value) for position, value in enumerate(arguments))
    return arguments, {name: cast(name, value) for name, value in named.items()}


def allocate_weights(
    denoiser: diffusers.ModelMixin,
    name: str,
    seed: int,
    device: torch.device | str,
    auxiliary: torch.nn.ModuleDict | None = None,
) -> None:
    """Move a denoiser from the "meta" device to `device`, with the weights that rank 0 draws and broadcasts."""
    weights = denoisers.build_denoiser(name, seed=seed).state_dict() if rank() == 0 else {}
    if auxiliary and rank() == 0:
        weights |= {f"{denoisers.AUXILIARY}.{key}": value for key, value in auxiliary.state_dict().items()}
    denoiser.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size() > 1)
    set_model_state_dict(denoiser, weights, options=options)


def apply_channels_last(denoiser: diffusers.ModelMixin, sharded: bool) -> None:
    """Let convolutions use the memory layout (B, H, W, C), on which tensor cores are fastest.

    Without FSDP2, the weights are converted to channels_last. FSDP2 needs contiguous weights, so with it each
    convolution's inputs are converted instead.
    """
    if not sharded:
        denoiser.to(memory_format=torch.channels_last)
        return

    def convert_input(module, arguments):
        return (arguments[0].contiguous(memory_format=torch.channels_last),)

    for module in denoiser.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(convert_input)


# ---- in the training step


def synchronise_gradients(model: torch.nn.Module, last: bool, strategy: str) -> contextlib.AbstractContextManager:
    """Context manager for a micro-batch: only the backward pass of the `last` one reduces gradients over the ranks.

    Under "fsdp" and "hsdp", weights stay gathered until the end of that pass. So a step needs one all-gather, whatever
    the number of micro-batches.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        if strategy != "fsdp-full":
            model.set_reshard_after_backward(last)
    return contextlib.nullcontext()


def autocast(model: torch.nn.Module, precision: str) -> torch.autocast:
    """Context manager for a forward pass: with "bf16", matrix products in bf16; weights and sums stay in fp32.

    It changes nothing for a model that casts itself: one that FSDP2 shards, or one with weights in bf16. Otherwise
    autocast would compute the norms of such a model in fp32.
    """
    weight = next(model.parameters())
    casts_itself = isinstance(model, FSDPModule) or weight.dtype == torch.bfloat16
    enabled = precision == "bf16" and not casts_itself
    return torch.autocast(weight.device.type, dtype=torch.bfloat16, enabled=enabled)
