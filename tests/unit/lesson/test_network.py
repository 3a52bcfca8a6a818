"""The network cell: bus bandwidth as nccl-tests defines it, what a node says of EFA, and the share of a step."""

import pathlib

import pytest
import torch.distributed as dist

from helpers.lesson import estimates, network

pytestmark = pytest.mark.slow
NODE = {
    "node": "n1",
    "devices": 4,
    "plugins": ["/opt/amazon/ofi-nccl/lib/libnccl-net.so"],
    "loaded": ["/opt/amazon/ofi-nccl/lib/libnccl-net.so", "/opt/amazon/efa/lib/libfabric.so.1"],
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
    with pytest.raises(ValueError, match="^num_training_workers=1 has no network to measure: give at least 2.$"):
        network.measure_bandwidth("cpu")


def test_every_collective_is_measured_at_every_size(four_ranks):
    rows = [(row["collective"], row["bytes"]) for row in network.measure_bandwidth("cpu", [1000, 4096])]
    assert rows == [("all-reduce", 992), ("all-reduce", 4096), ("all-gather", 992), ("all-gather", 4096)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "NCCL has what EFA needs: 4 EFA interface"),
        ({"devices": 0}, "EFA is off, NCCL uses TCP or InfiniBand: the machine has no EFA interface"),
        ({"plugins": [], "loaded": []}, "NCCL's plugin aws-ofi-nccl is not found"),
        ({"loaded": []}, "EFA could be on"),
    ],
)
def test_a_node_says_whether_efa_is_on_and_why(change, said):
    text = network.explain({**NODE, **change})
    assert said in text and text.startswith("n1: ") and text.endswith(".") and "\n" not in text


def test_this_node_is_described(tmp_path, monkeypatch):
    plugin = pathlib.Path(tmp_path, "libnccl-net-ofi.so")
    plugin.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = network.describe_node()
    assert set(found) == set(NODE) and "gloo over TCP" in network.explain(found, "cpu")
    assert str(plugin) in found["plugins"]


def test_the_share_of_a_step_follows_from_the_bandwidth():
    rows = [
        {"collective": "all-reduce", "bytes": size, "bus bandwidth, GB/s": rate} for size, rate in ((1e6, 1), (1e9, 50))
    ]
    shares = network.step_shares({"ranks": 32, "ranks_per_node": 8, "rows": rows})
    _, seconds, exposed, hidden = estimates.predict_scaling(865_910_724, 0.69, 50, (32,), strategy="ddp").iloc[0]
    assert shares.loc["ddp"].tolist() == pytest.approx([seconds, 1 - exposed, 1 - hidden])
    assert list(shares.index) == ["ddp", "fsdp", "hsdp", "fsdp-full"]
    within = network.step_shares({"ranks": 8, "ranks_per_node": 8, "rows": rows})
    assert within.loc["ddp"].iloc[0] == pytest.approx(7 / 8 * 8 * 865_910_724 / 50e9)
