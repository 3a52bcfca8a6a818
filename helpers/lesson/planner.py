"""How long a training run takes, what it costs and what limits it, before any machine is rented.

A `Scenario` describes the data, the machines and their rates; `compare` estimates each of the `PATHS` by which its
latents can be made, `search` and `cheapest` choose machines, and `best_interval` the time between checkpoints.

Every field is an assumption with a unit; the source of a default is given beside it. Rates say where they come from:
"measured", "published", or "estimated" from data sheets. All results are averages: `simulator` draws single runs. Not
counted: storage of the raw data and requests to it, CPU machines for the head node, validation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from .. import encoder, images
from ..config import PreprocessingConfig, TrainingConfig
from ..runtime import profiling
from . import ablations, published_results
from .estimates import (
    check_count,
    check_positive,
    encoder_rate,
    encoders_needed,
    online_throughput,
    predict_scaling,
    training_hours,
)

# How latents are made: by the trainers themselves (a DataLoader); before training; on the way to the trainers in every
# epoch; on the way in the first epoch only, and stored for the others.
PATHS = ("DataLoader", "offline", "online", "once")
_PUBLISHED_GPUS = 32  # A100-80G, behind the published rates: blog, Table 1
_MONTH = 730.0  # hours


@dataclass(frozen=True)
class Rate:
    """images/s of a GPU or CPU worker. `origin`: "measured", "published" or "estimated"; `source`: where it is from."""

    images_per_second: float
    origin: str = "measured"
    source: str = "here"

    def __post_init__(self):
        check_positive("images_per_second", self.images_per_second)

    def __str__(self):
        return f"{self.images_per_second:.4g} images/s ({self.origin}: {self.source})"


@dataclass(frozen=True)
class Machine:
    """A machine that can be rented.

    Args:
        num_gpus: its GPUs, each of them a trainer or an encoder.
        accelerator: their kind, a name that `profiling.find_accelerator` knows.
        dollars_per_hour: of the whole machine.
        gigabytes_per_second: network bandwidth to other machines, one way.
        source: of the price.
    """

    name: str
    num_gpus: int
    accelerator: str
    dollars_per_hour: float
    gigabytes_per_second: float
    source: str

    def __post_init__(self):
        check_count(f"num_gpus of {self.name}", self.num_gpus)
        check_positive(f"dollars_per_hour of {self.name}", self.dollars_per_hour)
        check_positive(f"gigabytes_per_second of {self.name}", self.gigabytes_per_second)


def _published_machine(name: str, gigabytes_per_second: float) -> Machine:
    found = next(instance for instance in published_results.INSTANCES if instance.name == name)
    count, _, accelerator = found.gpus.partition(" x ")
    return Machine(name, int(count), accelerator, found.dollars_per_hour, gigabytes_per_second, found.source)


_EFA = published_results.FACTS["network of a node, EFA"].value
_BLOCKS = "AWS, EC2 Capacity Blocks for ML, pricing until January 2025"
MACHINES = {
    machine.name: machine
    for machine in (
        _published_machine("p4de.24xlarge", _EFA),
        _published_machine("p4de.24xlarge, 1 year reserved", _EFA),
        _published_machine("g5.2xlarge", 1.25),  # up to 10 Gbit/s: Amazon EC2, G5 instances
        Machine("p4d.24xlarge, capacity block", 8, "A100-40G", 14.75, _EFA, _BLOCKS),
        Machine("p5.48xlarge, capacity block", 8, "H100", 39.33, 400.0, _BLOCKS),  # 3,200 Gbit/s, as the next
        Machine("p5e.48xlarge, capacity block", 8, "H200", 43.26, 400.0, _BLOCKS),
    )
}


# ---- rates


@functools.cache
def trainer_rate(resolution: int, accelerator: str = "A100-80G") -> Rate:
    """images/s at which one of many GPUs trains Stable Diffusion 2's U-Net on stored latents.

    Published for an A100-80G (EFA, FSDP and torch.compile); estimated for others, at the same share of their peak.
    Raises ValueError for resolutions other than 256 and 512, and accelerators without a data sheet: measure these.
    """
    found = _find(accelerator)
    rows = [row for row in published_results.ABLATION if (row.resolution, row.gpus[:2]) == (resolution, "32")]
    if not rows:
        raise ValueError(f"resolution={resolution!r} has no published rate (256, 512): give trainer=Rate(images/s).")
    rate = rows[-1].images_per_second / _PUBLISHED_GPUS
    if found.name == "A100":
        return Rate(rate, "published", rows[-1].source)
    scaled = rate * found.bf16_tflops / _find("A100").bf16_tflops
    return Rate(scaled, "estimated", f"an A100's share of the peak ({rows[-1].source})")


@functools.cache
def known_encoder_rate(resolution: int, accelerator: str = "A10G") -> Rate:
    """images/s at which one GPU encodes with Stable Diffusion 2's VAE and text encoder, pictures and captions.

    Published for an A10G at 256 pixels; otherwise estimated from counted FLOPs (`estimates.encoder_rate`). Raises
    ValueError for an accelerator without a data sheet.
    """
    fact = published_results.FACTS["one A10G, online, at least"]
    if (resolution, _find(accelerator).name) == (256, "A10G"):
        return Rate(fact.value, "published", fact.source)
    return Rate(encoder_rate([resolution], accelerator), "estimated", f"FLOPs, an A10G's utilization ({fact.source})")


def _find(accelerator):
    found = profiling.find_accelerator(accelerator)
    if found is None:
        raise ValueError(f"accelerator={accelerator!r} has no data sheet in helpers.runtime.profiling.ACCELERATORS.")
    return found


def both_rate(trainer: Rate, encoder: Rate) -> Rate:
    """images/s of one GPU that encodes a picture and then trains on it, from its `trainer` and `encoder` rates."""
    rate = 1 / (1 / trainer.images_per_second + 1 / encoder.images_per_second)
    return Rate(rate, "estimated", "the seconds of both added")


@functools.cache
def trainer_encodes(resolution: int, accelerator: str = "A100-80G") -> Rate:
    """images/s at which a trainer's GPU encodes between its training steps, as with a DataLoader.

    Published for an A100 at 256 pixels, 0.44 s for a micro-batch of 128; otherwise estimated from FLOPs and peak.
    """
    fact, found = published_results.FACTS["encoders' time in a step"], _find(accelerator)
    rate = 128 / fact.value  # micro-batch: blog, Table 1
    if (resolution, found.name) == (256, "A100"):
        return Rate(rate, "published", fact.source)
    rate *= found.bf16_tflops / _find("A100").bf16_tflops
    if resolution != 256:
        rate *= encoder_rate([resolution]) / encoder_rate([256])
    return Rate(rate, "estimated", f"FLOPs, from an A100 at 256 pixels ({fact.source})")


def measure(config: TrainingConfig, raw: PreprocessingConfig, *, steps: int = 8) -> dict[str, Rate]:
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
    encode = encoder.Encoder(raw.encoder_model, raw.encoder_precision, num_threads=torch.get_num_threads())
    size, count, random = config.largest_resolution, raw.encoder_batch_size, np.random.default_rng(0)
    pixels_BHWC = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    ids_BL = images.tokenize(["a picture"] * count, images.load_tokenizer(raw.encoder_model))
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
    """How often machines are lost, and what a loss costs; for the planner and for the `simulator`.

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
        trainers_each, encoders_each: on each machine; None: one on each GPU.
        latents_bytes: per stored row; at 256 pixels: 2 x 4 x 32 x 32 moments and 77 x 1,024 embeddings in fp16.
        raw_bytes: per raw row; MosaicML: more than 100 TB for 790 million.
        storage_dollars: per GB and month; Amazon S3 Standard, us-west-2, first 50 TB.
        egress_dollars: per GB read by the trainers or encoders; AWS: 0 within a region, 0.02 from another one.
        spot: whether the machines are rented on the spot market.
        spot_discount: share off the on-demand price (an assumption; AWS says up to 0.9).
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
    trainers_each: int | None = None
    encoders_each: int | None = None
    latents_bytes: float = 2 * (2 * 4 * 32 * 32 + 77 * 1024)
    raw_bytes: float = 126_600
    storage_dollars: float = 0.023
    egress_dollars: float = 0.0
    spot: bool = False
    spot_discount: float = 0.6
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
        if not 0 <= check_not_negative("spot_discount", self.spot_discount) < 1:
            raise ValueError(f"spot_discount={self.spot_discount!r} must be a share of the price, less than 1.")

    @property
    def training_rate(self) -> float:
        """images/s of all trainers on stored latents."""
        return self.trainers * (self.trainers_each or self.trainer_machine.num_gpus) * self.trainer.images_per_second

    @property
    def encoding_rate(self) -> float:
        """images/s of all encoders."""
        return self.encoders * (self.encoders_each or self.encoder_machine.num_gpus) * self.encoder.images_per_second

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

    price = 1 - one.spot_discount if one.spot else 1.0
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
        price * rented + storage + egress,
        price * rented,
        storage,
        egress,
        samples / training / 3600,
        "encoders" if waits else "trainers",
    )


