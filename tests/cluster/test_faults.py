"""Machines, processes and files that fail, for real; afterwards every step has the samples and the loss that it should.

`once(flag, action)` runs an action in the process that reaches it first, at the same step in every run of the test.
"""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.train
from ray import cloudpickle

from helpers import checkpoint, encoder, ingest, preprocess, run_setup, storage, train
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.lesson import captioned_shapes
from helpers.runtime import fault_tolerance, metrics_log, monitoring, session
from tests.pipelines import bare, build_pipeline, draw_and_encode, encode, fit, short_run

STEPS = 30
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    session.connect("local", num_cpus=5)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_and_encode(tmp_path_factory.mktemp("storage"), 500)


def run_of(data, name, **changes):
    return short_run(data, name, **{"max_steps": STEPS, "max_failures": 1, "num_training_workers": 2, **changes})


@pytest.fixture(scope="module")
def straight(data):
    """Metrics of a run of two workers that nothing happened to."""
    config = run_of(data, "straight")
    fit(config)
    return metrics_log.read_metrics(config.run_uri)


def once(flag, action):
    """Do `action` if this is the first process that comes here."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    action()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def loop_that(*events):
    """The worker loop, in which things happen at the end of a step, once each: (action, step, rank, flag).

    Not before the last checkpoint that was due is there: the time that its upload takes is not what is tested.
    """

    def loop(values):
        config = TrainingConfig.from_dict(values)
        gather_ids, done = train.gather_ids, [train.read_resume_point(config)["step"]]

        def gather_and_act(units):
            found = gather_ids(units)
            done[0] += 1
            for action, step, rank, flag in events:
                if (done[0], ray.train.get_context().get_world_rank()) == (step, rank):
                    while train.last_step(config) < (step - 1) // config.checkpoint_every * config.checkpoint_every:
                        threading.Event().wait(0.05)
                    once(flag, action)
            return found

        train.gather_ids = gather_and_act
        train.train_loop_per_worker(values)

    return loop


def assert_bit_equal(config, straight):
    found = metrics_log.read_metrics(config.run_uri)
    for column in ("step", "loss", "grad_norm", "samples_crc32", "samples_seen"):
        assert found[column].tolist() == straight[column].tolist(), column
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    crc = every.groupby("step")["samples_crc32"].nunique()
    assert (crc == 1).all()  # steps that were redone saw the same samples


def test_the_uninterrupted_run_is_what_a_bare_loop_computes_from_the_plan(data, straight):
    """Ties every comparison below to something that knows neither Ray nor workers."""
    losses, samples = zip(*bare(run_of(data, "straight"), STEPS), strict=True)
    assert straight["samples_crc32"].tolist() == list(samples)
    np.testing.assert_allclose(straight["loss"], losses, rtol=1e-5)


def test_training_workers_are_killed_and_nothing_is_lost(data, straight, tmp_path, capsys):
    config = run_of(data, "killed", max_failures=2)
    with monitoring.monitor_run(config):
        fit(config, loop=loop_that((die, 13, 0, f"{tmp_path}/first"), (die, 17, 1, f"{tmp_path}/second")))
    assert_bit_equal(config, straight)
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    assert every[every["attempt"] == 2]["step"].min() == every[every["attempt"] == 3]["step"].min() == 11
    assert len(fault_tolerance.read_failures(config.run_uri)) >= 2 and "lost: worker" in capsys.readouterr().out


def half_a_checkpoint(folder, uri):
    """What an upload that is cut off leaves: all files, but half of the large ones."""
    target = pathlib.Path(uri)
    target.mkdir(exist_ok=True)
    for path in pathlib.Path(folder).iterdir():
        content = path.read_bytes()
        (target / path.name).write_bytes(content if len(content) < 50_000 else content[: len(content) // 2])


def test_a_worker_is_killed_while_it_writes_a_checkpoint_and_the_one_before_is_used(data, straight, tmp_path):
    config = run_of(data, "half-a-checkpoint")
    flag = str(tmp_path / "flag")

    def loop(values):
        copy_folder, rank = storage.copy_folder, ray.train.get_context().get_world_rank()

        def copy_or_die(folder, uri):
            def cut_off():
                half_a_checkpoint(folder, uri)
                die()

            if storage.name(uri).startswith("checkpoint-000000020") and rank == 0:
                while train.last_step(config) < 10:
                    threading.Event().wait(0.05)
                once(flag, cut_off)
            copy_folder(folder, uri)

        storage.copy_folder = copy_or_die
        train.train_loop_per_worker(values)

    fit(config, loop=loop)
    assert_bit_equal(config, straight)
    torn = storage.join(config.run_uri, checkpoint.checkpoint_name(20, 1))
    assert "bytes of" in checkpoint.find_corruption(torn)
    run_setup.open_run(config)
    assert not storage.exists(torn)
    assert [storage.name(uri) for uri in checkpoint.list_checkpoints(config.run_uri)] == [
        checkpoint.checkpoint_name(30, 2),
        checkpoint.checkpoint_name(20, 2),
    ]


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_ever():
    threading.Event().wait()


def test_workers_that_hang_are_noticed_and_replaced(data, straight, tmp_path):
    """One is stopped: it answers nobody, and the other waits for it in a collective. Then one just never goes on."""
    config = run_of(data, "hanging", hang_timeout=8, max_failures=2)
    fit(config, loop=loop_that((stop, 13, 1, f"{tmp_path}/stopped"), (wait_for_ever, 17, 0, f"{tmp_path}/waiting")))
    assert_bit_equal(config, straight)
    assert sum("made no step in" in failure for failure in fault_tolerance.read_failures(config.run_uri)) >= 2


DRIVER = """
    import os, signal, sys, threading
    from helpers import storage
    from helpers.config import PreprocessingConfig, TrainingConfig
    from helpers.runtime import metrics_log, session
    from tests.pipelines import encode, fit

    def die_when(reached):
        def watch():
            while not reached():
                threading.Event().wait(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=watch, daemon=True).start()

    session.connect("local", num_cpus=5)
