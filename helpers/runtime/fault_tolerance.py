"""Workers that hang are ended, failures are recorded, and a preemption notice is answered with a checkpoint."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

import ray.exceptions
import ray.train
import torch

from .. import distributed, storage
from ..config import TrainingConfig

# What Ray raises where a node, an actor or a worker is gone, or what it held or was to do.
LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.ActorUnschedulableError,
)


class Watchdog:
    """Kills this process when `beat` has not been called for `timeout` seconds.

    A worker that waits forever in a collective, or for a file system that does not answer, looks alive from outside.
    Until the first beat it has ten times as long, for compilation and the first batch.

    Args:
        timeout: seconds.
        on_hang: called with the seconds without progress before the process is killed. It has ten seconds, because the
            storage that it writes to may be what hangs.
    """

    def __init__(self, timeout: float, on_hang: Callable[[float], None] | None = None):
        self.timeout, self.on_hang = timeout, on_hang
        self.last_beat, self.limit = time.monotonic(), 10 * timeout
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        self.last_beat, self.limit = time.monotonic(), self.timeout

    def watch(self) -> None:
        while not self.stop.wait(min(1.0, self.timeout / 10)):
            silent = time.monotonic() - self.last_beat
            if silent > self.limit:
                try:
                    faulthandler.dump_traceback()  # shows in the worker's log where it hangs
                    if self.on_hang:
                        report = threading.Thread(target=self.on_hang, args=(silent,), daemon=True)
                        report.start()
                        report.join(10)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()


def hang_callback(config: TrainingConfig) -> Callable[[float], None]:
    """For `Watchdog(on_hang=...)`: records the failure in the run's folder."""
    rank = distributed.rank()
    return lambda seconds: write_failure(
        config.run_uri, f"worker {rank} made no step in {seconds:.0f} s (hang_timeout) and was ended"
    )


def limit_health_checks(seconds: float) -> None:
    """Let Ray Train, started from this process, replace workers that do not answer its health check within `seconds`.

    A stopped process (SIGSTOP, a frozen machine) cannot run its own `Watchdog`. Ray Train offers this only as an
    environment variable, which its controller takes from the process that calls `trainer.fit()`.
    """
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(seconds)


class PreemptionNotice:
    """Asks Ray Train every few seconds whether a node of the run is about to be taken away: save a checkpoint then.

    All workers must ask at the same steps, so they agree on a number of steps: after the first step, and again after
    the twentieth, because the first ones are slower.
    """

    def __init__(self, device: torch.device | str, every_seconds: float = 2.0):
        self.device, self.every_seconds = device, every_seconds
        self.every_steps = None
        self.step = 0
        self.answered = None  # node ids of the last notice

    def arrived(self, step_seconds: float) -> bool:
        """Call after each step, on all workers; True at the first step that sees a new notice."""
        self.step += 1
        if self.step in (1, 20):
            slowest = distributed.max_over_ranks(step_seconds, self.device)
            self.every_steps = max(1, round(self.every_seconds / slowest))
        if self.step % self.every_steps:
            return False
        info = ray.train.get_preemption_info()
        if info is None or info.preempted_node_ids == self.answered:
            return False
        self.answered = info.preempted_node_ids
        return True


def write_failure(run_uri: str, error: str) -> None:
    """Record why workers were lost, in `failures/` of the run."""
    folder, errors = storage.join(run_uri, "failures"), read_failures(run_uri)
    if errors[-1:] != [error]:  # Ray Train may report a failure twice
        storage.write_json(storage.join(folder, f"{len(errors) + 1:03d}.json"), {"error": error})


def read_failures(run_uri: str) -> list[str]:
    """One short text for each group of workers that was lost, oldest first."""
    return [storage.read_json(uri)["error"] for uri in storage.list_files(storage.join(run_uri, "failures"), ".json")]


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that records why workers were lost; `monitoring.monitor_run` shows it."""

    def __init__(self, run_uri: str):
        self.run_uri = run_uri

    def after_exception(self, run_context, worker_exceptions):
        errors = [f"worker {rank}: {summarize_error(str(error))}" for rank, error in sorted(worker_exceptions.items())]
        write_failure(self.run_uri, "; ".join(errors))


def was_lost(error: BaseException) -> bool:
    """Whether an error says that a node, an actor or a worker was lost: the same work may succeed elsewhere.

    An actor that fails in its own `__init__`, such as an encoder that cannot load its model, would fail again.
    """
    return isinstance(error, LOST) and not getattr(error, "actor_init_failed", False)


def summarize_error(text: str) -> str:
    """One sentence of an error: the last line of a traceback, else the line that says what happened to the worker."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    telling = [
        line for line in lines if any(word in line for word in (" dead", " died", "unavailable", "has been hanging"))
    ]
    line = lines[-1] if "Traceback" in text else (telling or lines)[0]
    return line.split(". ")[0][:200]
