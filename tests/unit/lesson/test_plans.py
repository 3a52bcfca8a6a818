"""Estimates, the planner and the network: what follows from the published numbers, and closed forms."""

import pathlib

import pytest
import torch.distributed as dist

from helpers.lesson import estimates, full_run, network, planner, published_results

pytestmark = pytest.mark.slow
README = pathlib.Path(__file__).parents[3] / "README.md"
FACTS = published_results.FACTS
SD2 = 865_910_724  # parameters


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
    hours, dollars = planner.compare_machines().loc["64 x H100", ["hours", "training, $"]]
    assert f"| {64 * hours:,.0f} | {dollars:,.0f} on demand, 2026 |" in text


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


def test_the_profiles_have_as_many_encoders_as_feed_the_trainers():
    for (resolution, name), row in planner.compare_recipes().iterrows():
        profile = full_run.read_profile(f"full-{name}-{resolution}")
        assert row["encoders online"] <= profile["num_encoders"] < 1.08 * row["encoders online"]


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
