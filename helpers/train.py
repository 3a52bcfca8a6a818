"""The Ray Train side: the worker loop, checkpoints, failures, resume. The only module that knows Ray Train."""

import contextlib
import functools
import os
import shutil
import tempfile
import threading
import time

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.train
import ray.train.collective
import ray.train.torch
import torch
from diffusers import UNet2DConditionModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from . import checkpoint, distributed, ingest, schema, storage
from .config import TrainingConfig
from .runtime import fault_tolerance, metrics_log, profiling
from .runtime.fault_tolerance import Watchdog
from .train_step import TrainStep, Unit


def train_loop_per_worker(config, steps=None):
    """What every training worker runs: restore, then one step after another until `max_steps`.

    `steps`: where this worker's share of each global batch comes from; None: `planned_steps`, from Ray Data.
    """
    config = TrainingConfig.from_dict(config)
    manifest = next(iter(ingest.read_manifests(config).values()))
    distributed.use_cores(ray.train.get_context().get_local_world_size(), online=bool(manifest.online))
    learner = TrainStep(config, manifest, ray.train.torch.get_device())
    step = restore(learner)
    log = metrics_log.MetricsLog(config.run_uri) if ray.train.get_context().get_world_rank() == 0 else None
    write_worker_info(config, log)
    rejects, preemption, checkpoints = (
        Rejects(config),
        fault_tolerance.PreemptionNotice(),
        CheckpointManager(learner, log),
    )
    meter, checkpoint_seconds = profiling.Meter(config, manifest, learner.device), 0.0

    with Watchdog(config.hang_timeout, on_hang=fault_tolerance.hang_callback(config)) as watchdog:
        for units, data_seconds, started in (steps or train_steps)(config, manifest, step, rejects):
            with meter.watch():
                metrics = learner.step(step, units)
            step += 1
            ids, num_kept = gather_ids(units)
            seconds = time.perf_counter() - started
            if log:
                speeds = meter.line(config.resolution_at(step - 1), seconds, data_seconds, checkpoint_seconds, num_kept)
                log.write(step, metrics, ids, num_kept, **speeds)
            checkpoint_seconds = 0.0
            watchdog.beat()
            if step % config.checkpoint_every == 0 or step == config.max_steps or preemption.arrived(seconds):
                rejects.write(step)
                checkpoint_seconds = checkpoints.save(step)
                watchdog.beat()


def train_steps(config, manifest, first_step, rejects):
    """Yield `(units, seconds waited for data, start)` of each step: this worker's share of each global batch."""
    rank, world = distributed.rank(), distributed.world_size()
    blocks = iter(
        ray.train.get_dataset_shard("train").iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4)
    )
    waiting = {}  # unit number -> its rows: a block may hold the units of several steps
    for step in range(first_step, config.max_steps):
        started = time.perf_counter()
        wanted = [step * config.units_per_step + slot for slot in range(rank, config.units_per_step, world)]
        if wanted[0] not in waiting:
            for _ in wanted:
                block = next(blocks, None)
                if block is not None:
                    waiting.update(ingest.split_units(block, config.unit_rows))
        if not waiting.keys() >= set(wanted):
            raise RuntimeError(f"Worker {rank} got units {sorted(waiting)} in place of {wanted}.")
        units = []
        for number in wanted:
            rows = waiting.pop(number)
            rejects.add(rows)
            first_position = number % config.units_per_step * config.unit_rows
            units.append(Unit.from_arrow(rows, manifest, config.resolution_at(step), first_position))
        waiting = {number: rows for number, rows in waiting.items() if number > wanted[0]}  # none from before a resume
        yield units, time.perf_counter() - started, started


def build_train_dataset(config, stream=ingest.latents_dataset):
    """The training data from the run's last checkpoint on, for Ray Train's `datasets`.

    Ray Train calls it anew for each group of workers, so a group that replaces a failed one starts where its
    checkpoint does. `stream`: where latents come from; another than `ingest.latents_dataset` encodes them on the way.
    """
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    return stream(
        plan,
        last_step(config),
        config.max_steps,
        resolution=config.resolution,
        validation_share=config.validation_share,
    )


def open_checkpoint(run_uri):
    """A run's newest complete checkpoint as Ray Train's `Checkpoint`, or None."""
    uri = checkpoint.last_complete(run_uri)
    if uri is None:
        return None
    filesystem, path = storage.open_filesystem(uri)
    return ray.train.Checkpoint(path, filesystem)


def last_checkpoint(config):
    """`open_checkpoint` of the run itself."""
    return open_checkpoint(config.run_uri)


def best_checkpoint(config):
    """`open_checkpoint` of the run's `best/`, the one with the lowest validation loss; None before the first validation."""
    return open_checkpoint(storage.join(config.run_uri, checkpoint.BEST))


def first_checkpoint(config):
    """`open_checkpoint` of the run that `init_from` names; None if it names no run with one under this storage."""
    if config.init_from is None or "/" in config.init_from:
        return None
    return open_checkpoint(storage.join(config.storage, "runs", config.init_from))


def unet_folder(config):
    """The folder that `init_from` names, with a U-Net in diffusers layout, as Ray Train's `Checkpoint`."""
    filesystem, path = storage.open_filesystem(config.init_from)
    return ray.train.Checkpoint(path, filesystem)


def last_step(config):
    """Steps done at the run's newest complete checkpoint; 0 without one."""
    uri = checkpoint.last_complete(config.run_uri)
    return 0 if uri is None else checkpoint.step_of(uri)


