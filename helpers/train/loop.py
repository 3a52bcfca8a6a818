"""The training function of a Ray Train worker, with its data, checkpoints, metrics and faults."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ray.train
import ray.train.collective
import ray.train.torch

from .. import distributed, storage
from ..config.training import TrainingConfig
from . import checkpoint, faults
from .meter import Meter
from .metrics import MetricsLog
from .resume import CheckpointManager, restore
from .sources import Rejects, StepSource
from .step import TrainStep, Unit, choose_kernels


def train_loop_per_worker(
    config: TrainingConfig, source: StepSource | None = None, evaluate: Callable | None = None
) -> None:
    """What each training worker runs: restore the checkpoint, then one step after another until the source ends.

    Args:
        config: of the run.
        source: of the steps; None: stored latents, `StepSource(config)`.
        evaluate: `evaluate(denoiser, config, step)`, with the averaged weights, on all workers between two steps,
            what Ray Train's validation needs where no GPU is left for it (`evaluation.at_checkpoints.OnWorkers`).
            None: such checkpoints are not evaluated.
    """
    source = source or StepSource(config)
    source.start()
    manifest = source.data.first
    device = ray.train.torch.get_device()
    distributed.use_cores(ray.train.get_context().get_local_world_size(), online=bool(manifest.online))

    choose_kernels(config)  # before the first matrix product, which fixes cuBLAS's workspace
    if faults.end_if_sick(config, device):
        return
    train_step = TrainStep(config, manifest, device)
    step = restore(train_step, source.resume_point)
    log = MetricsLog(config.run_uri) if distributed.rank() == 0 else None
    meter = Meter(config, manifest, device)
    writer = MetricsWriter(log)
    checkpoints = CheckpointManager(train_step, log, evaluate)
    rejects = Rejects(config)
    preemption = faults.PreemptionNotice(device)
    write_worker_info(config, log)

    compiled_for = set()  # the columns of latents: the denoiser is compiled for each shape
    record_hang = functools.partial(faults.record_hang, config.run_uri)
    with faults.Watchdog(config.hang_timeout, record_hang) as watchdog:
        started, checkpoint_seconds = time.perf_counter(), 0.0
        for units, data_seconds in source.steps(step, rejects):
            latents = units[0].latents_spec
            if latents not in compiled_for:
                watchdog.beat(slow=True)
                compiled_for.add(latents)
            try:
                with meter.watch():
                    metrics = train_step.step(step, units)
            except FloatingPointError as error:
                # Ray Train would start the workers again, to fail at the same step. They return; the driver raises.
                if log:
                    faults.end_run(config.run_uri, str(error))
                break
            step += 1
            num_kept, seconds = metrics.pop("num_kept"), time.perf_counter() - started
            speed = meter.step_record(latents, seconds, data_seconds, checkpoint_seconds, num_kept)
            writer.write(step, metrics, units, num_kept, speed)
            watchdog.beat()
            checkpoint_seconds = 0.0
            if step % config.checkpoint_every == 0 or step == source.end_step or preemption.arrived(seconds):
                watchdog.beat(slow=True)  # the upload before this one may not be finished
                rejects.write(step)
                writer.wait()
                checkpoint_seconds = checkpoints.save(step)
                watchdog.beat()
            started = time.perf_counter()
        writer.wait()
        if log:
            storage.retry(log.flush)
    checkpoints.uploaded.wait()
    if checkpoints.lost and step == source.end_step:  # no other one holds what the run was to reach: start again
        raise RuntimeError(checkpoints.lost)


class MetricsWriter:
    """Gathers the ids of each global batch on rank 0 and writes the step's metrics, in a thread, during the next step.

    One line at a time, because a worker that dies would take the lines that are not yet written with it. `log`: rank
    0's; None on the other ranks.
    """

    def __init__(self, log: MetricsLog | None):
        self.log, self.group, self.pool = log, checkpoint.cpu_group(), ThreadPoolExecutor(1)
        self.written = None  # the last line's Future

    def write(self, step: int, metrics: dict, units: list[Unit], num_kept: int, speed: dict) -> None:
        """Call it on all ranks, with this rank's units."""
        self.wait()
        ids = [i for unit in units for i in unit.ids]
        self.written = self.pool.submit(self.gather_and_write, step, metrics, ids, num_kept, speed)

    def gather_and_write(self, step: int, metrics: dict, ids: list, num_kept: int, speed: dict) -> None:
        ranks = distributed.gather_objects(ids, self.group)
        if ranks:
            self.log.write(step, metrics, itertools.chain.from_iterable(ranks), num_kept, **speed)

    def wait(self) -> None:
        """Until the last line is written; raises what writing it raised."""
        if self.written:
            self.written.result()


def write_worker_info(config: TrainingConfig, log: MetricsLog | None) -> None:
    """Rank 0 writes `workers.json`: rank, node and process of each worker of this attempt. Call it on all ranks."""
    node_id = ray.get_runtime_context().get_node_id()
    workers = distributed.gather_objects({"rank": distributed.rank(), "node_id": node_id, "pid": os.getpid()})
    if log:
        storage.write_json(storage.join(config.run_uri, "workers.json"), {"attempt": log.attempt, "workers": workers})
