"""Trackers of a run: what they are given, and that none of them can harm it."""

import contextlib
import sys
import types

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from helpers import storage
from helpers.config import TrainingConfig
from helpers.production import monitor
from helpers.production.extras import results
from helpers.production.extras import trackers as tracking
from helpers.train.metrics import MetricsLog

LINE = {"loss": 0.5, "learning_rate": 1e-3, "grad_norm": 2.0}
SPEED = {"images_per_second": 10.0, "step_seconds": 1.0, "checkpoint_seconds": 0.0, "data_wait_share": 0.1}
PICTURE = np.zeros((4, 6, 3), np.uint8)


def run_of(tmp_path, *trackers):
    return TrainingConfig(storage=str(tmp_path), run_name="tracked", max_steps=3, trackers=list(trackers))


def take_steps(config, *steps):
    log = MetricsLog(config.run_uri)
    for step in steps:
        log.write(step, {**LINE, **SPEED, "num_kept": 1}, [step])
    storage.write_json(
        storage.join(config.run_uri, "validation", f"{steps[-1]:09d}.json"),
        {"step": steps[-1], "validation_loss": 0.25, "unweighted": 0.3, "rows": 2},
    )


def records(folder):
    """The events of a folder's event files: records of length, its CRC, the data, its CRC."""
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


@pytest.fixture
def run_folder(tmp_path):
    config = run_of(tmp_path)
    storage.write_json(storage.join(config.run_uri, "config.json"), {"parameters": config.to_dict()})
    return tmp_path


@pytest.fixture
def tracked(monkeypatch):
    """What a stand-in for TensorBoard's tracker is given."""
    seen = []

    @contextlib.contextmanager
    def stand_in(config):
        yield lambda step, values: seen.append((step, values))

    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", stand_in)
    return seen


def test_trackers_get_steps_and_validations(run_folder, tracked):
    config = run_of(run_folder, "tensorboard")
    take_steps(config, 1)  # of an earlier driver
    with monitor.monitor_run(config, every=60):
        take_steps(config, 2, 3)
    by_kind = {"validation_loss" in values: (step, values) for step, values in tracked}
    assert sorted(step for step, _ in tracked) == [2, 3, 3]
    assert {**LINE, **SPEED}.items() <= by_kind[False][1].items()
    assert by_kind[True] == (3, {"validation_loss": 0.25, "unweighted": 0.3, "rows": 2})


def test_an_evaluation_is_tracked_when_it_is_over(run_folder, tracked, capsys):
    """With its losses by noise level and its pictures; what failed or was skipped is said once."""
    config = run_of(run_folder, "tensorboard")
    result = {"step": 2, "validation_loss": 0.25, "loss_by_noise": {"62": 0.5, "937": 0.1}}
    results.write_result(config.run_uri, {**result, "unfinished": True})
    folder = run_folder / "runs/tracked/evaluation/000000002"
    folder.mkdir(parents=True)
    Image.fromarray(PICTURE).save(folder / "grid.png")
    with monitor.monitor_run(config, every=60):
        results.write_result(config.run_uri, {**result, "clip_score": 30.0, "failed": {"cmmd": "too few pictures"}})
        results.note(config.run_uri, 3, skipped="step 4 is newer")
    ((step, values),) = tracked
    assert step == 2 and np.array_equal(values.pop("evaluation"), PICTURE)
    by_noise = {"loss_by_noise/0062": 0.5, "loss_by_noise/0937": 0.1}
    assert values == {"validation_loss": 0.25, "clip_score": 30.0, **by_noise}
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("evaluation of step 2, cmmd failed: too few pictures") == 1
    assert "evaluation of step 3 skipped: step 4 is newer" in lines
    with monitor.monitor_run(config, every=60):
        pass
    assert len(tracked) == 1


def test_tensorboard_gets_numbers_pictures_and_parameters(run_folder):
    config = run_of(run_folder, "tensorboard")
    with tracking.start(config) as track:
        track(7, {"loss": 0.5, "a red circle": PICTURE})
    found = [
        (event.step, value)
        for event in records(run_folder / "runs/tracked/tensorboard")
        for value in event.summary.value
    ]
    values = {value.tag.partition("/")[0]: (step, value) for step, value in found}
    assert values["loss"][0] == 7 and values["loss"][1].simple_value == 0.5
    image = next(value.image for _, value in found if value.HasField("image"))
    assert (image.height, image.width) == (4, 6)
    assert "global_batch_size" in str(values["parameters"][1])


def stand_in_wandb(calls):
    @contextlib.contextmanager
    def init(**options):
        calls.append(("init", options))
        yield types.SimpleNamespace(
            define_metric=lambda name, step_metric: calls.append((name, step_metric)),
            log=lambda values: calls.append(("log", values)),
        )
        calls.append(("finish",))

    return types.SimpleNamespace(init=init, Image=lambda picture: ("picture", picture.shape))


def test_wandb_gets_the_run_and_its_values(run_folder, monkeypatch):
    """A stand-in with the calls of the real one, which is not installed here."""
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in_wandb(calls))
    with tracking.start(run_of(run_folder, "wandb")) as track:
        track(7, {"loss": 0.5, "sample": PICTURE})
    assert calls[0][1]["name"] == "tracked" and calls[0][1]["config"]["max_steps"] == 3
    logged = {"step": 7, "loss": 0.5, "sample": ("picture", (4, 6, 3))}
    assert calls[1:] == [("*", "step"), ("log", logged), ("finish",)]


def test_a_tracker_that_is_not_installed_is_said_once(run_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = run_of(run_folder, "wandb", "tensorboard")
    with monitor.monitor_run(config, every=60):
        take_steps(config, 1, 2)
    assert capsys.readouterr().out.count("tracker wandb is not installed") == 1
    assert list(records(run_folder / "runs/tracked/tensorboard"))


def test_a_tracker_that_fails_is_said_once_and_left_out(run_folder, tracked, monkeypatch, capsys):
    @contextlib.contextmanager
    def fails(config):
        yield lambda step, values: 1 / 0

    monkeypatch.setitem(tracking.TRACKERS, "wandb", fails)
    with tracking.start(run_of(run_folder, "wandb", "tensorboard")) as track:
        track(1, LINE)
        track(2, LINE)
    said = capsys.readouterr().out
    assert said.count("tracker wandb failed: ZeroDivisionError: division by zero. The run goes on without it.") == 1
    assert [step for step, _ in tracked] == [1, 2]
