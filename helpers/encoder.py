"""`LatentEncoder`: pictures and token ids -> VAE moments and caption embeddings. The actor of the encode stage.

Nothing else runs the VAE's encoder or the text encoder while data is prepared; the trainers hold only the U-Net.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import transformers
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from . import images, schema
from .images import load_tokenizer, model_source

MOMENTS = {"moments": 2, "mean": 1}
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# One report per call of an encoder; times in seconds since 1970.
CALL = pa.struct([("encoder", pa.string()), ("started", pa.float64()), ("ended", pa.float64()), ("rows", pa.int64())])


def load_vae(model: str, dtype: torch.dtype = torch.float32) -> AutoencoderKL:
    options = {"subfolder": "vae", "torch_dtype": dtype, "use_safetensors": True}
    return AutoencoderKL.from_pretrained(**model_source(model), **options).eval().requires_grad_(False)


def load_text_encoder(model: str, dtype: torch.dtype = torch.float32) -> CLIPTextModel:
    transformers.logging.disable_progress_bar()
    options = {"subfolder": "text_encoder", "dtype": dtype, "use_safetensors": True}
    return CLIPTextModel.from_pretrained(**model_source(model), **options).eval().requires_grad_(False)


def stored_columns(
    model: str,
    shapes: dict[int, list[tuple[int, int]]],
    latents: str = "moments",
    text_precision: str = "fp16",
) -> list[schema.ColumnSpec]:
    """The columns that a model's latents and embeddings are stored in, from its configs; no weights are read.

    `shapes`: {resolution: [(width, height)]}. `latents`: "moments" for the VAE posterior's mean and standard deviation,
    "mean" for the mean alone. `text_precision`: the codec of the embeddings.
    """
    vae = AutoencoderKL.load_config(**model_source(model), subfolder="vae")
    width = CLIPTextConfig.from_pretrained(**model_source(model), subfolder="text_encoder").hidden_size
    downsampling, channels = 2 ** (len(vae["block_out_channels"]) - 1), vae["latent_channels"]
    columns = [
        schema.ColumnSpec(
            schema.latents_column(width, height),
            (MOMENTS[latents], channels, height // downsampling, width // downsampling),
            resolution=resolution,
        )
        for resolution, sizes in shapes.items()
        for width, height in sizes
    ]
    text = schema.ColumnSpec(schema.EMBEDDINGS, (load_tokenizer(model).model_max_length, width), text_precision)
    return [*columns, text]


def arguments(config) -> tuple:
    """`LatentEncoder`'s arguments, from a `PreprocessingConfig`."""
    model = config.encoder_model
    columns = stored_columns(model, config.shapes, config.latents, config.text_precision)
    return model, columns, config.encoder_precision


