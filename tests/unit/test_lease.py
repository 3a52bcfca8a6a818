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

from helpers import resumable_job, run_setup, storage
from helpers.config import TrainingConfig
from helpers.runtime import lease
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


@pytest.fixture
def folder(tmp_path):
    yield str(tmp_path)
    for held in lease._held.values():
        held.release()
    lease._held.clear()


def hold(uri):
    return lease.hold(uri, "run_name='one'")


def holder_elsewhere(folder, **changes):
    """A lease of another host, as its driver wrote it; returns its file."""
    uri = storage.join(folder, "lease.json")
    now = time.time()
    content = {
        "token": "theirs",
        "host": "node-7",
        "place": "there",
        "pid": 7,
        "created": now,
        "since": now,
        "beats": 0,
    }
    storage.write_json(uri, {**content, **changes})
    return uri


def holder_here(folder):
    """A lease of a process of this machine that lives: the one that started these tests."""
    pid = os.getppid()
    alive = {"place": lease.place(), "pid": pid, "created": psutil.Process(pid).create_time()}
    return holder_elsewhere(folder, host="this-host", **alive)


def test_a_second_driver_is_refused_until_the_first_is_dead(folder):
    """Killed, so that it can delete nothing: the next one goes on at once."""
    command = [sys.executable, "-c", HOLDER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        said = rf"run_name='one' is in use by process {first.pid} on \S+, since 20..-..-.. ..:..:...*: wait until"
        with pytest.raises(RuntimeError, match=said):
            hold(folder)
        first.kill()
        started = time.monotonic()
        first.wait()
        hold(folder)
        assert time.monotonic() - started < lease.STALE_SECONDS / 2


def test_a_driver_that_ends_leaves_no_lease(folder):
    done = subprocess.run([sys.executable, "-c", HOLDER, folder], input="", capture_output=True, text=True, timeout=60)
    assert done.stdout == "held\n" and not os.listdir(folder)


def test_one_process_holds_it_as_often_as_it_asks(folder):
    first = hold(folder)
    assert hold(folder) is first
    with hold(folder):
        first.check()
    assert not os.listdir(folder)
    hold(folder).check()


def test_another_hosts_lease_is_taken_over_when_it_is_old(folder):
    path = holder_elsewhere(folder)
    os.utime(path, (time.time() - 61, time.time() - 61))
    hold(folder).check()
    assert os.listdir(folder) == ["lease.json"]


def test_another_hosts_silence_is_waited_for(folder, monkeypatch, capsys):
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.2)
    holder_elsewhere(folder)
    hold(folder).check()
    assert re.search(r"in use by process 7 on node-7, since .* Waiting up to 0 s", capsys.readouterr().out)


def test_another_hosts_heartbeat_refuses(folder):
    path, beats, stop = holder_elsewhere(folder), iter(range(10**9)), threading.Event()

    def beat():
        while not stop.is_set():
            holder_elsewhere(folder, beats=next(beats))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="process 7 on node-7"):
            hold(folder)
    finally:
        stop.set()
        thread.join()
    assert storage.read_json(path)["token"] == "theirs"


def test_of_two_that_write_at_once_the_last_one_has_it(store, monkeypatch):
    """On an object store, where both find no lease."""
    uri = "s3://bucket/two-drivers"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="process 7 on node-7"):
        patch.setattr(time, "sleep", lambda seconds: holder_elsewhere(uri))
        hold(uri)
    storage.delete(uri)
    with hold(uri) as mine:
        mine.check()
    assert not storage.list_files(uri)


def test_a_driver_that_stood_still_too_long_is_interrupted(folder, capsys):
    mine = hold(folder)
    with pytest.raises(KeyboardInterrupt):
        holder_elsewhere(folder)
        threading.Event().wait(30)
    assert "on node-7" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="on node-7"):
        mine.check()
    mine.release()
    assert storage.read_json(storage.join(folder, "lease.json"))["token"] == "theirs"


def test_heartbeats_change_the_file(folder):
    mine = hold(folder)
    while mine.read()["beats"] < 2:
        threading.Event().wait(0.01)
    mine.check()


def test_a_job_that_another_driver_does_is_left_alone(folder):
    description = {"encoder": {}, "columns": []}
    job = resumable_job.Job(
        folder,
        {"resolutions": [32]},
        description,
        plan=lambda: [resumable_job.Segment(0, ["a"], 1)],
        id_type=None,
    )
    holder_here(folder)
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
    holder_here(config.run_uri)
    uploading = storage.join(config.run_uri, "checkpoint-000000010-001", "part")
    storage.write_text(uploading, "half of it")
    with pytest.raises(RuntimeError, match=f"run_name='one' is in use by process {os.getppid()} on this-host, since"):
        run_setup.open_run(config)
    assert storage.exists(uploading)
