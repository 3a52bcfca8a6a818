"""Evaluation of a run's checkpoints while it trains: held-out loss by noise level, pictures of fixed prompts, scores.

Ray Train calls `validate` for each checkpoint that is due, one at a time, in parallel with training. It ends a run
whose validation is killed or runs out of memory, so `validate` only waits for a Ray task that does the work
(`evaluate_checkpoint`) and records its outcome. If the trainers use all GPUs, they evaluate between two steps
(`OnWorkers`). Results: `runtime.results`; pictures: the run's `evaluation/{step}/`.
"""

from __future__ import annotations

import functools
import io
import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.train
import ray.train.collective
import torch

from .. import checkpoint, distributed, encoder, held_out_rows, images, sampling, schema, storage
from ..manifest import Manifest
from ..runtime import ray_errors, results
from ..training_config import TrainingConfig
from ..unet import build_unet
from ..validation import losses_by_noise
from . import scores
from .prompts import read_prompts

NUM_PROMPTS = 64  # captions of held-out rows, if no prompts are given
GRID = 16  # pictures kept per checkpoint, of the first prompts
Agreement = Callable[[list[np.ndarray], list[str]], dict[str, float]]


def validation_config(
    config: TrainingConfig,
    prompts: list[str] | None = None,
    agreement: Agreement | None = None,
    **options,
) -> ray.train.ValidationConfig:
    """The `validation_config` argument of `TorchTrainer`.

    Args:
        config: `prompts`, `guidance_scale`, `sampling_steps`, `sampler`, `clip_model` and `best_by` are used.
        prompts: used if `config.prompts` is None; None: captions of held-out rows.
        agreement: `agreement(pictures, prompts)` returns the share of pictures that show what their prompt says, as
            "all" and by attribute, for data whose pictures a program can judge. None: not measured.
        options: `where`, `timeout_s` and `work`, as for `validate`.

    Raises ValueError for prompts that cannot be used, and for `best_by="agreement"` without `agreement`.
    """
    if config.validate_every:
        prompts = resolve_prompts(config, prompts)
    if config.best_by == "agreement" and agreement is None:
        raise ValueError(
            "best_by='agreement' needs an agreement function, which this data does not have: choose another best_by."
        )
    fn = functools.partial(validate, config=config.to_dict(), prompts=prompts, agreement=agreement, **options)
    # It only waits. Ray restarts it if its process is lost; otherwise Ray Train would end the run.
    return ray.train.ValidationConfig(fn, ray_remote_kwargs={"num_cpus": 0, "max_retries": -1})


def resolve_prompts(config: TrainingConfig, prompts: list[str] | None = None) -> list[str] | None:
    """The prompts that `config.prompts` names, else `prompts`. Raises ValueError for unusable prompts."""
    if config.prompts is None:
        return prompts
    tokenizer = images.load_tokenizer(sampling.read_encoder_manifest(config).encoder["model"])
    given = config.prompts if isinstance(config.prompts, str) else list(config.prompts)
    return read_prompts(given, tokenizer=tokenizer)


# ---- in parallel with training


def validate(
    saved: ray.train.Checkpoint,
    config: dict,
    prompts: list[str] | None = None,
    agreement: Agreement | None = None,
    *,
    work: Callable[..., dict[str, Any]] | None = None,
    where: dict[str, Any] | None = None,
    timeout_s: float = 3600,
) -> dict[str, Any]:
    """Ray Train's validation function: has a checkpoint evaluated, and returns the results as its metrics.

    The newest checkpoint goes first: older ones are recorded as skipped. An evaluation that fails, is killed or takes
    longer than `timeout_s` is recorded as failed, and the run continues.

    Args:
        config, prompts, agreement: as for `validation_config`, the config as a dict.
        work: your own function in place of `evaluate_checkpoint`, with the same arguments.
        where: options of the Ray task, to place it on separate machines, such as {"accelerator_type": "A10G"} or
            {"resources": {"evaluation": 1}}. By default it takes a CPU and, with `use_gpu`, a GPU.
        timeout_s: seconds after which an evaluation is abandoned.
    """
    config = TrainingConfig.from_dict(config)
    step, newest = step_of_name(saved.path), newest_due(config)
    if not saved:  # a `fault_tolerance.LostCheckpoint`
        return results.note(config.run_uri, step, skipped="its checkpoint could not be uploaded")
    if newest > step:
        return results.note(
            config.run_uri, step, skipped=f"the checkpoint of step {newest} is newer and is evaluated instead"
        )
    gpu = int(config.use_gpu)  # its memory is freed when the task's process ends, after one call
    task = ray.remote(**{"num_cpus": 1, "num_gpus": gpu, "max_calls": gpu, "max_retries": 0, **(where or {})})(call)
    working = task.remote(work or evaluate_checkpoint, saved, config.to_dict(), prompts, agreement)
    try:
        return ray.get(working, timeout=timeout_s)
    except ray.exceptions.TaskCancelledError:  # the run was ended: Ray Train validates when it is resumed
        raise
    except ray.exceptions.GetTimeoutError:
        ray.cancel(working, force=True)
        reason = f"it took longer than {timeout_s:,.0f} s"
    except ray.exceptions.RayError as error:
        reason = ray_errors.summarize_error(str(error))
    return results.note(config.run_uri, step, failed={"evaluation": reason})


