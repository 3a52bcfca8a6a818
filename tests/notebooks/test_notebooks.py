"""What the notebooks promise: their form, and that they run, shrunk, from another folder."""

import ast
import copy
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import papermill
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from matplotlib import cbook
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

from helpers.config.notebook import OnlineConfig, PreprocessingConfig, TrainingConfig
from tests.faults import slow
from tests.pipelines import defaults

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = ["Preprocessing.ipynb", "Training.ipynb", "Online_Preprocessing_and_Training.ipynb"]
DEEPER = ["helpers/lesson/Evaluation.ipynb", "helpers/lesson/Scaling.ipynb"]  # they read what the others left
MOST_CELLS = dict(zip([*NOTEBOOKS, *DEEPER], [55, 90, 55, 55, 55], strict=True))
ROWS = {"limit": 320, "validation_share": 0.05}
STEPS = {"resolution": 32, "max_steps": 12, "global_batch_size": 16, "warmup_steps": 2, "validation_share": 0.05}
SHRUNK = {
    NOTEBOOKS[0]: {**ROWS, "resolutions": [32]},
    NOTEBOOKS[1]: {**STEPS, "checkpoint_every": 12, "validate_every": 12},
    NOTEBOOKS[2]: {**ROWS, **STEPS, "checkpoint_every": 6, "validate_every": 6},
}


def read(name):
    return nbformat.read(ROOT / name, as_version=4)


def code_cells(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def test_a_parameter_has_a_comment_which_is_the_same_in_all_notebooks():
    seen = {}
    for name in MOST_CELLS:
        (cell,) = [cell for cell in code_cells(name) if "parameters" in cell.metadata.get("tags", [])]
        assert all(isinstance(statement, ast.Assign) for statement in ast.parse(cell.source).body)
        comments = dict(re.findall(r"^(\w+) = .*  # (.{5,})$", cell.source, re.MULTILINE))
        assert comments.keys() == defaults(name).keys()
        comments.pop("sections", None)  # each notebook lists its own
        assert {**comments, **seen} == {**seen, **comments}
        seen |= comments


@pytest.mark.parametrize("name", MOST_CELLS)
def test_parameters_are_not_assigned_again_below_their_cell(name):
    mine = set(defaults(name))
    for cell in code_cells(name)[1:]:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, (ast.Name, ast.alias)):
                bound = (node.asname or node.name) if isinstance(node, ast.alias) else node.id
                stores = isinstance(node, ast.alias) or isinstance(node.ctx, (ast.Store, ast.Del))
                assert not (stores and bound in mine), f"{name} assigns {bound} again: {cell.source[:80]}"


@pytest.mark.parametrize("name", MOST_CELLS)
def test_what_a_notebook_imports_keeps_its_meaning(name):
    """A name that is assigned again would mean something else when its cell runs twice."""
    nodes = [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell.source))]
    imported = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not imported & assigned


@pytest.mark.parametrize("name", MOST_CELLS)
def test_cells_are_short_plain_python_with_prose_before_them(name):
    cells = read(name).cells
    assert len(cells) <= MOST_CELLS[name]
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert not [cell for cell in cells if "papermill-error-cell" in cell.source]  # of an execution that failed once
    for cell in code_cells(name):
        lines = cell.source.splitlines()
        tags = cell.metadata.get("tags", [])
        assert "parameters" in tags or len(lines) <= (30 if "by-hand" in tags else 20), cell.source[:80]
        assert not [line for line in lines if re.match(r"\s*(!|%)", line)], cell.source[:80]
        assert max(map(len, lines)) <= 100, max(lines, key=len)


@pytest.mark.parametrize("name", MOST_CELLS)
def test_notebooks_are_committed_executed_without_errors(name):
    for number, cell in enumerate(code_cells(name), start=1):
        assert cell.execution_count == number, "not executed from top to bottom in one go"
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.get("text")
            text = json.dumps([output.get("text", ""), output.get("data", {}).get("text/plain", "")])
            assert not re.search(r"/(home|root|work|tmp|Users)/", text), text[:300]


@pytest.mark.parametrize("name", MOST_CELLS)
def test_three_links_or_more_lead_out_of_a_notebook_and_its_links_to_files_exist(name):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    assert len(set(re.findall(r"\]\((https?://[^)\s]+)\)", text))) >= 3
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert ((ROOT / name).parent / target).exists(), target


@pytest.mark.parametrize("name", MOST_CELLS)
def test_every_picture_has_alternative_text(name):
    """An output's `alt` stands in its metadata, or in its HTML; in Markdown between the brackets."""
    for cell in read(name).cells:
        for html in re.findall(r"<img\b[^>]*>", cell.source):
            assert re.search(r"alt=[\"'][^\"']{5,}", html), html[:200]
        assert not re.search(r"!\[\s*\]\(", cell.source), cell.source[:80]
        for output in cell.get("outputs", []):
            data, metadata = output.get("data", {}), output.get("metadata", {})
            html = "".join(data.get("text/html", ""))
            for tag in re.findall(r"<img\b[^>]*>", html):
                assert re.search(r"alt=[\"'][^\"']{5,}", tag), f"{name}: {cell.source[:80]}"
            for kind in (kind for kind in data if kind.startswith("image/")):
                found = metadata.get(kind, {}).get("alt") or metadata.get("alt") or ("alt=" in html and html)
                assert found and len(found) > 5, f"{name}: no alternative text below {cell.source[:80]}"


