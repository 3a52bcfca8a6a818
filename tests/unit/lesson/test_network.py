"""The network cell: bus bandwidth as nccl-tests defines it, what a node says of EFA, and the share of a step."""

import pathlib

import pytest
import torch.distributed as dist

from helpers.lesson import estimates, network

NODE = {
    "node": "n1",
    "devices": 4,
    "provider": True,
    "plugins": ["/opt/amazon/ofi-nccl/lib/libnccl-net.so"],
    "loaded": ["/opt/amazon/ofi-nccl/lib/libnccl-net.so", "/opt/amazon/efa/lib/libfabric.so.1"],
    "variables": {},
}


@pytest.fixture
def four_ranks():
    """This process as rank 0 of four, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_bus_bandwidth_is_that_of_nccl_tests():
    """doc/PERFORMANCE.md: S/t x 2 (n - 1) / n for an all-reduce, S/t x (n - 1) / n for an all-gather."""
    assert network.bus_bandwidth("all-reduce", 8e9, 2.0, 4) == pytest.approx(6.0)
    assert network.bus_bandwidth("all-gather", 8e9, 2.0, 4) == pytest.approx(3.0)


def test_every_collective_is_measured_at_every_size(four_ranks):
    rows = network.measure_bandwidth("cpu", [1000, 4096], rounds=1)
    assert [(row["collective"], row["bytes"]) for row in rows] == [
        (name, size) for name in network.COLLECTIVES for size in (992, 4096)
    ]
    for row in rows:
        expected = network.bus_bandwidth(row["collective"], row["bytes"], row["microseconds"] / 1e6, 4)
        assert row["bus bandwidth, GB/s"] == pytest.approx(expected)


def test_one_worker_has_no_network():
    with pytest.raises(ValueError, match="^num_training_workers=1 has no network to measure: give at least 2.$"):
        network.measure_bandwidth("cpu")


def test_this_node_is_described_as_json():
    found = network.describe_node()
    assert set(found) == set(NODE) and "EFA is off" in network.explain({**found, "devices": 0})
    assert "gloo over TCP" in network.explain(found, "cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "EFA is on: 4 EFA interface"),
        ({"variables": {"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"}}, "EFA is on"),
        ({"devices": 0}, "EFA is off, NCCL uses TCP or InfiniBand: the machine has no EFA interface"),
        ({"variables": {"FI_PROVIDER": "tcp"}}, "FI_PROVIDER=tcp forbids it. Unset it"),
        ({"variables": {"NCCL_NET": "Socket"}}, "NCCL_NET=Socket forbids it"),
        ({"provider": False}, "finds no libfabric provider"),
        ({"provider": None}, "EFA is on"),
        ({"plugins": [], "loaded": []}, "NCCL's plugin aws-ofi-nccl is not found"),
        ({"loaded": []}, "EFA could be on"),
    ],
)
def test_a_node_says_whether_efa_is_on_and_why(change, said):
    text = network.explain({**NODE, **change})
    assert said in text and text.startswith("n1: ") and text.endswith(".") and "\n" not in text


def test_plugins_on_the_library_path_are_found(tmp_path, monkeypatch):
    plugin = pathlib.Path(tmp_path, "libnccl-net-ofi.so")
    plugin.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FI_PROVIDER", "efa")
    found = network.describe_node()
    assert str(plugin) in found["plugins"] and found["variables"] == {"FI_PROVIDER": "efa"}


def test_the_share_of_a_step_follows_from_the_bandwidth():
    rows = [
        {"collective": "all-reduce", "bytes": size, "bus bandwidth, GB/s": rate} for size, rate in ((1e6, 1), (1e9, 50))
    ]
    shares = network.step_shares({"ranks": 32, "ranks_per_node": 8, "rows": rows}, step_seconds=0.5)
    table = estimates.predict_scaling(865_910_724, 0.5, 50, (32,), strategy="ddp")
    assert shares.loc["ddp"].tolist() == pytest.approx([table.iloc[0, 1], 1 - table.iloc[0, 2], 1 - table.iloc[0, 3]])
    assert list(shares.index) == ["ddp", "fsdp", "hsdp", "fsdp-full"]
    assert shares.loc["fsdp"].iloc[0] == pytest.approx(0.75 * shares.loc["ddp"].iloc[0])
    within = network.step_shares({"ranks": 8, "ranks_per_node": 8, "rows": rows}, step_seconds=0.5)
    assert within.loc["ddp"].iloc[0] == pytest.approx(7 / 8 * 8 * 865_910_724 / 50e9)
