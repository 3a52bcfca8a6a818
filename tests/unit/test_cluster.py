"""How Ray is started; what is said about a cluster's GPUs before a run starts, from made-up nodes."""

import contextlib
import json
import os
import pathlib
import re

import pytest
import ray

from helpers import cluster as ray_cluster
from helpers.config import TrainingConfig
from helpers.online.config import OnlineConfig
from helpers.production.checks import cluster as checks

ROOT = pathlib.Path(__file__).parents[2]


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


def check(encoder_gpus=0, validates=False, **changes):
    config = TrainingConfig(**{"num_training_workers": 2, **changes})
    options = {"encoder_gpus": encoder_gpus, "validates": validates}
    checks.check_gpus(config.worker_counts, config.training_accelerator_type, **options)


@pytest.mark.parametrize(
    ("trainers", "encoders", "said"),
    [
        (6, 2, ""),
        (7, 0, ""),
        (8, 0, "num_training_workers=8 take 8 of 8 CPUs, and the tasks that read data need one more"),
        (0, 15, "num_encoders=15 take 7.5 of 8 CPUs"),
        (7, 1, "num_training_workers=7 and num_encoders=1 take 7.5 of 8 CPUs"),
    ],
)
def test_what_leaves_no_cpu_to_the_tasks_that_read_is_told(cluster_of, monkeypatch, capsys, trainers, encoders, said):
    """Refused where no node will join; with GPUs, trainers take no CPU."""
    cluster_of()
    config = TrainingConfig(num_training_workers=max(trainers, 1), use_gpu=not trainers, global_batch_size=168)
    raw = OnlineConfig(num_encoders=encoders) if encoders else None
    monkeypatch.setattr(checks, "check_gpus", lambda *_, **__: None)
    monkeypatch.setattr(checks, "check_shared", lambda *_: None)
    monkeypatch.setattr(checks, "is_local_ray", lambda: False)
    checks.check_run(config, raw)
    found = capsys.readouterr().out
    assert said in found and bool(said) == bool(found)
    monkeypatch.setattr(checks, "is_local_ray", lambda: True)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        checks.check_run(config, raw)


A100, A10G, SEVERAL = (
    ("A100", 8.0),
    ("A10G", 4.0),
    "training_accelerator_type=None, and the cluster has GPUs of several",
)
VALIDATED = {"validates": True}


@pytest.mark.parametrize(
    ("gpus", "changes", "said"),
    [
        # A100s alone, or one trainer, which cannot get two kinds
        ([A100, A10G], {"training_accelerator_type": "A100"}, ""),
        # a GPU to validate
        (
            [("A100", 2.0)],
            VALIDATED,
            "want 3 GPUs, one of them for validation, and the cluster has 2: the trainers stop",
        ),
        ([("A100", 2.0)], {**VALIDATED, "num_training_workers": 1, "encoder_gpus": 0.5}, "want 2.5 GPUs"),
        ([("A100", 2.0)], {}, ""),
        ([("A100", 2.0), A10G], {**VALIDATED, "training_accelerator_type": "A100"}, "want 3 GPUs of kind A100, one of"),
        # what is waited for
        ([A100], {"num_training_workers": 8, "encoder_gpus": 8}, "wants 16 GPUs, 8 of them for encoders, and the clus"),
    ],
)
def test_too_few_gpus_are_told_before_a_run_starts(cluster_of, capsys, gpus, changes, said):
    cluster_of(*gpus)
    check(**changes)
    found = capsys.readouterr().out
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("gpus", "changes", "sentence"),
    [
        (
            [A100, A100, A10G],
            {},
            rf"^{SEVERAL} kinds \(16 of kind A100, 4 of kind A10G\): .* name one, such as 'A100'.$",
        ),
        ([(None, 1.0), ("A10G", 1.0)], {"num_training_workers": (1, 2)}, "1 of kind A10G, 1 of kind unknown"),
    ],
)
def test_trainers_that_may_get_two_kinds_of_gpu_are_refused(cluster_of, gpus, changes, sentence):
    cluster_of(*gpus)
    with pytest.raises(ValueError, match=sentence):
        check(**changes)


def test_a_kind_of_gpu_that_the_cluster_has_none_of_is_told(cluster_of, monkeypatch, capsys):
    """Refused where no node will join, or where Ray knows no such kind; else the sentence says what is waited for."""
    cluster_of(A10G)
    for is_local, kind in ((False, "A100-80GB"), (True, "A100")):
        monkeypatch.setattr(checks, "is_local_ray", lambda is_local=is_local: is_local)
        sentence = (
            f"^training_accelerator_type='{kind}', and the cluster has no GPU of that kind but 4 of kind A10G: name"
        )
        with pytest.raises(ValueError, match=sentence):
            check(training_accelerator_type=kind)
    monkeypatch.setattr(checks, "is_local_ray", lambda: False)
    check(training_accelerator_type="A100", encoder_gpus=4)
    assert "wants 2 GPUs of kind A100, 0 of them for encoders, and the cluster has 0:" in capsys.readouterr().out


def test_a_machine_too_busy_to_start_ray_is_one_sentence_after_some_attempts(monkeypatch):
    attempts = []

    def start(*arguments, **options):
        attempts.append(options["runtime_env"]["excludes"])
        raise Exception("The current node timed out during startup. This could happen because of something.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # or the shared cluster would end
    with pytest.raises(TimeoutError, match="Ray did not start in 4 attempts, because this machine is too busy: end"):
        ray_cluster.connect("local")
    assert attempts == [["*.ipynb"]] * 4


def test_ray_is_started_in_one_place_which_gives_it_a_token_and_no_secrets():
    """`tests/cluster/test_access.py` and `tests/object_store/test_secrets.py` show what comes of it."""
    code = {path: path.read_text() for path in (ROOT / "helpers").rglob("*.py")}
    for path in [*ROOT.glob("*.ipynb"), *(ROOT / "helpers").rglob("*.ipynb")]:
        cells = json.loads(path.read_text())["cells"]
        code[path] = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    starts = [path for path, text in code.items() if re.search(r"ray\.init\(|\"env_vars\": \{", text)]
    assert starts == [ROOT / "helpers" / "cluster.py"]


def test_what_asks_for_no_gpu_sees_none(cluster):
    """Else encoders on CPUs, and the scores beside a training, would compute on the trainers' GPUs."""
    seen = ray.remote(num_cpus=0)(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert ray.get(seen.remote()) == ""
