"""What keeps Ray Data from taking cores and memory from a trainer: callbacks of its scheduling loop, an early start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.data

LOCAL_RAY = "PRETRAIN_LOCAL_RAY"  # set in the workers of a Ray on this machine (`runtime.session.connect`)


class ExecutionCallback:
    """Ray Data's execution callbacks; none does anything."""

    def do_nothing(self, executor: Any, error: Exception | None = None) -> None:
        pass

    before_execution_starts = on_execution_step = after_execution_succeeds = after_execution_fails = do_nothing


class SchedulerThrottle(ExecutionCallback):
    """Pauses Ray Data's scheduling loop while it is backpressured: it would busy-wait on tasks whose output must wait.

    On a machine that also trains, that would take a core from the trainer. Steps that return at once, because they
    wait for no task, double the pause up to 50 ms; others halve it.
    """

    def __init__(self):
        self.pause, self.resumed = 0.0, 0.0

    def on_execution_step(self, executor: Any) -> None:
        busy_waiting = time.perf_counter() - self.resumed < 0.01
        self.pause = min(0.05, 2 * self.pause + 0.001) if busy_waiting else self.pause / 2
        time.sleep(self.pause)
        self.resumed = time.perf_counter()


class BlockStatsCleaner(ExecutionCallback):
    """Every `STEPS` steps, drops the statistics that Ray Data keeps of each block for `Dataset.stats()`.

    They take some kilobytes a block, and a run of Stable Diffusion's size has tens of millions of blocks.
    """

    STEPS = 100  # of the scheduling loop; each takes a tenth of a second at most

    def __init__(self):
        self.steps = 0

    def on_execution_step(self, executor: Any) -> None:
        self.steps += 1
        stats = executor.get_stats() if self.steps % self.STEPS == 0 else None
        while stats:
            for blocks in stats.metadata.values():
                blocks.clear()
            stats = next(iter(stats.parents), None)


def restrain(context: ray.data.DataContext) -> None:
    """Give a dataset's scheduling loop the callbacks above; the throttle only if trainers share this machine."""
    throttle = [SchedulerThrottle] if LOCAL_RAY in os.environ else []
    context.custom_execution_callback_classes = [BlockStatsCleaner, *throttle]


def start_processes(function: Callable, *arguments: Any) -> None:
    """Run a function in two processes of a Ray on this machine, so that they are started before they are needed.

    Their imports take seconds, which pass while the trainer starts. On a cluster, nothing is done.
    """
    if LOCAL_RAY in os.environ:
        for _ in range(2):
            ray.remote(function).remote(*arguments)
