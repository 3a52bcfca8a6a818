"""What a training run leaves on disk, and how it is read: metrics, checkpoints, failures. No Ray, no torch."""

import json
import os
import re
import zlib

import pandas as pd

from . import storage

PROGRESS = "progress.json"  # in every checkpoint: the step, and the files that make it complete
SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's own list of checkpoints
BEST = "best"  # in a run's folder: a copy of the checkpoint with the lowest validation loss
COLUMNS = ["step", "attempt", "loss", "samples_seen"]


# --- metrics ------------------------------------------------------------------------------------------


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
        line = json.dumps({
            "step": step, "attempt": self.attempt, **metrics, **speed,
            "samples_seen": self.samples_seen, "samples_crc32": samples_crc32(ids),
        })  # fmt: skip
        if self.file:
            self.file.write(line + "\n")
        else:
            self.lines.append(line)

    def flush(self):
        if self.lines:
            last = json.loads(self.lines[-1])["step"]
            storage.write_text(storage.join(self.run_uri, f"metrics-{self.attempt:04d}-{last:09d}.jsonl"), "\n".join(self.lines) + "\n")
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


def speed(metrics):
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
            "images/s": steps["images_per_second"].median(), "a worker": steps["images_per_second_per_worker"].median(),
            "MFU": steps["mfu"].median(), "peak memory, GiB": steps["peak_memory_gib"].max(),
            "data": (steps["data_wait_share"] * steps["step_seconds"]).sum() / whole,
            "communication": talk * computing / whole, "checkpoints": stopped / whole,
        }  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


# --- checkpoints --------------------------------------------------------------------------------------


def checkpoint_name(step, attempt):
    """A name of its own for every save, so that a step which is redone never writes into an earlier attempt's folder."""
    return f"checkpoint-{step:09d}-{attempt:03d}"


def list_checkpoints(run_uri):
    """URIs of a run's checkpoint folders, complete or not, newest step first."""
    found = [uri for uri in storage.list_folders(run_uri) if re.fullmatch(r"checkpoint-\d{9}-\d{3}", storage.name(uri))]
    return sorted(found, key=storage.name, reverse=True)


def damage(checkpoint_uri):
    """What is wrong with a checkpoint folder, in a few words; None if it is complete."""
    try:
        progress = storage.read_json(storage.join(checkpoint_uri, PROGRESS))
        expected = progress["files"]
    except FileNotFoundError:
        return f"it has no {PROGRESS}"
    except (ValueError, KeyError):
        return f"its {PROGRESS} is cut short"
    sizes = storage.sizes(checkpoint_uri)
    for name, size in expected.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != size:
            return f"its file {name} has {sizes[name]:,} bytes of {size:,}"
    return None


def last_complete(run_uri):
    """URI of the newest complete checkpoint; None if there is none.

    Ray Train's own list is not asked: it knows what was reported, not what the storage still holds.
    """
    return next((uri for uri in list_checkpoints(run_uri) if damage(uri) is None), None)


def keep_as_best(run_uri, folder, name):
    """Copy a checkpoint to `best/` of its run, and then delete the one that was there."""
    best_uri = storage.join(run_uri, BEST)
    storage.copy_folder(folder, storage.join(best_uri, name))
    for uri in list_checkpoints(best_uri):
        if storage.name(uri) != name:
            storage.delete(uri)


def step_of(checkpoint_uri):
    """Steps done at a checkpoint."""
    return int(storage.read_json(storage.join(checkpoint_uri, PROGRESS))["step"])


def repair(run_uri):
    """Make Ray Train's list of checkpoints agree with what the storage holds; returns sentences on what was dropped.

    A damaged checkpoint leaves the list and its folder is deleted; so are folders that never made it into the list,
    but for the newest complete one, where the run goes on. Call it while nothing trains under this name.
    """
    said, resume_from = [], last_complete(run_uri)
    listed_uri = storage.join(run_uri, SNAPSHOT)
    try:
        snapshot = storage.read_json(listed_uri)
        listed = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"]]
    except FileNotFoundError:
        snapshot, listed = None, []
    except (ValueError, KeyError):  # the driver was killed while it was written
        snapshot, listed = None, []
        storage.delete(listed_uri)
        said.append(f"{SNAPSHOT} was cut short: Ray Train's list of checkpoints is made anew.")
    folders = {storage.name(uri): uri for uri in list_checkpoints(run_uri)}
    kept = []
    for name in listed:
        problem = damage(folders[name]) if name in folders else "its folder is missing"
        if problem is None:
            kept.append(name)
        else:
            said.append(f"{name} cannot be used: {problem}.")
    if snapshot is not None and kept != listed:
        if kept:
            storage.write_json(listed_uri, _without(snapshot, kept))
        else:
            storage.delete(listed_uri)
    for name, uri in folders.items():
        if name not in kept and uri != resume_from:
            storage.delete(uri)
    if said:
        said.append(f"The run goes on from {storage.name(resume_from)}." if resume_from else "The run starts over.")
    return said


def _without(snapshot, kept):
    """Ray Train's snapshot with only the checkpoints `kept`."""
    pairs = zip(snapshot["checkpoint_results"], snapshot["checkpoint_report_indices"], strict=True)
    pairs = [(result, index) for result, index in pairs if result["checkpoint_dir_name"] in kept]
    latest = max(pairs, key=lambda pair: pair[1])[0]
    # Validations that were under way are not resumed: the next checkpoint is validated again.
    return {
        **snapshot,
        "checkpoint_results": [result for result, _ in pairs],
        "checkpoint_report_indices": [index for _, index in pairs],
        "latest_checkpoint_result": latest,
        "pending_training_results": [],
        "pending_validation_specs": [],
    }


# --- failures -----------------------------------------------------------------------------------------


def write_failure(run_uri, text):
    """Note why workers were lost, for whoever follows the run."""
    number = len(storage.list_files(storage.join(run_uri, "failures"), ".json")) + 1
    last = storage.read_json(storage.join(run_uri, "failures", f"{number - 1:03d}.json"))["error"] if number > 1 else None
    if text != last:  # the same failure may be polled twice
        storage.write_json(storage.join(run_uri, "failures", f"{number:03d}.json"), {"error": text})


def read_failures(run_uri):
    """What went wrong in a run, oldest first: one short text for each group of workers that was lost."""
    return [storage.read_json(uri)["error"] for uri in storage.list_files(storage.join(run_uri, "failures"), ".json")]
