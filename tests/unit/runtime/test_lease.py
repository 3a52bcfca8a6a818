"""Two drivers at once: one of them is refused, by name, until the other one has ended or is known to be dead."""

import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest

from helpers import storage
from helpers.config import TrainingConfig
from helpers.encode.job import Job, Segment
from helpers.production import lease
from helpers.train import setup
from tests.benchmarks import made_up

HOLDER = """
import sys, threading
from helpers.runtime import lease
lease.hold(sys.argv[1], "run_name='one'")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    monkeypatch.delenv("PRETRAIN_JOB_ID", raising=False)


@pytest.fixture
def folder(tmp_path):
    yield str(tmp_path)
    for held in lease._held.values():
        held.release()
    lease._held.clear()


def hold(uri):
    return lease.hold(uri, "run_name='one'")


def write_lease(folder, **changes):
    """A lease of another host, as its driver wrote it."""
    content = {"token": "theirs", "job": None, "place": "there", "process": [7, time.time()]}
    content["holder"] = "process 7 on node-7, since 2026-11-23 18:00:00+0000"
    storage.write_json(storage.join(folder, "lease.json"), {**content, **changes})


def write_lease_of_this_host(folder):
    """A lease of a process of this machine that lives: the one that started these tests."""
    with lease.Lease(folder, "any") as own:
        place = own.content["place"]
    alive = psutil.Process(os.getppid())
    write_lease(folder, place=place, process=[alive.pid, alive.create_time()], holder=f"process {alive.pid} on host")


def test_a_second_driver_is_refused_until_the_first_is_dead(folder, monkeypatch):
    """Killed, so that it can delete nothing: the next one goes on at once."""
    monkeypatch.setattr(lease, "STALE_SECONDS", 600)
    command = [sys.executable, "-c", HOLDER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        said = rf"run_name='one' is in use by process {first.pid} on \S+, since 20..-..-.. ..:..:...*: wait until"
        with pytest.raises(RuntimeError, match=said):
            hold(folder)
        first.kill()
        first.wait()
        hold(folder).check()


def test_a_process_id_that_was_reused_is_no_holder(folder):
    write_lease_of_this_host(folder)
    path = storage.join(folder, "lease.json")
    content = storage.read_json(path)
    content["process"][1] -= 3600
    storage.write_json(path, content)
    hold(folder).check()


def test_one_process_holds_it_as_often_as_it_asks(folder):
    first = hold(folder)
    assert hold(folder) is first
    with hold(folder):
        first.check()
    assert not os.listdir(folder)
    hold(folder).check()


def test_another_hosts_lease_is_taken_over_after_a_silence(folder, capsys):
    write_lease(folder)
    hold(folder).check()
    assert "in use by process 7 on node-7, since 2026" in capsys.readouterr().out
    assert os.listdir(folder) == ["lease.json"]


def test_another_hosts_heartbeat_refuses(folder):
    beat = threading.Timer(0.1, write_lease, [folder], {"beat": 1.0})
    write_lease(folder)
    beat.start()
    with pytest.raises(RuntimeError, match="process 7 on node-7"):
        hold(folder)
    beat.join()
    assert storage.read_json(storage.join(folder, "lease.json"))["token"] == "theirs"


def test_the_same_job_takes_over_at_once_on_another_host(folder, monkeypatch):
    monkeypatch.setattr(lease, "STALE_SECONDS", 600)
    monkeypatch.setenv("PRETRAIN_JOB_ID", "4711")
    write_lease(folder, job="4711")
    hold(folder).check()


def test_of_two_that_write_at_once_the_last_one_has_it(store, monkeypatch):
    """On an object store, where both find no lease."""
    uri = "s3://bucket/two-drivers"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="process 7 on node-7"):
        patch.setattr(time, "sleep", lambda seconds: write_lease(uri))
        hold(uri)
    storage.delete(uri)
    with hold(uri) as held:
        held.check()
    assert not storage.list_files(uri)


def test_a_driver_that_stood_still_too_long_is_interrupted(folder, capsys):
    held = hold(folder)
    with pytest.raises(KeyboardInterrupt):
        write_lease(folder)
        threading.Event().wait(30)
    assert "on node-7" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="on node-7"):
        held.check()
    held.release()
    assert storage.read_json(storage.join(folder, "lease.json"))["token"] == "theirs"


def test_heartbeats_change_the_file(folder):
    held = hold(folder)
    first = held.read()
    while held.read() == first:
        threading.Event().wait(0.01)
    held.check()


def test_a_job_that_another_driver_does_is_left_alone(folder):
    description = {"encoder": {}, "columns": []}
    job = Job(
        folder,
        {"resolutions": [32]},
        description,
        plan=lambda: [Segment(0, ["a"], 1)],
        id_type=None,
    )
    write_lease_of_this_host(folder)
    written = pathlib.Path(folder, "data", "000000-0123456789ab.parquet")  # of a segment that the other one does
    written.parent.mkdir()
    written.touch()
    with pytest.raises(RuntimeError, match=re.escape(f"latents_uri={folder!r} is in use by process {os.getppid()}")):
        job.run(pipeline=None)
    assert written.exists()


def test_a_run_that_another_driver_does_is_left_alone(folder):
    made_up.write_latents(
        f"{folder}/latents", 64, {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (4, 128)}, 64
    )
    config = TrainingConfig(storage=folder, run_name="one", resolution=32, global_batch_size=16)
    write_lease_of_this_host(config.run_uri)
    uploading = storage.join(config.run_uri, "checkpoint-000000010-001", "part")
    storage.write_text(uploading, "half of it")
    with pytest.raises(RuntimeError, match=f"run_name='one' is in use by process {os.getppid()} on host"):
        setup.open_run(config)
    assert storage.exists(uploading)
