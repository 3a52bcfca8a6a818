"""Kinds of raw data that mislead, in every format: guesses, rules, names, and files that cost more than they seem to.

A rule of helpers/docs/DATA.md is one row of a table here, and each runs over all readers.
"""

import collections
import csv
import functools
import io
import json
import os
import random
import resource
import signal
import struct
import tarfile
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import storage
from helpers.config import PreprocessingConfig
from helpers.production.readers import detect, folder
from helpers.raw import inputs, readers
from tests.raw_data import (
    as_arrow,
    captioned,
    found,
    good,
    hugging_face,
    image,
    job_rows,
    online_rows,
    refusal,
    rows_of,
    table,
    tar_of,
    transformed,
    write,
)

FORMATS = ("parquet", "arrow", "webdataset", "metadata.jsonl", "metadata.csv", "side-cars")
IMAGE = image()


def link(file, name):
    name.parent.mkdir(exist_ok=True)
    os.link(file, name)


def files_of(rows, kind, name="a"):
    """{name: data} of `[{column: text or None}]` in a format; an image stands beside each row."""
    images = {f"{name}{number}.png": IMAGE for number in range(len(rows))}
    present = [{key: value for key, value in row.items() if value is not None} for row in rows]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if kind in ("parquet", "arrow"):
        columns = {key: pa.array([row.get(key) for row in rows], pa.string()) for key in names}
        data = pa.table({"jpg": [IMAGE] * len(rows), **columns})
        return {f"{name}.{kind}": data if kind == "parquet" else as_arrow(data, batch_rows=3)}
    if kind == "metadata.csv":
        fields = [[file, *(row.get(key) or "" for key in names)] for file, row in zip(images, rows, strict=True)]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([["file_name", *names], *fields])
        return {f"{name}/metadata.csv": text.getvalue(), **{f"{name}/{file}": IMAGE for file in images}}
    texts = {file: json.dumps({"file_name": file, **row}) for file, row in zip(images, present, strict=True)}
    if kind == "metadata.jsonl":
        return {f"{name}/metadata.jsonl": "\n".join(texts.values()), **{f"{name}/{file}": IMAGE for file in images}}
    beside = {file.replace(".png", ".json"): json.dumps(row) for file, row in zip(images, present, strict=True)}
    members = {
        key: data for file in images for key, data in ((file, IMAGE), (file[:-3] + "json", beside[file[:-3] + "json"]))
    }
    return {f"{name}.tar": tar_of(members)} if kind == "webdataset" else members


# ---- guesses (K1)

VALUES = st.sampled_from([None, "", " ", "x", "y"])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from(FORMATS))
def test_later_rows_may_contradict_the_first(tmp_path_factory, data, kind):
    """Of random tables of nulls and empty texts, each row has the first filled caption, and its own id or one made."""
    files, expected = {}, {}
    for number in range(data.draw(st.integers(1, 6))):
        size = data.draw(st.integers(1, 5))
        names = data.draw(st.lists(st.sampled_from(["caption", "text", "txt"]), min_size=1, unique=True))
        filler = data.draw(st.sampled_from([0, 70]))  # rows before those that differ
        rows = [{"caption": "usual", "key": f"{number}-{row}"} for row in range(filler)]
        has_ids = data.draw(st.booleans())
        for row in range(size):
            one = {name: data.draw(VALUES) for name in names}
            rows.append(one | ({"key": data.draw(st.sampled_from([None, f"{number}+{row}"]))} if has_ids else {}))
        files |= files_of(rows, kind, f"f{number}")
        for row in rows:
            texts = [row[name] for name in ("caption", "text", "txt") if (row.get(name) or "").strip()]
            expected.setdefault(row.get("key"), []).append(texts)
    path = write(tmp_path_factory.mktemp("d"), **files)
    try:
        got = job_rows(path)
    except (ValueError, FileNotFoundError) as error:
        assert "caption" in str(error)  # the first files have no column of captions
        return
    num_rows = sum(map(len, expected.values()))
    assert len(got) == num_rows
    for key, (caption, reason) in got.items():
        wanted = expected.get(key) or sum(expected.values(), [])  # an id that is made may be any row's
        assert any(caption in texts if texts else reason for texts in wanted), (key, caption, reason)


