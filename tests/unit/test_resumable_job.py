"""A segment that fails: restarted where something was lost, and only there. No Ray."""

import json

import pyarrow as pa
import pytest
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from helpers import resumable_job, storage

ROWS = 10
LOST = {
    "actor": ActorDiedError(),
    "worker": WorkerCrashedError(),
    "node": NodeDiedError("the node has died"),
    "owner": OwnerDiedError("0" * 56, None, ""),
    "in a task": RayTaskError("list_files", "Traceback", ActorDiedError()).as_instanceof_cause(),
}
WRONG = {
    "broken encoder": RayActorError(actor_init_failed=True),
    "own error": RayTaskError("transform", "Traceback", ValueError("no number")).as_instanceof_cause(),
    "store": OSError("the store does not answer"),
}


def job_of(folder, parameters=None, **changes):
    return resumable_job.Job(
        str(folder),
        {"resolutions": [32], **(parameters or {})},
        {"encoder": {}, "columns": [], "scaling_factor": 1.0, "empty_caption_embedding": ""},
        plan=lambda: [resumable_job.Segment(0, ["a"], ROWS), resumable_job.Segment(1, ["b"], ROWS)],
        listing={},
        id_type=pa.int64(),
        **changes,
    )


class Reports:
    """What a pipeline's write tasks report of a segment, or an error after a file was written."""

    def __init__(self, job, segment, error=None):
        self.job, self.segment, self.error = job, segment, error

    def iter_batches(self, **options):
        name = f"{self.segment.index:06d}-0123456789ab.parquet"
        storage.write_text(self.job.uri("data", name), "")
        if self.error:
            raise self.error
        report = {"files": [{"name": name, "row_groups": [ROWS]}], "rejects": [], "written": ROWS, "bytes": 0}
        report |= {"at": {}, "buckets": {}, "rejected": {}, "calls": [], "stages": {}}
        yield pa.table({"report": [json.dumps(report)]})


def failing(job, errors):
    """A pipeline that fails with one error after another, and the indices of the segments that it began."""
    errors, begun = list(errors), []

    def pipeline(segment):
        begun.append(segment.index)
        return Reports(job, segment, errors.pop(0) if errors else None)

    return pipeline, begun


@pytest.mark.parametrize("error", LOST.values(), ids=list(LOST))
def test_a_segment_is_begun_again_when_something_is_lost(tmp_path, capsys, error):
    job = job_of(tmp_path, max_failures=2)
    pipeline, begun = failing(job, [error, error])
    manifest = job.run(pipeline)
    assert begun == [0, 0, 0, 1] and manifest.total("written") == 2 * ROWS
    said = capsys.readouterr().out
    assert "Segment 0 is restarted (failure 1 of max_failures=2): " in said and "(failure 2 of max_failures=2)" in said


def test_after_max_failures_the_job_ends_and_can_be_resumed(tmp_path):
    job = job_of(tmp_path, max_failures=1)
    pipeline, begun = failing(job, [LOST["actor"]] * 2)
    with pytest.raises(ActorDiedError):
        job.run(pipeline)
    assert begun == [0, 0] and not job.written_files()
    assert job_of(tmp_path).run(pipeline).total("written") == 2 * ROWS


@pytest.mark.parametrize("error", WRONG.values(), ids=list(WRONG))
def test_an_error_that_would_come_again_ends_the_job(tmp_path, error):
    job = job_of(tmp_path)
    pipeline, begun = failing(job, [error])
    with pytest.raises(type(error)):
        job.run(pipeline)
    assert begun == [0] and not job.written_files()


def test_a_job_of_an_earlier_version_is_not_gone_on_with(tmp_path):
    """Its rows do not lie by bucket."""
    job_of(tmp_path).run(failing(job_of(tmp_path), [])[0])
    with pytest.raises(ValueError, match=r"made with other parameters \(aspect_ratios=None, not \[1.0\]\)"):
        job_of(tmp_path, {"aspect_ratios": (1.0,)})
