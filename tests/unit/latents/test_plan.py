"""The plan's promises, over any data (hypothesis), and what it is made from. No Ray, no files."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.latents.manifest import DataSets
from helpers.latents.plan import CHUNK_BYTES, BucketRows, Files, Plan, Shape, Source, plan_run, sources_by_shape
from helpers.latents.read import worker_units
from helpers.production.checks.training import describe_shapes
from tests.unit.latents.test_golden_plans import SHAPES, make_manifest

SQUARE = schema.ColumnSpec("image_latents_64", SHAPES["image_latents_64"][1])
BUCKETS = ["32", "48x16", "32+64", "32+80x48", "48x16+80x48", "held out 32", "held out 48x16+80x48"]


def source(names, row_groups, proportion=1.0, uri="/data", number=0):
    """All rows of a data set, as squares of 64 pixels."""
    entries = [
        {"name": name, "row_groups": groups, "buckets": {"64": len(groups)}}
        for name, groups in zip(names, row_groups, strict=True)
    ]
    files = Files.of(uri, entries)
    rows = BucketRows(files.groups_of("64"), 0, int(files.group_rows.sum()), (number, 1))
    return Source(files, SQUARE, (rows,), proportion)


def plan_of(names, row_groups, unit_rows, units_per_step, chunk_units, seed=0, block_steps=1, uri="/data"):
    shapes = [Shape([source(names, row_groups, uri=uri)])]
    return Plan(shapes, unit_rows, units_per_step, chunk_units, seed, block_steps)


def made(files):
    """`(manifest, {"/a": its files})`"""
    manifest, entries = make_manifest([dict(file) for file in files])
    return manifest, Files.of("/a", entries)


@st.composite
def plans(draw, most_sources=3, **fixed):
    """One data set or several, files with row groups of any sizes, and units and chunks that need not fit them."""
    shares = draw(st.lists(st.integers(1, 20), min_size=1, max_size=most_sources))
    sources = []
    for number, share in enumerate(shares):
        row_groups = draw(st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=5))
        assume(sum(map(sum, row_groups)))
        names = [f"{i}.parquet" for i in range(len(row_groups))]
        sources.append(source(names, row_groups, share / sum(shares), f"/data-{number}", number))
    units_per_step = fixed.pop("units_per_step", None) or draw(st.sampled_from([1, 2, 4, 8]))
    block_steps = draw(st.integers(1, 3))
    whole = block_steps * units_per_step if block_steps > 1 else 1
    plan = Plan(
        [Shape(sources)],
        draw(st.integers(1, 12)),
        units_per_step,
        whole * draw(st.integers(1, 9)),
        draw(st.integers(0, 3)),
        block_steps,
    )
    assume(plan.steps_per_epoch >= 1)
    return plan


def one_set(manifest):
    return DataSets({"/a": manifest}, {"/a": 1.0})


@st.composite
def bucket_plans(draw, sizes=None, most_sources=2):
    """Rows of several shapes and sizes and held-out ones, some row groups of each; trained on at one size or two."""
    if sizes is None:
        sizes = draw(st.sampled_from([32, 64, {32: 0.5, 64: 0.5}, {32: 0.2, 64: 0.8}]))
    uris = [f"/data-{number}" for number in range(draw(st.integers(1, most_sources)))]
    shares = {uri: draw(st.integers(1, 5)) for uri in uris}
    config = TrainingConfig(latents_uri=shares, resolution=sizes)
    by_shape = {}
    for number, uri in enumerate(uris):
        groups = st.lists(st.integers(1, 30), min_size=1, max_size=4)
        file = st.lists(st.sampled_from(BUCKETS), unique=True, max_size=4).flatmap(
            lambda names, groups=groups: st.tuples(*(st.tuples(st.just(name), groups) for name in names))
        )
        files = draw(st.lists(file, min_size=1, max_size=4))
        manifest, entries = make_manifest([dict(file) for file in files])
        share, of_sizes = config.proportions[uri], config.resolution_shares
        for one in sources_by_shape(manifest, number, share, of_sizes, Files.of(uri, entries)):
            by_shape.setdefault(one.latents.name, []).append(one)
    shares = config.resolution_shares
    shapes = [Shape(sources, shares[sources[0].latents.resolution]) for sources in by_shape.values()]
    assume({shape.latents.resolution for shape in shapes} == set(config.resolutions))
    units_per_step, block_steps = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    plan = Plan(
        shapes,
        draw(st.integers(1, 6)),
        units_per_step,
        (block_steps * units_per_step if block_steps > 1 else 1) * draw(st.integers(1, 9)),
        draw(st.integers(0, 3)),
        block_steps,
    )
    assume(plan.steps_per_epoch >= 1)
    return plan


def rows_of(plan):
    """Every row of the data as (data set, file, row group, row)."""
    return {
        (source.files.uri, *source.files.row_range(group, 0, 0)[:2], row)
        for source in plan.sources
        for group, rows in enumerate(source.files.group_rows)
        for row in range(rows)
    }


def dealt(plan, first_step, end_step):
    """[(unit number, its rows)] in the order in which they travel: what a reader must hand out."""
    travelling = []
    for chunk in plan.chunk_range(first_step, end_step):
        ranges, permutation = plan.chunk_rows(chunk)
        rows = [
            (source.files.uri, name, group, start + i)
            for source, of_source in ranges
            for name, group, start, count, *_ in of_source
            for i in range(count)
        ]
        first_unit = plan.unit_range(chunk).start
        for unit in plan.blocks(chunk, first_step, end_step).ravel().tolist():
            start = max(0, unit - first_unit) * plan.unit_rows
            travelling.append((unit, [rows[i] for i in permutation[start : start + plan.unit_rows]]))
    if first_step < end_step:
        travelling += [(-1, travelling[0][1])] * (plan.padding_blocks(first_step, end_step) * plan.block_steps)
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
    workers = [worker_units(shard, plan, steps, rank, num_workers) for rank, shard in enumerate(shards)]
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
    assert len(used) >= sum(source.num_rows for source in plan.sources) - plan.batch_rows + 1


@settings(max_examples=40, deadline=None)
@given(plans())
def test_an_epoch_of_a_mixture_ends_with_its_first_source(plan):
    sizes = np.array([source.num_rows for source in plan.sources])
    (shape,) = plan.shapes
    assert (shape.rows_by_source(plan.steps_per_epoch * plan.batch_rows) <= sizes).all()
    assert (shape.rows_by_source((plan.steps_per_epoch + 1) * plan.batch_rows) > sizes).any()


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_proportions_hold_in_every_window_of_an_epoch(plan, data):
    """Within two rows, and a thousandth of a percent for their rounding."""
    used = sum(steps_of(plan, 0, plan.steps_per_epoch), [])
    first = data.draw(st.integers(0, len(used)))
    window = used[first : data.draw(st.integers(first, len(used)))]
    for source_ in plan.sources:
        found = sum(uri == source_.files.uri for uri, *_ in window)
        assert abs(found - source_.proportion * len(window)) <= 2 + 1e-4 * len(window)


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


# ---- shapes


def bucket_of(row, plan):
    """The bucket of a row (data set, file, row group, row)."""
    uri, name, group, _ = row
    files = next(source.files for source in plan.sources if source.files.uri == uri)
    number = files.first_group[files.names.to_pylist().index(name)] + group
    return files.bucket_names[files.group_buckets[number]]


@settings(max_examples=30, deadline=None)
@given(bucket_plans())
def test_a_step_trains_on_one_shape_and_on_no_held_out_row(plan):
    """Each of its rows has latents of it; which shape it is depends on the step's number alone."""
    for step, batch in enumerate(steps_of(plan, 0, 2 * plan.steps_per_epoch)):
        of_rows = {bucket_of(row, plan) for row in batch}
        assert not any(bucket.startswith("held out") for bucket in of_rows)
        assert all(plan.latents_at(step).name in schema.bucket_columns(bucket) for bucket in of_rows)


