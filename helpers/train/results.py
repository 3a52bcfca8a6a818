"""Evaluation results of a run's checkpoints: one file `validation/{step}.json` each, in the run's folder.

Keys of a file: step; validation_loss, unweighted and rows (`evaluation.validation_loss`); loss_by_noise, {timestep:
unweighted loss}; for a `validation_uri`, the same four as validation_set_loss, validation_set_unweighted,
validation_set_rows and validation_set_loss_by_noise, and validation_set_uri; prompts, the number of pictures drawn;
clip_score, cmmd, agreement and agreement_by_attribute, if they were asked for; seconds. After failures: failed, {what:
a sentence}. A checkpoint that was skipped for a newer one has step and skipped, a sentence. `unfinished` is true while
an evaluation runs; to_score, {ranks, prompts}, is there until what the trainers drew is scored
(`evaluation.at_checkpoints.OnWorkers`).
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from .. import storage
from ..config.training import TrainingConfig

HIGHER_IS_BETTER = {"clip_score", "agreement"}  # values of `best_by`; for the others, the lowest is best


def uri(run_uri: str, step: int) -> str:
    return storage.join(run_uri, "validation", f"{step:09d}.json")


def write(run_uri: str, result: dict[str, Any]) -> None:
    storage.write_json(uri(run_uri, result["step"]), result)


def of_step(run_uri: str, step: int) -> dict[str, Any]:
    """The result of a step; {"step": step} without one."""
    return storage.read_json(uri(run_uri, step)) if storage.exists(uri(run_uri, step)) else {"step": step}


def note(run_uri: str, step: int, *, skipped: str = "", failed: dict[str, str] | None = None) -> dict[str, Any]:
    """Add to a step's result that its evaluation was skipped or failed, print it, and return the result."""
    result = of_step(run_uri, step)
    for name in ("unfinished", "to_score"):
        result.pop(name, None)
    if skipped:
        result["skipped"] = skipped
    if failed:
        result["failed"] = {**result.get("failed", {}), **failed}
    write(run_uri, result)
    for sentence in sentences(result):
        print(sentence)
    return result


def sentences(result: dict[str, Any]) -> list[str]:
    """What went wrong with an evaluation, for people to read."""
    where = f"evaluation of step {result['step']}"
    failed = [f"{where}, {what} failed: {why}" for what, why in result.get("failed", {}).items()]
    return failed + ([f"{where} skipped: {result['skipped']}"] if "skipped" in result else [])


def read(run_uri: str) -> list[dict[str, Any]]:
    """All results, by step."""
    return [storage.read_json(one) for one in storage.list_files(storage.join(run_uri, "validation"), ".json")]


def scores(run_uri: str) -> pd.DataFrame:
    """The numbers of the run's evaluated checkpoints: one row per step, one column per number."""
    rows = [numbers(result) for result in read(run_uri) if "skipped" not in result]
    return pd.DataFrame(rows, columns=list(dict.fromkeys(["step", *(name for row in rows for name in row)])))


def numbers(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result; losses by noise as "loss_by_noise/{timestep}"."""
    by_noise = {name: losses for name, losses in result.items() if name.endswith("loss_by_noise")}
    flat = {f"{name}/{int(timestep):04d}": loss for name in by_noise for timestep, loss in by_noise[name].items()}
    kept = {name: value for name, value in result.items() if isinstance(value, int | float)}
    return {**kept, **flat}


def read_picture(uri: str) -> np.ndarray:
    """(H, W, 3) uint8 of a file."""
    filesystem, path = storage.open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        return np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))


def is_best(config: TrainingConfig, result: dict[str, Any]) -> bool:
    """Whether no other step of the run is better by `config.best_by`. False if the result does not have it.

    A step whose evaluation is unfinished does not count: it becomes the best when it is finished. Losses on another
    validation set, which a run may be given when it is resumed, are not compared.
    """
    value, sign = result.get(config.best_by), -1 if config.best_by in HIGHER_IS_BETTER else 1
    found = [other for other in read(config.run_uri) if "unfinished" not in other and other["step"] != result["step"]]
    if config.best_by.startswith("validation_set"):
        found = [other for other in found if other.get("validation_set_uri") == config.validation_uri]
    others = [other.get(config.best_by) for other in found]
    return value is not None and all(sign * value <= sign * other for other in others if other is not None)
