"""A folder of captioned pictures in any usual layout gets in as it is, and every file is accounted for."""

import dataclasses
import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.encode import job, prepare
from helpers.latents.manifest import Manifest
from helpers.production.readers import detect
from helpers.raw import inputs, readers
from tests.unit.raw.test_as_it_is import as_arrow as arrow
from tests.unit.raw.test_as_it_is import config_of, online_rows, picture, refusal, rows_of, table, tar_of, write

HUGGING_FACE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def captioned(numbers, folder="", end="txt"):
    """{name: data} of pictures with their captions beside them."""
    files = {f"{folder}{number}.jpg": picture(kind="JPEG") for number in numbers}
    return files | {f"{folder}{number}.{end}": f"a cat {number}" for number in numbers}


def found(uri, **parameters):
    return detect.detect(config_of(uri, **parameters))


def taken(uri, **parameters):
    """The parameters that `detect.detect` chooses."""
    config = found(uri, **parameters).config
    return config.input_format, config.image_column, config.caption_column, config.id_column


def hugging_face(numbers):
    pictures = pa.array([{"bytes": picture(), "path": f"{number}.png"} for number in numbers], HUGGING_FACE)
    return pa.table({"image": pictures, "text": [f"a cat {number}" for number in numbers]})


def both(uri, **parameters):
    """The rows of a job, which are those of an online run."""
    rows = rows_of(uri, **parameters)
    trained_on, rejected = online_rows(uri, **parameters)
    assert trained_on | {key: row for key, row in rows.items() if row[1] in rejected} == rows
    return rows


# ---- layouts


@pytest.mark.parametrize("end", ["txt", "caption", "TXT"])
def test_captions_beside_pictures_are_read(tmp_path, end):
    path = write(tmp_path / "k", **captioned("12", "1_name/", end), **captioned("34", "deep/er/", end))
    expected = {f"1_name/{key}.jpg": (f"a cat {key}", "") for key in "12"}
    expected |= {f"deep/er/{key}.jpg": (f"a cat {key}", "") for key in "34"}
    assert both(path) == rows_of(path, input_format="imagefolder") == expected
    assert taken(path) == ("imagefolder", "file_name", "text", "__row_number__")


def test_folders_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(detect, "UNIT_PICTURES", 4)
    path = write(tmp_path / "k", **captioned(range(10)), **{"5#2.jpg": picture(), "5#2.txt": "b"})
    parts = [os.path.relpath(one, path) for one in detect.list_inputs(str(path))]
    assert parts == ["0.jpg#4", "4.jpg#4", "7.jpg#3"]
    assert both(path) == {f"{n}.jpg": (f"a cat {n}", "") for n in range(10)} | {"5#2.jpg": ("b", "")}


def test_a_text_holds_a_caption_a_line_where_several_are_wanted(tmp_path):
    tar = {"a.tar": tar_of(("0.jpg", picture()), ("0.txt", b"a cat\na tabby asleep\n"))}
    folder = {"0.jpg": picture(), "0.txt": "a cat\na tabby asleep\n"}
    for name, files in {"folder": folder, "tar": tar}.items():
        path = write(tmp_path / name, **files)
        config = found(path, max_captions=2).config
        rows = inputs.to_raw_rows(detect.first_rows(config, 9), config)
        assert [rows["caption"].to_pylist(), rows["caption_2"].to_pylist()] == [["a cat"], ["a tabby asleep"]]
        assert [caption for caption, _ in both(path).values()] == ["a cat\na tabby asleep"]


def test_tables_and_captions_beside_pictures_are_read_by_one_name(tmp_path):
    lines = "file_name,text,note\n0.png,a,\ndeep/1.png,b,\n"
    files = {"t/metadata.csv": lines, "t/0.png": picture(), "t/deep/1.png": picture(), "t/deep/2.png": picture()}
    path = write(tmp_path / "f", **files, **captioned("34", "k/"), **{"t/0.txt": "of a table's folder"})
    expected = {"t/metadata.csv:0": ("a", ""), "t/metadata.csv:1": ("b", "")}
    assert both(path) == expected | {f"k/{key}.jpg": (f"a cat {key}", "") for key in "34"}
    left_out = {detect.WHY_LEFT_OUT[detect.PICTURE]: 1, detect.WHY_LEFT_OUT[detect.SIDE_CAR]: 1}
    assert found(path).counts == {"found": 9, "read": 7, "left_out": left_out}


