"""Raw pictures encoded on the way to the trainers: exact, resumable, and the same as a bare loop computes."""

import functools
import os
import signal
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

from helpers import encoder, ingest, online, run_setup, storage, train, train_step
from helpers.config import OnlineConfig
from helpers.lesson import baseline, captioned_shapes, fault_injection, looks
from helpers.runtime import metrics_log, monitoring, session
from tests.pipelines import fit, online_stream, short_run

STEPS = 24
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    session.connect("local", num_cpus=6)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
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


def fit_online(raw, config, **changes):
    online.prepare(raw, config)
    fit(config, stream=functools.partial(online_stream, config=raw, seed=config.seed, **changes))


@pytest.fixture(scope="module")
def straight(raw):
    config = run_of(raw, "straight")
    fit_online(raw, config)
    return metrics_log.read_metrics(config.run_uri)


def test_an_online_run_is_what_a_bare_loop_computes(raw, straight):
    """The plan over raw files, the augmentation, transform, encoder and step, without Ray."""
    config = run_of(raw, "straight")
    manifest = schema_of(config)
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    read = functools.partial(online.read_raw, config=raw, validation_share=config.validation_share)
    tables = ingest.read_chunks(
        {"id": range(len(plan.chunks(0, STEPS)))}, plan=plan, first_chunk=0, first_step=0, num_steps=STEPS, read=read
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
    assert straight["samples_crc32"].tolist() == samples
    np.testing.assert_allclose(straight["loss"], losses, rtol=1e-5)


def schema_of(config):
    return ingest.read_manifests(config)[config.latents_uri]


def test_two_workers_and_two_encoders_train_on_the_same_batches(raw, straight):
    config = run_of(raw, "two", num_training_workers=2)
    fit_online(raw, config, num_encoders=2)
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == straight["samples_crc32"].tolist()
    np.testing.assert_allclose(found["loss"], straight["loss"], rtol=1e-5)


def test_the_data_loader_baseline_has_the_same_samples_and_losses(raw, straight):
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
    assert samples == straight["samples_crc32"].tolist()
    np.testing.assert_allclose(losses, straight["loss"], rtol=1e-5)


def test_the_data_loader_baseline_trains_on_two_workers_of_ray_train_and_survives_a_kill(raw, straight):
    config = run_of(raw, "baseline", num_training_workers=2)
    steps = functools.partial(baseline.steps, raw=raw)
    with fault_injection.inject_worker_failure(config, rank=1, at_step=13):
        fit(config, loop=functools.partial(train.train_loop_per_worker, steps=steps), stream=None)
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == straight["samples_crc32"].tolist()
    np.testing.assert_allclose(found["loss"], straight["loss"], rtol=1e-5)
    assert len(looks.read_run_rejects(config.run_uri))


def test_a_profile_tells_where_time_and_memory_go_when_the_encoders_sit_with_the_unet(raw):
    config = run_of(raw, "profiled")
    found = baseline.profile(config, schema_of(config), raw, num_steps=2, warm_up=1)
    assert found.shares.index.tolist() == ["data", "encode", "forward", "backward", "optimizer"]
    assert found.shares.sum() == pytest.approx(1) and found.shares["encode"] > 0.05
    assert found.phases["step"].unique().tolist() == [1, 2]
    assert (found.memory["gib"] > 0.05).all()


class MortalEncoder(encoder.LatentEncoder):
    """Dies once, in its third call."""

    def __init__(self, *arguments, flag, **options):
        super().__init__(*arguments, **options)
        self.flag, self.calls = flag, 0

    def __call__(self, rows):
        self.calls += 1
        if self.calls == 3 and not os.path.exists(self.flag):
            open(self.flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(rows)


def test_a_trainer_and_an_encoder_are_killed_and_the_run_stays_the_same_bit_by_bit(raw, straight, tmp_path):
    config = run_of(raw, "killed")
    with fault_injection.inject_worker_failure(config, rank=0, at_step=13):
        fit_online(raw, config, latent_encoder=functools.partial(mortal, str(tmp_path / "flag")))
    found = metrics_log.read_metrics(config.run_uri)
    for column in ("samples_crc32", "loss", "grad_norm", "samples_seen"):
        assert found[column].tolist() == straight[column].tolist(), column
    assert metrics_log.read_metrics(config.run_uri, all_attempts=True)["attempt"].max() == 2
    assert (tmp_path / "flag").exists()


def mortal(flag):
    """The encoder class that dies once, for `online_stream`."""
    return MortalEncoder, {"flag": flag}


class CountingEncoder(encoder.LatentEncoder):
    """Notes each of its rows as a byte of a file, and may take its time for each block."""

    def __init__(self, *arguments, counted, seconds, **options):
        super().__init__(*arguments, **options)
        self.counted, self.seconds = counted, seconds

    def __call__(self, rows):
        time.sleep(self.seconds)
        with open(self.counted, "ab") as file:
            file.write(b"." * len(rows))
        return super().__call__(rows)


def counting(counted, seconds=0.0):
    return CountingEncoder, {"counted": str(counted), "seconds": seconds}


def test_a_trainer_that_stands_still_holds_back_what_feeds_it(raw, tmp_path, monkeypatch):
    """Encoders make some steps ahead, stop, and go on when the trainer does: never the whole run into the object store."""
    monkeypatch.setattr(ingest, "AHEAD_STEPS", 8)
    monkeypatch.setattr(ingest, "AHEAD_BYTES", 2**20)
    config, counted = run_of(raw, "held-back", max_steps=5000), tmp_path / "counted"
    manifest = online.prepare(raw, config)
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    rows = online_stream(
        plan,
        0,
        config.max_steps,
        resolution=32,
        validation_share=0.05,
        config=raw,
        latent_encoder=functools.partial(counting, counted),
    )
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


def test_a_run_that_goes_on_at_a_step_decodes_and_encodes_no_more_than_the_block_that_it_is_in(raw, tmp_path):
    config, counted = run_of(raw, "resumed", max_steps=60), tmp_path / "counted"
    plan = ingest.plan_run({config.latents_uri: online.prepare(raw, config)}, config)
    rows = online_stream(
        plan,
        45,
        config.max_steps,
        resolution=32,
        validation_share=0.05,
        config=raw,
        latent_encoder=functools.partial(counting, counted),
    )
    assert rows.materialize().count() == counted.stat().st_size
    steps = counted.stat().st_size / config.global_batch_size
    assert 60 - 45 <= steps < 60 - 45 + 2 * plan.block_steps <= 60 - 45 + 16


@pytest.mark.parametrize("change", [{"random_crop": 0.9}, {"row_filter": "width > 8"}, {"horizontal_flip": False}])
def test_a_run_is_not_resumed_under_another_augmentation_or_filter(raw, straight, change):
    config = run_of(raw, "straight")
    with pytest.raises(ValueError, match=f"made with {next(iter(change))}="):
        online.prepare(OnlineConfig(**{**raw.to_dict(), **change}), config)
        run_setup.open_run(config)
    online.prepare(raw, config)
    run_setup.open_run(config)


def test_a_slow_encoder_makes_the_trainer_wait_and_not_the_driver(raw, straight, tmp_path):
    config, ticks = run_of(raw, "slow-encoder"), []
    with monitoring.poll_in_background(lambda: ticks.append(time.monotonic()), every=0.1):
        fit_online(raw, config, latent_encoder=functools.partial(counting, tmp_path / "counted", 0.3))
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == straight["samples_crc32"].tolist()
    assert metrics_log.throughput(found, skip=0)[1] > 0.5  # of the time the trainer waits for data, and says so
    assert np.diff(ticks).max() < 5


def test_bad_pictures_are_masked_counted_and_listed_with_their_reason(raw, straight):
    table = pa.concat_tables([pq.read_table(path) for path in storage.list_files(raw.raw_uri)])
    bad = looks.read_run_rejects(run_of(raw, "straight").run_uri)
    assert len(bad) and bad["id"].is_unique and {"broken image", "no caption"} <= set(bad["reason"])
    assert set(bad["id"]) <= set(table["hash"].to_pylist())
    masked = np.diff(np.concatenate([[0], straight["samples_seen"]]))
    assert (masked <= 32).all() and (masked < 32).any()


def test_the_augmentation_changes_with_the_epoch_and_with_nothing_else():
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
    config = run_of(raw, "limited", latents_uri=str(tmp_path / "online"))
    manifest = online.prepare(limited, config)
    assert manifest.total("read") == 150 and sum(sum(groups) for _, groups in manifest.files) == 150
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    rows = pa.concat_tables(
        online.read_raw(mine, source, config=limited, validation_share=0.0)
        for mine, source in zip(plan.chunk(0, 0)[0], plan.sources, strict=True)
    )
    table = pa.concat_tables(pq.read_table(path) for path in storage.list_files(raw.raw_uri))
    widths = dict(zip(table["hash"].to_pylist(), table["width"].to_pylist(), strict=True))
    assert rows["keep"].to_pylist() == [widths[row_id] > 64 for row_id in rows["id"].to_pylist()]
    assert 0 < sum(rows["keep"].to_pylist()) < len(rows)


def test_row_groups_that_would_be_read_again_and_again_are_named_with_what_to_do(capsys):
    online.check_row_groups([("a.parquet", [1000, 1000])], row_bytes=100_000)
    assert capsys.readouterr().out == ""
    online.check_row_groups([("a.parquet", [1000, 5000])], row_bytes=100_000)
    assert "up to 5,000 rows, 477 MiB" in (said := capsys.readouterr().out) and "row_group_size=671" in said
