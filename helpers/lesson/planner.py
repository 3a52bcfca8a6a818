"""How long a training run takes, what it costs and what limits it, before any machine is rented.

A `Scenario` describes the data, the machines and their rates. `compare_paths` estimates each of the `PATHS` by which
its latents can be made, `break_even` says from how many epochs on one is cheaper than another, and `best_interval`
chooses the time between checkpoints.

Every field is an assumption with a unit; the source of a default is given beside it. Rates say where they come from:
"measured", "published", "derived" from published numbers, or "estimated" from FLOPs. All results are averages. Not
counted: raw data's storage and traffic, CPU machines for the head node, validation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..config import PreprocessingConfig, TrainingConfig
from ..encode.captions import caption_ids
from ..encode.encoder import LatentEncoder
from ..production.extras import meter
from . import ablations, estimates, full_run, published_results
from .estimates import check_numbers, encoders_needed, training_hours

# Latents are made by the trainers themselves (a DataLoader); before training; or on the way to the trainers.
PATHS = ("DataLoader", "offline", "online")
INTERVALS = (300.0, 900.0, 1800.0, 3600.0, 7200.0)  # seconds between checkpoints, the rows of `interval_table`
_MONTH = 730.0  # hours
_A100_TODAY = "p4de.24xlarge, 2026"


@dataclass(frozen=True)
class Rate:
    """images/s of a GPU or CPU worker.

    `origin`: "measured", "published", "derived" or "estimated"; `source`: document, formula or hardware.
    """

    images_per_second: float
    origin: str = "measured"
    source: str = "here"

    def __post_init__(self):
        check_numbers(images_per_second=self.images_per_second)

    def __str__(self):
        return f"{self.images_per_second:.4g} images/s ({self.origin}: {self.source})"


@dataclass(frozen=True)
class Machine:
    """A machine that can be rented, with `num_gpus` GPUs, each of them a trainer or an encoder; $ per hour of all."""

    name: str
    num_gpus: int
    dollars_per_hour: float

    def __post_init__(self):
        check_numbers(num_gpus=self.num_gpus, dollars_per_hour=self.dollars_per_hour)


# Machines with published prices, by name.
MACHINES = {
    row.name: Machine(row.name, int(row.gpus.split()[0]), row.dollars_per_hour)
    for row in published_results.INSTANCES.itertuples(index=False)
}


# ---- rates


def scaled_rate(images_per_second: float, times: float, source: str) -> Rate:
    """A published rate, or the one that follows for images of `times` as many FLOPs, at the same share of the peak."""
    if times == 1:
        return Rate(images_per_second, "derived", source)
    return Rate(images_per_second / times, "estimated", f"FLOPs, the utilization of {source}")


@dataclass(frozen=True)
class Kinds:
    """Kinds of GPUs: of trainers, with their number, such as "64 x H100"; of encoders, such as "L40S"."""

    trainers: str
    encoder: str


DOCUMENTS = Kinds("32 x A100-80G", "A10G")
TODAY = Kinds("64 x H100", "L40S")


@functools.cache
def trainer_rate(resolution: int, recipe: str = "sd2", trainers: str = DOCUMENTS.trainers) -> Rate:
    """images/s at which one of `trainers` trains a recipe's denoiser on stored latents.

    Published, or derived from all GPUs' together, for Stable Diffusion 2 at 512 pixels, on A100s also at 256; else
    estimated from these by FLOPs. Raises ValueError for resolutions other than 256 and 512, and for GPUs without a
    published rate: measure these.
    """
    if resolution not in (256, 512):
        raise ValueError(f"resolution={resolution!r} has no published rate (256, 512): give trainer=Rate(images/s).")
    flops = estimates.step_flops(resolution, recipe)
    if trainers == DOCUMENTS.trainers:
        row = published_results.ABLATION.query("resolution == @resolution and gpus == @trainers").iloc[-1]
        count = int(trainers.split()[0])
        how = f"{row['images_per_second']:,} images/s / {count} GPUs; {row['source']}"
        return scaled_rate(row["images_per_second"] / count, flops / estimates.step_flops(resolution), how)
    row = _row(published_results.TRAINERS, "gpus", trainers, f"'{DOCUMENTS.trainers}'")
    return scaled_rate(row["images_per_second"], flops / estimates.step_flops(512), f"{trainers}; {row['source']}")


def _row(table: pd.DataFrame, column: str, value: str, *others: str) -> pd.Series:
    """The row of a published table whose `column` is `value`; ValueError that lists the known values."""
    if value not in set(table[column]):
        known = ", ".join([*map(repr, table[column]), *others])
        raise ValueError(f"{value!r} has no published rate: choose one of {known}, or give your own planner.Rate.")
    return table.set_index(column, drop=False).loc[value]


@functools.cache
def known_encoder_rate(resolution: int, recipe: str = "sd2", captions: int = 1, gpu: str = DOCUMENTS.encoder) -> Rate:
    """images/s at which one `gpu` encodes with a recipe's VAE and text encoder, images and `captions` of each.

    An A10G's with Stable Diffusion 2's at 256 pixels is derived from published numbers. It is taken to reach the same
    share of its peak, 46 %, in all cases. Another GPU is taken to be as much faster as its memory.
    """
    fact, table = published_results.FACTS["one A10G, online, at least"], published_results.ENCODERS
    times = estimates.encoder_flops(resolution, recipe=recipe, captions=captions) / estimates.encoder_flops(256)
    bandwidth = [_row(table, "gpu", name)["gigabytes_per_second"] for name in (gpu, DOCUMENTS.encoder)]
    faster, source = bandwidth[0] / bandwidth[1], f"{fact.derived}; {fact.source}"
    if faster == 1:
        return scaled_rate(fact.value, times, source)
    return Rate(fact.value * faster / times, "estimated", f"an A10G's times {faster:.2f}, its memory's bandwidth")


@functools.cache
def trainer_encodes(resolution: int, recipe: str = "sd2", trainers: str = DOCUMENTS.trainers) -> Rate:
    """images/s at which a trainer's GPU encodes between its training steps, as with a DataLoader.

    An A100's is derived from published numbers, 0.44 s for a micro-batch of 128 at 256 pixels; the others' from that
    measured here on one H200.
    """
    times = estimates.encoder_flops(resolution, recipe=recipe) / estimates.encoder_flops(256)
    if trainers == DOCUMENTS.trainers:
        fact = published_results.FACTS["encoders' time in a step"]
        return scaled_rate(128 / fact.value, times, f"128 images / {fact.value} s; {fact.source}")
    fact, hopper = published_results.FACTS["one H200, encoding"], not trainers.endswith("B200")
    rate = fact.value * (1 if hopper else 8.0 / 4.8)  # TB/s of a B200's memory and an H200's
    return Rate(rate / times, "measured" if trainers.endswith("H200") and times == 1 else "estimated", fact.source)


def both_rate(trainer: Rate, encoder: Rate) -> Rate:
    """images/s of one GPU that encodes an image and then trains on it, from its `trainer` and `encoder` rates."""
    rate = 1 / (1 / trainer.images_per_second + 1 / encoder.images_per_second)
    return Rate(rate, "estimated", "the seconds of both added")


def measure_rates(config: TrainingConfig, raw: PreprocessingConfig, *, steps: int = 8) -> dict[str, Rate]:
    """{"encoder": its rate, "trainer": its rate}, measured in this process, on its GPU if it has one.

    Random images and latents at the largest resolution of `config`: the encoder of `raw` takes batches of
    `encoder_batch_size`, a single trainer one unit per step. Rates are medians. One is measured after the other: each
    has the device to itself, so the rates are those of separate machines.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = dataclasses.replace(
        config, global_batch_size=config.unit_rows, units_per_step=1, num_training_workers=1, strategy="ddp"
    )
    trained = ablations.measure_step(alone, device, steps=steps, warm_up=3)["images/s"]
    models = {"model": raw.model_of("vae"), "text_encoder_model": raw.model_of("text_encoder")}
    encode = LatentEncoder(**models, precision=raw.encoder_precision, num_threads=torch.get_num_threads())
    size, count, random = config.largest_resolution, raw.encoder_batch_size, np.random.default_rng(0)
    pixels_BHWC = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    ids_BL = caption_ids(["a picture"] * count, raw)
    seconds = []
    for _ in range(1 + steps):
        started = time.perf_counter()
        encode.encode_images(pixels_BHWC)
        encode.encode_captions(ids_BL)
        seconds.append(time.perf_counter() - started)
    encoded = count / statistics.median(seconds[1:])
    source = meter.hardware(device)
    return {"encoder": Rate(encoded, source=source), "trainer": Rate(trained, source=source)}


