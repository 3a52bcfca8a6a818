"""Ray's workers in the tests: forks of a process that has imported PyTorch and diffusers already.

Ray starts each worker as two interpreters one after another, which import for some seven CPU seconds until a trainer
can begin; a training run starts ten. After `start`, Ray runs this file in place of its `setup_worker.py`: it asks the
process in which `serve` runs for a fork, which goes on as the worker, with this one's arguments, environment and files.
Ray itself, which reads its settings when it is imported, is imported by each fork, and so is `helpers`.

A Ray that a test starts in another process (by hand, secrets, Slurm; not notebooks and the drivers of `tests.faults`)
starts its workers as users do.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile

SOCKET = "TESTS_PRELOADED_SOCKET"  # the variable that names it, which Ray's processes inherit
MODULES = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "transformers.models.clip.modeling_clip",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pydantic",
    "jsonschema",
]
# PyTorch counts its threads when it is imported: one, as in a worker to which Ray gives one CPU.
IMPORTED_WITH = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start():
    """Workers of a Ray that this process starts from now on are forks. Returns a function that ends it."""
    folder = tempfile.TemporaryDirectory()
    os.environ[SOCKET] = os.path.join(folder.name, "socket")
    variables, pipe = {**os.environ, **IMPORTED_WITH}, subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__, "serve"], env=variables, stdin=pipe, stdout=pipe)
    assert server.stdout.readline() == b"listening\n"
    use(os.path.abspath(__file__))

    def end():
        use("setup_worker.py")  # Ray's own
        del os.environ[SOCKET]
        server.communicate()
        folder.cleanup()

    return end


def use(setup_worker):
    """Have Ray start workers by a file of another name than Ray's own."""
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = setup_worker


def ask_for_a_fork():
    """What Ray starts as a worker: it ends when its fork ends, and the other way round."""
    request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.nice(0)]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [struct.pack("!Q", len(request))], [0, 1, 2])
        connection.sendall(request)
        status = connection.recv(4)
    code = os.waitstatus_to_exitcode(struct.unpack("!i", status)[0]) if status else 1
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(abs(code))


def receive(connection):
    """`(what is asked for, its open files)`; None if who asks was killed meanwhile."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    size, request = struct.unpack("!Q", head or bytes(8))[0], b""
    while len(request) < size and (part := connection.recv(1 << 16)):
        request += part
    if size and len(request) == size:
        return json.loads(request), files
    for file in files:
        os.close(file)
    return None


def serve():
    """Fork for whoever asks, until standard input ends. Returns what was asked for, in the fork alone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[SOCKET])
    listener.listen(64)
    print("listening", flush=True)  # who asks meanwhile waits
    for name in MODULES:
        importlib.import_module(name)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    asking = {}  # {process of a fork: connection to who asked for it}
    while True:
        for key, _ in selector.select():
            if key not in selector.get_map().values():  # another one of these has just ended it
                continue
            if key.fileobj is sys.stdin:
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                received = receive(connection)
                if received is None:
                    continue
                process = os.fork()
                if not process:
                    become_alone(selector, connection, received[1])
                    return received[0]
                for file in received[1]:
                    os.close(file)
                asking[process] = connection
                selector.register(connection, selectors.EVENT_READ, process)
                selector.register(io.FileIO(os.pidfd_open(process)), selectors.EVENT_READ, process)
            elif key.fileobj is asking.get(key.data):  # who asked was killed
                selector.unregister(key.fileobj)
                asking.pop(key.data).close()
                os.kill(key.data, signal.SIGKILL)
            else:  # the fork has ended
                selector.unregister(key.fileobj)
                key.fileobj.close()
                _, status = os.waitpid(key.data, 0)
                if connection := asking.pop(key.data, None):
                    selector.unregister(connection)
                    with contextlib.suppress(BrokenPipeError):  # who asked was killed
                        connection.send(struct.pack("!i", status))
                    connection.close()


def become_alone(selector, connection, files):
    """In a fork: take the files for the standard ones, and close all others.

    A group of its own: Ray kills the process group of a worker that ends, unless it is that of the raylet.
    """
    os.setpgid(0, 0)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    for other in [connection, *(key.fileobj for key in selector.get_map().values())]:
        if other is not sys.stdin:
            other.close()
    selector.close()


def become_worker(arguments, environment, folder, nice):
    """What Ray's `setup_worker.py` does, and then its `default_worker.py`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    command = [argument for argument in arguments if not argument.startswith(("--serialized-", "--language"))]
    (context,) = (text.partition("=")[2] for text in arguments if text.startswith("--serialized-runtime-env-context="))
    context = json.loads(context)
    assert not context["command_prefix"], context
    os.environ.update(context["env_vars"])
    sys.path[:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # in place of this file's folder
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        become_worker(*serve())
    else:
        ask_for_a_fork()
