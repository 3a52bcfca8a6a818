"""The Ray cluster of a notebook: connect, run on a GPU; which errors are worth another attempt."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import secrets
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ray
import ray.data
import ray.exceptions
from IPython import get_ipython

# Variables of stores and of the model hub that workers get. None is a secret: Ray shows and logs what they get.
FORWARDED = (
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_MAX_ATTEMPTS"),
    "GOOGLE_APPLICATION_CREDENTIALS",
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
)
START_ATTEMPTS = 4


# Ray Data repeats a task that kills its process without end, unless `max_retries` bounds it (`max_task_retries` for an
# actor). Ray 2.60 takes both only as `ray_remote_args`, which Ray 2.64 removes. Nothing public replaces them: the named
# parameters of `map_batches` have no such bound, `DataContext` bounds exceptions alone, and a task cannot ask which
# attempt it is. `tests/cluster/test_faults.py` counts the attempts, and so finds a Ray without the bound.
warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated", category=DeprecationWarning)


def connect(ray_address: str = "local", num_cpus: int | None = None) -> None:
    """Start Ray on this machine ("local"), or join the cluster at an address; once per process, unless Ray has died.

    Workers get this package and settings of object stores and of the model hub (`FORWARDED`) through the runtime
    environment: a cluster's nodes need only requirements.txt, and credentials of their own. A local Ray inherits this
    process's environment. It is quiet and is given at least four CPUs, so that on a small machine stages that wait for
    each other share a core. On a cluster, logs and signal handlers stay as they are, and the dashboard's address is
    printed if there is one. In a notebook, a Ray that has died is replaced before the next cell runs.
    """
    if ray.is_initialized():
        if answers():
            return
        print("Ray has died: it is started or joined again.")
        ray.shutdown()
    if ray_address == "local":
        start_local_ray(num_cpus)
    else:
        context = ray.init(ray_address, runtime_env=worker_environment())
        if context.dashboard_url:
            print(f"Ray's dashboard: http://{context.dashboard_url}")
    if (shell := get_ipython()) is not None:  # a call into a Ray that has died would end the kernel's process
        shell.events.register("pre_run_cell", lambda _: ray.is_initialized() and connect(ray_address, num_cpus))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True  # the same input gives the same files
    context.target_max_block_size = 32 * 2**20  # small blocks keep all stages busy and memory low


def answers() -> bool:
    """Whether the Ray that this process has joined still runs: the cluster's head, and this node's raylet."""
    here = ray.get_runtime_context()
    try:
        host, _, port = here.gcs_address.rpartition(":")
        socket.create_connection((host, port), 30).close()
        node = next(node for node in ray.nodes() if node["NodeID"] == here.get_node_id())  # "Alive" for 15 s too long
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 30).close()
    except OSError:
        return False
    return True


def start_local_ray(num_cpus: int | None) -> None:
    """`ray.init` on this machine without Ray's messages; PRETRAIN_LOCAL_RAY=1 tells workers that they share it.

    Raises ValueError if the path of the folder for temporary files is too long for sockets; TimeoutError on a machine
    so busy that Ray, which waits for half a minute, timed out `START_ATTEMPTS` times.
    """
    num_cpus = num_cpus or max(4, os.cpu_count())
    # Ray warns when it has started four times as many workers as it may start at once, by default one per core.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(2 * num_cpus))
    # Ray Data would start 32 processes for each read of Parquet files, to read their footers on a cluster's nodes.
    os.environ.setdefault("RAY_DATA_PARQUET_FOOTER_NUM_ACTORS", "1")
    # Clouds preempt nodes, not the machine that this runs on; the watcher is one more process for each run.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Ray would write a token for this session to the home, where later clusters of this machine would find it.
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())
    # Ray's C++ layer warns about Ray Data's internals. While it starts, it also reports this setting.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    environment = worker_environment(PRETRAIN_LOCAL_RAY="1")
    for _ in range(START_ATTEMPTS):
        try:
            with stderr_closed():
                ray.init("local", num_cpus=num_cpus, runtime_env=environment, **quiet)
            break
        except Exception as error:  # Ray has no narrower class for it
            if "AF_UNIX" in str(error):
                raise ValueError(
                    "Ray's sockets need a shorter path than RAY_TMPDIR or TMPDIR allows: set RAY_TMPDIR to a short "
                    f"folder, such as /tmp, and start again. ({error})"
                ) from None
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    else:
        raise TimeoutError(
            f"Ray did not start in {START_ATTEMPTS} attempts, because this machine is too busy: end what else runs on "
            "it, then run this cell again."
        )
    # A Jupyter kernel is shut down by SIGTERM, on which Ray's handler would print a stack trace.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


def worker_environment(**variables: str) -> dict:
    """What workers get: this package without its notebooks, `variables`, and this process's `FORWARDED` ones.

    A URL with a user's name in it is left out: it may hold a password. A file that `GOOGLE_APPLICATION_CREDENTIALS`
    names must be on every node. What asks for no GPU sees none.
    """
    ours = {name: os.environ[name] for name in FORWARDED if "@" not in os.environ.get(name, "@")}
    # By default Ray 2.60 hides a node's GPUs only from what asks for some of them (ray-project/ray, issue 54868):
    # encoders on CPUs, and scores beside the training, would compute on the trainers' GPUs.
    ours["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    package = str(pathlib.Path(__file__).parent)
    return {"py_modules": [package], "excludes": ["*.ipynb"], "env_vars": {**ours, **variables}}


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


def is_local_ray() -> bool:
    """Whether this process started Ray on this machine (`start_local_ray`): no other nodes will join."""
    return "PRETRAIN_LOCAL_RAY" in ray.get_runtime_context().runtime_env.get("env_vars", {})


def run_on_device(
    function: Callable, *arguments: Any, use_gpu: bool, accelerator_type: str | None = None, **options: Any
) -> Any:
    """What `function(*arguments, **options)` returns, in this process, or with `use_gpu` in a Ray task on a GPU.

    The task frees the GPU's memory when it ends; this process would keep it from the trainers. `accelerator_type`: the
    kind of GPU; None: any.
    """
    if not use_gpu:
        return function(*arguments, **options)
    on_gpu = ray.remote(num_gpus=1, max_calls=1, accelerator_type=accelerator_type)
    return ray.get(on_gpu(function).remote(*arguments, **options))


# What Ray raises when a node, an actor or a worker is lost, or an object or task because of that.
LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.ActorUnschedulableError,
)


def was_lost(error: BaseException) -> bool:
    """Whether an error says that a node, an actor or a worker was lost: the same work may succeed elsewhere.

    An actor that fails in its own `__init__` is not lost, because it would fail again: an encoder, for example, that
    cannot load its model. If a Ray Data task raised the error, often only its text arrives.
    """
    wrapped = isinstance(error, (ray.exceptions.RayTaskError, ray.exceptions.UnserializableException))
    text = str(error) if wrapped else ""
    named = [getattr(ray.exceptions, name, object) for name in re.findall(r"ray\.exceptions\.(\w+)", text)]
    in_init = getattr(error, "actor_init_failed", False) or "in its creation task" in text
    return (isinstance(error, LOST) or any(issubclass(kind, LOST) for kind in named)) and not in_init


def summarize_error(text: str) -> str:
    """One sentence for an error: what a traceback ends with, else the line that says what happened to the worker.

    Ray Data's own error, in which it wraps another one, is left out.
    """
    if "\n  File " in text and (named := re.findall(r"^(?!ray\.)[\w.]*?(\w+: .+)$", text, re.MULTILINE)):
        return named[-1][:500]
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    telling = [
        line for line in lines if any(word in line for word in (" dead", " died", "unavailable", "has been hanging"))
    ]
    line = lines[-1] if "Traceback" in text else (telling or lines)[0]
    return line.split(". ")[0][:500]


@contextlib.contextmanager
def one_line_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raises RuntimeError, "{what}: {why}", in place of Ray's errors and those of other `kinds`.

    Without it, a notebook shows the traceback of each process that an error passed through.
    """
    try:
        yield
    except (ray.exceptions.RayError, *kinds) as error:
        # Ray Train's errors have those of its workers, or its controller's.
        causes = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None) or error]
        raise RuntimeError(f"{what}: {summarize_error(str(causes[0]))}") from None