@settings(max_examples=30, deadline=None)
@given(bucket_plans(), st.data())
def test_shapes_and_resolutions_hold_in_every_window(plan, data):
    """Of steps, within a few: three to a resolution's share, four to a shape's."""
    chosen = [plan.latents_at(step) for step in range(plan.steps_per_epoch)]
    first = data.draw(st.integers(0, len(chosen)))
    window = chosen[first : data.draw(st.integers(first, len(chosen)))]
    for shape, steps in zip(plan.shapes, plan.shape_steps, strict=True):
        found = sum(latents.name == shape.latents.name for latents in window)
        assert abs(found - steps / len(chosen) * len(window)) <= 4
    for size, share in {shape.latents.resolution: shape.share for shape in plan.shapes}.items():
        found = sum(latents.resolution == size for latents in window)
        assert abs(found - share * len(window)) <= 3


@settings(max_examples=30, deadline=None)
@given(bucket_plans(sizes=64, most_sources=1))
def test_an_epoch_leaves_out_less_than_one_batch_of_each_shape(plan):
    for shape in describe_shapes(plan):
        assert 0 <= shape["left_over"] < plan.batch_rows and shape["steps"] == shape["rows"] // plan.batch_rows


def test_small_pictures_leave_large_ones_to_large_sizes():
    """All of 1,000 rows are used at 32 or 64 pixels, though a quarter is too small for 64."""
    manifest, files = made([{"32": [50] * 5, "32+64": [50] * 15}])
    for share, expected in ((0.75, {"32x32": 25, "64x64": 75}), (0.5, {"32x32": 50, "64x64": 50})):
        config = TrainingConfig(latents_uri="/a", resolution={32: 1 - share, 64: share}, global_batch_size=10)
        plan = plan_run(one_set(manifest), config, {"/a": files})
        assert {one["shape"]: one["steps"] for one in describe_shapes(plan)} == expected
    config = TrainingConfig(latents_uri="/a", resolution={32: 0.1, 64: 0.9}, global_batch_size=10)
    left_over = [one["left_over"] for one in describe_shapes(plan_run(one_set(manifest), config))]
    assert left_over == [170, 0]  # too small for 64 pixels, and not needed at 32


