import json
import os
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from helpers import storage


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file())


def test_relative_paths_are_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert storage.resolve("a/../b/") == str(tmp_path / "b")
    assert storage.resolve("~/c") == str(tmp_path / "home" / "c")
    assert storage.resolve(tmp_path / "d") == str(tmp_path / "d")


@pytest.mark.parametrize("uri", ["s3://bucket/folder", "gs://bucket/folder"])
def test_uris_stay_as_they_are(uri):
    assert storage.resolve(uri + "/") == uri
    assert storage.join(uri, "a", "b.json") == uri + "/a/b.json"
    assert storage.name(uri + "/") == "folder"


@pytest.mark.parametrize("uri", ["s3://", "gs:///folder", "gss://bucket/folder", "file:///folder"])
def test_a_uri_of_no_known_store_is_one_sentence(uri):
    with pytest.raises(ValueError, match="cannot be opened: give a folder, or a URI such as"):
        storage.exists(uri)


@pytest.mark.parametrize("uri", ["gs://bucket/a b#c%20ü:?", "abfs://bucket@account.dfs.core.windows.net/a b#c%20ü:?"])
def test_any_key_of_googles_and_azures_stores_is_the_path_that_pyarrow_gets(uri):
    assert storage.open_filesystem(uri)[1] == "bucket/a b#c%20ü:?"


