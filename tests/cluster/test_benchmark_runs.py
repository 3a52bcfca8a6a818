"""Benchmarks that start Ray, with tiny sizes: they run, and leave their results."""

import json
import sys

from tests.benchmarks import encode_through_ray, resume_exactness
from tests.faults import slow


@slow
def test_a_benchmark_through_ray_leaves_its_results(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["encode_through_ray", "--rows", "120", "--rounds", "1"])
    encode_through_ray.main()
    assert json.loads((tmp_path / "encode_through_ray.json").read_text())["summary"]


@slow
def test_the_comparison_of_tools_finds_that_a_killed_run_resumes_exactly_on_half_of_its_workers(monkeypatch, tmp_path):
    """And before it is killed it has the batches of the undisturbed run."""
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    arguments = ["--rows", "640", "--tools", "this-project", "--resume-on", "1"]
    monkeypatch.setattr(sys, "argv", ["resume_exactness", *arguments])
    resume_exactness.main()
    (row,) = json.loads((tmp_path / "resume_exactness.json").read_text())["details"]["rows"]
    (resumed,) = row["runs"]
    assert [resumed[count] for count in ("batches that differ", "rows twice", "rows never")] == [0, 0, 0]
    assert resumed["batches"] > 0 and row["batches that differ before the kill"] == 0
