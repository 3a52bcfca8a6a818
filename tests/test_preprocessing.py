"""The preprocessing job on a real Ray: what is written, what is rejected, and what happens when it is run again."""

import collections
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from PIL import Image

from helpers import captioned_shapes, encoder, images, preprocess, schema, session, sources, storage, tokens
from helpers.config import PreprocessingConfig
from tests.pipelines import build_pipeline, encode

ROWS = 600


@pytest.fixture(scope="module", autouse=True)
def cluster():
    session.connect("local", num_cpus=4)
    yield
    ray.shutdown()


def picture(size=(64, 64), mode="RGB", file_format="PNG", **options):
    data = io.BytesIO()
    Image.new("RGB", size, (200, 30, 60)).convert(mode).save(data, file_format, **options)
    return data.getvalue()


def write_rows(folder, rows, row_group_size=50, rows_per_file=None):
    """LAION-style Parquet of [(id, caption, bytes)]."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    rows_per_file = rows_per_file or len(rows)
    for number, start in enumerate(range(0, len(rows), rows_per_file)):
        ids, captions, data = zip(*rows[start : start + rows_per_file], strict=True)
        table = pa.table({
            "hash": pa.array(ids, pa.int64()), "caption": pa.array(captions, pa.string()),
            "width": pa.array([64.0] * len(ids)), "jpg": pa.array(data, pa.binary()),
        })  # fmt: skip
        pq.write_table(table, f"{folder}/{number:03d}.parquet", row_group_size=row_group_size)


def read_latents(latents_uri, name="data"):
    return pa.concat_tables([pq.read_table(path) for path in storage.list_files(storage.join(latents_uri, name), ".parquet")])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished job over the sample data, with its config and manifest."""
    config = PreprocessingConfig(storage=str(tmp_path_factory.mktemp("storage")))
    captioned_shapes.write_parquet(config.raw_uri, ROWS, spoilt_share=0.02, rows_per_file=200)
    return config, encode(config)


def test_every_input_row_is_written_or_rejected_with_a_reason(finished):
    config, manifest = finished
    raw = pa.concat_tables([pq.read_table(path) for path in sources.list_inputs(config.raw_uri)])
    written, rejected = read_latents(config.latents_uri), read_latents(config.latents_uri, "rejects")
    assert sorted(written["id"].to_pylist() + rejected["id"].to_pylist()) == sorted(raw["hash"].to_pylist())
    assert manifest.total("read") == ROWS == manifest.total("written") + sum(manifest.rejected.values())
    assert manifest.total("written") == written.num_rows
    assert manifest.rejected == collections.Counter(rejected["reason"].to_pylist())
    assert set(rejected["source"].to_pylist()) <= {"shapes-00000.parquet", "shapes-00001.parquet", "shapes-00002.parquet"}


def test_the_manifest_on_disk_knows_each_file_and_its_row_groups(finished):
    config, manifest = finished
    assert schema.Manifest.read(config.latents_uri) == manifest
    names = [storage.name(path) for path in storage.list_files(storage.join(config.latents_uri, "data"))]
    assert sorted(names) == sorted(name for name, _ in manifest.files)
    for name, row_groups in manifest.files:
        metadata = pq.read_metadata(f"{config.latents_uri}/data/{name}")
        assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == row_groups
    on_disk = storage.read_json(storage.join(config.latents_uri, "manifest.json"))
    assert on_disk["read"] == on_disk["written"] + sum(on_disk["rejected"].values()) + on_disk["filtered"]


