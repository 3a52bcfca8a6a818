"""The benchmarks for GPUs, tried on a CPU."""

import sys

import pytest

from tests.benchmarks import gpu_step

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_gpu_benchmark_measures_each_setting_and_tells_what_the_fastest_spends_its_time_on(monkeypatch, capsys):
    eager = {name: setting for name, setting in gpu_step.SETTINGS.items() if setting[1:] == (None, None)}
    assert len(eager) == 3
    monkeypatch.setattr(gpu_step, "SLOW", {})
    monkeypatch.setattr(
        gpu_step, "SETTINGS", {**eager, "no such backend": ({}, None, gpu_step.SDPBackend.CUDNN_ATTENTION)}
    )
    monkeypatch.setattr(
        sys, "argv", ["gpu_step", "--unet", "tiny", "--resolution", "32", "--batch", "2", "4", "--steps", "1"]
    )
    gpu_step.main()
    said = capsys.readouterr().out
    assert "failed: no such backend, batch 2: " in said and said.count("MFU") >= 4
    assert "where the time of the fastest goes" in said and "convolution" in said