@pytest.mark.parametrize("name", MOST_CELLS)
def test_most_code_cells_show_something(name):
    """Of the main lesson; sections may be left out, and hand-written functions are shown where they are called."""
    cells = [cell for cell in code_cells(name)[1:] if "in sections" not in cell.source]
    cells = [cell for cell in cells if "by-hand" not in cell.metadata.get("tags", [])]
    shown = [cell for cell in cells if cell.outputs]
    assert len(shown) >= 0.7 * len(cells), [cell.source[:60] for cell in cells if not cell.outputs]


BY_HAND_SHRUNK = "checkpoint_every=100, max_steps=400, stop_at=200", "checkpoint_every=5, max_steps=20, stop_at=10"


def shrink(notebook, twice):
    """Runs of sections have 30 steps. `twice`: the main lesson's cells stand twice, as if a user had run each again.

    Cells by hand stand once: they train for longer than the others, and begin with an empty folder.
    """
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        once = {"parameters", "injected-parameters", "by-hand"} & set(cell.metadata.get("tags", []))
        if twice and cell.cell_type == "code" and not once and "in sections" not in cell.source:
            again = copy.deepcopy(cell)
            again.id = f"{cell.id}-again"
            cells.append(again)
        cell.source = re.sub(r"\bmax_steps=\d{3}\b", "max_steps=30", cell.source)
    notebook.cells = cells
    return notebook


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder elsewhere, with a copy of the helpers under another name. The shared cluster is stopped."""
    ray.shutdown()
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copytree(ROOT / "helpers", folder / "my_helpers", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_nbval_runs_the_first_notebook(workspace):
    """Shrunk, from another folder, with renamed helpers; without the sections, as the README's main command does."""
    run_by_nbval(workspace, NOTEBOOKS[0], sections=[])


@slow
@pytest.mark.timeout(2400)  # of many runs: a cell that hangs ends after 600 s
@pytest.mark.parametrize("name", MOST_CELLS)
def test_nbval_runs_every_section_of_a_notebook(name, workspace):
    """And in the first two the cells of the main lesson twice, as a user would by hand."""
    run_by_nbval(workspace, name, change=functools.partial(shrink, twice=name in NOTEBOOKS[:2]))


def run_by_nbval(workspace, name, change=lambda notebook: notebook, **parameters):
    """Execute a notebook; each reads what those before it left there: the order of MOST_CELLS."""
    name_there = name.replace("helpers", "my_helpers")
    prepared = workspace / name_there
    values = {**SHRUNK.get(name, {}), **parameters}
    papermill.execute_notebook(ROOT / name, prepared, parameters=values, prepare_only=True, progress_bar=False)
    notebook = change(nbformat.reads(prepared.read_text().replace(*BY_HAND_SHRUNK), as_version=4))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace("from helpers", "from my_helpers")
            cell.outputs, cell.execution_count = [], None
            if "by_lightning = " in cell.source:
                cell.source += "\nassert len(by_lightning) == 20"
    nbformat.write(notebook, prepared)
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=600", "--durations=10", "-q"]
    # pytest-xdist puts the repository on the path, where the kernel would find `helpers` by its old name too.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command += ["-p", "no:cacheprovider", name_there]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-6000:]
    num_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    assert f"{num_cells} passed" in done.stdout


def write_photographs(folder, num_rows=120):
    """Cuts of a photograph, of many sizes, as somebody's own Parquet with columns of other names."""
    with Image.open(cbook.get_sample_data("grace_hopper.jpg")) as photograph:
        photograph.load()
    random, rows = np.random.default_rng(0), []
    for number in range(num_rows):
        width, height = random.integers(40, 400, size=2)
        left, top = random.integers(0, photograph.width - width + 1), random.integers(0, photograph.height - height + 1)
        data = io.BytesIO()
        photograph.crop((left, top, left + width, top + height)).save(data, "JPEG", quality=90)
        rows.append({"key": f"{number:05d}", "TEXT": f"a cut of {width} by {height} pixels", "image": data.getvalue()})
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "photographs.parquet")


def run_on_photographs(name, folder):
    own = {
        "storage": str(folder / "storage"),
        "input_uri": str(folder / "photographs"),
        "image_column": "image",
        "caption_column": "TEXT",
        "id_column": "key",
        "limit": None,
        "sections": [],
    }
    mine = {key: value for key, value in {**SHRUNK[name], **own}.items() if key in defaults(name)}
    papermill.execute_notebook(ROOT / name, folder / name, parameters=mine, progress_bar=False, cwd=str(ROOT))