def test_data_sets_mix_within_a_batch_of_one_shape():
    """Three to one, in batches of both shapes, though the smaller part of the rows is wide."""
    manifest, files = made([{"32+64": [50] * 12, "32+80x48": [50] * 6}])
    config = TrainingConfig(latents_uri={"/a": 3, "/b": 1}, resolution=64, global_batch_size=20)
    data = DataSets(dict.fromkeys(["/a", "/b"], manifest), config.proportions)
    plan = plan_run(data, config, {"/a": files, "/b": dataclasses.replace(files, uri="/b")})
    for step, batch in enumerate(steps_of(plan, 0, plan.steps_per_epoch)):
        assert sum(uri == "/a" for uri, *_ in batch) == 15, plan.latents_at(step)
    assert plan.shape_steps.tolist() == [40, 20]


def test_a_mixture_keeps_its_proportions_where_shapes_differ():
    """One to one, in all shapes together, though one data set is larger and has all the wide pictures."""
    (wide, files_of_wide), (square, files_of_square) = (
        made([{"32+64": [50] * 40, "32+80x48": [50] * 40}]),
        made([{"32+64": [50] * 20}]),
    )
    config = TrainingConfig(latents_uri={"/a": 1, "/b": 1}, resolution=64, global_batch_size=20)
    data = DataSets({"/a": wide, "/b": square}, config.proportions)
    plan = plan_run(data, config, {"/a": files_of_wide, "/b": dataclasses.replace(files_of_square, uri="/b")})
    used = sum(steps_of(plan, 0, plan.steps_per_epoch), [])
    assert len(used) == 2000 and sum(uri == "/a" for uri, *_ in used) == pytest.approx(1000, abs=20)
    assert [one["left_over"] for one in describe_shapes(plan)] == pytest.approx([1500, 1500], abs=20)


def test_a_size_of_which_all_rows_are_held_out_is_refused():
    manifest, _ = made([{"32": [64, 64], "held out 32+64": [3]}])
    config = TrainingConfig(latents_uri="/a", resolution={32: 0.5, 64: 0.5}, global_batch_size=16)
    with pytest.raises(
        ValueError, match=r"^global_batch_size=16 is more than the rows of /a \(128 of 32x32, 0 of 64x64\) "
    ):
        plan_run(one_set(manifest), config)


def test_a_worker_plans_without_the_files():
    """The same steps, shapes, blocks and units."""
    manifest, files = made([{"32": [9] * 5, "32+64": [7] * 5}, {"32+80x48": [30], "48x16": [31]}])
    config = TrainingConfig(
        resolution={32: 0.5, 64: 0.5},
        latents_uri="/a",
        global_batch_size=6,
        units_per_step=3,
        num_training_workers=(2, 3),
    )
    whole, head = plan_run(one_set(manifest), config, {"/a": files}), plan_run(one_set(manifest), config)
    assert head.steps_per_epoch == whole.steps_per_epoch > 5
    assert [head.latents_at(step) for step in range(99)] == [whole.latents_at(step) for step in range(99)]
    for rank in range(3):
        units = [[list(plan.units_of_worker(step, 3, rank, 3)) for step in range(3, 20)] for plan in (whole, head)]
        assert units[0] == units[1]


