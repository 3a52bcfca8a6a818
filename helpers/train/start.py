"""What a new run starts from: another run's whole state (`continue_from`), or weights alone (`init_from`). No Ray.

`init_from` takes, at one place or another, a denoiser in safetensors:

    a run           "name" or "name@step" under `storage`, or the run's folder: its newest complete checkpoint
    a checkpoint    its folder in a run
    a pipeline      its folder, or its hub id, "org/name@revision": the pipeline's U-Net or transformer
    a denoiser      its folder, or its hub id

Weights without a variant are preferred to those in fp16. Pickles (`.bin`) are never opened.

`continue_from` takes a run: "name", "name@step", or the run's folder, also with a step. The new run begins at that step
with the other run's weights, optimizer and EMA. `max_steps`, the warm-up and the schedule count from the other run's
first step. Metrics begin at the next step, and their `samples_seen` counts the rows of the new run. The place in the
data is kept if the data and `PLACE` are the same; else the new run reads its own plan from that step on.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from .. import storage
from ..config.parameters import first_difference
from ..config.training import TrainingConfig
from ..encode import models
from ..model import denoisers
from . import checkpoint, checkpoint_io

PLACE = ("resolution", "seed", "global_batch_size", "units_per_step", "caption_shares")  # what decides a step's rows
FP16_TOO = [pattern for pattern in models.UNUSED if "fp16" not in pattern]


# ---- runs


def split_step(run: str) -> tuple[str, int | None]:
    """("name", step) of "name@step"; ("name", None) of "name"."""
    name, _, step = run.rpartition("@")
    return (name, int(step)) if name and step.isdecimal() else (run, None)


def find_checkpoint(config: TrainingConfig, parameter: str) -> str:
    """URI of the checkpoint that a parameter names by "run" (the newest complete one) or by "run@step".

    The run is one under `config.storage`, or a folder. Raises ValueError if its checkpoint is missing or incomplete.
    """
    given = getattr(config, parameter)
    name, step = split_step(given)
    uri = name if "/" in name else storage.join(config.storage, "runs", name)
    folders = [*checkpoint.list_checkpoints(uri), *checkpoint.list_checkpoints(storage.join(uri, checkpoint.BEST))]
    usable = [folder for folder in reversed(folders) if checkpoint.find_corruption(folder) is None]
    by_step = {checkpoint.step_of(folder): folder for folder in usable}
    if not by_step:
        other = " and no denoiser in diffusers layout" if parameter == "init_from" else ""
        raise ValueError(f"{parameter}={given!r}: {uri} holds no complete checkpoint{other}: check the name.")
    step = max(by_step) if step is None else step
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise ValueError(f"{parameter}={given!r}: {uri} has no complete checkpoint of that step, but of {steps}.")
    return by_step[step]


def run_of(checkpoint_uri: str) -> str:
    return checkpoint_uri.rpartition("/")[0].removesuffix(f"/{checkpoint.BEST}")


def read_run(checkpoint_uri: str, given: str) -> dict[str, Any]:
    """`config.json` of a checkpoint's run. `given`: the beginning of the error message."""
    run_uri = run_of(checkpoint_uri)
    try:
        return storage.read_json(storage.join(run_uri, "config.json"))
    except FileNotFoundError:
        raise ValueError(
            f"{given} is a checkpoint in {run_uri}, which lacks the config.json of its run: copy that file there."
        ) from None


def pin_run(config: TrainingConfig, earlier: str | None) -> str:
    """`continue_from` with its step. `earlier`: that of the run that is being resumed, whose step is kept."""
    name, step = split_step(config.continue_from)
    if step is not None:
        return config.continue_from
    if earlier and split_step(earlier)[0] == name:
        return earlier
    return f"{name}@{checkpoint.step_of(find_checkpoint(config, 'continue_from'))}"


def units_to_keep(config: TrainingConfig, global_batch_size: int | None) -> int | None:
    """`units_per_step` of the run that `continue_from` names, if its batch has the same size: its place is then kept.

    So another number of workers continues at the same place.
    """
    uri = find_checkpoint(config, "continue_from")
    earlier = read_run(uri, f"continue_from={config.continue_from!r}")["parameters"]
    return earlier["units_per_step"] if earlier["global_batch_size"] == global_batch_size else None


# ---- weights


