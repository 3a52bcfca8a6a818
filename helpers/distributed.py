"""Rank, world size and process groups of a training worker."""

import functools
import os

import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist


def place():
    """`(rank, number of workers, device)` of this worker."""
    context = ray.train.get_context()
    return context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device()


@functools.cache
def objects_group():
    """A process group for Python objects: gloo's, since NCCL would take them by way of the GPU. First called on all workers at once."""
    return dist.new_group(backend="gloo")


def use_cores(workers_here, online=False):
    """Share this machine's cores among its workers: Ray sets one thread a logical CPU.

    Where pictures are encoded on the way, one is left to that: threads that wait for each other lose more than they gain.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores - online) // workers_here))