@slow
def test_ones_own_photographs_are_used_by_parameters(workspace, tmp_path):
    """Captions of held-out rows are the prompts where the data is not the drawn one."""
    write_photographs(tmp_path / "photographs")
    for name in NOTEBOOKS[:2]:
        run_on_photographs(name, tmp_path)
    manifest = json.loads((tmp_path / "storage" / "latents" / "manifest.json").read_text())
    assert manifest["read"] == manifest["written"] == 120
    (samples,) = (tmp_path / "storage" / "runs").glob("*/samples")
    assert 1 <= len(list(samples.iterdir())) <= 12


@slow
def test_a_batch_run_without_latents_names_the_command(workspace, tmp_path):
    """It fails, and the executed notebook is saved with the error."""
    notebook = nbformat.read(ROOT / "Training.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("from helpers", "from my_helpers")
    nbformat.write(notebook, tmp_path / "Training.ipynb")
    with pytest.raises(papermill.PapermillExecutionError):
        papermill.execute_notebook(
            tmp_path / "Training.ipynb",
            tmp_path / "executed.ipynb",
            parameters={"storage": str(tmp_path / "nothing")},
            cwd=str(workspace),
            progress_bar=False,
        )
    saved = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    errors = [o for cell in saved.cells if cell.cell_type == "code" for o in cell.outputs if o.output_type == "error"]
    assert "No latents at latents_uri=" in errors[0]["evalue"]
    assert "papermill Preprocessing.ipynb" in errors[0]["evalue"]


def test_a_cell_that_is_run_too_early_says_what_to_run_first():
    """After the cells that import and check parameters, one from the middle."""
    notebook = read("Preprocessing.ipynb")
    cells = code_cells("Preprocessing.ipynb")
    notebook.cells = [*cells[:4], next(cell for cell in cells if "def pipeline(" in cell.source)]
    with pytest.raises(CellExecutionError, match="(?s)'job' is not defined.*Run the cells above this one first"):
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()


# ---- the README


def test_the_readme_and_the_notebooks_give_the_same_minutes():
    """The README's table says how long a notebook takes to run with all its sections; so does its first cell."""
    row = re.compile(r"^\| \[\w+\.ipynb\]\((\S+)\) \|.*\| (\d+) \|$", re.MULTILINE)
    minutes = dict(row.findall((ROOT / "README.md").read_text()))
    assert list(minutes) == list(MOST_CELLS)
    for name, number in minutes.items():
        assert f"about {number} minute" in read(name).cells[0].source, name


def readme_commands():
    """The README's shell commands, each a list of words; `#` begins a comment."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").replace("&&\n", "&& ").splitlines()
    commands = [command for line in lines for command in re.split(" && | ; ", line)]
    return [words for command in commands if (words := shlex.split(command, comments=True))]


def papermill_call(command):
    """(notebook, parameters) of a papermill command, or None; as papermill reads them."""
    if pathlib.Path(command[0]).name != "papermill":
        return None
    given, words = {}, iter(command[3:])
    for word in words:
        if word == "-p":
            name = next(words)
            value = next(words)
            given[name] = None if value == "None" else yaml.safe_load(value)
        elif word == "-y":
            given.update(yaml.safe_load(next(words)))
        elif word == "-f":  # a profile serves all notebooks
            profile, known = yaml.safe_load((ROOT / next(words)).read_text()), defaults(command[1])
            given.update({name: value for name, value in profile.items() if name in known})
    return command[1], given


def test_the_readmes_programs_are_installed_by_it():
    """By requirements.txt, or they come with a Unix shell, Python or git."""
    installed = {"papermill", "jupyter", "pytest", "ray", "pip", "python", "python3"}
    programs = {pathlib.Path(command[0]).name for command in readme_commands()}
    assert programs <= installed | {"git", "cd", "mkdir", "export", "curl"}, programs


def test_the_readmes_main_command_is_what_is_tested():
    """Without the sections: `test_ones_own_photographs_are_used_by_parameters` runs these two so, shrunk."""
    calls = [papermill_call(command) for command in readme_commands()]
    assert [call for call in calls if call][:2] == [(name, {"sections": []}) for name in NOTEBOOKS[:2]]


def test_the_readmes_papermill_commands_have_right_parameters():
    """Their names are parameters of the notebook, and their values pass the checks that the notebook begins with."""
    configs = {NOTEBOOKS[0]: [PreprocessingConfig], NOTEBOOKS[1]: [TrainingConfig]}
    calls = [call for call in map(papermill_call, readme_commands()) if call]
    assert len(calls) >= 3
    for name, given in calls:
        assert given.keys() <= defaults(name).keys(), (name, given)
        values = {**defaults(name), **given}
        for config in configs.get(name, [TrainingConfig, OnlineConfig]):
            online = {"resolutions": [values["resolution"]]} if config is OnlineConfig else {}
            config.from_parameters({**values, **online})


def test_the_readmes_modules_files_and_parameters_exist():
    """Every `python -m module`, pytest path and link to a file."""
    for command in readme_commands():
        if "-m" in command and pathlib.Path(command[0]).name.startswith("python"):
            assert importlib.util.find_spec(command[command.index("-m") + 1]), command
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (ROOT / target).exists(), target
    for module in re.findall(r"python -m (tests\.[a-z_.]+)", text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"`((?:tests|helpers|\.github)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
