"""Starting and ending work on a Ray cluster from a notebook: connect, check the storage, free the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import storage
from ..config import TrainingConfig
from . import fault_tolerance


def connect(ray_address: str = "local", num_cpus: int | None = None) -> None:
    """Start Ray on this machine ("local"), or join the cluster at an address; once a process.

    Workers get this package and the `AWS_*` variables through the runtime environment: a cluster's nodes need no more
    than requirements.txt. Ray that is started here is quiet, and told of at least four CPUs, so that on a small machine
    stages that wait for each other share a core. On a cluster, logs and signal handlers stay as they are.
    """
    if ray.is_initialized():
        return
    package = str(pathlib.Path(__file__).parents[1])
    if ray_address == "local":
        start_local_ray(package, num_cpus)
    else:
        ray.init(ray_address, runtime_env={"py_modules": [package], "env_vars": worker_variables()})
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # the same input gives the same files
    context.target_max_block_size = 32 * 2**20  # small blocks keep all stages busy and memory low


def start_local_ray(package: str, num_cpus: int | None) -> None:
    """`ray.init` on this machine without Ray's messages; PRETRAIN_LOCAL_RAY=1 tells workers that they share it."""
    num_cpus = num_cpus or max(4, os.cpu_count())
    # Ray warns when it has started four times as many workers as it may start at once, by default one a core.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(2 * num_cpus))
    # Ray's C++ layer warns about Ray Data's own workings. While it starts it also reports this setting.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with stderr_closed():
        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"py_modules": [package], "env_vars": {**worker_variables(), "PRETRAIN_LOCAL_RAY": "1"}},
        )
    # A Jupyter kernel is shut down by SIGTERM, on which Ray's handler would print a stack trace.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


def worker_variables() -> dict[str, str]:
    """Environment of the workers.

    This process's `AWS_*` variables, with which workers on other machines reach the same object store; and NCCL keeps
    its last collectives, for `fault_tolerance.dump_flight_recorder`.
    """
    store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    recorder = f"{tempfile.gettempdir()}/nccl-{uuid.uuid4().hex}-"  # and the rank; not another job's on this machine
    files = dict.fromkeys([fault_tolerance.PIPE, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"], recorder)
    return {**store, **files, "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


@contextlib.contextmanager
def stderr_closed() -> Iterator[None]:
    """Drop what native code writes to standard error while the block runs; exceptions are not affected."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def check_shared(uri: str, parameter: str = "storage") -> None:
    """Raises ValueError, naming the `parameter`, if some node does not see what this process writes to `uri`."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    token = storage.join(uri, f".shared-{uuid.uuid4().hex}")
    storage.write_text(token, "")
    try:
        seen = ray.remote(num_cpus=0)(storage.exists)
        found = {
            node["NodeManagerAddress"]: seen.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(token)
            for node in nodes
        }
        for address, result in found.items():
            try:
                sees = ray.get(result)
            except ray.exceptions.TaskUnschedulableError:
                continue  # the node left after it was listed
            if not sees:
                raise ValueError(
                    f"{parameter}={uri!r} is not shared: the node {address} does not see what is written there. "
                    "Give a folder that all nodes mount, or a URI such as s3://bucket/folder."
                )
    finally:
        storage.delete(token)


def warn_if_validation_waits(config: TrainingConfig, use_gpu: bool, encoder_gpus: float = 0) -> None:
    """Print a warning if trainers, and encoders with `encoder_gpus` in all, leave no GPU for validation."""
    if not use_gpu or not config.validate_every:
        return
    has, needed = ray.cluster_resources().get("GPU", 0), config.most_workers + encoder_gpus + 1
    if has < needed:
        print(
            f"Training and its validation want {needed:g} GPUs, one of them for validation, and the cluster has "
            f"{has:g}: validation would wait until training ends, and keep every checkpoint until then. Add GPUs, or "
            "set validate_every=0."
        )


def run_on_gpu(function: Callable, use_gpu: bool, *arguments):
    """Call a function in this process, or, with `use_gpu` on a machine without a GPU, on a GPU of the cluster."""
    if not use_gpu or torch.cuda.is_available():
        return function(*arguments)
    return ray.get(ray.remote(num_gpus=1)(function).remote(*arguments))


def free_disk(storage_uri: str) -> int:
    """Delete all that the notebooks keep under `storage`: raw samples, latents, runs. Returns the bytes freed."""
    freed = 0
    for folder in ("raw", "scratch", "latents", "online", "runs"):
        uri = storage.join(storage_uri, folder)
        freed += sum(storage.sizes(uri).values())
        storage.delete(uri)
    return freed