@pytest.mark.parametrize(
    ("uri", "shown"),
    {
        "s3://KEY:SE/CR+ET=@bucket/run@5": "s3://bucket/run@5",
        "s3://SECRET@bucket/x?X-Amz-Signature=SECRET&a=/x": "s3://bucket/x",
        "https://me:SECRET@hub:8080/a@b#token=SECRET": "https://hub:8080/a@b",
        "abfss://container:SECRET@account.dfs.core.windows.net/a?sig=SECRET": "abfss://container@account.dfs.core.windows.net/a",
        "gs://me:SEC@RET@bucket/a": "gs://bucket/a",
        **{
            uri: uri
            for uri in (
                "/a?b=c@d#e=f",
                "gs://anonymous@bucket/a",
                "s3://bucket/a:b@c",
                "s3://bucket/a b#c%20ü",
                "https://hub:80/a@b",
            )
        },
    }.items(),
)
def test_a_uri_is_shown_and_refused_without_what_is_secret(uri, shown):
    assert storage.shown(uri) == shown == storage.shown(shown)
    if uri != shown:
        with pytest.raises(ValueError, match="credentials come from the environment") as raised:
            storage.exists(uri)
        assert "SECRET" not in str(raised.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(), one, max_size=3),
    max_leaves=8,
)


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.dictionaries(st.text(), JSON, max_size=4) | st.lists(JSON, max_size=4), st.data())
def test_a_json_file_with_any_bit_flipped_is_refused_by_name_or_read_as_before(tmp_path, content, data):
    uri = tmp_path / "a.json"
    storage.write_json(uri, content, indent=data.draw(st.sampled_from([None, 1])))
    assert storage.read_json(uri, shape=object) == content
    damaged, bit = bytearray(uri.read_bytes()), data.draw(st.integers(0, 8 * uri.stat().st_size - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    uri.write_bytes(damaged)
    try:
        assert storage.read_json(uri, "restore it", shape=object) == content
    except storage.DamagedFile as error:
        assert str(error).startswith(f"{uri} is damaged or cut short") and str(error).endswith(": restore it.")


SHAPE = {"step": int, "files": {"a": [int]}}


@pytest.mark.parametrize("shape", [{}, {"step": "3"}, {"files": []}, {"files": {"a": [1, "2"]}}, [], None, 3, [1]])
def test_json_of_another_type_is_refused_by_name(tmp_path, shape):
    """Whether it has a checksum or, as files of other programs and earlier versions, none."""
    whole = {"step": 3, "files": {"a": [1, 2], "b": 0}}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    assert storage.read_json(tmp_path / "a.json", shape=SHAPE) == whole
    other = {**whole, **shape} if shape and isinstance(shape, dict) else shape
    (tmp_path / "a.json").write_text(json.dumps(other))
    with pytest.raises(storage.DamagedFile, match=r"a\.json is damaged.*: restore it\.$"):
        storage.read_json(tmp_path / "a.json", "restore it", shape=SHAPE)


class Interrupted(BaseException):
    """As KeyboardInterrupt is, no Exception."""


@pytest.mark.parametrize("error", [OSError, Interrupted])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, error):
    """So a reader never sees a part of it; an interrupted writer leaves the old one."""
    storage.write_text(tmp_path / "a.txt", "old")

    def interrupt(*_):
        raise error

    monkeypatch.setattr(storage.os, "replace", interrupt)
    with pytest.raises(error):
        storage.write_text(tmp_path / "a.txt", "new")
    assert names(tmp_path) == ["a.txt"] and storage.read_text(tmp_path / "a.txt") == "old"


def test_listing_is_sorted_and_goes_as_deep_as_asked(tmp_path):
    for name in ("b.json", "a.json", "c.txt", "sub/d.json"):
        storage.write_text(tmp_path / name, "x")
    here = str(tmp_path)
    assert storage.list_files(here, ".json") == [f"{here}/a.json", f"{here}/b.json"]
    assert storage.list_files(here + "/", ".json", recursive=True)[-1] == f"{here}/sub/d.json"
    assert len(storage.list_files(here)) == 3
    assert storage.list_files(tmp_path / "nowhere") == []
    assert storage.list_folders(here) == [f"{here}/sub"] and storage.list_folders(tmp_path / "nowhere") == []
    assert storage.sizes(here) == {"a.json": 1, "b.json": 1, "c.txt": 1, "sub/d.json": 1}
    assert storage.sizes(f"{here}/c.txt") == {"": 1} and storage.sizes(tmp_path / "nowhere") == {}


def test_links_are_followed_but_those_to_what_is_listed_anyway(tmp_path):
    """Links that lead back listed 82 files for 2; two of them would list 2**40."""
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "file").write_text(name)
        for number in range(2):
            (tmp_path / "data" / name / f"self {number}").symlink_to(tmp_path / "data" / name)
    (tmp_path / "data" / "a" / "to b").symlink_to(tmp_path / "data" / "b")
    (tmp_path / "data" / "b" / "to a").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "data" / "a" / "file")
    (tmp_path / "data" / "dangling").symlink_to(tmp_path / "nothing")
    found = [path.removeprefix(f"{tmp_path}/data/") for path in storage.list_files(tmp_path / "data", recursive=True)]
    assert found == ["a/file", "b/file", "linked"]
    assert storage.sizes(tmp_path / "data") == dict.fromkeys(found, 1)
    assert storage.list_files(tmp_path / "nothing", recursive=True) == []


def test_a_folder_is_listed_once_and_a_file_by_each_of_its_names(tmp_path):
    """As in a hub's cache, whose snapshots are folders of links; `latest` is a link to the newest folder."""
    storage.write_text(tmp_path / "blobs" / "0123", "x")
    for snapshot in ("aaaa", "bbbb"):
        (tmp_path / "snapshots" / snapshot).mkdir(parents=True)
        (tmp_path / "snapshots" / snapshot / "a.parquet").symlink_to("../../blobs/0123")
    storage.write_text(tmp_path / "v" / "2024" / "b.parquet", "y")
    (tmp_path / "v" / "latest").symlink_to("2024")
    os.link(tmp_path / "v" / "2024" / "b.parquet", tmp_path / "b.parquet")
    snapshots = "snapshots/aaaa/a.parquet", "snapshots/bbbb/a.parquet"
    assert list(storage.sizes(tmp_path)) == ["b.parquet", "blobs/0123", *snapshots, "v/2024/b.parquet"]
    assert list(storage.sizes(tmp_path / "v")) == ["2024/b.parquet"]
