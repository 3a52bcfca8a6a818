"""The benchmark of encoding through Ray, with tiny sizes: it runs, and leaves its results."""

import json
import sys

from tests.benchmarks import encode_through_ray
from tests.faults import slow


@slow
def test_a_benchmark_through_ray_leaves_its_results(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["encode_through_ray", "--rows", "120", "--rounds", "1"])
    encode_through_ray.main()
    assert json.loads((tmp_path / "encode_through_ray.json").read_text())["summary"]
