"""`leave_out`: what a list holds, and where its rows are missed: encoding, online, training, validation. No Ray."""

import dataclasses
import functools
import hashlib
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from PIL import Image

from helpers import storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import stages
from helpers.latents import held_out, schema
from helpers.latents.manifest import DataSets, read_manifest, read_segments, write_manifest
from helpers.latents.plan import load_plan
from helpers.latents.read import latents_reader
from helpers.production import monitor
from helpers.production.checks import training
from helpers.production.data import exclusions
from helpers.raw import inputs
from helpers.train import start
from helpers.train.step import TrainStep, Unit
from tests.latents import SHAPES, plan_for, receive_steps, write_job

SPECS = [schema.ColumnSpec(name, SHAPES[name]) for name in ("image_latents_64", schema.EMBEDDINGS)]
SUM = hashlib.sha256(b"a picture").hexdigest()


@pytest.fixture
def make_list(tmp_path):
    """A function that writes a list: a text's bytes, or a Parquet file's columns; returns its path."""

    def write(content, name="list"):
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(pa.table(content), path)
        return str(path)

    return write


# ---- the list


@pytest.mark.parametrize(
    "content",
    [
        f"7\na b\nä\n{SUM}\n".encode(),
        f"\ufeff  {SUM}\r\n7\r\n\r\na b\r\nä".encode(),
        {"why": [1, 2, 3, 4, 5], "id": ["7", "a b", None, "ä", SUM]},
        {"id": pa.array(["7", "a b", "ä", SUM]).dictionary_encode()},
    ],
    ids=["text", "text of Windows", "Parquet", "Parquet with a dictionary"],
)
def test_a_list_is_a_text_or_a_parquet_file(make_list, content):
    location = exclusions.pin(make_list(content))
    values = [7, "7", "a b", "ä", SUM, "07", "a", "", None, -7]
    assert exclusions.is_listed(location, values).tolist() == [True] * 5 + [False] * 5
    assert len(exclusions.load_hashes(location)) == 4 and exclusions.is_listed(location, []).tolist() == []


def test_numbers_and_sums_as_bytes_are_compared_as_text(make_list):
    numbers = exclusions.pin(make_list({"id": pa.array([3, 2**62], pa.int64())}, "numbers"))
    assert exclusions.is_listed(numbers, [3, "3", 2**62, 4]).tolist() == [True, True, True, False]
    sums = exclusions.pin(make_list({"sha256": pa.array([bytes.fromhex(SUM)], pa.binary(32))}, "sums"))
    assert exclusions.is_listed(sums, [SUM, SUM[1:]]).tolist() == [True, False]


BAD = {
    "cannot be read: give a text file in UTF-8 or a Parquet file. ([Errno 2] ": None,
    "holds no id: give another list": b"\n \r\n",
    "cannot be read: give a text file in UTF-8 or a Parquet file.": b"\xff\xd8\xff\xe0 JFIF",
    "cannot be read: give a text file in UTF-8 or a Parquet file. (": b"PAR1 cut short",
    "has no column 'id' or 'sha256' but key, why: rename one": {"key": [1], "why": ["x"]},
    "holds double in 'id', not ids or sums: give text": {"id": [1.5]},
    "holds list<element: int64> in 'id', not ids": {"id": [[1]]},
}


@pytest.mark.parametrize(("sentence", "content"), BAD.items(), ids=list(BAD))
def test_a_list_that_cannot_be_used_is_refused_before_anything_starts(make_list, tmp_path, sentence, content):
    path = str(tmp_path / "list") if content is None else make_list(content)
    wanted = f"^leave_out={re.escape(repr(path))} {re.escape(sentence)}"
    values = {"storage": str(tmp_path), "run_name": "a", "units_per_step": None, "leave_out": path}
    with pytest.raises(ValueError, match=wanted) as error:
        start.training_config(values)
    assert "\n" not in str(error.value)


def test_a_list_of_more_than_the_allowed_bytes_is_refused(make_list, monkeypatch):
    monkeypatch.setattr(exclusions, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="has 12 bytes: give a list of at most 10"):
        exclusions.pin(make_list(b"1\n2\n3\n4\n5\n6\n"))


def test_a_list_that_changes_under_a_run_is_noticed(make_list):
    path = make_list(b"1\n")
    location = exclusions.pin(path)
    assert location == f"{path}@{hashlib.sha256(b'1' + bytes([10])).hexdigest()}" == exclusions.pin(location)
    make_list(b"2\n")
    with pytest.raises(ValueError, match=r"list' has changed \(its SHA-256 is .*\): start the same command again"):
        exclusions.is_listed(location, [1])
    assert exclusions.pin("") == "" and not exclusions.is_listed("", [1, 2]).any()


