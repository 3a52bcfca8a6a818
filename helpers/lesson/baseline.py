"""The baseline: a PyTorch `DataLoader` with the encoders on the training device. No Ray Data.

The plan, the transform, the encoder and the training step are those of the two Ray Data pipelines, so the run is the
same, step by step. The work is divided differently: loader processes decode the images, and the trainer encodes them
before each step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import ray.train.torch
import torch

from .. import distributed
from ..config import TrainingConfig
from ..encode import encoder, prepare
from ..latents import schema
from ..latents.manifest import DataSets, Manifest
from ..latents.plan import Plan, load_plan
from ..latents.read import KEEP, ChunkReader, ReadRows, split_units
from ..online import encode as online
from ..online.config import OnlineConfig
from ..production import monitor
from ..train import run_folder, source
from ..train.step import TrainStep, Unit


@dataclasses.dataclass
class PlannedImages(torch.utils.data.Dataset):
    """One item for each step of the run: the decoded images and captions of a worker's units.

    Each loader process reads all chunks of the plan, and decodes only the rows of its own steps.

    Args:
        plan: `plan.Plan` over raw rows.
        num_steps: number of steps of the run.
        rank, world_size: rank of the worker, and number of workers.
        read: `(row ranges, source)` -> raw rows, as `online.read_raw`.
        transform: raw rows -> pixels and token ids, as `online.transform_for_epoch`.
    """

    plan: Plan
    num_steps: int
    rank: int
    world_size: int
    read: ReadRows
    transform: Callable[[pa.Table], pa.Table]

    def __post_init__(self):
        self.chunks = {}  # chunk number -> {unit number: its rows}

    def __len__(self):
        return self.num_steps

    def read_chunk(self, chunk: int) -> dict[int, pa.Table]:
        """{unit number: its raw rows} of a chunk."""
        blocks = ChunkReader(self.plan, chunk, self.read).blocks(0, self.num_steps)
        return split_units(pa.concat_tables(blocks).combine_chunks(), self.plan.unit_rows)

    def __getitem__(self, step: int):
        """`(pixels (B, H, W, 3) uint8, token ids (B, L), keep (B,), positions (B,), latents_spec, account)` of a step.

        B rows. `latents_spec`: the column that the pixels become. `account`: Arrow table of id, reason, source.
        """
        plan = self.plan
        # A step's units lie in one chunk, or in two neighbours.
        self.chunks = {n: self.chunks.get(n) or self.read_chunk(n) for n in plan.chunk_range(step, step + 1)}
        units = {unit: rows for chunk in self.chunks.values() for unit, rows in chunk.items()}
        slots = range(self.rank, plan.units_per_step, self.world_size)  # this worker's units within the step
        rows = self.transform(
            pa.concat_tables(units[step * plan.units_per_step + slot] for slot in slots).combine_chunks()
        )
        spec = plan.latents_at(step)
        width, height = spec.size
        found, fits = schema.decode_present_rows(rows[schema.input_column(spec.name)], (height, width, 3))
        pixels = np.zeros((len(rows), height, width, 3), np.uint8)
        pixels[fits] = found
        ids, _ = schema.from_binary(rows[schema.CAPTION_IDS], (-1,), np.int32)
        keep = rows[KEEP].to_numpy() & fits & (rows[schema.REASON].to_numpy() == "")
        positions = np.concatenate([slot * plan.unit_rows + np.arange(plan.unit_rows) for slot in slots])
        tensors = (torch.from_numpy(np.array(values)) for values in (pixels, ids, keep, positions))
        return *tensors, spec, rows.select([schema.ID, schema.REASON, schema.SOURCE])


def build_loader(
    plan: Plan, config: TrainingConfig, raw: OnlineConfig, first_step: int, rank: int = 0, world_size: int = 1
) -> torch.utils.data.DataLoader:
    """A `DataLoader` of a worker's steps from `first_step` on."""
    read = functools.partial(online.read_raw, config=raw)
    transform = functools.partial(
        online.transform_for_epoch, config=raw, units_per_epoch=plan.units_per_epoch, seed=config.seed
    )
    data = PlannedImages(plan, config.max_steps, rank, world_size, read, transform)
    return torch.utils.data.DataLoader(
        data,
        batch_size=None,
        sampler=range(first_step, config.max_steps),
        num_workers=raw.num_transform_workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4,
        collate_fn=tuple,  # an item is a whole step
        multiprocessing_context="forkserver",
    )


