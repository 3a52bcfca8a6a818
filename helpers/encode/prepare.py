"""What the driver does before a preprocessing job: pins the models, derives what follows from them, plans segments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from typing import Any, TypeVar

import torch

from .. import storage
from ..config import PreprocessingConfig
from ..latents import schema
from ..latents.manifest import encode_embedding
from ..model import denoisers
from ..raw import inputs
from . import captions, encoder, job, models

MOMENTS = {"moments": 2, "mean": 1}
MOST_TOKENS = 8192  # in a caption, if neither the tokenizer nor the text encoder names a limit
Config = TypeVar("Config", bound=PreprocessingConfig)


def check_early(config: PreprocessingConfig) -> None:
    """Raises ValueError for models as `derive` does, and for a parameter that differs from what a job began with.

    Also for a new job whose `latents_uri` cannot be written. Reads neither data nor weights.
    """
    begun = job.begun_with(config.latents_uri)
    fixed = derive(config, begun and begun["encoder"]).fixed("rows", "latents")
    given = [name for name, value in fixed.items() if value not in (None, "auto")]  # others follow from the input
    job.check_begun(config.latents_uri, begun, fixed, given)
    if begun is None:
        probe = storage.join(config.latents_uri, job.SEGMENTS, "probe")
        try:
            storage.write_text(probe, "")
            storage.delete(probe)
        except OSError as error:
            raise ValueError(
                f"latents_uri={config.latents_uri!r} cannot be written: give another storage or latents_uri. ({error})"
            ) from None


def prepare_job(
    config: PreprocessingConfig, rows_per_segment: int | None = None, recorded: dict[str, Any] | None = None
) -> job.Job:
    """A checked and planned preprocessing job; `job.config` is what `derive` returns.

    Called before any worker starts. Encodes one empty caption and nothing else. Raises FileNotFoundError or ValueError
    that says what to change.

    Args:
        config: with the format and the columns of the input (`production.readers.detect`).
        rows_per_segment: about how many rows are committed together.
        recorded: further entries of the job's parameters, which a rerun must have too.
    """
    begun = job.begun_with(config.latents_uri)
    config = derive(config, begun and begun["encoder"])
    paths, listing = inputs.list_inputs(config)
    # Encoders start anew with each segment: the more there are, the more rows it takes to make that worth it.
    rows_per_segment = rows_per_segment or job.ROWS_PER_SEGMENT * config.most_encoders
    parameters = describe_input(config, listing) | (recorded or {})
    parameters["input_written_crc32"] = input_version(config, listing, begun)
    plan = functools.partial(job.plan_segments, paths, config, rows_per_segment)
    return job.Job(config, parameters, describe_encoder(config), plan)


def derive(config: Config, earlier: dict[str, str] | None = None) -> Config:
    """The config with the commits of its models, and with the fields that follow from the models.

    `maximum_tokens`, unless it is given, and `text_cleaning` are what the denoiser needs. `size_multiple` is what the
    VAE and the denoiser divide sides by. Reads neither data nor weights.

    `earlier`: `Manifest.encoder` of the job or run that is being resumed; None for a new one. Its commits are kept
    unless the config names a revision ("hub/id@revision").

    Raises ValueError for a model that is unknown, and for parameters that do not fit the models.
    """
    config = pin_models(config, earlier)
    denoiser = denoisers.load_denoiser_config(config.unet_config)
    adapter = denoisers.ADAPTERS[denoiser["_class_name"]]
    with naming_models(config):
        factor = encoder.downsampling(encoder.vae_config(config.model_of("vae")))
        tokens = config.maximum_tokens
        if tokens is None and adapter.masks_padding:
            tokens = min(adapter.max_tokens, longest_caption(config))
        derived = {
            "text_cleaning": adapter.text_cleaning or "none",
            "size_multiple": factor * adapter.divisor(denoiser),
        }
        config = dataclasses.replace(config, maximum_tokens=tokens, **derived)
        stored_columns(config, 1)
    return config


def pin_models(config: Config, earlier: dict[str, str] | None = None) -> Config:
    """The config with a commit in the name of each model of the hub (`models.pin_model`). `earlier`: see `derive`."""
    keys = {"vae": "model", "text_encoder": "text_encoder_model"}
    parts = {config.model_parameter(part): key for part, key in reversed(keys.items())}  # one may name both models
    pinned = {
        parameter: models.pin_model(getattr(config, parameter), earlier and earlier[key], parameter)
        for parameter, key in parts.items()
    }
    return dataclasses.replace(config, **pinned)


def describe_input(config: PreprocessingConfig, listing: dict[str, int]) -> dict[str, Any]:
    """The parameters that decide what is written, and a checksum of the input's files."""
    return {
        **config.fixed("rows", "latents"),
        "num_captions": config.num_captions,
        "input_uri": config.data_uri,
        "input_crc32": inputs.checksum(listing),
    }


