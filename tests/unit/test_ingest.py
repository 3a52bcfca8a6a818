import dataclasses
import itertools
import json
import pickle
import threading
import types
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import ingest, run_setup, schema, storage
from helpers.config import TrainingConfig


def source(names, row_groups, proportion=1.0, uri="/data"):
    return ingest.Source.of(uri, list(zip(names, row_groups, strict=True)), proportion)


def plan_of(names, row_groups, unit_rows, units_per_step, chunk_units, seed=0, block_steps=1):
    return ingest.Plan([source(names, row_groups)], unit_rows, units_per_step, chunk_units, seed, block_steps)


@st.composite
def plans(draw, most_sources=3, **fixed):
    """One data set or several, files with row groups of any sizes, and units and chunks that need not fit them."""
    shares = draw(st.lists(st.integers(1, 20), min_size=1, max_size=most_sources))
    sources = []
    for number, share in enumerate(shares):
        row_groups = draw(st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=5))
        assume(sum(map(sum, row_groups)))
        names = [f"{i}.parquet" for i in range(len(row_groups))]
        sources.append(source(names, row_groups, share / sum(shares), f"/data-{number}"))
    units_per_step = fixed.pop("units_per_step", None) or draw(st.sampled_from([1, 2, 4, 8]))
    block_steps = draw(st.integers(1, 3))
    whole = block_steps * units_per_step if block_steps > 1 else 1
    plan = ingest.Plan(
        sources,
        draw(st.integers(1, 12)),
        units_per_step,
        whole * draw(st.integers(1, 9)),
        draw(st.integers(0, 3)),
        block_steps,
    )
    assume(plan.steps_per_epoch >= 1)
    return plan


SIZES = {
    "image_latents_32": (32, (2, 4, 4, 4)),
    "image_latents_48x16": (32, (2, 4, 2, 6)),
    "image_latents_64": (64, (2, 4, 8, 8)),
    "image_latents_80x48": (64, (2, 4, 6, 10)),
}
BUCKETS = ["32", "48x16", "32+64", "32+80x48", "48x16+80x48", "held out 32", "held out 48x16+80x48"]


def manifest_of(files):
    """The manifest of files that are lists of (bucket, rows of its row groups)."""
    segment = {"files": [], "rejects": [], "read": 0, "written": 0, "rejected": {}, "filtered": 0, "buckets": {}}
    for number, buckets in enumerate(files):
        rows = [count for _, mine in buckets for count in mine]
        counts = {bucket: len(mine) for bucket, mine in buckets}
        segment["files"].append({"name": f"{number}.parquet", "row_groups": rows, "buckets": counts})
        segment["read"], segment["written"] = segment["read"] + sum(rows), segment["written"] + sum(rows)
        for bucket, mine in buckets:
            segment["buckets"][bucket] = segment["buckets"].get(bucket, 0) + sum(mine)
    columns = [schema.ColumnSpec(name, shape, resolution=size) for name, (size, shape) in SIZES.items()]
    return schema.Manifest(
        encoder={},
        resolutions=[32, 64],
        columns=[*columns, schema.ColumnSpec(schema.EMBEDDINGS, (6, 128))],
        scaling_factor=1.0,
        id_type="int64",
        empty_caption_embedding="",
        job={"validation_share": 0.0},
        segments=[segment],
    )


@st.composite
def bucket_plans(draw, sizes=None, most_sources=2, manifests=None):
    """Rows of several shapes and sizes and held-out ones, some row groups of each; trained on at one size or two."""
    if sizes is None:
        sizes = draw(st.sampled_from([32, 64, {32: 0.5, 64: 0.5}, {32: 0.2, 64: 0.8}]))
    uris = [f"/data-{number}" for number in range(draw(st.integers(1, most_sources)))]
    shares = {uri: draw(st.integers(1, 5)) for uri in uris}
    config = TrainingConfig(latents_uri=shares, resolution=sizes)
    sources = []
    for number, uri in enumerate(uris):
        groups = st.lists(st.integers(1, 30), min_size=1, max_size=4)
        file = st.lists(st.sampled_from(BUCKETS), unique=True, max_size=4).flatmap(
            lambda names, groups=groups: st.tuples(*(st.tuples(st.just(name), groups) for name in names))
        )
        files = draw(st.lists(file, min_size=1, max_size=4))
        manifest = manifest_of(files)
        sources += ingest.sources_by_shape(manifest, uri, number, config)
        if manifests is not None:
            manifests[uri] = manifest
    assume({source.latents.resolution for source in sources} == set(config.resolutions))
    units_per_step, block_steps = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    plan = ingest.Plan(
        sources,
        draw(st.integers(1, 6)),
        units_per_step,
        (block_steps * units_per_step if block_steps > 1 else 1) * draw(st.integers(1, 9)),
        draw(st.integers(0, 3)),
        block_steps,
        shares=config.resolution_shares,
    )
    assume(plan.steps_per_epoch >= 1)
    return plan


def rows_of(plan):
    """Every row of the data as (data set, file, row group, row)."""
    return {
        (source.uri, *source.row_range(group, 0, 0)[:2], row)
        for source in plan.sources
        for group, rows in enumerate(source.group_rows)
        for row in range(rows)
    }


