"""A hub id is looked up once, on the driver; from then on its commit is part of the model's name, wherever it goes."""

from huggingface_hub import HfApi, constants, errors

from . import images
from .preprocessing_config import PreprocessingConfig


def pin_model(model: str, earlier: str | None = None, parameter: str = "model") -> str:
    """A hub id, or "hub/id@revision", as "hub/id@commit"; a model of this package, a folder or a URI as it is.

    `earlier`: the model of a job that goes on; unless `model` names a revision, its commit is kept. Where the hub is
    not reached, the commit in its cache on this machine is taken. Raises ValueError, naming the `parameter`, if there
    is none either, or if the hub has no such model.
    """
    name, _, revision = model.partition("@")
    if not images.is_hub_id(model):
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
