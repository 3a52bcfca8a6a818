"""The benchmarks: their results as JSON, and the table of these."""

import json
import re
import sys

import pytest

from tests.benchmarks import gpu_checks, gpu_encode, gpu_step, record, table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder that results are written into."""
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        (gpu_checks, "--checks checkpoints repeats --unet tiny --resolution 32"),
        (gpu_encode, "--model tiny-sd --resolutions 32 --batch 2 --seconds 0.05"),
        (gpu_step, "--unet tiny --resolution 32 --batch 2 4 --steps 1 --settings base autocast"),
    ],
)
def test_a_benchmark_of_a_gpu_runs_on_a_cpu_and_leaves_its_results(benchmark, arguments, monkeypatch, results):
    name = benchmark.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    benchmark.main()
    found = json.loads((results / f"{name}.json").read_text())
    assert found["command"] == f"python -m tests.benchmarks.{name} {arguments}"
    assert found["summary"] and found["details"]["rows"] and found["details"]["failed"] == []
    assert all(row.get("passed", True) for row in found["details"]["rows"])


def test_the_table_of_results_is_what_the_files_say():
    """If not: `python -m tests.benchmarks.table`."""
    _, _, rest = table.README.read_text().partition(table.BEGIN)
    assert rest.partition(table.END)[0].strip().splitlines() == table.lines()


def test_each_number_measured_in_the_readme_is_in_the_results_that_it_names():
    """Digit for digit."""
    _, _, rest = (record.ROOT / "README.md").read_text().partition("| what | measured |\n|---|---|\n")
    lines, number = rest.partition("\n\n")[0].splitlines(), re.compile(r"\d[\d.,]*\d|\d")
    assert len(lines) >= 3
    for line in lines:
        row = re.fullmatch(r"\| \[.+\]\((tests/benchmarks/results/\w+\.json)\).* \| (.+) \|", line)
        summary = json.loads((record.ROOT / row[1]).read_text())["summary"]
        known = number.findall(" ".join([*summary, *summary.values()]))
        assert set(number.findall(row[2])) <= set(known), line
