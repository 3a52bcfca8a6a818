"""Reading what is planned: the rows, their order, reads that fail or are late. No Ray."""

import pickle
import threading
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from helpers.config import TrainingConfig
from helpers.latents import read, schema
from helpers.latents.manifest import write_manifest
from helpers.latents.plan import RowRange, read_files
from helpers.latents.read import (
    CHUNKS_AHEAD,
    join_blocks,
    latents_reader,
    read_repeatedly,
    read_row_ranges,
    share_plan,
    split_units,
)
from helpers.production.data import hedged
from tests.latents import build_segment, plan_for, read_steps
from tests.unit.latents.test_plan import dealt, plan_of


@pytest.fixture(scope="module")
def plan():
    return plan_of(["a", "b", "c"], [[64] * 5, [64, 7], [1] * 9], 8, 2, 6)


@pytest.fixture
def latents_uri(tmp_path, build_latents, build_manifest):
    return write_latents(tmp_path / "one", build_latents(40), build_manifest)


def write_latents(folder, table, build_manifest):
    """Two files, the first of 25 rows, in row groups of 10."""
    (folder / "data").mkdir(parents=True)
    files = []
    for name, part in (("a.parquet", table[:25]), ("b.parquet", table[25:])):
        pq.write_table(part, folder / "data" / name, row_group_size=10)
        files.append((name, [min(10, len(part) - start) for start in range(0, len(part), 10)]))
    segment = build_segment(files)
    write_manifest(str(folder), build_manifest(segments=[segment]), [segment])
    return str(folder)


def test_row_ranges_are_read_in_their_order(latents_uri):
    planned = [
        ("b.parquet", 1, 2, 3, 1),
        ("a.parquet", 2, 0, 5, 0),
        ("b.parquet", 0, 9, 1, 1),
        ("a.parquet", 0, 0, 2, 0),
    ]
    ranges = [RowRange(*rows) for rows in planned]
    found = read_row_ranges(ranges, [schema.ID, schema.EMBEDDINGS], read_files(latents_uri))
    assert found["id"].to_pylist() == [37, 38, 39, 20, 21, 22, 23, 24, 34, 0, 1]
    assert found.column_names == [schema.ID, schema.EMBEDDINGS]


@pytest.mark.parametrize("block_steps", [1, 2])
def test_the_rows_that_were_planned_are_read(latents_uri, build_latents, block_steps):
    plan = plan_of(
        ["a.parquet", "b.parquet"], [[10, 10, 5], [10, 5]], 4, 2, 4, seed=1, block_steps=block_steps, uri=latents_uri
    )
    rows = pa.concat_tables(read_steps(plan, latents_reader(plan), 2, 8))
    ids = build_latents(40)["id"].to_pylist()
    places = {(latents_uri, "a.parquet", g, r): ids[10 * g + r] for g in range(3) for r in range(10) if 10 * g + r < 25}
    places |= {
        (latents_uri, "b.parquet", g, r): ids[25 + 10 * g + r] for g in range(2) for r in range(10) if 10 * g + r < 15
    }
    travelling = dealt(plan, 2, 8)
    assert rows["id"].to_pylist() == [places[row] for _, unit in travelling for row in unit]
    assert rows["unit"].to_pylist() == np.repeat([number for number, _ in travelling], 4).tolist()
    assert rows.column_names == ["id", "caption", "image_latents_64", "caption_embeddings", "unit"]
    expected = build_latents(40).take(rows["id"])
    for column in ("image_latents_64", "caption_embeddings", "caption"):
        assert rows[column].to_pylist() == expected[column].to_pylist()


def test_a_block_is_split_into_whole_units():
    block = pa.table({"unit": np.repeat([4, 6, -1], 3), "id": range(9)})
    found = split_units(block, 3)
    assert {number: rows["id"].to_pylist() for number, rows in found.items()} == {4: [0, 1, 2], 6: [3, 4, 5]}
    with pytest.raises(RuntimeError, match=r"A block of 6 rows holds parts of units: \[-1, 4, 6\]"):
        split_units(block[1:7], 3)


def numbered(plan):
    """`read` for chunks: rows that say where they come from, and are found where they were planned."""
    calls = []

    def read(row_ranges, source):
        calls.append(row_ranges)
        rows = [f"{name} {group} {first + row}" for name, group, first, count, *_ in row_ranges for row in range(count)]
        return pa.table({"row": rows})

    return read, calls


def test_chunks_are_read_while_an_earlier_one_is_used(plan):
    read_rows, calls = numbered(plan)
    chunks = read_steps(plan, read_rows)
    first = next(chunks)
    ahead = [rows for chunk in range(1 + CHUNKS_AHEAD) for rows in plan.chunk_rows(chunk)[0][0][1]]
    while sum(map(len, calls)) < len(ahead):  # threads read them
        threading.Event().wait(0.001)
    assert sorted(rows for of_file in calls for rows in of_file) == sorted(ahead)
    found = pa.concat_tables([first, *chunks])["row"].to_pylist()
    expected = [row for _, unit in dealt(plan, 0, plan.steps_per_epoch) for row in unit]
    assert found == [f"{name} {group} {row}" for _, name, group, row in expected]


