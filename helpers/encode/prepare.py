"""What the driver does before a preprocessing job: checks the input and the encoder, and plans the job."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import zlib

import pyarrow as pa

from ..config.preprocessing import PreprocessingConfig
from ..latents.manifest import encode_embedding
from ..raw import checks, inputs
from . import captions, job, models


def prepare(config: PreprocessingConfig, rows_per_segment: int | None = None) -> job.Job:
    """Check a preprocessing job and plan it, before any worker starts; encodes nothing but one empty caption.

    Pins the models (`models.pin_encoder`). Raises FileNotFoundError or ValueError with what to change.
    """
    models.pin_encoder(config, (job.begun_with(config.latents_uri) or {}).get("encoder"))
    checked = check(config)
    # Encoders start anew with each segment: the more there are, the more rows it takes to make that worth it.
    rows_per_segment = rows_per_segment or job.ROWS_PER_SEGMENT * config.most_encoders
    return job.Job(
        config.latents_uri,
        checked.parameters,
        checked.description,
        plan=functools.partial(job.plan_segments, checked.paths, config, rows_per_segment),
        id_type=checked.id_type,
        max_failures=config.max_failures,
    )


@dataclasses.dataclass(frozen=True)
class CheckedInput:
    """What a job is made of.

    Args:
        paths: input files.
        listing: {path below the input: bytes}.
        parameters: those that decide what is written, and a checksum of the listing.
        description: the encoder's part of the manifest (`describe`).
        id_type: Arrow type of the stored ids.
    """

    paths: list[str]
    listing: dict[str, int]
    parameters: dict
    description: dict
    id_type: pa.DataType


def check(config: PreprocessingConfig) -> CheckedInput:
    """Check raw data and encoder before any worker starts.

    Raises FileNotFoundError or ValueError with what to change.
    """
    paths = inputs.list_inputs(config.data_uri, config.input_format)
    input_schema = checks.check_input(paths[0], config)
    listing = inputs.listing(paths, config.data_uri)
    parameters = config.deciding("rows", "stored") | {"input_uri": config.data_uri}
    parameters["text_precision"] = "fp16"  # recorded since captions could be stored in 8-bit floats too
    if config.num_captions > 1:
        parameters["num_captions"] = config.num_captions
    for name, default in (("maximum_tokens", None), ("text_cleaning", "none")):
        if parameters[name] == default:  # data of earlier versions is the same without
            del parameters[name]
    parameters["input_crc32"] = zlib.crc32(json.dumps(sorted(listing.items())).encode())
    id_type = inputs.id_type(input_schema.field(config.id_column).type)
    return CheckedInput(paths, listing, parameters, describe(config), id_type)


def describe(config: PreprocessingConfig) -> dict:
    """The encoder's part of the manifest, from the models' configs and one empty caption encoded here, on the CPU.

    Keys: encoder, columns, scaling_factor, shift_factor, empty_caption_embedding. The encoder's "model" is pinned, and
    its "revision" that commit, or a hash of a folder's files. Raises ValueError for a model that is not in diffusers
    layout or of a class that is not known, and for parameters that its parts cannot take.
    """
    import torch

    from . import encoder

    pinned = dataclasses.replace(config)
    models.pin_encoder(pinned, None)
    model, text_model = pinned.model_of("vae"), pinned.model_of("text_encoder")
    try:
        _, columns, precision, _ = encoder.arguments(pinned, config.num_captions)
        vae, (text_class, _) = encoder.vae_config(model), encoder.text_config(text_model)
        empty_ids_BL = torch.from_numpy(captions.caption_ids([""], pinned))
        text_encoder = encoder.load_text_encoder(text_model)
    except models.Unsupported:
        raise
    except (OSError, ValueError) as error:
        parameters = dict.fromkeys(config.model_parameter(part) for part in ("vae", "text_encoder"))
        names = " or ".join(f"{name}={getattr(config, name)!r}" for name in parameters)
        raise ValueError(
            f"{names} holds no model in diffusers layout (vae/, text_encoder/, tokenizer/): give 'tiny-sd', a folder "
            f"or a hub id. ({str(error).splitlines()[0]})"
        ) from None
    factor = encoder.downsampling(vae)
    for width, height in itertools.chain.from_iterable(config.shapes.values()):
        if width % factor or height % factor:
            raise ValueError(
                f"resolutions={list(config.resolutions)} and size_multiple={config.size_multiple} come to {width} x "
                f"{height} pixels, which the VAE halves {factor.bit_length() - 1} times: use multiples of {factor}."
            )
    if (empty_ids_BL < 0).all():
        raise ValueError(
            f"The tokenizer of {text_model!r} makes no token of an empty caption: give maximum_tokens=None."
        )
    with torch.inference_mode():
        empty_BLD = encoder.last_states(text_encoder, empty_ids_BL)
    return {
        "encoder": {
            **name_models(model, text_model),
            "precision": precision,
            **name_classes(vae["_class_name"], text_class),
        },
        "columns": columns,
        "scaling_factor": vae["scaling_factor"],
        "shift_factor": vae.get("shift_factor") or 0.0,
        "empty_caption_embedding": encode_embedding(empty_BLD[empty_ids_BL >= 0].numpy()),
    }


def name_models(model: str, text_encoder_model: str) -> dict[str, str]:
    """{"model", "revision"}, and where the text encoder is another model's, its two too."""
    parts, text_parts = ("vae",), ("text_encoder", "tokenizer")
    if model == text_encoder_model:
        return {"model": model, "revision": revision_of(model, *parts, *text_parts)}
    names = {
        "text_encoder_model": text_encoder_model,
        "text_encoder_revision": revision_of(text_encoder_model, *text_parts),
    }
    return {"model": model, "revision": revision_of(model, *parts), **names}


def name_classes(vae_class: str, text_encoder_class: str) -> dict[str, str]:
    """The classes that are not those of Stable Diffusion, which earlier versions did not name."""
    names = {"vae_class": vae_class, "text_encoder_class": text_encoder_class}
    usual = {"vae_class": "AutoencoderKL", "text_encoder_class": "CLIPTextModel"}
    return {name: value for name, value in names.items() if value != usual[name]}


def revision_of(model: str, *parts: str) -> str:
    """The commit of a pinned hub id, or a hash of the files of some parts of a model's folder."""
    if models.is_hub_id(model):
        return model.partition("@")[2]
    folder = pathlib.Path(models.model_folder(model))
    digest = hashlib.sha256()
    for path in sorted(path for name in parts for path in folder.glob(f"{name}/*")):
        if path.is_file():
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
