"""How long a reader waits: seconds from the start of a notebook's production cell to its first rows, or first step.

    python -m tests.benchmarks.first_results [--rounds 3]

Preprocessing.ipynb and Training.ipynb are executed up to that cell, without the sections. Timed is when the cell's
progress line first says that rows were encoded, or that a step was taken. The goals, on an otherwise idle machine with
two cores: 15 s and 25 s.
"""

import re
import statistics
import tempfile
import time

import nbformat
from nbclient import NotebookClient

from tests.benchmarks import record

# notebook -> (what its production cell calls, what the progress line says at first, parameters)
NOTEBOOKS = {
    "Preprocessing.ipynb": ("job.run(pipeline", r": ([1-9][\d,]*) of [\d,]+ rows", {}),
    "Training.ipynb": ("build_trainer(config).fit()", r": ([1-9][\d,]*) of [\d,]+ steps", {"max_steps": 60}),
}
SHORT = {"checkpoint_every": 60, "validate_every": 0, "sections": []}


class Watched(NotebookClient):
    """Executes a notebook; `seconds` is the time from the start of its last cell to the first `line` shown there."""

    line, started, seconds = "", 0.0, None

    async def async_execute_cell(self, cell, cell_index, **options):
        self.started = time.perf_counter()
        return await super().async_execute_cell(cell, cell_index, **options)

    def process_message(self, msg, cell, cell_index):
        shown = msg["content"].get("data", {}).get("text/plain", "")
        if self.seconds is None and cell is self.nb.cells[-1] and re.search(self.line, shown):
            self.seconds = time.perf_counter() - self.started
        return super().process_message(msg, cell, cell_index)


def wait(name, storage):
    """Seconds until the production cell of a notebook shows something."""
    called, line, parameters = NOTEBOOKS[name]
    notebook = nbformat.reads((record.ROOT / name).read_text(), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    last = next(number for number, cell in enumerate(cells) if called in cell.source)
    values = {"storage": storage, **parameters, **(SHORT if parameters else {})}
    injected = nbformat.v4.new_code_cell("\n".join(f"{key} = {value!r}" for key, value in values.items()))
    notebook.cells = [cells[0], injected, *cells[1 : last + 1]]
    client = Watched(notebook, timeout=600, resources={"metadata": {"path": str(record.ROOT)}})
    client.line = line
    client.execute()
    return client.seconds


def main():
    given = record.options(__doc__, rounds=3)
    found = {name: [] for name in NOTEBOOKS}
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as storage:
            for name, seconds in found.items():
                seconds.append(wait(name, storage))
                print(f"round {number + 1}, {name}: {seconds[-1]:.1f} s", flush=True)
    summary = {}
    for name, seconds in found.items():
        said = f"{statistics.median(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f})"
        summary[f"production cell of {name}, until it shows its first rows or step"] = said
    record.write("first_results", summary, seconds=found)


if __name__ == "__main__":
    main()
