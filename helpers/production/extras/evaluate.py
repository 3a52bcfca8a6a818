"""Validation beside the training: the Ray tasks in which checkpoints are evaluated, one at a time.

Ray Train ends a run whose validation is killed or runs out of memory, so `validate` only waits for another task, which
does the work, and records its outcome. Its process, and Ray Train's controller, load this module, and not PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ray
import ray.train

from ... import cluster
from ...config import TrainingConfig
from ...latents import held_out
from ...train import checkpoint, faults
from . import results
from .settings import Agreement, Evaluation


def validation_config(
    config: TrainingConfig,
    prompts: list[str] | None = None,
    agreement: Agreement | None = None,
    **options,
) -> ray.train.ValidationConfig:
    """The `validation_config` argument of `TorchTrainer`.

    Args:
        config, agreement: see `Evaluation`.
        prompts: used if `config.prompts` is None; None: captions of held-out rows.
        options: `where`, `timeout_s` and `work`, as for `validate`.

    Raises ValueError for prompts that cannot be used, and for `best_by="agreement"` without `agreement`.
    """
    if config.validate_every:
        from .at_checkpoints import resolve_prompts

        prompts = resolve_prompts(config, prompts)
        held_out.of_run(
            config.run_uri, config.proportions, config.largest_resolution
        )  # the trainers then find them: a large data set's list of files takes gigabytes
    if config.best_by == "agreement" and agreement is None:
        raise ValueError(
            "best_by='agreement' needs an agreement function, which this data does not have: choose another best_by."
        )
    fn = functools.partial(validate, evaluation=Evaluation(config, prompts, agreement), **options)
    # `validate` only waits. Ray restarts it if its process is lost; otherwise Ray Train would end the run.
    return ray.train.ValidationConfig(fn, ray_remote_kwargs={"num_cpus": 0, "max_retries": -1})


def validate(
    saved: ray.train.Checkpoint,
    evaluation: Evaluation,
    *,
    work: Callable[[ray.train.Checkpoint, Evaluation], dict[str, Any]] | None = None,
    where: dict[str, Any] | None = None,
    timeout_s: float = 3600,
) -> dict[str, Any]:
    """Ray Train's validation function: has a checkpoint evaluated, and returns the results as its metrics.

    The newest checkpoint is evaluated first; older ones are recorded as skipped. A checkpoint whose images the trainers
    have drawn is always scored. An evaluation that fails, is killed or takes longer than `timeout_s` is recorded as
    failed, and the run continues.

    Args:
        saved: the checkpoint.
        evaluation: how it is evaluated.
        work: your own function in place of `at_checkpoints.evaluate_checkpoint`, with the same arguments.
        where: options of the Ray task, to place it on separate machines, such as {"accelerator_type": "A10G"} or
            {"resources": {"evaluation": 1}}. By default it takes a CPU and, with `use_gpu`, a GPU of the trainers'
            kind. A task that only scores takes a CPU anywhere.
        timeout_s: seconds after which an evaluation is abandoned.
    """
    config, step = evaluation.config, checkpoint.step_of_name(saved.path)
    options = {"num_cpus": 1, "max_retries": 0}
    if "to_score" in results.read_result(config.run_uri, step):
        return run_task(score_here, saved, evaluation, options, timeout_s)
    if isinstance(saved, faults.LostCheckpoint):
        return results.note(config.run_uri, step, skipped="its checkpoint could not be uploaded")
    if (newest := newest_due(config)) > step:
        skipped = f"the checkpoint of step {newest} is newer and is evaluated instead"
        return results.note(config.run_uri, step, skipped=skipped)
    if config.use_gpu:  # a GPU's memory is freed when the task's process ends, after one call
        options |= {"num_gpus": 1, "max_calls": 1, "accelerator_type": config.training_accelerator_type}
    return run_task(work or evaluate_here, saved, evaluation, options | (where or {}), timeout_s)


def run_task(
    work: Callable[[ray.train.Checkpoint, Evaluation], dict[str, Any]],
    saved: ray.train.Checkpoint,
    evaluation: Evaluation,
    options: dict[str, Any],
    timeout_s: float,
) -> dict[str, Any]:
    """What `work` returns, called in a Ray task; if the task fails, the step's result with the reason."""
    working = ray.remote(**options)(work).remote(saved, evaluation)
    try:
        return ray.get(working, timeout=timeout_s)
    except ray.exceptions.TaskCancelledError:  # the run was ended: Ray Train validates when it is resumed
        raise
    except ray.exceptions.GetTimeoutError:
        ray.cancel(working, force=True)
        reason = f"it took longer than {timeout_s:,.0f} s"
    except ray.exceptions.RayError as error:
        reason = cluster.summarize_error(str(error))
    return results.note(evaluation.config.run_uri, checkpoint.step_of_name(saved.path), failed={"evaluation": reason})


def newest_due(config: TrainingConfig) -> int:
    """The step of the run's newest complete checkpoint that is due for evaluation; 0 without one."""
    for uri in checkpoint.list_checkpoints(config.run_uri):
        step = checkpoint.step_of_name(uri)
        if config.validates_at(step) and checkpoint.find_corruption(uri) is None:
            return step
    return 0


def evaluate_here(saved: ray.train.Checkpoint, evaluation: Evaluation) -> dict[str, Any]:
    """`at_checkpoints.evaluate_checkpoint`, in a task that alone loads the models' code."""
    from .at_checkpoints import evaluate_checkpoint

    return evaluate_checkpoint(saved, evaluation)


def score_here(saved: ray.train.Checkpoint, evaluation: Evaluation) -> dict[str, Any]:
    """`at_checkpoints.score_checkpoint`, in such a task."""
    from .at_checkpoints import score_checkpoint

    return score_checkpoint(saved, evaluation)
