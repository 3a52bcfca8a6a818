"""What a CPU cannot show of the training step on a GPU: precision, layouts, checkpoints, compiled blocks.

    python -m tests.benchmarks.gpu_checks [--checks layouts bf16 ...] [--unet sd2-base] [--resolution 256] [--batch 4]

- layouts: after compiling, every convolution's output is in channels last.
- bf16: two eager steps give the loss and gradient norm of fp32, within --tolerance.
- checkpoints: two are saved through pinned memory, with a step after each before it is written; loaded again, each
  goes on with the losses of the run.
- repeats: with `deterministic=True`, two runs have the same losses and weights, bit by bit.
- compiled-fsdp, compiled-ddp: as bf16, compiled. They compile for minutes.

What fails says so and the next check runs; each result is written when it is there.
"""

import tempfile

import torch

from helpers import distributed
from helpers.config import TrainingConfig
from helpers.lesson import ablations
from helpers.train import checkpoint
from helpers.train.step import TrainStep
from tests.benchmarks import gpu_step, record
from tests.steps import everything


def new_step(given, **changes):
    """A new `TrainStep` and its units of a batch."""
    values = {"unet_config": given.unet, "resolution": given.resolution, "global_batch_size": given.batch}
    config = TrainingConfig(**{**values, "precision": "bf16", "ema_start": 10**9, "learning_rate": 1e-4, **changes})
    manifest, units = ablations.random_batch(config)
    return TrainStep(config, manifest, DEVICE), units


def losses(train_step, units, steps):
    return [train_step.step(number, units)["loss"] for number in steps]


def same_losses(given, **changes):
    eager, found = [], []
    for values, kept in (({"precision": "fp32"}, eager), (changes, found)):
        train_step, units = new_step(given, **values)
        kept += losses(train_step, units, range(3))
    worst = max(abs(one / other - 1) for one, other in zip(found, eager, strict=True))
    return "losses differ from eager fp32 by", worst, worst < given.tolerance


def layouts(given):
    train_step, units = new_step(given, strategy="fsdp", compile_unet=DEVICE == "cuda")
    wrong = []

    def look(module, _, output):
        wrong.append(not output.is_contiguous(memory_format=torch.channels_last))

    for module in train_step.denoiser.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(look)
    train_step.step(0, units)
    return f"of {len(wrong)} convolutions' outputs, not in channels last", sum(wrong), wrong and not any(wrong)


def checkpoints(given):
    """As a run saves: one stager for all, the next step is trained while a checkpoint is written."""
    train_step, units = new_step(given, strategy="fsdp", ema_start=0)
    stager, group = checkpoint.open_stager(), distributed.new_cpu_group()
    straight, worst = losses(train_step, units, [0]), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for step in (1, 2):
            finish = checkpoint.async_save(f"{folder}/{step}", train_step, step=step, stager=stager, group=group)
            straight += losses(train_step, units, [step])
            finish()
        stager.close()
        straight += losses(train_step, units, [3])
        for step in (1, 2):
            other, _ = new_step(given, strategy="fsdp", ema_start=0)
            checkpoint.load(f"{folder}/{step}", other)
            resumed = losses(other, units, range(step, 4))
            worst = max([worst, *(abs(one / two - 1) for one, two in zip(resumed, straight[step:], strict=True))])
    return "losses after two checkpoints differ from the run's by", worst, worst < 1e-3


def repeats(given):
    runs = []
    for _ in range(2):
        train_step, units = new_step(given, deterministic=True)
        runs.append((losses(train_step, units, range(3)), everything(train_step)))
    (one, weights), (other, others) = runs
    wrong = sum(not torch.equal(*pair) for pair in zip(weights, others, strict=True)) + (one != other)
    return "deterministic=True: tensors and losses that differ between two runs", wrong, wrong == 0


def compiled(strategy):
    # On a CPU compiling takes minutes, and shows nothing that the tests do not.
    return lambda given: same_losses(given, strategy=strategy, compile_unet=DEVICE == "cuda")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKS = {
    "layouts": layouts,
    "bf16": lambda given: same_losses(given, strategy="fsdp"),
    "checkpoints": checkpoints,
    "repeats": repeats,
    "compiled-fsdp": compiled("fsdp"),
    "compiled-ddp": compiled("ddp"),
}


def main():
    given = record.options(__doc__, checks=list(CHECKS), unet="sd2-base", resolution=256, batch=4, tolerance=0.05)
    what = f"checks of the GPU's step: {', '.join(given.checks)}"
    results = record.Rows("gpu_checks", lambda rows: {what: f"{sum(row['passed'] for row in rows)} passed"})
    with gpu_step.one_rank(DEVICE):
        for name in given.checks:

            def check(name=name):
                return dict(zip(("found", "value", "passed"), CHECKS[name](given), strict=True))

            results.add({"check": name}, check)


if __name__ == "__main__":
    main()
