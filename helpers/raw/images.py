"""Encoded bytes -> an RGB image of a given shape. Pure functions, of plain values that can be pickled."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageMode

# An allow-list: some of Pillow's other decoders start programs (EPS) or are hardly tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
UNSUPPORTED = {
    "HEIC": re.compile(rb"....ftyp(?:hei|hev|miaf|mif1|msf1)(?!.{0,64}avi[fs])", re.DOTALL),
    "JXL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "JPEG 2000": re.compile(rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  "),
    "PSD": re.compile(b"8BPS"),
    "TIFF of such samples, or cut short": re.compile(rb"II[*+]\0|MM\0[*+]"),
}
# WebP and AVIF: Pillow cannot open them if they were cut short.
CUT_SHORT = re.compile(rb"RIFF....WEBP|....ftyp.{0,64}?avi[fs]", re.DOTALL)
MAX_PIXELS = 89_478_485  # Pillow's own limit against decompression bombs
MAX_DECODED_BYTES = 2**29
MAX_SCANS = 100  # of a JPEG: each scan takes a pass over all pixels, and may have few bytes
JPEG = ("JPEG", "MPO")
DCT_SCALES = (8, 4, 2)  # by which a JPEG may be divided while it is decoded; others are slower than none
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # TIFF tags, and a value
PNG_STEPS = {"L;2": 85, "L;4": 17}  # from a sample to the 8 bits that Pillow keeps of it
MAX_UNIT = 2.0  # floats up to 1, of which resizing has brought some above; in 255 steps they would be black
JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")  # of a segment with a length, or the end; not within pixels
START_OF_SCAN, END_OF_IMAGE = b"\xff\xda", b"\xff\xd9"
PROFILE_MODES = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}  # a profile's kind of colours -> Pillow's mode
BROKEN_PROFILE = "broken colour profile"  # a note: what is wrong with an image that is used
WRONG_COLUMNS = "its width or height column is wrong, or that of before its EXIF orientation"
Transpose = Image.Transpose
SIDEWAYS = (Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90)
UPRIGHT = (Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM)
TURNS = dict(enumerate((*UPRIGHT, *SIDEWAYS), start=2))  # EXIF orientation -> what undoes it
PROBE = Image.fromarray(np.stack(np.meshgrid(*[np.arange(0, 256, 17, np.uint8)] * 3), -1).reshape(64, 64, 3))

Shape = tuple[int, int]  # width, height
Shapes = dict[int, list[Shape]]  # resolution -> its shapes
Box = tuple[int, int, int, int]  # left, top, right, bottom
Crop = Callable[[Shape, float], tuple[Box, bool]]  # a size, the crop's width over its height -> box, if it is mirrored
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
    return Image.fromarray(load(open_image(data), data)[0])


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Without those of broken EXIF and the like."""
    with warnings.catch_warnings(action="ignore"):
        yield


