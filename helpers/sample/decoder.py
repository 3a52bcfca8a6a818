"""Latents -> images, by the VAE's decoder: as many at a time as a GPU's memory holds."""

from __future__ import annotations

import math

import diffusers
import numpy as np
import torch

from ..encode.encoder import downsampling, load_vae

MOST_DECODED = 32  # images at a time; more are not faster
MEMORY_SHARE = 0.8  # share of the free memory for activations: convolutions need work space, and memory is fragmented
# Numbers per pixel of an image that the decoder holds at the same time: three feature maps with 256 channels at the
# full resolution. Counted for the VAEs of Stable Diffusion 2 and FLUX: 0.75 GiB for 512 x 512 pixels in fp32.
# AutoencoderDC holds 578, a smaller AutoencoderKL less.
NUMBERS_PER_PIXEL = 3 * 256


def decoded_at_once(num_pixels: int, itemsize: int, memory: float = math.inf) -> int:
    """The number of images, 1 to `MOST_DECODED`, that are decoded at once in `memory` bytes.

    An image has `num_pixels` pixels; a number of the VAE's precision takes `itemsize` bytes.
    """
    image_bytes = NUMBERS_PER_PIXEL * num_pixels * itemsize
    return int(min(max(1, memory * MEMORY_SHARE / image_bytes), MOST_DECODED))


@torch.inference_mode()
def decode_latents(model: str | diffusers.ModelMixin, latents_BCHW: torch.Tensor) -> np.ndarray:
    """Unscaled latents -> (B, H, W, 3) uint8 images, decoded by a VAE on its device; `model`: the VAE, or its name.

    On a GPU, as many images are decoded at once as its free memory holds. A VAE in fp16 that says
    `force_upcast` decodes in fp32, as in diffusers' pipelines.
    """
    vae, images, memory = load_vae(model) if isinstance(model, str) else model, [], math.inf
    upcast = vae.dtype == torch.float16 and vae.config.get("force_upcast")
    vae = vae.float() if upcast else vae
    if vae.device.type == "cuda":
        torch.cuda.empty_cache()  # memory that PyTorch keeps without using it is free, too
        memory, _ = torch.cuda.mem_get_info(vae.device)
    num_pixels = latents_BCHW.shape[2] * latents_BCHW.shape[3] * downsampling(vae.config) ** 2
    for latents in latents_BCHW.split(decoded_at_once(num_pixels, vae.dtype.itemsize, memory)):
        pixels = vae.decode(latents.to(vae.device, vae.dtype)).sample.float()
        images.append(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu())
    if upcast:
        vae.half()  # the weights are what they were, bit by bit
    return torch.cat(images).numpy()


def reconstruct(model: str | diffusers.ModelMixin, moments_B2CHW: np.ndarray) -> np.ndarray:
    """Stored moments -> (B, H, W, 3) uint8 images, decoded from the posterior's mean."""
    return decode_latents(model, torch.from_numpy(np.array(moments_B2CHW[:, 0], dtype=np.float32)))
