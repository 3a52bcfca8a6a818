"""Image features beside latents on a real Ray: added to finished latents, read by a run, computed on the way."""

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode import stages
from helpers.latents import schema
from helpers.latents.manifest import DataSets, read_segments
from helpers.lesson import captioned_shapes
from helpers.online.config import OnlineConfig
from helpers.production import features
from helpers.production.extras.repa import Repa
from helpers.production.image_encoder import ImageEncoder
from helpers.raw import inputs
from helpers.train import metrics
from helpers.train.step import TrainStep, Unit
from tests.pipelines import build_pipeline, detected, fit, online_stream, prepare_job, prepare_run, short_run

ROWS, MODEL = 300, "tiny-clip"
ALIGNED = {"image_encoder_model": MODEL, "resolution": 32, "max_steps": 12, "checkpoint_every": 4}


def contents(folder):
    return {path: path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def stored(cluster, tmp_path_factory):
    """(config, the latents' files before features were added)."""
    values = {"storage": str(tmp_path_factory.mktemp("features")), "resolutions": [32, 64], "validation_share": 0.05}
    captioned_shapes.write_data_set(storage.join(values["storage"], "raw"), ROWS, spoilt_share=0.02)
    job = prepare_job(PreprocessingConfig(**values))
    job.run(build_pipeline(job))
    before = contents(job.config.latents_uri)
    # The same job again, as Preprocessing.ipynb does it.
    again = prepare_job(PreprocessingConfig(**values, image_encoder_model=MODEL))
    again.run(None)  # nothing to encode
    features.store(again)
    return again.config, before


@pytest.fixture
def transformed(stored):
    """The transformed rows of the raw images, in one table."""
    config = detected(stored[0])
    (path,) = {path for segment in read_segments(config.latents_uri) for path in segment["sources"]}
    raw = inputs.to_raw_rows(inputs.with_path(pq.read_table(path), path), config)
    return stages.transform(raw, config=config)


def test_features_are_added_to_finished_latents_and_change_none_of_their_files(stored, capsys):
    config, before = stored
    now = contents(config.latents_uri)
    assert {path: now[path] for path in before} == before
    features.store(prepare_job(config))
    assert "Nothing to do" in capsys.readouterr().out
    assert contents(config.latents_uri) == now


def test_each_file_has_the_rows_of_its_latents_and_the_features_of_their_images(stored, transformed):
    config, images = stored[0], ImageEncoder(MODEL)
    folder = features.folder_of(config.latents_uri, MODEL)
    files = [file for segment in read_segments(config.latents_uri) for file in segment["files"]]
    by_id = {row_id: row for row, row_id in enumerate(transformed["id"].to_pylist())}
    for file in files:
        latents, found = (
            pq.ParquetFile(storage.join(uri, "data", file["name"])) for uri in (config.latents_uri, folder)
        )
        groups = [found.metadata.row_group(group).num_rows for group in range(found.num_row_groups)]
        assert groups == file["row_groups"]
        ids = latents.read(["id"])["id"].to_pylist()
        assert found.read(["id"])["id"].to_pylist() == ids
        rows = transformed.take([by_id[one] for one in ids[:8]]).combine_chunks()
        for resolution, grid in ((32, (2, 2)), (64, (4, 4))):
            pixels, _ = schema.decode_present_rows(rows[f"pixels_{resolution}"], (resolution, resolution, 3))
            column = found.read([f"image_features_{resolution}"])[0].slice(0, 8)
            values, _ = schema.from_binary(column, (96, *grid))
            np.testing.assert_allclose(values, images.encode(pixels, grid), atol=2e-3)


@pytest.fixture(scope="module")
def straight(stored):
    config = short_run(stored[0].storage, "aligned", **ALIGNED)
    fit(config)
    return metrics.read_metrics(config.run_uri)


def test_a_run_reads_the_stored_features_in_the_batches_of_a_run_without(stored, straight):
    plain = short_run(stored[0].storage, "plain", **{**ALIGNED, "image_encoder_model": None, "max_steps": 4})
    fit(plain)
    found = metrics.read_metrics(plain.run_uri)
    assert found["samples_crc32"].tolist() == straight["samples_crc32"].tolist()[:4]
    assert straight["repa"].iloc[-1] < straight["repa"].iloc[0] and "repa" not in found
    assert found["loss"][0] == straight["loss"][0] and (found["loss"][1:] != straight["loss"][1:4]).all()


def test_the_same_rows_have_the_same_losses_online_as_stored(stored, transformed):
    config = short_run(stored[0].storage, "by-hand", **ALIGNED)
    manifest = DataSets.open(config.proportions).first
    raw = detected(OnlineConfig(storage=stored[0].storage, resolutions=[32], image_encoder_model=MODEL))
    online = features.FeatureEncoder(**features.encoder_arguments(raw))(transformed)
    places = {one: row for row, one in enumerate(online["id"].to_pylist())}
    listed = features.read_list(stored[0].latents_uri, MODEL)["files"]
    folders = stored[0].latents_uri, features.folder_of(stored[0].latents_uri, MODEL)
    latents, found = (
        pa.concat_tables(pq.read_table(storage.join(uri, "data", file["name"])) for file in listed) for uri in folders
    )
    rows = latents.append_column(schema.FEATURES, found["image_features_32"])
    (loss,) = Repa().auxiliary_losses(config, manifest)
    by_path = []
    for table in (rows, online.take([places[one] for one in rows["id"].to_pylist()])):
        state, losses = TrainStep(config, manifest, auxiliary=[loss]), []
        for step in range(4):
            batch = table.slice(step * config.global_batch_size, config.global_batch_size).combine_chunks()
            line = state.step(step, [Unit.from_arrow(batch, manifest, manifest.latents(32), 0)])
            losses.append((line["loss"], line["repa"]))
        by_path.append(losses)
    np.testing.assert_allclose(by_path[1], by_path[0], rtol=1e-4)


@pytest.mark.slow
def test_an_online_run_computes_the_features_on_the_way(stored):
    raw = OnlineConfig(storage=stored[0].storage, resolutions=[32], validation_share=0.05, image_encoder_model=MODEL)
    changes = {"latents_uri": storage.join(raw.storage, "online"), "validation_share": 0.05}
    config = short_run(raw.storage, "online", **{**ALIGNED, **changes})
    _, raw = prepare_run(raw, config)
    fit(config, stream=online_stream(raw, seed=config.seed))
    found = metrics.read_metrics(config.run_uri)
    assert len(found) == 12 and found["repa"].iloc[-1] < found["repa"].iloc[0]
