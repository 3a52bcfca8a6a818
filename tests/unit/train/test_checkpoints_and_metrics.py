"""What a run leaves on disk, where it resumes, and the end of a worker that hangs. No Ray cluster."""

import pathlib
import signal

import pytest
import ray
import torch

from helpers import distributed, storage
from helpers.config import TrainingConfig
from helpers.production.extras import sick_devices
from helpers.train import run_folder, start
from helpers.train.metrics import MetricsLog, MetricsReader, StepLog, read_metrics
from helpers.train.source import StepSource
from tests.processes import run_script


@pytest.fixture
def run_uri(tmp_path):
    return str(tmp_path / "run")


def write(run_uri, steps, **changes):
    pathlib.Path(run_uri).mkdir(exist_ok=True)
    log = MetricsLog(run_uri)
    for step in steps:
        log.write(step, {"loss": step / 10, "num_kept": 2, "images_per_second": 5.0, **changes}, ids=[step, "b"])
    log.file.close()
    return log


def test_the_last_attempt_counts_and_samples_count_once(run_uri):
    write(run_uri, range(1, 6))
    write(run_uri, range(4, 8), loss=9.0)
    found = read_metrics(run_uri)
    assert found["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found["attempt"].tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert found["samples_seen"].tolist() == [2, 4, 6, 8, 10, 12, 14]
    assert len(read_metrics(run_uri, all_attempts=True)) == 9


def test_a_metrics_reader_gets_each_whole_line_once(run_uri):
    reader = MetricsReader(run_uri)
    assert reader.read() == []
    write(run_uri, [1, 2])
    path = pathlib.Path(run_uri, "metrics.jsonl")
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert [line["step"] for line in reader.read()] == [1]
    path.write_text(whole)
    assert [line["step"] for line in reader.read()] == [2]
    assert reader.read() == []


def write_checkpoint(run_uri, step, attempt=1, files=(("a", 3),)):
    folder = pathlib.Path(run_uri, run_folder.checkpoint_name(step, attempt))
    folder.mkdir(parents=True)
    for name, size in files:
        (folder / name).write_bytes(b"x" * size)
    storage.write_json(folder / run_folder.PROGRESS, {"step": step, "files": dict(files), "checksums": {}})
    return folder


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "a").unlink(), "its file a is missing"),
        (lambda folder: (folder / "a").write_bytes(b"x"), "its file a has 1 bytes of 3"),
        (lambda folder: (folder / run_folder.PROGRESS).unlink(), "it has no progress.json"),
        *[
            (lambda folder, text=text: (folder / run_folder.PROGRESS).write_text(text), "its progress.json is damaged")
            for text in ('{"step": 3', "[]", "null", '{"step": 3}', '{"step": "3", "files": {}, "checksums": {}}')
        ],
        (lambda folder: folder.rename(f"{folder.parent}/checkpoint-000000040-001"), "its progress.json says step 30"),
    ],
)
def test_a_damaged_checkpoint_is_described_in_a_few_words(run_uri, harm, problem):
    folder = write_checkpoint(run_uri, 30)
    harm(folder)
    (folder,) = pathlib.Path(run_uri).iterdir()
    assert run_folder.find_corruption(str(folder)) == problem


def test_the_newest_complete_checkpoint_of_any_attempt_is_found(run_uri):
    assert run_folder.last_complete(run_uri) is None
    write_checkpoint(run_uri, 20, attempt=2)
    write_checkpoint(run_uri, 100, attempt=1)
    (write_checkpoint(run_uri, 110, attempt=3) / "a").unlink()
    assert run_folder.step_of(run_folder.last_complete(run_uri)) == 100


def test_attempts_are_ordered_by_number(run_uri):
    write_checkpoint(run_uri, 30, attempt=999)
    newest = write_checkpoint(run_uri, 30, attempt=1000)
    assert run_folder.last_complete(run_uri) == str(newest)


def test_unlisted_checkpoints_are_deleted_but_the_newest(run_uri):
    old, newest = write_checkpoint(run_uri, 10), write_checkpoint(run_uri, 20)
    (torn := write_checkpoint(run_uri, 30) / "a").unlink()
    assert start.reconcile_checkpoints(run_uri) == [
        f"{torn.parent.name} cannot be used: its file a is missing.",
        f"The run resumes from {newest.name}.",
    ]
    assert not old.exists() and newest.exists() and not torn.parent.exists()


def test_workers_resume_at_the_checkpoint_that_their_data_starts_from(tmp_path):
    """Even if another one is completed in between, by a worker that is being replaced."""
    config = TrainingConfig(storage=str(tmp_path), run_name="run")
    steps = StepSource(config)
    assert run_folder.choose_resume_point(config.run_uri) == {"checkpoint": None, "step": 0} == steps.resume_point()
    write_checkpoint(config.run_uri, 10)
    point = run_folder.choose_resume_point(config.run_uri)
    write_checkpoint(config.run_uri, 20)
    assert steps.resume_point() == point
    assert point == {"checkpoint": storage.join(config.run_uri, run_folder.checkpoint_name(10, 1)), "step": 10}
    assert run_folder.choose_resume_point(config.run_uri)["step"] == 20 == run_folder.last_step(config)


def test_the_reason_of_a_failure_is_recorded_once(run_uri):
    for text in ("worker 0: it died", "worker 0: it died", "worker 1: it died"):
        run_folder.write_failure(run_uri, text)
    assert run_folder.read_failures(run_uri) == ["worker 0: it died", "worker 1: it died"]


