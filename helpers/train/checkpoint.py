"""Saves a run's checkpoints while training goes on, and loads them, whole or sharded.

torch.distributed.checkpoint (DCP) writes each rank's part. `Saver` uploads it. Nothing is loaded whose bytes have
changed, and no code from a file is run, though DCP describes the parts in a pickle.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import os
import pathlib
import pickle
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray.train
import ray.train.collective
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from .. import distributed, storage
from ..encode import models
from ..model import denoisers
from . import run_folder
from .metrics import MetricsLog
from .run_folder import PROGRESS
from .step import TrainStep

# `no_dist` has said that there is one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

METADATA = ".metadata"
WEIGHTS = "diffusion_pytorch_model.safetensors"  # of a denoiser in diffusers layout
# What `.metadata` is made of. The unpickler makes nothing else.
KNOWN_CLASSES = {
    "torch.distributed.checkpoint.metadata": {*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}

# ---- in a run


class Saver:
    """Saves a worker's part of each checkpoint. Create it on all ranks, and call its methods on all of them.

    `save` copies the state to CPU memory. Training waits only for this copy. A thread of Ray Train then writes the
    files and uploads them to the run's folder. A checkpoint counts once all of its files are there
    (`run_folder.find_corruption`).

    A checkpoint is lost if a worker cannot write its part, or upload it after several attempts. Rank 0 then deletes
    the incomplete folder and reports a `run_folder.LostCheckpoint`, and training goes on.

    Args:
        state: what is saved: its model, its optimizer and its EMA.
        run_uri: the run's folder.
        log: rank 0's metrics, whose attempt is part of a checkpoint's name; None on the other ranks.
    """

    def __init__(self, state: TrainStep, run_uri: str, log: MetricsLog | None):
        self.state, self.run_uri, self.log = state, run_uri, log
        self.run = run_folder.run_id(run_uri) if log else None
        self.group = distributed.new_cpu_group()
        self.stager = open_stager()
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
        finish = async_save(folder, self.state, step=step, stager=self.stager, group=self.group, run=self.run)
        self.uploaded.clear()
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            # Ray Train takes rank 0's name.
            checkpoint_dir_name=run_folder.checkpoint_name(step, self.log.attempt) if self.log else None,
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
                run_folder.write_failure(self.run_uri, self.lost)
                return run_folder.LostCheckpoint(path, self.filesystem, self.lost)
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


def restore(train_step: TrainStep, resume_point: Callable[[], dict[str, Any]]) -> int:
    """Load the resume point's checkpoint, else the weights of `init_from`; returns the steps done. On all ranks."""
    config = train_step.config
    with checkpoint_dir(lambda: resume_point()["checkpoint"]) as folder:
        if folder:
            return load(folder, train_step)
    if config.init_from:
        runs_uri = storage.join(config.storage, "runs")
        find = functools.partial(find_weights, config.init_from, config.unet_config, runs_uri)
        # Each node downloads a checkpoint once, and its processes take turns to download a hub id.
        with contextlib.nullcontext(find()) if is_hub_id(config.init_from) else checkpoint_dir(find) as folder:
            load_initial_weights(folder, train_step.denoiser, config.init_weights)
    return 0


@contextlib.contextmanager
def checkpoint_dir(find: Callable[[], str | None]) -> Iterator[str | None]:
    """The local folder of the checkpoint whose URI `find()` returns on rank 0; None without one. Call it on all ranks.

    Rank 0 broadcasts the checkpoint: all ranks load the same one, and each node downloads it once, because Ray Train
    names the local folder after this object, not after the URI.
    """
    uri = find() if distributed.rank() == 0 else None
    found = ray.train.collective.broadcast_from_rank_zero(uri and run_folder.as_checkpoint(uri))
    if found is None:
        yield None
        return
    with found.as_directory() as folder:
        ray.train.collective.barrier()  # a worker that comes after the others left would download it again
        yield folder


# ---- a local folder


def open_stager() -> DefaultStager:
    """A DCP stager, which copies state to CPU memory. Use one stager for all `async_save`s: it reuses its memory.

    With a GPU the memory is page-locked. The GPU copies to it at the speed of the bus, but allocating it is slow.
    """
    pinned = torch.cuda.is_available()
    options = StagingOptions(
        use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
    )
    return DefaultStager(options)


