"""Progress of a running job: a line that is updated in place, polling in the background, interrupts."""

import contextlib
import html
import signal
import threading
import time

from IPython.display import display

from . import fault_tolerance, metrics_log


@contextlib.contextmanager
def interruptible():
    """Around `trainer.fit()`: an interrupt ends the run, and then the cell, with KeyboardInterrupt.

    Ray Train's own handler ends the run too, but then the whole process, by SystemExit; and it stays in place after the
    run, where it asks a controller that is gone.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if main and before is not None:  # None: not set by Python, so not Python's to set again
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def poll_in_background(action, every):
    """While the block runs, call `action()` every so many seconds in a thread, until it returns True.

    What it raises is raised when the block ends.
    """
    stop, errors = threading.Event(), []

    def watch():
        while not stop.wait(every):
            try:
                if action():
                    return
            except Exception as error:  # raised below, where someone sees it
                errors.append(error)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


class Progress:
    """A bar in a notebook (or a line in a terminal's log) that is updated in place: `progress(done, total, text)`."""

    def __init__(self, label, unit="rows"):
        self.label, self.unit = label, unit
        self.started, self.handle = time.time(), None

    def __call__(self, done, total, text=""):
        seconds = time.time() - self.started
        line = f"{self.label}: {done:,} of {total:,} {self.unit} in {seconds:.0f} s {text}"
        bar = f"<progress value='{done}' max='{max(total, 1)}' style='width: 20em; vertical-align: middle'></progress>"
        # Front ends show the bar, batch runs keep the line.
        bundle = {"text/html": f"{bar} <code>{html.escape(line)}</code>", "text/plain": line}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)


@contextlib.contextmanager
def monitor_run(config, every=1.0):
    """Show how far a run is, and what was lost on the way, while the block (`trainer.fit()`) runs.

    An interrupt ends the run and raises KeyboardInterrupt.
    """
    progress = Progress(f"run {config.run_name}", "steps")
    reader, recent = metrics_log.MetricsReader(config.run_uri), []
    shown = len(fault_tolerance.read_failures(config.run_uri))

    def show():
        nonlocal shown
        recent.extend(reader.read())
        del recent[:-50]
        failures = fault_tolerance.read_failures(config.run_uri)
        for failure in failures[shown:]:
            print(f"lost: {failure}")
        shown = len(failures)
        if recent:
            loss = sum(line["loss"] for line in recent) / len(recent)
            speed = sorted(line["images_per_second"] for line in recent)[len(recent) // 2]
            progress(recent[-1]["step"], config.max_steps, f"- loss {loss:.3f}, {speed:.0f} images/s")

    try:
        with interruptible(), poll_in_background(show, every):
            yield
    finally:
        show()
