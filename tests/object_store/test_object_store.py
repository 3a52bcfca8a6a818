"""Raw data, latents and runs on s3://, over HTTP, from a server that fails now and then and one that goes away."""

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import checkpoint, storage, train
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.lesson import captioned_shapes
from helpers.manifest import read_files, read_manifest
from helpers.plan import load_plan
from helpers.read import read_chunks, read_latents
from tests.benchmarks import made_up
from tests.pipelines import assert_bare, encode, fit, short_run

ROWS, STEPS = 300, 12


@pytest.fixture
def server(store):
    return store


@pytest.fixture(autouse=True)
def faultless(server):
    yield
    server.fail_every = 0


# ---- files


@pytest.mark.parametrize(
    "name", ["plain", "with space", "with#hash", "with%20percent", "ümlaut", "a:b", "a?b", "a+b", "<&>"]
)
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


def test_more_objects_than_one_answer_lists_are_all_listed(server):
    for number in range(2_345):
        server.objects["bucket", f"many/{number:05d}/a"] = (b"1", 0)
    assert (
        len(storage.list_files("s3://bucket/many", recursive=True))
        == 2_345
        == len(storage.list_folders("s3://bucket/many"))
    )
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


@pytest.mark.parametrize(
    "trouble",
    [{"cut_every": 5}, {"late_every": 7, "late_delay": 1.0}, {"late_every": 9, "late_delay": 8.0}],
    ids=["answers that break off", "late answers", "no answers"],
)
def test_rows_are_read_from_a_store_in_trouble(server, trouble):
    """A client of S3 gives up a request that is not answered within three seconds."""
    uri, shapes = "s3://bucket/trouble", {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (6, 128)}
    made_up.write_latents(uri, 512, shapes, rows_per_file=64)
    config = TrainingConfig(latents_uri=uri, resolution=32, global_batch_size=64, validation_share=0)
    plan = load_plan(config)

    def rows():
        options = {"first_chunk": 0, "first_step": 0, "end_step": 16, "read": read_latents}
        return pa.concat_tables(read_chunks({"id": range(2)}, plan=plan, **options))

    expected = rows()
    vars(server).update(trouble)
    try:
        assert rows().equals(expected)
    finally:
        vars(server).update(cut_every=0, late_every=0, late_delay=2)


# ---- a job


@pytest.fixture(scope="module")
def finished(store, cluster):
    """A job from and to a server that fails every tenth request."""
    config = PreprocessingConfig(storage="s3://bucket/sd")
    store.fail_every, before = 10, store.failures
    captioned_shapes.write_parquet(config.raw_uri, ROWS, spoilt_share=0.03, rows_per_file=100)
    manifest = encode(config)
    store.fail_every = 0
    assert store.failures > before
    return config, manifest


def read(uri):
    return pa.concat_tables(
        [
            pq.read_table(storage.open_filesystem(path)[1], filesystem=storage.open_filesystem(path)[0])
            for path in storage.list_files(uri, ".parquet")
        ]
    )


def test_a_server_that_fails_now_and_then_loses_no_row(finished):
    config, manifest = finished
    raw, written, rejected = (
        read(storage.join(uri))
        for uri in (config.raw_uri, f"{config.latents_uri}/data", f"{config.latents_uri}/rejects")
    )
    assert sorted(written["id"].to_pylist() + rejected["id"].to_pylist()) == sorted(raw["hash"].to_pylist())
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
        with pytest.raises(Exception) as error:
            encode(away, vanish)
    finally:
        server.come_back()
    assert "NETWORK_CONNECTION" in str(error.value)
    assert "run the job again" in str(error.value.__notes__)
    assert not storage.exists("s3://bucket/again/manifest.json")
    repeated = encode(away)
    assert repeated.written == manifest.written
    assert sorted(read("s3://bucket/again/data")["id"].to_pylist()) == sorted(
        read(f"{config.latents_uri}/data")["id"].to_pylist()
    )


# ---- a run


def test_a_run_reads_and_keeps_everything_in_the_store(server, finished):
    """While the store fails every tenth request."""
    values = {"checkpoint_every": 6, "max_failures": 1}
    config = short_run("s3://bucket/sd", "run", max_steps=STEPS, **values)
    server.fail_every = 10
    fit(config)
    server.fail_every = 0
    assert_bare(config)
    names = [storage.name(uri) for uri in storage.list_files(config.run_uri)]
    assert {"config.json", "metrics-0001-000000006.jsonl", "metrics-0001-000000012.jsonl"} <= set(names)
    assert train.last_step(config) == STEPS
    assert checkpoint.find_corruption(checkpoint.last_complete(config.run_uri)) is None