def call(work: Callable, *arguments) -> dict[str, Any]:
    """`work(*arguments)`: what Ray runs as a task must be a plain function, and `work` may be any callable."""
    return work(*arguments)


def step_of_name(name: str) -> int:
    return int(storage.name(name).split("-")[1])


def newest_due(config: TrainingConfig) -> int:
    """The step of the run's newest complete checkpoint that is due for evaluation; 0 without one."""
    for uri in checkpoint.list_checkpoints(config.run_uri):
        step = step_of_name(uri)
        due = config.validate_every and (step % config.validate_every == 0 or step == config.max_steps)
        if due and checkpoint.find_corruption(uri) is None:
            return step
    return 0


def evaluate_checkpoint(
    saved: ray.train.Checkpoint, config: dict, prompts: list[str] | None, agreement: Agreement | None
) -> dict[str, Any]:
    """Evaluate a checkpoint's averaged weights in this process; copy it to `best/` if no other is better."""
    config = TrainingConfig.from_dict(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with saved.as_directory() as folder:
        unet = checkpoint.load_weights(folder, build_unet(config.unet_config)).to(device).eval()
        result = evaluate_unet(unet, config, checkpoint.step_of(folder), prompts, agreement)
        if results.is_best(config, result):
            checkpoint.keep_as_best(config.run_uri, folder, storage.name(saved.path))
    return result


# ---- by the trainers


class OnWorkers:
    """`evaluate` of `train.train_loop_per_worker`: the workers share the held-out rows and the prompts.

    `prompts`: as `resolve_prompts` returns them; `agreement`: as for `validation_config`.
    """

    def __init__(self, prompts: list[str] | None = None, agreement: Agreement | None = None):
        self.prompts, self.agreement = prompts, agreement

    def __call__(self, unet: torch.nn.Module, config: TrainingConfig, step: int) -> tuple[dict[str, Any], bool]:
        if distributed.rank() == 0:
            held_out_rows.of_run(config)  # caches them for the other ranks
        ray.train.collective.barrier()
        result = evaluate_unet(unet, config, step, self.prompts, self.agreement)
        is_best = distributed.rank() == 0 and results.is_best(config, result)
        return ray.train.collective.broadcast_from_rank_zero((result, is_best))


# ---- what is evaluated


def evaluate_unet(
    unet: torch.nn.Module, config: TrainingConfig, step: int, prompts: list[str] | None, agreement: Agreement | None
) -> dict[str, Any]:
    """Evaluate a U-Net on all ranks together; rank 0 returns what it writes to the run's `validation/{step}.json`.

    The losses are written before the first picture is drawn, so that they survive if drawing fails. Failures are
    recorded and the rest continues. Pictures depend only on the order of the prompts, not on the number of ranks.
    """
    started, manifest = time.perf_counter(), sampling.read_encoder_manifest(config)
    rows = held_out_rows.of_run(config)
    result = {"step": step, **held_out_losses(unet, manifest, rows, config)}
    if distributed.rank() == 0:
        results.write(config.run_uri, {**result, "unfinished": True})
    if prompts is None and rows is not None:
        prompts = list(dict.fromkeys(rows[schema.CAPTION].to_pylist()))[:NUM_PROMPTS]
    try:
        drawn = draw(unet, config, manifest, prompts) if prompts else []
    except Exception as error:  # no failure here may end the run
        drawn = error
    drawn_by_rank = distributed.gather_objects(drawn)
    if drawn_by_rank is None:
        return {}
    errors = [drawn for drawn in drawn_by_rank if isinstance(drawn, Exception)]
    failed = {"drawing": describe(errors[0])} if errors else {}
    if prompts and not failed:
        pictures = [picture for drawn in drawn_by_rank for picture in drawn][: len(prompts)]
        save_grid(pictures, prompts, config, step)
        result["prompts"] = len(prompts)
        for name, values in score(pictures, prompts, config, manifest, rows, agreement):
            if isinstance(values, Exception):
                failed[name] = describe(values)
            else:
                result |= values
    result["seconds"] = round(time.perf_counter() - started, 3)
    results.write(config.run_uri, result)
    return results.note(config.run_uri, step, failed=failed) if failed else result


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def held_out_losses(
    unet: torch.nn.Module, manifest: Manifest, rows: pa.Table | None, config: TrainingConfig
) -> dict[str, Any]:
    """{"validation_loss", "unweighted", "rows", "loss_by_noise"}; {} if no rows are held out."""
    if rows is None:
        return {}
    losses = losses_by_noise(unet, manifest, rows, config)
    loss, unweighted = losses[:, 1:].mean(axis=0).tolist()
    by_noise = {str(int(timestep)): value for timestep, value in losses[:, [0, 2]].tolist()}
    return {"validation_loss": loss, "unweighted": unweighted, "rows": rows.num_rows, "loss_by_noise": by_noise}


def draw(unet: torch.nn.Module, config: TrainingConfig, manifest: Manifest, prompts: list[str]) -> list[np.ndarray]:
    """This rank's part of the pictures. All ranks draw equally many, because they gather sharded weights together."""
    device, count = next(unet.parameters()).device, -(-len(prompts) // distributed.world_size())
    first = distributed.rank() * count
    share = [prompts[min(number, len(prompts) - 1)] for number in range(first, first + count)]
    pipeline = sampling.build_pipeline(unet, manifest.encoder["model"], config.prediction_type, config.sampler)
    pipeline.vae.to(device)
    pipeline.text_encoder.to(device)
    options = {"steps": config.sampling_steps, "guidance_scale": config.guidance_scale}
    return sampling.generate(pipeline, share, resolution=config.largest_resolution, seed=first, **options)


def score(
    pictures: list[np.ndarray],
    prompts: list[str],
    config: TrainingConfig,
    manifest: Manifest,
    rows: pa.Table | None,
    agreement: Agreement | None,
) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """Yield `(name, values)` for each score that is asked for, or its exception in place of the values."""

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clip = functools.cache(lambda: scores.CLIP(config.clip_model, device=device))
    embedded = functools.cache(lambda: clip().images(pictures))

    def rate():
        shares = agreement(pictures, prompts)
        return {"agreement": shares["all"], "agreement_by_attribute": shares}

    measures = {"agreement": rate} if agreement else {}
    # tiny-clip was only trained on the drawn pictures.
    if config.clip_model and (config.clip_model != "tiny-clip" or manifest.encoder["model"] == "tiny-sd"):
        measures["clip_score"] = lambda: {"clip_score": scores.clip_score(embedded(), clip().texts(prompts))}
        if rows is not None:
            real = functools.partial(embed_held_out, config=config, manifest=manifest, rows=rows)
            measures["cmmd"] = lambda: {"cmmd": scores.cmmd(embedded(), real(clip()))}
    for name, measure in measures.items():
        try:
            yield name, measure()
        except Exception as error:  # reported by the caller; must not end the run
            yield name, error


def embed_held_out(clip: scores.CLIP, config: TrainingConfig, manifest: Manifest, rows: pa.Table) -> np.ndarray:
    """(n, d) embeddings of held-out rows' pictures, decoded from their latents; cached in the run's `validation/`."""
    name = f"held-out-{zlib.crc32(config.clip_model.encode()):08x}.npy"
    uri = storage.join(config.run_uri, "validation", name)
    if storage.exists(uri):
        filesystem, path = storage.open_filesystem(uri)
        with filesystem.open_input_file(path) as file:
            return np.load(io.BytesIO(file.read()))
    embedded = np.concatenate([clip.images(pictures) for pictures in decode_rows(rows, config, manifest)])
    file = io.BytesIO()
    np.save(file, embedded)
    storage.write_bytes(uri, file.getvalue())
    return embedded


def decode_rows(
    rows: pa.Table, config: TrainingConfig, manifest: Manifest, batch_size: int = 64
) -> Iterator[list[np.ndarray]]:
    """Yield batches of pictures decoded from the largest resolution's latents, in all shapes, by the same VAE."""
    vae = encoder.load_vae(manifest.encoder["model"]).to("cuda" if torch.cuda.is_available() else "cpu")
    for spec in manifest.latents_at(config.largest_resolution):
        if spec.name in rows.column_names:
            moments, valid = spec.decode(rows[spec.name])
            moments = moments[np.asarray(valid)]
            for start in range(0, len(moments), batch_size):
                yield list(encoder.reconstruct(vae, moments[start : start + batch_size]))


def save_grid(pictures: list[np.ndarray], prompts: list[str], config: TrainingConfig, step: int) -> None:
    """Write the first pictures to `evaluation/{step}/`: `00.png`, ..., together `grid.png`, and `prompts.json`."""
    uri, shown = storage.join(config.run_uri, "evaluation", f"{step:09d}"), pictures[:GRID]
    blank = [np.zeros_like(shown[0])] * (-len(shown) % min(4, len(shown)))
    padded = [*shown, *blank]
    rows = [np.concatenate(padded[start : start + 4], axis=1) for start in range(0, len(padded), 4)]
    storage.write_bytes(storage.join(uri, "grid.png"), sampling.to_png(np.concatenate(rows)))
    sampling.save_pictures(shown, uri)
    storage.write_text(storage.join(uri, "prompts.json"), json.dumps(prompts[:GRID], ensure_ascii=False))