def on_hub(model: str) -> bool:
    return "/" in model and not os.path.isabs(model) and models.is_hub_id(model)


def is_checkpoint(folder: str) -> bool:
    return storage.exists(storage.join(folder, checkpoint.PROGRESS))


def find_weights(config: TrainingConfig) -> str:
    """The folder or URI of `init_from`'s weights: a checkpoint, or a denoiser in diffusers layout.

    Weights of a hub id are first downloaded to this machine. Raises ValueError if there are none.
    """
    given, kind = config.init_from, denoisers.load_denoiser_config(config.unet_config)["_class_name"]
    if "/" not in given:
        return find_checkpoint(config, "init_from")
    if is_checkpoint(given):
        if problem := checkpoint.find_corruption(given):
            raise ValueError(f"init_from={given!r} cannot be used: {problem}.")
        return given
    component = denoisers.ADAPTERS[kind].component
    root = download(given, component) if on_hub(given) else given
    for folder in (storage.join(root, component), root):
        path = storage.join(folder, "config.json")
        if storage.exists(path) and "_class_name" in storage.read_json(path, "get it again"):  # a run has one without
            return folder
    return find_checkpoint(config, "init_from")


def download(model: str, component: str) -> str:
    """The folder of a hub id in this machine's cache, with its denoiser; in fp16 if there are no other weights."""
    files = "config.json", "diffusion_pytorch_model*", f"{component}/*", "scheduler/*"
    try:
        folder = models.model_folder(model, *files)
        if not storage.list_files(folder, ".safetensors", recursive=True):
            folder = models.model_folder(model, *files, unused=FP16_TOO)
    except ValueError as error:
        raise ValueError(f"init_from={error}") from None
    return folder


def weight_files(folder: str) -> list[str]:
    """The safetensors files of a denoiser in diffusers layout: those without a variant, else those in fp16."""
    variants = {"": [], ".fp16": []}
    for uri in storage.list_files(folder, ".safetensors"):
        if found := re.fullmatch(r"diffusion_pytorch_model(.*)\.safetensors", storage.name(uri)):
            variants.setdefault(re.sub(r"-\d+-of-\d+", "", found[1]), []).append(uri)
    return variants[""] or variants[".fp16"]


def tensor_names(uri: str) -> set[str]:
    """The names of the tensors in a safetensors file, of which only the header is read; none of another file."""
    filesystem, path = storage.open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(num_bytes))) if num_bytes < file.size() else set()


def load_initial_weights(folder: str, denoiser: torch.nn.Module, which: str = "model") -> None:
    """Load the weights that a new run starts from: of a local checkpoint, or of a denoiser in diffusers layout.

    The EMA restarts; otherwise the other run's weights would linger in it. `which`: of a checkpoint, "model" (the last
    weights) or "ema" (averaged weights).
    """
    if is_checkpoint(folder):
        checkpoint_io.load_weights(folder, denoiser, which)
        return
    weights = {}
    for path in weight_files(folder):
        weights |= load_file(path)
    weights = {name: tensor.float() for name, tensor in weights.items()}
    set_model_state_dict(denoiser, weights, options=StateDictOptions(full_state_dict=True))


# ---- checks, before anything starts


def check_start(config: TrainingConfig, data: list[dict]) -> list[str]:
    """Check `init_from` and `continue_from` of a run that has no checkpoint of its own yet.

    Returns sentences about what cannot be kept of the run that is continued. Raises ValueError if the run cannot start
    from what they name. `data`: what `setup.describe_data` returns.
    """
    if checkpoint.last_complete(config.run_uri):
        return []
    if config.continue_from:
        return check_continue_from(config, data)
    if config.init_from:
        check_init_from(config)
    return []


def check_continue_from(config: TrainingConfig, data: list[dict]) -> list[str]:
    uri, given = find_checkpoint(config, "continue_from"), f"continue_from={config.continue_from!r}"
    step, run = checkpoint.step_of(uri), read_run(uri, given)
    if config.max_steps <= step:
        raise ValueError(f"max_steps={config.max_steps} is not after step {step} of {given}: make it larger.")
    before = run["parameters"]
    check_config(config, denoisers.load_denoiser_config(before["unet_config"]), given)
    check_objective(config, before["prediction_type"], given, "continue a run of the same")
    sentences, lost = [], "is not kept, so rows may come twice in an epoch, or not at all"
    if found := first_difference(before, config.to_dict(), PLACE):
        name, earlier, value = found
        sentences.append(f"{given} had {name}={earlier!r}, not {value!r}: its place in the data {lost}.")
    elif first_difference({"data": run["data"]}, {"data": data}) or storage.exists(f"{run_of(uri)}/latents"):  # kept
        sentences.append(f"{given} was trained on other data: its place in the data {lost}.")
    if config.ema_start >= step:
        sentences.append(f"{given} is of step {step}, before ema_start={config.ema_start}: its EMA is not kept.")
    return sentences