@pytest.mark.parametrize("kind", FORMATS)
def test_ids_and_captions_that_end_are_made_and_taken_from_the_next_column(tmp_path, kind):
    rows = [{"key": str(n) if n < 70 else None, "caption": "a" if n < 70 else "", "text": "b"} for n in range(75)]
    path = write(tmp_path / "d", **files_of(rows, kind))
    rows_read = rows_of(path)
    assert sorted(caption for caption, _ in rows_read.values()) == ["a"] * 70 + ["b"] * 5
    assert len(rows_read) == 75 and {str(n) for n in range(70)} < set(rows_read)
    assert not any(reason for _, reason in rows_read.values())
    counted = collections.Counter(row["note"] for row in transformed(path))
    note = "no 'key': an id was made; no usable 'caption': another caption was taken"
    assert counted == {"": 70, note: 5}


def test_whole_numbers_are_text_and_ids_that_lack_are_made(tmp_path):
    path = write(tmp_path / "d", **{"a.parquet": table(id=[1, None]).drop_columns("hash")})
    write(path, **{"b.parquet": table().drop_columns("hash")})  # as in a later file without ids
    assert set(rows_of(path)) == {"1", "a.parquet:1", "b.parquet:0", "b.parquet:1"}


def test_captions_that_begin_late_are_found(tmp_path):
    members = {
        f"{n:03d}.{end}": data
        for n in range(90)
        for end, data in (("png", IMAGE), ("txt", "a"))
        if n > 79 or end == "png"
    }
    path = write(tmp_path / "t", **{"a.tar": tar_of(members)})
    reasons = [reason for _, reason in rows_of(path).values()]
    assert reasons == ["no caption"] * 80 + [""] * 10
    folders = {f"{n}/a.{end}": data for n in range(6) for end, data in (("png", IMAGE), ("json", "{}"))}
    assert sum(not reason for _, reason in rows_of(write(tmp_path / "f", **folders, **{"5/a.txt": "a"})).values()) == 1


# ---- content, not names (K2)


ICEBERG = {f"metadata/0000{number}-0a1b.metadata.json": "{}" for number in range(2)}  # as all catalogs write it
TABLES = {"Delta": {"_delta_log/0.json": "{}"}, "Hudi": {".hoodie/hoodie.properties": ""}, "Iceberg": ICEBERG}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_keeps_deleted_rows_is_refused_wherever_the_input_begins(tmp_path, kind):
    marks = {f"lake/t/{name}": data for name, data in TABLES[kind].items()}
    path = write(tmp_path, **marks, **{"lake/t/a.parquet": table(), "lake/t/data/y=1/m=2/b.parquet": table()})
    write(path, **{"lake/plain/c.parquet": table()})
    os.symlink("lake/t/data/y=1", path / "link")
    os.symlink("lake/t/a.parquet", path / "link.parquet")
    folders = ["lake", "lake/t", "lake/t/data", "lake/t/data/y=1", "lake/t/data/y=1/m=2", "link", "link/m=2"]
    patterns = ["lake/*/?.parquet", "lake/**/*.parquet", "lake/t/data/y=*/m=*/*.parquet"]
    for uri in (*folders, *patterns, "lake/t/a.parquet", "lake/t/data/y=1/m=2/b.parquet", "link.parquet"):
        assert f"holds files of a table ({kind}: " in refusal(path / uri), uri
    for uri in ("lake/plain", "lake/plain/c.parquet", "lake/p*/*.parquet"):
        assert job_rows(path / uri) == good("a", "b")


