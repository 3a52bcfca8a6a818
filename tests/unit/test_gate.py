"""That `.ci/run` runs every test, and that what the fault table names as tested is among them."""

import ast
import itertools
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
FAULTS = ROOT / "helpers" / "clusters" / "README.md"


def fault_table():
    """[(what fails, [(file, test)])] of the table whose last column is called "tested in"."""
    lines = FAULTS.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith("| tested in |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    cells = [row.strip("|").split("|") for row in rows]
    return [(row[0].strip(), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])) for row in cells]


def names_in(file):
    """The names of a file's test functions."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_each_row_of_the_fault_table_names_its_tests():
    table = fault_table()
    assert len(table) >= 12
    for fault, named in table:
        assert named, fault
        for file, test in named:
            assert test in names_in(file), f"{fault}: {file} has no test {test}"


def test_the_tests_that_the_default_run_leaves_out_are_run_by_themselves():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {marker.partition(":")[0] for marker in options["markers"]}
    assert set(re.findall(r"not (\w+)", options["addopts"])) == markers and "--strict-markers" in options["addopts"]
    script = (ROOT / ".ci" / "run").read_text()
    (chosen,) = re.findall(r'^step .* pytest tests -m "([^"]+)"', script, re.MULTILINE)
    assert set(chosen.split(" or ")) == markers
    assert "|| true" not in script and "rerun" not in script + options["addopts"]
    assert re.search(r"^ +- run: bash \.ci/run$", (ROOT / ".github/workflows/tests.yml").read_text(), re.MULTILINE)
