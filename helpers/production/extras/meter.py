"""Measures a training step: images/s, FLOPs, MFU, peak memory, waiting for data and for other workers. No Ray."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import sys
from collections.abc import Iterable, Iterator

import diffusers
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ...config import TrainingConfig
from ...distributed import rank, world_size
from ...latents import schema
from ...latents.manifest import Manifest
from ...model import denoisers

# (name, start, end) in microseconds of a kernel or an operation.
Event = tuple[str, float, float]


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
COLLECTIVES = ("nccl", "gloo", "c10d")  # words in the names of their kernels and operations


def find_accelerator(device_name: str) -> str | None:
    """The key of a GPU in `PEAK_TFLOPS`; None for a GPU that is not listed.

    `device_name`: what the GPU's driver calls it, such as "NVIDIA A100-SXM4-80GB".
    """
    words = device_name.replace("-", " ").lower()
    return next((name for name in PEAK_TFLOPS if f" {name.lower()} " in f" {words} "), None)


@contextlib.contextmanager
def profiled(device: torch.device | str = "cpu") -> Iterator[list[Event]]:
    """Profile a block; the list that it yields is filled when the block ends.

    On a GPU, the list holds kernels and copies. On a CPU, it holds PyTorch's outermost operations and gloo's
    collectives.
    """
    on_gpu, events = torch.device(device).type == "cuda", []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else PyTorch's profiler prints when it starts and stops
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        yield events
        if on_gpu:
            torch.cuda.synchronize(device)
    for event in profiler.events():
        if on_gpu:
            counts = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        else:
            inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
            counts = event.name.startswith("gloo:") or (event.name.startswith("aten::") and not inner)
        if counts:
            events.append((event.name, event.time_range.start, event.time_range.end))


def is_collective(name: str) -> bool:
    """Whether a kernel or operation belongs to a collective, by its name. Compiled (Triton) kernels never do."""
    name = name.lower()
    return not name.startswith("triton") and any(word in name for word in COLLECTIVES)


def exposed_communication(events: list[Event]) -> float:
    """Share of a profiled step's time in collectives that do not overlap with compute."""
    everything = [(start, end) for _, start, end in events]
    compute = [(start, end) for name, start, end in events if not is_collective(name)]
    step = max((end for _, end in everything), default=0) - min((start for start, _ in everything), default=0)
    return (covered(everything) - covered(compute)) / step if step else 0.0


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that at least one of the intervals covers."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


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


class Meter:
    """Measures a worker's steps. `step_record` returns the columns of speed in `metrics.jsonl`:

    - `resolution`, `width` and `height` of the step's images.
    - `masked_rows` of the global batch, which are computed but not trained on; no other column counts them.
    - `step_seconds`, without checkpoints.
    - `images_per_second`: unmasked rows of the global batch over `step_seconds`; `images_per_second_per_worker`.
    - `mfu`: model FLOPs (`training_flops`) over the hardware's peak (`peak_flops`); None if the peak is not known.
    - `peak_memory_gib` of this worker.
    - `data_wait_share`: share of the step's time waiting for data.
    - `communication_share`: share of the profiled step's time in collectives that do not overlap with compute; None
      before that step, 0 with one worker. `config.profile_step=n` profiles the n-th step after each start of the
      worker; None: no step.
    - `checkpoint_seconds`: how long training paused for a checkpoint before this step.
    """

    def __init__(self, config: TrainingConfig, manifest: Manifest, device: torch.device | str):
        self.config, self.manifest, self.device = config, manifest, device
        self.num_steps, self.communication_share = 0, 0.0 if world_size() == 1 else None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager for every step. With several workers, rank 0 profiles the step that `profile_step` names."""
        self.num_steps += 1
        if world_size() == 1 or rank() > 0 or self.num_steps != self.config.profile_step:
            yield
            return
        with profiled(self.device) as events:
            yield
        self.communication_share = exposed_communication(events)

    @functools.cached_property
    def peak(self) -> float | None:
        return peak_flops(self.device, self.config.precision)

    @functools.cache  # noqa: B019 (a worker has one meter)
    def flops(self, shape: tuple[int, ...]) -> float:
        """FLOPs of training on one row of latents (C, H, W)."""
        return training_flops(self.config.unet_config, shape, self.manifest.embeddings.shape)

    def step_record(
        self,
        latents: schema.ColumnSpec,
        seconds: float,
        data_seconds: float,
        checkpoint_seconds: float,
        num_rows: int,
    ) -> dict[str, float | None]:
        """The columns of one step; `latents`: its column of latents; `num_rows`: unmasked rows of its global batch."""
        rate = num_rows / seconds
        per_worker = rate / world_size()
        return {
            "resolution": latents.resolution,
            "width": latents.size[0],
            "height": latents.size[1],
            "masked_rows": self.config.global_batch_size - num_rows,
            "step_seconds": seconds,
            "images_per_second": rate,
            "images_per_second_per_worker": per_worker,
            "mfu": self.flops(latents.shape[1:]) * per_worker / self.peak if self.peak else None,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
            "data_wait_share": data_seconds / seconds,
            "communication_share": self.communication_share,
            "checkpoint_seconds": checkpoint_seconds,
        }
