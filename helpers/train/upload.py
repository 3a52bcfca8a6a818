"""Saves a run's checkpoints while training goes on: copies the state, writes files, uploads them."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from typing import Any

import ray.train
from torch.distributed.checkpoint.api import CheckpointException

from .. import distributed, storage
from . import checkpoint, checkpoint_io, faults
from .metrics import MetricsLog
from .step import TrainStep


class CheckpointManager:
    """Saves a worker's part of each checkpoint. Create it on all ranks, and call its methods on all of them.

    `save` copies the state to CPU memory. Training waits only for this copy. A thread of Ray Train then writes the
    files and uploads them to the run's folder. A checkpoint counts once all of its files are there
    (`checkpoint.find_corruption`).

    A checkpoint is lost if a worker cannot write its part, or upload it after several attempts. Rank 0 then deletes
    the incomplete folder and reports a `faults.LostCheckpoint`, and training goes on.
    `faults.RecordFailures` ends a run that loses several checkpoints in a row.

    Args:
        train_step: what is saved.
        run_uri: the run's folder.
        log: rank 0's metrics, whose attempt is part of a checkpoint's name; None on the other ranks.
    """

    def __init__(self, train_step: TrainStep, run_uri: str, log: MetricsLog | None):
        self.train_step, self.run_uri, self.log = train_step, run_uri, log
        self.group = distributed.new_cpu_group()
        self.stager = checkpoint_io.open_stager()
        # Ray Train recognises checkpoints in its own folder only by its own file system.
        self.filesystem = ray.train.get_context().get_storage().storage_filesystem
        self.uploaded = threading.Event()  # set unless a checkpoint is being written or uploaded
        self.uploaded.set()
        self.lost = None  # on rank 0: why the last checkpoint was lost

    def wait(self) -> None:
        """Wait until the last checkpoint is uploaded, or lost."""
        self.uploaded.wait()

    def save(self, step: int, reports: Iterable[dict[str, Any]] = ()) -> None:
        """Copy the state after `step` steps and start to write and upload it.

        `reports`: arguments for `ray.train.report` (`extra.Hook.before_checkpoint`).
        """
        self.wait()
        folder = tempfile.mkdtemp()  # each worker's own, also where several share a node
        finish = checkpoint_io.async_save(folder, self.train_step, step=step, stager=self.stager, group=self.group)
        self.uploaded.clear()
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            # Ray Train takes rank 0's name.
            checkpoint_dir_name=checkpoint.checkpoint_name(step, self.log.attempt) if self.log else None,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=functools.partial(self.upload, finish),
            delete_local_checkpoint_after_upload=False,
            **{name: value for report in reports for name, value in report.items()},
        )

    def upload(self, finish: Callable[[], None], local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        """Runs in Ray Train's thread: wait until the files are written, then upload them to `name` in the run's folder.

        Returns what Ray Train registers. An OSError of the storage is not raised: Ray Train would restart all workers.
        """
        try:
            error = self.try_to_upload(finish, local.path, name)
            path = storage.open_filesystem(storage.join(self.run_uri, name))[1]
            errors = distributed.gather_objects(error, self.group)
            self.lost = next(filter(None, errors or []), None)
            if self.lost:  # Ray Train goes by what rank 0 reports
                with contextlib.suppress(OSError):  # then it is deleted when the run is started again
                    storage.delete(storage.join(self.run_uri, name))
                faults.write_failure(self.run_uri, self.lost)
                return faults.LostCheckpoint(path, self.filesystem, self.lost)
            return ray.train.Checkpoint(path, self.filesystem)
        finally:
            shutil.rmtree(local.path)
            self.uploaded.set()

    def try_to_upload(self, finish: Callable[[], None], folder: str, name: str) -> str | None:
        """Upload this worker's files, with several attempts each; returns why it failed, None if it did not."""
        try:
            finish()
            if self.log:
                storage.retry(self.log.flush)  # a run that resumes continues the step's samples_seen
            storage.copy_folder(folder, storage.join(self.run_uri, name))
        except CheckpointException as error:  # on all workers; PyTorch does not say that a disk is full
            free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free"
            return f"{name} could not be written to {folder} ({free}): {str(error).strip().splitlines()[-1]}"
        except OSError as error:
            return f"{name} could not be uploaded: {type(error).__name__}: {error}"
        return None
