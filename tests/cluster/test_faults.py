"""Processes and files that fail, for real; afterwards every step has the samples and the loss that it should."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import signal
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
import ray.train
from ray import cloudpickle

from helpers import cluster as session
from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode import encoder, stages
from helpers.encode.job import Segment
from helpers.latents import read
from helpers.latents.manifest import read_manifest
from helpers.latents.plan import read_files
from helpers.lesson import captioned_shapes
from helpers.online import index
from helpers.online.config import OnlineConfig
from helpers.production import monitor
from helpers.raw import inputs
from helpers.train import metrics, run_folder
from tests.faults import (
    assert_same_run,
    attempts_of,
    damage_and_die,
    die,
    loop_with,
    loop_with_cut_off_upload,
    loop_with_nan,
    loop_with_refused_uploads,
    once,
    run_driver,
    slow,
    steps_done,
    stop,
    truncate_newest,
    wait_for_ever,
)
from tests.pipelines import TWO_WORKERS, build_pipeline, detected, evaluated, fit, prepare_job, short_run

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def straight(run):
    """Metrics of the run of two workers that nothing happened to; `test_training` compares it with a bare loop."""
    return metrics.read_metrics(run[0].run_uri)


ONE_WORKER = {"num_training_workers": 1, "strategy": "ddp"}


def watched(timeout):
    """`extras` of a run that is not evaluated, whose watchdog waits for so many seconds."""
    return {"evaluate": None, "watchdog": {"timeout": timeout}}


def run_of(run, name, **changes):
    values = {**TWO_WORKERS, "max_failures": 10, **changes}
    return short_run(run[0].storage, name, **values)


# ---- training


@slow
def test_a_run_to_which_everything_happens_is_the_undisturbed_one(run, straight, tmp_path, capsys):
    """Bit by bit, every step that was done again too. One after another:

    - the driver is killed after 33 steps, and the newest checkpoint, of step 30, is cut short;
    - a worker is stopped when step 23 is done again, and the other waits for it in a collective: both are replaced;
    - a worker dies after step 33, and the new checkpoint of step 30 is damaged at its full size;
    - a worker dies while it uploads the checkpoint of step 30; the next command deletes what it left;
    - the driver is interrupted, and the same command goes on from step 30.

    Of the restarts that `max_failures` allows, those of workers count.
    """
    config = run_of(run, "unlucky", max_failures=3, extras=watched(30))
    run_driver(f"""
        config = TrainingConfig(**{config.to_dict()!r})
        die_when(lambda: steps_done(config) >= 33 and is_listed(config, 30))
        fit(config, loop=loop_with((wait_for_ever, 33, 0, {str(tmp_path / "driver")!r})))
    """)
    newest, file = truncate_newest(config)

    def interrupt():
        if len(attempts_of(config)) == 5 and steps_done(config) == 33 and run_folder.last_step(config) == 30:
            os.kill(os.getpid(), signal.SIGINT)
            return True

    strike = functools.partial(damage_and_die, config.run_uri)
    stopped, struck = (stop, 23, 1, tmp_path / "stopped"), (strike, 33, 0, tmp_path / "struck")
    events = loop_with(stopped, struck, (wait_for_ever, 33, 0, tmp_path / "interrupted"))
    loop = loop_with_cut_off_upload(str(tmp_path / "cut off"), 30, inner=events, attempt=4)
    with pytest.raises(KeyboardInterrupt), monitor.monitor_run(config):
        with monitor.poll_in_background(interrupt, every=0.1):
            fit(config, loop=loop)
    said = capsys.readouterr().out
    assert f"{newest} cannot be used: its file {file} has 1,000 bytes of" in said
    assert "lost: checkpoint-000000030-003 cannot be used: its file __" in said
    assert ".distcp is damaged after byte" in said and "resumes from checkpoint-000000020-001." in said
    assert any("made no step in" in failure for failure in run_folder.read_failures(config.run_uri))
    torn = storage.join(config.run_uri, run_folder.checkpoint_name(30, 4))
    assert "bytes of" in run_folder.find_corruption(torn)
    # All CPUs at once can only be had when no worker and no task is left.
    assert ray.get(ray.remote(num_cpus=6)(lambda: True).remote(), timeout=300)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fit(config)
    assert attempts_of(config) == [1, 21, 21, 21, 21, 31]
    assert_same_run(config, straight)
    newest = [storage.name(uri) for uri in run_folder.list_checkpoints(config.run_uri)][:2]
    assert newest == [run_folder.checkpoint_name(40, 6), run_folder.checkpoint_name(30, 5)]
    assert not storage.exists(torn)


@slow
def test_incomplete_checkpoints_replace_no_complete_one_and_three_in_a_row_end_the_run(run, capsys):
    """One is kept: that of step 10, from which the same command goes on."""
    config = run_of(run, "refused", max_failures=1, checkpoints_kept=1, checkpoint_every=5, extras=evaluated(20))
    ended = "3 checkpoints in a row were lost; checkpoint-000000025-001 .*: OSError: AWS Error SLOW_DOWN"
    with pytest.raises(RuntimeError, match=ended), monitor.monitor_run(config):
        fit(config, loop=loop_with_refused_uploads(1, (5, 15, 20, 25)))
    assert attempts_of(config) == [1] and run_folder.last_step(config) == 10
    said = capsys.readouterr().out
    assert "lost: checkpoint-000000015-001 could not be uploaded: OSError: AWS Error SLOW_DOWN" in said
    assert "evaluation of step 20 skipped: its checkpoint could not be uploaded" in said


def stream_that_dies(plan, first_step, end_step):
    """Stored rows, whose reading kills its process each time: Ray Data tries again without end."""
    return read.build_dataset(plan, first_step, end_step, lambda row_ranges, source: die())


@slow
def test_a_run_whose_data_kills_its_reader_each_time_ends_after_max_failures(run):
    """Before a group's first step, which may compile, the watchdog's timeout counts ten times."""
    config = run_of(run, "unreadable", **ONE_WORKER, extras=watched(2), max_failures=1)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(config, stream=stream_that_dies)
    failures = run_folder.read_failures(config.run_uri)
    assert sum(bool(re.search(r"made no step in 2\d s", failure)) for failure in failures) >= 2
    assert attempts_of(config) == []


@slow
def test_a_nan_ends_a_run_at_once(run):
    """Ray Train would start the workers four times, to meet the same NaN at the same step."""
    config = run_of(run, "not-finite", max_failures=3)
    sentence = "^The loss at step 13 is nan"
    with pytest.raises(RuntimeError, match=sentence), monitor.monitor_run(config):
        fit(config, loop=loop_with_nan(13))
    assert attempts_of(config) == [1] and steps_done(config) == 13 and run_folder.last_step(config) == 10
    assert run_folder.read_failures(config.run_uri) == []


# ---- preprocessing


def table_of(latents_uri):
    """All rows that a job wrote, in its order."""
    names = read_files(latents_uri).names.to_pylist()
    return pa.concat_tables([pq.read_table(f"{latents_uri}/data/{name}") for name in names])


def test_killed_processes_of_a_job_give_the_same_rows(encoded, tmp_path, monkeypatch, capsys):
    """Every row once, in the order and with the bytes of a job that nothing happened to; no segment begins again."""
    finished, expected = encoded
    config = dataclasses.replace(finished, latents_uri=str(tmp_path / "latents"))
    reading, encoding, transforming = flags = [str(tmp_path / name) for name in ("read", "encode", "transform")]

    class MortalEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                once(encoding, die)
            return super().__call__(rows)

    def mortal_transform(rows, **options):
        once(transforming, die)
        return stages.transform(rows, **options)

    read = inputs.read_part

    def mortal_read(part, **options):
        once(reading, die)
        return read(part, **options)

    job = prepare_job(config)
    monkeypatch.setattr(inputs, "read_part", mortal_read)
    manifest = job.run(build_pipeline(job, latent_encoder=MortalEncoder, transform=mortal_transform))
    assert all(map(os.path.exists, flags))
    assert "is restarted" not in capsys.readouterr().out
    assert manifest.read == expected.read and manifest.rejected == expected.rejected
    rows, others = table_of(config.latents_uri), table_of(finished.latents_uri)
    assert rows == others


def test_a_killed_driver_of_a_job_is_followed_up(cluster, tmp_path, monkeypatch):
    """With a filter, whose rows are counted, and a limit, which bounds what is read. No input is counted again.

    And with a list of rows that must go, in both segments.
    """
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32], row_filter="width > 64", limit=70)
    captioned_shapes.write_data_set(config.raw_uri, 80, rows_per_file=40)
    raw = pq.read_table(config.raw_uri)[:70]
    passed = raw.filter(pc.greater(raw["width"], 64)).to_pylist()
    by_id, by_picture = [passed[0], passed[-1]], [passed[1], passed[-2]]
    listed = [str(row["hash"]) for row in by_id] + [hashlib.sha256(row["jpg"]).hexdigest() for row in by_picture]
    (tmp_path / "list").write_text("\n".join(listed))
    config = dataclasses.replace(config, extras={"exclusions": {"uri": str(tmp_path / "list")}})
    run_driver(f"""
        config = PreprocessingConfig(**{config.to_dict()!r})
        job = prepare_job(config, rows_per_segment=40)
        build = build_pipeline(job)
        def pipeline(segment):
            if segment.index == 1:  # the first segment is committed, the second one about to start
                os.kill(os.getpid(), signal.SIGKILL)
            return build(segment)
        job.run(pipeline)
    """)
    with pytest.raises(FileNotFoundError, match="No latents at"):
        read_manifest(config.latents_uri)
    data = storage.join(config.latents_uri, "data")
    first = {path: os.stat(path).st_mtime_ns for path in storage.list_files(data)}
    pathlib.Path(data, "000001-0123456789ab.parquet").write_bytes(b"half")
    monkeypatch.setattr(inputs, "count_rows", lambda paths, config: pytest.fail("the input's footers are read again"))
    job = prepare_job(config, rows_per_segment=40)
    assert list(job.committed()) == [0] and [segment.index for segment in job.pending()] == [1]
    manifest = job.run(build_pipeline(job))
    wanted = [str(row["hash"]) for row in passed[2:-2]]
    files = {path: os.stat(path).st_mtime_ns for path in storage.list_files(data)}
    assert first.items() < files.items()
    assert sorted(sum((pq.read_table(path)["id"].to_pylist() for path in files), [])) == sorted(wanted)
    counts = [manifest.read, manifest.written, manifest.filtered]
    assert counts == [70, len(wanted), 70 - len(passed)] and 0 < len(wanted) < 70
    assert manifest.rejected == {"excluded": 4}


def test_a_task_that_kills_its_process_is_tried_four_times(cluster, tmp_path, monkeypatch):
    """One that reads for a job, and one that indexes for an online run. Ray Data would repeat it without end."""
    config = OnlineConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_data_set(config.raw_uri, 20)
    config, attempts = detected(config), tmp_path / "attempts"

    def note_and_die(*_, **__):
        with open(attempts, "a") as file:
            file.write("x")
        die()

    monkeypatch.setattr(inputs, "read_part", note_and_die)
    monkeypatch.setattr(index, "as_row", note_and_die)
    paths, listing = inputs.list_inputs(config)
    with pytest.raises(ray.exceptions.RayError) as raised:
        inputs.read_rows(Segment(0, paths, 20), config).take_all()
    assert session.was_lost(raised.value) and attempts.read_text() == "xxxx"
    with pytest.raises(RuntimeError, match="^The same command resumes the index"):
        index.build_index(f"{tmp_path}/index", paths, listing, config, 0.05)
    assert attempts.read_text() == 2 * "xxxx"
