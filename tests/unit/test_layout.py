"""How large the parts are, what copying a module costs, and which way imports point."""

import ast

import pytest

from tests import copy_table
from tests.copy_table import MODULES, NAME, PACKAGE, ROOT, closure, code_lines, cost, imports, needs, packages


def folder_lines(folder, leave_out=()):
    """Lines of code in a folder, at any depth, but for those of some of its subfolders."""
    left_out = {folder / name for name in leave_out}
    return sum(code_lines(path) for path in folder.rglob("*.py") if not left_out & set(path.parents))


def module_lines(name):
    return code_lines(PACKAGE / f"{name}.py")


def copied_lines(name):
    return cost(closure(f"{NAME}.{name}"))


@pytest.mark.parametrize(
    ("part", "measure", "most"),
    [
        ("encode.encoder", copied_lines, 530),
        ("model.unet", copied_lines, 305),
        ("encode.stages", copied_lines, 2250),
        ("train.loop", copied_lines, 2930),
        ("latents/plan", module_lines, 320),
        ("latents/read", module_lines, 235),
        ("train/kept", module_lines, 150),
        ("lesson/side_by_side", module_lines, 125),
        ("runtime/lease", module_lines, 80),
        ("lesson/figures", module_lines, 505),
        ("lesson", lambda name: folder_lines(PACKAGE / name), 2660),
        ("all but lesson", lambda _: folder_lines(PACKAGE, leave_out=["lesson"]), 7_200),
        ("tests", lambda name: folder_lines(ROOT / name, leave_out=["makers"]), 14_870),
        ("README.md", lambda name: len((ROOT / name).read_text().split()), 1500),
    ],
)
def test_a_part_stays_small(part, measure, most):
    """Lines of code: of a module alone, of one with all that must be copied with it, of a folder. README: words."""
    assert measure(part) <= most


def test_the_readmes_table_of_modules_is_what_the_imports_say():
    """If not: `python -m tests.copy_table`."""
    _, begin, rest = copy_table.README.read_text().partition(copy_table.BEGIN)
    table, end, _ = rest.partition(copy_table.END)
    assert begin and end and table.strip() == copy_table.table()


def test_the_unet_needs_torch_and_diffusers_only():
    assert packages(closure(f"{NAME}.model.unet")) == {"torch", "diffusers"}


def test_train_needs_no_plots_notebooks_or_lessons():
    needed = closure(f"{NAME}.train.loop")
    assert not packages(needed) & {"matplotlib", "IPython"}
    assert not [name for name in needed if name.startswith(f"{NAME}.lesson")]


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


def test_lessons_are_imported_by_lessons_alone():
    lesson = f"{NAME}.lesson"
    for name in MODULES:
        if not name.startswith(lesson):
            assert not [needed for needed in needs(name) if needed.startswith(lesson)], name


def test_imports_within_the_package_are_relative():
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] != NAME, name
            elif isinstance(node, ast.Import):
                assert NAME not in {alias.name.partition(".")[0] for alias in node.names}, name


def dotted(node):
    """`a.b.c` of an attribute chain, or None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def test_nothing_private_of_other_packages_is_used():
    """`torch._dynamo.config` has no other name."""
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        names = {name for name in imports(module) if name.partition(".")[0] != NAME}
        bound = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
            for alias in node.names
        }
        chains = filter(None, (dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)))
        names |= {chain for chain in chains if chain.partition(".")[0] in bound}
        private = {
            name
            for name in names
            if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            and not name.startswith(("torch._dynamo.config", "__future__"))
            and name != "torch._dynamo"
        }
        assert not private, f"{module}: {sorted(private)}"


STAGES = ["config", "runtime", "latents", "raw", "model", "encode", "train", "sample", "evaluation", "lesson"]


def stage_of(name):
    """The stage that a module is in; "" for the package itself and the two modules beside the stages."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and MODULES[name].name == "__init__.py") else ""


def test_the_first_level_lists_the_stages_and_two_modules():
    files = {path for path in PACKAGE.iterdir() if path.suffix == ".py" and path.name != "__init__.py"}
    folders = {path for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert {path.name for path in folders} == set(STAGES)
    assert {path.stem for path in files} == {"storage", "distributed"}


def test_no_import_points_up():
    """A stage imports only stages before it."""
    for name in MODULES:
        for needed in filter(stage_of, needs(name)):
            mine = stage_of(name)
            assert mine and STAGES.index(needed.split(".")[1]) <= STAGES.index(mine), f"{name} imports {needed}"


def test_the_package_lists_every_stage_in_order():
    lines = (PACKAGE / "__init__.py").read_text().splitlines()
    listed = [line.split()[0].rstrip("/") for line in lines if line.startswith("    ") and "/ " in line]
    assert listed[: len(STAGES)] == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_says_what_goes_in_and_out(stage):
    text = (PACKAGE / stage / "__init__.py").read_text()
    assert len(text.strip().splitlines()) <= 5 and code_lines(PACKAGE / stage / "__init__.py") == 0