def test_hugging_faces_parquet_needs_no_columns_named(tmp_path):
    path = write(tmp_path / "h", **{"a.parquet": hugging_face("12"), "b.parquet": hugging_face("34")})
    expected = {f"{file}.parquet:{row}": (f"a cat {key}", "") for file, row, key in ["a01", "a12", "b03", "b14"]}
    assert both(path) == {key: expected[key] for key in expected}
    assert taken(path) == ("parquet", "image", "text", "__row_number__")


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_save_to_disk_writes_is_read(tmp_path, is_stream):
    data = arrow(hugging_face(range(5)), is_stream, batch_rows=2)
    files = {"train/data-00000-of-00001.arrow": data, "train/state.json": "{}", "train/dataset_info.json": "{}"}
    path = write(tmp_path / "d", **files, **{"train/cache-0123.arrow": data, "dataset_dict.json": "{}"})
    name = "train/data-00000-of-00001.arrow"
    assert both(path) == {f"{name}:{number}": (f"a cat {number}", "") for number in range(5)}
    counts = found(path).counts
    assert (counts["found"], counts["read"], counts["left_out"]["caches of `datasets`"]) == (5, 1, 1)


def test_rows_of_an_arrow_file_are_read_from_where_they_are(tmp_path):
    path = str(
        write(tmp_path, **{"a.arrow": arrow(table("123456789"[:4], caption=list("abcd")), batch_rows=3)}) / "a.arrow"
    )
    read = readers.Arrow()
    places = pa.concat_tables(read.locate(path, ["caption"]))
    pieces = [places.take([3]), places.take([0, 2])]
    assert [one["hash"].to_pylist() for one in read.read_located(path, pieces, ["hash"])] == [["4"], ["1", "3"]]
    assert read.row_groups(path) == [3, 1]


def test_img2datasets_outputs_are_read(tmp_path):
    about = {n: json.dumps({"key": f"0000{n}", "caption": f"a cat {n}", "width": 64}) for n in range(3)}
    beside = {
        "00000_stats.json": "{}",
        "00000.parquet": pa.table({"url": ["https://a/b.jpg"], "caption": ["a"], "key": ["00000"]}),
    }
    files = {f"00000/0000{n}.{end}": data for n in range(3) for end, data in samples(n, about[n]).items()}
    members = [
        (name.removeprefix("00000/"), data.encode() if isinstance(data, str) else data) for name, data in files.items()
    ]
    expected = {f"0000{n}": (f"a cat {n}", "") for n in range(3)}
    pictures = [picture(kind="JPEG")] * 3
    rows = pa.table(
        {"jpg": pictures, "caption": [f"a cat {n}" for n in range(3)], "key": list(expected), "url": ["u"] * 3}
    )
    layouts = {
        "imagefolder": {**beside, **files},
        "webdataset": {**beside, "00000.tar": tar_of(*members), "00001.tar": tar_of()},  # no picture was there
        "parquet": {"00000_stats.json": "{}", "00000.parquet": rows},
    }
    for name, content in layouts.items():
        path = write(tmp_path / name, **content)
        assert (
            both(path) == both(path, row_filter="width > 3") == expected
            if name != "parquet"
            else both(path) == expected
        )
        assert taken(path)[0] == name and taken(path)[2:] == ("caption", "key")
        counts = found(path).counts
        assert counts["found"] == counts["read"] + sum(counts["left_out"].values())
        assert counts["found"] - counts["read"] == (1 if name == "parquet" else 2)


def samples(number, about):
    return {"jpg": picture(kind="JPEG"), "json": about, "txt": f"a cat {number}"}


def test_of_several_layouts_the_one_with_most_pictures_is_taken(tmp_path):
    one = tar_of(("0.jpg", picture()), ("0.txt", b"a"))
    path = write(tmp_path / "m", **captioned("12"), **{"a.tar": one, "b.parquet": table("345", caption=list("cde"))})
    assert set(rows_of(path)) == {"3", "4", "5"}
    files = {kind: row for kind, *row in found(path).files}
    assert files["WebDataset tar"] == [1, 0, "of another layout: input_format='webdataset' reads them"]
    assert files["Parquet file"][:2] == [1, 1] and files["picture"][:2] == [2, 0]
    assert dict((name, why) for name, _, why in found(path).columns)["input_format"].startswith(
        "most pictures; parquet: "
    )
    assert (
        set(rows_of(path, input_format="webdataset")) == {"0"} and len(rows_of(path, input_format="imagefolder")) == 2
    )


