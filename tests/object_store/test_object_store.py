"""Raw data, latents and runs on s3://, over HTTP, from a server that fails now and then and one that goes away."""

import pathlib
import time
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.train

from helpers import storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.latents.manifest import read_manifest
from helpers.latents.plan import read_files
from helpers.latents.read import read_latents
from helpers.lesson import captioned_shapes
from helpers.train import checkpoint, metrics, run_folder
from tests.benchmarks import made_up
from tests.faults import attempts_of, wait_until
from tests.latents import plan_for, read_steps
from tests.pipelines import assert_bare, encode, fit, short_run

ROWS, STEPS = 300, 12


@pytest.fixture
def server(store):
    return store


@pytest.fixture(autouse=True)
def faultless(server):
    yield
    server.fail_every = server.refusals = 0


# ---- files


@pytest.mark.parametrize("name", ["plain", "a b#c%20ü", "a:b?c+<&>"])
def test_any_key_can_be_written_listed_read_copied_and_deleted(server, tmp_path, name):
    uri = storage.join("s3://bucket/files", name, "deep", "file.json")
    storage.write_json(uri, {"text": "grüße"})
    assert ("bucket", f"files/{name}/deep/file.json") in server.objects
    assert storage.list_files("s3://bucket/files", ".json", recursive=True) == [uri]
    assert storage.read_json(uri) == {"text": "grüße"} and storage.exists(uri) and storage.is_file(uri)
    assert storage.list_folders("s3://bucket/files") == [f"s3://bucket/files/{name}"]
    storage.copy_folder("s3://bucket/files", tmp_path)
    assert (tmp_path / name / "deep" / "file.json").exists()
    storage.delete("s3://bucket/files")
    assert not storage.exists(uri) and server.keys("files") == []


def test_an_empty_object_may_mark_a_folder_and_another_one_may_not(server):
    storage.write_bytes("s3://bucket/marked/a.parquet", b"1")
    for data, is_file in ((b"", False), (b"x", True)):
        server.objects["bucket", "marked"] = data, time.time()
        assert storage.is_file("s3://bucket/marked") == is_file
        if not is_file:
            assert storage.sizes("s3://bucket/marked") == {"a.parquet": 1}
    with pytest.raises(ValueError, match="s3://bucket/marked is both an object and a folder"):
        storage.sizes("s3://bucket/marked")
    storage.write_bytes("s3://bucket/empty", b"")
    assert storage.is_file("s3://bucket/empty") and storage.sizes("s3://bucket/empty") == {"": 0}


def test_large_files_go_in_parts_and_a_failing_server_loses_none(server, tmp_path):
    data = np.random.default_rng(0).bytes(23 * 2**20)
    pathlib.Path(tmp_path, "large").write_bytes(data)
    server.fail_every, failures = 5, server.failures
    for _ in range(3):
        storage.copy_folder(tmp_path, "s3://bucket/parts")
        assert server.objects["bucket", "parts/large"][0] == data
    assert server.failures > failures
    assert any("uploadId" in path for method, path in server.requests if method == "PUT")
    storage.delete("s3://bucket/parts")


def test_a_file_that_is_too_large_for_a_stores_own_copy_is_copied_too(server, monkeypatch):
    """S3 refuses to copy an object of more than 5 GiB by one request."""
    monkeypatch.setattr(storage, "MOST_COPIED", 1000)
    monkeypatch.setattr(server, "most_copied", 1000)
    for size in (1000, 1001):
        storage.write_bytes(f"s3://bucket/from/{size}", b"1" * size)
    server.requests.clear()
    storage.copy_folder("s3://bucket/from", "s3://bucket/best")
    assert storage.sizes("s3://bucket/best") == {"1000": 1000, "1001": 1001}
    assert "/bucket/from/1001" in [path for method, path in server.requests if method == "GET"]
    assert "/bucket/from/1000" not in [path for method, path in server.requests if method == "GET"]


