"""Benchmarks for GPUs, run on a CPU as a smoke test."""

import sys

import pytest

from tests.benchmarks import gpu_step

pytestmark = pytest.mark.usefixtures("one_thread")


def test_gpu_step_measures_each_setting_and_profiles_the_fastest(monkeypatch, capsys):
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
    printed = capsys.readouterr().out
    assert "failed: no such backend, batch 2: " in printed and printed.count("MFU") >= 4
    assert "where the time of the fastest goes" in printed and "convolution" in printed
