"""The latents that an online run keeps: what is committed when, and what the epochs after the first read. No Ray."""

import collections
import dataclasses
import functools
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import storage
from helpers.config import TrainingConfig
from helpers.encode import encoder
from helpers.latents import held_out, read, schema
from helpers.latents.manifest import MANIFEST, read_files, read_manifest, write_manifest
from helpers.latents.plan import Plan, Shape
from helpers.online import prepare
from helpers.online.config import OnlineConfig
from helpers.train import dataset, kept, resume, sources
from tests.latents import build_segment, plan_for, read_steps
from tests.unit.latents.test_plan import bucket_plans, dealt, plans, rows_of

RAW = OnlineConfig(keep_latents=True)
GROUPS = [7, 20, 1, 13, 5, 9, 3]
ROWS = sum(GROUPS)
MASKED, REJECTED = range(0, ROWS, 9), range(4, ROWS, 17)
PER_EPOCH = ROWS // 8


class Killed(BaseException):
    pass


@settings(deadline=None, max_examples=25)
@given(st.one_of(plans(), bucket_plans()))
def test_what_an_epoch_leaves_over_is_all_the_rest(plan):
    rests = kept.left_over(plan)
    assert all(number >= plan.units_per_epoch for number in rests)
    used = [row for unit, rows in dealt(plan, 0, plan.steps_per_epoch) if unit >= 0 for row in rows]
    for rest in rests.values():
        assert rest.block_rows == plan.block_rows
        used += [row for unit, rows in dealt(rest, 0, rest.steps_per_epoch) if unit >= 0 for row in rows]
    counts = collections.Counter(used)
    assert set(counts.values()) == {1}
    in_pools = {row for source in plan.sources for row in rows_in(source)}
    assert in_pools == counts.keys() and counts.keys() <= rows_of(plan)


def rows_in(source):
    """The rows that a source gives in an epoch."""
    plan = Plan([Shape([source])], 1, 1, 1, 0)
    ((order,),) = plan.epoch_orders(0)
    ranges = [source.files.row_range(*one) for one in order.ranges(0, sum(shape.num_rows for shape in plan.shapes))]
    return {(source.files.uri, *one[:2], row) for one in ranges for row in range(one[2], one[2] + one[3])}


class Blocks:
    """Stands for a Ray dataset: blocks that are made as they are asked for."""

    def __init__(self, blocks):
        self.blocks = blocks

    def map_batches(self, function, *, fn_kwargs, batch_size, batch_format, num_cpus):
        return Blocks(function(block, **fn_kwargs) for block in self.blocks)

    def iter_batches(self, **options):
        yield from self.blocks


def blocks_of(plan, first_step, end_step, read_rows):
    return Blocks(read_steps(plan, read_rows, first_step, end_step))


