"""One training step: the U-Net, its EMA and optimizer, and what they do with a batch of latents. No Ray.

Ray Train's workers, a bare loop and tests all call this.
"""

import contextlib
import dataclasses

import numpy as np
import torch
import torch.distributed as dist

from . import diffusion, schema
from .unet import autocast, build_model, clip_gradients, computes_in_bf16, synchronise_gradients


@dataclasses.dataclass
class Unit:
    """U rows of a global batch, on their way to the U-Net.

    moments (U, 2, C, H, W), or (U, 1, C, H, W) of means alone, and text (U, L, D) in fp16; `keep_U` False masks a row out
    of the loss; `positions_U` are the rows' places in the global batch.
    """

    moments: torch.Tensor
    text: torch.Tensor
    keep_U: torch.Tensor
    positions_U: np.ndarray
    ids: list

    @classmethod
    def from_arrow(cls, table, manifest, resolution, first_position):
        """From a table of latents rows; a column `keep` is taken if there is one."""
        latents, embeddings = manifest.latents(resolution), manifest.embeddings
        moments, valid = latents.decode(table[latents.name])
        text, _ = embeddings.decode(table[embeddings.name])
        keep = valid & table["keep"].to_numpy() if "keep" in table.column_names else valid
        positions, ids = first_position + np.arange(len(moments)), table[schema.ID].to_pylist()
        return cls(to_tensor(moments), to_tensor(text), to_tensor(keep), positions, ids)

    def split(self, rows):
        """Micro-batches of `rows` rows."""
        for start in range(0, len(self.ids), rows):
            part = slice(start, start + rows)
            yield Unit(self.moments[part], self.text[part], self.keep_U[part], self.positions_U[part], self.ids[part])


def to_tensor(values):
    """A copy of an array, because Arrow's buffers are read-only; pinned where there is a GPU, which then need not be waited for."""
    copy = torch.from_numpy(values.copy())
    return copy.pin_memory() if torch.cuda.is_available() else copy


class TrainStep:
    """The state of training on one worker.

    Args:
        config: `TrainingConfig`.
        manifest: of the latents: shapes, scaling factor, the empty caption.
        device: this worker's device.
        phase: called as `with phase(name)` around the forward and backward passes and the optimizer's step.
        fused: one kernel for all of AdamW; None: PyTorch's default, for comparison.
    """

    def __init__(self, config, manifest, device="cpu", phase=contextlib.nullcontext, fused=True):
        self.config, self.device, self.phase = config, torch.device(device), phase
        self.scaling_factor = manifest.scaling_factor
        self.empty_LD = torch.from_numpy(manifest.empty_caption.astype(np.float32)).to(self.device)
        self.schedule = diffusion.noise_schedule(config.prediction_type)
        self.schedule.alphas_cumprod = self.schedule.alphas_cumprod.to(self.device)
        self.unet, self.model = build_model(config, self.device)
        self.ema = diffusion.EMA(self.unet, config.ema_decay, config.ema_start, warm_up=config.init_from is None)
        # A U-Net that computes in bf16 by itself casts what comes in; autocast would take its norms back to fp32.
        self.autocast_to = "fp32" if computes_in_bf16(config) else config.precision
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=fused,
        )

    def losses(self, unit, step):
        """(U,) losses of a unit's rows at a step; masked rows count 0."""
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
        # Masked rows hold arbitrary bits, which may be NaN; zero times NaN would still be NaN.
        text = diffusion.drop_captions(text.float(), self.empty_LD, draws.dropped_B | ~keep)
        latents = torch.where(keep[:, None, None, None], latents, 0)
        with autocast(self.autocast_to, self.device):
            rows = diffusion.row_losses(self.model, self.schedule, latents, text, draws, self.config.min_snr_gamma)
        return rows * keep

    def step(self, step, units):
        """Train on this worker's units of global batch number `step` (from 0).

        Returns {"loss", "grad_norm", "learning_rate"}: the loss is the mean over the unmasked rows of the whole
        global batch, before this update. Raises FloatingPointError if it or the gradient is not finite, before any
        weight changes.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        kept = self.sum_over_workers(torch.tensor(float(sum(int(unit.keep_U.sum()) for unit in units)))).clamp(min=1)
        micros = [
            micro for unit in units for micro in unit.split(self.config.micro_batch_size or self.config.unit_rows)
        ]
        total = torch.zeros((), device=self.device)
        for number, micro in enumerate(micros):
            with synchronise_gradients(self.model, number == len(micros) - 1, self.config.strategy):
                with self.phase("forward"):
                    loss = self.losses(micro, step).sum() / kept
                with self.phase(
                    "backward"
                ):  # the gradients of the workers are averaged: times their number makes it the sum
                    (loss * world).backward()
            total += loss.detach()
        total = self.sum_over_workers(total).item()
        if not np.isfinite(total):
            raise FloatingPointError(f"The loss at step {step} is {total}: lower learning_rate or check the latents.")
        with self.phase("optimizer"):
            norm = clip_gradients(self.model, max_norm=1.0)
            if not np.isfinite(norm):
                raise FloatingPointError(
                    f"The gradient at step {step} is {norm}: lower learning_rate or check the latents."
                )
            rate = self.config.learning_rate * diffusion.lr_multiplier(step, self.config)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.ema.update(step + 1)
        return {"loss": total, "grad_norm": norm, "learning_rate": rate}

    def sum_over_workers(self, value):
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value.to(self.device)
        value = value.to(self.device)
        dist.all_reduce(value)
        return value


@torch.no_grad()
def validation_loss(unet, manifest, rows, config, timesteps_per_row=8):
    """`(loss, unweighted)`: mean losses of a U-Net over held-out rows, at evenly spread timesteps and with fixed noise.

    The first is weighted as in training (`min_snr_gamma`), so that it stands on the training curve's axis.

    `rows`: an Arrow table of latents. The same rows, noise and timesteps every time: curves of different steps and
    runs can be compared.
    """
    device = next(unet.parameters()).device
    schedule = diffusion.noise_schedule(config.prediction_type)
    schedule.alphas_cumprod = schedule.alphas_cumprod.to(device)
    totals, count = np.zeros(2), 0
    for start in range(0, rows.num_rows, 64):
        unit = Unit.from_arrow(rows.slice(start, 64).combine_chunks(), manifest, config.largest_resolution, start)
        for number in range(timesteps_per_row):
            draws = diffusion.draw(0, number, unit.positions_U, unit.moments.shape[2:], device=device)
            draws.timesteps_B[:] = int((number + 0.5) * 1000 / timesteps_per_row)
            latents = diffusion.sample_latents(unit.moments.to(device), draws.posterior_BCHW, manifest.scaling_factor)
            values = diffusion.row_losses(unet, schedule, latents, unit.text.to(device).float(), draws).sum().item()
            # One timestep for all rows, so their weights are the same.
            weight = diffusion.loss_weights(schedule, draws.timesteps_B[:1], config.min_snr_gamma).item()
            totals += values * weight, values
            count += len(unit.ids)
    return tuple((totals / max(1, count)).tolist())
