"""A run's metrics: one line of JSON per step, written by rank 0, read back as a frame. No Ray, no torch."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import zlib
from collections.abc import Iterable

import pandas as pd

from .. import storage

COLUMNS = ["step", "attempt", "loss", "samples_seen"]
FLUSH_SECONDS = 15  # that a line for an object store waits for others, at most
OBJECT_LINES = 1_000  # after which an object is followed by another one


def samples_crc32(ids: Iterable) -> int:
    """CRC-32 of the ids as text, sorted, joined by newlines: the same for the same set of samples."""
    return zlib.crc32("\n".join(sorted(map(str, ids))).encode())


class MetricsLog:
    """Writes a run's metrics, on rank 0. Steps that are repeated after a failure have a higher `attempt`.

    On a disk each line is appended to `metrics.jsonl` at once. If the disk is full, the log prints the error once. It
    keeps the lines in memory until the disk has room again.

    An object store cannot append. There the lines are in objects `metrics-{attempt}-{first step}.jsonl`. The first
    unwritten line starts a timer. After `FLUSH_SECONDS`, a thread rewrites the newest object with all of its lines.
    After `OBJECT_LINES` lines, a new object begins. If a write takes at most 15 seconds, a step's metrics can be read
    within 30 seconds. A killed worker then loses at most the last 30 seconds of metrics. Lines that the store refuses
    are written later.
    """

    def __init__(self, run_uri: str):
        self.run_uri = run_uri
        earlier = read_metrics(run_uri, all_attempts=True)
        self.attempt = 1 if earlier.empty else int(earlier["attempt"].max()) + 1
        self.samples_seen = {0: 0, **dict(zip(earlier["step"], earlier["samples_seen"], strict=True))}  # by step
        self.lines = []  # of the newest object
        self.unwritten, self.told = b"", False  # what a full disk has not taken yet; whether that was told
        self.flushing, self.timer = threading.Lock(), None
        self.file = None
        if storage.is_local(run_uri):
            path = storage.join(run_uri, "metrics.jsonl")
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the worker lives)
            if self.file.tell() and not storage.read_bytes(path, self.file.tell() - 1).endswith(b"\n"):
                self.unwritten = b"\n"  # a worker was killed while it wrote

    def write(self, step: int, metrics: dict, ids: Iterable, num_kept: int, **speed) -> None:
        """Write one line; `ids`: of the whole global batch; `num_kept`: how many of its rows are not masked."""
        self.samples_seen = {step: int(self.samples_seen.get(step - 1, 0)) + num_kept}
        record = {"step": step, "attempt": self.attempt, **metrics, **speed}
        record |= {"samples_seen": self.samples_seen[step], "samples_crc32": samples_crc32(ids)}
        # JSON has no NaN and no infinity, which the loss of a skipped step may be.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        if self.file:
            with self.flushing:
                self.unwritten += json.dumps(finite).encode() + b"\n"
            self.flush_in_time()
        else:
            self.lines.append(json.dumps(finite) + "\n")
            if self.timer is None:
                self.timer = threading.Timer(FLUSH_SECONDS, self.flush_in_time)
                self.timer.daemon = True
                self.timer.start()

    def flush_in_time(self) -> None:
        """Flush; print an OSError once.

        On an object store, a timer's thread calls it. The next line then starts a new timer.
        """
        self.timer = None
        try:
            self.flush()
            self.told = False
        except OSError as error:
            if not self.told:
                print(f"The newest metrics are written later: {error}")
            self.told = True

    def flush(self) -> None:
        """Write all lines so far. Any thread may call it.

        Raises OSError if the disk or the store refuses; the lines are then kept for the next flush.
        """
        with self.flushing:
            while self.unwritten:
                with storage.naming(self.file.name):
                    self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
            lines = self.lines[:]  # meanwhile `write` may add others
            if lines:
                name = f"metrics-{self.attempt:04d}-{json.loads(lines[0])['step']:09d}.jsonl"
                storage.write_text(storage.join(self.run_uri, name), "".join(lines))
            if len(lines) >= OBJECT_LINES:
                del self.lines[: len(lines)]


class MetricsReader:
    """Reads a run's metrics while they are written."""

    def __init__(self, run_uri: str):
        self.run_uri = run_uri
        self.positions = {}  # URI of a file: bytes that were read
        self.torn = 0  # lines that were left out: a killed worker's last one may be incomplete

    def read(self) -> list[dict]:
        """Records of steps since the last call, in the order of their lines; incomplete lines come in a later call."""
        text, positions = b"", {}
        for uri, size in metrics_files(self.run_uri).items():
            position = self.positions.get(uri, 0)
            if size > position:
                new = storage.read_bytes(uri, position)
                new = new[: new.rfind(b"\n") + 1]
                positions[uri] = position + len(new)
                text += new
        self.positions |= positions  # after the last file, so that an error loses no lines
        records = list(map(read_record, text.splitlines()))
        self.torn += records.count(None)
        return list(filter(None, records))


def read_record(line: bytes) -> dict | None:
    """A line's record; None for a torn line."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None


def metrics_files(run_uri: str) -> dict[str, int]:
    """{URI: bytes} of the files that hold a run's metrics, in the order of their lines."""
    found = storage.sizes(run_uri, recursive=False).items()
    return {storage.join(run_uri, name): size for name, size in found if re.fullmatch(r"metrics.*\.jsonl", name)}


def read_metrics(run_uri: str, all_attempts: bool = False) -> pd.DataFrame:
    """A run's metrics, one row per step; for repeated steps the last attempt, or all with `all_attempts`."""
    rows = MetricsReader(run_uri).read()
    if not rows:
        return pd.DataFrame(columns=COLUMNS)
    frame = pd.DataFrame(rows).sort_values(["step", "attempt"], kind="stable").reset_index(drop=True)
    return frame if all_attempts else frame.drop_duplicates("step", keep="last").reset_index(drop=True)
