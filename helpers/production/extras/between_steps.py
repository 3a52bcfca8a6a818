"""Evaluation at checkpoints by Ray Train's validation, with the GPU part by the trainers if no GPU is spare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...config import TrainingConfig
from ...train.extra import Extra, Hook
from . import evaluate

if TYPE_CHECKING:
    from ...train.loop import Run


@dataclasses.dataclass(frozen=True)
class BetweenSteps(Extra):
    prompts: list[str] | None = None
    agreement: Callable | None = None

    def __call__(self, run: Run) -> Hook:
        from .at_checkpoints import OnWorkers

        return Validation(run, OnWorkers(self.prompts))

    def trainer_options(self, config: TrainingConfig) -> dict[str, Any]:
        return {"validation_config": evaluate.validation_config(config, self.prompts, self.agreement)}


class Validation(Hook):
    def __init__(self, run: Run, evaluate: Callable):
        self.run, self.evaluate = run, evaluate

    def before_checkpoint(self, step: int) -> dict[str, Any]:
        return {"validation": self.prepare(step)}

    def prepare(self, step: int) -> bool:
        """Whether Ray Train validates the checkpoint of a step; runs `evaluate` first if no GPU is spare.

        Ray Train's validation is a task beside the training. If no GPU is spare, the task would start when training
        ends, and all checkpoints would be kept until then. So this method runs the GPU part (`evaluate`) on the
        workers, and the task does the rest. The last checkpoint is left to the task, because the trainers' GPUs are
        free by then.
        """
        config, train_step = self.run.config, self.run.train_step
        if not config.validates_at(step):
            return False
        if step == config.max_steps or has_spare_gpu(train_step.device, config.training_accelerator_type):
            return True
        with train_step.averaged() as denoiser:
            self.evaluate(denoiser, config, step)
        return True


def has_spare_gpu(device: Any, accelerator_type: str | None = None) -> bool:
    """Whether a GPU of the trainers' kind is idle; True if the trainers run on CPUs. Call it on all ranks."""
    import ray
    import ray.train.collective
    from ray.autoscaler.v2.sdk import get_cluster_status

    from ... import distributed

    spare = device.type != "cuda"
    if distributed.rank() == 0 and not spare:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        free = [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]
        of_kind = [node for node in free if accelerator_type is None or f"accelerator_type:{accelerator_type}" in node]
        spare = any(node.get("GPU", 0) >= 1 for node in of_kind)
    return ray.train.collective.broadcast_from_rank_zero(spare)
