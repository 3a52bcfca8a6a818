"""Evaluation of a run's checkpoints: held-out losses, images of prompts, and their scores.

With a spare GPU, or on CPUs, Ray Train's validation evaluates a checkpoint in a task beside the training. Otherwise the
trainers compute the held-out losses between two steps. Images and scores then follow for the last checkpoint, when the
trainers' GPUs are free.

Without PyTorch: Ray Train's controller and the process of `validate` load this module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import ray
import ray.train
import ray.train.collective
from ray.autoscaler.v2.sdk import get_cluster_status

from ... import cluster, storage
from ...config import Count, Location, Model, Real, TrainingConfig
from ...train import run_folder
from ...train.extra import Extra, Hook
from . import results, validated

if TYPE_CHECKING:
    import torch

    from ...train.loop import Run

TIMEOUT = 3600  # seconds after which an evaluation is abandoned
Loss = Literal["validation_loss", "unweighted", "validation_set_loss", "validation_set_unweighted"]


@validated
class Evaluate(Extra):
    """Evaluates checkpoints; the best one is kept in the run's `best/`.

    Args:
        every: steps between evaluations; each saves a checkpoint. The last checkpoint is always evaluated.
        prompts: texts to draw, or a text file with one a line; None: captions of held-out rows.
        guidance_scale, sampling_steps, sampler: see `sample.sample`.
        clip_model: CLIP for scores: "tiny-clip" (in helpers), a folder or a hub id; None: no scores by CLIP.
        best_by: the score of the best checkpoint.
        validation_uri: a second validation set, encoded; its losses are "validation_set_loss" and so on.
        agreement: `agreement(images, prompts)` returns the share of images that show what their prompt says, as "all"
            and by attribute, for data whose images a program can judge. None: not measured.
    """

    every: Count = 500
    prompts: list[str] | str | None = None
    guidance_scale: Annotated[Real, pydantic.Field(ge=1)] = 2.0
    sampling_steps: Count = 20
    sampler: Literal["auto", "ddim", "dpm++", "euler", "unipc"] = "auto"
    clip_model: Model | None = "tiny-clip"
    best_by: Loss | Literal["clip_score", "cmmd", "agreement"] = "validation_loss"
    validation_uri: Location = ""
    agreement: Callable[..., dict[str, float]] | None = None

    def __call__(self, run: Run) -> Hook:
        return LossesBetweenSteps(self, run)

    def trainer_options(self, config: TrainingConfig) -> dict[str, Any]:
        """`validation_config`. Raises ValueError for arguments that do not go together, or not with the data."""
        from .scores import settle

        fn = functools.partial(validate, evaluate=settle(self, config), config=config)
        # `validate` only waits. Ray restarts it if its process is lost; otherwise Ray Train would end the run.
        options = {"num_cpus": 0, "max_retries": -1}
        return {"validation_config": ray.train.ValidationConfig(fn, ray_remote_kwargs=options)}

    def is_due(self, step: int, max_steps: int) -> bool:
        return step % self.every == 0 or step == max_steps


# ---- by the trainers


@dataclasses.dataclass
class LossesBetweenSteps(Hook):
    """Asks Ray Train to evaluate the checkpoints that are due; computes their held-out losses if no GPU is spare.

    Ray Train's task would otherwise start when training ends, and all checkpoints would be kept until then.
    """

    evaluate: Evaluate
    run: Run

    def wants_checkpoint(self, step: int) -> bool:
        return self.evaluate.is_due(step, self.run.config.max_steps)

    def before_checkpoint(self, step: int) -> dict[str, Any]:
        config, train_step = self.run.config, self.run.train_step
        if not self.evaluate.is_due(step, config.max_steps):
            return {}
        if step == config.max_steps or has_spare_gpu(train_step.device, config.training_accelerator_type):
            return {"validation": True}
        from .scores import losses

        with train_step.averaged() as denoiser:
            losses(denoiser, train_step.manifest, config, self.evaluate.validation_uri, step)
        return {"validation": ray.train.ValidationTaskConfig(fn_kwargs={"has_losses": True})}


def has_spare_gpu(device: torch.device, accelerator_type: str | None = None) -> bool:
    """Whether a GPU of the trainers' kind is idle; True if the trainers run on CPUs. Call it on all ranks."""
    spare = device.type != "cuda"
    if ray.train.get_context().get_world_rank() == 0 and not spare:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        free = [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]
        of_kind = [node for node in free if accelerator_type is None or f"accelerator_type:{accelerator_type}" in node]
        spare = any(node.get("GPU", 0) >= 1 for node in of_kind)
    return ray.train.collective.broadcast_from_rank_zero(spare)


# ---- beside the training


def validate(
    saved: ray.train.Checkpoint, evaluate: Evaluate, config: TrainingConfig, has_losses: bool = False
) -> dict[str, Any]:
    """Ray Train's validation function: has a checkpoint evaluated, and returns the result as its metrics.

    Ray Train ends a run whose validation is killed or runs out of memory. So this function only waits for another task,
    which does the work. An evaluation that fails, is killed or takes longer than `TIMEOUT` is recorded as failed, and
    the run continues. The newest checkpoint is evaluated first; older ones are recorded as skipped.

    `has_losses`: the trainers have computed the losses, and only the best checkpoint is to be kept.
    """
    run_uri, step = config.run_uri, run_folder.step_of_name(saved.path)
    lost = isinstance(saved, run_folder.LostCheckpoint)
    if has_losses:
        result, uri = results.read_result(run_uri, step), storage.join(run_uri, storage.name(saved.path))
        if not lost and run_folder.find_corruption(uri) is None and results.is_best(run_uri, result, evaluate.best_by):
            results.keep_as_best(run_uri, uri, storage.name(uri))
        return result
    if lost:
        return results.note(run_uri, step, skipped="its checkpoint could not be uploaded")
    if (newest := newest_due(evaluate, run_uri, config.max_steps)) > step:
        skipped = f"the checkpoint of step {newest} is newer and is evaluated instead"
        return results.note(run_uri, step, skipped=skipped)
    options = {"num_cpus": 1, "max_retries": 0}
    if config.use_gpu:  # a GPU's memory is freed when the task's process ends, after one call
        options |= {"num_gpus": 1, "max_calls": 1, "accelerator_type": config.training_accelerator_type}
    working = ray.remote(**options)(evaluate_here).remote(saved, evaluate, config)
    try:
        return ray.get(working, timeout=TIMEOUT)
    except ray.exceptions.TaskCancelledError:  # the run was ended: Ray Train validates when it is resumed
        raise
    except ray.exceptions.GetTimeoutError:
        ray.cancel(working, force=True)
        reason = f"it took longer than {TIMEOUT:,} s"
    except ray.exceptions.RayError as error:
        reason = cluster.summarize_error(str(error))
    return results.note(run_uri, step, failed={"evaluation": reason})


def newest_due(evaluate: Evaluate, run_uri: str, max_steps: int) -> int:
    """The step of the run's newest complete checkpoint that is due for evaluation; 0 without one."""
    for uri in run_folder.list_checkpoints(run_uri):
        step = run_folder.step_of_name(uri)
        if evaluate.is_due(step, max_steps) and run_folder.find_corruption(uri) is None:
            return step
    return 0


def evaluate_here(saved: ray.train.Checkpoint, evaluate: Evaluate, config: TrainingConfig) -> dict[str, Any]:
    """`scores.evaluate_checkpoint`, in a task that alone loads the models' code."""
    from .scores import evaluate_checkpoint

    return evaluate_checkpoint(saved, evaluate, config)