class Run:
    """An online run whose trainer only notes its rows: driver, stream and checkpoints, without Ray."""

    def __init__(self, folder, rows, manifest, patch, max_steps=3 * PER_EPOCH, **changes):
        self.rows, self.max_steps = rows, max_steps
        self.encoded, self.steps, self.saved, self.died = [], {}, 0, set()
        values = {"storage": str(folder), "latents_uri": str(folder / "online"), "run_name": "kept", "resolution": 32}
        values |= {
            "global_batch_size": 8,
            "units_per_step": 2,
            "max_steps": max_steps,
            "checkpoint_every": 3,
            "validate_every": 0,
        }
        self.config = TrainingConfig(**{**values, **changes})
        self.manifest = manifest
        write_manifest(self.config.latents_uri, manifest, [build_segment([("0.parquet", GROUPS)])])
        patch.setattr(resume, "last_step", lambda config: self.saved)
        patch.setattr(dataset, "choose_resume_point", lambda config: {"step": self.saved})
        patch.setattr(dataset, "join_blocks", lambda rows, *_: rows)
        patch.setattr(held_out, "of_run", lambda config: None)

    def stream(self, plan, first_step, end_step):
        def read_rows(ranges, source):
            starts = np.concatenate([[0], np.cumsum(GROUPS)])
            ids = np.concatenate([starts[one[1]] + one[2] + np.arange(one[3]) for one in ranges])
            self.encoded += ids.tolist()
            return self.rows.take(pa.array(ids))

        return blocks_of(plan, first_step, end_step, read_rows)

    def stored(self, plan, first_step, end_step):
        return blocks_of(plan, first_step, end_step, read.latents_reader(plan))

    def fit(self, source, die_at=None):
        begin, plan = source.first_step, plan_for(source.config)
        if getattr(source.stream, "func", None) is read.latents_dataset:
            source.stream = self.stored
        steps = range(self.saved - begin, source.end_step - begin)
        blocks = source.datasets["train"]().iter_batches()
        for step, units in zip(steps, read.worker_units(blocks, plan, steps, 0, 1), strict=True):
            if step + begin == die_at and die_at not in self.died:
                self.died.add(die_at)
                raise Killed
            found = pa.concat_tables([one.select(["id", "keep", "image_latents_32"]) for one in units.values()])
            assert self.steps.setdefault(step + begin, found).equals(found)  # also of a step that is done again
            if (step + begin + 1) % self.config.checkpoint_every == 0 or step + begin + 1 == source.end_step:
                self.saved = step + begin + 1

    def go(self, die_at=None):
        for source in kept.run_sources(RAW, self.config, self.stream):
            self.fit(source, die_at)
        return self

    def go_on_until_done(self, die_at=None):
        """The same command again and again; how often it was killed."""
        for kills in range(5):
            try:
                self.go(die_at)
                return kills
            except Killed:
                continue


@pytest.fixture(scope="module")
def rows(build_latents):
    """Every row as an encoder gives it."""
    reasons = ["broken image" if number in REJECTED else "" for number in range(ROWS)]
    columns = {
        schema.REASON: pa.array(reasons),
        schema.SOURCE: pa.array(["a.parquet"] * ROWS),
        "note": pa.array([""] * ROWS),
        "transform_seconds": pa.array([0.01] * ROWS),
        "encoder_call": pa.nulls(ROWS, encoder.CALL),
        read.KEEP: pa.array([number not in MASKED for number in range(ROWS)]),
    }
    return functools.reduce(lambda table, item: table.append_column(*item), columns.items(), build_latents(ROWS))


@pytest.fixture
def start(tmp_path, rows, build_manifest, monkeypatch):
    """`start(name, **changes)`: a run in a storage of its own."""

    def start(name, **changes):
        (tmp_path / name).mkdir()
        job = {"online": RAW.to_dict(), "resolutions": [32, 64], "raw_row_bytes": 2**19}
        return Run(tmp_path / name, rows, build_manifest(GROUPS, job=job), monkeypatch, **changes)

    return start


def kept_latents(run):
    uri = storage.join(run.config.run_uri, kept.FOLDER)
    return uri, read_manifest(uri)


def test_the_first_epoch_is_encoded_and_the_others_read_it(start, capsys):
    run = start("straight").go()
    assert sorted(run.encoded) == list(range(ROWS)) and sorted(run.steps) == list(range(3 * PER_EPOCH))
    uri, manifest = kept_latents(run)
    good = set(range(ROWS)) - set(MASKED) - set(REJECTED)
    assert manifest.buckets == {"32+64": len(good)} and not manifest.online
    assert manifest.read == ROWS and manifest.rejected == {"broken image": len(set(REJECTED) - set(MASKED))}
    said = f"{len(good)} rows are kept in runs/{run.config.run_name}/latents: {len(good) // 8} steps per epoch from"
    assert said in capsys.readouterr().out
    names = {storage.name(one) for one in storage.list_files(storage.join(uri, "data"))}
    assert names == set(read_files(uri).names.to_pylist())
    first = [row for step in range(PER_EPOCH) for row in run.steps[step]["id"].to_pylist()]
    assert len(set(first)) == len(first) == 8 * PER_EPOCH
    length = len(good) // 8
    for begin in (PER_EPOCH, PER_EPOCH + length):
        epoch = pa.concat_tables([run.steps[step] for step in range(begin, min(begin + length, 3 * PER_EPOCH))])
        ids = epoch["id"].to_pylist()
        assert len(set(ids)) == len(ids) and set(ids) <= good and all(epoch["keep"].to_pylist())
        assert epoch["image_latents_32"].equals(run.rows.take(pa.array(ids))["image_latents_32"])
    assert run.steps[PER_EPOCH]["id"] != run.steps[PER_EPOCH + length]["id"]  # each epoch has an order of its own