# ---- faults


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often machines are lost, and what a loss costs.

    Args:
        failures_per_day: failures of one machine. Default: MosaicML's two in 6.5 days on 16 machines of 8 A100s.
        return_seconds: time until another machine has joined (an assumption: ten minutes).
        restart_seconds: time from the loss to the first step of the next attempt: detection, start of the workers,
            loading of the checkpoint, first batch (an assumption; measure your own).
        checkpoint_every_seconds: training between two checkpoints; `full_run`: about half an hour.
        checkpoint_seconds: pause of training for a checkpoint (an assumption; measured in `metrics.jsonl`).
        upload_seconds: time until a checkpoint is complete (an assumption: 14 GB from four machines).
    """

    failures_per_day: float = 2 / (16 * 6.5)
    return_seconds: float = 600.0
    restart_seconds: float = 120.0
    checkpoint_every_seconds: float = 1800.0
    checkpoint_seconds: float = 2.0
    upload_seconds: float = 30.0

    def __post_init__(self):
        check_numbers(zero_allowed=True, **dataclasses.asdict(self))
        check_numbers(checkpoint_every_seconds=self.checkpoint_every_seconds)

    @property
    def seconds_lost(self) -> float:
        """Mean time that a failure costs: the work since the newest complete checkpoint, restart, and waiting."""
        repeated = (self.checkpoint_every_seconds + self.checkpoint_seconds) / 2 + self.upload_seconds
        return repeated + self.restart_seconds + self.return_seconds

    def slowdown(self, num_machines: int) -> float:
        """Elapsed over compute time, to first order in the rate of failures (Young 1974)."""
        saving = self.checkpoint_seconds / self.checkpoint_every_seconds
        return (1 + saving) * (1 + num_machines * self.failures_per_day * self.seconds_lost / 86_400)


def best_interval(checkpoint_seconds: float, seconds_between_failures: float) -> float:
    """Seconds of training between two checkpoints that minimise the time lost.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", eq. 37; its first term is
    Young's: the square root of 2 x `checkpoint_seconds` x `seconds_between_failures` (of all machines together). Raises
    ValueError unless both are above 0.
    """
    between = seconds_between_failures
    check_numbers(checkpoint_seconds=checkpoint_seconds, seconds_between_failures=between)
    half = checkpoint_seconds / (2 * between)
    if half >= 1:
        return between
    return math.sqrt(2 * checkpoint_seconds * between) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint_seconds


def interval_table(faults: Faults, num_machines: int, dollars_per_hour: float) -> pd.DataFrame:
    """What failures cost by checkpoint interval: a row for each of `INTERVALS` and for the best (`best_interval`).

    `dollars_per_hour`: of all machines. Columns: every (minutes), lost for each failure (minutes: repeated work,
    restart and waiting for the machine), slower (share of the time), $ per day that pay for no progress.
    """
    per_day = num_machines * faults.failures_per_day
    check_numbers(failures_per_day=per_day, dollars_per_hour=dollars_per_hour)
    best = best_interval(faults.checkpoint_seconds, 86_400 / per_day)
    rows = []
    for seconds in sorted({*INTERVALS, best}):
        tried = dataclasses.replace(faults, checkpoint_every_seconds=seconds)
        slower = tried.slowdown(num_machines) - 1
        dollars = 24 * dollars_per_hour * slower / (1 + slower)
        what = "best (Daly)" if seconds == best else ""
        rows.append((seconds / 60, tried.seconds_lost / 60, slower, dollars, what))
    return pd.DataFrame(rows, columns=["every, min", "lost for each failure, min", "slower", "$ a day for it", ""])


# ---- scenarios


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The data, the machines and their rates. Raises ValueError for impossible numbers.

    Args:
        trainer: images/s of one trainer on stored latents, when all of them train.
        encoder: images/s of one encoder.
        dataloader: images/s of one trainer that encodes its own images; None: `both_rate` of the other two, as if a
            trainer's GPU encoded at an encoder's rate.
        rows: images of the data set; blog, Table 2.
        epochs: passes over the rows.
        trainers, encoders: number of machines of each kind; blog, Table 2.
        trainer_machine, encoder_machine: kinds of machines.
        latents_bytes: bytes of a stored row; at 256 pixels: 2 x 4 x 32 x 32 moments and 77 x 1,024 embeddings in fp16.
        storage_dollars: price of a GB for a month; Amazon S3 Standard, us-west-2, first 50 TB.
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
    storage_dollars: float = 0.023
    faults: Faults | None = None

    def __post_init__(self):
        above_zero = ("rows", "epochs", "trainers", "encoders", "latents_bytes")
        check_numbers(**{name: getattr(self, name) for name in above_zero})
        check_numbers(zero_allowed=True, storage_dollars=self.storage_dollars)
        if self.epochs < 1:
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
    `dollars`: for machines and storage. `images_per_second`: during training, over all epochs.
    """

    hours: float
    encoding_hours: float
    training_hours: float
    dollars: float
    machine_dollars: float
    storage_dollars: float
    images_per_second: float
    bottleneck: str


