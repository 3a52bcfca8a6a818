"""Raw pictures encoded on the way to the trainers: exact, resumable, and the same as a bare loop computes."""

import concurrent.futures
import dataclasses
import functools
import os
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from PIL import Image
from ray import cloudpickle

from helpers import encoder, ingest, online, run_setup, schema, storage, train, train_step
from helpers.config import OnlineConfig
from helpers.data_io import index
from helpers.lesson import baseline, captioned_shapes, fault_injection, looks
from helpers.runtime import fault_tolerance, metrics_log, monitoring
from tests.faults import assert_same_run, attempts_of, die, kill_stream, loop_with, once, variants
from tests.pipelines import fit, online_stream, short_run

STEPS = 24
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


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
    captioned_shapes.write_parquet(config.raw_uri, 300, spoilt_share=0.05, rows_per_file=120)
    return config


def run_of(raw, name, **changes):
    values = {
        "latents_uri": storage.join(raw.storage, "online"),
        "max_steps": STEPS,
        "checkpoint_every": 8,
        "max_failures": 1,
    }
    return short_run(raw.storage, name, **{**values, **changes})


def fit_online(raw, config, loop=train.train_loop_per_worker, num_encoders=1, latent_encoder=encoder.LatentEncoder):
    online.prepare(raw, config)
    stream = online_stream(raw, seed=config.seed, num_encoders=num_encoders, latent_encoder=latent_encoder)
    fit(config, loop=loop, stream=stream)


@pytest.fixture(scope="module")
def straight(raw):
    """Metrics of a run of one worker and one encoder that nothing happens to."""
    config = run_of(raw, "straight")
    fit_online(raw, config)
    return metrics_log.read_metrics(config.run_uri)


def fit_with_kills(raw, config, folder):
    """The worker of rank 0 and an encoder are killed: (config, metrics)."""
    flags = [str(folder / name) for name in ("trainer", "encoder")]
    fit_online(raw, config, loop_with((die, 13, 0, flags[0])), latent_encoder=mortal(flags[1]))
    assert all(map(os.path.exists, flags)) and attempts_of(config)[:2] == [1, 9]
    return config, metrics_log.read_metrics(config.run_uri)


@pytest.fixture(scope="module")
def disturbed(raw, tmp_path_factory):
    """A run of one worker and an encoder, both of which are killed: (config, metrics)."""
    return fit_with_kills(raw, run_of(raw, "disturbed", max_failures=5), tmp_path_factory.mktemp("flags"))


@pytest.fixture(scope="module")
def expected(raw, disturbed):
    """(losses, samples_crc32) of the steps, computed without Ray.

    The plan over raw files, the augmentation, transform, encoder and step.
    """
    config, _ = disturbed
    manifest = schema_of(config)
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    read = functools.partial(online.read_raw, config=raw)
    tables = ingest.read_chunks(
        {"id": range(len(plan.chunk_range(0, STEPS)))},
        plan=plan,
        first_chunk=0,
        first_step=0,
        num_steps=STEPS,
        read=read,
    )
    latent_encoder = encoder.LatentEncoder(*encoder.arguments(raw), batch_size=raw.encoder_batch_size)
    units = {}
    for table in tables:
        rows = plan.block_rows
        for start in range(0, len(table), rows):  # as the blocks travel
            block = table.slice(start, rows).combine_chunks()
            done = online.transform(block, config=raw, units_per_epoch=plan.units_per_epoch, seed=config.seed)
            units.update(ingest.split_units(latent_encoder(done), config.unit_rows))
    alone, losses, samples = train_step.TrainStep(config, manifest), [], []
    for step in range(STEPS):
        batch = [
            train_step.Unit.from_arrow(units[2 * step + slot], manifest, 32, slot * config.unit_rows)
            for slot in range(2)
        ]
        losses.append(alone.step(step, batch)["loss"])
        samples.append(metrics_log.samples_crc32([i for unit in batch for i in unit.ids]))
    return losses, samples


def assert_expected(expected, losses, samples):
    assert list(samples) == expected[1]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)


