"""The planner: the published tables from their inputs, closed forms, and what it says about bad input."""

import dataclasses
import math
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.config.notebook import PreprocessingConfig, TrainingConfig
from helpers.latents import schema
from helpers.lesson import estimates, full_run, planner, published_results

CHANGES = st.fixed_dictionaries(
    {
        "epochs": st.floats(1, 50),
        "trainers": st.integers(1, 64),
        "encoders": st.integers(1, 200),
        "storage_dollars": st.floats(0, 1),
        "egress_dollars": st.floats(0, 0.1),
        "faults": st.none() | st.builds(planner.Faults, failures_per_day=st.floats(0, 1)),
    }
)


def scenario(**changes):
    """Published rates at 256 pixels, without storage, faults or FLOPs to count."""
    values = {"trainer": planner.trainer_rate(256), "encoder": planner.known_encoder_rate(256), "storage_dollars": 0.0}
    return planner.Scenario(**{**values, **changes})


@pytest.mark.parametrize("row", list(published_results.EPOCH_COSTS.itertuples()), ids=lambda row: row.setup)
def test_the_published_costs_follow_from_the_published_rates_to_0_3_percent(row):
    """The blog's Table 2: offline, its $2,183 for encoding are hours of A10Gs, and storage is not counted."""
    rate = published_results.EPOCH_COSTS.set_index("setup")["images_per_second"] / 32
    encoder = published_results.FACTS["one A10G, offline" if row.setup == "offline" else "one A10G, online, at least"]
    one = scenario(
        trainer=planner.Rate(rate["online" if row.setup == "online" else "offline"]),
        encoder=planner.Rate(encoder.value),
        dataloader=planner.Rate(rate["DataLoader"]),
    )
    found = planner.estimate(one, row.setup)
    assert found.training_hours == pytest.approx(row.hours, rel=0.001)
    assert found.dollars == pytest.approx(row.dollars, rel=0.003)
    if row.setup == "offline":
        assert found.dollars - 4 * 40.96 * found.training_hours == pytest.approx(row.one_time_dollars, rel=0.001)


# ---- what follows from what


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_no_path_is_faster_than_its_trainers(changes):
    one = scenario(**changes)
    table = planner.compare_paths(one)
    fastest = one.rows * one.epochs / one.training_rate / 3600
    assert list(table.index) == list(planner.PATHS)
    assert (table["training_hours"] >= fastest * (1 - 1e-9)).all()
    assert (table["hours"] - table["encoding_hours"] - table["training_hours"]).abs().max() < 1e-6 * fastest
    parts = table[["machine_dollars", "storage_dollars", "egress_dollars"]].sum(axis=1)
    assert parts.tolist() == pytest.approx(table["dollars"].tolist())
    assert table.loc["once", "training_hours"] <= table.loc["online", "training_hours"] * (1 + 1e-9)


def test_encoded_once_is_online_for_the_first_epoch_only():
    one = scenario(encoders=10)
    first, tenth = (
        {path: planner.estimate(dataclasses.replace(one, epochs=count), path) for path in planner.PATHS}
        for count in (1, 10)
    )
    assert first["once"].hours == first["online"].hours and first["once"].bottleneck == "encoders"
    more = tenth["once"].training_hours - first["once"].training_hours
    assert more == pytest.approx(tenth["offline"].training_hours - first["offline"].training_hours)
    assert first["offline"].bottleneck == "trainers"


@settings(max_examples=60, deadline=None)
@given(CHANGES, st.sampled_from(planner.PATHS), st.sampled_from(planner.PATHS))
def test_at_the_break_even_both_paths_cost_the_same(changes, path, other):
    one = scenario(**{**changes, "epochs": 1.0})
    epochs = planner.break_even(one, path, other)
    assert epochs >= 1
    if 1 < epochs < 1e6:
        costs = [planner.estimate(dataclasses.replace(one, epochs=epochs), each).dollars for each in (path, other)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-6)


def test_the_break_even_is_one_or_infinity_where_a_path_is_always_or_never_cheaper():
    each = planner.Rate(100.0)
    one = scenario(trainer=each, encoder=each, trainers=1, encoders=8, rows=1e6)
    assert planner.break_even(one, "once", "online") == 1  # both encode the first epoch at the same price
    assert planner.break_even(dataclasses.replace(one, storage_dollars=1e4), "offline", "online") == math.inf


