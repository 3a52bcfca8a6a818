import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import ingest, schema
from helpers.config import TrainingConfig


@st.composite
def plans(draw, **fixed):
    """Files with row groups of any sizes, and units and chunks that need not fit them."""
    row_groups = draw(st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=5))
    values = {
        "unit_rows": draw(st.integers(1, 12)),
        "units_per_step": draw(st.sampled_from([1, 2, 4, 8])),
        "chunk_units": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 3)),
    }
    plan = ingest.Plan([f"{i}.parquet" for i in range(len(row_groups))], row_groups, **{**values, **fixed})
    assume(sum(map(sum, row_groups)) and plan.steps_per_epoch >= 1)
    return plan


def rows_of(plan):
    """Every row of the data as (file, row group, row)."""
    return {
        (name, group, row)
        for name, groups in zip(plan.file_names, plan.row_groups, strict=True)
        for group, rows in enumerate(groups)
        for row in range(rows)
    }


def deal(plan, spans):
    """unit number -> its rows, in order, by the plan's words: what a reader must hand out."""
    units = {}
    for epoch, index, first, stop in spans:
        pieces, permutation = plan.chunk(epoch, index)
        rows = [(name, group, start + i) for name, group, start, count in pieces for i in range(count)]
        dealt = [rows[i] for i in permutation]
        for unit in range(first, stop):
            number = epoch * plan.units_per_epoch + index * plan.chunk_units + unit
            assert number not in units
            units[number] = dealt[unit * plan.unit_rows : (unit + 1) * plan.unit_rows]
    return units


def steps_of(plan, first, last):
    """The global batches of some steps, as lists of rows."""
    units = deal(plan, plan.units_from(first, last))
    assert list(units) == list(range(first * plan.units_per_step, last * plan.units_per_step))  # in order, none missing
    per_step = plan.units_per_step
    return [sum((units[step * per_step + i] for i in range(per_step)), []) for step in range(first, last)]


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(0, 3))
def test_an_epoch_uses_every_row_once_but_for_less_than_one_batch(plan, epoch):
    steps = plan.steps_per_epoch
    batches = steps_of(plan, epoch * steps, (epoch + 1) * steps)
    batch = plan.unit_rows * plan.units_per_step
    used = [row for rows in batches for row in rows]
    assert all(len(rows) == batch for rows in batches)
    assert len(used) == len(set(used)) and set(used) <= rows_of(plan)
    assert len(used) >= plan.num_rows - batch + 1


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_a_run_that_starts_at_a_step_goes_on_as_one_that_started_at_the_first(plan, data):
    last = data.draw(st.integers(1, 3 * plan.steps_per_epoch))
    first = data.draw(st.integers(0, last))
    assert steps_of(plan, first, last) == steps_of(plan, 0, last)[first:]


@settings(max_examples=60, deadline=None)
@given(plans(units_per_step=8))
def test_any_number_of_workers_trains_on_the_same_global_batches(plan):
    """Ray hands out blocks in turn: unit u goes to worker u % W, which takes units_per_step / W of them a step."""
    last = plan.steps_per_epoch + 1
    units = deal(plan, plan.units_from(0, last))
    batches = steps_of(plan, 0, last)
    for num_workers in (1, 2, 4, 8):
        shards = [
            iter([unit for number, unit in units.items() if number % num_workers == rank])
            for rank in range(num_workers)
        ]
        for batch in batches:
            # As the worker loop does: slot s of the batch comes from worker s % W.
            slots = {slot: next(shards[rank]) for rank in range(num_workers) for slot in range(rank, 8, num_workers)}
            assert sum((slots[slot] for slot in range(8)), []) == batch
        assert all(next(shard, None) is None for shard in shards)


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 2))
def test_the_chunks_are_cut_from_one_permutation_of_the_row_groups(plan, epoch):
    """Chunk number i is rows [start, stop) of the row groups, laid end to end in the epoch's order."""
    groups, ends = plan.order(epoch)
    names = [
        (name, group)
        for name, sizes in zip(plan.file_names, plan.row_groups, strict=True)
        for group in range(len(sizes))
    ]
    sizes = [size for sizes in plan.row_groups for size in sizes]
    assert sorted(groups) == list(range(len(sizes))) and ends[-1] == plan.num_rows
    line = [(*names[group], row) for group in groups for row in range(sizes[group])]
    found = []
    for index in range(plan.chunks_per_epoch):
        pieces, permutation = plan.chunk(epoch, index)
        rows = [(name, group, start + i) for name, group, start, count in pieces for i in range(count)]
        assert sorted(permutation) == list(range(len(rows)))
        assert all(count >= 1 for *_, count in pieces)
        assert len(rows) == plan.chunk_units * plan.unit_rows or index == plan.chunks_per_epoch - 1
        found += rows
    assert found == line[: plan.units_per_epoch * plan.unit_rows]


