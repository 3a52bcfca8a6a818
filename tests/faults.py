"""Faults that tests put into Ray's workers, each once and at the same step in every run of a test."""

import contextlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import ray
import ray.train
import torch
from ray import cloudpickle
from ray.cluster_utils import Cluster

from helpers import cluster as session
from helpers import storage
from helpers.encode import encoder
from helpers.production.extras import results
from helpers.train import run_folder, start
from helpers.train.loop import train_loop_per_worker
from helpers.train.metrics import read_metrics
from helpers.train.step import TrainStep

ROOT = pathlib.Path(__file__).parents[1]
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def once(flag, action):
    """Do `action` if this is the first process that comes here."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    action()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    """Answer nobody, and be alive."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_stream():
    """Kill the process in which Ray Data runs the pipeline that feeds the trainers of this machine."""
    for process in psutil.Process().parent().children():
        if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::SplitCoordinator"):
            process.kill()


def wait_for_ever():
    threading.Event().wait()


def wait_until(reached, seconds=300):
    """Raises TimeoutError after so many seconds, for which nothing here waits even on a busy machine."""
    given_up = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > given_up:
            raise TimeoutError(f"{reached} did not become true within {seconds} s")
        threading.Event().wait(0.2)  # what is asked reads files, and there is no core to spare


def checkpoint_is_there(config, step):
    """Whether the newest checkpoint that is due after so many steps is complete."""
    return run_folder.last_step(config) >= step // config.checkpoint_every * config.checkpoint_every


def is_evaluated(config, step):
    """Whether the evaluation of a step's checkpoint is over, or the step was skipped."""
    return any(result["step"] == step and "unfinished" not in result for result in results.read_results(config.run_uri))


def is_listed(config, step):
    """Whether Ray Train's list has the checkpoint of a step.

    Its controller, which outlives a killed driver for some seconds, then has nothing left to write.
    """
    listed = storage.join(config.run_uri, start.SNAPSHOT)
    return storage.exists(listed) and f"checkpoint-{step:09d}" in storage.read_text(listed)


def loop_with(*events):
    """The worker loop, in which things happen once each: (action, steps that are done, rank, file that is its flag).

    Not before the last checkpoint that is due is complete: the time that its upload takes is not what is tested.
    """

    def loop(config, **options):
        train_one = TrainStep.step

        def act_and_train(self, step, units):
            for action, at_step, rank, flag in events:
                if (step, ray.train.get_context().get_world_rank()) == (at_step, rank) and not os.path.exists(flag):
                    wait_until(lambda at_step=at_step: checkpoint_is_there(config, at_step))
                    once(flag, action)
            return train_one(self, step, units)

        TrainStep.step = act_and_train
        train_loop_per_worker(config, **options)

    return loop


