"""REPA as an auxiliary loss of the training step: what it changes, what it leaves, how it resumes, what is refused."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
import torch

from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.lesson.ablations import random_batch
from helpers.model.denoisers import build_denoiser
from helpers.production.extras import repa
from helpers.train import checkpoint
from helpers.train.step import AuxiliaryLoss, TrainStep
from tests.latents import refuse
from tests.steps import BATCH, MIDDLE, STEPS, column, everything, one_level_recipe, same, save, train, train_in_groups

FEATURES, POSITIONS = 6, 64  # the middle block of a U-Net of one level has 8 x 8 positions at 64 pixels


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return one_level_recipe(tmp_path_factory.mktemp("unet"))


@pytest.fixture(scope="module")
def manifest(build_manifest):
    return build_manifest()


@pytest.fixture(scope="module")
def rows(build_latents):
    """Rows with features. Some are masked, and their features are NaN, as a null's may be."""
    table = build_latents(BATCH * STEPS)
    keep = np.arange(len(table)) % 7 != 2
    values = np.random.default_rng(0).normal(size=(len(table), FEATURES * POSITIONS)).astype(np.float16)
    values[~keep] = np.nan
    return table.append_column("keep", pa.array(keep)).append_column(schema.FEATURES, schema.to_binary(values))


def aligned(config, manifest, end_step=None, weight=0.5, block="mid_block"):
    """A `TrainStep` with REPA's loss."""
    channels, _ = repa.block_output(config.unet_config, manifest, manifest.latents(config.largest_resolution), block)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        projection = repa.Projection(channels, 16, FEATURES)
    return TrainStep(config, manifest, auxiliary=[AuxiliaryLoss("repa", projection, block, weight, end_step)])


@pytest.fixture(scope="module")
def one(recipe, manifest, rows):
    """One process: `(lines, state)` after all steps."""
    state = aligned(recipe(), manifest)
    return train(state, rows), state


def test_the_block_is_drawn_to_the_features_from_the_first_step_on(one, recipe, manifest, rows):
    plain = train(TrainStep(recipe(), manifest), rows)
    assert one[0][0]["loss"] == plain[0]["loss"] and one[0][1]["loss"] != plain[1]["loss"]
    state, first = aligned(recipe(), manifest), rows.slice(0, BATCH)
    found = column([train(state, first, 0, 1)[0] for _ in range(20)], "repa")
    assert np.isfinite(found).all() and found[-1] < 0.95 * found[0]


def test_from_its_end_step_on_it_has_no_effect(one, recipe, manifest, rows):
    ended, always = column(train(aligned(recipe(), manifest, end_step=1), rows)), column(one[0])
    assert (ended[:2] == always[:2]).all() and (ended[2:] != always[2:]).all()


def test_its_weights_are_in_no_average_and_in_no_export(one, recipe, tmp_path):
    names = {name for name, _ in build_denoiser(recipe().unet_config).named_parameters()}
    assert one[1].ema.state_dict().keys() == names
    save(tmp_path, one[1], STEPS)
    for which in ("ema", "model"):
        assert checkpoint.load_weights(tmp_path, build_denoiser(recipe().unet_config), which)


def test_it_resumes_to_the_bit_and_starts_from_a_run_without_it(one, recipe, manifest, rows, tmp_path):
    state = aligned(recipe(), manifest)
    train(state, rows, 0, MIDDLE)
    save(tmp_path / "aligned", state, MIDDLE)
    resumed = aligned(recipe(), manifest)
    assert train(resumed, rows, checkpoint.load(tmp_path / "aligned", resumed)) == one[0][MIDDLE:]
    assert same(everything(resumed), everything(one[1]))
    plain = TrainStep(recipe(), manifest)
    save(tmp_path / "plain", plain, 0)
    started = aligned(recipe(seed=5), manifest)
    checkpoint.load_initial_weights(tmp_path / "plain", started.denoiser)
    weights = dict(started.denoiser.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in plain.denoiser.named_parameters())


