"""Scores of generated pictures: do they show what their prompts say, and how far are they from real pictures?

CLIP score: mean cosine similarity of a picture's and its prompt's embeddings. Distances between two sets of pictures,
from one feature vector per picture: CMMD from CLIP embeddings, FID and KID from Inception's features. The functions
take features as (pictures, width) arrays; `CLIP` and `Inception` make them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer, PretrainedConfig
from transformers import logging as transformers_logging

from .. import images

TINY_CLIP = "tiny-clip"
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
ROWS_AT_A_TIME = 1024  # of a kernel matrix: of 30,000 x 30,000 elements only 250 MB are held at once
BATCH_SIZE = 64
INCEPTION_URL = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
)


# ---- scores


def clip_score(images_ND: np.ndarray, texts_ND: np.ndarray) -> float:
    """100 x the mean of max(cosine, 0) of pictures' and their prompts' CLIP embeddings, row by row: 0 to 100.

    Hessel et al. 2021 (https://arxiv.org/abs/2104.08718), with the weight 100 that reports on Stable Diffusion use
    instead of 2.5. Only scores from the same CLIP are comparable. Raises ValueError for arrays of different shapes.
    """
    pictures, texts = np.asarray(images_ND, np.float64), np.asarray(texts_ND, np.float64)
    if pictures.ndim != 2 or pictures.shape != texts.shape or not len(pictures):
        raise ValueError(
            f"The CLIP score takes one text embedding a picture, at least one; the shapes are {pictures.shape} and "
            f"{texts.shape}: embed pictures and prompts by the same CLIP."
        )
    norms = np.linalg.norm(pictures, axis=1) * np.linalg.norm(texts, axis=1)
    return float(100 * np.maximum((pictures * texts).sum(1) / norms, 0).mean())


def cmmd(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """CMMD of two sets of CLIP embeddings with unit norm: 0 for equal sets, smaller is closer.

    1,000 x the squared maximum mean discrepancy with the kernel exp(-|x - y|^2 / (2 * 10^2)), as a V-statistic (mean
    over all pairs, a row with itself included). Jayasumana et al. 2024, https://arxiv.org/abs/2401.09603; constants as
    in its code, https://github.com/google-research/google-research/tree/master/cmmd. The estimate is stable from a few
    thousand pictures on. It has an upward bias of order 1/N, so compare sets of the same size.

    Raises ValueError for fewer than 2 rows, different widths, or values that are not finite; so do the other distances.
    """
    x, y = _checked("CMMD", x_ND, y_MD, 2)

    def kernel(a, b):
        squared = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
        return np.exp(squared / (-2 * CMMD_SIGMA**2))

    within = _mean_kernel(x, x, kernel) + _mean_kernel(y, y, kernel)
    return float(CMMD_SCALE * (within - 2 * _mean_kernel(x, y, kernel)))


def frechet_distance(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """FID if the features are Inception's: Frechet distance of Gaussians fitted to two sets of features.

    |mean_x - mean_y|^2 + tr(S_x + S_y - 2 (S_x S_y)^(1/2)) with unbiased covariances S. Heusel et al. 2017,
    https://arxiv.org/abs/1706.08500. Raises ValueError unless there are more rows than feature dimensions: with fewer,
    the covariance is singular and the distance depends on the number of pictures more than on the pictures.
    """
    width = np.shape(x_ND)[-1] if np.ndim(x_ND) else 0
    why = f", more than the features are wide, because the covariance of {width:,} features is singular otherwise"
    x, y = _checked("The Frechet distance", x_ND, y_MD, width + 1, why)
    cov_x, cov_y = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (x, y))
    # tr (AB)^(1/2) = tr (A^(1/2) B A^(1/2))^(1/2), whose matrix is symmetric: real eigenvalues, no complex square root.
    values, vectors = np.linalg.eigh(cov_x)
    root_x = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root_x @ cov_y @ root_x).clip(0)).sum()
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(cov_x) + np.trace(cov_y) - 2 * cross)


def kernel_distance(x_ND: np.ndarray, y_MD: np.ndarray) -> float:
    """KID if the features are Inception's: the unbiased squared MMD with the kernel (x y / width + 1)^3.

    Binkowski et al. 2018, https://arxiv.org/abs/1801.01401. Computed over all rows at once; implementations that
    average over subsets estimate the same number. It may be slightly negative.
    """
    x, y = _checked("The kernel distance", x_ND, y_MD, 2)

    def kernel(a, b):
        return (a @ b.T / x.shape[1] + 1) ** 3

    def within(a):  # without the kernel matrix's diagonal
        itself = (((a**2).sum(1) / a.shape[1] + 1) ** 3).sum()
        return (_mean_kernel(a, a, kernel) * len(a) ** 2 - itself) / (len(a) * (len(a) - 1))

    return float(within(x) + within(y) - 2 * _mean_kernel(x, y, kernel))


def _mean_kernel(x_ND: np.ndarray, y_MD: np.ndarray, kernel: Callable) -> float:
    """The mean of a kernel over all pairs of rows."""
    starts = range(0, len(x_ND), ROWS_AT_A_TIME)
    total = sum(kernel(x_ND[start : start + ROWS_AT_A_TIME], y_MD).sum() for start in starts)
    return total / (len(x_ND) * len(y_MD))


def _checked(distance: str, x: np.ndarray, y: np.ndarray, least: int, why: str = "") -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{distance} compares features of one width, (pictures, width) each; the shapes are {x.shape} and "
            f"{y.shape}: make both by the same network."
        )
    if min(len(x), len(y)) < least:
        raise ValueError(
            f"{distance} takes at least {least:,} pictures on each side{why}; there are {len(x):,} and {len(y):,}: "
            f"give more{', or take CMMD, which needs 2' if why else ''}."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"{distance} takes finite features; some are NaN or infinite: compute them in fp32.")
    return x, y


# ---- features


class CLIP:
    """Embeddings from any CLIP in transformers layout, in fp32; pictures are preprocessed by its own processor.

    Args:
        model: "tiny-clip" (in this package, for the drawn data set), a folder, a hub id, or "hub/id@revision", with
            config.json, safetensors, tokenizer and preprocessor_config.json, such as openai/clip-vit-large-patch14.
        device: where it computes.

    Raises ValueError for a model of another kind or layout. torchvision is not needed.
    """

    def __init__(self, model: str = TINY_CLIP, device: str | torch.device = "cpu"):
        folder = pathlib.Path(__file__).parents[1] / TINY_CLIP
        source = images.model_source(str(folder) if model == TINY_CLIP else model)
        self.device = torch.device(device)
        transformers_logging.disable_progress_bar()
        try:
            kind = PretrainedConfig.get_config_dict(**source)[0].get("model_type")
            if kind != "clip":
                raise ValueError(f"its config.json says model_type={kind!r}, not 'clip'")
            loaded, report = CLIPModel.from_pretrained(
                **source, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
            if report["missing_keys"]:
                raise ValueError(f"its weights lack {sorted(report['missing_keys'])[0]}")
            self.tokenizer = CLIPTokenizer.from_pretrained(**source)
            self.processor = CLIPImageProcessorPil.from_pretrained(**source)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{model!r} is not a CLIP model in transformers layout ({str(error).strip().splitlines()[0]}): give a "
                "folder or hub id with a CLIPModel's config.json, model.safetensors, tokenizer and "
                "preprocessor_config.json, as openai/clip-vit-large-patch14 has them."
            ) from None
        self.model = loaded.eval().requires_grad_(False).to(self.device)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text that are read, including start and end; the rest is cut off."""
        return self.model.config.text_config.max_position_embeddings

    def images(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """N pictures, uint8 (H, W, 3) of any sizes -> (N, D) float32 with unit rows."""

        def embed(part):
            prepared = self.processor([Image.fromarray(picture) for picture in part], return_tensors="pt")
            return self.model.get_image_features(prepared.pixel_values.to(self.device)).pooler_output

        return self._unit_rows(embed, pictures)

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """N texts -> (N, D) float32 with unit rows."""

        def embed(part):
            options = {"padding": True, "truncation": True, "max_length": self.max_tokens, "return_tensors": "pt"}
            ids = self.tokenizer(list(part), **options).to(self.device)
            return self.model.get_text_features(ids.input_ids, attention_mask=ids.attention_mask).pooler_output

        return self._unit_rows(embed, texts)

    @torch.inference_mode()
    def _unit_rows(self, embed: Callable, rows: Sequence) -> np.ndarray:
        parts = [embed(rows[start : start + BATCH_SIZE]) for start in range(0, len(rows), BATCH_SIZE)]
        if not parts:
            return np.zeros((0, self.model.config.projection_dim), np.float32)
        return torch.nn.functional.normalize(torch.cat(parts), dim=1).cpu().numpy()


class Inception:
    """Features for FID and KID: the last pooling layer of Inception (2015), as implemented in torch-fidelity.

    Args:
        weights: the file on disk, `weights-inception-2015-12-05-6726825d.pth`; nothing is downloaded.
        device: where it computes.

    Raises ImportError if torch-fidelity (which needs torchvision) is missing, FileNotFoundError without the weights.
    """

    def __init__(self, weights: str, device: str | torch.device = "cpu"):
        if not pathlib.Path(weights).is_file():
            raise FileNotFoundError(f"Inception's weights {weights!r} are not on disk: download {INCEPTION_URL}.")
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ImportError(
                f"FID and KID take Inception's features, which need the packages torch-fidelity and torchvision "
                f"({error}): pip install torch-fidelity, or leave the weights out; CLIP score and CMMD need neither."
            ) from None
        self.device = torch.device(device)
        network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(weights))
        self.network = network.eval().to(self.device)

    @torch.inference_mode()
    def images(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """N pictures, uint8 (H, W, 3) of one size -> (N, 2048) float32."""
        parts = [np.zeros((0, 2048), np.float32)]
        for start in range(0, len(pictures), BATCH_SIZE):
            pixels_BCHW = torch.from_numpy(np.stack(pictures[start : start + BATCH_SIZE])).permute(0, 3, 1, 2)
            parts.append(self.network(pixels_BCHW.to(self.device))[0].float().cpu().numpy())
        return np.concatenate(parts)
