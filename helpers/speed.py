"""How fast a training step is, and where its time goes: FLOPs, MFU, peak memory, a profile by kind of work. No Ray."""

import contextlib
import dataclasses
import functools
import gc
import resource
import statistics
import sys
import time

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from . import costs, parallel, schema
from .learner import Learner, Unit, to_tensor

# The kinds of work of a step, by words in the names of GPU kernels and of PyTorch's operations; the first match counts.
KINDS = {
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


# --- one step under the profiler ----------------------------------------------------------------------


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


def kind(name):
    """The kind of work that a kernel or operation does; see KINDS."""
    name = name.lower()
    if name.startswith(("triton_poi", "triton_red", "triton_per")):  # compiled: named after all that they were fused from
        return "norm" if "norm" in name else REST
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), REST)


def by_kind(events):
    """A frame with columns kind, milliseconds, share, calls of what `profiled` found, the largest first."""
    frame = pd.DataFrame([(kind(name), (end - start) / 1e3) for name, start, end in events], columns=["kind", "milliseconds"])
    table = frame.groupby("kind")["milliseconds"].agg(["sum", "size"]).sort_values("sum", ascending=False).reset_index()
    table.columns = ["kind", "milliseconds", "calls"]
    table.insert(2, "share", table["milliseconds"] / table["milliseconds"].sum())
    return table


def exposed_communication(events):
    """Share of a profiled step in which workers talk and nothing is computed; what hides behind computing is free."""
    talk = _union((start, end) for name, start, end in events if kind(name) == "communication")
    work = _union((start, end) for name, start, end in events if kind(name) != "communication")
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


# --- FLOPs and memory ---------------------------------------------------------------------------------


def training_flops(unet_config, latents_shape, text_shape):
    """FLOPs of training on one sample: forward, and twice that backward (the usual count; recomputed activations apart)."""
    return 3e9 * parallel.measure(unet_config, latents_shape, text_shape)["gflops"].sum()


def peak_flops(device, precision="fp32"):
    """FLOP/s that a device can reach: of a known GPU by its data sheet (`costs.ACCELERATORS`), else measured."""
    if torch.device(device).type == "cuda":
        known = costs.find_accelerator(torch.cuda.get_device_name(device))
        if known:
            return 1e12 * (known.bf16_tflops if precision == "bf16" else known.tf32_tflops)
    return measured_flops(device, precision)


def measured_flops(device, precision="fp32", size=None):
    """FLOP/s of the fastest of some products of square matrices, on this thread's cores or on a GPU."""
    on_gpu = torch.device(device).type == "cuda"
    size = size or (8192 if on_gpu else 1024)
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    fastest = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        left @ left
        if on_gpu:
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest


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
        shapes = self.manifest.shapes
        return training_flops(self.config.unet_config, shapes[f"image_latents_{resolution}"][1:], shapes["caption_embeddings"])

    def line(self, resolution, seconds, data_seconds, checkpoint_seconds):
        """The columns of one step."""
        rate = self.config.global_batch_size / seconds
        return {
            "resolution": resolution, "step_seconds": seconds, "images_per_second": rate, "images_per_second_per_worker": rate / self.world,
            "mfu": self.flops(resolution) * rate / self.world / self.peak,
            "peak_memory_gib": peak_memory(self.device) / 2**30,
            "data_wait_share": data_seconds / seconds, "communication_share": self.communication_share,
            "checkpoint_seconds": checkpoint_seconds,
        }  # fmt: skip


# --- the ablation -------------------------------------------------------------------------------------

# What each row adds to the one before; `fused` is the optimizer's.
ABLATION = {
    "ddp, fp32": {"strategy": "ddp", "precision": "fp32", "channels_last": False, "compile_unet": False, "fused": None},
    "+ bf16": {"precision": "bf16"},
    "+ channels last, fused AdamW": {"channels_last": True, "fused": True},
    "+ fsdp": {"strategy": "fsdp"},
    "+ torch.compile": {"compile_unet": True},
}