def test_a_folder_above_the_input_may_be_closed(tmp_path, monkeypatch):
    path, walk = write(tmp_path / "d", **{"a.parquet": table()}), storage.walk

    def denied(uri, *recursive):
        if not str(uri).startswith(str(path)):
            raise OSError("AWS Error ACCESS_DENIED during ListObjectsV2 operation")
        return walk(uri, *recursive)

    monkeypatch.setattr(storage, "walk", denied)
    assert job_rows(path) == good("a", "b")


def test_arrow_files_that_no_list_names_are_not_read(tmp_path):
    shards = {f"{n}.arrow": as_arrow(hugging_face([n])) for n in range(3)}
    path = write(tmp_path / "s", **shards, **{"state.json": '{"_data_files": [{"filename": "1.arrow"}]}'})
    assert rows_of(path) == {"1.arrow:0": ("a cat 1", "")}
    write(path, **{f"more/{name}": data for name, data in shards.items()})
    os.link(path / "state.json", path / "more/state.json")
    assert set(rows_of(path)) == {"1.arrow:0", "more/1.arrow:0"}
    assert "state.json is no JSON object" in refusal(write(path, **{"state.json": bytes(100)}))


def test_what_two_links_lead_to_is_read_once(tmp_path):
    path = write(tmp_path / "d", **{"2024/a.parquet": table()})
    os.symlink("2024", path / "latest")
    os.symlink("2024/a.parquet", path / "b.parquet")
    assert rows_of(path) == good("a", "b")


@pytest.mark.parametrize(
    ("input_uri", "own"),
    [("d", "d/out"), ("d", "link/out"), ("link", "d/out"), ("d", "d/linked"), ("d", "elsewhere"), ("d/in", "d")],
)
def test_the_storage_below_the_input_is_no_input_whatever_links_lead_there(tmp_path, input_uri, own):
    path = write(tmp_path, **{"d/in/a.parquet": table()})
    (path / "elsewhere").mkdir()
    os.symlink("d", path / "link")
    os.symlink("../elsewhere", path / "d/linked")
    config = PreprocessingConfig(storage=str(path / own), input_uri=str(path / input_uri), resolutions=[32])
    write(path / own, **{"latents/data/0.parquet": table("34"), "runs/quick/config.json": "{}"})
    assert [storage.name(name) for name, _ in inputs.walk_input(config)] == ["a.parquet"]


@pytest.mark.parametrize("given", ["storage", "latents_uri"])
def test_the_inputs_folder_is_no_place_to_write(tmp_path, given):
    path = write(tmp_path / "d", **{"a.parquet": table(), "p-1/b.parquet": table()})
    os.symlink("d", tmp_path / "link")
    others = {"storage": str(tmp_path / "out"), given: str(path), "resolutions": [32]}
    configs = functools.partial(PreprocessingConfig, **others)
    for uri in ("d", "link", "d/**/*.parquet", "d/*/*.parquet"):
        with pytest.raises(ValueError, match=f"^{given}='{path}' is the folder of input_uri, .* folder of its own"):
            detect.detect(configs(input_uri=str(tmp_path / uri)))
    for uri in ("d/a.parquet", "d/*.parquet", "d/p-*/*.parquet"):  # they do not reach what is written
        assert len(detect.detect(configs(input_uri=str(tmp_path / uri))).paths) == 1
    begun = {"input_crc32": inputs.checksum(storage.sizes(path))}  # by an earlier version
    assert len(detect.detect(configs(input_uri=str(path)), begun).paths) == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow", "webdataset"])
def test_a_file_with_several_names_is_read_once(tmp_path, kind):
    files = files_of([{"caption": "a"}, {"caption": "b"}], kind)
    path = write(tmp_path / "d", **{f"1/{name}": data for name, data in files.items()})
    (name,) = files
    link(path / "1" / name, path / ".hidden" / name)
    link(path / "1" / name, path / "2" / name)
    link(path / "1" / name, path / "1" / f"again-{name}")
    assert sorted(rows_of(path).values()) == [("a", ""), ("b", "")]


