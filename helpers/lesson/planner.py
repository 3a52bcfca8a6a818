"""How long a training run takes, what it costs and what limits it, before any machine is rented.

A `Scenario` describes the data, the machines and their rates. `compare_paths` estimates each of the `PATHS` by which
its latents can be made, `break_even` says from how many epochs on one is cheaper than another, and `best_interval`
chooses the time between checkpoints.

Every field is an assumption with a unit; the source of a default is given beside it. Rates say where they come from:
"measured", "published", "derived" from published numbers, or "estimated" from FLOPs. All results are averages. Not
counted: storage of the raw data and requests to it, CPU machines for the head node, validation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..config.notebook import PreprocessingConfig, TrainingConfig
from ..encode.captions import caption_ids
from ..encode.encoder import Encoder
from ..train import profiling
from . import ablations, estimates, full_run, published_results
from .estimates import check_count, check_positive, encoder_rate, encoders_needed, online_throughput, training_hours

# How latents are made: by the trainers themselves (a DataLoader); before training; on the way to the trainers in every
# epoch; on the way in the first epoch only, and stored for the others.
PATHS = ("DataLoader", "offline", "online", "once")
_PUBLISHED_GPUS = 32  # A100-80G, behind the published rates: blog, Table 1
_MONTH = 730.0  # hours


@dataclass(frozen=True)
class Rate:
    """images/s of a GPU or CPU worker.

    `origin`: "measured", "published", "derived" or "estimated"; `source`: where it is from.
    """

    images_per_second: float
    origin: str = "measured"
    source: str = "here"

    def __post_init__(self):
        check_positive("images_per_second", self.images_per_second)

    def __str__(self):
        return f"{self.images_per_second:.4g} images/s ({self.origin}: {self.source})"


@dataclass(frozen=True)
class Machine:
    """A machine that can be rented, with `num_gpus` GPUs, each of them a trainer or an encoder; $ per hour of all."""

    name: str
    num_gpus: int
    dollars_per_hour: float

    def __post_init__(self):
        check_count(f"num_gpus of {self.name}", self.num_gpus)
        check_positive(f"dollars_per_hour of {self.name}", self.dollars_per_hour)


# Those with published prices, by name.
MACHINES = {
    row.name: Machine(row.name, int(row.gpus.split()[0]), row.dollars_per_hour)
    for row in published_results.INSTANCES.itertuples(index=False)
}


# ---- rates


def trainer_rate(resolution: int, recipe: str = "sd2") -> Rate:
    """images/s at which one of 32 A100-80G trains a recipe's denoiser on stored latents.

    Stable Diffusion 2's is derived from all 32's, with EFA, FSDP and torch.compile; others (`estimates.RECIPES`) are
    estimated from FLOPs, at the same share of the peak. Raises ValueError for resolutions other than 256 and 512:
    measure these.
    """
    rows = published_results.ABLATION.query("resolution == @resolution and gpus == '32 x A100-80G'")
    if rows.empty:
        raise ValueError(f"resolution={resolution!r} has no published rate (256, 512): give trainer=Rate(images/s).")
    together, source = rows["images_per_second"].iloc[-1], rows["source"].iloc[-1]
    how = f"{together:,} images/s / {_PUBLISHED_GPUS} GPUs; {source}"
    if recipe == "sd2":
        return Rate(together / _PUBLISHED_GPUS, "derived", how)
    times = estimates.step_flops(resolution) / estimates.step_flops(resolution, recipe)
    return Rate(together / _PUBLISHED_GPUS * times, "estimated", f"FLOPs, the utilization of {how}")


@functools.cache
def known_encoder_rate(resolution: int, recipe: str = "sd2", captions: int = 1) -> Rate:
    """images/s at which one A10G encodes with a recipe's VAE and text encoder, pictures and `captions` of each.

    Stable Diffusion 2's at 256 pixels is derived from published numbers; others are estimated from counted FLOPs
    (`estimates.encoder_rate`).
    """
    fact = published_results.FACTS["one A10G, online, at least"]
    if (resolution, recipe, captions) == (256, "sd2", 1):
        return Rate(fact.value, "derived", f"{fact.derived}; {fact.source}")
    rate = encoder_rate([resolution], recipe=recipe, captions=captions)
    return Rate(rate, "estimated", f"FLOPs, the utilization of {fact.derived}; {fact.source}")


def both_rate(trainer: Rate, encoder: Rate) -> Rate:
    """images/s of one GPU that encodes a picture and then trains on it, from its `trainer` and `encoder` rates."""
    rate = 1 / (1 / trainer.images_per_second + 1 / encoder.images_per_second)
    return Rate(rate, "estimated", "the seconds of both added")


@functools.cache
def trainer_encodes(resolution: int, recipe: str = "sd2") -> Rate:
    """images/s at which an A100 encodes between its training steps, as with a DataLoader.

    Stable Diffusion 2's at 256 pixels is derived from published numbers, 0.44 s for a micro-batch of 128; others are
    estimated from FLOPs.
    """
    fact = published_results.FACTS["encoders' time in a step"]
    rate = 128 / fact.value  # micro-batch: blog, Table 1
    if (resolution, recipe) == (256, "sd2"):
        return Rate(rate, "derived", f"128 images / {fact.value} s; {fact.source}")
    rate *= encoder_rate([resolution], recipe=recipe) / encoder_rate([256])
    return Rate(rate, "estimated", f"FLOPs; {fact.source}")


def measure_rates(config: TrainingConfig, raw: PreprocessingConfig, *, steps: int = 8) -> dict[str, Rate]:
    """Measure one encoder and one trainer in this process, on its GPU if it has one, one after the other.

    Random pictures and latents at the largest resolution of `config`: the encoder of `raw` takes batches of
    `encoder_batch_size`, a single trainer one unit per step. Returns {"encoder": its rate, "trainer": its rate} from
    medians. Each has the device to itself, so the rates are those of separate machines.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = dataclasses.replace(
        config, global_batch_size=config.unit_rows, units_per_step=1, num_training_workers=1, strategy="ddp"
    )
    trained = ablations.measure_step(alone, device, steps=steps, warm_up=3)["images/s"]
    models = {"model": raw.model_of("vae"), "text_encoder_model": raw.model_of("text_encoder")}
    encode = Encoder(**models, precision=raw.encoder_precision, num_threads=torch.get_num_threads())
    size, count, random = config.largest_resolution, raw.encoder_batch_size, np.random.default_rng(0)
    pixels_BHWC = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    ids_BL = caption_ids(["a picture"] * count, raw)
    seconds = []
    for _ in range(1 + steps):
        started = time.perf_counter()
        encode({"pixels": pixels_BHWC, "caption_ids": ids_BL})
        seconds.append(time.perf_counter() - started)
    source = profiling.hardware(device)
    return {
        "encoder": Rate(count / statistics.median(seconds[1:]), source=source),
        "trainer": Rate(trained, source=source),
    }