def test_captions_of_one_folder_may_be_in_texts_and_in_json(tmp_path):
    """And those of a table in a column of another name."""
    files = {"k/a.jpg": picture(), "k/a.json": '{"text": "a"}', "k/b.jpg": picture(), "k/b.caption": "b"}
    files |= {"k/c.jpg": picture(), "k/c.json": '{"caption": "c"}', "t/d.png": picture()}
    path = write(tmp_path / "k", **files, **{"t/metadata.csv": "file_name,caption\nd.png,d\n"})
    assert {row[0] for row in both(path).values()} == set("abcd")


def test_of_two_texts_beside_a_picture_one_is_read_and_one_is_counted(tmp_path):
    files = {
        "a.jpg": picture(),
        "a.txt": "a",
        "a.caption": "b",
        "a.json": '{"key": "k"}',
        "b.JFIF": picture(kind="JPEG"),
    }
    path = write(
        tmp_path / "k", **files, **{"b.Caption": "b", "c.jp2": "", "c.txt": "c", "d.psd": "8BPS", "d.txt": "d"}
    )
    assert both(path) == {
        "a.jpg": ("a", ""),
        "b.JFIF": ("b", ""),
        "c.jp2": (None, "no image bytes"),
        "d.psd": (None, "format not supported: PSD"),
    }
    assert found(path).counts == {"found": 10, "read": 9, "left_out": {detect.WHY_LEFT_OUT[detect.SIDE_CAR]: 1}}


def test_pictures_of_one_name_share_their_caption(tmp_path):
    path = write(tmp_path / "k", **{"a.jpg": picture(), "a.png": picture(), "a.txt": "a"})
    assert both(path) == {"a.jpg": ("a", ""), "a.png": ("a", "")}
    assert found(path).counts == {"found": 3, "read": 3, "left_out": {}}


def test_a_file_without_rows_decides_nothing(tmp_path):
    good = tar_of(("0.jpg", picture()), ("0.txt", b"a"))
    assert both(write(tmp_path / "tars", **{"a.tar": tar_of(), "b.tar": good})) == {"0": ("a", "")}
    head, line = "file_name,text\n", "0.png,a\n"
    path = write(tmp_path / "t", **{"a/metadata.csv": head, "b/metadata.csv": head + line, "b/0.png": picture()})
    assert both(path) == {"b/metadata.csv:0": ("a", "")}
    assert "holds no rows (1 files" in refusal(write(tmp_path / "none", **{"a.tar": tar_of()}))


def test_a_table_of_datasets_lies_beside_its_pictures(tmp_path):
    rows = pa.table({"file_name": ["0.png"], "text": ["a"]})
    path = write(tmp_path / "f", **{"train/metadata.parquet": rows, "train/0.png": picture()})
    assert both(path) == {"train/metadata.parquet:0": ("a", "")}


# ---- columns


def test_a_column_of_pictures_is_found_where_the_first_ones_are_missing(tmp_path):
    """As img2dataset stores what it could not download."""
    rows = {"url": ["https://a/b.jpg"] * 40, "caption": ["a"] * 40, "key": list(map(str, range(40)))}
    for number, pictures in enumerate([[None] * 39 + [picture()], pa.nulls(40), pa.nulls(40, pa.binary())]):
        path = write(tmp_path / str(number), **{"a.parquet": pa.table({**rows, "jpg": pictures})})
        assert taken(path)[1] == "jpg"


def test_a_table_may_call_its_pictures_differently(tmp_path):
    path = write(tmp_path / "t", **{"metadata.csv": "filename,caption\n0.png,a\n", "0.png": picture()})
    assert both(path) == {"metadata.csv:0": ("a", "")}
    assert found(path).counts == {"found": 2, "read": 2, "left_out": {}}