@pytest.mark.parametrize("put", [os.link, os.symlink])
def test_an_image_is_read_beside_each_of_its_captions_whatever_is_linked(tmp_path, put):
    """As in a snapshot of the hub's cache, and after `jdupes -L` or `rdfind`."""
    other = image((0, 200, 0))
    path = write(tmp_path / "captions", **{"cat/1.png": IMAGE, "cat/1.txt": "a photo", "dog/1.png": other})
    put(path / "cat/1.txt", path / "dog/1.txt")
    assert rows_of(path) == {"cat/1.png": ("a photo", ""), "dog/1.png": ("a photo", "")}
    path = write(tmp_path / "images", **{"x/1.png": IMAGE, "x/1.txt": "a photo", "y/1.txt": "a cat"})
    put(path / "x/1.png", path / "y/1.png")
    assert rows_of(path) == {"x/1.png": ("a photo", ""), "y/1.png": ("a cat", "")}
    path = write(
        tmp_path / "tables",
        **{"test/metadata.csv": "file_name,text\n1.png,a\n", "test/1.png": IMAGE, "train/1.png": other},
    )
    put(path / "test/metadata.csv", path / "train/metadata.csv")
    assert rows_of(path) == {"test/metadata.csv:0": ("a", ""), "train/metadata.csv:0": ("a", "")}


def test_tables_with_several_names_keep_their_rows_if_they_name_images_elsewhere(tmp_path):
    path = write(tmp_path / "d", **{"x/1.png": IMAGE, "y/1.png": IMAGE})
    write(path, **{"x/t/metadata.csv": "file_name,text\n../1.png,a\n"})
    link(path / "x/t/metadata.csv", path / "y/t/metadata.csv")
    assert set(rows_of(path)) == {"x/t/metadata.csv:0", "y/t/metadata.csv:0"}


def test_revisions_that_share_images_give_each_image_once(tmp_path):
    """Snapshots of the hub's cache; the second one adds images between those of the first."""
    path = write(tmp_path / "d", **captioned("02", "aaaa/"), **captioned("13", "bbbb/"))
    for file in os.listdir(path / "aaaa"):
        link(path / "aaaa" / file, path / "bbbb" / file)
    assert rows_of(path) == {f"{'ab'[n % 2] * 4}/{n}.jpg": (f"a cat {n}", "") for n in range(4)}
    files = {"aaaa/metadata.csv": "file_name,text\n1.png,a\n", "aaaa/1.png": IMAGE}
    path = write(tmp_path / "t", **files)
    for file in files:
        link(path / file, path / file.replace("aaaa", "bbbb"))
    assert rows_of(path) == {"aaaa/metadata.csv:0": ("a", "")}


def test_splits_that_are_read_together_are_said(tmp_path):
    path = write(tmp_path / "d", **{"train/a.parquet": table(), "data/test-0.parquet": table("34")})
    assert "test and train are read together" in str(found(path).columns)


# ---- rules (K4)

RULES = {
    "NaN": (float("nan"), ("", "no caption")),
    "nothing that is seen": ("\u200b\u3164\u2800\ufe0f", ("", "empty caption")),
    "filled with NUL": ("a cat\0\0\0", ("a cat", "")),
    "byte order mark": ("\ufeffa cat", ("a cat", "")),
    "too long": ("x" * 70_000, ("", "caption of more than 65536 bytes")),
    "a list": (["", "a cat", "b"], ("a cat", "")),
    "an object": ({"en": "a cat"}, ("", "no caption")),
    "private use": ("\ue000", ("\ue000", "")),
}
TYPED = ("metadata.csv", "parquet", "arrow")
LACKING = {
    "NaN": TYPED,
    "a list": TYPED,
    "an object": TYPED,
    "filled with NUL": ("metadata.csv",),
}  # formats that have no such value


@pytest.mark.parametrize(
    ("rule", "kind"), [(rule, kind) for rule in RULES for kind in FORMATS if kind not in LACKING.get(rule, ())]
)
def test_each_rule_holds_in_each_reader(tmp_path, kind, rule):
    value, expected = RULES[rule]
    rows = [{"key": "odd", "caption": value}, {"key": "usual", "caption": "b"}]
    got = job_rows(write(tmp_path / "d", **files_of(rows, kind)))
    assert got["odd"] == expected and got["usual"] == ("b", "")


