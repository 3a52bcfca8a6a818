"""Hung workers are ended, failures are recorded, spot notices are answered with a checkpoint."""

import faulthandler
import os
import signal
import threading
import time

import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist

from .. import storage


class Watchdog:
    """Kills this process when `beat` has not been called for `timeout` seconds.

    A worker that waits for ever in a collective, or for a file system that does not answer, looks alive from outside.
    Until the first beat it has ten times as long: compiling, and the first batch, take their time.

    Args:
        timeout: seconds.
        on_hang: called with the seconds without progress, before the process ends; it has ten seconds, since what it
            writes to may be what hangs.
    """

    def __init__(self, timeout, on_hang=None):
        self.timeout, self.on_hang = timeout, on_hang
        self.last, self.limit = time.monotonic(), 10 * timeout
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def beat(self):
        self.last, self.limit = time.monotonic(), self.timeout

    def watch(self):
        while not self.stop.wait(min(1.0, self.timeout / 10)):
            silent = time.monotonic() - self.last
            if silent > self.limit:
                try:
                    faulthandler.dump_traceback()  # where it hangs, into the worker's log
                    if self.on_hang:
                        telling = threading.Thread(target=self.on_hang, args=(silent,), daemon=True)
                        telling.start()
                        telling.join(10)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()


def write_failure(run_uri, text):
    """Note why workers were lost, for whoever follows the run."""
    number = len(storage.list_files(storage.join(run_uri, "failures"), ".json")) + 1
    last = (
        storage.read_json(storage.join(run_uri, "failures", f"{number - 1:03d}.json"))["error"] if number > 1 else None
    )
    if text != last:  # the same failure may be polled twice
        storage.write_json(storage.join(run_uri, "failures", f"{number:03d}.json"), {"error": text})


def read_failures(run_uri):
    """What went wrong in a run, oldest first: one short text for each group of workers that was lost."""
    return [storage.read_json(uri)["error"] for uri in storage.list_files(storage.join(run_uri, "failures"), ".json")]


class PreemptionNotice:
    """Asks Ray Train, every few seconds, whether a node is about to be taken away: then a checkpoint is due.

    All workers must ask at the same steps, so how many steps that are is agreed on after the first one.
    """

    def __init__(self, every_seconds=2.0):
        self.every_seconds = every_seconds
        self.every_steps = None
        self.step = 0
        self.answered = None  # the notice that a checkpoint was saved for

    def arrived(self, step_seconds):
        """Call once a step, on every worker; True at the first step that sees a new notice."""
        self.step += 1
        if (
            self.every_steps is None or self.step == 20
        ):  # the first step is slow, and the tenth profiled (`profiling.Meter`)
            self.every_steps = max(1, round(self.every_seconds / slowest_worker(step_seconds)))
        if self.step % self.every_steps:
            return False
        info = ray.train.get_preemption_info()
        if info is None or info.preempted_node_ids == self.answered:
            return False
        self.answered = info.preempted_node_ids
        return True


def slowest_worker(seconds):
    """The largest of a number of seconds over all workers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    value = torch.tensor(seconds, device=ray.train.torch.get_device())
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def hang_callback(config):
    """What a worker that hangs does before it ends itself."""
    rank = ray.train.get_context().get_world_rank()
    return lambda seconds: write_failure(
        config.run_uri, f"worker {rank} made no step in {seconds:.0f} s (hang_timeout) and was ended"
    )


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that notes in the run's folder why workers were lost; `follow` shows it."""

    def __init__(self, run_uri):
        self.run_uri = run_uri

    def after_exception(self, run_context, worker_exceptions):
        texts = [f"worker {rank}: {summarize_error(str(error))}" for rank, error in sorted(worker_exceptions.items())]
        write_failure(self.run_uri, "; ".join(texts))


def summarize_error(text):
    """What an error says, in a sentence: below a stack the last line, else the one that tells what became of the worker."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    telling = [
        line for line in lines if any(word in line for word in (" dead", " died", "unavailable", "has been hanging"))
    ]
    line = lines[-1] if "Traceback" in text else (telling or lines)[0]
    return line.split(". ")[0][:200]
