"""Captions, ids and images of any usual type get in as they are, or are rejected with the reason."""

import os
import tarfile
import uuid

import pyarrow as pa
import pytest

from helpers.production.readers import folder
from helpers.raw import inputs, readers
from helpers.raw.images import BadImage
from tests.raw_data import as_arrow, found, good, image, online_rows, refusal, rows_of, table, tar_of, write

# ---- captions


def test_a_text_holds_a_caption_a_line_where_several_are_wanted(tmp_path):
    files = {"0.jpg": image(), "0.txt": "a cat\na tabby asleep\n"}
    for name, data in {"folder": files, "tar": {"a.tar": tar_of(files)}}.items():
        config = found(write(tmp_path / name, **data), max_captions=2).config
        rows = next(inputs.reader(config).stream(inputs.list_inputs(config)[0][0], inputs.used_columns(config)))
        assert inputs.captions_of(rows, config) == [["a cat", "a tabby asleep"]]


def test_a_table_may_hold_quotes_lines_and_gaps(tmp_path):
    lines = b'file_name,text,score\na.jpg,"one, two",3\nb.jpg,"two\nlines",x\nc.jpg,,\n'
    lines += b'd.jpg,"say ""hi""",1e3\ne.jpg,\xff,\n'
    path = write(tmp_path / "t", **{"metadata.csv": lines, **{f"{name}.jpg": image() for name in "abcde"}})
    captions = [row for row, _ in rows_of(path).values()]
    assert captions == ["one, two", "two\nlines", "", 'say "hi"', ""]
    assert set(online_rows(path, row_filter="score >= 3")[0]) == {"metadata.csv:0", "metadata.csv:3"}


def test_json_values_of_other_types_become_null(tmp_path):
    texts = [b'{"width": 3.5}', b'{"width": "12"}', b'{"width": "wide"}', b"[1, 2]", b'{"width": ', b"[" * 100_000]
    path = write(tmp_path, **{"a.tar": tar_of({f"{number}.json": text for number, text in enumerate(texts)})})
    (rows,) = readers.WebDataset({"width": pa.float64()}).stream(str(path / "a.tar"), ["width"])
    assert rows["width"].to_pylist() == [3.5, 12, None, None, None, None]


# ---- types of columns

IMAGES = [image()] * 2
COLUMNS = {
    "dictionary": ("caption", pa.array(["a", "b"]).dictionary_encode()),
    "fixed_size_binary": ("caption", pa.array([b"a", b"b"], pa.binary(1))),
    "list": ("caption", pa.array([["a"], ["b", "c"]])),
    "list_view": ("caption", pa.array([["a"], ["b"]], pa.list_view(pa.string()))),
    "run ends": ("caption", pa.RunEndEncodedArray.from_arrays([1, 2], ["a", "b"])),
    "dictionary of images": ("jpg", pa.array(IMAGES).dictionary_encode()),
    "struct": ("jpg", pa.array([{"bytes": one, "path": None} for one in IMAGES])),
}


@pytest.mark.parametrize(("name", "column"), COLUMNS.values(), ids=COLUMNS)
def test_any_type_of_text_bytes_and_lists_is_read(tmp_path, name, column):
    rows = table(**{name: column})
    in_arrow = isinstance(column, (pa.ListViewArray, pa.RunEndEncodedArray))  # Parquet has no such types
    path = write(tmp_path / "p", **({"a.arrow": as_arrow(rows)} if in_arrow else {"a.parquet": rows}))
    assert rows_of(path) == good("a", "b")


def test_uuids_are_ids_as_people_write_them_and_other_bytes_hex_digits(tmp_path):
    ids = [uuid.UUID(int=1), uuid.UUID("d41d8cd9-8f00-b204-e980-0998ecf8427e")]
    path = write(tmp_path / "p", **{"a.parquet": table(hash=pa.array([one.bytes for one in ids], pa.uuid()))})
    assert set(rows_of(path)) == set(map(str, ids))
    path = write(tmp_path / "b", **{"a.parquet": table(hash=pa.array([ids[1].bytes, "zwölf".encode()]))})
    assert set(rows_of(path)) == {ids[1].hex, "zwölf"}


@pytest.mark.parametrize(
    "changes",
    [
        {"hash": pa.array([3, 4])},
        {"jpg": pa.array([{"bytes": one, "path": None} for one in IMAGES])},
        {"caption": pa.array([["c"], ["d", "e"]])},
    ],
    ids=["int64", "struct", "list"],
)
def test_files_of_different_types_are_brought_to_one(tmp_path, changes):
    more = {"caption": ["c", "d"], "width": ["x", "y"], **changes}
    path = write(tmp_path / "p", **{"a.parquet": table(width=["x", "y"]), "b.parquet": table("34", **more)})
    assert rows_of(path) == good("a", "b", "c", "d")


# ---- images behind paths


