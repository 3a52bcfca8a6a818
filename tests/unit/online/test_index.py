"""Online, rows that are filtered, held out or too small are known before any picture is read."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import storage
from helpers.config import TrainingConfig
from helpers.encode import encoder, prepare
from helpers.latents import schema
from helpers.latents.manifest import read_manifest
from helpers.latents.parquet import write_table
from helpers.latents.plan import RowRange
from helpers.online import encode, index
from helpers.online import prepare as prepare_online
from helpers.online.config import OnlineConfig
from helpers.production.decode import isolated
from helpers.production.readers import detect
from helpers.raw import images, inputs, readers
from helpers.train.step import Unit
from tests.latents import plan_for, read_steps
from tests.raw_data import image, tar_of, write

SIZES = [(40, 40), (64, 32), (32, 64), (70, 70), (20, 20)]


def picture(size, number, kind="PNG"):
    return image((number * 37 % 256, number % 256, 100), kind, size)


def rows_of(count, sizes=SIZES):
    chosen = [sizes[number % len(sizes)] for number in range(count)]
    return pa.table(
        {
            "hash": [f"id {number}" for number in range(count)],
            "caption": [f"caption {number}" for number in range(count)],
            "jpg": [picture(size, number) for number, size in enumerate(chosen)],
            "width": [width for width, _ in chosen],
            "height": [height for _, height in chosen],
            "score": [number // len(sizes) % 2 for number in range(count)],
        }
    )


def configs(folder, row_group_size=20, rows=200, training=None, sizes=SIZES, **changes):
    (folder / "raw").mkdir(exist_ok=True)
    table = rows_of(rows, sizes)
    for number in range(2):
        half = table[number * rows // 2 : (number + 1) * rows // 2]
        pq.write_table(half, folder / "raw" / f"{number}.parquet", row_group_size=row_group_size)
    columns = {"input_format": "parquet", "image_column": "jpg", "caption_column": "caption", "id_column": "hash"}
    options = {**columns, "resolutions": [32], **changes}
    raw = OnlineConfig(storage=str(folder), input_uri=str(folder / "raw"), **options)
    options = {"latents_uri": str(folder / "online"), "global_batch_size": 8, "resolution": 32}
    return raw, TrainingConfig(storage=str(folder), **{**options, "validation_share": 0.1, **(training or {})}), table


def planned(raw, training):
    manifest, _ = prepare_online.prepare_run(raw, training)
    return manifest, plan_for(training)


def transformed(plan, raw, first_step, num_steps):
    """The transformed rows of some steps."""
    read = functools.partial(encode.read_raw, config=raw)
    for block in read_steps(plan, read, first_step, num_steps):
        yield encode.transform_for_epoch(block.combine_chunks(), config=raw, units_per_epoch=plan.units_per_epoch)


KNOWN = {"width_column": "width", "height_column": "height"}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Other tests may have connected to Ray, whose tasks would not see what is replaced here."""
    monkeypatch.setattr(index.ray, "is_initialized", lambda: False)


@pytest.fixture
def decoded(monkeypatch):
    """The bytes of each picture that is decoded, here in this process."""
    found, load = [], images.load

    def run_here(function, calls, seconds):
        return [function(*call) for call in calls]

    monkeypatch.setattr(isolated, "run_apart", run_here)
    monkeypatch.setattr(images, "load", lambda one, data, *rest: found.append(data) or load(one, data, *rest))
    return found


def test_pictures_are_decoded_only_to_be_trained_on(tmp_path, decoded):
    raw, training, table = configs(tmp_path, row_filter="score == 1", **KNOWN)
    manifest, plan = planned(raw, training)
    ids = dict(zip(table["jpg"].to_pylist(), table["hash"].to_pylist(), strict=True))
    held_out = [ids[data] for data in decoded]  # prepared, each once
    assert manifest.filtered == 100 and manifest.rejected == {"smaller than 32 pixels": 20}
    assert len(held_out) == manifest.buckets["held out 32"] == len(set(held_out))
    assert manifest.buckets["32"] == sum(shape.num_rows for shape in plan.shapes) == 80 - len(held_out)
    decoded.clear()
    steps, trained_on = plan.steps_per_epoch - 1, []
    for rows in transformed(plan, raw, 0, steps):
        assert (rows["reason"].to_numpy()[rows["keep"].to_numpy()] == "").all()
        fits = rows["pixels_32"].is_valid().to_numpy()
        assert (fits == rows["keep"].to_numpy()).all()  # what an encoder takes
        trained_on += rows.filter(pa.array(fits))["id"].to_pylist()
    assert sorted(ids[data] for data in decoded) == sorted(trained_on)
    assert len(trained_on) == len(set(trained_on)) == steps * training.global_batch_size
    wanted = {row["hash"] for row in table.to_pylist() if row["score"] and row["width"] > 20}
    assert set(trained_on) <= wanted - set(held_out)


