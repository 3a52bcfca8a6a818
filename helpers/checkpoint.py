"""Save and load the state of training with `torch.distributed.checkpoint`: every rank writes its part."""

import contextlib
import json
import pathlib
import re
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import storage

PROGRESS = "progress.json"  # in every checkpoint: the step, and the files that make it complete
SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own list of checkpoints
BEST = "best"  # in a run's folder: a copy of the checkpoint with the lowest validation loss


def checkpoint_name(step, attempt):
    """A name of its own for every save, so that a step which is redone never writes into an earlier attempt's folder."""
    return f"checkpoint-{step:09d}-{attempt:03d}"


def list_checkpoints(run_uri):
    """URIs of a run's checkpoint folders, complete or not, newest step first."""
    found = [uri for uri in storage.list_folders(run_uri) if re.fullmatch(r"checkpoint-\d{9}-\d{3}", storage.name(uri))]
    return sorted(found, key=storage.name, reverse=True)


def find_corruption(checkpoint_uri):
    """What is wrong with a checkpoint folder, in a few words; None if it is complete."""
    try:
        progress = storage.read_json(storage.join(checkpoint_uri, PROGRESS))
        expected = progress["files"]
    except FileNotFoundError:
        return f"it has no {PROGRESS}"
    except (ValueError, KeyError):
        return f"its {PROGRESS} is cut short"
    sizes = storage.sizes(checkpoint_uri)
    for name, size in expected.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != size:
            return f"its file {name} has {sizes[name]:,} bytes of {size:,}"
    return None


def last_complete(run_uri):
    """URI of the newest complete checkpoint; None if there is none.

    Ray Train's own list is not asked: it knows what was reported, not what the storage still holds.
    """
    return next((uri for uri in list_checkpoints(run_uri) if find_corruption(uri) is None), None)


def keep_as_best(run_uri, folder, name):
    """Copy a checkpoint to `best/` of its run, and then delete the one that was there."""
    best_uri = storage.join(run_uri, BEST)
    storage.copy_folder(folder, storage.join(best_uri, name))
    for uri in list_checkpoints(best_uri):
        if storage.name(uri) != name:
            storage.delete(uri)


def step_of(checkpoint_uri):
    """Steps done at a checkpoint."""
    return int(storage.read_json(storage.join(checkpoint_uri, PROGRESS))["step"])


def reconcile_checkpoints(run_uri):
    """Make Ray Train's list of checkpoints agree with what the storage holds; returns sentences on what was dropped.

    A damaged checkpoint leaves the list and its folder is deleted; so are folders that never made it into the list,
    but for the newest complete one, where the run goes on. Call it while nothing trains under this name.
    """
    said, resume_from = [], last_complete(run_uri)
    listed_uri = storage.join(run_uri, SNAPSHOT)
    try:
        snapshot = storage.read_json(listed_uri)
        listed = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"]]
    except FileNotFoundError:
        snapshot, listed = None, []
    except (ValueError, KeyError):  # the driver was killed while it was written
        snapshot, listed = None, []
        storage.delete(listed_uri)
        said.append(f"{SNAPSHOT} was cut short: Ray Train's list of checkpoints is made anew.")
    folders = {storage.name(uri): uri for uri in list_checkpoints(run_uri)}
    kept = []
    for name in listed:
        problem = find_corruption(folders[name]) if name in folders else "its folder is missing"
        if problem is None:
            kept.append(name)
        else:
            said.append(f"{name} cannot be used: {problem}.")
    if snapshot is not None and kept != listed:
        if kept:
            storage.write_json(listed_uri, _without(snapshot, kept))
        else:
            storage.delete(listed_uri)
    for name, uri in folders.items():
        if name not in kept and uri != resume_from:
            storage.delete(uri)
    if said:
        said.append(f"The run goes on from {storage.name(resume_from)}." if resume_from else "The run starts over.")
    return said


def _without(snapshot, kept):
    """Ray Train's snapshot with only the checkpoints `kept`."""
    pairs = zip(snapshot["checkpoint_results"], snapshot["checkpoint_report_indices"], strict=True)
    pairs = [(result, index) for result, index in pairs if result["checkpoint_dir_name"] in kept]
    latest = max(pairs, key=lambda pair: pair[1])[0]
    # Validations that were under way are not resumed: the next checkpoint is validated again.
    return {
        **snapshot,
        "checkpoint_results": [result for result, _ in pairs],
        "checkpoint_report_indices": [index for _, index in pairs],
        "latest_checkpoint_result": latest,
        "pending_training_results": [],
        "pending_validation_specs": [],
    }


def is_single_process():
    """Whether there is no other rank to agree with.

    A group of one could take part in collectives with itself; but gloo's threads then start OpenMP teams of their own,
    libgomp finds more threads than cores and stops spinning, and every later step takes twice as long.
    """
    return not dist.is_initialized() or dist.get_world_size() == 1


def save(folder, *, model, optimizer, ema, step):
    """Write model, EMA, optimizer and step to a local folder; on several ranks each writes its own files there.

    Rank 0 adds `progress.json`: the step, and every rank's files with their sizes, by which a copy of the folder that
    lacks something is told from a complete one (`checkpoint.find_corruption`).
    """
    with expected_single_process():
        dcp.save(gather_state(model, optimizer, ema), storage_writer=open_writer(folder), no_dist=is_single_process())
    write_progress(folder, step)


def async_save(folder, *, model, optimizer, ema, step, group=None):
    """Like `save`, but only copies the state into the CPU's memory; a thread writes while training goes on.

    Returns `finish()`, which waits until everything is written. Call it on every rank, from any thread, before the next
    `start`. `group`: what `cpu_group` gave, because training has the default one to itself.
    """
    # The default of `async_save`, were it not that a writer which is given copies in its own way, twice where it is sharded.
    stager = DefaultStager(StagingOptions(*[False] * 4))
    with expected_single_process():
        writing = dcp.async_save(
            gather_state(model, optimizer, ema),
            storage_writer=open_writer(folder),
            async_stager=stager,
            process_group=group,
            no_dist=is_single_process(),
        )

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
    if not is_single_process():
        parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(files, parts, group=group)
        files = {name: size for part in parts or [] for name, size in part.items()}
    if is_single_process() or dist.get_rank() == 0:
        pathlib.Path(folder, PROGRESS).write_text(json.dumps({"step": step, "files": files}))


def load(folder, *, model, optimizer, ema):
    """Restore what `save` wrote, in place; returns the number of steps done."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "ema": ema.copy()}
    with expected_single_process():
        dcp.load(state, checkpoint_id=folder, no_dist=is_single_process())
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
