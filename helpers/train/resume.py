"""Restoring a checkpoint on all workers: the one that `dataset` chose, or the weights that a run starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import ray.train
import ray.train.collective

from .. import distributed, storage
from ..config import TrainingConfig
from . import checkpoint, checkpoint_io, weights
from .step import TrainStep


def last_step(config: TrainingConfig) -> int:
    """Steps done at the run's newest complete checkpoint; 0 without one."""
    uri = checkpoint.last_complete(config.run_uri)
    return 0 if uri is None else checkpoint.step_of(uri)


def restore(train_step: TrainStep, resume_point: Callable[[], dict]) -> int:
    """Load the resume point's checkpoint, else the weights of `init_from`; returns the steps done. For all ranks."""
    config = train_step.config

    def checkpoint_to_resume():
        uri = resume_point()["checkpoint"]
        return uri and as_checkpoint(uri)

    with checkpoint_dir(checkpoint_to_resume) as folder:
        if folder:
            return checkpoint_io.load(folder, train_step)
    if config.init_from is not None:
        with initial_weights(config) as folder:
            weights.load_initial_weights(folder, train_step.denoiser, config.init_weights)
    return 0


def initial_weights(config: TrainingConfig) -> contextlib.AbstractContextManager[str]:
    """The local folder of `init_from`'s weights. Each node downloads them once. Call it on all ranks."""
    if weights.on_hub(config.init_from):
        return contextlib.nullcontext(weights.find_weights(config))
    return checkpoint_dir(lambda: as_checkpoint(weights.find_weights(config)))


@contextlib.contextmanager
def checkpoint_dir(find: Callable[[], ray.train.Checkpoint | None]) -> Iterator[str | None]:
    """The local folder of the checkpoint that `find()` returns on rank 0; None without one. Call it on all ranks.

    Rank 0 broadcasts the checkpoint: all ranks load the same one, and each node downloads it once.
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
