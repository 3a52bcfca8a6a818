"""Records on the driver's side why workers were lost, and ends a run that loses its checkpoints. Without PyTorch."""

from __future__ import annotations

import ray.train

from ... import cluster
from ...train import run_folder

MAX_LOST = 3  # checkpoints in a row, after which a run ends


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that records why workers were lost; `monitor_run` shows the records.

    It ends the run when `MAX_LOST` checkpoints in a row are lost, because no step since the last complete checkpoint is
    saved.
    """

    def __init__(self, run_uri: str):
        self.run_uri = run_uri
        self.lost = 0  # checkpoints since the last complete one

    def after_report(self, run_context, metrics, checkpoint):
        self.lost = self.lost + 1 if isinstance(checkpoint, run_folder.LostCheckpoint) else 0
        if self.lost == MAX_LOST:  # raised in Ray Train's controller, which then starts no workers again
            raise RuntimeError(
                f"{MAX_LOST} checkpoints in a row were lost; {checkpoint.why}: start the same command again when the "
                "storage takes files; the run resumes from its last complete checkpoint."
            )

    def after_exception(self, run_context, worker_exceptions):
        errors = [
            f"worker {rank}: {cluster.summarize_error(str(error))}" for rank, error in sorted(worker_exceptions.items())
        ]
        run_folder.write_failure(self.run_uri, "; ".join(errors))
