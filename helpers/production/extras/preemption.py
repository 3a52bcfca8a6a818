"""Saves a checkpoint when one of the run's nodes is about to be preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray.train
import ray.train.collective

from ...config import Amount, Positive
from ...train.extra import Extra, Hook
from . import validated

if TYPE_CHECKING:
    from ...config import TrainingConfig
    from ...train.loop import Run
    from ...train.step import Unit


@validated
class Preemption(Extra):
    """Each worker asks Ray Train for a notice once in roughly `every_seconds` seconds.

    At the announced end of a node, Ray Train ends the workers of the other nodes too. `grace_seconds` lets them finish
    an upload that takes longer than the notice. Without an upload under way it only delays the restart, so it is 0 by
    default: the part of one worker takes seconds, and a notice comes two minutes before the end.

    Ray Train's `relax_collectives_on_preemption` stays off. It would let the other workers report a checkpoint without
    the lost one, and no checkpoint here is complete without the part of each worker, under "ddp" too.
    """

    every_seconds: Positive = 2.0
    grace_seconds: Amount = 0.0

    def __call__(self, run: Run) -> Hook:
        return Notice(self.every_seconds)

    def trainer_options(self, config: TrainingConfig) -> dict[str, Any]:
        return {"failure_config": {"preemption_grace_s": self.grace_seconds}}


class Notice(Hook):
    """Wants a checkpoint at the first step that sees a new notice.

    All workers must ask at the same steps, so they agree on a number of steps between two requests. Rank 0 chooses the
    number after the first step, and again after the 20th, because the first steps are slower.
    """

    def __init__(self, every_seconds: float):
        self.every_seconds = every_seconds
        self.num_steps, self.every_steps, self.step_seconds = 0, 1, 0.0
        self.answered = None  # node ids of the last notice

    def after_step(self, step: int, units: list[Unit], record: dict[str, Any]) -> None:
        self.step_seconds = record["step_seconds"]

    def wants_checkpoint(self, step: int) -> bool:
        self.num_steps += 1
        if self.num_steps in (1, 20):
            chosen = max(1, round(self.every_seconds / self.step_seconds))
            self.every_steps = ray.train.collective.broadcast_from_rank_zero(chosen)
        if self.num_steps % self.every_steps:
            return False
        info = ray.train.get_preemption_info()
        if info is None or info.preempted_node_ids == self.answered:
            return False
        self.answered = info.preempted_node_ids
        return True
