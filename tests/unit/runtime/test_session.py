"""What is said about a cluster's GPUs before a run starts, from made-up nodes; the pauses of Ray Data's loop."""

import types

import pytest
import ray

from helpers.config.notebook import TrainingConfig
from helpers.lesson import looks
from helpers.runtime import session
from helpers.runtime import throttle as throttle_module


@pytest.fixture
def cluster_of(monkeypatch):
    """A function that makes up a cluster: a (kind, number of GPUs) for each node; kind None: Ray does not know it."""

    def make(*gpus):
        nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}]
        nodes += [{"Alive": True, "Resources": {"GPU": count, f"accelerator_type:{kind}": 1.0}} for kind, count in gpus]
        nodes.append({"Alive": False, "Resources": {"GPU": 8.0, "accelerator_type:H100": 1.0}})  # it has gone
        for node in nodes:
            node["Resources"].pop("accelerator_type:None", None)
        monkeypatch.setattr(ray, "nodes", lambda: nodes)

    return make


def check(encoder_gpus=0, **changes):
    config = TrainingConfig(**{"num_training_workers": 2, "validate_every": 0, **changes})
    options = {"encoder_gpus": encoder_gpus, "validates": config.validate_every > 0}
    session.check_gpus(config.worker_counts, config.training_accelerator_type, **options)


def test_trainers_that_may_get_two_kinds_of_gpu_are_refused(cluster_of):
    cluster_of(("A100", 8.0), ("A100", 8.0), ("A10G", 4.0))
    with pytest.raises(ValueError) as error:
        check()
    assert str(error.value) == (
        "training_accelerator_type=None, and the cluster has GPUs of several kinds (16 of kind A100, 4 of kind A10G): "
        "trainers on two kinds would all go at the pace of the slower; name one, such as 'A100'."
    )
    cluster_of((None, 1.0), ("A10G", 1.0))
    with pytest.raises(ValueError, match="1 of kind A10G, 1 of kind unknown"):
        check(num_training_workers=(1, 2))


def test_trainers_on_one_kind_of_gpu_are_let_through(cluster_of, capsys):
    cluster_of(("A100", 8.0), ("A10G", 4.0))
    check(training_accelerator_type="A100")
    check(num_training_workers=1)
    cluster_of(("A100", 8.0), ("A100", 4.0))
    check()
    assert capsys.readouterr().out == ""


def test_a_cluster_without_a_gpu_for_validation_is_told(cluster_of, capsys):
    cluster_of(("A100", 2.0))
    check(validate_every=250)
    said = capsys.readouterr().out
    assert "want 3 GPUs, one of them for validation, and the cluster has 2: the trainers stop to validate." in said
    check(num_training_workers=(1, 2), validate_every=250)
    assert capsys.readouterr().out == said
    check(num_training_workers=1, validate_every=250)
    check()
    assert capsys.readouterr().out == ""
    check(num_training_workers=1, validate_every=250, encoder_gpus=0.5)
    assert "want 2.5 GPUs" in capsys.readouterr().out


def test_a_cluster_with_too_few_gpus_is_told_what_is_waited_for(cluster_of, capsys):
    cluster_of(("A100", 8.0))
    check(num_training_workers=8, encoder_gpus=8)
    said = capsys.readouterr().out
    assert "Training wants 16 GPUs, 8 of them for encoders, and the cluster has 8" in said
    assert "set num_training_workers or num_encoders lower" in said


def test_a_kind_of_gpu_that_the_cluster_has_none_of_is_told(cluster_of, monkeypatch, capsys):
    """Refused where no node will join, or where Ray knows no such kind; else the sentence says what is waited for."""
    monkeypatch.setattr(session, "is_local_ray", lambda: False)
    cluster_of(("A10G", 4.0))
    with pytest.raises(ValueError) as error:
        check(training_accelerator_type="A100-80GB")
    assert str(error.value) == (
        "training_accelerator_type='A100-80GB', and the cluster has no GPU of that kind but 4 of kind A10G: name a "
        "kind that it has, or None for any."
    )
    check(training_accelerator_type="A100", encoder_gpus=4)
    assert "wants 2 GPUs of kind A100, 0 of them for encoders, and the cluster has 0:" in capsys.readouterr().out
    monkeypatch.setattr(session, "is_local_ray", lambda: True)
    with pytest.raises(ValueError, match="training_accelerator_type='A100', and the cluster has no GPU of that kind"):
        check(training_accelerator_type="A100")


def test_only_gpus_of_the_trainers_kind_are_left_for_validation(cluster_of, capsys):
    cluster_of(("A100", 2.0), ("A10G", 4.0))
    check(validate_every=250, training_accelerator_type="A100")
    said = capsys.readouterr().out
    assert "want 3 GPUs of kind A100, one of them for validation, and the cluster has 2: the trainers stop" in said


def test_ray_datas_loop_is_paused_only_while_it_busy_waits(monkeypatch):
    now, throttle = 0.0, throttle_module.SchedulerThrottle()

    def sleep(seconds):
        nonlocal now
        now += seconds

    def pauses(seconds_of_a_step):
        for _ in range(20):
            sleep(seconds_of_a_step)
            before = now
            throttle.on_execution_step(None)
            yield now - before

    monkeypatch.setattr(throttle_module, "time", types.SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    assert list(pauses(0.001))[-1] == pytest.approx(0.05)
    assert list(pauses(0.1))[-1] < 0.001


def test_a_machine_too_busy_to_start_ray_is_one_sentence_after_some_attempts(monkeypatch):
    attempts = []

    def start(*arguments, **options):
        attempts.append(options["runtime_env"]["excludes"])
        raise Exception("The current node timed out during startup. This could happen because of something.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(TimeoutError, match="Ray did not start in 4 attempts, because this machine is too busy: end"):
        session.connect("local")
    assert attempts == [["*.ipynb"]] * 4


def test_a_run_that_was_not_trained_names_the_notebook_to_run_first(tmp_path):
    with pytest.raises(FileNotFoundError, match="run_name='mine' has no checkpoint in .*: run Training.ipynb first"):
        looks.finished_run(str(tmp_path), "mine")
