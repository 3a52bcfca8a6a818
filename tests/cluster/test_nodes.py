"""Several Ray nodes on one machine: nodes that are lost, come back, or are about to be taken away."""

import contextlib
import datetime
import functools
import http.server
import os
import subprocess
import sys
import threading
import time
import types

import psutil
import pyarrow.parquet as pq
import pytest
import ray
import ray.train.collective
import torch
from ray import cloudpickle
from ray.train import ScalingConfig

from helpers import cluster, storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.latents.manifest import read_segments
from helpers.lesson import captioned_shapes
from helpers.online import encode as online
from helpers.online.config import OnlineConfig
from helpers.production import monitor
from helpers.production.checks import cluster as checks
from helpers.production.extras import evaluate
from helpers.train import metrics, run_folder, source
from helpers.train.loop import train_loop_per_worker
from helpers.train.step import TrainStep
from tests.faults import (
    ROOT,
    MetadataService,
    add_node,
    attempts_of,
    loop_with,
    loop_with_sick_device,
    placed_encoder,
    slow,
    steps_done,
    this_node,
    wait_until,
)
from tests.latents import plan_for, receive_steps
from tests.pipelines import assert_bare, encode, fit, online_stream, prepare_run, short_run

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
TRAINER = {"trainer": 1}  # one training worker a node
ENCODER = {"accelerator_type:A10G": 1}
# Ray Train may ask for a node once more before it knows that it is gone, and waits so many seconds for it.
PATIENCE = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20"


@pytest.fixture(autouse=True)
def leave_no_node(nodes):
    """A test that fails leaves no node on which the next one would be placed."""
    yield
    for node in list(nodes.worker_nodes):
        lose(nodes, node)


@pytest.fixture
def data(finished_job):
    return finished_job[0].storage


def run_of(data, name, **changes):
    return short_run(data, name, **{"max_failures": 10, **changes})


def lose(nodes, node):
    nodes.remove_node(node, allow_graceful=False)


def is_alive(node):
    return any(found["NodeID"] == node.node_id and found["Alive"] for found in ray.nodes())


def in_background(action, released):
    """Do `action` in a thread, then create the file `released`; returns a function that gives the action's result."""
    result, error = [], []

    def watch():
        try:
            result.append(action())
        except Exception as problem:  # handed to the test
            error.append(problem)
        finally:
            released.touch()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def wait():
        thread.join(60)
        if error:
            raise error[0]
        return result[0]

    return wait


def held_loop(released, config, **options):
    """The worker loop, whose steps are slow, and whose last one waits, until the file `released` is there.

    Notes the number of workers, and the node of rank 0, of each attempt in `workers/` beside that file.
    """
    train_one = TrainStep.step
    context, folder = ray.train.get_context(), released.parent / "workers"

    def held_step(self, step, units):
        if not released.exists():
            threading.Event().wait(0.3)  # so that the run meets what happens to the nodes
        if step == config.max_steps - 1:
            wait_until(released.exists)
        return train_one(self, step, units)

    if context.get_world_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{time.time_ns()}").write_text(f"{context.get_world_size()} {this_node()}")
    TrainStep.step = held_step
    train_loop_per_worker(config, **options)


def attempts_seen(released):
    """[(number of workers, node of rank 0)] of the attempts so far."""
    texts = [path.read_text().split() for path in sorted((released.parent / "workers").glob("*"))]
    return [(int(text[0]), text[1]) for text in texts if len(text) == 2]


def scaling(**changes):
    """`ScalingConfig` for the notebook's cell: a worker on a trainers' node each."""
    values = {"resources_per_worker": {"CPU": 1, **TRAINER}, **changes}
    return functools.partial(ScalingConfig, **values)


