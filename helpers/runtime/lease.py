"""Allow only one driver at a time on a job's latents or a run: `lease.json` in the folder, with a heartbeat."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import pathlib
import signal
import socket
import threading
import time
import uuid

import psutil

from .. import storage

BEAT_SECONDS, STALE_SECONDS = 10, 60
SETTLE_SECONDS = 2  # longer than a driver takes from reading the lease to writing it
_held: dict[str, Lease] = {}  # this process's leases, by folder


def hold(uri: str, parameter: str) -> Lease:
    """The lease on a folder; this process keeps it until `release`, the end of a `with` block, or its exit.

    A process that holds the lease gets the same one again, so that a cell can be run twice. `parameter`: what to call
    the folder in errors, such as "run_name='laptop'". Raises RuntimeError if another driver holds it.
    """
    lease = _held.get(uri)
    if lease is None or not lease.is_held():
        lease = _held[uri] = Lease(uri, parameter)
    return lease


class Lease:
    """Writes `lease.json` into a folder and renews it every `BEAT_SECONDS` in a thread, until `release`.

    An existing lease is taken over at once if its process ran here and is dead, else as soon as its last heartbeat is
    `STALE_SECONDS` old by the storage's own clock; until then this waits, unless it sees a heartbeat. A process that
    finds its lease taken over, because it was suspended for so long, is interrupted (KeyboardInterrupt).

    A new file on a disk is created exclusively. In all other cases the file is written, and read back after
    `SETTLE_SECONDS`: the last of several writers holds the lease. This does not cover a driver that is suspended for
    longer than that between reading and writing the lease: two drivers then believe that they hold it until the next
    heartbeat, or `check`, of the one whose file was replaced.

    Raises RuntimeError, which says who holds the lease and since when.
    """

    def __init__(self, uri: str, parameter: str):
        self.uri, self.parameter = storage.join(uri, "lease.json"), parameter
        pid = os.getpid()
        self.content = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "place": place(), "pid": pid}
        self.content |= {"created": psutil.Process(pid).create_time(), "since": time.time(), "beats": 0}
        self.stop, self.thread = threading.Event(), threading.Thread(target=self.renew, daemon=True)
        holder = self.read()
        if holder is not None:
            self.wait_until_stale(holder)
        if not (holder is None and self.create()):
            self.write()
            time.sleep(SETTLE_SECONDS)
            if not self.is_held():
                raise self.refusal()
        self.thread.start()
        atexit.register(self.release)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def read(self) -> dict | None:
        """The file's content; None if there is no file, {} if it is incomplete."""
        try:
            return storage.read_json(self.uri)
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def write(self) -> None:
        storage.write_json(self.uri, self.content)

    def create(self) -> bool:
        """Write the file unless it exists; False where that is not possible in one step (object stores)."""
        if not storage.is_local(self.uri):
            return False
        path = pathlib.Path(storage.open_filesystem(self.uri)[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x") as file:
                file.write(json.dumps(self.content))
        except FileExistsError:
            raise self.refusal() from None
        return True

    def is_held(self) -> bool:
        return (self.read() or {}).get("token") == self.content["token"]

    def check(self) -> None:
        """Raises RuntimeError if another driver has taken the lease over: call it before files are deleted."""
        if not self.is_held():
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        holder = self.read() or {"pid": "?", "host": "an unknown host", "since": time.time()}
        since = datetime.datetime.fromtimestamp(holder["since"]).astimezone().isoformat(" ", "seconds")
        return RuntimeError(
            f"{self.parameter} is in use by process {holder['pid']} on {holder['host']}, since {since}: wait until "
            "that has ended, or stop it."
        )

    def wait_until_stale(self, holder: dict) -> None:
        """Return when the holder counts as gone; raises RuntimeError if it is alive."""
        is_here = holder.get("place") == self.content["place"]
        if is_here and (holder["pid"] == os.getpid() or not is_alive(holder)):
            return
        left = STALE_SECONDS - self.seconds_since_beat()
        if is_here and left > 0:
            raise self.refusal()
        if left > 0:
            print(f"{self.refusal()} Waiting up to {left:.0f} s for a heartbeat.")
        until = time.monotonic() + left
        while time.monotonic() < until:
            time.sleep(min(1, BEAT_SECONDS / 10))
            now = self.read()
            if now is None:
                return
            if now != holder:
                raise self.refusal()

    def seconds_since_beat(self) -> float:
        """By the storage's clock, which timestamps both files: drivers' clocks may differ."""
        probe = f"{self.uri}.{self.content['token']}"
        storage.write_text(probe, "now")
        now, beat = (storage.version(uri)[1] for uri in (probe, self.uri))
        storage.delete(probe)
        return (now - (beat or now)) / 1e9

    def renew(self) -> None:
        """Runs in the thread: rewrite the file periodically, while it is this lease's."""
        while not self.stop.wait(BEAT_SECONDS):
            try:
                if not self.is_held():
                    return self.give_up()
                self.content["beats"] += 1
                self.write()
            except OSError:
                continue  # the storage cannot be reached

    def give_up(self) -> None:
        """Interrupt this process if another one holds the lease; a deleted file is left to `check`."""
        holder = self.read()
        if holder and (holder["place"], holder["pid"]) != (self.content["place"], self.content["pid"]):
            print(f"{self.refusal()} It took over because this process sent no heartbeat for {STALE_SECONDS} s.")
            os.kill(os.getpid(), signal.SIGINT)

    def release(self) -> None:
        """Delete the file, if it is still this lease's; if the storage cannot be reached, the lease expires."""
        atexit.unregister(self.release)
        self.stop.set()
        self.thread.join()
        with contextlib.suppress(OSError):
            if self.is_held():
                storage.delete(self.uri)


def place() -> str:
    """Where a process id is valid: a host, since its last boot, and a container on it."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def is_alive(holder: dict) -> bool:
    """Whether a process of this place is running; its id may have been reused."""
    try:
        process = psutil.Process(holder["pid"])
        same = abs(process.create_time() - holder["created"]) < 10  # it shifts when the host's clock is set
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
