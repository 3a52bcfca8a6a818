"""A run's failures: the watchdog of a worker, the records of lost workers and checkpoints. Without PyTorch.

Ray Train's controller loads this module, so the checks of a worker's device, which need PyTorch, are in `devices`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable

import ray.train
from pyarrow import fs

from .. import cluster, storage

# In a run's folder: why its workers ended it, and the nodes that were excluded since its driver started.
ENDED, EXCLUDED = "ended.json", "excluded.json"
MAX_LOST = 3  # checkpoints in a row, after which a run ends


class Watchdog:
    """Kills this process when `beat` has not been called for `timeout` seconds.

    A worker that waits forever, in a collective or for a file system, looks alive from outside. Until the first beat
    the limit is 10 * `timeout`, because that time includes compilation and the first batch. It is also 10 * `timeout`
    after `beat(slow=True)`.

    Args:
        timeout: seconds.
        on_hang: called with the seconds since the last beat, before the process is killed. It gets ten seconds, because
            the storage that it writes to may be what hangs.
    """

    def __init__(self, timeout: float, on_hang: Callable[[float], None]):
        self.timeout, self.on_hang = timeout, on_hang
        self.last_beat, self.limit = time.monotonic(), 10 * timeout
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def beat(self, slow: bool = False) -> None:
        """Report progress. `slow`: the next beat may take ten times as long."""
        self.last_beat, self.limit = time.monotonic(), self.timeout * (10 if slow else 1)

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

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()


def record_hang(run_uri: str, rank: int, seconds: float) -> None:
    """For `Watchdog(on_hang=...)`: record in the run's `failures/` that this worker made no step for `seconds`."""
    error = f"worker {rank} made no step in {seconds:.0f} s (hang_timeout) and was ended"
    write_failure(run_uri, error)


class LostCheckpoint(ray.train.Checkpoint):
    """What rank 0 reports to Ray Train in place of a checkpoint that a worker could not upload; `why`: a sentence.

    It is falsy. Ray Train registers only truthy checkpoints, so a lost one replaces no older checkpoint. This project's
    code recognises it by `isinstance`.
    """

    def __init__(self, path: str, filesystem: fs.FileSystem, why: str):
        super().__init__(path, filesystem)
        self.why = why

    def __bool__(self) -> bool:
        return False


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that records why workers were lost; `monitor_run` shows the records.

    It ends the run when `MAX_LOST` checkpoints in a row are lost, because no step since the last complete checkpoint is
    saved.
    """

    def __init__(self, run_uri: str):
        self.run_uri = run_uri
        self.lost = 0  # checkpoints since the last complete one

    def after_report(self, run_context, metrics, checkpoint):
        self.lost = self.lost + 1 if isinstance(checkpoint, LostCheckpoint) else 0
        if self.lost == MAX_LOST:  # raised in Ray Train's controller, which then starts no workers again
            raise RuntimeError(
                f"{MAX_LOST} checkpoints in a row were lost; {checkpoint.why}: start the same command again when the "
                "storage takes files; the run resumes from its last complete checkpoint."
            )

    def after_exception(self, run_context, worker_exceptions):
        errors = [
            f"worker {rank}: {cluster.summarize_error(str(error))}" for rank, error in sorted(worker_exceptions.items())
        ]
        write_failure(self.run_uri, "; ".join(errors))


def write_failure(run_uri: str, error: str) -> None:
    """Print why workers or a checkpoint were lost, and record it in the run's `failures/`.

    If the storage refuses the record, the reason is only printed.
    """
    print(error)
    try:
        errors = read_failures(run_uri)
        if errors[-1:] != [error]:  # Ray Train may report a failure twice
            storage.write_json(storage.join(run_uri, "failures", f"{len(errors) + 1:03d}.json"), {"error": error})
    except OSError as refused:
        print(f"This could not be recorded: {refused}")


def read_failures(run_uri: str) -> list[str]:
    """One short text for each group of workers and each checkpoint that was lost, oldest first."""
    uris = storage.list_files(storage.join(run_uri, "failures"), ".json")
    return [storage.read_json(uri, "left out", lambda sentence: {"error": sentence})["error"] for uri in uris]


def end_run(run_uri: str, error: str) -> None:
    """End the run with `error`: call it in one worker, then return from all. Ray Train does not restart the run."""
    storage.write_json(storage.join(run_uri, ENDED), {"error": error})