def test_a_device_or_link_that_computes_wrongly_is_found(monkeypatch):
    device, multiply = torch.device("cpu"), torch.bmm
    assert sick_devices.check_device(device) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bmm", lambda one, other: multiply(one, other).index_fill_(1, torch.tensor([7]), 0))
        assert sick_devices.check_device(device) == "multiplies matrices wrongly"
    assert sick_devices.check_links(device) is None
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda numbers: numbers.index_fill_(0, torch.tensor([7]), 0))
    assert sick_devices.check_links(device) == "got wrong sums from the other workers"


def test_what_an_earlier_call_left_in_the_buffer_is_not_taken_for_gathered_values(monkeypatch):
    """As gloo may leave it there while a group is taken down: seen as the ids of the step before, at a step's loss."""
    buffers = []

    def gather_object(value, values, group):
        buffers.append(value)
        values[:] = [value, buffers[0]]  # the other rank's is still that of the first call

    monkeypatch.setattr(distributed, "rank", lambda: 0)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "gather_object", gather_object)
    assert distributed.gather_objects("first", "a group") == ["first", "first"]
    with pytest.raises(RuntimeError, match="of an earlier call"):
        distributed.gather_objects("second", "a group")


@pytest.mark.parametrize(
    ("computing", "links", "before", "sick"),
    [
        ("....", "....", [], None),
        (".x..", "xxxx", [], [1]),  # its wrong results spoil everyone's sums
        (".xx.", "....", [], [1, 2]),
        ("....", "..xx", [], [2, 3]),
        ("....", "xxxx", [], []),  # nobody can be named
        ("x...", "....", [], []),  # the head, which the driver needs
        (".xxx", "....", [], []),  # too many for it to be the machines
        (".x..", "....", ["a", "b"], []),
        (".x..", "....", ["a", "node 1"], [1]),  # asked for in vain before
    ],
)
def test_sick_machines_are_excluded_or_the_run_ends(tmp_path, monkeypatch, computing, links, before, sick):
    config, drained = TrainingConfig(storage=str(tmp_path), run_name="sick"), []
    head = {"NodeID": "node 0", "Resources": {"node:__internal_head__": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [head, {"NodeID": "node 1", "Resources": {}}])
    monkeypatch.setattr(sick_devices, "drain_node", lambda reason, node_id: drained.append(node_id))
    everyone = [
        {
            "device": "x" in device or None,
            "links": "x" in link or None,
            "text": f"{rank} is sick",
            "node": f"node {rank}",
        }
        for rank, (device, link) in enumerate(zip(computing, links, strict=True))
    ]
    storage.write_json(storage.join(config.run_uri, sick_devices.EXCLUDED), before)
    assert sick_devices.exclude(config.run_uri, everyone) == sick
    assert sorted(drained) == [f"node {rank}" for rank in sick or []]
    assert storage.exists(storage.join(config.run_uri, run_folder.ENDED)) == (sick == [])


def test_no_machine_is_excluded_while_the_head_is_not_known(tmp_path, monkeypatch):
    config = TrainingConfig(storage=str(tmp_path), run_name="sick")
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "node 1", "Resources": {}}])
    everyone = [{"device": "wrong", "links": None, "text": "0 is sick", "node": "node 1"}]
    assert sick_devices.exclude(config.run_uri, everyone) == []
    assert storage.exists(storage.join(config.run_uri, run_folder.ENDED))


WATCHED = """
import threading
from helpers.production.extras.watchdog import Timer
with Timer(0.3, on_hang={on_hang}) as watchdog:
    watchdog.beat()
    {body}
print("ended", flush=True)
"""


def watched(body, on_hang='lambda seconds: print("hung", seconds > 0.3, flush=True)'):
    """`(exit code, output)` of a process that a watchdog ends after 0.3 seconds without a beat."""
    return run_script(WATCHED.format(body=body, on_hang=on_hang))


def test_a_hung_process_tells_where_it_hangs_and_ends_itself():
    code, said = watched("threading.Event().wait()")
    assert code == -signal.SIGKILL and "hung True\n" in said and "threading.py" in said


@pytest.mark.slow
@pytest.mark.parametrize("on_hang", ["lambda seconds: threading.Event().wait()", "lambda seconds: 1 / 0"])
def test_a_hung_process_ends_itself_even_if_its_report_hangs(on_hang):
    """As where the storage that it would write to is what does not answer."""
    assert watched("threading.Event().wait()", on_hang)[0] == -signal.SIGKILL


def test_a_process_that_goes_on_is_left_alone():
    assert watched("[(threading.Event().wait(0.1), watchdog.beat()) for _ in range(8)]") == (0, "ended\n")


def test_compiling_another_size_and_slow_uploads_are_no_hang():
    """As the training loop calls it: a size's first step and a checkpoint may take ten times as long."""
    steps = """
    from types import SimpleNamespace as Unit
    small, large, pause = Unit(latents_spec=8), Unit(latents_spec=16), threading.Event().wait
    for step, unit in enumerate([small, large, small]):
        watchdog.before_step(step, [unit])
        pause(1 if step < 2 else 0)
        watchdog.after_step(step, [unit], {})
    watchdog.before_checkpoint(3)
    pause(1)
    watchdog.before_step(3, [small])
    """
    assert watched(steps) == (0, "ended\n")
    code, said = watched(f"{steps}\n    pause()")
    assert code == -signal.SIGKILL and "hung True\n" in said


def test_metrics_that_cannot_be_written_stop_the_worker(tmp_path, monkeypatch):
    log = StepLog(str(tmp_path), 2)

    def refuse(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(log.file, "write", refuse)
    log.write(1, {"loss": 1.0}, [])
    with pytest.raises(OSError, match="the disk is full"):
        log.write(2, {"loss": 1.0}, [])
