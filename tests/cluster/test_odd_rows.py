"""A hundred kinds of odd, broken and hostile rows in one job: each is converted, or rejected with its own reason."""

import base64
import collections
import gzip
import io
import pickle
import struct
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, PngImagePlugin

from helpers import storage
from helpers.config.notebook import PreprocessingConfig
from tests.pipelines import encode

WRITTEN = ""
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8))


def save(kind, mode="RGB", size=None, **options):
    data = io.BytesIO()
    picture = PICTURE.resize(size) if size else PICTURE
    picture.convert(mode).save(data, kind, **options)
    return data.getvalue()


def grey(values, kind="TIFF"):
    data = io.BytesIO()
    Image.fromarray(values).save(data, kind)
    return data.getvalue()


def exif(orientation):
    found = Image.Exif()
    found[0x0112] = orientation
    return found


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_header(width, height):
    """A PNG that claims a size, and holds nothing."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def text_chunk():
    info = PngImagePlugin.PngInfo()
    info.add_text("key", "x" * 100_000, zip=True)
    return info


def zipped(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.png", data)
    return buffer.getvalue()


class Hostile:
    """Would run a command if anything unpickled it."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code from data was run')",))


JPEG, PNG, WEBP, GIF, BMP, TIFF = (save(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"))
SMALL = "smaller than 32 pixels"

# What is wrong or odd -> (bytes, what becomes of it).
PICTURES = {
    "jpeg": (JPEG, WRITTEN),
    "progressive jpeg": (save("JPEG", progressive=True), WRITTEN),
    "jpeg of the least quality": (save("JPEG", quality=1), WRITTEN),
    "grey jpeg": (save("JPEG", "L"), WRITTEN),
    "cmyk jpeg": (save("JPEG", "CMYK"), WRITTEN),
    "jpeg on its side by exif": (save("JPEG", exif=exif(6)), WRITTEN),
    "jpeg with an orientation that is none": (save("JPEG", exif=exif(99)), WRITTEN),
    "jpeg with broken exif": (save("JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), WRITTEN),
    "jpeg with a broken colour profile": (save("JPEG", icc_profile=b"not a profile"), WRITTEN),
    "jpeg with a comment": (save("JPEG", comment=b"\xff" * 60_000), WRITTEN),
    "jpeg with something behind it": (JPEG + b"<script>" * 100, WRITTEN),
    "png": (PNG, WRITTEN),
    "png with alpha": (save("PNG", "RGBA"), WRITTEN),
    "grey png with alpha": (save("PNG", "LA"), WRITTEN),
    "palette png": (save("PNG", "P"), WRITTEN),
    "palette png with transparency": (save("PNG", "P", transparency=0), WRITTEN),
    "png of one bit": (save("PNG", "1"), WRITTEN),
    "png of 16 bits": (grey(np.full((64, 64), 40_000, np.uint16), "PNG"), WRITTEN),
    "png with a large text": (save("PNG", pnginfo=text_chunk()), WRITTEN),
    "webp": (WEBP, WRITTEN),
    "lossless webp": (save("WEBP", lossless=True), WRITTEN),
    "webp with alpha": (save("WEBP", "RGBA"), WRITTEN),
    "moving webp": (save("WEBP", save_all=True, append_images=[PICTURE.rotate(90)]), WRITTEN),
    "gif": (GIF, WRITTEN),
    "moving gif": (save("GIF", save_all=True, append_images=[PICTURE.rotate(90)] * 3), WRITTEN),
    "gif with transparency": (save("GIF", "P", transparency=3), WRITTEN),
    "bmp": (BMP, WRITTEN),
    "bmp of one bit": (save("BMP", "1"), WRITTEN),
    "palette bmp": (save("BMP", "P"), WRITTEN),
    "tiff": (TIFF, WRITTEN),
    "lzw tiff": (save("TIFF", compression="tiff_lzw"), WRITTEN),
    "jpeg in a tiff": (save("TIFF", compression="jpeg"), WRITTEN),
    "cmyk tiff": (save("TIFF", "CMYK"), WRITTEN),
    "tiff of 16 bits": (grey(np.full((64, 64), 40_000, np.uint16)), WRITTEN),
    "tiff of floats": (grey(np.full((64, 64), 0.5, np.float32)), WRITTEN),
    "tiff of floats that are no numbers": (grey(np.full((64, 64), np.nan, np.float32)), WRITTEN),
    "tiff of several pages": (save("TIFF", save_all=True, append_images=[PICTURE]), WRITTEN),
    "jpeg called png": (JPEG, WRITTEN),
    "just large enough": (save("PNG", size=(32, 32)), WRITTEN),
    "long and large enough": (save("PNG", size=(33, 3000)), WRITTEN),
    "one pixel": (save("PNG", size=(1, 1)), SMALL),
    "a pixel too small": (save("PNG", size=(31, 400)), SMALL),
    "a line": (save("PNG", size=(5000, 1)), SMALL),
    "a bomb": (save("PNG", "1", size=(12_000, 12_000)), "too many pixels"),
    "a bomb of an unpacked tiff": (save("TIFF", "1", size=(12_000, 12_000), compression="group4"), "too many pixels"),
    "a header that claims 60,000 squared": (png_header(60_000, 60_000), "too many pixels"),
    "a header that claims the largest size": (png_header(2**31 - 1, 2**31 - 1), "too many pixels"),
    "a header without pixels": (png_header(64, 64), "broken image"),
    "a header of no size": (png_header(0, 64), "not an image"),
    "null": (None, "no image bytes"),
    "no bytes": (b"", "no image bytes"),
    "one byte": (b"\xff", "not an image"),
    "zeros": (bytes(5000), "not an image"),
    "noise": (np.random.default_rng(1).bytes(5000), "not an image"),
    "a web page": (b"<!DOCTYPE html><title>404</title>", "not an image"),
    "json": (b'{"error": "gone"}', "not an image"),
    "xml with entities": (b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>', "not an image"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"><script>1</script></svg>', "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n(x) run\n", "not an image"),
    "pdf": (b"%PDF-1.7\n1 0 obj\n", "not an image"),
    "icon": (save("ICO", "RGBA", size=(64, 64)), "not an image"),
    "portable pixmap": (save("PPM"), "not an image"),
    "targa": (save("TGA"), "not an image"),
    "jpeg 2000 box": (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100), "not an image"),
    "heic": (b"\x00\x00\x00\x18ftypheic" + bytes(100), "not an image"),
    "video": (b"\x00\x00\x00\x18ftypmp42" + bytes(100), "not an image"),
    "program": (b"\x7fELF" + bytes(100), "not an image"),
    "pickle that runs code": (pickle.dumps(Hostile()), "not an image"),
    "array of numpy": (b"\x93NUMPY\x01\x00" + bytes(100), "not an image"),
    "zip": (zipped(PNG), "not an image"),
    "gzip": (gzip.compress(PNG), "not an image"),
    "base64": (base64.b64encode(PNG), "not an image"),
    "a line feed in front": (b"\n" + PNG, "not an image"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "broken image"),
    "half a png": (PNG[: len(PNG) // 2], "broken image"),
    "half a webp": (WEBP[: len(WEBP) // 2], "not an image"),
    "half a gif": (GIF[: len(GIF) // 2], "broken image"),
    "half a bmp": (BMP[: len(BMP) // 2], "broken image"),
    "half a tiff": (TIFF[: len(TIFF) // 2], "broken image"),
    "the head of a jpeg": (JPEG[:4], "not an image"),
    "png with a wrong checksum": (PNG[:45] + b"\0\0\0" + PNG[48:], "broken image"),
}

# caption -> what becomes of it
CAPTIONS = {
    "no caption": None,
    "empty": "",
    "blanks": " \t\r\n ",
    "wide blanks": "\u3000\u2003",
    "zero-width space": "\u200b",
    "byte-order mark": "\ufeffa caption",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "right to left": "صورة قطة \u202eabc",
    "han": "漢字" * 50,
    "combining": "Z" + "\u0351" * 300,
    "null character": "a\0b",
    "control characters": "".join(map(chr, range(1, 32))) + "x",
    "lines": "one\ntwo\r\nthree",
    "long": "word " * 20_000,
    "one long word": "x" * 200_000,
    "number": "42",
    "not a number": "nan",
    "the word null": "null",
    "punctuation": "?!.",
    "markup": "<|endoftext|><b>&amp;</b>",
    "template": "{{7*7}} ${PATH} %s {0}",
    "query": "'; DROP TABLE rows; --",
    "path": "../../etc/passwd",
    "address": "https://example.org/a.jpg",
    "private use": "\ue000\U0010ffff",
}
REJECTED_CAPTIONS = {
    "no caption": "no caption",
    "empty": "empty caption",
    "blanks": "empty caption",
    "wide blanks": "empty caption",
}
IDS = {
    "null id": None,
    "empty id": "",
    "long id": "i" * 100_000,
    "blank id": " ",
    "id with lines": "a\nb",
    "unicode id": "漢\u200b🎨",
    "id like a path": "../../x",
    "id like a number": "007",
    "id with a null character": "a\0b",
}


def odd_rows():
    """[(name of the kind, id, caption, bytes, expected reason)]"""
    rows = [(name, name, "a caption", data, reason) for name, (data, reason) in PICTURES.items()]
    rows += [(name, name, caption, PNG, REJECTED_CAPTIONS.get(name, WRITTEN)) for name, caption in CAPTIONS.items()]
    rows += [(name, row_id, "a caption", PNG, WRITTEN if row_id else "no id") for name, row_id in IDS.items()]
    rows += [("an id three times", "three", "a caption", data, WRITTEN) for data in (PNG, PNG, JPEG)]
    rows += [
        ("everything is wrong", None, None, None, "no id"),
        ("bad picture and caption", "both", "", b"x", "empty caption"),
    ]
    return rows


def text_of_bytes(values):
    """A column of text that holds whatever bytes; writers that do not check make such."""
    return pa.array([value.encode() if isinstance(value, str) else value for value in values], pa.binary()).view(
        pa.string()
    )


# Bytes that are no UTF-8 in a column of text: (id, caption, what becomes of it, the id that is stored)
NO_TEXT = [
    (b"latin-1 caption", "für".encode("latin-1"), "no caption", "latin-1 caption"),
    (b"utf-16 caption", "für".encode("utf-16"), "no caption", "utf-16 caption"),
    (b"half a character", "für".encode()[:2], "no caption", "half a character"),
    (bytes.fromhex("d41d8cd98f00b204e9800998ecf8427e"), b"raw md5 as id", WRITTEN, "d41d8cd98f00b204e9800998ecf8427e"),
    (b"\xff", b"\xff", "no caption", "ff"),
]


def test_each_kind_is_converted_or_rejected_with_its_reason(cluster, tmp_path):
    assert len({name for name, *_ in odd_rows()}) >= 100
    rows = odd_rows() + [("no text", row_id, caption, PNG, reason) for row_id, caption, reason, _ in NO_TEXT]
    random = np.random.default_rng(0)
    rows = [rows[place] for place in random.permutation(len(rows))]
    _, ids, captions, data, reasons = zip(*rows, strict=True)
    table = pa.table(
        {"hash": text_of_bytes(ids), "caption": text_of_bytes(captions), "jpg": pa.array(data, pa.binary())}
    )
    stored = {row_id: name for row_id, *_, name in NO_TEXT}
    rows = [(name, stored.get(row_id, row_id), caption, *rest) for name, row_id, caption, *rest in rows]
    pq.write_table(table, tmp_path / "odd.parquet", row_group_size=100)
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "odd.parquet"))
    manifest = encode(config)
    written, rejected = (
        pa.concat_tables([pq.read_table(path) for path in storage.list_files(storage.join(config.latents_uri, name))])
        for name in ("data", "rejects")
    )
    good = [
        (row_id, caption.decode() if isinstance(caption, bytes) else caption)
        for _, row_id, caption, _, reason in rows
        if not reason
    ]
    assert collections.Counter(
        zip(written["id"].to_pylist(), written["caption"].to_pylist(), strict=True)
    ) == collections.Counter(good)
    bad = collections.Counter((row_id, reason) for _, row_id, _, _, reason in rows if reason)
    assert collections.Counter(zip(rejected["id"].to_pylist(), rejected["reason"].to_pylist(), strict=True)) == bad
    assert manifest.read == len(rows) and manifest.rejected == collections.Counter(
        reason for reason in reasons if reason
    )
    latents, valid = manifest.latents(32).decode(written["image_latents_32"])
    # A picture below a resolution has no latents there.
    small = written.filter(pc.equal(written["id"], "just large enough"))
    assert len(small) == 1 and small["image_latents_64"].null_count == 1
    assert written["image_latents_64"].null_count < len(written)
    text, _ = manifest.embeddings.decode(written["caption_embeddings"])
    assert valid.all() and np.isfinite(latents.astype(np.float32)).all() and np.isfinite(text.astype(np.float32)).all()
