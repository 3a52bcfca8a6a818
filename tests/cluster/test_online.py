"""Raw pictures encoded on the way to the trainers: exact, resumable, and the same as a bare loop computes."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from ray import cloudpickle

from helpers import storage
from helpers.encode import encoder
from helpers.latents import plan as plan_module
from helpers.latents import read, schema
from helpers.latents.manifest import DataSets
from helpers.latents.read import build_dataset, execution_options, join_blocks, worker_units
from helpers.lesson import baseline, captioned_shapes, display, fault_injection
from helpers.online import encode as online
from helpers.online import index
from helpers.online.config import OnlineConfig
from helpers.production import monitor
from helpers.raw import images
from helpers.train import metrics, run_folder
from helpers.train.loop import train_loop_per_worker
from helpers.train.step import TrainStep
from tests import coordinator, killing_pictures
from tests.faults import assert_same_run, attempts_of, die, kill_stream, loop_with, once, slow, wait_for_ever
from tests.killing_pictures import KILLED, KILLS, with_killing_pictures
from tests.latents import plan_for
from tests.pipelines import assert_bare, detected, fit, online_stream, prepare_run, short_run
from tests.unit.latents.test_plan import plan_of

STEPS = 24
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(killing_pictures)


@pytest.fixture(scope="module")
def raw(cluster, tmp_path_factory):
    """Raw rows of which some are spoilt."""
    config = OnlineConfig(
        storage=str(tmp_path_factory.mktemp("storage")),
        resolutions=[32],
        encoder_batch_size=8,
        random_crop=0.8,
        horizontal_flip=True,
    )
    captioned_shapes.write_data_set(config.raw_uri, 300, spoilt_share=0.05, rows_per_file=120)
    return detected(config)


def run_of(raw, name, **changes):
    values = {
        "latents_uri": storage.join(raw.storage, "online"),
        "max_steps": STEPS,
        "checkpoint_every": 8,
        "max_failures": 1,
    }
    return short_run(raw.storage, name, **{**values, **changes})


def fit_online(raw, config, loop=train_loop_per_worker, latent_encoder=encoder.LatentEncoder):
    prepare_run(raw, config)
    fit(config, loop=loop, stream=online_stream(raw, seed=config.seed, latent_encoder=latent_encoder))


@pytest.fixture(scope="module")
def straight(raw):
    """A run of one worker and one encoder that nothing happens to: (config, metrics)."""
    config = run_of(raw, "straight")
    fit_online(raw, config)
    return config, metrics.read_metrics(config.run_uri)


def test_an_online_run_is_a_bare_loop(raw, straight):
    assert_bare(straight[0], raw=raw)


def mortal(*events):
    """An encoder class to which things happen once each, in the third call of a process: (action, flag)."""

    class MortalEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3:
                left = [(flag, action) for action, flag in events if not os.path.exists(flag)]
                for flag, action in left[:1]:
                    once(flag, action)
            return super().__call__(rows)

    return MortalEncoder


@slow
def test_killed_processes_of_an_online_run_change_no_bit(raw, straight, tmp_path, capsys):
    """The stream's own process, with which the workers are replaced; an encoder, which Ray Data replaces; a worker.

    In this order: what was encoded when the stream is killed does not last until the step at which the worker dies.
    """
    flags = [str(tmp_path / name) for name in ("stream", "encoder", "worker", "held")]
    config = run_of(raw, "disturbed", max_failures=5)
    to_be_killed = []  # not empty in the worker that waits for it

    def hold():
        if to_be_killed:
            wait_for_ever()

    with monitor.monitor_run(config), fault_injection.inject_worker_failure(config, rank=0, at_step=13):
        fit_online(
            raw,
            config,
            loop=loop_with((functools.partial(to_be_killed.append, True), 12, 0, flags[2]), (hold, 13, 0, flags[3])),
            latent_encoder=mortal((kill_stream, flags[0]), (die, flags[1])),
        )
    assert all(map(os.path.exists, flags)) and attempts_of(config)[-1] == 9
    assert run_folder.read_failures(config.run_uri)
    assert "lost: worker 0: " in capsys.readouterr().out
    assert_same_run(config, straight[1])


def schema_of(config):
    return DataSets.open(config.proportions).first


@slow
def test_the_data_loader_baseline_has_the_same_losses(raw, straight):
    """A plain DataLoader, and encoders on the trainer's device, without Ray."""
    config, found = straight
    manifest = schema_of(config)
    plan = plan_for(config)
    encode, alone = baseline.DeviceEncoder(raw), TrainStep(config, manifest)
    losses, samples = [], []
    for step, item in enumerate(baseline.build_loader(plan, config, raw, first_step=0)):
        unit = encode(item)
        losses.append(alone.step(step, [unit])["loss"])
        samples.append(metrics.samples_crc32(unit.ids))
    assert samples == found["samples_crc32"].tolist()
    np.testing.assert_allclose(losses, found["loss"], rtol=5e-5)  # latents are encoded in batches of another size