@pytest.fixture(scope="module")
def plan():
    return ingest.Plan(["a", "b", "c"], [[64] * 5, [64, 7], [1] * 9], 8, 2, 6, seed=0)


def test_every_epoch_and_every_seed_has_an_order_of_its_own(plan):
    def first(seed, epoch):
        other = ingest.Plan(plan.file_names, plan.row_groups, 8, 2, 6, seed)
        return steps_of(other, epoch * plan.steps_per_epoch, epoch * plan.steps_per_epoch + 1)[0]

    orders = [first(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 16
    assert first(2, 3) == first(2, 3)


def test_every_chunk_is_shuffled_in_an_order_of_its_own():
    plan = ingest.Plan(["a"], [[64] * 16], 8, 2, 16, seed=0)
    orders = [plan.chunk(epoch, index)[1] for epoch in range(2) for index in range(plan.chunks_per_epoch)]
    assert len({tuple(order) for order in orders}) == 2 * plan.chunks_per_epoch == 16


def test_a_batch_mixes_row_groups_and_not_only_the_rows_within_them():
    plan = ingest.Plan(["a"], [[64] * 16], 8, 2, 64, seed=0)
    batches = steps_of(plan, 0, plan.steps_per_epoch)
    assert np.mean([len({(name, group) for name, group, _ in batch}) for batch in batches]) > 5
    assert not any(batch == sorted(batch) for batch in batches)


def test_the_plan_is_the_same_on_another_machine(plan):
    """It travels by pickle, and NumPy may not change its stream: a resume on a new version must not reshuffle."""
    assert steps_of(pickle.loads(pickle.dumps(plan)), 0, 5) == steps_of(plan, 0, 5)
    assert plan.order(1)[0].tolist() == [11, 0, 10, 7, 4, 1, 15, 9, 3, 14, 6, 13, 8, 12, 2, 5]


def test_row_groups_of_one_row_work():
    plan = ingest.Plan(["a"], [[1] * 20], 3, 2, 2, seed=0)
    used = sum(steps_of(plan, 0, plan.steps_per_epoch), [])
    assert plan.steps_per_epoch == 3 and len(set(used)) == 18


def test_files_without_rows_do_not_shift_the_others():
    plan = ingest.Plan(["a", "empty", "b"], [[5, 5], [], [5]], 1, 1, 4, seed=0)
    assert (
        set(sum(steps_of(plan, 0, 15), []))
        == rows_of(plan)
        == {(n, g, r) for n, g in (("a", 0), ("a", 1), ("b", 0)) for r in range(5)}
    )


def test_no_steps_left_is_no_work(plan):
    assert plan.units_from(5, 5) == []


# ---- from a manifest


def test_a_run_is_planned_from_the_manifest_and_the_recipe(build_manifest):
    config = TrainingConfig(global_batch_size=32, units_per_step=2, seed=5)
    plan = ingest.plan_run(build_manifest((64, 64, 10)), config)
    assert (plan.unit_rows, plan.units_per_step, plan.seed, plan.num_rows) == (16, 2, 5, 138)
    assert plan.steps_per_epoch == 4 and plan.file_names == ["0.parquet"]


def test_the_plan_does_not_change_with_the_workers_or_the_micro_batch(build_manifest):
    manifest = build_manifest((64, 64))
    plans = [
        ingest.plan_run(manifest, TrainingConfig(global_batch_size=32, units_per_step=4, **values))
        for values in ({}, {"num_training_workers": 4}, {"num_training_workers": 2, "micro_batch_size": 4})
    ]
    assert steps_of(plans[0], 0, 9) == steps_of(plans[1], 0, 9) == steps_of(plans[2], 0, 9)


def test_chunks_are_sized_by_bytes(build_manifest):
    """174 kB a row, as Stable Diffusion 2's 256 and 512 with 1024-wide captions: a few hundred rows a chunk."""
    shapes = {"image_latents_256": [2, 4, 32, 32], "caption_embeddings": [77, 1024]}
    plan = ingest.plan_run(build_manifest([64] * 1000, shapes=shapes), TrainingConfig(global_batch_size=64))
    assert 0.5 < plan.chunk_units * 64 * (16384 + 157696) / ingest.CHUNK_BYTES <= 1


def test_too_few_rows_for_one_batch_is_one_sentence(build_manifest):
    with pytest.raises(ValueError) as error:
        ingest.plan_run(build_manifest((30, 33)), TrainingConfig(global_batch_size=64, latents_uri="/data/latents"))
    assert str(error.value) == (
        "global_batch_size=64 is more than the 63 rows of /data/latents: make it smaller, or encode more data."
    )


# ---- reading what is planned


@pytest.fixture
def latents_uri(tmp_path, build_latents):
    (tmp_path / "data").mkdir()
    table = build_latents(40)
    pq.write_table(table[:25], tmp_path / "data" / "a.parquet", row_group_size=10)
    pq.write_table(table[25:], tmp_path / "data" / "b.parquet", row_group_size=10)
    return str(tmp_path)


def test_pieces_are_read_in_their_order(latents_uri):
    pieces = [("b.parquet", 1, 2, 3), ("a.parquet", 2, 0, 5), ("b.parquet", 0, 9, 1), ("a.parquet", 0, 0, 2)]
    found = ingest.read_pieces(pieces, [schema.ID, schema.EMBEDDINGS], latents_uri)
    assert found["id"].to_pylist() == [37, 38, 39, 20, 21, 22, 23, 24, 34, 0, 1]
    assert found.column_names == [schema.ID, schema.EMBEDDINGS] and found["id"].num_chunks == 1


def test_the_rows_that_were_planned_are_read_and_marked(latents_uri, build_latents, monkeypatch):
    plan = ingest.Plan(["a.parquet", "b.parquet"], [[10, 10, 5], [10, 5]], 4, 2, 3, seed=1)
    spans = plan.units_from(2, 8)
    monkeypatch.setattr(ingest.ray, "get", lambda value: value)
    tables = list(
        ingest.read_chunks(
            {"id": np.arange(len(spans))},
            plan=plan,
            spans=spans,
            latents_uri=latents_uri,
            resolution=64,
            validation_share=0.3,
        )
    )
    rows, ids = pa.concat_tables(tables), build_latents(40)["id"].to_pylist()
    at = {("a.parquet", g, r): ids[10 * g + r] for g in range(3) for r in range(10) if 10 * g + r < 25}
    at |= {("b.parquet", g, r): ids[25 + 10 * g + r] for g in range(2) for r in range(10) if 10 * g + r < 15}
    assert rows["id"].to_pylist() == [at[row] for batch in steps_of(plan, 2, 8) for row in batch]
    assert rows["unit"].to_pylist() == np.repeat(np.arange(4, 16), 4).tolist()
    assert rows["keep"].to_pylist() == [not held for held in schema.held_out(rows["id"].to_pylist(), 0.3)]
    assert rows.column_names == ["id", "caption", "image_latents_64", "caption_embeddings", "keep", "unit"]
    expected = build_latents(40).take(rows["id"])
    for column in ("image_latents_64", "caption_embeddings", "caption"):
        assert rows[column].to_pylist() == expected[column].to_pylist()


def test_rows_without_latents_are_masked_not_dropped(tmp_path, build_latents, monkeypatch):
    valid = np.arange(20) % 3 != 0
    table = build_latents(20)
    values, _ = schema.from_binary(table["image_latents_64"], (2, 4, 8, 8))
    table = table.set_column(
        table.column_names.index("image_latents_64"), "image_latents_64", schema.to_binary(values, valid)
    )
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    plan = ingest.Plan(["a.parquet"], [[20]], 5, 2, 2, seed=0)
    monkeypatch.setattr(ingest.ray, "get", lambda value: value)
    spans = plan.units_from(0, 2)
    rows = pa.concat_tables(
        ingest.read_chunks(
            {"id": np.arange(len(spans))},
            plan=plan,
            spans=spans,
            latents_uri=str(tmp_path),
            resolution=64,
            validation_share=0.0,
        )
    )
    assert sorted(rows["id"].to_pylist()) == list(range(20))
    assert rows["keep"].to_pylist() == [bool(valid[i]) for i in rows["id"].to_pylist()]


def test_validation_takes_the_held_out_rows_that_have_latents(latents_uri, build_manifest):
    segment = {
        "files": [{"name": "a.parquet", "row_groups": [10, 10, 5]}, {"name": "b.parquet", "row_groups": [10, 5]}],
        "read": 40,
        "written": 40,
        "filtered": 0,
        "rejected": {},
    }
    manifest = build_manifest(segments=[segment])
    config = TrainingConfig(latents_uri=latents_uri, validation_share=0.3)
    held = [i for i in range(40) if schema.held_out([i], 0.3)[0]]
    assert ingest.validation_rows(manifest, config, 100)["id"].to_pylist() == held
    assert ingest.validation_rows(manifest, config, 3)["id"].to_pylist() == held[:3]
    assert ingest.validation_rows(manifest, TrainingConfig(latents_uri=latents_uri, validation_share=0), 3) is None
