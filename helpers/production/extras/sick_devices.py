"""Finds sick devices of the training workers before they train, and excludes their machines."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import ray
import ray.train
import ray.train.collective
import torch

from ... import distributed, storage
from ...config import TrainingConfig
from ...train import run_folder
from ...train.extra import Extra
from . import validated

MOST_EXCLUDED = 2  # nodes
EXCLUDED = "excluded.json"  # in a run's folder: the nodes that were excluded since its driver started
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head alone


def check_device(device: torch.device) -> str | None:
    """The problem with this worker's device; None if there is none.

    It multiplies matrices of integers that every precision holds exactly: once on a CPU, repeatedly for one second on a
    GPU. The right product is known: a Sylvester-Hadamard matrix with n rows, times itself, is n times the identity.
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
    """The problem that an all-reduce of integers finds in the links between workers; None if there is none.

    Call it on all ranks.
    """
    ranks = distributed.world_size()
    numbers = torch.full((2**24 if device.type == "cuda" else 2**10,), distributed.rank() + 1.0, device=device)
    wrong = (distributed.sum_over_ranks(numbers) != ranks * (ranks + 1) / 2).any()
    return "got wrong sums from the other workers" if wrong else None


@validated
class SickDevices(Extra):
    """Checks the device and the links of each worker, for a second on a GPU."""

    def check(self, run_uri: str, device: torch.device) -> str | None:
        """A sentence if a device or link of any worker computes wrongly; the sick worker raises RuntimeError.

        The sick workers' machines are excluded. Ray Train then starts the group again, on other machines or with fewer
        workers. If `exclude` ends the run instead, no worker raises.
        """
        problems = {"device": check_device(device), "links": check_links(device)}
        text = " and ".join(filter(None, problems.values()))
        found = {
            **problems,
            "text": f"{device} of {socket.gethostname()} (worker {distributed.rank()}) {text}",
            "node": ray.get_runtime_context().get_node_id(),
        }
        everyone = distributed.gather_objects(found, distributed.new_cpu_group())
        sick = ray.train.collective.broadcast_from_rank_zero(everyone and exclude(run_uri, everyone))
        if distributed.rank() in (sick or ()):
            raise RuntimeError(f"{found['text']}: this machine is excluded, and the run goes on without it.")
        return None if sick is None else "A worker's device or link computes wrongly: the workers are started again."

    def on_driver(self, config: TrainingConfig) -> contextlib.AbstractContextManager:
        storage.delete(storage.join(config.run_uri, EXCLUDED))
        return contextlib.nullcontext()


def exclude(run_uri: str, everyone: list[dict]) -> list[int] | None:
    """Take the nodes of sick workers out of Ray; returns the ranks of these workers, None if all are well.

    In four cases it excludes no node, ends the run with an error that names the sick workers, and returns [].
        - A sick worker is on the head node, which the driver needs.
        - Ray's list of nodes does not say which node is the head.
        - More than `MOST_EXCLUDED` nodes would be excluded, so the check itself may be wrong.
        - All workers get wrong sums and no device is sick, so the machine that causes the wrong sums is unknown.

    Args:
        everyone: for each rank {"device", "links": problems or None, "text": a sentence, "node": its id}.
    """
    # A device that computes wrongly spoils the sums of all.
    computing, summing = ([rank for rank, found in enumerate(everyone) if found[what]] for what in ("device", "links"))
    sick = computing or summing
    if not sick:
        return None
    uri, nodes = storage.join(run_uri, EXCLUDED), {everyone[rank]["node"] for rank in sick}
    excluded = nodes.union(storage.read_json(uri, shape=[str]) if storage.exists(uri) else [])
    heads = {node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"]}
    text = "; ".join(everyone[rank]["text"] for rank in sick)
    if not heads or nodes & heads or len(excluded) > MOST_EXCLUDED or (not computing and len(summing) == len(everyone)):
        error = f"{text}: start the same command again without this machine."
        run_folder.write_failure(run_uri, error)
        run_folder.end_run(run_uri, error)
        return []
    storage.write_json(uri, sorted(excluded))
    for node in nodes:
        drain_node(text, node)
    return sick


def drain_node(reason: str, node_id: str) -> None:
    """Tell Ray that a node will go: nothing is placed there any more, and Ray Train's workers there save a checkpoint.

    Ray on that node ends as soon as nothing runs there. `node_id`: in hex. Raises RuntimeError if Ray refuses.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", reason, "--node-id", node_id]
    command += ["--address", ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"Ray did not drain the node {node_id}: {(done.stderr or done.stdout).strip()[-500:]}")
