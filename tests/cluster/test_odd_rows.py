"""Odd, broken and hostile rows of many kinds in one job: each is converted, or rejected with its own reason.

`tests/unit/raw/test_images.py` has every format and mode of pictures.
"""

import collections
import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, PngImagePlugin
from ray import cloudpickle

from helpers.config import PreprocessingConfig
from helpers.encode import stages
from tests import killing_pictures
from tests.killing_pictures import HANGS, KILLED, KILLS, LATE, with_killing_pictures
from tests.pipelines import encode
from tests.unit.raw.test_images import png

WRITTEN = ""
cloudpickle.register_pickle_by_value(killing_pictures)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8))


def save(kind, mode="RGB", size=None, **options):
    data = io.BytesIO()
    picture = PICTURE.resize(size) if size else PICTURE
    picture.convert(mode).save(data, kind, **options)
    return data.getvalue()


def exif(orientation):
    found = Image.Exif()
    found[0x0112] = orientation
    return found


def text_chunk():
    info = PngImagePlugin.PngInfo()
    info.add_text("key", "x" * 100_000, zip=True)
    return info


class Hostile:
    """Would run a command if anything unpickled it."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code from data was run')",))


JPEG, PNG = save("JPEG"), save("PNG")
SMALL = "smaller than 32 pixels"

# What is wrong or odd -> (bytes, what becomes of it).
IMAGES = {
    "jpeg": (JPEG, WRITTEN),
    "cmyk jpeg": (save("JPEG", "CMYK"), WRITTEN),
    "jpeg with a broken colour profile": (save("JPEG", icc_profile=b"not a profile"), WRITTEN),
    "jpeg with something behind it": (JPEG + b"<script>" * 100, WRITTEN),
    "png with a large text": (save("PNG", pnginfo=text_chunk()), WRITTEN),
    "jpeg in a tiff": (save("TIFF", compression="jpeg"), WRITTEN),
    "just large enough": (save("PNG", size=(32, 32)), WRITTEN),
    "one pixel": (save("PNG", size=(1, 1)), SMALL),
    "a pixel too small": (save("PNG", size=(31, 400)), SMALL),
    "a bomb": (save("PNG", "1", size=(12_000, 12_000)), "too many pixels"),
    "a header that claims 60,000 squared": (png(60_000, 60_000), "too many pixels"),
    "a header without pixels": (png(64, 64), "broken image"),
    "null": (None, "no image bytes"),
    "no bytes": (b"", "no image bytes"),
    "xml with entities": (b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>', "not an image"),
    "pdf": (b"%PDF-1.7\n1 0 obj\n", "not an image"),
    "jpeg 2000 box": (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100), "format not supported: JPEG 2000"),
    "pickle that runs code": (pickle.dumps(Hostile()), "not an image"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "broken image"),
    "png with a wrong checksum": (PNG[:45] + b"\0\0\0" + PNG[48:], "broken image"),
}

# caption -> what becomes of it
CAPTIONS = {
    "no caption": None,
    "empty": "",
    "wide blanks": "\u3000\u2003",
    "byte-order mark": "\ufeffa caption",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "right to left": "صورة قطة \u202eabc",
    "combining": "Z" + "\u0351" * 300,
    "null character": "a\0b",
    "control characters": "".join(map(chr, range(1, 32))) + "x",
    "long": "word " * 13_000,
    "too long": "word " * 20_000,
    "markup": "<|endoftext|><b>&amp;</b>",
    "template": "{{7*7}} ${PATH} %s {0}",
    "private use": "\ue000\U0010ffff",
}
NOT_UTF8 = "caption is not UTF-8"
STORED_CAPTIONS = {"\ufeffa caption": "a caption"}  # without a byte order mark
REJECTED_CAPTIONS = {
    "no caption": "no caption",
    "empty": "empty caption",
    "wide blanks": "empty caption",
    "too long": "caption of more than 65536 bytes",
}
IDS = {
    "null id": None,
    "empty id": "",
    "long id": "i" * 50_000,
    "endless id": "i" * 100_000,
    "id like a path": "../../x",
    "id with a null character": "a\0b",
}


def odd_rows():
    """[(name of the kind, id, caption, bytes, expected reason)]"""
    rows = [(name, name, "a caption", data, reason) for name, (data, reason) in IMAGES.items()]
    rows += [(name, name, caption, PNG, REJECTED_CAPTIONS.get(name, WRITTEN)) for name, caption in CAPTIONS.items()]
    rows += [(name, row_id, "a caption", PNG, WRITTEN) for name, row_id in IDS.items()]
    rows += [("an id three times", "three", "a caption", data, WRITTEN) for data in (PNG, PNG, JPEG)]
    rows += [
        ("everything is wrong", None, None, None, "no caption"),
        ("bad picture and caption", "both", "", b"x", "empty caption"),
    ]
    return rows


def text_of_bytes(values):
    """A column of text that holds whatever bytes; writers that do not check make such."""
    return pa.array([value.encode() if isinstance(value, str) else value for value in values], pa.binary()).view(
        pa.string()
    )


# Bytes that are not UTF-8 in a column of text: (id, caption, what becomes of it, the id that is stored)
NO_TEXT = [
    (b"latin-1 caption", "für".encode("latin-1"), NOT_UTF8, "latin-1 caption"),
    (b"utf-16 caption", "für".encode("utf-16"), NOT_UTF8, "utf-16 caption"),
    (b"half a character", "für".encode()[:2], NOT_UTF8, "half a character"),
    (bytes.fromhex("d41d8cd98f00b204e9800998ecf8427e"), b"raw md5 as id", WRITTEN, "d41d8cd98f00b204e9800998ecf8427e"),
    (b"\xff", b"\xff", NOT_UTF8, "ff"),
]


def test_each_kind_is_converted_or_rejected_with_its_reason(cluster, tmp_path):
    rows = odd_rows() + [("no text", row_id, caption, PNG, reason) for row_id, caption, reason, _ in NO_TEXT]
    random = np.random.default_rng(0)
    rows = [rows[place] for place in random.permutation(len(rows))]
    _, ids, captions, data, reasons = zip(*rows, strict=True)
    table = pa.table(
        {"hash": text_of_bytes(ids), "caption": text_of_bytes(captions), "jpg": pa.array(data, pa.binary())}
    )
    stored = {row_id: name for row_id, *_, name in NO_TEXT}
    stored |= {row_id: None for name, row_id in IDS.items() if name in ("null id", "empty id", "endless id")}
    made = [f"odd.parquet:{number}" for number in range(len(rows))]
    rows = [
        (name, stored.get(row_id, row_id) or new_id, caption, *rest)
        for (name, row_id, caption, *rest), new_id in zip(rows, made, strict=True)
    ]
    pq.write_table(table, tmp_path / "odd.parquet", row_group_size=100)
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "odd.parquet"), id_column="hash")
    manifest = encode(config)
    written, rejected = (pq.read_table(f"{config.latents_uri}/{name}") for name in ("data", "rejects"))

    def counted(table, *columns):
        return collections.Counter(zip(*(table[column].to_pylist() for column in columns), strict=True))

    texts = [STORED_CAPTIONS.get(caption, caption) for _, _, caption, *_ in rows]
    texts = [caption.decode(errors="replace") if isinstance(caption, bytes) else caption for caption in texts]
    good = [(row[1], text) for row, text in zip(rows, texts, strict=True) if not row[-1]]
    assert counted(written, "id", "caption") == collections.Counter(good)
    bad = [(row_id, reason) for _, row_id, _, _, reason in rows if reason]
    assert counted(rejected, "id", "reason") == collections.Counter(bad)
    assert manifest.read == len(rows) and manifest.rejected == collections.Counter(filter(None, reasons))
    latents, valid = manifest.latents(32).decode(written["image_latents_32"])
    # A picture below a resolution has no latents there.
    small = written.filter(pc.equal(written["id"], "just large enough"))
    assert len(small) == 1 and small["image_latents_64"].null_count == 1
    assert written["image_latents_64"].null_count < len(written)
    text, _ = manifest.embeddings.decode(written["caption_embeddings"])
    assert valid.all() and np.isfinite(latents.astype(np.float32)).all() and np.isfinite(text.astype(np.float32)).all()


def test_pictures_that_kill_their_process_or_never_end_cost_their_own_rows(cluster, tmp_path, capsys):
    """Nothing begins again, and a second job rejects the same pictures, though its decoders would survive them."""
    data = [PNG] * 300
    expected = {"7": KILLED, "8": KILLED, "250": KILLED, "299": LATE}
    for place, reason in expected.items():
        data[int(place)] = JPEG + (KILLS if reason == KILLED else HANGS)
    table = pa.table({"hash": range(300), "caption": ["a caption"] * 300, "jpg": pa.array(data, pa.binary())})
    pq.write_table(table, tmp_path / "rows.parquet")
    values = {"storage": str(tmp_path), "input_uri": str(tmp_path / "rows.parquet"), "resolutions": [32]}
    for name, transform in {"first": with_killing_pictures(stages.transform), "again": stages.transform}.items():
        config = PreprocessingConfig(**values, latents_uri=str(tmp_path / name))
        manifest = encode(config, transform=transform)
        written, rejected = (pq.read_table(tmp_path / name / folder) for folder in ("data", "rejects"))
        assert dict(zip(rejected["id"].to_pylist(), rejected["reason"].to_pylist(), strict=True)) == expected
        assert set(written["id"].to_pylist()) == {str(row) for row in range(300)} - expected.keys()
        assert manifest.rejected == {KILLED: 3, LATE: 1}
    assert "is restarted" not in capsys.readouterr().out