def input_version(config: PreprocessingConfig, listing: dict[str, int], begun: dict[str, Any] | None) -> int | None:
    """A checksum of the times at which the input's files were written: that with which the job began, if it has one.

    Prints a sentence if files of the same sizes have been written since, because rows that are encoded stay.
    """
    written = inputs.modified(listing, config)
    now = inputs.checksum(written)
    before = begun.get("input_written_crc32") if begun else now
    if before not in (None, now):
        print(
            f"Files of input_uri={config.data_uri!r} were written again after this job began (the newest is "
            f"{max(written, key=written.get)}), and rows that are encoded stay as they are. To encode them again, "
            f"give another latents_uri, or delete {config.latents_uri}."
        )
    return before


# ---- the encoder


def encoder_arguments(config: PreprocessingConfig, num_captions: int | None = None) -> dict[str, Any]:
    """The arguments of `LatentEncoder`, by name. Raises Unsupported as `stored_columns` does.

    `num_captions`: captions of each row that are encoded; None: all that are stored. An online run encodes 1.
    """
    sizes = [shape for shapes in config.shapes.values() for shape in shapes]
    return {
        "model": config.model_of("vae"),
        "columns": stored_columns(config, num_captions or config.num_captions),
        "text_encoder_model": config.model_of("text_encoder"),
        "precision": config.encoder_precision,
        "batch_size": config.encoder_batch_size,
        # It is faster at small sizes alone, and each change of the size costs.
        "channels_last": config.gpus_per_encoder > 0 and len(sizes) == 1 and max(sizes[0]) <= 256,
    }


def stored_columns(config: PreprocessingConfig, num_captions: int) -> list[schema.ColumnSpec]:
    """The columns of latents and of the embeddings of `num_captions` captions, from the models' configs.

    Reads no weights. Raises Unsupported for models that `LatentEncoder` does not take, and for parameters that do not
    fit the models.
    """
    model = config.model_of("vae")
    vae, (_, text) = encoder.vae_config(model), encoder.text_config(config.model_of("text_encoder"))
    if config.latents == "moments" and vae["_class_name"] == "AutoencoderDC":
        raise models.Unsupported(f"latents='moments', and {model!r} has an AutoencoderDC, which has none: use 'mean'.")
    factor = encoder.downsampling(vae)
    columns = []
    for resolution, sizes in config.shapes.items():
        if resolution % factor:
            raise models.Unsupported(f"resolutions={list(config.resolutions)}: the VAE needs multiples of {factor}.")
        for width, height in sizes:
            shape = MOMENTS[config.latents], vae["latent_channels"], height // factor, width // factor
            columns.append(schema.ColumnSpec(schema.latents_column(width, height), shape, resolution=resolution))
    text_shape = caption_length(config), text.hidden_size
    is_ragged = config.maximum_tokens is not None
    names = [schema.numbered(schema.EMBEDDINGS, number) for number in range(1, 1 + num_captions)]
    return columns + [schema.ColumnSpec(name, text_shape, ragged=is_ragged) for name in names]


