"""The rules that keep the core thin: its parameters, the closure of the training loop, the direction of imports.

Each number is today's, and may only fall: a new parameter replaces another.
"""

import ast
import functools
import io
import json
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = ("Preprocessing.ipynb", "Training.ipynb", "Online_Preprocessing_and_Training.ipynb")
PARAMETERS = 69
CLOSURE = {"modules": 13, "lines": 1_900}  # of `train.loop`
ROOMS = {"online": {"online"}, "production": {"online", "production"}, "lesson": {"online", "production", "lesson"}}


def modules():
    """{dotted name: file} of the package's modules; a package stands for its `__init__`."""
    found = {}
    for path in (ROOT / "helpers").rglob("*.py"):
        parts = path.relative_to(ROOT / "helpers").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def nodes(tree):
    """The nodes of a tree, without what only a type checker runs."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node)


@functools.cache
def imports(module):
    """Dotted names that a module imports from the package, in functions too."""
    path, found = MODULES[module], []
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found += [".".join([*base, alias.name]) for alias in node.names]
    return found


def needs(module):
    """The package's modules that a module imports."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imports(module)}
    return (found & MODULES.keys()) - {module, ""}


def closure(module, found=frozenset()):
    """The modules that have to be copied with a module, without the folders' `__init__`."""
    found = found | {module}
    for needed in sorted(needs(module)):
        found = found if needed in found else closure(needed, found)
    return frozenset(name for name in found if MODULES[name].name != "__init__.py")


def code_lines(path):
    """The number of lines that hold code: no blank lines, comments or docstrings."""
    source, docstrings = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in empty]
    lines = set().union(*(range(token.start[0], token.end[0] + 1) for token in tokens))
    return len(lines - docstrings)


def room(module):
    """The room beside the core that a module is in; "" for the core."""
    first = module.split(".")[0]
    return first if first in ROOMS else ""


def parameters(notebook):
    """The names that papermill may set: those of the cells up to the one with the tag "parameters"."""
    names = set()
    for cell in json.loads((ROOT / notebook).read_text())["cells"]:
        if cell["cell_type"] == "code":
            statements = ast.parse("".join(cell["source"])).body
            names |= {node.targets[0].id for node in statements if isinstance(node, ast.Assign)}
        if "parameters" in cell["metadata"].get("tags", []):
            return names
    raise ValueError(f"{notebook} has no cell with the tag")


def test_a_new_parameter_replaces_another():
    assert len(set().union(*map(parameters, NOTEBOOKS))) <= PARAMETERS


def test_the_training_loop_is_copied_with_little_and_nothing_of_the_rooms():
    needed = closure("train.loop")
    assert not [name for name in needed if room(name)]
    assert len(needed) <= CLOSURE["modules"] and sum(code_lines(MODULES[name]) for name in needed) <= CLOSURE["lines"]


def test_the_core_imports_no_room_and_a_room_those_before_it():
    found = {(name, needed) for name in MODULES for needed in needs(name) if room(needed)}
    assert not {(name, needed) for name, needed in found if room(needed) not in ROOMS.get(room(name), ())}


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


def test_imports_within_the_package_are_relative_and_of_public_names():
    for name, path in MODULES.items():
        assert not re.search(r"^ *(from|import) helpers\b", path.read_text(), re.MULTILINE), name
        assert not [imported for imported in imports(name) if re.search(r"(^|\.)_[a-z]", imported)], name