@without_warnings()
def open_image(data: bytes | None) -> Image.Image:
    """An image whose header was read, and is within all limits. What is wrong in a PNG's texts does not matter."""
    if not data:
        raise BadImage("no image bytes")
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # some formats tell their size only while decoding
    ImageFile.LOAD_TRUNCATED_IMAGES = data.startswith(b"\x89PNG")  # here this concerns chunks without pixels
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BadImage("too many pixels") from None
    except Exception:  # Pillow's parsers raise exceptions of many types
        name = next((name for name, magic in UNSUPPORTED.items() if magic.match(data)), None)
        otherwise = "broken image" if CUT_SHORT.match(data) else "not an image"
        raise BadImage(f"format not supported: {name}" if name else otherwise) from None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    zeros_at_end = len(data) - len(data.rstrip(b"\0"))
    if image.format in ("WEBP", "AVIF") and zeros_at_end > max(512, len(data) // 10):
        raise BadImage("broken image")  # a part never arrived; these decoders would make colours of the zeros
    num_pixels = image.width * image.height
    if num_pixels > MAX_PIXELS:
        raise BadImage("too many pixels")
    # Pillow keeps at most four bytes of a pixel, but unpacks those of a TIFF as they are.
    if image.format == "TIFF" and num_pixels * sum(image.tag_v2.get(BITS_PER_SAMPLE, ())) > 8 * MAX_DECODED_BYTES:
        raise BadImage("too many bytes when decoded")
    if image.format in JPEG and sum(1 for _ in scans(data)) > MAX_SCANS:
        raise BadImage("too many scans")
    if image.format == "PNG" and "transparency" in image.info and image.tile:
        samples = image.tile[0].args
        if samples == "RGB;16B":
            raise BadImage("format not supported: PNG with a transparent colour of 16 bits")
        image.info["transparency"] *= PNG_STEPS.get(samples, 1)
    return image


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """How an image must be turned by its EXIF; None if it stands upright, or EXIF is broken."""
    try:
        # Pillow itself turns a TIFF.
        return None if image.format == "TIFF" else TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:
        return None


def upright_size(image: Image.Image) -> Shape:
    return image.size[::-1] if turn_of(image) in SIDEWAYS else image.size


def decoding_scale(image: Image.Image, crops: dict[Shape, tuple[Box, bool]]) -> int:
    """The number by which the sides of an opened image may be divided while it is decoded, which saves time.

    It is 1 but for a JPEG. What is decoded has at least twice the wanted sides, and all crops begin and end at whole
    pixels of it.
    """
    if image.format not in JPEG:
        return 1
    sides = [side for box, _ in crops.values() for side in box]
    if turn_of(image) is not None:
        sides += image.size
    shrink = min((min((x1 - x0) / w, (y1 - y0) / h) for (w, h), ((x0, y0, x1, y1), _) in crops.items()), default=1)
    fitting = (scale for scale in DCT_SCALES if 2 * scale <= shrink and not any(side % scale for side in sides))
    return next(fitting, 1)


@without_warnings()
def load(image: Image.Image, data: bytes, scale: int = 1) -> tuple[np.ndarray, str]:
    """`((H, W, 3) uint8 sRGB pixels of an upright image, note)` of an opened one.

    `scale`: the number that its sides are divided by (see `decoding_scale`).
    """
    try:
        turn, profile = turn_of(image), image.info.get("icc_profile", b"")  # None: Pillow could not unpack it
        transform, is_broken = srgb_transform(profile)
        note = BROKEN_PROFILE if is_broken or profile is None else ""
        if image.format in JPEG:
            pixels = jpeg_pixels(image, data, scale)
            if image.mode == "RGB" and turn is None and transform is None:
                return pixels, note  # as most photographs
            info, image = image.info, Image.frombytes(image.mode, pixels.shape[1::-1], pixels)
            image.info = info
        if image.format == "PNG":
            check_png(data)
        image.load()
        found = to_rgb(image)
        return np.asarray(found if turn is None else found.transpose(turn)), note
    except Exception:
        raise BadImage("broken image") from None


def jpeg_pixels(image: Image.Image, data: bytes, scale: int) -> np.ndarray:
    """(H, W) or (H, W, C) uint8 of an opened JPEG, its sides divided by `scale`.

    Raises ValueError if it lacks more than its end.
    """
    data = data.replace(b"ICC_PROFILE\0", b"ICC_PROFILE\1")  # a broken profile costs no pixel
    options = {
        "colorspace": "GRAY" if image.mode == "L" else image.mode,
        "min_width": -(-image.width // scale),
        "min_height": -(-image.height // scale),
    }
    try:
        pixels = simplejpeg.decode_jpeg(data, **options)
    except ValueError:
        pixels = simplejpeg.decode_jpeg(data + END_OF_IMAGE, **options)
    return 255 - pixels if image.mode == "CMYK" else pixels


def check_png(data: bytes) -> None:
    """Raises ValueError if the pixels of a PNG do not have their checksum. Pillow stops at the last pixel.

    Damage to other chunks, such as texts, costs no pixel.
    """
    place = 8  # after the signature
    while place < len(data):
        end = place + 8 + int.from_bytes(data[place : place + 4])
        is_whole = zlib.crc32(data[place + 4 : end]) == int.from_bytes(data[end : end + 4])
        if data[place + 4 : place + 8] == b"IDAT" and not is_whole:
            raise ValueError("damaged pixels")
        place = end + 4


def scans(data: bytes) -> Iterator[bytes]:
    """The header of each scan of a JPEG's first image."""
    found = JPEG_MARKER.search(data, 2)
    while found and found[0] != END_OF_IMAGE:
        end = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
        if found[0] == START_OF_SCAN:
            yield data[found.end() + 2 : end]
        found = JPEG_MARKER.search(data, end)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode -> sRGB, by the ICC profile or a PNG's gamma; deep greys in 8 bits, alpha over white."""
    info = image.info
    transform, _ = srgb_transform(info.get("icc_profile"))
    is_grey = ImageMode.getmode(image.mode).basemode == "L"
    fitting = ("L", "RGB") if is_grey else ("CMYK",) if image.mode == "CMYK" else ("RGB",)
    if image.mode.startswith("I") or image.mode == "F":
        grey = Image.fromarray(to_grey(image), "L")
        if "transparency" in info:
            grey.putalpha(Image.fromarray(np.asarray(image) != info["transparency"]))
        image = grey
    has_alpha = image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    if has_alpha and image.mode != "RGBA":
        image = image.convert("RGBA")
    if has_alpha and image.format == "BMP":
        has_alpha = image.getextrema()[3] != (0, 0)  # else the channel is not used
    colours = image
    if transform and transform.input_mode in fitting:
        colours = ImageCms.applyTransform(image.convert(transform.input_mode), transform)
    elif info.get("gamma") and not {"icc_profile", "srgb"} & info.keys() and abs(2.2 * info["gamma"] - 1) > 0.05:
        curve = 255 * (np.arange(256) / 255) ** (1 / (2.2 * info["gamma"]))
        colours = image.convert("RGB").point([round(value) for value in curve] * 3)
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
    """(H, W) uint8 of 16-bit, 32-bit or float greyscale."""
    values_HW = np.nan_to_num(np.asarray(image, np.float32), posinf=0, neginf=0)  # NaN marks missing values
    largest = values_HW.max(initial=0)
    if image.mode == "F" and largest <= MAX_UNIT:
        values_HW *= 255
    elif image.mode.startswith("I;16") or largest > 255:
        values_HW /= 257
    grey_HW = np.clip(values_HW, 0, 255, out=values_HW).astype(np.uint8)
    return 255 - grey_HW if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO else grey_HW


def center_crop(size: Shape, ratio: float = 1.0) -> tuple[Box, bool]:
    """The largest centre crop of an image of this size whose width is `ratio` times its height; not mirrored."""
    width = max(1, min(size[0], round(size[1] * ratio)))
    height = max(1, min(size[1], round(size[0] / ratio)))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return (left, top, left + width, top + height), False


def random_crop(
    size: Shape, ratio: float, *, seeds: Sequence[int], smallest: float, may_mirror: bool
) -> tuple[Box, bool]:
    """A crop of an image of this size, whose width is `ratio` times its height, sampled from `seeds`.

    Its sides are at least the share `smallest` of the largest crop's; 1: the centre crop. `may_mirror`: half are
    mirrored.
    """
    random = np.random.default_rng(seeds)
    box, _ = center_crop(size, ratio)
    if smallest < 1:
        share = random.uniform(smallest, 1)
        largest = min(size[0], size[1] * ratio), min(size[1], size[0] / ratio)
        width, height = (max(1, round(side * share)) for side in largest)
        left = int(random.integers(0, size[0] - width + 1))
        top = int(random.integers(0, size[1] - height + 1))
        box = left, top, left + width, top + height
    return box, may_mirror and random.random() < 0.5


def cut(image: np.ndarray | Image.Image, crop: tuple[Box, bool], shape: Shape, scale: int = 1) -> np.ndarray:
    """(H, W, 3) uint8: a crop of an RGB image, resized to a shape.

    `scale`: the number that the image's sides, and not the crop's, were divided by.
    """
    box, is_mirrored = crop
    left, top, right, bottom = (side // scale for side in box)
    pixels_HWC = np.asarray(image)[top:bottom, left:right]
    return resize(pixels_HWC[:, ::-1] if is_mirrored else pixels_HWC, shape)


def resize(pixels_HWC: np.ndarray, shape: Shape) -> np.ndarray:
    """uint8 pixels in another shape, by an antialiased bicubic filter.

    PyTorch's has a kernel for uint8 with the channels last. It is ten times as fast as Pillow's, whose results differ
    by 1 of 255 at most.
    """
    if pixels_HWC.shape[1::-1] == shape:
        return np.ascontiguousarray(pixels_HWC)
    from torch import from_numpy, nn  # here: 230 MiB that a process which only hands images on does not need

    pixels_1CHW = from_numpy(pixels_HWC.copy()).permute(2, 0, 1)[None]
    resized_1CHW = nn.functional.interpolate(pixels_1CHW, shape[::-1], mode="bicubic", antialias=True)
    return resized_1CHW[0].permute(1, 2, 0).numpy()


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
        image = open_image(data)
        size = upright_size(image)
        reached, reason = reached_shapes(size, shapes)
        if wanted and wanted not in reached:
            is_smaller = size[0] < wanted[0] or size[1] < wanted[1]
            raise BadImage(reason or (f"smaller than {wanted[0]} pixels" if is_smaller else WRONG_COLUMNS))
        reached = [wanted] if wanted else reached
        # One decode for all shapes.
        crops = {shape: crop(size, shape[0] / shape[1]) for shape in reached}
        scale = decoding_scale(image, crops)
        upright, note = load(image, data, scale)
    except BadImage as bad:
        return DecodedImage({}, str(bad))
    pixels = {shape: cut(upright, of_shape, shape, scale) for shape, of_shape in crops.items()}
    return DecodedImage(pixels, reason, note)


def nearest_shape(size: Shape, shapes: Sequence[Shape]) -> Shape:
    """The one of `shapes` whose centre crop cuts the least away from an image of this size."""
    ratio = size[0] / size[1]
    return min(shapes, key=lambda shape: abs(math.log(ratio * shape[1] / shape[0])))


def reached_shapes(size: Shape, shapes: Shapes) -> tuple[list[Shape], str]:
    """`(the nearest shape of each resolution that an image of this size reaches, why there is none)`."""
    nearest = [nearest_shape(size, of_resolution) for of_resolution in shapes.values()]
    reached = [shape for shape in nearest if size[0] >= shape[0] and size[1] >= shape[1]]
    return reached, "" if reached else f"smaller than {min(shapes)} pixels"
