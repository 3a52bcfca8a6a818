"""Paired trials: what the settings share, comparable errors, intervals. No Ray."""

import itertools

import numpy as np
import pytest
import torch

from helpers.config import TrainingConfig
from helpers.latents.held_out import first
from helpers.lesson import trials
from helpers.model import diffusion
from tests.benchmarks import made_up

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (6, 128)}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of trials of three steps."""
    folder = str(tmp_path_factory.mktemp("trials"))
    made_up.write_latents(f"{folder}/latents", 60, SHAPES, 30, validation_share=0.1)
    return TrainingConfig(storage=folder, resolution=32, global_batch_size=8, max_steps=3, warmup_steps=1)


def test_a_setting_against_itself_differs_by_nothing(config):
    found = trials.run(
        config, {"one": {}, "same": {"run_name": "other"}, "eps": {"prediction_type": "epsilon"}}, [0, 1]
    )
    compared = trials.compare_settings(found).set_index(["setting", "metric"])
    assert (compared.loc["same"][["difference", "low", "high"]] == 0).all(axis=None)
    assert (compared.loc["eps"]["difference"] != 0).all()
    error = found[(found["metric"] == "min-SNR error") & (found["setting"] == "one")]["value"]
    assert error.iloc[0] != error.iloc[1]  # seeds are different runs


def test_settings_share_rows_positions_and_first_weights(config, monkeypatch):
    seen = {}

    def look(trial):
        units = list(itertools.chain.from_iterable(trials.batches(trial)))
        draws = [diffusion.random_draws(trial.seed, 0, unit.positions_U, (4, 4, 4)).noise_BCHW for unit in units]
        seen[trial.run_name, trial.seed] = [unit.ids for unit in units], torch.stack(draws)

    monkeypatch.setattr(trials, "train", look)
    monkeypatch.setattr(trials, "held_out_errors", lambda *_: {"error": 0.0})
    trials.run(config, {name: {"run_name": name} for name in "ab"}, [3, 4])
    for seed in (3, 4):
        assert seen["a", seed][0] == seen["b", seed][0] and torch.equal(seen["a", seed][1], seen["b", seed][1])
    assert seen["a", 3][0] != seen["a", 4][0]
    ids = list(itertools.chain.from_iterable(seen["a", 3][0]))
    held_out = first(config.proportions, config.largest_resolution, 1000)["id"].to_pylist()
    assert len(set(ids)) == 24 and not set(ids) & set(held_out)


def test_an_interval_is_students():
    quantiles = {2: 12.706204736, 3: 4.302652730, 5: 2.776445105, 30: 2.045229642}  # of t at 97.5 %, by scipy 1.17
    for count, quantile in quantiles.items():
        values = np.random.default_rng(count).normal(3, 2, count)
        half = quantile * values.std(ddof=1) / count**0.5
        expected = (values.mean() - half, values.mean() + half)
        assert trials.t_interval(values.tolist()) == pytest.approx(expected, rel=1e-6)