def kill_once(patch, module, name, when, after=False):
    """A function that is killed once: before it does its work, or after."""
    function, done = getattr(module, name), []

    def killed(*values, **options):
        hit = not done and when(*values)
        if hit:
            done.append(True)
        if hit and not after:
            raise Killed
        result = function(*values, **options)
        if hit:
            raise Killed
        return result

    patch.setattr(module, name, killed)


def segment(index):
    return lambda uri, *_: f"segments/{index:06d}.json" in uri


KILLS = {
    "in the first epoch": lambda patch: 5,
    "in the first step": lambda patch: 0,
    "between file and entry": lambda patch: kill_once(patch, storage, "write_json", segment(8)),
    "after an entry": lambda patch: kill_once(patch, storage, "write_json", segment(8), after=True),
    "before the first epoch's last checkpoint": lambda patch: PER_EPOCH - 1,
    "in what was left over": lambda patch: kill_once(patch, storage, "write_json", segment(2 * PER_EPOCH)),
    "before the manifest": lambda patch: kill_once(patch, storage, "write_text", lambda uri, _: "manifest" in uri),
    "between files and manifest": lambda patch: kill_once(
        patch, storage, "write_json", lambda uri, _: "manifest" in uri
    ),
    "in the second epoch": lambda patch: PER_EPOCH + 3,
    "in the third epoch": lambda patch: 2 * PER_EPOCH + 2,
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=list(KILLS))
def test_a_killed_run_goes_on_as_if_it_had_not_been(start, monkeypatch, kill):
    straight, disturbed = start("straight"), start("disturbed")
    with monkeypatch.context() as patch:
        patch.setattr(resume, "last_step", lambda config: straight.saved)
        patch.setattr(dataset, "choose_resume_point", lambda config: {"step": straight.saved})
        straight.go()
    with monkeypatch.context() as patch:
        assert disturbed.go_on_until_done(kill(patch)) == 1
    assert straight.steps.keys() == disturbed.steps.keys()
    for step, found in straight.steps.items():
        assert found.equals(disturbed.steps[step]), step
    (uri, manifest), (expected_uri, expected) = kept_latents(disturbed), kept_latents(straight)
    assert manifest.buckets == expected.buckets
    assert read_files(uri).group_rows.tolist() == read_files(expected_uri).group_rows.tolist()
    names = {storage.name(one) for one in storage.list_files(storage.join(uri, "data"))}
    assert names == set(read_files(uri).names.to_pylist())  # what was not committed is gone
    assert set(disturbed.encoded) == set(range(ROWS))


def test_a_block_is_committed_before_it_is_handed_over(start):
    """So also before the checkpoint that covers it; a block that is committed is not written again."""
    run = start("blocks")
    plan = plan_for(run.config)
    job = kept.open_job(run.config, plan, run.manifest)
    options = {"stream": run.stream, "keep": {"plan": plan, **job.write_arguments()}}
    for _ in range(2):
        for number, _ in enumerate(kept.encode_epoch(plan, 0, plan.steps_per_epoch, **options).iter_batches()):
            assert len(job.committed()) >= number + 1
        assert len(storage.list_files(job.uri("data"))) == len(job.committed())


def test_a_block_without_its_first_steps_is_not_committed(start):
    """A run that resumes within a block: what was trained on before is there, and committed."""
    run = start("within")
    plan = plan_for(run.config)
    job = kept.open_job(run.config, plan, run.manifest)
    options = {"plan": plan, **job.write_arguments()}
    block = next(run.stream(plan, 2, 4).iter_batches())
    units = np.where(block[read.UNIT].to_numpy() < 6, -1, block[read.UNIT].to_numpy())
    cut = block.set_column(block.column_names.index(read.UNIT), read.UNIT, pa.array(units))
    assert plan.block_steps == 2 and set(units) == {-1, 6}
    assert kept.keep_block(cut, **options) is cut and not job.committed() and not job.written_files()
    kept.keep_block(block, **options)
    assert list(job.committed()) == [4]
    kept.keep_block(cut, **options)
    assert list(job.committed()) == [4]


