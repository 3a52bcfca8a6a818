"""The notebooks' hand-written thread as one script: the cells tagged "by-hand" of Preprocessing and Training.ipynb."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
MODELS = str(ROOT / "helpers" / "models" / "tiny-sd")
NOTEBOOKS = ["Preprocessing.ipynb", "Training.ipynb"]
BEGIN = """import ray

raw_folder, latents_folder, scratch, steps = {raw!r}, {latents!r}, {scratch!r}, 4


def models():
    return {models!r}


ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
"""
END = "pipeline.save_pretrained({folder!r})\n"


def first_lines():
    """What the text of Preprocessing.ipynb says to write before the cells."""
    cells = json.loads((ROOT / NOTEBOOKS[0]).read_text())["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    (lines,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return lines


def cells(names=NOTEBOOKS):
    """The code of the tagged cells, in order."""
    notebooks = [json.loads((ROOT / name).read_text()) for name in names]
    tagged = [
        cell for notebook in notebooks for cell in notebook["cells"] if "by-hand" in cell["metadata"].get("tags", [])
    ]
    return ["".join(cell["source"]).removeprefix("# section: by-hand\n") for cell in tagged]


def run_until(notebook, wanted, **values):
    """What a notebook's tagged cells define, up to and with the statement that defines `wanted`; they see `values`."""
    space = dict(values)
    for source in cells([notebook]):
        for statement in ast.parse(source).body:
            exec(compile(ast.Module([statement], []), notebook, "exec"), space)
            if wanted in space:
                return space
    raise NameError(f"No tagged cell of {notebook} defines {wanted}.")


def assemble(folder, changes=None, **settings):
    """The script: it encodes `folder`/scratch/raw, trains, resumes, draws, and writes a pipeline to `folder`/pipeline.

    Args:
        changes: {a part of the script, which is there once: what stands there instead}
        settings: replace those of the cell that defines them.
    """
    folder = pathlib.Path(folder).resolve()
    changes = {
        '"/path/to/helpers/models/tiny-sd"': repr(MODELS),
        'abspath("scratch"), 2000': 'abspath("scratch"), 4',
        **(changes or {}),
    }
    parts = [first_lines()]
    for cell in cells():
        parts.append(cell + "\n")
        if "def fit_by_hand" in cell:
            parts.append(f"settings |= {settings!r}\n")
    script = "\n\n".join([*parts, END.format(folder=f"{folder}/pipeline")])
    for part, other in changes.items():
        assert script.count(part) == 1, part
        script = script.replace(part, other)
    return script


def run(folder, **options):
    """Run the script (`options`: see `assemble`) where `helpers` cannot be imported; returns what it printed."""
    script = pathlib.Path(folder) / "by_hand.py"
    script.write_text(assemble(folder, **options))
    environment = {**os.environ, "RAY_AUTH_TOKEN": "by hand"}  # or Ray would write one to the home
    command = [sys.executable, "-I", script.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"The script ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout
