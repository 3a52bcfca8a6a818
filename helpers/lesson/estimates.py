"""Estimates for a cluster before it is rented: hours, dollars, encoders, memory per rank, scaling over GPUs."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from diffusers import AutoencoderKL
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedConfig, PreTrainedModel, T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from ..model import denoisers
from ..train import meter
from . import published_results

# The frozen networks of Stable Diffusion 2, as their published configs say.
SD2_VAE = dict(
    block_out_channels=[128, 256, 512, 512],
    layers_per_block=2,
    down_block_types=["DownEncoderBlock2D"] * 4,
    up_block_types=["UpDecoderBlock2D"] * 4,
    sample_size=768,
)
SD2_TEXT = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=23,
    num_attention_heads=16,
    hidden_act="gelu",
    projection_dim=512,
)
# FLUX.1's has 16 channels, and no convolution around them. Its config, too, is the published one.
FLUX_VAE = SD2_VAE | dict(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, sample_size=1024)


@dataclass(frozen=True)
class Recipe:
    """The networks of a full run, and the tokens of its captions.

    Args:
        unet_config: the denoiser.
        vae: the config of an `AutoencoderKL`.
        text_class, text: the text encoder's class and config.
        tokens: of a caption that is encoded or trained on, with padding.
        stored_tokens: of each caption of a row that is stored, on average.
        call: further arguments of the text encoder's forward pass.
    """

    unet_config: str
    vae: dict[str, Any]
    text_class: type[PreTrainedModel]
    text: PreTrainedConfig
    tokens: int
    stored_tokens: tuple[int, ...]
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return self.vae.get("latent_channels", 4)


# By the name in `helpers/profiles`, as in full-today-256.yaml. Its text encoder is that of T5Gemma 2B-2B, whose config
# Transformers has as default; without a mask, since the "meta" device cannot look into one. Its captions are those of
# Recap-DataComp-1B: 49.4 and 10.2 words on average (Li et al. 2024); four tokens for three words is an assumption.
RECIPES = {
    "sd2": Recipe("sd2-base", SD2_VAE, CLIPTextModel, CLIPTextConfig(**SD2_TEXT), 77, (77,)),
    "today": Recipe(
        "transformer-600m",
        FLUX_VAE,
        T5GemmaEncoder,
        T5GemmaConfig().encoder,
        128,
        (66, 14),
        {"attention_mask": {"full_attention": None, "sliding_attention": None}},
    ),
}


def check_positive(name: str, value: float) -> float:
    """`value`; raises ValueError naming it unless it is a finite number above 0."""
    number = isinstance(value, (int, float)) or hasattr(value, "__float__")
    if isinstance(value, bool) or not number or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number above 0.")
    return value


def check_count(name: str, value: float) -> int:
    """`value` as an int; raises ValueError unless it is a whole number above 0."""
    if check_positive(name, value) != int(value):
        raise ValueError(f"{name}={value!r} must be a whole number.")
    return int(value)


def training_hours(num_samples: float, images_per_second: float) -> float:
    """Hours that `num_samples` take at `images_per_second` (all workers together). ValueError if not above 0."""
    return check_positive("num_samples", num_samples) / check_positive("images_per_second", images_per_second) / 3600


def encoders_needed(trainer_rate: float, encoder_rate: float) -> int:
    """Fewest encoders that keep trainers busy: `trainer_rate` is all trainers', `encoder_rate` one encoder's images/s.

    ValueError if a rate is not above 0.
    """
    ratio = check_positive("trainer_rate", trainer_rate) / check_positive("encoder_rate", encoder_rate)
    return max(1, math.ceil(ratio * (1 - 1e-12)))  # rounding errors in the rates must not add an encoder


def build_encoders(recipe: str = "sd2", device: torch.device | str = "meta") -> tuple[AutoencoderKL, PreTrainedModel]:
    """The VAE and the text encoder of one of `RECIPES` with random weights, initialised on `device`."""
    one = RECIPES[recipe]
    with torch.device(device):
        return AutoencoderKL.from_config(one.vae).eval(), one.text_class(one.text).eval()


@functools.cache
def encoder_flops(*resolutions: int, recipe: str = "sd2", captions: int = 1) -> int:
    """FLOPs of encoding one row with a recipe's models: `captions` of it, and the picture at each resolution."""
    vae, text_encoder = build_encoders(recipe)
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        text_encoder(torch.zeros(captions, RECIPES[recipe].tokens, dtype=torch.long), **RECIPES[recipe].call)
        for resolution in resolutions:
            vae.encode(torch.zeros(1, 3, resolution, resolution))
    return counter.get_total_flops()


