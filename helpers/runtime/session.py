"""Starting and ending work on a Ray cluster from a notebook: connect quietly, check the storage, free the disk."""

import contextlib
import logging
import os
import pathlib
import signal
import threading
import uuid

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import storage


def connect(ray_address="local", num_cpus=None):
    """Start Ray on this machine ("local"), or join the cluster at an address; quiet, once a process.

    Workers get this package, and the `AWS_*` variables, through the runtime environment, so a cluster needs no more than
    requirements.txt.
    On a small machine Ray is told of at least four CPUs: stages that wait on each other may share a core.
    """
    if ray.is_initialized():
        return
    options = {"address": ray_address}
    if ray_address == "local":
        num_cpus = num_cpus or max(4, os.cpu_count())
        options.update(num_cpus=num_cpus, include_dashboard=False)
        # Ray warns of four times as many processes as it starts at once, by default one a core: a few on a laptop.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(2 * num_cpus))
    # Ray's C++ layer warns of matters inside Ray Data; that it was told not to, it says too, before it listens.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with stderr_closed():
        ray.init(
            **options,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"py_modules": [str(pathlib.Path(__file__).parents[1])], "env_vars": store_variables()},
        )
    # A Jupyter kernel that is shut down gets SIGTERM while Ray is still tidying up, and Ray's handler prints a stack.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # the same files from the same input, run after run
    context.target_max_block_size = 32 * 2**20  # small blocks keep the stages busy and memory low


def store_variables():
    """This process's `AWS_*` variables, by which workers on other machines reach the same object store as it does."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@contextlib.contextmanager
def stderr_closed():
    """Drop what native code writes to standard error while the block runs; Python's exceptions are not affected."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def check_shared(uri, parameter="storage"):
    """Raises ValueError, naming the `parameter`, unless every node of the cluster sees what this process writes to `uri`."""
    others = [node for node in ray.nodes() if node["Alive"]]
    if len(others) < 2:
        return
    token = storage.join(uri, f".shared-{uuid.uuid4().hex}")
    storage.write_text(token, "")
    try:
        seen = ray.remote(num_cpus=0)(storage.exists)
        found = {
            node["NodeManagerAddress"]: seen.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(token)
            for node in others
        }
        for address, result in found.items():
            try:
                sees = ray.get(result)
            except ray.exceptions.TaskUnschedulableError:
                continue  # a node that left since it was listed
            if not sees:
                raise ValueError(
                    f"{parameter}={uri!r} is not shared: the node {address} does not see what is written there. "
                    "Give a folder that all nodes mount, or a URI such as s3://bucket/folder."
                )
    finally:
        storage.delete(token)


def warn_if_validation_waits(config, use_gpu, encoder_gpus=0):
    """Print a sentence if trainers, and encoders that take `encoder_gpus` together, leave no GPU of the cluster for validation."""
    if not use_gpu or not config.validate_every:
        return
    has, wanted = ray.cluster_resources().get("GPU", 0), config.most_workers + encoder_gpus + 1
    if has < wanted:
        print(
            f"Training and its validation want {wanted:g} GPUs, one of them for validation, and the cluster has {has:g}: validation "
            "would wait until training ends, and keep the checkpoints. Add GPUs, or set validate_every=0."
        )


def run_on_gpu(function, use_gpu, *arguments):
    """Call a function here, or, with `use_gpu` on a machine that has none, on a GPU of the cluster."""
    if not use_gpu or torch.cuda.is_available():
        return function(*arguments)
    return ray.get(ray.remote(num_gpus=1)(function).remote(*arguments))


def free_disk(storage_uri):
    """Delete everything that the notebooks keep under `storage`: raw samples, latents, runs, what the online run notes of
    its data. Returns the bytes freed."""
    freed = 0
    for folder in ("raw", "latents", "online", "runs"):
        uri = storage.join(storage_uri, folder)
        freed += sum(storage.sizes(uri).values())
        storage.delete(uri)
    return freed