def test_an_online_run_with_kills_is_a_bare_loop(disturbed, expected):
    _, found = disturbed
    assert_expected(expected, found["loss"], found["samples_crc32"])


@variants
def test_kills_change_no_bit(disturbed, straight):
    assert_same_run(disturbed[0], straight)


@variants
def test_two_workers_with_kills_are_a_bare_loop(raw, expected, tmp_path):
    _, found = fit_with_kills(raw, run_of(raw, "two", num_training_workers=2, max_failures=5), tmp_path)
    assert_expected(expected, found["loss"], found["samples_crc32"])


def schema_of(config):
    return ingest.read_manifests(config)[config.latents_uri]


@variants
def test_the_data_loader_baseline_has_the_same_losses(raw, expected):
    """A plain DataLoader, and encoders on the trainer's device, without Ray."""
    config = run_of(raw, "loader")
    manifest = schema_of(config)
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    encode, alone = baseline.DeviceEncoder(raw), train_step.TrainStep(config, manifest)
    losses, samples = [], []
    for step, item in enumerate(baseline.build_loader(plan, config, raw, first_step=0)):
        unit = encode(item)
        losses.append(alone.step(step, [unit])["loss"])
        samples.append(metrics_log.samples_crc32(unit.ids))
    assert_expected(expected, losses, samples)


@variants
def test_the_data_loader_baseline_survives_a_kill_under_ray(raw, expected):
    config = run_of(raw, "baseline", num_training_workers=2)
    steps = functools.partial(baseline.steps, raw=raw)
    with fault_injection.inject_worker_failure(config, rank=1, at_step=13):
        fit(config, loop=functools.partial(train.train_loop_per_worker, steps=steps), stream=None)
    found = metrics_log.read_metrics(config.run_uri)
    assert_expected(expected, found["loss"], found["samples_crc32"])
    assert len(looks.read_run_rejects(config.run_uri))


def test_a_profile_tells_where_time_and_memory_go(raw, disturbed):
    config = run_of(raw, "profiled")
    found = baseline.profile(config, schema_of(config), raw, num_steps=2, warm_up=1)
    assert found.shares.index.tolist() == ["data", "encode", "forward", "backward", "optimizer"]
    assert found.shares.sum() == pytest.approx(1) and found.shares["encode"] > 0.05
    assert found.phases["step"].unique().tolist() == [1, 2]
    assert (found.memory["gib"] > 0.05).all()


def mortal(flag, action=die):
    """An encoder class that dies once, in its third call, or does another harm."""

    class MortalEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3:
                once(flag, action)
            return super().__call__(rows)

    return MortalEncoder


@variants
def test_a_killed_stream_changes_no_bit(raw, straight, tmp_path, capsys):
    """The process in which Ray Data runs the pipeline: the workers are replaced, and their stream with them."""
    config, flag = run_of(raw, "no-stream"), str(tmp_path / "stream")
    with monitoring.monitor_run(config):
        fit_online(raw, config, latent_encoder=mortal(flag, kill_stream))
    assert os.path.exists(flag) and len(fault_tolerance.read_failures(config.run_uri)) == 1
    assert "lost: worker 0: " in capsys.readouterr().out
    assert_same_run(config, straight)


def counting(counted, seconds=0.0):
    """An encoder class that notes each of its rows as a byte of a file, and may take its time for each block."""

    class CountingEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            time.sleep(seconds)
            with open(counted, "ab") as file:
                file.write(b"." * len(rows))
            return super().__call__(rows)

    return CountingEncoder


