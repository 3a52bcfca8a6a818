"""The network among real workers, on CPUs with gloo."""

import pytest
import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from helpers import storage
from helpers.lesson import network

SIZES = [2**14, 2**20]

pytestmark = pytest.mark.variants


def check_rows(rows):
    expected = [(name, size) for name in network.COLLECTIVES for size in SIZES]
    assert [(row["collective"], row["bytes"]) for row in rows] == expected
    assert all(0 < row["bus bandwidth, GB/s"] < 100 for row in rows)


def test_workers_measure_the_network_among_them(cluster, tmp_path):
    def measure(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        try:
            return network.measure("cpu", SIZES, rounds=2)
        finally:
            dist.destroy_process_group()

    one, other = ray.get([ray.remote(measure).remote(rank) for rank in range(2)])
    check_rows(one)
    slowest = [[row["microseconds"] for row in rows] for rows in (one, other)]
    assert slowest[0] == slowest[1]  # the slowest rank's, on every rank


def test_the_trainers_leave_what_they_measured(cluster, tmp_path):
    run_uri = storage.join(str(tmp_path), "network")
    TorchTrainer(
        network.measure_per_worker,
        train_loop_config={"run_uri": run_uri, "sizes": SIZES, "rounds": 2},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="network", storage_path=str(tmp_path)),
    ).fit()
    found = storage.read_json(storage.join(run_uri, "network.json"))
    assert (found["ranks"], found["ranks_per_node"], found["device"]) == (2, 2, "cpu")
    check_rows(found["rows"])
    assert len(found["nodes"]) == 1 and "gloo" in network.explain(found["nodes"][0], found["device"])
    assert (network.step_shares(found)["share of a step, nothing hidden"] > 0).all()