class DeviceEncoder:
    """Encodes a loader's items on the trainer's device, where the result stays."""

    def __init__(self, raw: OnlineConfig, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        threads = torch.get_num_threads()
        models = {"model": raw.model_of("vae"), "text_encoder_model": raw.model_of("text_encoder")}
        self.encoder = encoder.LatentEncoder(**models, precision=raw.encoder_precision, num_threads=threads)
        self.is_ragged = raw.maximum_tokens is not None
        self.num_moments = prepare.MOMENTS[raw.latents]
        self.batch_size = raw.encoder_batch_size

    def __call__(self, item) -> Unit:
        pixels, ids, keep, positions, latents_spec, account = item
        pixels, ids = (values.to(self.device, non_blocking=True) for values in (pixels, ids))
        moments = torch.cat([self.encoder.moments(part) for part in pixels.split(self.batch_size)])
        moments = moments[:, : self.num_moments]
        text = torch.cat([self.encoder.embeddings(part) for part in ids.split(self.batch_size)])
        mask = ids >= 0 if self.is_ragged else None
        row_ids = account[schema.ID].to_pylist()
        return Unit(moments, text, keep, positions.numpy(), row_ids, latents_spec, mask_UL=mask)


class LoaderSource(source.StepSource):
    """Steps whose rows come from a `DataLoader` and are encoded by the worker itself, without Ray Data."""

    def __init__(self, config: TrainingConfig, raw: OnlineConfig):
        super().__init__(config)
        self.raw = raw

    @property
    def datasets(self) -> None:
        return None

    def start(self) -> Manifest:
        return self.data.first

    def resume_point(self) -> dict:
        return run_folder.choose_resume_point(self.config.run_uri)

    def steps(self, step: int) -> Iterator[tuple[list[Unit], float]]:
        plan = load_plan(self.data, self.config)
        loader = iter(build_loader(plan, self.config, self.raw, step, distributed.rank(), distributed.world_size()))
        encode = DeviceEncoder(self.raw, ray.train.torch.get_device())
        for _ in range(step, self.end_step):
            started = time.perf_counter()
            item = next(loader)
            data_seconds = time.perf_counter() - started
            self.note_rejects(item[-1])
            yield [encode(item)], data_seconds


@dataclasses.dataclass
class Profile:
    """Time by phase, and memory over time, of some steps.

    Args:
        phases: frame with columns step, phase, start, seconds.
        memory: frame with columns second, gib: CUDA's allocated memory, or on a CPU the process's resident set.
        device: "cuda" or "cpu".
    """

    phases: pd.DataFrame
    memory: pd.DataFrame
    device: str


def profile(
    config: TrainingConfig, manifest: Manifest, raw: OnlineConfig, *, num_steps: int = 3, warm_up: int = 3
) -> Profile:
    """The `Profile` of some training steps, with encoders and U-Net on one device, in this process.

    `warm_up` steps before them do not count. Phases: data (waiting for the loader), encode, forward, backward,
    optimizer (with clipping and EMA).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = load_plan(DataSets.open(config.proportions), config)
    short = dataclasses.replace(config, max_steps=warm_up + num_steps)
    loader = iter(build_loader(plan, short, raw, 0))
    watch = Stopwatch(device)
    encode, train_step = DeviceEncoder(raw, device), TrainStep(short, manifest, device, watch)
    memory = []
    with monitor.poll_in_background(lambda: memory.append((time.perf_counter(), watch.memory())), every=0.002):
        for step in range(short.max_steps):
            watch.step = step
            with watch("data"):
                item = next(loader)
            with watch("encode"):
                unit = encode(item)
            train_step.step(step, [unit])
    phases = pd.DataFrame(watch.spans, columns=["step", "phase", "start", "seconds"])
    phases = phases[phases["step"] >= warm_up].reset_index(drop=True)
    begin, end = phases["start"].iloc[0], phases["start"].iloc[-1] + phases["seconds"].iloc[-1]
    memory = pd.DataFrame(
        [(at - begin, size / 2**30) for at, size in memory if begin <= at <= end], columns=["second", "gib"]
    )
    return Profile(phases.assign(start=phases["start"] - begin), memory, device.type)


class Stopwatch:
    """Records when each phase of a step begins and how long it takes; for `TrainStep`."""

    def __init__(self, device: torch.device):
        self.device, self.step, self.spans = device, 0, []

    @contextlib.contextmanager
    def __call__(self, phase: str):
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # kernels run asynchronously
        self.spans.append((self.step, phase, started, time.perf_counter() - started))

    def memory(self) -> int:
        """Bytes in use: allocated on the GPU, or on a CPU the process's resident set."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else psutil.Process().memory_info().rss
