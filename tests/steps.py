"""Training steps that tests of several folders take: a denoiser on made-up rows, in this process or in groups."""

import contextlib
import json
import os
import pathlib

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from helpers import distributed
from helpers.config import TrainingConfig
from helpers.distributed import local
from helpers.evaluate import validation_loss
from helpers.latents import schema
from helpers.model.denoisers import build_denoiser, load_denoiser_config
from helpers.train import checkpoint
from helpers.train.step import TrainStep, Unit
from tests.latents import SHAPES
from tests.processes import start_ranks

BATCH, MIDDLE, STEPS, COLUMN = 8, 3, 6, "image_latents_64"
# What is masked differs between the parts of a batch, and so between workers.
KEEP = ~np.isin(np.arange(BATCH * STEPS) % 11, [1, 5, 6])
NAN, INFINITY = 0x7E00, 0x7C00  # as bits of fp16
STRATEGIES = ["ddp", "fsdp", "fsdp-full", "hsdp"]


def with_bits(table, bits, rows, column=COLUMN):
    """The table with the latents of some rows, or another column, replaced by one fp16 bit pattern."""
    values, _ = schema.from_binary(table[column], SHAPES[column])
    values = values.copy()
    values.view(np.uint16)[rows] = bits
    return table.set_column(table.column_names.index(column), column, schema.to_binary(values))


def with_keep(table, keep):
    return table.set_column(table.column_names.index("keep"), "keep", pa.array(keep))


def units(state, rows, step, rank=0, world=1):
    """A worker's units of a global batch, dealt as the worker loop does."""
    size, latents = state.config.unit_rows, state.manifest.latents(state.config.resolution)
    return [
        Unit.from_arrow(rows.slice(step * BATCH + slot * size, size), state.manifest, latents, slot * size)
        for slot in range(rank, state.config.units_per_step, world)
    ]


def train(state, rows, first=0, last=STEPS, rank=0, world=1):
    """What `TrainStep.step` returns of each step."""
    return [state.step(step, units(state, rows, step, rank, world)) for step in range(first, last)]


def column(lines, name="loss"):
    return np.array([line[name] for line in lines])


def held_out(rows):
    """Seven rows that are not masked, which no number of ranks here divides."""
    return rows.filter(rows["keep"])[:7]


# ---- the state of a run


def save(folder, state, step):
    begin_save(folder, state, step)()


def begin_save(folder, state, step):
    stager = checkpoint.open_stager()
    return checkpoint.async_save(folder, state, step=step, stager=stager, group=distributed.new_cpu_group())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def everything(state):
    """Copies of this rank's part of all that a checkpoint holds: weights, moments, counters of steps, averages."""
    moments = [value for one in state.optimizer.state.values() for value in one.values()]
    tensors = [*state.denoiser.parameters(), *moments, *state.ema.state_dict().values()]
    return [local(tensor.detach()).clone() for tensor in tensors]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---- runs by processes of gloo groups


def train_in_groups(folder, runs, build=TrainStep):
    """{name of a run: what each of its ranks found}; `runs`: {name: arguments of `run_strategy` after `folder`}."""
    start_ranks(take_part, (str(folder), runs, build), nprocs=4)
    ranks = [json.loads(pathlib.Path(folder, f"{rank}.json").read_text()) for rank in range(4)]
    return {name: [found[name] for found in ranks if name in found] for name in runs}


def take_part(rank, folder, runs, build):
    """One of four processes, which take part in the runs of so many ranks."""
    torch.set_num_threads(1)
    found = {}
    for name, (config, *rest) in runs.items():
        world = config.worker_counts[0]
        if rank < world:
            with group(folder, f"group of {name}", rank, world):
                found[name] = run_strategy(f"{folder}/{name}", config, *rest, rank=rank, world=world, build=build)
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))


@contextlib.contextmanager
def group(folder, name, rank, world):
    """A gloo group of `world` ranks, two on each node but for the last of an odd number."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == world - 1 and world % 2 else "2"
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_strategy(folder, config, manifest, rows, previous=None, *, rank, world, build):
    """What a rank finds; it leaves the checkpoint of step MIDDLE in `folder`.

    `previous`: another run's checkpoint; `build(config, manifest)`: makes a `TrainStep`.
    """
    state = build(config, manifest)
    begun, drawn = dict(state.denoiser.named_parameters()), build_denoiser(config.unet_config).named_parameters()
    assert all(torch.equal(whole(begun[name]), value) for name, value in drawn)
    lines = train(state, rows, 0, MIDDLE, rank, world)
    writing = begin_save(folder, state, MIDDLE)
    with state.averaged() as denoiser:  # between two steps, whose losses stay
        validated = validation_loss(denoiser, manifest, held_out(rows), config)
    lines += train(state, rows, MIDDLE, STEPS, rank, world)
    writing()
    restored = build(config, manifest)
    step = checkpoint.load(folder, restored)
    resumed = train(restored, rows, step, STEPS, rank, world)
    same_state = same(everything(state), everything(restored))
    # At last only the last rank meets a NaN.
    before = everything(state)
    bad = with_bits(with_keep(rows, [True] * len(rows)), NAN if rank == world - 1 else 0, slice(0, BATCH))
    try:
        state.step(STEPS, units(state, bad, 0, rank, world))
        refused = ""
    except FloatingPointError as error:
        refused = str(error)
    return {
        "lines": lines,
        "validated": validated,
        "resumed": resumed,
        "same_state": same_state,
        "refused": refused,
        "unchanged": same(everything(state), before),
        "continued": previous and two_losses_from(previous, config, manifest, rows, rank, world),
    }


def two_losses_from(folder, config, manifest, rows, rank=0, world=1):
    """Of the two steps after a checkpoint: they show its weights, then its optimizer state."""
    state = TrainStep(config, manifest)
    step = checkpoint.load(folder, state)
    return column(train(state, rows, step, step + 2, rank, world)).tolist()


def one_level_recipe(folder):
    """A function that makes a config: a U-Net of one level, the same parts as "tiny" at a third of the time."""
    path = folder / "unet.json"
    one_level = {
        "block_out_channels": [32],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
        "attention_head_dim": [2],
    }
    path.write_text(json.dumps({**load_denoiser_config("tiny"), **one_level}))
    small = {"global_batch_size": BATCH, "units_per_step": 4, "warmup_steps": 2, "max_steps": 50}
    return lambda **values: TrainingConfig(**{"unet_config": str(path), "learning_rate": 1e-3, **small, **values})
