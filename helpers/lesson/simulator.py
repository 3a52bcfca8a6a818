"""Event-driven simulation of a whole run: lost machines, preemption notices, commits, checkpoints, restarts.

The rules are those of this project and of Ray Train: a segment counts once it is committed; checkpoints are due every
`checkpoint_every` steps and count once uploaded; a group of workers that loses a machine resumes from the newest
complete one; with `num_training_workers=(least, most)` it shrinks when Ray Train stops waiting for the lost machine,
and grows by a restart that Ray Train considers once a minute; a notice triggers a checkpoint. The duration of a step
for a number of workers follows from the epoch plan. Losses of machines are drawn from `planner.Faults`, or given.

Not simulated: validation, damaged checkpoints, several losses that one person must repair.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .. import ingest, resumable_job
from ..config import TrainingConfig
from . import full_run, planner
from .estimates import check_count, check_positive, encoder_rate, predict_scaling


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Machines of one kind that a stage rents from its start to its end; a lost one is not paid for until it is back.

    Args:
        count: machines.
        workers_each: trainers or encoders on each.
        dollars_per_hour: of one machine, as it is rented (on demand or spot).
        faults: how often they are lost, and what a loss costs.
    """

    count: int
    workers_each: int
    dollars_per_hour: float
    faults: planner.Faults = planner.Faults()

    def __post_init__(self):
        check_count("count", self.count)
        check_count("workers_each", self.workers_each)
        check_positive("dollars_per_hour", self.dollars_per_hour)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A preprocessing job.

    Args:
        fleet: of the encoders.
        rows: of the input.
        rows_per_second: of one encoder.
        segment_seconds: to start the workers of a segment and to end it (tests/benchmarks/README.md: 36).
        begun_again: share of machine losses after which the segment restarts, because Ray Data does not replace what
            they held (an assumption). Otherwise it repeats their tasks, which takes seconds and is not counted.
        max_failures: how often a segment restarts before the job ends with an error.
        relaunch_seconds: until somebody has relaunched a failed job (an assumption: an hour).
    """

    name: str = "encoding"
    fleet: Fleet
    rows: int
    rows_per_second: float
    segment_seconds: float = 36.0
    begun_again: float = 0.05
    max_failures: int = 3
    relaunch_seconds: float = 3600.0

    def __post_init__(self):
        check_count("rows", self.rows)
        check_positive("rows_per_second", self.rows_per_second)
        for name in ("segment_seconds", "begun_again", "relaunch_seconds"):
            planner.check_not_negative(name, getattr(self, name))

    @property
    def segments(self) -> list[int]:
        """Rows of each segment, as `preprocess.prepare` plans them over files much smaller than a segment."""
        rows = resumable_job.ROWS_PER_SEGMENT * self.fleet.count * self.fleet.workers_each
        return [min(rows, self.rows - start) for start in range(0, self.rows, rows)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run.

    Args:
        config: its parameters: steps, units, workers, `checkpoint_every`, `max_failures`.
        fleet: of the trainers.
        unit_seconds: of a worker for a unit of `config.unit_rows` rows, including communication.
        encoders: of an online run; None: latents are stored.
        encoder_rows_per_second: of one of these encoders.
        seen_seconds: from a notice to the checkpoint: Ray Train asks every 5 s, the workers every 2 s.
        resize_seconds: how often Ray Train considers growing (`ScalingConfig.elastic_resize_monitor_interval_s`).
        start_timeout_seconds: how long Ray Train waits for all workers of a new group before it starts a smaller one
            (RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S). When a machine is lost without notice, its workers fail before Ray
            knows that the machine is gone, so the next group still counts on it.
        relaunch_seconds: until somebody has relaunched a run that exceeded `max_failures` (an assumption).
    """

    name: str = "training"
    config: TrainingConfig
    fleet: Fleet
    unit_seconds: float
    encoders: Fleet | None = None
    encoder_rows_per_second: float | None = None
    seen_seconds: float = 7.0
    resize_seconds: float = 60.0
    start_timeout_seconds: float = 60.0
    relaunch_seconds: float = 3600.0

    def __post_init__(self):
        check_positive("unit_seconds", self.unit_seconds)
        for name in ("seen_seconds", "resize_seconds", "start_timeout_seconds", "relaunch_seconds"):
            planner.check_not_negative(name, getattr(self, name))
        if self.encoders:
            check_positive("encoder_rows_per_second", self.encoder_rows_per_second)
        possible = self.fleet.count * self.fleet.workers_each
        if possible < self.config.fewest_workers:
            raise ValueError(
                f"num_training_workers={self.config.num_training_workers!r} cannot start on {self.fleet.count} "
                f"machines with {self.fleet.workers_each} workers each: give more machines, or fewer workers."
            )

    @functools.cached_property
    def plan(self) -> ingest.Plan:
        """The epoch plan; only its assignment of units to workers matters here."""
        config = self.config
        source = ingest.Source.of("", [("", [config.global_batch_size])])
        return ingest.Plan([source], config.unit_rows, config.units_per_step, config.units_per_step, config.seed)

    @functools.cache  # noqa: B019 (a stage lives as long as its simulation)
    def compute_seconds(self, workers: int) -> float:
        """Of a step on `workers` workers: the one with the most units sets the pace."""
        most = max(len(self.plan.units_of_worker(0, 0, rank, workers)) for rank in range(workers))
        return most * self.unit_seconds


