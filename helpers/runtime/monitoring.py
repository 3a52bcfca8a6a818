"""Progress of a running job, in the notebook and on a batch run's terminal; polling in the background; interrupts."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import html
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pandas as pd
import ray.train
from IPython import get_ipython
from IPython.display import display

from .. import storage
from ..training_config import TrainingConfig
from . import fault_tolerance, lease, metrics_log, ray_errors, results, tracking

MAX_LOST = 3  # checkpoints in a row, after which a run ends


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Use it around `trainer.fit()`: an interrupt ends the run and the cell, with KeyboardInterrupt.

    Ray Train's own handler ends the whole process by SystemExit, and stays installed after the run, when its controller
    is gone.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if in_main_thread and before is not None:  # None: not installed by Python, which cannot restore it
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def raise_end(run_uri: str) -> Iterator[None]:
    """Wrap `trainer.fit()` in it: raises RuntimeError if a worker called `fault_tolerance.end_run`, with its error."""
    ended, excluded = (storage.join(run_uri, name) for name in (fault_tolerance.ENDED, fault_tolerance.EXCLUDED))
    storage.delete(ended)
    storage.delete(excluded)
    yield
    if storage.exists(ended):
        raise RuntimeError(storage.read_json(ended)["error"])


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that records why workers were lost; `monitor_run` shows it.

    It ends the run when `MAX_LOST` checkpoints in a row were lost, whichever workers saved them: what is trained after
    the last complete one is lost with them.
    """

    def __init__(self, run_uri: str):
        self.run_uri = run_uri
        self.lost = 0  # checkpoints since the last complete one

    def after_report(self, run_context, metrics, checkpoint):
        self.lost = self.lost + 1 if isinstance(checkpoint, fault_tolerance.LostCheckpoint) else 0
        if self.lost == MAX_LOST:  # raised in Ray Train's controller, which then starts no workers again
            raise RuntimeError(
                f"{MAX_LOST} checkpoints in a row were lost; {checkpoint.why}: start the same command again when the "
                "storage takes files; the run resumes from its last complete checkpoint."
            )

    def after_exception(self, run_context, worker_exceptions):
        errors = [
            f"worker {rank}: {ray_errors.summarize_error(str(error))}"
            for rank, error in sorted(worker_exceptions.items())
        ]
        fault_tolerance.write_failure(self.run_uri, "; ".join(errors))


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


def keep_executed_notebook(folder_uri: str) -> None:
    """Copy the executed notebook into a folder, such as a run's, when this kernel ends.

    The notebook is papermill's output, which is known only with `--inject-output-path`; without that, nothing is
    copied. papermill writes its output after each cell, even one that fails.
    """
    shell = get_ipython()
    output = shell and shell.user_ns.get("PAPERMILL_OUTPUT_PATH")
    if output:
        copy_to = storage.join(folder_uri, storage.name(output))
        atexit.register(lambda: storage.write_text(copy_to, storage.read_text(output)))


class Progress:
    """Shows a job's progress: call `progress(done, total, text)` as often as you like.

    In a notebook it is one display that is updated in place. In a batch run (papermill, or a plain Python program),
    where nobody sees the display, a line goes to the terminal every `seconds_between_lines`, and at the end.
    """

    def __init__(self, label: str, unit: str = "rows", seconds_between_lines: float = 10):
        self.label, self.unit, self.seconds_between_lines = label, unit, seconds_between_lines
        self.started = time.monotonic()
        self.first = None  # (time, done) of the first call: a resumed job does not start at 0
        self.last = None  # (time, done) of the last line on the terminal
        self.terminal, self.handle = batch_terminal(), None

    def __call__(self, done: int, total: int, text: str = "") -> None:
        now = time.monotonic()
        self.first = self.first or (now, done)
        line = f"{self.label}: {done:,} of {total:,} {self.unit} in {format_seconds(now - self.started)}"
        if self.first[1] < done < total:
            seconds_left = (now - self.first[0]) / (done - self.first[1]) * (total - done)
            line += f", {format_seconds(seconds_left)} left"
        if text:
            line += f", {text}"
        self.show(line, done, total)
        due = self.last is None or now - self.last[0] >= self.seconds_between_lines or done >= total
        if due and (self.last is None or self.last[1] != done):
            self.write(line)
            self.last = now, done

    def show(self, line: str, done: int, total: int) -> None:
        """Update the notebook's display."""
        if get_ipython() is None:
            return
        bar = f"<progress value='{done}' max='{max(total, 1)}' style='width: 20em; vertical-align: middle'></progress>"
        bundle = {"text/html": f"{bar} <code>{html.escape(line)}</code>", "text/plain": line}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    def message(self, text: str) -> None:
        """Print a message that stays: in the notebook, and on the terminal of a batch run."""
        print(text)
        if get_ipython() is not None:
            self.write(text)

    def write(self, line: str) -> None:
        """Write a line to the terminal of a batch run."""
        if self.terminal is None:
            return
        start = "\n" if self.last is None else ""  # papermill's own progress bar does not end its line
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(self.terminal, f"{start}{line}\n".encode())


