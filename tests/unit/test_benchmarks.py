"""The benchmarks that need no Ray, tried with tiny sizes; and the table of their results."""

import importlib
import json
import sys

import pytest

from tests.benchmarks import gpu_step, record, table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder that results are written into."""
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def test_the_gpu_benchmark_measures_each_setting(monkeypatch, capsys, results):
    """And tells what the fastest spends its time on; on a CPU here."""
    eager = {name: setting for name, setting in gpu_step.SETTINGS.items() if setting[1:] == (None, None)}
    assert len(eager) == 3
    monkeypatch.setattr(gpu_step, "SLOW", {})
    monkeypatch.setattr(
        gpu_step, "SETTINGS", {**eager, "no such backend": ({}, None, gpu_step.SDPBackend.CUDNN_ATTENTION)}
    )
    monkeypatch.setattr(
        sys, "argv", ["gpu_step", "--unet", "tiny", "--resolution", "32", "--batch", "2", "4", "--steps", "1"]
    )
    gpu_step.main()
    said = capsys.readouterr().out
    assert "failed: no such backend, batch 2: " in said and said.count("MFU") >= 4
    assert "where the time of the fastest goes" in said and "convolution" in said
    assert "images/s" in next(iter(json.loads((results / "gpu_step.json").read_text())["summary"].values()))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan_two_billion", ["--files", "200", "--rows-per-file", "1000"]),
        ("read_layout", ["--rows", "128", "--rounds", "1"]),
        ("host_time", ["--steps", "1", "--layers", "1"]),
        pytest.param(
            "picture_quality",
            ["--rows", "300", "--scale", "0.002", "--seeds", "1", "--prompts", "4"],
            marks=pytest.mark.variants,
        ),
        pytest.param("storage_cost", ["--rows", "150", "--steps", "2", "--prompts", "2"], marks=pytest.mark.variants),
    ],
)
def test_a_benchmark_runs_and_leaves_its_results(name, arguments, monkeypatch, results):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    importlib.import_module(f"tests.benchmarks.{name}").main()
    found = json.loads((results / f"{name}.json").read_text())
    assert found["command"] == f"python -m tests.benchmarks.{name} {' '.join(arguments)}"
    assert found["hardware"]["cores"] and found["summary"] and found.keys() >= {"revision", "versions", "details"}


def test_the_table_is_made_from_the_results(monkeypatch, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(sys, "argv", ["read_speed", "--rows", "8"])
    record.write("read_speed", {"reading": "5 samples/s"})
    for _ in range(2):  # it may be made again
        table.main()
        text = readme.read_text()
        assert text.startswith(f"before\n{table.BEGIN}\n| what") and text.endswith(f"{table.END}\nafter\n")
        assert "| reading | 5 samples/s | `python -m tests.benchmarks.read_speed --rows 8` | 1, " in text
        assert "old" not in text and text.count("| reading |") == 1
