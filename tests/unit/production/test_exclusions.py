"""Excluded rows: what a list holds, and where its rows are missed: encoding, training, validation. No Ray."""

import hashlib
import pickle

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import stages
from helpers.latents import held_out, schema
from helpers.latents.read import latents_reader
from helpers.production.data.exclusions import Exclusions, mask
from helpers.production.extras import choose
from helpers.raw import inputs
from tests.latents import SHAPES, plan_for, receive_steps, write_job
from tests.raw_data import image

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
    listed = Exclusions(make_list(content))
    values = [7, "7", "a b", "ä", SUM, "07", "a", "", None, -7]
    assert listed.is_excluded(values).tolist() == [True] * 5 + [False] * 5
    assert listed.record()["exclusions"]["entries"] == 4 and listed.is_excluded([]).tolist() == []


BAD = {
    "no file": None,
    "no id": b"\n \r\n",
    "cut short": b"PAR1 cut short",
    "floats": {"id": [1.5]},
}


@pytest.mark.parametrize("content", BAD.values(), ids=list(BAD))
def test_a_list_that_cannot_be_used_is_refused_where_it_is_chosen(make_list, tmp_path, content):
    path = str(tmp_path / "list") if content is None else make_list(content)
    with pytest.raises(ValueError, match="^exclusions='.*list' (cannot be read|holds no id)") as error:
        choose({"exclusions": Exclusions()}, {"exclusions": {"uri": path}})
    assert "\n" not in str(error.value)


def test_a_list_that_changes_under_a_run_is_noticed(make_list):
    sent = pickle.dumps(Exclusions(make_list(b"1\n")))
    make_list(b"2\n")
    with pytest.raises(ValueError, match="has changed"):
        pickle.loads(sent).is_excluded([1])
    assert not Exclusions().is_excluded([1, 2]).any() and Exclusions().record() == {}


def test_listed_rows_are_rejected_before_they_are_decoded(make_list, tmp_path):
    """By id, whatever else is wrong with the row, or by the image's sum, in capitals too; others are as before."""
    pictures = [image((number, 0, 0)) for number in range(5)]
    columns = {
        inputs.ID: [10, 11, 12, 13, 14],
        inputs.CAPTION: ["a", "b", "c", None, "e"],
        inputs.IMAGE: [*pictures[:3], None, pictures[4]],
        inputs.ERROR: [None, None, None, "gone", None],
        inputs.SOURCE: ["f"] * 5,
        inputs.NOTE: [""] * 5,
    }
    sums = [hashlib.sha256(data).hexdigest() for data in pictures]
    listed = Exclusions(make_list(f"11\n13\n{sums[2]}\n{sums[4].upper()}\n".encode()))
    config, raw = PreprocessingConfig(storage=str(tmp_path), resolutions=[32]), pa.table(columns)
    before, done = (stages.transform(raw, config=config, excluded=one) for one in (None, listed.is_excluded))
    assert done[schema.REASON].to_pylist() == ["", *["excluded"] * 4]
    same = [name for name in done.column_names if name != "transform_seconds"]
    assert done.select(same)[:1].equals(before.select(same)[:1])
    assert done["pixels_32"].null_count == 4 and done["caption"].to_pylist() == ["a", "", "", "", ""]


# ---- training


def write_latents(uri, build_latents, num_rows=80, seed=0, share=0.2, job=None):
    rows = build_latents(num_rows, seed).drop_columns(["image_latents_32"])
    more = {schema.REASON: [""] * num_rows, schema.SOURCE: ["a"] * num_rows, "note": [""] * num_rows}
    more |= {"encoder_call": pa.nulls(num_rows, pa.struct([])), "transform_seconds": pa.nulls(num_rows, pa.float64())}
    table = pa.table({**{name: rows[name] for name in rows.column_names}, **more})
    tables = [table[: num_rows // 2], table[num_rows // 2 :]]
    encoder = {"model": "tiny-sd", "revision": "0", "precision": "fp32"}
    write_job(str(uri), num_rows, tables, SPECS, share, job=job, encoder=encoder)
    return str(uri)


@pytest.fixture
def config(tmp_path, build_latents):
    uri = write_latents(tmp_path / "latents", build_latents)
    values = {"storage": str(tmp_path), "latents_uri": uri, "global_batch_size": 8, "units_per_step": 2}
    return TrainingConfig(**values, validation_share=0.2, max_steps=20, warmup_steps=2)


def excluding(make_list, ids):
    return Exclusions(make_list("".join(f"{row_id}\n" for row_id in ids).encode()))


def received(config, listed=None, first_step=0, num_workers=1):
    """The units of two epochs' steps from `first_step` on, in order."""
    plan = plan_for(config)
    read = mask(latents_reader(plan), (listed or Exclusions()).is_excluded)
    steps = receive_steps(plan, read, first_step, 2 * plan.steps_per_epoch, num_workers)
    return [rows for units in steps for rows in units.values()]


@pytest.mark.parametrize("first_step", [0, 5])
def test_listed_rows_are_masked_and_every_other_row_of_every_batch_is_as_before(config, make_list, first_step):
    """Also of a run that begins to use the list at a later step, on other workers."""
    ids = [3, 17, 40, 79]
    before = received(config)[2 * first_step :]
    now = received(config, excluding(make_list, [*ids, "unknown"]), first_step, num_workers=2)
    masked = []
    for one, other in zip(before, now, strict=True):
        assert one.drop_columns("keep").equals(other.drop_columns("keep")) and all(one["keep"].to_pylist())
        assert other["keep"].to_pylist() == [row_id not in ids for row_id in other["id"].to_pylist()]
        masked += other.filter(pc.invert(other["keep"]))["id"].to_pylist()
    assert set(masked) <= set(ids) and len(masked) >= 2


@pytest.mark.parametrize("is_cached", [False, True])
def test_held_out_rows_are_dropped_too(config, make_list, is_cached):
    """By the extra alone: a list in the notebook counts as much as one in the parameter `extras`."""
    where = [config.proportions, config.largest_resolution]
    withheld = held_out.first(*where, held_out.NUM_ROWS)["id"].to_pylist()
    if is_cached:
        assert held_out.of_run(config.run_uri, *where)["id"].to_pylist() == withheld
    listed = excluding(make_list, withheld[:3])
    with listed.on_driver(config):
        assert held_out.of_run(config.run_uri, *where)["id"].to_pylist() == withheld[3:]


def test_a_list_of_which_no_id_is_in_the_latents_is_refused(config, make_list, tmp_path, build_latents):
    """Rejected rows count too, and latents that were encoded with the list hold none of its rows."""
    excluding(make_list, [SUM, 79]).check_found([config.latents_uri])
    wrong = excluding(make_list, [SUM, 1000])
    with pytest.raises(ValueError, match=r"none of its 2 entries is an id in .*latents, where ids are such as \d+"):
        wrong.on_driver(config)
    other = write_latents(tmp_path / "other", build_latents, job={"validation_share": 0.2, **wrong.record()})
    wrong.check_found([other])
    assert wrong.record(other) == wrong.record() and Exclusions().record(other) == wrong.record()
    (tmp_path / "latents/rejects").mkdir()
    rejected = {"id": [1000], "reason": [stages.EXCLUDED], "source": ["a"]}
    pq.write_table(pa.table(rejected), tmp_path / "latents/rejects/000000.parquet")
    wrong.check_found([config.latents_uri])
