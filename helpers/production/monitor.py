"""What the driver does while a run trains: show its progress, record its failures, raise what ended it.

`python -m helpers.production.monitor storage/runs/NAME` shows a run's progress in another terminal.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import ray.train
from IPython import get_ipython
from IPython.display import Image, display

from .. import cluster, storage
from ..config import TrainingConfig
from ..latents.manifest import DataSets
from ..notebook import Progress, interruptible, keep_executed_notebook, with_interrupt_hint
from ..train import run_folder, start
from ..train.extra import Extra
from ..train.metrics import MetricsReader, read_metrics, throughput
from . import lease
from .checks import training
from .extras import results, trackers


@contextlib.contextmanager
def poll_in_background(action: Callable[[], object], every: float) -> Iterator[None]:
    """While the block runs, call `action()` in a thread every `every` seconds, until it returns True.

    An exception in `action` is raised when the block ends.
    """
    stop = threading.Event()

    def poll():
        while not stop.wait(every) and not action():
            pass

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            yield
        finally:
            stop.set()
    polling.result()


def print_if_finished(config: TrainingConfig, extras: dict[str, Extra] | None = None) -> bool:
    """Whether a run has done all its steps; if so, print when, and how to train anew.

    A run that `extras` evaluate, and whose last evaluation is missing, is not finished: `trainer.fit()` makes up for
    it.
    """
    step = run_folder.last_step(config)
    result = results.read_result(config.run_uri, step)
    missing = len(result) == 1 or "unfinished" in result
    if step < config.max_steps or ("evaluate" in (extras or {}) and missing):
        return False
    written = storage.version(storage.join(run_folder.last_complete(config.run_uri), run_folder.PROGRESS))[1]
    when = time.strftime("%d %B %Y at %H:%M", time.localtime(written / 1e9))
    print(
        f"Nothing to do: the run {config.run_name} finished its {step:,} steps on {when}. To train anew, set run_name "
        f'to another name in the cell of parameters, such as "{config.run_name}-2", and run the cells from there.'
    )
    return True


def hold(config: TrainingConfig) -> lease.Lease:
    return lease.hold(config.run_uri, f"run_name={config.run_name!r}")


def open_run(config: TrainingConfig) -> DataSets:
    """`start.open_run` with all checks, and with the run's lease, which this process holds from then on.

    Prints what the run will not use.
    """
    # The lease is taken by the guard, so a run that is refused leaves no folder.
    data = start.open_run(config, training.ALL, guard=lambda: hold(config).check())
    for sentence in training.notes(config, data):
        print(sentence)
    return data


class RunDisplay:
    """Shows what a run writes to its folder: its steps, evaluations, and lost workers and checkpoints.

    Except for the metrics, it does not show what the folder already holds when the display is made.

    Args:
        run_uri: the run's folder.
        max_steps: of the run.
        track: gets the numbers of each step and evaluation, and the evaluation's images as "evaluation".
    """

    def __init__(self, run_uri: str, max_steps: int, track: trackers.Track = lambda step, values: None):
        self.run_uri, self.max_steps, self.track = run_uri, max_steps, track
        self.progress = Progress(f"run {storage.name(run_uri)}", "steps")
        self.metrics, self.evaluations = MetricsReader(run_uri), results.ResultsReader(run_uri)
        self.num_failures = len(run_folder.read_failures(run_uri))
        self.images = None  # the display of an evaluation's images
        self.recent = pd.DataFrame()  # the metrics of the last 10,000 steps

    def update(self) -> None:
        """Show what is new."""
        self.show_failures()
        self.show_evaluations()
        self.show_steps()

    def show_failures(self) -> None:
        failures = run_folder.read_failures(self.run_uri)
        for failure in failures[self.num_failures :]:
            self.progress.message(f"lost: {failure}")
        self.num_failures = len(failures)

    def show_evaluations(self) -> None:
        for result in self.evaluations.read():
            for sentence in results.sentences(result):
                self.progress.message(sentence)
            values = results.numeric_values(result)
            step = values.pop("step")
            grid_uri = results.grid_uri(self.run_uri, step)
            if storage.exists(grid_uri):
                values["evaluation"] = results.read_png(grid_uri)
                self.show_images(grid_uri, f"Images of prompts after step {step}")
            if values:  # an evaluation that was skipped has none
                self.track(step, values)

    def show_images(self, uri: str, described: str) -> None:
        """Show an evaluation's images below the line, in place of those before. `described`: their alternative text."""
        if get_ipython() is None:
            return
        image = Image(storage.read_bytes(uri), format="png", alt=described)
        if self.images is None:
            self.images = display(image, display_id=True)
        else:
            self.images.update(image)

    def show_steps(self) -> None:
        new = self.metrics.read()
        if self.metrics.torn:
            self.progress.message(f"Lines of the metrics that are torn, and left out: {self.metrics.torn}")
            self.metrics.torn = 0
        for record in new:
            values = results.numeric_values(record)
            self.track(values.pop("step"), values)
        if not new:
            return
        # A step that is repeated after a failure counts once, as the newest.
        recent = pd.concat([self.recent, pd.DataFrame(new)]).drop_duplicates("step", keep="last")
        self.recent = recent.tail(10_000)
        step, loss = new[-1]["step"], self.recent["loss"][-50:].astype(float).mean()
        images_per_second, _ = throughput(self.recent)
        self.progress(step, self.max_steps, f"loss {loss:.3f}, {images_per_second:,.0f} images/s")


