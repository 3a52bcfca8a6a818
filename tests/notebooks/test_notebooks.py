"""What the notebooks promise: their form, and that they run, shrunk, from another folder."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import nbformat
import papermill
import pytest
import yaml
from nbconvert import HTMLExporter

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.model import denoisers
from helpers.online.config import OnlineConfig
from tests import execute_notebooks, own_data
from tests.faults import slow
from tests.pipelines import defaults

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = execute_notebooks.NOTEBOOKS[:3]  # the others read what these left
MOST_CELLS = dict(zip(execute_notebooks.NOTEBOOKS, [50, 80, 42, 55, 55], strict=True))
ROWS = {"limit": 320, "validation_share": 0.05}
STEPS = {"resolution": 32, "max_steps": 6, "global_batch_size": 16, "warmup_steps": 2, "validation_share": 0.05}
STEPS |= {"checkpoint_every": 6, "validate_every": 6, "sampling_steps": 2}
SHRUNK = {
    NOTEBOOKS[0]: {**ROWS, "resolutions": [32]},
    NOTEBOOKS[1]: STEPS,
    NOTEBOOKS[2]: {**ROWS, **STEPS, "limit": 160},
}


def read(name):
    return nbformat.read(ROOT / name, as_version=4)


def code_cells(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", execute_notebooks.NOTEBOOKS)
def test_each_figure_has_a_text_for_those_who_cannot_see_it_also_as_a_web_page(name):
    """`jupyter nbconvert --to html --template classic`; the default template leaves an output's text out."""
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(read(name))
    images = re.findall(r"<img\b[^>]*>", page)
    texts = [re.search(r'\balt="([^"]*)"', image) for image in images]
    assert len(images) > 2 and all(text and len(text[1]) > 10 for text in texts)
    assert not any("No description" in text[1] for text in texts)


def parameter_cells(name):
    """The tagged cell, and in the main notebooks the short one above it."""
    cells = code_cells(name)
    (tagged,) = [i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    return cells[: tagged + 1]


def section_of(cell):
    """The section that a cell's first line names, or None."""
    found = re.match(r"# section: ([\w-]+)\n", cell.source)
    return found and found[1]


def test_a_parameter_has_a_comment_which_is_the_same_in_all_notebooks():
    seen = {}
    for name in MOST_CELLS:
        source = "\n".join(cell.source for cell in parameter_cells(name))
        assert all(isinstance(statement, ast.Assign) for statement in ast.parse(source).body)
        found = re.findall(r"^(\w+) = .*  # (.{5,})$", source, re.MULTILINE)
        comments = dict(found)
        assert len(comments) == len(found)
        assert comments.keys() == defaults(name).keys()
        comments.pop("sections", None)  # each notebook lists its own
        assert {**comments, **seen} == {**seen, **comments}
        seen |= comments


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_ten_parameters_that_matter_stand_first_and_the_others_are_folded(name):
    first, others = parameter_cells(name)
    assert len(first.source.splitlines()) <= 10 and not first.metadata.get("tags")
    assert others.metadata["jupyter"]["source_hidden"]


@pytest.mark.parametrize("name", MOST_CELLS)
def test_parameters_are_not_assigned_again_below_their_cells(name):
    mine = set(defaults(name))
    for cell in code_cells(name)[len(parameter_cells(name)) :]:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, (ast.Name, ast.alias)):
                bound = (node.asname or node.name) if isinstance(node, ast.alias) else node.id
                stores = isinstance(node, ast.alias) or isinstance(node.ctx, (ast.Store, ast.Del))
                assert not (stores and bound in mine), f"{name} assigns {bound} again: {cell.source[:80]}"


@pytest.mark.parametrize("name", MOST_CELLS)
def test_what_a_notebook_calls_of_helpers_is_there_and_takes_these_arguments(name):
    """By name: functions of the modules that it imports, and their keywords."""
    nodes = [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell.source))]
    known = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "helpers":
            for alias in node.names:
                module = importlib.import_module(node.module)
                found = getattr(module, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                known[alias.asname or alias.name] = found
    for node in nodes:
        if isinstance(node, ast.Attribute) and inspect.ismodule(known.get(getattr(node.value, "id", None))):
            assert hasattr(known[node.value.id], node.attr), f"{node.value.id}.{node.attr}"
    calls = [(node, called(node.func, known)) for node in nodes if isinstance(node, ast.Call)]
    for node, function in calls:
        if function is not None:
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(function).bind_partial(**given)


def called(node, known):
    """What a call's function names, of what the notebook imports from helpers; None for another one."""
    if isinstance(node, ast.Name):
        found = known.get(node.id)
        return found if callable(found) else None
    module = known.get(getattr(getattr(node, "value", None), "id", None))
    return getattr(module, node.attr) if inspect.ismodule(module) else None


@pytest.mark.parametrize("name", MOST_CELLS)
def test_cells_are_short_plain_python_with_prose_before_them(name):
    cells = read(name).cells
    assert len(cells) <= MOST_CELLS[name]
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert not [cell for cell in cells if "papermill-error-cell" in cell.source]  # of an execution that failed once
    for cell in code_cells(name):
        lines = cell.source.splitlines()
        tags = cell.metadata.get("tags", [])
        is_folded = cell.metadata.get("jupyter", {}).get("source_hidden")
        assert is_folded or "parameters" in tags or len(lines) <= (30 if "by-hand" in tags else 20), cell.source[:80]
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
def test_what_a_notebook_imports_keeps_its_meaning(name):
    """A name that is assigned again would mean something else when its cell runs twice."""
    nodes = [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell.source))]
    imported = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert not imported & assigned


