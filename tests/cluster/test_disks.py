"""Disks that are full, and latents that are gone, for real: one sentence, no part is left, and it goes on."""

import pathlib
import shutil
import subprocess
import threading

import pytest

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.latents.plan import read_files
from helpers.lesson import captioned_shapes
from helpers.production import monitor
from helpers.production.checks import training
from helpers.train import metrics, run_folder
from helpers.train.loop import train_loop_per_worker
from tests.faults import slow, wait_until
from tests.pipelines import build_pipeline, fit, prepare_job, short_run

FULL = r"cannot be written: No space left on device"


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, and a function that sets the disk's size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size, *options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "none", str(folder)]
        return subprocess.run(command, capture_output=True, check=True)

    try:
        mount("1m")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a disk")
    yield folder, lambda size: mount(size, "remount")
    subprocess.run(["umount", "-l", str(folder)], check=True)


@slow
def test_training_on_a_full_disk_goes_on_when_there_is_room(encoded, small_disk, capsys):
    """A checkpoint that does not fit leaves no part. When there is room the same workers save the next one."""
    folder, resize = small_disk
    resize("20m")  # one checkpoint, of 14 MB
    config = short_run(str(folder), "full", latents_uri=encoded[0].latents_uri, max_failures=0, checkpoints_kept=1)
    partial = []

    def make_room():
        wait_until(lambda: run_folder.read_failures(config.run_uri))
        partial.extend(map(run_folder.find_corruption, run_folder.list_checkpoints(config.run_uri)))
        resize("100m")

    def loop(config, **options):
        storage.retry.__defaults__ = ((3,), "")  # seconds, once, before a checkpoint is lost
        train_loop_per_worker(config, **options)

    thread = threading.Thread(target=make_room)
    thread.start()
    with monitor.monitor_run(config):
        fit(config, loop=loop)
    thread.join()
    lost = run_folder.read_failures(config.run_uri)
    assert lost and partial == [None] and f"{config.run_uri}/checkpoint-000000020-001" in lost[0] and FULL in lost[0]
    assert f"lost: {lost[0]}" in capsys.readouterr().out and run_folder.last_step(config) == 40
    found = metrics.read_metrics(config.run_uri)
    assert found["step"].tolist() == list(range(1, 41)) and set(found["attempt"]) == {1}


@slow
def test_encoding_on_a_full_disk_is_one_sentence_and_goes_on_when_there_is_room(cluster, small_disk, tmp_path):
    folder, resize = small_disk
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32], latents_uri=str(folder / "latents"))
    captioned_shapes.write_data_set(config.raw_uri, 600, rows_per_file=200)
    job = prepare_job(config, rows_per_segment=200)
    said = (
        rf"^The same command resumes the job, whose segment \d failed: OSError: .Errno 28. {folder}/latents/\S+ {FULL}$"
    )
    with pytest.raises(RuntimeError, match=said):
        job.run(build_pipeline(job))
    entries = job.committed().values()
    assert {file["name"] for entry in entries for file in entry["files"]} == set(map(storage.name, job.written_files()))
    resize("100m")
    job = prepare_job(config, rows_per_segment=200)
    assert job.run(build_pipeline(job)).written == 600


def test_deleted_latents_are_one_sentence_with_the_file(encoded, tmp_path, monkeypatch):
    """Found by a task that reads them, as in a data set of so many files that none is looked at before."""
    monkeypatch.setattr(training, "LISTED_ROWS", -1)
    latents = pathlib.Path(shutil.copytree(encoded[0].latents_uri, tmp_path / "latents"))
    config = short_run(str(tmp_path), "deleted", latents_uri=str(latents), max_failures=0)
    for name in read_files(str(latents)).names.to_pylist():
        (latents / "data" / name).unlink()
    with pytest.raises(RuntimeError) as raised, monitor.monitor_run(config):
        fit(config)
    said = str(raised.value)
    assert "\n" not in said and f"{latents}/data/" in said and len(said) < 500, said
    assert said.startswith("The same command resumes the run, which failed: "), said
