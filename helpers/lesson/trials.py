"""Paired trials: settings of a training run compared seed by seed, with an interval around the difference.

The loss of a recipe varies between seeds, often by more than two recipes differ. So each setting is trained once per
seed. With the same seed, all settings share the initial weights, the rows of each step, their noise and dropped
captions. The effect of a seed is then common to all settings and cancels in their difference.

With `timestep_sampling="uniform"` they share timesteps too; with importance sampling these depend on the objective.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from ..config import TrainingConfig
from ..evaluate import losses_by_noise
from ..latents import held_out
from ..latents.manifest import DataSets, Manifest
from ..latents.plan import load_plan
from ..latents.read import latents_reader, read_chunks, worker_units
from ..model import diffusion
from ..production.data import exclusions
from ..train.step import TrainStep, Unit

NUM_ROWS = 256  # held-out rows that errors are measured on


def run(config: TrainingConfig, settings: Mapping[str, Mapping[str, object]], seeds: Sequence[int]) -> pd.DataFrame:
    """Train each setting with each seed; returns a frame with columns setting, seed, metric, value.

    The metrics are those of `held_out_errors`, on rows that no setting trains on.

    Args:
        config: fields that the settings have in common.
        settings: name -> fields that differ, such as {"prediction_type": "epsilon"}.
        seeds: seeds of the trials, in place of the config's.

    Raises ValueError for fewer than two settings or seeds, or a name that is not a field of `TrainingConfig`.
    """
    if len(settings) < 2:
        raise ValueError(f"settings={list(settings)} leaves nothing to compare: give two or more.")
    if len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(
            f"seeds={list(seeds)} must be at least two different seeds: one cannot show how much results vary."
        )
    configs = {name: dataclasses.replace(config, **changes) for name, changes in settings.items()}
    rows = held_out.first(config.proportions, config.largest_resolution, NUM_ROWS)
    if rows is None:
        raise ValueError(f"{config.latents_uri} holds no held-out rows: encode it with a validation_share above 0.")
    manifest = DataSets.open(config.proportions).first
    records = []
    for seed in seeds:  # seed by seed, so that results are paired even after an interruption
        for name, setting in configs.items():
            trial, started = dataclasses.replace(setting, seed=seed), time.perf_counter()
            values = held_out_errors(train(trial), trial, manifest, rows)
            records += [(name, seed, metric, float(value)) for metric, value in values.items()]
            (metric, value), *_ = values.items()
            print(f"{name}, seed {seed}: {metric} {value:.4f}, {time.perf_counter() - started:.0f} s", flush=True)
    return pd.DataFrame(records, columns=["setting", "seed", "metric", "value"])


def train(config: TrainingConfig) -> torch.nn.Module:
    """The averaged denoiser of a run that trains in this process, without Ray, on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = TrainStep(config, DataSets.open(config.proportions).first, device)
    for step, units in enumerate(batches(config)):
        trained.step(step, units)
    trained.ema.swap()
    return trained.denoiser.eval()


def batches(config: TrainingConfig) -> Iterator[list[Unit]]:
    """The global batches of a run's steps, as Ray Train's workers get them, read in this process."""
    data, steps = DataSets.open(config.proportions), range(config.max_steps)
    plan = load_plan(data, config)
    chunks = plan.chunk_range(0, len(steps))
    excluded = exclusions.Exclusions(**(config.extras.get("exclusions") or {}))
    read = exclusions.mask(latents_reader(plan), excluded.is_excluded)
    options = {"first_chunk": chunks.start, "first_step": 0, "end_step": len(steps), "read": read}
    blocks = read_chunks({"id": range(len(chunks))}, plan=plan, **options)
    for step, units in zip(steps, worker_units(blocks, plan, steps, 0, 1), strict=True):
        latents = plan.latents_at(step)
        yield [
            Unit.from_arrow(rows, data.first, latents, unit % config.units_per_step * config.unit_rows)
            for unit, rows in units.items()
        ]


def held_out_errors(
    denoiser: torch.nn.Module, config: TrainingConfig, manifest: Manifest, rows: pa.Table
) -> dict[str, float]:
    """Errors on held-out latents that are comparable whatever the denoiser predicts: v or the noise.

    A prediction of v determines one of the noise and one of the clean latents x0. At one timestep their errors are
    multiples of each other: mse(noise) = a mse(v) and mse(x0) = (1 - a) mse(v), with a = alphas_cumprod there. So the
    ranking of two denoisers at a timestep does not depend on the choice. Over all timesteps it depends on the weights,
    and min-SNR's apply to the error of x0, whatever the denoiser predicts.

    Returns {"min-SNR error": mean over rows and timesteps of min(SNR, 5) mse(x0), and for each timestep "t=50": mse(v),
    ...}. Noise is the same in every call. Raises ValueError for a model that predicts flow.
    """
    if config.prediction_type == "flow":
        raise ValueError("prediction_type='flow' adds other noise at a timestep than epsilon and v: compare pictures.")
    losses = losses_by_noise(denoiser, manifest, rows, config, timesteps_per_row=10)
    timesteps, errors = losses[:, 0].astype(int), losses[:, 2]
    schedule = diffusion.noise_schedule(config.prediction_type, config.zero_terminal_snr)
    alphas = schedule.alphas_cumprod[timesteps].double().numpy()
    of_v = errors if config.prediction_type == "v_prediction" else errors / alphas
    of_x0 = (1 - alphas) * of_v
    weighted = float(np.mean(np.minimum(alphas / (1 - alphas), 5) * of_x0))
    return {"min-SNR error": weighted, **{f"t={t}": float(v) for t, v in zip(timesteps, of_v, strict=True)}}


def compare_settings(results: pd.DataFrame) -> pd.DataFrame:
    """Compare each setting with the first, by metric: the mean of the differences seed by seed, and its t interval.

    `results`: what `run` returned, or such a frame from elsewhere.

    Columns: setting, metric, baseline and value (means over the seeds), difference (value - baseline), low and high
    (of its 95 % interval), seeds. A difference whose interval excludes 0 is rarely chance; among many metrics, some
    will be. Raises ValueError if a setting lacks a seed that another one has, or for fewer than two seeds.
    """
    names, rows = list(dict.fromkeys(results["setting"])), []
    for metric in dict.fromkeys(results["metric"]):
        values = results[results["metric"] == metric].pivot(index="seed", columns="setting", values="value")
        lacking = values.reindex(columns=names).isna().stack()
        if lacking.any():
            seed, name = lacking.index[lacking][0]
            raise ValueError(f"{name!r} has no {metric!r} with seed {seed}: the settings must have the same seeds.")
        for name in names[1:]:
            differences = (values[name] - values[names[0]]).tolist()
            low, high = t_interval(differences)
            means = values[names[0]].mean(), values[name].mean(), statistics.mean(differences)
            rows.append((name, metric, *means, low, high, len(differences)))
    return pd.DataFrame(rows, columns=["setting", "metric", "baseline", "value", "difference", "low", "high", "seeds"])


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval around the mean of a sample. Raises ValueError for fewer than two values."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} value(s): an interval needs at least two, of different seeds.")
    half = t_quantile(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, by numerical integration.

    With t = sqrt(degrees) tan(angle), the density of the angle is proportional to cos(angle) ** (degrees - 1).
    """
    angles = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    density = np.cos(angles) ** (degrees - 1)
    cumulative = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(degrees**0.5 * np.tan(np.interp(probability, cumulative / cumulative[-1], angles)))
