"""Allow only one driver at a time on a job's latents or a run: `lease.json` in the folder, with a heartbeat."""

import contextlib
import math
import os
import signal
import threading
import time
import uuid

import psutil

from .. import storage

# SETTLE_SECONDS is longer than a driver takes from reading the lease to writing it.
BEAT_SECONDS, STALE_SECONDS, SETTLE_SECONDS = 10, 60, 2


class Lease(contextlib.AbstractContextManager):
    """Writes `lease.json` into a folder and renews it every `BEAT_SECONDS` in a thread, until `release`.

    An existing lease is taken over at once if its process ran on this host and is gone, or if it has this driver's
    PRETRAIN_JOB_ID. Any other lease is taken over after `STALE_SECONDS` without a heartbeat, a damaged one too. A
    process whose own lease was taken over, because it was suspended for so long, is interrupted (KeyboardInterrupt).

    PRETRAIN_JOB_ID is an environment variable with the job's id. A launcher that may restart a failed driver on another
    host sets it, and starts a job's next driver only after the last one has ended.

    A new file on a disk is created exclusively. In all other cases the file is written, and read back after
    `SETTLE_SECONDS`: the last of several writers holds the lease. This does not cover a driver that is suspended for
    longer than that between reading and writing the lease: two drivers then believe that they hold it until the next
    heartbeat, or `check`, of the one whose file was replaced.

    Raises RuntimeError, which says who holds the lease and since when.
    """

    def __init__(self, uri: str, parameter: str):
        self.uri, self.parameter, self.stop = storage.join(uri, "lease.json"), parameter, threading.Event()
        process, host, now = psutil.Process(), os.uname().nodename, time.strftime("%Y-%m-%d %H:%M:%S%z")
        container = os.readlink("/proc/self/ns/pid") if psutil.LINUX else ""
        self.content = {"token": uuid.uuid4().hex, "job": os.environ.get("PRETRAIN_JOB_ID")}
        self.content["holder"] = f"process {process.pid} on {host}, since {now}"
        self.content["place"] = f"{host} {uuid.getnode()} {container}"  # where the process id is valid
        self.content["process"] = [process.pid, process.create_time()]
        previous = self.read()
        if previous and not self.is_gone(previous):
            raise self.refusal()
        if previous or not storage.is_local(self.uri) or not self.create():
            storage.write_json(self.uri, self.content)
            time.sleep(SETTLE_SECONDS)
        self.check()
        self.thread = threading.Thread(target=self.renew, daemon=True)
        self.thread.start()

    def create(self) -> bool:
        """Create the file exclusively, or find another driver's there; False on a disk without links."""
        try:
            storage.write_json(self.uri, self.content, new=True)
        except OSError as error:
            return isinstance(error, FileExistsError)
        return True

    def read(self) -> dict:
        """The file's content; {} if there is none; of one that cannot be read, when it was written."""
        with contextlib.suppress(FileNotFoundError):
            return storage.read_json(self.uri, otherwise=lambda _: {"damaged": storage.version(self.uri)[1] or 0})
        return {}

    def is_held(self) -> bool:
        return self.read().get("token") == self.content["token"]

    def check(self) -> None:
        """Raises RuntimeError if another driver has taken the lease over: call it before files are deleted."""
        if not self.is_held():
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        holder = self.read().get("holder", f"an unknown process ({self.uri} is damaged)")
        return RuntimeError(f"{self.parameter} is in use by {holder}: wait until that has ended, or stop it.")

    def is_gone(self, previous: dict) -> bool:
        """Whether the process that wrote a lease has ended; where that cannot be known, waits for a heartbeat."""
        if previous.get("place") == self.content["place"]:
            return not is_alive(*previous["process"])
        if self.content["job"] and previous.get("job") == self.content["job"]:
            return True
        if time.time() - previous.get("damaged", math.inf) / 1e9 > STALE_SECONDS:
            return True
        print(f"{self.refusal()} Waiting {STALE_SECONDS} s for a heartbeat.")
        time.sleep(STALE_SECONDS)
        return self.read() in (previous, {})

    def renew(self) -> None:
        """Runs in the thread: rewrite the file periodically, while it is this lease's."""
        while not self.stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the storage cannot be reached
                if self.is_held():
                    storage.write_json(self.uri, {**self.content, "beat": time.time()})
                elif self.read():  # another driver's; a deleted file is left to `check`
                    print(f"{self.refusal()} It took over because this process sent no heartbeat.")
                    return os.kill(os.getpid(), signal.SIGINT)

    def release(self, *_) -> None:
        """Delete the file, if it is still this lease's; if the storage cannot be reached, the lease expires."""
        self.stop.set()
        self.thread.join()
        with contextlib.suppress(OSError):
            if self.is_held():
                storage.delete(self.uri)

    __exit__ = release


_held: dict[str, Lease] = {}  # this process's leases, by folder


def hold(uri: str, parameter: str) -> Lease:
    """The lease on a folder; this process keeps it until `release`, the end of a `with` block, or its own end.

    A process that holds the lease gets the same one again, so that a cell can be run twice. `parameter`: what to call
    the folder in errors, such as "run_name='laptop'". Raises RuntimeError if another driver holds it.
    """
    if uri not in _held or not _held[uri].is_held():
        _held[uri] = Lease(uri, parameter)
    return _held[uri]


def is_alive(pid: int, created: float) -> bool:
    """Whether a process of this host is running; its id may have been reused."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 10  # it shifts when the host's clock is set
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False
