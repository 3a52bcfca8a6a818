"""What a run has learned: the pipeline of a checkpoint, pictures from prompts, the exported diffusers pipeline."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
import ray.train
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from PIL import Image
from transformers import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from .. import storage
from ..config.training import TrainingConfig
from ..encode import captions, encoder
from ..latents.manifest import Manifest, read_manifest
from ..model import denoisers, diffusion
from ..model.unet import build_unet
from ..train import checkpoint
from . import decoder

SAMPLERS = {
    "ddim": "DDIMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
}


def read_encoder_manifest(config: TrainingConfig) -> Manifest:
    """The manifest of the run's latents; of a mixture the first, since all its data sets share one encoder."""
    return read_manifest(next(iter(config.proportions)))


def build_pipeline(unet: ModelMixin, manifest: Manifest, config: TrainingConfig) -> DiffusionPipeline:
    """diffusers' pipeline of a denoiser, and of the VAE, text encoder and tokenizer that encoded its data."""
    adapter = denoisers.adapter_of(unet)
    tokenizer = copy.deepcopy(captions.load_tokenizer(manifest.text_encoder_model))
    tokenizer.model_max_length, _ = manifest.embeddings.shape
    vae = encoder.load_vae(manifest.vae_model)
    if adapter.shifts and vae.config.get("shift_factor", 0) is None:
        vae.register_to_config(shift_factor=0.0)  # the pipeline would add None
    models = {
        "vae": vae,
        "text_encoder": encoder.load_text_encoder(manifest.text_encoder_model),
        "tokenizer": tokenizer,
        "scheduler": build_sampler(config),
        adapter.component: unet.eval(),
    }
    with without_warnings():
        pipeline = getattr(diffusers, adapter.pipeline)(**models, **adapter.left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def denoiser_of(pipeline: DiffusionPipeline) -> ModelMixin:
    return pipeline.unet if "unet" in pipeline.components else pipeline.transformer


def build_sampler(config: TrainingConfig) -> SchedulerMixin:
    """diffusers' scheduler that `config.sampler` names, for the objective that the U-Net was trained with."""
    sampler = getattr(diffusers, SAMPLERS[config.sampler])
    if config.prediction_type == "flow":
        return sampler(
            num_train_timesteps=diffusion.NUM_TIMESTEPS,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=config.timestep_shift,
            steps_offset=1,  # not used; StableDiffusionPipeline warns of 0
        )
    schedule = diffusion.noise_schedule(config.prediction_type, config.zero_terminal_snr).config
    options = {"set_alpha_to_one": False} if config.sampler == "ddim" else {}
    if config.zero_terminal_snr:  # sampling begins with noise alone, as training saw it
        options["timestep_spacing"] = "trailing"
    return sampler.from_config(schedule, **options)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Make or load a pipeline in it: neither missing image processors nor base classes concern what is used here."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`LoraLoaderMixin` is deprecated", FutureWarning)  # of PRXPipeline
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def generate(
    pipeline: DiffusionPipeline,
    prompts: list[str],
    *,
    resolution: int,
    width: int | None = None,
    height: int | None = None,
    seed: int = 0,
    steps: int = 20,
    guidance_scale: float = 2.0,
    batch_size: int = 32,
) -> list[np.ndarray]:
    """One image a prompt, (H, W, 3) uint8 arrays; image i depends on prompt i and seed + i only.

    Squares of `resolution`, unless `width` and `height` are given.
    """
    pictures, vae = [], pipeline.vae.config
    denoiser = denoiser_of(pipeline)
    options = denoisers.adapter_of(denoiser).call_options(pipeline.tokenizer.model_max_length)
    for start in range(0, len(prompts), batch_size):
        batch = list(prompts[start : start + batch_size])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(batch))]
        with denoiser.register_forward_pre_hook(denoisers.expand_timestep, with_kwargs=True):
            latents = pipeline(
                batch,
                height=height or resolution,
                width=width or resolution,
                num_inference_steps=steps,
                guidance_scale=guidance_scale,
                generator=generators,
                output_type="latent",
                **options,
            ).images
        latents = latents / vae.scaling_factor + (vae.get("shift_factor") or 0)
        pictures += list(decoder.decode_latents(pipeline.vae, latents))
    return pictures