def counting(counted):
    """An encoder class that notes each of its rows as a byte of a file."""

    class CountingEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            with open(counted, "ab") as file:
                file.write(b"." * len(rows))
            return super().__call__(rows)

    return CountingEncoder


def test_units_larger_than_a_block_arrive_whole(cluster):
    """On each of three workers, though a stage's output is split at 48 MiB."""
    row_bytes, unit_rows = 2**20, 100
    plan = dataclasses.replace(plan_of(["a"], [[64] * 20], unit_rows, 4, 2), worker_counts=range(3, 4))

    def read_rows(row_ranges, source):
        ids = [rows.row_group * 64 + rows.first_row + i for rows in row_ranges for i in range(rows.num_rows)]
        return pa.table({"id": ids, "keep": [True] * len(ids)})

    def encode(rows):
        latents = np.zeros((len(rows), row_bytes), dtype=np.uint8)
        latents[:, 0] = rows["id"].to_numpy() % 251
        return rows.append_column("latents", schema.to_binary(latents, dtype=np.uint8))

    stream = build_dataset(plan, 0, 1, read_rows).map_batches(
        encode, batch_size=plan.block_rows, batch_format="pyarrow"
    )
    assert stream.context.target_max_block_size < unit_rows * row_bytes / 2
    shards, found = join_blocks(stream, plan, row_bytes).streaming_split(3, equal=True), {}

    def take(rank):
        blocks = shards[rank].iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        for units in worker_units(blocks, plan, range(1), rank, 3):
            for number, rows in units.items():
                latents, _ = schema.from_binary(rows["latents"], (row_bytes,), np.uint8)
                assert (latents[:, 0] == rows["id"].to_numpy() % 251).all()
                found[number] = rows["id"].to_pylist()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert sorted(found) == [0, 1, 2, 3] and {len(ids) for ids in found.values()} == {unit_rows}
    assert len(set(sum(found.values(), []))) == 4 * unit_rows


@slow
def test_a_trainer_that_stands_still_holds_back_encoders(raw, tmp_path, monkeypatch):
    """Encoders make some steps ahead, stop, and go on when the trainer does: never the whole run at once."""
    monkeypatch.setattr(read, "BACKPRESSURE_STEPS", 8)
    monkeypatch.setattr(read, "BACKPRESSURE_BYTES", 2**20)
    config, counted = run_of(raw, "held-back", max_steps=5000), tmp_path / "counted"
    manifest, _ = prepare_run(raw, config)
    plan = plan_for(config)
    stream = online_stream(raw, latent_encoder=counting(counted))
    rows = stream(plan, 0, config.max_steps)
    rows.context.execution_options = execution_options(manifest.row_bytes, config.global_batch_size)
    (feed,) = rows.streaming_split(1, equal=False)
    blocks = iter(feed.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4))

    def encoded_when_it_stops():
        """Rows that were encoded once there have been no more for two seconds."""
        before, quiet = -1, 0
        while quiet < 20:
            threading.Event().wait(0.1)
            now = counted.stat().st_size
            before, quiet = now, quiet + 1 if now == before else 0
        return before

    most = min(20 * 2**20 / manifest.row_bytes, config.max_steps * config.global_batch_size / 10)
    taken = len(next(blocks))
    ahead = encoded_when_it_stops() - taken
    assert 0 < ahead < most
    while taken < 2 * ahead:  # what was made ahead is used, and more is made
        taken += len(next(blocks))
    assert encoded_when_it_stops() - taken < most


@slow
def test_a_slow_trainer_lets_few_chunk_numbers_wait(cluster, tmp_path, monkeypatch):
    """Of 100,000 small reading tasks, whose numbers have too few bytes for Ray Data to hold them back."""
    monkeypatch.setattr(read, "LISTED_TASKS", 50)
    rows, file, units = coordinator.small_tasks(), tmp_path / "seen", []
    coordinator.watch(rows, file, most_bytes=2**26)
    (feed,) = rows.streaming_split(1, equal=True)
    for block in feed.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        units.append(block["unit"][0].as_py())
        while len(coordinator.seen(file)) < 10 + len(units) // 10:
            threading.Event().wait(0.01)
        if len(units) == 200:
            break
    waiting, kept = ([line[name] for line in coordinator.seen(file)] for name in ("waiting", "kept"))
    assert units == list(range(200)) and 50 < max(waiting) <= 100
    assert kept != sorted(kept)  # it forgets what it has handed out


@pytest.mark.parametrize("change", [{"random_crop": 0.9}, {"row_filter": "width > 8"}, {"horizontal_flip": False}])
def test_a_run_is_not_resumed_under_another_augmentation(raw, straight, change):
    config, _ = straight
    with pytest.raises(ValueError, match=f"{next(iter(change))}="):
        prepare_run(OnlineConfig(**{**raw.to_dict(), **change}), config)
        monitor.open_run(config)
    prepare_run(raw, config)
    monitor.open_run(config)


