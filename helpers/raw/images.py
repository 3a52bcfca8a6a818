"""Encoded bytes -> an RGB image of a given shape. Pure functions, of plain values that can be pickled."""

from __future__ import annotations

import functools
import io
import math
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageFile, ImageMode, ImageOps

# An allow-list: some of Pillow's other decoders start programs (EPS) or are hardly tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
UNSUPPORTED = {
    "HEIC": re.compile(rb"....ftyp(?:hei|hev|miaf|mif1|msf1)(?!.{0,64}avi[fs])", re.DOTALL),
    "JXL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "JPEG 2000": re.compile(rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  "),
    "PSD": re.compile(b"8BPS"),
}
# WebP and AVIF: Pillow cannot open them if they were cut short.
CUT_SHORT = re.compile(rb"RIFF....WEBP|....ftyp.{0,64}?avi[fs]", re.DOTALL)
MAX_PIXELS = 89_478_485  # Pillow's own limit against decompression bombs
MAX_DECODED_BYTES = 2**29
MAX_SCANS = 100  # of a JPEG: each scan takes a pass over all pixels, and may have few bytes
BITS_PER_SAMPLE = 258  # a TIFF tag
JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")  # of a segment with a length, or the end; not within pixels
START_OF_SCAN, END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}  # a profile's kind of colours -> Pillow's mode
NOTE, BROKEN_PROFILE = "note", "broken colour profile"  # in `Image.info`, what is wrong with an image that is used
PROBE = Image.fromarray(np.stack(np.meshgrid(*[np.arange(0, 256, 17, np.uint8)] * 3), -1).reshape(64, 64, 3))

Shape = tuple[int, int]  # width, height
Shapes = dict[int, list[Shape]]  # resolution -> its shapes
Crop = Callable[[Image.Image, float], Image.Image]  # an image and the crop's width over its height -> the crop
Call = tuple[bytes | None, Crop, Shape | None]  # the arguments of `make_pixels`


class DecodedImage(NamedTuple):
    """(H, W, 3) uint8 pixels by shape, or the `reason` why an image cannot be used.

    `note`: what is wrong with an image that is used.
    """

    pixels: dict[Shape, np.ndarray]
    reason: str = ""
    note: str = ""


class BadImage(ValueError):
    """An image cannot be used; the text is the reason that `rejects/` and the report give."""


def decode(data: bytes | None) -> Image.Image:
    """Encoded bytes -> an upright sRGB `PIL.Image` (EXIF orientation applied, first frame, alpha over white).

    Raises `BadImage`: "no image bytes", "not an image", "format not supported: HEIC" (and others of `UNSUPPORTED`),
    "broken image" or, before anything is decompressed, "too many pixels", "too many bytes when decoded"
    (`MAX_DECODED_BYTES`) or "too many scans" (`MAX_SCANS`). `helpers/docs/DATA.md` says what becomes of colours.
    """
    if not data:
        raise BadImage("no image bytes")
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # some formats tell their size only while decoding
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broken EXIF and the like; the bomb warning is the size check below
        try:
            image = open_image(data)
        except Image.DecompressionBombError:
            raise BadImage("too many pixels") from None
        except Exception:  # Pillow's parsers raise exceptions of many types
            name = next((name for name, magic in UNSUPPORTED.items() if magic.match(data)), None)
            otherwise = "broken image" if CUT_SHORT.match(data) else "not an image"
            raise BadImage(f"format not supported: {name}" if name else otherwise) from None
        if image.width * image.height > MAX_PIXELS:
            raise BadImage("too many pixels")
        if decoded_bytes(image) > MAX_DECODED_BYTES:
            raise BadImage("too many bytes when decoded")
        if image.format in ("JPEG", "MPO") and sum(1 for _ in scans(data)) > MAX_SCANS:
            raise BadImage("too many scans")
        try:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
        except (SyntaxError, ValueError, KeyError, TypeError, struct.error):
            pass  # broken EXIF: the pixels are there, only the orientation is unknown
        except Exception:
            raise BadImage("broken image") from None
        try:
            image.load()
            found = to_rgb(image)
            profile = image.info.get("icc_profile", b"")  # None: Pillow could not unpack it
            found.info = {NOTE: BROKEN_PROFILE} if profile is None or srgb_transform(profile)[1] else {}
            return found
        except Exception:
            raise BadImage("broken image") from None


