"""Encoding on one GPU by Stable Diffusion 2's VAE and text encoder: rows a second by size, batch and setting.

    python -m tests.benchmarks.gpu_encode [--resolutions 256,512 512 256] [--batch 32 64 16] [--minutes 2]
    python -m tests.benchmarks.gpu_encode --model tiny-sd --resolutions 32 --batch 2 --seconds 0.1     # on a CPU

Random weights, drawn on the GPU, in fp16; random pixels and token ids, copied to the GPU each time. What is timed is
`LatentEncoder`'s: pixels to moments, ids to embeddings, each size by itself; sizes in one pass add up. The setting that
should be fastest comes first; each result is written when it is there; after --minutes no new one is begun.
"""

import gc
import time

import numpy as np
import pandas as pd
import torch

from helpers import encoder
from helpers.lesson import estimates
from helpers.runtime.meter import peak_flops, peak_memory
from tests.benchmarks import record, roofline

# name -> (channels last, compiled)
SETTINGS = {
    "channels last, compiled": (True, True),
    "channels last": (True, False),
    "as it is": (False, False),
}


def build(model, device, channels_last, compiled):
    """An `Encoder` of random weights in fp16 ("sd2"), or of "tiny-sd" in fp32."""
    made = object.__new__(encoder.Encoder)
    made.device, made.batch_size = torch.device(device), None
    made.dtype = torch.float16 if device == "cuda" else torch.float32
    if model == "sd2":
        made.vae, made.text_encoder = (roofline.cast(part, made.dtype) for part in estimates.sd2_encoders(device))
    else:
        made.vae, made.text_encoder = encoder.load_vae(model).to(device), encoder.load_text_encoder(model).to(device)
    if channels_last:
        made.vae.to(memory_format=torch.channels_last)
    if compiled and device == "cuda":  # a CPU only tries the code
        made.vae.encoder.compile(dynamic=False)
        made.text_encoder.compile(dynamic=False)
    return made


def measure(given, device, setting, sizes, batch):
    """({"text" or a size: seconds of a batch}, peak bytes); pixels and ids come from the CPU, latents go back to it."""
    made = build(given.model, device, *SETTINGS[setting])
    random, config = np.random.default_rng(0), made.text_encoder.config
    ids = random.integers(1, config.vocab_size - 1, (batch, config.max_position_embeddings), dtype=np.int32)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {"text": roofline.typical_seconds(lambda: made.encode_captions(ids), device, given.seconds)}
    for size in sizes:
        pixels = random.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
        found[size] = roofline.typical_seconds(lambda pixels=pixels: made.encode_images(pixels), device, given.seconds)
    return found, peak_memory(device)


def main():
    given = record.options(
        __doc__, model="sd2", resolutions=["256,512", "512", "256"], batch=[32, 64, 16], seconds=2.0, minutes=2.0
    )
    until = time.monotonic() + 60 * given.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates, peak = roofline.ceilings(device), peak_flops(device, "bf16")
    rows, summary = [], {}
    passes = {text: [int(size) for size in text.split(",")] for text in given.resolutions}
    first, *other_batches = given.batch
    fastest, *other_settings = SETTINGS
    combinations = [(fastest, first), *((fastest, batch) for batch in other_batches)]
    for setting, batch in [*combinations, *((setting, first) for setting in other_settings)]:
        if time.monotonic() > until:
            print(f"  no time left for: {setting}, batch {batch}", flush=True)
            continue
        try:
            found = measure(given, device, setting, sorted(set().union(*passes.values())), batch)
        except Exception as error:  # out of memory, or what a compiler does not like; the next one is tried
            found = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        torch.compiler.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if isinstance(found, str):
            print(f"  failed: {setting}, batch {batch}: {found}", flush=True)
            continue
        times, memory = found
        for text, sizes in passes.items():
            rate = batch / (times["text"] + sum(times[size] for size in sizes))
            least = roofline.least_seconds(roofline.encoder_work(tuple(sizes), batch), rates).sum()
            row = {"setting": setting, "pixels": text, "batch": batch, "rows/s": rate}
            row["of peak"] = rate * estimates.encoder_flops(*sizes) / peak if peak else float("nan")
            row |= {"of roofline": rate * least / batch, "peak memory, GiB": memory / 2**30}
            rows.append(row)
            print(
                f"  {setting}, {text} pixels, batch {batch}: {rate:.1f} rows/s, {row['of peak']:.1%} of the peak, ",
                end="",
            )
            print(f"{row['of roofline']:.1%} of the roofline", flush=True)
            best = max((other for other in rows if other["pixels"] == text), key=lambda other: other["rows/s"])
            summary[f"encoding at {text} pixels with {given.model}'s models, the fastest setting"] = (
                f"{best['rows/s']:.1f} rows/s ({best['setting']}, batch {best['batch']})"
            )
        record.write("gpu_encode", summary, settings=rows, ceilings=rates)
    print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
