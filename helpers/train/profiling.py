"""How fast runs are, and on what hardware. No Ray."""

from __future__ import annotations

import pandas as pd
import torch

WARM_UP = 20  # steps; at most half of a run


def throughput(metrics: pd.DataFrame, skip: int = WARM_UP) -> tuple[float, float]:
    """`(images/s, share of the time spent waiting for data)` of a run, the one definition used everywhere.

    Images/s are unmasked rows over elapsed time, pauses for checkpoints included, without the first `skip` steps. They
    are a ratio of sums, not a mean over steps: data for several steps arrives together, and one step waits for all of
    them. Time between two attempts is not counted.

    `metrics`: columns images_per_second, step_seconds, checkpoint_seconds, data_wait_share.
    """
    steps = after_warm_up(metrics, skip)
    seconds = (steps["step_seconds"] + steps["checkpoint_seconds"]).sum()
    rows = (steps["images_per_second"] * steps["step_seconds"]).sum()
    return rows / seconds, (steps["data_wait_share"] * steps["step_seconds"]).sum() / seconds


def after_warm_up(metrics: pd.DataFrame, skip: int) -> pd.DataFrame:
    return metrics.iloc[min(skip, len(metrics) // 2) :]


def speed_summary(metrics: dict[str, pd.DataFrame], skip: int = WARM_UP) -> pd.DataFrame:
    """The speed of runs as a frame: one row per run of {name: metrics}.

    The first `skip` steps are left out, as in `throughput`. Columns:
        images/s: see `throughput`
        a worker: images/s per worker
        MFU: NaN if the peak is not known
        peak memory, GiB
        data: share of the elapsed time spent waiting for data
        communication: share of the elapsed time in collectives that do not overlap with compute; NaN if it was not
            measured (`Meter`)
        checkpoints: share of the elapsed time in pauses for checkpoints
    """
    rows = {}
    for name, frame in metrics.items():
        steps = after_warm_up(frame, skip)
        seconds, paused = steps["step_seconds"], steps["checkpoint_seconds"].sum()
        elapsed = seconds.sum() + paused
        rate, waiting = throughput(frame, skip)
        rows[name] = {
            "images/s": rate,
            "a worker": (steps["images_per_second_per_worker"] * seconds).sum() / elapsed,
            "MFU": (steps["mfu"].astype(float) * seconds).sum(min_count=1) / elapsed,
            "peak memory, GiB": frame["peak_memory_gib"].max(),
            "data": waiting,
            "communication": frame["communication_share"].astype(float).median() * seconds.sum() / elapsed,
            "checkpoints": paused / elapsed,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def hardware(device: torch.device | str) -> str:
    """What a speed was measured on, such as "NVIDIA H200, torch 2.13.0"."""
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads a worker"
    return f"{name}, torch {torch.__version__}"
