"""Images from the checkpoints of a training run, and their export as diffusers pipelines."""

from __future__ import annotations

import diffusers
import numpy as np
import ray.train
import torch

from .. import storage
from ..config.training import TrainingConfig
from ..latents.manifest import DataSets, Manifest
from ..model.denoisers import build_denoiser
from ..train import checkpoint, checkpoint_io
from .card import model_card
from .pipeline import build_pipeline, build_sampler, export_pipeline, generate


def load_denoiser(config: TrainingConfig, saved: ray.train.Checkpoint, which: str = "ema") -> diffusers.ModelMixin:
    """The denoiser of a Ray Train checkpoint. `which`: "ema" (averaged weights), or "model" (the last ones)."""
    with saved.as_directory() as folder:
        return checkpoint_io.load_weights(folder, build_denoiser(config.unet_config), which)


def pipeline_of_run(
    denoiser: diffusers.ModelMixin, manifest: Manifest, config: TrainingConfig
) -> diffusers.DiffusionPipeline:
    """diffusers' pipeline of a run's denoiser, with the models that `manifest` names and the config's sampler."""
    objective = {"zero_terminal_snr": config.zero_terminal_snr, "timestep_shift": config.timestep_shift}
    return build_pipeline(
        denoiser,
        build_sampler(config.sampler, config.prediction_type, **objective),
        vae_model=manifest.vae_model,
        text_encoder_model=manifest.text_encoder_model,
        max_tokens=manifest.embeddings.shape[0],
        resolution=config.largest_resolution,
    )


def sample(
    config: TrainingConfig,
    prompts: list[str],
    saved: ray.train.Checkpoint | None,
    *,
    width: int | None = None,
    height: int | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Images of prompts from a checkpoint's EMA weights, or from an untrained denoiser if `saved` is None.

    Computes on this process's GPU if it has one. Images are squares of the config's largest resolution, unless `width`
    and `height` are given; see `generate`.
    """
    denoiser = build_denoiser(config.unet_config, seed=config.seed) if saved is None else load_denoiser(config, saved)
    pipeline = pipeline_of_run(denoiser, DataSets.open(config.proportions).first, config)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    size = {"resolution": config.largest_resolution, "width": width, "height": height}
    sampling = {"steps": config.sampling_steps, "guidance_scale": config.guidance_scale}
    return generate(pipeline, prompts, **size, **sampling, seed=seed)


def export_checkpoint(
    config: TrainingConfig, saved: ray.train.Checkpoint, which: str = "ema", uri: str | None = None
) -> str:
    """Export a checkpoint as a diffusers pipeline to `uri`, by default the run's `pipeline/`; returns its URI."""
    data = DataSets.open(config.proportions)
    pipeline = pipeline_of_run(load_denoiser(config, saved, which), data.first, config)
    uri = export_pipeline(pipeline, uri or storage.join(config.run_uri, "pipeline"))
    storage.write_text(
        storage.join(uri, "README.md"), model_card(pipeline, config, data, checkpoint.step_of(saved.path))
    )
    return uri