def compare(scenario: Scenario) -> pd.DataFrame:
    """`estimate` for each of the `PATHS`: one row each, with `dollars_another_epoch`, the cost of one more epoch."""
    rows = []
    for path in PATHS:
        found = estimate(scenario, path)
        more = estimate(dataclasses.replace(scenario, epochs=scenario.epochs + 1), path)
        rows.append({**dataclasses.asdict(found), "dollars_another_epoch": more.dollars - found.dollars})
    return pd.DataFrame(rows).set_index("path")


def break_even(scenario: Scenario, path: str = "offline", other: str = "online") -> float:
    """Number of epochs from which `path` costs less than `other`: 1 if always, infinity if never.

    Dollars are linear in the epochs: each path has a fixed cost and a cost per epoch.
    """
    one, two = (
        [estimate(dataclasses.replace(scenario, epochs=count), each).dollars for each in (path, other)]
        for count in (1.0, 2.0)
    )
    dearer, saved = one[0] - one[1], (two[1] - one[1]) - (two[0] - one[0])
    if dearer <= 0 and saved >= 0:
        return 1.0
    return 1 + dearer / saved if saved > 0 else math.inf


# ---- the cheapest machines


def search(
    scenario: Scenario,
    resolution: int,
    *,
    trainer_machines: Iterable[Machine] = tuple(machine for machine in MACHINES.values() if machine.num_gpus > 1),
    encoder_machines: Iterable[Machine] = tuple(MACHINES.values()),
    most_trainers: int = 16,
    most_encoders: int = 200,
    global_batch_size: int = 4096,
    parameters: float = 865_910_724,
) -> pd.DataFrame:
    """`estimate` over kinds and numbers of machines: one row per plan, the cheapest first.

    Rates are `trainer_rate` and `known_encoder_rate` at `resolution`, or the scenario's own on its own machines. The
    network's effect on the trainers' rate follows from `estimates.predict_scaling` ("fsdp", hidden behind the backward
    pass) with steps of `global_batch_size` rows. Encoder counts are the fewest that keep the trainers busy, and one
    fewer: for "online" and "once", any other number costs more per image. Offline also tries half, twice and four times
    as many. Does not check whether the model fits a GPU's memory (`estimates.memory_table`). Raises ValueError if no
    plan is possible.
    """
    trainers, encoders = list(trainer_machines), list(encoder_machines)
    rows = []
    for machine, count in itertools.product(trainers, range(1, check_count("most_trainers", most_trainers) + 1)):
        own = machine == scenario.trainer_machine
        rate = scenario.trainer if own else trainer_rate(resolution, machine.accelerator)
        both = own and scenario.dataloader or both_rate(rate, trainer_encodes(resolution, machine.accelerator))
        gpus = count * machine.num_gpus
        if gpus > global_batch_size:
            continue
        step = global_batch_size / gpus / rate.images_per_second
        scaled = predict_scaling(
            parameters, step, machine.gigabytes_per_second, (gpus,), ranks_per_node=machine.num_gpus
        )
        left = scaled["efficiency, hidden behind backward"].iloc[0]
        mine = dataclasses.replace(
            scenario,
            trainer=dataclasses.replace(rate, images_per_second=rate.images_per_second * left),
            dataloader=dataclasses.replace(both, images_per_second=both.images_per_second * left),
            trainer_machine=machine,
            trainers=count,
            trainers_each=None,
        )
        rows.append((mine, "DataLoader"))
        for kind in encoders:
            own = kind == scenario.encoder_machine
            each = scenario.encoder if own else known_encoder_rate(resolution, kind.accelerator)
            mine = dataclasses.replace(
                mine, encoder=each, encoder_machine=kind, encoders_each=scenario.encoders_each if own else None
            )
            balanced = mine.balanced_encoders
            few = {balanced - 1, balanced}
            for path, counts in (
                ("offline", few | {max(1, balanced // 2), 2 * balanced, 4 * balanced}),
                ("online", few),
                ("once", few),
            ):
                allowed = sorted(number for number in counts if 1 <= number <= most_encoders)
                rows += [(dataclasses.replace(mine, encoders=number), path) for number in allowed]
    if not rows:
        raise ValueError("No plan is possible: give at least one machine for trainers.")
    return pd.DataFrame([_row(one, path) for one, path in rows]).sort_values("dollars", ignore_index=True)


def _row(one: Scenario, path: str) -> dict[str, Any]:
    with_encoders = path != "DataLoader"
    return {
        "trainers": f"{one.trainers} x {one.trainer_machine.name}",
        "encoders": f"{one.encoders} x {one.encoder_machine.name}" if with_encoders else "-",
        **dataclasses.asdict(estimate(one, path)),
        "rates": "/".join(
            dict.fromkeys([one.trainer.origin, one.encoder.origin] if with_encoders else [one.trainer.origin])
        ),
    }


def cheapest(plans: pd.DataFrame, deadline_hours: float | None = None, dollars_at_most: float | None = None):
    """The plans of `search` (or similar rows) within a deadline and a budget, the cheapest first.

    Raises ValueError if there are none, naming the fastest plan, or the cheapest within the deadline.
    """
    limits = {}
    if deadline_hours is not None:
        limits["hours"] = check_positive("deadline_hours", deadline_hours)
    if dollars_at_most is not None:
        limits["dollars"] = check_positive("dollars_at_most", dollars_at_most)
    met = plans
    for name, most in limits.items():
        within = met[met[name] <= most]
        if within.empty:
            best = met.loc[met[name].idxmin()]
            asked = f"deadline_hours={most:g}" if name == "hours" else f"dollars_at_most={most:g}"
            also = " in that time" if name == "dollars" and len(limits) > 1 else ""
            raise ValueError(
                f"{asked} cannot be met{also}: the best plan takes "
                f"{best['hours']:,.1f} hours and costs ${best['dollars']:,.0f} ({best['trainers']}, encoders "
                f"{best['encoders']}, {best['path']}). Relax the limit, or search more machines."
            )
        met = within
    return met.sort_values("dollars", ignore_index=True)


# ---- Stable Diffusion 2


def sd2(resolution: int, **changes: Any) -> Scenario:
    """Stable Diffusion 2's phase at 256 or 512 pixels, as published; `changes`: fields of the scenario."""
    phase = next((found for found in published_results.PHASES if found.resolution == resolution), None)
    trainer, encodes = trainer_rate(resolution), trainer_encodes(resolution)
    values = {
        "trainer": trainer,
        "encoder": known_encoder_rate(resolution),
        "dataloader": both_rate(trainer, encodes),
        "rows": phase.num_samples,
        "latents_bytes": 2 * (2 * 4 * (resolution // 8) ** 2 + 77 * 1024),
    }
    return Scenario(**{**values, **changes})


def published(path: str) -> Scenario:
    """The inputs of one row of the blog's Table 2: "DataLoader", "offline" or "online".

    Each has its own measured throughput. Offline, the $2,183 are g5.2xlarge hours of one pass; storage is not in the
    table. Raises ValueError for another path.
    """
    costs = {row.setup: row for row in published_results.EPOCH_COSTS}
    if path not in costs:
        raise ValueError(f"path={path!r} is not in Table 2: choose one of {', '.join(map(repr, costs))}.")
    facts, rates = published_results.FACTS, {row.setup: row.images_per_second for row in costs.values()}
    train = rates["online" if path == "online" else "offline"] / _PUBLISHED_GPUS
    fact = facts["one A10G, offline" if path == "offline" else "one A10G, online, at least"]
    return Scenario(
        trainer=Rate(train, "published", costs[path].source),
        encoder=Rate(fact.value, "published", fact.source),
        dataloader=Rate(rates["DataLoader"] / _PUBLISHED_GPUS, "published", costs["DataLoader"].source),
        storage_dollars=0.0,
    )
