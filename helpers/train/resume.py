"""Where a run resumes, and how its checkpoints are saved."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray.autoscaler.v2.sdk import get_cluster_status

from .. import distributed, storage
from ..config.training import TrainingConfig
from . import checkpoint, faults
from .metrics import MetricsLog
from .step import TrainStep

RESUME = "resume.json"  # in a run's folder: where the current group of workers resumes


def last_step(config: TrainingConfig) -> int:
    """Steps done at the run's newest complete checkpoint; 0 without one."""
    uri = checkpoint.last_complete(config.run_uri)
    return 0 if uri is None else checkpoint.step_of(uri)


def choose_resume_point(config: TrainingConfig) -> dict:
    """Choose the newest complete checkpoint and write the choice to the run's `resume.json`.

    {"checkpoint": its name, None to start from step 0, "step": steps done}. Called once for each group of workers: when
    its dataset is built, or by rank 0 if it has none. A checkpoint that is completed later, by the upload of a worker
    that is being replaced, changes nothing for the group.
    """
    uri = checkpoint.last_complete(config.run_uri)
    point = {"checkpoint": uri and storage.name(uri), "step": 0 if uri is None else checkpoint.step_of(uri)}
    storage.write_json(storage.join(config.run_uri, RESUME), point)
    return point


def restore(train_step: TrainStep, resume_point: Callable[[], dict]) -> int:
    """Load the checkpoint of the resume point, else what `init_from` names; returns the steps done. For all ranks."""
    config = train_step.config

    def checkpoint_to_resume():
        name = resume_point()["checkpoint"]
        return name and as_checkpoint(storage.join(config.run_uri, name))

    with checkpoint_dir(checkpoint_to_resume) as folder:
        if folder:
            return checkpoint.load(folder, model=train_step.model, optimizer=train_step.optimizer, ema=train_step.ema)
    if config.init_from is not None:
        with checkpoint_dir(lambda: first_checkpoint(config) or as_checkpoint(config.init_from)) as folder:
            checkpoint.load_initial_weights(folder, train_step.denoiser)
    return 0


@contextlib.contextmanager
def checkpoint_dir(find: Callable[[], ray.train.Checkpoint | None]) -> Iterator[str | None]:
    """The local folder of the checkpoint that `find()` returns on rank 0, or None. Call it on all ranks.

    Rank 0 broadcasts the checkpoint, so all ranks load the same one, and each node downloads it once.
    """
    found = find() if distributed.rank() == 0 else None
    found = ray.train.collective.broadcast_from_rank_zero(found)
    if found is None:
        yield None
        return
    with found.as_directory() as folder:
        ray.train.collective.barrier()  # a worker that comes after the others left would download it again
        yield folder


def as_checkpoint(uri: str) -> ray.train.Checkpoint:
    """A folder as Ray Train's `Checkpoint`."""
    filesystem, path = storage.open_filesystem(uri)
    return ray.train.Checkpoint(path, filesystem)


def last_checkpoint(config: TrainingConfig) -> ray.train.Checkpoint | None:
    """The run's newest complete checkpoint; None without one."""
    uri = checkpoint.last_complete(config.run_uri)
    return uri and as_checkpoint(uri)


def first_checkpoint(config: TrainingConfig) -> ray.train.Checkpoint | None:
    """The newest complete checkpoint of the run that `init_from` names; None if this storage has no such run."""
    if config.init_from is None or "/" in config.init_from:
        return None
    uri = checkpoint.last_complete(storage.join(config.storage, "runs", config.init_from))
    return uri and as_checkpoint(uri)


