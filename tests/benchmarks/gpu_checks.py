"""What a CPU cannot show of the training step on a GPU: same losses compiled, layouts of convolutions, DDP's graphs.

    python -m tests.benchmarks.gpu_checks [--unet sd2-base] [--resolution 256] [--batch 4]

- Two steps in bf16, compiled and in channels last, give the loss and gradient norm of two eager steps in fp32, within
  --tolerance, under "ddp" and "fsdp".
- Every convolution's output is in channels last; how many kernels change a layout in a step.
- Memory after a step without its activations, compared with `estimates.memory`.
- DDP with compiled blocks: how many graphs; a block each, forward and backward, if DDPOptimizer leaves them alone.

What fails says so and the next check runs; each result is written when it is there.
"""

import collections
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from helpers.config import TrainingConfig
from helpers.lesson import ablations, estimates
from helpers.train_step import TrainStep
from helpers.unet import build_model
from tests.benchmarks import gpu_step, record

FAST = {"precision": "bf16", "compile_unet": True, "channels_last": True}


def settings(given, **changes):
    values = {"unet_config": given.unet, "resolution": given.resolution, "global_batch_size": given.batch}
    return TrainingConfig(**values, ema_start=10**9, learning_rate=1e-4, **changes)


def new_step(given, device, **changes):
    config = settings(given, **changes)
    with gpu_step.switched(gpu_step.Setting(), device):
        manifest, units = ablations.random_batch(config)
        return TrainStep(config, manifest, device), units


def losses(given, device, **changes):
    """[loss, gradient norm] of two steps."""
    train_step, units = new_step(given, device, **changes)
    found = [train_step.step(number, units) for number in range(2)]
    torch.compiler.reset()
    return [found[0]["loss"], found[0]["grad_norm"], found[1]["loss"], found[1]["grad_norm"]]


def same_losses(given, device):
    eager = losses(given, device, precision="fp32")
    for strategy in ("ddp", "fsdp"):
        found = losses(given, device, strategy=strategy, **FAST)
        worst = max(abs(one / other - 1) for one, other in zip(found, eager, strict=True))
        yield (
            f"{strategy}, compiled, bf16: loss and gradient norm differ from eager fp32 by",
            worst,
            worst < given.tolerance,
        )


def layouts(given, device):
    train_step, units = new_step(given, device, strategy="fsdp", **{**FAST, "compile_unet": False})
    seen = collections.Counter()

    def look(module, _, output):
        seen[output.is_contiguous(memory_format=torch.channels_last)] += 1

    for module in train_step.unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(look)
    train_step.step(0, units)
    yield "convolutions whose output is not in channels last", seen[False], seen[False] == 0


def memory(given, device):
    if device == "cpu":
        return
    for strategy in ("ddp", "fsdp"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        train_step, units = new_step(given, device, strategy=strategy, precision="bf16")
        train_step.step(0, units)
        held = torch.cuda.memory_allocated() - before
        expected = estimates.memory(given.unet, strategy, 1, precision="bf16")
        ratio = held / (expected["parameters"] + expected["optimizer"])
        yield f"{strategy}: memory between steps over that of weights and moments", ratio, 0.98 < ratio < 1.1
        del train_step


def graphs(given, device):
    two_ranks = mock.patch.object(gpu_step.unet_module, "world_size", lambda: 2)  # one rank alone needs no DDP
    with gpu_step.switched(gpu_step.Setting(), device), two_ranks:
        unet, model = build_model(given.unet, **FAST, device=device)
    assert isinstance(model, DistributedDataParallel)
    latents = torch.randn(2, 4, given.resolution // 8, given.resolution // 8, device=device)
    text = torch.randn(2, 77, unet.config.cross_attention_dim, device=device)
    counters.clear()
    with torch.autocast(device, dtype=torch.bfloat16):
        model(latents, torch.zeros(2, dtype=torch.long, device=device), text).sample.square().mean().backward()
    blocks, made = len(unet.down_blocks) + len(unet.up_blocks) + 1, counters["stats"]["unique_graphs"]
    expected = blocks if device == "cuda" else 0
    yield f"graphs of {blocks} compiled blocks under DDP", made, made == expected


def main():
    given = record.options(__doc__, unet="sd2-base", resolution=256, batch=4, tolerance=0.05)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []

    def keep(check, value, passed):
        rows.append({"check": check, "value": value, "passed": bool(passed)})
        print(
            f"  {'passed' if passed else 'FAILED'}: {check} {value if isinstance(value, str) else f'{value:.4g}'}",
            flush=True,
        )
        summary = {"checks of the GPU's step": f"{sum(row['passed'] for row in rows)} of {len(rows)} passed"}
        record.write("gpu_checks", summary, checks=rows)

    with gpu_step.one_rank(device):
        for check in (same_losses, layouts, memory, graphs):
            try:
                for found in check(given, device):
                    keep(*found)
            except Exception as error:  # said, and the next one is tried
                keep(check.__name__, f"{type(error).__name__}: {error}".splitlines()[0][:160], False)


if __name__ == "__main__":
    main()
