"""Several Ray nodes on one machine: nodes that are lost, come back, or are about to be taken away."""

import functools
import os
import pathlib
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray import cloudpickle
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from helpers import encoder, ingest, online, storage, train
from helpers.config import OnlineConfig, PreprocessingConfig
from helpers.lesson import captioned_shapes
from helpers.runtime import metrics_log, session
from tests.pipelines import bare, draw_and_encode, encode, fit, online_stream, short_run

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
TRAINER = {"trainer": 1}  # one training worker a node
ENCODER = {"accelerator_type:A10G": 1}


@pytest.fixture(scope="module")
def cluster():
    """A head node that reads and decodes; trainers and encoders on nodes of their own."""
    # Nodes come while a run goes on, from threads, in which Python cannot register handlers for the exit.
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3}, shutdown_at_exit=False)
    session.connect(made.address)
    yield made
    ray.shutdown()
    made.shutdown()
    # Ray Train would ask this cluster for its state long after it is gone.
    pathlib.Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def data(cluster, tmp_path_factory):
    return draw_and_encode(tmp_path_factory.mktemp("storage"), 500)


def run_of(data, name, **changes):
    return short_run(data, name, **{"max_steps": 60, "max_failures": 3, **changes})


def when(reached, action):
    """Do `action` in a thread as soon as `reached()`; returns a function that gives the action's result."""
    result, error = [], []

    def watch():
        try:
            while not reached():
                threading.Event().wait(0.05)
            result.append(action())
        except Exception as problem:  # handed to the test
            error.append(problem)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def wait():
        thread.join(60)
        if error:
            raise error[0]
        return result[0]

    return wait


def steps_done(config):
    metrics = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    return 0 if metrics.empty else metrics["step"].iloc[-1]


def slow_loop(values):
    """The worker loop, held up in each step, so that Ray has the time to see nodes come and go while it trains."""
    step = train.TrainStep.step

    def slow_step(self, *arguments):
        threading.Event().wait(0.5)
        return step(self, *arguments)

    train.TrainStep.step = slow_step
    train.train_loop_per_worker(values)


def assert_same_run(config):
    """Every step has the samples of the plan, and the loss of a bare loop to 1e-5, whatever happened in between."""
    found = metrics_log.read_metrics(config.run_uri)
    losses, samples = zip(*bare(config, config.max_steps), strict=True)
    assert found["step"].tolist() == list(range(1, config.max_steps + 1))
    assert found["samples_crc32"].tolist() == list(samples)
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-5)


def num_trainers():
    return sum(node["Resources"].get("trainer", 0) for node in ray.nodes() if node["Alive"])


def test_an_elastic_run_shrinks_when_a_node_is_lost_grows_when_one_comes_and_stays_the_same_run(cluster, data):
    first, second = (cluster.add_node(num_cpus=1, resources=TRAINER) for _ in range(2))
    config = run_of(data, "elastic", num_training_workers=(1, 2), max_steps=90)
    lost = when(lambda: steps_done(config) >= 13, lambda: cluster.remove_node(second, allow_graceful=False))

    def attempt():
        metrics = metrics_log.read_metrics(config.run_uri, all_attempts=True)
        return (0, 0) if metrics.empty else (metrics["attempt"].iloc[-1], metrics["step"].iloc[-1])

    back = when(
        lambda: attempt()[0] == 2 and attempt()[1] >= 13, lambda: cluster.add_node(num_cpus=1, resources=TRAINER)
    )
    scaling = {"resources_per_worker": {"CPU": 1, **TRAINER}, "elastic_resize_monitor_interval_s": 2}
    fit(config, loop=counting_loop(config), scaling=scaling)
    lost(), cluster.remove_node(first, allow_graceful=False), cluster.remove_node(back(), allow_graceful=False)
    workers = [int(path.read_text()) for path in sorted(pathlib.Path(config.run_uri, "workers").iterdir())]
    assert workers == [2, 1, 2]
    assert_same_run(config)


