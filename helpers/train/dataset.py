"""Chooses the checkpoint from which a run resumes, and makes the run's blocks from that step on.

A process of Ray Train's own calls these functions. It loads PyTorch only if there is a checkpoint to check, or if
images are encoded while the run trains.
"""

from __future__ import annotations

from collections.abc import Callable

import ray.data

from .. import storage
from ..config import TrainingConfig
from ..latents.manifest import DataSets
from ..latents.plan import Plan, load_plan
from ..latents.read import join_blocks
from . import checkpoint, faults

RESUME = "resume.json"  # in a run's folder: where the current group of workers resumes
Stream = Callable[[Plan, int, int], ray.data.Dataset]  # a plan, first step, end step -> its blocks


def choose_resume_point(config: TrainingConfig) -> dict:
    """Choose the newest sound checkpoint (`checkpoint.last_sound`) and write the choice to the run's `resume.json`.

    Without one, a run begins at the checkpoint of `continue_from`. Returns {"checkpoint": URI, "step": steps done}; the
    URI is None if the run starts from step 0. Damaged checkpoints are noted as failures. Called once for each group of
    workers: when the group's dataset is built, or by rank 0 if the group has no dataset. A worker of the previous group
    may complete a checkpoint's upload after the choice. The new group ignores that checkpoint.
    """
    uri, sentences = checkpoint.last_sound(config.run_uri)
    for sentence in sentences:
        faults.write_failure(config.run_uri, sentence)
    if uri is None and config.continue_from:
        uri = checkpoint.find_checkpoint(config, "continue_from")
    point = {"checkpoint": uri, "step": 0 if uri is None else checkpoint.step_of(uri)}
    storage.write_json(storage.join(config.run_uri, RESUME), point)
    return point


def from_resume_point(
    config: TrainingConfig, data: DataSets, stream: Stream, first_step: int, end_step: int
) -> ray.data.Dataset:
    """The blocks of a run from the step at which it resumes; the arguments are those of `sources.StepSource`.

    Ray Train calls it for each group of workers, before the group starts. So the checkpoint is chosen here, and the
    workers read the choice (`StepSource.resume_point`). Raises RuntimeError if the run would resume before
    `first_step`.
    """
    step = choose_resume_point(config)["step"]
    if step < first_step:
        raise RuntimeError(
            f"The checkpoints of run_name={config.run_name!r} after step {first_step} are damaged: it resumes at step "
            f"{step}, whose images are encoded on the way: run it again."
        )
    plan = load_plan(data, config)
    return join_blocks(stream(plan, step - first_step, end_step - first_step), plan, data.row_bytes)