# ---- faults


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often machines are lost, and what a loss costs.

    Args:
        failures_per_day: of one machine, without notice. Default: MosaicML's two in 6.5 days on 16 machines of 8 A100s.
        reclaims_per_day: of one machine on the spot market, with notice; 0 by default, because it differs by zone.
        notice_seconds: between the notice and the loss; AWS: two minutes.
        return_seconds: until another machine has joined (an assumption: ten minutes).
        restart_seconds: from the loss to the first step of the next attempt: detection, start of the workers, loading
            of the checkpoint, first batch (an assumption; measure your own).
        checkpoint_every_seconds: of training between two checkpoints; `full_run`: about half an hour.
        checkpoint_seconds: pause of training for each (an assumption; measured in `metrics.jsonl`).
        upload_seconds: until a checkpoint is complete (an assumption: 14 GB from four machines).
    """

    failures_per_day: float = 2 / (16 * 6.5)
    reclaims_per_day: float = 0.0
    notice_seconds: float = 120.0
    return_seconds: float = 600.0
    restart_seconds: float = 120.0
    checkpoint_every_seconds: float = 1800.0
    checkpoint_seconds: float = 2.0
    upload_seconds: float = 30.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_not_negative(field.name, getattr(self, field.name))
        check_positive("checkpoint_every_seconds", self.checkpoint_every_seconds)

    @property
    def work_lost(self) -> float:
        """Seconds of training that a failure undoes on average: those since the newest complete checkpoint."""
        return (self.checkpoint_every_seconds + self.checkpoint_seconds) / 2 + self.upload_seconds

    def slowdown(self, num_machines: int) -> float:
        """Elapsed over compute time, to first order in the rates (Young 1974).

        The run waits for each lost machine, so `return_seconds` adds to the restart. A notice triggers a checkpoint;
        training between it and the loss of the machine is repeated.
        """
        after_notice = min(self.work_lost, self.notice_seconds)
        failure, reclaim = (
            lost + self.restart_seconds + self.return_seconds for lost in (self.work_lost, after_notice)
        )
        lost = self.failures_per_day * failure + self.reclaims_per_day * reclaim
        saving = self.checkpoint_seconds / self.checkpoint_every_seconds
        return (1 + saving) * (1 + num_machines * lost / 86_400)


def check_not_negative(name: str, value: float) -> float:
    """`value`; raises ValueError naming it unless it is a finite number of at least 0."""
    if value != 0 or isinstance(value, bool):
        try:
            check_positive(name, value)
        except ValueError:
            raise ValueError(f"{name}={value!r} must be a finite number of at least 0.") from None
    return value


def best_interval(checkpoint_seconds: float, seconds_between_failures: float) -> float:
    """Seconds of training between two checkpoints that minimise the time lost.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", eq. 37; its first term is
    Young's: the square root of 2 x `checkpoint_seconds` x `seconds_between_failures` (of all machines together). Raises
    ValueError unless both are above 0.
    """
    between = check_positive("seconds_between_failures", seconds_between_failures)
    half = check_positive("checkpoint_seconds", checkpoint_seconds) / (2 * between)
    if half >= 1:
        return between
    return math.sqrt(2 * checkpoint_seconds * between) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint_seconds


def interval_table(
    faults: Faults,
    num_machines: int,
    dollars_per_hour: float,
    intervals: Iterable[float] = (300, 900, 1800, 3600, 7200),
) -> pd.DataFrame:
    """What failures cost by checkpoint interval, including the best one (`best_interval`): a row for each.

    `dollars_per_hour`: of all machines. Columns: every (minutes), lost for each failure (minutes: repeated work,
    restart and waiting for the machine), slower (share of the time), $ per day that pay for no progress.
    """
    check_positive("dollars_per_hour", dollars_per_hour)
    per_day = check_count("num_machines", num_machines) * faults.failures_per_day
    intervals = {float(seconds): "" for seconds in intervals}
    if per_day and faults.checkpoint_seconds:
        intervals[best_interval(faults.checkpoint_seconds, 86_400 / per_day)] = "best (Daly)"
    rows = []
    for seconds, what in sorted(intervals.items()):
        tried = dataclasses.replace(faults, checkpoint_every_seconds=seconds)
        slower = tried.slowdown(num_machines) - 1
        lost = tried.work_lost + faults.restart_seconds + faults.return_seconds
        rows.append((seconds / 60, lost / 60, slower, 24 * dollars_per_hour * slower / (1 + slower), what))
    names = ["every, min", "lost for each failure, min", "slower", "$ a day for it", ""]
    return pd.DataFrame(rows, columns=names)


# ---- scenarios


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The data, the machines and their rates. Raises ValueError for impossible numbers.

    Args:
        trainer: images/s of one trainer on stored latents, when all of them train.
        encoder: images/s of one encoder.
        dataloader: images/s of one trainer that encodes its own pictures; None: `both_rate` of the other two, as if a
            trainer's GPU encoded at an encoder's rate.
        rows: images of the data set; blog, Table 2.
        epochs: how often each is trained on.
        trainers, encoders: machines of each kind; blog, Table 2.
        trainer_machine, encoder_machine: their kinds.
        latents_bytes: per stored row; at 256 pixels: 2 x 4 x 32 x 32 moments and 77 x 1,024 embeddings in fp16.
        raw_bytes: per raw row; MosaicML: more than 100 TB for 790 million.
        storage_dollars: per GB and month; Amazon S3 Standard, us-west-2, first 50 TB.
        egress_dollars: per GB read by the trainers or encoders; AWS: 0 within a region, 0.02 from another one.
        faults: failures, or None. They lengthen training but not encoding, which only repeats the tasks of a lost
            machine.
    """

    trainer: Rate
    encoder: Rate
    dataloader: Rate | None = None
    rows: float = 1_126_400_000
    epochs: float = 1.0
    trainers: int = 4
    encoders: int = 40
    trainer_machine: Machine = MACHINES["p4de.24xlarge"]
    encoder_machine: Machine = MACHINES["g5.2xlarge"]
    latents_bytes: float = 2 * (2 * 4 * 32 * 32 + 77 * 1024)
    raw_bytes: float = 126_600
    storage_dollars: float = 0.023
    egress_dollars: float = 0.0
    faults: Faults | None = None

    def __post_init__(self):
        for name in ("trainers", "encoders"):
            check_count(name, getattr(self, name))
        for name in ("rows", "latents_bytes", "raw_bytes"):
            check_positive(name, getattr(self, name))
        for name in ("storage_dollars", "egress_dollars"):
            check_not_negative(name, getattr(self, name))
        if check_positive("epochs", self.epochs) < 1:
            raise ValueError(f"epochs={self.epochs!r} is less than one: make rows smaller instead.")

    @property
    def training_rate(self) -> float:
        """images/s of all trainers on stored latents."""
        return self.trainers * self.trainer_machine.num_gpus * self.trainer.images_per_second

    @property
    def encoding_rate(self) -> float:
        """images/s of all encoders."""
        return self.encoders * self.encoder_machine.num_gpus * self.encoder.images_per_second

    @property
    def balanced_encoders(self) -> int:
        """Fewest encoder machines that keep the trainers busy online."""
        return encoders_needed(self.training_rate, self.encoding_rate / self.encoders)