def encoder_rate(resolutions: Iterable[int], accelerator: str = "A10G", **row: Any) -> float:
    """Estimated rows/s that one GPU encodes at `resolutions` in one pass, from counted FLOPs; not measured.

    `row`: `recipe` and `captions`, as for `encoder_flops`. The share of its peak is taken to be that of an A10G at the
    101.9 images/s at 256 pixels that follow from published numbers of Stable Diffusion 2, 46 %. ValueError for an
    accelerator that is not in `meter.ACCELERATORS`.
    """
    found = meter.find_accelerator(accelerator)
    if found is None:
        raise ValueError(f"accelerator={accelerator!r} has no data sheet in helpers.runtime.meter.ACCELERATORS.")
    seen = published_results.FACTS["one A10G, online, at least"].value
    utilization = seen * encoder_flops(256) / meter.find_accelerator("A10G").bf16_tflops
    return found.bf16_tflops * utilization / encoder_flops(*resolutions, **row)


@functools.cache
def step_flops(resolution: int, recipe: str = "sd2") -> float:
    """FLOPs of a training step on one row of a recipe's run, whose caption is padded."""
    one, side = RECIPES[recipe], resolution // 8
    return meter.training_flops(one.unet_config, (one.channels, side, side), (one.tokens, one.text.hidden_size))


