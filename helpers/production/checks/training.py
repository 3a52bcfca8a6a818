"""What is refused before a run, besides what the core refuses (`train.start.CHECKS`): sentences by check.

A check is a function `(config, data) -> sentences`. The first one that finds something refuses the run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ... import storage
from ...config import TrainingConfig, first_difference
from ...distributed import COMPILED_SHAPES
from ...latents.manifest import DataSets, read_segments
from ...latents.parquet import MEND
from ...latents.plan import plan_run
from ...model import denoisers
from ...train import checkpoint, run_folder, start

LISTED_ROWS = 10**8  # a larger data set's files are not listed before a run: they are checked when they are read


# ---- the data


def mixture_fits(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if data sets of different encoders or layouts are mixed."""
    names = ("num_captions", "encoder", "text_cleaning", "columns", "scaling_factor", "shift_factor", "id_type")
    names = (*names, "empty_caption_embedding")
    settings = {uri: {name: getattr(manifest, name) for name in names} for uri, manifest in data.manifests.items()}
    (first_uri, first), *others = settings.items()
    for uri, theirs in others:
        if found := first_difference(theirs, first):
            name, *values = found
            what = "" if name == "empty_caption_embedding" else " ({} and {})".format(*values)
            yield (
                f"latents_uri mixes {uri} with {first_uri}, which differ in {name}{what}: encode both with the same "
                "settings."
            )


def captions_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if `caption_shares` has another number than the data has captions."""
    for uri, manifest in data.manifests.items():
        if config.caption_shares and len(config.caption_shares) != manifest.num_captions:
            yield (
                f"caption_shares={list(config.caption_shares)} has {len(config.caption_shares)} numbers, and {uri} "
                f"holds {manifest.num_captions} captions a row: give one for each, or None."
            )


def files_are_there(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for the first file that is missing or has another size than was written.

    It lists the folder once, which takes an object store a second for each thousand files.
    """
    for uri, manifest in data.manifests.items():
        if manifest.online or manifest.written > LISTED_ROWS:
            continue
        sizes = storage.sizes(storage.join(uri, "data"))
        for file in (file for segment in read_segments(uri) for file in segment["files"]):
            name, size = file["name"], file.get("bytes")
            if name not in sizes or size not in (None, sizes[name]):
                found = f"has {sizes[name]:,} bytes in place of {size:,}" if name in sizes else "is missing"
                yield f"{storage.join(uri, 'data', name)} {found}: {MEND}."
                return


# ---- the denoiser


def denoiser_is_supported(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each value of the denoiser's config that is not supported."""
    yield from denoisers.find_faults(config.unet_config)


def encoders_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if the denoiser's pipeline does not take the data's encoders."""
    adapter = denoisers.ADAPTERS[denoisers.load_denoiser_config(config.unet_config)["_class_name"]]
    for uri, manifest in data.manifests.items():
        padded, unfit = not manifest.embeddings.ragged, []
        vae, text_encoder = f"vae_model={manifest.vae_model!r}", f"text_encoder_model={manifest.text_encoder_model!r}"
        if manifest.vae_class not in adapter.vaes:
            unfit.append(f"{vae}, {manifest.vae_class}, not {' or '.join(adapter.vaes)}")
        if manifest.shift_factor and not adapter.shifts:
            unfit.append(f"{vae}, whose shift_factor={manifest.shift_factor} it does not apply")
        if manifest.text_encoder_class not in adapter.text_encoders:
            names = " or ".join(adapter.text_encoders)
            unfit.append(f"{text_encoder}, {manifest.text_encoder_class}, not {names}")
        if padded and adapter.masks_padding:
            unfit.append("maximum_tokens=None: it masks padding, and these captions are padded")
        if not padded and not adapter.masks_padding:
            unfit.append("maximum_tokens: it takes padded captions")
        if adapter.text_cleaning not in (None, manifest.text_cleaning):
            unfit.append(f"captions cleaned by {manifest.text_cleaning!r}: it cleans them by {adapter.text_cleaning!r}")
        if unfit:
            yield (
                f"unet_config={config.unet_config!r} samples by {adapter.pipeline}, and {uri} was encoded with "
                f"{'; with '.join(unfit)}: encode the data again, with this unet_config in Preprocessing.ipynb, or "
                "choose another unet_config."
            )


def first_weights_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if a new run cannot start from what `init_from` names.

    A run that already has a checkpoint of its own is not checked.
    """
    if not config.init_from or run_folder.last_complete(config.run_uri):
        return
    try:
        folder = checkpoint.find_weights(config.init_from, config.unet_config, storage.join(config.storage, "runs"))
    except ValueError as error:
        yield str(error)
        return
    given = f"init_from={config.init_from!r}"
    if run_folder.is_checkpoint(folder):
        run_uri = folder.rpartition("/")[0].removesuffix(f"/{run_folder.BEST}")
        if not storage.exists(storage.join(run_uri, "config.json")):
            yield f"{given} is a checkpoint in {run_uri}, which lacks the config.json of its run: copy that file there."
            return
        parameters = start.read_config(run_uri)["parameters"]
        theirs, objective = denoisers.load_denoiser_config(parameters["unet_config"]), parameters["prediction_type"]
    else:
        theirs = storage.read_json(storage.join(folder, "config.json"))
        objective = objective_of_pipeline(folder.rpartition("/")[0])
        yield from incomplete_weights(config.unet_config, folder, given)
    yield from other_settings(config.unet_config, theirs, given)
    if objective not in (None, config.prediction_type):
        yield (
            f"{given} was trained with prediction_type={objective!r}, not {config.prediction_type!r}: start from "
            "weights of the same."
        )


def incomplete_weights(unet_config: str, folder: str, given: str) -> Iterator[str]:
    """A sentence if weights in diffusers layout are pickled, or lack a tensor: it would keep random values."""
    files = checkpoint.weight_files(folder)
    if not files:
        yield (
            f"{given}: {folder} holds no weights in safetensors, and .bin files are not opened, because they may "
            "run code: save the denoiser again with safe_serialization=True."
        )
        return
    with torch.device("meta"):
        names = denoisers.build_denoiser(unet_config).state_dict()
    if missing := names.keys() - set().union(*map(tensor_names, files)):
        yield f"{given}: the weights in {folder} lack {min(missing)}: get them again."


def tensor_names(uri: str) -> set[str]:
    """The names of the tensors in a safetensors file; empty for another kind of file. Reads only the file's header."""
    filesystem, path = storage.open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(num_bytes))) if num_bytes < file.size() else set()