def async_save(
    folder: str,
    state: TrainStep,
    *,
    step: int,
    stager: DefaultStager,
    group: dist.ProcessGroup | None = None,
    run: str | None = None,
) -> Callable[[], None]:
    """Save model, EMA, optimizer's moments and step to a local folder; returns `finish()`, which waits for the files.

    The state is copied to CPU memory. Each rank's thread then writes the rank's part to files. Call `finish` on every
    rank, from any thread, before the next `async_save`. `finish` waits for the files. It then makes rank 0 write
    `progress.json`, with the sizes and checksums of all ranks' files.

    Args:
        stager: from `open_stager`, kept by the caller. Without one, PyTorch would copy sharded state twice.
        group: from `distributed.new_cpu_group`, because training uses the default group at the same time.
        run: rank 0's `run_folder.run_id`; None: a checkpoint of no run.
    """
    weights, optimizer = get_state_dict(state.model, state.optimizer)
    # One tensor after another: to copy ahead, the writing thread would use the first GPU on every rank.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    writing = dcp.async_save(
        {"model": weights, "moments": optimizer["state"], "ema": state.ema.state_dict()},
        storage_writer=writer,
        async_stager=stager,
        process_group=group,
        # With one process, gloo's threads would oversubscribe OpenMP: later steps would take twice as long.
        no_dist=distributed.world_size() == 1,
    )

    def finish():
        writing.result()
        sizes = {path.name: path.stat().st_size for path in pathlib.Path(folder).iterdir()}
        sums = {name: run_folder.sum_parts(storage.join(folder, name), size) for name, size in sizes.items()}
        ranks = distributed.gather_objects((sizes, sums), group)
        if ranks:
            files, checksums = (dict(collections.ChainMap(*parts)) for parts in zip(*ranks, strict=True))
            progress = {"step": step, "files": files, "checksums": checksums, "run": run}
            storage.write_json(storage.join(folder, PROGRESS), progress, indent=None)

    return finish


def load(folder: str, state: TrainStep) -> int:
    """Restore what `async_save` wrote, in place; returns the steps done. The number of ranks may have changed.

    The optimizer keeps its own options, such as its weight decay.
    """
    weights, optimizer = get_state_dict(state.model, state.optimizer)
    loaded = {"model": weights, "moments": optimizer["state"], "ema": state.ema.copy()}
    read(folder, loaded, no_dist=distributed.world_size() == 1)
    optimizer = {**optimizer, "state": loaded["moments"]}
    set_state_dict(state.model, state.optimizer, model_state_dict=loaded["model"], optim_state_dict=optimizer)
    step = run_folder.step_of(folder)
    state.ema.load_state_dict(loaded["ema"], step)
    return step


@torch.no_grad()
def load_weights(folder: str, denoiser: torch.nn.Module, which: str = "ema") -> torch.nn.Module:
    """Load a checkpoint's weights into a denoiser, whole or sharded, and return it. `which`: "ema" or "model"."""
    state = {which: {name: parameter.detach() for name, parameter in denoisers.own_weights(denoiser).items()}}
    read(folder, state, no_dist=True)
    denoiser.load_state_dict(state[which], strict=not hasattr(denoiser, denoisers.AUXILIARY))
    return denoiser