def dealt(plan, first_step, num_steps):
    """[(unit number, its rows)] in the order in which they travel: what a reader must hand out."""
    travelling = []
    for chunk in plan.chunk_range(first_step, num_steps):
        ranges, permutation = plan.chunk_rows(chunk)
        rows = [
            (source.uri, name, group, start + i)
            for source, mine in zip(plan.sources, ranges, strict=True)
            for name, group, start, count in mine
            for i in range(count)
        ]
        first_unit = plan.unit_range(chunk).start
        for unit in plan.block_order(plan.unit_range(chunk, first_step, num_steps)).tolist():
            unit = unit if unit >= first_step * plan.units_per_step else -1
            start = max(0, unit - first_unit) * plan.unit_rows
            travelling.append((unit, [rows[i] for i in permutation[start : start + plan.unit_rows]]))
    if last := plan.padding_blocks(first_step, num_steps) * plan.block_steps if first_step < num_steps else 0:
        travelling += [(-1, travelling[0][1])] * last
    return travelling


def steps_of(plan, first, last, num_workers=1):
    """The global batches of some steps, as the workers take them: block b goes to worker b % num_workers.

    Blocks that are left over when each worker has got as many are dropped, as Ray's `streaming_split` does.
    """
    plan = dataclasses.replace(plan, worker_counts=range(1, num_workers + 1))
    travelling, size = dealt(plan, first, last), plan.block_steps
    assert len(travelling) % size == 0
    rows = [row for _, unit in travelling for row in unit]
    numbers = np.repeat([number for number, _ in travelling], plan.unit_rows)
    table = pa.table({"unit": numbers.astype(np.int64), "row": np.arange(len(rows))})
    blocks = [table.slice(start, plan.block_rows) for start in range(0, len(rows), plan.block_rows)]
    blocks = blocks[: len(blocks) // num_workers * num_workers]
    shards = [iter(blocks[rank::num_workers]) for rank in range(num_workers)]
    steps = range(first, last)
    workers = [ingest.worker_units(shard, plan, steps, rank, num_workers) for rank, shard in enumerate(shards)]
    batches = []
    for of_workers in zip(*workers, strict=True):
        units = {number: unit for mine in of_workers for number, unit in mine.items()}
        assert len(units) == sum(map(len, of_workers)) == plan.units_per_step
        assert max(map(len, of_workers)) == -(-plan.units_per_step // num_workers)  # nobody waits for longer
        batches.append([rows[i] for number in sorted(units) for i in units[number]["row"].to_pylist()])
    left = sum(len(list(shard)) for shard in shards)
    assert len(batches) == last - first and left < num_workers * (num_workers if num_workers > 1 else 1)
    return batches


@settings(max_examples=40, deadline=None)
@given(plans() | bucket_plans(), st.integers(0, 3))
def test_a_sample_is_used_at_most_once_an_epoch(plan, epoch):
    """At one size, where it has several."""
    steps = plan.steps_per_epoch
    batches = steps_of(plan, epoch * steps, (epoch + 1) * steps)
    used = [row for rows in batches for row in rows]
    assert all(len(rows) == plan.batch_rows for rows in batches)
    assert len(used) == len(set(used)) and set(used) <= rows_of(plan)


@settings(max_examples=40, deadline=None)
@given(plans(most_sources=1), st.integers(0, 3))
def test_an_epoch_leaves_out_less_than_one_batch(plan, epoch):
    steps = plan.steps_per_epoch
    used = sum(steps_of(plan, epoch * steps, (epoch + 1) * steps), [])
    assert len(used) >= plan.num_rows - plan.batch_rows + 1


@settings(max_examples=40, deadline=None)
@given(plans())
def test_an_epoch_of_a_mixture_ends_with_its_first_source(plan):
    sizes = np.array([source.num_rows for source in plan.sources])
    (bucket,) = plan.buckets
    assert (bucket.rows_by_source(plan.steps_per_epoch * plan.batch_rows) <= sizes).all()
    assert (bucket.rows_by_source((plan.steps_per_epoch + 1) * plan.batch_rows) > sizes).any()


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_proportions_hold_in_every_window_of_an_epoch(plan, data):
    """Within two rows, and a thousandth of a percent for their rounding."""
    used = sum(steps_of(plan, 0, plan.steps_per_epoch), [])
    first = data.draw(st.integers(0, len(used)))
    window = used[first : data.draw(st.integers(first, len(used)))]
    for source_ in plan.sources:
        found = sum(uri == source_.uri for uri, *_ in window)
        assert abs(found - source_.proportion * len(window)) <= 2 + 1e-4 * len(window)


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1], [0.97, 0.02, 0.01], [0.4, 0.3, 0.2, 0.1], [1 / 3] * 3])
def test_proportions_hold_in_windows_of_a_long_run(shares):
    sources = [source(["a"], [[64] * 2000], share, f"/{i}") for i, share in enumerate(shares)]
    plan = ingest.Plan(sources, 16, 4, 64, seed=0)
    chosen = np.tile(plan.buckets[0].mixing_schedule, 2)
    for size in (50, 333, 5000):
        for number, share in enumerate(shares):
            counts = np.convolve(chosen == number, np.ones(size), mode="valid")
            assert np.abs(counts - share * size).max() <= 2 + 1e-4 * size


@settings(max_examples=40, deadline=None)
@given(plans() | bucket_plans(), st.data())
def test_a_run_may_start_at_any_step(plan, data):
    last = data.draw(st.integers(1, 3 * plan.steps_per_epoch))
    first = data.draw(st.integers(0, last))
    assert steps_of(plan, first, last) == steps_of(plan, 0, last)[first:]


