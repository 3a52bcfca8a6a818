"""The loss on held-out rows by noise level. The noise is the same every time, so steps and runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import torch

from .config import TrainingConfig
from .distributed import rank, sum_over_ranks, world_size
from .latents import schema
from .latents.manifest import Manifest
from .model import diffusion
from .model.sharding import autocast
from .train.step import Unit, training_schedule

BATCH_SIZE = 64
Batches = Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]  # rows, their positions (B,), whether they count (B,) bool
# Held-out rows (`held_out.of_run`), or a function with `num_rows` that streams those with the latents of a column.
Rows = pa.Table | Callable[[schema.ColumnSpec], Batches]


def validation_loss(
    denoiser: torch.nn.Module, manifest: Manifest, rows: Rows, config: TrainingConfig, timesteps_per_row: int = 8
) -> tuple[float, float]:
    """`(loss, unweighted loss)`: the means of `losses_by_noise` over its timesteps."""
    losses = losses_by_noise(denoiser, manifest, rows, config, timesteps_per_row)
    return tuple(losses[:, 1:].mean(axis=0).tolist())


@torch.no_grad()
def losses_by_noise(
    denoiser: torch.nn.Module, manifest: Manifest, rows: Rows, config: TrainingConfig, timesteps_per_row: int = 8
) -> np.ndarray:
    """(T, 3): timestep, loss, unweighted loss: means over `rows` with fixed noise, at T timesteps.

    The timesteps are the middles of T equal parts of the noise schedule. Only rows with latents at the largest
    resolution count, in any of its shapes.

    The loss is weighted as in training (`min_snr_gamma`), so that the training curve compares with it. Each rank
    computes its share of the rows, and all ranks return the same. The precision is that of training: trainers and
    tasks find the same losses.
    """
    device = next(denoiser.parameters()).device
    schedule = training_schedule(config, manifest, device)
    timesteps = ((np.arange(timesteps_per_row) + 0.5) * diffusion.NUM_TIMESTEPS / timesteps_per_row).astype(int)
    totals = np.zeros((timesteps_per_row, 3))
    for spec in manifest.latents_at(config.largest_resolution):
        batches = table_batches(rows, spec) if isinstance(rows, pa.Table) else rows(spec)
        for encoded, positions_B, counts_B in batches:
            unit = Unit.from_arrow(encoded.combine_chunks(), manifest, spec, 0)
            moments, text, _, mask = unit.to(device)
            counts = torch.from_numpy(counts_B).to(device)
            for number, timestep in enumerate(timesteps):
                draws = diffusion.random_draws(0, number, positions_B, moments.shape[2:], device=device)
                draws.timesteps_B[:] = int(timestep)
                posterior, scales = draws.posterior_BCHW, (manifest.scaling_factor, manifest.shift_factor)
                latents = diffusion.sample_latents(moments, posterior, *scales)
                with autocast(denoiser, config.precision):
                    losses = diffusion.row_losses(denoiser, schedule, latents, text.float(), draws, mask_BL=mask)
                unweighted = (losses * counts).sum().item()
                # All rows have the same timestep here, and so the same weight.
                weight = diffusion.loss_weights(schedule, draws.timesteps_B[:1], config.min_snr_gamma).item()
                totals[number] += unweighted * weight, unweighted, counts_B.sum()
    totals = sum_over_ranks(torch.tensor(totals, device=device)).cpu().numpy()
    return np.column_stack([timesteps, totals[:, :2] / totals[:, 2:].clip(min=1)])


def table_batches(rows: pa.Table, latents: schema.ColumnSpec) -> Batches:
    """This rank's batches of the rows of a table that have these latents."""
    if latents.name in rows.column_names:
        encoded = rows.filter(rows[latents.name].is_valid())
        for positions_B, counts_B in rank_batches(encoded.num_rows):
            yield encoded.take(positions_B), positions_B, counts_B


def rank_batches(num_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`(row numbers (B,), whether they count (B,) bool)` of this rank's batches.

    All ranks compute the same number of rows, because they gather sharded weights together. For that, the last row is
    repeated and does not count.
    """
    rows_per_rank = -(-num_rows // world_size())
    end = (rank() + 1) * rows_per_rank
    for start in range(rank() * rows_per_rank, end, BATCH_SIZE):
        numbers = np.arange(start, min(start + BATCH_SIZE, end))
        yield numbers.clip(max=num_rows - 1), numbers < num_rows
