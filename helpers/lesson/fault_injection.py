"""Kills a worker of a run, for lessons and tests of fault tolerance."""

import contextlib
import os
import signal

import ray
import ray.train
import ray.train.collective
import ray.train.torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import storage
from ..runtime import metrics_log, monitoring


def kill(node_id, pid):
    """SIGKILL a process on a node of the cluster."""

    def send():
        os.kill(pid, signal.SIGKILL)

    if node_id == ray.get_runtime_context().get_node_id():
        return send()
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ray.get(ray.remote(num_cpus=0, scheduling_strategy=where)(send).remote())


@contextlib.contextmanager
def inject_worker_failure(config, rank, at_step):
    """While the block (`trainer.fit()`) runs: kill a worker, really, as soon as the run has reached a step.

    SIGKILL, by a task on the worker's own node. What a lesson or a drill needs; nothing else does.
    """
    reader = metrics_log.MetricsReader(config.run_uri)
    reader.read()  # what is there already does not count: a finished run that is run again loses nobody

    def strike():
        if any(line["step"] >= at_step for line in reader.read()):
            worker = storage.read_json(storage.join(config.run_uri, "workers.json"))["workers"][rank]
            kill(worker["node_id"], worker["pid"])
            return True

    with monitoring.poll_in_background(strike, every=0.05):
        yield
