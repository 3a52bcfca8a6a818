"""How fast a training step is, and where its time goes: FLOPs, MFU, peak memory, a profile by kind of work. No Ray."""

import contextlib
import functools
import resource
import sys
from dataclasses import dataclass

import pandas as pd
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..unet import count_flops


@dataclass(frozen=True)
class Accelerator:
    """What one GPU can do, by NVIDIA's data sheets: dense tensor core TFLOP/s, memory in GB.

    fp32 training is held against the TF32 rate, which PyTorch's convolutions use unless told otherwise. Matrix products
    stay in fp32, so the share of this that is reached is small.
    """

    name: str
    bf16_tflops: float
    tf32_tflops: float
    memory_gb: float


# A name that holds another one comes first.
ACCELERATORS = (
    Accelerator("A10G", 70, 35, 24),
    Accelerator("A100", 312, 156, 80),
    Accelerator("A10", 125, 62.5, 24),
    Accelerator("L40S", 362, 183, 48),
    Accelerator("L4", 121, 60, 24),
    Accelerator("H100 PCIe", 756, 378, 80),
    Accelerator("H100", 989, 494, 80),
    Accelerator("H200", 989, 494, 141),
    Accelerator("B200", 2250, 1125, 180),
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The GPU that a driver calls `device_name`, such as "NVIDIA A100-SXM4-80GB"; None if it is not known here."""
    words = device_name.replace("-", " ").lower()
    return next((gpu for gpu in ACCELERATORS if f" {gpu.name.lower()} " in f" {words} "), None)


# The kinds of work of a step, by words in the names of GPU kernels and of PyTorch's operations; the first match counts.
OP_CATEGORIES = {
    "communication": ("nccl", "gloo", "c10d"),
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
def profiled(device="cpu"):
    """Profile a block: gives a list that afterwards holds `(name, start, end)` in microseconds of what was computed.

    On a GPU these are its kernels and copies, on a CPU PyTorch's outermost operations and gloo's collectives.
    """
    on_gpu, found = torch.device(device).type == "cuda", []
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        yield found
        if on_gpu:
            torch.cuda.synchronize(device)
    for event in recorded.events():
        if on_gpu:
            counts = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        else:
            inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
            counts = event.name.startswith("gloo:") or (event.name.startswith("aten::") and not inner)
        if counts:
            found.append((event.name, event.time_range.start, event.time_range.end))


def op_category(name):
    """The kind of work that a kernel or operation does; see KINDS."""
    name = name.lower()
    if name.startswith(
        ("triton_poi", "triton_red", "triton_per")
    ):  # compiled: named after all that they were fused from
        return "norm" if "norm" in name else REST
    return next((kind for kind, words in OP_CATEGORIES.items() if any(word in name for word in words)), REST)


def time_by_category(events):
    """A frame with columns kind, milliseconds, share, calls of what `profiled` found, the largest first."""
    frame = pd.DataFrame(
        [(op_category(name), (end - start) / 1e3) for name, start, end in events], columns=["kind", "milliseconds"]
    )
    table = frame.groupby("kind")["milliseconds"].agg(["sum", "size"]).sort_values("sum", ascending=False).reset_index()
    table.columns = ["kind", "milliseconds", "calls"]
    table.insert(2, "share", table["milliseconds"] / table["milliseconds"].sum())
    return table


def exposed_communication(events):
    """Share of a profiled step in which workers talk and nothing is computed; what hides behind computing is free."""
    talk = _union((start, end) for name, start, end in events if op_category(name) == "communication")
    work = _union((start, end) for name, start, end in events if op_category(name) != "communication")
    whole = max((end for _, _, end in events), default=0) - min((start for _, start, _ in events), default=0)
    both = _union([*talk, *work])
    return (_length(both) - _length(work)) / whole if whole else 0.0


def _union(intervals):
    joined = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(intervals):
    return sum(end - start for start, end in intervals)


def hardware(device):
    """What a speed was measured on, and with: "NVIDIA H200, torch 2.13.0"."""
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads a worker"
    return f"{name}, torch {torch.__version__}"


def training_flops(unet_config, latents_shape, text_shape):
    """FLOPs of training on one sample: forward, and twice that backward (the usual count; recomputed activations apart)."""
    return 3e9 * count_flops(unet_config, latents_shape, text_shape)["gflops"].sum()


def peak_flops(device, precision="fp32"):
    """Peak FLOP/s of a known GPU by its data sheet (`ACCELERATORS`); None where it is not known, as on a CPU."""
    known = find_accelerator(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    return known and 1e12 * (known.bf16_tflops if precision == "bf16" else known.tf32_tflops)


def peak_memory(device):
    """Most bytes in use so far: allocated on a GPU, or held by this process on a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Meter:
    """What a worker tells of its speed, once a step, for `metrics.jsonl`.

    - `resolution` of the step's pictures.
    - `step_seconds`, without checkpoints; of it `images_per_second`, of all workers, and `images_per_second_per_worker`.
    - `mfu`: share of what the hardware can compute (`peak_flops`) that went into the U-Net (`training_flops`).
    - `peak_memory_gib` of this worker.
    - `data_wait_share` of the step's time, and `communication_share`: what collectives took that nothing hid behind, of
      the tenth step, which is profiled; None before.
    - `checkpoint_seconds` that training stood still before this step, for a checkpoint.
    """

    PROFILED_STEP = 10

    def __init__(self, config, manifest, device):
        self.config, self.manifest, self.device = config, manifest, device
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.steps, self.communication_share = 0, 0.0 if self.world == 1 else None

    @contextlib.contextmanager
    def watch(self):
        """Around the step; only rank 0 looks closer, and only once."""
        self.steps += 1
        if self.world == 1 or dist.get_rank() or self.steps != self.PROFILED_STEP:
            yield
            return
        with profiled(self.device) as events:
            yield
        self.communication_share = exposed_communication(events)

    @functools.cached_property
    def peak(self):
        return peak_flops(self.device, self.config.precision)

    @functools.cache  # noqa: B019 (a worker has one meter)
    def flops(self, resolution):
        return training_flops(
            self.config.unet_config, self.manifest.latents(resolution).shape[1:], self.manifest.embeddings.shape
        )

    def line(self, resolution, seconds, data_seconds, checkpoint_seconds):
        """The columns of one step."""
        rate = self.config.global_batch_size / seconds
        return {
            "resolution": resolution,
            "step_seconds": seconds,
            "images_per_second": rate,
            "images_per_second_per_worker": rate / self.world,
            "mfu": self.flops(resolution) * rate / self.world / self.peak if self.peak else None,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
            "data_wait_share": data_seconds / seconds,
            "communication_share": self.communication_share,
            "checkpoint_seconds": checkpoint_seconds,
        }
