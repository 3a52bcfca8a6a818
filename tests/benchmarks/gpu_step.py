"""The training step of one GPU: images a second by batch size and setting, and what the time goes into.

    python -m tests.benchmarks.gpu_step [--unet sd2-base] [--resolution 256 512] [--batch 32 64 128] [--minutes 8]
    python -m tests.benchmarks.gpu_step --unet tiny --resolution 64 --batch 16 --steps 3      # on a CPU, to try it

Random latents, a full step with the optimizer, EMA off, bf16. First each setting at the first batch size, then the
fastest one at the others, then max-autotune, and at last a profile of the fastest by kind of kernel. A setting that
fails (out of memory, a backend that is not there) says so and is passed over; after --minutes, shared evenly by the
resolutions, no new one is begun.
"""

import argparse
import contextlib
import gc
import os
import tempfile
import time

# Its key does not say which attention was chosen: a graph compiled with one would be taken for another.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from helpers.config import TrainingConfig  # noqa: E402
from helpers.lesson import ablations, published_results  # noqa: E402
from helpers.unet import compile_blocks  # noqa: E402
from tests.benchmarks import record  # noqa: E402

# name -> changes of the config, `compile` mode (None: not compiled), attention backend (None: PyTorch's choice).
# "fsdp" on one GPU is the U-Net in bf16 as such, norms included; "ddp" is autocast.
SETTINGS = {
    "autocast": ({"strategy": "ddp"}, None, None),
    "autocast, channels last": ({"strategy": "ddp", "channels_last": True}, None, None),
    "autocast, channels last, compiled": ({"strategy": "ddp", "channels_last": True}, "default", None),
    "bf16": ({}, None, None),
    "bf16, compiled": ({}, "default", None),
    "bf16, channels last, compiled": ({"channels_last": True}, "default", None),
    "bf16, channels last, compiled, flash attention": ({"channels_last": True}, "default", SDPBackend.FLASH_ATTENTION),
    "bf16, channels last, compiled, cuDNN attention": ({"channels_last": True}, "default", SDPBackend.CUDNN_ATTENTION),
    "autocast, channels last, CUDA graphs": ({"strategy": "ddp", "channels_last": True}, "reduce-overhead", None),
    "bf16, channels last, CUDA graphs": ({"channels_last": True}, "reduce-overhead", None),
}
# Compiles for minutes: after everything else.
SLOW = {"bf16, channels last, max-autotune": ({"channels_last": True}, "max-autotune-no-cudagraphs", None)}


def measure(config, setting, device, steps):
    """`ablations.measure_step` of one setting."""
    changes, mode, backend = {**SETTINGS, **SLOW}[setting]
    config = TrainingConfig(**{**config, "strategy": "fsdp", **changes})
    compile_with = (lambda train_step: compile_blocks(train_step.unet, mode)) if mode else None
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        return ablations.measure_step(config, device, steps=steps, warm_up=5, prepare=compile_with)


def sweep(given, resolution, device, until):
    """`(rows, the fastest one's kinds)` at one resolution."""
    rows, best = [], None

    def run(setting, batch):
        nonlocal best
        if time.monotonic() > until:
            return print(f"  no time left for: {setting}, batch {batch}")
        config = {
            "unet_config": given.unet,
            "resolution": resolution,
            "global_batch_size": batch,
            "precision": "bf16",
            "micro_batch_size": given.micro_batch,
        }
        try:
            found = measure(config, setting, device, given.steps)
        except Exception as error:  # whatever a compiler or a backend does not like; said, and the next one is tried
            found = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        if isinstance(found, str):  # outside of `except`, which would keep the failed step's memory alive
            torch.compiler.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            return print(f"  failed: {setting}, batch {batch}: {found}", flush=True)
        kinds = found.pop("kinds")
        rows.append({"setting": setting, "batch": batch, **found})
        print(f"  {setting}, batch {batch}: {found['images/s']:.1f} images/s, MFU {found['MFU']:.1%}", flush=True)
        if best is None or found["images/s"] > best[0]:
            best = found["images/s"], setting, kinds, batch
            print("    " + ", ".join(f"{row['kind']} {row['share']:.0%}" for row in kinds[:6]), flush=True)

    for setting in SETTINGS:
        run(setting, given.batch[0])
    for batch in given.batch[1:]:
        if best:
            run(best[1], batch)
    for setting in SLOW:
        run(setting, best[3] if best else given.batch[0])
    return rows, best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="sd2-base")
    parser.add_argument("--resolution", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 32, 128, 256])
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=9)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {given.unet}, bf16, random latents, EMA off")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        summary, details = {}, {}
        for number, resolution in enumerate(given.resolution, start=1):
            until = started + 60 * given.minutes * number / len(given.resolution)
            print(f"{resolution} pixels:")
            rows, best = sweep(given, resolution, device, until)
            if best:
                details[resolution] = rows
                fastest = max(rows, key=lambda row: row["images/s"])
                summary[f"one step of {given.unet} at {resolution} pixels, the fastest setting"] = (
                    f"{fastest['images/s']:.1f} images/s, MFU {fastest['MFU']:.1%}"
                )
                print(pd.DataFrame(rows).sort_values("images/s", ascending=False).round(3).to_string(index=False))
                print(f"where the time of the fastest goes ({best[1]}):")
                print(pd.DataFrame(best[2]).round(3).to_string(index=False), flush=True)
        dist.destroy_process_group()
    for row in published_results.ABLATION:
        if row.setup == "+ torch.compile":
            each = row.images_per_second / int(row.gpus.split()[0])
            print(f"published: {each:.0f} images/s a GPU at {row.resolution} px ({row.gpus}; {row.source})")
    fact = published_results.FACTS["one H200, MLPerf at 512 px"]
    print(f"published: {fact.value} images/s a GPU at 512 px (H200; {fact.source}, MLPerf Training v4.0)")
    record.write("gpu_step", summary, settings=details)


if __name__ == "__main__":
    main()
