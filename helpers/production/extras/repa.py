"""Aligns a block of the denoiser with the features of a frozen image encoder (REPA).

Features come with the rows (`production.features`), so the image encoder never runs on a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from ...config import Count, Name, Positive, TrainingConfig, Whole
from ...latents import schema
from ...latents.manifest import DataSets, Manifest
from ...model import denoisers
from ...train.extra import Extra
from ...train.step import AuxiliaryLoss
from .. import features
from . import change, validated

EndStep = Annotated[Whole, Field(ge=1)]


@validated
class Repa(Extra):
    """The auxiliary loss "repa" of a run with an `image_encoder_model`; without one, nothing happens.

    Args:
        weight: of the loss, which is 1 minus the cosine of features and projected states, from 0 to 2.
        block: the block of the denoiser that is aligned, such as "mid_block" or "blocks.4"; None: the middle block of a
            U-Net, the block at a third of a transformer's depth.
        end_step: the first step without it; None: it stays until the run ends.
        width: of the hidden layers of the projection.
    """

    weight: Positive = 0.5
    block: Name | None = None
    end_step: EndStep | None = None
    width: Count = 256

    def auxiliary_losses(self, config: TrainingConfig, manifest: Manifest) -> list[AuxiliaryLoss]:
        if config.image_encoder_model is None:
            return []
        uri = next(iter(config.proportions))
        column, *_ = features.columns_of(uri, manifest, config.image_encoder_model)
        block = self.block or default_block(config.unet_config)
        channels, _ = block_output(
            config.unet_config, manifest, manifest.latents_at(config.largest_resolution)[0], block
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            projection = Projection(channels, self.width, column.shape[0])
        return [AuxiliaryLoss("repa", projection, block, self.weight, self.end_step)]


class Projection(torch.nn.Module):
    """An MLP from a block's states to features; returns (B,) losses: the mean of 1 - cosine over the positions."""

    def __init__(self, channels: int, width: int, num_features: int):
        super().__init__()
        sizes = [(channels, width), (width, width), (width, num_features)]
        layers = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.SiLU())]
        self.layers, self.num_features = torch.nn.Sequential(*layers[:-1]), num_features

    def forward(self, output: torch.Tensor | tuple, features_BN: torch.Tensor | None) -> torch.Tensor:
        """`output`: (B, C, H, W) or (B, H * W, C), perhaps the first of several; `features_BN`: from (F, H, W)."""
        projected_BLF = self.layers(as_sequence(output)).float()
        if features_BN is None:  # rows that count for nothing
            return 0 * projected_BLF.mean(dim=(1, 2))
        length = projected_BLF.shape[1]
        # Zeros follow the features of a shape that is smaller than others.
        wanted_BFL = features_BN[:, : self.num_features * length].unflatten(1, (self.num_features, length))
        return 1 - F.cosine_similarity(projected_BLF, wanted_BFL.transpose(1, 2).float(), dim=2).mean(dim=1)


def as_sequence(output: torch.Tensor | tuple) -> torch.Tensor:
    """A block's output as (B, positions, channels)."""
    states = output[0] if isinstance(output, tuple) else output
    return states.flatten(2).transpose(1, 2) if states.ndim == 4 else states


def block_names(unet_config: str) -> list[str]:
    """The names of a denoiser's blocks, in the order of the forward pass."""
    with torch.device("meta"):
        denoiser = denoisers.build_denoiser(unet_config)
    return list(denoisers.parts(denoiser, denoisers.adapter_of(denoiser).blocks))


def default_block(unet_config: str) -> str:
    names = block_names(unet_config)
    return "mid_block" if "mid_block" in names else names[len(names) // 3]


def block_output(unet_config: str, manifest: Manifest, latents: schema.ColumnSpec, block: str) -> tuple[int, int]:
    """`(channels, positions)` of a block's output for one row of latents, from shapes alone."""
    kept = []
    with torch.device("meta"), torch.no_grad():
        denoiser = denoisers.build_denoiser(unet_config)
        denoiser.get_submodule(block).register_forward_hook(lambda module, arguments, output: kept.append(output))
        length = manifest.embeddings.shape[0]
        mask_BL = torch.ones(1, length, dtype=torch.bool) if manifest.embeddings.ragged else None
        inputs = torch.randn(1, *latents.shape[1:]), torch.zeros(1), torch.randn(1, *manifest.embeddings.shape)
        denoisers.denoise(denoiser, *inputs, mask_BL)
    _, positions, channels = as_sequence(kept[0]).shape
    return channels, positions


def repa_fits(config: TrainingConfig, data: DataSets) -> Iterator[str]:
    """A sentence if a run with an `image_encoder_model` lacks features, or a block that they fit."""
    extra, model = change("repa", Repa(), config.extras.get("repa", {})), config.image_encoder_model
    if extra is None or model is None:
        return
    which, names = f"image_encoder_model={model!r}", block_names(config.unet_config)
    block = extra.block or default_block(config.unet_config)
    if block not in names:
        yield (
            f"extras: repa with block={block!r}: unet_config={config.unet_config!r} has no such block: choose from "
            f"{', '.join(names)}."
        )
        return
    for uri, manifest in data.manifests.items():
        listed = None if manifest.online else features.read_list(uri, model)
        if not manifest.online and (listed is None or listed["files_crc32"] != manifest.files_crc32):
            yield (
                f"{which}: {uri} holds no such image features: run Preprocessing.ipynb with the parameters that "
                f"encoded it and `-p image_encoder_model {model}`, which adds them and encodes nothing else."
            )
            return
        stored = {column.name: column for column in features.columns_of(uri, manifest, model)}
        for latents in (spec for resolution in config.resolutions for spec in manifest.latents_at(resolution)):
            column = stored[latents.name.replace(schema.LATENTS, schema.FEATURES)]
            _, positions = block_output(config.unet_config, manifest, latents, block)
            height, width = column.shape[1:]
            if positions != height * width:
                yield (
                    f"{which}: at {' x '.join(map(str, latents.size))} pixels {uri} has features on a grid of {width} "
                    f"x {height}, and the block {block} of unet_config={config.unet_config!r} has {positions} "
                    "positions: choose another block, or encode the data with this unet_config."
                )
                return
