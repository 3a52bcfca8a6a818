"""The simulator: closed forms where there are some, and what holds for every draw."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.config import TrainingConfig
from helpers.lesson import planner, simulator
from helpers.resumable_job import ROWS_PER_SEGMENT

CALM = planner.Faults(failures_per_day=0.0, checkpoint_seconds=0.0, upload_seconds=0.0)


def fleet(count=4, workers_each=1, faults=CALM, **changes):
    values = {"dollars_per_hour": 10.0, "count": count, "workers_each": workers_each, "faults": faults}
    return simulator.Fleet(**{**values, **changes})


def training(faults=CALM, machines=4, workers=None, unit_seconds=1.0, fleet_changes=None, stage=None, **changes):
    """A run of a unit a worker, on machines of one worker."""
    values = {
        "num_training_workers": workers or machines,
        "units_per_step": machines,
        "global_batch_size": 8 * machines,
        "max_steps": 1000,
        "checkpoint_every": 100,
        "validate_every": 0,
        "max_failures": 10**6,
    }
    config = TrainingConfig(**{**values, **changes})
    mine = fleet(machines, faults=faults, **(fleet_changes or {}))
    return simulator.Training(config=config, fleet=mine, unit_seconds=unit_seconds, **(stage or {}))


def encoding(faults=CALM, machines=2, segments=3, **changes):
    values = {"rows_per_second": 100.0, "segment_seconds": 36.0, "begun_again": 0.0}
    rows = segments * machines * ROWS_PER_SEGMENT
    return simulator.Encoding(fleet=fleet(machines, faults=faults), rows=rows, **{**values, **changes})


def draw(stage, seed=0, losses=None):
    return simulator.simulate_stage(stage, np.random.default_rng(seed), losses)


# ---- closed forms


def test_without_losses_a_run_takes_the_planners_time():
    rate = planner.Rate(8.0)  # a unit of 8 rows a second
    for changes in ({}, {"max_steps": 1037, "checkpoint_every": 50}):
        stage = training(**changes)
        found, config = draw(stage), stage.config
        rows = config.max_steps * config.global_batch_size
        machine = planner.Machine("m", 1, "A100", 10.0, 50.0, "made up")
        plan = planner.Scenario(trainer=rate, encoder=rate, trainer_machine=machine, rows=rows, storage_dollars=0.0)
        expected = planner.estimate(plan, "offline")
        assert found.hours == pytest.approx(expected.training_hours, rel=1e-9)
        assert found.dollars == pytest.approx(40 * expected.training_hours, rel=1e-9)
        assert (found.restarts, found.repeated, found.losses) == (0, 0, 0)


def test_checkpoints_add_their_stall_and_the_last_upload():
    faults = dataclasses.replace(CALM, checkpoint_seconds=3.0, upload_seconds=20.0)
    found = draw(training(faults))
    assert 3600 * found.hours == pytest.approx(1000 + 10 * 3 + 20) and found.stalled_seconds == pytest.approx(30)
    # A save waits for the upload before it.
    slow = dataclasses.replace(CALM, upload_seconds=150.0)
    assert 3600 * draw(training(slow)).hours == pytest.approx(1000 + 9 * 50 + 150)


def test_without_losses_a_job_takes_its_rows_and_its_segments():
    stage = encoding(segments=3)
    found = draw(stage)
    assert stage.segments == [2 * ROWS_PER_SEGMENT] * 3 and found.done == stage.rows
    assert 3600 * found.hours == pytest.approx(3 * (36 + ROWS_PER_SEGMENT / 100))
    assert found.dollars == pytest.approx(20 * found.hours)


def test_losses_are_a_poisson_process():
    """Machines that are back at once: as many losses as rate x machines x days, with that variance."""
    faults = dataclasses.replace(CALM, failures_per_day=2.0, restart_seconds=0.0, return_seconds=0.0)
    stage = encoding(faults, machines=4, segments=100, begun_again=0.0)
    counts = [draw(stage, seed).losses for seed in range(200)]
    expected = 4 * 2.0 * draw(simulator.without_losses(stage)).hours / 24
    assert np.mean(counts) == pytest.approx(expected, abs=4 * math.sqrt(expected / 200))
    assert np.var(counts) == pytest.approx(expected, rel=0.4)


def test_rare_failures_cost_what_young_and_daly_say():
    """The planner's first-order loss, against the mean of the draws, within its standard error."""
    faults = planner.Faults(
        failures_per_day=0.3,
        checkpoint_every_seconds=1800.0,
        checkpoint_seconds=5.0,
        upload_seconds=60.0,
        restart_seconds=120.0,
        return_seconds=600.0,
    )
    stage = training(faults, unit_seconds=1.0, max_steps=864_000, checkpoint_every=1800)  # ten days
    ratios = np.array([3600 * draw(stage, seed).hours / 864_000 for seed in range(60)])
    expected = faults.slowdown(4) - 1
    assert ratios.mean() - 1 == pytest.approx(expected, rel=0.05)


