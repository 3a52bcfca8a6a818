"""The training function of a Ray Train worker: one screen. Extras join it by their hooks (`extra`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ray
import ray.train
import ray.train.torch

from .. import distributed, storage
from . import checkpoint, run_folder
from .extra import Extra
from .metrics import StepLog
from .step import TrainStep, Unit, choose_kernels

if TYPE_CHECKING:
    from ..config import TrainingConfig
    from ..latents.manifest import Manifest


class Source(Protocol):
    """Where the steps of a run come from: `source.StepSource`, or your own data."""

    end_step: int  # the run's last step

    def start(self) -> Manifest:
        """What the data is. Called first, so that slow beginnings run while the model is built."""

    def resume_point(self) -> dict[str, Any]:
        """{"checkpoint": its URI or None, "step": steps done}: what the workers load; called on rank 0.

        It is chosen once for each group of workers, by `run_folder.choose_resume_point(run_uri)`.
        """

    def steps(self, step: int) -> Iterator[tuple[list[Unit], float]]:
        """Yield `(this worker's units, seconds that it waited for data)` for each step from `step` on."""

    def write_rejects(self, step: int) -> None:
        """Called before each checkpoint: keep what will not be asked for again."""


def train_loop_per_worker(config: TrainingConfig, source: Source, extras: Sequence[Extra] = ()) -> None:
    """What each training worker runs: restore the checkpoint, then one step after another until the source ends.

    Args:
        config: of the run.
        source: of the steps.
        extras: what else happens, in this order.
    """
    manifest = source.start()
    # Kernels and cores come before the first matrix product, which fixes cuBLAS's workspace.
    distributed.use_cores(ray.train.get_context().get_local_world_size(), online=bool(manifest.online))
    choose_kernels(config.attention, config.deterministic)
    device = ray.train.torch.get_device()
    for extra in extras:
        if reason := extra.check(config.run_uri, device):
            return print(reason)
    auxiliary = [loss for extra in extras for loss in extra.auxiliary_losses(config, manifest)]
    train_step = TrainStep(config, manifest, device, auxiliary=auxiliary)
    step = checkpoint.restore(train_step, source.resume_point)
    run = Run(train_step)
    with contextlib.ExitStack() as stack:
        hooks = [stack.enter_context(extra(run)) for extra in extras]
        for units, waited in source.steps(step):
            for hook in hooks:
                hook.before_step(step, units)
            record = run.take_step(step, units, waited)
            if record is None:
                break
            step += 1
            for hook in hooks:
                hook.after_step(step, units, record)
            run.log.write(step, record, units)
            is_due = step % config.checkpoint_every == 0 or step == source.end_step
            if any([is_due, *[hook.wants_checkpoint(step) for hook in hooks]]):
                with run.log.pause():
                    source.write_rejects(step)
                    reports = [hook.before_checkpoint(step) for hook in hooks]
                    run.saver.save(step, reports)
    run.finish(complete=step == source.end_step)


class Run:
    """A worker's part of a run, as hooks see it.

    Attributes:
        train_step: the denoiser, its optimizer and its EMA.
        config: of the run.
        log: writes the metrics.
        saver: saves checkpoints.
    """

    def __init__(self, train_step: TrainStep):
        self.train_step, self.config = train_step, train_step.config
        self.log = StepLog(self.config.run_uri, self.config.global_batch_size)
        self.saver = checkpoint.Saver(train_step, self.config.run_uri, self.log.file)
        write_worker_info(self.config.run_uri, self.log)

    def take_step(self, step: int, units: list[Unit], waited: float) -> dict[str, Any] | None:
        """The step's line of metrics. None if the loss is not finite: the run has ended.

        All workers then return, and the driver raises (`run_folder.raise_end`). If one raised here, Ray Train would
        restart all, to fail at the same step.
        """
        try:
            return self.log.measure(self.train_step.step(step, units), units, waited)
        except FloatingPointError as error:
            if distributed.rank() == 0:
                run_folder.end_run(self.config.run_uri, str(error))
            return None

    def finish(self, complete: bool) -> None:
        """Wait until everything is written.

        `complete`: whether all steps are done. Raises RuntimeError if the run's last checkpoint was lost: Ray Train
        then starts the workers again.
        """
        self.log.finish()
        self.saver.wait()
        if self.saver.lost and complete:
            raise RuntimeError(self.saver.lost)


def write_worker_info(run_uri: str, log: StepLog) -> None:
    """Rank 0 writes `workers.json`: rank, node and process of each worker of this attempt. Call it on all ranks."""
    node_id = ray.get_runtime_context().get_node_id()
    worker = {"rank": distributed.rank(), "node_id": node_id, "pid": os.getpid()}
    if workers := distributed.gather_objects(worker, log.group):
        storage.write_json(storage.join(run_uri, "workers.json"), {"attempt": log.file.attempt, "workers": workers})
