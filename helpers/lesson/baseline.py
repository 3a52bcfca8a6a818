"""What the documents compare with: a plain PyTorch `DataLoader`, the encoders and the U-Net on the same device. No Ray Data.

The plan, the transform, the encoder and the training step are those of the other two paths, so it is the same run, step by
step. What differs is who does the work and when: loader processes decode, and the trainer encodes before it trains.
"""

import contextlib
import dataclasses
import functools
import time

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import torch

from .. import distributed, encoder, ingest, online, schema
from ..runtime import monitoring
from ..train_step import TrainStep, Unit


class PlannedImages(torch.utils.data.Dataset):
    """One item a step of the run: the pictures and captions of one worker's share of its global batch, decoded.

    Each loader process reads every chunk of the plan for itself, and decodes only the rows of its own steps.

    Args:
        plan: `ingest.Plan` over raw rows.
        num_steps: of the run.
        rank, world: which of how many workers.
        read: `(pieces, source)` -> raw rows, as `online.read_raw`.
        transform: raw rows -> pixels and token ids, as `online.transform`.
        resolution_at: step -> pixels, as `TrainingConfig.resolution_at`.
    """

    def __init__(self, plan, num_steps, rank, world, read, transform, resolution_at):
        self.plan, self.num_steps, self.rank, self.world = plan, num_steps, rank, world
        self.read, self.transform, self.resolution_at = read, transform, resolution_at
        self.held = {}  # chunk number -> {unit number: its rows}

    def __len__(self):
        return self.num_steps

    def read_chunk(self, number):
        """{unit number: its raw rows} of a chunk of the run."""
        tables = ingest.read_chunks(
            {"id": [number]}, plan=self.plan, first_chunk=0, first_step=0, num_steps=self.num_steps, read=self.read
        )
        return {
            unit: rows
            for table in tables
            for unit, rows in ingest.split_units(table.combine_chunks(), self.plan.unit_rows).items()
        }

    def __getitem__(self, step):
        """`(pixels (U, H, W, 3) uint8, token ids (U, L), keep (U,), positions (U,), account)` of the rows of a step.

        `account`: Arrow table of id, reason, source.
        """
        plan = self.plan
        # One chunk, or two where a step begins in one and ends in the next.
        self.held = {n: self.held.get(n) or self.read_chunk(n) for n in plan.chunks(step, step + 1)}
        units = {unit: rows for chunk in self.held.values() for unit, rows in chunk.items()}
        slots = range(self.rank, plan.units_per_step, self.world)
        rows = self.transform(
            pa.concat_tables(units[step * plan.units_per_step + slot] for slot in slots).combine_chunks()
        )
        resolution = self.resolution_at(step)
        pixels, fits = schema.from_binary(rows[schema.pixels_column(resolution)], (resolution, resolution, 3), np.uint8)
        ids, _ = schema.from_binary(rows[schema.CAPTION_IDS], (-1,), np.int32)
        keep = rows[ingest.KEEP].to_numpy() & fits & (rows[schema.REASON].to_numpy() == "")
        positions = np.concatenate([slot * plan.unit_rows + np.arange(plan.unit_rows) for slot in slots])
        tensors = (torch.from_numpy(np.array(values)) for values in (pixels, ids, keep, positions))
        return *tensors, rows.select([schema.ID, schema.REASON, schema.SOURCE])


def build_loader(plan, config, raw, first_step, rank=0, world=1):
    """A `DataLoader` of the steps from `first_step` on. `config`: `TrainingConfig`, `raw`: `OnlineConfig`."""
    read = functools.partial(online.read_raw, config=raw, validation_share=config.validation_share)
    transform = functools.partial(online.transform, config=raw, units_per_epoch=plan.units_per_epoch, seed=config.seed)
    data = PlannedImages(plan, config.max_steps, rank, world, read, transform, config.resolution_at)
    return torch.utils.data.DataLoader(
        data,
        batch_size=None,
        sampler=range(first_step, config.max_steps),
        num_workers=raw.num_transform_workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4,
        collate_fn=as_it_is,
        multiprocessing_context="forkserver",
    )