def test_rows_without_features_are_refused_and_not_left_out(recipe, manifest, rows):
    with pytest.raises(ValueError, match="no image features, which repa needs"):
        train(aligned(recipe(), manifest), rows.drop_columns([schema.FEATURES]), 0, 1)


# ---- on several workers

RUNS = {"ddp on 2": ("ddp", 2), "fsdp-full on 4": ("fsdp-full", 4)}


@pytest.fixture(scope="module")
def runs(recipe, manifest, rows, tmp_path_factory):
    asked = {
        name: (recipe(strategy=strategy, num_training_workers=workers), manifest, rows)
        for name, (strategy, workers) in RUNS.items()
    }
    return train_in_groups(tmp_path_factory.mktemp("ranks"), asked, aligned)


@pytest.mark.parametrize("name", RUNS)
def test_one_two_and_four_workers_agree_and_resume(name, one, runs):
    lines, resumed = runs[name][0]["lines"], runs[name][0]["resumed"]
    for loss in ("loss", "repa"):
        np.testing.assert_allclose(column(lines, loss), column(one[0], loss), rtol=1e-5)
    assert resumed == lines[MIDDLE:]


def test_micro_batches_change_nothing(one, recipe, manifest, rows):
    lines = train(aligned(recipe(micro_batch_size=1), manifest), rows)
    for loss in ("loss", "repa"):
        np.testing.assert_allclose(column(lines, loss), column(one[0], loss), rtol=1e-5)


def test_compiled_blocks_change_nothing(one, graphs, recipe, manifest, rows):
    lines = train(aligned(recipe(compile_unet=True), manifest), rows, 0, 3)
    assert graphs
    for loss in ("loss", "repa"):
        np.testing.assert_allclose(column(lines, loss), column(one[0], loss)[:3], rtol=1e-5)


def test_a_transformer_is_aligned_with_or_without_recomputed_activations():
    found = []
    for checkpointing in (False, True):
        config = TrainingConfig(
            unet_config="tiny-transformer", global_batch_size=4, activation_checkpointing=checkpointing
        )
        manifest, units = random_batch(config, num_tokens=8)
        block = repa.default_block(config.unet_config)
        assert block.startswith("blocks.")
        _, positions = repa.block_output(config.unet_config, manifest, manifest.latents(64), block)
        generator = torch.Generator().manual_seed(0)
        units[0].features = torch.randn(4, FEATURES * positions, generator=generator).half()
        state = aligned(config, manifest, block=block)
        found.append([state.step(step, units) for step in range(3)])
    assert found[0][2]["repa"] < found[0][0]["repa"]
    assert [column(lines).tolist() for lines in found][0] == pytest.approx(column(found[1]).tolist(), rel=1e-5)


# ---- what is refused before anything starts


def config_with(**extra):
    return TrainingConfig(image_encoder_model="tiny-clip", extras={"repa": extra} if extra else {})


def test_a_block_that_the_denoiser_lacks_is_refused(manifest):
    with pytest.raises(ValueError, match=r"block='blocks.4'.*choose from down_blocks.0.*mid_block"):
        refuse(manifest, config_with(block="blocks.4"), checks=[repa.repa_fits])


def test_latents_without_features_are_refused_with_what_adds_them(manifest, tmp_path):
    with pytest.raises(ValueError, match=r"-p image_encoder_model tiny-clip`, which adds them and encodes nothing"):
        refuse(manifest, config_with(), str(tmp_path), checks=[repa.repa_fits])


def test_a_grid_that_does_not_fit_is_refused(manifest):
    """An online run's features follow the autoencoder and the denoiser that it began with."""
    job = {"online": {"width_column": None}, "size_multiple": 32}
    online = dataclasses.replace(manifest, job=job)
    with pytest.raises(ValueError, match=r"64 x 64 pixels .* grid of 2 x 2, and the block up_blocks.0 .* positions"):
        refuse(online, config_with(block="up_blocks.0"), checks=[repa.repa_fits])
