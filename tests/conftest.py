"""What several folders of tests share: one Ray cluster with an object store, and made-up latents."""

import os
import pathlib
import signal
import sys

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
import torch.distributed as dist
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from helpers import cluster as session
from helpers.latents import schema
from helpers.latents.manifest import Manifest, encode_embedding
from helpers.model import sharding
from tests import preloaded
from tests.latents import SHAPES, build_segment
from tests.object_store.s3_server import S3Server

# Everybody tries the same cases. `--hypothesis-profile default` tries others.
settings.register_profile("same cases", derandomize=True, database=None, deadline=None)
settings.load_profile("same cases")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# README's test command does not compile the packages: each module is compiled by the first process that imports it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ray would start a process a CPU before there is work for it.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray Train checks its workers every half second in place of every two: short runs end sooner.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
# Threads of PyTorch that wait for each other leave the cores to other processes, of which there are many.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# Two processes run the tests (pytest-xdist), a file at a time in this order: first those that take long, or start Ray
# for themselves, then those that share a cluster, which each process starts when it first needs one.
OWN_RAY = [
    "notebooks",
    "test_nodes.py",
    "test_secrets.py",
    "test_access.py",
    "test_slurm.py",
]
ORDER = [*OWN_RAY, "cluster", "object_store", "unit"]


def pytest_collection_modifyitems(items):
    def place(item):
        parts = pathlib.Path(item.path).relative_to(pathlib.Path(__file__).parent).parts
        return min(ORDER.index(name) for name in parts if name in ORDER)

    items.sort(key=place)  # stable: within a folder as they were collected


# They use the same long run, which is then made once.
SAME_RUN = ["tests/cluster/test_training.py", "tests/cluster/test_faults.py"]


class ByFile(LoadFileScheduling):
    """Deals the files out; those of `SAME_RUN` to the same process."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return SAME_RUN[0] if file in SAME_RUN else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


@pytest.fixture(scope="session")
def store():
    """An S3 server on this machine, which all processes that are started from now on find by `AWS_*` variables."""
    with pytest.MonkeyPatch.context() as patch, S3Server() as server, server.environment():
        patch.setenv("AWS_MAX_ATTEMPTS", "6")  # a store that stays away is given up sooner
        yield server


@pytest.fixture(scope="session")
def preloaded_workers():
    end = preloaded.start()
    yield
    end()


@pytest.fixture(scope="session")
def cluster(store, preloaded_workers):
    """The Ray cluster that all tests share, but those that stop it to start several nodes or a notebook."""
    session.connect("local", num_cpus=6)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def no_shared_cluster(preloaded_workers):
    """While the tests of a module start Rays of their own, the shared cluster is stopped; afterwards it is there."""
    was_running = ray.is_initialized()
    ray.shutdown()
    yield
    ray.shutdown()
    if was_running:
        session.connect("local", num_cpus=6)


@pytest.fixture(autouse=True)
def really_the_shared_cluster(request):
    """Who forgot to end nodes of their own gets a sentence here, and not a later test that waits for ever."""
    if "cluster" in request.fixturenames and "no_shared_cluster" not in request.fixturenames:
        ours = ray.is_initialized() and session.is_local_ray()
        assert ours, "an earlier test ended the shared cluster, or its own still runs: it needs `no_shared_cluster`"


@pytest.fixture(scope="module")
def one_thread():
    """Small networks on one thread: several wait for each other wherever something else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def group_of_one(tmp_path):
    """This process as the only one of a process group."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def graphs(monkeypatch):
    """What TorchDynamo captures, in place of compiling it for minutes: of each graph, whether sizes are symbolic."""
    monkeypatch.setattr(sharding, "has_compiler", lambda: True)
    captured, compile_module = [], torch.nn.Module.compile

    def record(graph, arguments):
        sizes = [size for argument in arguments for size in getattr(argument, "shape", [argument])]
        captured.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph.forward

    def compile_by_recording(module, **options):
        compile_module(module, backend=record, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_recording)
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield captured
    torch.compiler.reset()


@pytest.fixture(scope="session")
def build_manifest():
    """A function that makes a finished job's manifest; keywords change fields. `segments`: of its `files.json`."""

    def build(row_groups=(64, 64), shapes=None, segments=None, **changes):
        shapes = shapes or SHAPES
        values = {
            "encoder": {"model": "made-up", "revision": "0", "precision": "fp32"},
            "resolutions": [32, 64],
            "columns": [schema.ColumnSpec(column, shape) for column, shape in shapes.items()],
            "scaling_factor": 0.5,
            "id_type": "int64",
            "empty_caption_embedding": encode_embedding(np.linspace(-1, 1, 6 * 128).reshape(6, 128)),
            "job": {"validation_share": 0.0},
        }
        columns = [column for column in shapes if column != schema.EMBEDDINGS]
        return Manifest.of(segments or [build_segment([("0.parquet", row_groups)], columns)], **{**values, **changes})

    return build


@pytest.fixture(scope="session")
def build_latents():
    """A function that makes a table of latents rows: the same for the same number of rows and seed."""

    def build(num_rows, seed=0):
        random = np.random.default_rng(seed)
        columns = {
            schema.ID: pa.array(range(num_rows)),
            schema.CAPTION: pa.array([f"caption {i}" for i in range(num_rows)]),
        }
        for column, shape in SHAPES.items():
            values = random.normal(size=(num_rows, *shape))
            if column != schema.EMBEDDINGS:
                values[:, 1] = 0.05 * np.abs(values[:, 1])  # standard deviations
            columns[column] = schema.to_binary(values)
        return pa.table(columns)

    return build