def counting_loop(config):
    """`slow_loop` that notes how many workers each attempt has; once there are two again, nothing holds it up."""
    folder = pathlib.Path(config.run_uri, "workers")

    def loop(values):
        context = ray.train.get_context()
        if context.get_world_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{time.time_ns()}").write_text(str(context.get_world_size()))
        grown = context.get_world_size() == 2 and train.last_step(config) > 0
        (train.train_loop_per_worker if grown else slow_loop)(values)

    return loop


def drain(node, seconds):
    """Tell Ray that a node will be taken away, as a cloud's notice does."""
    accepted, why_not = GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(
        node.node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "spot reclaim",
        int((time.time() + seconds) * 1000),
    )
    assert accepted, why_not
    return steps_done


def test_a_node_that_will_be_taken_away_gets_a_checkpoint_saved_in_time(cluster, data):
    config = run_of(data, "preempted", max_steps=50, checkpoint_every=100)  # none is due by itself
    node = cluster.add_node(num_cpus=1, resources=TRAINER)
    noticed = when(lambda: steps_done(config) >= 5, lambda: drain(node, 60))
    saved = when(
        lambda: train.last_step(config) > 0,
        lambda: (
            train.last_step(config),
            cluster.add_node(num_cpus=1, resources=TRAINER),
            cluster.remove_node(node, False),
        ),
    )
    fit(config, loop=slow_loop, scaling={"resources_per_worker": {"CPU": 1, **TRAINER}})
    noticed()
    step, other, _ = saved()
    cluster.remove_node(other, allow_graceful=False)
    assert 5 <= step < 50
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    assert every[every["attempt"] == 2]["step"].min() == step + 1
    assert_same_run(config)


def test_a_node_under_encoders_is_lost_and_every_row_is_there_once(cluster, tmp_path):
    config = PreprocessingConfig(storage=str(tmp_path), resolutions=[32])
    captioned_shapes.write_parquet(config.raw_uri, 6000, rows_per_file=2000)
    node = cluster.add_node(num_cpus=1, resources=ENCODER)
    changed = []

    def lose(done, total):
        if not changed:  # the first time that files have been written
            changed.append(cluster.add_node(num_cpus=1, resources=ENCODER))
            cluster.remove_node(node, allow_graceful=False)

    manifest = encode(config, lose, on="A10G")
    cluster.remove_node(changed[0], allow_graceful=False)
    assert manifest.total("written") == 6000
    files = storage.list_files(storage.join(config.latents_uri, "data"), ".parquet")
    written = pa.concat_tables([pq.read_table(path, columns=["id"]) for path in files])["id"].to_pylist()
    raw = [
        i
        for path in storage.list_files(config.raw_uri)
        for i in pq.read_table(path, columns=["hash"])["hash"].to_pylist()
    ]
    assert sorted(written) == sorted(raw)


def test_online_encoders_and_trainers_stay_on_their_kind_of_node_and_either_kind_may_be_lost(cluster, tmp_path):
    raw = OnlineConfig(storage=str(tmp_path), resolutions=[32], encoder_batch_size=16)
    captioned_shapes.write_parquet(raw.raw_uri, 300, spoilt_share=0.05)
    config = run_of(raw.storage, "placed", latents_uri=storage.join(raw.storage, "online"), max_steps=40)
    online.prepare(raw, config)
    # The encoders' nodes have a GPU by name alone, of which each encoder asks for half.
    having = {"A10G": {"num_gpus": 1}, "A100": {}}

    def add(kind):
        return cluster.add_node(num_cpus=1, resources={f"accelerator_type:{kind}": 1}, **having[kind])

    nodes = {kind: [add(kind)] for kind in having}

    def replace(kind):
        nodes[kind].append(add(kind))
        cluster.remove_node(nodes[kind][0], allow_graceful=False)

    encoder_lost = when(lambda: steps_done(config) >= 6, lambda: replace("A10G"))
    trainer_lost = when(lambda: steps_done(config) >= 24, lambda: replace("A100"))
    where = {kind: tmp_path / kind for kind in nodes}
    stream = functools.partial(
        online_stream,
        config=raw,
        on="A10G",
        gpus=0.5,
        num_encoders=2,
        latent_encoder=functools.partial(placed, str(where["A10G"])),
    )
    scaling = {"resources_per_worker": {"CPU": 1}, "accelerator_type": "A100"}
    fit(config, loop=functools.partial(noting_loop, str(where["A100"])), scaling=scaling, stream=stream)
    encoder_lost(), trainer_lost()
    for kind in nodes:
        assert {path.name for path in where[kind].iterdir()} == {node.node_id for node in nodes[kind]}, kind
        cluster.remove_node(nodes[kind][1], allow_graceful=False)
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == planned_samples(config, raw)
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    assert every["attempt"].max() == 2
    # Steps that both trainers did, on other nodes, have the same losses bit by bit.
    redone = every.groupby("step")["loss"].agg(["size", "nunique"])
    assert (redone["size"] == 2).any() and (redone["nunique"] == 1).all()


