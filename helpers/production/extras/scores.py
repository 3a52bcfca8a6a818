"""What is measured of a checkpoint: losses on held-out rows, images of prompts, CLIP score and CMMD of the images.

CLIP score: mean cosine similarity of the embeddings of images and their prompts. CMMD: a distance between two sets of
images. Both take embeddings as (images, width) arrays, which `CLIP` makes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray.train
import torch
import transformers
from PIL import Image

from ... import sample, storage
from ...config import TrainingConfig
from ...distributed import rank, world_size
from ...encode import encoder, models
from ...encode.models import TINY_CLIP, TINY_SD
from ...evaluate import Rows, losses_by_noise
from ...latents import held_out, schema
from ...latents.manifest import DataSets, Manifest
from ...model.denoisers import build_denoiser
from ...model.sharding import cast_inputs
from ...notebook import Progress
from ...train import checkpoint, run_folder
from ..data import validation_set
from . import results

if TYPE_CHECKING:
    from .evaluate import Evaluate

NUM_PROMPTS = 64  # captions of held-out rows, if no prompts are given
GRID = 16  # images kept per checkpoint, of the first prompts
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
ROWS_AT_A_TIME = 1024  # rows of a kernel matrix that are held at once: 250 MB of 30,000 x 30,000 elements
BATCH_SIZE = 64


# ---- a checkpoint


def settle(evaluate: Evaluate, config: TrainingConfig) -> Evaluate:
    """`evaluate` with a list of prompts, and with the commit of a CLIP on the hub.

    Call it on the driver. Raises ValueError for arguments that do not go together, or do not fit the run and its data.
    """
    best_by, data = evaluate.best_by, DataSets.open(config.proportions).first
    lacks = {
        "clip_model": best_by in ("clip_score", "cmmd") and evaluate.clip_model is None,
        "validation_uri": best_by.startswith("validation_set") and not evaluate.validation_uri,
        "agreement": best_by == "agreement" and evaluate.agreement is None,
    }
    if missing := [name for name, is_missing in lacks.items() if is_missing]:
        raise ValueError(f"best_by={best_by!r} needs {missing[0]}: give one, or choose another best_by.")
    sample.build_sampler(config, evaluate.sampler, evaluate.sampling_steps)
    if evaluate.validation_uri:
        validation_set.check(evaluate.validation_uri, config, data)
    if held_out_rows(config) is None and not evaluate.best_by.startswith("validation_set"):
        Progress("evaluation").message(
            f"No rows are held out (validation_share={config.validation_share:g}): no checkpoint is the best by a "
            "validation loss. Encode more rows, or with a larger share, or give `evaluate` a validation_uri."
        )
    prompts = read_prompts(evaluate.prompts)
    clip_model = evaluate.clip_model and models.pin_model(evaluate.clip_model, parameter="clip_model")
    return dataclasses.replace(evaluate, prompts=prompts, clip_model=clip_model)


def held_out_rows(config: TrainingConfig) -> pa.Table | None:
    """The run's held-out rows. The driver finds them: a large data set's list of files takes gigabytes."""
    return held_out.of_run(config.run_uri, config.proportions, config.largest_resolution)


def read_prompts(given: list[str] | str | None) -> list[str] | None:
    """The lines of a text file, without blank ones; a list, or None, comes back as it is.

    Raises FileNotFoundError for a file that is not there, ValueError for one without a line or that is no text.
    """
    if not isinstance(given, str):
        return given
    if not storage.is_file(given):
        raise FileNotFoundError(f"prompts={given!r} does not exist: give a text file of prompts, or a list of them.")
    try:
        lines = map(str.strip, storage.read_bytes(given).decode("utf-8-sig").split("\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts={given!r} is no text in UTF-8 ({error.reason} at byte {error.start}).") from None
    if prompts := list(filter(None, lines)):
        return prompts
    raise ValueError(f"prompts={given!r} holds no prompt: give at least one.")


def evaluate_checkpoint(saved: ray.train.Checkpoint, evaluate: Evaluate, config: TrainingConfig) -> dict[str, Any]:
    """Evaluate a checkpoint's EMA weights in this process; copy it to `best/` if no other is better."""
    with saved.as_directory() as folder:
        denoiser = checkpoint.load_weights(folder, build_denoiser(config.unet_config)).to(find_device()).eval()
        if config.precision == "bf16" and config.strategy != "ddp":
            compute_in_bf16(denoiser)
        result = evaluate_denoiser(denoiser, evaluate, config, run_folder.step_of(folder))
        if results.is_best(config.run_uri, result, evaluate.best_by):
            results.keep_as_best(config.run_uri, folder, storage.name(saved.path))
    return result


