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
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 120.0  # that a call may take
BATCH_BYTES = 2**25  # of the arguments that a child holds at a time
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


def run_apart(function: Callable, calls: Sequence[tuple], seconds: float) -> list:
    """`function(*call)` of each call, or a `Lost` in its place; what the function raises is raised.

    Calls begin with bytes, such as an encoded picture. Function, arguments and results are pickled.
    """
    results = []
    with LOCK:
        while len(results) < len(calls):
            results += run_batch(function, next_batch(calls, len(results)), seconds)
    return results


def next_batch(calls: Sequence[tuple], start: int) -> Sequence[tuple]:
    """The calls from `start` on whose bytes come to at most `BATCH_BYTES`, at least one."""
    stop, size = start, 0
    while stop < len(calls) and (stop == start or size + len(calls[stop][0]) <= BATCH_BYTES):
        size += len(calls[stop][0])
        stop += 1
    return calls[start:stop]


def run_batch(function: Callable, calls: Sequence[tuple], seconds: float) -> list:
    """The results of calls up to the first that is `Lost`."""
    results, exit_code = attempt(function, calls, seconds)
    if exit_code and exit_code != -signal.SIGALRM:
        # Again alone, since what another call left behind, or a lack of memory, may have killed the process.
        again, exit_code = attempt(function, [calls[len(results)]], seconds)
        results += again
    if exit_code == -signal.SIGALRM:
        results.append(Lost(f"took longer than {seconds:g} s to decode"))
    elif exit_code:
        results.append(Lost(f"its process was killed by {signal.Signals(-exit_code).name}"))
    return results


def attempt(function: Callable, calls: Sequence[tuple], seconds: float) -> tuple[list, int]:
    """`(results, exit code)`: 0, or that of the child that the first call without a result killed.

    Raises RuntimeError if the child ends in another way: it cannot import what it needs.
    """
    global child
    results = []
    try:
        child = child or Child()
        pickle.dump((function, calls, seconds), child.file, pickle.HIGHEST_PROTOCOL)
        child.file.flush()
        while len(results) < len(calls):
            error, result = pickle.load(child.file)
            if error is not None:
                raise error
            results.append(result)
        return results, 0
    except (EOFError, pickle.UnpicklingError, ConnectionError) as error:
        exit_code, child = child.stop(), None
        if exit_code >= 0:
            raise RuntimeError(f"A process that decodes pictures ended with exit code {exit_code}.") from error
        return results, exit_code
    except BaseException:  # an interrupted cell (KeyboardInterrupt) too: results of this batch would come later
        if child:
            child.stop()
        child = None
        raise


def serve() -> None:
    """The child's loop. The system itself ends the process (SIGALRM) after `seconds` of one call."""
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as file:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            while True:
                function, calls, seconds = pickle.load(file)
                for call in calls:
                    pickle.dump(timed(function, call, seconds), file, pickle.HIGHEST_PROTOCOL)
                    file.flush()


def timed(function: Callable, call: tuple, seconds: float) -> tuple[Exception | None, Any]:
    """`(what a call raised, its result)`."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return None, function(*call)
    except Exception as error:
        return error, None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
