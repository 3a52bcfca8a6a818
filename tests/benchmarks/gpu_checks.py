"""What a CPU cannot show of the training step on a GPU: precision, layouts, memory, checkpoints, compiled blocks.

    python -m tests.benchmarks.gpu_checks [--checks layouts memory ...] [--unet sd2-base] [--resolution 256] [--batch 4]

- layouts: every convolution's output is in channels last.
- memory: after a step, without its activations, compared with `estimates.memory`.
- bf16: two eager steps give the loss and gradient norm of fp32, within --tolerance.
- checkpoints: two are saved through pinned memory, with a step after each before it is written; loaded again, each
  holds the bits of its step and goes on with the losses of the run.
- repeats: with `deterministic=True`, two runs have the same losses and weights, bit by bit.
- compiled-fsdp, compiled-ddp: as bf16, compiled and in channels last. They compile for minutes.
- graphs: of the tiny U-Net's compiled blocks under DDP: one a block, if DDPOptimizer leaves them alone.

What fails says so and the next check runs; each result is written when it is there.
"""

import tempfile

import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from helpers import distributed
from helpers.config import TrainingConfig
from helpers.lesson import ablations, estimates
from helpers.model import denoisers
from helpers.model.sharding import build_model
from helpers.train import checkpoint_io
from helpers.train.step import TrainStep
from tests.benchmarks import gpu_step, record
from tests.steps import everything

FAST = {"precision": "bf16", "channels_last": True}


def new_step(given, device, **changes):
    """A new `TrainStep` and its units of a batch."""
    values = {"unet_config": given.unet, "resolution": given.resolution, "global_batch_size": given.batch}
    config = TrainingConfig(**{**values, "ema_start": 10**9, "learning_rate": 1e-4, **changes})
    manifest, units = ablations.random_batch(config)
    return TrainStep(config, manifest, device), units


def losses(given, device, **changes):
    """[loss, gradient norm] of two steps."""
    train_step, units = new_step(given, device, **changes)
    found = [train_step.step(number, units) for number in range(2)]
    return [found[0]["loss"], found[0]["grad_norm"], found[1]["loss"], found[1]["grad_norm"]]


def same_losses(given, device, **changes):
    eager = losses(given, device, precision="fp32")
    found = losses(given, device, **FAST, **changes)
    worst = max(abs(one / other - 1) for one, other in zip(found, eager, strict=True))
    return "loss and gradient norm differ from eager fp32 by", worst, worst < given.tolerance


def layouts(given, device):
    train_step, units = new_step(given, device, strategy="fsdp", **FAST)
    wrong = []

    def look(module, _, output):
        wrong.append(not output.is_contiguous(memory_format=torch.channels_last))

    for module in train_step.denoiser.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(look)
    train_step.step(0, units)
    return f"of {len(wrong)} convolutions' outputs, not in channels last", sum(wrong), wrong and not any(wrong)


def memory(given, device):
    ratios = []
    for strategy in ("ddp", "fsdp") if device == "cuda" else ():
        before = torch.cuda.memory_allocated()
        train_step, units = new_step(given, device, strategy=strategy, precision="bf16")
        train_step.step(0, units)
        held = torch.cuda.memory_allocated() - before
        expected = estimates.memory(given.unet, strategy, 1, precision="bf16")
        ratios.append(held / (expected["parameters"] + expected["optimizer"]))
        del train_step
    passed = all(0.98 < ratio < 1.1 for ratio in ratios)
    return "memory between steps over that of weights and moments, ddp and fsdp", ratios, passed


def checkpoints(given, device):
    """As `CheckpointManager` saves: one stager for all, the next step is trained while a checkpoint is written."""
    train_step, units = new_step(given, device, **FAST, strategy="fsdp", ema_start=0)
    stager, group = checkpoint_io.open_stager(), distributed.new_cpu_group()
    straight, held, wrong = [train_step.step(0, units)["loss"]], {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            held[step] = everything(train_step)
            finish = checkpoint_io.async_save(f"{folder}/{step}", train_step, step=step, stager=stager, group=group)
            straight.append(train_step.step(step, units)["loss"])
            finish()
        stager.close()
        straight.append(train_step.step(3, units)["loss"])
        worst = 0.0
        for step in (1, 2):
            other, _ = new_step(given, device, **FAST, strategy="fsdp", ema_start=0)
            checkpoint_io.load(f"{folder}/{step}", other)
            wrong += sum(not torch.equal(*pair) for pair in zip(everything(other), held[step], strict=True))
            resumed = [other.step(number, units)["loss"] for number in range(step, 4)]
            worst = max([worst, *(abs(one / two - 1) for one, two in zip(resumed, straight[step:], strict=True))])
    what = "tensors that differ from their step's, and losses after two checkpoints that differ from the run's by"
    return what, [wrong, worst], wrong == 0 and worst < (1e-3 if device == "cuda" else 1e-12)


def repeats(given, device):
    runs = []
    for _ in range(2):
        train_step, units = new_step(given, device, precision="bf16", deterministic=True)
        found = [train_step.step(number, units)["loss"] for number in range(3)]
        runs.append((found, everything(train_step)))
    (one, weights), (other, others) = runs
    wrong = sum(not torch.equal(*pair) for pair in zip(weights, others, strict=True)) + (one != other)
    return "deterministic=True: tensors and losses that differ between two runs", wrong, wrong == 0


def graphs(given, device):
    on_gpu = device == "cuda"
    denoiser, _ = build_model("tiny", **FAST, compile_unet=on_gpu, device=device)
    model = DistributedDataParallel(denoiser, gradient_as_bucket_view=True)
    latents = torch.randn(2, 4, 16, 16, device=device)
    text = torch.randn(2, 77, denoiser.config.cross_attention_dim, device=device)
    counters.clear()
    with torch.autocast(device, dtype=torch.bfloat16):
        model(latents, torch.zeros(2, dtype=torch.long, device=device), text).sample.square().mean().backward()
    blocks, made = len(denoisers.blocks(denoiser)), counters["stats"]["unique_graphs"]
    return f"graphs of {blocks} compiled blocks under DDP", made, made == (blocks if on_gpu else 0)


def compiled(strategy):
    # On a CPU compiling takes minutes, and shows nothing that the tests do not.
    return lambda given, device: same_losses(given, device, strategy=strategy, compile_unet=device == "cuda")


CHECKS = {
    "layouts": layouts,
    "memory": memory,
    "bf16": lambda given, device: same_losses(given, device, strategy="fsdp"),
    "checkpoints": checkpoints,
    "repeats": repeats,
    "graphs": graphs,
    "compiled-fsdp": compiled("fsdp"),
    "compiled-ddp": compiled("ddp"),
}


def main():
    given = record.options(__doc__, checks=list(CHECKS), unet="sd2-base", resolution=256, batch=4, tolerance=0.05)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def summarise(rows):
        return {f"checks of the GPU's step: {', '.join(given.checks)}": f"{sum(row['passed'] for row in rows)} passed"}

    results = record.Rows("gpu_checks", summarise)
    with gpu_step.one_rank(device):
        for name in given.checks:

            def check(name=name):
                return dict(zip(("found", "value", "passed"), CHECKS[name](given, device), strict=True))

            results.add({"check": name}, check)


if __name__ == "__main__":
    main()
