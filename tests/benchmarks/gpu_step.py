"""The training step of one GPU: images a second by setting and batch size.

    python -m tests.benchmarks.gpu_step [--unet sd2-base] [--resolution 512] [--batch 64 96 128] [--compiled]
    python -m tests.benchmarks.gpu_step --unet tiny --resolution 64 --batch 16 --steps 3      # on a CPU, to try it

Random latents, a full step with the optimizer, EMA off, bf16. A setting is parameters of `TrainingConfig`. Each setting
runs at the first batch size, then the fastest setting at the other sizes. A setting that fails (out of memory, a kernel
that is not there) is listed. "first step, s" is that of the step that compiles.
"""

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist

from helpers.config import TrainingConfig
from helpers.lesson import ablations
from tests.benchmarks import record

# "fsdp" on one GPU computes in bf16 as such, norms included, beside fp32 weights; "ddp" by autocast.
SETTINGS = {
    "base": {"strategy": "fsdp"},
    "cudnn": {"strategy": "fsdp", "attention": "cudnn"},
    "flash": {"strategy": "fsdp", "attention": "flash"},
    "autocast": {"strategy": "ddp"},
}


@contextlib.contextmanager
def one_rank(device):
    """A process group of this process alone."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main():
    given = record.options(
        __doc__,
        unet="sd2-base",
        resolution=512,
        batch=[64, 96, 128],
        settings=list(SETTINGS),
        compiled=False,
        steps=10,
    )
    device, how = "cuda" if torch.cuda.is_available() else "cpu", "compiled" if given.compiled else "eager"

    def measure(setting, batch):
        size = {"resolution": given.resolution, "global_batch_size": batch, "precision": "bf16"}
        compiled = given.compiled and device == "cuda"  # on a CPU: minutes
        config = TrainingConfig(unet_config=given.unet, compile_unet=compiled, **size, **SETTINGS[setting])
        return ablations.measure_step(config, device, steps=given.steps, warm_up=min(4, given.steps))

    def fastest(rows):
        return max(rows, key=lambda row: row["images/s"])

    def summarise(rows):
        best, what = fastest(rows), f"one step of {given.unet} at {given.resolution} pixels, {how}"
        speed = f"{best['images/s']:.1f} images/s, MFU {best['MFU']:.1%} ({best['setting']}, batch {best['batch']})"
        return {f"{what}, the fastest setting": speed}

    results = record.Rows("gpu_step", summarise)

    def add(setting, batch):
        results.add({"setting": setting, "batch": batch}, lambda: measure(setting, batch))

    with one_rank(device):
        first, *others = given.batch
        for setting in given.settings:
            add(setting, first)
        for batch in others if results.rows else ():
            add(fastest(results.rows)["setting"], batch)


if __name__ == "__main__":
    main()
