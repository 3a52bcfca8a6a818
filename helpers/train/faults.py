"""Faults of training workers: hangs, sick machines, preemptions, lost checkpoints; the records of them."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import ray
import ray.train
import ray.train.collective
import torch
from pyarrow import fs

from .. import distributed, storage
from ..runtime import drain

# In a run's folder: why its workers ended it, and the nodes that were excluded since its driver started.
ENDED, EXCLUDED = "ended.json", "excluded.json"
MOST_EXCLUDED = 2
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head alone


class Watchdog:
    """Kills this process when `beat` has not been called for `timeout` seconds.

    A worker that waits forever, in a collective or for a file system, looks alive from outside. The limit is
    10 * `timeout` before the first beat, which includes compilation and the first batch. It is also 10 * `timeout`
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


def record_hang(run_uri: str, seconds: float) -> None:
    """For `Watchdog(on_hang=...)`: record in the run's `failures/` that this worker made no step for `seconds`."""
    error = f"worker {distributed.rank()} made no step in {seconds:.0f} s (hang_timeout) and was ended"
    write_failure(run_uri, error)


def check_device(device: torch.device) -> str | None:
    """The problem with this worker's device; None if there is none.

    Multiplies integer matrices, on a GPU for a second. Every precision holds these integers exactly, and the product is
    known: a Sylvester-Hadamard matrix times itself is its size times the identity.
    """
    on_gpu = device.type == "cuda"
    matrix = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    while len(matrix) < 256:  # bf16 holds whole numbers up to 256
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrices = matrix.repeat(1024 if on_gpu else 1, 1, 1)
    expected = (256 * torch.eye(256, dtype=matrix.dtype, device=device)).expand_as(matrices)
    end = time.monotonic() + (1 if on_gpu else 0)
    while True:
        if not torch.equal(torch.bmm(matrices, matrices), expected):
            return "multiplies matrices wrongly"
        if time.monotonic() >= end:
            return None


def check_links(device: torch.device) -> str | None:
    """The problem with the links between the workers, by an all-reduce of integers. Call it on all ranks."""
    ranks = distributed.world_size()
    numbers = torch.full((2**24 if device.type == "cuda" else 2**10,), distributed.rank() + 1.0, device=device)
    wrong = (distributed.sum_over_ranks(numbers) != ranks * (ranks + 1) / 2).any()
    return "got wrong sums from the other workers" if wrong else None


def end_if_sick(run_uri: str, device: torch.device) -> bool:
    """Return True if a device or link of any worker computes wrongly.

    The caller must then return from the training function. Call it on all ranks.

    The sick workers' machines are excluded, and these workers raise RuntimeError. Ray Train then starts the group
    again, on other machines or with fewer workers. If `exclude` ends the run instead, no worker raises.
    """
    problems = {"device": check_device(device), "links": check_links(device)}
    text = " and ".join(filter(None, problems.values()))
    found = {
        **problems,
        "text": f"{device} of {socket.gethostname()} (worker {distributed.rank()}) {text}",
        "node": ray.get_runtime_context().get_node_id(),
    }
    everyone = distributed.gather_objects(found)
    sick = ray.train.collective.broadcast_from_rank_zero(everyone and exclude(run_uri, everyone))
    if distributed.rank() in (sick or ()):
        raise RuntimeError(f"{found['text']}: this machine is excluded, and the run goes on without it.")
    return sick is not None


def exclude(run_uri: str, everyone: list[dict]) -> list[int] | None:
    """Take the nodes of sick workers out of Ray; returns the ranks of these workers, None if all are well.

    It ends the run and returns [] in three cases. The error then names the sick workers.
        - A sick worker is on the head node, which the driver needs, or Ray's list of nodes does not tell the head.
        - More than `MOST_EXCLUDED` nodes would be excluded, so the check itself may be wrong.
        - All workers get wrong sums and no device is sick, so the machine that causes them is unknown.

    Args:
        everyone: for each rank {"device", "links": problems or None, "text": a sentence, "node": its id}.
    """
    # A device that computes wrongly spoils the sums of all.
    computing, summing = ([rank for rank, found in enumerate(everyone) if found[what]] for what in ("device", "links"))
    sick = computing or summing
    if not sick:
        return None
    uri, nodes = storage.join(run_uri, EXCLUDED), {everyone[rank]["node"] for rank in sick}
    excluded = nodes.union(storage.read_json(uri) if storage.exists(uri) else [])
    heads = {node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"]}
    text = "; ".join(everyone[rank]["text"] for rank in sick)
    if not heads or nodes & heads or len(excluded) > MOST_EXCLUDED or (not computing and len(summing) == len(everyone)):
        error = f"{text}: start the same command again without this machine."
        write_failure(run_uri, error)
        end_run(run_uri, error)
        return []
    storage.write_json(uri, sorted(excluded))
    for node in nodes:
        drain.drain_node(text, node_id=node, address=ray.get_runtime_context().gcs_address)
    return sick


class PreemptionNotice:
    """Asks Ray Train every few seconds whether a node of the run is about to be preempted, to save a checkpoint.

    All workers must ask at the same steps. So they agree on how many steps lie between two requests. They choose this
    number after their step 1, and again after their step 20, because the first steps are slower.
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
