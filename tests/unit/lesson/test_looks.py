"""Errors, interrupts and restarts in a notebook, in a real kernel."""

import json
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[3]
ABOVE = ["config = 7", "# section: by-hand\ntrained = 'by hand'", "trained = 'the run'\nprint('ran')"]
LATE = "from helpers.lesson import looks\n\nlooks.catch_up()\nprint(config, trained)"
CELLS = {
    "nowhere": "__vsc_ipynb_file__ = ''\nfrom helpers.lesson import looks\n\nlooks.catch_up()",
    "restarted": "__vsc_ipynb_file__ = {path!r}\n" + LATE,
    "again": LATE,
    "fold": "looks.fold_tracebacks()",
    "too early": "segments = job.segments",
    "stopped run": "raise KeyboardInterrupt('Stopped after step 3.')",
    "stopped cell": "raise KeyboardInterrupt",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """{name: outputs} of `CELLS`, run in one kernel, which works in the repository."""
    path = tmp_path_factory.mktemp("saved") / "a.ipynb"
    saved = [{"cell_type": "code", "source": source} for source in [*ABOVE, LATE, "raise ValueError"]]
    path.write_text(json.dumps({"cells": saved}))
    cells = [nbformat.v4.new_code_cell(source.format(path=str(path))) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(ROOT)}})
    return dict(zip(CELLS, (cell.outputs for cell in client.execute().cells), strict=True))


def printed(outputs):
    assert not [output for output in outputs if output.output_type == "error"]
    return "".join(output.get("text", "") for output in outputs)


def test_a_cell_that_is_stopped_shows_one_sentence_and_no_traceback(outputs):
    assert printed(outputs["stopped run"]) == "Stopped after step 3.\n"
    assert printed(outputs["stopped cell"]) == "Stopped: this cell did not finish.\n"


def test_after_a_restart_one_cell_runs_those_above_it_but_for_the_sections(outputs):
    assert printed(outputs["restarted"]) == "ran\n7 the run\n"
    assert printed(outputs["again"]) == "7 the run\n"


def test_where_the_notebooks_file_is_unknown_the_late_cell_says_what_to_run(outputs):
    assert outputs["nowhere"][-1].evalue.startswith(
        "This kernel does not know its notebook's file: run the cells above"
    )


def test_a_cell_that_is_run_too_early_says_what_to_run_first(outputs):
    said = json.dumps(outputs["too early"])
    assert "name 'job' is not defined" in said and "Run the cells above this one first" in said
