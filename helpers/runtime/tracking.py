"""A run's metrics, pictures and parameters in TensorBoard, Weights & Biases, MLflow, or a function of your own.

The driver tracks what the run writes to its folder, along with the progress (`monitoring.monitor_run`): workers are not
involved, and a tracker that fails does not affect the run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import storage
from ..config import TrainingConfig
from . import metrics_log, results

# `track(step, values)`: values by name are numbers, or pictures (RGB arrays H x W x 3 of uint8, or Pillow's).
Track = Callable[[int, dict[str, Any]], object]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextlib.contextmanager
def tensorboard(config: TrainingConfig) -> Iterator[Track]:
    """Event files in the run's `tensorboard/`, by tensorboardX, which Ray Train installs.

    If that is on an object store, they are copied there at the end.
    """
    from tensorboardX import SummaryWriter

    uri = storage.join(config.run_uri, "tensorboard")
    with contextlib.ExitStack() as stack:
        folder = uri if storage.is_local(uri) else stack.enter_context(tempfile.TemporaryDirectory())
        if folder != uri:
            stack.callback(storage.copy_folder, folder, uri)
        writer = stack.enter_context(SummaryWriter(folder, flush_secs=10))
        writer.add_text("parameters", f"```\n{json.dumps(config.to_dict(), indent=1)}\n```")

        def track(step, values):
            for name, value in values.items():
                if is_number(value):
                    writer.add_scalar(name, value, step)
                else:
                    writer.add_image(name, np.asarray(value), step, dataformats="HWC")

        yield track


@contextlib.contextmanager
def wandb(config: TrainingConfig) -> Iterator[Track]:
    """A run of the project "pretraining"; a resumed run continues there. WANDB_MODE=offline needs no network."""
    import wandb

    named = dict(project="pretraining", name=config.run_name, id=config.run_name, resume="allow")
    with wandb.init(**named, config=config.to_dict()) as run:
        run.define_metric("*", step_metric="step")  # wandb's own steps cannot go back, as a validation's do

        def track(step, values):
            shown = {name: value if is_number(value) else wandb.Image(value) for name, value in values.items()}
            run.log({"step": step, **shown})

        yield track


@contextlib.contextmanager
def mlflow(config: TrainingConfig) -> Iterator[Track]:
    """A run of the experiment "pretraining", at MLFLOW_TRACKING_URI; a resumed run continues there."""
    import mlflow

    mlflow.set_experiment("pretraining")
    found = mlflow.search_runs(filter_string=f"attributes.run_name = '{config.run_name}'", output_format="list")
    known = {"run_id": found[0].info.run_id} if found else {"run_name": config.run_name}
    with mlflow.start_run(**known):
        if not found:
            mlflow.log_params(config.to_dict())

        def track(step, values):
            mlflow.log_metrics({name: value for name, value in values.items() if is_number(value)}, step=step)
            for name, value in values.items():
                if not is_number(value):
                    mlflow.log_image(np.asarray(value), key=name, step=step)

        yield track


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


@contextlib.contextmanager
def start(config: TrainingConfig, own: Sequence[Track] = ()) -> Iterator[Track]:
    """Start `config.trackers` and your `own` functions; yields a function that calls all of them.

    One that is not installed, cannot be reached or fails is reported once and dropped; training continues.
    """
    active: dict[str, Track] = {f"function {track!r}": track for track in own}
    open_trackers = {}

    def attempt(name, action):
        try:
            return action()
        except Exception as error:  # tracking must not end the run
            active.pop(name, None)
            why = "is not installed" if isinstance(error, ImportError) else "failed"
            print(f"tracker {name} {why}: {type(error).__name__}: {error}. The run goes on without it.")

    def track(step: int, values: dict[str, Any]) -> None:
        for name, one in list(active.items()):
            attempt(name, lambda one=one: one(step, values))

    for name in config.trackers:
        open_trackers[name] = TRACKERS[name](config)
        started = attempt(name, open_trackers[name].__enter__)
        if started:
            active[name] = started
    try:
        yield track
    finally:
        for name in set(open_trackers) & set(active):
            attempt(name, lambda name=name: open_trackers[name].__exit__(None, None, None))


class RunReader:
    """Reads what a run writes to its folder from now on: `values()` yields each step and evaluated checkpoint once.

    `said`: sentences about evaluations that failed or were skipped; the caller removes them.
    """

    def __init__(self, config: TrainingConfig):
        self.run_uri, self.folder = config.run_uri, storage.join(config.run_uri, "validation")
        self.seen, self.said = {uri for uri in self.files() if "unfinished" not in storage.read_json(uri)}, []
        earlier = metrics_log.read_metrics(config.run_uri, all_attempts=True)
        self.earlier = set(zip(earlier["step"], earlier["attempt"], strict=True)) if len(earlier) else set()

    def files(self) -> list[str]:
        return storage.list_files(self.folder, ".json")

    def values(self, lines: list[dict]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield `(step, values)` of `lines` of the metrics, and of evaluations finished since the last call.

        The values of an evaluation are its numbers, and its pictures as "evaluation".
        """
        for line in lines:
            if (line["step"], line["attempt"]) not in self.earlier:
                yield line["step"], {name: value for name, value in line.items() if name != "step" and is_number(value)}
        for uri in self.files():
            result = {"unfinished": True} if uri in self.seen else storage.read_json(uri)
            if "unfinished" not in result:
                self.seen.add(uri)
                self.said += results.sentences(result)
                values = results.numbers(result)
                step = values.pop("step")
                grid = storage.join(self.run_uri, "evaluation", f"{step:09d}", "grid.png")
                if storage.exists(grid):
                    values["evaluation"] = results.read_picture(grid)
                if values:  # empty for a checkpoint that was skipped
                    yield step, values