def as_it_is(item):
    """The item of one step: nothing to collate."""
    return item


class DeviceEncoder:
    """Encodes, on the trainer's device, what a loader gives; the result never leaves the device."""

    def __init__(self, raw, device="cpu"):
        self.device = torch.device(device)
        self.latent_encoder = encoder.LatentEncoder(*encoder.arguments(raw), num_threads=torch.get_num_threads())
        self.num_moments = encoder.MOMENTS[raw.latents]
        self.batch_size = raw.encoder_batch_size

    def __call__(self, item):
        """A loader's item -> `Unit`."""
        pixels, ids, keep, positions, account = item
        pixels, ids = (values.to(self.device, non_blocking=True) for values in (pixels, ids))
        moments = torch.cat([self.latent_encoder.moments(part) for part in pixels.split(self.batch_size)])
        moments = moments[:, : self.num_moments]
        text = torch.cat([self.latent_encoder.embeddings(part) for part in ids.split(self.batch_size)])
        return Unit(moments, text, keep, positions.numpy(), account[schema.ID].to_pylist())


def steps(config, manifest, first_step, rejects, *, raw):
    """As `train.train_steps`, for `train.train_loop_per_worker(..., steps=...)`: from a DataLoader, encoded by the worker."""
    rank, world, device = distributed.place()
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    loader = iter(build_loader(plan, config, raw, first_step, rank, world))
    encode = DeviceEncoder(raw, device)
    for _ in range(first_step, config.max_steps):
        started = time.perf_counter()
        item = next(loader)
        waited = time.perf_counter() - started
        rejects.add(item[-1])
        yield [encode(item)], waited, started


@dataclasses.dataclass
class Profile:
    """Where time and memory go in some steps.

    `phases`: frame with columns step, phase, start, seconds. `memory`: frame with columns second, gib; what the
    process holds on its device (CUDA's allocated memory, or the resident set).
    """

    phases: pd.DataFrame
    memory: pd.DataFrame
    device: str

    @property
    def shares(self):
        """Share of the time of each phase, in the order of a step."""
        seconds = self.phases.groupby("phase", sort=False)["seconds"].sum()
        return seconds / seconds.sum()


def profile(config, manifest, raw, *, num_steps=3, warm_up=3, device=None):
    """Take some steps with encoders and U-Net on one device, in this process; returns their `Profile`.

    Phases: data (waiting for the loader), encode, forward, backward, optimizer (with clipping and EMA).
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = ingest.plan_run({config.latents_uri: manifest}, config)
    few = dataclasses.replace(config, max_steps=warm_up + num_steps)
    loader = iter(build_loader(plan, few, raw, 0))
    watch = Stopwatch(device)
    encode, alone = DeviceEncoder(raw, device), TrainStep(few, manifest, device, phase=watch)
    memory = []
    with monitoring.poll_in_background(lambda: memory.append((time.perf_counter(), watch.memory())), every=0.002):
        for step in range(few.max_steps):
            watch.step = step
            with watch("data"):
                item = next(loader)
            with watch("encode"):
                unit = encode(item)
            alone.step(step, [unit])
    phases = pd.DataFrame(watch.spans, columns=["step", "phase", "start", "seconds"])
    phases = phases[phases["step"] >= warm_up].reset_index(drop=True)
    begin, end = phases["start"].iloc[0], phases["start"].iloc[-1] + phases["seconds"].iloc[-1]
    memory = pd.DataFrame(
        [(at - begin, size / 2**30) for at, size in memory if begin <= at <= end], columns=["second", "gib"]
    )
    return Profile(phases.assign(start=phases["start"] - begin), memory, device.type)


class Stopwatch:
    """Notes when each phase of a step begins and how long it takes; for `Learner(phase=...)`."""

    def __init__(self, device):
        self.device, self.step, self.spans = device, 0, []

    @contextlib.contextmanager
    def __call__(self, phase):
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # kernels run behind Python's back
        self.spans.append((self.step, phase, started, time.perf_counter() - started))

    def memory(self):
        """Bytes in use: allocated on the GPU, or the process's resident set."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else psutil.Process().memory_info().rss