def read(folder: str, state: dict, no_dist: bool) -> None:
    """Fill `state` in place from a local checkpoint. Raises DamagedCheckpoint. No code from the files is run."""
    if why := run_folder.find_damage(folder):
        raise DamagedCheckpoint(f"{folder} cannot be used: {why}: use another checkpoint.")
    try:
        dcp.load(state, storage_reader=SafeReader(folder), planner=TensorPlanner(), no_dist=no_dist)
    except CheckpointException as error:  # what the ranks raised, with their stacks
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, DamagedCheckpoint)]
        raise (causes or [error])[0] from None


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint that is not safe to use: its bytes have changed, or its content is not allowed.

    Three kinds of content are not allowed:
        - Metadata that names a class which PyTorch's checkpoints do not contain.
        - Metadata that names a file outside of the checkpoint's folder.
        - Entries that are not tensors, which PyTorch would unpickle.
    """


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles only `KNOWN_CLASSES` and dtypes. Raises DamagedCheckpoint for any other name before importing it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in KNOWN_CLASSES.get(module, ()):
            raise DamagedCheckpoint(f"{METADATA} names {module}.{name}, which no checkpoint holds: do not use it.")
        return super().find_class(module, name)


class SafeReader(dcp.FileSystemReader):
    """Reads a local checkpoint's metadata by `MetadataUnpickler`, and no file outside of the folder."""

    def __init__(self, folder: str):
        super().__init__(folder)
        # Here, on every rank: DCP would turn what `read_metadata` raises into a text.
        self.metadata = MetadataUnpickler(io.BytesIO(pathlib.Path(folder, METADATA).read_bytes())).load()
        self.metadata.storage_meta = self.metadata.storage_meta or dcp_metadata.StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        for stored in self.metadata.storage_data.values():
            if (name := stored.relative_path) != os.path.basename(name):
                raise DamagedCheckpoint(f"{METADATA} of {folder} names a file outside of it: {name!r}.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self.metadata


class TensorPlanner(dcp.DefaultLoadPlanner):
    """Loads tensors alone."""

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        raise DamagedCheckpoint(f"The checkpoint's {read_item.dest_index.fqn} is no tensor: do not use it.")


# ---- the weights that a new run starts from (`init_from`)


def is_hub_id(model: str) -> bool:
    return "/" in model and not os.path.isabs(model) and models.is_hub_id(model)


def find_weights(given: str, unet_config: str, runs_uri: str) -> str:
    """The folder or URI of `init_from`'s weights: a checkpoint, or a denoiser in diffusers layout.

    `given` names them in one of four ways:
        - A run: its name below `runs_uri` or its folder; its newest complete checkpoint, or that of "@step".
        - A checkpoint's folder in a run.
        - A pipeline: its folder or its hub id, "org/name@revision". The pipeline's U-Net or transformer is taken.
        - A denoiser: its folder, or its hub id.

    Weights of a hub id are first downloaded to this machine. Raises ValueError if there are none.
    """
    if "/" not in given:
        return run_folder.find_checkpoint(given, runs_uri)
    if run_folder.is_checkpoint(given):
        if problem := run_folder.find_corruption(given):
            raise ValueError(f"init_from={given!r} cannot be used: {problem}.")
        return given
    component, root = denoisers.find_adapter(unet_config).component, given
    if is_hub_id(given):
        files = "config.json", "diffusion_pytorch_model*", f"{component}/*", "scheduler/*", "vae/config.json"
        try:
            root = models.model_folder(given, *files)
        except ValueError as error:
            raise ValueError(f"init_from={error}") from None
    for folder in (storage.join(root, component), root):
        path = storage.join(folder, "config.json")
        if storage.exists(path) and "_class_name" in storage.read_json(path, "get it again"):  # a run has one without
            return folder
    return run_folder.find_checkpoint(given, runs_uri)


def weight_files(folder: str) -> list[str]:
    """The safetensors files of a denoiser in diffusers layout, as diffusers chooses them; [] if there are none.

    An index of parts goes before a single file. Variants and pickles (`.bin`) are not opened.
    """
    index, single = storage.join(folder, f"{WEIGHTS}.index.json"), storage.join(folder, WEIGHTS)
    if storage.exists(index):
        names = storage.read_json(index, "get it again", shape={"weight_map": dict})["weight_map"].values()
        return sorted({storage.join(folder, storage.name(str(name))) for name in names})
    return [single] if storage.exists(single) else []


def load_initial_weights(folder: str, denoiser: torch.nn.Module, which: str = "model") -> None:
    """Load the weights that a new run starts from: of a local checkpoint, or of a denoiser in diffusers layout.

    The EMA restarts; otherwise the other run's weights would linger in it. `which`: of a checkpoint, "model" (the last
    weights) or "ema" (averaged weights).
    """
    if run_folder.is_checkpoint(folder):
        load_weights(folder, denoiser, which)
        return
    weights = {}
    for path in weight_files(folder):
        weights |= load_file(path)
    weights = {name: tensor.float() for name, tensor in weights.items()}
    strict = not hasattr(denoiser, denoisers.AUXILIARY)  # whose weights no other run has
    set_model_state_dict(denoiser, weights, options=StateDictOptions(full_state_dict=True, strict=strict))
