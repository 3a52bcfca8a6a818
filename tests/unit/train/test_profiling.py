"""FLOPs, profiles and memory of a training step, and what a run tells of them."""

import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.config import TrainingConfig
from helpers.lesson import ablations
from helpers.production.extras import meter
from helpers.train.metrics import StepLog

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- FLOPs and peaks


# ---- memory


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


# ---- what a run tells


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
