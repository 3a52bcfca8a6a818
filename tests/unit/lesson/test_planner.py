"""The planner: the published tables from their inputs, closed forms, and what the notebook says of it."""

import dataclasses
import math
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.latents import schema
from helpers.lesson import estimates, full_run, planner, published_results

pytestmark = pytest.mark.slow
README = pathlib.Path(__file__).parents[3] / "README.md"
SCENARIOS = st.builds(
    planner.Scenario,
    trainer=st.just(planner.Rate(184.6)),
    encoder=st.just(planner.Rate(101.9)),
    trainers=st.integers(1, 64),
    encoders=st.integers(1, 200),
    storage_dollars=st.floats(0, 1),
    faults=st.none() | st.builds(planner.Faults, failures_per_day=st.floats(0, 1)),
)


def test_the_readmes_table_of_paths_is_the_planners():
    scenario = planner.phase("sd2", 256, encoders=58)
    text = README.read_text()
    for _, found in planner.compare_paths(scenario).iterrows():
        assert f"| {found.hours:.1f} | {found.dollars:,.0f} | {found.dollars_another_epoch:,.0f} |" in text
    assert f"From {planner.break_even(scenario, 'offline', 'online'):.2f} epochs on" in text
    assert f"{scenario.rows * scenario.latents_bytes / 1e12:.0f} TB" in text


def test_the_readme_has_the_published_totals():
    printed = {name: f"{value:,.0f}" for name, value in published_results.totals()["printed"].items()}
    by_anyscale = printed["A100 hours"], printed["Anyscale, on demand"], printed["Anyscale, 1 year reserved"]
    assert "| {} | {} on demand; {} reserved".format(*by_anyscale) in README.read_text()
    assert f"| {printed['MosaicML, all']} | {printed['MosaicML, dollars']}, at $2" in README.read_text()


@pytest.mark.parametrize("row", list(published_results.EPOCH_COSTS.itertuples()), ids=lambda row: row.setup)
def test_the_published_costs_follow_from_the_published_rates_to_0_3_percent(row):
    """The blog's Table 2: offline, its $2,183 for encoding are hours of A10Gs, and storage is not counted."""
    rate = published_results.EPOCH_COSTS.set_index("setup")["images_per_second"] / 32
    encoder = published_results.FACTS["one A10G, offline" if row.setup == "offline" else "one A10G, online, at least"]
    one = planner.Scenario(
        trainer=planner.Rate(rate["online" if row.setup == "online" else "offline"]),
        encoder=planner.Rate(encoder.value),
        dataloader=planner.Rate(rate["DataLoader"]),
        storage_dollars=0.0,
    )
    found = planner.estimate(one, row.setup)
    assert found.training_hours == pytest.approx(row.hours, rel=0.001)
    assert found.dollars == pytest.approx(row.dollars, rel=0.003)
    if row.setup == "offline":
        assert found.dollars - 4 * 40.96 * found.training_hours == pytest.approx(row.one_time_dollars, rel=0.001)


@settings(max_examples=60, deadline=None)
@given(SCENARIOS, st.floats(1, 50))
def test_no_path_is_faster_than_its_trainers(one, epochs):
    one = dataclasses.replace(one, epochs=epochs)
    table = planner.compare_paths(one)
    fastest = one.rows * one.epochs / one.training_rate / 3600
    assert list(table.index) == list(planner.PATHS)
    assert (table["training_hours"] >= fastest * (1 - 1e-9)).all()
    assert table["hours"].tolist() == pytest.approx((table["encoding_hours"] + table["training_hours"]).tolist())
    assert table["dollars"].tolist() == pytest.approx((table["machine_dollars"] + table["storage_dollars"]).tolist())
    stretch = one.faults.slowdown(one.trainers) if one.faults else 1
    first, second = (planner.estimate(dataclasses.replace(one, epochs=count), "once") for count in (1, 2))
    assert first.training_hours == planner.estimate(dataclasses.replace(one, epochs=1), "online").training_hours
    assert second.training_hours - first.training_hours == pytest.approx(stretch * fastest / epochs)  # a stored epoch
    enough = dataclasses.replace(one, encoders=one.balanced_encoders)
    assert planner.estimate(enough, "online").bottleneck == "trainers"


@settings(max_examples=60, deadline=None)
@given(SCENARIOS, st.sampled_from(planner.PATHS), st.sampled_from(planner.PATHS))
def test_at_the_break_even_both_paths_cost_the_same(one, path, other):
    epochs = planner.break_even(one, path, other)
    assert epochs >= 1 and (path != other or epochs == 1)
    if 1 < epochs < 1e6:
        costs = [planner.estimate(dataclasses.replace(one, epochs=epochs), each).dollars for each in (path, other)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-6)
    dear = dataclasses.replace(one, storage_dollars=1e4)
    assert planner.break_even(dear, "offline", "online") == math.inf


