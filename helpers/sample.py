"""Images from prompts by a run's checkpoint, in diffusers' pipeline; the pipeline's export."""

from __future__ import annotations

import copy
import io
import json
import pathlib
import tempfile
import warnings
from typing import Any

import diffusers
import numpy as np
import ray.train
import torch
import transformers
from PIL import Image

from . import storage
from .config import TrainingConfig
from .encode import captions, encoder
from .latents.manifest import DataSets, Manifest
from .model import denoisers, diffusion
from .train import checkpoint, start

warnings.filterwarnings("ignore", "`LoraLoaderMixin` is deprecated", FutureWarning)  # of PRXPipeline

# DDIM is DPM-Solver++ of first order (Lu et al., 2022). diffusers' `DDIMScheduler` moves by 1000 // steps timesteps.
# With 350 steps it begins at 699, or arrives elsewhere than its next step expects.
SAMPLERS = {
    "ddim": ("DPMSolverMultistepScheduler", {"solver_order": 1}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
FLOW_SAMPLERS = ("dpm++", "unipc")

# Pixels decoded at once: 4 images of 512 x 512. More are not faster. The decoders of Stable Diffusion 2 and FLUX hold
# three feature maps with 256 channels at the full resolution: 3 GiB for so many pixels in fp32.
MOST_PIXELS = 2**20


# ---- images of a run


def sample(
    config: TrainingConfig,
    prompts: list[str],
    saved: ray.train.Checkpoint | None,
    *,
    steps: int = 20,
    guidance_scale: float = 2.0,
    sampler: str = "auto",
    seed: int = 0,
) -> list[np.ndarray]:
    """Images of prompts from a checkpoint's EMA weights, or from an untrained denoiser if `saved` is None.

    Computes on this process's GPU if it has one. Images are squares of the config's largest resolution; the exported
    pipeline draws other sizes too. `sampler`: see `build_sampler`; the others: see `generate`.
    """
    if saved is None:
        denoiser = denoisers.build_denoiser(config.unet_config, seed=config.seed)
    else:
        denoiser = load_denoiser(config, saved)
    manifest = DataSets.open(config.proportions).first
    pipeline = pipeline_of_run(denoiser, manifest, config, sampler=sampler, steps=steps)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    options = {"resolution": config.largest_resolution, "guidance_scale": guidance_scale}
    return generate(pipeline, prompts, **options, seed=seed, steps=steps)


def load_denoiser(config: TrainingConfig, saved: ray.train.Checkpoint, which: str = "ema") -> diffusers.ModelMixin:
    """The denoiser of a Ray Train checkpoint. `which`: "ema" (averaged weights), or "model" (the last ones).

    It is built as it was trained: the file that `unet_config` names may have changed since.
    """
    trained = start.read_config(config.run_uri).get("denoiser") or config.unet_config
    with saved.as_directory() as folder:
        return checkpoint.load_weights(folder, denoisers.build_denoiser(trained), which)


def generate(
    pipeline: diffusers.DiffusionPipeline,
    prompts: list[str],
    *,
    resolution: int,
    seed: int = 0,
    steps: int = 20,
    guidance_scale: float = 2.0,
    batch_size: int = 32,
) -> list[np.ndarray]:
    """One image per prompt, (H, W, 3) uint8. Image i depends on prompt i and seed + i only.

    Args:
        resolution: side in pixels of the images, which are squares.
        steps: denoising steps per image.
        guidance_scale: scale of classifier-free guidance; 1: none.
    """
    images, vae = [], pipeline.vae.config
    denoiser = denoiser_of(pipeline)
    options = denoisers.adapter_of(denoiser).call_options(pipeline.tokenizer.model_max_length)
    for first in range(0, len(prompts), batch_size):
        batch = list(prompts[first : first + batch_size])
        generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(batch))]
        with denoiser.register_forward_pre_hook(denoisers.expand_timestep, with_kwargs=True):
            latents = pipeline(
                batch,
                height=resolution,
                width=resolution,
                num_inference_steps=steps,
                guidance_scale=guidance_scale,
                generator=generators,
                output_type="latent",
                **options,
            ).images
        latents = latents / vae.scaling_factor + (vae.get("shift_factor") or 0)
        images += list(decode_latents(pipeline.vae, latents))
    return images