def test_stored_latents_are_what_the_encoder_gives_for_each_row_alone(finished):
    config, manifest = finished
    table = read_latents(config.latents_uri)
    raw = pa.concat_tables([pq.read_table(path) for path in sources.list_inputs(config.raw_uri)])
    by_id = dict(zip(raw["hash"].to_pylist(), zip(raw["jpg"].to_pylist(), raw["caption"].to_pylist(), strict=True), strict=True))
    latent_encoder = encoder.LatentEncoder(*encoder.arguments(config))
    tokenizer = tokens.load_tokenizer("tiny-sd")
    for row in range(0, table.num_rows, 97):
        data, caption = by_id[table["id"][row].as_py()]
        assert table["caption"][row].as_py() == caption
        square = images.center_square(images.decode(data))
        for resolution in (32, 64):
            column = schema.latents_column(resolution)
            expected = latent_encoder.encode_images(images.to_pixels(images.resize(square, resolution))[None])
            stored, valid = schema.from_binary(table[column].slice(row, 1), manifest.shapes[column])
            assert valid.all()
            np.testing.assert_allclose(stored.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.02)
        text, _ = schema.from_binary(table["caption_embeddings"].slice(row, 1), manifest.shapes["caption_embeddings"])
        expected = latent_encoder.encode_captions(tokens.tokenize([caption], tokenizer))
        np.testing.assert_allclose(text.astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.02)


def test_running_a_finished_job_again_writes_nothing_and_says_so(finished, capsys):
    config, manifest = finished
    before = {path: os.stat(path).st_mtime_ns for path in storage.list_files(config.latents_uri, recursive=True)}
    assert encode(config) == manifest
    assert "Nothing to do" in capsys.readouterr().out
    assert {path: os.stat(path).st_mtime_ns for path in storage.list_files(config.latents_uri, recursive=True)} == before


def test_the_same_input_gives_the_same_latents_in_the_same_order(finished, tmp_path):
    config, manifest = finished
    again = PreprocessingConfig(storage=config.storage, latents_uri=str(tmp_path))
    repeated = encode(again)
    assert [groups for _, groups in repeated.files] == [groups for _, groups in manifest.files]
    for (name, _), (other, _) in zip(manifest.files, repeated.files, strict=True):
        assert pq.read_table(f"{config.latents_uri}/data/{name}") == pq.read_table(f"{tmp_path}/data/{other}")


def test_an_input_that_has_changed_is_refused(tmp_path):
    write_rows(tmp_path / "raw", [(n, "a caption", picture()) for n in range(20)])
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "raw"), resolutions=[32])
    encode(config)
    write_rows(tmp_path / "raw", [(n, "a caption", picture()) for n in range(30)])
    with pytest.raises(ValueError, match=r"was made with other parameters \(the files of the input\)"):
        encode(config)


def test_other_parameters_into_the_same_folder_are_refused(finished):
    config, _ = finished
    with pytest.raises(ValueError, match=r"holds data that was made with other parameters \(resolutions=\[32, 64\], not \[64\]\)"):
        encode(PreprocessingConfig(storage=config.storage, resolutions=[64]))


