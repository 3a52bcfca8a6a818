"""Scores of generated images: how well they match their prompts, and how far they are from real images.

CLIP score: mean cosine similarity of the embeddings of images and their prompts. CMMD: a distance between two sets of
images. Both take embeddings as (images, width) arrays, which `CLIP` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers
from PIL import Image

from ...encode import models
from ...encode.models import TINY_CLIP

CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
ROWS_AT_A_TIME = 1024  # rows of a kernel matrix that are held at once: 250 MB of 30,000 x 30,000 elements
BATCH_SIZE = 64


# ---- scores


def clip_score(images_ND: np.ndarray, texts_ND: np.ndarray) -> float:
    """100 x the mean of max(cosine, 0) of the CLIP embeddings of images and their prompts, row by row: 0 to 100.

    Hessel et al. 2021 (https://arxiv.org/abs/2104.08718), with the weight 100 that reports on Stable Diffusion use
    instead of 2.5. Only scores from the same CLIP are comparable. Raises ValueError for arrays of different shapes.
    """
    images, texts = np.asarray(images_ND, np.float64), np.asarray(texts_ND, np.float64)
    if images.ndim != 2 or images.shape != texts.shape or not len(images):
        raise ValueError(
            f"The CLIP score takes one text embedding an image, at least one; the shapes are {images.shape} and "
            f"{texts.shape}: embed images and prompts by the same CLIP."
        )
    norms = np.linalg.norm(images, axis=1) * np.linalg.norm(texts, axis=1)
    return float(100 * np.maximum((images * texts).sum(1) / norms, 0).mean())


def cmmd(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """CMMD of two sets of CLIP embeddings with unit norm: 0 for equal sets, smaller is closer.

    1,000 x the squared maximum mean discrepancy with the kernel exp(-|x - y|^2 / (2 * 10^2)), as a V-statistic (mean
    over all pairs, a row with itself included). Jayasumana et al. 2024, https://arxiv.org/abs/2401.09603; constants as
    in its code, https://github.com/google-research/google-research/tree/master/cmmd. The estimate is stable from a few
    thousand images on. It has an upward bias of order 1/N, so compare sets of the same size.

    Raises ValueError for fewer than 2 rows, different widths, or values that are not finite.
    """
    x, y = np.asarray(x_ND, np.float64), np.asarray(y_MD, np.float64)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(
            f"CMMD compares embeddings of one width, (images, width) each; the shapes are {x.shape} and {y.shape}: "
            "make both by the same CLIP."
        )
    if min(len(x), len(y)) < 2:
        raise ValueError(f"CMMD takes at least 2 images on each side; there are {len(x)} and {len(y)}: give more.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("CMMD takes finite embeddings; some are NaN or infinite: compute them in fp32.")
    return float(CMMD_SCALE * (mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)))


def mean_kernel(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """The mean of CMMD's kernel over all pairs of rows."""
    total = 0.0
    for start in range(0, len(x_ND), ROWS_AT_A_TIME):
        rows = x_ND[start : start + ROWS_AT_A_TIME]
        squared = (rows**2).sum(1)[:, None] + (y_MD**2).sum(1) - 2 * rows @ y_MD.T
        total += np.exp(squared / (-2 * CMMD_SIGMA**2)).sum()
    return total / (len(x_ND) * len(y_MD))


# ---- features


class CLIP:
    """Embeddings from any CLIP in transformers layout, in fp32. Its own processor prepares the images.

    Args:
        model: "tiny-clip" (in this package, for the drawn data set), a folder, a hub id, or "hub/id@revision". It holds
            config.json, safetensors, tokenizer and preprocessor_config.json, such as openai/clip-vit-large-patch14.
        device: where it computes.

    Raises ValueError for a model of another kind or layout, and for one that `models.model_folder` does not find.
    torchvision is not needed.
    """

    def __init__(self, model: str = TINY_CLIP, device: str | torch.device = "cpu"):
        folder = models.model_folder(model, "*")
        self.device = torch.device(device)
        transformers.logging.disable_progress_bar()
        try:
            kind = transformers.PretrainedConfig.get_config_dict(folder)[0].get("model_type")
            if kind != "clip":
                raise ValueError(f"its config.json says model_type={kind!r}, not 'clip'")
            loaded, report = transformers.CLIPModel.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
            if report["missing_keys"]:
                raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
            self.tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
            self.processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{model!r} is not a CLIP model in transformers layout ({str(error).strip().splitlines()[0]}): give a "
                "folder or hub id with a CLIPModel's config.json, model.safetensors, tokenizer and "
                "preprocessor_config.json, as openai/clip-vit-large-patch14 has them."
            ) from None
        self.model = loaded.eval().requires_grad_(False).to(self.device)

    def images(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """N images, uint8 (H, W, 3) of any sizes -> (N, D) float32 with unit rows."""

        def embed(batch):
            prepared = self.processor([Image.fromarray(image) for image in batch], return_tensors="pt")
            return self.model.get_image_features(prepared.pixel_values.to(self.device)).pooler_output

        return self.unit_rows(embed, images)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """N texts -> (N, D) float32 with unit rows. A text is cut after as many tokens as the model reads."""
        most = self.model.config.text_config.max_position_embeddings

        def embed(batch):
            options = {"padding": True, "truncation": True, "max_length": most, "return_tensors": "pt"}
            ids = self.tokenizer(list(batch), **options).to(self.device)
            return self.model.get_text_features(ids.input_ids, attention_mask=ids.attention_mask).pooler_output

        return self.unit_rows(embed, texts)

    @torch.inference_mode()
    def unit_rows(self, embed: Callable, rows: Sequence) -> np.ndarray:
        embeddings = [torch.zeros(0, self.model.config.projection_dim, device=self.device)]
        embeddings += [embed(rows[start : start + BATCH_SIZE]) for start in range(0, len(rows), BATCH_SIZE)]
        return torch.nn.functional.normalize(torch.cat(embeddings), dim=1).cpu().numpy()
