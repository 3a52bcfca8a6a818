"""The training step of one GPU: images a second by setting and batch size, and what the time goes into.

    python -m tests.benchmarks.gpu_step [--unet sd2-base] [--resolution 512] [--batch 64 96 128] [--compiled]
    python -m tests.benchmarks.gpu_step --unet tiny --resolution 64 --batch 16 --steps 3      # on a CPU, to try it

Random latents, a full step with the optimizer, EMA off, bf16. A setting is parameters of `TrainingConfig`, so what is
measured is what a run with them does. The settings at the first batch size (halved until it fits), then the fastest at
the others; a row each, written when it is there. A setting that fails (out of memory, a kernel that is not there) is
listed and passed over. "first step, s" is that of the step that compiles, which takes minutes with an empty cache. "of
roofline" is the share of the least time by tests/benchmarks/roofline.py, elementwise operations for nothing.
"""

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist

from helpers.config import TrainingConfig
from helpers.lesson import ablations, published_results
from tests.benchmarks import record, roofline

# "fsdp" on one GPU computes in bf16 as such, norms included, beside fp32 weights; "ddp" by autocast.
BASE = {"strategy": "fsdp", "channels_last": True, "cudnn_benchmark": True}
SETTINGS = {
    "base": {},
    "cudnn": {"attention": "cudnn"},
    "flash": {"attention": "flash"},
    "efficient": {"attention": "efficient"},
    "contiguous": {"channels_last": False},
    "untimed": {"cudnn_benchmark": False},
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


def measure(given, device, rates, setting, batch):
    """A row's numbers; see `ablations.measure_step`."""
    changes = {**BASE, **SETTINGS[setting], "compile_unet": given.compiled and device == "cuda"}  # on a CPU: minutes
    config = TrainingConfig(
        unet_config=given.unet,
        resolution=given.resolution,
        global_batch_size=batch,
        precision="bf16",
        **changes,
    )
    found = ablations.measure_step(config, device, steps=given.steps, warm_up=min(4, given.steps))
    least = roofline.least_seconds(roofline.step_work(given.unet, given.resolution, batch), rates).sum()
    return {**found, "of roofline": found["images/s"] * least / batch}


def fastest(rows):
    return max(rows, key=lambda row: row["images/s"])


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = "compiled" if given.compiled else "eager"
    for row in published_results.ABLATION.itertuples():
        if row.setup == "+ torch.compile":
            each = row.images_per_second / int(row.gpus.split()[0])
            print(f"published: {each:.0f} images/s a GPU at {row.resolution} px ({row.gpus}; {row.source})")
    fact = published_results.FACTS["one H200, MLPerf at 512 px"]
    print(f"published: {fact.value} images/s a GPU at 512 px (H200; {fact.source}, MLPerf Training v4.0)", flush=True)

    def summarise(rows):
        best = fastest(rows)
        return {
            f"one step of {given.unet} at {given.resolution} pixels, {how}, the fastest setting": (
                f"{best['images/s']:.1f} images/s, MFU {best['MFU']:.1%}, {best['of roofline']:.1%} of the roofline "
                f"({best['setting']}, batch {best['batch']})"
            )
        }

    with one_rank(device):
        rates = roofline.ceilings(device)
        results = record.Rows("gpu_step", summarise, ceilings=rates)

        def add(setting, batch):
            what = {"setting": setting, "batch": batch}
            return results.add(what, lambda: measure(given, device, rates, setting, batch))

        first, *others = given.batch
        for setting in given.settings:
            while add(setting, first) is None and not results.rows and first > 1:
                if "OutOfMemory" not in results.failed[-1]["error"]:
                    break
                first //= 2
        for batch in others if results.rows else ():
            if batch != first:
                add(fastest(results.rows)["setting"], batch)


if __name__ == "__main__":
    main()
