"""One training step in plain PyTorch, on one process or many: the denoiser, its optimizer and EMA, a batch of latents.

No Ray: Ray Train's workers, a plain loop and the tests all call this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.backends import cuda
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..distributed import sum_over_ranks, world_size
from ..latents import schema
from ..model import denoisers, diffusion
from ..model.sharding import autocast, build_model, synchronise_gradients

if TYPE_CHECKING:
    from ..config import TrainingConfig
    from ..latents.manifest import Manifest

MAX_NORM = 1.0  # gradients are clipped to it


@dataclasses.dataclass
class Unit:
    """U rows of a global batch, on the CPU.

    Args:
        moments: (U, 2, C, H, W) mean and standard deviation of the VAE, or (U, 1, C, H, W) the mean alone; fp16.
        text: (U, L, D) caption embeddings, fp16.
        keep_U: False for rows that are masked out of the loss.
        positions_U: the rows' positions in the global batch.
        ids: one for each row.
        latents_spec: the column that the moments are from.
        mask_UL: True for tokens; None: the text contains padding tokens, which the denoiser reads.
        features: (U, N) image features for auxiliary losses, fp16; None: the rows have none.
    """

    moments: torch.Tensor
    text: torch.Tensor
    keep_U: torch.Tensor
    positions_U: np.ndarray
    ids: list
    latents_spec: schema.ColumnSpec
    mask_UL: torch.Tensor | None = None
    features: torch.Tensor | None = None

    @classmethod
    def from_arrow(cls, table: pa.Table, manifest: Manifest, latents: schema.ColumnSpec, first_position: int) -> Unit:
        """A unit of a table's rows, with their latents from one column.

        Rows without latents in this column, or whose `keep` is False, are masked. `first_position`: the first row's
        position in the global batch.
        """
        name = latents.name if latents.name in table.column_names else schema.LATENTS
        moments, valid = latents.decode(table[name])
        text, _ = manifest.embeddings.decode(table[schema.EMBEDDINGS])
        keep = valid & table["keep"].to_numpy() if "keep" in table.column_names else valid
        positions, ids = first_position + np.arange(len(moments)), table[schema.ID].to_pylist()
        unit = cls(to_tensor(moments), to_tensor(text), to_tensor(keep), positions, ids, latents)
        if manifest.embeddings.ragged:
            num_tokens_U = manifest.embeddings.num_tokens(table[schema.EMBEDDINGS])
            unit.mask_UL = to_tensor(np.arange(text.shape[1]) < num_tokens_U[:, None])
        if schema.FEATURES in table.column_names:
            unit.features = to_tensor(schema.from_binary(table[schema.FEATURES], (-1,))[0])
        return unit

    @classmethod
    def masked(cls, manifest: Manifest, latents: schema.ColumnSpec, num_rows: int) -> Unit:
        """A unit of masked rows without ids, for a worker that has fewer rows of the step than others."""
        specs, none = [latents, manifest.embeddings], np.zeros(num_rows, dtype=bool)
        columns = {spec.name: spec.encode(np.zeros((num_rows, *spec.shape)), none) for spec in specs}
        table = pa.table({**columns, schema.ID: pa.nulls(num_rows)})
        return dataclasses.replace(cls.from_arrow(table, manifest, latents, 0), ids=[])

    def split(self, rows: int) -> Iterator[Unit]:
        """Micro-batches of `rows` rows; the last may be smaller."""
        by_row = {name: value for name, value in vars(self).items() if name != "latents_spec" and value is not None}
        for start in range(0, len(self.keep_U), rows):
            chosen = {name: value[start : start + rows] for name, value in by_row.items()}
            yield dataclasses.replace(self, **chosen)

    def to(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`(moments, text, keep_U, mask_UL)` on a device."""
        tensors = self.moments, self.text, self.keep_U, self.mask_UL
        return tuple(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors)