# ---- the machines


class NodeUse:
    """CPU, network and GPU use of the machine that it runs on, since the last call."""

    def __init__(self):
        psutil.cpu_percent()
        self.before = time.monotonic(), psutil.net_io_counters()

    def read(self) -> dict[str, float]:
        """cpu_percent, sent and received GB/s, and of all GPUs together gpu_percent and gpu_memory_gib."""
        (then, old), (now, new) = self.before, (time.monotonic(), psutil.net_io_counters())
        self.before, seconds = (now, new), max(1e-9, now - then)
        use = {
            "cpu_percent": psutil.cpu_percent(),
            "sent_gb_per_second": (new.bytes_sent - old.bytes_sent) / seconds / 1e9,
            "received_gb_per_second": (new.bytes_recv - old.bytes_recv) / seconds / 1e9,
        }
        query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):  # no GPU here
            lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
            gpus = np.array([[float(value) for value in line.split(",")] for line in lines])
            use |= {"gpu_percent": gpus[:, 0].mean(), "gpu_memory_gib": gpus[:, 1].sum() / 1024}
        return {name: float(value) for name, value in use.items()}


class ClusterUse:
    """`NodeUse` of every node of the cluster, by an actor on each, without waiting for any of them."""

    def __init__(self):
        self.actors, self.asked = {}, {}

    def values(self) -> dict[str, float]:
        """What arrived since the last call: {"nodes/{address}/{name}": value}. Nodes may come and go."""
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self.actors = {node: actor for node, actor in self.actors.items() if node in alive}
        for node in alive.keys() - self.actors.keys():
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            self.actors[node] = ray.remote(num_cpus=0)(NodeUse).options(scheduling_strategy=on_node).remote()
        ready, _ = ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0) if self.asked else ([], [])
        found = {}
        for answer in ready:
            node = self.asked.pop(answer)
            try:
                found |= {f"nodes/{alive.get(node, node)}/{name}": value for name, value in ray.get(answer).items()}
            except ray.exceptions.RayError:  # the node was lost, or the actor, which is restarted
                self.actors.pop(node, None)
        for node in self.actors.keys() - set(self.asked.values()):
            self.asked[self.actors[node].read.remote()] = node
        return found