def test_files_that_no_layout_reads_have_the_reason_of_their_kind(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table(), "a_stats.json": "{}", "b.tar.gz": "", "c.tgz": ""})
    tars, texts = (detect.WHY_LEFT_OUT[kind] for kind in (detect.TAR, detect.SIDE_CAR))
    assert found(path).counts == {"found": 4, "read": 1, "left_out": {tars: 2, texts: 1}}


def test_a_column_of_ids_is_taken_if_none_is_missing_or_repeated(tmp_path):
    for name, ids, right in (("a", ["1", "2"], "key"), ("b", ["1", "1"], "id"), ("c", ["1", None], "id")):
        path = write(
            tmp_path / name,
            **{"a.parquet": table("78").rename_columns(["jpg", "caption", "id"]).append_column("key", [ids])},
        )
        assert taken(path)[3] == right
    again = {f"{name}.tar": tar_of(("0.jpg", picture()), ("0.txt", b"a")) for name in "ab"}
    path = write(tmp_path / "tars", **again)
    assert both(path) == {"a.tar:0": ("a", ""), "b.tar:0": ("a", "")}


def test_pictures_that_rows_name_are_read(tmp_path):
    rows = pa.table({"image": ["p/0.png", "p/1.png"], "text": ["a", "b"]})
    files = {"0.parquet": b"<html>", "1.parquet": rows, "p/0.png": picture(), "p/1.png": picture()}
    path = write(tmp_path / "p", **files)
    assert both(path) == {"1.parquet:0": ("a", ""), "1.parquet:1": ("b", "")}
    assert found(path).counts == {"found": 4, "read": 4, "left_out": {}}  # that 0.parquet cannot be read is known later


def test_places_count_through_a_whole_file(tmp_path):
    captions = [f"a cat {row}" for row in range(150)]
    path = write(tmp_path / "p", **{"a.parquet": pa.table({"jpg": [picture()] * 150, "caption": captions})})
    expected = {f"a.parquet:{row}": (caption, "") for row, caption in enumerate(captions)}
    assert rows_of(path) == expected and online_rows(path)[0] == expected


def test_a_resumed_job_keeps_what_it_began_with(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table(key=["x", "y"])})
    config = config_of(path, id_column="key")
    parameters = prepare.prepare_job(config).parameters
    left_open = dataclasses.replace(config, id_column=None)
    assert prepare.prepare_job(left_open).config.id_column == "hash"
    assert detect.look(left_open, parameters).config.id_column == "key"
    write(path, **{"b.parquet": table("34", key=["z", "w"])})  # another input
    assert detect.look(left_open, parameters).config.id_column == "hash"


# ---- every file is accounted for


def test_files_are_read_or_left_out_for_a_reason(tmp_path):
    files = {
        "a.jpg": picture(),
        "a.txt": "a",
        "alone.jpg": picture(),
        "README.md": "",
        ".DS_Store": "",
        "_DSC1.JPG": picture(),
    }
    files |= {
        "__MACOSX/._a.jpg": "",
        ".ipynb_checkpoints/a.txt": "",
        "old_metadata.csv": "",
        "_DSC1.txt": "b",
        "b.txt": "b",
    }
    path = write(tmp_path / "k", **files)
    os.symlink("nowhere", path / "c.jpg")
    os.symlink("itself.jpg", path / "itself.jpg")
    assert set(rows_of(path)) == {"a.jpg", "_DSC1.JPG"}
    assert found(path).counts == {
        "found": 13,
        "read": 4,
        "left_out": {
            detect.WHY_LEFT_OUT[detect.BROKEN]: 2,
            detect.WHY_LEFT_OUT[detect.SIDE_CAR]: 1,
            detect.WHY_LEFT_OUT[detect.HIDDEN]: 3,
            "of no layout": 1,
            detect.WHY_LEFT_OUT[detect.PICTURE]: 1,
            detect.WHY_LEFT_OUT[detect.OTHER_TABLE]: 1,
        },
    }


