"""Evaluation of a run's checkpoints while it trains: held-out loss by noise level, pictures of fixed prompts, scores.

Ray Train calls `validate` for each checkpoint that is due, one at a time, in parallel with training. It ends a run
whose validation is killed or runs out of memory, so `validate` only waits for a Ray task that does the work
(`evaluate_checkpoint`) and records its outcome. If the trainers use all GPUs, they compute losses and pictures between
two steps (`OnWorkers`), and the task only scores them, on CPUs (`score_checkpoint`). Results: `runtime.results`;
pictures: the run's `evaluation/{step}/`.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.train
import torch
from diffusers import DiffusionPipeline

from .. import distributed, storage
from ..config.training import TrainingConfig
from ..encode import captions
from ..latents import held_out, schema
from ..latents.manifest import Manifest
from ..model.denoisers import build_denoiser
from ..model.sharding import cast_inputs
from ..runtime import ray_errors
from ..sample import decoder
from ..sample.pipeline import build_pipeline, generate, read_encoder_manifest, save_pictures, to_png
from ..train import checkpoint, results
from . import scores
from .losses import losses_by_noise
from .prompts import read_prompts

NUM_PROMPTS = 64  # captions of held-out rows, if no prompts are given
GRID = 16  # pictures kept per checkpoint, of the first prompts
Agreement = Callable[[list[np.ndarray], list[str]], dict[str, float]]
# Pictures of the prompts, pictures of held-out rows, why there are none.
Pictures = tuple[list[np.ndarray], list[np.ndarray], list[str]]


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
        held_out.of_run(config)  # the trainers then find them: a large data set's list of files takes gigabytes
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
    tokenizer = captions.load_tokenizer(read_encoder_manifest(config).text_encoder_model)
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

    The newest checkpoint goes first: older ones are recorded as skipped, but for those that only have to be scored. An
    evaluation that fails, is killed or takes longer than `timeout_s` is recorded as failed, and the run continues.

    Args:
        config, prompts, agreement: as for `validation_config`, the config as a dict.
        work: your own function in place of `evaluate_checkpoint`, with the same arguments.
        where: options of the Ray task, to place it on separate machines, such as {"accelerator_type": "A10G"} or
            {"resources": {"evaluation": 1}}. By default it takes a CPU and, with `use_gpu`, a GPU of the trainers'
            kind. A task that only scores takes a CPU anywhere.
        timeout_s: seconds after which an evaluation is abandoned.
    """
    config = TrainingConfig.from_dict(config)
    step, newest = step_of_name(saved.path), newest_due(config)
    to_score = "to_score" in results.of_step(config.run_uri, step)
    if not saved and not to_score:  # a `faults.LostCheckpoint`
        return results.note(config.run_uri, step, skipped="its checkpoint could not be uploaded")
    if newest > step and not to_score:
        return results.note(
            config.run_uri, step, skipped=f"the checkpoint of step {newest} is newer and is evaluated instead"
        )
    work = score_checkpoint if to_score else work or evaluate_checkpoint
    options = {"num_cpus": 1, "max_retries": 0}
    if not to_score:
        if config.use_gpu:  # a GPU's memory is freed when the task's process ends, after one call
            options |= {"num_gpus": 1, "max_calls": 1, "accelerator_type": config.training_accelerator_type}
        options |= where or {}
    task = ray.remote(**options)(call)
    working = task.remote(work, saved, config.to_dict(), prompts, agreement)
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
        denoiser = checkpoint.load_weights(folder, build_denoiser(config.unet_config)).to(device).eval()
        if config.precision == "bf16" and config.strategy != "ddp":
            compute_in_bf16(denoiser)
        result = evaluate_denoiser(denoiser, config, checkpoint.step_of(folder), prompts, agreement)
        if results.is_best(config, result):
            checkpoint.keep_as_best(config.run_uri, folder, storage.name(saved.path))
    return result