def test_bad_rows_are_converted_or_rejected_and_never_stop_the_job(tmp_path):
    good = picture()
    palette = Image.new("P", (64, 64))
    palette.info["transparency"] = 0
    buffer = io.BytesIO()
    palette.save(buffer, "PNG", transparency=0)
    rows = {
        "converted": [
            ("a gif", picture(mode="P", file_format="GIF")), ("sixteen bits", picture(mode="I;16")),
            ("cmyk", picture(mode="CMYK", file_format="JPEG")), ("palette with alpha", buffer.getvalue()),
            ("word " * 500, good), ("ünï©ødé 漢字 🎨", good), ("a webp", picture(file_format="WEBP")),
        ],
        "broken image": [("cut", good[: len(good) // 2])],
        "no image bytes": [("empty", b""), ("null", None)],
        "not an image": [("text", b"<html>404</html>"), ("noise", bytes(range(256)))],
        "smaller than 32 pixels": [("one pixel", picture((1, 1))), ("thin", picture((500, 3)))],
        "too many pixels": [("bomb", picture((12_000, 12_000), mode="1"))],
        "no caption": [(None, good)],
        "empty caption": [("", good), (" \n\t", good)],
    }  # fmt: skip
    flat = [(number, caption, data) for number, (caption, data) in enumerate(sum(rows.values(), []))]
    reasons = sum(([reason] * len(found) for reason, found in rows.items()), [])
    write_rows(tmp_path / "raw", flat + [(None, "no id", good), (3, "an id twice", good)])
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "raw"))
    manifest = encode(config)
    rejects = read_latents(config.latents_uri, "rejects")
    found = dict(zip(rejects["id"].to_pylist(), rejects["reason"].to_pylist(), strict=True))
    expected = {number: reason for number, reason in enumerate(reasons) if reason != "converted"}
    assert found == {**expected, None: "no id"}
    written = sorted(read_latents(config.latents_uri)["id"].to_pylist())
    assert written == sorted([n for n, reason in enumerate(reasons) if reason == "converted"] + [3])
    assert manifest.total("read") == len(flat) + 2 == manifest.total("written") + sum(manifest.rejected.values())


def test_a_picture_below_a_resolution_has_no_latents_there(tmp_path):
    write_rows(tmp_path / "raw", [(0, "large", picture((80, 80))), (1, "middle", picture((50, 70))), (2, "large", picture())])
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "raw"))
    encode(config)
    table = read_latents(config.latents_uri).sort_by("id")
    assert table["image_latents_32"].is_valid().to_pylist() == [True, True, True]
    assert table["image_latents_64"].is_valid().to_pylist() == [True, False, True]


def test_filtered_rows_are_counted_and_limit_bounds_what_is_read(tmp_path):
    rows = [(number, "a caption", picture()) for number in range(100)]
    write_rows(tmp_path / "raw", rows, rows_per_file=30)
    config = PreprocessingConfig(
        storage=str(tmp_path), input_uri=str(tmp_path / "raw"), resolutions=[32], row_filter="hash >= 20 and hash < 90", limit=70
    )
    manifest = encode(config)
    assert sorted(read_latents(config.latents_uri)["id"].to_pylist()) == list(range(20, 70))
    assert (manifest.total("read"), manifest.total("written"), manifest.total("filtered")) == (70, 50, 20)


def test_segments_are_committed_one_by_one_and_a_rerun_does_only_what_is_missing(tmp_path, monkeypatch):
    write_rows(tmp_path / "raw", [(n, "a caption", picture()) for n in range(120)], rows_per_file=40)
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "raw"), resolutions=[32])
    job = preprocess.prepare(config, rows_per_segment=40)
    pipeline = build_pipeline(job, config)

    def interrupted(segment):
        if segment.index == 2:
            raise KeyboardInterrupt  # what a stopped cell raises
        return pipeline(segment)

    with pytest.raises(KeyboardInterrupt):
        job.run(interrupted)
    assert not storage.exists(storage.join(config.latents_uri, "manifest.json"))
    with pytest.raises(FileNotFoundError, match="No latents at"):
        schema.Manifest.read(config.latents_uri)
    first = {path: os.stat(path).st_mtime_ns for path in storage.list_files(storage.join(config.latents_uri, "data"))}
    assert sum(pq.read_metadata(path).num_rows for path in first) == 80

    pathlib.Path(config.latents_uri, "data", "000002-left-by-a-killed-job.parquet").write_bytes(b"half")
    monkeypatch.setattr(sources, "count_rows", lambda paths, config: pytest.fail("the input's footers are read again"))
    again = preprocess.prepare(config, rows_per_segment=40)
    assert [segment.index for segment in again.pending()] == [2]
    again.run(build_pipeline(again, config))
    assert sorted(read_latents(config.latents_uri)["id"].to_pylist()) == list(range(120))
    assert first.items() <= {p: os.stat(p).st_mtime_ns for p in storage.list_files(storage.join(config.latents_uri, "data"))}.items()