def test_two_columns_of_one_name_are_refused_in_each_reader(tmp_path):
    twice = pa.Table.from_arrays([*table().columns, ["c", "d"]], [*table().column_names, "caption"])
    for name, data in (("a.parquet", twice), ("a.arrow", as_arrow(twice)), ("metadata.csv", "file_name,text,text\n")):
        assert "has several columns called" in refusal(write(tmp_path / name, **{name: data}))


@pytest.mark.parametrize("text", ['[{"file_name": "0.png", "text": "a"}]', '{\n"file_name": "0.png",\n"text": "a"\n}'])
def test_json_that_is_no_json_lines_is_refused(tmp_path, text):
    assert "holds no JSON Lines" in refusal(write(tmp_path / "d", **{"metadata.jsonl": text, "0.png": IMAGE}))


def json_files(kind, texts):
    """{name: data} of samples whose JSON is one of `texts` each."""
    samples = {}
    for number, text in enumerate(texts):
        samples |= {f"{number}.png": IMAGE, f"{number}.json": text}
    if kind == "webdataset":
        return {"a.tar": tar_of(samples)}
    lines = "\n".join(text.replace("{", f'{{"file_name": "{number}.png", ', 1) for number, text in enumerate(texts))
    return samples if kind == "side-cars" else {**samples, "metadata.jsonl": lines}


@pytest.mark.parametrize("kind", ["metadata.jsonl", "side-cars", "webdataset"])
def test_json_that_cannot_be_used_is_the_reason_why_there_is_no_caption(tmp_path, kind):
    whole = '{"text": "a", "more": {"x": 1, "x": 2}}'
    path = write(tmp_path / "d", **json_files(kind, [whole, '{"text": "b"},', '{"text": "c", "text": "d"}', whole]))
    damaged, repeated = ("", "no caption: no readable JSON object"), ("", "no caption: JSON with a key twice")
    assert list(job_rows(path).values()) == [("a", ""), damaged, repeated, ("a", "")]
    assert [caption for caption, _ in online_rows(path)[0].values()] == ["a", "a"]


def test_a_caption_in_a_text_is_read_whatever_the_json(tmp_path):
    files = {"a.png": IMAGE, "a.txt": "a", "a.json": "{", "b.png": IMAGE, "b.json": '{"text": "b"}'}
    for name, data in {"side-cars": files, "tar": {"0.tar": tar_of(files)}}.items():
        assert sorted(job_rows(write(tmp_path / name, **data)).values()) == [("a", ""), ("b", "")]


def test_json_lines_that_all_have_a_key_twice_are_refused(tmp_path):
    text = '{"file_name": "0.png", "text": "a", "text": "b"}'
    assert "with each key once" in refusal(write(tmp_path / "d", **{"metadata.jsonl": text, "0.png": IMAGE}))


def test_texts_may_be_called_after_the_whole_name_of_an_image(tmp_path):
    path = write(tmp_path / "d", **{"a.png": IMAGE, "a.png.txt": "a", "b.png": IMAGE, "b.png.json": '{"text": "b"}'})
    assert rows_of(path) == {"a.png": ("a", ""), "b.png": ("b", "")}


# ---- names (K5)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.sampled_from(FORMATS),
)
def test_any_name_and_caption_goes_through_every_reader(tmp_path_factory, name, kind):
    path = tmp_path_factory.mktemp("d")
    caption = f"{name} cat"
    got = job_rows(
        write(path, **files_of([{"key": "1", "caption": caption}], kind, f"x{name}y" if kind != "webdataset" else "x"))
    )
    assert list(got.values()) == [(readers.as_caption(caption.encode()), "")]


