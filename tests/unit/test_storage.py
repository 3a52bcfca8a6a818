import pathlib

import pytest

from helpers import storage


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file())


def test_relative_paths_are_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert storage.resolve("a/../b/") == str(tmp_path / "b")
    assert storage.resolve("~/c") == str(tmp_path / "home" / "c")
    assert storage.resolve(tmp_path / "d") == str(tmp_path / "d")


@pytest.mark.parametrize("uri", ["s3://bucket/folder", "gs://bucket/folder", "file:///tmp/folder"])
def test_uris_stay_as_they_are(uri):
    assert storage.resolve(uri + "/") == uri
    assert storage.join(uri, "a", "b.json") == uri + "/a/b.json"
    assert storage.name(uri + "/") == "folder"


def test_local_paths_and_file_uris_are_local(tmp_path):
    assert storage.is_local(tmp_path) and storage.is_local(f"file://{tmp_path}")


@pytest.mark.parametrize("folder", ["plain", "with space", "with#hash", "with%20percent", "ümlaut", "a:b", "a?b"])
def test_any_folder_name_can_be_used(tmp_path, folder):
    uri = storage.join(tmp_path, folder, "deep", "file.json")
    storage.write_json(uri, {"text": "grüße"})
    assert storage.list_files(tmp_path / folder, recursive=True) == [uri]
    assert storage.read_json(uri) == {"text": "grüße"} and storage.exists(uri) and storage.is_file(uri)
    storage.delete(tmp_path / folder)
    assert not storage.exists(tmp_path / folder)


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


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing.json"):
        storage.read_json(tmp_path / "missing.json")


def test_files_folders_and_nothing_can_be_deleted(tmp_path):
    for name in ("a.txt", "folder/b.txt", "folder/deep/c.txt", "kept.txt"):
        storage.write_text(tmp_path / name, "x")
    for name in ("a.txt", "folder", "folder", "never-was"):
        storage.delete(tmp_path / name)
    assert names(tmp_path) == ["kept.txt"] and not storage.exists(tmp_path / "folder")


def test_a_folder_is_copied_with_all_files(tmp_path):
    for name in ("a.txt", "deep/b.txt"):
        storage.write_text(tmp_path / "from" / name, name)
    storage.copy_folder(tmp_path / "from", tmp_path / "new" / "to")
    assert names(tmp_path / "new" / "to") == ["a.txt", "deep/b.txt"] == names(tmp_path / "from")
    assert storage.read_text(tmp_path / "new" / "to" / "deep" / "b.txt") == "deep/b.txt"


def test_links_are_followed_but_those_that_lead_back(tmp_path):
    """Such a link listed 82 files for 2; two of them would list 2**40."""
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
    assert found == ["a/file", "a/to b/file", "b/file", "b/to a/file", "linked"]
    assert storage.sizes(tmp_path / "data") == dict.fromkeys(found, 1)
    assert storage.list_files(tmp_path / "nothing", recursive=True) == []