def test_an_interrupted_cell_leaves_no_actors_and_no_half_written_data(tmp_path):
    config = PreprocessingConfig(storage=str(tmp_path))
    captioned_shapes.write_parquet(config.raw_uri, 4000, rows_per_file=500)
    job = preprocess.prepare(config)

    def interrupt(done, total):
        signal.raise_signal(signal.SIGINT)  # the first time that files have been written

    with pytest.raises(KeyboardInterrupt):
        job.run(build_pipeline(job, config), interrupt)
    assert storage.list_files(storage.join(config.latents_uri, "data")) == []
    # All four CPUs at once can only be had when no actor and no task is left.
    assert ray.get(ray.remote(num_cpus=4)(lambda: True).remote(), timeout=120)
    manifest = encode(config)
    assert manifest.total("written") == 4000


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"input_uri": "/no/such/folder"}, FileNotFoundError, r"input_uri='/no/such/folder' does not exist"),
        ({"image_column": "png"}, ValueError, r"image_column='png' is not a column of .*: it has hash, caption, width, height, jpg"),
        ({"caption_column": "text"}, ValueError, r"caption_column='text' is not a column"),
        ({"id_column": "key"}, ValueError, r"id_column='key' is not a column"),
        ({"image_column": "width"}, ValueError, r"image_column='width' holds .*, neither the bytes of encoded pictures nor"),
        ({"caption_column": "width"}, ValueError, r"caption_column='width' holds double, not text"),
        ({"row_filter": "punsafe < 0.5"}, ValueError, r"row_filter='punsafe' is not a column"),
        ({"row_filter": "punsafe < 0.5 and width > 8"}, ValueError, r"row_filter='punsafe' is not a column"),
        ({"resolutions": [60]}, ValueError, r"resolutions=\[60\]: the VAE halves a picture 3 times, and 60 is not a multiple of 8"),
        ({"encoder_model": "/no/such/model"}, ValueError, r"encoder_model='/no/such/model' holds no model in diffusers layout"),
    ],
)
def test_wrong_input_is_one_sentence_before_any_worker_starts(finished, tmp_path, change, error, sentence):
    config, _ = finished
    values = {"input_uri": config.raw_uri, "storage": str(tmp_path), **change}
    with pytest.raises(error, match=sentence):
        preprocess.prepare(PreprocessingConfig(**values))
    assert not storage.exists(storage.join(str(tmp_path), "latents"))


def test_an_input_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"hash": pa.array([], pa.int64()), "caption": pa.array([], pa.string()), "jpg": pa.array([], pa.binary())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="The input holds no rows"):
        preprocess.prepare(PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "a.parquet")))


def test_workers_find_the_helpers_when_the_folder_is_renamed_and_used_from_elsewhere(tmp_path):
    """A copy under another name, in another folder, in a process of its own."""
    package = pathlib.Path(encoder.__file__).parent
    subprocess.run(["cp", "-r", str(package), str(tmp_path / "my_diffusion")], check=True)
    script = """
import functools, json
from ray.data import ActorPoolStrategy
from my_diffusion import captioned_shapes, encoder, preprocess, session, sources
from my_diffusion.config import PreprocessingConfig
config = PreprocessingConfig(storage="elsewhere", resolutions=[32])
captioned_shapes.write_parquet(config.raw_uri, 40)
session.connect("local", num_cpus=4)
job = preprocess.prepare(config)
manifest = job.run(lambda segment: (
    sources.read_rows(segment, config)
    .map_batches(functools.partial(preprocess.transform, config=config), batch_format="pyarrow")
    .map_batches(encoder.LatentEncoder, fn_constructor_args=encoder.arguments(config), batch_size=32,
                 batch_format="pyarrow", compute=ActorPoolStrategy(size=1), num_cpus=0.5)
    .map_batches(preprocess.write_latents, fn_kwargs=job.write_arguments(segment), batch_format="pyarrow",
                 num_cpus=0.25)))
print(json.dumps({"written": manifest.total("written")}))
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"written": 40}
