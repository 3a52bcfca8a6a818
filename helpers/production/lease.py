"""One driver at a time on a job's latents or a run: `lease.json` in the folder, which its driver renews."""

import contextlib
import os
import threading
import time
import uuid

import psutil

from .. import storage

RENEW_SECONDS, STALE_SECONDS = 60, 600


class Lease(contextlib.AbstractContextManager):
    """Writes `lease.json` into a folder and renews it in a thread, until `release`.

    Raises RuntimeError, which says who holds the folder, if the process of an earlier lease runs on this host. A lease
    of another host is refused too if it was renewed less than `STALE_SECONDS` ago, by the storage's clock.

    PRETRAIN_JOB_ID is an environment variable with the job's id. A launcher that may restart a failed driver on another
    host sets it, and starts a job's next driver only after the last one has ended. That driver takes the lease over at
    once.

    If two drivers start at the same moment, the one that writes last holds the lease. The other one's next `check`
    raises.
    """

    def __init__(self, uri: str, what: str):
        self.uri, self.what, self.released = storage.join(uri, "lease.json"), what, threading.Event()
        process, host = psutil.Process(), os.uname().nodename
        namespace = os.readlink("/proc/self/ns/pid") if psutil.LINUX else ""
        self.content = {
            "token": uuid.uuid4().hex,
            "holder": f"process {process.pid} on {host}, since {time.strftime('%Y-%m-%d %H:%M:%S%z')}",
            "place": f"{host} {uuid.getnode()} {namespace}",  # where the process id is valid
            "process": [process.pid, process.create_time()],
            "job": os.environ.get("PRETRAIN_JOB_ID"),
        }
        if storage.exists(self.uri) and self.is_in_use(self.read()):
            raise self.refusal()
        storage.write_json(self.uri, self.content)
        self.thread = threading.Thread(target=self.renew, daemon=True)
        self.thread.start()

    def is_in_use(self, found: dict) -> bool:
        """Whether the process that wrote the lease in the folder may still run."""
        if found.get("place") == self.content["place"]:
            return is_alive(*found["process"])
        if self.content["job"] and found.get("job") == self.content["job"]:
            return False
        clock = f"{self.uri}.{self.content['token']}"
        storage.write_text(clock, "")
        now_ns, renewed_ns = storage.version(clock)[1], storage.version(self.uri)[1]
        storage.delete(clock)
        return now_ns - renewed_ns < STALE_SECONDS * 1e9

    def read(self) -> dict:
        """The file's content; {} if there is none, or if it is damaged."""
        return storage.read_json(self.uri, otherwise=lambda _: {}) if storage.exists(self.uri) else {}

    def is_held(self) -> bool:
        return self.read().get("token") == self.content["token"]

    def check(self) -> None:
        """Raises RuntimeError if another driver has taken the lease over: call it before files are deleted."""
        if not self.is_held():
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        holder = self.read().get("holder", "an unknown process")
        sentence = f"{self.what} is in use by {holder} ({self.uri}): wait until that has ended, or stop it."
        return RuntimeError(f"{sentence} The lease of a lost machine ends {STALE_SECONDS // 60} minutes after it.")

    def renew(self) -> None:
        while not self.released.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the storage cannot be reached
                if self.is_held():
                    storage.write_json(self.uri, self.content)

    def release(self, *_) -> None:
        self.released.set()
        self.thread.join()
        if self.is_held():
            storage.delete(self.uri)

    __exit__ = release


_held: dict[str, Lease] = {}  # this process's leases, by folder


def hold(uri: str, what: str) -> Lease:
    """The lease on a folder. This process keeps it until `release`, the end of a `with` block, or its own end.

    A process that holds the lease gets the same one again, so that a cell can be run twice. `what`: how errors call the
    folder, such as "run_name='laptop'". Raises RuntimeError if another driver holds it.
    """
    if uri not in _held or not _held[uri].is_held():
        _held[uri] = Lease(uri, what)
    return _held[uri]


def is_alive(pid: int, created: float) -> bool:
    """Whether a process of this host is running; its id may have been reused."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 10  # it shifts when the host's clock is set
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False
