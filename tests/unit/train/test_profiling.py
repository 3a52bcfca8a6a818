"""FLOPs, profiles and memory of a training step, and what a run tells of them."""

import dataclasses
import types

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

from helpers.config import TrainingConfig
from helpers.lesson import ablations, estimates
from helpers.production.extras import meter
from helpers.production.extras.meter import speed_summary
from helpers.train.metrics import StepLog, throughput
from tests.latents import refuse

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- FLOPs and peaks


def test_gpus_are_found_by_the_names_that_drivers_give():
    names = {
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA A10G": "A10G",
        "NVIDIA A10": "A10",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
    }
    assert {name: meter.find_accelerator(name) for name in names} == names
    assert meter.find_accelerator("NVIDIA RTX A1000") is None


def test_the_peak_is_known_only_of_gpus_with_a_data_sheet(monkeypatch):
    assert meter.peak_flops("cpu") is None
    for name, peak in (("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert meter.peak_flops("cuda", "bf16") == peak


# ---- memory


@pytest.mark.parametrize("ranks", [1, 2, 8, 32, 128])
def test_training_state_takes_sixteen_bytes_a_parameter_or_a_share(ranks):
    whole = 4 * 865_910_724
    ddp = estimates.memory("sd2-base", "ddp", ranks)
    assert ddp == {"parameters": whole, "gradients": whole, "optimizer": 2 * whole, "gathered": 0}
    for strategy, across in (("fsdp", ranks), ("fsdp-full", ranks), ("hsdp", min(8, ranks))):
        found = estimates.memory("sd2-base", strategy, ranks, precision="bf16")
        # Parameters are cut into rows: a few have fewer than there are ranks.
        assert whole / across <= found["parameters"] <= 1.02 * whole / across
        assert found["parameters"] == found["gradients"] == found["optimizer"] / 2
        assert found["gathered"] == whole / 2 if strategy != "fsdp-full" else found["gathered"] < 0.35 * whole / 2


# ---- the ablation


@pytest.mark.slow
def test_the_ablation_compares_each_setting_with_the_first(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)  # compiling has tests of its own, and takes a minute
    config = TrainingConfig(global_batch_size=4, resolution=32)
    rows = list(ablations.ablation(config, steps=2, warm_up=1))
    assert [row["setting"] for row in rows] == list(ablations.ABLATION)[:-1]
    assert rows[0]["speedup"] == 1 and rows[2]["speedup"] == rows[2]["images/s"] / rows[0]["images/s"]
    assert all(row["ms a step"] == pytest.approx(4000 / row["images/s"]) for row in rows)
    assert all(np.isnan(row["MFU"]) for row in rows)  # a CPU's peak is not known


def test_random_batches_fit_the_unet_and_are_dealt_to_ranks():
    config = TrainingConfig(
        unet_config="sd2-base", resolution=256, global_batch_size=8, units_per_step=4, num_training_workers=2
    )
    manifest, units = ablations.random_batch(config, rank=1, world=2)
    assert [unit.positions_U.tolist() for unit in units] == [[2, 3], [6, 7]]
    assert units[0].moments.shape == (2, 2, 4, 32, 32) and units[0].text.shape == (2, 77, 1024)
    filled = dataclasses.replace(manifest, buckets={"256": 8})
    refuse(filled, config, "random")


# ---- what a run tells


STEP = {"step_seconds": 0.5, "images_per_second": 128.0, "images_per_second_per_worker": 64.0, "mfu": 0.4}
STEP |= {"peak_memory_gib": 2.0, "data_wait_share": 0.1, "checkpoint_seconds": 0.0}


def test_the_summary_and_the_throughput_of_a_run_agree():
    """Rows over elapsed time, checkpoints included, without the first steps; the shares are of the same time."""
    changes = [
        {"images_per_second": 1.0, "data_wait_share": 0.9},  # warm-up
        {"checkpoint_seconds": 1.0},
        {"images_per_second": 64.0, "images_per_second_per_worker": 32.0, "mfu": 0.2},  # half the rows are masked
        {},
    ]
    metrics = pd.DataFrame([STEP | change for change in changes])
    summary = speed_summary({"a": metrics}, skip=1).loc["a"]
    rate, waiting = throughput(metrics, skip=1)
    assert summary["images/s"] == rate == (64 + 32 + 64) / 2.5 and summary["a worker"] == rate / 2
    assert summary["MFU"] == pytest.approx(0.5 / 2.5) and summary["peak memory, GiB"] == 2
    assert summary["checkpoints"] == 1 / 2.5 and summary["data"] == waiting == pytest.approx(0.15 / 2.5)


def test_what_was_not_measured_is_nan_in_the_summary():
    metrics = pd.DataFrame([STEP | {"mfu": None}] * 3)
    summary = speed_summary({"a": metrics}).loc["a"]
    assert np.isnan(summary["MFU"]) and summary["images/s"] == 128


class Run:
    """What a hook sees of a run on a CPU."""

    def __init__(self, manifest):
        self.config = TrainingConfig()
        self.train_step = types.SimpleNamespace(device=torch.device("cpu"), manifest=manifest)


def test_speed_counts_unmasked_rows_only_and_the_meter_adds_mfu(build_manifest, tmp_path):
    assert not dist.is_initialized()
    manifest = build_manifest()
    log, units = StepLog(str(tmp_path), 64), [types.SimpleNamespace(latents_spec=manifest.latents(64))]
    log.started -= 0.5
    found = log.measure({"num_kept": 60}, units, waited=0.05)
    assert found["masked_rows"] == 4 and found["resolution"] == 64 and found["checkpoint_seconds"] == 0
    assert found["images_per_second"] == found["images_per_second_per_worker"] == pytest.approx(120, rel=0.1)
    assert found["data_wait_share"] == pytest.approx(0.1, rel=0.1)
    with meter.Meter()(Run(manifest)) as hook:
        hook.after_step(1, units, found)
        assert found["mfu"] is None and 0.1 < found["peak_memory_gib"] < 100  # a CPU's peak is not known
        hook.peak = 1e9
        hook.after_step(1, units, found)
    flops = meter.training_flops("tiny", (4, 8, 8), (6, 128))
    assert found["mfu"] == pytest.approx(flops * found["images_per_second"] / 1e9)
