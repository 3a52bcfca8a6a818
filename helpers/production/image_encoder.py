"""Images -> features of their parts, by a frozen image encoder in transformers layout."""

from __future__ import annotations

import functools
import inspect
import json
import pathlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from ..encode.encoder import PRECISIONS
from ..encode.models import Unsupported, check_class, explained, model_folder
from ..latents import schema

# Class in a model's config.json -> the class of its image tower. No code from the model's folder is run.
CLASSES = {
    "CLIPModel": "CLIPVisionModel",
    "CLIPVisionModel": "CLIPVisionModel",
    "SiglipModel": "SiglipVisionModel",
    "SiglipVisionModel": "SiglipVisionModel",
    "Dinov2Model": "Dinov2Model",
    "Dinov2WithRegistersModel": "Dinov2WithRegistersModel",
    "DINOv3ViTModel": "DINOv3ViTModel",
}
IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}


class ImageEncoder:
    """A frozen image encoder, on the GPU if there is one.

    Args:
        model: "tiny-clip", or a folder or hub id with a config.json of a class in `CLASSES`.
        precision: as of `encoder.LatentEncoder`.
        batch_size: images that go through the network at a time.
    """

    def __init__(self, model: str, precision: str = "fp32", batch_size: int = 32):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = PRECISIONS[precision] if self.device.type == "cuda" else torch.float32
        self.class_name, self.config = image_config(model)
        self.batch_size, folder = batch_size, model_folder(model, "*.json", "*.safetensors")
        preprocessor = pathlib.Path(folder, "preprocessor_config.json")
        values = {**IMAGENET, **(json.loads(preprocessor.read_text()) if preprocessor.exists() else {})}
        self.mean, self.std = (torch.tensor(values[name], device=self.device)[:, None, None] for name in IMAGENET)
        transformers.logging.disable_progress_bar()
        network = getattr(transformers, self.class_name).from_pretrained(folder, dtype=dtype, use_safetensors=True)
        self.network = network.to(self.device).eval().requires_grad_(False)
        interpolates = "interpolate_pos_encoding" in inspect.signature(network.forward).parameters
        self.options = {"interpolate_pos_encoding": True} if interpolates else {}

    def encode(self, pixels_BHWC: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """(B, C, *grid) fp16 features of uint8 images: the mean of the patches in each cell, as a unit vector."""
        batches = range(0, len(pixels_BHWC), self.batch_size)
        return np.concatenate([self.encode_batch(pixels_BHWC[i : i + self.batch_size], grid) for i in batches])

    @torch.inference_mode()
    def encode_batch(self, pixels_BHWC: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        pixels_BCHW = torch.from_numpy(np.array(pixels_BHWC)).to(self.device).permute(0, 3, 1, 2) / 255
        patch = self.config["patch_size"]
        rows, columns = self.patches(*pixels_BCHW.shape[2:])
        size = rows * patch, columns * patch
        resized_BCHW = F.interpolate(pixels_BCHW, size, mode="bicubic", antialias=True).clamp(0, 1)
        normal_BCHW = ((resized_BCHW - self.mean) / self.std).to(self.network.dtype)
        states_BLD = self.network(pixel_values=normal_BCHW, **self.options).last_hidden_state.float()
        patches_BLD = states_BLD[:, states_BLD.shape[1] - rows * columns :]  # without class token and registers
        patches_BDHW = patches_BLD.transpose(1, 2).unflatten(2, (rows, columns))
        coarser = grid[0] > rows or grid[1] > columns
        fit = functools.partial(F.interpolate, mode="bilinear") if coarser else F.adaptive_avg_pool2d
        cells_BDHW = fit(patches_BDHW, grid)
        return F.normalize(cells_BDHW, dim=1).cpu().numpy().astype(schema.DTYPE)

    def patches(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of patches: those of the encoder's own size in an image of this aspect ratio."""
        side, ratio = self.config["image_size"] / self.config["patch_size"], (height / width) ** 0.5
        return max(1, round(side * ratio)), max(1, round(side / ratio))


def image_config(model: str) -> tuple[str, dict[str, Any]]:
    """`(class of the image tower, its configuration)`. Raises ValueError for a model of a class not in `CLASSES`."""
    which = f"image_encoder_model={model!r}"
    with explained(f"{which} holds no model in transformers layout: give 'tiny-clip', a folder or a hub id."):
        values = json.loads(pathlib.Path(model_folder(model, "config.json"), "config.json").read_text())
        name = (values.get("architectures") or [None])[0]
        check_class(name, CLASSES, f"{which} is an image encoder")
        config_class = getattr(transformers, CLASSES[name]).config_class
        return CLASSES[name], config_class.from_dict(values.get("vision_config", values)).to_dict()


def feature_columns(latents: list[schema.ColumnSpec], size_multiple: int, model: str) -> list[schema.ColumnSpec]:
    """The column of features for each column of latents, (C, H, W): a cell for each `size_multiple` pixels.

    `size_multiple`: what the autoencoder and the denoiser divide sides by, so the grid is the denoiser's coarsest.
    """
    channels, columns = image_config(model)[1]["hidden_size"], []
    for spec in latents:
        width, height = spec.size
        if width % size_multiple or height % size_multiple:
            raise Unsupported(
                f"image_encoder_model={model!r}: features of images of {width} x {height} pixels need sides that are "
                f"multiples of {size_multiple}: give other resolutions."
            )
        shape = channels, height // size_multiple, width // size_multiple
        columns.append(schema.ColumnSpec(spec.name.replace(schema.LATENTS, schema.FEATURES), shape))
    return columns