@dataclass(frozen=True)
class Loss:
    """A given loss, in place of drawn ones.

    Args:
        step: steps done when it happens, such as 40.5 for half-way through the next one.
        machine: its number in the fleet; None: only a worker's process is lost.
        back_after: seconds until it, or a replacement, has joined; None: never.
        notice_seconds: from a notice, which then comes at `step`, to the loss; 0: no notice.
    """

    step: float
    machine: int | None = None
    back_after: float | None = None
    notice_seconds: float = 0.0


@dataclass
class Outcome:
    """What happened in a stage.

    `restarts`: of a group of workers, or a segment, `resizes` of them because a machine came back. `down_seconds`:
    without workers that train (or without encoders); `stalled_seconds`: paused for checkpoints. `done`: steps (or rows)
    that count; `repeated`: those done again. `shrunk_seconds`: on fewer workers than the most. `relaunches`: restarts
    by hand after an error.
    """

    hours: float = 0.0
    dollars: float = 0.0
    losses: int = 0
    notices: int = 0
    restarts: int = 0
    resizes: int = 0
    relaunches: int = 0
    down_seconds: float = 0.0
    stalled_seconds: float = 0.0
    shrunk_seconds: float = 0.0
    repeated: int = 0
    done: int = 0
    events: int = 0


class Clock:
    """Events in the order of their virtual time; ties in the order in which they were scheduled."""

    def __init__(self, random: np.random.Generator):
        self.random, self.now, self.events, self.order = random, 0.0, [], itertools.count()
        self.count = 0

    def after(self, seconds: float, action: Callable, *arguments: Any) -> None:
        """Call `action(*arguments)` after `seconds`; never if they are infinite."""
        if math.isfinite(seconds):
            heapq.heappush(self.events, (self.now + seconds, next(self.order), action, arguments))

    def draw(self, per_day: float) -> float:
        """Seconds until the next event of a Poisson process; infinite for a rate of 0."""
        return self.random.exponential(86_400 / per_day) if per_day else math.inf

    def run_until(self, finished: Callable[[], bool]) -> None:
        while not finished():
            if not self.events:
                raise RuntimeError("The run waits for machines that never come back.")
            self.now, _, action, arguments = heapq.heappop(self.events)
            self.count += 1
            action(*arguments)


class Machines:
    """The machines of a fleet: which are present, and what they cost. Notifies `stage` of changes.

    `stage` has `lost(machine, announced)`, `noticed(machine)` and `came_back(machine)`.
    """

    def __init__(self, clock: Clock, fleet: Fleet, stage: Any, outcome: Outcome, drawn: bool = True):
        self.clock, self.fleet, self.stage, self.outcome, self.drawn = clock, fleet, stage, outcome, drawn
        self.there = set(range(fleet.count))
        self.rented, self.since = 0.0, 0.0
        for machine in sorted(self.there):
            self.draw(machine)

    @property
    def workers(self) -> int:
        return len(self.there) * self.fleet.workers_each

    def draw(self, machine: int) -> None:
        """Draw how and when a machine that has just joined will be lost."""
        if not self.drawn:
            return
        faults = self.fleet.faults
        failure, reclaim = self.clock.draw(faults.failures_per_day), self.clock.draw(faults.reclaims_per_day)
        back = self.clock.random.exponential(faults.return_seconds) if faults.return_seconds else 0.0
        if failure <= reclaim:
            self.clock.after(failure, self.lose, machine, False, back)
        else:
            self.clock.after(reclaim, self.notice, machine, faults.notice_seconds, back)

    def notice(self, machine: int, seconds: float, back_after: float) -> None:
        self.outcome.notices += 1
        self.clock.after(seconds, self.lose, machine, True, back_after)
        self.stage.noticed(machine)

    def lose(self, machine: int, announced: bool, back_after: float) -> None:
        self.count_rent()
        self.there.discard(machine)
        self.outcome.losses += 1
        self.clock.after(back_after, self.join, machine)
        self.stage.lost(machine, announced)

    def join(self, machine: int) -> None:
        self.count_rent()
        self.there.add(machine)
        self.draw(machine)
        self.stage.came_back(machine)

    def count_rent(self) -> None:
        self.rented += len(self.there) * (self.clock.now - self.since)
        self.since = self.clock.now

    def dollars(self) -> float:
        self.count_rent()
        return self.rented / 3600 * self.fleet.dollars_per_hour