def test_more_objects_than_one_answer_lists_are_all_listed(server):
    for number in range(2_345):
        server.objects["bucket", f"many/{number:05d}/a"] = (b"1", 0)
    assert len(storage.list_files("s3://bucket/many", recursive=True)) == 2_345
    assert len(storage.list_folders("s3://bucket/many")) == 2_345
    storage.delete("s3://bucket/many")
    assert server.keys("many") == []


def test_a_store_that_is_away_for_some_seconds_is_waited_for(server):
    storage.write_text("s3://bucket/waited.txt", "before")
    back = server.vanish(seconds=1.5)
    storage.write_text("s3://bucket/waited.txt", "after")
    back.join()
    assert storage.read_text("s3://bucket/waited.txt") == "after"


def test_a_text_shorter_than_an_error_is_asked_for_again(server):
    storage.write_text("s3://bucket/short.txt", "short")
    server.fail_every, failures = 4, server.failures  # every second time that it is read
    assert {storage.read_text("s3://bucket/short.txt") for _ in range(20)} == {"short"}
    assert server.failures > failures


@pytest.mark.parametrize("trouble", [{"cut_every": 5}, {"late_every": 9, "late_delay": 8.0}], ids=["cut", "late"])
def test_rows_are_read_from_a_store_in_trouble(server, trouble):
    """Answers break off, or come too late: a client of S3 gives up a request after three seconds."""
    uri, shapes = "s3://bucket/trouble", {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (6, 128)}
    made_up.write_latents(uri, 512, shapes, rows_per_file=64)
    plan = plan_for(TrainingConfig(latents_uri=uri, resolution=32, global_batch_size=64, validation_share=0))

    def rows():
        return pa.concat_tables(read_steps(plan, read_latents, 0, 16))

    expected = rows()
    vars(server).update(trouble)
    try:
        assert rows().equals(expected)
    finally:
        vars(server).update(cut_every=0, late_every=0, late_delay=2)


# ---- checkpoints and metrics


@pytest.fixture
def run_uri(server, tmp_path, monkeypatch):
    """In a bucket of which each request is made once, and a refused copy tried again at once."""
    server.buckets.add("impatient")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(storage.retry, "__defaults__", ((0.01,), ""))
    return f"s3://impatient/runs/{tmp_path.name}"


@pytest.fixture
def upload(run_uri, tmp_path, monkeypatch):
    """`upload(name)`: what Ray Train's thread does with a checkpoint that is written, and what it then reports."""
    run = types.SimpleNamespace(storage_filesystem=storage.open_filesystem(run_uri)[0])
    context = types.SimpleNamespace(get_storage=lambda: run)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    manager = checkpoint.Saver(state=None, run_uri=run_uri, log=None)

    def upload(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a").write_bytes(b"123")
        storage.write_json(folder / run_folder.PROGRESS, {"step": 10, "files": {"a": 3}, "checksums": {}})
        reported = manager.upload(lambda: None, ray.train.Checkpoint(str(folder)), name)
        assert not folder.exists() and manager.uploaded.is_set()
        return reported

    return upload


def test_an_upload_that_fails_once_is_tried_again(server, upload, run_uri):
    name = run_folder.checkpoint_name(10, 1)
    server.refuse, server.refusals = f"{name}/a", 1
    assert upload(name) and server.refusals == 0
    assert storage.name(run_folder.last_complete(run_uri)) == name and run_folder.read_failures(run_uri) == []


def test_an_upload_that_fails_for_good_loses_that_checkpoint_only(server, upload, run_uri):
    names = [run_folder.checkpoint_name(step, 1) for step in (10, 20, 30)]
    server.refuse, server.refusals = names[1], float("inf")
    first, second, third = map(upload, names)
    assert first and third and not second
    (sentence,) = run_folder.read_failures(run_uri)
    assert names[1] in sentence and "SLOW_DOWN" in sentence


@pytest.fixture
def log(run_uri, monkeypatch):
    """Metrics in the store, written soon after a step."""
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.01)
    return metrics.MetricsLog(run_uri)


def write(log, *steps):
    for step in steps:
        log.write(step, {"loss": 0.5, "num_kept": 2}, ids=[step])


