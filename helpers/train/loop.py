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
import torch
from ray.autoscaler.v2.sdk import get_cluster_status

from .. import distributed, storage
from ..config import TrainingConfig
from ..production.extras import sick_devices
from ..production.extras.meter import Meter
from . import checkpoint_io, faults
from .metrics import MetricsLog
from .resume import restore
from .sources import StepSource
from .step import TrainStep, Unit, choose_kernels
from .upload import CheckpointManager


def train_loop_per_worker(
    config: TrainingConfig, source: StepSource | None = None, evaluate: Callable | None = None
) -> None:
    """What each training worker runs: restore the checkpoint, then one step after another until the source ends.

    Args:
        config: of the run.
        source: of the steps; None: stored latents, `StepSource(config)`.
        evaluate: `evaluate(denoiser, config, step)` (`evaluation.at_checkpoints.OnWorkers`). If no GPU is spare for Ray
            Train's validation, all workers call it between two steps, to evaluate the averaged weights. None: only the
            last checkpoint is evaluated if no GPU is spare.
    """
    source = source or StepSource(config)
    source.start()
    manifest = source.data.first
    device = ray.train.torch.get_device()
    distributed.use_cores(ray.train.get_context().get_local_world_size(), online=bool(manifest.online))

    choose_kernels(config)  # before the first matrix product, which fixes cuBLAS's workspace
    if sick_devices.end_if_sick(config.run_uri, device):
        return
    train_step = TrainStep(config, manifest, device)
    step = restore(train_step, source.resume_point)

    log = MetricsLog(config.run_uri) if distributed.rank() == 0 else None
    write_worker_info(config.run_uri, log)
    writer = MetricsWriter(log)
    meter = Meter(config, manifest, device)
    checkpoints = CheckpointManager(train_step, config.run_uri, log)
    preemption = sick_devices.PreemptionNotice(device)

    compiled_for = set()  # columns of latents: the denoiser is compiled for each shape
    record_hang = functools.partial(faults.record_hang, config.run_uri, distributed.rank())
    with faults.Watchdog(config.hang_timeout, record_hang) as watchdog:
        started, checkpoint_seconds = time.perf_counter(), 0.0
        for units, data_seconds in source.steps(step):
            latents = units[0].latents_spec
            if latents not in compiled_for:
                watchdog.beat(slow=True)
                compiled_for.add(latents)
            try:
                with meter.watch():
                    metrics = train_step.step(step, units)
            except FloatingPointError as error:
                # All workers return and the driver raises: Ray Train would restart them, to fail at the same step.
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
                watchdog.beat(slow=True)  # the previous upload may take long
                source.write_rejects(step)
                writer.wait()
                stopped = time.perf_counter()
                checkpoints.wait()
                checkpoints.save(step, validate=prepare_validation(train_step, step, evaluate))
                checkpoint_seconds = time.perf_counter() - stopped
                watchdog.beat()
            started = time.perf_counter()
        writer.wait()
        if log:
            storage.retry(log.flush)
    checkpoints.wait()
    if checkpoints.lost and step == source.end_step:  # the result of the run: Ray Train starts the workers again
        raise RuntimeError(checkpoints.lost)


def prepare_validation(train_step: TrainStep, step: int, evaluate: Callable | None) -> bool:
    """Whether Ray Train validates the checkpoint of a step; runs `evaluate` first if no GPU is spare.

    Call it on all ranks.

    Ray Train's validation is a task beside the training. If no GPU is spare, the task would start when training ends,
    and all checkpoints would be kept until then. So this function runs the GPU part (`evaluate`) on the workers, and
    the task does the rest. The last checkpoint is left to the task, because the trainers' GPUs are free by then.
    """
    config = train_step.config
    if not config.validates_at(step):
        return False
    if step == config.max_steps or has_spare_gpu(train_step.device, config.training_accelerator_type):
        return True
    if evaluate is None:
        return False
    with train_step.averaged() as denoiser:
        evaluate(denoiser, config, step)
    return True


def has_spare_gpu(device: torch.device, accelerator_type: str | None = None) -> bool:
    """Whether a GPU of the trainers' kind is idle; True if the trainers run on CPUs. Call it on all ranks."""
    spare = device.type != "cuda"
    if distributed.rank() == 0 and not spare:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        free = [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]
        of_kind = [node for node in free if accelerator_type is None or f"accelerator_type:{accelerator_type}" in node]
        spare = any(node.get("GPU", 0) >= 1 for node in of_kind)
    return ray.train.collective.broadcast_from_rank_zero(spare)


class MetricsWriter:
    """Writes a step's metrics with the ids of its global batch, in a thread while the next step runs.

    Each step waits until the previous step's line is written to `log`. So a worker that dies loses at most one line. On
    an object store, the lines that `MetricsLog` has not yet flushed are lost too.

    `log`: rank 0's; None on the other ranks.
    """

    def __init__(self, log: MetricsLog | None):
        self.log, self.group, self.pool = log, checkpoint_io.cpu_group(), ThreadPoolExecutor(1)
        self.written = None  # the last line's Future

    def write(self, step: int, metrics: dict, units: list[Unit], num_kept: int, speed: dict) -> None:
        """Start to write a step's line. Call it on all ranks, with this rank's units."""
        self.wait()
        ids = [i for unit in units for i in unit.ids]
        self.written = self.pool.submit(self.gather_and_write, step, metrics, ids, num_kept, speed)

    def gather_and_write(self, step: int, metrics: dict, ids: list, num_kept: int, speed: dict) -> None:
        ranks = distributed.gather_objects(ids, self.group)
        if ranks:
            self.log.write(step, metrics, itertools.chain.from_iterable(ranks), num_kept, **speed)

    def wait(self) -> None:
        """Wait until the last line is written. Raises the writing thread's error."""
        if self.written:
            self.written.result()


def write_worker_info(run_uri: str, log: MetricsLog | None) -> None:
    """Rank 0 writes `workers.json`: rank, node and process of each worker of this attempt. Call it on all ranks."""
    node_id = ray.get_runtime_context().get_node_id()
    workers = distributed.gather_objects({"rank": distributed.rank(), "node_id": node_id, "pid": os.getpid()})
    if log:
        storage.write_json(storage.join(run_uri, "workers.json"), {"attempt": log.attempt, "workers": workers})
