"""What people bring gets in as it is, or is refused in one sentence: captions, columns, tars, names of files."""

import base64
import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import tarfile
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import job, prepare, stages
from helpers.online import encode
from helpers.online import prepare as prepare_online
from helpers.online.config import OnlineConfig
from helpers.production.readers import detect
from helpers.raw import inputs, readers
from tests.latents import plan_for

TARS = {"input_format": "webdataset", "caption_column": "txt", "id_column": "__key__"}
FOLDERS = {"input_format": "imagefolder", "image_column": "file_name", "caption_column": "text"}
FOLDERS |= {"id_column": "file_name"}


def picture(colour=(200, 40, 40), kind="PNG"):
    data = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(data, kind)
    return data.getvalue()


def table(ids=("1", "2"), **changes):
    columns = {"jpg": pa.array([picture()] * len(ids)), "caption": pa.array(["a", "b"][: len(ids)])}
    return pa.table({**columns, "hash": pa.array(list(ids)), **changes})


def write(path, **files):
    """Files in a folder; values are tables, bytes or texts."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, pa.Table):
            pq.write_table(data, path / name)
        else:
            (path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def tar_of(*members):
    """A tar's bytes."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def as_arrow(rows, is_stream=True, batch_rows=100):
    data = pa.BufferOutputStream()
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(data, rows.schema) as file:
        file.write_table(rows, max_chunksize=batch_rows)
    return data.getvalue().to_pybytes()


def write_tar(path, *members):
    return write(path, **{"a.tar": tar_of(*members)})


def config_of(uri, kind=PreprocessingConfig, **parameters):
    return kind(storage=f"{uri}-storage", input_uri=str(uri), resolutions=[32], **parameters)


def rows_of(uri, **parameters):
    """{id: (caption, reason)} of all rows, by checks, readers and transform, without Ray."""
    checked, found = prepare.prepare_job(config_of(uri, **parameters)), []
    config = checked.config
    reader, columns = inputs.reader(config), inputs.used_columns(config)
    paths = [path for segment in job.plan_segments(checked.paths, config) for path in segment.paths]
    for part in [part for path in paths for part in inputs.parts(reader, path)]:
        for rows in inputs.read_part(pa.Table.from_pylist([part]), columns=columns, reader=reader):
            raw = inputs.to_raw_rows(rows, config, checked.id_type)
            found += stages.transform(raw, config=config).select(["id", "caption", "reason"]).to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: (row["caption"] if not row["reason"] else None, row["reason"]) for row in found}


def online_rows(uri, **parameters):
    """{id: (caption, reason)} of the rows of an epoch of an online run, without Ray."""
    config = config_of(uri, OnlineConfig, **parameters)
    options = {"storage": config.storage, "latents_uri": f"{config.storage}/online", "validation_share": 0.0}
    training = TrainingConfig(**options, global_batch_size=1, resolution=32)
    manifest, config = prepare_online.prepare_run(config, training)
    plan, found = plan_for(training), {}
    for number in range(plan.chunks_per_epoch):
        ((source, ranges),) = plan.chunk_rows(number)[0]
        raw = encode.read_raw(ranges, source, config=config, id_type=pa.type_for_alias(manifest.id_type))
        done = stages.transform(raw, config=config).select(["id", "caption", "reason"]).to_pylist()
        found |= {row["id"]: (row["caption"] if not row["reason"] else None, row["reason"]) for row in done}
    return found, manifest.rejected


def good(*captions):
    return dict(zip("123456789", ((caption, "") for caption in captions), strict=False))


