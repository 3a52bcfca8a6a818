"""One preprocessing job, one training run and one cluster of several nodes, which the tests of this folder share."""

import functools
import os
import shutil

import pytest
from filelock import FileLock

from helpers.config import PreprocessingConfig
from helpers.latents.manifest import read_manifest
from helpers.lesson import captioned_shapes
from tests.faults import is_evaluated, loop_with, simulated_cluster, wait_until
from tests.pipelines import TWO_WORKERS, encode, evaluated, fit, short_run

ROWS = 600


@pytest.fixture(scope="session")
def finished_job(request, tmp_path_factory):
    """A finished job over drawn pictures, some of them spoilt: (config, manifest).

    All processes that run these tests share it: the first one that needs it makes it, and the others wait.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "encoded"
    config = PreprocessingConfig(storage=str(folder), validation_share=0.05)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            request.getfixturevalue("cluster")
            captioned_shapes.write_data_set(config.raw_uri, ROWS, spoilt_share=0.02, rows_per_file=200)
            encode(config)
    return config, read_manifest(config.latents_uri)


@pytest.fixture(scope="session")
def encoded(finished_job, cluster):
    """The finished job, for tests that use the shared cluster."""
    return finished_job


@pytest.fixture(scope="session")
def run(encoded, tmp_path_factory):
    """A finished run, undisturbed and validated: (config, Ray Train's result). Two workers shard it, at two sizes."""
    validation_uri = shutil.copytree(encoded[0].latents_uri, f"{encoded[0].storage}/validation set")
    extras = evaluated(20, validation_uri=validation_uri)
    config = short_run(encoded[0].storage, "first", **TWO_WORKERS, extras=extras)
    flag = tmp_path_factory.mktemp("flags") / "evaluated"
    wait = functools.partial(wait_until, functools.partial(is_evaluated, config, 20))
    return config, fit(config, loop=loop_with((wait, 30, 0, flag)))  # or step 40 would be evaluated in its place


@pytest.fixture(scope="module")
def nodes(finished_job, no_shared_cluster):
    """A head node that reads and decodes, to which tests add nodes."""
    os.environ.pop("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", None)  # set where Ray is started locally
    with simulated_cluster(3) as made:
        yield made
