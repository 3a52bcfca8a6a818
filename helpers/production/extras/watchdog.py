"""Ends a worker that hangs, so that Ray Train starts the workers again, and records it. Without PyTorch."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import ray.train

from ...config import Positive, TrainingConfig
from ...train import run_folder
from ...train.extra import Extra, Hook
from . import validated

if TYPE_CHECKING:
    from ...train.loop import Run
    from ...train.step import Unit

LIMIT = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
NCCL = {"RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR": "1", "RAY_TRAIN_NCCL_RAS_ACTION": "fail"}
NCCL_LIMIT = "RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S"


@validated
class Watchdog(Extra):
    """Kills a worker that makes no step for `timeout` seconds. List it first: it covers what other extras do.

    A worker that waits forever, in a collective or for a file system, looks alive from outside. The limit is ten times
    `timeout` before the first step of each shape of images, which may be compiled, and for a checkpoint, because the
    upload before it may take long.

    `asks_nccl`: Ray Train also asks NCCL every 15 seconds whether all ranks are in the same collective. If they are not
    for half of `timeout`, it ends the workers with an error that names the ranks and the collective, and writes their
    stacks to `hang_detector/` in the run's folder. It needs NCCL 2.24 or newer and the program `ncclras` on each node;
    without them Ray Train logs a warning and goes on.
    """

    timeout: Positive = 600.0
    asks_nccl: bool = False

    def __call__(self, run: Run) -> contextlib.AbstractContextManager[Hook]:
        rank = ray.train.get_context().get_world_rank()
        return Timer(self.timeout, functools.partial(record_hang, run.config.run_uri, rank))

    @contextlib.contextmanager
    def on_driver(self, config: TrainingConfig) -> Iterator[None]:
        """Ray Train gives up on a worker that does not answer for as long.

        A stopped process (SIGSTOP, a frozen machine) cannot run its own timer. Ray Train offers these settings only as
        environment variables of the process that calls `trainer.fit()`.
        """
        settings = {LIMIT: str(self.timeout)}
        if self.asks_nccl:
            settings |= {**NCCL, NCCL_LIMIT: str(self.timeout / 2)}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


class Timer(Hook):
    """Kills this process when `beat` has not been called for `timeout` seconds; before the first beat, for ten times.

    Args:
        timeout: seconds.
        on_hang: called with the seconds since the last beat, before the process is killed. It gets ten seconds, because
            the storage that it writes to may be what hangs.
    """

    def __init__(self, timeout: float, on_hang: Callable[[float], None]):
        self.timeout, self.on_hang = timeout, on_hang
        self.last_beat, self.limit = time.monotonic(), 10 * timeout
        self.shapes = set()  # columns of latents that the denoiser is compiled for
        self.stop = threading.Event()

    def beat(self, slow: bool = False) -> None:
        """Report progress. `slow`: the next beat may take ten times as long."""
        self.last_beat, self.limit = time.monotonic(), self.timeout * (10 if slow else 1)

    def before_step(self, step: int, units: list[Unit]) -> None:
        shape = units[0].latents_spec
        self.beat(slow=shape not in self.shapes)
        self.shapes.add(shape)

    def after_step(self, step: int, units: list[Unit], record: dict[str, Any]) -> None:
        self.beat()

    def before_checkpoint(self, step: int) -> dict[str, Any]:
        self.beat(slow=True)
        return {}

    def watch(self) -> None:
        while not self.stop.wait(min(1.0, self.timeout / 10)):
            silent = time.monotonic() - self.last_beat
            if silent > self.limit:
                try:
                    faulthandler.dump_traceback()  # shows in the worker's log where it hangs
                    report = threading.Thread(target=self.on_hang, args=(silent,), daemon=True)
                    report.start()
                    report.join(10)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> Timer:
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()


def record_hang(run_uri: str, rank: int, seconds: float) -> None:
    """Record in the run's `failures/` that this worker made no step for `seconds`."""
    run_folder.write_failure(run_uri, f"worker {rank} made no step in {seconds:.0f} s (watchdog) and was ended")