@settings(max_examples=25, deadline=None)
@given(plans() | bucket_plans(), st.data())
def test_any_number_of_workers_gets_the_same_global_batches(plan, data):
    last = plan.steps_per_epoch + 1
    first = data.draw(st.integers(0, last))
    batches = steps_of(plan, first, last)
    for num_workers in (2, 3, 5, 8):
        assert steps_of(plan, first, last, num_workers) == batches


@settings(max_examples=25, deadline=None)
@given(plans(), st.integers(0, 2))
def test_chunks_follow_one_permutation_of_the_row_groups(plan, epoch):
    """The rows that a data set gives, chunk after chunk, are those of its row groups in the epoch's order."""
    for number, (groups, ends, _) in enumerate(plan.row_group_order(epoch)):
        mine = plan.sources[number]
        assert sorted(groups) == list(range(len(mine.group_rows))) and ends[-1] == mine.num_rows
        line = [(*mine.row_range(group, 0, 0)[:2], row) for group in groups for row in range(mine.group_rows[group])]
        found = []
        for index in range(plan.chunks_per_epoch):
            ranges, permutation = plan.chunk_rows(epoch * plan.chunks_per_epoch + index)
            assert sorted(permutation) == list(range(sum(count for part in ranges for *_, count in part)))
            assert all(count >= 1 for *_, count in ranges[number])
            found += [(name, group, start + i) for name, group, start, count in ranges[number] for i in range(count)]
        assert found == line[: len(found)]


# ---- buckets


def bucket_of(row, manifests):
    """The bucket of a row (data set, file, row group, row)."""
    uri, name, group, _ = row
    names, buckets = manifests[uri].group_buckets
    groups = [len(rows) for _, rows in manifests[uri].files]
    return names[buckets[sum(groups[: int(name.removesuffix(".parquet"))]) + group]]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_step_trains_on_one_shape_and_on_no_held_out_row(data):
    """Each of its rows has latents of it; which shape it is depends on the step's number alone."""
    manifests = {}
    plan = data.draw(bucket_plans(manifests=manifests))
    for step, batch in enumerate(steps_of(plan, 0, 2 * plan.steps_per_epoch)):
        of_rows = {bucket_of(row, manifests) for row in batch}
        assert not any(bucket.startswith("held out") for bucket in of_rows)
        assert all(plan.latents_at(step).name in schema.bucket_columns(bucket) for bucket in of_rows)


@settings(max_examples=30, deadline=None)
@given(bucket_plans(), st.data())
def test_buckets_and_resolutions_hold_in_every_window(plan, data):
    """Of steps, within a few: three to a resolution's share, four to a bucket's."""
    chosen = [plan.latents_at(step) for step in range(plan.steps_per_epoch)]
    first = data.draw(st.integers(0, len(chosen)))
    window = chosen[first : data.draw(st.integers(first, len(chosen)))]
    for bucket, steps in zip(plan.buckets, plan.bucket_steps, strict=True):
        found = sum(latents.name == bucket.latents.name for latents in window)
        assert abs(found - steps / len(chosen) * len(window)) <= 4
    for size, share in plan.shares.items():
        found = sum(latents.resolution == size for latents in window)
        assert abs(found - share * len(window)) <= 3


@settings(max_examples=30, deadline=None)
@given(bucket_plans(sizes=64, most_sources=1))
def test_an_epoch_leaves_out_less_than_one_batch_of_each_bucket(plan):
    for bucket in plan.describe_buckets():
        assert 0 <= bucket["left_over"] < plan.batch_rows and bucket["steps"] == bucket["rows"] // plan.batch_rows


def test_small_pictures_leave_large_ones_to_large_sizes():
    """All of 1,000 rows are used at 32 or 64 pixels, though a quarter is too small for 64."""
    manifest = manifest_of([[("32", [50] * 5), ("32+64", [50] * 15)]])
    for share, expected in ((0.75, {"32x32": 25, "64x64": 75}), (0.5, {"32x32": 50, "64x64": 50})):
        config = TrainingConfig(latents_uri="/a", resolution={32: 1 - share, 64: share}, global_batch_size=10)
        plan = ingest.plan_run({"/a": manifest}, config)
        assert {one["bucket"]: one["steps"] for one in plan.describe_buckets()} == expected
    config = TrainingConfig(latents_uri="/a", resolution={32: 0.1, 64: 0.9}, global_batch_size=10)
    left_over = [one["left_over"] for one in ingest.plan_run({"/a": manifest}, config).describe_buckets()]
    assert left_over == [170, 0]  # too small for 64 pixels, and not needed at 32