def test_threads_of_a_process_read_a_list_once(make_list, monkeypatch):
    location, read, reads, second = exclusions.pin(make_list(b"5\n")), storage.read_bytes, [], threading.Event()

    def read_while_another_may(uri):
        reads.append(uri)
        second.set() if reads.count(uri) > 1 else second.wait(0.2)
        return read(uri)

    monkeypatch.setattr(storage, "read_bytes", read_while_another_may)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row_id: exclusions.is_listed(location, [row_id]).item(), [5] * 8))
    assert found == [True] * 8 and reads.count(exclusions.split(location)[0]) == 1  # a lease's thread reads too


# ---- encoding


def picture(color):
    data = io.BytesIO()
    Image.new("RGB", (40, 40), color).save(data, "PNG")
    return data.getvalue()


def test_listed_rows_are_rejected_by_reason_before_they_are_decoded(make_list, tmp_path):
    """By id, whatever else is wrong with the row, or by the picture's sum, in capitals too; others are as before."""
    pictures = [picture((number, 0, 0)) for number in range(5)]
    columns = {
        inputs.ID: [10, 11, 12, 13, 14],
        inputs.CAPTION: ["a", "b", "c", None, "e"],
        inputs.IMAGE: [*pictures[:3], None, pictures[4]],
        inputs.ERROR: [None, None, None, "gone", None],
        inputs.SOURCE: ["f"] * 5,
    }
    sums = [hashlib.sha256(data).hexdigest() for data in pictures]
    location = make_list(f"11\n13\n{sums[2]}\n{sums[4].upper()}\n".encode())
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32])
    raw = pa.table(columns)
    before, done = (
        stages.transform(raw, config=one) for one in (config, dataclasses.replace(config, leave_out=location))
    )
    assert done[schema.REASON].to_pylist() == ["", *["left out by id", "left out by picture"] * 2]
    same = [name for name in done.column_names if name != "transform_seconds"]
    assert done.select(same)[:1].equals(before.select(same)[:1])
    assert done["pixels_32"].null_count == 4 and done["caption"].to_pylist() == ["a", "", "", "", ""]


# ---- training


