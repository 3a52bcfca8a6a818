"""Benchmarks that start Ray, with tiny sizes: they run, and leave their results."""

import importlib
import json
import sys

import pytest

from tests.faults import slow

SMALL = {
    "encode_through_ray": "--rows 120 --rounds 1",
    "train_through_ray": "--rows 200 --steps 30 --rounds 1",
    "picture_quality": "--rows 200 --scale 0.002 --seeds 1 --prompts 4 --threads 1",
    "online_throughput": "--encoders 4 --seconds 4",
}


@slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_through_ray_leaves_its_results(name, cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name].split()])
    importlib.import_module(f"tests.benchmarks.{name}").main()
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["summary"] and not found["details"].get("failed")
