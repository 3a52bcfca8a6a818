"""The process in which `isolated` decodes. It imports PyTorch, this module and those of what it is sent."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from collections.abc import Callable
from typing import Any


def serve() -> None:
    """Append the results of a file's calls to the file, one by one, until the parent ends.

    The system ends this process by SIGALRM after `seconds` of one call.
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