def refusal(uri, **parameters):
    """The one sentence by which an input is refused."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        rows_of(uri, **parameters)
    assert type(error.value) in (ValueError, FileNotFoundError, readers.Unreadable) and len(str(error.value)) < 600
    return str(error.value)


# ---- captions

NOT_UTF8 = (None, "caption is not UTF-8")
TEXT = "a so-called “cat” in a café"
ENCODINGS = {
    "utf-8": (TEXT, ""),
    "utf-8-sig": (TEXT, ""),
    "utf-16": (TEXT, ""),
    "cp1252": NOT_UTF8,
    "utf-32": NOT_UTF8,
    "utf-16-le": NOT_UTF8,  # without its mark
}
AS_UTF16_BE = codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be")


@pytest.mark.parametrize(("encoding", "right"), ENCODINGS.items())
def test_a_caption_in_a_tar_is_utf8_or_utf16_or_rejected(tmp_path, encoding, right):
    path = write_tar(tmp_path / "t", ("1.jpg", picture()), ("1.txt", TEXT.encode(encoding)))
    assert rows_of(path, **TARS) == {"1": right}
    if not right[1]:
        found, _ = online_rows(
            write_tar(tmp_path / "o", *((f"{i}.{e}", d) for i in "12" for e, d in members(encoding))), **TARS
        )
        assert found == dict.fromkeys("12", right)


def members(encoding):
    return [("jpg", picture()), ("txt", TEXT.encode(encoding))]


def test_a_damaged_utf16_caption_is_rejected_and_big_endian_is_read(tmp_path):
    texts = {"1": AS_UTF16_BE, "2": AS_UTF16_BE[:-1], "3": b"\xff\xfe"}
    files = [(f"{key}.{end}", data) for key, text in texts.items() for end, data in (("jpg", picture()), ("txt", text))]
    found = rows_of(write_tar(tmp_path, *files), **TARS)
    assert found == {"1": (TEXT, ""), "2": NOT_UTF8, "3": (None, "empty caption")}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_of_captions_is_utf8_or_utf16_or_its_captions_are_rejected(tmp_path, encoding, kind):
    rows = [("0.png", "a cat"), ("1.png", TEXT)]
    lines = [json.dumps({"file_name": name, "text": text}, ensure_ascii=False) for name, text in rows]
    if kind == "csv":
        lines = ["file_name,text", *(f"{name},{text}" for name, text in rows)]
    pictures = {"0.png": picture(), "1.png": picture()}
    path = write(tmp_path / "f", **{f"metadata.{kind}": "\n".join(lines).encode(encoding)}, **pictures)
    expected = {"0.png": ("a cat", ""), "1.png": NOT_UTF8 if encoding == "cp1252" else (TEXT, "")}
    assert rows_of(path, **FOLDERS) == expected
    first = detect.first_rows(config_of(path, **FOLDERS), 5).to_pandas()  # as the notebook shows them
    assert first["text"][1][0] == (TEXT.encode("cp1252") if encoding == "cp1252" else TEXT)
    if encoding != "cp1252":
        assert online_rows(path, **FOLDERS) == (expected, {})
    write(path, **{f"metadata.{kind}": "\n".join(lines).encode("utf-16-le")})
    assert refusal(path) == f"{path}/metadata.{kind} is UTF-16 without a byte order mark: save it as UTF-8."


def test_text_in_parquet_that_is_not_utf8_is_rejected_and_a_byte_order_mark_is_no_part_of_it(tmp_path):
    captions = pa.array([TEXT.encode("cp1252"), b"\xef\xbb\xbfa cat", "ü".encode("utf-16")], pa.binary())
    for kind in (pa.binary(), pa.string()):
        rows = table("123", jpg=[picture()] * 3, caption=captions.cast(kind, safe=False))
        found = rows_of(write(tmp_path / str(kind), **{"a.parquet": rows}))
        assert found == {"1": NOT_UTF8, "2": ("a cat", ""), "3": ("ü", "")}


NO_TEXT = (None, "caption is neither a text nor a list of texts")
VALUES = {
    "1": (["a café", "b"], ("a café", "")),
    "2": ([], (None, "no caption")),
    "3": ({"en": "a"}, NO_TEXT),
    "4": ("a", ("a", "")),
    "5": ([["a"]], NO_TEXT),
    "6": (["", None, "b"], ("b", "")),
    "7": (None, (None, "no caption")),
    "8": ({}, (None, "no caption")),
}


def test_lists_in_json_are_captions_and_objects_are_none(tmp_path):
    expected = {key: right for key, (_, right) in VALUES.items()}
    texts = {key: json.dumps({"caption": value}).encode() for key, (value, _) in VALUES.items()}
    files = [
        (f"{key}.{end}", data) for key, text in texts.items() for end, data in (("jpg", picture()), ("json", text))
    ]
    path = write_tar(tmp_path / "t", *files)
    from_json = {**TARS, "caption_column": "caption"}
    assert rows_of(path, **from_json) == expected
    assert rows_of(path, **from_json, row_filter="caption != 'x'") == expected
    found, rejected = online_rows(path, **from_json)
    assert found == {key: right for key, right in expected.items() if not right[1]}
    assert rejected == {"no caption": 3, NO_TEXT[1]: 2}
    lines = [json.dumps({"file_name": f"{key}.png", "text": value}) for key, (value, _) in VALUES.items()]
    pictures = {f"{key}.png": picture() for key in VALUES}
    path = write(tmp_path / "f", **{"metadata.jsonl": "\n".join(lines)}, **pictures)
    assert rows_of(path, **FOLDERS) == {f"{key}.png": right for key, right in expected.items()}
    config = config_of(path, **FOLDERS, max_captions=2)
    first = inputs.to_raw_rows(detect.first_rows(config, 1), config)
    assert (first["caption"].to_pylist(), first["caption_2"].to_pylist()) == (["a café"], ["b"])


def test_a_field_of_a_csv_may_be_as_long_as_any_text(tmp_path):
    lines = f"file_name,text,more\n0.png,a,{'x' * 200_000}\n1.png,{'y' * 200_000},\n"
    path = write(tmp_path, **{"metadata.csv": lines, "0.png": picture(), "1.png": picture()})
    assert rows_of(path, **FOLDERS) == {"0.png": ("a", ""), "1.png": (None, "caption of more than 65536 bytes")}


# ---- columns

IDS = [uuid.UUID(int=1), uuid.UUID("d41d8cd9-8f00-b204-e980-0998ecf8427e")]
PICTURES = [picture()] * 2
COLUMNS = {
    "dictionary": ("caption", pa.array(["a", "b"]).dictionary_encode()),
    "string_view": ("caption", pa.array(["a", "b"], pa.string_view())),
    "large_string": ("caption", pa.array(["a", "b"], pa.large_string())),
    "binary": ("caption", pa.array([b"a", b"b"])),
    "fixed_size_binary": ("caption", pa.array([b"a", b"b"], pa.binary(1))),
    "binary_view caption": ("caption", pa.array([b"a", b"b"], pa.binary_view())),
    "list": ("caption", pa.array([["a"], ["b", "c"]])),
    "large_list": ("caption", pa.array([["a"], ["b"]], pa.large_list(pa.string()))),
    "fixed_size_list": ("caption", pa.array([["a", "x"], ["b", "y"]], pa.list_(pa.string(), 2))),
    "list_view": ("caption", pa.array([["a"], ["b"]], pa.list_view(pa.string()))),
    "run ends": ("caption", pa.RunEndEncodedArray.from_arrays([1, 2], ["a", "b"])),
    "list of views": ("caption", pa.array([["a"], ["b"]], pa.list_(pa.string_view()))),
    "list of a dictionary": ("caption", pa.array([["a"], ["b"]], pa.list_(pa.dictionary(pa.int32(), pa.string())))),
    "binary_view": ("jpg", pa.array(PICTURES, pa.binary_view())),
    "large_binary": ("jpg", pa.array(PICTURES, pa.large_binary())),
    "fixed size pictures": ("jpg", pa.array(PICTURES, pa.binary(len(PICTURES[0])))),
    "dictionary of pictures": ("jpg", pa.array(PICTURES).dictionary_encode()),
    "struct": ("jpg", pa.array([{"bytes": one, "path": None} for one in PICTURES])),
    "struct of a view": (
        "jpg",
        pa.array([{"bytes": one} for one in PICTURES], pa.struct([("bytes", pa.binary_view())])),
    ),
    "ids in a dictionary": ("hash", pa.array(["1", "2"]).dictionary_encode()),
    "ids in a view": ("hash", pa.array(["1", "2"], pa.string_view())),
}


@pytest.mark.parametrize(("name", "column"), COLUMNS.values(), ids=COLUMNS)
def test_any_type_of_text_bytes_and_lists_is_read(tmp_path, name, column):
    rows = table(**{name: column})
    in_arrow = isinstance(column, (pa.ListViewArray, pa.RunEndEncodedArray))  # Parquet has no such types
    path = write(tmp_path / "p", **({"a.arrow": as_arrow(rows)} if in_arrow else {"a.parquet": rows}))
    assert rows_of(path, row_filter="caption != 'x'" if name == "hash" else "") == good("a", "b")
    assert online_rows(path) == (good("a", "b"), {})


def test_uuids_are_ids_as_people_write_them(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table(hash=pa.array([one.bytes for one in IDS], pa.uuid()))})
    expected = {str(IDS[0]): ("a", ""), str(IDS[1]): ("b", "")}
    assert rows_of(path) == expected and online_rows(path) == (expected, {})
    for kind in (pa.binary(16), pa.binary()):  # without the name of their type
        path = write(tmp_path / str(kind), **{"a.parquet": table(hash=pa.array([one.bytes for one in IDS], kind))})
        assert set(rows_of(path)) == {one.hex for one in IDS}
    path = write(tmp_path / "text", **{"a.parquet": table(hash=pa.array([b"one", "zw\xf6lf".encode()]))})
    assert set(rows_of(path)) == {"one", "zw\xf6lf"}


def test_two_columns_of_one_name_are_refused(tmp_path):
    rows = pa.Table.from_arrays(table().columns + [["c", "d"]], names=["jpg", "caption", "hash", "caption"])
    for name, data in {"a.parquet": rows, "a.arrow": as_arrow(rows)}.items():
        path = write(tmp_path / name, **{name: data})
        assert refusal(path) == f"{path}/{name} has several columns called 'caption': rename them."


def test_the_path_is_read_where_bytes_are_null(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [(None, "x.png"), (picture(), "not read"), (None, None), (None, "nothing.png")]
    pictures = pa.array([{"bytes": data, "path": name} for data, name in values], kind)
    path = write(tmp_path / "p", **{"a.parquet": table("1234", jpg=pictures, caption=list("abcd")), "x.png": picture()})
    reasons = {"3": "no image bytes", "4": "image file not found"}
    expected = {
        key: (None, reasons[key]) if key in reasons else (text, "") for key, text in zip("1234", "abcd", strict=True)
    }
    assert rows_of(path) == expected and online_rows(path)[0] == expected
    no_bytes = pa.array([{"bytes": None, "path": "x.png"}], pa.struct([("bytes", pa.null()), ("path", pa.string())]))
    write(path, **{"a.parquet": table("1", jpg=no_bytes)})
    assert rows_of(path) == good("a")


def test_pictures_in_base64_are_refused(tmp_path):
    for kind in ("PNG", "JPEG", "WEBP"):
        text = base64.b64encode(picture(kind=kind)).decode()
        sentence = "image_column='jpg' holds images as base64 text: store their bytes in its place."
        for column in ([text, text], ["pictures/1.png", f"data:image/png;base64,{text}"]):
            for values in (column, pa.array(column).cast(pa.binary()), [{"bytes": one} for one in column]):
                path = write(tmp_path, **{"a.parquet": table(jpg=values)})
                assert refusal(path) == sentence


def test_files_of_different_types_are_brought_to_one(tmp_path):
    more = {"jpg": PICTURES, "caption": ["c", "d"], "hash": ["3", "4"]}
    others = {
        "ids": {"hash": pa.array([3, 4])},
        "uint64": {"hash": pa.array([3, 4], pa.uint64())},
        "int32": {"hash": pa.array([3, 4], pa.int32())},
        "picture": {"jpg": pa.array([{"bytes": one, "path": None} for one in PICTURES])},
        "large": {"jpg": pa.array(PICTURES, pa.large_binary()), "caption": pa.array(["c", "d"], pa.large_string())},
        "list": {"caption": pa.array([["c"], ["d", "e"]])},
        "unused": {"width": pa.array([1, 2])},
    }
    for name, changes in others.items():
        files = {"a.parquet": table(width=["x", "y"]), "b.parquet": pa.table({**more, **changes})}
        path = write(tmp_path / name, **files)
        assert rows_of(path) == good("a", "b", "c", "d"), name
        assert online_rows(path) == (good("a", "b", "c", "d"), {}), name
    whole = write(
        tmp_path / "whole", **{"a.parquet": table(hash=[1, 2]), "b.parquet": pa.table({**more, "hash": [3, 4]})}
    )
    assert set(rows_of(whole)) == {1, 2, 3, 4}


def test_files_that_do_not_go_together_are_named_before_a_job(tmp_path):
    others = {
        "caption": {"caption": pa.array([1, 2])},
        "jpg": {"jpg": pa.array([1, 2])},
        "hash": {"hash": pa.array([[1], [2]])},
        "width": {"width": pa.array(["1", "2"])},
    }
    for name, changes in others.items():
        files = {"a.parquet": table(width=[1, 2]), "b.parquet": table("34", **{"width": [1, 2], **changes})}
        sentence = refusal(write(tmp_path / name, **files), row_filter="width > 0", id_column="hash")
        assert "a.parquet" in sentence and "b.parquet" in sentence and name in sentence
    sentence = refusal(
        write(tmp_path / "lacks", **{"a.parquet": table(), "b.parquet": table().drop_columns("caption")})
    )
    assert "caption_column='caption' is not a column of" in sentence and "b.parquet" in sentence


def test_a_struct_of_paths_alone_is_read_by_path(tmp_path):
    rows = table(jpg=pa.array([{"path": "1.png"}, {"path": "p/2.png"}])).rename_columns(["photo", "caption", "hash"])
    path = write(tmp_path / "t", **{"a.parquet": rows, "1.png": PICTURES[0], "p/2.png": PICTURES[1]})
    assert rows_of(path) == good("a", "b") == online_rows(path)[0]


# ---- tars


@pytest.mark.parametrize(("count", "parameters"), [(3, TARS), (3, {}), (100, TARS), (100, {})])
def test_members_that_do_not_stand_together_are_refused_with_how_to_sort(tmp_path, count, parameters):
    names = [f"{number}.{end}" for end in ("jpg", "txt") for number in range(count)]
    path = write_tar(tmp_path, *((name, picture() if name.endswith("jpg") else b"a") for name in names))
    write(path, **{"0.parquet": pa.table({"caption": ["a"], "key": ["0"]})})  # img2dataset's
    sentence = refusal(path, **parameters)
    assert sentence.startswith(f"{path}/a.tar: the members of the sample '0' do not stand together: sort the tar")
    assert "tar --sort=name" in sentence


@pytest.mark.parametrize("longer", ["a.1", "a.v2"])
def test_a_picture_with_a_longer_name_is_a_sample_if_it_has_a_caption(tmp_path, longer):
    red, blue = picture((255, 0, 0)), picture((0, 0, 255))
    files = {"a.jpg": red, "a.txt": b"a", f"{longer}.jpg": blue, f"{longer}.txt": b"b", "b.jpg": red, "b.txt": b"c"}
    expected = {"a": ("a", ""), longer: ("b", ""), "b": ("c", "")}
    for name, members in {"a": files.items(), "b": sorted(files.items())}.items():
        path = write_tar(tmp_path / name, *members)
        assert rows_of(path, **TARS) == expected and online_rows(path, **TARS) == (expected, {})
        config = config_of(path, **TARS)
        raw = inputs.to_raw_rows(detect.first_rows(config, 9), config)
        assert dict(zip(raw["id"].to_pylist(), raw["image"].to_pylist(), strict=True)) == {
            "a": red,
            longer: blue,
            "b": red,
        }
    masks = {"a.jpg": red, "a.txt": b"a", "a.visible.png": blue}
    assert rows_of(write_tar(tmp_path / "m", *masks.items()), **TARS) == {"a": ("a", "")}


def test_of_two_pictures_in_a_sample_the_named_one_is_taken(tmp_path):
    red, blue = picture((255, 0, 0)), picture((0, 0, 255))
    samples = [(f"{key}.{end}", data) for key in "12" for end, data in (("jpg", red), ("png", blue), ("txt", b"a"))]
    for directory, files in {"a": samples, "b": samples[::-1]}.items():
        path = write_tar(tmp_path / directory, *files)
        for column, right in (("jpg", red), ("png", blue)):
            config = config_of(path, **TARS, image_column=column)
            assert inputs.to_raw_rows(detect.first_rows(config, 9), config)["image"].to_pylist() == [right] * 2
    assert online_rows(tmp_path / "a", **TARS, image_column="png")[0] == {"1": ("a", ""), "2": ("a", "")}
    path = write_tar(tmp_path / "c", ("0.png", red), ("0.webp", blue), ("0.txt", b"a"))
    assert "the sample '0' has 2 pictures (.png, .webp): name one, such as image_column='png'" in refusal(path, **TARS)
    for parameters in (TARS, {}):
        assert rows_of(path, **parameters, image_column="webp") == {"0": ("a", "")}
    write(path, **{"0.parquet": pa.table({"caption": ["a"], "key": ["0"]})})
    assert rows_of(path, image_column="webp") == {"0": ("a", "")}
    assert "has 2 pictures" in refusal(path)


def captioned(keys, *ends):
    """Members of a tar: a text and pictures of each key."""
    return [(f"{key}.{end}", b"a" if end == "txt" else picture()) for key in keys for end in (*ends, "txt")]


@pytest.mark.parametrize("ends", [("jpg", "png"), ("input.jpg", "target.jpg")])
def test_a_later_sample_with_two_pictures_is_rejected_unless_one_is_named(tmp_path, ends):
    """Later than the samples by which the column is chosen."""
    path = write_tar(tmp_path / "t", *captioned(range(100, 170), "jpg"), *captioned("x", *ends), *captioned("y", "jpg"))
    expected = {str(key): ("a", "") for key in (*range(100, 170), "x", "y")}
    assert rows_of(path) == expected | {"x": (None, "several images in one sample")}
    trained_on, _ = online_rows(path)
    assert trained_on["x"] == (None, "several images in one sample") and len(trained_on) == len(expected)
    if "jpg" in ends:
        assert rows_of(path, image_column="jpg") == expected


def test_pictures_with_longer_names_are_columns(tmp_path):
    path = write_tar(tmp_path / "t", *captioned("ab", "input.jpg", "target.jpg"))
    assert "holds images in input.jpg, target.jpg: name one, such as image_column='input.jpg'" in refusal(path)
    assert "it has __key__, input.jpg, target.jpg, txt" in refusal(path, image_column="x")
    blue = picture((0, 0, 255))
    members = [(name, blue if "target" in name else data) for name, data in captioned("ab", "input.jpg", "target.jpg")]
    for number, files in enumerate((members, members[::-1], [(f"shot 2.{name}", data) for name, data in members])):
        path = write_tar(tmp_path / str(number), *files)
        rows = rows_of(path, image_column="target.jpg")
        assert (
            [row for row in rows.values()]
            == [("a", "")] * 2
            == list(online_rows(path, image_column="target.jpg")[0].values())
        )
        config = config_of(path, **TARS, image_column="target.jpg")
        assert inputs.to_raw_rows(detect.first_rows(config, 9), config)["image"].to_pylist() == [blue] * 2
    assert rows_of(write_tar(tmp_path / "one", *captioned("ab", "image.jpg"))) == {"a": ("a", ""), "b": ("a", "")}
    own = write_tar(tmp_path / "own", *captioned(["photo.v1", "photo.v2"], "jpg"), ("photo.v3.jpg", picture()))
    assert rows_of(own) == {"photo.v1": ("a", ""), "photo.v2": ("a", ""), "photo.v3": (None, "no caption")}


def test_pictures_whose_names_have_dots_are_samples(tmp_path):
    plain = [x for i in range(3) for x in ((f"{i}.jpg", picture()), (f"{i}.txt", b"a"))]
    dotted = [x for i in range(3) for x in ((f"shot 2.{i}.jpg", picture()), (f"shot 2.{i}.txt", b"a"))]
    expected = dict.fromkeys(["0", "1", "2", "shot 2.0", "shot 2.1", "shot 2.2"], ("a", ""))
    for directory, files in {"a": plain + dotted, "b": dotted + plain}.items():
        path = write_tar(tmp_path / directory, *files)
        assert rows_of(path, **TARS) == expected and online_rows(path, **TARS) == (expected, {})


def test_a_caption_in_a_tar_may_be_called_caption(tmp_path):
    path = write_tar(
        tmp_path, ("0.jfif", picture(kind="JPEG")), ("0.caption", b"a"), ("1.jp2", b""), ("1.Caption", b"b")
    )
    assert rows_of(path) == {"0": ("a", ""), "1": (None, "no image bytes")}


def test_masks_are_no_pictures(tmp_path):
    for names in (("x.depth.png", "x.jpg", "x.txt"), ("x.jpg", "x.mask.png", "x.seg.png", "x.txt")):
        path = write_tar(tmp_path, *((name, b"a" if name.endswith("txt") else picture()) for name in names))
        assert rows_of(path, **TARS) == {"x": ("a", "")}


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_linked_members_are_read_from_a_disk_and_refused_where_samples_are_read_alone(tmp_path, kind):
    write(tmp_path / "t", **{"a.tar": b""})
    with tarfile.open(tmp_path / "t" / "a.tar", "w") as tar:
        for name, data in (("0.jpg", picture()), ("0.txt", b"a"), ("1.jpg", None), ("1.txt", b"a")):
            info = tarfile.TarInfo(f"./{name}")
            if data is None:
                info.type, info.linkname = kind, "./0.jpg"
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data or b""))
    assert rows_of(tmp_path / "t", **TARS) == {"./0": ("a", ""), "./1": ("a", "")}
    refused = r"a\.tar: './1.jpg' is a link, which cannot be read alone: make the tar with `tar --dereference --hard-"
    with pytest.raises((ValueError, RuntimeError), match=refused):  # RuntimeError: through Ray, if it runs
        online_rows(tmp_path / "t", **TARS)


def test_two_tars_in_one_file_are_refused(tmp_path):
    one, two = (tar_of((f"{number}.jpg", picture()), (f"{number}.txt", b"a")) for number in range(2))
    assert "another tar follows in the same file" in refusal(write(tmp_path, **{"a.tar": one + two}), **TARS)
    assert rows_of(write(tmp_path, **{"a.tar": one + bytes(100_000)}), **TARS) == {"0": ("a", "")}


def test_compressed_tars_are_refused(tmp_path):
    one = tar_of(("0.jpg", picture()), ("0.txt", b"a"))
    sentence = "is a compressed tar, in which no sample can be found: decompress it"
    for name, data in {
        "b.tar.gz": gzip.compress(one),
        "B.TGZ": gzip.compress(one),
        "b.tar.xz": lzma.compress(one),
    }.items():
        path = write(tmp_path / name, **{"a.tar": one, name: data})
        assert f"{name} {sentence}" in refusal(path, **TARS)
        assert f"{name} {sentence}" in refusal(path / name, **TARS)
    for number, data in enumerate((gzip.compress(one), bz2.compress(one), lzma.compress(one))):
        assert f"a.tar {sentence}" in refusal(write(tmp_path / str(number), **{"a.tar": data}), **TARS)


# ---- names of files


def test_what_tools_leave_behind_is_left_out(tmp_path):
    names = ["_temporary/0/task_1/a.parquet", ".ipynb_checkpoints/a-checkpoint.parquet", ".a.parquet"]
    names += ["_delta_log/1.checkpoint.parquet", "deep/.hidden/a.parquet"]
    path = write(
        tmp_path / "s", **{"a.parquet": table(), **dict.fromkeys(names, table()), "._a.parquet": b"\0\5\x16\7"}
    )
    assert rows_of(path) == good("a", "b") and online_rows(path) == (good("a", "b"), {})
    assert inputs.list_inputs(f"{path}/**/*.parquet") == inputs.list_inputs(str(path)) == [f"{path}/a.parquet"]
    hidden = write(tmp_path / ".cache", **{"a.parquet": table()})  # what is given is read
    assert rows_of(hidden) == good("a", "b") and rows_of(hidden / "a.parquet") == good("a", "b")
    lines, apple = "file_name,text\n0.png,a\n", b"\0\5\x16\7" + bytes(100)
    files = {"d/0.png": picture(), "d/metadata.csv": lines, "d/old_metadata.csv": lines}
    path = write(tmp_path / "z", **files, **{"__MACOSX/d/._metadata.csv": apple, "d/._metadata.csv": apple})
    assert rows_of(path, **FOLDERS) == {"0.png": ("a", "")}


def test_suffixes_in_capitals_are_read(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table("1"), "B.PARQUET": table("2"), "c.parq": table("3")})
    assert set(rows_of(path)) == {"1", "2", "3"}
    path = write(tmp_path / "t", **{"A.TAR": tar_of(("0.JPG", picture()), ("0.TXT", b"a"))})
    assert rows_of(path, **TARS) == {"0": ("a", "")}
    line = json.dumps({"file_name": "0.PNG", "text": "a"})
    path = write(tmp_path / "f", **{"Metadata.JSONL": line, "0.PNG": picture()})
    assert rows_of(path, **FOLDERS) == {"0.PNG": ("a", "")}


def test_links_that_lead_nowhere_or_back_and_names_that_are_not_utf8(tmp_path):
    path = write(tmp_path / "a", **{"a.parquet": table()})
    os.symlink(path, path / "again")
    open(os.path.join(os.fsencode(path), b"caf\xe9.jpg"), "wb").close()
    os.symlink("nowhere", path / "b.jpg")
    assert rows_of(path) == good("a", "b")
    os.symlink("not-fetched", path / "b.parquet")
    assert f"{path}/b.parquet is a link that leads nowhere" in refusal(path)
    os.remove(path / "b.parquet")
    open(os.path.join(os.fsencode(path), b"caf\xe9.parquet"), "wb").close()
    said = "caf?.parquet is a link that leads nowhere, no regular file, or its name is not UTF-8"
    assert f"{path}/{said}" in refusal(path)
