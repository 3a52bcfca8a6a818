"""Data in whatever form a download left it: Parquet, WebDataset tars, image folders, pictures behind paths."""

import collections
import functools
import io
import json
import os
import pathlib
import tarfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.encode import prepare, stages
from helpers.lesson import captioned_shapes
from helpers.online.config import OnlineConfig
from helpers.raw import images, inputs, readers
from tests import own_data
from tests.unit.raw import test_layouts

ROWS = 150
LISTED = {"id_column": "key", "caption_column": "text", "image_column": "file_name"}
COLUMNS = {
    "parquet": {},
    "webdataset": {"input_format": "webdataset", "id_column": "key"},
    "imagefolder": {"input_format": "imagefolder", **LISTED},
    "paths": LISTED,
}


def write_tar(path, samples):
    """[{name in the tar: bytes}] as a WebDataset tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for sample in samples:
            for name, data in sample.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def drawn_rows():
    """[(key, picture's bytes, caption, width)] of drawn pictures, a few of them spoilt."""
    rows = []
    for index in range(ROWS):
        picture, caption = captioned_shapes.draw_sample(index)
        data = io.BytesIO()
        picture.save(data, ("JPEG", "PNG", "WEBP")[index % 3])
        data, caption = data.getvalue() if index % 40 else b"<html>", caption if index % 50 else ""
        rows.append((f"{index:05d}", data, caption, 32 + index))
    return rows


@pytest.fixture(scope="module")
def input_folders(tmp_path_factory):
    """The same rows in each format, in two files: {name: folder}."""
    root = tmp_path_factory.mktemp("inputs")
    rows = pd.DataFrame(drawn_rows(), columns=["hash", "jpg", "caption", "width"])
    for number, part in enumerate((rows[:100], rows[100:])):
        (root / "parquet").mkdir(exist_ok=True)
        part.to_parquet(root / "parquet" / f"{number}.parquet", row_group_size=30, index=False)
        write_tar(root / "webdataset" / f"{number:05d}.tar", [sample(row) for row in part.itertuples()])
        write_pictures(root / "imagefolder" / ("train", "more/deep")[number], part, ".bin")
    write_pictures(root / "paths" / "pictures", rows)
    table = listed(rows).assign(file_name=[f"pictures/{key}" for key in rows["hash"]])
    table.to_parquet(root / "paths" / "rows.parquet", index=False)
    listed(rows[:100], ".bin").to_csv(root / "imagefolder/train/metadata.csv", index=False)
    lines = listed(rows[100:], ".bin").to_json(orient="records", lines=True)
    (root / "imagefolder/more/deep/metadata.jsonl").write_text(lines + "\n\n")
    return {name: root / name for name in COLUMNS}


def sample(row):
    """A row as a WebDataset sample: {name in the tar: bytes}."""
    columns = {"key": row.hash, "caption": row.caption, "width": row.width, "exif": None}
    extension = ("jpg", "png", "webp")[int(row.hash) % 3]
    files = {extension: row.jpg, "txt": row.caption.encode(), "json": json.dumps(columns).encode()}
    return {f"{row.hash}.{name}": data for name, data in files.items()}


def write_pictures(folder, rows, extension=""):
    folder.mkdir(parents=True)
    for row in rows.itertuples():
        (folder / f"{row.hash}{extension}").write_bytes(row.jpg)


def listed(rows, extension=""):
    """The rows as a table of pictures' files."""
    table = rows.rename(columns={"caption": "text", "hash": "key"}).drop(columns="jpg")
    return table.assign(file_name=table["key"] + extension)


def config_of(input_folders, name, tmp_path, **changes):
    values = {"storage": str(tmp_path), "input_uri": str(input_folders[name]), "resolutions": [32]}
    return OnlineConfig(**{**values, **COLUMNS[name], **changes})


# ---- through Ray


def filtered(input_folders, name, tmp_path, **changes):
    """The config of a format, with a filter that uses a column of numbers and one of text."""
    caption = COLUMNS[name].get("caption_column", "caption")
    return config_of(input_folders, name, tmp_path, row_filter=f"width >= 48 and {caption} != 'x'", **changes)


def test_every_format_is_read_and_transformed_alike(input_folders, cluster, tmp_path):
    """Through Ray Data, all in one job, as far as the encoder: the same ids, captions, pixels and reasons."""
    datasets = []
    for name in COLUMNS:
        config = filtered(input_folders, name, tmp_path / name)
        datasets += [inputs.read_rows(segment, config) for segment in prepare.prepare_job(config).segments]
    rows = datasets[0].union(*datasets[1:])
    rows = rows.map_batches(functools.partial(stages.transform, config=config), batch_format="pyarrow")
    found = collections.defaultdict(list)
    of_file = {"0.parquet": "parquet", "1.parquet": "parquet", "rows.parquet": "paths"}
    of_ending = {".tar": "webdataset", ".csv": "imagefolder", "sonl": "imagefolder"}
    for row in rows.take_all():
        values = (row["id"], row["caption"] or "", row["reason"], bytes(row["pixels_32"] or b""))
        found[of_file.get(row["source"]) or of_ending[row["source"][-4:]]].append(values)
    expected = sorted(found["parquet"])
    assert {name: sorted(values) for name, values in found.items()} == dict.fromkeys(COLUMNS, expected)
    assert len(expected) == ROWS - 16
    reasons = collections.Counter(reason for _, _, reason, _ in expected if reason)
    assert reasons == {"not an image": 3, "empty caption": 2}


def test_a_limit_cuts_the_last_file_and_no_other(input_folders, cluster, tmp_path):
    keys = [key for key, *_ in drawn_rows()]
    # Of image folders, more/deep/metadata.jsonl comes before train/metadata.csv.
    for name, files, wanted in (("webdataset", 100, keys[100:120]), ("imagefolder", 50, keys[:70])):
        config = config_of(input_folders, name, tmp_path, limit=120)
        first, last = prepare.prepare_job(config, rows_per_segment=40).segments
        assert (first.rows, first.limit, last.rows, last.limit) == (files, None, 120 - files, 120 - files)
        rows = inputs.read_rows(last, config).take_all()
        assert [row["id"] for row in rows] == wanted
        assert {row["source"] for row in rows} == {inputs.name_of(path, config) for path in last.paths}


# ---- on the way to the trainers


# ---- finding files


def test_a_pattern_gives_the_files_that_match_it(tmp_path):
    names = ["a/0.parquet", "a/1.parquet", "a/b/2.parquet", "c/3.parquet", "a/4.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = {
        "a/*.parquet": names[:2],
        "*/*.parquet": [*names[:2], names[3]],
        "**/*.parquet": names[:4],
        "a/[1-9].parquet": names[1:2],
        "a/?.parquet": names[:2],
        "a/[!0].parquet": names[1:2],
        "**/2.parquet": names[2:3],
    }
    for pattern, expected in patterns.items():
        found = inputs.list_inputs(f"{tmp_path}/{pattern}")
        assert [storage.name(path) for path in found] == [storage.name(name) for name in expected], pattern
    with pytest.raises(FileNotFoundError, match="matches no file: give a Parquet file, a folder of them or a pattern"):
        inputs.list_inputs(f"{tmp_path}/d/*.parquet", "parquet")


def test_a_job_over_a_pattern_knows_its_files_again(input_folders, tmp_path):
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=f"{input_folders['parquet']}/*.parquet")
    job = prepare.prepare_job(config)
    assert sorted(job.listing) == ["0.parquet", "1.parquet"]
    assert job.listing == {name: (input_folders["parquet"] / name).stat().st_size for name in job.listing}


# ---- tars


def webdataset(**types):
    return readers.WebDataset({"__key__": pa.string(), "txt": pa.string(), "jpg": pa.binary(), **types})


def test_samples_are_runs_of_members_with_one_name(tmp_path):
    path = write_tar(
        tmp_path / "a.tar",
        [
            {"x/1.jpg": b"one", "x/1.txt": b"first"},
            {"x/2.JPEG": b"two", "x/2.txt": "zwölf".encode(), "x/2.cls": b"7"},
            {"y.z/2.png": b"three"},  # a dot in the folder is no extension
            {"3.txt": b"no picture", ".hidden": b"", "README": b""},
            {"4.jpg": b"four", "4.txt": b"\xff"},
            {"4.jpg": b"another four"},  # the same part again
        ],
    )
    (table,) = webdataset().stream(str(path), ["__key__", "jpg", "txt"])
    table = table.set_column(2, "txt", pa.array(inputs.texts(table["txt"])))
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("x/1", b"one", "first"),
        ("x/2", b"two", "zwölf"),
        ("y.z/2", b"three", None),
        ("3", None, "no picture"),
        ("4", b"four", None),
        ("4", b"another four", None),
    ]
    assert webdataset().row_groups(str(path)) == [6]


