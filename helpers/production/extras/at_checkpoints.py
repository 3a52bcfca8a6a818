"""Evaluation of a run's checkpoints while it trains: held-out loss by noise level, images of fixed prompts, scores.

Ray Train calls `validation.validate` for each checkpoint that is due. A Ray task then does the work
(`evaluate_checkpoint`). If the trainers use all GPUs, they compute losses and images between two steps (`OnWorkers`),
and the task only scores the images, on CPUs (`score_checkpoint`). Results: `train.results`; images: the run's
`evaluation/{step}/`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import time
import zlib
from collections.abc import Callable
from typing import Any, Self

import diffusers
import numpy as np
import ray
import ray.train
import torch

from ... import distributed, sample, storage
from ...config import TrainingConfig
from ...encode import captions
from ...evaluate import held_out_losses, validation_set_losses
from ...latents import held_out, schema
from ...latents.manifest import DataSets, Manifest
from ...model.denoisers import build_denoiser
from ...model.sharding import cast_inputs
from ...sample import generate, pipeline_of_run, save_images, to_png
from ...train import checkpoint, checkpoint_io
from ..data import exclusions
from . import results, scores
from .prompts import read_prompts
from .settings import Evaluation

NUM_PROMPTS = 64  # captions of held-out rows, if no prompts are given
GRID = 16  # images kept per checkpoint, of the first prompts


def resolve_prompts(config: TrainingConfig, prompts: list[str] | None = None) -> list[str] | None:
    """The prompts that `config.prompts` names, else `prompts`. Raises ValueError for unusable prompts."""
    if config.prompts is None:
        return prompts
    tokenizer = captions.load_tokenizer(DataSets.open(config.proportions).first.text_encoder_model)
    given = config.prompts if isinstance(config.prompts, str) else list(config.prompts)
    return read_prompts(given, tokenizer=tokenizer)


# ---- in a Ray task


def evaluate_checkpoint(saved: ray.train.Checkpoint, evaluation: Evaluation) -> dict[str, Any]:
    """Evaluate a checkpoint's EMA weights in this process; copy it to `best/` if no other is better."""
    config, device = evaluation.config, "cuda" if torch.cuda.is_available() else "cpu"
    with saved.as_directory() as folder:
        denoiser = checkpoint_io.load_weights(folder, build_denoiser(config.unet_config)).to(device).eval()
        if config.precision == "bf16" and config.strategy != "ddp":
            compute_in_bf16(denoiser)
        result = evaluate_denoiser(denoiser, evaluation, checkpoint.step_of(folder))
        if results.is_best(config.run_uri, result, config.best_by):
            checkpoint.keep_as_best(config.run_uri, folder, storage.name(saved.path))
    return result


def compute_in_bf16(denoiser: torch.nn.Module) -> None:
    """Let a denoiser compute as FSDP2 does in training: weights and inputs in bf16, the prediction in fp32."""
    denoiser.to(torch.bfloat16)
    denoiser.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    denoiser.register_forward_hook(lambda module, arguments, output: (output[0].float(),))