@dataclasses.dataclass(frozen=True)
class AuxiliaryLoss:
    """A loss that is trained beside the denoiser's, on the output of one of the denoiser's blocks.

    Args:
        name: of the loss in the metrics, which hold its mean over the unmasked rows, without the weight.
        module: `module(output, features)` returns (B,) losses of the block's output and the rows' features (B, N). The
            features are None for masked rows that fill up a step. The module's weights are trained, sharded and
            checkpointed with the denoiser's. They are no part of the EMA, so they are not exported.
        block: the block's name among the denoiser's modules.
        weight: of the loss.
        end_step: the first step at which the weight is 0; None: it never is.
    """

    name: str
    module: torch.nn.Module
    block: str
    weight: float
    end_step: int | None = None

    def weight_at(self, step: int) -> float:
        return self.weight if self.end_step is None or step < self.end_step else 0.0


def to_tensor(values: np.ndarray) -> torch.Tensor:
    """Copy an array (Arrow's buffers are read-only); pinned if there is a GPU, for asynchronous copies to it."""
    copy = torch.from_numpy(values.copy())
    return copy.pin_memory() if torch.cuda.is_available() else copy


def choose_kernels(attention: str, deterministic: bool) -> None:
    """Apply a config's `attention` and `deterministic` to the whole process.

    `deterministic` allows only operations that give the same bits each time; others raise. cuBLAS gets workspaces of a
    fixed size: call this function before the first matrix product on the GPU. cuDNN does not choose convolutions by
    timing. Attention uses plain matrix products, which keep all attention scores in memory. What is the same, bit by
    bit:

    | | CPUs, tested, eager | CUDA GPUs |
    |---|---|---|
    | rows, timesteps, dropped captions, first weights, on any number of workers | yes | yes: CPUs compute them |
    | a row's noise at a step, on any number of workers | yes | yes, on GPUs of one kind; a CPU's differs |
    | a repeated run on the same number of workers | yes | with `deterministic`, same GPUs and versions |
    | a resumed run on the same number of workers | yes, except "ddp" on more than two workers | tested on one H200 |
    | a run on another number of workers, or with another micro-batch size | no: losses within 1e-5 | no |

    The H200 resumed with `deterministic`: 40 of 40 losses were bit-equal (tests/benchmarks/README.md).
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Plain matrix products compute what the chosen kernel does not take.
    kernel = "plain" if deterministic else attention
    cuda.enable_cudnn_sdp(kernel in ("auto", "cudnn"))
    cuda.enable_flash_sdp(kernel in ("auto", "flash"))
    cuda.enable_mem_efficient_sdp(kernel in ("auto", "efficient"))
    # Caches of compiled graphs would not ask which kernel was chosen.
    torch.compiler.config.cache_key_tag = attention


def training_schedule(
    config: TrainingConfig, manifest: Manifest, device: torch.device | str = "cpu"
) -> diffusion.Schedule:
    """The noise schedule of a run on these latents."""
    if config.prediction_type == "flow":
        _, _, height, width = manifest.latents(config.largest_resolution).shape
        return diffusion.FlowSchedule(config.timestep_shift, height * width)
    return diffusion.noise_schedule(config.prediction_type, config.zero_terminal_snr, device)


class TrainStep:
    """The state of training on one worker: denoiser, optimizer, EMA. `step` trains on one global batch.

    Args:
        config: of the run.
        manifest: of the latents: shapes, scaling factor, the empty caption's embedding.
        device: this worker's device.
        profile_span: called as `with profile_span(name)` around each "forward", "backward" and "optimizer".
        auxiliary: further losses.
    """

    def __init__(
        self,
        config: TrainingConfig,
        manifest: Manifest,
        device: torch.device | str = "cpu",
        profile_span: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
        auxiliary: Sequence[AuxiliaryLoss] = (),
    ):
        choose_kernels(config.attention, config.deterministic)
        self.config, self.device, self.profile_span = config, torch.device(device), profile_span
        self.manifest, mask_L = manifest, manifest.empty_mask
        self.empty_LD = torch.from_numpy(manifest.empty_caption.astype(np.float32)).to(self.device)
        self.empty_L = None if mask_L is None else torch.from_numpy(mask_L).to(self.device)
        self.schedule = training_schedule(config, manifest, self.device)
        self.density_T = diffusion.timestep_density(self.schedule, config.min_snr_gamma, config.timestep_sampling)
        if config.timestep_sampling == "importance":  # a timestep without weight is never drawn
            weights_T = np.divide(1, self.density_T, out=np.zeros_like(self.density_T), where=self.density_T > 0)
            self.sampling_weights_T = torch.from_numpy(weights_T).float().to(self.device)
        self.auxiliary, self.outputs = auxiliary, {}
        self.denoiser, self.model = build_model(
            config.unet_config,
            seed=config.seed,
            strategy=config.strategy,
            precision=config.precision,
            compile_unet=config.compile_unet,
            channels_last=config.compile_unet and self.device.type == "cuda",  # the layout of tensor cores
            activation_checkpointing=config.activation_checkpointing,
            device=self.device,
            auxiliary=torch.nn.ModuleDict({loss.name: loss.module for loss in auxiliary}),
        )
        for loss in auxiliary:
            self.keep_output(loss)
        self.ema = diffusion.EMA(self.denoiser, config.ema_decay, config.ema_start)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def row_losses(self, unit: Unit, step: int) -> torch.Tensor:
        """(U,) losses of a unit's rows at a step; 0 for masked rows."""
        moments, text, keep, mask = unit.to(self.device)
        draws = diffusion.random_draws(
            self.config.seed,
            step,
            unit.positions_U,
            moments.shape[2:],
            caption_dropout=self.config.caption_dropout,
            density_T=self.density_T,
            device=self.device,
        )
        scaling = self.manifest.scaling_factor, self.manifest.shift_factor
        latents = diffusion.sample_latents(moments, draws.posterior_BCHW, *scaling)
        # Masked rows hold arbitrary bits. They are replaced, not multiplied by zero, because NaN * 0 is NaN.
        replaced = draws.dropped_B | ~keep
        text, mask = diffusion.drop_captions(text.float(), mask, self.empty_LD, self.empty_L, replaced)
        latents = torch.where(keep[:, None, None, None], latents, 0)
        with autocast(self.denoiser, self.config.precision):
            losses = diffusion.row_losses(
                self.model, self.schedule, latents, text, draws, self.config.min_snr_gamma, mask_BL=mask
            )
        if self.config.timestep_sampling == "importance":
            losses = losses * self.sampling_weights_T[draws.timesteps_B]
        return losses * keep

    def keep_output(self, loss: AuxiliaryLoss) -> None:
        """Let each forward pass keep the output of the loss's block in `outputs`."""

        def keep(module: torch.nn.Module, arguments: tuple, output: Any) -> None:
            self.outputs[loss.name] = output

        self.denoiser.get_submodule(loss.block).register_forward_hook(keep)

    def auxiliary_losses(self, unit: Unit) -> torch.Tensor:
        """(A,) sums of the auxiliary losses over the unmasked rows of the unit of the last forward pass."""
        keep, features = unit.keep_U.to(self.device, non_blocking=True), unit.features
        if features is None and unit.keep_U.any():
            names = ", ".join(loss.name for loss in self.auxiliary)
            raise ValueError(f"The rows have no image features, which {names} needs: read them with the latents.")
        if features is not None:  # those of masked rows are arbitrary bits
            features = torch.where(keep[:, None], features.to(self.device, non_blocking=True), 0)
        modules = getattr(self.denoiser, denoisers.AUXILIARY)
        with autocast(self.denoiser, self.config.precision):
            losses = [modules[loss.name](self.outputs.pop(loss.name), features) for loss in self.auxiliary]
        return torch.stack([(losses_U.float() * keep).sum() for losses_U in losses])

    def step(self, step: int, units: list[Unit]) -> dict[str, float]:
        """Train on this worker's units of global batch number `step`, counted from 0.

        `units` has at least one unit, which may be masked.

        Returns {"loss", "grad_norm", "learning_rate", "num_kept"}, and the auxiliary losses by name. A loss is the mean
        over the `num_kept` unmasked rows of the whole global batch, before this update. Raises FloatingPointError, on
        all ranks, if the loss or the gradient is not finite. Nothing has changed then.
        """
        config = self.config
        # Not `torch.tensor`, which would wait for the GPU.
        num_kept = float(sum(np.count_nonzero(unit.keep_U) for unit in units))
        num_kept = sum_over_ranks(torch.full((), num_kept, device=self.device))
        rows = config.micro_batch_size or config.unit_rows
        micro_batches = [micro_batch for unit in units for micro_batch in unit.split(rows)]
        # Every rank takes part in the same collectives, with as many micro-batches as the ranks with the most units.
        num_micro_batches = -(-config.units_per_step // world_size()) * (config.unit_rows // rows)
        if len(micro_batches) < num_micro_batches:
            masked = Unit.masked(self.manifest, units[0].latents_spec, rows)
            micro_batches += [masked] * (num_micro_batches - len(micro_batches))
        loss, auxiliary = torch.zeros((), device=self.device), torch.zeros(len(self.auxiliary), device=self.device)
        weights = torch.tensor([one.weight_at(step) for one in self.auxiliary]).to(self.device, non_blocking=True)
        for number, micro_batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with synchronise_gradients(self.model, last, config.strategy):
                with self.profile_span("forward"):
                    trained_loss = micro_loss = self.row_losses(micro_batch, step).sum() / num_kept.clamp(min=1)
                    if self.auxiliary:
                        micro_auxiliary = self.auxiliary_losses(micro_batch) / num_kept.clamp(min=1)
                        trained_loss = micro_loss + (weights * micro_auxiliary).sum()
                        auxiliary += micro_auxiliary.detach()
                with self.profile_span("backward"):
                    # Gradients are averaged over the ranks, where the loss is a sum over them.
                    (trained_loss * world_size()).backward()
            loss += micro_loss.detach()
        with self.profile_span("optimizer"):
            factor = diffusion.lr_multiplier(step, config.warmup_steps, config.max_steps, config.lr_schedule)
            learning_rate = config.learning_rate * factor
            loss, norm = self.update(loss, learning_rate)
            # The step's only wait for the GPU. All ranks have the same numbers, so all raise or none does.
            auxiliary = sum_over_ranks(auxiliary.double()) if self.auxiliary else []
            values = torch.stack([loss, norm.double(), num_kept.double(), *auxiliary]).tolist()
            loss, norm, num_kept, *auxiliary = values
            if not np.isfinite(loss + norm):
                name, value = ("gradient", norm) if np.isfinite(loss) else ("loss", loss)
                raise FloatingPointError(
                    f"The {name} at step {step} is {value}: check the latents, or lower learning_rate in a new run."
                )
            self.ema.update(step + 1)
        return {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "num_kept": int(num_kept),
            **{one.name: value for one, value in zip(self.auxiliary, auxiliary, strict=True)},
        }

    @torch.no_grad()
    def update(self, loss: torch.Tensor, learning_rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip the gradient and update by AdamW; returns the loss of all ranks and the gradient's norm before clipping.

        All work is queued on the device; the CPU does not wait. If the loss or the gradient is not finite, nothing
        changes. `loss`: this rank's part; the parts are summed.
        """
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss = sum_over_ranks(loss.double())
        # As PyTorch's `GradScaler` does. The fused AdamW divides gradients by `grad_scale`, and changes nothing if
        # `found_inf` is 1; the host does not wait for either.
        self.optimizer.grad_scale = (norm / MAX_NORM).clamp(min=1).float()
        self.optimizer.found_inf = 1 - (loss + norm).isfinite().float()
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @contextlib.contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """The denoiser with the averaged weights, to evaluate between two steps. Call it on all ranks.

        The averaged weights take the place of the trained ones until the block ends, in the same memory. Compiled
        blocks run eagerly, because another number of rows would compile them again. Afterwards each module's
        train/eval mode is restored, because the blocks were compiled for that mode.
        """
        modes = {module: module.training for module in self.denoiser.modules()}
        with self.ema.swapped(), torch.compiler.set_stance("force_eager"):
            try:
                yield self.denoiser.eval()
            finally:
                for module, training in modes.items():
                    module.training = training
                    if isinstance(module, FSDPModule):
                        module.reshard()  # weights that stay gathered until a backward pass would be the averaged ones
