"""Starting and ending work on a Ray cluster from a notebook: connect quietly, check the storage, free the disk."""

import contextlib
import html
import logging
import os
import pathlib
import signal
import threading
import time
import uuid

import ray
import torch
from IPython.display import display
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from . import storage


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
            **options, log_to_driver=False, logging_level="ERROR",
            runtime_env={"py_modules": [str(pathlib.Path(__file__).parent)], "env_vars": store_variables()},
        )  # fmt: skip
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


@contextlib.contextmanager
def interruptible():
    """Around `trainer.fit()`: an interrupt ends the run, and then the cell, with KeyboardInterrupt.

    Ray Train's own handler ends the run too, but then the whole process, by SystemExit; and it stays in place after the
    run, where it asks a controller that is gone.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if main and before is not None:  # None: not set by Python, so not Python's to set again
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def meanwhile(action, every):
    """While the block runs, call `action()` every so many seconds in a thread, until it returns True.

    What it raises is raised when the block ends.
    """
    stop, errors = threading.Event(), []

    def watch():
        while not stop.wait(every):
            try:
                if action():
                    return
            except Exception as error:  # raised below, where someone sees it
                errors.append(error)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


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
            node["NodeManagerAddress"]: seen.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                token
            )
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


def tell_if_validation_waits(config, use_gpu, encoder_gpus=0):
    """Print a sentence if trainers, and encoders that take `encoder_gpus` together, leave no GPU of the cluster for validation."""
    if not use_gpu or not config.validate_every:
        return
    has, wanted = ray.cluster_resources().get("GPU", 0), config.most_workers + encoder_gpus + 1
    if has < wanted:
        print(
            f"Training and its validation want {wanted:g} GPUs, one of them for validation, and the cluster has {has:g}: validation "
            "would wait until training ends, and keep the checkpoints. Add GPUs, or set validate_every=0."
        )


def kill(node_id, pid):
    """SIGKILL a process on a node of the cluster."""

    def send():
        os.kill(pid, signal.SIGKILL)

    if node_id == ray.get_runtime_context().get_node_id():
        return send()
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ray.get(ray.remote(num_cpus=0, scheduling_strategy=where)(send).remote())


def call(function, use_gpu, *arguments):
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
        freed += storage.size_bytes(uri)
        storage.delete(uri)
    return freed


class Progress:
    """A bar in a notebook (or a line in a terminal's log) that is updated in place: `progress(done, total, text)`."""

    def __init__(self, label, unit="rows"):
        self.label, self.unit = label, unit
        self.started, self.handle = time.time(), None

    def __call__(self, done, total, text=""):
        seconds = time.time() - self.started
        line = f"{self.label}: {done:,} of {total:,} {self.unit} in {seconds:.0f} s {text}"
        bar = f"<progress value='{done}' max='{max(total, 1)}' style='width: 20em; vertical-align: middle'></progress>"
        # Front ends show the bar, batch runs keep the line.
        bundle = {"text/html": f"{bar} <code>{html.escape(line)}</code>", "text/plain": line}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)
