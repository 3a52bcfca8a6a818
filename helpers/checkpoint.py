"""Save and load the state of training with `torch.distributed.checkpoint`: every rank writes its part."""

import contextlib
import json
import pathlib
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .runs import PROGRESS, step_of


def alone():
    """Whether there is no other rank to agree with.

    A group of one could take part in collectives with itself; but gloo's threads then start OpenMP teams of their own,
    libgomp finds more threads than cores and stops spinning, and every later step takes twice as long.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def save(folder, *, model, optimizer, ema, step):
    """Write model, EMA, optimizer and step to a local folder; on several ranks each writes its own files there.

    Rank 0 adds `progress.json`: the step, and every rank's files with their sizes, by which a copy of the folder that
    lacks something is told from a complete one (`runs.damage`).
    """
    with expected_single_process():
        dcp.save(gather_state(model, optimizer, ema), storage_writer=open_writer(folder), no_dist=alone())
    write_progress(folder, step)


def start(folder, *, model, optimizer, ema, step, group=None):
    """Like `save`, but only copies the state into the CPU's memory; a thread writes while training goes on.

    Returns `finish()`, which waits until everything is written. Call it on every rank, from any thread, before the next
    `start`. `group`: what `cpu_group` gave, because training has the default one to itself.
    """
    # The default of `async_save`, were it not that a writer which is given copies in its own way, twice where it is sharded.
    stager = DefaultStager(StagingOptions(*[False] * 4))
    with expected_single_process():
        writing = dcp.async_save(
            gather_state(model, optimizer, ema), storage_writer=open_writer(folder), async_stager=stager,
            process_group=group, no_dist=alone(),
        )  # fmt: skip

    def finish():
        with expected_single_process():
            writing.result()
        stager.close()  # or the copy stays
        write_progress(folder, step, group)

    return finish


def open_writer(folder):
    """Writes one tensor after another. With copies ahead, the thread that writes would use the first GPU on every rank."""
    return dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)


def cpu_group():
    """A process group for `start`, on all ranks; None where there is nobody to agree with."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def gather_state(model, optimizer, ema):
    """What a checkpoint holds: this rank's part of it."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "ema": ema.state_dict()}


def write_progress(folder, step, group=None):
    files = {path.name: path.stat().st_size for path in pathlib.Path(folder).iterdir()}
    if not alone():
        parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(files, parts, group=group)
        files = {name: size for part in parts or [] for name, size in part.items()}
    if alone() or dist.get_rank() == 0:
        pathlib.Path(folder, PROGRESS).write_text(json.dumps({"step": step, "files": files}))


def load(folder, *, model, optimizer, ema):
    """Restore what `save` wrote, in place; returns the number of steps done."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "ema": ema.copy()}
    with expected_single_process():
        dcp.load(state, checkpoint_id=folder, no_dist=alone())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = step_of(folder)
    ema.load_state_dict(state["ema"], step)
    return step


@contextlib.contextmanager
def expected_single_process():
    """PyTorch warns when a checkpoint is read or written without a process group, which is what `no_dist` asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@torch.no_grad()
def load_weights(folder, unet, which="ema"):
    """Load the weights of a checkpoint into a plain U-Net: "ema" or "model"."""
    state = {which: {name: parameter.detach() for name, parameter in unet.named_parameters()}}
    with expected_single_process():
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    unet.load_state_dict(state[which])
    return unet
