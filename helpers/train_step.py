"""One training step in plain PyTorch, on one process or many: the U-Net, its optimizer and EMA, and a batch of latents.

No Ray: Ray Train's workers, a plain loop and the tests all call this.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import torch
from torch.distributed.fsdp import FSDPModule

from . import diffusion, schema
from .config import TrainingConfig
from .distributed import rank, sum_over_ranks, world_size
from .unet import autocast, build_model, clip_gradients, computes_in_bf16, synchronise_gradients


@dataclasses.dataclass
class Unit:
    """U rows of a global batch.

    moments (U, 2, C, H, W), or (U, 1, C, H, W) of means alone, and text (U, L, D), both fp16. keep_U: False for rows
    that are masked out of the loss. positions_U: the rows' positions in the global batch. ids: one for each row.
    """

    moments: torch.Tensor
    text: torch.Tensor
    keep_U: torch.Tensor
    positions_U: np.ndarray
    ids: list

    @classmethod
    def from_arrow(cls, table: pa.Table, manifest: schema.Manifest, resolution: int, first_position: int) -> Unit:
        """From rows of latents; rows without latents at this resolution, and rows whose `keep` is False, are masked."""
        latents, embeddings = manifest.latents(resolution), manifest.embeddings
        moments, valid = latents.decode(table[latents.name])
        text, _ = embeddings.decode(table[embeddings.name])
        keep = valid & table["keep"].to_numpy() if "keep" in table.column_names else valid
        positions, ids = first_position + np.arange(len(moments)), table[schema.ID].to_pylist()
        return cls(to_tensor(moments), to_tensor(text), to_tensor(keep), positions, ids)

    @classmethod
    def masked(cls, manifest: schema.Manifest, resolution: int, num_rows: int) -> Unit:
        """Masked rows without ids: what a worker computes while others have more rows of the step."""
        specs, none = [manifest.latents(resolution), manifest.embeddings], np.zeros(num_rows, dtype=bool)
        columns = {spec.name: spec.encode(np.zeros((num_rows, *spec.shape)), none) for spec in specs}
        table = pa.table({**columns, schema.ID: pa.nulls(num_rows)})
        return dataclasses.replace(cls.from_arrow(table, manifest, resolution, 0), ids=[])

    def split(self, rows: int) -> Iterator[Unit]:
        """Micro-batches of `rows` rows; the last may be smaller."""
        for start in range(0, len(self.keep_U), rows):
            part = slice(start, start + rows)
            yield Unit(self.moments[part], self.text[part], self.keep_U[part], self.positions_U[part], self.ids[part])


def to_tensor(values: np.ndarray) -> torch.Tensor:
    """Copy an array (Arrow's buffers are read-only); pinned if there is a GPU, for asynchronous copies to it."""
    copy = torch.from_numpy(values.copy())
    return copy.pin_memory() if torch.cuda.is_available() else copy


class TrainStep:
    """The state of training on one worker: U-Net, optimizer, EMA; `step` trains on one global batch.

    Args:
        config: `TrainingConfig`.
        manifest: of the latents: shapes, scaling factor, the empty caption's embedding.
        device: this worker's device.
        profile_span: called as `with profile_span(name)` around each "forward", "backward" and "optimizer".
        fused: AdamW in one kernel; None: PyTorch's default, for comparison.
    """

    def __init__(
        self,
        config: TrainingConfig,
        manifest: schema.Manifest,
        device: torch.device | str = "cpu",
        profile_span: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
        fused: bool | None = True,
    ):
        self.config, self.device, self.profile_span = config, torch.device(device), profile_span
        self.manifest, self.scaling_factor = manifest, manifest.scaling_factor
        self.empty_LD = torch.from_numpy(manifest.empty_caption.astype(np.float32)).to(self.device)
        self.schedule = diffusion.noise_schedule(config.prediction_type)
        self.schedule.alphas_cumprod = self.schedule.alphas_cumprod.to(self.device)
        self.unet, self.model = build_model(config, self.device)
        self.ema = diffusion.EMA(self.unet, config.ema_decay, config.ema_start, warm_up=config.init_from is None)
        # A U-Net that FSDP2 casts to bf16 casts its inputs too; autocast would compute its norms in fp32.
        self.autocast_precision = "fp32" if computes_in_bf16(config) else config.precision
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=fused,
        )

    def row_losses(self, unit: Unit, step: int) -> torch.Tensor:
        """(U,) losses of a unit's rows at a step; 0 for masked rows."""
        moments, text, keep = (
            values.to(self.device, non_blocking=True) for values in (unit.moments, unit.text, unit.keep_U)
        )
        draws = diffusion.draw(
            self.config.seed,
            step,
            unit.positions_U,
            moments.shape[2:],
            caption_dropout=self.config.caption_dropout,
            device=self.device,
        )
        latents = diffusion.sample_latents(moments, draws.posterior_BCHW, self.scaling_factor)
        # Masked rows hold arbitrary bits. They are replaced, not multiplied by zero, because NaN * 0 is NaN.
        text = diffusion.drop_captions(text.float(), self.empty_LD, draws.dropped_B | ~keep)
        latents = torch.where(keep[:, None, None, None], latents, 0)
        with autocast(self.autocast_precision, self.device):
            losses = diffusion.row_losses(self.model, self.schedule, latents, text, draws, self.config.min_snr_gamma)
        return losses * keep

    def step(self, step: int, units: list[Unit]) -> dict[str, float]:
        """Train on this worker's units of global batch number `step` (from 0).

        Returns {"loss", "grad_norm", "learning_rate"}: the loss is the mean over the unmasked rows of the whole global
        batch, before this update. Raises FloatingPointError if the loss or the gradient is not finite, before any
        weight changes.
        """
        config = self.config
        num_kept = torch.tensor(float(sum(int(unit.keep_U.sum()) for unit in units)), device=self.device)
        num_kept = sum_over_ranks(num_kept).clamp(min=1)
        rows = config.micro_batch_size or config.unit_rows
        micro_batches = [part for unit in units for part in unit.split(rows)]
        # Every rank takes part in the same collectives, with as many micro-batches as the ranks with the most units.
        most = -(-config.units_per_step // world_size()) * (config.unit_rows // rows)
        if len(micro_batches) < most:
            masked = Unit.masked(self.manifest, config.resolution_at(step), rows)
            micro_batches += [masked] * (most - len(micro_batches))
        loss = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            last = micro_batch is micro_batches[-1]
            with synchronise_gradients(self.model, last, config.strategy):
                with self.profile_span("forward"):
                    part = self.row_losses(micro_batch, step).sum() / num_kept
                with self.profile_span("backward"):
                    # Gradients are averaged over the ranks, where the loss is a sum over them.
                    (part * world_size()).backward()
            loss += part.detach()
        with self.profile_span("optimizer"):
            norm = clip_gradients(self.model, max_norm=1.0)
            # The step's only wait for the GPU. The norm is over all ranks, so all ranks raise or none does.
            loss, norm = torch.stack([sum_over_ranks(loss), norm]).tolist()
            for name, value in (("loss", loss), ("gradient", norm)):
                if not np.isfinite(value):
                    raise FloatingPointError(
                        f"The {name} at step {step} is {value}: lower learning_rate or check the latents."
                    )
            learning_rate = config.learning_rate * diffusion.lr_multiplier(step, config)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.ema.update(step + 1)
        return {"loss": loss, "grad_norm": norm, "learning_rate": learning_rate}

    def validate(self, rows: pa.Table) -> tuple[float, float]:
        """`validation_loss` of the averaged weights, by all ranks together, between two steps; for all ranks.

        The averaged weights take the place of the trained ones meanwhile. Compiled blocks run as they were written:
        they would be compiled again for another number of rows.
        """
        with self.ema.swapped(), torch.compiler.set_stance("force_eager"):
            self.unet.eval()
            losses = validation_loss(self.unet, self.manifest, rows, self.config)
            self.unet.train()
            for module in self.unet.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # weights that stay gathered until a backward pass would be the averaged ones
        return losses


@torch.no_grad()
def validation_loss(
    unet: torch.nn.Module,
    manifest: schema.Manifest,
    rows: pa.Table,
    config: TrainingConfig,
    timesteps_per_row: int = 8,
) -> tuple[float, float]:
    """`(loss, unweighted loss)`: means over held-out latents `rows`, at evenly spaced timesteps, with fixed noise.

    The first is weighted as in training (`min_snr_gamma`), to be comparable with the training curve. Rows, noise and
    timesteps are the same every time, so that steps and runs can be compared. In a process group each rank computes its
    part of the rows, and all return the same.
    """
    device = next(unet.parameters()).device
    schedule = diffusion.noise_schedule(config.prediction_type)
    schedule.alphas_cumprod = schedule.alphas_cumprod.to(device)
    totals, num_mine = np.zeros(3), -(-rows.num_rows // world_size())
    for start in range(rank() * num_mine, (rank() + 1) * num_mine, 64):
        places = np.arange(start, min(start + 64, (rank() + 1) * num_mine))
        # All ranks compute the same number of rows, because sharded weights are gathered by all together.
        counts = torch.from_numpy(places < rows.num_rows).to(device)
        places = np.minimum(places, rows.num_rows - 1)
        unit = Unit.from_arrow(rows.take(places).combine_chunks(), manifest, config.largest_resolution, 0)
        for number in range(timesteps_per_row):
            draws = diffusion.draw(0, number, places, unit.moments.shape[2:], device=device)
            draws.timesteps_B[:] = int((number + 0.5) * 1000 / timesteps_per_row)
            latents = diffusion.sample_latents(unit.moments.to(device), draws.posterior_BCHW, manifest.scaling_factor)
            losses = diffusion.row_losses(unet, schedule, latents, unit.text.to(device).float(), draws)
            unweighted = (losses * counts).sum().item()
            # All rows have the same timestep here, and so the same weight.
            weight = diffusion.loss_weights(schedule, draws.timesteps_B[:1], config.min_snr_gamma).item()
            totals += unweighted * weight, unweighted, counts.sum().item()
    *totals, count = sum_over_ranks(torch.tensor(totals, device=device)).tolist()
    return tuple(total / max(1, count) for total in totals)
