"""Save and load the state of training with `torch.distributed.checkpoint`: every rank writes its part."""

import contextlib
import json
import pathlib
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

PROGRESS = "progress.json"


def alone():
    """Whether there is no other rank to agree with.

    A group of one could take part in collectives with itself; but gloo's threads then start OpenMP teams of their own,
    libgomp finds more threads than cores and stops spinning, and every later step takes twice as long.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def save(folder, *, model, optimizer, ema, step):
    """Write model, EMA, optimizer and step to a local folder; on several ranks each writes its own files there."""
    weights, moments = get_state_dict(model, optimizer)
    with expected_single_process():
        dcp.save(
            {"model": weights, "optimizer": moments, "ema": ema.state_dict()}, checkpoint_id=folder,
            no_dist=alone(),
        )  # fmt: skip
    if alone() or dist.get_rank() == 0:
        pathlib.Path(folder, PROGRESS).write_text(json.dumps({"step": step}))


def load(folder, *, model, optimizer, ema):
    """Restore what `save` wrote, in place; returns the number of steps done."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "ema": ema.copy()}
    with expected_single_process():
        dcp.load(state, checkpoint_id=folder, no_dist=alone())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = read_step(folder)
    ema.load_state_dict(state["ema"], step)
    return step


def read_step(folder):
    """The number of steps done at a checkpoint in a local folder."""
    return json.loads(pathlib.Path(folder, PROGRESS).read_text())["step"]


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
