"""The pauses of Ray Data's loop."""

import types

import pytest

from helpers.latents import throttle as throttle_module


def test_ray_datas_loop_is_paused_only_while_it_busy_waits(monkeypatch):
    now, throttle = 0.0, throttle_module.SchedulerThrottle()

    def sleep(seconds):
        nonlocal now
        now += seconds

    def pauses(seconds_of_a_step):
        for _ in range(20):
            sleep(seconds_of_a_step)
            before = now
            throttle.on_execution_step(None)
            yield now - before

    monkeypatch.setattr(throttle_module, "time", types.SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    assert list(pauses(0.001))[-1] == pytest.approx(0.05)
    assert list(pauses(0.1))[-1] < 0.001
