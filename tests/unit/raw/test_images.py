import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.raw import images
from tests.peak import ROOT


def encoded(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def photograph(width=48, height=32):
    """A smooth picture whose four corners differ, so that compression is harmless and every turn shows."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([255 * x / width, 255 * y / height, 128 + 0 * x], axis=-1).astype(np.uint8))


def difference(one, other):
    return np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).max()


def png(width, height, rows=b"", depth=8, colours=2, **chunks):
    """A PNG that claims a size (`colours` 0: grey, 2: RGB, 3: palette, 6: RGBA), whatever it holds."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunk(k.encode(), v) for k, v in chunks.items())
    return start + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def tiff(values, photometric, *, extra=None, size=None):
    """An uncompressed TIFF of (H, W) or (H, W, samples) values, some of which Pillow cannot write."""
    height, width = values.shape[:2]
    samples, kind = values[0, 0].size, {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    width, height = size or (width, height)
    tags = {256: width, 257: height, 259: 1, 262: photometric, 277: samples, 278: height, 279: values.nbytes}
    many = {258: [values.dtype.itemsize * 8] * samples, 339: [kind] * samples}
    if extra:
        tags[338] = extra
    start = 8 + 2 + 12 * (len(tags) + 3) + 4  # of what does not fit into an entry
    entries, more = {273: struct.pack("<HHII", 273, 4, 1, start + 4 * samples)}, b""
    entries |= {tag: struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()}
    for tag, parts in many.items():
        packed = struct.pack(f"<{samples}H", *parts)
        entries[tag] = struct.pack("<HHI", tag, 3, samples)
        entries[tag] += packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack("<I", start + len(more))
        more += packed
    table = b"".join(entry for _, entry in sorted(entries.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + more + values.tobytes()


# ---- every format and mode that people have


@pytest.mark.parametrize(
    "kind, options, tolerance",
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("JPEG", {"quality": 95}, 8),
        ("GIF", {}, 60),
        ("AVIF", {"quality": 95}, 14),
    ],
)
def test_a_picture_keeps_its_colours_in_every_format(kind, options, tolerance):
    found = images.decode(encoded(photograph(), kind, **options))
    assert (found.mode, found.size) == ("RGB", (48, 32))
    assert difference(found, photograph()) <= tolerance


# ---- colour profiles


def icc_profile(space, tags, pcs=b"XYZ ", device=b"mntr"):
    """An ICC profile of version 2 with some tags: {signature: data}."""
    tags = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + bytes(78), **tags, b"wtpt": xyz(WHITE)}
    offset, table, body = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += name + struct.pack(">II", offset + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    start = struct.pack(">I4xI4s4s4s", offset + len(body), 0x02400000, device, space, pcs)
    start += struct.pack(">6H", 2024, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + numbers(WHITE)
    return start.ljust(128, b"\0") + table + body


WHITE = (0.9642, 1, 0.8249)


def numbers(values):
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def xyz(values):
    return b"XYZ \0\0\0\0" + numbers(values)


def gamma(value):
    return b"curv\0\0\0\0" + struct.pack(">IH2x", 1, round(value * 256))


def rgb_profile(red, green, blue, power):
    curves = dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), gamma(power))
    return icc_profile(b"RGB ", {b"rXYZ": xyz(red), b"gXYZ": xyz(green), b"bXYZ": xyz(blue), **curves})


ADOBE_RGB = rgb_profile((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457), 2.2)
# As on their paper. Without black point compensation the darkest would be the grey (48, 48, 48).
INKS = {(0, 0, 0, 0): (255, 255, 255), (0, 0, 0, 255): (0, 0, 0), (255, 0, 0, 0): (0, 161, 213)}
GREY_PROFILE = icc_profile(b"GRAY", {b"kTRC": gamma(1)})


def ink_profile():
    """CMYK in which cyan is Lab (60, -40, -40), paper is white, and the blackest ink a dark grey, Lab (20, 0, 0)."""
    nodes = []
    for cyan, magenta, yellow, black in np.ndindex(2, 2, 2, 2):
        light = 20 if black or cyan + magenta + yellow == 3 else 100 - 40 * cyan - 20 * magenta - 5 * yellow
        hue = (0, 0) if light == 20 else (-40 * cyan + 40 * magenta, -40 * cyan + 40 * yellow)
        nodes += [round(light * 2.55), 128 + hue[0], 128 + hue[1]]
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + numbers([1, 0, 0, 0, 1, 0, 0, 0, 1])
    return icc_profile(
        b"CMYK", {b"A2B1": table + bytes(range(256)) * 4 + bytes(nodes) + bytes(range(256)) * 3}, b"Lab ", b"scnr"
    )


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in images.FORMATS), ("JPEG", {"progressive": True})]
)
def test_an_image_that_was_cut_short_is_a_broken_one(kind, options):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, kind, **options)
    for end in (len(data) // 2, int(0.9 * len(data)), *[len(data) - 5] * (kind == "JPEG")):
        with pytest.raises(images.BadImage, match="^broken image$"):
            images.decode(data[:end])


@pytest.mark.parametrize(("kind", "options"), [("WEBP", {}), ("WEBP", {"lossless": True}), ("AVIF", {})])
def test_an_image_whose_second_half_never_arrived_is_a_broken_one(kind, options):
    """Its file has the right length, as of a download that was allocated first."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, kind, **options)
    half = len(data) // 2
    with pytest.raises(images.BadImage, match="^broken image$"):
        images.decode(data[:half] + bytes(len(data) - half))


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_a_black_image_is_used(kind):
    assert images.decode(encoded(Image.new("RGB", (2048, 2048)), kind)).getextrema() == ((0, 0),) * 3


# ---- orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(orientation, kind):
    upright = photograph()
    # What a camera held that way writes: the transposition that the tag's own undoes.
    held = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright if orientation == 1 else upright.transpose(held[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 98} if kind in ("JPEG", "WEBP") else {}
    found = images.decode(encoded(stored, kind, exif=exif, **options))
    assert found.size == upright.size and difference(found, upright) <= 12


def test_a_broken_exif_block_is_ignored():
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\xff" * 4
    data = encoded(photograph(), "JPEG", quality=98, exif=exif)
    assert difference(images.decode(data), photograph()) <= 8


# ---- damage that costs no pixel


def with_chunk(name, data, bad_crc=False):
    """A PNG with a chunk after its header."""
    whole = encoded(photograph(), "PNG")
    checksum = struct.pack(">I", zlib.crc32(name + data) ^ bad_crc)
    return whole[:33] + struct.pack(">I", len(data)) + name + data + checksum + whole[33:]


@pytest.mark.parametrize(
    "data",
    [
        with_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(b"node " * 600_000)),
        with_chunk(b"zTXt", b"workflow\0\0" + zlib.compress(bytes(100_000_000))),
        with_chunk(b"tEXt", b"workflow\0" + b"node " * 600_000),
        with_chunk(b"iCCP", b"press\0\0" + zlib.compress(np.random.default_rng(0).bytes(2_000_000))),
        with_chunk(b"tEXt", b"k\0v", bad_crc=True),
        encoded(photograph(), "PNG")[:-12],
    ],
    ids=["iTXt", "bomb", "tEXt", "iCCP", "checksum", "no end"],
)
def test_a_png_is_read_whatever_its_texts_are(data):
    pixels, note = images.load(images.open_image(data), data)
    assert difference(Image.fromarray(pixels), photograph()) == 0
    assert note == (images.BROKEN_PROFILE if b"iCCP" in data else "")


# ---- JPEGs, strictly and at a smaller scale


def leaves(width, height, seed=0):
    """As photographs are: overlapping discs of all sizes, fine grain, and noise whose power falls with frequency."""
    random = np.random.default_rng(seed)
    picture = np.full((height, width, 3), 128.0)
    for radius in np.minimum(8 / np.sqrt(1 - random.random(300)), width / 3):
        disc = np.hypot(*np.mgrid[-radius:radius, -radius:radius]) < radius
        top, left = random.integers(0, (height, width)) * (1 - np.array(disc.shape) / (height, width))
        part = picture[int(top) :, int(left) :][: len(disc), : len(disc)]
        part[disc[: len(part), : part.shape[1]]] = random.normal(128, 50) + random.normal(0, 12, 3)
    spectrum = np.fft.rfft2(random.normal(size=(height, width)))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    texture = np.fft.irfft2(spectrum / np.maximum(frequency, 1 / width), s=(height, width))
    picture += 20 * (texture / texture.std() + random.normal(0, 0.1, texture.shape))[..., None]
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def photo():
    return leaves(1600, 1200)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_a_jpeg_of_which_a_part_is_lost_is_a_broken_image(photo, options):
    """Unless that part is its end marker. Pillow alone shows most of these, half grey."""
    data = encoded(photo.resize((256, 192)), "JPEG", quality=92, **options)
    half, end = len(data) // 2, b"\xff\xd9"
    damaged = [data[:half] + bytes(len(data) - half), data[:half] + bytes(len(data) - half - 2) + end]
    damaged += [data[:half] + end, data[:half] + bytes(512) + data[half + 512 :], data[:-20], data[:-20] + end]
    for one in damaged:
        with pytest.raises(images.BadImage, match="^broken image$"):
            images.decode(one)
    assert images.decode(data[:-2]) == images.decode(data) == images.decode(data + b"more")


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"keep_rgb": True}, {"icc_profile": b"no profile" * 9}])
def test_a_jpeg_has_the_pixels_that_pillow_gives_it(photo, mode, options):
    data = encoded(photo.resize((100, 75)).convert(mode), "JPEG", **options)
    assert images.jpeg_pixels(images.open_image(data), data, 1).tobytes() == Image.open(io.BytesIO(data)).tobytes()


@pytest.mark.parametrize("side", [256, 512])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0, "quality": 98}, {"orientation": 6}, {"orientation": 3}])
def test_a_jpeg_decoded_at_a_smaller_scale_has_the_pixels_of_a_whole_one(side, options, photo):
    """Within 45 dB, for crops at any place too."""
    exif = Image.Exif()
    exif[0x0112] = options.get("orientation", 1)
    for size in ((1600, 1200), (1203, 1601), (2400, 1600)):
        data = encoded(photo.resize(size), "JPEG", exif=exif, **{"quality": 90} | options)
        whole = images.decode(data)
        for crop in (images.center_crop, lambda size, ratio: ((37, 51, 1131, 1145), True)):
            found = images.make_pixels(data, crop, shapes={side: [(side, side)]}).pixels[side, side]
            expected = images.cut(whole, crop(whole.size, 1.0), (side, side))
            error = np.mean((found.astype(float) - expected) ** 2)
            assert error < 255**2 / 10**4.5


def test_width_and_height_columns_of_a_turned_image_are_named():
    exif, shapes = Image.Exif(), {32: [(24, 40), (32, 32), (40, 24)]}
    exif[0x0112] = 6
    data = encoded(photograph(96, 48), "JPEG", exif=exif)
    assert list(images.make_pixels(data, shapes=shapes).pixels) == [(24, 40)]
    for wanted in ((40, 24), (32, 32)):
        assert images.make_pixels(data, wanted=wanted, shapes=shapes).reason == images.WRONG_COLUMNS


# ---- what is no picture


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("HEIC", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"),
        ("JXL", b"\0\0\0\x0cJXL \r\n\x87\n"),
        ("JPEG 2000", encoded(photograph(), "JPEG2000")),
        ("PSD", b"8BPS\0\1"),
        ("TIFF of such samples, or cut short", tiff(np.zeros((2, 2, 2), np.uint16), 1, extra=2)),  # grey and alpha
        ("TIFF of such samples, or cut short", tiff(np.zeros((2, 2, 3), np.float32), 2)),
        ("PNG with a transparent colour of 16 bits", png(1, 1, bytes(7), 16, tRNS=bytes(6))),
    ],
)
def test_a_format_that_is_not_read_is_named(name, data):
    with pytest.raises(images.BadImage, match=f"^format not supported: {name}$"):
        images.decode(data + bytes(200))


BOUNDS = ("too many pixels", "too many bytes when decoded", "too many scans")


def test_a_picture_of_too_many_pixels_or_bytes_is_refused_before_it_is_decoded():
    """Bytes are counted in the depth that the file has: at most 512 MiB."""
    for side, reason in ((9460, "too many pixels"), (9459, "broken image")):  # the smaller one is only empty
        with pytest.raises(images.BadImage, match=f"^{reason}$"):
            images.decode(png(side, side))
    pixel = np.zeros((1, 1, 4), np.uint16)
    with pytest.raises(images.BadImage, match="^broken image$"):
        images.decode(tiff(pixel, 2, extra=2, size=(8192, 8192)))  # it is only empty
    with pytest.raises(images.BadImage, match="^too many bytes when decoded$"):
        images.decode(tiff(pixel, 2, extra=2, size=(8192, 8193)))


def jpeg_of_scans(count):
    """A progressive JPEG that repeats its last scan, and what no decoder reads: markers in a comment, and behind it."""
    data = encoded(photograph(), "JPEG", progressive=True, comment=b"\xff\xda\0\2" * 500)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    missing = count - len([*images.scans(data)])
    return data[:end] + data[last:end] * missing + data[end:] + b"\xff\xda\0\2" * 500


def test_a_jpeg_has_at_most_a_hundred_scans():
    images.open_image(jpeg_of_scans(100))
    with pytest.raises(images.BadImage, match="^too many scans$"):
        images.decode(jpeg_of_scans(101))


SEEDS = [encoded(photograph(12, 9), kind) for kind in images.FORMATS]


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=200)
    | st.tuples(
        st.sampled_from(SEEDS),
        st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
        st.integers(0, 10_000),
    )
)
@example(data=b"")
def test_any_bytes_are_an_rgb_picture_or_a_bad_image(data):
    if isinstance(data, tuple):
        seed, changes, length = data
        changed = bytearray(seed)
        for place, value in changes:
            changed[place % len(changed)] = value
        data = bytes(changed[:length])
    try:
        found = images.decode(data)
    except images.BadImage as bad:
        named = (f"format not supported: {name}" for name in images.UNSUPPORTED)
        assert str(bad) in ("no image bytes", "not an image", "broken image", *BOUNDS, *named)
    else:
        assert found.mode == "RGB" and found.width * found.height > 0


# ---- the table of the documentation


def bicubic(values, size):
    """A row of pixels resized by hand: a cubic of Keys, as wide as the pixels of the smaller of the two rows."""
    scale, places = len(values) / size, (np.arange(size) + 0.5) * len(values) / size - 0.5
    x = np.abs(np.arange(len(values)) - places[:, None]) / max(scale, 1)
    weights = np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2) * (x < 2)
    return np.clip(weights @ values / weights.sum(axis=1), 0, 255)


def decoded(array, kind="TIFF"):
    return np.asarray(images.decode(encoded(Image.fromarray(np.asarray(array)), kind)))[..., 0].tolist()


def resized(width, height):
    return images.make_pixels(encoded(STEP, "PNG"), shapes={16: [(width, height)]})[0][width, height]


def first_pixel(mode, colour, kind="PNG", **options):
    return images.decode(encoded(Image.new(mode, (4, 4), colour), kind, **options)).getpixel((0, 0))


def grey_png(width, depth, row, **chunks):
    return np.asarray(images.decode(png(width, 1, row, depth, 0, **chunks)))[0, :, 0].tolist()


def bmp(alpha):
    """2 x 2 pixels of 32 bits, with a mask for alpha."""
    pixels = bytes([10, 20, 30, alpha] * 4)
    header = struct.pack("<IiiHHIIiiII", 108, 2, 2, 1, 32, 3, len(pixels), 2835, 2835, 0, 0)
    header += struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + b"BGRs" + bytes(48)
    return b"BM" + struct.pack("<IHHI", 122 + len(pixels), 0, 0, 122) + header + pixels


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return images.decode(encoded(STEP, "PNG", exif=exif)).size


STEP = Image.fromarray(np.repeat(np.repeat([[20, 20, 90, 250, 20]], 8, axis=1), 30, axis=0).astype(np.uint8)).convert(
    "RGB"
)
IN_THE_MIDDLE = np.asarray(STEP)[0, 5:35, 0].astype(float)
FRAMES = {"save_all": True, "append_images": [Image.new("L", (4, 4), 99)]}
TABLE = {
    "an ICC profile of RGB, grey or CMYK": (
        lambda: [
            first_pixel("RGB", (60, 180, 60), icc_profile=ADOBE_RGB),
            first_pixel("L", 128, icc_profile=GREY_PROFILE),  # linear light of a half
            *(first_pixel("CMYK", ink, "TIFF", icc_profile=ink_profile()) for ink in INKS),
        ],
        [(0, 181, 42), (188, 188, 188), *INKS.values()],
    ),
    "a broken profile, or one of other colours": (
        lambda: [first_pixel("RGB", (60, 180, 60), icc_profile=one) for one in (b"no profile", GREY_PROFILE)],
        [(60, 180, 60)] * 2,
    ),
    "CMYK without a profile": (lambda: first_pixel("CMYK", (55, 0, 255, 102), "TIFF"), (120, 153, 0)),
    "transparency": (lambda: first_pixel("RGBA", (200, 100, 0, 51)), (244, 224, 204)),
    "16-bit greys, or integers above 255": (
        lambda: decoded(np.array([[0, 257, 25700, 65535]], np.uint16)) + decoded(np.array([[0, 257, 65535]], np.int32)),
        [[0, 1, 100, 255], [0, 1, 255]],
    ),
    "integers of more than 8 bits, none above 255": (lambda: decoded(np.array([[0, 7, 255]], np.int32)), [[0, 7, 255]]),
    "greys whose zero is white": (
        lambda: np.asarray(images.decode(tiff(np.array([[0, 257, 65535]], np.uint16), 0)))[..., 0].tolist(),
        [[255, 254, 0]],
    ),
    "a transparent colour of 2, 4 or 16 bits": (
        lambda: [
            grey_png(4, 2, bytes([0, 0b00011011]), tRNS=b"\0\2"),
            grey_png(4, 4, bytes([0, 0x05, 0xAF]), tRNS=b"\0\x0a"),
            grey_png(2, 16, bytes([0, 1, 1, 100, 0]), tRNS=b"\x64\0"),
        ],
        [[0, 85, 255, 255], [0, 85, 255, 255], [1, 255]],
    ),
    "a PNG's gamma, without a profile": (
        lambda: [
            grey_png(1, 8, b"\0\x64", gAMA=struct.pack(">I", 100_000)),
            grey_png(1, 16, b"\0\x64\x64", gAMA=struct.pack(">I", 100_000)),
            grey_png(1, 8, b"\0\x64", gAMA=struct.pack(">I", 45_455)),
            grey_png(1, 8, b"\0\x64", gAMA=struct.pack(">I", 100_000), sRGB=b"\0"),
        ],
        [[167], [167], [100], [100]],
    ),
    "a BMP's fourth channel, if it is all 0": (lambda: images.decode(bmp(0)).getpixel((0, 0)), (30, 20, 10)),
    "floats, none above 2": (lambda: decoded(np.array([[0, 0.5, 1, 1.01]], np.float32)), [[0, 127, 255, 255]]),
    "floats, some above 2, none above 255": (lambda: decoded(np.array([[0, 0.5, 99]], np.float32)), [[0, 0, 99]]),
    "floats, some above 255": (lambda: decoded(np.array([[0, 257, 65535]], np.float32)), [[0, 1, 255]]),
    "NaN, infinity, values below 0": (
        lambda: decoded(np.array([[np.nan, np.inf, -np.inf, -3, 9]], np.float32)),
        [[0, 0, 0, 0, 9]],
    ),
    "several frames": (lambda: first_pixel("L", 7, "GIF", **FRAMES), (7, 7, 7)),
    "an EXIF orientation": (turned, (30, 40)),
    "a size other than the wanted one": (
        lambda: (
            np.abs(resized(12, 12)[5, :, 0] - bicubic(IN_THE_MIDDLE, 12)).max() <= 1
            and np.abs(resized(30, 30)[5, :, 0] - IN_THE_MIDDLE).max() == 0
        ),
        True,
    ),
}


@pytest.mark.parametrize("line", TABLE)
def test_the_documentations_table_of_colours_is_true(line):
    found, right = TABLE[line]
    assert found() == right if "ICC" not in line else difference(found(), right) <= 5


def test_each_line_of_the_documentations_table_is_tested():
    text = (ROOT / "helpers" / "docs" / "DATA.md").read_text()
    lines = text.partition("| an image with |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(TABLE)