def objective_of_pipeline(uri: str) -> str | None:
    """The `prediction_type` that a pipeline's scheduler is for; None if there is no scheduler."""
    path = storage.join(uri, "scheduler", "scheduler_config.json")
    if not storage.exists(path):
        return None
    scheduler = storage.read_json(path, "get the pipeline again")
    found = scheduler.get("prediction_type", "epsilon")
    is_flow = "FlowMatch" in scheduler["_class_name"] or found == "flow_prediction"
    return "flow" if is_flow else found


def other_settings(unet_config: str, theirs: dict[str, Any], given: str) -> Iterator[str]:
    """A sentence for the first value of a denoiser's config that `unet_config` sets otherwise.

    A value that changes no weight's shape counts too. The default image size does not count. `theirs`: the denoiser's
    config. `given`: the beginning of the sentence.
    """
    ours = denoisers.load_denoiser_config(unet_config)
    arguments = list(inspect.signature(denoisers.ADAPTERS[ours["_class_name"]].kind.__init__).parameters.items())[1:]
    defaults = {"_class_name": None} | {name: argument.default for name, argument in arguments}
    for name, default in defaults.items():
        value, own = theirs.get(name, default), ours.get(name, default)
        if name != "sample_size" and not same_setting(value, own):
            yield (
                f"{given} is a denoiser with {name}={value}, and unet_config={unet_config!r} has {own}: start from one "
                "of the same configuration, or give its config.json as unet_config."
            )
            return


def same_setting(one: Any, other: Any) -> bool:
    """Whether two values of a config are equal; a single value stands for a list with that value for each block."""
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))
    if isinstance(one, list) == isinstance(other, list):
        return one == other
    several, single = (one, other) if isinstance(one, list) else (other, one)
    return all(value == single for value in several)


def parts_fit(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each part of a run that does not belong to the others: all that a manifest can tell, at once."""
    for check in (denoiser_is_supported, encoders_fit, start.columns_fit, start.widths_fit, captions_fit):
        yield from check(config, data)


ALL: Sequence[start.Check] = (
    mixture_fits,
    parts_fit,
    start.plan_is_filled,
    first_weights_fit,
    files_are_there,
)


# ---- what is said, and not refused


def notes(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence for each thing that the run will not use."""
    for uri, manifest in data.manifests.items():
        share = manifest.job["validation_share"]
        if config.validation_share not in (0, share):
            yield f"validation_share={config.validation_share} is not used: {uri} was encoded with {share}."
    shapes = start.describe_shapes(plan_run(data, config))
    for shape in shapes:
        if not shape["steps"]:
            yield (
                f"Images of {shape['shape']} are left out: their {shape['rows']} rows do not fill a batch of "
                f"{config.global_batch_size}."
            )
    if config.compile_unet and len(shapes) > COMPILED_SHAPES:
        yield (
            f"compile_unet=True compiles for {COMPILED_SHAPES} shapes, and the data has {len(shapes)}: later shapes "
            "run as without it. Encode with fewer aspect_ratios."
        )
