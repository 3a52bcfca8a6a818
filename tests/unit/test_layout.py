"""What copying a module costs, computed from the imports; which way imports point."""

import ast
import functools
import io
import pathlib
import subprocess
import sys
import tokenize

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "helpers"
NAME = PACKAGE.name


def modules():
    """{dotted name: file} of the package's modules; a package stands for its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = (NAME, *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module):
    """[(dotted name of a module or of something in it, whether the statement stands at the module's top level)]"""
    tree, path = ast.parse(MODULES[module].read_text()), MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found += [(f"{base}.{alias.name}", id(node) in top) for alias in node.names]
    return found


@functools.cache
def needs(module, top_level_only=False):
    """The package's modules that a module imports itself."""
    found = set()
    for name, is_top in imports(module):
        if is_top or not top_level_only:
            mine = name if name in MODULES else name.rpartition(".")[0]
            if mine in MODULES:
                found.add(mine)
    return found - {module}


def with_packages(module):
    """A module and the packages that it lies in, whose `__init__` is run first."""
    parts = module.split(".")
    return {".".join(parts[: count + 1]) for count in range(len(parts))}


def closure(module):
    """All modules of the package that have to be copied with a module, itself and every `__init__` included."""
    found, waiting = set(), [module]
    while waiting:
        for name in with_packages(waiting.pop()) - found:
            found.add(name)
            waiting += needs(name)
    return found


def code_lines(source):
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@functools.cache
def formatted(path):
    """A file's text as `ruff format` writes it at 120 columns."""
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    command = [str(ruff), "format", "--isolated", "--line-length=120", "--stdin-filename=module.py", "-"]
    done = subprocess.run(command, input=path.read_text(), capture_output=True, text=True, check=True)
    return done.stdout


def cost(names):
    return sum(code_lines(formatted(MODULES[name])) for name in names)


def outside(names):
    """The other packages that modules import, wherever in them."""
    return {name.partition(".")[0] for module in names for name, _ in imports(module)} - {NAME}


@pytest.mark.parametrize(("module", "most_modules", "most_lines"), [("encoder", 4, 450), ("train", 14, 2760)])
def test_what_copying_costs(module, most_modules, most_lines):
    """`__init__` counts by its lines; a folder's `__init__` that holds no code is no module to read."""
    needed = closure(f"{NAME}.{module}")
    counted = {name for name in needed if code_lines(MODULES[name].read_text())}
    assert len(counted) <= most_modules, sorted(counted)
    assert cost(needed) <= most_lines, {name: cost([name]) for name in sorted(needed)}


def test_train_needs_no_plots_notebooks_or_lessons():
    needed = closure(f"{NAME}.train")
    assert not outside(needed) & {"matplotlib", "IPython"}
    assert not [name for name in needed if name.startswith(f"{NAME}.lesson")]


def test_sampling_needs_no_sample_data():
    assert f"{NAME}.lesson.captioned_shapes" not in closure(f"{NAME}.sampling")


def test_the_core_is_small():
    core = [name for name, path in MODULES.items() if path.parent == PACKAGE]
    assert cost(core) <= 3660, {name: cost([name]) for name in core}


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
        names = {name for name, _ in imports(module) if name.partition(".")[0] != NAME}
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


def test_the_package_lists_every_module():
    text = (PACKAGE / "__init__.py").read_text()
    listed = {line.replace("*", " ").split()[0] for line in text.splitlines() if line.replace("*", " ").strip()}
    for name, path in MODULES.items():
        if path.parent == PACKAGE and path.name != "__init__.py":
            assert name.rpartition(".")[2] in listed, name
    for folder in ("data_io", "runtime", "evaluation", "lesson"):
        assert f"{folder}/" in listed, folder
