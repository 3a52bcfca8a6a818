"""Model folders: those in this package, local ones, and a hub id's, whose commit is looked up once."""

import contextlib
import os
import pathlib

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import WeakFileLock, disable_progress_bars

from ..config.preprocessing import PreprocessingConfig

TINY_SD, TINY_CLIP = IN_PACKAGE = ("tiny-sd", "tiny-clip")
# Files of a model's repository that nothing here reads: other formats and variants of its weights, pictures.
UNUSED = ["*.bin", "*.h5", "*.msgpack", "*.ckpt", "*.onnx*", "*.fp16.*", "*.non_ema.*", "safety_checker/*", "*.png"]


def tiny_sd_folder() -> str:
    """Where this package's models are on the machine that calls it, in diffusers layout."""
    return model_folder(TINY_SD)


def is_hub_id(model: str) -> bool:
    return not (model in IN_PACKAGE or "://" in model or os.path.exists(model))


def model_folder(model: str, *patterns: str) -> str:
    """The folder of a model on this machine: in this package, as given, or of a hub id in the hub's cache (`HF_HOME`).

    Of "hub/id@commit" (`models.pin_model`) the files that match `patterns` are downloaded where the cache lacks them. A
    lock makes a node's processes do so one after the other: each file is downloaded once, and what is there is used
    without a request. Raises ValueError for a model that is neither there nor can be downloaded.
    """
    if model in IN_PACKAGE:
        return str(pathlib.Path(__file__).parents[1] / "models" / model)
    if not is_hub_id(model):
        return model
    (name, _, revision), cache = model.partition("@"), constants.HF_HUB_CACHE
    os.makedirs(cache, exist_ok=True)
    writable = os.access(cache, os.W_OK)  # one in an image may not be
    lock = WeakFileLock(f"{cache}/{name.replace('/', '--')}.lock") if writable else contextlib.nullcontext()
    options = {"allow_patterns": list(patterns), "ignore_patterns": UNUSED}
    try:
        with lock, disable_progress_bars():
            return snapshot_download(name, revision=revision or None, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model!r} is neither a folder here, nor in {cache}, nor to be had from {constants.ENDPOINT}: check its "
            f"name, the network, HF_TOKEN and HF_HUB_OFFLINE. ({str(error).splitlines()[0]})"
        ) from None


class Unsupported(ValueError):
    """A model, or a parameter of it, that this code does not take; the text says which and what to change."""


def check_class(name: str | None, known: dict[str, type], what: str) -> None:
    """Raises Unsupported for a class that is not among the `known` ones. `what`: begins the sentence."""
    if name not in known:
        raise Unsupported(f"{what} of class {name}, and this code takes {', '.join(known)}: give another model.")


def pin_model(model: str, earlier: str | None = None, parameter: str = "model") -> str:
    """A hub id, or "hub/id@revision", as "hub/id@commit"; a model of this package, a folder or a URI as it is.

    `earlier`: the model of a job that goes on; unless `model` names a revision, its commit is kept. Where the hub is
    not reached, the commit in its cache on this machine is taken. Raises ValueError, naming the `parameter`, if there
    is none either, or if the hub has no such model.
    """
    name, _, revision = model.partition("@")
    if not is_hub_id(model):
        return model
    if earlier and not revision and earlier.startswith(f"{name}@"):
        return earlier
    try:
        return f"{name}@{HfApi().resolve_revision(name, revision=revision or None).resolved}"
    except (errors.RevisionResolutionError, errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise ValueError(
            f"{parameter}={model!r} is neither a folder here nor a model that {constants.ENDPOINT} gives: check its "
            f"name and revision, the network, HF_TOKEN and HF_HUB_OFFLINE. ({str(error).splitlines()[0]})"
        ) from None


def pin_encoder(config: PreprocessingConfig, earlier: dict | None) -> None:
    """Name the commits in the config's models, for all that is called with `config` from now on: `pin_model`.

    `earlier`: `Manifest.encoder` of the job or the online run that goes on, None for a new one.
    """
    vae = earlier and earlier["model"]
    text_encoder = earlier and earlier.get("text_encoder_model", vae)
    # Of one model for both, the VAE's is known.
    known = {config.model_parameter("text_encoder"): text_encoder, config.model_parameter("vae"): vae}
    for parameter, before in known.items():
        model, revision = (
            pin_model(getattr(config, parameter), before, parameter),
            parameter.replace("model", "revision"),
        )
        # A revision that was asked for becomes the commit too, so that `dataclasses.replace(config)` keeps it.
        config.derive(**{parameter: model, revision: getattr(config, revision) and model.partition("@")[2]})