def note_node(folder):
    """Leave a file with the name of the node that this runs on."""
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, ray.get_runtime_context().get_node_id()), "w").close()


class PlacedEncoder(encoder.LatentEncoder):
    """Notes where it is when it has encoded something."""

    def __init__(self, *arguments, folder, **options):
        super().__init__(*arguments, **options)
        self.folder = folder

    def __call__(self, rows):
        note_node(self.folder)
        return super().__call__(rows)


def placed(folder):
    """The encoder class for `online_stream`, and its keyword arguments."""
    return PlacedEncoder, {"folder": folder}


def noting_loop(folder, values):
    note_node(folder)
    slow_loop(values)


def planned_samples(config, raw):
    """`samples_crc32` of each step, from the plan and the raw files alone."""
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    chunks = plan.chunk_range(0, config.max_steps)
    read = functools.partial(online.read_raw, config=raw, validation_share=config.validation_share)
    tables = ingest.read_chunks(
        {"id": range(len(chunks))}, plan=plan, first_chunk=0, first_step=0, num_steps=config.max_steps, read=read
    )
    units = {number: rows for table in tables for number, rows in ingest.split_units(table, config.unit_rows).items()}
    per_step = config.units_per_step
    return [
        metrics_log.samples_crc32(
            [i for slot in range(per_step) for i in units[step * per_step + slot][raw.id_column].to_pylist()]
        )
        for step in range(config.max_steps)
    ]


def test_a_cluster_without_a_gpu_for_validation_is_told_what_to_add(monkeypatch, capsys):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    data = "storage"
    two = run_of(data, "two", num_training_workers=2, validate_every=10)
    session.warn_if_validation_waits(two, use_gpu=True)
    said = capsys.readouterr().out
    assert (
        "want 3 GPUs, one of them for validation, and the cluster has 2:" in said
        and "Add GPUs, or set validate_every=0." in said
    )
    session.warn_if_validation_waits(
        run_of(data, "elastic", num_training_workers=(1, 2), validate_every=10), use_gpu=True
    )
    assert capsys.readouterr().out == said
    session.warn_if_validation_waits(run_of(data, "one", validate_every=10), use_gpu=True)
    session.warn_if_validation_waits(run_of(data, "never", num_training_workers=2), use_gpu=True)
    session.warn_if_validation_waits(two, use_gpu=False)
    assert capsys.readouterr().out == ""
    session.warn_if_validation_waits(run_of(data, "online", validate_every=10), use_gpu=True, encoder_gpus=0.5)
    assert "want 2.5 GPUs" in capsys.readouterr().out


def test_a_storage_that_the_other_nodes_do_not_see_is_refused(cluster, tmp_path, monkeypatch):
    node = cluster.add_node(num_cpus=1)
    session.check_shared(str(tmp_path))
    # A path that each process reads in its own way stands in for a disk of its own.
    monkeypatch.chdir(tmp_path)
    os.mkdir("mine")
    with pytest.raises(ValueError, match=r"storage='/proc/self/cwd/mine' is not shared: the node .* does not see"):
        session.check_shared("/proc/self/cwd/mine")
    cluster.remove_node(node, allow_graceful=False)