def open_image(data: bytes) -> Image.Image:
    """An image of one of `FORMATS`, opened. What is wrong in a PNG's texts or profile does not matter."""
    ImageFile.LOAD_TRUNCATED_IMAGES = data.startswith(b"\x89PNG")  # here this concerns chunks without pixels
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def decoded_bytes(image: Image.Image) -> int:
    """Bytes of an opened image's pixels in the depth that its file has, from its header; Pillow may keep fewer."""
    mode = ImageMode.getmode(image.mode)
    pixel_bits = 8 * len(mode.bands) * np.dtype(mode.typestr).itemsize
    if image.format == "PNG" and image.tile:
        channels, _, depth = image.tile[0].args.partition(";")  # such as "RGB;16B"
        pixel_bits = len(channels) * (16 if depth == "16B" else 8)
    elif image.format == "TIFF":
        pixel_bits = max(pixel_bits, sum(image.tag_v2.get(BITS_PER_SAMPLE, ())))
    return image.width * image.height * pixel_bits // 8


def scans(data: bytes) -> Iterator[bytes]:
    """The header of each scan of a JPEG's first image."""
    found = JPEG_MARKER.search(data, 2)
    while found and found[0] != END_OF_IMAGE:
        end = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
        if found[0] == START_OF_SCAN:
            yield data[found.end() + 2 : end]
        found = JPEG_MARKER.search(data, end)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode -> sRGB, by the image's ICC profile; 16-bit and float greys in 8 bits, alpha over white."""
    transform, _ = srgb_transform(image.info.get("icc_profile"))
    is_grey = ImageMode.getmode(image.mode).basemode == "L"
    fitting = ("L", "RGB") if is_grey else ("CMYK",) if image.mode == "CMYK" else ("RGB",)
    if image.mode.startswith("I") or image.mode == "F":
        grey = Image.fromarray(to_grey(image), "L")
        if "transparency" in image.info:
            grey.putalpha(Image.fromarray(np.asarray(image) != image.info["transparency"]))
        image = grey
    has_alpha = image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    if has_alpha and image.mode != "RGBA":
        image = image.convert("RGBA")
    colours = image
    if transform and transform.input_mode in fitting:
        colours = ImageCms.applyTransform(image.convert(transform.input_mode), transform)
    if has_alpha:
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(colours, mask=image)
        return white
    return colours if colours.mode == "RGB" else colours.convert("RGB")


@functools.lru_cache(maxsize=16)
def srgb_transform(profile: bytes | None) -> tuple[ImageCms.ImageCmsTransform | None, bool]:
    """`(transform, whether the profile is broken)`, from an ICC profile's colours to sRGB.

    The transform is relative colorimetric, with black point compensation. It is None without a profile, for a broken
    one, and for one that is sRGB (it changes no colour by more than 1).
    """
    if not profile:
        return None, False
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = PROFILE_MODES[source.profile.xcolor_space.strip()]
        intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB", intent, flags)
    except (ImageCms.PyCMSError, OSError, KeyError):
        return None, True
    probe = PROBE.convert(mode)
    changes = np.asarray(ImageCms.applyTransform(probe, transform), int) - np.asarray(probe.convert("RGB"), int)
    return (transform if abs(changes).max() > 1 else None), False