def steps_read(reader, count):
    """The steps of the next `count` lines."""
    lines = []
    wait_until(lambda: lines.extend(reader.read()) or len(lines) >= count)
    return [line["step"] for line in lines]


def test_metrics_are_seen_soon_after_a_step_without_a_checkpoint(log):
    """So a worker that is killed then has lost nothing."""
    reader = metrics.MetricsReader(log.run_uri)
    for steps in ([1, 2], [3]):
        write(log, *steps)
        assert steps_read(reader, len(steps)) == steps
    again = metrics.MetricsLog(log.run_uri)
    write(again, 3)
    assert steps_read(reader, 1) == [3] and reader.read() == []
    found = metrics.read_metrics(log.run_uri)
    assert found[["attempt", "samples_seen"]].values.tolist() == [[1, 2], [1, 4], [2, 6]]


def test_metrics_that_the_store_refuses_are_written_later(server, log, capsys):
    """And no step waits for it."""
    server.refuse, server.refusals = "metrics-", float("inf")
    write(log, 1)
    wait_until(lambda: "written later" in capsys.readouterr().out)
    write(log, 2)
    server.refusals = 0
    assert steps_read(metrics.MetricsReader(log.run_uri), 2) == [1, 2]


# ---- a job


@pytest.fixture(scope="module")
def finished(store, cluster):
    """A job from and to a server that fails every tenth request."""
    config = PreprocessingConfig(storage="s3://bucket/sd")
    store.fail_every, before = 10, store.failures
    captioned_shapes.write_data_set(config.raw_uri, ROWS, spoilt_share=0.03, rows_per_file=100)
    manifest = encode(config)
    store.fail_every = 0
    assert store.failures > before
    return config, manifest


def read(uri):
    filesystem, path = storage.open_filesystem(uri)
    return pq.read_table(path, filesystem=filesystem)


def test_a_server_that_fails_now_and_then_loses_no_row(finished):
    config, manifest = finished
    folders = config.raw_uri, f"{config.latents_uri}/data", f"{config.latents_uri}/rejects"
    raw, written, rejected = map(read, folders)
    assert sorted(written["id"].to_pylist() + rejected["id"].to_pylist()) == sorted(map(str, raw["hash"].to_pylist()))
    assert manifest == read_manifest(config.latents_uri) and manifest.read == ROWS
    assert sorted(read_files(config.latents_uri).names.to_pylist()) == sorted(
        storage.name(path) for path in storage.list_files(f"{config.latents_uri}/data")
    )


@pytest.mark.slow
def test_a_store_that_goes_away_ends_the_job_clearly(server, finished):
    """And the same job again completes it."""
    config, manifest = finished
    away = PreprocessingConfig(storage="s3://bucket/sd", latents_uri="s3://bucket/again")

    def vanish(done, total):
        if not server.gone:
            server.vanish()

    try:
        with pytest.raises(RuntimeError, match="same command resumes.*NETWORK_CONNECTION"):
            encode(away, vanish)
    finally:
        server.come_back()
    assert not storage.exists("s3://bucket/again/manifest.json")
    repeated = encode(away)
    assert repeated.written == manifest.written
    assert sorted(read("s3://bucket/again/data")["id"].to_pylist()) == sorted(
        read(f"{config.latents_uri}/data")["id"].to_pylist()
    )


# ---- a run


def test_a_run_reads_and_keeps_everything_in_the_store(server, finished):
    """While the store fails every tenth request, and one file of a checkpoint more often than its client asks."""
    config = short_run("s3://bucket/sd", "run", max_steps=STEPS, checkpoint_every=6, max_failures=1)
    server.fail_every = 10
    server.refuse, server.refusals = "checkpoint-000000006.*distcp", storage.max_attempts()
    fit(config)
    assert server.refusals == 0 and attempts_of(config) == [1]
    server.fail_every = 0
    assert_bare(config)
    names = [storage.name(uri) for uri in storage.list_files(config.run_uri)]
    assert {"config.json", "metrics-0001-000000001.jsonl"} <= set(names)
    assert run_folder.last_step(config) == STEPS
    assert run_folder.find_corruption(run_folder.last_complete(config.run_uri)) is None
