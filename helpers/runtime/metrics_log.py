"""`metrics.jsonl` of a run: one line a step, written by rank 0, read back as a frame. No Ray, no torch."""

import json
import os
import zlib

import pandas as pd

from .. import storage

COLUMNS = ["step", "attempt", "loss", "samples_seen"]


def samples_crc32(ids):
    """CRC-32 of the ids as text, sorted, joined by newlines: the same for the same set of samples."""
    return zlib.crc32("\n".join(sorted(map(str, ids))).encode())


class MetricsLog:
    """`metrics.jsonl` of a run, one line a step, written by rank 0.

    Locally lines are appended as they come; an object store cannot append, so there the lines between two checkpoints
    make one object, `metrics-{attempt}-{step}.jsonl`. Steps that are redone after a failure appear again with a higher
    `attempt`: readers take the last (`read_metrics`).
    """

    def __init__(self, run_uri):
        self.run_uri = run_uri
        earlier = read_metrics(run_uri, all_attempts=True)
        self.attempt = 1 if earlier.empty else int(earlier["attempt"].max()) + 1
        self.samples_seen = None
        self.seen = dict(zip(earlier["step"], earlier["samples_seen"], strict=True))
        self.lines = []
        self.file = None
        if storage.is_local(run_uri):
            path = storage.join(run_uri, "metrics.jsonl")
            torn = os.path.exists(path) and not storage.read_text(path).endswith("\n") and os.path.getsize(path) > 0
            self.file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the worker lives)
            if torn:  # a killed worker's last line
                self.file.write("\n")

    def write(self, step, metrics, ids, num_kept, **speed):
        """`ids`: of the whole global batch; `num_kept`: how many of its rows were not masked out of the loss."""
        if self.samples_seen is None:
            self.samples_seen = int(self.seen.get(step - 1, 0))
            self.seen = None
        self.samples_seen += num_kept
        line = json.dumps(
            {
                "step": step,
                "attempt": self.attempt,
                **metrics,
                **speed,
                "samples_seen": self.samples_seen,
                "samples_crc32": samples_crc32(ids),
            }
        )
        if self.file:
            self.file.write(line + "\n")
        else:
            self.lines.append(line)

    def flush(self):
        if self.lines:
            last = json.loads(self.lines[-1])["step"]
            storage.write_text(
                storage.join(self.run_uri, f"metrics-{self.attempt:04d}-{last:09d}.jsonl"), "\n".join(self.lines) + "\n"
            )
            self.lines = []


class MetricsReader:
    """Follows a run's metrics while they are written: `read` gives the lines that came since it was last called."""

    def __init__(self, run_uri):
        self.run_uri = run_uri
        self.position = 0  # in the local file
        self.seen = set()  # objects

    def read(self):
        """New lines as dicts, in the order in which they were written; a line that is not complete yet comes later."""
        text = ""
        for uri in metrics_files(self.run_uri):
            if storage.is_local(uri):
                with open(uri) as file:
                    file.seek(self.position)
                    new = file.read()
                new = new[: new.rfind("\n") + 1]
                self.position += len(new.encode())
                text += new
            elif uri not in self.seen:
                self.seen.add(uri)
                text += storage.read_text(uri)
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]  # a killed worker's may be cut


def metrics_files(run_uri):
    return [uri for uri in storage.list_files(run_uri, ".jsonl") if storage.name(uri).startswith("metrics")]


def read_metrics(run_uri, all_attempts=False):
    """A run's metrics as a frame, one row a step: of steps that were done more than once, the last attempt."""
    rows = MetricsReader(run_uri).read()
    if not rows:
        return pd.DataFrame(columns=COLUMNS)
    frame = pd.DataFrame(rows).sort_values(["step", "attempt"], kind="stable").reset_index(drop=True)
    return frame if all_attempts else frame.drop_duplicates("step", keep="last").reset_index(drop=True)


def throughput(metrics, skip=20):
    """`(images a second, share of the time spent waiting for data)` of a run by the clock, after its first `skip` steps.

    Not the mean over steps: what several steps need arrives together, so one of them waits for all.
    """
    last = metrics.iloc[min(skip, len(metrics) - 1) :]
    seconds = 1 / last["images_per_second"]  # of one image
    return len(last) / seconds.sum(), (last["data_wait_share"] * seconds).sum() / seconds.sum()


def speed_summary(metrics):
    """How fast runs were: {name: metrics} -> a frame with a row a run.

    Images a second and MFU are the median step's; shares are of all the time, whose rest is computing: waiting for data,
    in collectives that nothing hid behind (of the one step that is profiled), and standing still for checkpoints.
    """
    rows = {}
    for name, steps in metrics.items():
        computing, stopped = steps["step_seconds"].sum(), steps["checkpoint_seconds"].sum()
        whole = computing + stopped
        talk = steps["communication_share"].astype(float).median()
        rows[name] = {
            "images/s": steps["images_per_second"].median(),
            "a worker": steps["images_per_second_per_worker"].median(),
            "MFU": steps["mfu"].median(),
            "peak memory, GiB": steps["peak_memory_gib"].max(),
            "data": (steps["data_wait_share"] * steps["step_seconds"]).sum() / whole,
            "communication": talk * computing / whole,
            "checkpoints": stopped / whole,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")
