"""How busy the cluster's machines are while a job or run goes on: for its display and its trackers.

A node whose agent serves Ray's metrics is asked for them over HTTP; that takes `ray[default]` there. Where no node
does, this process's machine is measured by psutil, and its GPUs by NVML if the package nvidia-ml-py is installed. No
task and no actor is started, so Ray's autoscaler still ends idle nodes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import re
import threading

import psutil
import ray
import ray.util

SECONDS = 10.0  # between two readings
TIMEOUT = 2.0  # seconds for a node's answer
METRIC = re.compile(r"^ray_node_(\w+)\{.*\} (\S+)$", re.MULTILINE)  # Ray's documented "System Metrics"

Use = dict[str, float]  # percentages: "CPU", "memory"; with GPUs, of all together, "GPU" and "GPU_memory"


def use_here() -> Use:
    """The use of this process's machine, over one second."""
    use = {"CPU": psutil.cpu_percent(interval=1), "memory": psutil.virtual_memory().percent}
    with contextlib.suppress(ImportError):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):  # no driver, or a GPU that is divided
            pynvml.nvmlInit()
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            memory = [pynvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in gpus]
            percentages = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in gpus]
            use |= use_of_gpus(percentages, sum(one.used for one in memory), sum(one.total for one in memory))
    return use


def use_of_gpus(percentages: list[float], used: float, total: float) -> Use:
    """The use of a machine's GPUs, by the time and the memory in use; {} without a GPU, or before all is known."""
    if not percentages or not total:
        return {}
    return {"GPU": sum(percentages) / len(percentages), "GPU_memory": 100 * used / total}


def use_of_node(node: dict) -> Use:
    """The use that a node's agent reports (`node`: of `ray.nodes()`); {} if it gives no answer, or no metrics yet."""
    connection = http.client.HTTPConnection(node["NodeManagerAddress"], node["MetricsExportPort"], timeout=TIMEOUT)
    found = collections.defaultdict(list)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/metrics")
        for name, value in METRIC.findall(connection.getresponse().read().decode(errors="replace")):
            found[name].append(float(value))
    if not (found["cpu_utilization"] and found["mem_used"] and found["mem_total"]):
        return {}
    use = {"CPU": found["cpu_utilization"][0], "memory": 100 * found["mem_used"][0] / found["mem_total"][0]}
    used = sum(found["gram_used"])
    return use | use_of_gpus(found["gpus_utilization"], used, used + sum(found["gram_available"]))


def read_machines() -> dict[str, Use]:
    """The use of each machine, by its address. Machines that give no answer are left out."""
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    served = {node["NodeManagerAddress"]: node for node in nodes if node["MetricsExportPort"] > 0}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        uses = dict(zip(served, pool.map(use_of_node, served.values()), strict=True))
    if not served:
        uses[ray.util.get_node_ip_address()] = use_here()
    return {address: use for address, use in sorted(uses.items()) if use}


def describe(*uses: Use) -> str:
    """Such as "CPU 87 %, memory 47 %"; of several machines, the lowest and the highest."""
    parts = []
    for name in dict.fromkeys(name for use in uses for name in use):
        low, high = (f"{end(use[name] for use in uses if name in use):.0f}" for end in (min, max))
        parts.append(f"{name.replace('_', ' ')} {low if low == high else f'{low} to {high}'} %")
    return ", ".join(parts)


def as_values(uses: dict[str, Use]) -> dict[str, float]:
    """For a tracker: "machines/{address}/CPU" and so on."""
    return {f"machines/{address}/{name}": value for address, use in uses.items() for name, value in use.items()}


class Watch:
    """The newest `read_machines()`: made again in a thread, every `SECONDS` at most. `watch(now)` never waits."""

    def __init__(self):
        self.uses: dict[str, Use] = {}
        self.thread, self.due = None, float("-inf")

    def __call__(self, now: float) -> dict[str, Use]:
        """A new dict for each reading; {} before the first, and while Ray gives no answer. `now`: seconds."""
        if now >= self.due and not (self.thread and self.thread.is_alive()):
            self.due = now + SECONDS
            self.thread = threading.Thread(target=self.read, daemon=True)
            self.thread.start()
        return self.uses

    def read(self) -> None:
        try:
            self.uses = read_machines()
        except (ConnectionError, RuntimeError, ray.exceptions.RayError):  # Ray is ending, or has died
            self.uses = {}
