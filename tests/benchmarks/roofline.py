"""The least time that a GPU needs for a training step or for encoding, from counted FLOPs and bytes.

    python -m tests.benchmarks.roofline [--tflops 790 600 450] [--bandwidth 4.3]

Operations are counted on the "meta" device, in bf16 or fp16. Each convolution, matrix product and attention takes the
longer of its FLOPs over the rate that its kind reaches on this GPU and its bytes (inputs once, outputs once) over the
bandwidth of a large copy (`ceilings`); each normalisation, concatenation and up-sampling its bytes. Two bounds: with
elementwise operations fused into these for nothing, the roofline that no version passes, and with each of them moving
its bytes, as without a compiler. The defaults are one H200's: products and bandwidth measured, the other two assumed.
"""

import contextlib
import functools
import statistics
import time
from unittest import mock

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from helpers.lesson import estimates
from helpers.model import denoisers
from tests.benchmarks import record

# What moves bytes of its own although it computes next to nothing.
MOVES = ("native_group_norm", "native_layer_norm", "cat", "upsample_nearest2d", "_softmax", "embedding")


class Work(TorchDispatchMode):
    """Collects (kind, FLOPs, bytes) of each operation that is no view."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        packet, name = func._overloadpacket, func._overloadpacket.__name__
        if packet in flop_registry:
            kind = "convolution" if "convolution" in name else "matrix product"
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=made)
            self.rows.append((kind, flops, size(args, made)))
        elif name.removesuffix("_backward") in MOVES:
            self.rows.append((name.removesuffix("_backward"), 0, size(args, made)))
        elif not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.rows.append(("elementwise", 0, size(args, made)))
        return made


def size(*values):
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, torch.Tensor))


@contextlib.contextmanager
def counted():
    """Count the work of a block on the "meta" device; yields a list of (kind, FLOPs, bytes)."""
    work = Work()

    class Attention(torch.autograd.Function):
        """One fused kernel forward, one backward, which computes the scores again."""

        @staticmethod
        def forward(ctx, query, key, value):
            ctx.save_for_backward(query, key, value)
            out = query.new_empty(*query.shape[:-1], value.shape[-1])
            work.rows.append(("attention", products(query, key, 2), size(query, key, value, out)))
            return out

        @staticmethod
        def backward(ctx, gradient):
            query, key, value = ctx.saved_tensors
            moved = size(query, key, value, gradient, gradient) + size(query, key, value)
            work.rows.append(("attention", products(query, key, 5), moved))
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def attention(query, key, value, *_, **__):
        return Attention.apply(query, key, value)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention), work:
        yield work.rows


def cast(model, dtype):
    """`model.to(dtype)` without the warning of diffusers, which concerns pretrained weights."""
    return torch.nn.Module.to(model, dtype)


def products(query, key, number):
    """FLOPs of `number` products of the size of queries by keys."""
    return 2 * number * query.numel() * key.shape[-2]


@functools.cache
def step_work(name, resolution, batch, num_tokens=77):
    """The work of a training step on one GPU: forward, backward and AdamW; a frame with kind, flops, bytes."""
    with torch.device("meta"):
        denoiser = cast(denoisers.build_denoiser(name), torch.bfloat16)
        side, channels = resolution // 8, denoiser.config.in_channels
        latents = torch.empty(batch, channels, side, side, dtype=torch.bfloat16)
        text = torch.empty(
            batch, num_tokens, denoisers.adapter_of(denoiser).caption_width(denoiser.config), dtype=torch.bfloat16
        )
        with counted() as rows:
            denoisers.denoise(denoiser, latents, torch.zeros(batch, dtype=torch.long), text).sum().backward()
    # AdamW reads four fp32 numbers a parameter and writes three and the bf16 weight; clipping reads the gradient.
    rows.append(("optimizer", 0, (16 + 12 + 2 + 4) * sum(p.numel() for p in denoiser.parameters())))
    return pd.DataFrame(rows, columns=["kind", "flops", "bytes"])


@functools.cache
def encoder_work(resolutions, batch):
    """The work of encoding `batch` rows by Stable Diffusion 2's models; a frame as `step_work`'s."""
    vae, text_encoder = (cast(model, torch.float16) for model in estimates.build_encoders())
    with torch.device("meta"), torch.no_grad(), counted() as rows:
        text_encoder(torch.zeros(batch, 77, dtype=torch.long))
        for resolution in resolutions:
            vae.encode(torch.empty(batch, 3, resolution, resolution, dtype=torch.float16))
    return pd.DataFrame(rows, columns=["kind", "flops", "bytes"])


def least_seconds(work, rates, fused=True):
    """Seconds of a frame of work, by kind: each operation is bound by its FLOPs or by its bytes.

    `rates`: as `ceilings` returns them. `fused`: elementwise operations cost nothing; else each moves its bytes.
    """
    work = work[work["kind"] != "elementwise"] if fused else work
    flops_per_second = work["kind"].map(lambda kind: rates.get(kind, rates["matrix product"]))
    seconds = (work["flops"] / flops_per_second).combine(work["bytes"] / rates["bytes"], max)
    return seconds.groupby(work["kind"]).sum().sort_values(ascending=False)


def ceilings(device):
    """What libraries reach on a device: FLOP/s in bf16 by kind, and bytes/s under "bytes"; random data, medians.

    Of a product of two matrices of 8,192 rows; of a 3 x 3 convolution of 640 channels in channels last, forward and
    backward; of attention over 4,096 places, forward and backward, by the fastest backend; of a copy of 2 GiB.
    """
    on_gpu = torch.device(device).type == "cuda"
    seconds = 0.5 if on_gpu else 0.02  # a CPU only tries the code
    side, numel, rows, channels, places = (8192, 2**30, 64, 640, 4096) if on_gpu else (256, 2**20, 2, 16, 64)

    def random(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def both_ways(call, *inputs):
        return typical_seconds(lambda: torch.autograd.grad(call(*inputs).sum(), inputs), device, seconds)

    left, right = random(side, side).detach(), random(side, side).detach()
    found = {"matrix product": 2 * side**3 / typical_seconds(lambda: left @ right, device, seconds)}
    source, target = random(numel).detach(), random(numel).detach()
    found["bytes"] = 2 * source.nbytes / typical_seconds(lambda: target.copy_(source), device, seconds)
    pictures, weight = (
        tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        for tensor in (random(rows, channels, 32, 32), random(channels, channels, 3, 3))
    )
    flops = 3 * 2 * 9 * channels**2 * 32 * 32 * rows
    convolve = functools.partial(torch.nn.functional.conv2d, padding=1)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        found["convolution"] = flops / both_ways(convolve, pictures, weight)
    heads = [random(rows // 2, 10, places, 64) for _ in range(3)]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)[: 2 if on_gpu else 3]:
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            rate = products(heads[0], heads[1], 7) / both_ways(torch.nn.functional.scaled_dot_product_attention, *heads)
            found["attention"] = max(rate, found.get("attention", 0))
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def typical_seconds(call, device, at_least):
    """The median time of a call, the GPU's work included, over `at_least` seconds after three calls of warm-up."""
    found, on_gpu = [], torch.device(device).type == "cuda"
    for number in range(1000):
        started = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
        if number >= 5 and sum(found[3:]) > at_least:
            break
    return statistics.median(found[3:])


def main():
    given = record.options(__doc__, tflops=[790.0, 600.0, 450.0], bandwidth=4.3)
    rates = {"bytes": 1e12 * given.bandwidth}
    for kind, tflops in zip(("matrix product", "convolution", "attention"), given.tflops, strict=True):
        rates[kind] = 1e12 * tflops
    parts = {
        f"a training step of sd2-base at {r}": (step_work("sd2-base", r, b), b) for r, b in ((512, 64), (256, 256))
    }
    parts |= {
        f"encoding at {' and '.join(map(str, r))}": (encoder_work(r, 32), 32) for r in ((256,), (512,), (256, 512))
    }
    for what, (work, batch) in parts.items():
        seconds, apart = least_seconds(work, rates), least_seconds(work, rates, fused=False)
        per_kind = ", ".join(f"{kind} {value / seconds.sum():.0%}" for kind, value in seconds.items() if value)
        print(f"{what}: {batch / apart.sum():.0f} to {batch / seconds.sum():.0f} images/s ({per_kind})")


if __name__ == "__main__":
    main()
