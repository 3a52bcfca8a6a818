"""Execute all notebooks on the laptop's values, one after the other, and commit their outputs.

python -m tests.execute_notebooks     # in a clean checkout, on a machine that does nothing else

They run in a clone of the last commit, because they store their data beside them. What they print is then of one
commit, one machine and one go.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = [
    "Preprocessing.ipynb",
    "Training.ipynb",
    "Online_Preprocessing_and_Training.ipynb",
    "helpers/lesson/Evaluation.ipynb",
    "helpers/lesson/Scaling.ipynb",
]
MOST_LOAD = 0.8  # processes that want a CPU, averaged over the last minute


def check(load, changes):
    """Raises SystemExit if the machine is busy, or the checkout has changes that would be committed too."""
    if load > MOST_LOAD:
        sys.exit(f"The machine does something else (load {load:.1f}, at most {MOST_LOAD}): wait until it is done.")
    if changes:
        sys.exit(f"The checkout has changes: commit them first.\n{changes}")


def without_times(notebook):
    """The notebook (JSON) without what papermill and Jupyter note of their own run, which changes every time."""
    notebook["metadata"].pop("papermill", None)
    for cell in notebook["cells"]:
        cell["metadata"] = {name: cell["metadata"][name] for name in ("jupyter", "tags") if cell["metadata"].get(name)}
    return notebook


def seconds(notebook, left_out="no such cell"):
    """How long papermill took for the code cells, but for those that begin with `left_out`."""
    cells = [cell for cell in notebook["cells"] if not "".join(cell["source"]).startswith(left_out)]
    return sum(cell["metadata"]["papermill"]["duration"] for cell in cells)


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main():
    check(os.getloadavg()[0], git("status", "--porcelain"))
    with tempfile.TemporaryDirectory() as folder:
        git("clone", "--quiet", str(ROOT), folder)
        for name in NOTEBOOKS:
            path = pathlib.Path(folder) / name
            command = [sys.executable, "-m", "papermill", name, name, "--no-progress-bar"]
            subprocess.run(command, cwd=folder, check=True)
            executed = json.loads(path.read_text())
            print(
                f"{name}: {seconds(executed):.0f} s, without its sections {seconds(executed, '# section:'):.0f} s",
                flush=True,
            )
            (ROOT / name).write_text(json.dumps(without_times(executed), indent=1, ensure_ascii=False) + "\n")
    git("commit", "--quiet", "--all", "--message", "The notebooks, executed in one go")


if __name__ == "__main__":
    main()