def test_units_of_300_mib_arrive_whole(cluster):
    """On each of three workers, though a stage's output is split at 48 MiB."""
    row_bytes, unit_rows = 2**20, 300
    source = ingest.Source.of("/none", [("a", [64] * 20)])
    plan = ingest.Plan([source], unit_rows, 4, chunk_units=2, seed=0, worker_counts=range(3, 4))

    def read(row_ranges, source):
        ids = [rows.row_group * 64 + rows.first_row + i for rows in row_ranges for i in range(rows.num_rows)]
        return pa.table({"id": ids, "keep": [True] * len(ids)})

    def encode(rows):
        latents = np.zeros((len(rows), row_bytes), dtype=np.uint8)
        latents[:, 0] = rows["id"].to_numpy() % 251
        return rows.append_column("latents", schema.to_binary(latents, dtype=np.uint8))

    stream = ingest.build_dataset(plan, 0, 1, read).map_batches(
        encode, batch_size=plan.block_rows, batch_format="pyarrow"
    )
    assert stream.context.target_max_block_size < 0.2 * unit_rows * row_bytes
    shards, found = ingest.join_blocks(stream, plan, row_bytes).streaming_split(3, equal=True), {}

    def take(rank):
        blocks = shards[rank].iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        for units in ingest.worker_units(blocks, plan, range(1), rank, 3):
            for number, rows in units.items():
                latents, _ = schema.from_binary(rows["latents"], (row_bytes,), np.uint8)
                assert (latents[:, 0] == rows["id"].to_numpy() % 251).all()
                found[number] = rows["id"].to_pylist()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert sorted(found) == [0, 1, 2, 3] and {len(ids) for ids in found.values()} == {unit_rows}
    assert len(set(sum(found.values(), []))) == 4 * unit_rows


@variants
def test_a_trainer_that_stands_still_holds_back_encoders(raw, tmp_path, monkeypatch):
    """Encoders make some steps ahead, stop, and go on when the trainer does: never the whole run at once."""
    monkeypatch.setattr(ingest, "BACKPRESSURE_STEPS", 8)
    monkeypatch.setattr(ingest, "BACKPRESSURE_BYTES", 2**20)
    config, counted = run_of(raw, "held-back", max_steps=5000), tmp_path / "counted"
    manifest = online.prepare(raw, config)
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    stream = online_stream(raw, latent_encoder=counting(counted))
    rows = stream(plan, 0, config.max_steps)
    rows.context.execution_options = ingest.execution_options(config)
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

    taken = len(next(blocks))
    ahead = encoded_when_it_stops() - taken
    assert 0 < ahead * manifest.row_bytes < 20 * 2**20 and ahead < config.max_steps * config.global_batch_size / 10
    while taken < 2 * ahead:  # what was made ahead is used, and more is made
        taken += len(next(blocks))
    assert encoded_when_it_stops() - taken < 1.5 * ahead


@variants
def test_a_resumed_run_encodes_no_more_than_its_block(raw, tmp_path):
    config, counted = run_of(raw, "resumed", max_steps=60), tmp_path / "counted"
    plan = ingest.plan_run({config.latents_uri: online.prepare(raw, config)}, config)
    stream = online_stream(raw, latent_encoder=counting(counted))
    rows = stream(plan, 45, config.max_steps)
    assert rows.materialize().count() == counted.stat().st_size
    steps = counted.stat().st_size / config.global_batch_size
    assert 60 - 45 <= steps < 60 - 45 + 2 * plan.block_steps <= 60 - 45 + 16


@pytest.mark.parametrize("change", [{"random_crop": 0.9}, {"row_filter": "width > 8"}, {"horizontal_flip": False}])
def test_a_run_is_not_resumed_under_another_augmentation(raw, disturbed, change):
    config, _ = disturbed
    with pytest.raises(ValueError, match=f"made with {next(iter(change))}="):
        online.prepare(OnlineConfig(**{**raw.to_dict(), **change}), config)
        run_setup.open_run(config)
    online.prepare(raw, config)
    run_setup.open_run(config)


@variants
def test_a_slow_encoder_makes_the_trainer_wait(raw, straight, tmp_path):
    config, ticks = run_of(raw, "slow-encoder"), []
    with monitoring.poll_in_background(lambda: ticks.append(time.monotonic()), every=0.1):
        fit_online(raw, config, latent_encoder=counting(tmp_path / "counted", 0.3))
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == straight["samples_crc32"].tolist()
    assert metrics_log.throughput(found, skip=0)[1] > 0.5  # of the time the trainer waits for data, and says so
    assert np.diff(ticks).max() < 5