def loop_with_cut_off_upload(flag, step, attempt, inner=train_loop_per_worker):
    """`inner`, whose rank 0 dies while it uploads an attempt's checkpoint of a step: large files are half there."""
    cut_short = run_folder.checkpoint_name(step, attempt)

    def half_a_checkpoint(folder, uri):
        target = pathlib.Path(uri)
        target.mkdir(exist_ok=True)
        for path in pathlib.Path(folder).iterdir():
            content = path.read_bytes()
            (target / path.name).write_bytes(content if len(content) < 500_000 else content[: len(content) // 2])

    def loop(config, **options):
        copy_folder = storage.copy_folder
        rank = ray.train.get_context().get_world_rank()

        def copy_or_die(folder, uri):
            def cut_off():
                half_a_checkpoint(folder, uri)
                die()

            if storage.name(uri) == cut_short and rank == 0:
                wait_until(lambda: checkpoint_is_there(config, step - 1))
                once(flag, cut_off)
            copy_folder(folder, uri)

        storage.copy_folder = copy_or_die
        inner(config, **options)

    return loop


def loop_with_refused_uploads(attempt, steps):
    """The worker loop, in which rank 1 cannot upload its part of the checkpoints of some steps, in one attempt."""
    refused = [run_folder.checkpoint_name(step, attempt) for step in steps]

    def loop(config, **options):
        copy_folder, rank = storage.copy_folder, ray.train.get_context().get_world_rank()

        def copy_or_refuse(folder, uri):
            if rank == 1 and storage.name(uri) in refused:
                raise OSError("AWS Error SLOW_DOWN during PutObject operation: reduce your request rate")
            copy_folder(folder, uri)

        storage.copy_folder = copy_or_refuse
        train_loop_per_worker(config, **options)

    return loop


def loop_with_nan(at_step, rank=1):
    """The worker loop, in which one rank's losses of a step are not a number, in every attempt."""

    def loop(config, **options):
        row_losses, here = TrainStep.row_losses, ray.train.get_context().get_world_rank()

        def spoilt(self, unit, step):
            return row_losses(self, unit, step) * (float("nan") if (step, here) == (at_step, rank) else 1)

        TrainStep.row_losses = spoilt
        train_loop_per_worker(config, **options)

    return loop


def loop_with_sick_device(where, inner=train_loop_per_worker):
    """`inner`, in which the device of one rank, or of a node by its id, multiplies wrongly."""

    def loop(config, **options):
        if where in (ray.train.get_context().get_world_rank(), this_node()):
            multiply = torch.bmm
            torch.bmm = lambda one, other: -multiply(one, other)
        inner(config, **options)

    return loop


@contextlib.contextmanager
def simulated_cluster(num_cpus):
    """A Ray cluster on this machine whose head has so many CPUs, to add nodes to; this process is connected to it.

    A Ray that this process is connected to is stopped first.
    """
    ray.shutdown()
    # Nodes are added from threads too, in which Python cannot register handlers for the exit.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus}, shutdown_at_exit=False)
    # Ray Train would ask this cluster for its state long after it is gone.
    address_file = pathlib.Path(cluster.head_node.get_temp_dir_path(), "ray_current_cluster")
    try:
        session.connect(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        address_file.unlink(missing_ok=True)


def add_node(cluster, num_cpus=1, **options):
    """Add a node, and wait until Ray knows it."""
    node = cluster.add_node(num_cpus=num_cpus, **options)
    wait_until(lambda: any(found["NodeID"] == node.node_id and found["Alive"] for found in ray.nodes()))
    return node


class MetadataService(http.server.BaseHTTPRequestHandler):
    """A stand-in for EC2's metadata service (IMDSv2); its server's `end`: when the spot instance is interrupted."""

    def do_PUT(self):
        self.answer("a token" if self.path == "/latest/api/token" else "")

    def do_GET(self):
        asked = self.path == "/latest/meta-data/spot/instance-action"
        allowed = self.headers["X-aws-ec2-metadata-token"] == "a token"
        notice = json.dumps({"action": "terminate", "time": self.server.end})
        self.answer(notice if asked and allowed and self.server.end else "")

    def answer(self, text):
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write(text.encode())


def this_node():
    return ray.get_runtime_context().get_node_id()


def placed_encoder(folder):
    """An encoder class that leaves a file with the name of its node when it has encoded something."""

    class PlacedEncoder(encoder.LatentEncoder):
        def __call__(self, rows):
            os.makedirs(folder, exist_ok=True)
            open(os.path.join(folder, this_node()), "w").close()
            return super().__call__(rows)

    return PlacedEncoder


DRIVER = """
    import faulthandler, os, signal, threading, traceback
    faulthandler.dump_traceback_later(600, exit=True)
    from helpers import storage
    from helpers.config import PreprocessingConfig, TrainingConfig
    from helpers import cluster as session
    from tests import preloaded
    from tests.faults import is_listed, loop_with, steps_done, wait_for_ever
    from tests.pipelines import build_pipeline, fit, prepare_job

    def die_when(reached):
        def watch():
            try:
                while not reached():
                    threading.Event().wait(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            except BaseException:  # this thread's alone: the driver would never end
                traceback.print_exc()
                os._exit(1)
        threading.Thread(target=watch, daemon=True).start()

    preloaded.use(preloaded.__file__)
    session.connect("local", num_cpus=6)
"""


def run_driver(text):
    """A driver of its own, with a Ray of its own, that ends by SIGKILL; returns what it printed."""
    script = textwrap.dedent(DRIVER) + textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-u", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    return done.stdout


def truncate_newest(config):
    """Cut the largest file of the newest checkpoint; returns (the checkpoint's name, the file's name)."""
    newest = run_folder.last_complete(config.run_uri)
    largest = max(pathlib.Path(newest).iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, 1000)
    return storage.name(newest), largest.name


def flip_a_byte(folder):
    """Of the largest file of a checkpoint; its size stays."""
    largest = max(pathlib.Path(folder).glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    return largest.name


def damage_and_die(run_uri):
    """The newest checkpoint keeps its size and changes its bytes; then this worker is killed."""
    flip_a_byte(run_folder.last_complete(run_uri))
    die()


def steps_done(config):
    """Steps of the newest attempt that have metrics."""
    metrics = read_metrics(config.run_uri, all_attempts=True)
    return 0 if metrics.empty else int(metrics["step"].iloc[-1])


def attempts_of(config):
    """The first step of each attempt, in order."""
    return read_metrics(config.run_uri, all_attempts=True).groupby("attempt")["step"].min().tolist()


def assert_same_run(config, straight):
    """Bit by bit: the samples and losses of every step, those of steps that were done again too."""
    found = read_metrics(config.run_uri)
    for column in ("step", "loss", "grad_norm", "samples_crc32", "samples_seen"):
        assert found[column].tolist() == straight[column].tolist(), column
    every = read_metrics(config.run_uri, all_attempts=True)
    assert (every.groupby("step")["samples_crc32"].nunique() == 1).all()


slow = pytest.mark.slow
