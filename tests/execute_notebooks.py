"""Execute all notebooks on the laptop's values, one after the other, and commit their outputs.

python -m tests.execute_notebooks     # in a clean checkout, on a machine that does nothing else

They run in a clone of the last commit, because they store their data beside them. What they print is then of one
commit, one machine and one go. Each notebook keeps the checksum of the sources that it was executed with.
"""

import hashlib
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
CHECKSUM = "sha256_of_executed_sources"  # of a notebook's metadata
MOST_LOAD = 0.8  # processes that want a CPU, averaged over the last minute


def checksum(notebook):
    """SHA-256 of a notebook's (JSON) code."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def check(load, changes):
    """Raises SystemExit if the machine is busy, or the checkout has changes that would be committed too."""
    if load > MOST_LOAD:
        sys.exit(f"The machine does something else (load {load:.1f}, at most {MOST_LOAD}): wait until it is done.")
    if changes:
        sys.exit(f"The checkout has changes: commit them first.\n{changes}")


def as_committed(notebook):
    """The executed notebook (JSON) with its checksum, without what papermill and Jupyter note of their own run."""
    notebook["metadata"].pop("papermill", None)
    for cell in notebook["cells"]:
        cell["metadata"] = {name: cell["metadata"][name] for name in ("jupyter", "tags") if cell["metadata"].get(name)}
    notebook["metadata"][CHECKSUM] = checksum(notebook)
    return notebook


def write(notebook, path):
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


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
            write(as_committed(executed), ROOT / name)
    git("commit", "--quiet", "--all", "--message", "The notebooks, executed in one go")


if __name__ == "__main__":
    main()
