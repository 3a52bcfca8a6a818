"""What the driver does before a preprocessing job: pins the models, checks input and encoder, plans the segments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pyarrow as pa
import torch

from ..config import PreprocessingConfig
from ..latents import schema
from ..latents.manifest import encode_embedding
from ..model import denoisers
from ..production.data import exclusions
from ..production.readers import detect
from ..raw import inputs
from . import captions, encoder, job, models

MOMENTS = {"moments": 2, "mean": 1}
MOST_TOKENS = 8192  # in a caption, if neither the tokenizer nor the text encoder names a limit
# Entries that a job's parameters and the encoder's part of a manifest leave out if they have these values: data that is
# older than an entry has none, and is the same.
LEFT_OUT = {
    "num_captions": 1,
    "leave_out": None,
    "maximum_tokens": None,
    "text_cleaning": "none",
    "vae_class": "AutoencoderKL",
    "text_encoder_class": "CLIPTextModel",
}
# Parameters that a job may leave open; what it found in the data or the models is recorded.
FOUND = {"input_format", "image_column", "caption_column", "id_column"}
FOUND |= {"maximum_tokens", "text_cleaning", "size_multiple"}
Config = TypeVar("Config", bound=PreprocessingConfig)


def find_input(config: PreprocessingConfig) -> detect.Found:
    """What the job at `config.latents_uri` will read (`detect.detect`)."""
    return detect.detect(config, job.begun_with(config.latents_uri))


def check_early(config: PreprocessingConfig) -> None:
    """Raises ValueError for parameters that contradict each other, or the job at `latents_uri`. Reads no data.

    Models are checked by `check_models`.
    """
    begun = job.begun_with(config.latents_uri) or {}
    now = config.fixed("rows", "latents")
    names = [name for name in now if name in begun and name not in FOUND]
    job.check_parameters(config.latents_uri, begun, now, names)
    check_models(config, begun.get("encoder"))


def check_models(config: PreprocessingConfig, earlier: dict[str, str] | None = None) -> None:
    """Raises ValueError for models that are unknown, or that the parameters do not fit. Reads no weights.

    `earlier`: as in `pin_models`.
    """
    pinned = fit_denoiser(pin_models(config, earlier))
    with naming_models(pinned):
        stored_columns(pinned, config.max_captions)


def prepare_job(config: PreprocessingConfig, rows_per_segment: int | None = None) -> job.Job:
    """A checked and planned preprocessing job; `job.config` is `config` with the commits of its models.

    Called before any worker starts. Encodes one empty caption and nothing else. Raises FileNotFoundError or ValueError
    that says what to change.
    """
    begun = job.begun_with(config.latents_uri)
    checked = check(config, begun)
    # Encoders start anew with each segment: the more there are, the more rows it takes to make that worth it.
    rows_per_segment = rows_per_segment or job.ROWS_PER_SEGMENT * config.most_encoders
    return job.Job(
        config.latents_uri,
        checked.parameters | leave_out({"leave_out": exclusions.record(checked.config.leave_out)}),
        checked.description,
        plan=functools.partial(job.plan_segments, checked.paths, checked.config, rows_per_segment),
        id_type=checked.id_type,
        max_failures=config.max_failures,
        config=checked.config,
    )


@dataclasses.dataclass(frozen=True)
class CheckedInput:
    """Raw data and encoder of a job, as `check` found them.

    Args:
        config: the parameters, with the commits of the models and the columns of the input.
        paths: input files.
        listing: {path below the input: bytes}.
        parameters: those that decide what is written, and a checksum of the listing.
        description: the encoder's part of the manifest (`describe_encoder`).
        id_type: Arrow type of the stored ids.
    """

    config: PreprocessingConfig
    paths: list[str]
    listing: dict[str, int]
    parameters: dict
    description: dict
    id_type: pa.DataType


def check(config: PreprocessingConfig, begun: dict | None = None) -> CheckedInput:
    """Pin the models (`pin_models`), then check raw data and encoder, before any worker starts.

    `begun`: the parameters that the job or online run at `latents_uri` began with; None for a new one. That job or run
    keeps its columns (`detect.detect`) and the commits of its models. If a job is resumed, its files are not checked
    again.

    Raises FileNotFoundError or ValueError that says what to change.
    """
    pinned = pin_models(config, begun and begun.get("encoder"))
    pinned = dataclasses.replace(pinned, leave_out=exclusions.pin(config.leave_out))
    found = detect.detect(fit_denoiser(pinned), begun)
    config, paths, listing = found.config, found.paths, found.listing
    is_resumed = begun is not None and "online" not in begun
    if is_resumed:
        id_type = pa.type_for_alias(begun["id_type"])
    else:
        id_type = inputs.id_type_of(inputs.reached(paths, config), config)
    parameters = {
        **config.fixed("rows", "latents"),
        "text_precision": "fp16",  # recorded because captions could be stored in 8-bit floats too
        "num_captions": config.num_captions,
        "input_uri": config.data_uri,
        "input_crc32": inputs.checksum(listing),
        "id_type": str(id_type),
    }
    return CheckedInput(config, paths, listing, leave_out(parameters), describe_encoder(config), id_type)


def leave_out(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without the entries whose name and value are both as in `LEFT_OUT`.

    Not related to the parameter `leave_out`.
    """
    return {name: value for name, value in values.items() if (name, value) not in LEFT_OUT.items()}


