"""Checks, before a new run starts, what `continue_from` (a run's whole state) and `init_from` (weights) name. No Ray.

The module `weights` says what `init_from` takes.

`continue_from` takes a run: "name", "name@step", or the run's folder, also with a step. The new run begins at that step
with the other run's weights, optimizer and EMA. `max_steps`, the warm-up and the schedule count from the other run's
first step. Metrics begin at the next step, and their `samples_seen` counts the rows of the new run. The new run goes on
at the same position in the data if both runs have the same data and the same values of the parameters in `PLACE`. Else
it reads its own plan from that step on.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch

from .. import storage
from ..config import TrainingConfig, first_difference
from ..model import denoisers
from . import checkpoint, weights

PLACE = ("resolution", "seed", "global_batch_size", "units_per_step", "caption_shares")  # what decides a step's rows


def check_start(config: TrainingConfig, data: list[dict]) -> list[str]:
    """Sentences about what a new run cannot keep of the run that `continue_from` names; [] if there is nothing to say.

    Raises ValueError if the new run cannot start from what `continue_from` or `init_from` names. A run that already has
    a checkpoint of its own is not checked. `data`: what `setup.describe_data` returns.
    """
    if checkpoint.last_complete(config.run_uri):
        return []
    if config.continue_from:
        return check_continue_from(config, data)
    if config.init_from:
        check_init_from(config)
    return []


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
    """`continue_from` with a step, "run@step". If it has none, the step of the newest complete checkpoint is added.

    `earlier`: `continue_from` of the run that is being resumed; None for a new run. If both name the same run, the step
    of `earlier` is kept.
    """
    name, step = checkpoint.split_step(config.continue_from)
    if step is not None:
        return config.continue_from
    if earlier and checkpoint.split_step(earlier)[0] == name:
        return earlier
    return f"{name}@{checkpoint.step_of(checkpoint.find_checkpoint(config, 'continue_from'))}"


def units_to_keep(config: TrainingConfig, global_batch_size: int | None) -> int | None:
    """`units_per_step` of the run that `continue_from` names; None if its global batch has another size.

    With this value, the new run continues at the same place in the data on any number of workers.
    """
    uri = checkpoint.find_checkpoint(config, "continue_from")
    earlier = read_run(uri, f"continue_from={config.continue_from!r}")["parameters"]
    return earlier["units_per_step"] if earlier["global_batch_size"] == global_batch_size else None


def check_continue_from(config: TrainingConfig, data: list[dict]) -> list[str]:
    uri, given = checkpoint.find_checkpoint(config, "continue_from"), f"continue_from={config.continue_from!r}"
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
    folder, given = weights.find_weights(config), f"init_from={config.init_from!r}"
    if weights.is_checkpoint(folder):
        parameters = read_run(folder, given)["parameters"]
        theirs, objective = denoisers.load_denoiser_config(parameters["unet_config"]), parameters["prediction_type"]
    else:
        theirs = storage.read_json(storage.join(folder, "config.json"))
        objective = objective_of_pipeline(folder.rpartition("/")[0])
        if not weights.weight_files(folder):
            raise ValueError(
                f"{given}: {folder} holds no weights in safetensors, and .bin files are not opened, because they may "
                "run code: save the denoiser again with safe_serialization=True."
            )
    check_config(config, theirs, given)
    if not weights.is_checkpoint(folder):
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
    """Raises ValueError if weights were trained with another `prediction_type` than the config's.

    `theirs`: the weights' `prediction_type`; None: not known, and not checked. `given`, `remedy`: the beginning and the
    end of the error message.
    """
    if theirs not in (None, config.prediction_type):
        raise ValueError(
            f"{given} was trained with prediction_type={theirs!r}, not {config.prediction_type!r}: {remedy}."
        )


def check_config(config: TrainingConfig, theirs: dict[str, Any], given: str) -> None:
    """Raises ValueError if a denoiser's config sets a value that `unet_config` sets otherwise.

    A value that changes no weight's shape counts too. The default image size (`sample_size`) does not count.
    `theirs`: the denoiser's config. `given`: the beginning of the error message.
    """
    ours = denoisers.load_denoiser_config(config.unet_config)
    adapter = denoisers.ADAPTERS[ours["_class_name"]]
    arguments = list(inspect.signature(adapter.kind.__init__).parameters.items())[1:]
    defaults = {"_class_name": None} | {name: argument.default for name, argument in arguments}
    theirs, ours = ({name: values.get(name, defaults[name]) for name in defaults} for values in (theirs, ours))
    for name in defaults:
        value, own = theirs[name], ours[name]
        if name != "sample_size" and not same_setting(value, own):
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


def tensor_names(uri: str) -> set[str]:
    """The names of the tensors in a safetensors file; empty for another kind of file. Reads only the file's header."""
    filesystem, path = storage.open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        return set(json.loads(file.read(num_bytes))) if num_bytes < file.size() else set()


def check_tensors(config: TrainingConfig, folder: str, given: str) -> None:
    """Raises ValueError if weights in diffusers layout lack a tensor: it would keep random values."""
    with torch.device("meta"):
        names = denoisers.build_denoiser(config.unet_config).state_dict()
    if missing := names.keys() - set().union(*map(tensor_names, weights.weight_files(folder))):
        raise ValueError(f"{given}: the weights in {folder} lack {min(missing)}: get them again.")