def test_both_forms_of_unicode_are_one_name(tmp_path):
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    path = write(tmp_path / "t", **{"metadata.csv": f"file_name,text\n{composed}.png,a\n", f"{apart}.png": IMAGE})
    assert rows_of(path) == {"metadata.csv:0": ("a", "")}
    path = write(tmp_path / "s", **{f"{composed}.png": IMAGE, f"{apart}.txt": "a"})
    assert list(rows_of(path).values()) == [("a", "")]


def test_two_forms_of_one_name_each_keep_their_caption(tmp_path):
    """On Linux, a folder may hold both."""
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    files = {f"{composed}.png": IMAGE, f"{composed}.txt": "composed", f"{apart}.png": IMAGE}
    assert rows_of(write(tmp_path / "d", **files)) == {f"{composed}.png": ("composed", "")}
    path = write(tmp_path / "d", **{f"{apart}.txt": "apart"})
    assert rows_of(path) == {f"{composed}.png": ("composed", ""), f"{apart}.png": ("apart", "")}


def test_ranges_in_braces_and_folders_that_may_not_be_opened(tmp_path, monkeypatch):
    path = write(tmp_path / "t", **{f"{n:05d}.tar": tar_of({f"{n}.png": IMAGE, f"{n}.txt": "a"}) for n in range(4)})
    assert set(rows_of(f"{path}/{{00001..00002}}.tar")) == {"00001.tar:0", "00002.tar:0"} or set(
        rows_of(f"{path}/{{00001..00002}}.tar")
    ) == {"1", "2"}
    (path / "lost+found").mkdir()
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(storage.os, "scandir", refuse)
    assert len(job_rows(path)) == 4


# ---- cost (K6)