def test_balanced_encoders_keep_the_trainers_busy():
    one = scenario()
    enough = dataclasses.replace(one, encoders=one.balanced_encoders)
    assert planner.estimate(enough, "online").bottleneck == "trainers"
    fewer = dataclasses.replace(one, encoders=one.balanced_encoders - 1)
    assert planner.estimate(fewer, "online").bottleneck == "encoders"
    assert one.balanced_encoders == math.ceil(one.training_rate / 101.875)


def test_egress_counts_what_is_read():
    far = scenario(epochs=3, egress_dollars=0.02)
    raw, latents = far.rows * far.raw_bytes / 1e9, far.rows * far.latents_bytes / 1e9
    read = {path: planner.estimate(far, path).egress_dollars / 0.02 for path in planner.PATHS}
    expected = {"DataLoader": 3 * raw, "online": 3 * raw, "offline": raw + 3 * latents, "once": raw + 2 * latents}
    assert read == pytest.approx(expected)


# ---- faults


def test_the_best_interval_is_youngs_and_loses_least():
    assert planner.best_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert planner.best_interval(100.0, 10.0) == 10.0  # fails before a checkpoint is written
    faults = planner.Faults(failures_per_day=0.5, checkpoint_seconds=20.0)
    table = planner.interval_table(faults, 4, 163.84, range(60, 7200, 60))
    best = table[table[""] == "best (Daly)"].iloc[0]
    assert best["slower"] <= table["slower"].min() * 1.001
    assert best["$ a day for it"] == pytest.approx(24 * 163.84 * best["slower"] / (1 + best["slower"]))


def test_a_failure_costs_its_work_its_restart_and_its_wait():
    faults = planner.Faults(
        failures_per_day=1.0, checkpoint_every_seconds=3600.0, checkpoint_seconds=0.0, upload_seconds=60.0
    )
    lost = 1800 + 60 + faults.restart_seconds + faults.return_seconds
    assert faults.slowdown(1) == pytest.approx(1 + lost / 86_400)
    noticed = dataclasses.replace(faults, failures_per_day=0.0, reclaims_per_day=1.0)
    assert noticed.slowdown(1) == pytest.approx(1 + (lost - 1860 + faults.notice_seconds) / 86_400)
    one = scenario(faults=faults, trainers=1)
    calm = dataclasses.replace(one, faults=None)
    for path in planner.PATHS:
        ratio = planner.estimate(one, path).training_hours / planner.estimate(calm, path).training_hours
        assert ratio == pytest.approx(faults.slowdown(1))


# ---- rates


def test_rates_say_where_they_come_from():
    assert planner.trainer_rate(256).origin == planner.trainer_rate(512).origin == "derived"
    assert planner.known_encoder_rate(256).origin == planner.trainer_encodes(256).origin == "derived"
    assert planner.known_encoder_rate(512).origin == planner.trainer_encodes(512).origin == "estimated"
    assert "derived: 5,908 images/s / 32 GPUs" in str(planner.trainer_rate(256))
    assert planner.sd2(512).latents_bytes == 2 * (2 * 4 * 64 * 64 + 77 * 1024)


@pytest.mark.parametrize("resolution", [256, 512])
def test_rates_of_another_recipe_are_estimated_at_the_share_of_the_peak_that_stable_diffusion_2_reaches(resolution):
    sd2, today = planner.phase("sd2", resolution), planner.phase("today", resolution)
    assert today.trainer.origin == today.encoder.origin == "estimated"
    more = {
        "trainer": estimates.step_flops(resolution, "today") / estimates.step_flops(resolution),
        "encoder": estimates.encoder_flops(resolution, recipe="today") / estimates.encoder_flops(resolution),
    }
    for each, times in more.items():
        slower = getattr(sd2, each).images_per_second / getattr(today, each).images_per_second
        assert slower == pytest.approx(times)
    assert today.dataloader.images_per_second < sd2.dataloader.images_per_second
    assert (today.rows, today.trainers) == (sd2.rows, sd2.trainers)


# ---- today's recipe beside Stable Diffusion 2's


@pytest.fixture(scope="module")
def recipes():
    return planner.compare_recipes()


