"""What a notebook needs around a job: its progress, interrupts, its executed copy."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import html
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from IPython import get_ipython
from IPython.display import display

from . import storage

# Control characters, of which terminals make commands; marks that reorder a line; halves of characters.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


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
        self.last = None  # (time, done) of the last line on the terminal
        self.terminal, self.handle = batch_terminal(), None

    def begin(self, done: int, total: int, doing: str) -> None:
        """Show at once what happens before the first call; it does not count for the time left."""
        self.show(f"{self.label}: {done:,} of {total:,} {self.unit}; {doing}", done, total)

    def __call__(self, done: int, total: int, text: str = "") -> None:
        now = time.monotonic()
        self.first = self.first or (now, done)
        line = f"{self.label}: {done:,} of {total:,} {self.unit} in {duration(now - self.started)}"
        if self.first[1] < done < total and now - self.first[0] >= SECONDS_TO_ESTIMATE:
            seconds_left = (now - self.first[0]) / (done - self.first[1]) * (total - done)
            line += f", {duration(seconds_left)} left"
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


def printable(text: object) -> str:
    """A user's text (a caption, a prompt, a name) for a terminal, a widget or a description: nothing but text.

    Tabs and ends of lines stay. For URIs: `storage.shown`.
    """
    return UNPRINTABLE.sub("\ufffd", str(text))


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: "0:03:05"."""
    return str(datetime.timedelta(seconds=round(seconds)))
