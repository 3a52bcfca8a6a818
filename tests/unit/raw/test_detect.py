"""A folder is read in its format, by its columns. Its files are counted. Unusable data is refused in a sentence."""

import dataclasses
import gzip
import json
import os

import datasets
import pyarrow as pa
import pytest

from helpers.encode import job
from helpers.production.readers import detect, folder
from helpers.raw import inputs, readers
from tests.raw_data import (
    as_arrow,
    captioned,
    config_of,
    found,
    good,
    hugging_face,
    image,
    job_rows,
    refusal,
    rows_of,
    table,
    tar_of,
    write,
)


def chosen(uri, **parameters):
    config = found(uri, **parameters).config
    return config.input_format, config.image_column, config.caption_column, config.id_column


def counts(uri):
    return {kind: (number, read) for kind, number, read, _ in found(uri).files}


def img2dataset(output_format):
    about = {f"0000{n}": json.dumps({"key": f"0000{n}", "caption": f"a cat {n}", "width": 64}) for n in range(3)}
    members = {}
    for key, text in about.items():
        members |= {f"{key}.jpg": image(kind="JPEG"), f"{key}.json": text, f"{key}.txt": json.loads(text)["caption"]}
    urls = pa.table({"url": ["https://a/b.jpg"], "caption": ["a"], "key": ["00000"]})
    rows = table(list(about), caption=[f"a cat {n}" for n in range(3)]).rename_columns(["jpg", "caption", "key"])
    return {
        "webdataset": {"00000.tar": tar_of(members), "00001.tar": tar_of({}), "00000.parquet": urls},
        "imagefolder": {**{f"00000/{name}": data for name, data in members.items()}, "00000.parquet": urls},
        "parquet": {"00000.parquet": rows},
    }[output_format] | {"00000_stats.json": "{}"}


@pytest.mark.parametrize(
    ("output_format", "columns"),
    [
        ("webdataset", ("image", "caption|txt|text")),
        ("imagefolder", ("file_name", "caption|text|txt")),
        ("parquet", ("jpg", "caption")),
    ],
)
def test_what_img2dataset_writes_is_read(tmp_path, output_format, columns):
    path = write(tmp_path / "i", **img2dataset(output_format))
    assert chosen(path) == (output_format, *columns, "key")
    assert rows_of(path) == {f"0000{n}": (f"a cat {n}", "") for n in range(3)}


@pytest.mark.parametrize(
    "files",
    [
        {"a.parquet": hugging_face(range(5))},
        {"train/a.arrow": as_arrow(hugging_face(range(5)), batch_rows=2), "train/cache-1.arrow": "", "a.json": "{}"},
        {"a.arrow": as_arrow(hugging_face(range(5)), is_stream=False, batch_rows=2)},
    ],
    ids=["parquet", "save_to_disk", "arrow file"],
)
def test_what_hugging_face_writes_is_read(tmp_path, files):
    path = write(tmp_path / "h", **files)
    assert chosen(path)[1:] == ("image", "text", readers.ROW_NUMBER)
    name = next(iter(files))
    assert rows_of(path) == {f"{name}:{number}": (f"a cat {number}", "") for number in range(5)}


def test_what_the_library_of_hugging_face_saves_is_read(tmp_path):
    rows = [{"image": {"bytes": image(), "path": None}, "text": f"a cat {number}"} for number in range(3)]
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())})
    saved.save_to_disk(tmp_path / "d")
    assert [caption for caption, reason in rows_of(tmp_path / "d").values()] == ["a cat 0", "a cat 1", "a cat 2"]


def test_captions_beside_images_and_in_tables_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "UNIT_IMAGES", 4)
    files = {**captioned(range(6), "k/"), **captioned("67", "deep/er/", "CAPTION"), "k/alone.jpg": image()}
    files |= {"k/8.jpg": image(), "k/8.json": '{"caption": "a cat 8"}', "k/5.json": "{}"}
    tables = {"t/metadata.csv": "file_name,text\n0.png,a\ndeep/1.png,b\n", "t/0.png": image(), "t/deep/1.png": image()}
    path = write(tmp_path / "f", **files, **tables, **{"t/0.txt": "of a table's folder"})
    expected = {f"{'deep/er' if n in (6, 7) else 'k'}/{n}.jpg": (f"a cat {n}", "") for n in range(9)}
    assert rows_of(path) == expected | {"t/metadata.csv:0": ("a", ""), "t/metadata.csv:1": ("b", "")}
    units = [os.path.relpath(one, path) for one in found(path).paths]
    assert units == ["deep/er/6.jpg#2", "k/0.jpg#4", "k/4.jpg#3", "t/metadata.csv"]
    assert counts(path) == {detect.IMAGE: (12, 11), detect.SIDE_CAR: (11, 10), detect.TABLE: (1, 1)}


