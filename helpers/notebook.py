"""What a notebook needs around a job: its sections, its progress, interrupts, its executed copy."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import html
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from IPython import get_ipython
from IPython.display import display

from . import storage
from .texts import printable


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Wrap `trainer.fit()` in it: an interrupt ends the run and the cell, with KeyboardInterrupt.

    Ray Train's own handler would end the whole process by SystemExit, and it stays installed after the run.
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
def with_interrupt_hint(describe: Callable[[], str]) -> Iterator[None]:
    """An interrupt of the block becomes a KeyboardInterrupt with `describe()`, which a notebook shows alone."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe()) from None


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
    """Copy the executed notebook, papermill's output, into a folder, such as a run's, when this kernel ends.

    The output's path is known only with `--inject-output-path`; without that, nothing is copied. papermill writes its
    output after each cell, even after one that fails.
    """
    shell = get_ipython()
    output = shell and shell.user_ns.get("PAPERMILL_OUTPUT_PATH")
    if output:
        copy_to = storage.join(folder_uri, storage.name(output))
        atexit.register(lambda: storage.write_text(copy_to, storage.read_text(output)))


SECONDS_TO_ESTIMATE = 5  # before a time left is shown: a rate of less says little


class Progress:
    """Shows a job's progress: call `progress(done, total, text)` as often as you like.

    A notebook shows one display that is updated in place. In a batch run (papermill, or a plain Python program), a line
    goes to the terminal every `seconds_between_lines`, and at the end.
    """

    def __init__(self, label: str, unit: str = "rows", seconds_between_lines: float = 10):
        self.label, self.unit, self.seconds_between_lines = label, unit, seconds_between_lines
        self.started = time.monotonic()
        self.first = None  # (time, done) of the first call: a resumed job does not start at 0
        self.picture_handle = None
        self.last = None  # (time, done) of the last line on the terminal
        self.terminal, self.handle = batch_terminal(), None

    def begin(self, done: int, total: int, doing: str) -> None:
        """Show at once what happens before the first call; it does not count for the time left."""
        self.show(f"{self.label}: {done:,} of {total:,} {self.unit}; {doing}", done, total)

    def __call__(self, done: int, total: int, text: str = "") -> None:
        now = time.monotonic()
        self.first = self.first or (now, done)
        line = f"{self.label}: {done:,} of {total:,} {self.unit} in {format_seconds(now - self.started)}"
        if self.first[1] < done < total and now - self.first[0] >= SECONDS_TO_ESTIMATE:
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
        line = printable(line)
        bar = f"<progress value='{done}' max='{max(total, 1)}' style='width: 20em; vertical-align: middle'></progress>"
        bundle = {"text/html": f"{bar} <code>{html.escape(line)}</code>", "text/plain": line}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    def picture(self, png: bytes, described: str) -> None:
        """Show a picture below the line, in place of the one before it. `described`: its alternative text."""
        if get_ipython() is None:
            return
        bundle = {"image/png": png, "text/plain": described}
        shown = dict(metadata={"image/png": {"alt": described}}, raw=True)
        if self.picture_handle is None:
            self.picture_handle = display(bundle, display_id=True, **shown)
        else:
            self.picture_handle.update(bundle, **shown)

    def message(self, text: str) -> None:
        """Print a message that stays: in the notebook, and on the terminal of a batch run."""
        print(printable(text))
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


chosen_sections: list[str] = []


def choose_sections(sections: Sequence[str], known: Sequence[str]) -> None:
    """From now on, leave out cells that begin with `# section: NAME` of a section that is not chosen.

    Raises ValueError if `sections` names one that the notebook does not have.
    """
    choices = ", ".join(map(repr, known))
    if not isinstance(sections, (list, tuple)):
        raise ValueError(f"sections={sections!r} must be a list of {choices}, or [] for what a job needs.")
    for section in sections:
        if section not in known:
            raise ValueError(f"sections={section!r} is unknown: choose one of {choices}.")
    chosen_sections[:] = sections
    shell = get_ipython()
    if shell is not None and only_chosen not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(only_chosen)


def only_chosen(lines: list[str]) -> list[str]:
    """A cell's lines, or one that says that its section is left out: an input transformer of IPython."""
    found = re.match(r"# section: ([\w-]+)", lines[0]) if lines else None
    if found is None or found[1] in chosen_sections:
        return lines
    return [f"print('left out: `sections` does not name {found[1]}')\n"]
