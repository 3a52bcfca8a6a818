"""Saving, loading and finding checkpoints with `torch.distributed.checkpoint`: each rank writes its part. No Ray."""

from __future__ import annotations

import json
import pathlib
import re
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
from .integrity import CheckedReader, DamagedCheckpoint, Pieces, PlainLoadPlanner, SummingWriter, find_damage

# `no_dist` has said that there is one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

PROGRESS = "progress.json"  # in every checkpoint: the step, the sizes of its files and the checksums of their pieces
DAMAGED = "damaged.json"  # in a checkpoint that is not used any more: why
BEST = "best"  # in a run's folder: a copy of the checkpoint that is best by `TrainingConfig.best_by`


def checkpoint_name(step: int, attempt: int) -> str:
    """A folder name that is unique for each save: a repeated step never writes into an earlier attempt's folder."""
    return f"checkpoint-{step:09d}-{attempt:03d}"


def list_checkpoints(run_uri: str) -> list[str]:
    """URIs of a run's checkpoint folders, complete or not, newest step first."""
    uris = [uri for uri in storage.list_folders(run_uri) if re.fullmatch(r"checkpoint-\d{9}-\d{3}", storage.name(uri))]
    return sorted(uris, key=storage.name, reverse=True)


def find_corruption(checkpoint_uri: str) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if all files are there, in full size.

    `last_sound` also reads the bytes; it marks a damaged checkpoint with `damaged.json`, which this function then
    reports.
    """
    try:
        expected = storage.read_json(storage.join(checkpoint_uri, PROGRESS), otherwise=lambda _: {}).get("files")
    except FileNotFoundError:
        return f"it has no {PROGRESS}"
    if expected is None:
        return f"its {PROGRESS} is cut short"
    sizes = storage.sizes(checkpoint_uri)
    if DAMAGED in sizes:
        unknown = {"why": f"its {DAMAGED} is cut short"}
        return storage.read_json(storage.join(checkpoint_uri, DAMAGED), otherwise=lambda _: unknown)["why"]
    for name, size in expected.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != size:
            return f"its file {name} has {sizes[name]:,} bytes of {size:,}"
    return None


def last_complete(run_uri: str) -> str | None:
    """URI of the newest complete checkpoint; None if there is none.

    Ray Train's own list of checkpoints says what was reported, not what the storage still holds.
    """
    return next((uri for uri in list_checkpoints(run_uri) if find_corruption(uri) is None), None)


def last_sound(run_uri: str) -> tuple[str | None, list[str]]:
    """`(URI of the newest intact checkpoint or None, sentences about newer, damaged checkpoints)`.

    It reads whole checkpoints. It marks each damaged checkpoint, so that `find_corruption` reports the damage without
    reading the bytes again.
    """
    sentences = []
    while uri := last_complete(run_uri):
        why = find_damage(uri, checksums(uri))
        if why is None:
            break
        storage.write_json(storage.join(uri, DAMAGED), {"why": why})
        sentences.append(f"{storage.name(uri)} cannot be used: {why}.")
    if sentences:
        sentences[-1] += f" The run resumes from {storage.name(uri)}." if uri else " The run starts over."
    return uri, sentences


def checksums(checkpoint_uri: str) -> Pieces:
    """The checksums of a checkpoint's pieces; {} if `progress.json` is missing or, in older versions, holds none."""
    uri = storage.join(checkpoint_uri, PROGRESS)
    return storage.read_json(uri).get("checksums", {}) if storage.exists(uri) else {}


def step_of(checkpoint_uri: str) -> int:
    """Steps done at a checkpoint."""
    return int(storage.read_json(storage.join(checkpoint_uri, PROGRESS))["step"])


def keep_as_best(run_uri: str, folder: str, name: str) -> None:
    """Copy a checkpoint to its run's `best/`, then delete the earlier best checkpoint."""
    best_uri = storage.join(run_uri, BEST)
    storage.copy_folder(folder, storage.join(best_uri, name))
    for uri in list_checkpoints(best_uri):
        if storage.name(uri) != name:
            storage.delete(uri)


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

    The state is copied to CPU memory; a thread then writes the files, each rank its own part. Call `finish` on every
    rank, from any thread, before the next `async_save`. `finish` also makes rank 0 write `progress.json`, with the
    sizes and checksums of all ranks' files. `find_corruption` and `last_sound` check copies against these numbers.

    Args:
        stager: from `open_stager`, kept by the caller. Without one, PyTorch would copy sharded state twice.
        group: from `cpu_group`, because training uses the default group at the same time.
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


def cpu_group() -> dist.ProcessGroup | None:
    """A process group for `async_save`, on all ranks; None without a process group."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def load(folder: str, state: TrainingState) -> int:
    """Restore what `async_save` wrote, in place; returns the steps done. The number of ranks may have changed.

    The optimizer keeps its own options, such as its weight decay: a run that continues another may change them.
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