def find_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_in_bf16(denoiser: torch.nn.Module) -> None:
    """Let a denoiser compute as FSDP2 does in training: weights and inputs in bf16, the prediction in fp32."""
    denoiser.to(torch.bfloat16)
    denoiser.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    denoiser.register_forward_hook(lambda module, arguments, output: (output[0].float(),))


def evaluate_denoiser(
    denoiser: torch.nn.Module, evaluate: Evaluate, config: TrainingConfig, step: int
) -> dict[str, Any]:
    """Evaluate a denoiser in this process; returns the content of the run's `validation/{step}.json`.

    The losses are written before the first image is drawn, so that they survive if drawing fails. Failures are recorded
    and the rest continues.
    """
    started, failed, manifest = time.perf_counter(), {}, DataSets.open(config.proportions).first
    result = losses(denoiser, manifest, config, evaluate.validation_uri, step, unfinished=True)
    rows, prompts = held_out_rows(config), evaluate.prompts
    if prompts is None:
        texts = [] if rows is None else rows[schema.CAPTION].to_pylist()
        prompts = list(dict.fromkeys(texts))[:NUM_PROMPTS]

    def attempt(what: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except Exception as error:  # must not end the run
            failed[what] = f"{type(error).__name__}: {error}"

    images = attempt("drawing", lambda: draw(denoiser, manifest, prompts, evaluate, config)) if prompts else None
    if images:
        save_grid(images, prompts, storage.join(config.run_uri, "evaluation", f"{step:09d}"))
        result["prompts"] = len(prompts)
        for name, measure in measures(images, prompts, rows, manifest, evaluate, config.run_uri).items():
            result |= attempt(name, measure) or {}
    result["seconds"] = round(time.perf_counter() - started, 3)
    results.write_result(config.run_uri, result)
    return results.note(config.run_uri, step, failed=failed) if failed else result


def losses(
    denoiser: torch.nn.Module,
    manifest: Manifest,
    config: TrainingConfig,
    validation_uri: str,
    step: int,
    **flags: bool,
) -> dict[str, Any]:
    """{"step", ...}: `held_out_losses` of held-out rows, and of `validation_uri` as "validation_set_loss" and so on.

    Call it on all ranks, which share the rows. Rank 0 writes the result of the step, with `flags`.
    """
    started, rows = time.perf_counter(), held_out_rows(config)
    found = {"step": step, **held_out_losses(denoiser, manifest, rows, config)}
    if validation_uri:
        rows = validation_set.ValidationSet(validation_uri, config.largest_resolution, rank(), world_size())
        others = {"uri": validation_uri, **held_out_losses(denoiser, rows.manifest, rows, config)}
        found |= {f"validation_set_{name.removeprefix('validation_')}": value for name, value in others.items()}
    found["seconds"] = round(time.perf_counter() - started, 3)
    if rank() == 0:
        results.write_result(config.run_uri, found | flags)
    return found


def held_out_losses(
    denoiser: torch.nn.Module, manifest: Manifest, rows: Rows | None, config: TrainingConfig
) -> dict[str, Any]:
    """{"validation_loss", "unweighted", "rows", "loss_by_noise"}, see `losses_by_noise`; {} if no rows are held out."""
    if rows is None:
        return {}
    found = losses_by_noise(denoiser, manifest, rows, config)
    loss, unweighted = found[:, 1:].mean(axis=0).tolist()
    by_noise = {str(int(timestep)): value for timestep, value in found[:, [0, 2]].tolist()}
    return {"validation_loss": loss, "unweighted": unweighted, "rows": rows.num_rows, "loss_by_noise": by_noise}


def draw(
    denoiser: torch.nn.Module, manifest: Manifest, prompts: list[str], evaluate: Evaluate, config: TrainingConfig
) -> list[np.ndarray]:
    steps = evaluate.sampling_steps
    pipeline = sample.pipeline_of_run(denoiser, manifest, config, sampler=evaluate.sampler, steps=steps)
    device = next(denoiser.parameters()).device
    pipeline.vae.to(device)
    pipeline.text_encoder.to(device)
    options = {"steps": steps, "guidance_scale": evaluate.guidance_scale}
    return sample.generate(pipeline, prompts, resolution=config.largest_resolution, **options)


def save_grid(images: list[np.ndarray], prompts: list[str], uri: str) -> None:
    """Write the first images to a folder: `00.png`, ..., together `grid.png`, and `prompts.json`."""
    shown = images[:GRID]
    blank = [np.zeros_like(shown[0])] * (-len(shown) % min(4, len(shown)))
    padded = [*shown, *blank]
    rows = [np.concatenate(padded[start : start + 4], axis=1) for start in range(0, len(padded), 4)]
    storage.write_bytes(storage.join(uri, "grid.png"), sample.to_png(np.concatenate(rows)))
    sample.save_images(shown, uri)
    storage.write_text(storage.join(uri, "prompts.json"), json.dumps(prompts[:GRID], ensure_ascii=False))


def measures(
    images: list[np.ndarray],
    prompts: list[str],
    rows: pa.Table | None,
    manifest: Manifest,
    evaluate: Evaluate,
    run_uri: str,
) -> dict[str, Callable[[], dict[str, Any]]]:
    """{name of a score: function that computes it}, of the scores that `evaluate` asks for."""
    clip = functools.cache(lambda: CLIP(evaluate.clip_model, find_device()))
    embedded = functools.cache(lambda: clip().images(images))

    def rate_agreement():
        shares = evaluate.agreement(images, prompts)
        return {"agreement": shares["all"], "agreement_by_attribute": shares}

    found = {"agreement": rate_agreement} if evaluate.agreement else {}
    if uses_clip(evaluate.clip_model, manifest):
        found["clip_score"] = lambda: {"clip_score": clip_score(embedded(), clip().texts(prompts))}
        if rows is not None:
            name = f"held-out-{zlib.crc32(evaluate.clip_model.encode()):08x}.npy"
            uri = storage.join(run_uri, held_out.FOLDER, name)
            found["cmmd"] = lambda: {"cmmd": cmmd(embedded(), embed_held_out(clip(), rows, manifest, uri))}
    return found


def uses_clip(clip_model: str | None, manifest: Manifest) -> bool:
    """Whether CLIP judges the run's images. tiny-clip was only trained on the drawn data set."""
    return bool(clip_model) and (clip_model != TINY_CLIP or manifest.vae_model == TINY_SD)


def embed_held_out(clip: CLIP, rows: pa.Table, manifest: Manifest, cache_uri: str) -> np.ndarray:
    """(n, d) embeddings of the held-out rows' images, cached in a file."""
    if storage.exists(cache_uri):
        return np.load(io.BytesIO(storage.read_bytes(cache_uri)))
    vae, images = encoder.load_vae(manifest.vae_model).to(find_device()), []
    for spec in manifest.columns:
        if spec.resolution and spec.name in rows.column_names:
            moments, valid = spec.decode(rows[spec.name])
            images += list(sample.reconstruct(vae, moments[np.asarray(valid)]))
    embedded, file = clip.images(images), io.BytesIO()
    np.save(file, embedded)
    storage.write_bytes(cache_uri, file.getvalue())
    return embedded


# ---- scores


def clip_score(images_ND: np.ndarray, texts_ND: np.ndarray) -> float:
    """100 x the mean of max(cosine, 0) of the CLIP embeddings of images and their prompts, row by row: 0 to 100.

    Hessel et al. 2021 (https://arxiv.org/abs/2104.08718), with the weight 100 that reports on Stable Diffusion use
    instead of 2.5. Only scores from the same CLIP are comparable.
    """
    images, texts = np.asarray(images_ND, np.float64), np.asarray(texts_ND, np.float64)
    norms = np.linalg.norm(images, axis=1) * np.linalg.norm(texts, axis=1)
    return float(100 * np.maximum((images * texts).sum(1) / norms, 0).mean())


def cmmd(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """CMMD of two sets of CLIP embeddings with unit norm: 0 for equal sets, smaller is closer.

    1,000 x the squared maximum mean discrepancy with the kernel exp(-|x - y|^2 / (2 * 10^2)), as a V-statistic (mean
    over all pairs, a row with itself included). Jayasumana et al. 2024, https://arxiv.org/abs/2401.09603; constants as
    in its code, https://github.com/google-research/google-research/tree/master/cmmd. The estimate is stable from a few
    thousand images on. It has an upward bias of order 1/N, so compare sets of the same size.

    Raises ValueError for fewer than 2 rows.
    """
    x, y = np.asarray(x_ND, np.float64), np.asarray(y_MD, np.float64)
    if min(len(x), len(y)) < 2:
        raise ValueError(f"CMMD takes at least 2 images on each side; there are {len(x)} and {len(y)}: give more.")
    return float(CMMD_SCALE * (mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)))


def mean_kernel(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """The mean of CMMD's kernel over all pairs of rows."""
    total = 0.0
    for start in range(0, len(x_ND), ROWS_AT_A_TIME):
        rows = x_ND[start : start + ROWS_AT_A_TIME]
        squared = (rows**2).sum(1)[:, None] + (y_MD**2).sum(1) - 2 * rows @ y_MD.T
        total += np.exp(squared / (-2 * CMMD_SIGMA**2)).sum()
    return total / (len(x_ND) * len(y_MD))


# ---- features


class CLIP:
    """Embeddings from any CLIP in transformers layout, in fp32. Its own processor prepares the images.

    Args:
        model: "tiny-clip" (in this package, for the drawn data set), a folder, a hub id, or "hub/id@revision". It holds
            config.json, safetensors, tokenizer and preprocessor_config.json, such as openai/clip-vit-large-patch14.
        device: where it computes.

    Raises ValueError for a model of another kind or layout, and for one that `models.model_folder` does not find.
    torchvision is not needed.
    """

    def __init__(self, model: str = TINY_CLIP, device: str | torch.device = "cpu"):
        folder = models.model_folder(model, "*")
        self.device = torch.device(device)
        transformers.logging.disable_progress_bar()
        options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        try:
            loaded, report = transformers.CLIPModel.from_pretrained(folder, **options)
            self.tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
            self.processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
            if missing := report["missing_keys"]:  # transformers would fill them with random numbers
                raise ValueError(f"its weights lack {min(missing)}")
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{model!r} is not a CLIP model in transformers layout ({why}): give one such as "
                "openai/clip-vit-large-patch14."
            ) from None
        self.model = loaded.eval().requires_grad_(False).to(self.device)

    def images(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """N images, uint8 (H, W, 3) of any sizes -> (N, D) float32 with unit rows."""

        def embed(batch):
            prepared = self.processor([Image.fromarray(image) for image in batch], return_tensors="pt")
            return self.model.get_image_features(prepared.pixel_values.to(self.device)).pooler_output

        return self.unit_rows(embed, images)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """N texts -> (N, D) float32 with unit rows. A text is cut after as many tokens as the model reads."""
        most = self.model.config.text_config.max_position_embeddings

        def embed(batch):
            options = {"padding": True, "truncation": True, "max_length": most, "return_tensors": "pt"}
            ids = self.tokenizer(list(batch), **options).to(self.device)
            return self.model.get_text_features(ids.input_ids, attention_mask=ids.attention_mask).pooler_output

        return self.unit_rows(embed, texts)

    @torch.inference_mode()
    def unit_rows(self, embed: Callable, rows: Sequence) -> np.ndarray:
        embeddings = [torch.zeros(0, self.model.config.projection_dim, device=self.device)]
        embeddings += [embed(rows[start : start + BATCH_SIZE]) for start in range(0, len(rows), BATCH_SIZE)]
        return torch.nn.functional.normalize(torch.cat(embeddings), dim=1).cpu().numpy()
