"""A segment that fails: restarted where something was lost, and only there. No Ray."""

import errno
import json
import os
import pathlib

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
from helpers.encode.job import Job, Segment, finished_manifest
from helpers.lesson import captioned_shapes

ROWS, MODELS = 10, {"model": "tiny-sd", "text_encoder_model": "tiny-sd"}
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
        PreprocessingConfig(latents_uri=str(folder), **changes),
        {"resolutions": [32], "validation_share": 0.0, **(parameters or {})},
        {
            "encoder": {"model": "tiny-sd", "text_encoder_model": "tiny-sd"},
            "columns": [],
            "scaling_factor": 1.0,
            "empty_caption_embedding": "",
        },
        plan=lambda: [Segment(0, ["a"], ROWS), Segment(1, ["b"], ROWS)],
    )


class Reports:
    """What a pipeline's write tasks report of a segment, or an error after a file was written."""

    def __init__(self, job, segment, error=None, **changes):
        self.job, self.segment, self.error, self.changes = job, segment, error, changes

    def iter_batches(self, **options):
        name = f"{self.segment.index:06d}-0123456789ab.parquet"
        storage.write_text(self.job.uri("data", name), "")
        if self.error:
            raise self.error
        report = {
            "files": [{"name": name, "row_groups": [ROWS], "buckets": {}}],
            "rejects": [],
            "written": ROWS,
            "bytes": 0,
        }
        report |= {"buckets": {}, "rejected": {}, "noted": {}, "calls": []}
        report |= {**dict.fromkeys(["transform_seconds", "encode_seconds", "write_seconds"], 0.0), **self.changes}
        yield pa.table({"report": [json.dumps(report)], "rows": [ROWS]})


def failing(job, errors, **changes):
    """A pipeline that fails with one error after another, and the indices of the segments that it began.

    `changes`: of what its tasks report.
    """
    errors, begun = list(errors), []

    def pipeline(segment):
        begun.append(segment.index)
        return Reports(job, segment, errors.pop(0) if errors else None, **changes)

    return pipeline, begun


@pytest.mark.parametrize("error", LOST.values(), ids=list(LOST))
def test_a_segment_is_begun_again_when_something_is_lost(tmp_path, capsys, error):
    job = job_of(tmp_path, max_failures=2)
    pipeline, begun = failing(job, [error, error])
    manifest = job.run(pipeline)
    assert begun == [0, 0, 0, 1] and manifest.written == 2 * ROWS
    said = capsys.readouterr().out
    assert "Segment 0 is restarted (failure 1): " in said and "(failure 2): " in said


def test_after_max_failures_the_job_ends_and_can_be_resumed(tmp_path):
    job = job_of(tmp_path, max_failures=1)
    pipeline, begun = failing(job, [LOST["actor"]] * 2)
    with pytest.raises(RuntimeError, match="^The same command resumes the job, whose segment 0 failed: The actor died"):
        job.run(pipeline)
    assert begun == [0, 0] and not job.written_files()
    assert job_of(tmp_path).run(pipeline).written == 2 * ROWS


def test_without_a_limit_a_segment_is_begun_again_whenever_something_is_lost(tmp_path, capsys):
    job = job_of(tmp_path, max_failures=-1)
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


def test_a_finished_job_encodes_nothing(tmp_path):
    pipeline, begun = failing(job := job_of(tmp_path), [])
    manifest = job.run(pipeline)
    again = job_of(tmp_path)
    assert again.segments == job.segments and again.run(pipeline) == manifest and begun == [0, 1]


def test_a_job_with_other_parameters_or_of_an_earlier_version_is_not_gone_on_with(tmp_path):
    job = job_of(tmp_path)
    job.save()
    with pytest.raises(ValueError, match=r"latents_uri='.*' was begun with resolutions=\[32\], not \[64\]"):
        job_of(tmp_path, {"resolutions": [64]})
    uri = job.uri("segments", "job.json")
    storage.write_json(uri, {"parameters": {**job.parameters, "schema_version": 4}, "segments": []})
    with pytest.raises(ValueError, match="schema_version=4, not 5"):
        job_of(tmp_path)


def test_a_job_that_rejects_all_rows_ends_with_the_reasons_each_time(tmp_path):
    pipeline, begun = failing(job_of(tmp_path), [], written=0, rejected={"broken image": ROWS})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"20 rejected: broken image\): .* delete .* or give another latents_uri"):
            job_of(tmp_path).run(pipeline)
    assert begun == [0, 1] and not finished_manifest(str(tmp_path))


def test_a_file_written_again_with_its_size_is_said(tmp_path, capsys):
    options = {"input_format": "parquet", "image_column": "jpg", "caption_column": "caption", "id_column": "hash"}
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32], **options)
    captioned_shapes.write_data_set(config.raw_uri, 20)
    (path,) = pathlib.Path(config.raw_uri).glob("*.parquet")
    job = prepare.prepare_job(config)
    job.save()
    prepare.prepare_job(config)
    assert "written again" not in capsys.readouterr().out
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert prepare.prepare_job(config).parameters == job.parameters
    assert f"(the newest is {path.name})" in capsys.readouterr().out
    del job.parameters["input_written_crc32"]  # of a job of before
    job.save()
    prepare.prepare_job(config)
    assert "written again" not in capsys.readouterr().out


def test_a_storage_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch):
    def read_only(uri, text):
        raise OSError(errno.EROFS, f"{uri} cannot be written: Read-only file system")

    monkeypatch.setattr(storage, "write_text", read_only)
    with pytest.raises(ValueError, match="latents_uri='.*/latents' cannot be written: give another storage"):
        prepare.check_early(PreprocessingConfig(storage=str(tmp_path)))


def test_rows_that_nothing_accounts_for_are_not_committed(tmp_path):
    job = job_of(tmp_path)
    pipeline, _ = failing(job, [])
    job.segments[1] = Segment(1, ["b"], ROWS + 1)
    with pytest.raises(RuntimeError, match="Segment 1: 11 rows read, 10 written and 0 rejected; the rest is unacc"):
        job.run(pipeline)
    assert list(job.committed()) == [0] and len(job.written_files()) == 1


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
        job_of(began.latents_uri, prepare.derive(began).fixed("rows", "latents")).save()
    with pytest.raises(ValueError, match=sentence):
        prepare.check_early(PreprocessingConfig(**{**given, **changes}))