def test_the_best_interval_is_the_best_of_the_draws():
    costs = {}
    faults = planner.Faults(failures_per_day=3.0, checkpoint_seconds=20.0, upload_seconds=0.0, return_seconds=0.0)
    best = round(planner.best_interval(20.0, 86_400 / 12))
    for every in (best // 4, best, 4 * best):
        stage = training(faults, max_steps=200_000, checkpoint_every=every)
        costs[every] = np.mean([draw(stage, seed).hours for seed in range(10)])
    assert min(costs, key=costs.get) == best


# ---- the rules, by losses that are given


def test_a_killed_worker_costs_the_steps_since_a_checkpoint():
    faults = dataclasses.replace(CALM, restart_seconds=30.0)
    found = draw(training(faults), losses=[simulator.Loss(250.5)])
    assert (found.restarts, found.repeated, found.losses) == (1, 50, 1)
    assert found.down_seconds == 30 and 3600 * found.hours == pytest.approx(1000 + 50.5 + 30)


def test_a_checkpoint_that_is_not_uploaded_does_not_count():
    faults = dataclasses.replace(CALM, restart_seconds=30.0, upload_seconds=60.0)
    assert draw(training(faults), losses=[simulator.Loss(259.5)]).repeated == 159
    assert draw(training(faults), losses=[simulator.Loss(260.5)]).repeated == 60


def test_a_run_of_fixed_size_waits_for_its_machine():
    faults = dataclasses.replace(CALM, restart_seconds=30.0)
    found = draw(training(faults), losses=[simulator.Loss(150.5, machine=1, back_after=400.0)])
    assert found.repeated == 50 and found.down_seconds == 430 and found.shrunk_seconds == 0
    assert found.dollars == pytest.approx((40 * found.hours) - 10 * 400 / 3600)  # a lost machine is not paid


def test_an_elastic_run_waits_a_minute_for_a_lost_machine_then_shrinks():
    """Three workers take as long as two for four units. It grows within a minute, and repeats what is not saved."""
    faults = dataclasses.replace(CALM, restart_seconds=10.0)
    stage = training(faults, workers=(2, 4))
    assert [stage.compute_seconds(count) for count in (4, 3, 2)] == [1, 2, 2]
    found = draw(stage, losses=[simulator.Loss(150.5, machine=1, back_after=300.0)])
    # Lost at 150.5, goes on at 220.5 from 100, at 2 s a step; back at 450.5, looked at by 510.5 (290 s: step 245).
    assert (found.restarts, found.resizes) == (2, 1)
    assert found.repeated == 50 + 45 and found.down_seconds == 80
    assert found.shrunk_seconds == pytest.approx(290)
    # Back before the minute is over: it goes on with all workers.
    found = draw(stage, losses=[simulator.Loss(150.5, machine=1, back_after=40.0)])
    assert (found.restarts, found.resizes, found.repeated) == (1, 0, 50)
    assert found.down_seconds == 50 and found.shrunk_seconds == 0


def test_fewer_than_the_least_workers_wait():
    faults = dataclasses.replace(CALM, restart_seconds=10.0)
    losses = [simulator.Loss(150.5, machine=number, back_after=200.0 + number) for number in range(3)]
    found = draw(training(faults, workers=(2, 4)), losses=losses)
    assert found.down_seconds == pytest.approx(200 + 10 + 10, abs=0.1) and found.resizes == 1
    with pytest.raises(RuntimeError, match="never come back"):
        draw(training(faults), losses=[simulator.Loss(10.0, machine=0)])


def test_a_notice_is_answered_with_a_checkpoint():
    faults = dataclasses.replace(CALM, restart_seconds=10.0, upload_seconds=5.0)
    loss = simulator.Loss(150.5, machine=0, back_after=0.0, notice_seconds=120.0)
    found = draw(training(faults, stage={"seen_seconds": 7.0}), losses=[loss])
    # Notice at 150.5, seen at 157.5, saved after step 158; the one of step 200 is due by itself, and newer.
    assert found.repeated == 70 and found.notices == 1
    late = draw(training(faults, checkpoint_every=1000, stage={"seen_seconds": 7.0}), losses=[loss])
    assert late.repeated == 270 - 158
    cut_short = dataclasses.replace(loss, step=262.5, notice_seconds=8.0)
    assert draw(training(faults, checkpoint_every=1000), losses=[cut_short]).repeated == 270


def test_after_too_many_failures_somebody_starts_the_run_again():
    stage = training(CALM, max_failures=1, stage={"relaunch_seconds": 500.0})
    stage = dataclasses.replace(stage, fleet=fleet(4, faults=dataclasses.replace(CALM, restart_seconds=10.0)))
    losses = [simulator.Loss(step) for step in (110.5, 230.5, 900.5)]
    found = draw(stage, losses=losses)
    assert (found.relaunches, found.restarts) == (1, 3) and found.down_seconds == pytest.approx(530)
    # Announced losses do not count (Ray Train's `max_preemption_failures`).
    losses = [simulator.Loss(step, 0, back_after=0.0, notice_seconds=60.0) for step in (110.5, 310.5, 510.5)]
    assert draw(stage, losses=losses).relaunches == 0


def test_an_online_run_goes_at_its_encoders_pace():
    """32 rows a step at 8 rows/s an encoder: two encoders give 2 s a step, one gives 4."""
    stage = training(CALM, stage={"encoders": fleet(2), "encoder_rows_per_second": 8.0})
    assert 3600 * draw(stage).hours == pytest.approx(2000)
    faults = dataclasses.replace(CALM, failures_per_day=100.0, return_seconds=1000.0)
    fewer = draw(dataclasses.replace(stage, encoders=fleet(2, faults=faults)))
    assert fewer.losses > 1 and fewer.restarts == 0 and 2000 < 3600 * fewer.hours < 100_000


def test_a_segment_that_begins_again_repeats_its_rows():
    faults = dataclasses.replace(CALM, failures_per_day=60.0, return_seconds=60.0)
    again = draw(encoding(faults, begun_again=1.0, max_failures=1, relaunch_seconds=1000.0))
    assert again.losses >= again.restarts > 1 and again.relaunches >= 1 and again.repeated > 0
    going_on = draw(encoding(faults, begun_again=0.0))
    assert going_on.restarts == going_on.repeated == 0 and going_on.hours < again.hours
    assert again.done == going_on.done == encoding().rows


# ---- what holds for every draw

FAULTS = st.builds(
    planner.Faults,
    failures_per_day=st.floats(0, 40),
    reclaims_per_day=st.floats(0, 40),
    notice_seconds=st.floats(0, 200),
    return_seconds=st.floats(0, 4000),
    restart_seconds=st.floats(0, 300),
    checkpoint_seconds=st.floats(0, 10),
    upload_seconds=st.floats(0, 100),
)


@settings(max_examples=30, deadline=None)
@given(FAULTS, st.sampled_from([4, (1, 4), (3, 4)]), st.sampled_from([7, 100, 1000]), st.integers(0, 10**6))
def test_every_draw_of_a_training_adds_up(faults, workers, every, seed):
    stage = training(faults, workers=workers, checkpoint_every=every, max_steps=500, max_failures=5)
    found, calm = draw(stage, seed), draw(simulator.without_losses(stage))
    seconds = 3600 * found.hours
    assert found.done == calm.done == 500
    assert seconds >= 3600 * calm.hours - 1e-6  # never before the run without losses
    pace = stage.compute_seconds(4)
    least = (500 + found.repeated) * pace + found.down_seconds + found.stalled_seconds
    assert seconds >= least - 1e-6
    # Steps on fewer workers are slower; each group may end within a step or while it waits for an upload, as the last.
    slower = stage.compute_seconds(stage.config.fewest_workers)
    groups = found.restarts + 1
    assert seconds <= least + found.shrunk_seconds + groups * (slower + faults.upload_seconds) + 1e-6
    assert found.dollars <= 40 * found.hours + 1e-6 and found.resizes <= found.restarts
    assert found.shrunk_seconds == 0 or isinstance(workers, tuple)
    assert found == draw(stage, seed)  # the same seed, the same draw


@settings(max_examples=40, deadline=None)
@given(FAULTS, st.floats(0, 1), st.integers(0, 10**6))
def test_every_draw_of_a_job_commits_each_row_once(faults, begun_again, seed):
    faults = dataclasses.replace(faults, failures_per_day=faults.failures_per_day / 4)
    stage = encoding(faults, begun_again=begun_again, segments=2)
    found, calm = draw(stage, seed), draw(simulator.without_losses(stage))
    assert found.done == stage.rows and found.hours >= calm.hours - 1e-9
    assert 3600 * found.hours >= (found.done + found.repeated) / 200 + found.down_seconds - 1e-3
    assert found == draw(stage, seed)


# ---- the full run


@functools.cache
def full_run_stages():
    return simulator.sd2_run(32, least_gpus=16, faults=planner.Faults(reclaims_per_day=0.05))


def test_the_full_run_takes_the_published_hours_without_losses():
    first, *phases = [simulator.without_losses(stage) for stage in full_run_stages()]
    runs = simulator.simulate(phases, draws=1)
    assert runs["done"].sum() == 700_000
    hours = (runs["hours"] - runs["stalled_seconds"] / 3600).sum()
    assert 32 * hours == pytest.approx(13_165, rel=1e-3) and hours / 24 == pytest.approx(17.1, abs=0.1)
    encoded = draw(first)
    assert encoded.done == 2_000_000_000 and encoded.hours == pytest.approx(424 + 1.7, abs=0.5)  # as the README says


def test_draws_of_the_full_run_are_thousands_of_events():
    """Not its 700,000 steps; and they depend on the seed and their number alone."""
    runs = simulator.simulate(full_run_stages(), draws=5)
    assert runs.groupby("draw")["events"].sum().max() < 10_000
    table = simulator.summarize(runs)
    assert list(table.index[-1:]) == ["mean"] and (table["hours"] > 800).all() and len(runs) == 15
    assert simulator.simulate(full_run_stages(), draws=5).equals(runs)
    assert not simulator.simulate(full_run_stages(), draws=5, seed=1).equals(runs)
    assert simulator.simulate(full_run_stages(), draws=2).equals(runs[:6])  # draw i is the same among more draws


@pytest.mark.parametrize("gpus", [64, 128])
def test_more_gpus_take_less_time_for_the_same_samples(gpus):
    stages = [simulator.without_losses(stage) for stage in simulator.sd2_run(gpus)[1:]]
    runs = simulator.simulate(stages, draws=1)
    assert runs["done"].sum() == 700_000 and 412 * 32 / gpus < runs["hours"].sum() < 420 * 32 / gpus * 1.1


# ---- bad input


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: fleet(0), "count=0"),
        (lambda: fleet(dollars_per_hour=-3), "dollars_per_hour=-3"),
        (lambda: encoding(rows_per_second=0), "rows_per_second=0"),
        (lambda: encoding(begun_again=-1), "begun_again=-1"),
        (lambda: training(unit_seconds=math.inf), "unit_seconds=inf"),
        (lambda: training(stage={"encoders": fleet(2)}), "encoder_rows_per_second=None"),
        (lambda: dataclasses.replace(training(), fleet=fleet(2)), "num_training_workers=4 cannot start on 2 machines"),
        (lambda: simulator.simulate([training()], draws=0), "draws=0"),
        (lambda: simulator.sd2_run(12), "num_gpus=12"),
    ],
)
def test_bad_values_are_named_in_one_sentence(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith(".")
