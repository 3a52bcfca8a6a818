"""Pictures of several shapes and sizes: from the transform to the training step. No Ray."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder, prepare, stages
from helpers.evaluate import losses_by_noise
from helpers.latents import schema
from helpers.latents.manifest import DataSets, read_manifest
from helpers.latents.plan import plan_run, read_files
from helpers.latents.read import latents_reader, split_units
from helpers.model.denoisers import build_denoiser
from helpers.production import monitor
from helpers.production.checks import training
from helpers.production.data.validation_set import ValidationSet
from helpers.raw import images, inputs
from helpers.train.step import TrainStep, Unit
from tests.latents import read_steps, write_job
from tests.processes import start_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(64, 64), (96, 48), (48, 96), (40, 40), (20, 60), (90, 64), (8, 8)]
CONFIG = PreprocessingConfig(resolutions=[32, 64], aspect_ratios=[0.5, 1, 2], validation_share=0.3)


def raw_rows(sizes):
    """Raw rows of plain pictures, ids 0 and up."""

    random = np.random.default_rng(0)

    def picture(size):
        data, pixels = io.BytesIO(), random.integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data, "PNG")
        return data.getvalue()

    number = len(sizes)
    return pa.table(
        {
            inputs.ID: pa.array(range(number)),
            inputs.CAPTION: ["a caption"] * number,
            inputs.IMAGE: pa.array(map(picture, sizes), pa.large_binary()),
            inputs.ERROR: pa.nulls(number, pa.string()),
            inputs.SOURCE: ["a"] * number,
            inputs.NOTE: [""] * number,
        }
    )


@pytest.fixture(scope="module")
def encoded():
    """`SIZES`, ten times each, transformed and encoded."""
    latent_encoder = encoder.LatentEncoder(**prepare.encoder_arguments(CONFIG))
    return latent_encoder(stages.transform(raw_rows(SIZES * 10), config=CONFIG))


@pytest.fixture
def folder(tmp_path, encoded):
    """The rows in a latents folder: (URI, manifest)."""
    columns, model = prepare.stored_columns(CONFIG, 1), {"model": "tiny-sd", "revision": "0", "precision": "fp32"}
    fields = {"validation_share": CONFIG.validation_share, "encoder": model, "scaling_factor": 0.6}
    write_job(str(tmp_path), len(encoded), [encoded], columns, **fields)
    return str(tmp_path), read_manifest(str(tmp_path))


def test_a_picture_has_latents_of_its_shape_at_each_size_it_reaches(encoded):
    found = [
        "+".join(name.removeprefix("image_latents_") for name, value in row.items() if "latents_" in name and value)
        for row in encoded.to_pylist()[: len(SIZES)]
    ]
    assert found == ["32+64", "48x16+96x48", "16x48+48x96", "32", "16x48", "32+64", ""]
    assert encoded["reason"].to_pylist()[-1] == "smaller than 32 pixels"


def test_latents_are_those_of_the_crop_alone(encoded):
    """The same as a picture has that is encoded by itself, cropped to its shape beforehand."""
    rows, encode = raw_rows(SIZES * 10), encoder.LatentEncoder(CONFIG.encoder_model)
    columns = {spec.name: spec for spec in prepare.stored_columns(CONFIG, 1)}
    picture = images.decode(rows[inputs.IMAGE][5].as_py())  # 90 x 64, nearest to a square
    pixels = images.cut(picture, ((13, 0, 77, 64), False), (32, 32))
    squares = columns["image_latents_32"]
    stored, valid = squares.decode(encoded[squares.name].cast(squares.arrow_type))
    expected = encode.encode_images(pixels[None])[0][0]
    assert valid[5]
    np.testing.assert_allclose(stored[5].astype(np.float32), expected.astype(np.float32), rtol=0.01, atol=0.02)


def test_row_groups_hold_rows_of_one_bucket_as_the_manifest_says(folder):
    uri, manifest = folder
    files = read_files(uri)
    (name,), names, buckets = files.names.to_pylist(), files.bucket_names, files.group_buckets
    with pq.ParquetFile(f"{uri}/data/{name}") as file:
        assert file.num_row_groups == len(buckets) and names[buckets[0]] == "32+64"
        for group, bucket in enumerate(buckets):
            rows = file.read_row_group(group)
            has = [column for column in rows.column_names if "latents_" in column and rows[column].null_count == 0]
            assert all(rows[column].null_count in (0, len(rows)) for column in rows.column_names)
            held = {bool(one) for one in schema.held_out_mask(rows["id"].to_pylist(), CONFIG.validation_share)}
            assert names[bucket] == schema.bucket_name(has, held.pop()) and not held
    assert manifest.buckets["32+64"] + manifest.buckets["held out 32+64"] == 20
    assert sum(manifest.buckets.values()) == manifest.written == 60
    assert manifest.rows_at(64) == 40 and manifest.rows_at(32) == 60


def config_of(uri, **values):
    return TrainingConfig(
        **{"latents_uri": uri, "resolution": 64, "global_batch_size": 4, "units_per_step": 2, **values}
    )


def batches(plan, config, manifest, last):
    """{step: its units}, as the reading tasks and a worker make them."""
    blocks = list(read_steps(plan, latents_reader(plan), 0, last))
    assert len({block.schema for block in blocks}) == 1  # whatever their shapes, blocks have the same columns
    units = {}
    for block in blocks:
        units.update(split_units(block, config.unit_rows))
    return {
        step: [Unit.from_arrow(units[2 * step + slot], manifest, plan.latents_at(step), 2 * slot) for slot in (0, 1)]
        for step in range(last)
    }


@pytest.mark.parametrize("resolution", [64, {32: 0.5, 64: 0.5}])
def test_every_row_of_a_batch_is_trained_on(folder, encoded, resolution):
    """With the stored latents of the step's shape, though shapes travel in one column."""
    uri, manifest = folder
    config = config_of(uri, resolution=resolution)
    plan = plan_run(DataSets({uri: manifest}, config.proportions), config, {uri: read_files(uri)})
    state, shapes = TrainStep(config, manifest), set()
    place = {row_id: row for row, row_id in enumerate(encoded["id"].to_pylist())}
    for step, units in batches(plan, config, manifest, plan.steps_per_epoch).items():
        latents = plan.latents_at(step)
        stored, valid = latents.decode(encoded[latents.name].cast(latents.arrow_type))
        rows = [place[row_id] for unit in units for row_id in unit.ids]
        assert valid[rows].all() and not schema.held_out_mask(list(range(70)), 0.3)[rows].any()
        np.testing.assert_array_equal(np.concatenate([unit.moments for unit in units]), stored[rows])
        metrics = state.step(step, units[: 1 + step % 2] if step else units)
        assert metrics["num_kept"] == (4 if step % 2 or not step else 2) and np.isfinite(metrics["loss"])
        shapes.add(units[0].moments.shape[2:])
    assert len(shapes) == sum(one["steps"] > 0 for one in training.describe_shapes(plan)) >= 3


