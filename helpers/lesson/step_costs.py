"""Where a step's time and FLOPs go: by category of work, by block of the denoiser. No Ray."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator

import pandas as pd
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..model import denoisers
from ..production.extras.meter import count_forward

# (name, start, end) in microseconds of a kernel or an operation.
Event = tuple[str, float, float]

COLLECTIVES = ("nccl", "gloo", "c10d")  # words in the names of their kernels and operations
# Categories of work, by words in the names of GPU kernels and of PyTorch's operations; the first match counts.
OP_CATEGORIES = {
    "communication": COLLECTIVES,
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "layout": ("nchwtonhwc", "nhwctonchw", "transpose"),
    "convolution": ("conv", "cudnn", "implicit", "winograd", "fprop", "dgrad", "wgrad"),
    "matrix product": ("gemm", "matmul", "addmm", "::mm", "::bmm", "cutlass", "nvjet", "xmma"),
    "norm": ("norm", "welford", "moments"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copy": ("memcpy", "memset", "copy", "catarray", "aten::cat", "aten::clone", "aten::to"),
}
REST = "elementwise and rest"


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


def op_category(name: str) -> str:
    """The category of a kernel or operation; see `OP_CATEGORIES`."""
    name = name.lower()
    if name.startswith(("triton_poi", "triton_red", "triton_per")):  # compiled: named after all that was fused
        return "norm" if "norm" in name else REST
    return next((kind for kind, words in OP_CATEGORIES.items() if any(word in name for word in words)), REST)


def time_by_category(events: Iterable[Event]) -> pd.DataFrame:
    """A frame with columns kind, milliseconds, calls, share, the largest category first."""
    rows = [(op_category(name), (end - start) / 1e3) for name, start, end in events]
    by_kind = pd.DataFrame(rows, columns=["kind", "milliseconds"]).groupby("kind")["milliseconds"]
    table = by_kind.agg(milliseconds="sum", calls="size").sort_values("milliseconds", ascending=False).reset_index()
    return table.assign(share=table["milliseconds"] / table["milliseconds"].sum())


def count_flops(name: str, latents_shape: tuple[int, ...], text_shape: tuple[int, ...]) -> pd.DataFrame:
    """Parameters and forward FLOPs of a denoiser by block for one sample, counted on the "meta" device.

    Returns a frame with columns block, parameters, gflops, in the order of the forward pass. A multiplication and an
    addition are two FLOPs. Arguments as for `meter.count_forward`.
    """
    denoiser, counter = count_forward(name, latents_shape, text_shape)
    flops = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    rows = []
    for block, module in denoisers.parts(denoiser, denoisers.adapter_of(denoiser).parts).items():
        parameters = sum(parameter.numel() for parameter in module.parameters())
        rows.append((block, parameters, flops.get(f"{type(denoiser).__name__}.{block}", 0) / 1e9))
    return pd.DataFrame(rows, columns=["block", "parameters", "gflops"])
