"""The objective: noise schedules, random numbers, loss, EMA, learning rate. No Ray.

A row's random numbers are a function of (seed, step, the row's position in the global batch). They are the same on any
number of workers and after every resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..distributed import local
from .denoisers import NUM_TIMESTEPS, denoise, own_weights


def noise_schedule(
    prediction_type: str = "v_prediction", zero_terminal_snr: bool = False, device: torch.device | str = "cpu"
) -> diffusers.DDPMScheduler:
    """Stable Diffusion's schedule: 1,000 steps, betas scaled-linear from 0.00085 to 0.012 (Rombach et al., 2022).

    Args:
        prediction_type: "v_prediction" or "epsilon".
        zero_terminal_snr: rescale betas so that the last step is noise alone (Lin et al., 2024, algorithm 1).
        device: the device of the tensors that training reads.
    """
    schedule = diffusers.DDPMScheduler(
        num_train_timesteps=NUM_TIMESTEPS,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type=prediction_type,
        clip_sample=False,
        steps_offset=1,
        rescale_betas_zero_snr=zero_terminal_snr,
    )
    schedule.alphas_cumprod = schedule.alphas_cumprod.to(device)
    return schedule


@dataclasses.dataclass(frozen=True)
class FlowSchedule:
    """Rectified flow (Liu et al., 2023): the denoiser predicts the direction of the line from latents to noise.

    It has the methods of a `DDPMScheduler` that `row_losses` calls. Without a shift, timestep t (0 to 999) is at
    s = (t + 1) / 1000 between latents (0) and noise (1). The shift moves it to `shift * s / (1 + (shift - 1) * s)`,
    closer to noise if shift > 1 (Esser et al., 2024, equation 23).

    Args:
        shift: the timestep shift for latents of `num_positions` positions. For other sizes it is multiplied by
            sqrt(height * width / num_positions).
        num_positions: height times width of latents.
    """

    shift: float = 1.0
    num_positions: int = 1

    @property
    def alphas_cumprod(self) -> torch.Tensor:
        """(T,) the latents' share of the variance, as in `DDPMScheduler`, for latents of `num_positions` positions."""
        times_T = self.times(torch.arange(NUM_TIMESTEPS), torch.empty(1, 1, self.num_positions, 1, device="meta"))
        return (1 - times_T) ** 2 / ((1 - times_T) ** 2 + times_T**2)

    def times(self, timesteps_B: torch.Tensor, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Each row's position between latents (0) and noise (1), (B,)."""
        height, width = latents_BCHW.shape[-2:]
        shift = self.shift * (height * width / self.num_positions) ** 0.5
        times_B = (timesteps_B + 1).float() / NUM_TIMESTEPS
        return shift * times_B / (1 + (shift - 1) * times_B)

    def add_noise(
        self, latents_BCHW: torch.Tensor, noise_BCHW: torch.Tensor, timesteps_B: torch.Tensor
    ) -> torch.Tensor:
        times_B111 = self.times(timesteps_B, latents_BCHW)[:, None, None, None]
        return (1 - times_B111) * latents_BCHW + times_B111 * noise_BCHW

    def get_velocity(
        self, latents_BCHW: torch.Tensor, noise_BCHW: torch.Tensor, timesteps_B: torch.Tensor
    ) -> torch.Tensor:
        return noise_BCHW - latents_BCHW


Schedule = diffusers.DDPMScheduler | FlowSchedule


# ---- random numbers

# One stream of random numbers for each use; part of the hash.
NOISE, TIMESTEP, DROPOUT = 0, 1, 2


def hash_positions(seed: int, step: int, positions: np.ndarray, stream: int) -> np.ndarray:
    """(B,) uint64 hashes of (seed, step, position, stream), by chained SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = np.zeros(len(positions), dtype=np.uint64)
        for part in (seed, step, stream, np.asarray(positions)):
            state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


@dataclasses.dataclass
class Draws:
    """The random numbers of B rows, made by `random_draws`."""

    posterior_BCHW: torch.Tensor  # standard normal, to sample the VAE's posterior
    noise_BCHW: torch.Tensor  # standard normal
    timesteps_B: torch.Tensor  # int64, 0 to 999
    dropped_B: torch.Tensor  # bool; True: the empty caption replaces the row's


def random_draws(
    seed: int,
    step: int,
    positions: np.ndarray,
    shape: tuple[int, ...],
    *,
    caption_dropout: float = 0.0,
    density_T: np.ndarray | None = None,
    device: torch.device | str = "cpu",
) -> Draws:
    """The random numbers of a step's rows.

    Args:
        seed, step: of the run.
        positions: the rows' positions in the global batch, (B,).
        shape: (C, H, W) of a row's latents.
        caption_dropout: probability of the empty caption.
        density_T: relative frequency of each timestep, see `timestep_density`; None: uniform.
        device: the device of the tensors. Normal random numbers differ between kinds of devices.
    """
    generator = torch.Generator(device)
    normals = torch.empty(len(positions), 2, *shape, device=device)
    for row, row_seed in enumerate(hash_positions(seed, step, positions, NOISE)):
        generator.manual_seed(int(row_seed >> np.uint64(1)))  # it takes 63 bits
        normals[row].normal_(generator=generator)
    timesteps = hash_positions(seed, step, positions, TIMESTEP)
    if density_T is None:
        timesteps %= np.uint64(NUM_TIMESTEPS)
    else:  # by inverse transform sampling
        uniform = timesteps / 2.0**64
        timesteps = np.searchsorted(np.cumsum(density_T)[:-1], uniform * density_T.sum(), side="right")
    uniform = hash_positions(seed, step, positions, DROPOUT) / 2.0**64
    return Draws(
        normals[:, 0],
        normals[:, 1],
        torch.from_numpy(timesteps.astype(np.int64)).to(device, non_blocking=True),
        torch.from_numpy(uniform < caption_dropout).to(device, non_blocking=True),
    )


# ---- the loss


def sample_latents(
    moments_B2CHW: torch.Tensor, noise_BCHW: torch.Tensor, scaling_factor: float, shift_factor: float = 0.0
) -> torch.Tensor:
    """Latents, (B, C, H, W) fp32: sampled from the VAE's posterior, shifted and scaled.

    `moments_B2CHW`: mean and standard deviation. If it holds the mean alone, (B, 1, C, H, W), the mean is the sample.
    """
    if moments_B2CHW.shape[1] == 1:
        return (moments_B2CHW[:, 0].float() - shift_factor) * scaling_factor
    mean, std = moments_B2CHW.float().unbind(1)
    return (mean + std * noise_BCHW - shift_factor) * scaling_factor


def drop_captions(
    text_BLD: torch.Tensor,
    mask_BL: torch.Tensor | None,
    empty_LD: torch.Tensor,
    empty_L: torch.Tensor | None,
    dropped_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`(captions, masks)` with the empty caption in the rows of `dropped_B`.

    Classifier-free guidance needs training with dropped captions (Ho and Salimans, 2022). `mask_BL`, `empty_L`: True
    for tokens; None if the denoiser reads padding tokens too.
    """
    text_BLD = torch.where(dropped_B[:, None, None], empty_LD, text_BLD)
    return text_BLD, None if mask_BL is None else torch.where(dropped_B[:, None], empty_L, mask_BL)


def loss_weights(schedule: Schedule, timesteps_B: torch.Tensor, gamma: float | None) -> torch.Tensor:
    """Min-SNR-gamma weights, (B,) (Hang et al., 2023, section 3.4); 1 if `gamma` is None.

    min(SNR, gamma) / SNR for epsilon-prediction, min(SNR, gamma) / (SNR + 1) for v-prediction. In both cases, the loss
    is the squared error of the clean latents that the prediction implies, times min(SNR, gamma).
    """
    if gamma is None:
        return torch.ones_like(timesteps_B, dtype=torch.float32)
    alphas = schedule.alphas_cumprod.to(timesteps_B.device)[timesteps_B]
    snr = alphas / (1 - alphas)
    clipped = snr.clamp(max=gamma)
    return clipped / (snr + 1) if schedule.config.prediction_type == "v_prediction" else clipped / snr


def timestep_density(schedule: Schedule, gamma: float | None, sampling: str) -> np.ndarray | None:
    """Relative frequency of each timestep in training, (T,), 1 on average; None: uniform.

    Args:
        schedule: of the run.
        gamma: see `loss_weights`.
        sampling: the distribution of timesteps.
            - "uniform".
            - "logit_normal": the logit of the position between latents and noise is normal, so the middle is sampled
              most (Esser et al., 2024, section 3.1).
            - "importance": proportional to the square root of the loss weights. Training divides each row's loss by the
              relative frequency of its timestep, so that gradients have the same expectation and less variance (Nichol
              and Dhariwal, 2021, section 3.3).
    """
    if sampling == "uniform":
        return None
    if sampling == "logit_normal":
        ends = torch.arange(NUM_TIMESTEPS + 1, dtype=torch.float64) / NUM_TIMESTEPS
        return NUM_TIMESTEPS * torch.special.ndtr(torch.logit(ends)).diff().numpy()
    roots_T = loss_weights(schedule, torch.arange(schedule.config.num_train_timesteps), gamma).sqrt().double().numpy()
    return roots_T / roots_T.mean()


def row_losses(
    denoiser: torch.nn.Module,
    schedule: Schedule,
    latents_BCHW: torch.Tensor,
    text_BLD: torch.Tensor,
    draws: Draws,
    gamma: float | None = None,
    mask_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted mean squared error of the denoiser's prediction for each row, (B,).

    `gamma`: see `loss_weights`. `mask_BL`: True for tokens; None if the denoiser reads padding tokens too.
    """
    noisy = schedule.add_noise(latents_BCHW, draws.noise_BCHW, draws.timesteps_B)
    is_flow = isinstance(schedule, FlowSchedule)
    if is_flow or schedule.config.prediction_type == "v_prediction":
        target = schedule.get_velocity(latents_BCHW, draws.noise_BCHW, draws.timesteps_B)
    else:
        target = draws.noise_BCHW
    timesteps_B = draws.timesteps_B
    if is_flow:  # diffusers' flow schedulers give the denoiser 1,000 times the position
        timesteps_B = NUM_TIMESTEPS * schedule.times(timesteps_B, latents_BCHW)
    predicted = denoise(denoiser, noisy, timesteps_B, text_BLD, mask_BL)
    squared = F.mse_loss(predicted.float(), target, reduction="none").mean(dim=(1, 2, 3))
    return squared * loss_weights(schedule, draws.timesteps_B, gamma)


# ---- averaged weights, learning rate


class EMA:
    """Exponential moving average of a model's parameters, plain or sharded (DTensor), in fp32.

    Step `start` + 1 begins the average as a copy of the parameters. Until then, the average takes neither time nor
    memory, and checkpoints hold the parameters in its place. MosaicML started it near the end of training.

    Args:
        model: the module with the parameters.
        decay: share of the average that a step keeps.
        start: number of steps before the average starts.
    """

    def __init__(self, model: torch.nn.Module, decay: float, start: int = 0):
        self.decay, self.start = decay, start
        self.averaged = own_weights(model)
        self.shadow = None

    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`, counted from 1."""
        if step <= self.start:
            return
        if self.shadow is None:
            self.begin(self.copy())
        else:
            since_start = step - self.start
            decay = min(self.decay, (1 + since_start) / (10 + since_start))  # low at first: the first weights fade
            get_ema_multi_avg_fn(decay)(*self.pairs, None)  # few kernels for all tensors on a GPU

    @torch.no_grad()
    def begin(self, shadow: dict[str, torch.Tensor]) -> None:
        """Continue from these averages."""
        self.shadow = shadow
        # Listed once, because the GPU would wait for the listing in every step.
        self.pairs = [local(average) for average in shadow.values()], [local(self.averaged[name]) for name in shadow]

    def parameters(self) -> dict[str, torch.Tensor]:
        """{name: the model's parameter in fp32}; a copy only if the parameter has another dtype."""
        return {name: parameter.detach().float() for name, parameter in self.averaged.items()}

    def copy(self) -> dict[str, torch.Tensor]:
        """{name: a copy of the model's parameter in fp32}."""
        return {name: parameter.clone() for name, parameter in self.parameters().items()}

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Context manager within which the model has the averaged weights, and the EMA the trained ones."""
        try:
            self.swap()
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's fp32 parameters and their averages, one tensor at a time."""
        parameters = self.parameters()
        for name, average in (self.shadow or {}).items():
            parameter = parameters[name]
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """{name: fp32 tensor} without a copy: the averages, or the parameters before the average starts."""
        return self.parameters() if self.shadow is None else self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Continue from a copy of `state`, which `state_dict` returned after `step` steps."""
        self.shadow = None
        if step > self.start:
            self.begin({name: state[name].clone() for name in self.averaged})


def lr_multiplier(step: int, warmup_steps: int, max_steps: int, schedule: str = "cosine") -> float:
    """Factor of the learning rate at step `step`, counted from 0: linear warm-up, then "cosine" to 0, or "constant"."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return 0.5 * (1 + np.cos(np.pi * min(1.0, progress)))