@pytest.mark.parametrize("damaged", ["b.parquet", "b.tar", "b.arrow"])
def test_a_file_that_cannot_be_read_is_left_out_counted_and_named(tmp_path, capsys, damaged):
    good = {
        "a.parquet": table("1"),
        "a.tar": tar_of(("1.jpg", picture()), ("1.txt", b"a")),
        "a.arrow": arrow(table("1")),
    }
    end = damaged[1:]
    for number, data in enumerate((b"", b"<html>" * 99)):
        path = write(tmp_path / str(number), **{f"a{end}": good[f"a{end}"], damaged: data, f"c{end}": good[f"a{end}"]})
        assert len(rows_of(path)) == 2
        assert f"{path}/{damaged} cannot be read, and is left out." in capsys.readouterr().out
        checked = prepare.prepare_job(config_of(path))
        (segment,) = job.plan_segments(checked.paths, checked.config)
        entry = job.segment_entry(segment, [])
        manifest = Manifest.of(
            [entry], **checked.description, resolutions=[32], id_type="string", job=checked.parameters
        )
        assert manifest.job["input_files"] == {
            "found": 3,
            "read": 2,
            "left_out": {"that cannot be read": 1},
            "unreadable": [damaged],
        }
        assert len(online_rows(path)[0]) == 2
        refused = refusal(write(tmp_path / f"alone{number}", **{damaged: data}))
        assert damaged in refused and "is not a readable" in refused


@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 6])
def test_a_tar_that_was_cut_short_is_not_read_in_part(tmp_path, blocks):
    """Wherever it was cut: `tarfile` takes a header that is not there, or cannot be read, for the end."""
    members = [(f"{number}.{end}", data) for number in range(3) for end, data in (("jpg", picture()), ("txt", b"a"))]
    whole = tar_of(*members)
    for cut in (512 * blocks, 512 * blocks + 100):
        path = write(
            tmp_path / str(cut), **{"a.tar": tar_of(("z.jpg", picture()), ("z.txt", b"z")), "b.tar": whole[:cut]}
        )
        assert rows_of(path) == {"z": ("z", "")}
    damaged = bytearray(whole)
    damaged[512 * 2 + 148 : 512 * 2 + 156] = b"99999999"  # the checksum of a header
    assert "is not a readable WebDataset tar" in refusal(write(tmp_path / "header", **{"a.tar": bytes(damaged)}))


def test_a_damaged_page_is_named(tmp_path):
    data = pa.BufferOutputStream()
    pq.write_table(table(), data)
    damaged = bytearray(data.getvalue().to_pybytes())
    damaged[30:150] = b"\xff" * 120
    path = write(tmp_path / "p", **{"a.parquet": bytes(damaged), "b.parquet": table("34")})
    assert detect.first_rows(found(path).config, 9)["hash"].to_pylist() == ["3", "4"]
    with pytest.raises(readers.Unreadable, match=r"a\.parquet is not a readable Parquet file: remove or replace it"):
        rows_of(path)


# ---- bad input


def test_an_input_without_captioned_pictures_is_refused_with_what_is_there(tmp_path):
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == (
        f"input_uri='{tmp_path}/empty' holds no file of captioned pictures: give a folder of pictures with captions, "
        "Parquet files or tars."
    )
    assert "does not exist: give" in refusal(tmp_path / "nowhere")
    texts = write(tmp_path / "texts", **{"a.txt": "a", "b.txt": "b", "c.pdf": "c"})
    assert "holds no file of captioned pictures (it has 2 .txt, 1 .pdf)" in refusal(texts)
    alone = write(tmp_path / "alone", **{"a.jpg": picture(), "b.jpg": picture()})
    sentence = refusal(alone)
    assert "holds 2 pictures and captions for none of them (it has 2 .jpg): write each one's caption" in sentence
    assert sentence == refusal(alone, input_format="imagefolder")
    for name in ("a.jpg", "*.jpg", "**/*"):
        assert refusal(f"{alone}/{name}") == (
            f"input_uri='{alone}/{name}' names pictures, whose captions are looked for in folders: give '{alone}'."
        )
    side_cars = write(tmp_path / "k", **captioned("12"))
    for wrong, what in (("parquet", "Parquet file"), ("webdataset", "WebDataset tar"), ("arrow", "Arrow file")):
        sentence = refusal(side_cars, input_format=wrong)
        assert f"holds no {what} (it has 2 .jpg, 2 .txt)" in sentence and 'or input_format="auto"' in sentence
    compressed = write(tmp_path / "z", **{"a.tar.gz": gzip.compress(tar_of(("0.jpg", picture())))})
    assert "a.tar.gz is a compressed tar" in refusal(compressed)


