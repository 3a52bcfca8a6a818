"""The list of extras: what a job may change in it, and what is refused before Ray starts."""

import os
import types

import pytest
import ray.train
from ray.train import RunConfig

from helpers.config import TrainingConfig
from helpers.production.extras import choose, preemption, trainer_options
from helpers.production.extras.meter import Meter
from helpers.production.extras.watchdog import Watchdog

LISTED = {"watchdog": Watchdog(), "meter": Meter()}


def test_a_job_changes_the_list_by_name_and_keeps_its_order():
    assert choose(LISTED, {}) == LISTED
    assert choose(LISTED, {"meter": None, "watchdog": {"timeout": 60}}) == {"watchdog": Watchdog(timeout=60)}
    assert choose(LISTED, {"evaluate": {"every": 10}}) == LISTED  # of another notebook
    assert choose(LISTED, {"watchdog": {"timeout": "6e1"}})["watchdog"] == Watchdog(timeout=60)  # as YAML has it


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dog": {}}, "extras='dog' is unknown: choose from watchdog,"),
        ({"meter": {"every": 3}}, "meter has no 'every'"),
        ({"watchdog": {"time": 3}}, "watchdog has no 'time': choose from timeout"),
        ({"watchdog": {"timeout": "soon"}}, "timeout='soon'"),
        ({"watchdog": {"timeout": True}}, "timeout=True"),
        ({"watchdog": 60}, "watchdog=60 must map"),
    ],
)
def test_an_unknown_name_argument_or_value_is_one_sentence(changes, said):
    with pytest.raises(ValueError, match=said) as raised:
        choose(LISTED, changes)
    assert "\n" not in str(raised.value)


def test_a_preempted_node_gives_the_others_time_to_upload_without_leaving_out_its_part(tmp_path):
    config, listed = TrainingConfig(storage=str(tmp_path)), {"preemption": preemption.Preemption()}
    for changes, seconds in (({}, 0), ({"preemption": {"grace_seconds": 60}}, 60)):
        retry = ray.train.FailureConfig(max_failures=3)
        options = trainer_options(choose(listed, changes), config, RunConfig(name="a", failure_config=retry))
        failures = options["run_config"].failure_config
        assert (failures.max_failures, failures.preemption_grace_s) == (3, seconds)
        assert not failures.relax_collectives_on_preemption and set(options) == {"run_config"}


@pytest.mark.parametrize("asks_nccl", [True, False])
def test_the_watchdog_lets_ray_train_ask_nccl_only_if_wanted_and_before_it_acts_itself(
    tmp_path, monkeypatch, asks_nccl
):
    """Afterwards the environment is as it was."""
    monkeypatch.setenv("RAY_TRAIN_NCCL_RAS_ACTION", "observe")
    monkeypatch.delenv("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR", raising=False)
    before, config = dict(os.environ), TrainingConfig(storage=str(tmp_path))
    chosen = choose({"watchdog": Watchdog()}, {"watchdog": {"timeout": 60, "asks_nccl": asks_nccl}})
    with chosen["watchdog"].on_driver(config):
        assert os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] == "60.0"
        asked = os.environ.get("RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR")
        assert asked == ("1" if asks_nccl else None)
        if asks_nccl:
            assert os.environ["RAY_TRAIN_NCCL_RAS_ACTION"] == "fail"
            assert os.environ["RAY_TRAIN_NCCL_RAS_CONFIRM_DURATION_S"] == "30.0"
    assert dict(os.environ) == before


def test_a_preemption_is_answered_by_one_checkpoint(monkeypatch):
    notice = None
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: notice)
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda value: value)
    hook, wanted = preemption.Notice(every_seconds=2.0), []
    for step in range(1, 12):
        if step == 4:
            notice = types.SimpleNamespace(preempted_node_ids=("a",))
        hook.after_step(step, [], {"step_seconds": 0.5})
        wanted.append(hook.wants_checkpoint(step))
    assert [step for step, wants in enumerate(wanted, start=1) if wants] == [4]