def pin_models(config: Config, earlier: dict[str, str] | None = None) -> Config:
    """The config with a commit in the name of each model of the hub (`models.pin_model`).

    `earlier`: `Manifest.encoder` of the job or run that is being resumed; None for a new one. Its commits are kept
    unless the config names a revision.
    """
    vae = earlier and earlier["model"]
    text_encoder = earlier and earlier.get("text_encoder_model", vae)
    # One parameter may name both models: the VAE's commit is then the one that is known.
    known = {config.model_parameter("text_encoder"): text_encoder, config.model_parameter("vae"): vae}
    pinned = {}
    for parameter, before in known.items():
        pinned[parameter] = models.pin_model(getattr(config, parameter), before, parameter)
        pinned[parameter.replace("model", "revision")] = None  # the model's name has the commit now
    return dataclasses.replace(config, **pinned)


def fit_denoiser(config: Config) -> Config:
    """The config with `maximum_tokens`, `text_cleaning` and `size_multiple` as the denoiser needs them.

    `maximum_tokens` and `text_cleaning` stay if they are not the defaults. Raises ValueError for a `unet_config` or a
    model that is unknown.
    """
    denoiser = denoisers.load_denoiser_config(config.unet_config)
    adapter = denoisers.ADAPTERS[denoiser["_class_name"]]
    tokens, cleaning = config.maximum_tokens, config.text_cleaning
    with naming_models(config):
        factor = encoder.downsampling(encoder.vae_config(config.model_of("vae")))
        if adapter.masks_padding and tokens is None:
            tokens = min(adapter.max_tokens, longest_caption(config))
    if cleaning == "none":
        cleaning = adapter.text_cleaning or "none"
    multiple = factor * adapter.divisor(denoiser)
    return dataclasses.replace(config, maximum_tokens=tokens, text_cleaning=cleaning, size_multiple=multiple)


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

    Reads no weights. Raises Unsupported for models that `Encoder` does not take, and for parameters that do not fit
    the models.
    """
    model = config.model_of("vae")
    vae, (_, text) = encoder.vae_config(model), encoder.text_config(config.model_of("text_encoder"))
    if config.latents == "moments" and vae["_class_name"] == "AutoencoderDC":
        raise models.Unsupported(f"latents='moments', and {model!r} has an AutoencoderDC, which has none: use 'mean'.")
    factor = encoder.downsampling(vae)
    columns = []
    for resolution, sizes in config.shapes.items():
        for width, height in sizes:
            if width % factor or height % factor:
                raise models.Unsupported(
                    f"resolutions={list(config.resolutions)} come to {width} x {height} pixels, which the VAE halves "
                    f"{factor.bit_length() - 1} times: use multiples of {factor}."
                )
            shape = MOMENTS[config.latents], vae["latent_channels"], height // factor, width // factor
            columns.append(schema.ColumnSpec(schema.latents_column(width, height), shape, resolution=resolution))
    text_shape = caption_length(config), text.hidden_size
    is_ragged = config.maximum_tokens is not None
    for number in range(1, 1 + num_captions):
        name = schema.numbered(schema.EMBEDDINGS, number)
        columns.append(schema.ColumnSpec(name, text_shape, ragged=is_ragged))
    return columns


def caption_length(config: PreprocessingConfig) -> int:
    """L, the number of token ids that captions are truncated or filled up to.

    L is `maximum_tokens` or, if that is None, the length that the tokenizer pads to. Raises Unsupported if L is more
    than the tokenizer or the text encoder takes.
    """
    model, longest = config.model_of("text_encoder"), longest_caption(config)
    wanted = config.maximum_tokens or captions.load_tokenizer(model).model_max_length
    if wanted > longest:
        raise models.Unsupported(
            f"maximum_tokens={config.maximum_tokens} comes to captions of {wanted} tokens, and tokenizer and text "
            f"encoder of {model!r} take {longest}: give at most that."
        )
    return wanted


def longest_caption(config: PreprocessingConfig) -> int:
    """The most token ids that tokenizer and text encoder take."""
    model = config.model_of("text_encoder")
    _, text = encoder.text_config(model)
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", MOST_TOKENS)
    return min(captions.load_tokenizer(model).model_max_length, positions)


def describe_encoder(config: PreprocessingConfig) -> dict:
    """The encoder's part of the manifest. Encodes an empty caption here, on the CPU.

    `config`: with pinned models (`pin_models`). Keys: encoder, columns, scaling_factor, shift_factor,
    empty_caption_embedding. Raises ValueError for a model that is not in diffusers layout or has an unknown class, and
    for parameters that do not fit the models.
    """
    model, text_model = config.model_of("vae"), config.model_of("text_encoder")
    with naming_models(config):
        columns = stored_columns(config, config.num_captions)
        vae, (text_class, _) = encoder.vae_config(model), encoder.text_config(text_model)
        empty_caption = encode_empty_caption(config)
    names = {**name_models(model, text_model), "precision": config.encoder_precision}
    return {
        "encoder": leave_out({**names, "vae_class": vae["_class_name"], "text_encoder_class": text_class}),
        "columns": columns,
        "scaling_factor": vae["scaling_factor"],
        "shift_factor": vae.get("shift_factor") or 0.0,
        "empty_caption_embedding": encode_embedding(empty_caption.numpy()),
    }


@contextlib.contextmanager
def naming_models(config: PreprocessingConfig) -> Iterator[None]:
    """Context manager for code that reads models: its errors become a ValueError that names the models' parameters.

    Unsupported is raised unchanged.
    """
    try:
        yield
    except models.Unsupported:
        raise
    except (OSError, ValueError) as error:
        parameters = dict.fromkeys(config.model_parameter(part) for part in ("vae", "text_encoder"))
        names = " or ".join(f"{name}={getattr(config, name)!r}" for name in parameters)
        raise ValueError(
            f"{names} holds no model in diffusers layout (vae/, text_encoder/, tokenizer/): give 'tiny-sd', a folder "
            f"or a hub id. ({str(error).splitlines()[0]})"
        ) from None


@torch.inference_mode()
def encode_empty_caption(config: PreprocessingConfig) -> torch.Tensor:
    """(tokens, width): the embedding of an empty caption. Raises Unsupported if it has no tokens."""
    model = config.model_of("text_encoder")
    ids_BL = torch.from_numpy(captions.caption_ids([""], config))
    if (ids_BL < 0).all():
        raise models.Unsupported(
            f"The tokenizer of {model!r} makes no token of an empty caption: give maximum_tokens=None."
        )
    return encoder.last_states(encoder.load_text_encoder(model), ids_BL)[ids_BL >= 0]


def name_models(model: str, text_encoder_model: str) -> dict[str, str]:
    """{"model", "revision"}; if the text encoder is another model's, "text_encoder_model" and its revision too."""
    text_parts = ("text_encoder", "tokenizer")
    if model == text_encoder_model:
        return {"model": model, "revision": revision_of(model, "vae", *text_parts)}
    text_revision = revision_of(text_encoder_model, *text_parts)
    names = {"model": model, "revision": revision_of(model, "vae")}
    return {**names, "text_encoder_model": text_encoder_model, "text_encoder_revision": text_revision}


def revision_of(model: str, *parts: str) -> str:
    """The commit of a pinned hub id, or a hash of the files in some subfolders of a model's folder."""
    if models.is_hub_id(model):
        return model.partition("@")[2]
    folder = pathlib.Path(models.model_folder(model))
    digest = hashlib.sha256()
    for path in sorted(path for part in parts for path in folder.glob(f"{part}/*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
