"""Latents -> pictures, by the VAE's decoder: as many at a time as a GPU's memory holds."""

from __future__ import annotations

import functools
import json
import math
import weakref

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..encode.encoder import VAE, VAES, load_vae

MOST_DECODED = 32  # pictures at a time: more are not faster
MEMORY_SHARE = 0.8  # of the free memory, for activations: convolutions need work space, and memory is fragmented


class PeakBytes(TorchFunctionMode):
    """While the block runs, counts the most bytes that tensors made by torch's functions hold at the same time."""

    def __init__(self):
        super().__init__()
        self.peak, self.held = 0, weakref.WeakSet()

    def __torch_function__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor):
            self.held.add(made.untyped_storage())  # which views share
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.held))
        return made


@functools.cache
def decoding_bytes(vae_config: str, shape: tuple[int, ...]) -> int:
    """The most bytes of fp32 activations while a VAE decodes latents of one picture, (C, H, W), beside its weights.

    Found without memory, on the "meta" device. `vae_config`: the VAE's `to_json_string()`.
    """
    with torch.device("meta"), torch.no_grad():
        config = json.loads(vae_config)
        vae = VAES[config["_class_name"]].from_config(config)
        with PeakBytes() as counted:
            vae.decode(torch.empty(1, *shape))
    return counted.peak


def decoded_at_once(vae: VAE, shape: tuple[int, ...], memory: float = math.inf) -> int:
    """How many pictures, with latents of `shape`, fit `memory` bytes while they are decoded: 1 to `MOST_DECODED`."""
    each = decoding_bytes(vae.to_json_string(), tuple(shape)) * vae.dtype.itemsize / 4
    return int(min(max(1, memory * MEMORY_SHARE / each), MOST_DECODED))


@torch.inference_mode()
def decode_latents(model: str | VAE, latents_BCHW: torch.Tensor) -> np.ndarray:
    """Unscaled latents -> (B, H, W, 3) uint8 pictures, by the model's VAE or by a VAE, on its device.

    On a GPU as many at a time as its free memory holds.
    """
    vae, pictures, memory = load_vae(model) if isinstance(model, str) else model, [], math.inf
    if vae.device.type == "cuda":
        torch.cuda.empty_cache()  # what PyTorch keeps without using it is free, too
        memory, _ = torch.cuda.mem_get_info(vae.device)
    for latents in latents_BCHW.split(decoded_at_once(vae, latents_BCHW.shape[1:], memory)):
        pixels = vae.decode(latents.to(vae.device, vae.dtype)).sample.float()
        pictures.append(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu())
    return torch.cat(pictures).numpy()


def reconstruct(model: str | VAE, moments_B2CHW: np.ndarray) -> np.ndarray:
    """Stored moments -> (B, H, W, 3) uint8 pictures, decoded from the posterior's mean."""
    return decode_latents(model, torch.from_numpy(np.array(moments_B2CHW[:, 0], dtype=np.float32)))
