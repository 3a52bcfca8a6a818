"""The README of an exported pipeline, and of a latents folder, with the metadata that the Hugging Face hub reads."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import ray.train
from huggingface_hub import DatasetCard, DatasetCardData, ModelCard, ModelCardData
from packaging.licenses import canonicalize_license_expression

from .. import storage
from ..config import TrainingConfig
from ..latents.manifest import DataSets, Manifest, read_manifest
from ..model import denoisers
from ..notebook import printable
from ..train import run_folder

MARKDOWN = re.compile(r"[\\`*{}\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is only that
# The parameters of a run that its card lists.
LISTED = (
    *("prediction_type", "zero_terminal_snr", "min_snr_gamma", "timestep_sampling", "timestep_shift", "resolution"),
    *("caption_dropout", "global_batch_size", "learning_rate", "lr_schedule", "ema_decay", "seed", "precision"),
)


def write_card(
    uri: str, config: TrainingConfig, saved: ray.train.Checkpoint, *, licence: str | None = None, **sampling: Any
) -> None:
    """Write the README of a pipeline that `sample.export_checkpoint` exported to `uri`; see `model_card`."""
    data, step = DataSets.open(config.proportions), run_folder.step_of_name(saved.path)
    card = model_card(config, data, step, licence, **sampling)
    storage.write_text(storage.join(uri, "README.md"), str(card))


def model_card(
    config: TrainingConfig, data: DataSets, step: int, licence: str | None = None, **sampling: Any
) -> ModelCard:
    """The card of a run's pipeline after `step` steps: how to call it, and what it is made of.

    Args:
        licence: an SPDX id or expression, such as "Apache-2.0" or "LicenseRef-Name". Raises ValueError for another.
        sampling: see `call_options`.
    """
    adapter, manifest = denoisers.find_adapter(config.unet_config), data.first
    licence, metadata = licence_metadata(licence)
    metadata |= {"library_name": "diffusers", "pipeline_tag": "text-to-image", "tags": [adapter.pipeline]}
    facts = {
        "data": "; ".join(describe_rows(uri, manifest, data) for uri, manifest in data.manifests.items()),
        "VAE": public_name(manifest.vae_model),
        "text encoder": public_name(manifest.text_encoder_model),
        "denoiser": adapter.name,
        "steps": f"{step:,}",
        **{name: getattr(config, name) for name in LISTED},
    }
    return ModelCard.from_template(
        ModelCardData(**metadata),
        template_path=str(pathlib.Path(__file__).with_suffix(".md")),
        name=adapter.pipeline,
        first_weights="the weights of another" if config.init_from else "random weights",
        options=call_options(config, manifest, **sampling),
        size=config.largest_resolution,
        max_tokens=manifest.embeddings.shape[0],
        note=adapter.note,
        facts={name: markdown_cell(value) for name, value in facts.items()},
        licence=licence,
    )


def licence_metadata(licence: str | None) -> tuple[str | None, dict[str, str]]:
    """`(the licence as SPDX writes it, what the hub reads of it)`. Raises ValueError for what is no SPDX expression."""
    if not licence:
        return None, {}
    licence = canonicalize_license_expression(licence)
    if licence.startswith("LicenseRef-") or " " in licence:
        return licence, {"license": "other", "license_name": licence}
    return licence, {"license": licence.lower()}  # as the hub writes SPDX ids


def write_data_card(latents_uri: str, *, licence: str | None = None) -> None:
    """Write the README of a finished job's latents into their folder; see `data_card`."""
    card = data_card(read_manifest(latents_uri), storage.name(latents_uri), licence)
    storage.write_text(storage.join(latents_uri, "README.md"), str(card))


def data_card(manifest: Manifest, name: str, licence: str | None = None) -> DatasetCard:
    """The card of a latents folder: what was encoded, how, and what its columns are. `licence`: as in `model_card`.

    `name`: the folder's, for data without an input of its own.
    """
    licence, metadata = licence_metadata(licence)
    metadata |= {"task_categories": ["text-to-image"], "size_categories": [size_category(manifest.written)]}
    metadata |= {"configs": [{"config_name": "default", "data_files": "data/*.parquet"}], "tags": ["latents"]}
    facts = {
        "rows": f"{manifest.written:,}",
        "rejected rows": "; ".join(f"{count:,}: {reason}" for reason, count in manifest.rejected.items()) or "none",
        "resolutions": ", ".join(map(str, manifest.resolutions)),
        "held out for validation": f"{manifest.job.get('validation_share', 0):g} of the rows",
        "VAE": public_name(manifest.vae_model),
        "text encoder": public_name(manifest.text_encoder_model),
        "captions per row": manifest.num_captions,
    }
    return DatasetCard.from_template(
        DatasetCardData(**metadata),
        template_path=str(pathlib.Path(__file__).with_name("data_card.md")),
        name=markdown_cell(public_name(manifest.job.get("input_uri") or name)),
        facts={name: markdown_cell(value) for name, value in facts.items()},
        columns={spec.name: "up to " * spec.ragged + " x ".join(map(str, spec.shape)) for spec in manifest.columns},
        scaling_factor=manifest.scaling_factor,
        shift_factor=manifest.shift_factor,
        has_moments=any(spec.resolution and spec.shape[0] == 2 for spec in manifest.columns),
        licence=licence,
    )


def size_category(rows: int) -> str:
    """What the hub calls a number of rows, such as "10K<n<100K"."""
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    passed = sum(rows >= 1000 * 10**power for power in range(len(names)))
    if passed in (0, len(names)):
        return "n>1T" if passed else "n<1K"
    return f"{names[passed - 1]}<n<{names[passed]}"


def call_options(
    config: TrainingConfig, manifest: Manifest, *, steps: int = 20, guidance_scale: float = 2.0
) -> dict[str, Any]:
    """The arguments with which an exported pipeline, called by diffusers alone, draws what `sample.sample` draws."""
    return {
        "height": config.largest_resolution,
        "width": config.largest_resolution,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        **denoisers.find_adapter(config.unet_config).call_options(manifest.embeddings.shape[0]),
    }


def describe_rows(uri: str, manifest: Manifest, data: DataSets) -> str:
    """How many rows of which input."""
    share = f", {data.proportions[uri]:.3g} of each batch" if len(data.manifests) > 1 else ""
    return f"{manifest.written:,} rows of {public_name(manifest.job.get('input_uri') or uri)}{share}"


def public_name(location: str) -> str:
    """A URI without secrets, or a hub id with its commit; only the name of a local folder, whose path is private."""
    is_path = "://" not in location and (location.startswith(("/", ".", "~")) or "@" not in location)
    return storage.name(location) if is_path else storage.shown(location)


def markdown_cell(text: object) -> str:
    """A text for a cell of a Markdown table."""
    return MARKDOWN.sub(r"\\\g<0>", " ".join(printable(text).split()))
