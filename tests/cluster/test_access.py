"""Who gets into a Ray cluster, with real nodes on this machine: homes, folders and ports of their own."""

import concurrent.futures
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile

import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[2]
LESSON = "from helpers import cluster; cluster.connect('local', num_cpus=1)"
DRIVER = "import os, ray; ray.init(os.environ['ADDRESS']); print('alive:', sum(n['Alive'] for n in ray.nodes()))"
NODE = ("--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats")


@pytest.fixture
def user(tmp_path):
    """The environment of somebody who has not used Ray: an empty home. At the end Ray is ended, its folder deleted."""
    folder = tempfile.mkdtemp(prefix="access-", dir="/tmp")  # paths of sockets may have 107 characters
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ours = {"HOME": str(tmp_path), "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
    address = {"ADDRESS": f"{socket.gethostbyname(socket.gethostname())}:{port}"}
    yield {**kept, **ours, **address}
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == folder:
                process.kill()
        except psutil.Error:  # it has ended, or is another user's
            pass
    shutil.rmtree(folder, ignore_errors=True)


def python(variables, *arguments):
    """`(exit status, output)` of Python in an environment."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=variables, cwd=variables["HOME"], capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout + done.stderr


def ray(variables, *arguments):
    return python(variables, "-m", "ray.scripts.scripts", *arguments)


def start_head(variables, *options):
    status, said = ray(variables, "start", "--head", f"--port={variables['ADDRESS'].split(':')[1]}", *NODE, *options)
    assert status == 0, said


def join(variables):
    return ray(variables, "start", f"--address={variables['ADDRESS']}", *NODE)


@pytest.mark.slow
def test_after_the_lesson_a_cluster_of_this_machine_is_as_if_it_had_not_run(user, tmp_path):
    """The lesson's session has a token of its own; another user, who has none, joins the cluster."""
    status, said = python(user, "-c", LESSON)
    assert status == 0 and list(tmp_path.iterdir()) == [], said
    start_head(user, "--include-dashboard=false")
    other = {**user, "HOME": tempfile.mkdtemp(dir=tmp_path)}
    status, said = join(other)
    assert status == 0, said
    assert "alive: 2" in python(other, "-c", DRIVER)[1]


DEAD = """
import psutil, ray
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for name in ("raylet", "gcs_server"):
    shell.run_cell("from helpers import cluster; cluster.connect('local', num_cpus=1)")
    first = ray.get_runtime_context().get_node_id()
    shell.run_cell("cluster.connect('local', num_cpus=1)")
    assert ray.get_runtime_context().get_node_id() == first
    process = next(child for child in psutil.Process().children() if child.name() == name)
    process.kill()
    process.wait()
    shell.run_cell("import ray; found = ray.get(ray.remote(lambda: 'works').remote())").raise_error()
    print(name, shell.user_ns["found"], ray.get_runtime_context().get_node_id() != first)
"""


@pytest.mark.slow
def test_a_ray_that_has_died_is_started_again(user):
    """Before the next cell, in the same process, as a notebook's kernel is; one that lives is used again."""
    status, said = python(user, "-c", DEAD)
    assert status == 0 and said.count("Ray has died: it is started or joined again.") == 2, said
    assert "raylet works True" in said and "gcs_server works True" in said, said


@pytest.mark.slow
def test_without_the_token_nobody_joins_a_cluster_or_runs_something_on_it(user):
    owner = {**user, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    start_head(owner, "--include-dashboard=false")
    another = {**owner, "RAY_AUTH_TOKEN": secrets.token_hex()}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # each tries for a while
        tried = [pool.submit(join, user), pool.submit(python, user, "-c", DRIVER), pool.submit(join, another)]
    for status, said in (one.result() for one in tried):
        assert status != 0 and "InvalidAuthToken" in said, said
    status, said = join(owner)
    assert status == 0, said
    assert "alive: 2" in python(owner, "-c", DRIVER)[1]


def test_a_path_too_long_for_sockets_leads_to_the_variable(user, tmp_path):
    """As Slurm's TMPDIR may be."""
    status, output = python({**user, "RAY_TMPDIR": str(tmp_path / ("x" * 86))}, "-c", LESSON)
    assert status == 1 and "set RAY_TMPDIR to a short folder" in output