class CheckpointManager:
    """Saves checkpoints while training goes on, and has them validated: beside it, or by the workers themselves.

    A Ray task validates where there is a GPU that nobody uses (`evaluation.at_checkpoints`); where there is none it
    would wait until training ends, and keep every checkpoint until then. So the workers do what takes a GPU between two
    steps, and the task the rest. The last checkpoint is left to the task, which gets a GPU of the trainers.

    Training stops only while the state is copied to CPU memory, pinned and kept where there is a GPU. A thread of Ray
    Train then writes it, each worker its own part, and uploads it to the run's folder. A checkpoint counts once all of
    its files are there (`checkpoint.find_corruption`).

    If a worker cannot upload its part, that checkpoint is lost: rank 0 reports a `faults.LostCheckpoint`,
    training goes on, and the folder is deleted when the run is started again. After several in a row
    `monitor.RecordFailures` ends the run; after the last step Ray Train starts the workers again (`max_failures`).

    Args:
        train_step: what is saved.
        log: rank 0's metrics, whose attempt is part of a checkpoint's name; None on the other ranks.
        evaluate: as `train_loop_per_worker` takes it.
    """

    def __init__(self, train_step: TrainStep, log: MetricsLog | None, evaluate: Callable | None = None):
        self.train_step, self.log, self.evaluate = train_step, log, evaluate
        self.group = checkpoint.cpu_group()
        self.stager = checkpoint.open_stager()
        # Ray Train recognises checkpoints in its own folder only by its own file system.
        self.filesystem = ray.train.get_context().get_storage().storage_filesystem
        self.uploaded = threading.Event()  # set unless a checkpoint is being written or uploaded
        self.uploaded.set()
        self.lost = None  # rank 0's: why the last checkpoint was lost

    def save(self, step: int) -> float:
        """Start to save; returns the seconds that training waited, the rest of the previous upload included."""
        started, config, state = time.perf_counter(), self.train_step.config, self.train_step
        self.uploaded.wait()
        due = bool(config.validate_every) and (step % config.validate_every == 0 or step == config.max_steps)
        if due and step < config.max_steps and not has_spare_gpu(state.device, config.training_accelerator_type):
            due = self.evaluate is not None
            if due:
                with state.averaged() as denoiser:
                    self.evaluate(denoiser, config, step)
        folder = tempfile.mkdtemp()  # each worker's own, also where several share a node
        parts = dict(model=state.model, optimizer=state.optimizer, ema=state.ema)
        finish = checkpoint.async_save(folder, **parts, step=step, group=self.group, stager=self.stager)
        self.uploaded.clear()
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            # Ray Train takes rank 0's name.
            checkpoint_dir_name=checkpoint.checkpoint_name(step, self.log.attempt) if self.log else None,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=functools.partial(self.upload, finish),
            delete_local_checkpoint_after_upload=False,
            validation=due,
        )
        return time.perf_counter() - started

    def upload(self, finish: Callable[[], None], local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        """In Ray Train's thread: wait until the files are written, then copy them to `name` in the run's folder.

        Raises nothing that the storage raises: Ray Train would call it again, or start all workers again.
        """
        try:
            finish()
            run_uri, error = self.train_step.config.run_uri, None
            uri = storage.join(run_uri, name)
            path = storage.open_filesystem(uri)[1]
            try:
                if self.log:
                    storage.retry(self.log.flush)  # a run that resumes continues the step's samples_seen
                storage.copy_folder(local.path, uri)
            except OSError as refused:
                error = f"{type(refused).__name__}: {refused}"
            ranks = distributed.gather_objects(error, self.group) or []  # Ray Train goes by what rank 0 reports
            self.lost = next((f"{name} could not be uploaded: {error}" for error in ranks if error), None)
            if self.lost:
                faults.write_failure(run_uri, self.lost)
                return faults.LostCheckpoint(path, self.filesystem, self.lost)
            return ray.train.Checkpoint(path, self.filesystem)
        finally:
            shutil.rmtree(local.path)
            self.uploaded.set()


def has_spare_gpu(device: torch.device, accelerator_type: str | None = None) -> bool:
    """Whether a Ray task can validate beside the training: on a GPU of the trainers' kind that nobody uses, or on CPUs.

    For all ranks.
    """
    spare = device.type != "cuda"
    if distributed.rank() == 0 and not spare:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        free = [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]
        of_kind = [node for node in free if accelerator_type is None or f"accelerator_type:{accelerator_type}" in node]
        spare = any(node.get("GPU", 0) >= 1 for node in of_kind)
    return ray.train.collective.broadcast_from_rank_zero(spare)