def test_stored_bytes_are_those_of_the_columns_that_preprocessing_writes(recipes):
    """Captions of Stable Diffusion 2 with their padding; today's without, at the mean number of tokens."""
    for (resolution, name), row in recipes.iterrows():
        one, side = estimates.RECIPES[name], resolution // 8
        latents = schema.ColumnSpec("image_latents_256", (2, one.channels, side, side))
        text = schema.ColumnSpec("caption_embeddings", (one.tokens, one.text.hidden_size), ragged=name == "today")
        assert row["latents, KB"] * 1e3 == latents.row_bytes
        assert row["captions, KB"] * 1e3 == sum(text.bytes_of(tokens) for tokens in one.stored_tokens)
        total = planner.phase(name, resolution).rows * (row["latents, KB"] + row["captions, KB"]) / 1e9
        assert row["all rows, TB"] == pytest.approx(total)


def test_the_profiles_have_the_planned_models_and_encoders_that_feed_the_trainers(recipes):
    for (resolution, name), row in recipes.iterrows():
        profile, one = full_run.read_profile(f"full-{name}-{resolution}"), estimates.RECIPES[name]
        assert row["encoders online"] <= profile["num_encoders"] < 1.08 * row["encoders online"]
        assert profile["num_transform_workers"] == 6 * profile["num_encoders"]
        assert profile["unet_config"] == one.unet_config and profile.get("maximum_tokens", 77) == one.tokens
        captions = profile.get("caption_column", "caption")
        assert len(one.stored_tokens) == (1 if isinstance(captions, str) else len(captions))
        online = planner.phase(name, resolution, encoders=profile["num_encoders"])
        assert row["hours, online"] == planner.compare_paths(online)["hours"]["online"]


def test_the_notebook_says_what_the_comparison_of_the_recipes_says(recipes):
    text = (pathlib.Path(planner.__file__).parent / "Scaling.ipynb").read_text()
    old, new = recipes.loc[256, "sd2"], recipes.loc[256, "today"]
    row = new["latents, KB"] + new["captions, KB"]
    pays = recipes["storing pays from, epochs"].unstack("pixels")
    for phrase in (
        f"{new['encoding, GFLOP']:.0f} GFLOP, of which {estimates.encoder_flops(recipe='today') / 1e9:.0f} are its",
        f"against {new['step, GFLOP']:.0f}. Stable Diffusion 2 has {old['encoding, GFLOP']:.0f} against "
        f"{old['step, GFLOP']:.0f}.",
        f"{new['encoders online']:.0f} in place of {old['encoders online']:.0f}",
        f"{row / (old['latents, KB'] + old['captions, KB']):.1f} times as large, {new['captions, KB'] / row:.0%}"[:-1],
        f"from {pays[256]['today']:.1f} epochs on at 256 pixels and {pays[512]['today']:.1f} at 512, where it was "
        f"{pays[256]['sd2']:.1f} and {pays[512]['sd2']:.1f}",
    ):
        assert phrase in text


def test_own_rates_are_measured_by_one_function(one_thread):
    config = TrainingConfig(resolution=32, global_batch_size=8, units_per_step=2, num_training_workers=2)
    raw = PreprocessingConfig(resolutions=[32], encoder_batch_size=4)
    rates = planner.measure_rates(config, raw, steps=2)
    assert set(rates) == {"encoder", "trainer"}
    assert all(rate.origin == "measured" and "CPU" in rate.source for rate in rates.values())


# ---- bad input


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: planner.Rate(0), "images_per_second=0"),
        (lambda: planner.Rate("fast"), "images_per_second='fast'"),
        (lambda: planner.Machine("m", 1, -1), "dollars_per_hour of m=-1"),
        (lambda: planner.Machine("m", 1.5, 1), "num_gpus of m=1.5"),
        (lambda: scenario(rows=0), "rows=0"),
        (lambda: scenario(epochs=0.5), "epochs=0.5"),
        (lambda: scenario(trainers=0), "trainers=0"),
        (lambda: scenario(storage_dollars=-1), "storage_dollars=-1"),
        (lambda: planner.estimate(scenario(), "offline!"), "path='offline!'"),
        (lambda: planner.Faults(failures_per_day=-1), "failures_per_day=-1"),
        (lambda: planner.Faults(checkpoint_every_seconds=0), "checkpoint_every_seconds=0"),
        (lambda: planner.best_interval(0, 1), "checkpoint_seconds=0"),
        (lambda: planner.interval_table(planner.Faults(), 4, "free"), "dollars_per_hour='free'"),
        (lambda: planner.trainer_rate(300), "resolution=300"),
    ],
)
def test_bad_values_are_named_in_one_sentence(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith(".")
