"""Encoding on one GPU by Stable Diffusion 2's VAE and text encoder: rows a second by resolution and batch size.

    python -m tests.benchmarks.gpu_encode [--resolutions 512 256] [--batch 32 64 16]
    python -m tests.benchmarks.gpu_encode --model tiny-sd --resolutions 32 --batch 2 --seconds 0.1     # on a CPU

Random weights in fp16, saved as a model's folder and loaded as any model; random pixels and token ids, copied to the
GPU each time. What is timed is `encoder.LatentEncoder`: pixels to moments, token ids to embeddings.
"""

import pathlib
import shutil
import statistics
import tempfile
import time

import numpy as np
import torch

from helpers.config import PreprocessingConfig
from helpers.encode import encoder, models, prepare
from helpers.lesson import estimates
from tests.benchmarks import record


def save_sd2(folder, device):
    """Write Stable Diffusion 2's encoders with random weights, in diffusers layout; the tokenizer is tiny-sd's."""
    for name, model in zip(("vae", "text_encoder"), estimates.build_encoders(device=device), strict=True):
        if name == "vae":
            model.register_to_config(force_upcast=False)  # diffusers' default, which Stable Diffusion 2's does not have
        torch.nn.Module.to(model, torch.float16).save_pretrained(pathlib.Path(folder, name))
    shutil.copytree(pathlib.Path(models.tiny_sd_folder(), "tokenizer"), pathlib.Path(folder, "tokenizer"))


def seconds_of(call, at_least):
    """The median time of a call, the GPU's work included, after three calls of warm-up."""
    found = []
    while len(found) < 6 or sum(found[3:]) < at_least:
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[3:])


def measure(model, size, batch, at_least):
    """{"rows/s", and seconds of a batch of images and of captions}"""
    sizes = {"encoder_batch_size": batch, "resolutions": [size]}
    config = PreprocessingConfig(encoder_model=model, encoder_precision="fp16", **sizes)
    made = encoder.LatentEncoder(**prepare.encoder_arguments(config))
    random, text = np.random.default_rng(0), made.text_encoder.config
    ids = random.integers(1, text.vocab_size - 1, (batch, text.max_position_embeddings), dtype=np.int32)
    pixels = random.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    images = seconds_of(lambda: made.encode_images(pixels), at_least)
    captions = seconds_of(lambda: made.encode_captions(ids), at_least)
    return {"rows/s": batch / (images + captions), "images, s": images, "captions, s": captions}


def main():
    given = record.options(__doc__, model="sd2", resolutions=[512, 256], batch=[32, 64, 16], seconds=2.0)

    def summarise(rows):
        summary = {}
        for size in dict.fromkeys(row["resolution"] for row in rows):
            best = max((row for row in rows if row["resolution"] == size), key=lambda row: row["rows/s"])
            what = f"encoding at {size} pixels with {given.model}'s models, eager, the fastest batch size"
            summary[what] = f"{best['rows/s']:.1f} rows/s (batch {best['batch']})"
        return summary

    results = record.Rows("gpu_encode", summarise)
    with tempfile.TemporaryDirectory() as folder:
        if given.model == "sd2":
            save_sd2(folder, "cuda" if torch.cuda.is_available() else "cpu")
        model = folder if given.model == "sd2" else given.model
        for size in given.resolutions:
            for batch in given.batch:
                what = {"resolution": size, "batch": batch}
                results.add(what, lambda size=size, batch=batch: measure(model, size, batch, given.seconds))


if __name__ == "__main__":
    main()
