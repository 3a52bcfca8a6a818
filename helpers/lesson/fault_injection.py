"""Kills a worker of a run, for lessons and tests of fault tolerance."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import storage
from ..config import TrainingConfig
from ..production import monitor
from ..train import metrics


def kill(node_id: str, pid: int) -> None:
    """SIGKILL a process on a node of the cluster."""

    def send():
        os.kill(pid, signal.SIGKILL)

    if node_id == ray.get_runtime_context().get_node_id():
        return send()
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ray.get(ray.remote(num_cpus=0, scheduling_strategy=where)(send).remote())


@contextlib.contextmanager
def inject_worker_failure(config: TrainingConfig, rank: int, at_step: int) -> Iterator[None]:
    """Fault injection around `trainer.fit()`: SIGKILL worker `rank` when the run reaches `at_step`. Demos only."""
    reader = metrics.MetricsReader(config.run_uri)
    reader.read()  # skip earlier attempts: a finished run that is started again loses no worker

    def kill_when_reached():
        if any(line["step"] >= at_step for line in reader.read()):
            worker = storage.read_json(storage.join(config.run_uri, "workers.json"))["workers"][rank]
            kill(worker["node_id"], worker["pid"])
            return True

    with monitor.poll_in_background(kill_when_reached, every=0.05):
        yield