def follow(run_uri: str, every: float = 1.0) -> None:
    """Print a run's progress until it has done its steps, whoever trains it."""
    display = RunDisplay(run_uri, start.read_config(run_uri)["parameters"]["max_steps"])
    while display.recent.empty or display.recent["step"].iloc[-1] < display.max_steps:
        display.show_steps()
        time.sleep(every)


@contextlib.contextmanager
def monitor_run(config: TrainingConfig, extras: dict[str, Extra] | None = None, every: float = 1.0) -> Iterator[None]:
    """Context manager around `trainer.fit()`: shows the run's progress, and its lost workers and checkpoints.

    Images/s are `metrics.throughput` over the last 10,000 steps; the loss is the mean of the last 50. The run's
    metrics and images go to the trackers of `extras`. The run's lease is held until the block ends. If the storage is
    unreachable, a warning is printed once and the last display stays. The run's folder keeps the executed notebook.

    An interrupt ends the run and raises KeyboardInterrupt, whose text says at which step the same cell resumes the run.
    Raises RuntimeError if the run fails, or if its workers end it, as after a loss that is not finite.
    """
    warned = False  # that the storage is unreachable

    def poll():
        nonlocal warned
        try:
            display.update()
            warned = False
        except OSError as error:  # the workers may go on, so the driver does
            if not warned:
                why = f"The run's folder cannot be read, which is tried again every {every:g} s: {error}"
                display.progress.message(why)
            warned = True

    with contextlib.ExitStack() as stack:
        stack.enter_context(with_interrupt_hint(lambda: where_it_stopped(config)))
        track = stack.enter_context(enter_extras(config, extras or {}))
        display = RunDisplay(config.run_uri, config.max_steps, track)
        display.metrics.read()  # steps of an earlier driver
        display.progress.begin(run_folder.last_step(config), config.max_steps, "starting the workers")
        stack.callback(poll)  # the last steps
        with (
            hold(config),
            run_folder.raise_end(config.run_uri),
            cluster.one_line_error("The same command resumes the run, which failed", ray.train.TrainingFailedError),
            interruptible(),
            poll_in_background(poll, every),
        ):
            keep_executed_notebook(config.run_uri)
            yield


@contextlib.contextmanager
def enter_extras(config: TrainingConfig, extras: dict[str, Extra]) -> Iterator[trackers.Track]:
    """What the extras of a run do on the driver; yields `track(step, values)`, which calls all trackers."""
    with contextlib.ExitStack() as stack:
        tracks = [stack.enter_context(extra.on_driver(config)) for extra in extras.values()]

        def track(step: int, values: dict[str, Any]) -> None:
            for tracker in filter(None, tracks):
                tracker(step, values)

        yield track


def where_it_stopped(config: TrainingConfig) -> str:
    """What an interrupted run prints: the step after which it stopped, and the step at which the same cell goes on."""
    steps, saved = read_metrics(config.run_uri)["step"], run_folder.last_step(config)
    done = f"after step {steps.iloc[-1]:,}" if len(steps) else "before the first step"
    kept = f"goes on from the last checkpoint, which is of step {saved:,}" if saved else "begins at step 1"
    return f"Stopped {done}. Running this cell again {kept}."


if __name__ == "__main__":
    if len(sys.argv) != 2 or not storage.exists(storage.join(sys.argv[1], "config.json")):
        sys.exit(f"No run has begun in {' '.join(sys.argv[1:]) or 'no folder'}: give one such as storage/runs/laptop.")
    with contextlib.suppress(KeyboardInterrupt):
        follow(sys.argv[1])
