"""Processes that tests start: each is forked from one that has imported what they need, once for all of them."""

import multiprocessing
import os
import tempfile

import torch

FORKSERVER = "forkserver"
multiprocessing.get_context(FORKSERVER).set_forkserver_preload(["pytest", "helpers.train.loop"])


def start_ranks(function, arguments, nprocs):
    """Run `function(rank, *arguments)` in so many processes; raises what one of them raises."""
    torch.multiprocessing.start_processes(function, arguments, nprocs, start_method=FORKSERVER)


def run_into(path, script):
    """Run a script whose output goes to a file."""
    file = os.open(path, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    exec(script, {})


def run_script(script):
    """`(exit code, standard output and standard error)` of a script; the code is -9 if it was killed."""
    with tempfile.NamedTemporaryFile("r") as file:
        process = multiprocessing.get_context(FORKSERVER).Process(target=run_into, args=(file.name, script))
        process.start()
        process.join(120)
        return process.exitcode, file.read()


# Takes the lease of a folder, notes its PRETRAIN_JOB_ID in `starts` there, and is killed, until it has been started so
# often; then it ends with a status. It claims to run on another host, where nobody can see whether it is alive.
DYING_DRIVER = """
import os, signal, sys
from helpers import storage
from helpers.production import lease
folder, times, status = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = lease.Lease(folder, "run_name='a'")
storage.write_json(held.uri, {**held.content, "place": "another host"})
with open(folder + "/starts", "a+") as file:
    file.write(os.environ["PRETRAIN_JOB_ID"] + "\\n")
    file.seek(0)
    if len(file.readlines()) == times:
        sys.exit(status)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
