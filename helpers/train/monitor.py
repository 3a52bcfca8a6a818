"""What the driver does while a run trains: show its progress, record its failures, raise what ended it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pandas as pd
import ray.train

from .. import storage
from ..config.training import TrainingConfig
from ..runtime import lease, retries
from ..runtime.progress import Progress, interruptible, poll_in_background
from . import faults, results, tracking
from .metrics import MetricsReader
from .profiling import throughput

MAX_LOST = 3  # checkpoints in a row, after which a run ends


@contextlib.contextmanager
def raise_end(run_uri: str) -> Iterator[None]:
    """Wrap `trainer.fit()` in it. Raises RuntimeError with the error of `faults.end_run`, if a worker called that.

    If training fails otherwise, what Ray Train raises becomes a RuntimeError of one sentence.
    """
    ended, excluded = (storage.join(run_uri, name) for name in (faults.ENDED, faults.EXCLUDED))
    storage.delete(ended)
    storage.delete(excluded)
    with retries.in_a_sentence("The same command resumes the run, which failed", ray.train.TrainingFailedError):
        yield
    if storage.exists(ended):
        raise RuntimeError(storage.read_json(ended)["error"])


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that records why workers were lost; `monitor_run` shows the records.

    It ends the run when `MAX_LOST` checkpoints in a row are lost, because no step since the last complete checkpoint is
    saved.
    """

    def __init__(self, run_uri: str):
        self.run_uri = run_uri
        self.lost = 0  # checkpoints since the last complete one

    def after_report(self, run_context, metrics, checkpoint):
        self.lost = self.lost + 1 if isinstance(checkpoint, faults.LostCheckpoint) else 0
        if self.lost == MAX_LOST:  # raised in Ray Train's controller, which then starts no workers again
            raise RuntimeError(
                f"{MAX_LOST} checkpoints in a row were lost; {checkpoint.why}: start the same command again when the "
                "storage takes files; the run resumes from its last complete checkpoint."
            )

    def after_exception(self, run_context, worker_exceptions):
        errors = [
            f"worker {rank}: {retries.summarize_error(str(error))}" for rank, error in sorted(worker_exceptions.items())
        ]
        faults.write_failure(self.run_uri, "; ".join(errors))


@contextlib.contextmanager
def monitor_run(config: TrainingConfig, every: float = 1.0) -> Iterator[None]:
    """Show a run's progress, and its lost workers and checkpoints, while the block (`trainer.fit()`) runs.

    Images/s are `profiling.throughput` over the last 10,000 steps; the loss is the mean of the last 50. The run's
    metrics and images go to `config.trackers`. The run's lease is held until the block ends. If the storage is
    unreachable, it warns once and keeps the last display.

    An interrupt ends the run and raises KeyboardInterrupt. Raises RuntimeError if the workers ended the run themselves,
    as after a loss that is not finite.
    """
    progress = Progress(f"run {config.run_name}", "steps")
    evaluations, metrics = tracking.EvaluationReader(config.run_uri), MetricsReader(config.run_uri)
    metrics.read()  # steps of an earlier driver
    recent = pd.DataFrame()
    num_shown = len(faults.read_failures(config.run_uri))
    warned = False  # that the storage is unreachable

    def show():
        nonlocal num_shown, recent
        failures = faults.read_failures(config.run_uri)
        for failure in failures[num_shown:]:
            progress.message(f"lost: {failure}")
        num_shown = len(failures)
        for result in evaluations.read():
            for sentence in results.sentences(result):
                progress.message(sentence)
            if values := tracking.evaluation_values(config.run_uri, result):
                track(result["step"], values)
        new = metrics.read()
        if metrics.torn:
            progress.message(f"Lines of the metrics that are torn, and left out: {metrics.torn}")
            metrics.torn = 0
        for record in new:
            values = results.numeric_values(record)
            track(values.pop("step"), values)
        if new:  # a step that is repeated after a failure counts once, as the newest
            recent = pd.concat([recent, pd.DataFrame(new)]).drop_duplicates("step", keep="last").tail(10_000)
            images_per_second, _ = throughput(recent)
            text = f"loss {recent['loss'][-50:].astype(float).mean():.3f}, {images_per_second:,.0f} images/s"
            progress(new[-1]["step"], config.max_steps, text)

    def poll():
        nonlocal warned
        try:
            show()
            warned = False
        except OSError as error:  # the workers may go on, so the driver does
            if not warned:
                progress.message(f"The run's folder cannot be read, which is tried again every {every:g} s: {error}")
            warned = True

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
