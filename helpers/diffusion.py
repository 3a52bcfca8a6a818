"""The objective: noise, v- and epsilon-prediction, min-SNR weights, caption dropout, EMA; all randomness by position.

Every random number of step s for the row at position p of the global batch is a function of (seed, s, p), so it does
not depend on how many workers there are or where a run was resumed.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

# What the streams of random numbers of one row are for; part of the hash.
NOISE, TIMESTEP, DROPOUT = 0, 1, 2


def noise_schedule(prediction_type="v_prediction"):
    """Stable Diffusion's schedule: 1,000 timesteps, betas scaled-linear from 0.00085 to 0.012 (Rombach et al., 2022)."""
    return DDPMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type=prediction_type,
        clip_sample=False,
        steps_offset=1,
    )


def hash_positions(seed, step, positions, stream):
    """uint64 hashes of (seed, step, position, stream), one a position; SplitMix64 (Steele et al., 2014), chained."""
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
    """The random numbers of B rows: see `draw`."""

    posterior_BCHW: torch.Tensor
    noise_BCHW: torch.Tensor
    timesteps_B: torch.Tensor
    dropped_B: torch.Tensor


def draw(seed, step, positions, shape, *, caption_dropout=0.0, num_timesteps=1000, device="cpu"):
    """The random numbers of the rows at `positions` of the global batch; `shape` (C, H, W) of one row's latents.

    Returns `Draws`: standard normals for the VAE posterior and for the diffusion, uniform timesteps, and which
    captions are dropped.
    """
    generator = torch.Generator(device)
    normals = torch.empty(len(positions), 2, *shape, device=device)
    for row, row_seed in enumerate(hash_positions(seed, step, positions, NOISE)):
        normals[row].normal_(generator=generator.manual_seed(int(row_seed >> np.uint64(1))))
    timesteps = hash_positions(seed, step, positions, TIMESTEP) % np.uint64(num_timesteps)
    uniform = hash_positions(seed, step, positions, DROPOUT) / 2.0**64
    return Draws(
        normals[:, 0],
        normals[:, 1],
        torch.from_numpy(timesteps.astype(np.int64)).to(device, non_blocking=True),
        torch.from_numpy(uniform < caption_dropout).to(device, non_blocking=True),
    )


def sample_latents(moments_B2CHW, noise_BCHW, scaling_factor):
    """Draw from the VAE's posterior and scale: (B, 2, C, H, W) stored moments -> (B, C, H, W) fp32 latents.

    Where only the mean was stored, (B, 1, C, H, W), it is the latent.
    """
    if moments_B2CHW.shape[1] == 1:
        return moments_B2CHW[:, 0].float() * scaling_factor
    mean, std = moments_B2CHW.float().unbind(1)
    return (mean + std * noise_BCHW) * scaling_factor


def drop_captions(text_BLD, empty_LD, dropped_B):
    """Captions replaced by the empty caption's embedding where `dropped_B`, for classifier-free guidance."""
    return torch.where(dropped_B[:, None, None], empty_LD, text_BLD)


def loss_weights(schedule, timesteps_B, gamma):
    """Min-SNR-gamma weights (Hang et al., 2023, eq. 6; for v the target's own SNR + 1 is divided out); (B,)."""
    if gamma is None:
        return torch.ones_like(timesteps_B, dtype=torch.float32)
    alphas = schedule.alphas_cumprod.to(timesteps_B.device)[timesteps_B]
    snr = alphas / (1 - alphas)
    clipped = snr.clamp(max=gamma)
    return clipped / (snr + 1) if schedule.config.prediction_type == "v_prediction" else clipped / snr


def row_losses(unet, schedule, latents_BCHW, text_BLD, draws, gamma=None):
    """(B,) weighted squared error of the U-Net's prediction, averaged over each row's latents."""
    noisy = schedule.add_noise(latents_BCHW, draws.noise_BCHW, draws.timesteps_B)
    if schedule.config.prediction_type == "v_prediction":
        target = schedule.get_velocity(latents_BCHW, draws.noise_BCHW, draws.timesteps_B)
    else:
        target = draws.noise_BCHW
    predicted = unet(noisy, draws.timesteps_B, text_BLD, return_dict=False)[0]
    squared = F.mse_loss(predicted.float(), target, reduction="none").mean(dim=(1, 2, 3))
    return squared * loss_weights(schedule, draws.timesteps_B, gamma)


class EMA:
    """Exponential moving average of a model's parameters, in fp32, from step `start` on.

    Before `start` it costs neither time nor memory, only its place in a checkpoint: it begins as a copy of the parameters
    (MosaicML began theirs near the end of training for that reason). `warm_up`: follow faster at first, so as not to hold on to a random
    initialisation; not for weights that come from another run.
    """

    def __init__(self, model, decay, start=0, warm_up=True):
        self.decay, self.start, self.warm_up = decay, start, warm_up
        self.model = model
        self.shadow = None

    @torch.no_grad()
    def update(self, step):
        """After the optimizer's step number `step` (the first is 1)."""
        if step <= self.start:
            return
        if self.shadow is None:
            self.shadow = self.copy()
            return
        early = (1 + step - self.start) / (10 + step - self.start) if self.warm_up else 1.0
        torch._foreach_lerp_(list(self.shadow.values()), list(self.parameters().values()), 1 - min(self.decay, early))

    def parameters(self):
        return {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}

    def copy(self):
        return {name: parameter.clone() for name, parameter in self.parameters().items()}

    def state_dict(self):
        """name -> fp32 tensor, no copy: the average itself, or before `start` the parameters themselves."""
        return self.parameters() if self.shadow is None else self.shadow

    def load_state_dict(self, state, step):
        """Continue after `step` steps from what `state_dict` gave."""
        names = [name for name, _ in self.model.named_parameters()]  # `update` goes by their order
        self.shadow = {name: state[name].clone() for name in names} if step > self.start else None


def lr_multiplier(step, config):
    """The factor of `config.learning_rate` at step `step` (from 0): linear warm-up, then cosine to 0, or constant."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return 0.5 * (1 + np.cos(np.pi * min(1.0, progress)))
