"""Joins the training loop by `train.extra.Extra`: a notebook lists its extras, a job changes them by name.

`watchdog`: a worker that hangs. `preemption`: a node whose end is announced. `sick_devices`: a GPU that gives wrong
results. `evaluate`, `scores`: losses, images and scores of checkpoints. `trackers`, `meter`: what a run shows.
`repa`: a loss that aligns the denoiser with an image encoder.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pydantic
import ray.train

from ...config import TrainingConfig
from ...train.extra import Extra
from .failures import RecordFailures

# All extras of the three notebooks: a profile serves all, and names those that its notebook does not list too.
NAMES = ("watchdog", "preemption", "sick_devices", "meter", "evaluate", "trackers", "exclusions", "repa")

# A class of settings whose values are checked when it is built.
validated = functools.partial(
    pydantic.dataclasses.dataclass,
    frozen=True,
    config=pydantic.ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True),
)


def choose(listed: dict[str, Any], changes: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """The extras of a run by name: those that the notebook lists, in its order, with a job's changes.

    Args:
        listed: {name: extra}.
        changes: {name: arguments to change, or None to leave the extra out}: the parameter `extras`.

    Raises ValueError for a name, an argument or a value that is not known.
    """
    if not isinstance(changes, dict):
        raise ValueError(f"extras={changes!r} must map names to arguments, such as {{'watchdog': {{'timeout': 60}}}}.")
    for name, arguments in changes.items():
        if name not in NAMES:
            raise ValueError(f"extras={name!r} is unknown: choose from {', '.join(NAMES)}.")
        if not isinstance(arguments, dict | None):
            raise ValueError(f"extras: {name}={arguments!r} must map arguments to values, or be None to leave it out.")
    chosen = {name: change(name, extra, changes.get(name, {})) for name, extra in listed.items()}
    return {name: extra for name, extra in chosen.items() if extra is not None}


def change(name: str, extra: Any, arguments: dict[str, Any] | None) -> Any:
    """The extra with other arguments; None without any. Raises ValueError for an argument that does not exist."""
    if arguments is None:
        return None
    known = [field.name for field in dataclasses.fields(extra)]
    for argument, value in arguments.items():
        if argument not in known:
            raise ValueError(f"extras: {name} has no {argument!r}: choose from {', '.join(known) or 'none'}.")
        try:
            extra = dataclasses.replace(extra, **{argument: value})
        except pydantic.ValidationError as error:
            why = error.errors()[0]["msg"]
            raise ValueError(f"extras: {name} with {argument}={value!r} cannot be used ({why}): change it.") from None
    return extra


def trainer_options(
    extras: dict[str, Extra], config: TrainingConfig, run_config: ray.train.RunConfig
) -> dict[str, Any]:
    """Arguments of `TorchTrainer`: `run_config` with the callbacks of all extras, `validation_config` if one has it.

    An extra's "failure_config" changes values of the `run_config`'s own. Lost workers and checkpoints are recorded in
    any case.
    """
    options = [extra.trainer_options(config) for extra in extras.values()]
    callbacks = [callback for option in options for callback in option.pop("callbacks", [])]
    for name, value in (item for option in options for item in option.pop("failure_config", {}).items()):
        setattr(run_config.failure_config, name, value)
    run_config.callbacks = [*run_config.callbacks, RecordFailures(config.run_uri), *callbacks]
    return {"run_config": run_config, **{name: value for option in options for name, value in option.items()}}
