"""The network between trainers: bus bandwidth by message size, whether EFA is on, and its share of a step."""

from __future__ import annotations

import glob
import itertools
import os
import pathlib
import socket
import statistics
import time
from collections.abc import Iterable

import pandas as pd
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from .. import distributed, storage
from . import estimates

# Bytes that each link of a ring carries, in units of message size x (n - 1) / n: nccl-tests, doc/PERFORMANCE.md.
COLLECTIVES = {"all-reduce": 2, "all-gather": 1}
GPU_SIZES = tuple(2**power for power in range(20, 31, 2))  # bytes: 1 MiB to 1 GiB
CPU_SIZES = tuple(2**power for power in range(14, 25, 2))
ROUNDS = 5  # repetitions of a measurement, after one that does not count
# Folders of AWS's installers for NCCL's plugin, and the system's; LD_LIBRARY_PATH is searched first.
LIBRARIES = ("/opt/amazon/ofi-nccl/lib*", "/opt/amazon/aws-ofi-nccl/lib*", "/opt/aws-ofi-nccl/lib*")
LIBRARIES += ("/usr/lib/*-linux-gnu", "/usr/lib*", "/usr/local/lib*")
# Stable Diffusion 2: size of the U-Net, and an A100's seconds of compute for 128 images at 256 pixels (published).
PARAMETERS, STEP_SECONDS = 865_910_724, 0.69


def time_collective(collective: str, num_bytes: int, device: torch.device | str) -> tuple[int, float]:
    """`(bytes, seconds)` of one call, the median of `ROUNDS`; call it on every rank, of at least two.

    Bytes are as in nccl-tests: a rank's tensor of an all-reduce, the gathered tensor of an all-gather; they may differ
    slightly from `num_bytes`, so that the ranks' parts are equal.
    """
    device, ranks = torch.device(device), dist.get_world_size()
    count = max(1, num_bytes // 4 // ranks) * ranks
    tensor = torch.ones(count, device=device)
    part = tensor[: count // ranks].clone()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    seconds = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        if collective == "all-reduce":
            dist.all_reduce(tensor)
        else:
            gather(tensor, part)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 4 * count, slowest.item()


def bus_bandwidth(collective: str, num_bytes: int, seconds: float, ranks: int) -> float:
    """GB/s over each link of a ring, as nccl-tests defines it: for equal links, the same for any number of ranks."""
    return 1e-9 * COLLECTIVES[collective] * (ranks - 1) / ranks * num_bytes / seconds


def measure_bandwidth(device: torch.device | str, sizes: Iterable[int] | None = None) -> list[dict]:
    """Time the `COLLECTIVES` over message `sizes` (bytes; None: `GPU_SIZES` or `CPU_SIZES`); call it on every rank.

    Returns rows with collective, bytes, "bus bandwidth, GB/s". Raises ValueError for a single worker.
    """
    ranks = distributed.world_size()
    if ranks < 2:
        raise ValueError("num_training_workers=1 has no network to measure: give at least 2.")
    sizes = sizes or (GPU_SIZES if torch.device(device).type == "cuda" else CPU_SIZES)
    rows = []
    for collective, size in itertools.product(COLLECTIVES, sizes):
        num_bytes, seconds = time_collective(collective, size, device)
        rate = bus_bandwidth(collective, num_bytes, seconds, ranks)
        rows.append({"collective": collective, "bytes": num_bytes, "bus bandwidth, GB/s": rate})
    return rows


def measure_per_worker(run_uri: str) -> None:
    """Training function of Ray Train: rank 0 writes `network.json` to `run_uri`.

    The file holds `ranks`, `ranks_per_node`, `device`, `rows` (`measure_bandwidth`) and `nodes` (`describe_node` of
    each node).
    """
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    distributed.use_cores(context.get_local_world_size())
    rows = measure_bandwidth(device)
    here = describe_node() if context.get_local_rank() == 0 else None  # after NCCL has loaded what it uses
    nodes = distributed.gather_objects(here, distributed.new_cpu_group())
    if context.get_world_rank() == 0:
        found = {
            "ranks": context.get_world_size(),
            "ranks_per_node": context.get_local_world_size(),
            "device": device.type,
            "rows": rows,
            "nodes": [node for node in nodes if node],
        }
        storage.write_json(storage.join(run_uri, "network.json"), found)


# ---- which network is used


def describe_node() -> dict:
    """The EFA setup of this process's node, as JSON.

    `devices`: number of EFA interfaces with the kernel's driver. `plugins`: files of NCCL's network plugin. `loaded`:
    files of the plugin and libfabric that this process has loaded.
    """
    drivers = glob.glob("/sys/class/infiniband/*/device/driver")
    maps = pathlib.Path("/proc/self/maps")
    mapped = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    folders = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), *LIBRARIES]
    return {
        "node": socket.gethostname(),
        "devices": sum(os.path.basename(os.path.realpath(path)) == "efa" for path in drivers),
        "plugins": sorted({path for folder in folders for path in glob.glob(f"{folder}/libnccl-net*.so*")}),
        "loaded": sorted(path for path in mapped if os.path.basename(path).startswith(("libnccl-net", "libfabric"))),
    }


def explain(node: dict, device: str = "cuda") -> str:
    """Whether NCCL on a node (`describe_node`) has what EFA needs, and what to change if it has not."""
    files = [os.path.basename(path) for path in node["loaded"]]
    if device != "cuda":
        said = "workers on CPUs use gloo over TCP; EFA is for NCCL on GPUs"
    elif not node["devices"]:
        said = (
            "EFA is off: the machine has no EFA interface. Start one that has some (p4d, p4de, p5), with EFA network "
        )
        said += "network interfaces and a security group that lets all traffic to and from itself through"
    elif not node["plugins"] and not files:
        said = "EFA is off: NCCL's plugin aws-ofi-nccl is not found. Install it, and put its folder on LD_LIBRARY_PATH "
        said += "where `ray start` runs"
    elif all(any(file.startswith(library) for file in files) for library in ("libnccl-net", "libfabric")):
        said = f"NCCL has what EFA needs: {node['devices']} interface(s), and this worker has loaded {', '.join(files)}"
    else:
        said = "EFA could be on, but this worker has not loaded libfabric: one node alone needs no network, else set "
        said += "NCCL_DEBUG=INFO and look for NET/OFI"
    return f"{node['node']}: {said}."


def step_shares(found: dict) -> pd.DataFrame:
    """The share of a Stable Diffusion 2 step that each strategy spends on the network: a row each, by arithmetic.

    `found`: what `measure_per_worker` wrote; the bandwidth is that of the largest all-reduce. Columns: seconds of
    communication, its share of a step if nothing overlaps, and if the backward pass hides it. On one node, the measured
    bandwidth is that within it; on several, that across nodes, and within a node an A100's NVLink is assumed.
    """
    reduced = [row for row in found["rows"] if row["collective"] == "all-reduce"]
    rate = max(reduced, key=lambda row: row["bytes"])["bus bandwidth, GB/s"]
    ranks, options, rows = found["ranks"], {"ranks_per_node": found["ranks_per_node"]}, {}
    if ranks <= found["ranks_per_node"]:
        options["within_node"] = rate
    for strategy in estimates.RING_BYTES:
        table = estimates.predict_scaling(PARAMETERS, STEP_SECONDS, rate, [ranks], strategy=strategy, **options)
        _, seconds, exposed, hidden = table.iloc[0]
        rows[strategy] = (seconds, 1 - exposed, 1 - hidden)
    names = ["communication, s", "share of a step, nothing hidden", "share, hidden behind backward"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=names).rename_axis("strategy")
