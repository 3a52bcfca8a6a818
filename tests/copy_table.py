"""What copying a module costs, computed from the imports: the table of helpers/docs/COPYING.md.

python -m tests.copy_table     # writes the table into that page
"""

import ast
import functools
import io
import pathlib
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "helpers"
NAME = PACKAGE.name
PAGE = PACKAGE / "docs" / "COPYING.md"
BEGIN, END = "<!-- copy table -->", "<!-- end of copy table -->"
COPIED = {
    "encode.encoder": "the actor that turns images and captions into latents and embeddings",
    "encode.stages": "what the preprocessing pipeline maps over rows: transform, write",
    "latents.plan": "which rows make which step, on any number of workers",
    "latents.read": "how these rows get to the workers, by Ray Data",
    "model.sharding": "the denoiser, sharded and compiled",
    "model.diffusion": "the objective",
    "train.loop": "the function that Ray Train's workers run",
    "sample.pipeline": "images from prompts by diffusers' pipeline, its export",
}
PACKAGES = {"PIL": "pillow"}  # imported name -> what pip calls it, where they differ


def modules():
    """{dotted name: file} of the package's modules; a package stands for its `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = (NAME, *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def imports(module):
    """Dotted names of modules, or of something in them, that a module imports, in functions too."""
    tree, path = ast.parse(MODULES[module].read_text()), MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def needs(module):
    """The package's modules that a module imports itself."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imports(module)}
    return (found & MODULES.keys()) - {module}


def closure(module):
    """All modules of the package that have to be copied with a module, itself and every `__init__` included."""
    found, waiting = set(), [module]
    while waiting:
        parts = waiting.pop().split(".")
        for name in {".".join(parts[: count + 1]) for count in range(len(parts))} - found:
            found.add(name)
            waiting += needs(name)
    return found


def code_lines(path):
    """Lines that hold code: no blank ones, no comments, no docstrings. The files are as `ruff format` writes them."""
    source, docstrings = path.read_text(), set()
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


def cost(names):
    """Lines of code of modules."""
    return sum(code_lines(MODULES[name]) for name in names)


def packages(names):
    """What modules import from outside of the package and of Python, as pip calls it."""
    found = {name.partition(".")[0] for module in names for name in imports(module)}
    return {PACKAGES.get(name, name) for name in found - set(sys.stdlib_module_names) - {NAME}}


def table():
    """Markdown, a row for each module in `COPIED`. An `__init__` without code is no file to read, and not counted."""
    rows = ["| module | what it holds | files | lines | packages |", "|---|---|---|---|---|"]
    for module, what in COPIED.items():
        needed = closure(f"{NAME}.{module}")
        files = sum(code_lines(MODULES[name]) > 0 for name in needed)
        rows.append(f"| `{module}` | {what} | {files} | {cost(needed):,} | {', '.join(sorted(packages(needed)))} |")
    return "\n".join(rows)


def main():
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
