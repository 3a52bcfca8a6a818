"""Saves a checkpoint when one of the run's nodes is about to be preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic
import ray.train

from ...train.extra import Extra, Hook
from . import validated

if TYPE_CHECKING:
    from ...train.loop import Run
    from ...train.step import Unit


@validated
class Preemption(Extra):
    """Each worker asks Ray Train for a notice once in roughly `every_seconds` seconds."""

    every_seconds: pydantic.PositiveFloat = 2.0

    def __call__(self, run: Run) -> Hook:
        return Notice(run.train_step.device, self.every_seconds)


class Notice(Hook):
    """Wants a checkpoint at the first step that sees a new notice.

    All workers must ask at the same steps, so they agree on a number of steps between two requests. They choose the
    number after their first step, and again after their 20th, because the first steps are slower.
    """

    def __init__(self, device: Any, every_seconds: float):
        self.device, self.every_seconds = device, every_seconds
        self.num_steps, self.every_steps, self.step_seconds = 0, 1, 0.0
        self.answered = None  # node ids of the last notice

    def after_step(self, step: int, units: list[Unit], record: dict[str, Any]) -> None:
        self.step_seconds = record["step_seconds"]

    def wants_checkpoint(self, step: int) -> bool:
        from ... import distributed  # loads PyTorch, which the driver does not need

        self.num_steps += 1
        if self.num_steps in (1, 20):
            slowest = distributed.max_over_ranks(self.step_seconds, self.device)
            self.every_steps = max(1, round(self.every_seconds / slowest))
        if self.num_steps % self.every_steps:
            return False
        info = ray.train.get_preemption_info()
        if info is None or info.preempted_node_ids == self.answered:
            return False
        self.answered = info.preempted_node_ids
        return True