def compute_in_bf16(denoiser: torch.nn.Module) -> None:
    """Let a denoiser compute as FSDP2 does in training: weights and inputs in bf16, the prediction in fp32."""
    denoiser.to(torch.bfloat16)
    denoiser.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    denoiser.register_forward_hook(lambda module, arguments, output: (output[0].float(),))


def score_checkpoint(
    saved: ray.train.Checkpoint, config: dict, prompts: list[str] | None, agreement: Agreement | None
) -> dict[str, Any]:
    """Score what the trainers drew at a checkpoint (`OnWorkers`), on CPUs; copy it to `best/` if no other is better."""
    config, name = TrainingConfig.from_dict(config), storage.name(saved.path)
    checkpoint_uri = storage.join(config.run_uri, name)
    torch.set_num_threads(max(1, os.cpu_count() // 4))  # the trainers leave most cores idle
    result = results.of_step(config.run_uri, step_of_name(name))
    to_score = result.pop("to_score")
    uris = [part_uri(config, result["step"], rank) for rank in range(to_score["ranks"])]
    by_rank = [pickle.loads(storage.read_bytes(uri)) for uri in uris]
    pictures = [[one for some in kind for one in some] for kind in zip(*by_rank, strict=True)]
    result = finish(result, pictures, to_score["prompts"], config, agreement)
    for uri in uris:
        storage.delete(uri)
    if results.is_best(config, result) and checkpoint.find_corruption(checkpoint_uri) is None:
        checkpoint.keep_as_best(config.run_uri, checkpoint_uri, name)
    return result


# ---- by the trainers


class OnWorkers:
    """`evaluate` of `loop.train_loop_per_worker`: the workers compute losses and pictures, each its share.

    They go on to train while a Ray task scores what they leave in the run's folder (`score_checkpoint`).

    `prompts`: as `resolve_prompts` returns them.
    """

    def __init__(self, prompts: list[str] | None = None):
        self.prompts, self.evaluator = prompts, None

    def __call__(self, denoiser: torch.nn.Module, config: TrainingConfig, step: int) -> None:
        started = time.perf_counter()
        self.evaluator = self.evaluator or Evaluator(denoiser, config, self.prompts)
        result = self.evaluator.losses(step)
        storage.write_bytes(part_uri(config, step, distributed.rank()), pickle.dumps(self.evaluator.draw()))
        if distributed.rank() == 0:
            to_score = {"ranks": distributed.world_size(), "prompts": self.evaluator.prompts}
            result |= {"seconds": time.perf_counter() - started, "unfinished": True, "to_score": to_score}
            results.write(config.run_uri, result)


def part_uri(config: TrainingConfig, step: int, rank: int) -> str:
    """Of a rank's share of the pictures, as `Evaluator.draw` returns them; deleted once they are scored."""
    return storage.join(config.run_uri, "evaluation", f"{step:09d}", f"rank-{rank:05d}.pickle")


# ---- what is evaluated


def evaluate_denoiser(
    denoiser: torch.nn.Module, config: TrainingConfig, step: int, prompts: list[str] | None, agreement: Agreement | None
) -> dict[str, Any]:
    """Evaluate a denoiser in this process; returns what it writes to the run's `validation/{step}.json`.

    The losses are written before the first picture is drawn, so that they survive if drawing fails. Failures are
    recorded and the rest continues.
    """
    started, evaluator = time.perf_counter(), Evaluator(denoiser, config, prompts)
    result, pictures = evaluator.losses(step), evaluator.draw()
    result["seconds"] = time.perf_counter() - started
    return finish(result, pictures, evaluator.prompts, config, agreement)


class Evaluator:
    """Computes a denoiser's losses and pictures, on all ranks together; what that takes is read once.

    `prompts`: None for captions of held-out rows.
    """

    def __init__(self, denoiser: torch.nn.Module, config: TrainingConfig, prompts: list[str] | None):
        self.denoiser, self.config, self.device = denoiser, config, next(denoiser.parameters()).device
        self.manifest, self.rows = read_encoder_manifest(config), held_out.of_run(config)
        if prompts is None and self.rows is not None:
            prompts = list(dict.fromkeys(self.rows[schema.CAPTION].to_pylist()))[:NUM_PROMPTS]
        self.prompts = prompts or []

    @functools.cached_property
    def pipeline(self) -> DiffusionPipeline:
        return build_pipeline(self.denoiser, self.manifest, self.config)

    def losses(self, step: int) -> dict[str, Any]:
        """{"step", ...}: see `held_out_losses`. Rank 0 writes them as an unfinished result."""
        result = {"step": step, **held_out_losses(self.denoiser, self.manifest, self.rows, self.config)}
        result |= validation_set_losses(self.denoiser, self.config)
        if distributed.rank() == 0:
            results.write(self.config.run_uri, {**result, "unfinished": True})
        return result

    def draw(self) -> Pictures:
        """This rank's share.

        Pictures depend on the order of the prompts, not on the number of ranks. On a GPU the frozen models take memory
        only meanwhile.
        """
        try:
            frozen = torch.nn.ModuleList([self.pipeline.vae, self.pipeline.text_encoder]).to(self.device)
            drawn, real = self.draw_share() if self.prompts else [], self.decode_share()
            frozen.to("cpu")
            return drawn, real, []
        except Exception as error:  # no failure here may end the run
            return [], [], [describe(error)]

    def draw_share(self) -> list[np.ndarray]:
        """All ranks draw equally many, because they gather sharded weights together."""
        count = -(-len(self.prompts) // distributed.world_size())
        first = distributed.rank() * count
        share = [self.prompts[min(number, len(self.prompts) - 1)] for number in range(first, first + count)]
        options = {"steps": self.config.sampling_steps, "guidance_scale": self.config.guidance_scale}
        size = self.config.largest_resolution
        return generate(self.pipeline, share, resolution=size, seed=first, **options)

    def decode_share(self) -> list[np.ndarray]:
        """Of the largest resolution's latents, in all shapes; none if they are not compared, or were before."""
        wanted = self.prompts and self.rows is not None and uses_clip(self.config, self.manifest)
        if not wanted or storage.exists(embeddings_uri(self.config)):
            return []
        count, pictures = -(-self.rows.num_rows // distributed.world_size()), []
        rows = self.rows.slice(distributed.rank() * count, count)
        for spec in self.manifest.latents_at(self.config.largest_resolution):
            if spec.name in rows.column_names and rows.num_rows:
                moments, valid = spec.decode(rows[spec.name])
                pictures += list(decoder.reconstruct(self.pipeline.vae, moments[np.asarray(valid)]))
        return pictures


def finish(
    result: dict[str, Any], pictures: Pictures, prompts: list[str], config: TrainingConfig, agreement: Agreement | None
) -> dict[str, Any]:
    """Score the pictures and write the whole result, which is returned. A score that fails is recorded as failed."""
    (drawn, real, errors), started = pictures, time.perf_counter()
    failed = {"drawing": errors[0]} if errors else {}
    result.pop("unfinished", None)
    if prompts and not errors:
        drawn = drawn[: len(prompts)]
        save_grid(drawn, prompts, config, result["step"])
        result["prompts"] = len(prompts)
        for name, measure in measures(drawn, real, prompts, config, agreement).items():
            try:
                result |= measure()
            except Exception as error:  # must not end the run
                failed[name] = describe(error)
    result["seconds"] = round(result["seconds"] + time.perf_counter() - started, 3)
    results.write(config.run_uri, result)
    return results.note(config.run_uri, result["step"], failed=failed) if failed else result


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def validation_set_losses(denoiser: torch.nn.Module, config: TrainingConfig) -> dict[str, Any]:
    """What `held_out_losses` returns, of the rows of `validation_uri`, as "validation_set_loss" and so on; {} without.

    For all ranks, which share the rows.
    """
    if not config.validation_uri:
        return {}
    rows = held_out.ValidationSet(config, distributed.rank(), distributed.world_size())
    losses = {"uri": config.validation_uri, **held_out_losses(denoiser, rows.manifest, rows, config)}
    return {f"validation_set_{name.removeprefix('validation_')}": value for name, value in losses.items()}


def held_out_losses(
    denoiser: torch.nn.Module,
    manifest: Manifest,
    rows: pa.Table | held_out.ValidationSet | None,
    config: TrainingConfig,
) -> dict[str, Any]:
    """{"validation_loss", "unweighted", "rows", "loss_by_noise"}; {} if no rows are held out."""
    if rows is None:
        return {}
    losses = losses_by_noise(denoiser, manifest, rows, config)
    loss, unweighted = losses[:, 1:].mean(axis=0).tolist()
    by_noise = {str(int(timestep)): value for timestep, value in losses[:, [0, 2]].tolist()}
    return {"validation_loss": loss, "unweighted": unweighted, "rows": rows.num_rows, "loss_by_noise": by_noise}


@functools.lru_cache(maxsize=1)
def load_clip(model: str) -> scores.CLIP:
    """Once a process."""
    return scores.CLIP(model, device="cuda" if torch.cuda.is_available() else "cpu")


def uses_clip(config: TrainingConfig, manifest: Manifest) -> bool:
    """tiny-clip was only trained on the drawn pictures."""
    return bool(config.clip_model) and (config.clip_model != "tiny-clip" or manifest.vae_model == "tiny-sd")


def measures(
    drawn: list[np.ndarray], real: list[np.ndarray], prompts: list[str], config: TrainingConfig, agreement: Agreement
) -> dict[str, Callable[[], dict[str, Any]]]:
    """{score that is asked for: what computes it and returns its values}."""
    clip = functools.partial(load_clip, config.clip_model)
    embedded = functools.cache(lambda: clip().images(drawn))

    def rate():
        shares = agreement(drawn, prompts)
        return {"agreement": shares["all"], "agreement_by_attribute": shares}

    found = {"agreement": rate} if agreement else {}
    if uses_clip(config, read_encoder_manifest(config)):
        found["clip_score"] = lambda: {"clip_score": scores.clip_score(embedded(), clip().texts(prompts))}
        if real or storage.exists(embeddings_uri(config)):
            found["cmmd"] = lambda: {"cmmd": scores.cmmd(embedded(), embed_held_out(real, config))}
    return found


def embeddings_uri(config: TrainingConfig) -> str:
    name = f"held-out-{zlib.crc32(config.clip_model.encode()):08x}.npy"
    return storage.join(config.run_uri, "validation", name)


def embed_held_out(real: list[np.ndarray], config: TrainingConfig) -> np.ndarray:
    """(n, d) embeddings of the held-out rows' pictures, cached in the run's `validation/`."""
    uri = embeddings_uri(config)
    if storage.exists(uri):
        return np.load(io.BytesIO(storage.read_bytes(uri)))
    embedded = load_clip(config.clip_model).images(real)
    file = io.BytesIO()
    np.save(file, embedded)
    storage.write_bytes(uri, file.getvalue())
    return embedded


def save_grid(pictures: list[np.ndarray], prompts: list[str], config: TrainingConfig, step: int) -> None:
    """Write the first pictures to `evaluation/{step}/`: `00.png`, ..., together `grid.png`, and `prompts.json`."""
    uri, shown = storage.join(config.run_uri, "evaluation", f"{step:09d}"), pictures[:GRID]
    blank = [np.zeros_like(shown[0])] * (-len(shown) % min(4, len(shown)))
    padded = [*shown, *blank]
    rows = [np.concatenate(padded[start : start + 4], axis=1) for start in range(0, len(padded), 4)]
    storage.write_bytes(storage.join(uri, "grid.png"), to_png(np.concatenate(rows)))
    save_pictures(shown, uri)
    storage.write_text(storage.join(uri, "prompts.json"), json.dumps(prompts[:GRID], ensure_ascii=False))