@pytest.mark.parametrize(
    ("failures", "error", "raised"), [(2, OSError, None), (9, OSError, OSError), (1, KeyError, KeyError)]
)
@pytest.mark.parametrize("repeat", [read_repeatedly, hedged.read_hedged])
def test_a_read_that_fails_is_repeated_some_times(repeat, failures, error, raised):
    """If a store may be the cause."""
    answers = iter([error("partly")] * failures + ["rows"] * 9)

    def answer_next():
        answer = next(answers)
        if answer != "rows":
            raise answer
        return answer

    if raised:
        with pytest.raises(raised, match="partly"):
            repeat(answer_next)
    else:
        assert repeat(answer_next) == "rows"


def test_a_hedged_read_that_hangs_is_made_again(monkeypatch, plan):
    """The first read of each file does not come back before all rows are there."""
    monkeypatch.setattr(hedged, "LATE_SECONDS", 0.01)
    monkeypatch.setattr(hedged, "_seconds", [0.0])
    read_rows, seen, done = numbered(plan)[0], set(), threading.Event()

    def hang_once(row_ranges, source):
        first = str(row_ranges) not in seen
        seen.add(str(row_ranges))
        if first:
            done.wait()
        return read_rows(row_ranges, source)

    try:
        found = pa.concat_tables(read_steps(plan, hedged.wrap(hang_once)))
    finally:
        done.set()
    assert found.equals(pa.concat_tables(read_steps(plan, read_rows)))


def test_ray_datas_loop_is_paused_only_while_it_busy_waits(monkeypatch):
    now, callback = 0.0, read.SchedulerCallback()
    monkeypatch.setenv(read.LOCAL_RAY, "1")

    def sleep(seconds):
        nonlocal now
        now += seconds

    def pauses(seconds_of_a_step):
        for _ in range(20):
            sleep(seconds_of_a_step)
            before = now
            callback.on_execution_step(None)
            yield now - before

    monkeypatch.setattr(read, "time", types.SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    assert list(pauses(0.001))[-1] == pytest.approx(0.05)
    assert list(pauses(0.1))[-1] < 0.001


def test_a_mixture_is_read_from_its_folders(tmp_path, build_latents, build_manifest):
    folders = [
        write_latents(tmp_path / name, build_latents(40, seed), build_manifest) for seed, name in enumerate("xy")
    ]
    config = TrainingConfig(
        latents_uri={folders[0]: 3, folders[1]: 1}, global_batch_size=8, units_per_step=2, validation_share=0
    )
    plan = plan_for(config)
    rows = pa.concat_tables(read_steps(plan, latents_reader(plan)))
    rows = rows.filter(pa.array(np.array(rows["unit"]) >= 0))
    second = set(build_latents(40, 1)["image_latents_64"].to_pylist())
    from_second = np.array([value in second for value in rows["image_latents_64"].to_pylist()])
    assert plan.steps_per_epoch == 6 and len(rows) == 48 and from_second.sum() == 12
    units = np.array(rows["unit"])
    assert all(from_second[units // 2 == step].sum() == 2 for step in range(6))


def test_the_order_of_a_large_epoch_is_made_once(monkeypatch):
    """And lies in the object store of each node, as do the names of files."""
    store = []
    monkeypatch.setattr(read, "OWN_ORDER", 10)
    monkeypatch.setattr(ray, "put", lambda value: store.append(value) or len(store) - 1)

    def remote(function):
        return types.SimpleNamespace(remote=lambda plan, epoch: ray.put(function(store[plan], epoch)))

    monkeypatch.setattr(ray, "remote", remote)
    plan = plan_of(["a", "b"], [[64] * 15] * 2, 8, 2, 6)
    _, orders = store[share_plan(plan, range(plan.chunks_per_epoch - 1, plan.chunks_per_epoch + 1))]
    assert sorted(orders) == [0, 1]
    for chunk in (0, plan.chunks_per_epoch + 1):
        shared = plan.chunk_rows(chunk, store[orders[chunk // plan.chunks_per_epoch]])
        alone = plan.chunk_rows(chunk)
        assert shared[0] == alone[0] and (shared[1] == alone[1]).all()
    small = plan_of(["a"], [[64]], 8, 2, 6)
    assert store[share_plan(small, range(9))] == (small, {})
    buffers = []
    inband = pickle.dumps(plan, protocol=5, buffer_callback=buffers.append)
    assert len(inband) < 2_500 and len(buffers) >= 3


def test_blocks_are_joined_where_ray_data_would_split_them():
    """Ray Data splits what a stage makes at 1.5 times its target."""

    class Rows:
        context = types.SimpleNamespace(target_max_block_size=32 * 2**20)

        def repartition(self, **options):
            return options

    rows, plan = Rows(), plan_of(["a"], [[64] * 9], unit_rows=256, units_per_step=1, chunk_units=1)
    assert join_blocks(rows, plan, row_bytes=100_000) is rows
    assert join_blocks(rows, plan, row_bytes=223_317) == {"target_num_rows_per_block": 256, "strict": True}
