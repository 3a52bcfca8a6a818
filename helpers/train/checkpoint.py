"""Checkpoints in a run's folder: names them, finds the complete and the damaged ones, keeps the best. No PyTorch.

`checkpoint_io` saves and loads checkpoints. It is a module of its own because it imports PyTorch, which takes seconds.
In a run, Ray's own processes load this module but not `checkpoint_io`.
"""

from __future__ import annotations

import re

from .. import storage
from ..config import TrainingConfig

PROGRESS = "progress.json"  # in every checkpoint: the step, the sizes of its files and the checksums of their pieces
DAMAGED = "damaged.json"  # in a checkpoint that is not used any more: why
BEST = "best"  # in a run's folder: a copy of the checkpoint that is best by `TrainingConfig.best_by`


def checkpoint_name(step: int, attempt: int) -> str:
    """A folder name that is unique for each save: a repeated step never writes into an earlier attempt's folder."""
    return f"checkpoint-{step:09d}-{attempt:03d}"


def step_of_name(name: str) -> int:
    """The step in the name or URI of a checkpoint's folder."""
    return int(storage.name(name).split("-")[1])


def list_checkpoints(run_uri: str) -> list[str]:
    """URIs of a run's checkpoint folders, complete or not, newest step first."""
    uris = [uri for uri in storage.list_folders(run_uri) if re.fullmatch(r"checkpoint-\d{9}-\d{3}", storage.name(uri))]
    return sorted(uris, key=storage.name, reverse=True)


def find_corruption(checkpoint_uri: str) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if all files are there, in full size.

    `last_sound` also reads the bytes; it marks a damaged checkpoint with `damaged.json`, which this function then
    reports.
    """
    try:
        expected = storage.read_json(storage.join(checkpoint_uri, PROGRESS), otherwise=lambda _: {}).get("files")
    except FileNotFoundError:
        return f"it has no {PROGRESS}"
    if expected is None:
        return f"its {PROGRESS} is cut short"
    sizes = storage.sizes(checkpoint_uri)
    if DAMAGED in sizes:
        unknown = {"why": f"its {DAMAGED} is cut short"}
        return storage.read_json(storage.join(checkpoint_uri, DAMAGED), otherwise=lambda _: unknown)["why"]
    for name, size in expected.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != size:
            return f"its file {name} has {sizes[name]:,} bytes of {size:,}"
    return None


def last_complete(run_uri: str) -> str | None:
    """URI of the newest complete checkpoint; None if there is none.

    Ray Train's own list of checkpoints says what was reported, not what the storage still holds.
    """
    return next((uri for uri in list_checkpoints(run_uri) if find_corruption(uri) is None), None)


def last_sound(run_uri: str) -> tuple[str | None, list[str]]:
    """`(URI of the newest intact checkpoint or None, sentences about newer, damaged checkpoints)`.

    It reads whole checkpoints. It marks each damaged checkpoint, so that `find_corruption` reports the damage without
    reading the bytes again.
    """
    sentences = []
    while uri := last_complete(run_uri):
        from .integrity import find_damage  # loads PyTorch, and most runs begin without a checkpoint

        why = find_damage(uri, checksums(uri))
        if why is None:
            break
        storage.write_json(storage.join(uri, DAMAGED), {"why": why})
        sentences.append(f"{storage.name(uri)} cannot be used: {why}.")
    if sentences:
        sentences[-1] += f" The run resumes from {storage.name(uri)}." if uri else " The run starts over."
    return uri, sentences


def checksums(checkpoint_uri: str) -> dict[str, list]:
    """The checksums of a checkpoint's pieces (`integrity.Pieces`); {} if an older version saved it without any."""
    uri = storage.join(checkpoint_uri, PROGRESS)
    return storage.read_json(uri).get("checksums", {}) if storage.exists(uri) else {}


def step_of(checkpoint_uri: str) -> int:
    """Steps done at a checkpoint."""
    return int(storage.read_json(storage.join(checkpoint_uri, PROGRESS))["step"])


def split_step(run: str) -> tuple[str, int | None]:
    """("name", step) of "name@step"; ("name", None) of "name"."""
    name, _, step = run.rpartition("@")
    return (name, int(step)) if name and step.isdecimal() else (run, None)


def find_checkpoint(config: TrainingConfig, parameter: str) -> str:
    """URI of the checkpoint that a parameter names by "run" (the newest complete one) or by "run@step".

    The run is given by its name under `config.storage`, or by its folder. Raises ValueError if its checkpoint is
    missing or incomplete.
    """
    given = getattr(config, parameter)
    name, step = split_step(given)
    uri = name if "/" in name else storage.join(config.storage, "runs", name)
    folders = [*list_checkpoints(uri), *list_checkpoints(storage.join(uri, BEST))]
    usable = [folder for folder in reversed(folders) if find_corruption(folder) is None]
    by_step = {step_of(folder): folder for folder in usable}
    if not by_step:
        other = " and no denoiser in diffusers layout" if parameter == "init_from" else ""
        raise ValueError(f"{parameter}={given!r}: {uri} holds no complete checkpoint{other}: check the name.")
    step = max(by_step) if step is None else step
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise ValueError(f"{parameter}={given!r}: {uri} has no complete checkpoint of that step, but of {steps}.")
    return by_step[step]


def keep_as_best(run_uri: str, folder: str, name: str) -> None:
    """Copy a checkpoint to its run's `best/`, then delete the earlier best checkpoint."""
    best_uri = storage.join(run_uri, BEST)
    storage.copy_folder(folder, storage.join(best_uri, name))
    for uri in list_checkpoints(best_uri):
        if storage.name(uri) != name:
            storage.delete(uri)
