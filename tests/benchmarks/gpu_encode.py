"""Encoding on one GPU by Stable Diffusion 2's VAE and text encoder: rows a second by size, batch and setting.

    python -m tests.benchmarks.gpu_encode [--resolutions 256,512 512 256] [--batch 32 64 16] [--compiled]
    python -m tests.benchmarks.gpu_encode --model tiny-sd --resolutions 32 --batch 2 --seconds 0.1     # on a CPU

Random weights in fp16, saved as a model's folder and loaded as any model; random pixels and token ids, copied to the
GPU each time. A setting is parameters of `PreprocessingConfig`; what is timed is `Encoder`'s: pixels to moments, ids to
embeddings, each size by itself; sizes in one pass add up. Each batch size with the first setting, then the other
settings; each result is written when it is there. "first call, s" is that of the calls that compile.
"""

import pathlib
import shutil
import tempfile
import time

import numpy as np
import torch

from helpers.config import PreprocessingConfig
from helpers.encode import encoder, models, prepare
from helpers.lesson import estimates
from helpers.production.extras.meter import peak_flops, peak_memory
from tests.benchmarks import record, roofline

SETTINGS = {"base": {"channels_last": True}, "contiguous": {"channels_last": False}}


def save_sd2(folder, device):
    """Write Stable Diffusion 2's encoders with random weights, in diffusers layout; the tokenizer is tiny-sd's."""
    for name, model in zip(("vae", "text_encoder"), estimates.build_encoders(device=device), strict=True):
        if name == "vae":
            model.register_to_config(force_upcast=False)  # diffusers' default, which Stable Diffusion 2's does not have
        roofline.cast(model, torch.float16).save_pretrained(pathlib.Path(folder, name))
    shutil.copytree(pathlib.Path(models.tiny_sd_folder(), "tokenizer"), pathlib.Path(folder, "tokenizer"))


def measure(given, device, model, setting, sizes, batch):
    """{"text" or a size: seconds of a batch, "first call, s", "peak memory, GiB"}."""
    compiled = given.compiled and device == "cuda"  # on a CPU: minutes
    config = PreprocessingConfig(
        encoder_model=model,
        encoder_precision="fp16",
        encoder_batch_size=batch,
        resolutions=sizes,
    )
    made = encoder.LatentEncoder(**{**prepare.encoder_arguments(config), "compile": compiled, **SETTINGS[setting]})
    random, text = np.random.default_rng(0), made.text_encoder.config
    ids = random.integers(1, text.vocab_size - 1, (batch, text.max_position_embeddings), dtype=np.int32)
    pixels = {size: random.integers(0, 256, (batch, size, size, 3), dtype=np.uint8) for size in sizes}
    calls = {"text": lambda: made.encode_captions(ids)}
    calls |= {size: lambda size=size: made.encode_images(pixels[size]) for size in sizes}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for call in calls.values():
        call()
    first = time.perf_counter() - started
    found = {what: roofline.typical_seconds(call, device, given.seconds) for what, call in calls.items()}
    return {**found, "first call, s": first, "peak memory, GiB": peak_memory(device) / 2**30}


def main():
    given = record.options(
        __doc__, model="sd2", resolutions=["256,512", "512", "256"], batch=[32, 64, 16], seconds=2.0, compiled=False
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates, peak = roofline.ceilings(device), peak_flops(device, "bf16")
    passes = {text: [int(size) for size in text.split(",")] for text in given.resolutions}
    sizes = sorted(set().union(*passes.values()))
    how = "compiled" if given.compiled else "eager"

    def rows_of(found, batch):
        """Of each pass: rows/s, and its shares of the GPU's peak and of the roofline."""
        rows = {}
        for text, sizes in passes.items():
            rate = batch / (found["text"] + sum(found[size] for size in sizes))
            least = roofline.least_seconds(roofline.encoder_work(tuple(sizes), batch), rates).sum()
            rows[f"{text} px, rows/s"] = rate
            rows[f"{text} px, of peak"] = rate * estimates.encoder_flops(*sizes) / peak if peak else float("nan")
            rows[f"{text} px, of roofline"] = rate * least / batch
        return rows

    def summarise(rows):
        summary = {}
        for text in passes:
            best = max(rows, key=lambda row: row[f"{text} px, rows/s"])
            summary[f"encoding at {text} pixels with {given.model}'s models, {how}, the fastest setting"] = (
                f"{best[f'{text} px, rows/s']:.1f} rows/s ({best['setting']}, batch {best['batch']})"
            )
        return summary

    results = record.Rows("gpu_encode", summarise, ceilings=rates)
    with tempfile.TemporaryDirectory() as folder:
        model = folder if given.model == "sd2" else given.model
        if given.model == "sd2":
            save_sd2(folder, device)
        base, *others = SETTINGS
        first, *_ = given.batch
        for setting, batch in [*((base, batch) for batch in given.batch), *((setting, first) for setting in others)]:

            def add(setting=setting, batch=batch):
                found = measure(given, device, model, setting, sizes, batch)
                return {**rows_of(found, batch), **{name: found[name] for name in found if name not in sizes}}

            results.add({"setting": setting, "batch": batch}, add)


if __name__ == "__main__":
    main()