def score_checkpoint(saved: ray.train.Checkpoint, evaluation: Evaluation) -> dict[str, Any]:
    """Score the images that the trainers drew (`OnWorkers`), on CPUs; copy the best checkpoint to `best/`."""
    config, name = evaluation.config, storage.name(saved.path)
    checkpoint_uri = storage.join(config.run_uri, name)
    torch.set_num_threads(max(1, os.cpu_count() // 4))  # the trainers leave most cores idle
    result = results.read_result(config.run_uri, checkpoint.step_of_name(name))
    to_score = result.pop("to_score")
    uris = [share_uri(config, result["step"], rank) for rank in range(to_score["ranks"])]
    images = Images.joined([Images.from_bytes(storage.read_bytes(uri)) for uri in uris])
    result = score_and_write(result, images, dataclasses.replace(evaluation, prompts=to_score["prompts"]))
    for uri in uris:
        storage.delete(uri)
    if results.is_best(config.run_uri, result, config.best_by) and checkpoint.find_corruption(checkpoint_uri) is None:
        checkpoint.keep_as_best(config.run_uri, checkpoint_uri, name)
    return result


# ---- by the trainers


class OnWorkers:
    """`evaluate` of `loop.train_loop_per_worker`: the workers compute losses and images, each its share.

    They continue to train while a Ray task scores the images, which they leave in the run's folder
    (`score_checkpoint`).

    `prompts`: as `resolve_prompts` returns them.
    """

    def __init__(self, prompts: list[str] | None = None):
        self.prompts, self.evaluator = prompts, None

    def __call__(self, denoiser: torch.nn.Module, config: TrainingConfig, step: int) -> None:
        started = time.perf_counter()
        self.evaluator = self.evaluator or Evaluator(denoiser, Evaluation(config, self.prompts))
        result = self.evaluator.losses(step)
        storage.write_bytes(share_uri(config, step, distributed.rank()), self.evaluator.draw().to_bytes())
        if distributed.rank() == 0:
            to_score = {"ranks": distributed.world_size(), "prompts": self.evaluator.evaluation.prompts}
            result |= {"seconds": time.perf_counter() - started, "unfinished": True, "to_score": to_score}
            results.write_result(config.run_uri, result)


def share_uri(config: TrainingConfig, step: int, rank: int) -> str:
    """The file with a rank's share of the images (`Images.to_bytes`); it is deleted once they are scored."""
    return storage.join(config.run_uri, "evaluation", f"{step:09d}", f"rank-{rank:05d}.npz")


# ---- what is evaluated


@dataclasses.dataclass
class Images:
    """Images to score, (H, W, 3) uint8: drawn from the prompts, and decoded from held-out rows.

    `error`: why there are none; empty: nothing failed.
    """

    drawn: list[np.ndarray]
    real: list[np.ndarray]
    error: str = ""

    @classmethod
    def joined(cls, shares: list[Self]) -> Self:
        """The images of all ranks, and the first error."""
        drawn = [image for share in shares for image in share.drawn]
        real = [image for share in shares for image in share.real]
        return cls(drawn, real, next((share.error for share in shares if share.error), ""))

    def to_bytes(self) -> bytes:
        """An `.npz` file: an array for each image, and the error as text."""
        named = {
            f"{kind}-{number}": image for kind in ("drawn", "real") for number, image in enumerate(vars(self)[kind])
        }
        file = io.BytesIO()
        np.savez(file, error=self.error, **named)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            drawn, real = ([arrays[name] for name in arrays if name.startswith(kind)] for kind in ("drawn", "real"))
            return cls(drawn, real, str(arrays["error"]))


def evaluate_denoiser(denoiser: torch.nn.Module, evaluation: Evaluation, step: int) -> dict[str, Any]:
    """Evaluate a denoiser in this process; returns the content of the run's `validation/{step}.json`.

    The losses are written before the first image is drawn, so that they survive if drawing fails. Failures are recorded
    and the rest continues.
    """
    started, evaluator = time.perf_counter(), Evaluator(denoiser, evaluation)
    result, images = evaluator.losses(step), evaluator.draw()
    result["seconds"] = time.perf_counter() - started
    return score_and_write(result, images, evaluator.evaluation)


class Evaluator:
    """Computes a denoiser's losses and images, on all ranks together. It reads models and rows once.

    Attributes:
        evaluation: as given, with captions of held-out rows if it had no prompts.
    """

    def __init__(self, denoiser: torch.nn.Module, evaluation: Evaluation):
        self.denoiser, self.config, self.device = denoiser, evaluation.config, next(denoiser.parameters()).device
        self.manifest = DataSets.open(self.config.proportions).first
        run = self.config
        is_excluded = functools.partial(exclusions.is_listed, run.leave_out)
        self.rows = held_out.of_run(run.run_uri, run.proportions, run.largest_resolution, is_excluded)
        self.evaluation = evaluation
        if evaluation.prompts is None:
            texts = [] if self.rows is None else self.rows[schema.CAPTION].to_pylist()
            self.evaluation = dataclasses.replace(evaluation, prompts=list(dict.fromkeys(texts))[:NUM_PROMPTS])

    @functools.cached_property
    def pipeline(self) -> diffusers.DiffusionPipeline:
        options = {"sampler": self.config.sampler, "steps": self.config.sampling_steps}
        return pipeline_of_run(self.denoiser, self.manifest, self.config, **options)

    def losses(self, step: int) -> dict[str, Any]:
        """{"step", ...}: see `held_out_losses`. Rank 0 writes them as an unfinished result."""
        result = {"step": step, **held_out_losses(self.denoiser, self.manifest, self.rows, self.config)}
        result |= validation_set_losses(self.denoiser, self.config)
        if distributed.rank() == 0:
            results.write_result(self.config.run_uri, {**result, "unfinished": True})
        return result

    def draw(self) -> Images:
        """This rank's share of the images.

        Images depend on the order of the prompts, not on the number of ranks. The frozen models occupy a GPU's memory
        only during this call.
        """
        try:
            frozen = torch.nn.ModuleList([self.pipeline.vae, self.pipeline.text_encoder]).to(self.device)
            images = Images(self.draw_share(), self.decode_share())
            frozen.to("cpu")
            return images
        except Exception as error:  # no failure here may end the run
            return Images([], [], describe_failure(error))

    def draw_share(self) -> list[np.ndarray]:
        """All ranks draw the same number of images, because they gather sharded weights together.

        The last prompt is repeated for that.
        """
        prompts = self.evaluation.prompts
        if not prompts:
            return []
        count = -(-len(prompts) // distributed.world_size())
        first = distributed.rank() * count
        share = [prompts[min(number, len(prompts) - 1)] for number in range(first, first + count)]
        options = {"steps": self.config.sampling_steps, "guidance_scale": self.config.guidance_scale}
        return generate(self.pipeline, share, resolution=self.config.largest_resolution, seed=first, **options)

    def decode_share(self) -> list[np.ndarray]:
        """Images of the largest resolution's latents, in all shapes; empty if CMMD is off or they are cached."""
        wanted = self.evaluation.prompts and self.rows is not None and uses_clip(self.config, self.manifest)
        if not wanted or storage.exists(embeddings_uri(self.config)):
            return []
        count, images = -(-self.rows.num_rows // distributed.world_size()), []
        rows = self.rows.slice(distributed.rank() * count, count)
        for spec in self.manifest.latents_at(self.config.largest_resolution):
            if spec.name in rows.column_names and rows.num_rows:
                moments, valid = spec.decode(rows[spec.name])
                images += list(sample.reconstruct(self.pipeline.vae, moments[np.asarray(valid)]))
        return images


# ---- scores


def score_and_write(result: dict[str, Any], images: Images, evaluation: Evaluation) -> dict[str, Any]:
    """The complete result of a step, which is written too: `result` with scores. A score that fails is recorded."""
    started, failed, prompts = time.perf_counter(), {}, evaluation.prompts
    result.pop("unfinished", None)
    if images.error:
        failed["drawing"] = images.error
    elif prompts:
        images = dataclasses.replace(images, drawn=images.drawn[: len(prompts)])
        save_grid(images.drawn, evaluation, result["step"])
        result["prompts"] = len(prompts)
        for name, measure in measures(images, evaluation).items():
            try:
                result |= measure()
            except Exception as error:  # must not end the run
                failed[name] = describe_failure(error)
    result["seconds"] = round(result["seconds"] + time.perf_counter() - started, 3)
    config = evaluation.config
    results.write_result(config.run_uri, result)
    return results.note(config.run_uri, result["step"], failed=failed) if failed else result


def describe_failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def measures(images: Images, evaluation: Evaluation) -> dict[str, Callable[[], dict[str, Any]]]:
    """{name of a score: function that computes it}, of the scores that `evaluation` asks for."""
    config, prompts = evaluation.config, evaluation.prompts
    clip = functools.partial(load_clip, config.clip_model)
    embed_drawn = functools.cache(lambda: clip().images(images.drawn))

    def rate_agreement():
        shares = evaluation.agreement(images.drawn, prompts)
        return {"agreement": shares["all"], "agreement_by_attribute": shares}

    def clip_score():
        return {"clip_score": scores.clip_score(embed_drawn(), clip().texts(prompts))}

    def cmmd():
        return {"cmmd": scores.cmmd(embed_drawn(), embed_held_out(images.real, config))}

    found = {"agreement": rate_agreement} if evaluation.agreement else {}
    if uses_clip(config, DataSets.open(config.proportions).first):
        found["clip_score"] = clip_score
        if images.real or storage.exists(embeddings_uri(config)):
            found["cmmd"] = cmmd
    return found


@functools.lru_cache(maxsize=1)
def load_clip(model: str) -> scores.CLIP:
    """Once a process."""
    return scores.CLIP(model, device="cuda" if torch.cuda.is_available() else "cpu")


def uses_clip(config: TrainingConfig, manifest: Manifest) -> bool:
    """Whether CLIP judges the run's images. tiny-clip was only trained on the drawn data set."""
    return bool(config.clip_model) and (config.clip_model != "tiny-clip" or manifest.vae_model == "tiny-sd")


def embeddings_uri(config: TrainingConfig) -> str:
    name = f"held-out-{zlib.crc32(config.clip_model.encode()):08x}.npy"
    return storage.join(config.run_uri, "validation", name)


def embed_held_out(real: list[np.ndarray], config: TrainingConfig) -> np.ndarray:
    """(n, d) embeddings of the held-out rows' images, cached in the run's `validation/`."""
    uri = embeddings_uri(config)
    if storage.exists(uri):
        return np.load(io.BytesIO(storage.read_bytes(uri)))
    embedded = load_clip(config.clip_model).images(real)
    file = io.BytesIO()
    np.save(file, embedded)
    storage.write_bytes(uri, file.getvalue())
    return embedded


def save_grid(drawn: list[np.ndarray], evaluation: Evaluation, step: int) -> None:
    """Write the first images to `evaluation/{step}/`: `00.png`, ..., together `grid.png`, and `prompts.json`."""
    uri, shown = storage.join(evaluation.config.run_uri, "evaluation", f"{step:09d}"), drawn[:GRID]
    blank = [np.zeros_like(shown[0])] * (-len(shown) % min(4, len(shown)))
    padded = [*shown, *blank]
    rows = [np.concatenate(padded[start : start + 4], axis=1) for start in range(0, len(padded), 4)]
    storage.write_bytes(storage.join(uri, "grid.png"), to_png(np.concatenate(rows)))
    save_images(shown, uri)
    storage.write_text(storage.join(uri, "prompts.json"), json.dumps(evaluation.prompts[:GRID], ensure_ascii=False))
