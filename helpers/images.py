"""Bytes -> a square RGB picture: decode, largest centre square, antialiased resize, normalise. Pure functions."""

import functools
import io
import pathlib
import struct
import warnings

import numpy as np
from PIL import Image, ImageOps
from transformers import CLIPTokenizer

TINY_SD = "tiny-sd"


def model_path(model):
    """The folder or hub id behind an `encoder_model` parameter; "tiny-sd" is the model in this package."""
    return str(pathlib.Path(__file__).parent / TINY_SD) if model == TINY_SD else model


@functools.lru_cache(maxsize=2)
def load_tokenizer(model):
    """The tokenizer, loaded once a process; no code from the model's folder is ever run."""
    return CLIPTokenizer.from_pretrained(model_path(model), subfolder="tokenizer")


def tokenize(captions, tokenizer):
    """B captions -> (B, L) int32 token ids, cut and padded to the tokenizer's `model_max_length` L."""
    if len(captions) == 0:
        return np.zeros((0, tokenizer.model_max_length), dtype=np.int32)
    encoded = tokenizer(list(captions), padding="max_length", truncation=True, max_length=tokenizer.model_max_length)
    return np.array(encoded["input_ids"], dtype=np.int32)


def count_tokens(captions, tokenizer):
    """Token ids of each whole caption, with begin and end, nothing cut off."""
    return [len(ids) for ids in tokenizer(captions, truncation=False, verbose=False)["input_ids"]]


# An allow-list: Pillow's other decoders include ones that start programs (EPS) or are rarely exercised.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = Image.MAX_IMAGE_PIXELS  # 89,478,485: Pillow's own limit against decompression bombs


class BadImage(ValueError):
    """A picture that cannot be used; its text is the reason that rejects and the report give."""


def decode(data, max_pixels=MAX_PIXELS):
    """Encoded bytes -> an upright RGB `PIL.Image` (EXIF orientation applied, first frame, alpha over white).

    Raises `BadImage` with one of a few fixed reasons; "too many pixels" before they are unpacked.
    """
    if not data:
        raise BadImage("no image bytes")
    Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow's own check, which some formats need while they are unpacked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broken EXIF and the like; the bomb warning is the size check below
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError:
            raise BadImage("too many pixels") from None
        except Exception:  # Pillow's parsers raise whatever their format makes them stumble over
            raise BadImage("not an image") from None
        if image.width * image.height > max_pixels:
            raise BadImage("too many pixels")
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
        except (SyntaxError, ValueError, KeyError, TypeError, struct.error):
            upright = image  # a broken EXIF block says nothing about the orientation; the pixels are there
        except Exception:
            raise BadImage("broken image") from None
        try:
            return to_rgb(upright)
        except Exception:
            raise BadImage("broken image") from None


def size(data):
    """(width, height) from the header of encoded bytes, as the picture is stored; None if it is no picture."""
    if not data or isinstance(data, BadImage):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data), formats=FORMATS).size
    except Exception:  # whatever the parsers stumble over: `decode` gives the reason
        return None


def to_rgb(image):
    """Any Pillow mode -> RGB; 16-bit and float greys are scaled to 8 bits, transparency is laid over white."""
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)  # floats mark gaps with NaN
        scale = 1 if grey.max(initial=0) <= 255 and not image.mode.startswith("I;16") else 257
        if image.mode == "F" and grey.max(initial=0) <= 1:
            scale = 1 / 255
        return Image.fromarray(np.clip(grey / scale, 0, 255).astype(np.uint8), "L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def center_square(image):
    """The largest square around the centre."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def resize(image, resolution):
    """A square picture at `resolution` x `resolution` pixels, antialiased (Lanczos over the whole support)."""
    if image.size == (resolution, resolution):
        return image
    return image.resize((resolution, resolution), Image.Resampling.LANCZOS)


def to_pixels(image):
    """(H, W, 3) uint8."""
    return np.asarray(image, dtype=np.uint8)


def normalize(pixels):
    """uint8 [0, 255] -> float32 [-1, 1], any shape; works on NumPy arrays and torch tensors alike.

    Applied where the encoder is, after the transfer: bytes are a quarter of the floats to move.
    """
    return pixels / np.float32(127.5) - 1 if isinstance(pixels, np.ndarray) else pixels.float() / 127.5 - 1