def test_a_run_shorter_than_an_epoch_keeps_what_it_encodes(start):
    run = start("short", max_steps=3).go()
    uri = storage.join(run.config.run_uri, kept.FOLDER)
    assert len(run.steps) == 3 and storage.list_files(storage.join(uri, "data"))
    assert not storage.exists(storage.join(uri, MANIFEST))
    exact = start("exact", max_steps=PER_EPOCH).go()
    assert len(exact.steps) == PER_EPOCH and kept_latents(exact)[1].read == ROWS


def test_a_run_that_gets_more_steps_keeps_what_a_longer_one_does(start):
    """Also if it ended within a block."""
    longer, run = start("longer").go(), start("grown", max_steps=3)
    assert plan_for(run.config).block_steps == 2
    for run.max_steps in (3, PER_EPOCH - 1, 3 * PER_EPOCH):
        run.config = dataclasses.replace(run.config, max_steps=run.max_steps)
        run.go()
    assert run.steps.keys() == longer.steps.keys()
    assert all(run.steps[step].equals(found) for step, found in longer.steps.items())
    assert kept_latents(run)[1].buckets == kept_latents(longer)[1].buckets


def test_a_part_that_is_gone_is_said(start):
    run = start("gone")
    with pytest.raises(Killed):
        run.go(die_at=5)
    uri = storage.join(run.config.run_uri, kept.FOLDER, "segments")
    storage.delete(next(one for one in storage.list_files(uri) if storage.name(one) == "000000.json"))
    with pytest.raises(RuntimeError, match="has lost 1 of the .* blocks that the first epoch of run_name='kept' kept"):
        run.go()


def test_a_run_that_lost_its_later_checkpoints_encodes_again(start):
    run = start("again").go()
    steps, run.steps, run.saved = run.steps, {}, PER_EPOCH - 2
    run.go()
    assert run.saved == run.max_steps
    for step, found in run.steps.items():
        assert found.equals(steps[step])
    run.saved = 3
    with pytest.raises(RuntimeError, match=f"after step {PER_EPOCH} are damaged: it resumes at step 3, whose"):
        sources.StepSource(run.config, first_step=PER_EPOCH).datasets["train"]()


def test_keep_latents_cannot_be_changed_within_a_run(start):
    run = start("changed")
    with pytest.raises(Killed):
        run.go(die_at=5)
    changed = dataclasses.replace(RAW, keep_latents=False)
    with pytest.raises(ValueError, match=re.escape("run_name='kept' was started with keep_latents=True, not False:")):
        next(kept.run_sources(changed, run.config, run.stream))
    storage.delete(storage.join(run.config.run_uri, kept.FOLDER))
    with pytest.raises(ValueError, match="keep_latents=False, not True, or its latents/ was deleted: set it back"):
        next(kept.run_sources(RAW, run.config, run.stream))


def test_without_keep_latents_there_is_one_source(start):
    run, plain = start("plain"), dataclasses.replace(RAW, keep_latents=False)
    (source,) = kept.run_sources(plain, run.config, run.stream)
    assert (source.config, source.stream, source.first_step) == (run.config, run.stream, 0)
    assert source.end_step == run.config.max_steps


@pytest.mark.parametrize("cut", [{"random_crop": 0.8}, {"horizontal_flip": True}])
def test_latents_of_random_cuts_are_not_kept(cut, tmp_path):
    config = OnlineConfig(keep_latents=True, **cut)
    with pytest.raises(ValueError, match="^keep_latents=True encodes a picture once, and random_crop=") as error:
        prepare.prepare_run(config, TrainingConfig(latents_uri=str(tmp_path)))
    assert str(next(iter(cut.values()))) in str(error.value)