def test_the_plan_by_bucket_stays_the_same_in_new_versions():
    """Numbers of an earlier version: a run that is resumed with newer code goes on with the same samples."""
    files = [[("32", [4]), ("32+64", [4, 3]), ("held out 32+64", [2])], [("32", [3, 2]), ("32+80x48", [4, 4])]]
    config = TrainingConfig(latents_uri="/one", resolution={32: 0.5, 64: 0.5})
    sources = ingest.sources_by_shape(manifest_of(files), "/one", 0, config)
    plan = ingest.Plan(sources, 2, 1, 3, seed=7, shares=config.resolution_shares)
    found = [plan.latents_at(step).size for step in range(plan.steps_per_epoch)]
    assert found == [(32, 32), (64, 64), (32, 32), (80, 48)] * 3
    # Order, ends, and where the rows of a row group begin whose first rows another size has.
    assert [(order.tolist(), ends.tolist(), first) for order, ends, first in plan.row_group_order(1)] == [
        ([2, 5, 0, 4, 6], [1, 3, 7, 10, 12], {0: 0, 2: 2, 6: 2}),
        ([1, 2], [4, 6], {1: 0}),
        ([7, 6], [4, 6], {7: 0}),
    ]
    assert [(ranges, permutation.tolist()) for ranges, permutation in map(plan.chunk_rows, range(2))] == [
        (
            [[("0.parquet", 2, 2, 1), ("1.parquet", 2, 2, 2), ("1.parquet", 0, 0, 1)], [("0.parquet", 1, 0, 2)], []],
            [0, 2, 5, 4, 1, 3],
        ),
        ([[("1.parquet", 0, 1, 2)], [("0.parquet", 1, 2, 2)], [("1.parquet", 3, 0, 2)]], [4, 5, 0, 1, 2, 3]),
    ]


def test_data_sets_mix_within_a_batch_of_one_shape():
    """Three to one, in batches of both shapes, though the smaller part of the rows is wide."""
    manifest = manifest_of([[("32+64", [50] * 12), ("32+80x48", [50] * 6)]])
    config = TrainingConfig(latents_uri={"/a": 3, "/b": 1}, resolution=64, global_batch_size=20)
    plan = ingest.plan_run({"/a": manifest, "/b": manifest}, config)
    for step, batch in enumerate(steps_of(plan, 0, plan.steps_per_epoch)):
        assert sum(uri == "/a" for uri, *_ in batch) == 15, plan.latents_at(step)
    assert plan.bucket_steps.tolist() == [40, 20]


def test_a_mixture_keeps_its_proportions_where_shapes_differ():
    """One to one, in all shapes together, though one data set is larger and has all the wide pictures."""
    wide = manifest_of([[("32+64", [50] * 40), ("32+80x48", [50] * 40)]])
    square = manifest_of([[("32+64", [50] * 20)]])
    config = TrainingConfig(latents_uri={"/a": 1, "/b": 1}, resolution=64, global_batch_size=20)
    plan = ingest.plan_run({"/a": wide, "/b": square}, config)
    used = sum(steps_of(plan, 0, plan.steps_per_epoch), [])
    assert len(used) == 2000 and sum(uri == "/a" for uri, *_ in used) == pytest.approx(1000, abs=20)
    assert [one["left_over"] for one in plan.describe_buckets()] == pytest.approx([1500, 1500], abs=20)


def test_a_size_of_which_all_rows_are_held_out_is_refused():
    manifest = manifest_of([[("32", [64, 64]), ("held out 32+64", [3])]])
    config = TrainingConfig(latents_uri="/a", resolution={32: 0.5, 64: 0.5}, global_batch_size=16)
    with pytest.raises(ValueError, match="^global_batch_size=16 is more than the 128 rows of 32x32, the 0 rows of 64 "):
        ingest.plan_run({"/a": manifest}, config)


def test_a_worker_plans_buckets_from_the_head_of_the_manifest(tmp_path):
    manifest = manifest_of([[("32", [9] * 5), ("32+64", [7] * 5)], [("32+80x48", [30]), ("48x16", [31])]])
    storage.write_json(tmp_path / "manifest.json", manifest.to_dict())
    sizes = {"resolution": {32: 0.5, 64: 0.5}, "latents_uri": str(tmp_path)}
    config = TrainingConfig(**sizes, global_batch_size=4, units_per_step=2)
    whole, head = (ingest.plan_run(ingest.read_manifests(config, heads), config) for heads in (False, True))
    assert head.steps_per_epoch == whole.steps_per_epoch > 5
    assert [head.latents_at(step) for step in range(99)] == [whole.latents_at(step) for step in range(99)]


def test_a_bucket_that_fills_no_batch_is_left_out():
    manifest = manifest_of([[("32+64", [64]), ("32+80x48", [10])]])
    config = TrainingConfig(latents_uri="/a", resolution=64, global_batch_size=16)
    plan = ingest.plan_run({"/a": manifest}, config)
    assert plan.describe_buckets() == [
        {"bucket": "64x64", "rows": 64, "steps": 4, "left_over": 0},
        {"bucket": "80x48", "rows": 10, "steps": 0, "left_over": 10},
    ]
    with pytest.raises(ValueError) as error:
        ingest.plan_run({"/a": manifest}, dataclasses.replace(config, global_batch_size=128))
    assert str(error.value) == (
        "global_batch_size=128 is more than the 64 rows of 64x64, the 10 rows of 80x48 of /a can fill: make it "
        "smaller, or encode more data."
    )


def test_a_block_holds_one_place_of_consecutive_steps():
    plan = plan_of(["a"], [[64] * 3], 4, 2, 12, block_steps=3)
    numbers = [number for number, _ in dealt(plan, 0, 6)]
    assert numbers == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_padding_of_a_block_is_marked():
    plan = plan_of(["a"], [[36]], 4, 2, 6, block_steps=3)
    assert plan.steps_per_epoch == 4
    assert [number for number, _ in dealt(plan, 2, 4)] == [-1, -1, 4, -1, -1, 5, 6, -1, -1, 7, -1, -1]


@pytest.fixture(scope="module")
def plan():
    return plan_of(["a", "b", "c"], [[64] * 5, [64, 7], [1] * 9], 8, 2, 6)