def test_a_table_lies_beside_its_images(tmp_path):
    for name, data in (
        ("metadata.jsonl", '{"file_name": "0.png", "text": "a"}\n{"file_name": '),
        ("Metadata.CSV", "filename,caption\n0.png,a\n"),
    ):
        path = write(tmp_path / name, **{f"train/{name}": data, "train/0.png": image()})
        rows = rows_of(path)
        assert rows.pop(f"train/{name}:0") == ("a", "") and all(reason for _, reason in rows.values())


def test_the_format_with_most_bytes_is_taken_and_files_are_counted(tmp_path):
    noise = os.urandom(10_000)
    rows = table("345", jpg=[image() + noise] * 3)
    path = write(
        tmp_path / "m", **captioned("12"), **{"a.tar": tar_of({"0.jpg": image(), "0.txt": "a"}), "b.parquet": rows}
    )
    write(path, **{"README.md": "", ".DS_Store": "", "_temporary/0.parquet": rows, "__MACOSX/._a.jpg": ""})
    os.symlink("nowhere", path / "c.jpg")
    assert chosen(path)[0] == "parquet" and set(job_rows(path)) == {"3", "4", "5"}
    assert counts(path) == {
        detect.BROKEN: (1, 0),
        detect.HIDDEN: (3, 0),
        detect.IMAGE: (2, 0),
        detect.OTHER: (1, 0),
        detect.SIDE_CAR: (2, 0),
        "Parquet file": (1, 1),
        "WebDataset tar": (1, 0),
    }
    assert set(job_rows(path, input_format="webdataset")) == {"0"}
    assert len(job_rows(path, input_format="imagefolder")) == 2


def test_a_pattern_gives_the_files_that_match_it(tmp_path):
    names = ["a/0.parquet", "a/1.PARQ", "a/b/2.parquet", "c/3.parquet"]
    path = write(tmp_path / "p", **dict.fromkeys(names, table()), **{"a/4.txt": "", ".cache/5.parquet": table()})
    patterns = {
        "a/*.parquet": [0],
        "*/*.parquet": [0, 3],
        "**/*.parquet": [0, 2, 3],
        "a/[0-9].*": [0, 1],
        "a/?.PARQ": [1],
        "c/[!0].parquet": [3],
        "c/3.parquet": [3],
        ".cache": [],
        "": range(4),
    }
    columns = {"input_format": "parquet", "image_column": "jpg", "caption_column": "caption", "id_column": "hash"}
    for pattern, numbers in patterns.items():
        paths, _ = inputs.list_inputs(config_of(path / pattern, **columns))
        assert paths == [f"{path}/{names[number]}" for number in numbers] or pattern == ".cache", pattern
    assert paths and inputs.list_inputs(config_of(path / ".cache", **columns))[0] == [f"{path}/.cache/5.parquet"]


def test_a_pattern_may_match_some_images_of_a_folder(tmp_path):
    path = write(tmp_path / "d", **captioned(range(5)))
    assert rows_of(path / "[13].*") == {f"{n}.jpg": (f"a cat {n}", "") for n in (1, 3)}


def test_ids_are_a_column_without_repeats_or_made(tmp_path):
    for ids, right in (
        (["1", "2"], "hash"),
        (["1", "1"], readers.ROW_NUMBER),
        (["1", None], "hash"),
        ([None] * 2, readers.ROW_NUMBER),
    ):
        assert chosen(write(tmp_path / str(ids), **{"a.parquet": table(hash=ids)}))[3] == right
    captions = [f"a cat {row}" for row in range(150)]
    path = write(tmp_path / "p", **{"a.parquet": pa.table({"jpg": [image()] * 150, "caption": captions})})
    assert rows_of(path) == {f"a.parquet:{row}": (caption, "") for row, caption in enumerate(captions)}


def test_images_whose_first_ones_are_missing_are_found_by_name(tmp_path):
    """As img2dataset stores what it could not download."""
    for number, images in enumerate([[None] * 39 + [image()], pa.nulls(40), pa.nulls(40, pa.binary())]):
        rows = pa.table({"url": ["https://a/b.jpg"] * 40, "caption": ["a"] * 40, "jpg": images})
        assert chosen(write(tmp_path / str(number), **{"a.parquet": rows}))[1] == "jpg"


def test_a_resumed_job_keeps_its_columns_if_the_files_are_the_same(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table(key=["x", "y"])})
    begun = {"id_column": "key", "input_crc32": inputs.checksum(found(path).listing)}
    assert detect.detect(config_of(path)).config.id_column == "hash"
    assert detect.detect(config_of(path), begun).config.id_column == "key"
    write(path, **{"b.parquet": table("34", key=["z", "w"])})
    assert detect.detect(config_of(path), begun).config.id_column == "hash"


