"""Measures a training step: its FLOPs, MFU, peak memory."""

from __future__ import annotations

import functools
import resource
import sys
from typing import TYPE_CHECKING, Any

import diffusers
import pandas as pd
import torch
from torch.utils.flop_counter import FlopCounterMode

from ...model import denoisers
from ...train.extra import Extra, Hook
from ...train.metrics import WARM_UP, after_warm_up, throughput
from . import validated

if TYPE_CHECKING:
    from ...train.loop import Run
    from ...train.step import Unit

# Dense tensor-core TFLOP/s in bf16 and in TF32 of a GPU, from NVIDIA's data sheets. MFU of fp32 training is relative to
# the TF32 rate, because PyTorch's convolutions use TF32 by default. PyTorch's matrix products do not use TF32, so the
# MFU of fp32 training stays low. A name that contains another one is listed before it.
PEAK_TFLOPS = {
    "A10G": (70, 35),
    "A100": (312, 156),
    "A10": (125, 62.5),
    "L40S": (362, 183),
    "L4": (121, 60),
    "H100 PCIe": (756, 378),
    "H100": (989, 494),
    "H200": (989, 494),
    "B200": (2250, 1125),
}


def find_accelerator(device_name: str) -> str | None:
    """The key of a GPU in `PEAK_TFLOPS`; None for a GPU that is not listed.

    `device_name`: what the GPU's driver calls it, such as "NVIDIA A100-SXM4-80GB".
    """
    words = device_name.replace("-", " ").lower()
    return next((name for name in PEAK_TFLOPS if f" {name.lower()} " in f" {words} "), None)


def count_forward(
    name: str, latents_shape: tuple[int, ...], text_shape: tuple[int, ...]
) -> tuple[diffusers.ModelMixin, FlopCounterMode]:
    """A denoiser without weights, and the FLOPs of its forward pass on one sample, counted on the "meta" device.

    Args:
        name: see `denoisers.load_denoiser_config`.
        latents_shape: (C, H, W).
        text_shape: (L, D).
    """
    with torch.device("meta"):
        denoiser = denoisers.build_denoiser(name)
        inputs = torch.randn(1, *latents_shape), torch.zeros(1, dtype=torch.long), torch.randn(1, *text_shape)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            denoisers.denoise(denoiser, *inputs)
    return denoiser, counter


def training_flops(unet_config: str, latents_shape: tuple[int, ...], text_shape: tuple[int, ...]) -> float:
    """FLOPs of training on one sample: a forward pass, and twice that for the backward pass (no recomputation).

    A multiplication and an addition are two FLOPs (`torch.utils.flop_counter`).
    """
    _, counter = count_forward(unet_config, latents_shape, text_shape)
    return 3.0 * counter.get_total_flops()


def peak_flops(device: torch.device | str, precision: str = "fp32") -> float | None:
    """Peak FLOP/s of a GPU in `PEAK_TFLOPS`; None for other GPUs and for CPUs, whose peak is not known."""
    known = find_accelerator(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    if known is None:
        return None
    bf16, tf32 = PEAK_TFLOPS[known]
    return 1e12 * (bf16 if precision == "bf16" else tf32)


def peak_memory(device: torch.device | str) -> int:
    """Peak bytes so far: allocated on a GPU, or resident in this process on a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def hardware(device: torch.device | str) -> str:
    """What a speed was measured on, such as "NVIDIA H200, torch 2.13.0"."""
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads a worker"
    return f"{name}, torch {torch.__version__}"


@validated
class Meter(Extra):
    """Adds to each line of metrics `mfu` and `peak_memory_gib` of this worker.

    `mfu`: model FLOPs (`training_flops`) over the hardware's peak (`peak_flops`); None if the peak is not known.
    """

    def __call__(self, run: Run) -> Hook:
        step = run.train_step
        peak = peak_flops(step.device, run.config.precision)
        return Measure(run.config.unet_config, step.manifest.embeddings.shape, step.device, peak)


class Measure(Hook):
    """Args: see `training_flops`; `device`: this worker's; `peak`: its FLOP/s, None if not known."""

    def __init__(self, unet_config: str, text_shape: tuple[int, ...], device: torch.device, peak: float | None):
        self.device, self.peak = device, peak
        self.flops = functools.cache(lambda shape: training_flops(unet_config, shape, text_shape))

    def after_step(self, step: int, units: list[Unit], record: dict[str, Any]) -> None:
        rate = record["images_per_second_per_worker"]
        record["mfu"] = self.peak and self.flops(units[0].latents_spec.shape[1:]) * rate / self.peak
        record["peak_memory_gib"] = peak_memory(self.device) / 2**30


def speed_summary(metrics: dict[str, pd.DataFrame], skip: int = WARM_UP) -> pd.DataFrame:
    """The speed of runs with a `Meter`, as a frame: one row per run of {name: metrics}.

    The first `skip` steps are left out, as in `throughput`. Columns:
        images/s: see `throughput`
        a worker: images/s per worker
        MFU: NaN if the peak is not known
        peak memory, GiB
        data: share of the elapsed time spent waiting for data
        checkpoints: share of the elapsed time in pauses for checkpoints
    """
    rows = {}
    for name, frame in metrics.items():
        steps = after_warm_up(frame, skip)
        seconds, paused = steps["step_seconds"], steps["checkpoint_seconds"].sum()
        elapsed = seconds.sum() + paused
        rate, waiting = throughput(frame, skip)
        rows[name] = {
            "images/s": rate,
            "a worker": (steps["images_per_second_per_worker"] * seconds).sum() / elapsed,
            "MFU": (steps["mfu"].astype(float) * seconds).sum(min_count=1) / elapsed,
            "peak memory, GiB": steps["peak_memory_gib"].max(),
            "data": waiting,
            "checkpoints": paused / elapsed,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")
