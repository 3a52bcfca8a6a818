"""Trackers of a run: what they are given, and that none of them can harm it."""

import contextlib
import json
import pathlib
import sys
import types

import numpy as np
import pytest
from ray.util.metrics import Gauge
from tensorboardX.proto.event_pb2 import Event

from helpers import storage
from helpers.config import TrainingConfig
from helpers.production import monitor
from helpers.production.extras import results, trackers
from helpers.production.extras.trackers import Trackers
from helpers.sample import to_png
from helpers.train import run_folder

ROOT = pathlib.Path(__file__).parents[3]
LINE = {"loss": 0.5, "learning_rate": 1e-3, "grad_norm": 2.0}
SPEED = {"images_per_second": 10.0, "step_seconds": 1.0, "checkpoint_seconds": 0.0, "data_wait_share": 0.1}
IMAGE = np.zeros((4, 6, 3), np.uint8)


def extras(*names):
    return {"trackers": Trackers(names=list(names))}


def records(folder):
    """The events of a folder's event files: records of length, its CRC, the data, its CRC."""
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


@pytest.fixture
def config(tmp_path):
    config = TrainingConfig(storage=str(tmp_path), run_name="tracked", max_steps=3)
    storage.write_json(storage.join(config.run_uri, "config.json"), {"parameters": config.to_dict()})
    return config


@pytest.fixture
def tracked(monkeypatch):
    """What a stand-in for TensorBoard's tracker is given."""
    seen = []

    @contextlib.contextmanager
    def stand_in(config):
        yield lambda step, values: seen.append((step, values))

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", stand_in)
    return seen


def test_an_evaluation_is_tracked_when_it_is_over(config, tracked, capsys):
    """With its losses by noise level and its images; what failed or was skipped is said once."""
    result = {"step": 2, "validation_loss": 0.25, "loss_by_noise": {"62": 0.5, "937": 0.1}}
    results.write_result(config.run_uri, {**result, "unfinished": True})
    storage.write_bytes(results.grid_uri(config.run_uri, 2), to_png(IMAGE))
    with monitor.monitor_run(config, extras("tensorboard"), every=60):
        results.write_result(config.run_uri, {**result, "clip_score": 30.0, "failed": {"cmmd": "too few images"}})
        results.note(config.run_uri, 3, skipped="step 4 is newer")
    ((step, values),) = tracked
    assert step == 2 and np.array_equal(values.pop("evaluation"), IMAGE)
    by_noise = {"loss_by_noise/0062": 0.5, "loss_by_noise/0937": 0.1}
    assert values == {"validation_loss": 0.25, "clip_score": 30.0, **by_noise}
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("evaluation of step 2, cmmd failed: too few images") == 1
    assert "evaluation of step 3 skipped: step 4 is newer" in lines
    with monitor.monitor_run(config, extras("tensorboard"), every=60):
        pass
    assert len(tracked) == 1


def test_tensorboard_gets_numbers_images_and_parameters(config, tmp_path):
    with Trackers().on_driver(config) as track:
        track(7, {"loss": 0.5, "a red circle": IMAGE})
    found = [
        (event.step, value) for event in records(tmp_path / "runs/tracked/tensorboard") for value in event.summary.value
    ]
    values = {value.tag.partition("/")[0]: (step, value) for step, value in found}
    assert values["loss"][0] == 7 and values["loss"][1].simple_value == 0.5
    image = next(value.image for _, value in found if value.HasField("image"))
    assert (image.height, image.width) == (4, 6)
    assert "global_batch_size" in str(values["parameters"][1])


def test_tensorboard_hides_steps_that_are_done_again(config, tmp_path):
    """After a worker is lost, and after the driver is killed; an evaluation that comes late hides nothing."""
    checkpoint = storage.join(config.run_uri, run_folder.checkpoint_name(2, 1))
    storage.write_json(storage.join(checkpoint, run_folder.PROGRESS), {"step": 2, "files": {}, "checksums": {}})
    with Trackers().on_driver(config) as track:
        for step in (3, 4, 5):
            track(step, {**LINE, **SPEED})
        track(4, {"validation_loss": 0.5})
        track(4, {**LINE, **SPEED})
    purges = [event.step for event in records(tmp_path / "runs/tracked/tensorboard") if event.session_log.status == 1]
    assert purges == [3, 4]


def test_wandbs_run_is_the_run_and_not_its_name(config, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in_wandb(calls))

    def wandb_id(config):
        with Trackers(names=["wandb"]).on_driver(config):
            return next(call for call in reversed(calls) if call[0] == "init")[1]["id"]

    other = TrainingConfig(storage=str(tmp_path / "other"), run_name="tracked")
    found = wandb_id(config)
    assert found == wandb_id(config) != wandb_id(other)
    storage.delete(config.run_uri)  # begun anew
    assert wandb_id(config) != found


def stand_in_wandb(calls):
    @contextlib.contextmanager
    def init(**options):
        calls.append(("init", options))
        yield types.SimpleNamespace(
            define_metric=lambda name, step_metric: calls.append((name, step_metric)),
            log=lambda values: calls.append(("log", values)),
        )
        calls.append(("finish",))

    return types.SimpleNamespace(init=init, Image=lambda image: ("image", image.shape))


@contextlib.contextmanager
def fails(config):
    yield lambda step, values: 1 / 0


@pytest.mark.parametrize("wandb", [None, fails], ids=["not installed", "fails"])
def test_a_tracker_that_fails_is_said_once_and_left_out(config, tracked, monkeypatch, capsys, wandb):
    if wandb:
        monkeypatch.setitem(trackers.TRACKERS, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Trackers(names=["wandb", "tensorboard"]).on_driver(config) as track:
        track(1, LINE)
        track(2, LINE)
    assert capsys.readouterr().out.count("tracker wandb failed") == 1
    assert [step for step, _ in tracked] == [1, 2]


def test_prometheus_gets_the_metrics_that_grafanas_panels_ask_for(config, monkeypatch):
    """Each with the run's name, and of evaluations, which have none of them, nothing."""
    sent = []
    monkeypatch.setattr(Gauge, "set", lambda gauge, value, tags: sent.append((gauge.info["name"], value, tags)))
    with Trackers(names=["prometheus"]).on_driver(config) as track:
        track(1, {**LINE, **SPEED})
        track(1, {"validation_loss": 0.25, "evaluation": IMAGE})
    values = {f"pretraining_{name}": value for name, value in {**LINE, **SPEED}.items()}
    assert all(values[name] == value and tags == {"run": "tracked"} for name, value, tags in sent)
    panels = json.loads((ROOT / "helpers/clusters/grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert sorted(asked) == sorted(f"ray_{name}" for name, *_ in sent) and len(asked) == 3
