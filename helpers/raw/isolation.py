"""Calls of a function in a child process: one that kills its process, or takes too long, costs its own result alone.

The child imports this module and those of the function and its arguments, nothing else. It ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

SECONDS = 120.0  # that a call may take
LOCK = threading.Lock()


class Lost(Exception):
    """Why a call has no result: its process was killed, also when it was tried again alone, or it took too long."""


class Child:
    """A process that runs `serve`, and the socket to it as a file."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with ours, theirs:
            # In a session of its own, or the interrupt of a notebook's cell would end it.
            self.process = subprocess.Popen(command, stdin=theirs, env=environment, start_new_session=True)
            self.file = ours.makefile("rwb")

    def stop(self) -> int:
        """The exit code of the process; a negative one is a signal's number."""
        with contextlib.suppress(OSError):  # what was not sent yet
            self.file.close()
        self.process.kill()  # does nothing if it was killed before
        return self.process.wait()


child: Child | None = None  # of this process; started by its first call


def forget_child() -> None:
    """In a process that was forked from this one: the child stays its parent's."""
    global child
    child = None


os.register_at_fork(after_in_child=forget_child)


def run_apart(function: Callable, calls: Iterable[tuple], seconds: float) -> list:
    """`function(*call)` of each call, or a `Lost` in its place; what the function raises is raised.

    Function, arguments and results are pickled, and are sent one call at a time.
    """
    with LOCK:
        return [run_call(function, call, seconds) for call in calls]


def run_call(function: Callable, call: tuple, seconds: float) -> Any:
    """The result of a call, or a `Lost`. A call whose process is killed is tried again in a new one.

    It may have been killed by what an earlier call left behind, or for lack of memory.
    """
    for _ in range(2):
        signal_number, result = attempt(function, call, seconds)
        if signal_number == signal.SIGALRM:
            return Lost(f"took longer than {seconds:g} s to decode")
        if not signal_number:
            return result
    return Lost(f"its process was killed by {signal.Signals(signal_number).name}")


def attempt(function: Callable, call: tuple, seconds: float) -> tuple[int, Any]:
    """`(0, result)`, or `(the signal that killed the child, None)`.

    Raises RuntimeError if the child ends in another way, such as without a module that it needs.
    """
    global child
    child = child or Child()
    try:
        pickle.dump((function, call, seconds), child.file, pickle.HIGHEST_PROTOCOL)
        child.file.flush()
        error, result = pickle.load(child.file)
    except (EOFError, pickle.UnpicklingError, ConnectionError) as lost:
        exit_code, child = child.stop(), None
        if exit_code >= 0:
            raise RuntimeError(f"A process that decodes pictures ended with exit code {exit_code}.") from lost
        return -exit_code, None
    except BaseException:  # an interrupted cell (KeyboardInterrupt): the result would come later
        child.stop()
        child = None
        raise
    if error is not None:
        raise error
    return 0, result


def serve() -> None:
    """The child's loop. The system ends the process by SIGALRM after `seconds` of one call."""
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as file:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            while True:
                function, call, seconds = pickle.load(file)
                signal.setitimer(signal.ITIMER_REAL, seconds)
                try:
                    answer = None, function(*call)
                except Exception as error:
                    answer = error, None
                signal.setitimer(signal.ITIMER_REAL, 0)
                pickle.dump(answer, file, pickle.HIGHEST_PROTOCOL)
                file.flush()