def test_bad_pictures_are_masked_and_listed(raw, disturbed):
    table = pa.concat_tables([pq.read_table(path) for path in storage.list_files(raw.raw_uri)])
    bad = looks.read_run_rejects(disturbed[0].run_uri)
    assert len(bad) and bad["id"].is_unique and "broken image" in set(bad["reason"])
    assert "no caption" in schema_of(disturbed[0]).rejected  # its columns tell: it is in no batch
    assert set(bad["id"]) <= set(table["hash"].to_pylist())
    masked = np.diff(np.concatenate([[0], disturbed[1]["samples_seen"]]))
    assert (masked <= 32).all() and (masked < 32).any()


def test_the_augmentation_changes_with_the_epoch_alone():
    picture = Image.effect_noise((80, 64), 50).convert("RGB")

    def cut(row_id, epoch, **changes):
        values = {"seed": 0, "random_crop": 0.7, "horizontal_flip": True, **changes}
        return online.augment_crop(picture, row_id, epoch, **values).tobytes()

    assert cut(5, 0) == cut(5, 0)
    assert len({cut(5, epoch) for epoch in range(6)}) == 6
    assert cut(5, 0) != cut(6, 0) and cut(5, 0) != cut(5, 0, seed=1)
    assert cut(5, 3, random_crop=1.0, horizontal_flip=False) == picture.crop((8, 0, 72, 64)).tobytes()


def test_a_limit_and_a_filter_hold_online_without_shifting_rows(raw, tmp_path):
    limited = OnlineConfig(storage=raw.storage, resolutions=[32], limit=150, row_filter="width > 64")
    config = run_of(raw, "limited", latents_uri=str(tmp_path / "online"), global_batch_size=16)
    manifest = online.prepare(limited, config)
    rejected = sum(manifest.rejected.values())
    assert manifest.total("read") == 150 == manifest.total("written") + manifest.total("filtered") + rejected
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    rows = pa.concat_tables(
        online.read_raw(mine, source, config=limited)
        for mine, source in zip(plan.chunk_rows(0)[0], plan.sources, strict=True)
    )
    table = pa.concat_tables(pq.read_table(path) for path in storage.list_files(raw.raw_uri))[:150]
    wanted = {row["hash"] for row in table.to_pylist() if row["width"] > 64 and row["caption"]}
    held_out = {row_id for row_id in wanted if schema.held_out([row_id], config.validation_share)[0]}
    assert set(rows["id"].to_pylist()) <= wanted - held_out and 0 < len(wanted) < 150
    assert plan.num_rows == len(wanted - held_out) and manifest.buckets["held out 32"] == len(held_out)


def test_a_large_row_group_is_read_once_an_epoch(cluster, tmp_path, monkeypatch):
    """By tasks that run at once, of which each reads a part of it; two of four row groups are kept."""
    monkeypatch.setattr(ingest, "CHUNK_BYTES", 40_000)
    whole = OnlineConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_parquet(whole.raw_uri, 400)
    (path,) = storage.list_files(whole.raw_uri)
    pq.write_table(pq.read_table(path), path, row_group_size=100)
    config = run_of(whole, "once", latents_uri=str(tmp_path / "online"), validation_share=0.0)
    manifest = online.prepare(whole, config)
    limited = dataclasses.replace(whole, read_ahead_bytes=int(2.5 * manifest.job["raw_group_bytes"]))
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    kept, keep = [], index.keep_row_groups
    monkeypatch.setattr(index, "keep_row_groups", lambda most: kept.append((most, keep(most))) or kept[-1][1])
    rows = online.raw_rows(plan, 0, plan.steps_per_epoch, config=limited).select_columns(["id", "unit"]).to_pandas()
    found = rows[rows["unit"] >= 0]["id"]
    assert len(found) == plan.steps_per_epoch * config.global_batch_size and found.is_unique
    ((most, read_group),) = kept
    assert most == 2 and plan.chunks_per_epoch > 20
    assert ray.get(read_group.args[0].reads.remote()) == 4