def test_the_path_is_read_where_bytes_are_null(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [(None, "x.png"), (image(), "not read"), (None, None), (None, "nothing.png")]
    images = pa.array([{"bytes": data, "path": name} for data, name in values], kind)
    path = write(tmp_path / "p", **{"a.parquet": table("1234", jpg=images), "x.png": image()})
    assert rows_of(path) == good("a", "b") | {"3": ("", "no image path"), "4": ("", "image file not found")}
    names = pa.array([{"path": "x.png"}, {"path": "p/y.png"}])
    path = write(tmp_path / "q", **{"a.parquet": table(jpg=names), "x.png": image(), "p/y.png": image()})
    assert rows_of(path) == good("a", "b")


def test_a_path_is_read_inside_the_inputs_folder_alone(tmp_path):
    base = write(tmp_path / "input", **{"deep/a b#ü.jpg": b"data"})
    write(tmp_path, **{"secret": b"secret", "input-2/a": b"neighbour"})
    (base / "link").symlink_to(base / "deep" / "a b#ü.jpg")
    (base / "device").symlink_to("/dev/zero")
    os.mkfifo(base / "fifo")
    outside = "image path outside of the input"
    expected = {
        "deep/a b#ü.jpg": b"data",
        f"{base}/deep/a b#ü.jpg": b"data",
        "deep/../deep/./a b#ü.jpg": b"data",
        "link": b"data",
        **dict.fromkeys(
            ["../secret", f"{tmp_path}/secret", f"{tmp_path}/input-2/a", "s3://bucket/a", "HTTPS://example.org/a.jpg"],
            outside,
        ),
        "nothing": "image file not found",
        None: "no image path",
        "deep": "image file not readable",
        "fifo": "not a regular file",
        "device": "not a regular file",
        "iVBORw0KGgo" * 500: "image file not readable",  # base64
    }
    fetched = [folder.fetch_image(name, str(base), str(base)) for name in expected]
    assert [str(one) if isinstance(one, BadImage) else one for one in fetched] == list(expected.values())


def test_a_member_or_a_file_larger_than_an_image_can_be_is_none(tmp_path, monkeypatch):
    for module in (readers, folder):
        monkeypatch.setattr(module, "MAX_BYTES", 1000)
    path = write(tmp_path, **{"a.tar": tar_of({"0.jpg": b"x" * 1001, "1.jpg": b"x" * 1000}), "b.jpg": b"x" * 1001})
    (rows,) = readers.WebDataset({"image": pa.binary()}).stream(str(path / "a.tar"), ["image"])
    assert list(map(len, rows["image"].to_pylist())) == [0, 1000]
    assert str(folder.fetch_image("b.jpg", str(path), str(path))) == "too many bytes"


# ---- samples of a tar


def samples_of(tmp_path, members, column="image"):
    path = write(tmp_path, **{"a.tar": tar_of(members)})
    reader = readers.WebDataset({"__key__": pa.string(), column: pa.binary(), "txt": pa.string()})
    (rows,) = reader.stream(str(path / "a.tar"), ["__key__", column, "txt"])
    assert reader.row_groups(str(path / "a.tar")) == [len(rows)]
    return [tuple(row.values()) for row in rows.to_pylist()]


def test_a_samples_name_ends_at_the_first_dot_of_its_file(tmp_path):
    members = {"x/1.jpg": b"1", "x/1.txt": "first", "x/2.JPEG": b"2", "x/2.txt": "zwölf", "x/2.cls": b"7"}
    members |= {"y.z/2.png": b"3", "3.txt": "no image", ".hidden": b"", "README": b""}
    members |= {"5.jpg": b"5", "5.mask.png": b"m", "5.txt": "five", "6.jpg": b"6", "6.png": b"6", "6.txt": "two images"}
    assert samples_of(tmp_path, members) == [
        ("x/1", b"1", "first"),
        ("x/2", b"2", "zwölf"),
        ("y.z/2", b"3", None),
        ("3", None, "no image"),
        ("5", b"5", "five"),
        ("6", None, "two images"),
    ]
    assert samples_of(tmp_path, {"a.input.jpg": b"in", "a.out.jpg": b"out", "a.txt": "a"}, "out.jpg") == [
        ("a", b"out", "a")
    ]


def test_a_sample_of_several_images_is_rejected_unless_one_is_named(tmp_path):
    members = {f"{n}.{end}": data for n in range(70) for end, data in (("jpg", image()), ("txt", "a"))}
    path = write(tmp_path / "t", **{"a.tar": tar_of({**members, "x.jpg": image(), "x.png": image(), "x.txt": "a"})})
    assert rows_of(path, id_column="__key__")["x"] == ("", "not exactly one image in the sample")
    assert set(rows_of(path, id_column="__key__", image_column="jpg").values()) == {("a", "")}


def test_links_in_tars_are_refused(tmp_path):
    path = write(tmp_path / "t", **{"a.tar": b""})
    with tarfile.open(path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("0.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "1.jpg"
        tar.addfile(info)
    assert "'0.jpg' is a link: make the tar with `tar --dereference" in refusal(path)