@dataclass(frozen=True)
class Estimate:
    """One path's hours, dollars, and bottleneck ("trainers" or "encoders").

    `hours` from the start to the trained model: `encoding_hours` (offline, before training) plus `training_hours`.
    `dollars`: for machines, storage and egress. `images_per_second`: during training, over all epochs.
    """

    path: str
    hours: float
    encoding_hours: float
    training_hours: float
    dollars: float
    machine_dollars: float
    storage_dollars: float
    egress_dollars: float
    images_per_second: float
    bottleneck: str


def estimate(scenario: Scenario, path: str) -> Estimate:
    """Hours and dollars of a scenario by one of the `PATHS`. Raises ValueError for another path."""
    one = scenario
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown: choose one of {', '.join(map(repr, PATHS))}.")
    samples, trained, encoded = one.rows * one.epochs, one.training_rate, one.encoding_rate
    streamed = online_throughput(one.encoders, encoded / one.encoders, trained)
    encoding = 0.0
    encoders_busy = 0.0  # hours during which encoders are rented
    if path == "DataLoader":
        each = one.dataloader or both_rate(one.trainer, one.encoder)
        trained *= each.images_per_second / one.trainer.images_per_second
        training = training_hours(samples, trained)
    elif path == "offline":
        encoding = encoders_busy = training_hours(one.rows, encoded)
        training = training_hours(samples, trained)
    elif path == "online":
        training = encoders_busy = training_hours(samples, streamed)
    else:
        encoders_busy = training_hours(one.rows, streamed)
        training = encoders_busy + (one.epochs - 1) * training_hours(one.rows, trained)
    stretch = one.faults.slowdown(one.trainers) if one.faults else 1.0
    busy = encoders_busy if path == "offline" else encoders_busy * stretch
    training *= stretch

    rented = one.trainers * one.trainer_machine.dollars_per_hour * training
    rented += one.encoders * one.encoder_machine.dollars_per_hour * busy
    gigabytes = {"raw": one.rows * one.raw_bytes / 1e9, "latents": one.rows * one.latents_bytes / 1e9}
    read = {
        "DataLoader": one.epochs * gigabytes["raw"],
        "offline": gigabytes["raw"] + one.epochs * gigabytes["latents"],
        "online": one.epochs * gigabytes["raw"],
        "once": gigabytes["raw"] + (one.epochs - 1) * gigabytes["latents"],
    }[path]
    # Stored latents grow linearly while they are made.
    kept = {"offline": encoding / 2 + training, "once": training - busy / 2}.get(path, 0.0) / _MONTH
    storage, egress = kept * gigabytes["latents"] * one.storage_dollars, read * one.egress_dollars
    waits = path in ("online", "once") and encoded < trained
    return Estimate(
        path,
        encoding + training,
        encoding,
        training,
        rented + storage + egress,
        rented,
        storage,
        egress,
        samples / training / 3600,
        "encoders" if waits else "trainers",
    )


