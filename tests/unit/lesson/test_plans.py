"""Estimates, the planner and the network: what follows from the published numbers, and closed forms."""

import dataclasses
import math
import pathlib
import re

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.lesson import estimates, full_run, network, planner, published_results

pytestmark = pytest.mark.slow
README = pathlib.Path(__file__).parents[3] / "README.md"
FACTS = published_results.FACTS
SD2 = 865_910_724  # parameters


def test_every_published_number_names_its_document():
    sources = [fact.source for fact in FACTS.values()]
    for table in ("DATA_PATHS", "ABLATION", "SCALING", "INSTANCES", "PHASES", "EPOCH_COSTS", "TRAINERS", "ENCODERS"):
        sources += getattr(published_results, table)["source"].tolist()
    assert not [source for source in sources if re.split("[,;]", source)[0] not in published_results.SOURCES]


def test_own_numbers_stand_beside_the_published_ones():
    phases = published_results.phases_table({512: 2 * 1349, 64: 100.0})
    assert phases.loc[("here", 512), "hours"] == pytest.approx(358.5 / 2, abs=0.1)
    paths = published_results.data_paths_table({"DataLoader": 200.0, "online": 300.0})
    assert paths.loc["online", ("speed-up", "here")] == 1.5
    assert paths.loc["offline", [("images/s", "256 px, A100s"), ("dollars", "published")]].tolist() == [4068, 14_753]
    table = published_results.published_ablation(512)
    assert table.loc["+ FSDP", ("32 x A100-80G", "images/s")] == 1168


def test_flops_of_the_encoders_are_those_counted_by_hand():
    """The VAE's 268 GFLOP of convolutions at 256 pixels are four times as many at 512."""
    counted = [estimates.encoder_flops(*sizes) / 1e9 for sizes in ((), (256,), (512,), (256, 512))]
    assert counted == pytest.approx([45.127, 317.849, 1161.786, 1434.508], abs=1e-3)
    vae, text_encoder = estimates.build_encoders()
    assert sum(p.numel() for p in text_encoder.parameters()) == 340_387_840
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863
    assert estimates.encoder_flops(256, recipe="today") / 1e9 == pytest.approx(795, abs=1)


@given(st.integers(1, 1000), st.floats(1e-3, 1e9))
def test_encoders_needed_are_the_fewest_that_keep_the_trainers_busy(count, trainer_rate):
    encoder_rate = trainer_rate / count
    assert estimates.encoders_needed(trainer_rate, encoder_rate) == count  # rounding never costs one
    assert estimates.online_throughput(count, encoder_rate, trainer_rate) == pytest.approx(trainer_rate)


@pytest.mark.parametrize("row", list(published_results.SCALING.itertuples()), ids=lambda row: row.gpus)
def test_the_predicted_scaling_agrees_with_mosaicmls_table(row):
    """Their batch of 2,048 leaves 16 images for each of 128 GPUs."""
    one, count = published_results.SCALING["images_per_second_256"][0] / 8, int(row.gpus.split()[0])
    table = estimates.predict_scaling(SD2, 2048 / count / one, 50, (count,), strategy="ddp")
    assert table.iloc[0, 3] == pytest.approx(row.images_per_second_256 / count / one, abs=0.08)


# ---- the planner


def test_the_readmes_table_of_paths_is_the_planners():
    today = planner.phase("sd2", 256)
    documents, text = planner.phase("sd2", 256, on=planner.DOCUMENTS, encoders=58), README.read_text()
    tables = [planner.compare_paths(scenario) for scenario in (today, documents)]
    for path in planner.PATHS:
        cells = [table.loc[path, name] for table in tables for name in ("hours", "dollars", "dollars_another_epoch")]
        assert "| {:.1f} | {:,.0f} | {:,.0f} | {:.1f} | {:,.0f} | {:,.0f} |".format(*cells) in text
    epochs = [planner.break_even(scenario, "offline", "online") for scenario in (today, documents)]
    assert "{:.2f} epochs on ({:.2f} with".format(*epochs) in text and f"{today.encoders} L40S" in text


def test_a_plan_has_the_machines_rates_and_prices_of_the_gpus_that_are_chosen():
    """MLPerf's rates at 512 pixels; a rate that a reader gives is taken as it is."""
    one = planner.phase("sd2", 512, on=planner.Kinds("16 x H200", "L4"))
    assert (one.trainers, one.trainer_machine.dollars_per_hour, one.trainer.images_per_second) == (2, 63.296, 142.0)
    assert one.encoder_machine.name == "g6.2xlarge" and one.encoder.origin == "estimated"
    assert planner.estimate(one, "online").bottleneck == "trainers"
    mine = planner.phase("sd2", 512, trainer=planner.Rate(100.0))
    assert mine.training_rate == 6400 and mine.encoders < planner.phase("sd2", 512).encoders
    table = planner.compare_machines()
    assert table.loc["32 x A100-80G", "training, $"] == pytest.approx(67_405, rel=1e-3)
    assert set(published_results.TRAINERS["gpus"]) < set(table.index)
    hours, dollars = table.loc["64 x H100", ["hours", "training, $"]]
    assert f"| {64 * hours:,.0f} | {dollars:,.0f} on demand, 2026 |" in README.read_text()