def test_shapes_come_from_columns(tmp_path):
    raw, training, table = configs(tmp_path, aspect_ratios=[0.5, 1, 2], **KNOWN)
    manifest, plan = planned(raw, training)
    trained = {name: rows for name, rows in manifest.buckets.items() if not name.startswith(schema.HELD_OUT)}
    assert set(trained) == {"32", "16x48", "48x16"}
    size_of = {row["hash"]: (row["width"], row["height"]) for row in table.to_pylist()}
    for rows in transformed(plan, raw, 0, plan.steps_per_epoch):
        rows = rows.filter(rows["keep"])
        assert set(rows["reason"].to_pylist()) <= {""}
        for column, expected in (("16x48", {(32, 64)}), ("48x16", {(64, 32)}), ("32", {(40, 40), (70, 70)})):
            mine = rows.filter(rows[f"pixels_{column}"].is_valid())
            assert {size_of[row_id] for row_id in mine["id"].to_pylist()} <= expected
            steps = np.unique(mine["unit"].to_numpy() // plan.units_per_step)
            assert all(plan.latents_at(step).name == f"image_latents_{column}" for step in steps)
    # The last unit, encoded with the rows of other shapes beside it, as a trainer takes it.
    unit = rows["unit"].to_numpy()[-1]
    latent_encoder = encoder.LatentEncoder(**prepare.encoder_arguments(raw, num_captions=1))
    mine = latent_encoder(rows).filter(pc.equal(rows["unit"], unit))
    spec = plan.latents_at(unit // plan.units_per_step)
    taken = Unit.from_arrow(mine, manifest, spec, 0)
    assert taken.keep_U.all() and taken.moments.shape == (8, *spec.shape)


def test_an_index_is_made_once_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    described, describe = [], readers.Parquet.stream
    monkeypatch.setattr(
        readers.Parquet, "stream", lambda self, path, *rest: described.append(path) or describe(self, path, *rest)
    )
    raw, training, _ = configs(tmp_path, training={"validation_share": 0.0}, row_filter="score == 1")
    write = index.write_table

    def stop_at_the_second(uri, table):
        if uri == index.index_uri_of(uri.rpartition("/")[0], "1.parquet"):
            raise KeyboardInterrupt
        write(uri, table)

    monkeypatch.setattr(index, "write_table", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        prepare_online.prepare_run(raw, training)
    monkeypatch.setattr(index, "write_table", write)
    manifest, _ = prepare_online.prepare_run(raw, training)
    assert [storage.name(path) for path in described] == ["0.parquet", "1.parquet", "1.parquet"]
    assert prepare_online.prepare_run(raw, training) == (manifest, raw) and len(described) == 3
    pq.write_table(rows_of(50), tmp_path / "raw" / "2.parquet")
    assert prepare_online.prepare_run(raw, training)[0].read == 250 and len(described) == 6


def rewrite(folder, rows, input_format):
    """Rows as files of a format, which come to the same sizes in any order of the rows."""
    storage.delete(folder)
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    if input_format == "parquet":
        pq.write_table(table, folder / "a.parquet", compression="none", use_dictionary=False, write_statistics=False)
    elif input_format == "arrow":
        datasets.Dataset(table).save_to_disk(str(folder))
    elif input_format == "webdataset":
        members = {}
        for row in rows:
            key = row["hash"]
            members |= {f"{key}.bmp": row["jpg"], f"{key}.txt": row["caption"], f"{key}.json": f'{{"hash": "{key}"}}'}
        write(folder, **{"a.tar": tar_of(members)})
    else:
        for number, row in enumerate(rows):
            (folder / f"{number:02d}.bmp").write_bytes(row["jpg"])
        lines = [json.dumps({"file_name": f"{number:02d}.bmp", **row, "jpg": ""}) for number, row in enumerate(rows)]
        (folder / "metadata.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("input_format", ["parquet", "webdataset", "arrow", "imagefolder"])
def test_files_written_again_with_the_same_sizes_have_a_new_index(tmp_path, capsys, input_format):
    """The rows in reverse order: the old index would train on held-out rows. Rows that are the same keep the index."""
    rows = [{"hash": f"{n:02d}", "caption": f"caption {n:02d}", "jpg": picture((32, 32), n, "BMP")} for n in range(40)]
    options = {"storage": str(tmp_path), "input_uri": str(tmp_path / "raw"), "resolutions": [32], "id_column": "hash"}
    training = TrainingConfig(storage=str(tmp_path), latents_uri=f"{tmp_path}/online", resolution=32)
    training = dataclasses.replace(training, global_batch_size=1, validation_share=0.3)
    manifests, sizes = [], []
    for written in (rows, rows, rows[::-1]):
        rewrite(tmp_path / "raw", written, input_format)
        sizes.append(storage.sizes(tmp_path / "raw"))
        raw = detect.detect(OnlineConfig(**options)).config
        manifest, plan = planned(raw, training)
        manifests.append(manifest)
        trained = pa.concat_tables(transformed(plan, raw, 0, plan.steps_per_epoch))
        trained = trained.filter(trained["keep"])["id"].to_pylist()
        assert len(trained) == manifest.buckets["32"] == 40 - manifest.buckets["held out 32"]
        assert not schema.held_out_mask(trained, 0.3).any()
    assert sizes[0] == sizes[1] == sizes[2]
    assert manifests[0] == manifests[1] != manifests[2]
    assert capsys.readouterr().out.count("were written again") == 1


@pytest.mark.parametrize("input_format", ["parquet", "webdataset", "arrow", "imagefolder"])
@pytest.mark.parametrize("change", ["in reverse order", "fewer rows"])
def test_a_file_that_is_replaced_under_an_index_is_named(tmp_path, input_format, change):
    """By one of the same size and time, or while a run reads: rows would move, and held-out ones be trained on."""
    rows = [{"hash": f"{n:02d}", "caption": f"caption {n:02d}", "jpg": picture((32, 32), n, "BMP")} for n in range(40)]
    options = {"storage": str(tmp_path), "input_uri": str(tmp_path / "raw"), "resolutions": [32], "id_column": "hash"}
    training = {"storage": str(tmp_path), "latents_uri": f"{tmp_path}/online", "resolution": 32}
    rewrite(tmp_path / "raw", rows, input_format)
    raw = detect.detect(OnlineConfig(**options)).config
    manifest, plan = planned(raw, TrainingConfig(**training, global_batch_size=1, validation_share=0.3))
    rewrite(tmp_path / "raw", rows[::-1] if change == "in reverse order" else rows[:9], input_format)
    ranges = [one for chunk in range(plan.chunks_per_epoch) for _, some in plan.chunk_rows(chunk)[0] for one in some]
    (name,) = {one.file_name.partition("/")[2] for one in ranges}
    reads = [{}, {"read_group": index.read_row_group}] if input_format == "parquet" else [{}]
    for options in reads:
        with pytest.raises(ValueError, match=f"^{tmp_path}/raw/{name} has other rows than when it was indexed: "):
            index.read_indexed_rows(ranges, raw, f"{training['latents_uri']}/index", **options)


def test_an_index_without_checksums_of_ids_is_read(tmp_path, monkeypatch):
    """As earlier versions made it: a run that has one goes on."""
    monkeypatch.setattr(index, "write_table", lambda uri, rows: write_table(uri, rows.drop_columns(index.ID_CRC32)))
    raw, training, _ = configs(tmp_path, training={"validation_share": 0.0})
    _, plan = planned(raw, training)
    blocks = transformed(plan, raw, 0, plan.steps_per_epoch)
    assert len({row_id for rows in blocks for row_id in rows["id"].to_pylist()}) == 200


def test_a_store_tells_which_files_were_written_again(store):
    uri = "s3://bucket/raw"
    config, found = OnlineConfig(input_uri=uri, input_format="parquet"), []
    for names in ("ab", "b"):
        for name in names:
            storage.write_text(f"{uri}/{name}.parquet", "x")
        found.append(inputs.modified(inputs.list_inputs(config)[1], config))
        time.sleep(1.1)  # a store's clock has seconds
    assert [name for name in found[0] if found[0][name] != found[1][name]] == ["b.parquet"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), min_size=1, max_size=4))
def test_a_raw_file_may_have_any_name_that_a_disk_takes(parts):
    parts = [part.replace("/", "_").strip(".") or "x" for part in [*parts[:-1], parts[-1] * 40]]
    parts = [part.encode()[:255].decode(errors="ignore") for part in parts]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "raw", *parts)
        path.parent.mkdir(parents=True)
        pq.write_table(rows_of(8), path)
        columns = {"input_format": "parquet", "image_column": "jpg", "caption_column": "caption", "id_column": "hash"}
        raw = OnlineConfig(storage=folder, input_uri=f"{folder}/raw", resolutions=[32], **columns)
        name = "/".join(parts)
        key, (report,) = index.build_index(f"{folder}/index", [str(path)], {name: 1}, raw, 0.0)
        assert (report["name"], report["read"]) == (name, 8)
        ranges = [RowRange(f"{key}/{name}", 0, 0, 8, 0)]
        rows = index.read_indexed_rows(ranges, raw, f"{folder}/index")
        assert rows["id"].to_pylist() == [f"id {number}" for number in range(8)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_filter": "score > 5"}, "200 left out by row_filter='score > 5'"),
        ({"resolutions": [96]}, "200 rejected: "),
    ],
)
def test_a_run_without_a_usable_row_is_refused_with_the_reasons(tmp_path, changes, reason):
    raw, training, _ = configs(tmp_path, **{**KNOWN, **changes})
    with pytest.raises(ValueError, match=f"^No row of input_uri=.* can be used, of 200 that were read .*{reason}"):
        prepare_online.prepare_run(raw, training)
    assert not storage.exists(storage.join(training.latents_uri, "manifest.json"))


