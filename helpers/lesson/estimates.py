"""Estimates for a cluster before it is rented: hours, dollars, encoders, memory per rank, scaling over GPUs."""

import functools
import math
import numbers
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
from ..production.extras import meter
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
# FLUX.1's VAE has 16 channels, and no convolution around them; by its published config.
FLUX_VAE = SD2_VAE | dict(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, sample_size=1024)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The networks of a full run, and the tokens of its captions.

    Args:
        unet_config: name of the denoiser.
        vae: config of an `AutoencoderKL`.
        text_class, text: class and config of the text encoder.
        tokens: tokens of a caption that is encoded or trained on, padding included.
        stored_tokens: mean number of stored tokens, for each caption of a row.
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


# By their name in `helpers/profiles`, as in full-today-256.yaml.
RECIPES = {
    "sd2": Recipe(
        unet_config="sd2-base",
        vae=SD2_VAE,
        text_class=CLIPTextModel,
        text=CLIPTextConfig(**SD2_TEXT),
        tokens=77,
        stored_tokens=(77,),
    ),
    "today": Recipe(
        unet_config="transformer-600m",
        vae=FLUX_VAE,
        text_class=T5GemmaEncoder,
        text=T5GemmaConfig().encoder,  # the default in Transformers is T5Gemma 2B-2B
        tokens=128,
        # Recap-DataComp-1B has 49.4 and 10.2 words on average (Li et al. 2024); assumed: four tokens for three words
        stored_tokens=(66, 14),
        # no mask, since the "meta" device cannot look into one
        call={"attention_mask": {"full_attention": None, "sliding_attention": None}},
    ),
}


def check_numbers(*, zero_allowed: bool = False, **values: float) -> None:
    """Raises ValueError that names a value unless all are finite numbers above 0, or at least 0 if that is allowed."""
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf or (value == 0 and not zero_allowed):
            raise ValueError(
                f"{name}={value!r} must be a finite number {'of at least' if zero_allowed else 'above'} 0."
            )


def training_hours(num_samples: float, images_per_second: float) -> float:
    """Hours that `num_samples` take at `images_per_second` (all workers together). ValueError if not above 0."""
    check_numbers(num_samples=num_samples, images_per_second=images_per_second)
    return num_samples / images_per_second / 3600


def encoders_needed(trainer_rate: float, encoder_rate: float) -> int:
    """Fewest encoders that keep trainers busy.

    `trainer_rate`: images/s of all trainers; `encoder_rate`: of one encoder. ValueError if a rate is not above 0.
    """
    check_numbers(trainer_rate=trainer_rate, encoder_rate=encoder_rate)
    return max(1, math.ceil(trainer_rate / encoder_rate * (1 - 1e-12)))  # rounding errors must not add an encoder


def online_throughput(num_encoders: int, encoder_rate: float, trainer_rate: float) -> float:
    """images/s when encoders stream into trainers: min(num_encoders x encoder_rate, trainer_rate).

    Source: the shape of the blog's Figure 6. ValueError if an argument is not above 0.
    """
    check_numbers(num_encoders=num_encoders, encoder_rate=encoder_rate, trainer_rate=trainer_rate)
    return min(num_encoders * encoder_rate, trainer_rate)


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


@functools.cache
def step_flops(resolution: int, recipe: str = "sd2") -> float:
    """FLOPs of a training step on one row of a recipe's run, whose caption is padded."""
    one, side = RECIPES[recipe], resolution // 8
    return meter.training_flops(one.unet_config, (one.channels, side, side), (one.tokens, one.text.hidden_size))


def count_flops(name: str, latents_shape: tuple[int, ...], text_shape: tuple[int, ...]) -> pd.DataFrame:
    """Parameters and forward FLOPs of a denoiser by block for one sample, counted on the "meta" device.

    Returns a frame with columns block, parameters, gflops, in the order of the forward pass. A multiplication and an
    addition are two FLOPs. Arguments as for `meter.count_forward`.
    """
    denoiser, counter = meter.count_forward(name, latents_shape, text_shape)
    flops = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    rows = []
    for block, module in denoisers.parts(denoiser, denoisers.adapter_of(denoiser).parts).items():
        parameters = sum(parameter.numel() for parameter in module.parameters())
        rows.append((block, parameters, flops.get(f"{type(denoiser).__name__}.{block}", 0) / 1e9))
    return pd.DataFrame(rows, columns=["block", "parameters", "gflops"])