def test_the_page_of_published_numbers_has_the_rates_and_prices_that_the_planner_takes():
    page = (README.parent / "helpers/docs/PUBLISHED.md").read_text()
    for row in published_results.TRAINERS.itertuples():
        machine = planner.MACHINES[row.machine]
        price = machine.dollars_per_hour / machine.num_gpus
        assert re.search(
            rf"^\| {row.gpus} \| {row.batch} \| {row.images_per_second} .*\| {price:.2f} \|", page, re.MULTILINE
        )


@pytest.mark.parametrize("row", list(published_results.EPOCH_COSTS.itertuples()), ids=lambda row: row.setup)
def test_the_published_costs_follow_from_the_published_rates_to_0_3_percent(row):
    """The blog's Table 2: offline, its $2,183 for encoding are hours of A10Gs, and storage is not counted."""
    rate = published_results.EPOCH_COSTS.set_index("setup")["images_per_second"] / 32
    encoder = FACTS["one A10G, offline" if row.setup == "offline" else "one A10G, online, at least"]
    one = planner.Scenario(
        trainer=planner.Rate(rate["online" if row.setup == "online" else "offline"]),
        encoder=planner.Rate(encoder.value),
        dataloader=planner.Rate(rate["DataLoader"]),
        storage_dollars=0.0,
    )
    found = planner.estimate(one, row.setup)
    assert found.training_hours == pytest.approx(row.hours, rel=0.001)
    assert found.dollars == pytest.approx(row.dollars, rel=0.003)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 200), st.floats(0, 1), st.sampled_from(planner.PATHS))
def test_at_the_break_even_both_paths_cost_the_same(trainers, encoders, storage_dollars, path):
    rates = dict(trainer=planner.Rate(184.6), encoder=planner.Rate(101.9), storage_dollars=storage_dollars)
    one = planner.Scenario(**rates, trainers=trainers, encoders=encoders)
    epochs = planner.break_even(one, path, "online")
    if 1 < epochs < 1e6:
        costs = [planner.estimate(dataclasses.replace(one, epochs=epochs), by).dollars for by in (path, "online")]
        assert costs[0] == pytest.approx(costs[1], rel=1e-6)
    enough = dataclasses.replace(one, encoders=one.balanced_encoders)
    assert planner.estimate(enough, "online").bottleneck == "trainers"


def test_the_best_interval_is_youngs_and_loses_least():
    assert planner.best_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)
    faults = planner.Faults(failures_per_day=0.5, checkpoint_seconds=20.0)
    best = planner.interval_table(faults, 4, 163.84).set_index("").loc["best (Daly)"]
    tried = [dataclasses.replace(faults, checkpoint_every_seconds=seconds) for seconds in range(60, 7200, 60)]
    assert best["slower"] <= min(one.slowdown(4) - 1 for one in tried) * 1.001


def test_own_rates_are_measured_by_one_function(one_thread):
    config = TrainingConfig(resolution=32, global_batch_size=8, units_per_step=2, num_training_workers=2)
    rates = planner.measure_rates(config, PreprocessingConfig(resolutions=[32], encoder_batch_size=4), steps=2)
    assert all(rate.origin == "measured" and "CPU" in rate.source for rate in rates.values())


def test_the_profiles_have_as_many_encoders_as_feed_the_trainers():
    for (resolution, name), row in planner.compare_recipes().iterrows():
        profile = full_run.read_profile(f"full-{name}-{resolution}")
        assert row["encoders online"] <= profile["num_encoders"] < 1.08 * row["encoders online"]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: planner.Rate("fast"), "images_per_second='fast'"),
        (lambda: planner.estimate(planner.phase("sd2", 256), "offline!"), "path='offline!'"),
        (lambda: planner.trainer_rate(300), "resolution=300"),
        (lambda: planner.phase("sd2", 256, on=planner.Kinds("8 x V100", "L4")), "'8 x V100' has no published rate"),
        (lambda: estimates.predict_scaling(1e6, 1.0, strategy="tp"), "strategy='tp'"),
        (lambda: network.measure_bandwidth("cpu"), "num_training_workers=1"),
    ],
)
def test_bad_values_are_named(call, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        call()


# ---- the network

NODE = {"node": "n1", "devices": 4, "plugins": ["/opt/libnccl-net.so"]}
NODE["loaded"] = ["/opt/libnccl-net.so", "/opt/libfabric.so.1"]


@pytest.fixture
def four_ranks():
    """This process as rank 0 of four, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_bandwidth_is_measured_as_nccl_tests_defines_it(four_ranks):
    """doc/PERFORMANCE.md: S/t x 2 (n - 1) / n for an all-reduce, S/t x (n - 1) / n for an all-gather."""
    assert network.bus_bandwidth("all-reduce", 8e9, 2.0, 4) == pytest.approx(6.0)
    rows = [(row["collective"], row["bytes"]) for row in network.measure_bandwidth("cpu", [1000, 4096])]
    assert rows == [("all-reduce", 992), ("all-reduce", 4096), ("all-gather", 992), ("all-gather", 4096)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "NCCL has what EFA needs: 4 interface"),
        ({"devices": 0}, "no EFA interface"),
        ({"plugins": [], "loaded": []}, "aws-ofi-nccl is not found"),
        ({"loaded": []}, "EFA could be on"),
    ],
)
def test_a_node_says_whether_efa_is_on_and_why(change, said):
    assert said in network.explain({**NODE, **change})
    assert network.describe_node().keys() == NODE.keys()