def sample(
    config: TrainingConfig,
    prompts: list[str],
    saved: ray.train.Checkpoint | None,
    *,
    width: int | None = None,
    height: int | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Images of prompts from a checkpoint's EMA weights, or from an untrained U-Net if `saved` is None; see `generate`.

    Runs on this process's GPU if it has one. Images are squares of the config's largest resolution, unless `width` and
    `height` are given.
    """
    manifest = read_encoder_manifest(config)
    unet = build_unet(config.unet_config, seed=config.seed) if saved is None else load_unet(config, saved)
    pipeline = build_pipeline(unet, manifest, config)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    size = {"resolution": config.largest_resolution, "width": width, "height": height}
    sampling = {"steps": config.sampling_steps, "guidance_scale": config.guidance_scale}
    return generate(pipeline, prompts, **size, **sampling, seed=seed)


def save_pictures(pictures: list[np.ndarray], uri: str) -> None:
    """Write images as `00.png`, `01.png`, ... to a folder or URI."""
    for number, picture in enumerate(pictures):
        storage.write_bytes(storage.join(uri, f"{number:02d}.png"), to_png(picture))


def to_png(picture: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(picture).save(data, "PNG")
    return data.getvalue()


def load_unet(config: TrainingConfig, saved: ray.train.Checkpoint, which: str = "ema") -> ModelMixin:
    """The denoiser of a Ray Train checkpoint, with its averaged weights ("ema") or its last ones ("model")."""
    unet = build_unet(config.unet_config)
    with saved.as_directory() as folder:
        return checkpoint.load_weights(folder, unet, which)


def export_pipeline(pipeline: DiffusionPipeline, uri: str) -> str:
    """Save a pipeline for `DiffusionPipeline.from_pretrained`, as fp32 safetensors; returns `uri`."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save_pretrained(folder)
        if isinstance(pipeline.text_encoder, T5GemmaEncoder):
            config = json.dumps(whole_config(pipeline.text_encoder), indent=2)
            pathlib.Path(folder, "text_encoder", "config.json").write_text(config)
        storage.copy_folder(folder, uri)
    return uri


def whole_config(text_encoder: T5GemmaEncoder) -> dict[str, Any]:
    """The config.json that diffusers' loader takes for a T5Gemma's encoder: it describes a decoder too."""
    sizes = text_encoder.config.to_dict()
    config = T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=sizes["vocab_size"])
    return {**config.to_dict(), "architectures": ["T5GemmaEncoder"]}


def describe_call(pipeline: DiffusionPipeline, config: TrainingConfig) -> str:
    """What an exported folder's README says: how plain diffusers draws as `generate` does."""
    adapter, max_tokens = denoisers.adapter_of(denoiser_of(pipeline)), pipeline.tokenizer.model_max_length
    options = {
        "height": config.largest_resolution,
        "width": config.largest_resolution,
        "num_inference_steps": config.sampling_steps,
        "guidance_scale": config.guidance_scale,
        **adapter.call_options(max_tokens),
    }
    arguments = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    return f"""# A {type(pipeline).__name__}

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("the path of this folder")
pictures = pipeline(
    ["a prompt"],
{arguments}).images
```

It was trained at {" and ".join(map(str, config.resolutions))} pixels; `guidance_scale=1` draws without guidance. A
prompt is cut after {max_tokens} tokens. {adapter.note}
"""


def export_checkpoint(
    config: TrainingConfig, saved: ray.train.Checkpoint, which: str = "ema", uri: str | None = None
) -> str:
    """Export a checkpoint as a diffusers pipeline to `uri`, by default the run's `pipeline/`; returns its URI."""
    manifest = read_encoder_manifest(config)
    pipeline = build_pipeline(load_unet(config, saved, which), manifest, config)
    uri = export_pipeline(pipeline, uri or storage.join(config.run_uri, "pipeline"))
    storage.write_text(storage.join(uri, "README.md"), describe_call(pipeline, config))
    return uri