def caption_length(config: PreprocessingConfig) -> int:
    """L, the number of token ids that captions are truncated or filled up to.

    L is `maximum_tokens` or, if that is None, the length that the tokenizer pads to. Raises Unsupported if L is more
    than the tokenizer or the text encoder takes.
    """
    longest = longest_caption(config)
    wanted = config.maximum_tokens or captions.load_tokenizer(config.model_of("text_encoder")).model_max_length
    if wanted > longest:
        raise models.Unsupported(
            f"maximum_tokens={config.maximum_tokens} comes to captions of {wanted} tokens, and tokenizer and text "
            f"encoder take {longest}: give at most that."
        )
    return wanted


def longest_caption(config: PreprocessingConfig) -> int:
    """The most token ids that tokenizer and text encoder take."""
    model = config.model_of("text_encoder")
    _, text = encoder.text_config(model)
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", MOST_TOKENS)
    return min(captions.load_tokenizer(model).model_max_length, positions)


def describe_encoder(config: PreprocessingConfig) -> dict[str, Any]:
    """The encoder's part of the manifest. Encodes an empty caption here, on the CPU.

    `config`: what `derive` returns. Keys: encoder, columns, scaling_factor, shift_factor, empty_caption_embedding.
    Raises ValueError for a model that is not in diffusers layout or has an unknown class, and for parameters that do
    not fit the models.
    """
    model, text_model = config.model_of("vae"), config.model_of("text_encoder")
    with naming_models(config):
        columns = stored_columns(config, config.num_captions)
        vae, (text_class, _) = encoder.vae_config(model), encoder.text_config(text_model)
        empty_caption = encode_empty_caption(config)
    return {
        "encoder": {
            "model": model,
            "revision": revision_of(model, "vae"),
            "vae_class": vae["_class_name"],
            "text_encoder_model": text_model,
            "text_encoder_revision": revision_of(text_model, "text_encoder", "tokenizer"),
            "text_encoder_class": text_class,
            "precision": config.encoder_precision,
        },
        "columns": columns,
        "scaling_factor": vae["scaling_factor"],
        "shift_factor": vae.get("shift_factor") or 0.0,
        "empty_caption_embedding": encode_embedding(empty_caption.numpy()),
    }


def naming_models(config: PreprocessingConfig) -> contextlib.AbstractContextManager:
    """`models.explained` for code that reads models: its errors name the models' parameters."""
    parameters = dict.fromkeys(config.model_parameter(part) for part in ("vae", "text_encoder"))
    names = " or ".join(f"{name}={getattr(config, name)!r}" for name in parameters)
    layout = "holds no model in diffusers layout (vae/, text_encoder/, tokenizer/)"
    return models.explained(f"{names} {layout}: give 'tiny-sd', a folder or a hub id.")


@torch.inference_mode()
def encode_empty_caption(config: PreprocessingConfig) -> torch.Tensor:
    """(tokens, width): the embedding of an empty caption. Raises Unsupported if it has no tokens."""
    model = config.model_of("text_encoder")
    ids_BL = torch.from_numpy(captions.caption_ids([""], config))
    if (ids_BL < 0).all():
        raise models.Unsupported(f"The tokenizer of {model!r} makes no token of an empty caption: give another model.")
    return encoder.last_states(encoder.load_text_encoder(model), ids_BL)[ids_BL >= 0]


def revision_of(model: str, *parts: str) -> str:
    """The commit of a pinned hub id, or a hash of the files in some subfolders of a model's folder."""
    if models.is_hub_id(model):
        return model.partition("@")[2]
    folder = pathlib.Path(models.model_folder(model))
    digest = hashlib.sha256()
    for path in sorted(path for part in parts for path in folder.glob(f"{part}/*") if path.is_file()):
        with open(path, "rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
