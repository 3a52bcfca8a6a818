"""The Slurm script with a stand-in `srun`, which runs its command on this machine: Ray's nodes really join."""

import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.processes import DYING_DRIVER

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "helpers" / "clusters" / "slurm.sh"
# Notes its options, then runs the command as often as there are tasks: one after the other, as nodes that start on one
# machine at the same time would choose the same ports and names.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    echo "$1" >> "$SRUN_LOG"
    [[ $1 == --ntasks=* ]] && tasks=${1#*=}
    shift
done
trap 'kill $(jobs -p)' TERM
exec 9> "$SRUN_LOG.lock"
for ((task = 0; task < tasks; task++)); do
    flock 9
    said=$(mktemp)
    "$@" --num-cpus=1 --object-store-memory=100000000 9>&- &> "$said" &
    while kill -0 $! && ! grep -q 'Ray runtime started' "$said"; do sleep 0.2; done
    flock --unlock 9
    cat "$said"
done
wait
"""
COMMAND = "import ray; ray.init('auto', log_to_driver=False); print('alive:', sum(n['Alive'] for n in ray.nodes()))"


@pytest.fixture
def slurm(tmp_path):
    """The environment of a heterogeneous job of two nodes and one, on ports and folders of its own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "scontrol").write_text('#!/bin/bash\necho "$@" >> "$SRUN_LOG.scontrol"\n')
    (tmp_path / "srun.log.scontrol").touch()
    for command in folder.iterdir():
        command.chmod(0o755)
    ray_folder = tempfile.mkdtemp(prefix="slurm-", dir="/tmp")  # paths of sockets may have 107 characters
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    yield {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))},
        "PATH": os.pathsep.join([str(folder), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_TMPDIR": ray_folder,
        "RAY_PORT": str(port),
        "RAY_WAIT_SECONDS": "250",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "SRUN_LOG": str(tmp_path / "srun.log"),
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
        "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
        "SLURMD_NODENAME": "node1",
    }
    shutil.rmtree(ray_folder, ignore_errors=True)


def run_job(variables, *command):
    """`(exit status, what it said, what it asked of scontrol)` of the script."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(["bash", SCRIPT, *command], env=variables, cwd=ROOT, start_new_session=True, **streams)
    try:
        said = job.communicate(timeout=300)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)  # the script's own trap ends Ray
            job.wait(60)
    return job.returncode, said, pathlib.Path(variables["SRUN_LOG"] + ".scontrol").read_text().splitlines()


@pytest.mark.slow
def test_the_slurm_script_starts_ray_on_all_nodes(slurm, tmp_path):
    """Both components' nodes have joined when the command runs, and its exit status is the job's.

    Whoever has not the job's token is refused, and only the user reads what Ray spills.
    """
    last = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "3"}  # which is not queued again
    stranger = f"env -u RAY_AUTH_TOKEN -u RAY_AUTH_MODE python -c {shlex.quote(COMMAND)} && exit 1"
    script = f"{stranger}; python -c {shlex.quote(COMMAND)}; exit 3"
    status, said, asked = run_job({**slurm, **last, "TMPDIR": str(tmp_path)}, "bash", "-c", script)
    assert "alive: 3" in said, said[-5000:]
    assert status == 3 and asked == [] and "InvalidAuthToken" in said
    (spill,) = tmp_path.glob("ray-spill-*")
    assert spill.stat().st_mode & 0o777 == 0o700 and (spill / "ray").is_dir()
    options = (tmp_path / "srun.log").read_text().splitlines()
    assert options.count("--nodes=1") == 2 and options.count("--exclude=node1") == 1
    assert {"--het-group=0", "--het-group=1"} <= set(options)


@pytest.mark.slow
def test_a_slurm_job_whose_driver_dies_is_queued_again(slurm, tmp_path):
    """The next driver takes over the lease of the dead one at once; a job that has succeeded is not queued."""
    alone = {**slurm, "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "4711"}
    del alone["SLURM_HET_SIZE"]
    driver = ["python", "-c", DYING_DRIVER, str(tmp_path), "2", "0"]
    status, said, asked = run_job(alone, *driver)
    assert status == 137 and asked == ["requeue 4711"], said[-5000:]
    status, said, asked = run_job({**alone, "SLURM_RESTART_COUNT": "1"}, *driver)
    assert status == 0 and asked == ["requeue 4711"] and "Waiting 60 s" not in said, said[-5000:]
    assert (tmp_path / "starts").read_text().split() == ["slurm-4711"] * 2
