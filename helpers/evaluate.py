"""Seeing what was learned: the pipeline of a checkpoint, pictures from prompts, scores, the validation function."""

import tempfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image

# Diffusers imports image processors that this project does not use, and each warns that torchvision is missing.
_verbosity = transformers.logging.get_verbosity()
transformers.logging.set_verbosity_error()
from diffusers import DDIMScheduler, StableDiffusionPipeline  # noqa: E402

transformers.logging.set_verbosity(_verbosity)

from . import checkpoint, encoder, images, ingest, schema, storage  # noqa: E402
from .config import TrainingConfig  # noqa: E402
from .train_step import validation_loss  # noqa: E402
from .unet import build_unet  # noqa: E402


NUM_VALIDATION_ROWS = 512


def first_manifest(config):
    """What is said of the encoder: the same in all data sets of a mixture."""
    return schema.Manifest.read(next(iter(config.proportions)))


def build_pipeline(unet, encoder_model, prediction_type="v_prediction"):
    """A `StableDiffusionPipeline` of a U-Net and the VAE, text encoder and tokenizer that made its latents."""
    scheduler = DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type=prediction_type,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    pipeline = StableDiffusionPipeline(
        vae=encoder.load_vae(encoder_model),
        text_encoder=encoder.load_text_encoder(encoder_model),
        tokenizer=images.load_tokenizer(encoder_model),
        unet=unet.eval(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline, prompts, *, resolution, seed=0, steps=20, guidance_scale=2.0, batch_size=32):
    """One picture a prompt, a list of (H, W, 3) uint8 arrays; picture i depends on (prompt i, seed + i) alone."""
    pictures = []
    for start in range(0, len(prompts), batch_size):
        part = list(prompts[start : start + batch_size])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        made = pipeline(
            part,
            height=resolution,
            width=resolution,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            generator=generators,
            output_type="np",
        )
        pictures += [(picture * 255).round().astype(np.uint8) for picture in made.images]
    return pictures


def sample(config, prompts, found, *, seed=0):
    """Pictures of prompts from a checkpoint's EMA weights, or from an untrained U-Net where `found` is None.

    On this process's GPU if it has one. `config`: the dict of a `TrainingConfig`.
    """
    config = TrainingConfig.from_dict(config)
    manifest = first_manifest(config)
    unet = build_unet(config.unet_config, seed=config.seed) if found is None else load_unet(config, found)
    pipeline = build_pipeline(unet, manifest.encoder["model"], config.prediction_type)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    return generate(pipeline, prompts, resolution=config.largest_resolution, seed=seed)


def save_pictures(pictures, uri):
    """Write pictures as `00.png`, `01.png`, ... under a folder or URI."""
    with tempfile.TemporaryDirectory() as folder:
        for number, picture in enumerate(pictures):
            Image.fromarray(picture).save(f"{folder}/{number:02d}.png")
        storage.copy_folder(folder, uri)


def load_unet(config, found, which="ema"):
    """The U-Net of a Ray Train checkpoint: its averaged weights ("ema") or the raw ones ("model")."""
    unet = build_unet(config.unet_config)
    with found.as_directory() as folder:
        return checkpoint.load_weights(folder, unet, which)


def export_pipeline(pipeline, uri):
    """Save a pipeline so that `StableDiffusionPipeline.from_pretrained` opens it; fp32 safetensors."""
    if storage.is_local(uri):
        pipeline.save_pretrained(uri)
        return uri
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save_pretrained(folder)
        storage.copy_folder(folder, uri)
    return uri


def export_checkpoint(config, found, which="ema"):
    """Export a checkpoint to the run's `pipeline/`; returns where it is. `config`: the dict of a `TrainingConfig`."""
    config = TrainingConfig.from_dict(config)
    manifest = first_manifest(config)
    pipeline = build_pipeline(load_unet(config, found, which), manifest.encoder["model"], config.prediction_type)
    return export_pipeline(pipeline, storage.join(config.run_uri, "pipeline"))


def validate(found, config):
    """Ray Train's validation function: the held-out loss of a checkpoint's EMA weights, while training goes on.

    Also writes it to `validation/{step}.json` of the run, and copies the checkpoint to `best/` if no other has a lower
    loss. `config`: the dict of a `TrainingConfig`.
    """
    config = TrainingConfig.from_dict(config)
    manifest = first_manifest(config)
    rows = validation_rows(config)
    if rows is None:
        return {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with found.as_directory() as folder:
        step = checkpoint.step_of(folder)
        unet = checkpoint.load_weights(folder, build_unet(config.unet_config)).to(device).eval()
        loss, unweighted = validation_loss(unet, manifest, rows, config)
        if not (read_validation(config.run_uri)["validation_loss"] < loss).any():
            checkpoint.keep_as_best(config.run_uri, folder, storage.name(found.path))
    result = {"step": step, "validation_loss": loss, "unweighted": unweighted, "rows": rows.num_rows}
    storage.write_json(storage.join(config.run_uri, "validation", f"{step:09d}.json"), result)
    return result


def validation_rows(config):
    """The run's held-out rows, kept in its `validation/rows.parquet`: to find a few among billions takes a while."""
    uri = storage.join(config.run_uri, "validation", "rows.parquet")
    if storage.exists(uri):
        filesystem, path = storage.open_filesystem(uri)
        return pq.read_table(path, filesystem=filesystem)
    rows = ingest.validation_rows(config, NUM_VALIDATION_ROWS)
    if rows is not None:
        file = pa.BufferOutputStream()
        pq.write_table(rows, file, compression="none")
        storage.write_bytes(uri, file.getvalue())
    return rows


def read_validation(run_uri):
    """The validation losses of a run as a frame with columns step, validation_loss, unweighted, rows."""
    found = [storage.read_json(uri) for uri in storage.list_files(storage.join(run_uri, "validation"), ".json")]
    return pd.DataFrame(found, columns=["step", "validation_loss", "unweighted", "rows"])