def check_init_from(config: TrainingConfig) -> None:
    folder, given = find_weights(config), f"init_from={config.init_from!r}"
    if is_checkpoint(folder):
        parameters = read_run(folder, given)["parameters"]
        theirs, objective = denoisers.load_denoiser_config(parameters["unet_config"]), parameters["prediction_type"]
    else:
        theirs = storage.read_json(storage.join(folder, "config.json"))
        objective = objective_of_pipeline(folder.rpartition("/")[0])
        if not weight_files(folder):
            raise ValueError(
                f"{given}: {folder} holds no weights in safetensors, and .bin files are not opened, because they may "
                "run code: save the denoiser again with safe_serialization=True."
            )
    check_config(config, theirs, given)
    if not is_checkpoint(folder):
        check_tensors(config, folder, given)
    if not config.init_other_objective:
        check_objective(config, objective, given, "set init_other_objective=True to start from it nevertheless")


def objective_of_pipeline(uri: str) -> str | None:
    """The `prediction_type` that a pipeline's scheduler is for; None if there is no scheduler."""
    path = storage.join(uri, "scheduler", "scheduler_config.json")
    if not storage.exists(path):
        return None
    scheduler = storage.read_json(path, "get the pipeline again")
    found = scheduler.get("prediction_type", "epsilon")
    is_flow = "FlowMatch" in scheduler["_class_name"] or found == "flow_prediction"
    return "flow" if is_flow else found


def check_objective(config: TrainingConfig, theirs: str | None, given: str, remedy: str) -> None:
    """`given`, `remedy`: the beginning and the end of the error message."""
    if theirs not in (None, config.prediction_type):
        raise ValueError(
            f"{given} was trained with prediction_type={theirs!r}, not {config.prediction_type!r}: {remedy}."
        )


def check_config(config: TrainingConfig, theirs: dict[str, Any], given: str) -> None:
    """Raises ValueError if a denoiser's config means something else than `unet_config`, also where shapes agree."""
    ours = denoisers.load_denoiser_config(config.unet_config)
    adapter = denoisers.ADAPTERS[ours["_class_name"]]
    arguments = list(inspect.signature(adapter.kind.__init__).parameters.items())[1:]
    defaults = {"_class_name": None} | {name: argument.default for name, argument in arguments}
    theirs, ours = ({name: values.get(name, defaults[name]) for name in defaults} for values in (theirs, ours))
    names = list(defaults)
    if theirs["_class_name"] == ours["_class_name"] and adapter.spacing(theirs) == adapter.spacing(ours):
        # An export's size is that of the pictures that it draws by default.
        names = [name for name in names if name not in ("sample_size", "interpolation_scale")]
    for name in names:
        value, own = theirs[name], ours[name]
        if not same_setting(value, own):
            raise ValueError(
                f"{given} is a denoiser with {name}={value}, and unet_config={config.unet_config!r} has {own}: start "
                "from one of the same configuration, or give its config.json as unet_config."
            )


def same_setting(one: Any, other: Any) -> bool:
    """Whether two values of a config are equal; a single value stands for a list with that value for each block."""
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))
    if isinstance(one, list) == isinstance(other, list):
        return one == other
    several, single = (one, other) if isinstance(one, list) else (other, one)
    return all(value == single for value in several)


def check_tensors(config: TrainingConfig, folder: str, given: str) -> None:
    """Raises ValueError if weights in diffusers layout lack a tensor: it would keep random values."""
    with torch.device("meta"):
        names = denoisers.build_denoiser(config.unet_config).state_dict()
    if missing := names.keys() - set().union(*map(tensor_names, weight_files(folder))):
        raise ValueError(f"{given}: the weights in {folder} lack {min(missing)}: get them again.")
