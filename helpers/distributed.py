"""A worker's process: rank, world size, collectives, cores, compiler. All work without a process group. No Ray."""

from __future__ import annotations

import collections
import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list | None:
    """Every rank's `value`, as a list in the order of ranks, on rank 0; None on other ranks. Call it on all ranks.

    `group`: of `new_cpu_group`, because NCCL would send Python objects through the GPU. Two threads must not share one.

    Raises RuntimeError if a value is of an earlier call. While a group is taken down, gloo may end a call without an
    error and without having received: what is in its buffer then is what the call before left there.
    """
    if world_size() == 1:
        return [value]
    _calls[group] += 1
    numbered = [None] * world_size() if rank() == 0 else None
    dist.gather_object((_calls[group], value), numbered, group=group)
    if numbered is None:
        return None
    if any(number != _calls[group] for number, _ in numbered):
        raise RuntimeError("A value was gathered that is of an earlier call: the workers' group is being taken down.")
    return [theirs for _, theirs in numbered]


_calls: collections.Counter = collections.Counter()  # of `gather_objects`, by group


def new_cpu_group() -> dist.ProcessGroup | None:
    """A new gloo group over all ranks; None without a process group.

    Call it on all ranks.
    """
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, a plain tensor in the same memory: operations on a DTensor start 5 times slower.

    Call it under `torch.no_grad()`.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def use_cores(workers_here: int, online: bool = False) -> None:
    """Divide this machine's cores among its workers, by PyTorch's number of threads.

    Ray sets one thread for each logical CPU. Threads that wait for a core slow the training down. `online`: leave one
    core to the encoders.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores - online) // workers_here))


COMPILED_SHAPES = 64  # the most shapes of inputs that a module is compiled for; others run as without torch.compile


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which Inductor needs on a CPU and, for its wrappers, on a GPU."""
    return any(map(shutil.which, ("g++", "clang++", "c++")))