def test_a_picture_that_kills_its_process_is_masked_and_listed(cluster, tmp_path):
    """In each of two epochs, as are rows that must go; all others are trained on once an epoch."""
    config = OnlineConfig(storage=str(tmp_path), resolutions=[32], encoder_batch_size=8)
    captioned_shapes.write_data_set(config.raw_uri, 64)
    (path,) = storage.list_files(config.raw_uri)
    rows = pq.read_table(path).to_pylist()
    rows[20]["jpg"] += KILLS
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)
    listed = f"{rows[30]['hash']}\n{hashlib.sha256(rows[40]['jpg']).hexdigest()}\n"
    (tmp_path / "list").write_text(listed)
    config = dataclasses.replace(config, extras={"exclusions": {"uri": str(tmp_path / "list")}})
    run = run_of(config, "killing", max_steps=8, checkpoint_every=4, global_batch_size=16, validation_share=0.0)
    _, config = prepare_run(config, run)
    fit(run, stream=online_stream(config, transform=with_killing_pictures(online.transform_for_epoch)))
    bad, found = display.read_run_rejects(run.run_uri), metrics.read_metrics(run.run_uri)
    reasons = {20: KILLED, 30: "excluded", 40: "excluded"}
    assert dict(zip(bad["id"], bad["reason"], strict=True)) == {str(rows[row]["hash"]): reasons[row] for row in reasons}
    assert attempts_of(run) == [1] and found["step"].tolist() == list(range(1, 9))
    assert found["samples_seen"].tolist()[3::4] == [61, 122]


def test_the_augmentation_changes_with_the_epoch_alone():
    picture = Image.effect_noise((80, 64), 50).convert("RGB")

    def cut(row_id, epoch, seed=0, **changes):
        values = {"random_crop": 0.7, "horizontal_flip": True, **changes}
        config = OnlineConfig(**values)
        crop = online.augment_crop(row_id, epoch, config, seed)(picture.size, 1.0)
        return images.cut(picture, crop, (64, 64)).tobytes()

    assert cut(5, 0) == cut(5, 0)
    assert len({cut(5, epoch) for epoch in range(6)}) == 6
    assert cut(5, 0) != cut(6, 0) and cut(5, 0) != cut(5, 0, seed=1)
    assert cut(5, 3, random_crop=1.0, horizontal_flip=False) == picture.crop((8, 0, 72, 64)).tobytes()


def test_a_limit_and_a_filter_hold_online_without_shifting_rows(raw, tmp_path):
    limited = OnlineConfig(storage=raw.storage, resolutions=[32], limit=150, row_filter="width > 64")
    config = run_of(raw, "limited", latents_uri=str(tmp_path / "online"), global_batch_size=16)
    manifest, limited = prepare_run(limited, config)
    rejected = sum(manifest.rejected.values())
    assert manifest.read == 150 == manifest.written + manifest.filtered + rejected
    plan = plan_for(config)
    rows = pa.concat_tables(online.read_raw(ranges, source, config=limited) for source, ranges in plan.chunk_rows(0)[0])
    table = pq.read_table(raw.raw_uri)[:150]
    wanted = {str(row["hash"]) for row in table.to_pylist() if row["width"] > 64 and row["caption"]}
    held_out = {row_id for row_id in wanted if schema.held_out_mask([row_id], config.validation_share)[0]}
    assert set(rows["id"].to_pylist()) <= wanted - held_out and 0 < len(wanted) < 150
    assert sum(source.num_rows for source in plan.sources) == len(wanted - held_out) and manifest.buckets[
        "held out 32"
    ] == len(held_out)


@pytest.mark.parametrize("most", [4, 2])
def test_a_large_row_group_is_read_once_an_epoch_while_it_is_kept(cluster, tmp_path, monkeypatch, most):
    """By tasks that run at once, of which each reads a part of it; `most` of four row groups are kept."""
    monkeypatch.setattr(plan_module, "CHUNK_BYTES", 40_000)
    monkeypatch.setattr(online, "CHUNK_BYTES", 40_000)
    whole = OnlineConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_data_set(whole.raw_uri, 400)
    (path,) = storage.list_files(whole.raw_uri)
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    config = run_of(whole, "once", latents_uri=str(tmp_path / "online"), validation_share=0.0)
    manifest, whole = prepare_run(whole, config)
    monkeypatch.setattr(online, "READ_AHEAD_BYTES", int((most + 0.5) * manifest.job["raw_group_bytes"]))
    plan = plan_for(config)
    reads, asked, keep = tmp_path / "reads", [], index.keep_row_groups

    def noting(*group):
        with open(reads, "ab") as notes:
            notes.write(b".")
        return index.read_row_group(*group)

    monkeypatch.setattr(index, "keep_row_groups", lambda number: asked.append(number) or keep(number, noting))
    found = online.raw_rows(plan, 0, plan.steps_per_epoch, config=whole).to_pandas().query("unit >= 0")["id"]
    assert len(found) == plan.steps_per_epoch * config.global_batch_size and found.is_unique
    assert asked == [most] and plan.chunks_per_epoch > 20
    # With fewer, a task that a busy machine delays reads its row group again; without a cache, every chunk would.
    assert 4 <= reads.stat().st_size < (5 if most == 4 else plan.chunks_per_epoch)
