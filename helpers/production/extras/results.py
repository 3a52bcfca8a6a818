"""Evaluation results of a run's checkpoints: one file `validation/{step}.json` each, in the run's folder. No PyTorch.

Keys of a file; an evaluation has those that apply to it:

- `step`: of the checkpoint.
- `validation_loss`, `unweighted`, `loss_by_noise` ({timestep: unweighted loss}), `rows`: see
  `scores.held_out_losses`.
- `validation_set_loss`, ...: the same four for a `validation_uri`, which is `validation_set_uri`.
- `prompts`: the number of images drawn.
- `clip_score`, `cmmd`, `agreement`, `agreement_by_attribute`: if they were asked for.
- `seconds`: duration of the evaluation.
- `failed`: {part of the evaluation: why it failed}; absent if nothing failed.
- `skipped`: why the checkpoint was not evaluated, for example because a newer one is evaluated instead.
- `unfinished`: true while an evaluation runs.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from ... import storage
from ...train import run_folder

HIGHER_IS_BETTER = {"clip_score", "agreement"}  # values of `best_by`; for the others, the lowest is best


def result_uri(run_uri: str, step: int) -> str:
    return storage.join(run_uri, "validation", f"{step:09d}.json")


def grid_uri(run_uri: str, step: int) -> str:
    """The first images that an evaluation drew, as one PNG."""
    return storage.join(run_uri, "evaluation", f"{step:09d}", "grid.png")


def write_result(run_uri: str, result: dict[str, Any]) -> None:
    storage.write_json(result_uri(run_uri, result["step"]), result)


def read_result(run_uri: str, step: int) -> dict[str, Any]:
    """The result of a step; {"step": step} without one."""
    uri = result_uri(run_uri, step)
    return result_in(uri) if storage.exists(uri) else {"step": step}


def result_in(uri: str) -> dict[str, Any]:
    """The result in a file; if the file is damaged, a result that says so."""

    def failed(sentence: str) -> dict[str, Any]:
        return {"step": int(storage.name(uri).removesuffix(".json")), "failed": {"reading": sentence}}

    return storage.read_json(uri, "left out", failed)


def note(run_uri: str, step: int, *, skipped: str = "", failed: dict[str, str] | None = None) -> dict[str, Any]:
    """Record in a step's result that its evaluation was skipped or failed, print it; returns the result."""
    result = read_result(run_uri, step)
    result.pop("unfinished", None)
    if skipped:
        result["skipped"] = skipped
    if failed:
        result["failed"] = {**result.get("failed", {}), **failed}
    write_result(run_uri, result)
    for sentence in sentences(result):
        print(sentence)
    return result


def sentences(result: dict[str, Any]) -> list[str]:
    """Sentences that say what went wrong with an evaluation."""
    where = f"evaluation of step {result['step']}"
    failed = [f"{where}, {what} failed: {why}" for what, why in result.get("failed", {}).items()]
    return failed + ([f"{where} skipped: {result['skipped']}"] if "skipped" in result else [])


def read_results(run_uri: str) -> list[dict[str, Any]]:
    """All results, by step."""
    return [result_in(uri) for uri in storage.list_files(storage.join(run_uri, "validation"), ".json")]


def scores(run_uri: str) -> pd.DataFrame:
    """The run's evaluated checkpoints as a frame: one row per step, one column per number."""
    rows = [numeric_values(result) for result in read_results(run_uri) if "skipped" not in result]
    return pd.DataFrame(rows, columns=list(dict.fromkeys(["step", *(name for row in rows for name in row)])))


def numeric_values(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result; losses by noise as "loss_by_noise/{timestep}"."""
    by_noise = {name: losses for name, losses in result.items() if name.endswith("loss_by_noise")}
    flat = {f"{name}/{int(timestep):04d}": loss for name in by_noise for timestep, loss in by_noise[name].items()}
    kept = {name: value for name, value in result.items() if isinstance(value, int | float)}
    return {**kept, **flat}


def read_png(uri: str) -> np.ndarray:
    """(H, W, 3) uint8 of a file."""
    return np.asarray(Image.open(io.BytesIO(storage.read_bytes(uri))).convert("RGB"))


def is_best(run_uri: str, result: dict[str, Any], best_by: str) -> bool:
    """Whether no other step of the run has a better `best_by`. False if the result has none.

    Unfinished evaluations do not count: such a step may become the best when its evaluation is finished. A resumed run
    may have another validation set; losses on different sets are not compared.
    """
    if result.get(best_by) is None:
        return False
    others = [other for other in read_results(run_uri) if "unfinished" not in other and other["step"] != result["step"]]
    if best_by.startswith("validation_set"):
        others = [other for other in others if other.get("validation_set_uri") == result["validation_set_uri"]]
    values = [other[best_by] for other in others if other.get(best_by) is not None]
    best = max if best_by in HIGHER_IS_BETTER else min
    return best([result[best_by], *values]) == result[best_by]


def keep_as_best(run_uri: str, folder: str, name: str) -> None:
    """Copy a checkpoint to its run's `best/`, then delete the earlier best checkpoint."""
    best_uri = storage.join(run_uri, run_folder.BEST)
    storage.copy_folder(folder, storage.join(best_uri, name))
    for uri in run_folder.list_checkpoints(best_uri):
        if storage.name(uri) != name:
            storage.delete(uri)


class ResultsReader:
    """Reads the results of evaluations that finish after it is created."""

    def __init__(self, run_uri: str):
        self.folder, self.seen = storage.join(run_uri, "validation"), set()
        self.read()

    def read(self) -> list[dict[str, Any]]:
        """Results of evaluations finished since the last call."""
        uris = storage.list_files(self.folder, ".json")
        found = {uri: result_in(uri) for uri in uris if uri not in self.seen}
        finished = {uri: result for uri, result in found.items() if "unfinished" not in result}
        self.seen |= finished.keys()
        return list(finished.values())