@contextlib.contextmanager
def watched(node, *options):
    """A node's watcher, as the cluster files start it; yields a function that announces the node's interruption.

    `options`: of `ray drain-node`.
    """
    server = http.server.HTTPServer(("127.0.0.1", 0), MetadataService)
    server.end = None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}"
    variables = {**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": uri, "RAY_ADDRESS": node.address}
    variables["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # of `ray`
    command = ["bash", ROOT / "helpers" / "clusters" / "before_spot_ends.sh", "--node-id", node.node_id, *options]
    watcher = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE)

    def announce(seconds):
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        server.end = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert watcher.wait(60) == 0

    try:
        yield announce
    finally:
        server.shutdown()
        watcher.kill()


def test_ray_uses_a_node_no_more_whose_interruption_is_announced(nodes, tmp_path):
    """What runs there may end; nothing else is placed there, and then Ray on that node ends."""
    node, on_spot = add_node(nodes, resources={"spot": 1}), {"num_cpus": 0, "resources": {"spot": 0.5}}

    def hold():
        (tmp_path / "started").touch()
        wait_until((tmp_path / "done").exists)

    running = ray.remote(**on_spot)(hold).remote()
    wait_until((tmp_path / "started").exists)
    with watched(node) as announce:
        announce(seconds=120)
    late = ray.remote(**on_spot)(this_node).remote()
    assert not ray.wait([late, running], timeout=2)[0] and is_alive(node)
    other = add_node(nodes, resources={"spot": 1})
    assert ray.get(late, timeout=60) == other.node_id
    (tmp_path / "done").touch()
    wait_until(lambda: not is_alive(node))
    (reason,) = (found["DeathReasonMessage"] for found in ray.nodes() if found["NodeID"] == node.node_id)
    assert reason == "AWS ends this spot instance"
    lose(nodes, node)
    lose(nodes, other)


@slow
def test_an_elastic_run_follows_the_nodes(nodes, data, tmp_path, monkeypatch):
    """Two workers; a node is announced to go, and goes; another one comes: the same run all the time.

    No checkpoint is due by itself: the one that it goes on from is that of the announcement.
    """
    monkeypatch.setenv(*PATIENCE)
    first, second = (add_node(nodes, resources=TRAINER) for _ in range(2))
    config = run_of(data, "elastic", num_training_workers=(1, 2), max_steps=60, checkpoint_every=100)
    released = tmp_path / "released"

    def workers():
        return [count for count, _ in attempts_seen(released)]

    def change_nodes():
        wait_until(lambda: workers()[-1:] == [2] and steps_done(config) >= 5)
        with watched(second) as announce:
            announce(seconds=60)
        wait_until(lambda: run_folder.last_step(config) > 0)
        saved = run_folder.last_step(config)
        lose(nodes, second)
        wait_until(lambda: workers()[-1] == 1)
        add_node(nodes, resources=TRAINER)
        wait_until(lambda: workers()[-1] == 2)
        return saved

    changed = in_background(change_nodes, released)
    fit(
        config,
        loop=functools.partial(held_loop, released),
        ScalingConfig=scaling(elastic_resize_monitor_interval_s=2),
    )
    saved = changed()
    lose(nodes, first)
    assert 5 <= saved < 60 and all(first > saved for first in attempts_of(config)[1:])  # not from the start
    assert_bare(config)  # every step has the samples of the plan, and the loss of a bare loop


def loop_with_slow_upload(folder, config, **options):
    """The worker loop, of which rank 0 of two uploads nothing before the file `gone` is in `folder`.

    From its first upload on, rank 0 waits in a step for ever, as NCCL does for a lost rank. Other files in `folder` say
    who has begun and ended an upload, and where rank 0 is. The next attempt trains as usual.
    """
    rank, copy_folder, train_one = ray.train.get_context().get_world_rank(), storage.copy_folder, TrainStep.step

    def note(name, text=""):
        (folder / f"{name}.part").write_text(text)
        (folder / f"{name}.part").rename(folder / name)

    def copy_late(source, target):
        note(f"begun {rank}")
        if rank == 0:
            wait_until((folder / "gone").exists)
        copy_folder(source, target)
        note(f"ended {rank}")

    def step_or_wait(self, step, units):
        if rank == 0 and (folder / "begun 0").exists():
            threading.Event().wait()
        threading.Event().wait(0.3)  # so that the notice comes before the last step
        return train_one(self, step, units)

    if not (folder / "gone").exists():
        if rank == 0:
            note("rank 0", this_node())
        storage.copy_folder, TrainStep.step = copy_late, step_or_wait
    train_loop_per_worker(config, **options)


@slow
def test_an_upload_that_outlasts_a_preempted_node_is_finished(nodes, data, tmp_path, monkeypatch):
    """By default Ray Train would end the other worker at the deadline, and the run would start over."""
    monkeypatch.setenv(*PATIENCE)
    made = [add_node(nodes, resources=TRAINER) for _ in range(2)]
    extras = {"preemption": {"grace_seconds": 60}, "evaluate": None}
    config = run_of(data, "grace", num_training_workers=(1, 2), max_steps=40, checkpoint_every=100, extras=extras)

    def preempt():
        wait_until(lambda: steps_done(config) >= 3)
        (node,) = (node for node in made if node.node_id != (tmp_path / "rank 0").read_text())
        with watched(node, "--deadline-remaining-seconds", "12") as announce:
            announce(seconds=12)
        deadline = time.time() + 12
        wait_until(lambda: (tmp_path / "begun 0").exists() and (tmp_path / "ended 1").exists())
        wait_until(lambda: time.time() > deadline + 2)  # only then Ray takes the loss for the one that was announced
        lose(nodes, node)
        wait_until(lambda: not is_alive(node))
        begun = (tmp_path / "ended 0").exists()
        (tmp_path / "gone").touch()
        return begun

    preempted = in_background(preempt, tmp_path / "released")
    fit(config, loop=functools.partial(loop_with_slow_upload, tmp_path), ScalingConfig=scaling())
    assert preempted() is False and (tmp_path / "ended 0").exists()
    first, second = attempts_of(config)
    assert first == 1 and second > 3  # the only checkpoint before it is that of the notice
    assert_bare(config)


@slow
def test_a_run_goes_on_without_a_sick_machine(nodes, data, tmp_path, monkeypatch):
    """Ray uses the machine no more; the failure names it, and the run is that of a bare loop."""
    monkeypatch.setenv(*PATIENCE)
    well, sick = (add_node(nodes, resources=TRAINER) for _ in range(2))
    config = run_of(data, "sick-machine", num_training_workers=(1, 2), max_steps=20)
    # Ray Train may begin on the other one alone, and must not have ended before it takes the sick one too.
    failed = functools.partial(run_folder.read_failures, config.run_uri)
    loop = loop_with((functools.partial(wait_until, failed), 10, 0, tmp_path / "failed"))
    with monitor.monitor_run(config):
        fit(
            config,
            loop=loop_with_sick_device(sick.node_id, loop),
            ScalingConfig=scaling(elastic_resize_monitor_interval_s=2),
        )
    (failure,) = run_folder.read_failures(config.run_uri)
    assert "multiplies matrices wrongly: this machine is excluded, and the run goes on without it" in failure
    assert is_alive(well) and not is_alive(sick)
    assert_bare(config)
    lose(nodes, sick)
    lose(nodes, well)


@slow
def test_encoders_of_a_job_move_when_their_node_is_lost(nodes, tmp_path):
    config = PreprocessingConfig(
        storage=str(tmp_path), resolutions=[32], encoder_accelerator_type="A10G", num_encoders=(1, 2)
    )
    captioned_shapes.write_data_set(config.raw_uri, 3000, rows_per_file=1000)
    node, other = add_node(nodes, resources=ENCODER), []

    def lose_node(done, total):
        if done and not other:
            other.append(add_node(nodes, resources=ENCODER))
            lose(nodes, node)

    manifest = encode(config, lose_node)
    lose(nodes, other[0])
    assert manifest.written == 3000 and 1 <= read_segments(config.latents_uri)[0]["encoders"] <= 2
    written, raw = pq.read_table(f"{config.latents_uri}/data"), pq.read_table(config.raw_uri)
    assert sorted(written["id"].to_pylist()) == sorted(map(str, raw["hash"].to_pylist()))


@slow
def test_online_each_stage_stays_on_its_kind_of_node(nodes, tmp_path):
    """Encoders on A10Gs, a trainer on an A100; a node of either kind is lost, and another of its kind comes."""
    raw = OnlineConfig(storage=str(tmp_path), resolutions=[32], encoder_batch_size=16)
    captioned_shapes.write_data_set(raw.raw_uri, 300, spoilt_share=0.05)
    config = run_of(
        raw.storage, "placed", latents_uri=storage.join(raw.storage, "online"), max_steps=24, checkpoint_every=6
    )
    _, raw = prepare_run(raw, config)
    # The encoders' nodes have a GPU by name alone, of which each encoder asks for half.
    having = {"A10G": {"num_gpus": 1}, "A100": {}}

    def add(kind):
        return add_node(nodes, resources={f"accelerator_type:{kind}": 1}, **having[kind])

    kinds, released, encoded_on = {kind: [add(kind)] for kind in having}, tmp_path / "released", tmp_path / "A10G"

    def replace(kind):
        kinds[kind].append(add(kind))
        lose(nodes, kinds[kind][0])

    def replace_both():
        wait_until(lambda: steps_done(config) >= 3)
        replace("A10G")
        wait_until(
            lambda: run_folder.last_step(config) >= 6 and steps_done(config) >= 20
        )  # two past the last checkpoint
        replace("A100")
        wait_until(lambda: len(attempts_seen(released)) > 1)

    replaced = in_background(replace_both, released)
    stream = online_stream(
        raw,
        encoder_accelerator_type="A10G",
        gpus_per_encoder=0.5,
        num_encoders=2,
        latent_encoder=placed_encoder(str(encoded_on)),
    )
    fit(
        config,
        loop=functools.partial(held_loop, released),
        stream=stream,
        training_accelerator_type="A100",
        ScalingConfig=scaling(resources_per_worker={"CPU": 1}),
    )
    replaced()
    assert {path.name for path in encoded_on.iterdir()} == {node.node_id for node in kinds["A10G"]}
    assert {node for _, node in attempts_seen(released)} == {node.node_id for node in kinds["A100"]}
    for made in kinds.values():
        lose(nodes, made[1])
    found = metrics.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == planned_samples(config, raw)
    # Steps that both trainers did, on other nodes, have the same losses bit by bit.
    every = metrics.read_metrics(config.run_uri, all_attempts=True)
    redone = every.groupby("step")["loss"].agg(["size", "nunique"])
    assert (redone["size"] > 1).any() and (redone["nunique"] == 1).all()


def planned_samples(config, raw):
    """`samples_crc32` of each step, from the plan and the raw files alone."""
    plan = plan_for(config)
    steps = receive_steps(plan, functools.partial(online.read_raw, config=raw), 0, config.max_steps)
    return [metrics.samples_crc32(sum((rows["id"].to_pylist() for rows in units.values()), [])) for units in steps]


def test_a_storage_that_other_nodes_do_not_see_is_refused(nodes, tmp_path, monkeypatch):
    node = add_node(nodes)
    checks.check_shared(str(tmp_path))
    # A path that each process reads in its own way stands in for a disk of its own.
    monkeypatch.chdir(tmp_path)
    os.mkdir("mine")
    with pytest.raises(ValueError, match=r"storage='/proc/self/cwd/mine' is not shared: the node .* does not see"):
        checks.check_shared("/proc/self/cwd/mine")
    lose(nodes, node)


def test_what_samples_on_a_gpu_leaves_its_memory(nodes):
    """In a process of its own on a GPU (here by name alone), which ends with it; without `use_gpu` in this process."""
    node = add_node(nodes, num_gpus=1)

    def sample(number):
        return os.getpid(), ray.get_gpu_ids(), number

    pid, gpus, number = cluster.run_on_device(sample, 3, use_gpu=True)  # on any kind
    assert pid != os.getpid() and len(gpus) == 1 and number == 3
    wait_until(lambda: not psutil.pid_exists(pid))
    assert cluster.run_on_device(sample, 3, use_gpu=False)[0] == os.getpid()
    lose(nodes, node)


def test_sampling_and_validation_land_on_the_trainers_kind_of_gpu(nodes, tmp_path, monkeypatch):
    """Of two kinds on three nodes; a free GPU of the other kind is none to spare."""
    small = dict(num_cpus=2, object_store_memory=80_000_000)
    kinds = {"A100": 2, "A10G": 4}
    added = {
        add_node(nodes, num_gpus=count, resources={f"accelerator_type:{kind}": 1}, **small): kind
        for kind, count in kinds.items()
    }
    kind_of = {node.node_id: kind for node, kind in added.items()}
    config = TrainingConfig(storage=str(tmp_path), use_gpu=True, training_accelerator_type="A100", checkpoint_every=10)

    def where(*_):
        return {"node": this_node(), "gpus": len(ray.get_gpu_ids())}

    found = [cluster.run_on_device(where, 3, use_gpu=True, accelerator_type="A100") for _ in range(3)]
    assert {(kind_of[one["node"]], one["gpus"]) for one in found} == {("A100", 1)}
    saved = ray.train.Checkpoint(storage.join(config.run_uri, "checkpoint-000000010-001"))
    monkeypatch.setattr(evaluate, "evaluate_here", where)
    found = evaluate.validate(saved, evaluate.Evaluate(every=10), config)
    assert (kind_of[found["node"]], found["gpus"]) == ("A100", 1)

    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda value: value)
    monkeypatch.setattr(ray.train, "get_context", lambda: types.SimpleNamespace(get_world_rank=lambda: 0))
    spare = functools.partial(evaluate.has_spare_gpu, torch.device("cuda"))
    wait_until(lambda: spare("A100"))
    trainers = ray.remote(num_gpus=2, num_cpus=1, accelerator_type="A100")(source.StepSource).remote(config)
    wait_until(lambda: not spare("A100"))  # the A10Gs are free
    assert spare("A10G") and spare(None) and not spare("H100")
    ray.kill(trainers)
    for node in added:
        lose(nodes, node)