"""


def run_driver(text):
    """A driver of its own, with a Ray of its own, that ends by SIGKILL."""
    script = textwrap.dedent(DRIVER) + textwrap.dedent(text)
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def test_the_driver_of_a_training_is_killed_and_the_run_resumes_where_it_was(data, straight, tmp_path):
    config = run_of(data, "driver")
    run_driver(f"""
        from tests.cluster.test_faults import loop_that
        config = TrainingConfig.from_dict({config.to_dict()!r})
        die_when(lambda: len(metrics_log.read_metrics(config.run_uri)) >= 13)
        fit(config, loop=loop_that((int, 13, 0, {str(tmp_path / "flag")!r})))  # nothing happens, once the checkpoint is there
    """)
    assert 10 <= train.last_step(config) < STEPS
    fit(config)
    assert_bit_equal(config, straight)
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    assert every[every["attempt"] == 2]["step"].min() > 10  # not from the start


@pytest.mark.parametrize("harm", ["truncated", "missing", "folder", "list"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(data, straight, capsys, harm):
    config = run_of(data, f"damaged-{harm}")
    if harm == "truncated":  # a whole run for one of them; the others are prepared by hand
        fit(TrainingConfig.from_dict({**config.to_dict(), "max_steps": 20, "lr_schedule": "constant"}))
        return check_resume_after_truncation(config, capsys)
    for step in (10, 20):
        folder = pathlib.Path(config.run_uri, checkpoint.checkpoint_name(step, 1))
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"1234")
        storage.write_json(folder / "progress.json", {"step": step, "files": {"__0_0.distcp": 4}})
    names = [checkpoint.checkpoint_name(step, 1) for step in (10, 20)]
    results = [{"checkpoint_dir_name": name, "metrics": {}} for name in names]
    listed = storage.join(config.run_uri, checkpoint.SNAPSHOT)
    storage.write_json(
        listed,
        {
            "checkpoint_results": results,
            "checkpoint_report_indices": [0, 1],
            "latest_checkpoint_result": results[1],
            "pending_training_results": [results[1]],
            "pending_validation_specs": [True],
            "current_report_index": 2,
        },
    )
    newest = pathlib.Path(config.run_uri, names[1])
    if harm == "missing":
        (newest / "__0_0.distcp").unlink()
        expected = f"{names[1]} cannot be used: its file __0_0.distcp is missing."
    elif harm == "folder":
        storage.delete(newest)
        expected = f"{names[1]} cannot be used: its folder is missing."
    else:  # the list itself was cut short; every checkpoint is there
        pathlib.Path(listed).write_text('{"checkpoint_results": [')
        expected = None
    said = checkpoint.reconcile_checkpoints(config.run_uri)
    told = [expected, f"The run resumes from {names[0]}."] if expected else [f"The run resumes from {names[1]}."]
    assert said[-len(told) :] == told and (expected or "was cut short" in said[0])
    assert train.last_step(config) == (10 if expected else 20)
    assert not storage.exists(listed)  # Ray Train starts a new list
    assert newest.exists() == (expected is None)


def check_resume_after_truncation(config, capsys):
    config = TrainingConfig.from_dict({**config.to_dict(), "max_steps": 20, "lr_schedule": "constant"})
    before = metrics_log.read_metrics(config.run_uri)
    newest = checkpoint.last_complete(config.run_uri)
    largest = max(pathlib.Path(newest).iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, 1000)
    fit(config)
    assert (
        f"{storage.name(newest)} cannot be used: its file {largest.name} has 1,000 bytes of" in capsys.readouterr().out
    )
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    assert every[every["attempt"] == 2]["step"].tolist() == list(range(11, 21))
    assert metrics_log.read_metrics(config.run_uri)["loss"].tolist() == before["loss"].tolist()


# ---- preprocessing


def ids_of(latents_uri):
    tables = [
        pq.read_table(path, columns=["id"])
        for path in storage.list_files(storage.join(latents_uri, "data"), ".parquet")
    ]
    return sorted(pa.concat_tables(tables)["id"].to_pylist())


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    config = PreprocessingConfig(storage=str(tmp_path_factory.mktemp("raw")), resolutions=[32])
    captioned_shapes.write_parquet(config.raw_uri, 3000, rows_per_file=1000)
    ids = [
        i
        for path in storage.list_files(config.raw_uri)
        for i in pq.read_table(path, columns=["hash"])["hash"].to_pylist()
    ]
    return config, sorted(ids)


@pytest.mark.parametrize("stage", ["encoder", "transform"])
def test_an_encoder_actor_or_a_transform_process_is_killed_and_every_row_is_there_once(raw, tmp_path, stage):
    config, ids = raw
    config = PreprocessingConfig(storage=config.storage, resolutions=[32], latents_uri=str(tmp_path / "latents"))
    flag = str(tmp_path / "flag")

    class MortalEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 5:
                once(flag, die)
            return super().__call__(rows)

    def mortal_transform(rows, config):
        once(flag, die)
        return preprocess.transform(rows, config=config)

    mortal = {"latent_encoder": MortalEncoder} if stage == "encoder" else {"transform": mortal_transform}
    manifest = encode(config, **mortal)
    assert os.path.exists(flag) and manifest.total("written") == 3000
    assert ids_of(config.latents_uri) == ids


def test_the_driver_of_a_preprocessing_is_killed_and_the_job_is_completed_by_the_next(raw, tmp_path):
    config, ids = raw
    config = PreprocessingConfig(storage=config.storage, resolutions=[32], latents_uri=str(tmp_path / "latents"))
    run_driver(f"""
        import helpers.preprocess
        from tests.pipelines import build_pipeline
        config = PreprocessingConfig.from_dict({config.to_dict()!r})
        job = helpers.preprocess.prepare(config, rows_per_segment=1000)
        die_when(lambda: len(storage.list_files(storage.join(config.latents_uri, "segments"), ".json")) >= 3)  # one, the job and its plan
        job.run(build_pipeline(job, config))
    """)
    # One segment is committed at least; of the next there may be files that nobody counts.
    job = preprocess.prepare(config, rows_per_segment=1000)
    done = job.committed()
    assert 1 <= len(done) <= 3
    started = []

    def pipeline(segment):
        started.append(segment.index)
        return build_pipeline(job, config)(segment)

    manifest = job.run(pipeline)
    assert started == [index for index in range(3) if index not in done]
    assert manifest.total("read") == manifest.total("written") == 3000
    assert ids_of(config.latents_uri) == ids
    assert ingest.read_manifests(TrainingConfig(latents_uri=config.latents_uri))
