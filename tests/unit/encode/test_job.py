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

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode import prepare
from helpers.encode.job import TIMELINE, Job, Segment, timeline

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
    return Job(
        str(folder),
        {"resolutions": [32], **(parameters or {})},
        {"encoder": {}, "columns": [], "scaling_factor": 1.0, "empty_caption_embedding": ""},
        plan=lambda: [Segment(0, ["a"], ROWS), Segment(1, ["b"], ROWS)],
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
        report |= {"buckets": {}, "rejected": {}, "noted": {}, "calls": []}
        report |= dict.fromkeys(["transform_seconds", "encode_seconds", "write_seconds"], 0.0)
        yield pa.table({"report": [json.dumps(report)], "rows": [ROWS]})


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
    assert begun == [0, 0, 0, 1] and manifest.written == 2 * ROWS
    said = capsys.readouterr().out
    assert "Segment 0 is restarted (failure 1 of max_failures=2): " in said and "(failure 2 of max_failures=2)" in said


def test_after_max_failures_the_job_ends_and_can_be_resumed(tmp_path):
    job = job_of(tmp_path, max_failures=1)
    pipeline, begun = failing(job, [LOST["actor"]] * 2)
    with pytest.raises(RuntimeError, match="^The same command resumes the job, whose segment 0 failed: The actor died"):
        job.run(pipeline)
    assert begun == [0, 0] and not job.written_files()
    assert job_of(tmp_path).run(pipeline).written == 2 * ROWS


def test_without_a_limit_a_segment_is_begun_again_whenever_something_is_lost(tmp_path, capsys):
    job = job_of(tmp_path, max_failures=PreprocessingConfig(max_failures=-1).max_failures)
    pipeline, begun = failing(job, [LOST["actor"]] * 9)
    assert job.run(pipeline).written == 2 * ROWS and begun == [0] * 10 + [1]
    assert "Segment 0 is restarted (failure 9): " in capsys.readouterr().out


@pytest.mark.parametrize("error", WRONG.values(), ids=list(WRONG))
def test_an_error_that_would_come_again_ends_the_job(tmp_path, error):
    job = job_of(tmp_path)
    pipeline, begun = failing(job, [error])
    with pytest.raises(RuntimeError, match="^The same command resumes the job, whose segment 0 failed: "):
        job.run(pipeline)
    assert begun == [0] and not job.written_files()


def test_a_finished_job_reads_its_list_of_files_once_and_again_where_it_is_run(tmp_path, monkeypatch):
    """The list of a large data set takes minutes."""
    pipeline, begun = failing(job := job_of(tmp_path), [])
    manifest, read, names = job.run(pipeline), storage.read_json, []
    monkeypatch.setattr(storage, "read_json", lambda uri, *more: names.append(storage.name(uri)) or read(uri, *more))
    again = job_of(tmp_path)
    assert names.count("files.json") == 1 and again.segments == job.segments
    assert again.run(pipeline) == manifest and names.count("files.json") == 2 and begun == [0, 1]


LIST = {"leave_out": {"sha256": "0" * 64, "entries": 3}}


def test_a_list_of_which_no_row_was_found_is_said_when_the_job_ends(tmp_path, capsys):
    job = job_of(tmp_path, LIST)
    assert job.run(failing(job, [])[0]).job.items() > LIST.items()
    assert capsys.readouterr().out == "leave_out: none of its 3 ids or sums was found in the rows that were read.\n"


def test_a_finished_job_takes_another_list_and_an_unfinished_one_does_not(tmp_path, capsys):
    pipeline, begun = failing(job := job_of(tmp_path, max_failures=0), [None, LOST["actor"]])
    with pytest.raises(RuntimeError, match="segment 1 failed"):
        job.run(pipeline)
    message = r"made with other parameters \(leave_out=None, not {'sha256': '0+', 'entries': 3}\): give another"
    with pytest.raises(ValueError, match=message):
        job_of(tmp_path, LIST)
    manifest = job_of(tmp_path).run(pipeline)
    capsys.readouterr()
    assert job_of(tmp_path, LIST).run(pipeline) == manifest and begun == [0, 1, 1]
    said = f"leave_out is not the list that {tmp_path} was encoded with: its rows stay as they are, and training masks"
    assert capsys.readouterr().out.startswith(said)
    with pytest.raises(ValueError, match=r"made with other parameters \(resolutions="):
        job_of(tmp_path, {**LIST, "resolutions": [64]})


def test_a_job_of_an_earlier_version_is_not_gone_on_with(tmp_path):
    job = job_of(tmp_path)
    storage.write_json(job.uri("segments", "job.json"), {"resolutions": [32]})
    with pytest.raises(ValueError, match=r"made with other parameters \(schema_version=None, not 5\): give another"):
        job_of(tmp_path)


def test_rows_that_nothing_accounts_for_are_not_committed(tmp_path):
    job = job_of(tmp_path)
    pipeline, _ = failing(job, [])
    job.segments[1] = Segment(1, ["b"], ROWS + 1)
    with pytest.raises(RuntimeError, match="Segment 1: 11 rows read, 10 written and 0 rejected; the rest is unacc"):
        job.run(pipeline)
    assert list(job.committed()) == [0] and len(job.written_files()) == 1


def calls_of(spans):
    return [{"encoder": name, "started": start, "ended": end, "rows": rows} for name, start, end, rows in spans]


def test_the_timeline_says_when_encoders_computed():
    one = calls_of([("a", 100.0, 101.0, 10), ("a", 101.5, 103.0, 30), ("a", 103.0, 104.0, 5)])
    assert timeline(one) == [[0, 1, 10], [1, 0.5, 10], [2, 1, 20], [3, 1, 5]]
    two = calls_of([("a", 0.0, 4.0, 8), ("b", 2.0, 4.0, 4)])  # the second one joins later
    assert timeline(two) == [[0, 0.5, 2], [1, 0.5, 2], [2, 1, 4], [3, 1, 4]]
    assert timeline(calls_of([("a", 1.0, 1.5, 9)])) == []  # too short
    long = timeline(calls_of([("a", second, second + 0.9, 9) for second in range(1000)]))
    assert len(long) == TIMELINE
    assert all(0.85 < share < 0.95 and 8.5 < rate < 9.5 for _, share, rate in long)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"limit": 20}, "limit=10, not 20"),
        ({"resolutions": [64]}, r"resolutions=\[32\], not \[64\]"),
        ({"resolutions": [32, 36]}, "multiples of"),
        ({"encoder_model": "no/folder/here"}, "encoder_model="),
    ],
)
def test_what_needs_no_data_is_refused_before_data_is_looked_at(changes, sentence, tmp_path):
    """An unfinished job began with a limit of 10 rows, at 32 pixels."""
    given = {"storage": str(tmp_path), "limit": 10, "resolutions": [32]}
    began = PreprocessingConfig(**given)
    prepare.check_early(began)
    if "encoder_model" not in changes and "multiples" not in sentence:
        job_of(began.latents_uri, began.fixed("rows", "latents")).save()
    with pytest.raises(ValueError, match=sentence):
        prepare.check_early(PreprocessingConfig(**{**given, **changes}))
