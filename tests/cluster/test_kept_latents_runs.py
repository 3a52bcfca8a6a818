"""An online run that keeps what its first epoch encodes: the others read it, whatever is killed on the way."""

import functools
import os
import sys

import numpy as np
import pytest
from ray import cloudpickle

from helpers import encoder, ingest, kept_latents, online, storage, train_step
from helpers.config import OnlineConfig
from helpers.lesson import captioned_shapes
from helpers.runtime import metrics_log
from tests.faults import assert_same_run, attempts_of, die, loop_with, run_driver, steps_done, variants
from tests.pipelines import fit_parts, short_run

STEPS = 12  # two epochs and some
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def raw(cluster, tmp_path_factory):
    """Raw rows of which some are spoilt, and which do not fill whole batches."""
    folder = str(tmp_path_factory.mktemp("storage"))
    config = OnlineConfig(storage=folder, resolutions=[32], encoder_batch_size=8, keep_latents=True)
    captioned_shapes.write_parquet(config.raw_uri, 170, spoilt_share=0.05, rows_per_file=60)
    return config


def run_of(raw, name, **changes):
    values = {"latents_uri": storage.join(raw.storage, "online"), "max_steps": STEPS, "checkpoint_every": 2}
    return short_run(raw.storage, name, **{**values, "max_failures": 5, **changes})


def kept(config):
    uri = storage.join(config.run_uri, kept_latents.FOLDER)
    return uri, ingest.read_manifest(uri)


def counting(counted):
    """An encoder class that notes each of its rows as a byte of a file."""

    class CountingEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            with open(counted, "ab") as file:
                file.write(b"." * len(rows))
            return super().__call__(rows)

    return CountingEncoder


def encode(raw, plan, config):
    """The units of an online run's first epoch, made without Ray."""
    read = functools.partial(online.read_raw, config=raw)
    latent_encoder = encoder.LatentEncoder(*encoder.arguments(raw), batch_size=raw.encoder_batch_size)
    for block in blocks(plan, plan.steps_per_epoch, read):
        done = online.transform(block, config=raw, units_per_epoch=plan.units_per_epoch, seed=config.seed)
        yield latent_encoder(done)


def blocks(plan, num_steps, read):
    options = {"first_chunk": 0, "first_step": 0, "num_steps": num_steps, "read": read}
    for table in ingest.read_chunks({"id": range(len(plan.chunk_range(0, num_steps)))}, plan=plan, **options):
        yield table.combine_chunks()


def bare(raw, config):
    """[(loss, samples_crc32)] of a run, without Ray: an epoch encoded, then steps of stored latents."""
    (online_manifest,) = ingest.read_manifests(config).values()
    plan, (uri, manifest) = ingest.plan_run({config.latents_uri: online_manifest}, config), kept(config)
    kept_plan = ingest.plan_run({uri: manifest}, short_run(raw.storage, "any", latents_uri=uri))
    read = ingest.read_latents
    first = encode(raw, plan, config), plan.steps_per_epoch, online_manifest
    others = blocks(kept_plan, STEPS - first[1], read), STEPS - first[1], manifest
    alone, found = train_step.TrainStep(config, online_manifest), []
    for tables, num_steps, described in (first, others):
        units = {}
        for table in tables:
            units.update(ingest.split_units(table, config.unit_rows))
        for step in range(num_steps):
            batch = [
                train_step.Unit.from_arrow(units[2 * step + slot], described, 32, slot * config.unit_rows)
                for slot in range(2)
            ]
            ids = metrics_log.samples_crc32([i for unit in batch for i in unit.ids])
            found.append((alone.step(len(found), batch)["loss"], ids))
    return found


@variants
def test_a_run_that_keeps_latents_encodes_each_row_once(raw, tmp_path):
    """Its losses are those of a bare loop. What it promises when it is killed: `tests/unit/test_kept_latents.py`."""
    config, counted, encoded = run_of(raw, "kept"), tmp_path / "counted", []
    fitted = lambda part: encoded.append(counted.stat().st_size)  # noqa: E731
    fit_parts(raw, config, latent_encoder=counting(counted), fitted=fitted)
    found, (_, manifest) = metrics_log.read_metrics(config.run_uri), kept(config)
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    epoch = plan.steps_per_epoch
    assert attempts_of(config) == [1, epoch + 1] and found["step"].tolist() == list(range(1, STEPS + 1))
    # After the first epoch, and after the others: between them what was left over, and in them nothing.
    assert encoded == [epoch * plan.batch_rows, plan.num_rows] and encoded[0] < encoded[1]
    assert manifest.total("read") == plan.num_rows and manifest.total("written") > 140
    assert not found["masked_rows"][epoch:].any()
    losses, samples = zip(*bare(raw, config), strict=True)
    assert tuple(found["samples_crc32"]) == samples
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-5)


DIE = {
    "in the first epoch": "steps_done(config) >= 3",
    "while what was left over is encoded": "storage.exists(storage.join(config.run_uri, 'latents/lease.json'))",
    "in the second epoch": "steps_done(config) >= 8",
}


@pytest.fixture(scope="module")
def straight(raw):
    """Metrics of a run that nothing happens to."""
    config = run_of(raw, "straight")
    fit_parts(raw, config)
    return metrics_log.read_metrics(config.run_uri)


@variants
@pytest.mark.parametrize("when", DIE.values(), ids=list(DIE))
def test_a_killed_driver_changes_no_bit(raw, straight, when, tmp_path):
    config = run_of(raw, f"driver-{list(DIE.values()).index(when)}")
    run_driver(f"""
        from helpers.config import OnlineConfig
        from tests.pipelines import fit_parts
        raw = OnlineConfig.from_dict({raw.to_dict()!r})
        config = TrainingConfig.from_dict({config.to_dict()!r})
        die_when(lambda: {when})
        fit_parts(raw, config)
    """)
    assert steps_done(config) < STEPS
    fit_parts(raw, config)
    assert_same_run(config, straight)


@variants
def test_two_workers_and_a_killed_one_keep_the_same(raw, straight, tmp_path):
    config, flags = run_of(raw, "two", num_training_workers=2), [str(tmp_path / name) for name in "ab"]
    fit_parts(raw, config, loop_with((die, 3, 1, flags[0]), (die, 9, 0, flags[1])))
    assert all(map(os.path.exists, flags))
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == straight["samples_crc32"].tolist()
    np.testing.assert_allclose(found["loss"], straight["loss"], rtol=1e-5)
