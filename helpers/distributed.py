"""Rank, world size and exchange between the processes of a training job; everything works in a single process too. No Ray."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.cache
def _gloo_group():
    """NCCL would send Python objects through the GPU."""
    return dist.new_group(backend="gloo")


def gather_objects(value: Any) -> list | None:
    """Every rank's value, in the order of ranks, on rank 0; None elsewhere. Call it on all ranks."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values, group=_gloo_group())
    return values


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def max_over_ranks(number: float, device: torch.device | str) -> float:
    """The largest of the ranks' numbers."""
    if world_size() == 1:
        return number
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def use_cores(workers_here: int, online: bool = False) -> None:
    """Share this machine's cores among its workers: by default, Ray gives a worker one thread for each CPU it reserves.

    With `online`, one core is left to the encoders on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores - online) // workers_here))
