"""Encoded bytes -> an RGB picture of a given shape; captions -> token ids; where models are.

Functions of pictures and captions are pure.
"""

import contextlib
import functools
import html
import io
import json
import math
import os
import pathlib
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import WeakFileLock, disable_progress_bars
from PIL import Image, ImageOps
from transformers import CLIPTokenizer, GemmaTokenizer, PreTrainedTokenizerBase, T5Tokenizer

# By the names in `tokenizer_config.json`. Not `AutoTokenizer`, which would load PyTorch into each transforming process.
TOKENIZERS = {made.__name__: made for made in (CLIPTokenizer, T5Tokenizer, GemmaTokenizer)}
TINY_SD, TINY_CLIP = IN_PACKAGE = ("tiny-sd", "tiny-clip")
# Files of a model's repository that nothing here reads: other formats and variants of its weights, pictures.
UNUSED = ["*.bin", "*.h5", "*.msgpack", "*.ckpt", "*.onnx*", "*.fp16.*", "*.non_ema.*", "safety_checker/*", "*.png"]


def tiny_sd_folder() -> str:
    """Where this package's models are on the machine that calls it, in diffusers layout."""
    return model_folder(TINY_SD)


def is_hub_id(model: str) -> bool:
    return not (model in IN_PACKAGE or "://" in model or os.path.exists(model))


def model_folder(model: str, *patterns: str) -> str:
    """The folder of a model on this machine: in this package, as given, or of a hub id in the hub's cache (`HF_HOME`).

    Of "hub/id@commit" (`hub.pin_model`) the files that match `patterns` are downloaded where the cache lacks them. A
    lock makes a node's processes do so one after the other: each file is downloaded once, and what is there is used
    without a request. Raises ValueError for a model that is neither there nor can be downloaded.
    """
    if model in IN_PACKAGE:
        return str(pathlib.Path(__file__).parent / model)
    if not is_hub_id(model):
        return model
    (name, _, revision), cache = model.partition("@"), constants.HF_HUB_CACHE
    os.makedirs(cache, exist_ok=True)
    writable = os.access(cache, os.W_OK)  # one in an image may not be
    lock = WeakFileLock(f"{cache}/{name.replace('/', '--')}.lock") if writable else contextlib.nullcontext()
    options = {"allow_patterns": list(patterns), "ignore_patterns": UNUSED}
    try:
        with lock, disable_progress_bars():
            return snapshot_download(name, revision=revision or None, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model!r} is neither a folder here, nor in {cache}, nor to be had from {constants.ENDPOINT}: check its "
            f"name, the network, HF_TOKEN and HF_HUB_OFFLINE. ({str(error).splitlines()[0]})"
        ) from None


class Unsupported(ValueError):
    """A model, or a parameter of it, that this code does not take; the text says which and what to change."""


def check_class(name: str | None, known: dict[str, type], what: str) -> None:
    """Raises Unsupported for a class that is not among the `known` ones. `what`: begins the sentence."""
    if name not in known:
        raise Unsupported(f"{what} of class {name}, and this code takes {', '.join(known)}: give another model.")


@functools.lru_cache(maxsize=2)
def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer, loaded once per process; no code from the model's folder is ever run."""
    folder = model_folder(model, "tokenizer/*")
    config = pathlib.Path(folder, "tokenizer/tokenizer_config.json")
    name = json.loads(config.read_text()).get("tokenizer_class", "CLIPTokenizer").removesuffix("Fast")
    check_class(name, TOKENIZERS, f"{model!r} has a tokenizer")
    return TOKENIZERS[name].from_pretrained(folder, subfolder="tokenizer")


def caption_ids(captions: Sequence[str], config: Any) -> np.ndarray:
    """B captions -> (B, L) int32 token ids, cleaned and tokenized as a `PreprocessingConfig` says."""
    tokenizer = load_tokenizer(config.model_of("text_encoder"))
    cleaned = [clean(caption, config.text_cleaning) for caption in captions]
    return tokenize(cleaned, tokenizer, config.maximum_tokens)


def clean(caption: str, cleaning: str) -> str:
    """A caption as the parameter `text_cleaning` says: as diffusers' pipelines prepare prompts.

    "lower": as `PixArtSigmaPipeline` with `clean_caption=False`; "ftfy": as `PRXPipeline` with
    `skip_text_cleaning=True`; "none": as `StableDiffusionPipeline`.
    """
    if cleaning == "lower":
        return caption.lower().strip()
    if cleaning == "ftfy":
        import ftfy

        return html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return caption


