"""Where a step's time and FLOPs go: by category of work, by block of the denoiser. No Ray."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ..model import denoisers
from ..production.extras.meter import COLLECTIVES, Event, count_forward

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
