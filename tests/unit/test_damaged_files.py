"""Half a file, and a full disk: what a person then reads, and what is made again. No Ray."""

import errno
import json
import os
import pathlib

import pytest

from helpers import storage
from helpers.config import TrainingConfig
from helpers.encode.job import finished_manifest
from helpers.latents.manifest import read_manifest, read_segments
from helpers.production import monitor
from helpers.production.extras import results
from helpers.train import run_folder, start
from helpers.train.metrics import MetricsLog, MetricsReader, read_metrics
from tests.unit.encode.test_job import ROWS, failing, job_of

# ---- half a file


def halve(uri):
    data = pathlib.Path(uri).read_bytes()
    pathlib.Path(uri).write_bytes(data[: len(data) // 2])


def half(uri, content=None):
    storage.write_json(uri, content or {"a": 1, "b": [2, 3]})
    halve(uri)
    return uri


def config_of(folder):
    config = TrainingConfig(storage=str(folder), run_name="run")
    storage.write_text(storage.join(config.run_uri, "metrics.jsonl"), "")
    return config


READ = {
    "latents/manifest.json": (lambda uri, _: read_manifest(os.path.dirname(uri)), "run the notebook that encoded this"),
    "runs/run/config.json": (lambda uri, folder: start.read_earlier(config_of(folder)), "delete it and train with the"),
    "runs/run/ended.json": (lambda uri, _: run_ends(uri), "delete it, and start the same command again"),
}


def run_ends(uri):
    with run_folder.raise_end(os.path.dirname(uri)):
        half(uri)


@pytest.mark.parametrize("part", [0, 0.5, None])
@pytest.mark.parametrize("name", READ)
def test_a_damaged_file_is_one_sentence_with_its_path_and_what_to_do(tmp_path, name, part):
    """Also an empty one, one without its end, and one of zeros."""
    uri, (read, remedy) = f"{tmp_path}/{name}", READ[name]
    data = json.dumps({"a": 1, "b": "ü"}).encode()
    storage.write_bytes(uri, bytes(100) if part is None else data[: int(len(data) * part)])
    with pytest.raises(
        storage.DamagedFile, match=rf"^{uri} is damaged or cut short \([\d,]+ bytes\): {remedy}"
    ) as raised:
        read(uri, tmp_path)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["manifest.json", "files.json"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_damaged_manifest_is_made_again_by_the_job_without_encoding(tmp_path, name, gone):
    pipeline, begun = failing(job := job_of(tmp_path), [])
    whole = job.run(pipeline)
    assert begun == [0, 1] and finished_manifest(str(tmp_path))
    (os.remove if gone else halve)(tmp_path / name)
    again = job_of(tmp_path)
    assert not finished_manifest(str(tmp_path)) and again.run(pipeline) == whole == read_manifest(str(tmp_path))
    assert begun == [0, 1] and len(read_segments(str(tmp_path))) == 2 and len(again.written_files()) == 2


def test_a_segment_whose_entry_is_damaged_is_encoded_again(tmp_path, capsys):
    pipeline, begun = failing(job := job_of(tmp_path), [None, OSError("the store does not answer")])
    with pytest.raises(RuntimeError, match="the store"):
        job.run(pipeline)
    halve(tmp_path / "segments" / "000000.json")
    assert job_of(tmp_path).run(pipeline).written == 2 * ROWS and begun == [0, 1, 0, 1]
    said = capsys.readouterr().out
    assert said.count("segments/000000.json is damaged or cut short") == 1 and "its segment is encoded again" in said
    assert len(job.written_files()) == 2


def test_a_damaged_result_or_failure_is_shown_as_that(tmp_path):
    run_uri = str(tmp_path)
    reader = results.ResultsReader(run_uri)
    results.write_result(run_uri, {"step": 10, "clip_score": 0.2})
    uri = half(results.result_uri(run_uri, 20), {"step": 20, "clip_score": 0.9})
    said = f"evaluation of step 20, reading failed: {uri} is damaged or cut short"
    read = reader.read()
    assert [result["step"] for result in read] == [10, 20] and not reader.read()
    assert results.sentences(read[1])[0].startswith(said)
    assert results.scores(run_uri)["clip_score"].tolist()[0] == 0.2
    assert results.is_best(run_uri, {"step": 30, "clip_score": 0.3}, "clip_score")
    run_folder.write_failure(run_uri, "worker 0: it died")
    half(storage.join(run_uri, "failures", "002.json"), {"error": "worker 1: it died"})
    assert run_folder.read_failures(run_uri)[1].startswith(f"{run_uri}/failures/002.json is damaged or cut short")
    run_folder.write_failure(run_uri, "worker 2: it died")
    assert run_folder.read_failures(run_uri)[2] == "worker 2: it died"


def test_torn_lines_of_the_metrics_are_left_out_and_counted(tmp_path):
    """Also one that another line follows, and one of zeros."""
    log, path = MetricsLog(str(tmp_path)), tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        log.write(step, {"loss": 0.5, "num_kept": 1}, ids=[step])
    first, second, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, second[:20] + second, bytes(50), b"\xff\xfe}", third, first[:9]]) + b"\n")
    reader = MetricsReader(str(tmp_path))
    assert [record["step"] for record in reader.read()] == [1, 3] and reader.torn == 4
    assert read_metrics(str(tmp_path))["step"].tolist() == [1, 3]


