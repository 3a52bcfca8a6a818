"""The README of an exported pipeline: a model card, with front matter as the Hugging Face hub reads it."""

from __future__ import annotations

from typing import Any

import diffusers
from huggingface_hub import ModelCardData

from .. import storage
from ..config import TrainingConfig
from ..latents.manifest import DataSets, Manifest
from ..model import denoisers
from ..sample import denoiser_of
from .data import exclusions

# The parameters of a run that its card lists.
LISTED = (
    *("prediction_type", "zero_terminal_snr", "min_snr_gamma", "timestep_sampling", "timestep_shift"),
    *("caption_dropout", "global_batch_size", "max_steps", "learning_rate", "lr_schedule", "ema_decay", "seed"),
    *("precision", "sampler"),
)


def model_card(pipeline: diffusers.DiffusionPipeline, config: TrainingConfig, data: DataSets, step: int) -> str:
    """The card of a pipeline that a run exported after `step` steps: what it is made of, and how to call it."""
    metadata = {"library_name": "diffusers", "pipeline_tag": "text-to-image", "tags": [type(pipeline).__name__]}
    if config.licence:
        metadata |= licence_fields(config.licence)
    facts = {
        "data": "; ".join(describe_rows(uri, manifest, data) for uri, manifest in data.manifests.items()),
        **describe_encoders(data.first),
        "denoiser": type(denoiser_of(pipeline)).__name__,
        "resolutions": " and ".join(map(str, config.resolutions)),
        "steps": f"{step:,}",
        "SHA-256 of the list of rows left out": exclusions.split(config.leave_out)[1] or "no list",
        **{name: getattr(config, name) for name in LISTED},
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    is_first = config.init_from is None and config.continue_from is None
    return f"""---
{ModelCardData(**metadata).to_yaml()}
---

# A {type(pipeline).__name__}

A text-to-image model, trained from {"random weights" if is_first else "the weights of another"}.

{describe_call(pipeline, config)}
## How it was trained

| | |
|---|---|
{rows}

Licence: {config.licence or "none is named (the parameter `licence`)"}.
"""


def licence_fields(licence: str) -> dict[str, str]:
    """The hub's metadata of an SPDX expression: its ids are lower-case, and what is no id has a name."""
    if licence.startswith("LicenseRef-") or " " in licence:
        return {"license": "other", "license_name": licence}
    return {"license": licence.lower()}


def describe_rows(uri: str, manifest: Manifest, data: DataSets) -> str:
    """How many rows of which input; of a local one only the name, since the path says something of the machine."""
    source = manifest.job.get("input_uri") or uri
    share = f", {data.proportions[uri]:.3g} of each batch" if len(data.manifests) > 1 else ""
    name = source if "://" in source else storage.name(source)
    return f"{manifest.written:,} rows of {name}{share}"


def describe_encoders(manifest: Manifest) -> dict[str, str]:
    """{"VAE": model and commit, "text encoder": model and commit}; of a folder, a hash of its files."""
    encoder = manifest.encoder
    models = {
        "VAE": (manifest.vae_model, encoder["revision"]),
        "text encoder": (manifest.text_encoder_model, encoder.get("text_encoder_revision", encoder["revision"])),
    }

    def name(model: str) -> str:
        return model.partition("@")[0] if "@" in model else storage.name(model)

    return {part: f"{name(model)}, {revision}" for part, (model, revision) in models.items()}


def call_options(pipeline: diffusers.DiffusionPipeline, config: TrainingConfig) -> dict[str, Any]:
    """The arguments with which an exported pipeline draws the images that `generate` draws."""
    adapter = denoisers.adapter_of(denoiser_of(pipeline))
    return {
        "height": config.largest_resolution,
        "width": config.largest_resolution,
        "num_inference_steps": config.sampling_steps,
        "guidance_scale": config.guidance_scale,
        **adapter.call_options(pipeline.tokenizer.model_max_length),
    }


def describe_call(pipeline: diffusers.DiffusionPipeline, config: TrainingConfig) -> str:
    """How plain diffusers draws the images that `generate` draws."""
    adapter, max_tokens = denoisers.adapter_of(denoiser_of(pipeline)), pipeline.tokenizer.model_max_length
    size = config.largest_resolution
    options = call_options(pipeline, config)
    arguments = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    by_default = f"Without `height` and `width`, images have {size} x {size} pixels."
    if adapter.bins and size not in adapter.bins:
        by_default += " Keep `use_resolution_binning=False`: diffusers has no bins for this size."
    return f"""```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("the path of this folder")
pictures = pipeline(
    ["a prompt"],
{arguments}).images
```

{by_default} `guidance_scale=1` draws without guidance. A prompt is cut after {max_tokens} tokens. {adapter.note}
"""
