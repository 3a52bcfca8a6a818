"""A reader at a notebook: in a kernel that is interrupted and restarted, as JupyterLab starts one."""

import os
import re

import papermill
import pytest
import ray
from jupyter_client.manager import start_new_kernel

from helpers import cluster
from tests.execute_notebooks import ROOT
from tests.faults import slow
from tests.notebooks.test_notebooks import code_cells
from tests.pipelines import TRAINING, draw_and_encode

SHRUNK = {"resolution": 32, "max_steps": 400, "warmup_steps": 2, "checkpoint_every": 20, "global_batch_size": 16}
SHRUNK |= {"extras": {"evaluate": None}, "validation_share": 0.05, "sections": ["prompt-box"]}


class Reader:
    """Runs cells in a kernel that works in `folder`, where the notebook's file lies."""

    def __init__(self, folder, notebook):
        self.notebook = notebook
        environment = {**os.environ, "JPY_SESSION_NAME": str(notebook), "PYTHONPATH": str(ROOT)}
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=environment)

    def run(self, code, interrupt_at=None):
        """What the cell printed, displayed and raised; it is interrupted once it says what matches `interrupt_at`."""
        said = []

        def hear(message):
            content = message["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain", "")
            text += "\n".join(content.get("traceback", []))
            if interrupt_at and re.search(interrupt_at, text) and not re.search(interrupt_at, "".join(said)):
                self.manager.interrupt_kernel()
            said.append(text)

        self.client.execute_interactive(code, output_hook=hear, allow_stdin=False, timeout=600)
        return "".join(said)

    def restart(self):
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)


@pytest.fixture
def reader(preloaded_kernels, tmp_path):
    reader = Reader(tmp_path, tmp_path / TRAINING)
    yield reader
    reader.client.stop_channels()
    reader.manager.shutdown_kernel(now=True)


def test_a_cell_that_is_run_too_early_or_stopped_says_so_in_one_sentence(reader):
    """Before the notebook is saved, its cells are unknown; then the cell that defines the missing name is named."""
    reader.run("from helpers.lesson import display as show\nshow.setup()")
    assert "Run the cells above this one first" in reader.run("segments = job.segments")
    assert reader.run("raise KeyboardInterrupt('Stopped after step 3.')") == "Stopped after step 3.\n"
    assert "run the cells above, with sections = []" in reader.run("show.catch_up()")
    reader.notebook.write_bytes((ROOT / TRAINING).read_bytes())
    said = reader.run("draw_by_hand(epsilon_loss)")
    assert "name 'draw_by_hand' is not defined" in said
    assert "`def from_epsilon(x, alpha, epsilon):`, under 'From noise to an image'" in said


@slow
def test_a_reader_trains_stops_goes_on_restarts_and_draws(no_shared_cluster, reader, tmp_path):
    cluster.connect("local", num_cpus=2)
    draw_and_encode(tmp_path / "storage", 320)
    ray.shutdown()
    papermill.execute_notebook(
        ROOT / TRAINING, tmp_path / TRAINING, SHRUNK, prepare_only=True, progress_bar=False, cwd=str(tmp_path)
    )
    cells = [cell["source"] for cell in code_cells(tmp_path / TRAINING)]
    place = {text: next(i for i, cell in enumerate(cells) if text in cell) for text in (".fit()\ncheck", "PromptBox(")}
    train, late = place.values()
    for cell in cells[:train]:
        reader.run(cell)
    stopped = reader.run(cells[train], interrupt_at=r"run laptop: [1-3]\d\d of 400 steps")
    assert re.search(r"Stopped after step \d+\. Running this cell again goes on", stopped)
    assert "checkpoint-000000400" in reader.run(cells[train])
    assert "Nothing to do" in reader.run(cells[train])
    reader.restart()
    assert "Nothing to do" in reader.run(next(cell for cell in cells if "show.catch_up()" in cell))
    for cell in cells[train + 2 : late]:
        said = reader.run(cell)
    assert "1 image" in reader.run(cells[late]), said
    assert "a red circle" in reader.run("box.text.value = 'a red circle'\nprint(box.said.value)")