@contextlib.contextmanager
def checkpoint_dir(find):
    """The local folder of the `Checkpoint` that rank 0 gets from `find()`, None if it gets none; call it on all workers.

    They agree on it so, and workers on one node share a download: Ray Train knows the `Checkpoint` again.
    """
    found = find() if ray.train.get_context().get_world_rank() == 0 else None
    found = ray.train.collective.broadcast_from_rank_zero(found)
    if found is None:
        yield None
        return
    with found.as_directory() as folder:
        ray.train.collective.barrier()  # one that comes late downloads again, over what the others would be reading
        yield folder


def restore(learner):
    """Load the run's newest complete checkpoint into a worker; returns the steps done."""
    with checkpoint_dir(lambda: last_checkpoint(learner.config)) as folder:
        if folder:
            return checkpoint.load(folder, model=learner.model, optimizer=learner.optimizer, ema=learner.ema)
    initialise(learner)
    return 0


def initialise(learner):
    """Start from `init_from`: another run's weights and EMA, or a U-Net in diffusers layout; with a fresh schedule."""
    config = learner.config
    if config.init_from is None:
        return
    with checkpoint_dir(lambda: first_checkpoint(config) or unet_folder(config)) as folder:
        if os.path.exists(os.path.join(folder, checkpoint.PROGRESS)):
            checkpoint.load_weights(folder, learner.unet, "ema")
            averaged = learner.ema.copy()
            checkpoint.load_weights(folder, learner.unet, "model")
        else:
            weights = UNet2DConditionModel.from_pretrained(folder, torch_dtype=torch.float32, use_safetensors=True)
            set_model_state_dict(learner.unet, weights.state_dict(), options=StateDictOptions(full_state_dict=True))
            averaged = learner.ema.copy()
    if config.ema_start == 0:
        learner.ema.shadow = averaged


class CheckpointManager:
    """Saves a worker's checkpoints beside its training.

    Training stands still while the state is copied into the CPU's memory. Then a thread of Ray Train's writes it, each
    worker its part, and uploads it to the run's folder, where it counts once all of it is there (`checkpoint.find_corruption`).
    """

    def __init__(self, learner, log):
        self.learner, self.log = learner, log
        self.group = checkpoint.cpu_group()
        self.filesystem = (
            ray.train.get_context().get_storage().storage_filesystem
        )  # as Ray Train knows its own folder again
        self.done = threading.Event()  # whether the one before is written and uploaded
        self.done.set()

    def save(self, step):
        """Begin to save; returns the seconds that training had to wait, the rest of an earlier one's upload included."""
        started, config, learner = time.perf_counter(), self.learner.config, self.learner
        self.done.wait()
        # Workers on one machine and on several: each uploads the files of its own folder.
        folder = tempfile.mkdtemp()
        finish = checkpoint.async_save(
            folder, model=learner.model, optimizer=learner.optimizer, ema=learner.ema, step=step, group=self.group
        )
        self.done.clear()
        if self.log:
            self.log.flush()
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=checkpoint.checkpoint_name(step, self.log.attempt)
            if self.log
            else None,  # rank 0's counts
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=functools.partial(self.upload, finish),
            delete_local_checkpoint_after_upload=False,
            validation=bool(config.validate_every) and (step % config.validate_every == 0 or step == config.max_steps),
        )
        return time.perf_counter() - started

    def upload(self, finish, local, name):
        """In Ray Train's thread: wait until the files are written, and copy them to `name` under the run's folder."""
        try:
            finish()
            uri = storage.join(self.learner.config.run_uri, name)
            storage.copy_folder(local.path, uri)
            return ray.train.Checkpoint(storage.open_filesystem(uri)[1], self.filesystem)
        finally:
            shutil.rmtree(local.path)
            self.done.set()


class Rejects:
    """Rows that could not be encoded on the way to this worker, for `rejects/` of the run.

    A file is written before the checkpoint that covers its steps, under a name that a redone step writes again.
    """

    def __init__(self, config):
        self.run_uri, self.found = config.run_uri, []

    def add(self, rows):
        if schema.REASON in rows.column_names:
            bad = rows.filter(pc.not_equal(rows[schema.REASON], ""))
            if len(bad):
                self.found.append(bad.select([schema.ID, schema.REASON, schema.SOURCE]))

    def write(self, step):
        if self.found:
            filesystem, path = storage.open_filesystem(storage.join(self.run_uri, "rejects"))
            filesystem.create_dir(path)
            rank = ray.train.get_context().get_world_rank()
            pq.write_table(pa.concat_tables(self.found), f"{path}/{step:09d}-{rank:05d}.parquet", filesystem=filesystem)
            self.found = []


def write_worker_info(config, log):
    """Rank 0 writes `workers.json`: where the workers of this attempt run."""
    mine = {
        "rank": ray.train.get_context().get_world_rank(),
        "node_id": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
    }
    parts = distributed.gather_objects(mine)
    if log:
        storage.write_json(storage.join(config.run_uri, "workers.json"), {"attempt": log.attempt, "workers": parts})


def gather_ids(units):
    """`(ids, rows kept)` of the whole global batch, on rank 0; (None, None) elsewhere."""
    ids, kept = [i for unit in units for i in unit.ids], sum(int(unit.keep_U.sum()) for unit in units)
    parts = distributed.gather_objects((ids, kept))
    return ([i for part, _ in parts for i in part], sum(kept for _, kept in parts)) if parts else (None, None)
