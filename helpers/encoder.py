"""`LatentEncoder`: pictures and token ids -> VAE moments and caption embeddings. The actor of the encode stage.

Nothing else touches the VAE and the text encoder while data is being prepared; the trainers hold only the U-Net.
"""

import hashlib
import pathlib
import time
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import transformers
from diffusers import AutoencoderKL
from transformers import CLIPTextModel

from . import images, schema
from .images import load_tokenizer, model_path, tokenize

MOMENTS = {"moments": 2, "mean": 1}
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_vae(model, dtype=torch.float32):
    return (
        AutoencoderKL.from_pretrained(model_path(model), subfolder="vae", torch_dtype=dtype, use_safetensors=True)
        .eval()
        .requires_grad_(False)
    )


def load_text_encoder(model, dtype=torch.float32):
    transformers.logging.disable_progress_bar()  # one more bar that says nothing
    return (
        CLIPTextModel.from_pretrained(model_path(model), subfolder="text_encoder", dtype=dtype, use_safetensors=True)
        .eval()
        .requires_grad_(False)
    )


class LatentEncoder:
    """A Ray Data actor: pixels and token ids -> latents and caption embeddings (`batch_format="pyarrow"`).

    Args:
        model: "tiny-sd", or a folder or hub id in diffusers layout (`vae/`, `text_encoder/`).
        resolutions: sizes in pixels; the batch holds `pixels_{resolution}` for each.
        precision: "fp32", "fp16" or "bf16": what the networks compute in. Results are stored as fp16.
        stored_latents: "moments", or "mean" to leave the standard deviations out.
        text_precision: of the caption embeddings that are given, "fp16" or "fp8" (`to_float8`).
        num_threads: threads of PyTorch on a CPU.
        batch_size: rows that go through the networks at a time; None: all that a call brings.
    """

    def __init__(
        self,
        model,
        resolutions,
        precision="fp32",
        stored_latents="moments",
        text_precision="fp16",
        *,
        num_threads=1,
        batch_size=None,
    ):
        # `torch.device == "cuda"` is always False: compare the type.
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            torch.set_num_threads(num_threads)
        self.dtype = PRECISIONS[precision]
        self.resolutions, self.batch_size = resolutions, batch_size
        self.num_moments, self.text_precision = MOMENTS[stored_latents], text_precision
        self.name = uuid.uuid4().hex[:8]  # by which the report tells encoders apart
        self.vae = load_vae(model, self.dtype).to(self.device)
        self.text_encoder = load_text_encoder(model, self.dtype).to(self.device)

    @torch.no_grad()
    def moments(self, pixels_BHWC):
        """(B, H, W, 3) uint8 -> (B, 2, C, H/8, W/8) fp16: the posterior's mean and standard deviation, unscaled.

        NaN throughout where one of a row's numbers is not finite; so are `embeddings`.
        """
        posterior = self.vae.encode(images.normalize(pixels_BHWC).permute(0, 3, 1, 2).to(self.dtype)).latent_dist
        return nan_fill_nonfinite(torch.stack([posterior.mean, posterior.std], dim=1).to(torch.float16))

    @torch.no_grad()
    def embeddings(self, caption_ids_BL):
        """(B, L) token ids -> (B, L, D) fp16: the text encoder's last hidden state, as Stable Diffusion takes it.

        With `text_precision="fp8"` the bytes that `to_float8` makes of it.
        """
        text = nan_fill_nonfinite(self.text_encoder(caption_ids_BL.long()).last_hidden_state.to(torch.float16))
        return to_float8(text) if self.text_precision == "fp8" else text

    def encode_images(self, pixels_BHWC):
        """`moments` of a numpy array, as one."""
        # np.array copies: Ray hands out read-only views of its object store
        return self.moments(torch.from_numpy(np.array(pixels_BHWC)).to(self.device)).cpu().numpy()

    def encode_captions(self, caption_ids_BL):
        """`embeddings` of a numpy array, as one."""
        return self.embeddings(torch.from_numpy(np.array(caption_ids_BL)).to(self.device)).cpu().numpy()

    def __call__(self, rows):
        """An Arrow table of transformed rows -> the same rows with latents and embeddings in place of pixels and tokens.

        Rejected rows, and pictures too small for a resolution, are not encoded: they become null there. A row of which a
        number is not finite, as half precision may overflow, is rejected: it would stop the training that meets it.
        """
        started = time.perf_counter()
        # What is not encoded passes through.
        columns = {
            name: rows[name] for name in rows.column_names if name != "caption_ids" and not name.startswith("pixels_")
        }
        kept = pc.equal(rows[schema.REASON], "").to_numpy()
        ids, _ = schema.from_binary(rows["caption_ids"], (-1,), np.int32)
        text = encode_masked(self.encode_captions, ids, kept, self.batch_size)
        encoded, finite = {schema.EMBEDDINGS: (text, kept)}, is_finite(text)
        for resolution in self.resolutions:
            pixels, fits = schema.from_binary(rows[f"pixels_{resolution}"], (resolution, resolution, 3), np.uint8)
            latents = encode_masked(self.encode_images, pixels, kept & fits, self.batch_size)
            encoded[schema.latents_column(resolution)] = latents[:, : self.num_moments], kept & fits
            finite &= is_finite(latents)
        for name, (values, there) in encoded.items():
            columns[name] = schema.to_binary(values, there & finite, values.dtype)
        if not finite.all():
            columns[schema.REASON] = pc.if_else(
                pa.array(finite), columns[schema.REASON], "encoded to no finite numbers"
            )
        seconds = (time.perf_counter() - started) / len(rows)
        columns["encode_seconds"] = pa.repeat(pa.scalar(seconds, pa.float32()), len(rows))
        columns["encoded_at"] = pa.repeat(time.time(), len(rows))
        columns["encoded_by"] = pa.repeat(self.name, len(rows))
        return pa.table(columns)