def batch_terminal() -> int | None:
    """File descriptor of the terminal that a batch run was started in; None if there is none.

    papermill's kernel inherits its standard error. ipykernel redirects that into the notebook, but `fileno()` still
    gives the original. In JupyterLab it would be the server's log; the server marks its kernels by JPY_SESSION_NAME.
    """
    if "JPY_SESSION_NAME" in os.environ:
        return None
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):  # no standard error, or one without a file
        return None


def format_seconds(seconds: float) -> str:
    """A duration in its two largest units: "42 s", "3 min 05 s", "2 h 10 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


@contextlib.contextmanager
def monitor_run(config: TrainingConfig, every: float = 1.0) -> Iterator[None]:
    """Show a run's progress and what it lost, workers and checkpoints, while the block (`trainer.fit()`) runs.

    Images/s are `metrics_log.throughput` over the last 10,000 steps; the loss is the mean of the last 50. The run's
    metrics and pictures go to `config.trackers`. An interrupt ends the run and raises KeyboardInterrupt. The run's
    lease is held until the block ends. While the storage gives no answer, which is said once, nothing new is shown.
    Raises RuntimeError if the workers ended the run themselves, as after a loss that is not finite.
    """
    progress = Progress(f"run {config.run_name}", "steps")
    evaluations, metrics = tracking.EvaluationReader(config.run_uri), metrics_log.MetricsReader(config.run_uri)
    metrics.read()  # steps of an earlier driver
    recent = pd.DataFrame()
    num_shown = len(fault_tolerance.read_failures(config.run_uri))
    told = False  # that the storage gives no answer

    def show():
        nonlocal num_shown, recent
        failures = fault_tolerance.read_failures(config.run_uri)
        for failure in failures[num_shown:]:
            progress.message(f"lost: {failure}")
        num_shown = len(failures)
        for result in evaluations.read():
            for sentence in results.sentences(result):
                progress.message(sentence)
            if values := tracking.evaluation_values(config.run_uri, result):
                track(result["step"], values)
        new = metrics.read()
        for record in new:
            values = results.numbers(record)
            track(values.pop("step"), values)
        if new:  # a step that is repeated after a failure counts once, as the newest
            recent = pd.concat([recent, pd.DataFrame(new)]).drop_duplicates("step", keep="last").tail(10_000)
            images_per_second, _ = metrics_log.throughput(recent)
            text = f"loss {recent['loss'][-50:].astype(float).mean():.3f}, {images_per_second:,.0f} images/s"
            progress(new[-1]["step"], config.max_steps, text)

    def poll():
        nonlocal told
        try:
            show()
            told = False
        except OSError as error:  # the workers may go on, so the driver does
            if not told:
                progress.message(f"The run's folder cannot be read, which is tried again every {every:g} s: {error}")
            told = True

    with contextlib.ExitStack() as stack:
        track = stack.enter_context(tracking.start(config))
        stack.callback(poll)  # the last steps
        with (
            lease.hold(config.run_uri, f"run_name={config.run_name!r}"),
            raise_end(config.run_uri),
            interruptible(),
            poll_in_background(poll, every),
        ):
            yield
