"""Two drivers at once: one of them is refused, by name, until the other one has ended or is known to be dead."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import psutil
import pytest

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode.job import Job, Segment
from helpers.production import lease

HOLDER = """
import sys
from helpers.production import lease
lease.hold(sys.argv[1], "run_name='one'")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.02)
    monkeypatch.delenv("PRETRAIN_JOB_ID", raising=False)
    yield str(tmp_path)
    for held in lease._held.values():
        held.release()
    lease._held.clear()


def hold(uri):
    return lease.hold(uri, "run_name='one'")


def write_lease(folder, age=0.0, **changes):
    """A lease of another host, which its driver renewed `age` seconds ago."""
    uri = storage.join(folder, "lease.json")
    content = {"token": "theirs", "job": "4711", "place": "there", "process": [7, time.time()]}
    storage.write_json(uri, {**content, "holder": "process 7 on node-7", **changes})
    if age:
        os.utime(uri, (time.time() - age,) * 2)


def test_a_second_driver_is_refused_until_the_first_is_dead(folder):
    """Killed, so that it can delete nothing: the next one goes on at once."""
    command = [sys.executable, "-c", HOLDER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match=rf"run_name='one' is in use by process {first.pid} on \S+, since 20"):
            hold(folder)
        first.kill()
        first.wait()
        hold(folder).check()


def test_a_process_id_that_was_reused_is_no_holder(folder):
    with lease.Lease(folder, "any") as own:
        place = own.content["place"]
    alive = psutil.Process(os.getppid())
    write_lease(folder, place=place, process=[alive.pid, alive.create_time()])
    with pytest.raises(RuntimeError, match="node-7"):
        hold(folder)
    write_lease(folder, place=place, process=[alive.pid, alive.create_time() - 3600])
    hold(folder).check()


def test_one_process_holds_it_as_often_as_it_asks(folder):
    first = hold(folder)
    assert hold(folder) is first
    with hold(folder):
        first.check()
    assert not os.listdir(folder)
    hold(folder).check()


def test_another_hosts_lease_is_taken_over_ten_minutes_after_it_was_renewed(folder):
    write_lease(folder, age=500)
    with pytest.raises(RuntimeError, match="node-7"):
        hold(folder)
    write_lease(folder, age=700)
    hold(folder).check()
    assert os.listdir(folder) == ["lease.json"]


def test_a_damaged_lease_locks_a_run_for_ten_minutes_and_not_longer(folder):
    uri = pathlib.Path(folder, "lease.json")
    uri.write_text('{"token": "thei')
    with pytest.raises(RuntimeError, match="in use by an unknown process .* ends 10 minutes after"):
        hold(folder)
    os.utime(uri, (time.time() - 700,) * 2)
    hold(folder).check()


def test_the_same_job_takes_over_at_once_on_another_host(folder, monkeypatch):
    write_lease(folder)
    monkeypatch.setenv("PRETRAIN_JOB_ID", "4711")
    hold(folder).check()


def test_on_an_object_store_its_clock_decides_and_the_last_writer_has_it(store):
    uri = "s3://bucket/two-drivers"
    write_lease(uri)
    with pytest.raises(RuntimeError, match="process 7 on node-7"):
        hold(uri)
    storage.delete(uri)
    with hold(uri) as held:
        held.check()
        write_lease(uri)
        with pytest.raises(RuntimeError, match="process 7 on node-7"):
            held.check()
    assert storage.read_json(storage.join(uri, "lease.json"))["token"] == "theirs"


def test_a_job_that_another_driver_took_over_deletes_nothing(folder):
    description = {"encoder": {"model": "tiny-sd", "text_encoder_model": "tiny-sd"}, "columns": []}
    config = PreprocessingConfig(latents_uri=str(folder))
    job = Job(config, {"resolutions": [32]}, description, plan=lambda: [Segment(0, ["a"], 1)])
    job.save()
    written = pathlib.Path(folder, "data", "000000-0123456789ab.parquet")  # of a segment that the other one does
    written.parent.mkdir()
    written.touch()
    held = hold(folder)
    write_lease(folder)
    with pytest.raises(RuntimeError, match="node-7"):
        job.run(pipeline=None, guard=held)
    assert written.exists()


def test_a_holder_renews_its_file(folder):
    held = hold(folder)
    first = storage.version(held.uri)
    while storage.version(held.uri) == first:
        threading.Event().wait(0.01)
    held.check()
