"""A decoder in a child process: an image that kills the process, or takes too long, costs its own row alone.

`decoder(lost_uri)` takes the place of `raw.images.decode_all` in `encode.stages.transform`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from typing import IO

from ... import storage
from ...raw import images
from .child import serve

SECONDS = 120.0  # that an image may take
LOCK = threading.Lock()


class Lost(Exception):
    """Why a call has no result: its process was killed, also when it was tried again, or it took too long."""


def decoder(lost_uri: str) -> Callable[[Iterable[images.Call], images.Shapes], list[images.DecodedImage]]:
    """A function like `images.decode_all`, which can be pickled.

    `lost_uri`: the folder that lists images that killed their process or took too long. They are rejected for the same
    reason from then on, without being tried.
    """
    return functools.partial(decode_isolated, lost_uri=lost_uri)


def decode_isolated(calls: Iterable[images.Call], shapes: images.Shapes, *, lost_uri: str) -> list[images.DecodedImage]:
    calls, lost = list(calls), crashes(lost_uri)
    reasons = [lost.get(image_key(data)) if lost and data else None for data, *_ in calls]
    tried = [call for call, reason in zip(calls, reasons, strict=True) if reason is None]
    results = iter(run_apart(functools.partial(images.make_pixels, shapes=shapes), tried, SECONDS))
    found = []
    for (data, *_), reason in zip(calls, reasons, strict=True):
        result = images.DecodedImage({}, reason) if reason else next(results)
        if isinstance(result, Lost):
            record_crash(lost_uri, data, str(result))
            result = images.DecodedImage({}, str(result))
        found.append(result)
    return found


@functools.cache
def crashes(lost_uri: str) -> dict[str, str]:
    """{`image_key`: why it is rejected} of the images recorded in a folder; read once per process."""
    return {storage.name(path): storage.read_json(path)["reason"] for path in storage.list_files(lost_uri)}


def record_crash(lost_uri: str, data: bytes, reason: str) -> None:
    crashes(lost_uri)[image_key(data)] = reason
    storage.write_json(storage.join(lost_uri, image_key(data)), {"reason": reason})


def image_key(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


class Child:
    """A process that runs `child.serve`, and the socket to it."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        # PyTorch, which resizes, is loaded first: that takes seconds, which no image must pay for.
        command = [sys.executable, "-P", "-c", f"import torch; from {serve.__module__} import serve; serve()"]
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


def run_apart(function: Callable, calls: list[tuple], seconds: float) -> list:
    """`function(*call)` of each call, or a `Lost` in its place; what the function raises is raised.

    Function, arguments and results are pickled. A call whose process is killed is tried again, as the first of a new
    process: it may have been killed by what an earlier call left behind, or for lack of memory.
    """
    results, suspect = [], None
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
                raise RuntimeError(f"A process that decodes images ended with exit code {exit_code}.")
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