def estimate(scenario: Scenario, path: str) -> Estimate:
    """Hours and dollars of a scenario by one of the `PATHS`. Raises ValueError for another path."""
    one = scenario
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown: choose one of {', '.join(map(repr, PATHS))}.")
    own = one.dataloader or both_rate(one.trainer, one.encoder)
    slower = own.images_per_second / one.trainer.images_per_second
    # Hours of one pass over all rows: trained on stored latents, encoded.
    stored, encoded = (training_hours(one.rows, rate) for rate in (one.training_rate, one.encoding_rate))
    epoch = {"DataLoader": stored / slower, "offline": stored, "online": max(stored, encoded)}[path]
    training = (one.faults.slowdown(one.trainers) if one.faults else 1.0) * one.epochs * epoch
    # Hours for which encoders are rented, and latents stored, which grow linearly while they are made.
    busy = {"DataLoader": 0.0, "offline": encoded, "online": training}[path]
    kept = encoded / 2 + training if path == "offline" else 0.0
    machines = one.trainers * one.trainer_machine.dollars_per_hour * training
    machines += one.encoders * one.encoder_machine.dollars_per_hour * busy
    storage = kept / _MONTH * one.rows * one.latents_bytes / 1e9 * one.storage_dollars
    before = encoded if path == "offline" else 0.0
    return Estimate(
        hours=before + training,
        encoding_hours=before,
        training_hours=training,
        dollars=machines + storage,
        machine_dollars=machines,
        storage_dollars=storage,
        images_per_second=one.rows * one.epochs / training / 3600,
        bottleneck="encoders" if path == "online" and encoded > stored else "trainers",
    )


