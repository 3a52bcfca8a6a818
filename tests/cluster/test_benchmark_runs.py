"""The benchmarks that use Ray, with tiny sizes: each runs, and leaves its results."""

import importlib
import json
import subprocess
import sys

import pytest

from tests.faults import ROOT

pytestmark = pytest.mark.variants


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ablation", "--steps 2 --batch 4 --resolution 32"),
        ("encode_through_ray", "--rows 120 --rounds 1"),
        ("online_throughput", "--encoders 1 2 --seconds 2"),
        ("read_object_store", "--rows 1024 --rounds 1"),
        ("resume_cost", "--rows 3000 --rounds 1"),
        ("scaling", "--workers 1 2 --strategy ddp --rounds 1 --steps 4 --batch 4 --resolution 32"),
        ("small_rows", "--steps 8 --rounds 1 --rows 2000"),
        ("train_through_ray", "--steps 24 --rounds 1"),
    ],
)
def test_a_benchmark_through_ray_leaves_its_results(cluster, name, arguments, monkeypatch, results):
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    importlib.import_module(f"tests.benchmarks.{name}").main()
    assert json.loads((results / f"{name}.json").read_text())["summary"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("memory", "--job preprocessing --rows 60 120"),
        ("million_rows", "--rows 4000 --rows-per-segment 2000 --stand-in"),
        ("read_speed", "--rows 1024 --rounds 1"),
        ("simulated_faults", "--steps 40 --seconds 0.1"),
        ("validation_cost", "--steps 16 --rounds 1 --seconds 0.1 --rows 200"),
    ],
)
def test_a_benchmark_with_its_own_ray_leaves_its_results(name, arguments, results):
    """Those of memory tell their processes from others by their session; one has several nodes."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments.split()]
    subprocess.run(command, cwd=ROOT, check=True)
    assert json.loads((results / f"{name}.json").read_text())["summary"]