def header(name, size, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.type = kind
    data = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    data[124:136] = b"\xff" * 4 + struct.pack(">q", size) if size < 0 else b"\x80" + bytes(3) + struct.pack(">q", size)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


ROW = tar_of({"0.png": IMAGE, "0.txt": "a"})
END = bytes(1024)
LARGE = pa.array([0] * 64, pa.int32())
COSTLY = {
    "negative.tar": header("1.png", -512) + ROW,
    "negative-pax.tar": header("x", 22, tarfile.XHDTYPE) + b"22 size=-100000000000\n".ljust(512, b"\0") + ROW,
    "huge.tar": header("1.png", 2**62) + ROW,
    "pax.tar": header("x", 2**40, tarfile.XHDTYPE) + ROW,
    "longname.tar": header("x", 2**40, tarfile.GNUTYPE_LONGNAME) + ROW,
    "many-pax.tar": (header("x", 0, tarfile.XHDTYPE) * 3000) + ROW,
    "empty.tar": b"".join(header(f"{n}.png", 0) for n in range(20_000)) + END,
    "value.parquet": pa.table({"jpg": [IMAGE] * 64, "caption": pa.DictionaryArray.from_arrays(LARGE, ["x" * 2**25])}),
    "id.parquet": pa.table(
        {"jpg": [IMAGE] * 64, "caption": ["a"] * 64, "id": pa.DictionaryArray.from_arrays(LARGE, ["x" * 2**25])}
    ),
    "captions.parquet": pa.table({"jpg": [IMAGE] * 64, "caption": [["x"] * 200_000] * 64}),
    "rows.parquet": pa.table({"jpg": pa.nulls(10**7, pa.binary()), "caption": pa.nulls(10**7, pa.string())}),
}


def limited(call):
    """What a call gives, or its ValueError or FileNotFoundError; it may take 30 s and half a GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def too_late(*_):
        raise AssertionError("it did not end")

    previous = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(30)
    try:
        return call()
    except (ValueError, FileNotFoundError) as error:
        return error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


@pytest.mark.parametrize("name", COSTLY)
def test_what_a_file_costs_is_bounded(tmp_path, name):
    data, path = COSTLY[name], tmp_path / "d"
    path.mkdir()
    if isinstance(data, pa.Table):
        pq.write_table(data, path / name, compression="zstd", row_group_size=10**7, store_schema=False)
    else:
        (path / name).write_bytes(data)
    assert (path / name).stat().st_size < 2**24
    got = limited(lambda: job_rows(path))
    assert name in str(got) if isinstance(got, Exception) else got


@pytest.mark.parametrize("on_store", [False, True])
def test_an_arrow_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch, on_store):
    rows, data = table(jpg=[bytes(2**27)] * 2), io.BytesIO()
    with pa.ipc.new_file(data, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(rows)
    path = write(tmp_path / "d", **{"a.arrow": data.getvalue()})
    del rows
    if on_store:
        monkeypatch.setattr(storage, "is_local", lambda uri: False)
    assert "a.arrow is not a readable Arrow file" in str(limited(lambda: job_rows(path)))


@pytest.mark.parametrize("kind", FORMATS[:-1])  # side-cars are read in units of a bounded number of files
def test_a_file_whose_rows_take_too_long_to_find_is_refused_by_name(tmp_path, monkeypatch, kind):
    path = write(tmp_path / "d", **files_of([{"caption": "a"}], kind))
    given = found(path)
    monkeypatch.setattr(readers, "MAX_SECONDS", 0)
    folder._load_table.cache_clear()
    with pytest.raises(readers.Unreadable, match=f"{given.paths[0]} .*takes a core more than 0 s"):
        list(inputs.reader(given.config).stream(given.paths[0], ["caption"]))


def whole_files():
    rows = table("1234", caption=["a", "b", "c", "d"])
    data, packed = io.BytesIO(), pa.BufferOutputStream()
    pq.write_table(rows, data, compression="zstd")
    with pa.ipc.new_stream(packed, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as file:
        file.write_table(rows, max_chunksize=2)
    lines = "\n".join(json.dumps({"file_name": f"{n}.png", "text": f"cat {n}"}) for n in range(4)).encode()
    members = {f"{n}.{end}": one for n in range(4) for end, one in (("png", IMAGE), ("txt", "a"), ("json", "{}"))}
    files = {"a.parquet": data.getvalue(), "a.arrow": packed.getvalue().to_pybytes(), "b.arrow": as_arrow(rows)}
    return files | {
        "a.tar": tar_of(members),
        "metadata.jsonl": lines,
        "metadata.csv": b"file_name,text\n0.png,a\n1.png,b\n",
    }


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(whole_files())), st.integers(0, 2**32), st.integers(0, 8), st.booleans())
def test_damaged_files_are_read_or_refused_by_name(tmp_path_factory, name, seed, num_flips, is_cut):
    """Random flips of bits and sizes: rows, or one sentence; no other error, in bounded time and memory."""
    data, chance = bytearray(whole_files()[name]), random.Random(seed)
    for _ in range(num_flips):
        # Half of them at the end: the footers of Parquet and Arrow.
        where = chance.randrange(len(data)) if chance.random() < 0.5 else -chance.randrange(1, min(len(data), 800))
        data[where] ^= 1 << chance.randrange(8)
    if is_cut:
        del data[chance.randrange(len(data)) :]
    path = write(tmp_path_factory.mktemp("d"), **{name: bytes(data)}, **{f"{n}.png": IMAGE for n in range(4)})
    got = limited(lambda: job_rows(path, input_format="imagefolder" if "metadata" in name else "auto"))
    assert str(path) in str(got) or "input_uri" in str(got) if isinstance(got, Exception) else isinstance(got, dict)


def test_columns_that_repeat_one_value_are_no_bombs(tmp_path):
    rows = 20_000
    images = [IMAGE[:-4] + struct.pack("<I", row) for row in range(rows)]
    same = pa.table({"jpg": images, "caption": ["a photo of a cat"] * rows, "width": [0.0] * rows})
    (tmp_path / "d").mkdir()
    pq.write_table(same, tmp_path / "d/a.parquet", compression="zstd", row_group_size=rows)
    given = found(tmp_path / "d", row_filter="width >= 0")
    reader = inputs.reader(given.config)
    assert reader.row_groups(given.paths[0]) == [rows]
    assert sum(len(table) for table in reader.stream(given.paths[0], ["caption", "width"])) == rows
