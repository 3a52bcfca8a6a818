"""The notebooks' hand-written thread as one script: the cells tagged "by-hand" of Preprocessing and Training.ipynb."""

import ast
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
MODELS = str(ROOT / "helpers" / "models" / "tiny-sd")
NOTEBOOKS = ["Preprocessing.ipynb", "Training.ipynb"]
ONLINE = "Online_Preprocessing_and_Training.ipynb"
BEGIN = """import ray

raw_folder, latents_folder, scratch, steps = {raw!r}, {latents!r}, {scratch!r}, 4


def models():
    return {models!r}


ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
"""
END = """differences = [np.abs(np.asarray(one, int) - other).max() for one, other in zip(by_diffusers, drawn_by_hand)]
print(f"largest difference of a pixel: {{max(differences)}} of 255")
pipeline.save_pretrained({folder!r})
"""


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
    """The script: it encodes `folder`/raw, trains, resumes, draws, and writes a pipeline to `folder`/pipeline.

    Args:
        changes: {a part of the cells, which is there once: what stands there in the script}
        settings: replace those of the cell that defines them.
    """
    folder = pathlib.Path(folder).resolve()
    begin = BEGIN.format(raw=f"{folder}/raw", latents=f"{folder}/latents", scratch=str(folder), models=MODELS)
    parts = [begin]
    for cell in cells():
        parts.append(cell + "\n")
        if "def fit_by_hand" in cell:
            parts.append(f"settings |= {settings!r}\n")
    script = "\n\n".join([*parts, END.format(folder=f"{folder}/pipeline")])
    for part, other in (changes or {}).items():
        assert script.count(part) == 1, part
        script = script.replace(part, other)
    return script


def short_form(folder):
    """The script of the online notebook's tagged cells: it trains on `folder`/raw and prints its losses."""
    folder = pathlib.Path(folder).resolve()
    begin = BEGIN.format(raw=f"{folder}/raw", latents="", scratch=str(folder), models=MODELS)
    end = "losses, weights = trainer.fit().return_value\nprint('losses:', losses)\n"
    return "\n\n".join([begin, *cells([ONLINE]), end])


def run(folder, **options):
    """What the script prints; `options`: see `assemble`."""
    return execute(folder, assemble(folder, **options))


def execute(folder, source):
    """Run a script where `helpers` cannot be imported; returns what it printed."""
    script = pathlib.Path(folder) / "by_hand.py"
    script.write_text(source)
    environment = {**os.environ, "RAY_AUTH_TOKEN": "by hand"}  # or Ray would write one to the home
    command = [sys.executable, "-I", script.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"The script ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout
