"""The speed of a training step as optimisations are added one by one, on random latents."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator

import numpy as np
import ray.train
import ray.train.torch
import torch

from .. import distributed, storage
from ..config import TrainingConfig
from ..latents import schema
from ..latents.manifest import Manifest, encode_embedding
from ..model import denoisers
from ..model.denoisers import load_denoiser_config
from ..production.extras import meter
from ..train.step import TrainStep, Unit, to_tensor

# Changes that each row adds to the row before it.
ABLATION = {
    "ddp, fp32": {"strategy": "ddp", "precision": "fp32", "compile_unet": False},
    "+ bf16": {"precision": "bf16"},
    "+ fsdp": {"strategy": "fsdp"},
    "+ torch.compile": {"compile_unet": True},
}


def random_batch(
    config: TrainingConfig, rank: int = 0, world: int = 1, num_tokens: int = 77
) -> tuple[Manifest, list[Unit]]:
    """`(manifest, units)`: a rank's part of a global batch of random latents and captions of the denoiser's shapes."""
    denoiser = load_denoiser_config(config.unet_config)
    width = denoiser[denoisers.ADAPTERS[denoiser["_class_name"]].text_width]
    resolution, random = config.largest_resolution, np.random.default_rng(rank)
    shape = (2, denoiser["in_channels"], resolution // 8, resolution // 8)
    manifest = Manifest.of(
        [],
        encoder={"model": "random", "revision": "0", "precision": "fp16"},
        resolutions=[resolution],
        columns=[
            schema.ColumnSpec(schema.latents_column(resolution), shape),
            schema.ColumnSpec(schema.EMBEDDINGS, (num_tokens, width)),
        ],
        scaling_factor=1.0,
        id_type="int64",
        empty_caption_embedding=encode_embedding(np.zeros((num_tokens, width))),
        job={},
    )
    units, latents_spec = [], manifest.latents(resolution)
    for slot in range(rank, config.units_per_step, world):
        positions = slot * config.unit_rows + np.arange(config.unit_rows)
        moments = to_tensor(np.abs(random.normal(size=(config.unit_rows, *shape)).astype(np.float16)))
        text = to_tensor(random.normal(size=(config.unit_rows, num_tokens, width)).astype(np.float16))
        keep, ids = to_tensor(np.ones(config.unit_rows, bool)), positions.tolist()
        units.append(Unit(moments, text, keep, positions, ids, latents_spec))
    return manifest, units


def time_steps(train_step: TrainStep, units: list[Unit], steps: int, warm_up: int) -> list[float]:
    """Seconds of each of `warm_up + steps` training steps on one batch, the GPU's work included."""
    seconds = []
    for step in range(warm_up + steps):
        started = time.perf_counter()
        train_step.step(step, units)
        if train_step.device.type == "cuda":
            torch.cuda.synchronize(train_step.device)
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_step(
    config: TrainingConfig, device: torch.device | str = "cpu", *, steps: int = 20, warm_up: int = 5
) -> dict:
    """Speed of the training step of `config` on random latents, by its median step; call it on every rank.

    EMA is off. Keys: "images/s", "ms a step", "MFU" (NaN if the hardware's peak is not known), "peak memory, GiB",
    "first step, s" (with compiling).
    """
    world = distributed.world_size()
    # A large U-Net would diverge on noise at the lesson's learning rate.
    config = dataclasses.replace(config, ema_start=10**9, learning_rate=1e-4)
    manifest, units = random_batch(config, distributed.rank(), world)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    train_step = TrainStep(config, manifest, device)
    first, *others = time_steps(train_step, units, steps, warm_up)
    seconds = statistics.median(others[-steps:])
    latents_shape = manifest.latents(config.largest_resolution).shape[1:]
    flops = meter.training_flops(config.unet_config, latents_shape, manifest.embeddings.shape)
    rate, peak = config.global_batch_size / seconds, meter.peak_flops(device, config.precision)
    result = {
        "images/s": rate,
        "ms a step": 1e3 * seconds,
        "MFU": flops * rate / world / peak if peak else float("nan"),
        "peak memory, GiB": meter.peak_memory(device) / 2**30,
        "first step, s": first,
    }
    del train_step
    gc.collect()
    torch.compiler.reset()
    if on_gpu:
        torch.cuda.empty_cache()
    return result


def ablation(
    config: TrainingConfig, device: torch.device | str = "cpu", *, steps: int = 20, warm_up: int = 5
) -> Iterator[dict]:
    """`measure_step` for each row of `ABLATION`, whose changes add up; `speedup` is over the first row.

    Without a C++ compiler the last row is left out.
    """
    settings, first_rate = {}, None
    for name, changes in ABLATION.items():
        settings |= changes
        if settings["compile_unet"] and not distributed.has_compiler():
            return
        result = measure_step(dataclasses.replace(config, **settings), device, steps=steps, warm_up=warm_up)
        rate = result.pop("images/s")
        first_rate = first_rate or rate
        del result["first step, s"]
        yield {"setting": name, "images/s": rate, "speedup": rate / first_rate, **result}


def ablation_per_worker(config: TrainingConfig, steps: int) -> None:
    """Training function of Ray Train that measures the `ablation` of a run's `config`, in `steps` steps each.

    It reads no data and saves no checkpoint. Rank 0 writes `hardware` and `rows` to `ablation.json` of the run, after
    each row, so that results survive a failure in a later one.
    """
    context = ray.train.get_context()
    distributed.use_cores(context.get_local_world_size())
    device = ray.train.torch.get_device()
    found = {"hardware": meter.hardware(device), "rows": []}
    for row in ablation(config, device, steps=steps):
        found["rows"].append(row)
        if context.get_world_rank() == 0:
            storage.write_json(storage.join(config.run_uri, "ablation.json"), found)