# ---- pipelines


def build_sampler(config: TrainingConfig, name: str = "auto", steps: int = 20) -> diffusers.SchedulerMixin:
    """diffusers' scheduler for a run's denoiser. `name`: one of `SAMPLERS`; "auto": "ddim", for flow "dpm++".

    Raises ValueError if the sampler does not fit the run's objective or denoiser, and for a number of steps with which
    it does not begin at the noisiest timestep, once. A shift moves flow's first timesteps together. Euler's sampler
    takes a single step at timestep 0.
    """
    flow = config.prediction_type == "flow"
    if name == "auto":
        name = "dpm++" if flow else "ddim"
    known = [one for one in denoisers.find_adapter(config.unet_config).samplers if one in FLOW_SAMPLERS or not flow]
    if name not in known:
        raise ValueError(
            f"sampler={name!r} does not fit prediction_type={config.prediction_type!r} and "
            f"unet_config={config.unet_config!r}: choose {' or '.join(map(repr, known))}."
        )
    fewest = 2 if name == "euler" else 1
    most = int(998 / max(1, config.timestep_shift)) if flow else 999
    if not fewest <= steps <= most:
        raise ValueError(
            f"sampling_steps={steps}: sampler={name!r} takes {fewest} to {most} steps with "
            f"timestep_shift={config.timestep_shift:g}."
        )
    class_name, options = SAMPLERS[name]
    sampler = getattr(diffusers, class_name)
    if flow:
        return sampler(
            num_train_timesteps=diffusion.NUM_TIMESTEPS,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=config.timestep_shift,
            steps_offset=1,  # not used; StableDiffusionPipeline warns of 0
        )
    schedule = diffusion.noise_schedule(config.prediction_type, config.zero_terminal_snr).config
    # "trailing" takes a step too many for 61 steps and others: diffusers rounds a fraction.
    return sampler.from_config(schedule, timestep_spacing="linspace", **options)


