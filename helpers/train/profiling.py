"""How fast runs are, and where a step's time and FLOPs go: by category of work, by block of the denoiser. No Ray."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from ..model import denoisers
from .meter import COLLECTIVES, Event, count_forward

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


WARM_UP = 20  # steps; at most half of a run


def throughput(metrics: pd.DataFrame, skip: int = WARM_UP) -> tuple[float, float]:
    """`(images/s, share of the time spent waiting for data)` of a run, the one definition used everywhere.

    Images/s are unmasked rows over elapsed time, pauses for checkpoints included, without the first `skip` steps. They
    are a ratio of sums, not a mean over steps: data for several steps arrives together, and one step waits for all of
    them. Time between two attempts is not counted.

    `metrics`: columns images_per_second, step_seconds, checkpoint_seconds, data_wait_share.
    """
    steps = after_warm_up(metrics, skip)
    seconds = (steps["step_seconds"] + steps["checkpoint_seconds"]).sum()
    rows = (steps["images_per_second"] * steps["step_seconds"]).sum()
    return rows / seconds, (steps["data_wait_share"] * steps["step_seconds"]).sum() / seconds


def after_warm_up(metrics: pd.DataFrame, skip: int) -> pd.DataFrame:
    return metrics.iloc[min(skip, len(metrics) // 2) :]


def speed_summary(metrics: dict[str, pd.DataFrame], skip: int = WARM_UP) -> pd.DataFrame:
    """The speed of runs as a frame: one row per run of {name: metrics}.

    The first `skip` steps are left out, as in `throughput`. Columns: images/s (`throughput`), images/s per worker ("a
    worker"), MFU (NaN if the peak is not known), peak memory, and shares of the elapsed time: waiting for data, in
    collectives that do not overlap with compute (NaN unless a step was profiled), and paused for checkpoints.
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
            "peak memory, GiB": frame["peak_memory_gib"].max(),
            "data": waiting,
            "communication": frame["communication_share"].astype(float).median() * seconds.sum() / elapsed,
            "checkpoints": paused / elapsed,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


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


def hardware(device: torch.device | str) -> str:
    """What a speed was measured on, such as "NVIDIA H200, torch 2.13.0"."""
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads a worker"
    return f"{name}, torch {torch.__version__}"


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