def tokenize(
    captions: Sequence[str], tokenizer: PreTrainedTokenizerBase, maximum_tokens: int | None = None
) -> np.ndarray:
    """B captions -> (B, L) int32 token ids, truncated or padded to the tokenizer's `model_max_length` L.

    With `maximum_tokens`, that is L, and -1 stands in place of padding.
    """
    most = maximum_tokens or tokenizer.model_max_length
    ids_BL = np.full((len(captions), most), -1, dtype=np.int32)
    if len(captions):
        padding = "max_length" if maximum_tokens is None else False
        encoded = tokenizer(list(captions), padding=padding, truncation=True, max_length=most)
        for ids_L, ids in zip(ids_BL, encoded["input_ids"], strict=True):
            ids_L[: len(ids)] = ids
    return ids_BL


def count_tokens(captions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Number of tokens of each caption before truncation, with the start and end tokens."""
    return [len(ids) for ids in tokenizer(captions, truncation=False, verbose=False)["input_ids"]]


# An allow-list: some of Pillow's other decoders start programs (EPS) or are hardly tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = Image.MAX_IMAGE_PIXELS  # 89,478,485: Pillow's own limit against decompression bombs


class BadImage(ValueError):
    """A picture that cannot be used; the text is the reason that `rejects/` and the report give."""


def decode(data: bytes | None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Encoded bytes -> an upright RGB `PIL.Image` (EXIF orientation applied, first frame, alpha over white).

    Raises `BadImage`: "no image bytes", "not an image", "broken image", or "too many pixels", which is read from the
    header, before anything is decompressed.
    """
    if not data:
        raise BadImage("no image bytes")
    Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow's own check: some formats tell their size only while decoding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broken EXIF and the like; the bomb warning is the size check below
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError:
            raise BadImage("too many pixels") from None
        except Exception:  # Pillow's parsers raise exceptions of many types
            raise BadImage("not an image") from None
        if image.width * image.height > max_pixels:
            raise BadImage("too many pixels")
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
        except (SyntaxError, ValueError, KeyError, TypeError, struct.error):
            upright = image  # broken EXIF: the pixels are there, only the orientation is unknown
        except Exception:
            raise BadImage("broken image") from None
        try:
            return to_rgb(upright)
        except Exception:
            raise BadImage("broken image") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode -> RGB: 16-bit and float greyscale is scaled to 8 bits, transparency becomes white."""
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)  # NaN marks missing values
        scale = 1 if grey.max(initial=0) <= 255 and not image.mode.startswith("I;16") else 257
        if image.mode == "F" and grey.max(initial=0) <= 1:
            scale = 1 / 255
        return Image.fromarray(np.clip(grey / scale, 0, 255).astype(np.uint8), "L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def center_crop(image: Image.Image, ratio: float = 1.0) -> Image.Image:
    """The largest centre crop whose width is `ratio` times its height."""
    width = max(1, min(image.width, round(image.height * ratio)))
    height = max(1, min(image.height, round(image.width / ratio)))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def resize(image: Image.Image, width: int, height: int | None = None) -> Image.Image:
    """A picture resized by an antialiased Lanczos filter to width x height pixels; None: to a square."""
    size = width, width if height is None else height
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def nearest_shape(size: tuple[int, int], shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of `shapes` (width, height) the one of which a centre crop cuts the least away from a picture of this size."""
    ratio = size[0] / size[1]
    return min(shapes, key=lambda shape: abs(math.log(ratio * shape[1] / shape[0])))


def reached_shapes(size: tuple[int, int], config: Any) -> tuple[list[tuple[int, int]], str]:
    """Of a picture's size (width, height) `(the nearest shape of each resolution that it reaches, why there is none)`.

    `config`: a `PreprocessingConfig`.
    """
    if config.max_aspect_ratio is not None and max(size) > config.max_aspect_ratio * min(size):
        return [], f"longer than {config.max_aspect_ratio:g} times its shorter side"
    nearest = [nearest_shape(size, shapes) for shapes in config.shapes.values()]
    reached = [shape for shape in nearest if config.upscale or (size[0] >= shape[0] and size[1] >= shape[1])]
    return reached, "" if reached else f"smaller than {config.resolutions[0]} pixels"


def to_pixels(image: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8."""
    return np.asarray(image, dtype=np.uint8)


def normalize(pixels: Any) -> Any:
    """uint8 [0, 255] -> float32 [-1, 1], any shape, of a NumPy array or a torch tensor.

    Called by the encoder, not by the transform: bytes are a quarter of the size of floats to transfer.
    """
    return pixels / np.float32(127.5) - 1 if isinstance(pixels, np.ndarray) else pixels.float() / 127.5 - 1
