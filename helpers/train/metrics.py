"""A run's metrics: measured on each worker, one line of JSON per step, read back as a frame. No Ray."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pandas as pd

from .. import distributed, storage

if TYPE_CHECKING:
    from .step import Unit

COLUMNS = ["step", "attempt", "loss", "samples_seen"]
FLUSH_SECONDS = 15  # that a line for an object store waits for others, at most
OBJECT_LINES = 1_000  # after which an object is followed by another one
WARM_UP = 20  # steps that a speed does not count; at most half of a run


def samples_crc32(ids: Iterable) -> int:
    """CRC-32 of the ids as text, sorted, joined by newlines: the same for the same set of samples."""
    return zlib.crc32("\n".join(sorted(map(str, ids))).encode())


class StepLog:
    """Measures a worker's steps, and writes them in a thread while the next step runs. On all ranks.

    Each step waits until the previous step's line is written. So a worker that dies loses at most one line. On an
    object store, the lines that `MetricsLog` has not yet flushed are lost too. The columns that it measures:

    - `resolution`, `width` and `height` of the step's images.
    - `masked_rows` of the global batch, which are computed but not trained on; no other column counts them.
    - `step_seconds`, without checkpoints; `data_wait_share` of them was spent waiting for data.
    - `images_per_second`: unmasked rows of the global batch over `step_seconds`; `images_per_second_per_worker`.
    - `checkpoint_seconds`: how long training paused for a checkpoint before this step.

    Args:
        run_uri: the run's folder.
        batch_rows: rows of a global batch.

    Attributes:
        file: rank 0's `MetricsLog`; None on the other ranks.
    """

    def __init__(self, run_uri: str, batch_rows: int):
        self.file = MetricsLog(run_uri) if distributed.rank() == 0 else None
        self.batch_rows, self.group, self.pool = batch_rows, distributed.new_cpu_group(), ThreadPoolExecutor(1)
        self.written = None  # the last line's Future
        self.started, self.paused = time.perf_counter(), 0.0

    def measure(self, record: dict[str, Any], units: list[Unit], waited: float) -> dict[str, Any]:
        """The record of a step that has just ended (`TrainStep.step`), with its size and speed.

        `waited`: seconds that this worker waited for the step's data.
        """
        latents, num_kept, seconds = units[0].latents_spec, record["num_kept"], time.perf_counter() - self.started
        rate, paused, self.paused = num_kept / seconds, self.paused, 0.0
        return {
            **record,
            "resolution": latents.resolution,
            "width": latents.size[0],
            "height": latents.size[1],
            "masked_rows": self.batch_rows - num_kept,
            "step_seconds": seconds,
            "images_per_second": rate,
            "images_per_second_per_worker": rate / distributed.world_size(),
            "data_wait_share": waited / seconds,
            "checkpoint_seconds": paused,
        }

    def write(self, step: int, record: dict[str, Any], units: list[Unit]) -> None:
        """Start to write a step's line. Call it on all ranks, with this rank's units. The next step's time begins."""
        self.wait()
        ids = [i for unit in units for i in unit.ids]
        self.written = self.pool.submit(self.gather_and_write, step, record, ids)
        self.started = time.perf_counter()

    def gather_and_write(self, step: int, record: dict[str, Any], ids: list) -> None:
        ranks = distributed.gather_objects(ids, self.group)
        if ranks:
            self.file.write(step, record, itertools.chain.from_iterable(ranks))

    def wait(self) -> None:
        """Wait until the last line is written. Raises the writing thread's error."""
        if self.written:
            self.written.result()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The time of the block counts as `checkpoint_seconds` of the next step. Lines so far are written first."""
        self.wait()
        stopped = time.perf_counter()
        yield
        self.started = time.perf_counter()
        self.paused = self.started - stopped

    def finish(self) -> None:
        """Wait until all lines are in the run's folder."""
        self.wait()
        if self.file:
            storage.retry(self.file.flush)


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

    def write(self, step: int, record: dict[str, Any], ids: Iterable) -> None:
        """Write one line.

        `record`: of the step; its "num_kept", the rows that are not masked, become `samples_seen`. `ids`: of the whole
        global batch.
        """
        record = {"step": step, "attempt": self.attempt, **record}
        self.samples_seen = {step: int(self.samples_seen.get(step - 1, 0)) + record.pop("num_kept")}
        record |= {"samples_seen": self.samples_seen[step], "samples_crc32": samples_crc32(ids)}
        line = json.dumps(record) + "\n"
        if self.file:
            with self.flushing:
                self.unwritten += line.encode()
            self.flush_in_time()
        else:
            self.lines.append(line)
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


def throughput(metrics: pd.DataFrame, skip: int = WARM_UP) -> tuple[float, float]:
    """`(images/s, share of the time spent waiting for data)` of a run, the one definition used everywhere.

    Images/s are unmasked rows over elapsed time, pauses for checkpoints included, without the first `skip` steps. They
    are a ratio of sums, not a mean over steps: data for several steps arrives together, and one step waits for all of
    them. Time between two attempts is not counted.

    `metrics`: columns images_per_second, step_seconds, checkpoint_seconds, data_wait_share.
    """
    steps = after_warm_up(metrics, skip)
    seconds = (steps["step_seconds"] + steps["checkpoint_seconds"]).sum()
    rows = (steps["images_per_second"] * steps["step_seconds"]).sum()
    return rows / seconds, (steps["data_wait_share"] * steps["step_seconds"]).sum() / seconds


def after_warm_up(metrics: pd.DataFrame, skip: int) -> pd.DataFrame:
    return metrics.iloc[min(skip, len(metrics) // 2) :]
