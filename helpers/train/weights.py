"""The weights that a new run starts from (`init_from`): where they are, and how they are loaded.

`init_from` names a denoiser's weights in one of four ways:

    a run           "name" or "name@step" under `storage`, or the run's folder: its newest complete checkpoint
    a checkpoint    its folder in a run
    a pipeline      its folder, or its hub id, "org/name@revision": the pipeline's U-Net or transformer
    a denoiser      its folder, or its hub id

A pipeline's or denoiser's weights must be in safetensors; pickles (`.bin`) are never opened. Weights without a variant
are preferred to those in fp16.
"""

from __future__ import annotations

import os
import re

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from .. import storage
from ..config import TrainingConfig
from ..encode import models
from ..model import denoisers
from . import checkpoint, checkpoint_io

FP16_TOO = [pattern for pattern in models.UNUSED if "fp16" not in pattern]


def on_hub(model: str) -> bool:
    return "/" in model and not os.path.isabs(model) and models.is_hub_id(model)


def is_checkpoint(folder: str) -> bool:
    return storage.exists(storage.join(folder, checkpoint.PROGRESS))


def find_weights(config: TrainingConfig) -> str:
    """The folder or URI of `init_from`'s weights: a checkpoint, or a denoiser in diffusers layout.

    Weights of a hub id are first downloaded to this machine. Raises ValueError if there are none.
    """
    given, kind = config.init_from, denoisers.load_denoiser_config(config.unet_config)["_class_name"]
    if "/" not in given:
        return checkpoint.find_checkpoint(config, "init_from")
    if is_checkpoint(given):
        if problem := checkpoint.find_corruption(given):
            raise ValueError(f"init_from={given!r} cannot be used: {problem}.")
        return given
    component = denoisers.ADAPTERS[kind].component
    root = download(given, component) if on_hub(given) else given
    for folder in (storage.join(root, component), root):
        path = storage.join(folder, "config.json")
        if storage.exists(path) and "_class_name" in storage.read_json(path, "get it again"):  # a run has one without
            return folder
    return checkpoint.find_checkpoint(config, "init_from")


def download(model: str, component: str) -> str:
    """The folder of a hub id in this machine's cache, with its denoiser; in fp16 if there are no other weights."""
    files = "config.json", "diffusion_pytorch_model*", f"{component}/*", "scheduler/*"
    try:
        folder = models.model_folder(model, *files)
        if not storage.list_files(folder, ".safetensors", recursive=True):
            folder = models.model_folder(model, *files, unused=FP16_TOO)
    except ValueError as error:
        raise ValueError(f"init_from={error}") from None
    return folder


def weight_files(folder: str) -> list[str]:
    """The safetensors files of a denoiser in diffusers layout: those without a variant, else those in fp16."""
    variants = {"": [], ".fp16": []}
    for uri in storage.list_files(folder, ".safetensors"):
        if found := re.fullmatch(r"diffusion_pytorch_model(.*)\.safetensors", storage.name(uri)):
            variants.setdefault(re.sub(r"-\d+-of-\d+", "", found[1]), []).append(uri)
    return variants[""] or variants[".fp16"]


def load_initial_weights(folder: str, denoiser: torch.nn.Module, which: str = "model") -> None:
    """Load the weights that a new run starts from: of a local checkpoint, or of a denoiser in diffusers layout.

    The EMA restarts; otherwise the other run's weights would linger in it. `which`: of a checkpoint, "model" (the last
    weights) or "ema" (averaged weights).
    """
    if is_checkpoint(folder):
        checkpoint_io.load_weights(folder, denoiser, which)
        return
    weights = {}
    for path in weight_files(folder):
        weights |= load_file(path)
    weights = {name: tensor.float() for name, tensor in weights.items()}
    set_model_state_dict(denoiser, weights, options=StateDictOptions(full_state_dict=True))