def validate(rank, folder, uri, config, world):
    """One of `world` processes, which validate on a validation set together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world} meet", rank=rank, world_size=world)
    config = TrainingConfig(**config)
    rows = ValidationSet(uri, config.largest_resolution, rank, world)
    losses = losses_by_noise(build_denoiser("tiny").eval(), rows.manifest, rows, config)
    np.save(f"{folder}/{world}-{rank}.npy", losses)
    dist.destroy_process_group()


def test_any_number_of_ranks_finds_the_loss_of_a_whole_validation_set(folder, tmp_path):
    """Of all of its shapes, held out or not. Three ranks have two row groups of each shape: one computes in vain."""
    uri, manifest = folder
    config, denoiser = TrainingConfig(), build_denoiser("tiny").eval()
    rows = ValidationSet(uri, config.largest_resolution)
    assert rows.num_rows == 40
    alone = losses_by_noise(denoiser, rows.manifest, rows, config)
    in_one_batch = losses_by_noise(denoiser, manifest, pq.read_table(f"{uri}/data"), config)
    np.testing.assert_allclose(alone, in_one_batch, rtol=1e-5)
    for world in (2, 3):
        start_ranks(validate, (str(tmp_path), uri, config.to_dict(), world), nprocs=world)
        for rank in range(world):
            np.testing.assert_allclose(np.load(tmp_path / f"{world}-{rank}.npy"), alone, rtol=1e-12)


def test_a_bucket_that_is_left_out_is_said_when_a_run_opens(folder, capsys, tmp_path):
    uri, _ = folder
    config = config_of(uri, storage=str(tmp_path), global_batch_size=9, units_per_step=1, run_name="nine")
    monitor.open_run(config)
    said = capsys.readouterr().out
    assert "compile_unet" not in said
    described = training.describe_shapes(plan_run(DataSets.open(config.proportions), config))
    assert {one["shape"] for one in described} == {"64x64", "48x96", "96x48"}
    for one in described:
        sentence = f"of {one['shape']} are left out: their {one['rows']} rows"
        assert (sentence in said) == (one["steps"] == 0)
    assert "are left out" in said and f"validation_share=0.02 is not used: {uri} was encoded with 0.3." in said