@pytest.mark.parametrize(("load", "changes"), [(1.5, ""), (0.1, " M Training.ipynb")])
def test_notebooks_are_not_executed_on_a_busy_machine_or_over_changes(load, changes):
    with pytest.raises(SystemExit, match="does something else|has changes"):
        execute_notebooks.check(load, changes)


@pytest.mark.parametrize("name", MOST_CELLS)
def test_most_code_cells_show_something(name):
    """Of the main lesson; sections may be left out, and hand-written functions are shown where they are called."""
    cells = [cell for cell in code_cells(name)[len(parameter_cells(name)) :] if section_of(cell) in (None, "by-hand")]
    cells = [cell for cell in cells if "by-hand" not in cell.metadata.get("tags", [])]
    shown = [cell for cell in cells if cell.outputs]
    assert len(shown) >= 0.7 * len(cells), [cell.source[:60] for cell in cells if not cell.outputs]


@pytest.mark.parametrize("name", MOST_CELLS)
def test_three_links_or_more_lead_out_of_a_notebook_and_its_links_to_files_exist(name):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    assert len(set(re.findall(r"\]\((https?://[^)\s]+)\)", text))) >= 3
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert ((ROOT / name).parent / target).exists(), target


@pytest.fixture(scope="module")
def workspace(no_shared_cluster, tmp_path_factory):
    """A folder elsewhere, with a copy of the helpers under another name."""
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copytree(ROOT / "helpers", folder / "my_helpers", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


# nbval runs every section of the first notebook, and the path of all three: `test_by_hand` runs the hand-written
# cells, `test_browser` the prompt box, and tests/cluster shows what the sections show. `tests.execute_notebooks` runs
# every cell of all notebooks.
CHOSEN = {
    NOTEBOOKS[0]: {},
    NOTEBOOKS[2]: {"sections": [], "unet_config": "tiny-transformer", "prediction_type": "flow"},
}


@slow
@pytest.mark.timeout(2400)  # of many runs: a cell that hangs ends after 600 s
@pytest.mark.parametrize("name", CHOSEN)
def test_nbval_runs_a_notebook(name, workspace):
    """From another folder, with renamed helpers. The last one trains PRX with flow."""
    run_by_nbval(workspace, name, **CHOSEN[name])


def run_by_nbval(workspace, name, **parameters):
    """Execute a notebook by nbval, in the folder `workspace`."""
    prepared = workspace / name
    values = {**SHRUNK.get(name, {}), **parameters}
    papermill.execute_notebook(ROOT / name, prepared, parameters=values, prepare_only=True, progress_bar=False)
    notebook = nbformat.read(prepared, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace("from helpers", "from my_helpers")
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, prepared)
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=600", "--durations=10", "-q"]
    # pytest-xdist puts the repository on the path, where the kernel would find `helpers` by its old name too.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command += ["-p", "no:cacheprovider", name]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-6000:]
    num_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    assert f"{num_cells} passed" in done.stdout


def own_data_commands():
    """README's two commands for one's own data: (notebook, parameters)."""
    calls = [call for call in map(papermill_call, readme_commands()) if call]
    return [(name, given) for name, given in calls if given.get("storage") == "my-storage"]


@slow
def test_readmes_commands_lead_from_ones_own_pictures_to_samples(workspace, tmp_path):
    """By nbval, shrunk by parameters alone. Captions of held-out rows are the prompts: the data is not drawn."""
    own_data.write_kohya(tmp_path / "pictures")
    here = {"input_uri": str(tmp_path / "pictures"), "storage": str(tmp_path / "storage")}
    for name, given in own_data_commands():
        run_by_nbval(workspace, name, **{**given, **{key: here[key] for key in given.keys() & here.keys()}})
    manifest = json.loads((tmp_path / "storage" / "latents" / "manifest.json").read_text())
    assert manifest["read"] == manifest["written"] == 120
    (samples,) = (tmp_path / "storage" / "runs").glob("*/samples")
    assert 1 <= len(list(samples.iterdir())) <= 12


@slow
def test_a_batch_run_without_latents_names_the_command(workspace, tmp_path):
    """It fails with little more than the sentence; the executed notebook is saved with the error and its traceback."""
    notebook = nbformat.read(ROOT / "Training.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("from helpers", "from my_helpers")
    nbformat.write(notebook, tmp_path / "Training.ipynb")
    with pytest.raises(papermill.PapermillExecutionError) as raised:
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
    assert errors[0]["evalue"] in str(raised.value) and len(str(raised.value).strip().splitlines()) < 8
    assert "<details><summary>Traceback</summary>" in json.dumps(saved)


# ---- the README and the pages that it leads to

PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("helpers/docs/*.md"))
PAGES += ["README.md", "helpers/clusters/README.md"]


def test_the_readme_and_the_notebooks_give_the_same_minutes():
    """The README's table says how long a notebook takes to run with all its sections; so does its first cell."""
    row = re.compile(r"^\| \[\w+\.ipynb\]\((\S+)\) \|.*\| (\d+) \|$", re.MULTILINE)
    minutes = dict(row.findall((ROOT / "README.md").read_text()))
    assert list(minutes) == list(MOST_CELLS)
    for name, number in minutes.items():
        assert f"about {number} minute" in read(name).cells[0].source, name


def readme_commands(page="README.md"):
    """The shell commands of a page, each a list of words; `#` begins a comment."""
    text = (ROOT / page).read_text()
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
    programs = {pathlib.Path(command[0]).name for page in PAGES for command in readme_commands(page)}
    assert programs <= installed | {"git", "cd", "mkdir", "export", "curl"}, programs


def test_the_readmes_main_command_is_what_is_tested():
    """Without the sections. The commands for one's own data only name the pictures and where to store more."""
    calls = [papermill_call(command) for command in readme_commands()]
    assert [call for call in calls if call][:2] == [(name, {"sections": []}) for name in NOTEBOOKS[:2]]
    assert [(name, given.keys()) for name, given in own_data_commands()] == [
        (NOTEBOOKS[0], {"sections", "input_uri", "limit", "storage"}),
        (NOTEBOOKS[1], {"sections", "storage"}),
    ]


def test_the_readmes_lines_of_python_draw_as_the_model_card_says():
    (lines,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    given = defaults(NOTEBOOKS[1])
    size = {"height": given["resolution"], "width": given["resolution"]}
    steps = {"num_inference_steps": given["sampling_steps"], "guidance_scale": given["guidance_scale"]}
    (options,) = re.findall(r"^options = dict\((.*)\)$", lines, re.MULTILINE)
    found = {word.arg: ast.literal_eval(word.value) for word in ast.parse(f"dict({options})").body[0].value.keywords}
    assert found == {**size, **steps, **denoisers.ADAPTERS["UNet2DConditionModel"].call_options(77)}
    assert f'"{given["storage"]}/runs/{given["run_name"]}/pipeline"' in lines


def test_the_readmes_papermill_commands_have_right_parameters():
    """Their names are parameters of the notebook, and their values pass the checks that the notebook begins with."""
    configs = {NOTEBOOKS[0]: [PreprocessingConfig], NOTEBOOKS[1]: [TrainingConfig]}
    calls = [call for page in PAGES for call in map(papermill_call, readme_commands(page)) if call]
    assert len(calls) >= 5
    for name, given in calls:
        assert given.keys() <= defaults(name).keys(), (name, given)
        values = {**defaults(name), **given}
        for config in configs.get(name, [TrainingConfig, OnlineConfig]):
            online = {"resolutions": [values["resolution"]]} if config is OnlineConfig else {}
            config.from_parameters({**values, **online})


@pytest.mark.parametrize("page", PAGES)
def test_the_modules_files_and_sections_that_a_page_names_exist(page):
    """Every `python -m module`, path and link to a file or to a section of a page."""
    for command in readme_commands(page):
        if "-m" in command and pathlib.Path(command[0]).name.startswith("python"):
            assert importlib.util.find_spec(command[command.index("-m") + 1]), command
    text = (ROOT / page).read_text()
    for target, section in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if section else []
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not section or section in anchors, (target, section)
    for module in re.findall(r"python -m (tests\.[a-z_.]+)", text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"`((?:tests|helpers|\.github)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