def compare_paths(scenario: Scenario) -> pd.DataFrame:
    """`estimate` for each of the `PATHS`: one row each, with `dollars_another_epoch`, the cost of one more epoch."""
    rows = []
    for path in PATHS:
        found = estimate(scenario, path)
        more = estimate(dataclasses.replace(scenario, epochs=scenario.epochs + 1), path)
        rows.append({**dataclasses.asdict(found), "dollars_another_epoch": more.dollars - found.dollars})
    return pd.DataFrame(rows).set_index("path")


def break_even(
    scenario: Scenario, path: str = "offline", other: str = "online", other_scenario: Scenario | None = None
) -> float:
    """Number of epochs from which `path` costs less than `other`: 1 if always, infinity if never.

    Dollars are linear in the epochs: each path has a fixed cost and a cost per epoch. `other_scenario`: that of
    `other`; None: the same.
    """
    paths = (path, scenario), (other, other_scenario or scenario)
    one, two = (
        [estimate(dataclasses.replace(plan, epochs=count), each).dollars for each, plan in paths]
        for count in (1.0, 2.0)
    )
    dearer, saved = one[0] - one[1], (two[1] - one[1]) - (two[0] - one[0])
    if dearer <= 0 and saved >= 0:
        return 1.0
    return 1 + dearer / saved if saved > 0 else math.inf