def compare_paths(scenario: Scenario) -> pd.DataFrame:
    """`estimate` for each of the `PATHS`: one row each, with `dollars_another_epoch`, the cost of one more epoch."""
    rows = {}
    for path in PATHS:
        found = estimate(scenario, path)
        more = estimate(dataclasses.replace(scenario, epochs=scenario.epochs + 1), path)
        rows[path] = {**dataclasses.asdict(found), "dollars_another_epoch": more.dollars - found.dollars}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("path")


def break_even(scenario: Scenario, path: str, other: str, other_scenario: Scenario | None = None) -> float:
    """Number of epochs from which `path` costs less than `other`: 1 if always, infinity if never.

    Dollars are linear in the epochs: each path has a fixed cost and a cost per epoch. `other_scenario`: that of
    `other`; None: the same.
    """

    def dollars(plan: Scenario, by: str) -> tuple[float, float]:
        """`(dollars of the first epoch, of each further one)`."""
        one, two = (estimate(dataclasses.replace(plan, epochs=epochs), by).dollars for epochs in (1.0, 2.0))
        return one, two - one

    (first, more), (other_first, other_more) = dollars(scenario, path), dollars(other_scenario or scenario, other)
    saved = 0.0 if math.isclose(more, other_more) else other_more - more
    if first <= other_first and saved >= 0:
        return 1.0
    return 1 + (first - other_first) / saved if saved > 0 else math.inf


# ---- full runs


def phase(recipe: str, resolution: int, *, captions: int = 1, on: Kinds = TODAY, **changes: Any) -> Scenario:
    """The phase of a recipe (`estimates.RECIPES`) at 256 or 512 pixels, by published, derived and estimated rates.

    Each recipe sees as many images as Stable Diffusion 2 did. `captions`: captions encoded of a row: one online, all
    beforehand. `on`: the GPUs; their number of machines follows. `changes`: fields of `Scenario`; without `encoders`,
    as many as keep the trainers busy online.
    """
    trainer = changes.get("trainer") or trainer_rate(resolution, recipe, on.trainers)
    phases = published_results.PHASES.set_index(["who", "resolution"])
    machine = Scenario.trainer_machine
    if on.trainers != DOCUMENTS.trainers:
        machine = MACHINES[_row(published_results.TRAINERS, "gpus", on.trainers)["machine"]]
    values = {
        "trainer": trainer,
        "encoder": known_encoder_rate(resolution, recipe, captions, on.encoder),
        "dataloader": both_rate(trainer, trainer_encodes(resolution, recipe, on.trainers)),
        "rows": phases["num_samples"]["Anyscale", resolution],
        "trainers": int(on.trainers.split()[0]) // machine.num_gpus,
        "trainer_machine": machine,
        "encoder_machine": MACHINES[_row(published_results.ENCODERS, "gpu", on.encoder)["machine"]],
        "latents_bytes": sum(estimates.row_bytes(resolution, recipe)),
    }
    found = Scenario(**{**values, **changes})
    return found if "encoders" in changes else dataclasses.replace(found, encoders=found.balanced_encoders)