def test_half_an_index_is_completed_from_its_files(tmp_path):
    """Its `index.json`, or the manifest that was made of it; the files of the index are not read again."""
    raw, training, _ = configs(tmp_path, training={"validation_share": 0.0})
    manifest, _ = prepare_online.prepare_run(raw, training)
    (report,) = pathlib.Path(training.latents_uri).rglob(index.REPORT)
    files = {path: path.stat().st_mtime_ns for path in report.parent.glob("*.parquet")}
    for damaged in (report, pathlib.Path(training.latents_uri, "manifest.json")):
        damaged.write_bytes(damaged.read_bytes()[:-20])
        assert prepare_online.prepare_run(raw, training)[0] == manifest
        assert read_manifest(training.latents_uri).files_crc32 == manifest.files_crc32
    assert {path: path.stat().st_mtime_ns for path in files} == files and storage.read_json(report, shape=list)


CAPTIONS = """
import sys
from helpers.online import index
from helpers.online.config import OnlineConfig
from helpers.production.readers import detect
from helpers.raw import inputs
from tests.peak import peak_kib

folder = sys.argv[1]
path, config = folder + "/a.parquet", OnlineConfig(storage=folder + "/out", input_uri=folder, resolutions=[32])
config = detect.detect(config).config
report = index.index_file(path, -1, config=config, validation_share=0.0, uri=folder + "/index")
found = index.read_index(index.index_uri_of(folder + "/index", "a.parquet"))
(rows,) = inputs.reader(config).read_rows(path, [found], ["hash", "caption"])
group = index.read_row_group(path, 0, ("hash", "caption", "jpg"), ("caption",))
kept = index.rows_of(group, found)
is_right = rows["hash"].to_pylist() == kept["hash"].to_pylist() == list(range(0, 1500, 250))
is_right &= inputs.text_lists(rows["caption"]) == inputs.text_lists(kept["caption"]) == [["short"]] * 6
print(report["rejected"], is_right, peak_kib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_indexing_and_reading_among_large_captions_take_little_memory(tmp_path):
    """Of a file of some kilobytes with 1,494 captions of 1 MiB. It took 6 GiB to index, 2.7 to read."""
    which = pa.array([int(row % 250 == 0) for row in range(1500)], pa.int32())
    captions = pa.DictionaryArray.from_arrays(which, ["x" * 2**20, "short"])
    table = pa.table({"hash": range(1500), "caption": captions, "jpg": [b"x"] * 1500})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    done = subprocess.run([sys.executable, "-c", CAPTIONS, tmp_path], capture_output=True, text=True, timeout=120)
    reasons, _, peak = done.stdout.rpartition(" ")
    assert reasons == "{'caption of more than 65536 bytes': 1494} True", done.stderr
    assert int(peak) < 2**20
