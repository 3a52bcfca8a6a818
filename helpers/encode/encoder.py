"""Pixels and token ids -> latents and caption embeddings: the actor of the encoding stage, and the networks in it.

In preprocessing and in online runs, only this module runs the VAE's encoder and the text encoder. The trainers hold
only the denoiser.
"""

from __future__ import annotations

import inspect
import json
import pathlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import transformers

from ..latents import schema
from .models import check_class, model_folder

# Only these classes are loaded, whatever a model's folder names, and no code from the folder is run.
VAES = ("AutoencoderKL", "AutoencoderDC")
TEXT_ENCODERS = ("CLIPTextModel", "T5EncoderModel", "T5GemmaEncoder")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# What each call of a `LatentEncoder` reports; times in seconds since 1970.
CALL = pa.struct([("encoder", pa.string()), ("started", pa.float64()), ("ended", pa.float64()), ("rows", pa.int64())])


class LatentEncoder:
    """The Ray Data actor that turns transformed rows (`stages.transform`) into rows with latents and embeddings.

    For `map_batches(LatentEncoder, batch_format="pyarrow", fn_constructor_kwargs=prepare.encoder_arguments(config))`.
    `encode_images` and `encode_captions` take plain NumPy arrays. The networks are on the GPU if there is one.

    Args:
        model: "tiny-sd", or a folder or hub id in diffusers layout (`vae/`, `text_encoder/`).
        columns: the tensor columns to make of each row.
        precision: "fp32", "fp16" or "bf16", in which the networks compute on a GPU. On a CPU they compute in fp32,
            because half precision is tens of times slower there. A VAE that overflows in fp16 computes in fp32
            (`load_vae`).
        text_encoder_model: as `model`, for the text encoder; None: `model`.
        num_threads: threads of PyTorch on a CPU.
        batch_size: rows that go through the networks at a time; None: all rows of a call.
        compile: whether to `torch.compile` the VAE's encoder, once for each shape, which needs a C++ compiler. Give
            `batch_size` too: smaller batches are then filled up to it with black images. Without `batch_size`, each new
            number of rows is compiled again.
        channels_last: whether the VAE's memory layout is (B, H, W, C).
    """

    def __init__(
        self,
        model: str,
        columns: Sequence[schema.ColumnSpec] = (),
        *,
        precision: str = "fp32",
        text_encoder_model: str | None = None,
        num_threads: int = 1,
        batch_size: int | None = None,
        compile: bool = False,
        channels_last: bool = False,
    ):
        # `torch.device == "cuda"` is always False: compare the type.
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(num_threads)
        dtype = PRECISIONS[precision] if self.device.type == "cuda" else torch.float32
        self.vae = load_vae(model, dtype).to(self.device)
        self.text_encoder = load_text_encoder(text_encoder_model or model, dtype).to(self.device)
        if channels_last:
            self.vae.to(memory_format=torch.channels_last)
        if compile:
            torch._dynamo.config.recompile_limit = 64  # shapes; further ones run as without torch.compile
            self.vae.encoder.compile(dynamic=False)
        self.batch_size, self.fills_up = batch_size, compile
        self.columns, self.name = columns, uuid.uuid4().hex[:8]  # tells encoders apart in the job's report

    def __call__(self, rows: pa.Table) -> pa.Table:
        """The same rows with stored columns in place of pixels and token ids, and with `encoder_call`.

        Rejected rows are null in every stored column. A latents column is also null for rows without pixels of its
        shape (`stages.transform`). Rows with non-finite values are rejected here. Half precision may overflow, and a
        non-finite value would stop training.
        """
        started, clock = time.time(), time.perf_counter()
        good_B = pc.equal(rows[schema.REASON], "").to_numpy()
        encoded = {spec: self.encode_column(spec, rows, good_B) for spec in self.columns}
        finite_B = np.all([column_finite_B for _, _, column_finite_B in encoded.values()], axis=0)
        inputs = {schema.input_column(spec.name) for spec in self.columns}
        columns = {name: rows[name] for name in rows.column_names if name not in inputs}
        resolutions = [spec.resolution for spec in self.columns if spec.resolution]
        several_shapes = len(resolutions) > len(set(resolutions))
        for spec, (values_BX, encoded_B, _) in encoded.items():
            num_tokens_B = (token_ids(spec, rows) >= 0).sum(axis=1) if spec.ragged else None
            columns[spec.name] = spec.encode(values_BX, encoded_B & finite_B, num_tokens_B)
            if spec.resolution and several_shapes:  # most are null, which takes no space in this type
                columns[spec.name] = pa.array(columns[spec.name].to_pylist(), pa.large_binary())
        columns[schema.REASON] = pc.if_else(pa.array(finite_B), rows[schema.REASON], "encoded to no finite numbers")
        ended = started + time.perf_counter() - clock
        call = {"encoder": self.name, "started": started, "ended": ended, "rows": len(rows)}
        return pa.table({**columns, "encoder_call": schema.once_per_call(call, len(rows), CALL)})

    def encode_column(
        self, spec: schema.ColumnSpec, rows: pa.Table, good_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(values (B, *spec.shape) fp16, encoded (B,) bool, finite (B,) bool)` of a stored column.

        Rows that are not encoded have zeros, which count as finite.
        """
        if spec.resolution is None:
            encode, inputs, encoded_B = self.encode_captions, token_ids(spec, rows)[good_B], good_B
        else:
            width, height = spec.size
            # V of the B rows have pixels of this size
            pixels_VHWC, fits_B = schema.decode_present_rows(rows[schema.input_column(spec.name)], (height, width, 3))
            encode, inputs, encoded_B = self.encode_images, pixels_VHWC[good_B[fits_B]], good_B & fits_B
        values_BX, finite_B = np.zeros((len(rows), *spec.shape), schema.DTYPE), np.ones(len(rows), bool)
        if len(inputs):
            values, finite_B[encoded_B] = encode(inputs)
            values_BX[encoded_B] = values[:, : spec.shape[0]]  # of moments the mean alone, or both
        return values_BX, encoded_B, finite_B

    def encode_images(self, pixels_BHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(moments (B, 2, C, H/8, W/8) fp16, finite (B,) bool)` of at least one image, uint8: see `vae_moments`."""
        return self.in_batches(self.moments, pixels_BHWC)

    def encode_captions(self, caption_ids_BL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(embeddings (B, L, D) fp16, finite (B,) bool)` of at least one caption's token ids: see `last_states`."""
        return self.in_batches(self.embeddings, caption_ids_BL)

    @torch.no_grad()
    def moments(self, pixels_BHWC: torch.Tensor) -> torch.Tensor:
        """`encode_images` of a tensor on the device."""
        pixels_BCHW = normalize(pixels_BHWC).permute(0, 3, 1, 2).to(self.vae.dtype)
        return vae_moments(self.vae, pixels_BCHW).to(torch.float16)

    @torch.no_grad()
    def embeddings(self, caption_ids_BL: torch.Tensor) -> torch.Tensor:
        """`encode_captions` of a tensor on the device."""
        return last_states(self.text_encoder, caption_ids_BL).to(torch.float16)

    def in_batches(
        self, encode: Callable[[torch.Tensor], torch.Tensor], inputs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`(values, finite (B,) bool)`: `encode(inputs)` on the device, `batch_size` rows at a time."""
        values, finite = [], []
        size = self.batch_size or len(inputs)
        for start in range(0, len(inputs), size):
            # np.array copies: Ray's object store gives read-only views
            inputs_BX = torch.from_numpy(np.array(inputs[start : start + size]))
            missing = size - len(inputs_BX) if self.fills_up else 0
            inputs_BX = torch.cat([inputs_BX, inputs_BX.new_zeros(missing, *inputs_BX.shape[1:])])
            values_BX = encode(inputs_BX.to(self.device))[: size - missing]
            finite.append(values_BX.isfinite().flatten(1).all(dim=1).cpu().numpy())
            values.append(values_BX.cpu().numpy())
        return np.concatenate(values), np.concatenate(finite)


def token_ids(spec: schema.ColumnSpec, rows: pa.Table) -> np.ndarray:
    """(B, L) int32: the token ids behind a column of embeddings; -1 where there is no token."""
    return schema.from_binary(rows[schema.input_column(spec.name)], (-1,), np.int32)[0]


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [0, 255] -> float32 [-1, 1], any shape.

    The encoder normalises, so that the transform can send it uint8, a quarter of the bytes of float32.
    """
    return pixels.float() / 127.5 - 1


def vae_moments(vae: diffusers.ModelMixin, pixels_BCHW: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in [-1, 1] -> (B, 2, C, H/8, W/8): the posterior's mean and standard deviation, unscaled.

    An `AutoencoderDC` has no posterior. For it, the latents come back: (B, 1, C, H/32, W/32).
    """
    encoded = vae.encode(pixels_BCHW)
    if isinstance(vae, diffusers.AutoencoderDC):
        return encoded.latent[:, None]
    return torch.stack([encoded.latent_dist.mean, encoded.latent_dist.std], dim=1)


def last_states(text_encoder: transformers.PreTrainedModel, caption_ids_BL: torch.Tensor) -> torch.Tensor:
    """(B, L) token ids -> (B, L, D): the text encoder's last hidden state.

    Positions with id -1 hold no token: they are masked, and their states are zero. Positions with a padding token are
    not masked, as in Stable Diffusion.
    """
    mask_BL = caption_ids_BL >= 0
    if mask_BL.all():
        return text_encoder(caption_ids_BL.long()).last_hidden_state
    ids_BL = caption_ids_BL.clamp(min=0).long()
    states_BLD = text_encoder(ids_BL, attention_mask=mask_BL.long()).last_hidden_state
    return states_BLD.masked_fill(~mask_BL[:, :, None], 0)


def load_vae(model: str, dtype: torch.dtype = torch.float32) -> diffusers.ModelMixin:
    """The VAE of a model, without gradients. Raises Unsupported as `vae_config` does.

    If `dtype` is fp16 and the VAE's config.json says `force_upcast`, the VAE is loaded in fp32: in fp16 it would
    overflow. Stable Diffusion XL's VAE says so.
    """
    config = vae_config(model)
    dtype = torch.float32 if config["force_upcast"] and dtype == torch.float16 else dtype
    options = {"subfolder": "vae", "dtype": dtype, "use_safetensors": True}
    vae_class = getattr(diffusers, config["_class_name"])
    return vae_class.from_pretrained(model_folder(model, "vae/*"), **options).eval().requires_grad_(False)


def load_text_encoder(model: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The text encoder of a model, without gradients. Raises Unsupported as `text_config` does."""
    transformers.logging.disable_progress_bar()
    name, config = text_config(model)
    options = {"subfolder": "text_encoder", "config": config, "dtype": dtype, "use_safetensors": True}
    folder = model_folder(model, "text_encoder/*")
    return text_encoder_class(name).from_pretrained(folder, **options).eval().requires_grad_(False)


def text_encoder_class(name: str) -> type[transformers.PreTrainedModel]:
    """The class that a name in `TEXT_ENCODERS` stands for.

    T5GemmaEncoder is taken from its own module, because `transformers` itself does not export it.
    """
    module = transformers.models.t5gemma.modeling_t5gemma if name == "T5GemmaEncoder" else transformers
    return getattr(module, name)


def vae_config(model: str) -> dict[str, Any]:
    """`vae/config.json`, with its class's defaults. Raises Unsupported for a class that is not in `VAES`."""
    config = json.loads(pathlib.Path(model_folder(model, "vae/config.json"), "vae/config.json").read_text())
    check_class(config.get("_class_name"), VAES, f"{model!r} has an autoencoder")
    options = inspect.signature(getattr(diffusers, config["_class_name"])).parameters
    defaults = {name: option.default for name, option in options.items()}
    # By default the class forces it. Stable Diffusion 2's VAE, which says nothing, computes well in fp16.
    return {**defaults, "force_upcast": False, **config}


def downsampling(vae_config: dict[str, Any]) -> int:
    """The VAE's downsampling factor: the image's side over the latents' side."""
    names = {"AutoencoderKL": "block_out_channels", "AutoencoderDC": "encoder_block_out_channels"}
    return 2 ** (len(vae_config[names[vae_config["_class_name"]]]) - 1)


def text_config(model: str) -> tuple[str, transformers.PreTrainedConfig]:
    """`(name of the text encoder's class, its config)`. Raises Unsupported for a class not in `TEXT_ENCODERS`."""
    folder = pathlib.Path(model_folder(model, "model_index.json", "text_encoder/config.json"))
    index, values = folder / "model_index.json", json.loads((folder / "text_encoder/config.json").read_text())
    parts = json.loads(index.read_text()) if index.exists() else {}
    name = parts["text_encoder"][1] if "text_encoder" in parts else (values.get("architectures") or [None])[0]
    check_class(name, TEXT_ENCODERS, f"{model!r} has a text encoder")
    loader = transformers.AutoConfig if name == "T5GemmaEncoder" else text_encoder_class(name).config_class
    config = loader.from_pretrained(folder, subfolder="text_encoder")
    return name, getattr(config, "encoder", config)  # published T5Gemma configs describe a decoder too