class EncodingRun:
    """One draw of a preprocessing job. Events scheduled before the last change have an older `version`: ignored."""

    def __init__(self, stage: Encoding, clock: Clock):
        self.stage, self.clock, self.outcome = stage, clock, Outcome()
        self.machines = Machines(clock, stage.fleet, self, self.outcome)
        self.pending = list(reversed(stage.segments))
        self.version, self.failures, self.working, self.ended = 0, 0, False, False
        self.rows, self.since, self.pace = 0.0, 0.0, 0.0  # of the segment at `since`, and rows/s from then on
        self.begin()

    def finished(self) -> bool:
        return not self.pending

    def after(self, seconds: float, action: Callable) -> None:
        """Replaces what was scheduled before."""
        self.version += 1
        version = self.version
        self.clock.after(seconds, lambda: action() if version == self.version else None)

    def begin(self) -> None:
        """Start the workers of the next segment that is not committed."""
        self.working, self.ended, self.rows = False, False, 0.0
        self.after(self.stage.segment_seconds, self.work)

    def work(self) -> None:
        """Encode from now on with the encoders that are present."""
        self.working = True
        self.since, self.pace = self.clock.now, self.machines.workers * self.stage.rows_per_second
        left = self.pending[-1] - self.rows
        self.after(left / self.pace if self.pace else math.inf, self.commit)

    def commit(self) -> None:
        self.outcome.done += self.pending.pop()
        self.failures = 0
        if self.pending:
            self.begin()

    def lost(self, machine: int, announced: bool) -> None:
        if self.ended:
            return
        self.changed()
        if self.clock.random.random() < self.stage.begun_again:
            self.outcome.restarts += 1
            self.outcome.repeated += round(self.rows)
            self.failures += 1
            if self.failures <= self.stage.max_failures:
                return self.begin()
            self.failures, self.working, self.ended = 0, False, True
            self.outcome.relaunches += 1
            self.after(self.stage.relaunch_seconds, self.begin)

    def came_back(self, machine: int) -> None:
        self.changed()

    def changed(self) -> None:
        """The number of encoders has changed."""
        if self.working:
            self.rows += self.pace * (self.clock.now - self.since)
            self.outcome.down_seconds += 0.0 if self.pace else self.clock.now - self.since
            self.work()

    def noticed(self, machine: int) -> None:
        """Encoders need no checkpoint."""


