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
import tempfile
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any

SECONDS = 120.0  # that a call may take
LOCK = threading.Lock()


class Lost(Exception):
    """Why a call has no result: its process was killed, also when it was tried again, or it took too long."""


class Child:
    """A process that runs `serve`, and the socket to it."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            # In a session of its own, or the interrupt of a notebook's cell would end it.
            self.process = subprocess.Popen(command, stdin=theirs, env=environment, start_new_session=True)

    def work(self, file: IO) -> bool:
        """Let the child do the calls in a file; False if it ended meanwhile."""
        try:
            socket.send_fds(self.socket, [b"."], [file.fileno()])
            return self.socket.recv(1) != b""
        except ConnectionError:
            return False

    def stop(self) -> int:
        """The exit code of the process; a negative one is a signal's number."""
        self.socket.close()
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

    Function, arguments and results are pickled. A call whose process is killed is tried again, as the first of a new
    process: it may have been killed by what an earlier call left behind, or for lack of memory.
    """
    calls, results, suspect = list(calls), [], None
    with LOCK:
        while len(results) < len(calls):
            found, signal_number = attempt(function, calls[len(results) :], seconds)
            results += found
            if not signal_number:
                break
            if signal_number == signal.SIGALRM:
                results.append(Lost(f"took longer than {seconds:g} s to decode"))
            elif suspect == len(results):
                results.append(Lost(f"its process was killed by {signal.Signals(signal_number).name}"))
            suspect = len(results)
    return results


def attempt(function: Callable, calls: list[tuple], seconds: float) -> tuple[list, int]:
    """`(all results, 0)`, or `(the results before the call that killed the child, the signal)`.

    Raises RuntimeError if the child ends in another way, such as without a module that it needs.
    """
    global child
    child, exit_code, results = child or Child(), 0, []
    with shared_file() as file:
        pickle.dump((function, calls, seconds), file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        start = file.tell()
        try:
            is_done = child.work(file)
        except BaseException:  # an interrupted cell (KeyboardInterrupt): the results would come later
            child.stop()
            child = None
            raise
        if not is_done:
            exit_code, child = child.stop(), None
            if exit_code >= 0:
                raise RuntimeError(f"A process that decodes pictures ended with exit code {exit_code}.")
        file.seek(start)
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the last one may be cut
            while True:
                results.append(pickle.load(file))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results, -exit_code


def shared_file() -> IO:
    """A file of which two processes can have a descriptor; in memory, if the system (Linux) has such files."""
    return os.fdopen(os.memfd_create("calls"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def serve() -> None:
    """The child's loop: the results of a file's calls are appended to it, one by one.

    The system ends the process by SIGALRM after `seconds` of one call.
    """
    connection = socket.socket(fileno=os.dup(0))  # the first descriptor closes only when the process has ended
    with contextlib.suppress(ConnectionError):  # the parent has ended
        while files := socket.recv_fds(connection, 1, 1)[1]:
            with os.fdopen(files[0], "r+b") as file:
                file.seek(0)
                function, calls, seconds = pickle.load(file)
                file.seek(0, os.SEEK_END)
                for call in calls:
                    pickle.dump(timed(function, call, seconds), file, pickle.HIGHEST_PROTOCOL)
                    file.flush()  # for the parent, if a later call kills this process
            connection.send(b".")


def timed(function: Callable, call: tuple, seconds: float) -> Any:
    """`function(*call)`, or what it raises."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*call)
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