def test_two_tables_that_name_one_picture_are_refused(tmp_path):
    files = {"metadata.csv": "file_name,text\n0.png,a\n", "metadata.jsonl": '{"file_name": "0.png", "text": "a"}'}
    path = write(tmp_path / "f", **files, **{"0.png": picture(), "1.png": picture()})
    assert refusal(path) == (
        f"{path}/metadata.csv and {path}/metadata.jsonl both name the picture 0.png: remove one of the two tables."
    )
    for name in (f"{path}/0.png", "./0.png"):
        write(path, **{"metadata.jsonl": json.dumps({"file_name": name, "text": "a"})})
        assert "both name the picture 0.png" in refusal(path)
    write(path, **{"metadata.jsonl": '{"file_name": "1.png", "text": "b"}'})
    assert both(path) == {"metadata.csv:0": ("a", ""), "metadata.jsonl:0": ("b", "")}


def test_tables_of_other_kinds_and_of_other_folders_may_not_name_one_picture_either(tmp_path):
    one, rows = {"s/0.png": picture()}, [{"file_name": "0.png", "text": "a"}]
    lines, parquet = "file_name,text\n0.png,a\n", pa.Table.from_pylist(rows)
    above = pa.Table.from_pylist([{"file_name": "s/0.png", "text": "a"}])
    pairs = [
        {"s/metadata.csv": lines, "s/metadata.parquet": parquet},
        {"metadata.csv": lines.replace("0", "s/0"), "s/metadata.csv": lines},
        {"metadata.parquet": above, "s/metadata.csv": lines},
        {"metadata.parquet": above, "s/metadata.parquet": parquet},
        {"s/metadata.csv": lines.replace("file_name", "image"), "s/metadata.jsonl": json.dumps(rows[0])},
    ]
    for number, tables in enumerate(pairs):
        path = write(tmp_path / str(number), **one, **tables)
        first, second = (f"{path}/{name}" for name in tables)
        right = f"{first} and {second} both name the picture s/0.png: remove one of the two tables."
        assert refusal(path) == right
    assert rows_of(tmp_path / "0", input_format="parquet") == {"s/metadata.parquet:0": ("a", "")}  # as given
    assert refusal(f"{tmp_path}/4/s/metadata.*").endswith("remove one of the two tables.")


def test_columns_that_are_not_there_are_named(tmp_path):
    path = write(tmp_path / "p", **{"a.parquet": table()})
    for parameter in ("image_column", "caption_column", "id_column"):
        assert f"{parameter}='x' is not a column of {path}/a.parquet: it has jpg, caption, hash." in refusal(
            path, **{parameter: "x"}
        )
    for changes, said in (
        ({"jpg": pa.array([1, 2])}, "holds nothing that is an image: name the column of images or their paths"),
        ({"mask": pa.array([picture()] * 2)}, ""),
    ):
        rows = table(**changes)
        if said:
            rows = rows.rename_columns(["thing", "caption", "hash"])
        path = write(tmp_path / str(bool(said)), **{"a.parquet": rows})
        assert said in refusal(path) if said else taken(path)[1] == "jpg"
    two = table(mask=pa.array([picture()] * 2)).rename_columns(["left", "caption", "hash", "right"])
    path = write(tmp_path / "two", **{"a.parquet": two})
    assert "holds images in left, right: name one, such as image_column='left'" in refusal(path)
    tars = {"0.tar": tar_of(("0.jpg", picture()), ("0.txt", b"a")), "0.parquet": pa.table({"caption": ["a"]})}
    assert "caption; the input has 1 .parquet, 1 .tar" in refusal(
        write(tmp_path / "tars", **tars), input_format="parquet"
    )
    prompts = write(tmp_path / "prompts", **{"a.parquet": table().rename_columns(["jpg", "prompt", "hash"])})
    assert "has no column caption, text or txt: name the column of captions by caption_column" in refusal(prompts)
    assert rows_of(prompts, caption_column="prompt") == {"1": ("a", ""), "2": ("b", "")}
    urls = write(tmp_path / "urls", **{"a.parquet": pa.table({"URL": ["https://a/b.jpg"], "TEXT": ["a"]})})
    assert refusal(urls).startswith("image_column='URL' holds URLs (https://a/b.jpg): download the pictures first")