class TrainingRun:
    """One draw of a training run, or the run with the given `losses`.

    Events scheduled before the group of workers ended, or before its pace changed, have an older `attempt` or `version`
    and are ignored.
    """

    def __init__(self, stage: Training, clock: Clock, losses: Sequence[Loss] | None = None):
        self.stage, self.clock, self.outcome = stage, clock, Outcome()
        self.config, self.faults = stage.config, stage.fleet.faults
        self.machines = Machines(clock, stage.fleet, self, self.outcome, drawn=losses is None)
        watcher = EncoderWatcher(self)
        self.encoders = stage.encoders and Machines(clock, stage.encoders, watcher, self.outcome, losses is None)
        self.attempt = self.version = self.failures = 0
        self.members, self.workers = frozenset(), 0  # of the group
        self.running, self.waiting, self.least = False, False, 0  # waiting: for machines with `least` workers
        self.step, self.since, self.seconds = 0.0, 0.0, math.inf  # steps done at `since`, seconds a step from then on
        self.complete, self.uploaded_at = 0, 0.0
        self.first = 0  # the group's first step
        self.down_since, self.started = 0.0, 0.0
        self.losses = sorted(losses or (), key=lambda loss: loss.step)
        self.start(seconds=0.0)

    def happen(self, attempt: int, version: int) -> None:
        """Apply the next of the given losses, and others at the same step."""
        if (attempt, version) != (self.attempt, self.version):
            return
        step = self.losses[0].step
        now = [loss for loss in self.losses if loss.step == step]
        self.losses = self.losses[len(now) :]
        self.plan_loss()
        for loss in now:
            back = math.inf if loss.back_after is None else loss.back_after
            if loss.machine is None:
                self.crash()
            elif loss.notice_seconds:
                self.machines.notice(loss.machine, loss.notice_seconds, back)
            else:
                self.machines.lose(loss.machine, False, back)

    def plan_loss(self) -> None:
        if self.losses:
            seconds = self.since - self.clock.now + (self.losses[0].step - self.step) * self.seconds
            self.clock.after(max(0.0, seconds), self.happen, self.attempt, self.version)

    def finished(self) -> bool:
        return self.complete >= self.config.max_steps

    # ---- groups of workers

    def possible(self) -> int:
        """Workers that Ray Train can start now."""
        return min(self.machines.workers, self.config.most_workers)

    def start(self, seconds: float, least: int | None = None) -> None:
        """Start a group of as many workers as there is room for, or wait until there is room for `least`."""
        self.least = least or self.config.fewest_workers
        self.waiting = self.possible() < self.least
        if not self.waiting:
            self.members, self.workers = frozenset(self.machines.there), self.possible()
            self.started = self.clock.now
            self.clock.after(seconds, self.begin, self.attempt)

    def begin(self, attempt: int) -> None:
        """The group has loaded the newest complete checkpoint and has its first batch."""
        if attempt != self.attempt:
            return
        self.outcome.down_seconds += self.clock.now - self.down_since
        self.running, self.first, self.step, self.since = True, self.complete, float(self.complete), self.clock.now
        self.set_pace()
        self.consider_growing()

    def end_group(self, counted: bool, unseen: bool = False) -> None:
        """The group is lost, or shut down to grow: its work since the newest complete checkpoint is repeated.

        `unseen`: a machine is gone, and Ray does not know yet.
        """
        before = self.workers
        if self.running:
            self.count_shrunk()
            self.outcome.stalled_seconds -= max(0.0, self.since - self.clock.now)
            step = math.floor(self.steps_done() + 1e-6)
            self.outcome.done += self.complete - self.first
            self.outcome.repeated += step - self.complete
            self.down_since = self.clock.now
        self.running, self.members, self.workers = False, frozenset(), 0
        self.attempt += 1
        self.uploaded_at = self.clock.now  # an upload ends with its workers
        self.outcome.restarts += 1
        self.failures += counted
        if self.failures > self.config.max_failures:
            self.failures = 0
            self.outcome.relaunches += 1
            self.clock.after(self.stage.relaunch_seconds, self.relaunch, self.attempt)
        else:
            self.start(self.faults.restart_seconds, before if unseen else None)
            if unseen:
                self.clock.after(self.stage.start_timeout_seconds, self.start_smaller, self.attempt)

    def start_smaller(self, attempt: int) -> None:
        if attempt == self.attempt and self.waiting:
            self.start(self.faults.restart_seconds)

    def relaunch(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.start(self.faults.restart_seconds)

    # ---- steps

    def steps_done(self) -> float:
        return self.step + max(0.0, self.clock.now - self.since) / self.seconds if self.running else self.step

    def set_pace(self) -> None:
        """Continue from now, or from the end of a checkpoint's stall, with the workers and encoders present."""
        seconds = self.stage.compute_seconds(self.workers)
        if self.encoders:
            supply = self.encoders.workers * self.stage.encoder_rows_per_second
            seconds = max(seconds, self.config.global_batch_size / supply if supply else math.inf)
        self.seconds, self.since = seconds, max(self.since, self.clock.now)
        self.plan_checkpoint(self.next_due())

    def next_due(self) -> int:
        """The step of the next regular checkpoint, as `train.train_loop_per_worker` saves them."""
        every = self.config.checkpoint_every
        return min((math.floor(self.step + 1e-6) // every + 1) * every, self.config.max_steps)

    def plan_checkpoint(self, step: int) -> None:
        self.version += 1
        seconds = self.since - self.clock.now + (step - self.step) * self.seconds
        self.clock.after(seconds, self.save, self.attempt, self.version, step)
        self.plan_loss()

    def save(self, attempt: int, version: int, step: int) -> None:
        """Training pauses until the previous upload is complete, and while the state is copied."""
        if (attempt, version) != (self.attempt, self.version):
            return
        stall = max(0.0, self.uploaded_at - self.clock.now) + self.faults.checkpoint_seconds
        self.outcome.stalled_seconds += stall
        self.count_shrunk()
        self.step, self.since = float(step), self.clock.now + stall
        self.uploaded_at = self.since + self.faults.upload_seconds
        self.clock.after(self.uploaded_at - self.clock.now, self.complete_checkpoint, attempt, step)
        if step < self.config.max_steps:
            self.plan_checkpoint(self.next_due())
        else:
            self.seconds = math.inf

    def complete_checkpoint(self, attempt: int, step: int) -> None:
        if attempt == self.attempt:
            self.complete = step

    def count_shrunk(self) -> None:
        if self.workers < self.config.most_workers:
            self.outcome.shrunk_seconds += max(0.0, self.clock.now - self.since)

    # ---- machines

    def crash(self) -> None:
        """A worker's process is killed."""
        self.outcome.losses += 1
        if self.members:
            self.end_group(counted=True)

    def lost(self, machine: int, announced: bool) -> None:
        if machine in self.members:
            # Ray Train counts announced losses separately, without a limit.
            self.end_group(counted=not announced, unseen=not announced)

    def noticed(self, machine: int) -> None:
        if machine in self.members:
            self.clock.after(self.stage.seen_seconds, self.answer, self.attempt)

    def answer(self, attempt: int) -> None:
        """Save after the current step."""
        if attempt == self.attempt and self.running and math.isfinite(self.seconds):
            step = math.floor(self.steps_done() + 1e-6) + 1
            if step < self.config.max_steps:
                self.plan_checkpoint(step)

    def came_back(self, machine: int) -> None:
        if self.waiting:
            self.start(self.faults.restart_seconds, self.least)
        elif self.running:
            self.consider_growing()

    def consider_growing(self) -> None:
        if self.possible() > self.workers:
            every = self.stage.resize_seconds
            passed = (self.clock.now - self.started) / every if every else 0.0
            self.clock.after((math.floor(passed) + 1 - passed) * every, self.grow, self.attempt)

    def grow(self, attempt: int) -> None:
        if attempt == self.attempt and self.possible() > self.workers:
            self.outcome.resizes += 1
            self.end_group(counted=False)

    def encoders_changed(self) -> None:
        if self.running and self.step < self.config.max_steps:
            self.count_shrunk()
            self.step = self.steps_done()
            self.set_pace()


class EncoderWatcher:
    """Tells a training run that its number of encoders changed; Ray Data repeats the tasks of lost ones."""

    def __init__(self, run: TrainingRun):
        self.run = run

    def lost(self, machine: int, announced: bool) -> None:
        self.run.encoders_changed()

    def came_back(self, machine: int) -> None:
        self.run.encoders_changed()

    def noticed(self, machine: int) -> None:
        """Encoders need no checkpoint."""


# ---- many draws


def simulate_stage(
    stage: Encoding | Training, random: np.random.Generator, losses: Sequence[Loss] | None = None
) -> Outcome:
    """One draw of a stage, or the outcome of a training run with the given `losses`.

    Raises RuntimeError if the stage waits for machines that never come back.
    """
    clock = Clock(random)
    run = EncodingRun(stage, clock) if isinstance(stage, Encoding) else TrainingRun(stage, clock, losses)
    clock.run_until(run.finished)
    outcome = run.outcome
    fleets = [run.machines, *([run.encoders] if getattr(run, "encoders", None) else [])]
    outcome.dollars = sum(machines.dollars() for machines in fleets)
    outcome.hours, outcome.events = clock.now / 3600, clock.count
    if isinstance(stage, Training):
        outcome.done += run.complete - run.first
    return outcome


def simulate(stages: Sequence[Encoding | Training], draws: int = 100, seed: int = 0) -> pd.DataFrame:
    """`draws` draws of a run, whose stages follow each other: a row for each draw and stage (`Outcome`).

    Draw i depends only on `seed` and i. Raises ValueError unless `draws` is a whole number above 0.
    """
    rows = []
    for draw in range(check_count("draws", draws)):
        random = np.random.default_rng([seed, draw])
        for stage in stages:
            rows.append({"draw": draw, "stage": stage.name, **dataclasses.asdict(simulate_stage(stage, random))})
    return pd.DataFrame(rows)


def without_losses(stage: Encoding | Training) -> Encoding | Training:
    """The same stage on machines that are never lost."""

    def calm(fleet):
        faults = dataclasses.replace(fleet.faults, failures_per_day=0.0, reclaims_per_day=0.0)
        return dataclasses.replace(fleet, faults=faults)

    changes = {"fleet": calm(stage.fleet)}
    if isinstance(stage, Training) and stage.encoders:
        changes["encoders"] = calm(stage.encoders)
    return dataclasses.replace(stage, **changes)


def summarize(runs: pd.DataFrame, quantiles: Iterable[float] = (0.1, 0.5, 0.9)) -> pd.DataFrame:
    """The result of `simulate`, summed over stages: a row for each quantile of the draws, and their mean."""
    totals = runs.drop(columns=["stage", "done", "events"]).groupby("draw").sum()
    totals["down_hours"], totals["shrunk_hours"] = totals["down_seconds"] / 3600, totals["shrunk_seconds"] / 3600
    shown = totals[["hours", "dollars", "losses", "notices", "restarts", "relaunches", "down_hours", "shrunk_hours"]]
    table = shown.quantile(list(quantiles))
    table.index = [f"{share:.0%} of the draws are below" for share in table.index]
    table.loc["mean"] = shown.mean()
    return table


# ---- Stable Diffusion 2


def sd2_run(
    num_gpus: int = 32,
    *,
    rows: int = 2_000_000_000,
    least_gpus: int | None = None,
    machine: planner.Machine = planner.MACHINES["p4de.24xlarge"],
    encoder_machine: planner.Machine = planner.MACHINES["g5.2xlarge"],
    num_encoders: int = full_run.PARAMETERS[256]["num_encoders"],
    spot_discount: float = 0.0,
    faults: planner.Faults | None = None,
    **changes: Any,
) -> list[Encoding | Training]:
    """The stages of the full run: all rows encoded at both sizes in one pass, then 256 and 512 pixels (`full_run`).

    Args:
        num_gpus: GPUs that train, on machines of kind `machine`; each takes one unit of the global batch.
        least_gpus: fewest GPUs that the run shrinks to; None: it waits for lost machines.
        spot_discount: share off the prices of both kinds of machines.
        changes: values of the training's parameters, such as `checkpoint_every`.

    Rates are `planner.trainer_rate`, reduced by `estimates.predict_scaling`, and `estimates.encoder_rate`.
    """
    faults = faults or planner.Faults()
    count = check_count("num_gpus", num_gpus) / machine.num_gpus
    if count != int(count):
        raise ValueError(f"num_gpus={num_gpus} is not a multiple of the {machine.num_gpus} GPUs of a {machine.name}.")
    price = 1 - planner.check_not_negative("spot_discount", spot_discount)
    encoders = Fleet(
        count=num_encoders,
        workers_each=encoder_machine.num_gpus,
        dollars_per_hour=price * encoder_machine.dollars_per_hour,
        faults=faults,
    )
    each = encoder_rate([256, 512], encoder_machine.accelerator)
    stages = [Encoding(fleet=encoders, rows=rows, rows_per_second=each)]
    trainers = Fleet(
        count=int(count),
        workers_each=machine.num_gpus,
        dollars_per_hour=price * machine.dollars_per_hour,
        faults=faults,
    )
    for resolution, parameters in full_run.PARAMETERS.items():
        workers = {"num_training_workers": (least_gpus or num_gpus, num_gpus), "units_per_step": num_gpus}
        unit_rows = parameters["global_batch_size"] // num_gpus
        workers["micro_batch_size"] = min(parameters["micro_batch_size"], unit_rows)
        config = TrainingConfig.from_parameters({**parameters, **workers, **changes})
        rate = planner.trainer_rate(resolution, machine.accelerator).images_per_second
        left = predict_scaling(865_910_724, unit_rows / rate, machine.gigabytes_per_second, (num_gpus,))
        seconds = unit_rows / rate / left["efficiency, hidden behind backward"].iloc[0]
        stages.append(Training(name=f"{resolution} pixels", config=config, fleet=trainers, unit_seconds=seconds))
    return stages
