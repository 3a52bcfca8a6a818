"""How busy machines are: measured here, told by Ray's agents, and read without anybody waiting for it.

Never on a GPU: NVML is a stand-in with the calls of nvidia-ml-py, and the metrics of GPUs are as Ray 2.60's agent
writes them (`ray.dashboard.modules.reporter`). The metrics of CPU and memory are lines that such an agent served.
"""

import http.server
import importlib.util
import pathlib
import socket
import sys
import threading
import types

import pytest
import ray

from helpers.runtime import machines

TAGS = 'IsHeadNode="false",RayNodeType="worker",SessionName="session_1",Version="2.60.0",ip="127.0.0.1"'
METRICS = f"""
# HELP ray_node_cpu_utilization Total CPU usage on a ray node
# TYPE ray_node_cpu_utilization gauge
ray_node_cpu_utilization{{{TAGS}}} 62.5
ray_node_mem_used{{{TAGS}}} 6.0e+09
ray_node_mem_available{{{TAGS}}} 1.8e+10
ray_node_mem_total{{{TAGS}}} 2.4e+10
ray_node_mem_total_host{{{TAGS}}} 9.9e+10
"""
GPU_METRICS = "".join(
    f'ray_node_gpus_utilization{{{TAGS},GpuIndex="{index}"}} {percent}\n'
    f'ray_node_gram_used{{{TAGS},GpuIndex="{index}"}} {used}\n'
    f'ray_node_gram_available{{{TAGS},GpuIndex="{index}"}} {81920 - used}\n'
    for index, (percent, used) in enumerate([(100, 61440), (90, 40960)])
)


@pytest.fixture
def agent():
    """A function that starts a node's agent which serves a text; it returns the node, as `ray.nodes()` lists it."""
    servers = []

    def start(text):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return {"NodeManagerAddress": "127.0.0.1", "MetricsExportPort": server.server_port, "Alive": True}

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def nvml(error=None):
    """A stand-in for the module that nvidia-ml-py installs, of two GPUs; `error`: there is no driver."""

    class NVMLError(Exception):
        pass

    def init():
        if error:
            raise NVMLError(error)

    used = {0: 60, 1: 40}
    return types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(used=used[gpu] * 2**30, total=80 * 2**30),
        nvmlDeviceGetUtilizationRates=lambda gpu: types.SimpleNamespace(gpu={0: 100, 1: 90}[gpu]),
    )


@pytest.mark.parametrize("module", [None, nvml("Driver Not Loaded")], ids=["no package", "no driver"])
def test_a_machine_without_nvml_tells_cpu_and_memory(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    use = machines.use_here()
    assert use.keys() == {"CPU", "memory"} and 0 <= use["CPU"] <= 100 and 0 < use["memory"] <= 100


def test_with_nvml_its_gpus_are_told_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    use = machines.use_here()
    assert (use["GPU"], use["GPU_memory"]) == (95, 62.5)


def test_a_node_tells_its_use_by_rays_metrics(agent):
    assert machines.use_of_node(agent(METRICS)) == {"CPU": 62.5, "memory": 25.0}
    half_ready = METRICS + GPU_METRICS.partition("\n")[0] + "\n"  # no GPU's memory yet
    assert machines.use_of_node(agent(half_ready)) == {"CPU": 62.5, "memory": 25.0}
    assert machines.use_of_node(agent(METRICS + GPU_METRICS)) == {
        "CPU": 62.5, "memory": 25.0, "GPU": 95.0, "GPU_memory": 62.5,
    }  # fmt: skip


def test_where_no_node_serves_metrics_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"MetricsExportPort": -1, "NodeManagerAddress": "a", "Alive": True}])
    (use,) = machines.read_machines().values()
    assert use.keys() >= {"CPU", "memory"}


def test_rays_agent_has_these_metrics():
    source = (
        pathlib.Path(importlib.util.find_spec("ray").origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    )
    text = source.read_text()
    assert 'namespace="ray"' in text
    for name in ("cpu_utilization", "mem_used", "mem_total", "gpus_utilization", "gram_used", "gram_available"):
        assert f'Gauge(\n        "node_{name}"' in text and name in pathlib.Path(machines.__file__).read_text()


@pytest.mark.parametrize("what", ["gone", "silent", "not ready", "no HTTP"])
def test_a_node_that_does_not_answer_is_left_out_and_the_others_are_told(what, agent, monkeypatch):
    monkeypatch.setattr(machines, "TIMEOUT", 0.2)
    with socket.socket() as waiting:
        waiting.bind(("127.0.0.1", 0))
        if what != "gone":
            waiting.listen()
        lost = {"Alive": True, "NodeManagerAddress": "127.0.0.2", "MetricsExportPort": waiting.getsockname()[1]}
        if what == "not ready":
            lost |= agent("# no metrics yet\n") | {"NodeManagerAddress": "localhost"}
        if what == "no HTTP":
            threading.Thread(target=lambda: waiting.accept()[0].sendall(b"\0\0\n"), daemon=True).start()
            lost["NodeManagerAddress"] = "localhost"
        elsewhere = [{"NodeManagerAddress": "127.0.0.3", "MetricsExportPort": -1, "Alive": True}]
        dead = [{"NodeManagerAddress": "127.0.0.4", "MetricsExportPort": 1, "Alive": False}]
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "nodes", lambda: [lost, agent(METRICS), *elsewhere, *dead])
        assert machines.read_machines() == {"127.0.0.1": {"CPU": 62.5, "memory": 25.0}}


def test_whoever_asks_never_waits_and_one_reading_runs_at_a_time(monkeypatch):
    readings, may_end = [], threading.Semaphore(0)

    def read():
        readings.append(threading.current_thread())
        may_end.acquire()
        if len(readings) == 3:
            raise ConnectionError("Ray has died")
        return {"here": {"CPU": float(len(readings))}}

    monkeypatch.setattr(machines, "read_machines", read)
    watch, every = machines.Watch(), machines.SECONDS
    assert watch(0.0) == watch(9 * every) == {} and len(readings) == 1  # the first goes on
    for now, found in enumerate(({"here": {"CPU": 1.0}}, {"here": {"CPU": 2.0}}, {}), start=1):
        may_end.release()
        watch.thread.join(60)
        assert watch.uses == found
        before = len(readings)
        watch(watch.due - 0.1)
        assert len(readings) == before  # not yet
        watch(20 * now * every)
    may_end.release()