def sparse_member(name, data, size):
    """GNU tar's sparse member: `data` in the file, `size` bytes when it is read."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410], header[483:495] = b"%011o\0%011o\0" % (512, len(data)), b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data.ljust(512, b"\0")


def test_a_member_larger_than_a_picture_can_be_is_none(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for key, data in (("0", b"x" * 1001), ("1", b"x" * 1000)):
            member = tarfile.TarInfo(f"{key}.jpg")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        end = tar.offset
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(buffer.getvalue()[:end] + sparse_member("2.jpg", b"x" * 100, 900) + bytes(1024))
    monkeypatch.setattr(readers, "MAX_BYTES", 1000)
    with readers.open_tar(str(tmp_path / "a.tar")) as tar:
        sizes = [(member.size, member.issparse()) for member in tar.getmembers()]
    assert sizes == [(1001, False), (1000, False), (900, True)]
    with readers.open_tar(str(tmp_path / "a.tar")) as tar:
        assert [len(sample["jpg"]) for sample in readers.samples(tar, picture="")] == [0, 1000, 0]
    (tmp_path / "large.jpg").write_bytes(b"x" * 1001)
    found = readers.read_picture("large.jpg", str(tmp_path), str(tmp_path))
    assert isinstance(found, images.BadImage) and str(found) == "too many bytes"


def test_json_of_any_kind_becomes_columns_or_nothing(tmp_path):
    texts = [
        b'{"width": 3, "txt": "not the text", "name": "a"}',
        b'{"width": 3.5, "name": 7}',
        b'{"width": "12", "name": null}',
        b'{"width": "wide", "name": "\\ud800"}',
        b'{"width": null}',
        b"[1, 2]",
        b'{"width": ',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"width": 1e999, "name": {"a": [1]}}',
        b'{"width": true, "name": "\xc3\xbc"}',
        b'{"width": ' + b"9" * 400 + b"}",
    ]
    path = write_tar(tmp_path / "a.tar", [{f"{number}.json": text} for number, text in enumerate(texts)])
    read = webdataset(width=pa.float64(), name=pa.string())
    (table,) = read.stream(str(path), ["width", "name", "txt"])
    inf = float("inf")
    assert table["width"].to_pylist() == [3, 3.5, 12, None, None, None, None, None, None, inf, 1, None]
    names = table["name"].to_pylist()
    assert names[:4] == ["a", "7", None, "?"] and names[9:11] == ['{"a": [1]}', "ü"]
    assert table["txt"].null_count >= len(table) - 1
    assert read.schema(str(path)).names == ["__key__", "width", "txt", "name"]


# ---- tables


def test_a_captions_table_may_hold_quotes_lines_and_gaps(tmp_path):
    (tmp_path / "metadata.csv").write_bytes(
        b'file_name,text,score\na.jpg,"one, two",3\nb.jpg,"two\nlines",x\nc.jpg,,\n'
        b'd.jpg,"say ""hi""",1e3\ne.jpg,\xff,NaN\n\nf.jpg\n'
    )
    read = readers.ImageFolder({"file_name": pa.string(), "text": pa.string(), "score": pa.float64()})
    (table,) = read.stream(str(tmp_path / "metadata.csv"), ["file_name", "text", "score"])
    assert inputs.texts(table["text"]) == ["one, two", "two\nlines", "", 'say "hi"', None, ""]
    assert table["score"].to_pylist()[:4] == [3, None, None, 1000] and table["file_name"].null_count == 0
    (tmp_path / "metadata.csv").write_text("a,b\n1,2,3\n1,2\n")
    with pytest.raises(ValueError, match="metadata.csv is not a readable table: correct it"):
        read.row_groups(str(tmp_path / "metadata.csv"))