def random_batch(config, rank=0, world=1, num_tokens=77):
    """`(manifest, units)`: a rank's part of a global batch of random latents and captions that fit the U-Net."""
    unet = parallel.load_unet_config(config.unet_config)
    resolution, width, random = config.largest_resolution, unet["cross_attention_dim"], np.random.default_rng(rank)
    shape = (2, unet["in_channels"], resolution // 8, resolution // 8)
    manifest = schema.Manifest(
        encoder={"model": "random", "revision": "0", "precision": "fp16"}, resolutions=[resolution],
        shapes={schema.latents_column(resolution): list(shape), schema.EMBEDDINGS: [num_tokens, width]}, scaling_factor=1.0,
        id_type="int64", empty_caption_embedding=schema.encode_embedding(np.zeros((num_tokens, width))), job={}, segments=[],
    )  # fmt: skip
    units = []
    for slot in range(rank, config.units_per_step, world):
        positions = slot * config.unit_rows + np.arange(config.unit_rows)
        moments = to_tensor(np.abs(random.normal(size=(config.unit_rows, *shape)).astype(np.float16)))
        text = to_tensor(random.normal(size=(config.unit_rows, num_tokens, width)).astype(np.float16))
        units.append(Unit(moments, text, to_tensor(np.ones(config.unit_rows, bool)), positions, positions.tolist()))
    return manifest, units


def time_steps(learner, units, steps, warm_up):
    """Seconds of each of `steps` training steps on one batch, after `warm_up` others; ends each on the GPU too."""
    seconds = []
    for step in range(warm_up + steps):
        started = time.perf_counter()
        learner.step(step, units)
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)
        seconds.append(time.perf_counter() - started)
    return seconds[warm_up:]


def measure_step(config, device="cpu", *, steps=20, warm_up=5, fused=True, prepare=None):
    """Speed of the training step of `config` on random latents: images/s and more, as a dict; on every rank.

    `prepare(learner)`: called before the first step. EMA is off. The median step counts.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Noise has nothing to teach: at the lesson's learning rate a large U-Net would only diverge.
    config = dataclasses.replace(config, ema_start=10**9, learning_rate=1e-4)
    manifest, units = random_batch(config, dist.get_rank() if world > 1 else 0, world)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    learner = Learner(config, manifest, device, fused=fused)
    if prepare:
        prepare(learner)
    seconds = statistics.median(time_steps(learner, units, steps, warm_up))
    with profiled(device) as events:
        learner.step(warm_up + steps, units)
    shapes = manifest.shapes
    flops = training_flops(config.unet_config, shapes[schema.latents_column(config.largest_resolution)][1:], shapes[schema.EMBEDDINGS])
    rate = config.global_batch_size / seconds
    found = {
        "images/s": rate, "ms a step": 1e3 * seconds, "MFU": flops * rate / world / peak_flops(device, config.precision),
        "peak memory, GiB": peak_memory(device) / 2**30, "communication": exposed_communication(events) if world > 1 else 0.0,
        "kinds": by_kind(events).to_dict("records"),
    }  # fmt: skip
    del learner
    gc.collect()
    torch.compiler.reset()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def ablation(config, device="cpu", *, steps=20, warm_up=5, done=lambda rows: None):
    """`measure_step` with what ABLATION adds row by row, as a list of dicts; `speedup` is over the first row.

    `done(rows)` is called after each, so that what was measured is kept where a later one fails. Without a C++ compiler
    there is no last row.
    """
    rows, settings = [], {}
    for name, changes in ABLATION.items():
        settings = {**settings, **changes}
        if settings["compile_unet"] and not parallel.has_compiler():
            continue
        values = {key: value for key, value in settings.items() if key != "fused"}
        found = measure_step(dataclasses.replace(config, **values), device, steps=steps, warm_up=warm_up, fused=settings["fused"])
        rows.append({"setting": name, "images/s": found["images/s"], "speedup": found["images/s"] / (rows or [found])[0]["images/s"], **{
            key: value for key, value in found.items() if key not in ("images/s", "kinds")
        }})  # fmt: skip
        done(rows)
    return rows