@pytest.mark.parametrize("end", ["parquet", "tar", "arrow"])
def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path, capsys, end):
    samples = {f"{n}.{kind}": data for n in range(3) for kind, data in (("jpg", image()), ("txt", "a"))}
    whole = {"parquet": table("1"), "tar": tar_of(samples), "arrow": as_arrow(table("1"))}[end]
    damaged = [b"", b"<html>" * 99] + ([whole[:2000], whole[:-11_000]] if end == "tar" else [])
    for number, data in enumerate(damaged):
        path = write(tmp_path / str(number), **{f"a.{end}": data, f"b.{end}": whole})
        assert len(rows_of(path)) == (3 if end == "tar" else 1)
        assert f"{path}/a.{end} cannot be read, and is left out." in capsys.readouterr().out
        assert "is not a readable" in refusal(write(tmp_path / f"alone{number}", **{f"a.{end}": data}))


# ---- what is refused

REFUSED = {
    "holds no captioned images": {"a.txt": "a", "b.pdf": ""},
    "holds 2 images without captions": {"a.jpg": image(), "b.jpg": image()},
    "is a compressed tar": {"a.tar.gz": gzip.compress(tar_of(captioned("1")))},
    "a.tar is not a readable WebDataset tar": {"a.tar": gzip.compress(tar_of(captioned("1")))},
    "holds no rows": {"a.tar": tar_of({})},
    "do not stand together": {"a.tar": tar_of({"1.jpg": image(), "2.jpg": image(), "1.txt": "a"})},
    "is not a readable WebDataset tar": {"a.tar": tar_of(captioned("1")) + tar_of(captioned("2"))},
    "such as image_column='left'": {"a.parquet": pa.table({"left": [image()], "right": [image()], "text": ["a"]})},
    "has no column caption, text or txt": {"a.parquet": pa.table({"jpg": [image()], "prompt": ["a"]})},
    "holds URLs (https://a/b.jpg)": {"a.parquet": pa.table({"URL": ["https://a/b.jpg"], "TEXT": ["a"]})},
    "metadata.csv is not UTF-8": {"metadata.csv": "file_name,text\n".encode("utf-16-le")},
    "is not a readable table": {"metadata.csv": "file_name,text\n1,2,3\n"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_data_that_cannot_be_used_is_refused_in_a_sentence(tmp_path, sentence):
    assert sentence in refusal(write(tmp_path / "d", **REFUSED[sentence]))


PARAMETERS = {
    "image_column='x' is not a column of": {"image_column": "x"},
    "image_column='width' holds int64": {"image_column": "width"},
    "compares values of different types": {"row_filter": "width > 'a'"},
    "one caption a row": {"max_captions": 2, "caption_column": "caption"},
    "name that one alone": {"caption_column": ["caption", "all"]},
    "(it has 1 .parquet)": {"input_format": "webdataset"},
}


@pytest.mark.parametrize("sentence", PARAMETERS)
def test_parameters_that_do_not_fit_the_data_are_refused_in_a_sentence(tmp_path, sentence):
    path = write(tmp_path / "p", **{"a.parquet": table(width=[1, 2], all=[["a"], ["b"]])})
    assert sentence in refusal(path, **PARAMETERS[sentence])


def test_a_later_file_that_does_not_fit_is_named(tmp_path):
    changes = {"caption": [1, 2], "jpg": [1, 2], "hash": [[1], [2]], "width": ["1", "2"]}
    for name, values in changes.items():
        files = {"a.parquet": table(width=[1, 2]), "b.parquet": table("34", **{"width": [1, 2], name: values})}
        said = refusal(write(tmp_path / name, **files), row_filter="width > 0", id_column="hash")
        assert "b.parquet" in said and name in said
    files = {"a.parquet": table(), "b.parquet": table().drop_columns("caption")}
    assert "caption_column='caption' is not a column of" in refusal(write(tmp_path / "lacks", **files))


def test_names_that_lead_nowhere_are_refused_if_the_format_would_read_them(tmp_path):
    path = write(tmp_path / "a", **{"a.parquet": table()})
    os.symlink(path, path / "again")
    assert rows_of(path) == good("a", "b")
    os.symlink("not-fetched", path / "b.parquet")
    assert "b.parquet is a link that leads nowhere" in refusal(path)
    assert f"{path}/no" in refusal(path / "no")
    assert "give a folder in which each has its caption beside it" in refusal(
        f"{write(tmp_path / 'k', **captioned('1'))}/*.jpg"
    )


def test_the_core_names_what_is_left_open(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table()})
    with pytest.raises(ValueError, match="input_format='auto' is left open"):
        inputs.list_inputs(config_of(path))
    with pytest.raises(ValueError, match="id_column=None is left open"):
        inputs.reader(dataclasses.replace(found(path).config, id_column=None))
    assert job.plan_segments(found(path).paths, found(path).config)[0].rows == 2
