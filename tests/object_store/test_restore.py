"""Workers that start from a checkpoint in an object store."""

import pytest
import ray

from helpers import train
from helpers.runtime import metrics_log, session
from tests.object_store.s3_server import S3Server
from tests.pipelines import draw_and_encode, fit, short_run


@pytest.fixture(scope="module")
def server():
    with S3Server() as server, server.environment():
        session.connect("local", num_cpus=5)
        yield server
        ray.shutdown()


def downloads(server):
    """What was read so far of the files that workers wrote into checkpoints."""
    return [path for method, path in server.requests if method == "GET" and ".distcp" in path]


def test_the_workers_of_a_node_download_a_checkpoint_once_to_resume_and_to_start_from_another_run(server):
    data = draw_and_encode("s3://bucket/sd", 200)
    values = {"num_training_workers": 2, "max_steps": 2, "checkpoint_every": 2, "warmup_steps": 1}
    first = short_run(data, "first", **values)
    fit(first)
    assert downloads(server) == [] and train.last_step(first) == 2
    fit(first)
    written = downloads(server)
    assert len(set(written)) == len(written) == 2  # a file of each worker
    assert len(metrics_log.read_metrics(first.run_uri, all_attempts=True)) == 2  # it was finished
    second = short_run(data, "second", init_from="first", **values)
    fit(second)
    assert sorted(downloads(server)) == sorted(written * 2)
    assert (
        metrics_log.read_metrics(second.run_uri)["loss"].iloc[0]
        != metrics_log.read_metrics(first.run_uri)["loss"].iloc[0]
    )