def test_a_shape_that_fills_no_batch_is_left_out():
    manifest, _ = made([{"32+64": [64], "32+80x48": [10]}])
    config = TrainingConfig(latents_uri="/a", resolution=64, global_batch_size=16)
    assert describe_shapes(plan_run(one_set(manifest), config)) == [
        {"shape": "64x64", "rows": 64, "steps": 4, "left_over": 0},
        {"shape": "80x48", "rows": 10, "steps": 0, "left_over": 10},
    ]
    with pytest.raises(ValueError) as error:
        plan_run(one_set(manifest), dataclasses.replace(config, global_batch_size=128))
    assert str(error.value) == (
        "global_batch_size=128 is more than the rows of /a (64 of 64x64, 10 of 80x48) can fill: make it smaller, or "
        "encode more data."
    )


def test_a_block_holds_one_place_of_consecutive_steps():
    plan = plan_of(["a"], [[64] * 3], 4, 2, 12, block_steps=3)
    numbers = [number for number, _ in dealt(plan, 0, 6)]
    assert numbers == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_a_unit_tells_its_block_in_any_epoch():
    """With five steps an epoch, two of them to a block: the drawing in `Plan`."""
    plan = plan_of(["a"], [[60]], 4, 3, 12, block_steps=2)
    assert plan.steps_per_epoch == 5 and plan.units_per_epoch == 15
    blocks = [block for chunk in range(4) for block in plan.blocks(chunk, 0, 10).tolist()]
    assert blocks[:11] == [
        [0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11], [12, -1], [13, -1], [14, -1], [15, 18], [16, 19]
    ]  # fmt: skip
    numbers, slots = plan.block_table(range(30), 0)
    assert all(blocks[number][slot] == unit for unit, (number, slot) in enumerate(zip(numbers, slots, strict=True)))
    assert [list(plan.units_of_worker(step, 0, 0, 2)) for step in range(3)] == [[0, 2], [3, 5], [7]]


def test_padding_of_a_block_is_marked():
    plan = plan_of(["a"], [[36]], 4, 2, 6, block_steps=3)
    assert plan.steps_per_epoch == 4
    assert [number for number, _ in dealt(plan, 2, 4)] == [-1, -1, 4, -1, -1, 5, 6, -1, -1, 7, -1, -1]


@pytest.fixture(scope="module")
def plan():
    return plan_of(["a", "b", "c"], [[64] * 5, [64, 7], [1] * 9], 8, 2, 6)


def test_every_epoch_and_every_seed_has_an_order_of_its_own(plan):
    def first(seed, epoch):
        other = Plan(plan.shapes, 8, 2, 6, seed)
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


def test_units_in_another_order_are_refused_in_one_sentence():
    plan = plan_of(["a"], [[64]], unit_rows=3, units_per_step=2, chunk_units=2)
    blocks = [pa.table({"unit": np.repeat([number], 3)}) for number in (1, 5, 3)]
    workers = worker_units(blocks, plan, range(4), 1, 2)
    assert list(next(workers)) == [1]
    with pytest.raises(
        RuntimeError, match=r"^Worker 1 expected units \[3\] for step 1 and received \[5\]: the data starts"
    ):
        next(workers)
    with pytest.raises(RuntimeError, match=r"^Worker 1 expected units \[7\] for step 3 and received \[\]: "):
        next(worker_units([], plan, range(3, 4), 1, 2))


def test_files_without_rows_do_not_shift_the_others():
    plan = plan_of(["a", "empty", "b"], [[5, 5], [], [5]], 1, 1, 4)
    expected = {("/data", n, g, r) for n, g in (("a", 0), ("a", 1), ("b", 0)) for r in range(5)}
    assert set(sum(steps_of(plan, 0, 15), [])) == rows_of(plan) == expected


def test_no_steps_left_is_no_work(plan):
    assert len(plan.chunk_range(5, 5)) == 0


# ---- from a manifest


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
    plan = plan_run(one_set(manifest), config)
    assert 0.5 < plan.chunk_units * 64 * (16384 + 157696) / CHUNK_BYTES <= 1
    assert plan.block_steps == steps


def test_small_units_travel_together(build_manifest):
    config = TrainingConfig(global_batch_size=32, units_per_step=2, latents_uri="/a")
    plan = plan_run(one_set(build_manifest([64] * 1000)), config)
    assert plan.block_steps == 8 and plan.chunk_units % 16 == 0


def test_too_few_rows_for_one_batch_is_one_sentence(build_manifest):
    with pytest.raises(ValueError) as error:
        config = TrainingConfig(global_batch_size=64, latents_uri="/data/latents")
        plan_run(DataSets({"/data/latents": build_manifest((30, 33))}, config.proportions), config)
    assert str(error.value) == (
        "global_batch_size=64 is more than the rows of /data/latents (63 of 64x64) can fill: make it smaller, or "
        "encode more data."
    )