def test_torn_lines_are_told_while_a_run_is_shown(tmp_path, capsys):
    config = config_of(tmp_path)
    with monitor.monitor_run(config, every=60):
        storage.write_text(storage.join(config.run_uri, "metrics.jsonl"), '{"step": 1, "lo\n')
    assert "Lines of the metrics that are torn, and left out: 1\n" in capsys.readouterr().out


# ---- a full disk


class FullDisk:
    """A disk on which only so many bytes fit; as `pyarrow.fs` and a file without a buffer behave there."""

    def __init__(self, monkeypatch, room=0):
        self.room, self.written = room, b""
        self.name = "/run/metrics.jsonl"
        monkeypatch.setattr(storage, "open_filesystem", self.open_filesystem(storage.open_filesystem))

    def open_filesystem(self, original):
        disk = self

        class Full(storage.fs.LocalFileSystem):
            def open_output_stream(self, path, **options):
                if not disk.room:
                    raise OSError(
                        errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device"
                    )
                return super().open_output_stream(path, **options)

        return lambda uri: (Full(), original(uri)[1])

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[: self.room]
        self.room -= len(data)
        self.written += data
        return len(data)


FULL = "cannot be written: No space left on device"


def test_a_full_disk_is_one_sentence_and_leaves_no_part(tmp_path, monkeypatch):
    storage.write_text(tmp_path / "a.json", "old")
    with monkeypatch.context() as patch:
        FullDisk(patch)
        with pytest.raises(OSError, match=rf"{tmp_path}/a.json {FULL}$"):
            storage.write_json(tmp_path / "a.json", {})
    assert (tmp_path / "a.json").read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_metrics_wait_for_room_on_a_full_disk(tmp_path, monkeypatch, capsys):
    log = MetricsLog(str(tmp_path))
    log.file = disk = FullDisk(monkeypatch, room=30)
    for step in (1, 2, 3):
        log.write(step, {"loss": 0.5, "num_kept": 1}, ids=[step])
    assert capsys.readouterr().out.count(f"/run/metrics.jsonl {FULL}") == 1 and len(disk.written) == 30
    with pytest.raises(OSError, match=FULL):
        log.flush()
    disk.room = 10_000
    log.write(4, {"loss": 0.5, "num_kept": 1}, ids=[4])
    assert [json.loads(line)["step"] for line in disk.written.splitlines()] == [1, 2, 3, 4]