def test_the_best_interval_is_youngs_and_loses_least():
    assert planner.best_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    assert planner.best_interval(100.0, 10.0) == 10.0  # fails before a checkpoint is written
    faults = planner.Faults(failures_per_day=0.5, checkpoint_seconds=20.0)
    table = planner.interval_table(faults, 4, 163.84).set_index("")
    best = table.loc["best (Daly)"]
    tried = [dataclasses.replace(faults, checkpoint_every_seconds=seconds) for seconds in range(60, 7200, 60)]
    assert best["slower"] <= min(one.slowdown(4) - 1 for one in tried) * 1.001
    assert best["$ a day for it"] == pytest.approx(24 * 163.84 * best["slower"] / (1 + best["slower"]))
    calm = dataclasses.replace(faults, checkpoint_every_seconds=3600.0, checkpoint_seconds=0.0)
    assert calm.slowdown(1) == pytest.approx(1 + 0.5 * (1800 + 30 + 120 + 600) / 86_400)  # its work, restart and wait


@pytest.mark.parametrize("resolution", [256, 512])
def test_another_recipes_rates_are_estimated_at_the_share_of_the_peak_of_stable_diffusion_2(resolution):
    sd2, today = planner.phase("sd2", resolution), planner.phase("today", resolution)
    assert sd2.trainer.origin == "derived" and "images/s / 32 GPUs" in str(sd2.trainer)
    for part, count in (("trainer", estimates.step_flops), ("encoder", estimates.encoder_flops)):
        rate, slower = getattr(sd2, part), getattr(today, part)
        times = count(resolution, recipe="today") / count(resolution)
        assert slower.origin == "estimated" and rate.images_per_second / slower.images_per_second == pytest.approx(
            times
        )


def test_own_rates_are_measured_by_one_function(one_thread):
    config = TrainingConfig(resolution=32, global_batch_size=8, units_per_step=2, num_training_workers=2)
    rates = planner.measure_rates(config, PreprocessingConfig(resolutions=[32], encoder_batch_size=4), steps=2)
    assert set(rates) == {"encoder", "trainer"}
    assert all(rate.origin == "measured" and "CPU" in rate.source for rate in rates.values())


# ---- today's recipe beside Stable Diffusion 2's


@pytest.fixture(scope="module")
def recipes():
    return planner.compare_recipes()


def test_the_profiles_have_the_planned_models_and_encoders_that_feed_the_trainers(recipes):
    """Stored bytes are those of the columns that preprocessing writes: with padding, or at the mean of tokens."""
    for (resolution, name), row in recipes.iterrows():
        profile, one = full_run.read_profile(f"full-{name}-{resolution}"), estimates.RECIPES[name]
        assert row["encoders online"] <= profile["num_encoders"] < 1.08 * row["encoders online"]
        assert profile["num_transform_workers"] == 6 * profile["num_encoders"]
        assert profile["unet_config"] == one.unet_config and profile.get("maximum_tokens", 77) == one.tokens
        captions = profile.get("caption_column", "caption")
        assert len(one.stored_tokens) == (1 if isinstance(captions, str) else len(captions))
        latents = schema.ColumnSpec("image_latents_256", (2, one.channels, resolution // 8, resolution // 8))
        text = schema.ColumnSpec("caption_embeddings", (one.tokens, one.text.hidden_size), ragged=name == "today")
        assert row["latents, KB"] * 1e3 == latents.row_bytes
        assert row["captions, KB"] * 1e3 == sum(text.bytes_of(tokens) for tokens in one.stored_tokens)


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
        f"from {pays[256]['today']:.1f} epochs on at 256 pixels and {pays[512]['today']:.1f} at 512, instead of "
        f"{pays[256]['sd2']:.1f} and {pays[512]['sd2']:.1f}",
    ):
        assert phrase in text


# ---- bad input


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: planner.Rate("fast"), "images_per_second='fast'"),
        (lambda: planner.Machine("m", 1, True), "dollars_per_hour=True"),
        (lambda: planner.Faults(failures_per_day=-1), "failures_per_day=-1"),
        (lambda: planner.phase("sd2", 256, epochs=0.5), "epochs=0.5"),
        (lambda: planner.estimate(planner.phase("sd2", 256), "offline!"), "path='offline!'"),
        (lambda: planner.trainer_rate(300), "resolution=300"),
        (lambda: estimates.predict_scaling(1e6, 1.0, strategy="tp"), "strategy='tp'"),
        (lambda: full_run.command("a", {}, 768, "b"), "resolution=768"),
    ],
)
def test_bad_values_are_named_in_one_sentence(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith(".")
