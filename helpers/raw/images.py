"""Encoded bytes -> an RGB picture of a given shape. Pure functions."""

import io
import math
import struct
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

# An allow-list: some of Pillow's other decoders start programs (EPS) or are hardly tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
Shape = tuple[int, int]  # (width, height) in pixels
MAX_PIXELS = Image.MAX_IMAGE_PIXELS  # 89,478,485: Pillow's own limit against decompression bombs


class BadImage(ValueError):
    """A picture cannot be used; the text is the reason that `rejects/` and the report give."""


def decode(data: bytes | None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Encoded bytes -> an upright RGB `PIL.Image` (EXIF orientation applied, first frame, alpha over white).

    Raises `BadImage`: "no image bytes", "not an image", "broken image", or "too many pixels". The number of pixels is
    read from the header, before anything is decompressed.
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


def nearest_shape(size: Shape, shapes: Sequence[Shape]) -> Shape:
    """The one of `shapes` whose centre crop cuts the least away from a picture of this size."""
    ratio = size[0] / size[1]
    return min(shapes, key=lambda shape: abs(math.log(ratio * shape[1] / shape[0])))


def reached_shapes(
    size: Shape, shapes: dict[int, list[Shape]], upscale: bool = False, max_aspect_ratio: float | None = None
) -> tuple[list[Shape], str]:
    """`(the nearest shape of each resolution that a picture reaches, why there is none)`.

    Args:
        size: of the picture.
        shapes: {resolution: its shapes}.
        upscale: whether smaller pictures reach a shape too.
        max_aspect_ratio: maximum of longer side / shorter side; None: any.
    """
    if max_aspect_ratio is not None and max(size) > max_aspect_ratio * min(size):
        return [], f"longer than {max_aspect_ratio:g} times its shorter side"
    nearest = [nearest_shape(size, of_resolution) for of_resolution in shapes.values()]
    reached = [shape for shape in nearest if upscale or (size[0] >= shape[0] and size[1] >= shape[1])]
    return reached, "" if reached else f"smaller than {min(shapes)} pixels"


def to_pixels(image: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8."""
    return np.asarray(image, dtype=np.uint8)
