"""The speed of a training step as optimisations are added one by one, on random latents."""

import dataclasses
import gc
import statistics
import time

import numpy as np
import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist

from .. import distributed, schema, storage
from ..config import TrainingConfig
from ..runtime import profiling
from ..train_step import TrainStep, Unit, to_tensor
from ..unet import has_compiler, load_unet_config


# What each row adds to the one before; `fused` is the optimizer's.
ABLATION = {
    "ddp, fp32": {"strategy": "ddp", "precision": "fp32", "channels_last": False, "compile_unet": False, "fused": None},
    "+ bf16": {"precision": "bf16"},
    "+ channels last, fused AdamW": {"channels_last": True, "fused": True},
    "+ fsdp": {"strategy": "fsdp"},
    "+ torch.compile": {"compile_unet": True},
}


def random_batch(config, rank=0, world=1, num_tokens=77):
    """`(manifest, units)`: a rank's part of a global batch of random latents and captions that fit the U-Net."""
    unet = load_unet_config(config.unet_config)
    resolution, width, random = config.largest_resolution, unet["cross_attention_dim"], np.random.default_rng(rank)
    shape = (2, unet["in_channels"], resolution // 8, resolution // 8)
    manifest = schema.Manifest(
        encoder={"model": "random", "revision": "0", "precision": "fp16"},
        resolutions=[resolution],
        columns=[
            schema.ColumnSpec(schema.latents_column(resolution), shape),
            schema.ColumnSpec(schema.EMBEDDINGS, (num_tokens, width)),
        ],
        scaling_factor=1.0,
        id_type="int64",
        empty_caption_embedding=schema.encode_embedding(np.zeros((num_tokens, width))),
        job={},
        segments=[],
    )
    units = []
    for slot in range(rank, config.units_per_step, world):
        positions = slot * config.unit_rows + np.arange(config.unit_rows)
        moments = to_tensor(np.abs(random.normal(size=(config.unit_rows, *shape)).astype(np.float16)))
        text = to_tensor(random.normal(size=(config.unit_rows, num_tokens, width)).astype(np.float16))
        units.append(Unit(moments, text, to_tensor(np.ones(config.unit_rows, bool)), positions, positions.tolist()))
    return manifest, units


def time_steps(learner, units, steps, warm_up):
    """Seconds of each of `steps` training steps on one batch, after `warm_up` others; ends each on the GPU too."""
    seconds = []
    for step in range(warm_up + steps):
        started = time.perf_counter()
        learner.step(step, units)
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)
        seconds.append(time.perf_counter() - started)
    return seconds[warm_up:]


def measure_step(config, device="cpu", *, steps=20, warm_up=5, fused=True, prepare=None):
    """Speed of the training step of `config` on random latents: images/s and more, as a dict; on every rank.

    `prepare(learner)`: called before the first step. EMA is off. The median step counts.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Noise has nothing to teach: at the lesson's learning rate a large U-Net would only diverge.
    config = dataclasses.replace(config, ema_start=10**9, learning_rate=1e-4)
    manifest, units = random_batch(config, dist.get_rank() if world > 1 else 0, world)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    learner = TrainStep(config, manifest, device, fused=fused)
    if prepare:
        prepare(learner)
    seconds = statistics.median(time_steps(learner, units, steps, warm_up))
    with profiling.profiled(device) as events:
        learner.step(warm_up + steps, units)
    latents_shape = manifest.latents(config.largest_resolution).shape[1:]
    flops = profiling.training_flops(config.unet_config, latents_shape, manifest.embeddings.shape)
    rate = config.global_batch_size / seconds
    found = {
        "images/s": rate,
        "ms a step": 1e3 * seconds,
        "MFU": flops * rate / world / profiling.peak_flops(device, config.precision),
        "peak memory, GiB": profiling.peak_memory(device) / 2**30,
        "communication": profiling.exposed_communication(events) if world > 1 else 0.0,
        "kinds": profiling.time_by_category(events).to_dict("records"),
    }
    del learner
    gc.collect()
    torch.compiler.reset()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def ablation(config, device="cpu", *, steps=20, warm_up=5, done=lambda rows: None):
    """`measure_step` with what ABLATION adds row by row, as a list of dicts; `speedup` is over the first row.

    `done(rows)` is called after each, so that what was measured is kept where a later one fails. Without a C++ compiler
    there is no last row.
    """
    rows, settings = [], {}
    for name, changes in ABLATION.items():
        settings = {**settings, **changes}
        if settings["compile_unet"] and not has_compiler():
            continue
        values = {key: value for key, value in settings.items() if key != "fused"}
        found = measure_step(
            dataclasses.replace(config, **values), device, steps=steps, warm_up=warm_up, fused=settings["fused"]
        )
        rows.append(
            {
                "setting": name,
                "images/s": found["images/s"],
                "speedup": found["images/s"] / (rows or [found])[0]["images/s"],
                **{key: value for key, value in found.items() if key not in ("images/s", "kinds")},
            }
        )
        done(rows)
    return rows


def ablation_per_worker(values):
    """What every worker runs to measure the ablation: `values` holds a `config`, as a dict, and the number of `steps`.

    No data is read and no checkpoint saved; rank 0 writes `hardware` and `rows` to `ablation.json` of the run.
    """
    config, context = TrainingConfig.from_dict(values["config"]), ray.train.get_context()
    distributed.use_cores(context.get_local_world_size())
    device = ray.train.torch.get_device()

    def save(rows):
        if context.get_world_rank() == 0:
            storage.write_json(
                storage.join(config.run_uri, "ablation.json"), {"hardware": profiling.hardware(device), "rows": rows}
            )

    ablation(config, device, steps=values["steps"], done=save)
