"""How large the parts are, what copying a module costs, which way imports point, and which names are taken twice.

Ruff checks that code accesses nothing private of other packages (SLF001); a test here, that it imports nothing such.
"""

import ast
import collections
import re
import subprocess

import pytest

from tests import copy_table
from tests.copy_table import MODULES, NAME, PACKAGE, ROOT, closure, code_lines, cost, imports, needs, packages

STAGES = ["config", "runtime", "latents", "raw", "model", "encode", "train", "sample", "evaluation", "lesson"]


def folder_lines(folder, leave_out=None):
    """Lines of code in a folder, at any depth, but for those of one of its subfolders."""
    paths = (path for path in folder.rglob("*.py") if leave_out not in path.relative_to(folder).parts)
    return sum(code_lines(path) for path in paths)


def copied_lines(*modules):
    """Lines of code of modules with all that must be copied with them."""
    return cost(set().union(*(closure(f"{NAME}.{module}") for module in modules)))


@pytest.mark.parametrize(
    ("measure", "most"),
    [
        pytest.param(lambda: copied_lines("encode.encoder"), 399, id="to copy: the encoder"),
        pytest.param(lambda: copied_lines("model.sharding", "model.diffusion"), 560, id="to copy: the model"),
        pytest.param(lambda: copied_lines("latents.read"), 1_266, id="to copy: plan and read"),
        pytest.param(lambda: copied_lines("train.loop"), 3_693, id="to copy: the training loop"),
        pytest.param(lambda: folder_lines(PACKAGE / "lesson"), 2_560, id="lesson"),
        pytest.param(lambda: folder_lines(PACKAGE, leave_out="lesson"), 9_099, id="all but lesson"),
        pytest.param(lambda: folder_lines(ROOT / "tests"), 19_112, id="tests"),
        pytest.param(lambda: len((ROOT / "README.md").read_text().split()), 1_000, id="words of README.md"),
        pytest.param(lambda: len((ROOT / "README.md").read_text().splitlines()), 150, id="lines of README.md"),
    ],
)
def test_a_part_stays_small(measure, most):
    """Lines of code: of modules with all that must be copied with them, of a folder. README: its words and lines."""
    assert measure() <= most


def test_the_table_of_modules_to_copy_is_what_the_imports_say():
    """If not: `python -m tests.copy_table`."""
    _, begin, rest = copy_table.PAGE.read_text().partition(copy_table.BEGIN)
    table, end, _ = rest.partition(copy_table.END)
    assert begin and end and table.strip() == copy_table.table()


def test_a_copied_module_needs_few_packages():
    assert not packages(closure(f"{NAME}.train.loop")) & {"matplotlib", "IPython"}


@pytest.mark.parametrize("module", ["denoisers", "sharding", "diffusion"])
def test_the_model_is_copied_without_configs_latents_and_ray(module):
    needed = closure(f"{NAME}.model.{module}")
    assert {name for name in needed if not name.startswith(f"{NAME}.model")} <= {NAME, f"{NAME}.distributed"}
    assert packages(needed) <= {"torch", "diffusers", "numpy"}


# ---- the way of imports


def stage_of(name):
    """The stage that a module is in; "" for the package itself and the two modules beside the stages."""
    stage = [*name.split("."), ""][1]
    return stage if stage in STAGES else ""


def test_the_first_level_lists_the_stages_and_two_modules():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    packages = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*/*.py")}
    assert modules == {"storage", "distributed"} and packages == set(STAGES)


def test_no_import_points_up():
    """A stage imports itself, stages before it, and the two modules beside the stages."""
    for name in MODULES:
        for needed in filter(stage_of, needs(name)):
            mine = stage_of(name)
            assert mine and STAGES.index(stage_of(needed)) <= STAGES.index(mine), f"{name} imports {needed}"


def test_imports_make_no_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for needed in sorted(needs(name)):
                visit(needed)
            path.pop()
            done.add(name)

    for name in MODULES:
        visit(name)


def test_imports_within_the_package_are_relative():
    for name, path in MODULES.items():
        assert not re.search(rf"^ *(from|import) {NAME}\b", path.read_text(), re.MULTILINE), name


def test_nothing_private_is_imported():
    for module in MODULES:
        assert not [name for name in imports(module) if re.search(r"\._[a-z]", name)], module


# ---- what a reader is told


def test_the_package_lists_every_stage_in_order():
    lines = (PACKAGE / "__init__.py").read_text().splitlines()
    listed = [line.split()[0].rstrip("/") for line in lines if line.startswith("    ") and "/ " in line]
    assert listed[: len(STAGES)] == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_says_what_goes_in_and_out(stage):
    file = PACKAGE / stage / "__init__.py"
    assert len(file.read_text().strip().splitlines()) <= 5 and code_lines(file) == 0


def test_no_two_public_functions_or_classes_share_a_name():
    """A command's `main` means the same everywhere."""
    defined = collections.defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                defined[node.name].append(module)
    shared = {name: modules for name, modules in defined.items() if len(modules) > 1}
    assert shared.keys() <= {"main"}, shared


def test_what_benchmarks_import_leaves_the_environment_of_their_processes_alone():
    """`tests.conftest` sets variables for the tests; with them, training through Ray was a quarter slower."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None)
                names = {module, *(f"{module}.{alias.name}" for alias in node.names), *(one.name for one in node.names)}
                assert "tests.conftest" not in names, path


def test_the_top_level_holds_what_the_readme_names_and_nothing_else():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {line.partition("/")[0] for line in done.stdout.splitlines()}
    notebooks = {"Preprocessing.ipynb", "Training.ipynb", "Online_Preprocessing_and_Training.ipynb"}
    files = {"README.md", "LICENSE", "requirements.txt", "pyproject.toml", ".gitignore", ".ci", ".github"}
    assert found - files == {*notebooks, "helpers", "tests"}
