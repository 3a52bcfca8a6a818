"""Progress in a notebook and on the terminal of a batch run."""

import json
import os
import pathlib
import subprocess
import sys
import threading

import nbformat
import pytest

from helpers import notebook as runtime_progress
from helpers import storage
from helpers.config import TrainingConfig
from helpers.notebook import time
from helpers.production import monitor
from helpers.production.extras import results
from helpers.production.extras.evaluate import Evaluate
from helpers.train import metrics, run_folder

ROOT = pathlib.Path(__file__).parents[3]
SPEED = {"step_seconds": 0.5, "images_per_second": 16.0, "data_wait_share": 0.1, "checkpoint_seconds": 0.0}
CELL = """
from helpers.notebook import Progress
progress = Progress("run a", "steps", seconds_between_lines=0)
for step in (10, 20, 30):
    progress(step, 30, f"loss 0.{step}, 99 images/s")
"""


def test_papermill_shows_progress_in_the_terminal_and_keeps_one_display(tmp_path):
    cells = [nbformat.v4.new_code_cell(CELL)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "in.ipynb")
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-m", "papermill", tmp_path / "in.ipynb", tmp_path / "out.ipynb", "--cwd", ROOT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("run a: ")]
    assert [line.split(" in ")[0] for line in lines] == [f"run a: {step} of 30 steps" for step in (10, 20, 30)]
    assert lines[1].endswith(", loss 0.20, 99 images/s") and lines[2].endswith(", loss 0.30, 99 images/s")
    (output,) = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[0].outputs
    assert output.data["text/plain"].startswith("run a: 30 of 30 steps") and "<progress" in output.data["text/html"]


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """A file in place of the terminal that a batch run was started in."""
    with open(tmp_path / "terminal", "w+") as file:
        monkeypatch.setattr(runtime_progress, "batch_terminal", file.fileno)
        yield lambda: pathlib.Path(file.name).read_text().strip().splitlines()


def test_a_run_shows_loss_speed_and_lost_workers(terminal, tmp_path, capsys):
    config = TrainingConfig(storage=str(tmp_path), run_name="a", max_steps=40)
    os.makedirs(config.run_uri)
    with monitor.monitor_run(config, every=60):
        log = metrics.MetricsLog(config.run_uri)
        for step in range(1, 41):
            log.write(step, {"loss": 0.25, "num_kept": 8, **SPEED}, [step])
        run_folder.write_failure(config.run_uri, "worker 1: it died")
    assert "lost: worker 1: it died\n" in capsys.readouterr().out
    line = terminal()[-1]
    assert line.startswith("run a: 40 of 40 steps in ") and line.endswith(", loss 0.250, 16 images/s")


TRAINS = """
import json, sys
from helpers.train import metrics
log = metrics.MetricsLog(sys.argv[1])
for step in range(1, 21):
    log.write(step, {"loss": 0.25, "num_kept": 8, **json.loads(sys.argv[2])}, [step])
"""


def test_a_run_that_another_process_trains_is_shown_until_its_last_step(terminal, tmp_path):
    storage.write_json(f"{tmp_path}/run/config.json", {"parameters": {"max_steps": 20}})
    with subprocess.Popen([sys.executable, "-c", TRAINS, f"{tmp_path}/run", json.dumps(SPEED)], cwd=ROOT):
        monitor.follow(f"{tmp_path}/run", every=0.05)
    assert terminal()[-1].startswith("run run: 20 of 20 steps in ") and "loss 0.250" in terminal()[-1]


def test_a_store_that_gives_no_answer_for_a_while_hides_no_step(terminal, tmp_path, monkeypatch, capsys):
    """Said once each time; what was read before the error is shown later."""
    config = TrainingConfig(storage=str(tmp_path), run_name="a", max_steps=20)
    read, refused, answered = storage.read_bytes, threading.Semaphore(0), threading.Event()

    def read_or_refuse(uri, *position):
        if uri.endswith("2.jsonl") and not answered.is_set():
            refused.release()
            raise OSError("AWS Error SLOW_DOWN")
        return read(uri, *position)

    monkeypatch.setattr(storage, "read_bytes", read_or_refuse)
    with monitor.monitor_run(config, every=0.001):
        for number in (1, 2):
            lines = [{"step": step, "loss": 0.25} for step in range(10 * number - 9, 10 * number + 1)]
            text = "".join(json.dumps({**line, **SPEED}) + "\n" for line in lines)
            storage.write_text(f"{config.run_uri}/metrics-{number}.jsonl", text)
        for _ in range(3):
            assert refused.acquire(timeout=60)
        answered.set()
    said = [line for line in capsys.readouterr().out.splitlines() if "cannot be read" in line]
    assert said == ["The run's folder cannot be read, which is tried again every 0.001 s: AWS Error SLOW_DOWN"]
    assert terminal()[-1].startswith("run a: 20 of 20 steps in ")


def save_run(config, step):
    """Metrics up to a step, and a checkpoint of it."""
    lines = "".join(
        json.dumps({"step": number, "attempt": 1, "loss": 0.25, **SPEED}) + "\n" for number in range(1, step + 1)
    )
    storage.write_text(f"{config.run_uri}/metrics.jsonl", lines)
    folder = f"{config.run_uri}/{run_folder.checkpoint_name(step, 1)}"
    storage.write_json(f"{folder}/{run_folder.PROGRESS}", {"step": step, "files": {}, "checksums": {}})


def test_a_finished_run_says_when_it_ended_and_how_to_train_anew(tmp_path, capsys):
    config = TrainingConfig(storage=str(tmp_path), run_name="a", max_steps=20, checkpoint_every=10)
    extras = {"evaluate": Evaluate()}
    for step in (10, 20):
        save_run(config, step)
        assert not monitor.print_if_finished(config, extras)  # at 20 its last evaluation is missing
    results.write_result(config.run_uri, {"step": 20, "unfinished": True})  # as a killed driver leaves it
    assert not monitor.print_if_finished(config, extras)
    results.write_result(config.run_uri, {"step": 20, "validation_loss": 0.2})
    assert monitor.print_if_finished(config, extras)
    said = capsys.readouterr().out
    assert said.startswith("Nothing to do: the run a finished its 20 steps on ")
    assert time.strftime("%d %B %Y") in said and 'such as "a-2"' in said


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (0, "Stopped before the first step. Running this cell again begins at step 1."),
        (20, "Stopped after step 20. Running this cell again goes on from the last checkpoint, which is of step 20."),
    ],
)
def test_a_run_that_is_stopped_says_where_it_goes_on(step, sentence, tmp_path):
    config = TrainingConfig(storage=str(tmp_path), run_name="a", max_steps=40)
    if step:
        save_run(config, step)
    with pytest.raises(KeyboardInterrupt, match=f"^{sentence}$"), monitor.monitor_run(config):
        raise KeyboardInterrupt