class LatentEncoder:
    """A Ray Data actor: pixels and token ids -> latents and caption embeddings (`batch_format="pyarrow"`).

    Args:
        model: "tiny-sd", or a folder or hub id in diffusers layout (`vae/`, `text_encoder/`).
        columns: what to make of each row (`stored_columns`).
        precision: "fp32", "fp16" or "bf16": what the networks compute in on a GPU. On a CPU, where half precision is
            tens of times slower, they compute in fp32; the manifest names the `precision` that was asked for.
        num_threads: threads of PyTorch on a CPU.
        batch_size: rows that go through the networks at a time; None: all rows of a call.
    """

    def __init__(
        self,
        model: str,
        columns: list[schema.ColumnSpec],
        precision: str = "fp32",
        *,
        num_threads: int = 1,
        batch_size: int | None = None,
    ):
        # `torch.device == "cuda"` is always False: compare the type.
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(num_threads)
        self.dtype = PRECISIONS[precision] if self.device.type == "cuda" else torch.float32
        # The name tells encoders apart in the job's report.
        self.columns, self.batch_size, self.name = columns, batch_size, uuid.uuid4().hex[:8]
        resolutions = [spec.resolution for spec in columns if spec.resolution]
        self.several_shapes = len(resolutions) > len(set(resolutions))
        self.vae = load_vae(model, self.dtype).to(self.device)
        self.text_encoder = load_text_encoder(model, self.dtype).to(self.device)

    @torch.no_grad()
    def moments(self, pixels_BHWC: torch.Tensor) -> torch.Tensor:
        """(B, H, W, 3) uint8 -> (B, 2, C, H/8, W/8) fp16: the posterior's mean and standard deviation, unscaled.

        A row with a value that is not finite is NaN throughout; so it is with `embeddings`.
        """
        posterior = self.vae.encode(images.normalize(pixels_BHWC).permute(0, 3, 1, 2).to(self.dtype)).latent_dist
        return nan_fill_nonfinite(torch.stack([posterior.mean, posterior.std], dim=1).to(torch.float16))

    @torch.no_grad()
    def embeddings(self, caption_ids_BL: torch.Tensor) -> torch.Tensor:
        """(B, L) token ids -> (B, L, D) fp16: the text encoder's last hidden state, as Stable Diffusion takes it."""
        return nan_fill_nonfinite(self.text_encoder(caption_ids_BL.long()).last_hidden_state.to(torch.float16))

    def encode_images(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """`moments` for NumPy arrays."""
        # np.array copies: Ray's object store gives read-only views
        return self.moments(torch.from_numpy(np.array(pixels_BHWC)).to(self.device)).cpu().numpy()

    def encode_captions(self, caption_ids_BL: np.ndarray) -> np.ndarray:
        """`embeddings` for NumPy arrays."""
        return self.embeddings(torch.from_numpy(np.array(caption_ids_BL)).to(self.device)).cpu().numpy()

    def encode_column(
        self, spec: schema.ColumnSpec, rows: pa.Table, good_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`(values (B, ...) fp16, encoded (B,) bool)` of one stored column; zeros where a row is not encoded."""
        if spec.name == schema.EMBEDDINGS:
            ids_BL, _ = schema.from_binary(rows[schema.CAPTION_IDS], (-1,), np.int32)
            return encode_masked(self.encode_captions, ids_BL[good_B], good_B, spec.shape, self.batch_size), good_B
        width, height = spec.size
        pixels_VHWC, fits_B = schema.from_sparse(rows[schema.pixels_column(spec.name)], (height, width, 3))
        mine_B = good_B & fits_B

        def encode(pixels_BHWC):  # the mean alone, or both
            return self.encode_images(pixels_BHWC)[:, : spec.shape[0]]

        return encode_masked(encode, pixels_VHWC[good_B[fits_B]], mine_B, spec.shape, self.batch_size), mine_B

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Transformed rows -> the same rows with stored columns in place of pixels and token ids, and `encoder_call`.

        Rejected rows, and pictures too small for a resolution, are not encoded: they become null there. A row with a
        value that is not finite, as half precision may overflow, is rejected: training would stop at it.
        """
        started = time.time()
        good_B = pc.equal(rows[schema.REASON], "").to_numpy()
        encoded = {spec: self.encode_column(spec, rows, good_B) for spec in self.columns}
        # One value per row is enough: see `nan_fill_nonfinite`.
        finite_B = np.all([np.isfinite(v.reshape(len(v), -1)[:, 0]) for v, _ in encoded.values()], axis=0)
        inputs = {schema.CAPTION_IDS, *(schema.pixels_column(s.name) for s in self.columns)}
        columns = {name: rows[name] for name in rows.column_names if name not in inputs}
        for spec, (values, encoded_B) in encoded.items():
            columns[spec.name] = spec.encode(values, encoded_B & finite_B)
            if spec.resolution and self.several_shapes:  # most are null, which takes no space in this type
                columns[spec.name] = pa.array(columns[spec.name].to_pylist(), pa.large_binary())
        reason = pc.if_else(pa.array(finite_B), rows[schema.REASON], "encoded to no finite numbers")
        call = {"encoder": self.name, "started": started, "ended": time.time(), "rows": len(rows)}
        return pa.table({**columns, schema.REASON: reason, "encoder_call": schema.once_per_call(call, len(rows), CALL)})


def nan_fill_nonfinite(values: torch.Tensor) -> torch.Tensor:
    """(B, ...) with NaN in all of a row that has a value that is not finite, so that one look at a row tells."""
    finite = values.isfinite().flatten(1).all(dim=1).view(-1, *[1] * (values.ndim - 1))
    return torch.where(finite, values, torch.nan)


def encode_masked(
    encode: Callable[[np.ndarray], np.ndarray],
    inputs: np.ndarray,
    rows_B: np.ndarray,
    shape: tuple[int, ...],
    batch_size: int | None = None,
) -> np.ndarray:
    """(B, *shape) fp16: `encode(inputs)`, `batch_size` at a time, at the rows of a (B,) mask; zeros elsewhere."""
    result, size = np.zeros((len(rows_B), *shape), dtype=schema.DTYPE), batch_size or max(1, len(inputs))
    parts = [encode(inputs[start : start + size]) for start in range(0, len(inputs), size)]
    if parts:
        result[rows_B] = np.concatenate(parts)
    return result


@torch.inference_mode()
def decode(model: str | AutoencoderKL, latents_BCHW: torch.Tensor) -> np.ndarray:
    """Unscaled latents -> (B, H, W, 3) uint8 pictures, by the model's VAE or by a VAE, on its device."""
    vae = load_vae(model) if isinstance(model, str) else model
    pixels = vae.decode(latents_BCHW.to(vae.device)).sample
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def reconstruct(model: str | AutoencoderKL, moments_B2CHW: np.ndarray) -> np.ndarray:
    """Stored moments -> (B, H, W, 3) uint8 pictures, decoded from the posterior's mean."""
    return decode(model, torch.from_numpy(np.array(moments_B2CHW[:, 0], dtype=np.float32)))