def test_a_line_that_is_no_json_is_a_row_of_nulls(tmp_path):
    path = tmp_path / "metadata.jsonl"
    path.write_text('{"file_name": "a.jpg", "text": "a"}\n{"file_name":\n\n{"text": "c", "file_name": "c.jpg"}')
    reader = readers.ImageFolder({"file_name": pa.string(), "text": pa.string()})
    (table,) = reader.stream(str(path), ["file_name", "text"])
    assert table["file_name"].to_pylist() == ["a.jpg", None, "c.jpg"] and table["text"].to_pylist() == ["a", None, "c"]
    path.write_text('{"file_name": "b.jpg", "text": "bb"}')
    (table,) = readers.ImageFolder({"text": pa.string()}).stream(str(path), ["text"])
    assert table["text"].to_pylist() == ["bb"]  # not what was read before


# ---- pictures behind paths


def test_a_path_is_read_inside_the_inputs_folder_alone(tmp_path):
    base = tmp_path / "input"
    (base / "deep").mkdir(parents=True)
    (base / "deep" / "a b#ü.jpg").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "input-2").mkdir()
    (tmp_path / "input-2" / "a").write_bytes(b"neighbour")
    expected = {
        "deep/a b#ü.jpg": b"picture",
        f"{base}/deep/a b#ü.jpg": b"picture",
        "deep/../deep/./a b#ü.jpg": b"picture",
        "../secret": "image path outside of the input",
        f"{tmp_path}/secret": "image path outside of the input",
        "deep/../../secret": "image path outside of the input",
        f"{tmp_path}/input-2/a": "image path outside of the input",
        "s3://bucket/a": "image path outside of the input",
        "/etc/passwd": "image path outside of the input",
        "https://example.org/a.jpg": "a URL, not downloaded",
        "HTTP://x/a": "a URL, not downloaded",
        "nothing": "image file not found",
        "": "no image path",
        None: "no image path",
        "deep": "image file not readable",
        "x" * 5000: "image file not readable",
    }
    found = readers.read_pictures(list(expected), [str(base)] * len(expected), str(base))
    assert [str(data) if isinstance(data, Exception) else data for data in found] == list(expected.values())
    unusable = str(readers.read_picture("a\0b", str(base), str(base)))
    assert unusable in ("invalid image path", "image file not found")