# ---- full runs


def phase(recipe: str, resolution: int, *, captions: int = 1, **changes: Any) -> Scenario:
    """The phase of a recipe (`estimates.RECIPES`) at 256 or 512 pixels, by published, derived and estimated rates.

    Each recipe sees as many images as Stable Diffusion 2 did, on the same trainers. `captions`: how many of a row are
    encoded: online one, beforehand all. `changes`: of `Scenario`'s fields.
    """
    trainer = trainer_rate(resolution, recipe)
    phases = published_results.PHASES.set_index(["who", "resolution"])
    values = {
        "trainer": trainer,
        "encoder": known_encoder_rate(resolution, recipe, captions),
        "dataloader": both_rate(trainer, trainer_encodes(resolution, recipe)),
        "rows": phases["num_samples"]["Anyscale", resolution],
        "latents_bytes": sum(estimates.row_bytes(resolution, recipe)),
    }
    return Scenario(**{**values, **changes})


sd2 = functools.partial(phase, "sd2")


def compare_recipes() -> pd.DataFrame:
    """Stable Diffusion 2's phases beside those of the profiles `full-today-256` and `-512`: a row each, by `phase`.

    Bytes are those of a stored row, and of all; "encoders online" keep the trainers busy. Hours and dollars, with as
    many encoders as the profile has: all captions encoded beforehand and stored, or one a row encoded online.
    """
    rows = {}
    for resolution in full_run.PARAMETERS:
        for recipe, models in estimates.RECIPES.items():
            encoders = full_run.read_profile(f"full-{recipe}-{resolution}")["num_encoders"]
            online = phase(recipe, resolution, encoders=encoders)
            stored = phase(recipe, resolution, encoders=encoders, captions=len(models.stored_tokens))
            latents, captions = estimates.row_bytes(resolution, recipe)
            found = {"stored": estimate(stored, "offline"), "online": estimate(online, "online")}
            rows[resolution, recipe] = {
                "latents, KB": latents / 1e3,
                "captions, KB": captions / 1e3,
                "all rows, TB": online.rows * online.latents_bytes / 1e12,
                "step, GFLOP": estimates.step_flops(resolution, recipe) / 1e9,
                "encoding, GFLOP": estimates.encoder_flops(resolution, recipe=recipe) / 1e9,
                "trainer, images/s": online.trainer.images_per_second,
                "encoder, images/s": online.encoder.images_per_second,
                "encoders online": online.balanced_encoders,
                **{f"hours, {path}": one.hours for path, one in found.items()},
                **{f"$, {path}": one.dollars for path, one in found.items()},
                "storing pays from, epochs": break_even(stored, other_scenario=online),
            }
    return pd.DataFrame(rows).T.rename_axis(["pixels", "recipe"])