def row_bytes(resolution: int, recipe: str = "sd2") -> tuple[int, int]:
    """`(latents, captions)` of a stored row of a recipe's run, on average: moments and embeddings in fp16."""
    one = RECIPES[recipe]
    return 2 * 2 * one.channels * (resolution // 8) ** 2, 2 * sum(one.stored_tokens) * one.text.hidden_size


def feature_bytes(resolution: int, recipe: str = "sd2", width: int = 768) -> int:
    """Bytes of a row's image features (`production.features`), in fp16. `width`: the image encoder's, such as ViT-B."""
    denoiser = denoisers.load_denoiser_config(RECIPES[recipe].unet_config)
    side = resolution // 8 // denoisers.ADAPTERS[denoiser["_class_name"]].divisor(denoiser)
    return 2 * width * side**2


# Bytes per parameter that a ring carries in a step: fp32 gradients once by reduce-scatter or twice by all-reduce, and
# bf16 weights once or twice by all-gather.
RING_BYTES = {"ddp": 8, "fsdp": 6, "hsdp": 8, "fsdp-full": 8}


def predict_scaling(
    parameters: float,
    step_seconds: float,
    gigabytes_per_second: float = published_results.FACTS["network of a node, EFA"].value,
    workers: Iterable[int] = (8, 16, 32, 64, 128),
    *,
    strategy: str = "fsdp",
    ranks_per_node: int = 8,
    within_node: float = published_results.FACTS["NVLink of an A100"].value,
) -> pd.DataFrame:
    """The efficiency that the network allows when each of n workers computes `step_seconds` per step: a row for each n.

    A ring over all ranks enters and leaves each node once, however many ranks it has. So a collective of S bytes takes
    (n - 1) / n * S divided by the bandwidth of the slowest link in GB/s: `gigabytes_per_second`, that of a node's
    network, with two nodes or more, else `within_node`. `RING_BYTES` gives S. "hsdp" does as "fsdp" within each node,
    whose ranks then all-reduce their shards across nodes together.

    Columns: communication seconds; efficiency if none of it overlaps with compute, and if it overlaps with the backward
    pass, two thirds of a step. Latency is not counted. Raises ValueError for numbers not above 0 and other strategies.
    The default bandwidth needs EFA on AWS; TCP has a seventeenth. `network.explain` says whether a node can use EFA.
    """
    if strategy not in RING_BYTES:
        raise ValueError(f"strategy={strategy!r} is not predicted: choose one of {', '.join(map(repr, RING_BYTES))}.")
    check_numbers(parameters=parameters, step_seconds=step_seconds, gigabytes_per_second=gigabytes_per_second)

    def ring_seconds(ranks: float, bytes_each: float, rate: float) -> float:
        return (ranks - 1) / ranks * bytes_each * parameters / (1e9 * rate)

    rows = []
    for count in workers:
        here = min(count, ranks_per_node)
        slowest_link = min(within_node, gigabytes_per_second) if count > here else within_node
        if strategy == "hsdp":
            seconds = ring_seconds(here, RING_BYTES["fsdp"], within_node)
            seconds += ring_seconds(count / here, RING_BYTES["hsdp"], gigabytes_per_second)
        else:
            seconds = ring_seconds(count, RING_BYTES[strategy], slowest_link)
        exposed = max(0.0, seconds - step_seconds * 2 / 3)
        rows.append((count, seconds, step_seconds / (step_seconds + seconds), step_seconds / (step_seconds + exposed)))
    names = ["workers", "communication, s", "efficiency, nothing hidden", "efficiency, hidden behind backward"]
    return pd.DataFrame(rows, columns=names)


def memory(name: str, strategy: str, ranks: int, *, precision: str = "fp32", ranks_per_node: int = 8) -> dict[str, int]:
    """Bytes of training state on the rank that holds most; activations are not counted.

    Returns a dict: "parameters", "gradients" and "optimizer" (AdamW's two moments), in fp32; "gathered": the weights
    that a sharded rank gathers to compute, in compute precision: all of them, or under "fsdp-full" the largest block
    and those outside any block.

    FSDP2 splits each parameter along its first dimension by `torch.chunk`, so the first rank holds a little more than
    its share. "hsdp" shards over the ranks of a node.
    """
    with torch.device("meta"):
        denoiser = denoisers.build_denoiser(name)
    across = {"ddp": 1, "hsdp": min(ranks, ranks_per_node)}.get(strategy, ranks)
    held = 4 * sum(-(-p.shape[0] // across) * p[0].numel() for p in denoiser.parameters())
    gathered = 0
    if strategy != "ddp" and (ranks > 1 or precision == "bf16"):  # as `sharding.is_sharded`
        gathered = sum(p.numel() for p in denoiser.parameters())
        if strategy == "fsdp-full":
            sizes = [sum(p.numel() for p in block.parameters()) for block in denoisers.blocks(denoiser)]
            gathered += max(sizes) - sum(sizes)
        gathered *= 2 if precision == "bf16" else 4
    return {"parameters": held, "gradients": held, "optimizer": 2 * held, "gathered": gathered}


def memory_table(name: str, ranks: Iterable[int] = (1, 8, 32, 128), **options: Any) -> pd.DataFrame:
    """GiB per rank from `memory`, a row for each strategy and number of ranks; `options`: of `memory`."""
    rows = []
    for strategy in RING_BYTES:
        for number in ranks:
            parts = {part: size / 2**30 for part, size in memory(name, strategy, number, **options).items()}
            rows.append({"strategy": strategy, "ranks": number, **parts, "all": sum(parts.values())})
    return pd.DataFrame(rows)