def nan_fill_nonfinite(values):
    """(B, ...) with NaN in the whole of each row that holds a number that is not finite: one look at a row then tells."""
    finite = values.isfinite().flatten(1).all(dim=1).view(-1, *[1] * (values.ndim - 1))
    return torch.where(finite, values, torch.nan)


def is_finite(values):
    """(B,) bool: which rows `mark_overflow` left alone; of 8-bit floats their scale tells."""
    first = values.reshape(len(values), -1)[:, : schema.SCALE_BYTES if values.dtype == np.uint8 else 1]
    return np.isfinite(np.ascontiguousarray(first).view(np.float32)[:, 0] if values.dtype == np.uint8 else first[:, 0])


def to_float8(text_BLD):
    """(B, L, D) floats -> (B, 4 + L * D) bytes: a fp32 scale a row, and the E4M3 floats that it multiplies.

    The scale lays a row's largest number on E4M3's, 448: nothing overflows, and a number keeps four significant bits.
    """
    rows = text_BLD.float().flatten(1)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / schema.FLOAT8_MAX
    return torch.cat([scales.view(torch.uint8), (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8)], dim=1)


def arguments(config):
    """The constructor's arguments, from a `PreprocessingConfig`."""
    return config.encoder_model, config.resolutions, config.encoder_precision, config.latents, config.text_precision


def encode_masked(encode, inputs, rows, batch_size=None):
    """`encode(inputs[rows])` at those rows, zeros elsewhere, so that the batch keeps its length; some rows at a time."""
    # One row at least, so that the result's shape is known when every row is rejected.
    places = np.flatnonzero(rows) if rows.any() else np.array([0])
    size = batch_size or len(places)
    result = None
    for start in range(0, len(places), size):
        some = places[start : start + size]
        # No copy where the rows are all there, one after another.
        encoded = encode(inputs[some[0] : some[-1] + 1] if some[-1] - some[0] + 1 == len(some) else inputs[some])
        if len(encoded) == len(inputs):
            return encoded if rows.any() else np.zeros_like(encoded)
        if result is None:
            result = np.zeros((len(inputs), *encoded.shape[1:]), dtype=encoded.dtype)
        result[some] = encoded if rows.any() else 0
    return result


def describe(model, resolutions, precision, stored_latents="moments", text_precision="fp16"):
    """What the manifest says of an encoder model, from its configs and one empty caption (on this machine's CPU).

    Returns a dict with `encoder`, `shapes`, `scaling_factor`, `empty_caption_embedding`, `text_precision`. Raises ValueError naming a
    resolution that the VAE cannot take, or a model that is not in diffusers layout.
    """
    try:
        vae_config = AutoencoderKL.load_config(model_path(model), subfolder="vae")
        tokenizer = load_tokenizer(model)
        text_encoder = load_text_encoder(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"encoder_model={model!r} holds no model in diffusers layout (vae/, text_encoder/, tokenizer/): "
            f"give 'tiny-sd', a folder or a hub id. ({str(error).splitlines()[0]})"
        ) from None
    halvings = len(vae_config["block_out_channels"]) - 1
    check_resolutions(resolutions, halvings)
    with torch.inference_mode():
        empty = text_encoder(torch.from_numpy(tokenize([""], tokenizer)).long()).last_hidden_state[0].numpy()
    channels = vae_config["latent_channels"]
    moments = MOMENTS[stored_latents]
    shapes = {
        schema.latents_column(r): list(schema.latents_shape(r, channels, 2**halvings, moments)) for r in resolutions
    }
    return {
        "encoder": {"model": model, "revision": revision(model, vae_config), "precision": precision},
        "shapes": {**shapes, schema.EMBEDDINGS: list(empty.shape)},
        "scaling_factor": vae_config["scaling_factor"],
        "empty_caption_embedding": schema.encode_embedding(empty),
        "text_precision": text_precision,
    }


def check_resolutions(resolutions, halvings=3):
    for resolution in resolutions:
        if resolution % 2**halvings:
            raise ValueError(
                f"resolutions={list(resolutions)}: the VAE halves a picture {halvings} times, and {resolution} is not "
                f"a multiple of {2**halvings}; use {max(1, round(resolution / 2**halvings)) * 2**halvings} instead."
            )


def revision(model, vae_config):
    """The hub's commit, or a hash of the weights' sizes and headers for a folder."""
    folder = pathlib.Path(model_path(model))
    if not folder.is_dir():
        return (
            vae_config.get("_commit_hash")
            or AutoencoderKL.load_config(model, subfolder="vae", return_commit_hash=True)[1]
        )
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("vae/*"), *folder.glob("text_encoder/*"), *folder.glob("tokenizer/*")]):
        if path.is_file():
            digest.update(path.name.encode() + hash_file(path))
    return digest.hexdigest()[:16]


def hash_file(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@torch.inference_mode()
def decode(model, latents_BCHW):
    """Unscaled latents -> (B, H, W, 3) uint8 pictures, by the model's VAE."""
    pixels = load_vae(model).decode(latents_BCHW).sample
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def reconstruct(model, moments_B2CHW):
    """Stored moments -> (B, H, W, 3) uint8 pictures, decoded from the posterior's mean."""
    return decode(model, torch.from_numpy(np.array(moments_B2CHW[:, 0], dtype=np.float32)))