def compare_machines(recipe: str = "sd2", encoder: str = TODAY.encoder, num_gpus: int = 8) -> pd.DataFrame:
    """Both phases of a recipe on stored latents, by kind of trainers: a row for the documents' A100s, then today's.

    Columns: images/s of a GPU at 256 and 512 pixels, dollars of a GPU-hour; hours and dollars of training both phases,
    on as many GPUs as the row says; encoders of kind `encoder` that would keep `num_gpus` of them busy at 256 pixels.
    """
    today = [Kinds(gpus, encoder) for gpus in published_results.TRAINERS["gpus"]]
    old = dataclasses.replace(DOCUMENTS, encoder=encoder)
    setups = [(old.trainers, old, {}), (f"{old.trainers}, 2026", old, {"trainer_machine": MACHINES[_A100_TODAY]})]
    rows = {}
    for name, on, changes in setups + [(on.trainers, on, {}) for on in today]:
        phases = [phase(recipe, resolution, on=on, **changes) for resolution in (256, 512)]
        found = [estimate(one, "offline") for one in phases]
        machine, hours = phases[0].trainer_machine, sum(one.training_hours for one in found)
        rate = num_gpus * phases[0].trainer.images_per_second
        rows[name] = {
            **{f"images/s, {256 * (1 + n)} px": one.trainer.images_per_second for n, one in enumerate(phases)},
            "$ a GPU-hour": machine.dollars_per_hour / machine.num_gpus,
            "hours": hours,
            "training, $": phases[0].trainers * machine.dollars_per_hour * hours,
            f"{encoder}s for {num_gpus} GPUs": encoders_needed(rate, phases[0].encoder.images_per_second),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("trainers")


def compare_recipes() -> pd.DataFrame:
    """Stable Diffusion 2's phases beside those of the profiles `full-today-256` and `-512`: a row each, by `phase`.

    Bytes are those of a stored row, and of all. Image features, of a ViT-B's width, come on top with REPA. "encoders
    online" keep the trainers busy. Hours and dollars, with as many encoders as the profile has: all captions encoded
    beforehand and stored, or one a row encoded online.
    """
    rows = {}
    for resolution in full_run.PARAMETERS:
        for recipe, models in estimates.RECIPES.items():
            encoders = full_run.read_profile(f"full-{recipe}-{resolution}")["num_encoders"]
            online = phase(recipe, resolution, on=DOCUMENTS, encoders=encoders)
            stored = dataclasses.replace(
                online, encoder=known_encoder_rate(resolution, recipe, len(models.stored_tokens))
            )
            latents, captions = estimates.row_bytes(resolution, recipe)
            found = {"stored": estimate(stored, "offline"), "online": estimate(online, "online")}
            rows[resolution, recipe] = {
                "latents, KB": latents / 1e3,
                "captions, KB": captions / 1e3,
                "image features, KB": estimates.feature_bytes(resolution, recipe) / 1e3,
                "all rows, TB": online.rows * online.latents_bytes / 1e12,
                "step, GFLOP": estimates.step_flops(resolution, recipe) / 1e9,
                "encoding, GFLOP": estimates.encoder_flops(resolution, recipe=recipe) / 1e9,
                "trainer, images/s": online.trainer.images_per_second,
                "encoder, images/s": online.encoder.images_per_second,
                "encoders online": online.balanced_encoders,
                **{f"hours, {path}": one.hours for path, one in found.items()},
                **{f"$, {path}": one.dollars for path, one in found.items()},
                "storing pays from, epochs": break_even(stored, "offline", "online", other_scenario=online),
            }
    return pd.DataFrame(rows).T.rename_axis(["pixels", "recipe"])