def row_bytes(resolution: int, recipe: str = "sd2") -> tuple[int, int]:
    """`(latents, captions)` of a stored row of a recipe's run, on average: moments and embeddings in fp16."""
    one = RECIPES[recipe]
    return 2 * 2 * one.channels * (resolution // 8) ** 2, 2 * sum(one.stored_tokens) * one.text.hidden_size


def online_throughput(num_encoders: int, encoder_rate: float, trainer_rate: float) -> float:
    """images/s when encoders stream into trainers: min(num_encoders x encoder_rate, trainer_rate).

    Source: the shape of the blog's Figure 6. ValueError if an argument is not above 0.
    """
    supply = check_count("num_encoders", num_encoders) * check_positive("encoder_rate", encoder_rate)
    return min(supply, check_positive("trainer_rate", trainer_rate))


# Bytes per parameter that a ring carries in a step: fp32 gradients once by reduce-scatter or twice by all-reduce, and
# bf16 weights once or twice by all-gather.
_RING_BYTES = {"ddp": 8, "fsdp": 6, "fsdp-full": 8, "hsdp": 8}


def predict_scaling(
    parameters: float,
    step_seconds: float,
    gigabytes_per_second: float = published_results.FACTS["network of a node, EFA"].value,
    workers=(8, 16, 32, 64, 128),
    *,
    strategy: str = "fsdp",
    backward_share: float = 2 / 3,
    ranks_per_node: int = 8,
    within_node: float = published_results.FACTS["NVLink of an A100"].value,
) -> pd.DataFrame:
    """The efficiency that the network allows when each of n workers computes `step_seconds` per step: a row for each n.

    A ring over all ranks enters and leaves each node once, whatever the number of its ranks, so a collective of S bytes
    takes (n - 1) / n * S divided by the bandwidth of the slowest link: `gigabytes_per_second`, of a node's network,
    with two nodes or more, else `within_node`. A ring carries fp32 gradients, twice under "ddp" (all-reduce), otherwise
    once (reduce-scatter), and bf16 weights once under "fsdp", twice under "fsdp-full". "hsdp" does as "fsdp" within
    each node, whose ranks then all-reduce their shards across nodes together. Columns: communication seconds;
    efficiency if none of it overlaps with compute, and if it overlaps with the backward pass (`backward_share` of the
    step). Latency is not counted. Raises ValueError for numbers not above 0 and other strategies.

    On AWS the default, `FACTS["network of a node, EFA"]`, needs EFA; without it NCCL uses TCP, at a seventeenth
    (`FACTS["network of a node, TCP"]`). `network.explain` says whether it is on.
    """
    if strategy not in _RING_BYTES:
        raise ValueError(f"strategy={strategy!r} is not predicted: choose one of {', '.join(map(repr, _RING_BYTES))}.")
    check_positive("step_seconds", step_seconds)
    across, within = 1e9 * check_positive("gigabytes_per_second", gigabytes_per_second), 1e9 * within_node

    def seconds(ranks, bytes_each, rate):
        return (ranks - 1) / ranks * bytes_each * check_positive("parameters", parameters) / rate

    rows = []
    for count in workers:
        count = check_count("workers", count)
        here = min(count, ranks_per_node)
        if strategy == "hsdp":
            talk = seconds(here, _RING_BYTES["fsdp"], within) + seconds(count / here, _RING_BYTES["hsdp"], across)
        else:
            talk = seconds(count, _RING_BYTES[strategy], min(within, across) if count > here else within)
        exposed = max(0.0, talk - backward_share * step_seconds)
        rows.append((count, talk, step_seconds / (step_seconds + talk), step_seconds / (step_seconds + exposed)))
    names = ["workers", "communication, s", "efficiency, nothing hidden", "efficiency, hidden behind backward"]
    return pd.DataFrame(rows, columns=names)


def memory(
    name: str,
    strategy: str,
    ranks: int,
    *,
    precision: str = "fp32",
    ranks_per_node: int = 8,
    accumulates: bool = False,
) -> dict[str, int]:
    """Bytes of training state on the rank that holds most; activations are not counted.

    Returns a dict: "parameters", "gradients" and "optimizer" (AdamW's two moments), in fp32; "gathered": the weights
    that a sharded rank gathers to compute, in compute precision: all of them, or under "fsdp-full" the largest block
    and those outside any block. With `accumulates` (`micro_batch_size` smaller than a unit), also "accumulated": the
    whole fp32 gradients, which a sharded rank holds until the last micro-batch.

    FSDP2 splits each parameter along its first dimension by `torch.chunk`, so the first rank holds a little more than
    its share. "hsdp" shards over the ranks of a node.
    """
    with torch.device("meta"):
        denoiser = denoisers.build_denoiser(name)
    across = {"ddp": 1, "hsdp": min(ranks, ranks_per_node)}.get(strategy, ranks)
    held = 4 * sum(-(-p.shape[0] // across) * p[0].numel() for p in denoiser.parameters())
    sharded = strategy != "ddp" and (ranks > 1 or precision == "bf16")  # as `sharding.is_sharded`
    gathered = 0
    if sharded:
        sizes = [sum(p.numel() for p in block.parameters()) for block in denoisers.blocks(denoiser)]
        total = sum(p.numel() for p in denoiser.parameters())
        gathered = (2 if precision == "bf16" else 4) * (
            total - sum(sizes) + max(sizes) if strategy == "fsdp-full" else total
        )
    found = {"parameters": held, "gradients": held, "optimizer": 2 * held, "gathered": gathered}
    if accumulates:
        found["accumulated"] = 4 * sum(p.numel() for p in denoiser.parameters()) if sharded else 0
    return found


def memory_table(name: str, ranks=(1, 8, 32, 128), **options) -> pd.DataFrame:
    """GiB per rank from `memory`, a row for each strategy and number of ranks; `options`: of `memory`."""
    rows = []
    for strategy in ("ddp", "fsdp", "fsdp-full", "hsdp"):
        for number in ranks:
            parts = {part: size / 2**30 for part, size in memory(name, strategy, number, **options).items()}
            rows.append({"strategy": strategy, "ranks": number, **parts, "all": sum(parts.values())})
    return pd.DataFrame(rows)