def write_latents(uri, build_latents, num_rows=80, seed=0, share=0.2, job=None, text_ids=False):
    rows = build_latents(num_rows, seed).drop_columns(["image_latents_32"])
    if text_ids:
        rows = rows.set_column(0, "id", pc.binary_join_element_wise("r", rows["id"].cast(pa.string()), ""))
    more = {schema.REASON: [""] * num_rows, schema.SOURCE: ["a"] * num_rows, "note": [""] * num_rows}
    more |= {"encoder_call": pa.nulls(num_rows, pa.struct([])), "transform_seconds": pa.nulls(num_rows, pa.float64())}
    table = pa.table({**{name: rows[name] for name in rows.column_names}, **more})
    tables = [table[: num_rows // 2], table[num_rows // 2 :]]
    encoder = {"model": "tiny-sd", "revision": "0", "precision": "fp32"}
    write_job(str(uri), num_rows, tables, SPECS, "string" if text_ids else "int64", share, job=job, encoder=encoder)
    return str(uri)


@pytest.fixture
def config(tmp_path, build_latents):
    uri = write_latents(tmp_path / "latents", build_latents)
    values = {"storage": str(tmp_path), "latents_uri": uri, "global_batch_size": 8, "units_per_step": 2}
    return TrainingConfig(**values, validation_share=0.2, max_steps=20, warmup_steps=2)


def with_list(config, make_list, ids, name="list"):
    content = "".join(f"{row_id}\n" for row_id in ids).encode()
    return dataclasses.replace(config, leave_out=exclusions.pin(make_list(content, name)))


def received(config, first_step=0, num_workers=1):
    """The units of two epochs' steps from `first_step` on, in order."""
    plan = plan_for(config)
    read = latents_reader(plan, functools.partial(exclusions.is_listed, config.leave_out))
    steps = receive_steps(plan, read, first_step, 2 * plan.steps_per_epoch, num_workers)
    return [rows for units in steps for rows in units.values()]


@pytest.mark.parametrize("kind", ["one", "text ids", "mixture"])
@pytest.mark.parametrize("first_step", [0, 5])
def test_listed_rows_are_masked_and_every_other_place_of_every_batch_is_as_before(
    config, make_list, build_latents, tmp_path, kind, first_step
):
    """Also of a run that begins to use the list at a later step, on other workers, and of two data sets."""
    ids, listed = list(range(80)), [3, 17, 40, 79]
    if kind == "text ids":
        uri = write_latents(tmp_path / "text", build_latents, text_ids=True)
        config, listed = dataclasses.replace(config, latents_uri=uri), [f"r{row_id}" for row_id in listed]
    if kind == "mixture":
        other = write_latents(tmp_path / "other", build_latents, 100, seed=1)
        config = dataclasses.replace(config, latents_uri={config.latents_uri: 1, other: 3})
    before = received(config)[2 * first_step :]
    now = received(with_list(config, make_list, [*listed, "unknown"]), first_step, num_workers=2)
    masked = []
    for one, other in zip(before, now, strict=True):
        assert one.drop_columns("keep").equals(other.drop_columns("keep")) and all(one["keep"].to_pylist())
        assert other["keep"].to_pylist() == [row_id not in listed for row_id in other["id"].to_pylist()]
        masked += other.filter(pc.invert(other["keep"]))["id"].to_pylist()
    assert set(masked) <= set(listed) and len(masked) >= 2 and len(ids) == 80


@pytest.mark.usefixtures("one_thread")
def test_a_masked_row_changes_no_bit_of_the_losses_of_others(config, make_list):
    listed = with_list(config, make_list, range(0, 80, 5))
    manifest, plan = read_manifest(config.latents_uri), plan_for(config)
    state, num_masked = TrainStep(config, manifest), 0
    for one, other in list(zip(received(config), received(listed), strict=True))[:3]:
        units = [Unit.from_arrow(rows, manifest, plan.latents_at(0), 0) for rows in (one, other)]
        losses, masked = (state.row_losses(unit, 3).detach().numpy() for unit in units)
        keep = units[1].keep_U.numpy()
        assert np.array_equal(losses[keep], masked[keep]) and (masked[~keep] == 0).all()
        num_masked += np.count_nonzero(~keep)
    assert num_masked > 0


def test_a_resumed_run_may_begin_to_use_a_list_and_change_it(config, make_list):
    data = monitor.open_run(config)
    storage.write_text(f"{config.run_uri}/metrics.jsonl", "{}\n")
    where = config.run_uri, config.proportions, config.largest_resolution
    rows = held_out.of_run(*where)
    withheld = rows["id"].to_pylist()
    lists = [with_list(config, make_list, ids, name) for name, ids in (("a", withheld[:2]), ("b", withheld[:3]))]
    for changed in [lists[0], lists[0], lists[1], config]:
        again = monitor.open_run(changed)
        plans = [load_plan(one, of) for one, of in ((data, config), (again, changed))]
        assert [plan.chunk_rows(0)[0][0][1] for plan in plans] == [plans[0].chunk_rows(0)[0][0][1]] * 2
    is_excluded = functools.partial(exclusions.is_listed, lists[1].leave_out)
    assert held_out.of_run(*where, is_excluded)["id"].to_pylist() == withheld[3:]
    assert held_out.of_run(*where)["id"].to_pylist() == withheld[3:]  # the run keeps no copy of the others
    assert held_out.first(*where[1:], 512, is_excluded)["id"].to_pylist() == withheld[3:]


def test_a_list_of_which_no_id_is_in_the_latents_is_refused_before_anything_starts(config, make_list):
    wrong = with_list(config, make_list, [SUM, 80, 81])
    message = r"leave_out='.*list': none of its 3 entries is an id in .*latents, where ids are such as \d+: give a list"
    with pytest.raises(ValueError, match=message):
        monitor.open_run(wrong)
    assert not storage.exists(config.run_uri)
    monitor.open_run(with_list(config, make_list, [SUM, 80, 79]))


def test_a_list_that_the_latents_were_encoded_with_or_a_longer_one_is_taken(config, make_list, tmp_path):
    """None of its ids is left in the latents: they are recorded in the manifest, and among the rejected rows."""
    used = with_list(config, make_list, [1000])
    manifest, segments = read_manifest(config.latents_uri), read_segments(config.latents_uri)
    job = {**manifest.job, "leave_out": exclusions.record(used.leave_out)}
    write_manifest(config.latents_uri, dataclasses.replace(manifest, job=job), segments)
    start.refuse(used, DataSets.open(config.proportions), [training.exclusions_fit])
    longer = with_list(config, make_list, [1000, 1001], "longer")
    with pytest.raises(ValueError, match="none of its 2 entries"):
        start.refuse(longer, DataSets.open(config.proportions), [training.exclusions_fit])
    (tmp_path / "latents/rejects").mkdir()
    rejected = {"id": [1000], "reason": [exclusions.BY_ID], "source": ["a"]}
    pq.write_table(pa.table(rejected), tmp_path / "latents/rejects/000000.parquet")
    start.refuse(longer, DataSets.open(config.proportions), [training.exclusions_fit])


def test_more_rows_than_can_be_searched_are_not(config, make_list, monkeypatch):
    monkeypatch.setattr(training, "LISTED_ROWS", 79)
    start.refuse(with_list(config, make_list, [SUM]), DataSets.open(config.proportions), [training.exclusions_fit])
