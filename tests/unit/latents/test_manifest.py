"""The two files of a latents folder."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from helpers import storage
from helpers.latents.manifest import (
    FILES,
    MANIFEST,
    read_manifest,
    read_segments,
    write_manifest,
)
from helpers.latents.plan import read_files


def segments():
    return [
        {
            "index": 0,
            "files": [
                {"name": "a", "row_groups": [64, 3], "buckets": {"32": 2}},
                {"name": "b", "row_groups": [5], "buckets": {"held out 32": 1}},
            ],
            "rejects": ["a"],
            "read": 80,
            "written": 72,
            "buckets": {"32": 67, "held out 32": 5},
            "rejected": {"not an image": 1, "no caption": 2},
            "filtered": 5,
        },
        {
            "index": 1,
            "files": [{"name": "c", "row_groups": [60, 4], "buckets": {"32": 1, "held out 32": 1}}],
            "rejects": [],
            "read": 70,
            "written": 64,
            "buckets": {"32": 60, "held out 32": 4},
            "rejected": {"not an image": 4},
            "filtered": 2,
            "seconds": 1.5,
        },
    ]


@pytest.fixture
def folder(tmp_path, build_manifest):
    write_manifest(str(tmp_path), build_manifest(segments=segments()), segments())
    return str(tmp_path)


def test_a_manifest_counts_every_row_once(folder):
    manifest = read_manifest(folder)
    assert (manifest.read, manifest.written, manifest.filtered) == (150, 136, 7)
    assert list(manifest.rejected.items()) == [("not an image", 5), ("no caption", 2)]  # the most frequent first
    assert manifest.read == manifest.written + sum(manifest.rejected.values()) + manifest.filtered
    assert (
        manifest.buckets == {"32": 127, "held out 32": 9}
        and manifest.rows_at(32) == 136
        and manifest.work["seconds"] == 1.5
    )


def test_planning_on_a_worker_reads_a_few_kilobytes(folder):
    """`files.json`, which grows with the data, is not even opened."""
    before = read_manifest(folder)
    storage.delete(storage.join(folder, FILES))
    assert read_manifest(folder) == before


def test_the_manifest_is_written_last(tmp_path, build_manifest, monkeypatch):
    written, write_text = [], storage.write_text
    monkeypatch.setattr(
        storage, "write_text", lambda uri, text, **_: [written.append(storage.name(uri)), write_text(uri, text)]
    )
    write_manifest(str(tmp_path), build_manifest(segments=segments()), segments())
    assert written == [FILES, MANIFEST]


def test_data_whose_files_have_changed_has_another_sum(build_manifest):
    changed = segments()
    changed[1]["files"][0]["row_groups"] = [60, 5]
    sums = {build_manifest(segments=one).files_crc32 for one in (segments(), changed, segments()[::-1])}
    assert len(sums) == 3 and build_manifest(segments=segments()).files_crc32 in sums


@pytest.mark.parametrize("version", [4, "5", None])
def test_latents_of_another_version_are_refused_with_what_to_do(tmp_path, build_manifest, version):
    write_manifest(str(tmp_path), dataclasses.replace(build_manifest(), schema_version=version), [])
    with pytest.raises(ValueError, match=f"schema version {version!r}, this code reads 5: encode the data again"):
        read_manifest(str(tmp_path))


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.sampled_from([FILES, MANIFEST]), st.data())
def test_a_flipped_bit_is_refused_by_the_files_name_or_changes_nothing(tmp_path, build_manifest, name, data):
    uri, manifest = str(tmp_path), build_manifest(segments=segments())
    write_manifest(uri, manifest, segments())
    damaged = bytearray((tmp_path / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    (tmp_path / name).write_bytes(damaged)
    try:
        assert read_manifest(uri) == manifest and read_segments(uri) == segments()
    except storage.DamagedFile as error:
        assert f"{name} is damaged" in str(error) and "run the notebook that encoded this data again" in str(error)


def fewer_files(listed):
    listed[0]["files"].pop()


def other_rows(listed):
    listed[0]["files"][0]["row_groups"][0] += 1


@pytest.mark.parametrize("change", [fewer_files, other_rows, list.clear, lambda listed: listed.append(None)])
@pytest.mark.parametrize("has_checksum", [False, True])
def test_a_list_of_other_files_than_the_manifest_counts_is_refused(tmp_path, build_manifest, change, has_checksum):
    """Lists of earlier versions have no checksum; those are read."""
    uri, listed = str(tmp_path), segments()
    write_manifest(uri, build_manifest(segments=segments()), segments())
    (tmp_path / FILES).write_text(json.dumps(listed))
    assert read_segments(uri) == listed and len(read_files(uri).names) == 3
    change(listed)
    if has_checksum:
        storage.write_json(tmp_path / FILES, listed)
    else:
        (tmp_path / FILES).write_text(json.dumps(listed))
    with pytest.raises(storage.DamagedFile, match=f"{FILES} .*: run the notebook that encoded this data again"):
        read_files(uri)
