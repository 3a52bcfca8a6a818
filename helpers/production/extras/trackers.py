"""A run's metrics, images and parameters in TensorBoard, Weights & Biases or Prometheus. No PyTorch.

The driver tracks what the run writes to its folder (`monitor.monitor_run`). Workers are not involved, and a tracker
that fails does not affect the run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from ... import storage
from ...config import Several, TrainingConfig
from ...train import run_folder
from ...train.extra import Extra
from . import validated

# `track(step, values)`: values by name are numbers or RGB images, (H, W, 3) uint8 arrays or Pillow's.
Track = Callable[[int, dict[str, Any]], object]


@validated
class Trackers(Extra):
    """Tracks a run with "tensorboard", "prometheus" (Ray's metrics), and with "wandb" if it is installed."""

    names: Several[Literal["tensorboard", "wandb", "prometheus"]] = ("tensorboard",)

    @contextlib.contextmanager
    def on_driver(self, config: TrainingConfig) -> Iterator[Track]:
        """Yields `track(step, values)`, which calls all trackers.

        A tracker that is not installed, cannot be reached or fails is reported once and dropped.
        """
        opened = {name: TRACKERS[name](config) for name in self.names}
        tracks: dict[str, Track] = {}

        def attempt(name: str, action: Callable, *arguments: Any) -> Any:
            try:
                return action(*arguments)
            except Exception as error:  # tracking must not end the run
                tracks.pop(name, None)
                print(f"tracker {name} failed: {type(error).__name__}: {error}. The run goes on without it.")

        def track(step: int, values: dict[str, Any]) -> None:
            for name, tracker in list(tracks.items()):
                attempt(name, tracker, step, values)

        for name, context in opened.items():
            tracks |= {name: tracker} if (tracker := attempt(name, context.__enter__)) else {}
        try:
            yield track
        finally:
            for name in list(tracks):
                attempt(name, opened[name].__exit__, None, None, None)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextlib.contextmanager
def tensorboard(config: TrainingConfig) -> Iterator[Track]:
    """Writes event files to the run's `tensorboard/`, by tensorboardX, which Ray Train installs.

    An object store gets the files at the end.
    """
    from tensorboardX import SummaryWriter

    uri = storage.join(config.run_uri, "tensorboard")
    with contextlib.ExitStack() as stack:
        folder = uri if storage.is_local(uri) else stack.enter_context(tempfile.TemporaryDirectory())
        if folder != uri:
            stack.callback(storage.copy_folder, folder, uri)

        def open_writer(step: int) -> SummaryWriter:
            """Events from `step` on that an earlier writer wrote are hidden: these steps are done again."""
            # A file's name has the second; two writers of one second must not share it.
            options = {"flush_secs": 10, "purge_step": step, "filename_suffix": f".{step}"}
            return stack.enter_context(SummaryWriter(folder, **options))

        newest = run_folder.last_step(config)
        writer = open_writer(newest + 1)
        writer.add_text("parameters", f"```\n{json.dumps(config.to_dict(), indent=1)}\n```")

        def track(step: int, values: dict[str, Any]) -> None:
            nonlocal writer, newest
            if "step_seconds" in values:  # a step's, not an evaluation's, which comes later than newer steps
                if step <= newest:
                    writer.close()
                    writer = open_writer(step)
                newest = step
            for name, value in values.items():
                if is_number(value):
                    writer.add_scalar(name, value, step)
                else:
                    writer.add_image(name, np.asarray(value), step, dataformats="HWC")

        yield track


@contextlib.contextmanager
def wandb(config: TrainingConfig) -> Iterator[Track]:
    """Logs to a run of the project "pretraining"; a resumed run continues it. WANDB_MODE=offline needs no network."""
    import wandb

    named = dict(project="pretraining", name=config.run_name, id=run_folder.run_id(config.run_uri), resume="allow")
    with wandb.init(**named, config=config.to_dict()) as run:
        run.define_metric("*", step_metric="step")  # wandb's own steps cannot go back, as a validation's do

        def track(step: int, values: dict[str, Any]) -> None:
            shown = {name: value if is_number(value) else wandb.Image(value) for name, value in values.items()}
            run.log({"step": step, **shown})

        yield track


@contextlib.contextmanager
def prometheus(config: TrainingConfig) -> Iterator[Track]:
    """Sets three of Ray's metrics, `ray_pretraining_loss` and so on, tagged with the run.

    The driver's node exports them; `helpers/clusters/grafana.json` shows them.
    """
    from ray.util.metrics import Gauge

    gauges = {
        name: Gauge(f"pretraining_{name}", description=text, tag_keys=("run",)) for name, text in EXPORTED.items()
    }

    def track(step: int, values: dict[str, Any]) -> None:
        for name in gauges.keys() & values.keys():
            gauges[name].set(values[name], tags={"run": config.run_name})

    yield track


EXPORTED = {
    "images_per_second": "Rows trained on in a second, over all workers.",
    "loss": "Training loss of the newest step.",
    "data_wait_share": "Share of a step that waited for data.",
}
TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "prometheus": prometheus}
