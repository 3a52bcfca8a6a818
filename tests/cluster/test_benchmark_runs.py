"""The benchmarks of the paths through Ray, with tiny sizes: each runs, and leaves its results."""

import importlib
import json
import sys

import pytest

from tests.faults import slow


@slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("encode_through_ray", "--rows 120 --rounds 1"),
        ("train_through_ray", "--steps 24 --rounds 1"),
    ],
)
def test_a_benchmark_through_ray_leaves_its_results(cluster, name, arguments, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    importlib.import_module(f"tests.benchmarks.{name}").main()
    assert json.loads((tmp_path / f"{name}.json").read_text())["summary"]
