"""Saves and loads the training state, whole or sharded, by torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .. import distributed, storage
from ..model.diffusion import EMA
from .checkpoint import PROGRESS, checksums, step_of
from .integrity import CheckedReader, DamagedCheckpoint, PlainLoadPlanner, SummingWriter

# `no_dist` has said that there is one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def open_stager() -> DefaultStager:
    """A DCP stager, which copies state to CPU memory. Use one stager for all `async_save`s: it reuses its memory.

    With a GPU the memory is page-locked. The GPU copies to it at the speed of the bus, but allocating it is slow.
    """
    pinned = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
    )
    return DefaultStager(options)


class TrainingState(Protocol):
    """The state that a checkpoint saves, such as a `step.TrainStep`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA


def async_save(
    folder: str, state: TrainingState, *, step: int, stager: DefaultStager, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Save model, EMA, optimizer and step to a local folder; returns `finish()`, which waits for the files.

    The state is copied to CPU memory. Each rank's thread then writes the rank's part to files. Call `finish` on every
    rank, from any thread, before the next `async_save`. `finish` waits for the files. It then makes rank 0 write
    `progress.json`, with the sizes and checksums of all ranks' files. `checkpoint.find_corruption` and `last_sound`
    compare a copy of the checkpoint with `progress.json`.

    Args:
        stager: from `open_stager`, kept by the caller. Without one, PyTorch would copy sharded state twice.
        group: from `distributed.new_cpu_group`, because training uses the default group at the same time.
    """
    weights, moments = get_state_dict(state.model, state.optimizer)
    # One tensor after another: to copy ahead, the writing thread would use the first GPU on every rank.
    writer = SummingWriter(folder, per_thread_copy_ahead=0)
    writing = dcp.async_save(
        {"model": weights, "optimizer": moments, "ema": state.ema.state_dict()},
        storage_writer=writer,
        async_stager=stager,
        process_group=group,
        # With one process, gloo's threads would oversubscribe OpenMP: later steps would take twice as long.
        no_dist=distributed.world_size() == 1,
    )

    def finish():
        writing.result()
        sizes = {path.name: path.stat().st_size for path in pathlib.Path(folder).iterdir()}
        ranks = distributed.gather_objects((sizes, writer.sum_pieces()), group)
        if ranks:
            files, sums = (
                {name: of for part in parts for name, of in part.items()} for parts in zip(*ranks, strict=True)
            )
            progress = {"step": step, "files": files, "checksums": sums}
            storage.write_text(storage.join(folder, PROGRESS), json.dumps(progress))

    return finish


def load(folder: str, state: TrainingState) -> int:
    """Restore what `async_save` wrote, in place; returns the steps done. The number of ranks may have changed.

    The checkpoint's options of the optimizer, such as its weight decay, are not restored: a run that continues another
    may have other options.
    """
    options = [{**group} for group in state.optimizer.param_groups]
    weights, moments = get_state_dict(state.model, state.optimizer)
    loaded = {"model": weights, "optimizer": moments, "ema": state.ema.copy()}
    read(folder, loaded, no_dist=distributed.world_size() == 1)
    parts = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
    set_state_dict(state.model, state.optimizer, **parts)
    for group, own in zip(state.optimizer.param_groups, options, strict=True):
        group |= {name: value for name, value in own.items() if name != "params"}
    step = step_of(folder)
    state.ema.load_state_dict(loaded["ema"], step)
    return step


def read(folder: str, state: dict, no_dist: bool) -> None:
    """Fill `state` in place from a local checkpoint. Raises DamagedCheckpoint. No code from the files is run."""
    reader = CheckedReader(folder, checksums(folder))
    try:
        dcp.load(state, storage_reader=reader, planner=PlainLoadPlanner(), no_dist=no_dist)
    except CheckpointException as error:  # what the ranks raised, with their stacks
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, DamagedCheckpoint)]
        raise (causes or [error])[0] from None


@torch.no_grad()
def load_weights(folder: str, denoiser: torch.nn.Module, which: str = "ema") -> torch.nn.Module:
    """Load a checkpoint's weights into a denoiser, whole or sharded, and return it. `which`: "ema" or "model"."""
    state = {which: {name: parameter.detach() for name, parameter in denoiser.named_parameters()}}
    read(folder, state, no_dist=True)
    denoiser.load_state_dict(state[which])
    return denoiser
