"""The least time that a GPU needs for a training step or for encoding, from counted FLOPs and bytes.

    python -m tests.benchmarks.roofline [--tflops 790] [--bandwidth 4.3]      # of one H200, as measured

Operations are counted on the "meta" device, in bf16 or fp16. Each convolution, matrix product and attention takes the
longer of its FLOPs over the rate of a large matrix product and its bytes (inputs once, outputs once) over the bandwidth
of a large copy; each normalisation, concatenation and up-sampling its bytes. Elementwise operations count as fused into
these, for nothing, so no version is faster. Both ceilings are measured on the GPU at hand (`ceilings`).
"""

import argparse
import contextlib
import statistics
import time
from unittest import mock

import pandas as pd
import torch
from diffusers import UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from helpers.lesson import estimates
from helpers.unet import load_unet_config

# What moves bytes of its own although it computes next to nothing.
MOVES = ("native_group_norm", "native_layer_norm", "cat", "upsample_nearest2d", "_softmax", "embedding")


class Work(TorchDispatchMode):
    """Collects (kind, FLOPs, bytes) of each operation that is not elementwise."""

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


def products(query, key, number):
    """FLOPs of `number` products of the size of queries by keys."""
    return 2 * number * query.numel() * key.shape[-2]


def step_work(name, resolution, batch, num_tokens=77):
    """The work of a training step on one GPU: forward, backward and AdamW; a frame with kind, flops, bytes."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(load_unet_config(name)).to(torch.bfloat16)
        side, channels = resolution // 8, unet.config.in_channels
        latents = torch.empty(batch, channels, side, side, dtype=torch.bfloat16)
        text = torch.empty(batch, num_tokens, unet.config.cross_attention_dim, dtype=torch.bfloat16)
        with counted() as rows:
            unet(latents, torch.zeros(batch, dtype=torch.long), text).sample.sum().backward()
    # AdamW reads four fp32 numbers a parameter and writes three and the bf16 weight; clipping reads the gradient.
    rows.append(("optimizer", 0, (16 + 12 + 2 + 4) * sum(p.numel() for p in unet.parameters())))
    return pd.DataFrame(rows, columns=["kind", "flops", "bytes"])


def encoder_work(resolutions, batch):
    """The work of encoding `batch` rows by Stable Diffusion 2's models; a frame as `step_work`'s."""
    vae, text_encoder = (model.to(torch.float16) for model in estimates.sd2_encoders())
    with torch.device("meta"), torch.no_grad(), counted() as rows:
        text_encoder(torch.zeros(batch, 77, dtype=torch.long))
        for resolution in resolutions:
            vae.encode(torch.empty(batch, 3, resolution, resolution, dtype=torch.float16))
    return pd.DataFrame(rows, columns=["kind", "flops", "bytes"])


def least_seconds(work, flops_per_second, bytes_per_second):
    """Seconds of a frame of work, by kind: each operation is bound by its FLOPs or by its bytes."""
    seconds = (work["flops"] / flops_per_second).combine(work["bytes"] / bytes_per_second, max)
    return seconds.groupby(work["kind"]).sum().sort_values(ascending=False)


def ceilings(device, seconds=1.0):
    """(FLOP/s of a large bf16 matrix product, bytes/s of a large copy) of a device; random data, the median."""
    on_gpu = torch.device(device).type == "cuda"
    side, numel = (8192, 2**30) if on_gpu else (512, 2**20)
    left, right = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.randn(numel, device=device).to(torch.bfloat16)
    target = torch.empty_like(source)
    product = typical_seconds(lambda: left @ right, device, seconds)
    copy = typical_seconds(lambda: target.copy_(source), device, seconds)
    return 2 * side**3 / product, 2 * source.nbytes / copy


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=790)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, bytes read and written")
    given = parser.parse_args()
    parts = {f"a training step of sd2-base at {r}": (step_work("sd2-base", r, b), b) for r, b in ((512, 64), (256, 256))}
    parts |= {f"encoding at {' and '.join(map(str, r))}": (encoder_work(r, 32), 32) for r in ([256], [512], [256, 512])}
    for what, (work, batch) in parts.items():
        seconds = least_seconds(work, 1e12 * given.tflops, 1e12 * given.bandwidth)
        per_kind = ", ".join(f"{kind} {value / seconds.sum():.0%}" for kind, value in seconds.items() if value)
        print(f"{what}: {batch / seconds.sum():.0f} images/s ({per_kind})")


if __name__ == "__main__":
    main()
