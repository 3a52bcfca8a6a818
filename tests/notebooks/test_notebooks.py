"""What every notebook promises a reader, from its source alone; `test_shrunk` runs all of them."""

import ast
import base64
import importlib.util
import inspect
import io
import json
import re

import pytest
from PIL import Image

from tests import execute_notebooks
from tests.execute_notebooks import NOTEBOOKS, ROOT


def read(name):
    """The notebook as JSON, its sources as texts."""
    notebook = json.loads((ROOT / name).read_text())
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def code_cells(name):
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def code_nodes(name):
    return [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell["source"]))]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_are_short_plain_python(name):
    for cell in code_cells(name):
        lines, tags = cell["source"].splitlines(), cell["metadata"].get("tags", [])
        is_folded = cell["metadata"].get("jupyter", {}).get("source_hidden")
        assert is_folded or "parameters" in tags or len(lines) <= (30 if "by-hand" in tags else 20), cell["source"]
        assert not [line for line in lines if re.match(r"\s*(!|%)", line) or len(line) > 100], cell["source"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_calls_of_helpers_is_there_and_takes_these_arguments(name):
    nodes, known = code_nodes(name), {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "helpers":
            for alias in node.names:
                module = importlib.import_module(node.module)
                found = getattr(module, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                known[alias.asname or alias.name] = found
    names = {ast.unparse(node): known[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in known}
    for node in nodes:
        if isinstance(node, ast.Attribute) and inspect.ismodule(module := names.get(ast.unparse(node.value))):
            names[ast.unparse(node)] = getattr(module, node.attr)
    for call in [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in names]:
        given = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(names[ast.unparse(call.func)]).bind_partial(**given)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_that_is_started_elsewhere_says_where_to_start(name, monkeypatch):
    first = next(cell["source"] for cell in code_cells(name) if "from helpers" in cell["source"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="papermill --cwd"):
        exec(first, {})


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_no_outputs_or_those_of_its_own_sources(name):
    cells = code_cells(name)
    if not any(cell["outputs"] or cell["execution_count"] for cell in cells):
        return
    assert read(name)["metadata"].get(execute_notebooks.CHECKSUM) == execute_notebooks.checksum(read(name))
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert all(len("".join(output["data"].get("text/plain", ""))) > 10 for output in images)  # for who sees none
    for output in images:
        if output["metadata"].get("image/png", {}).get("alt") == "".join(output["data"]["text/plain"]):
            # A figure, whose margin is white.
            figure = Image.open(io.BytesIO(base64.b64decode("".join(output["data"]["image/png"]))))
            assert figure.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