def test_every_epoch_and_every_seed_has_an_order_of_its_own(plan):
    def first(seed, epoch):
        other = ingest.Plan(plan.sources, 8, 2, 6, seed)
        return steps_of(other, epoch * plan.steps_per_epoch, epoch * plan.steps_per_epoch + 1)[0]

    orders = [first(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 16
    assert first(2, 3) == first(2, 3)


def test_every_chunk_is_shuffled_in_an_order_of_its_own():
    plan = plan_of(["a"], [[64] * 16], 8, 2, 16)
    orders = [plan.chunk_rows(chunk)[1] for chunk in range(2 * plan.chunks_per_epoch)]
    assert len({tuple(order) for order in orders}) == 2 * plan.chunks_per_epoch == 16


def test_a_batch_mixes_row_groups():
    plan = plan_of(["a"], [[64] * 16], 8, 2, 64)
    batches = steps_of(plan, 0, plan.steps_per_epoch)
    assert np.mean([len({(name, group) for _, name, group, _ in batch}) for batch in batches]) > 5
    assert not any(batch == sorted(batch) for batch in batches)


def test_the_plan_is_the_same_on_another_machine(plan):
    """It travels by pickle, and NumPy may not change its stream: a resume on a new version must not reshuffle."""
    assert steps_of(pickle.loads(pickle.dumps(plan)), 0, 5) == steps_of(plan, 0, 5)
    assert plan.row_group_order(1)[0][0].tolist() == [11, 0, 10, 7, 4, 1, 15, 9, 3, 14, 6, 13, 8, 12, 2, 5]


def test_the_plan_stays_the_same_in_new_versions():
    """Numbers of an earlier version: a run that is resumed with newer code goes on with the same samples."""
    files = [("a", [4, 4, 2]), ("b", [3, 4])]
    plan = ingest.Plan([ingest.Source.of("/one", files)], 2, 2, 4, seed=7)
    assert (plan.steps_per_epoch, plan.chunks_per_epoch, plan.chunk_range(2, 6)) == (4, 2, range(1, 3))
    order, ends, _ = plan.row_group_order(1)[0]
    assert (order.tolist(), ends.tolist()) == ([3, 0, 2, 1, 4], [3, 7, 9, 13, 17])
    assert [(ranges, permutation.tolist()) for ranges, permutation in map(plan.chunk_rows, range(4))] == [
        ([[("a", 2, 0, 2), ("a", 0, 0, 4), ("b", 1, 0, 2)]], [0, 6, 7, 2, 4, 5, 1, 3]),
        ([[("b", 1, 2, 2), ("a", 1, 0, 4), ("b", 0, 0, 2)]], [2, 3, 4, 1, 0, 6, 7, 5]),
        ([[("b", 0, 0, 3), ("a", 0, 0, 4), ("a", 2, 0, 1)]], [6, 3, 1, 0, 2, 4, 7, 5]),
        ([[("a", 2, 1, 1), ("a", 1, 0, 4), ("b", 1, 0, 3)]], [0, 6, 1, 7, 4, 3, 2, 5]),
    ]


def test_the_plan_of_a_mixture_stays_the_same_in_new_versions():
    sources = [
        ingest.Source.of("/one", [("a", [4, 4, 2]), ("b", [3, 4])], 0.75),
        ingest.Source.of("/two", [("c", [5, 3])], 0.25),
    ]
    plan = ingest.Plan(sources, 1, 2, 8, seed=7, block_steps=2)
    assert (plan.steps_per_epoch, plan.chunks_per_epoch, plan.chunk_range(2, 13)) == (11, 3, range(0, 4))
    assert [(order.tolist(), ends.tolist()) for order, ends, _ in plan.row_group_order(1)] == [
        ([3, 0, 2, 1, 4], [3, 7, 9, 13, 17]),
        ([0, 1], [5, 8]),
    ]
    assert [(ranges, permutation.tolist()) for ranges, permutation in map(plan.chunk_rows, range(6))] == [
        ([[("a", 2, 0, 2), ("a", 0, 0, 4)], [("c", 0, 0, 2)]], [5, 2, 6, 0, 4, 1, 7, 3]),
        ([[("b", 1, 0, 4), ("a", 1, 0, 2)], [("c", 0, 2, 2)]], [2, 3, 6, 4, 1, 0, 7, 5]),
        ([[("a", 1, 2, 2), ("b", 0, 0, 3)], [("c", 0, 4, 1)]], [0, 1, 5, 2, 3, 4]),
        ([[("b", 0, 0, 3), ("a", 0, 0, 3)], [("c", 0, 0, 2)]], [3, 0, 6, 2, 1, 4, 7, 5]),
        ([[("a", 0, 3, 1), ("a", 2, 0, 2), ("a", 1, 0, 3)], [("c", 0, 2, 2)]], [4, 1, 6, 0, 3, 2, 7, 5]),
        ([[("a", 1, 3, 1), ("b", 1, 0, 4)], [("c", 0, 4, 1)]], [2, 1, 5, 3, 0, 4]),
    ]
    units = [plan.block_order(plan.unit_range(chunk, 2, 13)).tolist() for chunk in range(4)]
    assert units == [
        [4, 6, 5, 7],
        [8, 10, 9, 11, 12, 14, 13, 15],
        [16, 18, 17, 19, 20, -1, 21, -1],
        [22, 24, 23, 25],
    ]


def test_units_in_another_order_are_refused_in_one_sentence():
    plan = plan_of(["a"], [[64]], unit_rows=3, units_per_step=2, chunk_units=2)
    blocks = [pa.table({"unit": np.repeat([number], 3)}) for number in (1, 5, 3)]
    workers = ingest.worker_units(blocks, plan, range(4), 1, 2)
    assert list(next(workers)) == [1]
    with pytest.raises(
        RuntimeError, match=r"^Worker 1 expected units \[3\] for step 1 and received \[5\]: the data starts"
    ):
        next(workers)
    with pytest.raises(RuntimeError, match=r"^Worker 1 expected units \[7\] for step 3 and received \[\]: "):
        next(ingest.worker_units([], plan, range(3, 4), 1, 2))


def test_row_groups_of_one_row_work():
    plan = plan_of(["a"], [[1] * 20], 3, 2, 2)
    used = sum(steps_of(plan, 0, plan.steps_per_epoch), [])
    assert plan.steps_per_epoch == 3 and len(set(used)) == 18


def test_files_without_rows_do_not_shift_the_others():
    plan = plan_of(["a", "empty", "b"], [[5, 5], [], [5]], 1, 1, 4)
    expected = {("/data", n, g, r) for n, g in (("a", 0), ("a", 1), ("b", 0)) for r in range(5)}
    assert set(sum(steps_of(plan, 0, 15), [])) == rows_of(plan) == expected


def test_no_steps_left_is_no_work(plan):
    assert len(plan.chunk_range(5, 5)) == 0


# ---- from a manifest


def test_a_run_is_planned_from_the_manifest_and_the_recipe(build_manifest):
    config = TrainingConfig(global_batch_size=32, units_per_step=2, seed=5, latents_uri="/a")
    plan = ingest.plan_run({"/a": build_manifest((64, 64, 10))}, config)
    assert (plan.unit_rows, plan.units_per_step, plan.seed, plan.num_rows) == (16, 2, 5, 138)
    assert plan.steps_per_epoch == 4 and plan.sources[0].file_names.to_pylist() == ["0.parquet"]


def test_a_worker_plans_from_the_head_of_the_manifest(latents_uri):
    """The same steps, blocks and units, without a file."""
    config = TrainingConfig(global_batch_size=8, units_per_step=4, latents_uri=latents_uri, num_training_workers=(2, 3))
    whole, head = (ingest.plan_run(ingest.read_manifests(config, heads), config) for heads in (False, True))
    assert (head.steps_per_epoch, head.block_steps, head.chunk_units) == (5, whole.block_steps, whole.chunk_units)
    for rank in range(3):
        units = [[list(plan.units_of_worker(step, 3, rank, 3)) for step in range(3, 20)] for plan in (whole, head)]
        assert units[0] == units[1]


def test_the_files_of_a_run_are_compared_by_the_sum_of_earlier_versions(build_manifest):
    manifest = build_manifest((64, 64, 3))
    for files in (manifest.files, [], [("a", [1]), ("ü", [])], [("b", [64, 2])] * 1001):
        expected = zlib.crc32(json.dumps(files).encode())
        assert run_setup.files_crc32(types.SimpleNamespace(files=files)) == expected


def test_the_order_of_a_large_epoch_is_made_once(monkeypatch):
    """And lies in the object store of each node, as do the names of files."""
    store = []
    monkeypatch.setattr(ingest, "OWN_ORDER", 10)
    monkeypatch.setattr(ray, "put", lambda value: store.append(value) or len(store) - 1)
    monkeypatch.setattr(ray, "get", lambda ref: store[ref])

    def remote(function):
        return types.SimpleNamespace(remote=lambda plan, epoch: ray.put(function(store[plan], epoch)))

    monkeypatch.setattr(ray, "remote", remote)
    plan = plan_of(["a", "b"], [[64] * 15] * 2, 8, 2, 6)
    shared = store[plan.shared(range(plan.chunks_per_epoch - 1, plan.chunks_per_epoch + 1))]
    assert sorted(shared.orders) == [0, 1]
    made = len(store)
    assert steps_of(shared, 100, 140) == steps_of(plan, 100, 140) and len(store) == made
    small = plan_of(["a"], [[64]], 8, 2, 6)
    assert store[small.shared(range(9))] is small
    buffers = []
    inband = pickle.dumps(plan, protocol=5, buffer_callback=buffers.append)
    assert len(inband) < 2_500 and len(buffers) >= 3


def test_the_plan_does_not_depend_on_workers_or_micro_batches(build_manifest):
    manifests = {"/a": build_manifest((64, 64))}
    plans = [
        ingest.plan_run(manifests, TrainingConfig(global_batch_size=32, units_per_step=4, latents_uri="/a", **values))
        for values in ({}, {"num_training_workers": 4}, {"num_training_workers": (1, 2), "micro_batch_size": 4})
    ]
    assert steps_of(plans[0], 0, 9) == steps_of(plans[1], 0, 9) == steps_of(plans[2], 0, 9)


@pytest.mark.parametrize(
    ("job", "workers", "steps"),
    [({}, 1, 6), ({}, 2, 3), ({}, 8, 1), ({"online": {"seed": 0}}, 1, 1)],
    ids=["stored", "for two workers", "for eight", "online"],
)
def test_chunks_are_sized_by_bytes_and_blocks_are_as_large_where_they_can(build_manifest, job, workers, steps):
    """174 kB a row, as Stable Diffusion 2 with 1024-wide captions: a few hundred rows a chunk."""
    shapes = {"image_latents_256": [2, 4, 32, 32], "caption_embeddings": [77, 1024]}
    config = TrainingConfig(global_batch_size=64 * workers, units_per_step=workers, latents_uri="/a", resolution=256)
    manifest = build_manifest([64] * 1000, shapes=shapes, job={"validation_share": 0.0, **job})
    plan = ingest.plan_run({"/a": manifest}, config)
    assert 0.5 < plan.chunk_units * 64 * (16384 + 157696) / ingest.CHUNK_BYTES <= 1
    assert plan.block_steps == steps


def test_small_units_travel_together(build_manifest):
    config = TrainingConfig(global_batch_size=32, units_per_step=2, latents_uri="/a")
    plan = ingest.plan_run({"/a": build_manifest([64] * 1000)}, config)
    assert plan.block_steps == 8 and plan.chunk_units % 16 == 0


def test_blocks_are_joined_where_ray_data_would_split_them():
    """Ray Data splits what a stage makes at 1.5 times its target."""

    class Rows:
        context = types.SimpleNamespace(target_max_block_size=32 * 2**20)

        def repartition(self, **options):
            return options

    rows, plan = Rows(), plan_of(["a"], [[64] * 9], unit_rows=256, units_per_step=1, chunk_units=1)
    assert ingest.join_blocks(rows, plan, row_bytes=100_000) is rows
    assert ingest.join_blocks(rows, plan, row_bytes=223_317) == {"target_num_rows_per_block": 256, "strict": True}


def test_too_few_rows_for_one_batch_is_one_sentence(build_manifest):
    with pytest.raises(ValueError) as error:
        config = TrainingConfig(global_batch_size=64, latents_uri="/data/latents")
        ingest.plan_run({"/data/latents": build_manifest((30, 33))}, config)
    assert str(error.value) == (
        "global_batch_size=64 is more than the 63 rows of /data/latents can fill: make it smaller, or encode more data."
    )


def test_data_sets_of_different_encoders_are_not_mixed(build_manifest):
    manifests = {"/a": build_manifest(), "/b": build_manifest(scaling_factor=0.7)}
    with pytest.raises(
        ValueError, match=r"latents_uri mixes /b with /a, which differ in scaling_factor \(0.7 and 0.5\)"
    ):
        ingest.check_mixture(manifests)


@pytest.mark.parametrize("indent", [None, 1])
def test_the_head_of_a_manifest_is_read_without_its_files(tmp_path, build_manifest, indent):
    """Of a large one not even the bytes: what follows the first ones here is no JSON."""
    manifest = build_manifest(job={"row_filter": 'a == "segments": ['})
    text = json.dumps(manifest.to_dict(), indent=indent)
    start, found, _ = text.rpartition('"segments": [')
    storage.write_text(tmp_path / "manifest.json", start + found + "x" * 3 * 2**20)
    head = ingest.read_head(str(tmp_path))
    assert dataclasses.replace(head, segments=[]) == dataclasses.replace(manifest, segments=[])
    assert head.to_dict() == {**manifest.to_dict(), "segments": head.segments} and head.files == []


# ---- reading what is planned


@pytest.fixture
def latents_uri(tmp_path, build_latents, build_manifest):
    return write_latents(tmp_path / "one", build_latents(40), build_manifest)


def write_latents(folder, table, build_manifest):
    """Two files, the first of 25 rows, in row groups of 10."""
    (folder / "data").mkdir(parents=True)
    files = []
    for name, part in (("a.parquet", table[:25]), ("b.parquet", table[25:])):
        pq.write_table(part, folder / "data" / name, row_group_size=10)
        row_groups = [min(10, len(part) - start) for start in range(0, len(part), 10)]
        files.append({"name": name, "row_groups": row_groups, "buckets": {"32+64": len(row_groups)}})
    segment = {**build_manifest().segments[0], "files": files, "read": 40, "written": 40, "buckets": {"32+64": 40}}
    storage.write_json(storage.join(folder, "manifest.json"), build_manifest(segments=[segment]).to_dict())
    return str(folder)


def read(plan, first, last):
    """What the reading tasks hand out, as one table."""
    chunks = plan.chunk_range(first, last)
    blocks = (
        ingest.read_blocks(plan, n, first, last, ingest.start_reading(plan, n, ingest.read_latents)) for n in chunks
    )
    return pa.concat_tables(itertools.chain.from_iterable(blocks))


def test_row_ranges_are_read_in_their_order(latents_uri):
    planned = [("b.parquet", 1, 2, 3), ("a.parquet", 2, 0, 5), ("b.parquet", 0, 9, 1), ("a.parquet", 0, 0, 2)]
    ranges = [ingest.RowRange(*rows) for rows in planned]
    found = ingest.read_row_ranges(ranges, [schema.ID, schema.EMBEDDINGS], f"{latents_uri}/data")
    assert found["id"].to_pylist() == [37, 38, 39, 20, 21, 22, 23, 24, 34, 0, 1]
    assert found.column_names == [schema.ID, schema.EMBEDDINGS]


@pytest.mark.parametrize("block_steps", [1, 2])
def test_the_rows_that_were_planned_are_read(latents_uri, build_latents, block_steps):
    files = [("a.parquet", [10, 10, 5]), ("b.parquet", [10, 5])]
    latents = schema.ColumnSpec("image_latents_64", (2, 4, 8, 8))
    source = dataclasses.replace(ingest.Source.of(latents_uri, files), latents=latents)
    plan = ingest.Plan([source], 4, 2, 4, seed=1, block_steps=block_steps)
    rows, ids = read(plan, 2, 8), build_latents(40)["id"].to_pylist()
    at = {(latents_uri, "a.parquet", g, r): ids[10 * g + r] for g in range(3) for r in range(10) if 10 * g + r < 25}
    at |= {
        (latents_uri, "b.parquet", g, r): ids[25 + 10 * g + r] for g in range(2) for r in range(10) if 10 * g + r < 15
    }
    travelling = dealt(plan, 2, 8)
    assert rows["id"].to_pylist() == [at[row] for _, unit in travelling for row in unit]
    assert rows["unit"].to_pylist() == np.repeat([number for number, _ in travelling], 4).tolist()
    assert all(rows["keep"].to_pylist())
    assert rows.column_names == ["id", "caption", "image_latents_64", "caption_embeddings", "keep", "unit"]
    expected = build_latents(40).take(rows["id"])
    for column in ("image_latents_64", "caption_embeddings", "caption"):
        assert rows[column].to_pylist() == expected[column].to_pylist()


def test_a_block_is_split_into_whole_units():
    block = pa.table({"unit": np.repeat([4, 6, -1], 3), "id": range(9)})
    found = ingest.split_units(block, 3)
    assert {number: rows["id"].to_pylist() for number, rows in found.items()} == {4: [0, 1, 2], 6: [3, 4, 5]}
    with pytest.raises(RuntimeError, match=r"A block of 6 rows holds parts of units: \[-1, 4, 6\]"):
        ingest.split_units(block[1:7], 3)


def numbered(plan):
    """`read` for chunks: rows that say where they come from, and are found where they were planned."""
    calls = []

    def read(row_ranges, source):
        calls.append(row_ranges)
        rows = [f"{name} {group} {first + row}" for name, group, first, count in row_ranges for row in range(count)]
        return pa.table({"row": rows})

    return read, calls


def read_all(plan, read, last=None):
    """The rows of an epoch's chunks in one task."""
    last = last or plan.steps_per_epoch
    chunks = plan.chunk_range(0, last)
    options = {"first_chunk": 0, "first_step": 0, "num_steps": last, "read": read}
    return ingest.read_chunks({"id": range(len(chunks))}, plan=plan, **options)


def test_chunks_are_read_while_an_earlier_one_is_used(plan):
    read, calls = numbered(plan)
    chunks = read_all(plan, read)
    first = next(chunks)
    ahead = [rows for chunk in range(1 + ingest.CHUNKS_AHEAD) for rows in plan.chunk_rows(chunk)[0][0]]
    while sum(map(len, calls)) < len(ahead):  # threads read them
        threading.Event().wait(0.001)
    assert sorted(rows for of_file in calls for rows in of_file) == sorted(ahead)
    found = pa.concat_tables([first, *chunks])["row"].to_pylist()
    expected = [row for _, unit in dealt(plan, 0, plan.steps_per_epoch) for row in unit]
    assert found == [f"{name} {group} {row}" for _, name, group, row in expected]


@pytest.fixture
def quickly_late(monkeypatch):
    monkeypatch.setattr(ingest, "LATE_SECONDS", 0.01)
    monkeypatch.setattr(ingest, "_seconds", [0.0])


def test_a_read_that_hangs_is_made_again(quickly_late, plan):
    """The first read of each file does not come back before all rows are there."""
    read, seen, done = numbered(plan)[0], set(), threading.Event()

    def hang_once(row_ranges, source):
        first = str(row_ranges) not in seen
        seen.add(str(row_ranges))
        if first:
            done.wait()
        return read(row_ranges, source)

    try:
        found = pa.concat_tables(read_all(plan, hang_once))
    finally:
        done.set()
    assert found.equals(pa.concat_tables(read_all(plan, read)))


@pytest.mark.parametrize(
    ("failures", "error", "raised"), [(2, OSError, None), (9, OSError, OSError), (1, KeyError, KeyError)]
)
def test_a_read_that_fails_is_repeated_some_times(failures, error, raised):
    """If a store may be the cause."""
    answers = iter([error("partly")] * failures + ["rows"] * 9)

    def read():
        answer = next(answers)
        if answer != "rows":
            raise answer
        return answer

    if raised:
        with pytest.raises(raised, match="partly"):
            ingest.read_repeatedly(read)
    else:
        assert ingest.read_repeatedly(read) == "rows"


def test_a_mixture_is_read_from_its_folders(tmp_path, build_latents, build_manifest):
    folders = [
        write_latents(tmp_path / name, build_latents(40, seed), build_manifest) for seed, name in enumerate("xy")
    ]
    config = TrainingConfig(
        latents_uri={folders[0]: 3, folders[1]: 1}, global_batch_size=8, units_per_step=2, validation_share=0
    )
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    rows = read(plan, 0, plan.steps_per_epoch)
    rows = rows.filter(pa.array(np.array(rows["unit"]) >= 0))
    second = set(build_latents(40, 1)["image_latents_64"].to_pylist())
    from_second = np.array([value in second for value in rows["image_latents_64"].to_pylist()])
    assert plan.steps_per_epoch == 6 and len(rows) == 48 and from_second.sum() == 12
    units = np.array(rows["unit"])
    assert all(from_second[units // 2 == step].sum() == 2 for step in range(6))