def test_only_regular_files_are_opened_and_links_to_them(tmp_path):
    """Hugging Face's cache consists of links. A FIFO would be waited for without end."""
    (tmp_path / "file").write_bytes(b"picture")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link to a fifo").symlink_to(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    expected = {"file": b"picture", "link": b"picture", "dangling": "image file not found"}
    expected |= dict.fromkeys(["fifo", "link to a fifo", "device"], "not a regular file")
    found = readers.read_pictures(list(expected), [str(tmp_path)] * len(expected), str(tmp_path))
    assert [str(data) if isinstance(data, Exception) else data for data in found] == list(expected.values())


def test_a_column_called_path_is_refused(tmp_path):
    pq.write_table(pa.table({"hash": [1], "caption": ["a"], "path": ["a.jpg"]}), tmp_path / "a.parquet")
    config = PreprocessingConfig(storage=str(tmp_path), input_uri=str(tmp_path / "a.parquet"), image_column="path")
    with pytest.raises(ValueError, match="A column called 'path' cannot be used, .*: rename it"):
        prepare.prepare_job(config)


def test_columns_that_samples_do_not_have_are_named(input_folders, tmp_path):
    refused = {
        "id_column='hash' is not a column of .*00000.tar: it has __key__, .*caption": ("webdataset", "id_column"),
        "row_filter='hash' is not a column of .*metadata.jsonl: it has key, text, width": ("imagefolder", "row_filter"),
    }
    for sentence, (name, parameter) in refused.items():
        value = "hash" if parameter == "id_column" else "hash < 0.5"
        with pytest.raises(ValueError, match=sentence):
            prepare.prepare_job(config_of(input_folders, name, tmp_path, **{parameter: value}))
    assert not pathlib.Path(tmp_path, "latents").exists()


@pytest.mark.parametrize(
    ("write", "rejected"),
    [
        pytest.param(own_data.write_to_disk, [], id="save_to_disk"),
        pytest.param(functools.partial(own_data.write_img2dataset, output_format="webdataset"), [], id="tars"),
        pytest.param(
            functools.partial(own_data.write_img2dataset, output_format="parquet"), ["no image bytes"], id="Parquet"
        ),
    ],
)
def test_what_other_tools_write_is_read_by_the_name_of_its_folder(write, rejected, tmp_path):
    """As a job and as an online run read it; `tests/notebooks` encodes such a folder by README's commands."""
    write(tmp_path / "pictures")
    rows = test_layouts.both(tmp_path / "pictures").values()
    assert [reason for _, reason in rows if reason] == rejected
    assert [text[:8] for text, reason in rows if not reason] == ["a cut of"] * 120
    counts = test_layouts.found(tmp_path / "pictures").counts
    assert counts["found"] == counts["read"] + sum(counts["left_out"].values())