def pipeline_of_run(
    denoiser: diffusers.ModelMixin,
    manifest: Manifest,
    config: TrainingConfig,
    *,
    sampler: str = "auto",
    steps: int = 20,
) -> diffusers.DiffusionPipeline:
    """diffusers' pipeline of a run's denoiser, with the models that encoded its training data.

    By default it generates squares of the config's largest resolution.

    Args:
        manifest: names the VAE and the text encoder. A prompt is cut after as many tokens as its captions were.
        sampler, steps: see `build_sampler`.
    """
    adapter, resolution = denoisers.adapter_of(denoiser), config.largest_resolution
    tokenizer = copy.deepcopy(captions.load_tokenizer(manifest.text_encoder_model))
    tokenizer.model_max_length = manifest.embeddings.shape[0]
    vae = encoder.load_vae(manifest.vae_model)
    if adapter.shifts and vae.config.get("shift_factor", 0) is None:
        vae.register_to_config(shift_factor=0.0)  # the pipeline would add None
    defaults = adapter.set_default_size(denoiser, resolution, resolution // encoder.downsampling(vae.config))
    models = {
        "vae": vae,
        "text_encoder": encoder.load_text_encoder(manifest.text_encoder_model),
        "tokenizer": tokenizer,
        "scheduler": build_sampler(config, sampler, steps),
        adapter.component: denoiser.eval(),
    }
    pipeline = getattr(diffusers, adapter.pipeline)(**models, **defaults, **adapter.left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def denoiser_of(pipeline: diffusers.DiffusionPipeline) -> diffusers.ModelMixin:
    return pipeline.unet if "unet" in pipeline.components else pipeline.transformer


# ---- latents -> images


@torch.inference_mode()
def decode_latents(model: str | diffusers.ModelMixin, latents_BCHW: torch.Tensor) -> np.ndarray:
    """Unscaled latents -> (B, H, W, 3) uint8 images, decoded by a VAE on its device; `model`: the VAE, or its name.

    A VAE in fp16 that says `force_upcast` decodes in fp32, as in diffusers' pipelines.
    """
    vae, images = encoder.load_vae(model) if isinstance(model, str) else model, []
    upcast = vae.dtype == torch.float16 and vae.config.get("force_upcast")
    vae = vae.float() if upcast else vae
    num_pixels = latents_BCHW.shape[2] * latents_BCHW.shape[3] * encoder.downsampling(vae.config) ** 2
    for latents in latents_BCHW.split(max(1, MOST_PIXELS // num_pixels)):
        pixels = vae.decode(latents.to(vae.device, vae.dtype)).sample.float()
        images.append(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu())
    if upcast:
        vae.half()  # the weights are what they were, bit by bit
    return torch.cat(images).numpy()


def reconstruct(model: str | diffusers.ModelMixin, moments_B2CHW: np.ndarray) -> np.ndarray:
    """Stored moments -> (B, H, W, 3) uint8 images, decoded from the posterior's mean."""
    return decode_latents(model, torch.from_numpy(np.array(moments_B2CHW[:, 0], dtype=np.float32)))


# ---- files


def export_checkpoint(
    config: TrainingConfig,
    saved: ray.train.Checkpoint,
    which: str = "ema",
    uri: str | None = None,
    *,
    sampler: str = "auto",
) -> str:
    """Export a checkpoint as a diffusers pipeline to `uri`, by default the run's `pipeline/`; returns its URI.

    `which`: see `load_denoiser`; `sampler`: see `build_sampler`.
    """
    manifest = DataSets.open(config.proportions).first
    pipeline = pipeline_of_run(load_denoiser(config, saved, which), manifest, config, sampler=sampler)
    return export_pipeline(pipeline, uri or storage.join(config.run_uri, "pipeline"))


def export_pipeline(pipeline: diffusers.DiffusionPipeline, uri: str) -> str:
    """Save a pipeline for `DiffusionPipeline.from_pretrained`, as fp32 safetensors; returns `uri`.

    Older versions of diffusers and transformers load it too, if they have its classes.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save_pretrained(folder)
        save_for_older_versions(pipeline, pathlib.Path(folder))
        storage.copy_folder(folder, uri)
    return uri


def save_for_older_versions(pipeline: diffusers.DiffusionPipeline, folder: pathlib.Path) -> None:
    """Save again, in a saved pipeline's folder, what older versions name otherwise or do not know."""
    # Options that nobody gave have the same defaults there, or are not known there.
    path, unset = folder / "scheduler" / "scheduler_config.json", pipeline.scheduler.config["_use_default_values"]
    given = {name: value for name, value in json.loads(path.read_text()).items() if name not in unset}
    path.write_text(json.dumps(given, indent=2))
    text_encoder, path = pipeline.text_encoder, folder / "text_encoder"
    if type(text_encoder).__name__ == denoisers.T5GEMMA:
        (path / "config.json").write_text(json.dumps(whole_config(text_encoder), indent=2))
    if type(text_encoder).__name__ == denoisers.CLIP:
        weights = {f"text_model.{name}": tensor for name, tensor in text_encoder.state_dict().items()}
        text_encoder.save_pretrained(path, state_dict=weights)
    if isinstance(pipeline.tokenizer, transformers.CLIPTokenizer):
        pipeline.tokenizer.backend_tokenizer.model.save(str(folder / "tokenizer"))  # vocab.json and merges.txt
        return
    index, tokenizer = folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"
    parts, options = json.loads(index.read_text()), json.loads(tokenizer.read_text())
    parts["tokenizer"][1] += "Fast"  # the class that reads tokenizer.json there; here both names mean one class
    options["additional_special_tokens"] = options.pop("extra_special_tokens", [])
    index.write_text(json.dumps(parts, indent=2))
    tokenizer.write_text(json.dumps(options, indent=2))


def whole_config(text_encoder: transformers.PreTrainedModel) -> dict[str, Any]:
    """The config.json that diffusers' loader takes for a T5Gemma's encoder: it describes a decoder too."""
    sizes = text_encoder.config.to_dict()
    config = transformers.T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=sizes["vocab_size"])
    return {**config.to_dict(), "architectures": ["T5GemmaEncoder"]}


def to_png(image: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG")
    return data.getvalue()


def save_images(images: list[np.ndarray], uri: str) -> None:
    """Write images as `00.png`, `01.png`, ... to a folder or URI."""
    for number, image in enumerate(images):
        storage.write_bytes(storage.join(uri, f"{number:02d}.png"), to_png(image))
