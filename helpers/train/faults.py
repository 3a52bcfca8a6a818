"""The records of a run's lost workers and checkpoints, and of why it ended. Without PyTorch."""

from __future__ import annotations

import ray.train
from pyarrow import fs

from .. import storage

# In a run's folder: why its workers ended it, and the nodes that were excluded since its driver started.
ENDED, EXCLUDED = "ended.json", "excluded.json"


class LostCheckpoint(ray.train.Checkpoint):
    """What rank 0 reports to Ray Train in place of a checkpoint that a worker could not upload; `why`: a sentence.

    It is falsy. Ray Train registers only truthy checkpoints, so a lost one replaces no older checkpoint. This project's
    code recognises it by `isinstance`.
    """

    def __init__(self, path: str, filesystem: fs.FileSystem, why: str):
        super().__init__(path, filesystem)
        self.why = why

    def __bool__(self) -> bool:
        return False


def write_failure(run_uri: str, error: str) -> None:
    """Print why workers or a checkpoint were lost, and record it in the run's `failures/`.

    If the storage refuses the record, the reason is only printed.
    """
    print(error)
    try:
        errors = read_failures(run_uri)
        if errors[-1:] != [error]:  # Ray Train may report a failure twice
            storage.write_json(storage.join(run_uri, "failures", f"{len(errors) + 1:03d}.json"), {"error": error})
    except OSError as refused:
        print(f"This could not be recorded: {refused}")


def read_failures(run_uri: str) -> list[str]:
    """One short text for each group of workers and each checkpoint that was lost, oldest first."""
    uris = storage.list_files(storage.join(run_uri, "failures"), ".json")
    return [storage.read_json(uri, "left out", lambda sentence: {"error": sentence})["error"] for uri in uris]


def end_run(run_uri: str, error: str) -> None:
    """End the run with `error`: call it in one worker, then return from all. Ray Train does not restart the run."""
    storage.write_json(storage.join(run_uri, ENDED), {"error": error})