def to_grey(image: Image.Image) -> np.ndarray:
    """(H, W) uint8 of 16-bit, 32-bit or float greyscale. In 64 bits are only a million pixels at a time."""
    values = np.asarray(image)
    parts = np.array_split(values.reshape(-1), -(-values.size // 2**20))

    def in_64_bits(part: np.ndarray) -> np.ndarray:
        return np.nan_to_num(part.astype(np.float64), posinf=0, neginf=0)  # NaN marks missing values

    largest = max(in_64_bits(part).max(initial=0) for part in parts)
    scale = 1 if largest <= 255 and not image.mode.startswith("I;16") else 257
    if image.mode == "F" and largest <= 1:
        scale = 1 / 255
    grey = [np.clip(in_64_bits(part) / scale, 0, 255).astype(np.uint8) for part in parts]
    return np.concatenate(grey).reshape(values.shape)


def center_crop(image: Image.Image, ratio: float = 1.0) -> Image.Image:
    """The largest centre crop whose width is `ratio` times its height."""
    width = max(1, min(image.width, round(image.height * ratio)))
    height = max(1, min(image.height, round(image.width / ratio)))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def random_crop(
    image: Image.Image, ratio: float, *, seeds: Sequence[int], smallest: float, may_mirror: bool
) -> Image.Image:
    """A crop of an image, whose width is `ratio` times its height, sampled from `seeds`.

    Its sides are at least the share `smallest` of the largest crop's; 1: the centre crop. `may_mirror`: half are
    mirrored.
    """
    random = np.random.default_rng(seeds)
    if smallest == 1:
        cut = center_crop(image, ratio)
    else:
        share = random.uniform(smallest, 1)
        largest = min(image.width, image.height * ratio), min(image.height, image.width / ratio)
        width, height = (max(1, round(side * share)) for side in largest)
        left = int(random.integers(0, image.width - width + 1))
        top = int(random.integers(0, image.height - height + 1))
        cut = image.crop((left, top, left + width, top + height))
    return ImageOps.mirror(cut) if may_mirror and random.random() < 0.5 else cut


def resize(image: Image.Image, width: int, height: int | None = None) -> Image.Image:
    """An image resized by an antialiased Lanczos filter to width x height pixels; None: to a square."""
    size = width, width if height is None else height
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def decode_all(calls: Iterable[Call], shapes: Shapes) -> list[DecodedImage]:
    """`make_pixels` of each call. `production.decode.isolated` has a function of the same arguments."""
    return [make_pixels(*call, shapes=shapes) for call in calls]


def make_pixels(
    data: bytes | None, crop: Crop = center_crop, wanted: Shape | None = None, *, shapes: Shapes
) -> DecodedImage:
    """The pixels of an encoded image, in the nearest shape of each resolution that the image reaches.

    `wanted`: the only shape to make. The image is bad if it does not reach that shape, or if another shape is nearer.
    """
    try:
        image = decode(data)
    except BadImage as bad:
        return DecodedImage({}, str(bad))
    reached, reason = reached_shapes(image.size, shapes)
    if wanted and wanted not in reached:
        is_smaller = image.width < wanted[0] or image.height < wanted[1]
        wrong = f"smaller than {wanted[0]} pixels" if is_smaller else "its width or height column is wrong"
        return DecodedImage({}, reason or wrong)
    reached = [wanted] if wanted else reached
    # One decode for all shapes, and one crop for all shapes of one ratio.
    crops = {ratio: crop(image, ratio) for ratio in {width / height for width, height in reached}}
    pixels = {shape: to_pixels(resize(crops[shape[0] / shape[1]], *shape)) for shape in reached}
    return DecodedImage(pixels, reason, image.info.get(NOTE, ""))


def nearest_shape(size: Shape, shapes: Sequence[Shape]) -> Shape:
    """The one of `shapes` whose centre crop cuts the least away from an image of this size."""
    ratio = size[0] / size[1]
    return min(shapes, key=lambda shape: abs(math.log(ratio * shape[1] / shape[0])))


def reached_shapes(size: Shape, shapes: Shapes) -> tuple[list[Shape], str]:
    """`(the nearest shape of each resolution that an image of this size reaches, why there is none)`."""
    nearest = [nearest_shape(size, of_resolution) for of_resolution in shapes.values()]
    reached = [shape for shape in nearest if size[0] >= shape[0] and size[1] >= shape[1]]
    return reached, "" if reached else f"smaller than {min(shapes)} pixels"


def to_pixels(image: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8."""
    return np.asarray(image, dtype=np.uint8)
