"""Arithmetic on a cluster before it is rented: hours, dollars, encoders, memory a rank, scaling over GPUs."""

import math

import pandas as pd
import torch
from diffusers import UNet2DConditionModel

from ..unet import load_unet_config
from . import published_results


def _positive(name, value):
    number = isinstance(value, (int, float)) or hasattr(value, "__float__")
    if isinstance(value, bool) or not number or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number above 0.")
    return value


def _count(name, value):
    if _positive(name, value) != int(value):
        raise ValueError(f"{name}={value!r} must be a whole number.")
    return int(value)


def training_hours(num_samples: float, images_per_second: float) -> float:
    """Hours that `num_samples` take at `images_per_second` (all workers together). ValueError if not above 0."""
    return _positive("num_samples", num_samples) / _positive("images_per_second", images_per_second) / 3600


def dollars(hours: float, instances: dict[str, int], prices: dict[str, float] | None = None) -> float:
    """Price of `hours` on `instances`, such as {"p4de.24xlarge": 4, "g5.2xlarge": 40}.

    `prices` ($ an hour by name) adds to INSTANCES or overrides it. ValueError for a name without a price, and for
    hours, counts or prices that are not above 0.
    """
    known = {instance.name: instance.dollars_per_hour for instance in published_results.INSTANCES} | (prices or {})
    if not instances:
        raise ValueError('instances={} names no machine: give at least one, such as {"p4de.24xlarge": 4}.')
    per_hour = 0.0
    for name, count in instances.items():
        if name not in known:
            raise ValueError(f"instance {name!r} has no price here: give prices={{{name!r}: dollars an hour}}.")
        per_hour += _count(f"instances[{name!r}]", count) * _positive(f"prices[{name!r}]", known[name])
    return _positive("hours", hours) * per_hour


def encoders_needed(trainer_rate: float, encoder_rate: float) -> int:
    """Fewest encoders that keep trainers busy: `trainer_rate` is all trainers', `encoder_rate` one encoder's images/s.

    ValueError if a rate is not above 0.
    """
    ratio = _positive("trainer_rate", trainer_rate) / _positive("encoder_rate", encoder_rate)
    return max(1, math.ceil(ratio * (1 - 1e-12)))  # rounding errors in the rates must not cost one encoder more


def online_throughput(num_encoders: int, encoder_rate: float, trainer_rate: float) -> float:
    """images/s when encoders stream into trainers: min(num_encoders x encoder_rate, trainer_rate).

    Source: the shape of the blog's Figure 6. ValueError if an argument is not above 0.
    """
    supply = _count("num_encoders", num_encoders) * _positive("encoder_rate", encoder_rate)
    return min(supply, _positive("trainer_rate", trainer_rate))


def predict_scaling(
    parameters: float,
    step_seconds: float,
    gigabytes_per_second: float,
    workers=(8, 16, 32, 64, 128),
    *,
    strategy: str = "fsdp",
    backward_share: float = 2 / 3,
) -> pd.DataFrame:
    """What the network allows when each of n workers computes `step_seconds` a step: a row for each n.

    A worker sends and receives (n - 1) / n of: gradients in fp32, twice under "ddp" (ring all-reduce), once under
    "fsdp" (reduce-scatter), which also gathers bf16 weights once. `gigabytes_per_second`: of a worker's link. Columns:
    communication seconds; efficiency if none of it overlaps with compute, and if it overlaps with the backward pass
    (`backward_share` of the step). Latency is not counted. ValueError for numbers not above 0 and other strategies.
    """
    bytes_each = {"ddp": 8, "fsdp": 6}
    if strategy not in bytes_each:
        raise ValueError(f"strategy={strategy!r} is not predicted: choose 'ddp' or 'fsdp'.")
    _positive("step_seconds", step_seconds)
    rate = 1e9 * _positive("gigabytes_per_second", gigabytes_per_second)
    rows = []
    for count in workers:
        count = _count("workers", count)
        talk = (count - 1) / count * bytes_each[strategy] * _positive("parameters", parameters) / rate
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
    that a sharded rank gathers to compute, in the precision of computing, which is all of them, or under "fsdp-full"
    the largest block and what belongs to no block. With `accumulates` (`micro_batch_size` smaller than a unit), also
    "accumulated": the whole fp32 gradients, which a sharded rank holds until the last micro-batch.

    FSDP2 splits each parameter along its first dimension by `torch.chunk`, so the first rank holds a little more than
    its share. "hsdp" shards over the ranks of a node.
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(load_unet_config(name))
    across = {"ddp": 1, "hsdp": min(ranks, ranks_per_node)}.get(strategy, ranks)
    held = 4 * sum(-(-p.shape[0] // across) * p[0].numel() for p in unet.parameters())
    sharded = strategy != "ddp" and (ranks > 1 or precision == "bf16")  # as `unet.is_sharded`
    gathered = 0
    if sharded:
        parts = [*unet.down_blocks, unet.mid_block, *unet.up_blocks]
        sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
        total = sum(p.numel() for p in unet.parameters())
        gathered = (2 if precision == "bf16" else 4) * (
            total - sum(sizes) + max(sizes) if strategy == "fsdp-full" else total
        )
    found = {"parameters": held, "gradients": held, "optimizer": 2 * held, "gathered": gathered}
    if accumulates:
        found["accumulated"] = 4 * sum(p.numel() for p in unet.parameters()) if sharded else 0
    return found


def memory_table(name: str, ranks=(1, 8, 32, 128), **options) -> pd.DataFrame:
    """GiB a rank by `memory`, a row for each strategy and number of ranks; `options` as `memory` takes them."""
    rows = []
    for strategy in ("ddp", "fsdp", "fsdp-full", "hsdp"):
        for number in ranks:
            parts = {part: size / 2**30 for part, size in memory(name, strategy, number, **options).items()}
            rows.append({"strategy": strategy, "ranks": number, **parts, "all": sum(parts.values())})
    return pd.DataFrame(rows)
