"""The same rows in each format, read and transformed through Ray Data."""

import collections
import functools
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import storage
from helpers.encode import job, stages
from helpers.lesson import captioned_shapes
from helpers.raw import filters, inputs
from tests.raw_data import as_arrow, found, table, tar_of, write

ROWS = 150


def drawn_rows():
    """{key: (image's bytes, caption, width)} of drawn images, a few of them spoilt."""
    rows = {}
    for number in range(ROWS):
        drawn, caption = captioned_shapes.draw_sample(number)
        data = io.BytesIO()
        drawn.save(data, ("JPEG", "PNG", "WEBP")[number % 3])
        spoilt = data.getvalue() if number % 40 else b"<html>"
        rows[f"{number:05d}"] = (spoilt, caption if number % 50 else "", 32 + number)
    return rows


def files_of(rows, kind):
    images, captions, widths = (list(column) for column in zip(*rows.values(), strict=True))
    columns = pa.table({"key": list(rows), "caption": captions, "width": widths})
    in_columns = columns.append_column("jpg", pa.array(images))
    if kind == "webdataset":
        ends = ("jpg", "png", "webp")
        members = {f"{key}.{ends[n % 3]}": data for n, (key, (data, *_)) in enumerate(rows.items())}
        members |= {f"{row['key']}.json": json.dumps(row) for row in columns.to_pylist()}
        return {"a.tar": tar_of(dict(sorted(members.items())))}
    beside = {f"{key}.jpg": data for key, (data, *_) in rows.items()}
    named = columns.append_column("file_name", [list(beside)])
    lines = "\n".join(json.dumps(row) for row in named.to_pylist())
    return {
        "parquet": {"a.parquet": in_columns},
        "arrow": {"a.arrow": as_arrow(in_columns)},
        "imagefolder": {"metadata.jsonl": lines, **beside},
        "paths": {"rows.parquet": named, **beside},
    }[kind]


def test_every_format_is_read_and_transformed_alike(cluster, tmp_path):
    """The readers of all formats come to Ray's workers: the same ids, captions, pixels and reasons."""
    rows, results = drawn_rows(), {}
    for kind in ("parquet", "webdataset", "imagefolder", "arrow", "paths"):
        text = "width >= 48 and caption != 'x'"
        given = found(write(tmp_path / kind, **files_of(rows, kind)), row_filter=text, id_column="key")
        (segment,) = job.plan_segments(given.paths, given.config)
        transform = functools.partial(stages.transform, config=given.config)
        done = inputs.read_rows(segment, given.config).map_batches(transform, batch_format="pyarrow").take_all()
        names = ("id", "caption", "reason", "pixels_32")
        results[kind] = sorted(tuple(str(row[name]) for name in names) for row in done)
    expected = results["parquet"]
    assert results == dict.fromkeys(results, expected) and len(expected) == ROWS - 16
    reasons = collections.Counter(reason for _, _, reason, _ in expected if reason)
    assert reasons == {"not an image": 3, "empty caption": 2}


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_a_limit_cuts_the_last_file_before_the_filter(cluster, tmp_path, kind):
    """So read = written + rejected + filtered, whatever a filter drops."""
    rows = drawn_rows()
    for number in range(2):
        half = dict(list(rows.items())[75 * number : 75 * number + 75])
        for name, data in files_of(half, kind).items():
            write(tmp_path / "raw", **{name.replace("a", str(number), 1): data})
    text = "width > 40 and key != '00100'"
    config = found(tmp_path / "raw", limit=120, row_filter=text, id_column="key").config
    first, last = job.plan_segments(inputs.list_inputs(config)[0], config, rows_per_segment=40)
    assert (first.rows, first.limit, last.rows, last.limit) == (75, None, 45, 45)
    read = [row for segment in (first, last) for row in inputs.read_rows(segment, config).take_all()]
    columns = pa.table({"key": list(rows), "width": [width for *_, width in rows.values()]})[:120]
    kept = columns.filter(pa.array(filters.kept_rows(columns, text)))["key"].to_pylist()
    assert sorted(row["id"] for row in read) == kept
    assert {row["source"] for row in read} == {storage.name(path) for path in (*first.paths, *last.paths)}
    assert set(read[0]) == {"id", "caption", "image", "error", "source", "note"}


def test_tasks_read_each_row_group_once_and_a_file_without_any_too(tmp_path):
    """Spark and polars leave such files; a segment may hold nothing else."""
    path = write(tmp_path / "p", **{"a.parquet": table()})
    pq.write_table(pa.table({"hash": range(5000)}), path / "many.parquet", row_group_size=500)
    reader = inputs.reader(found(path / "a.parquet").config)
    parts = inputs.parts(reader, str(path / "many.parquet"))
    assert [part[inputs.GROUPS] for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert [part[inputs.FIRST_ROW] for part in parts] == [0, 2500, 4500]
    pq.ParquetWriter(path / "none.parquet", pa.schema([("hash", pa.int64())])).close()
    assert [part[inputs.GROUPS] for part in inputs.parts(reader, str(path / "none.parquet"))] == [[]]
    assert list(reader.stream(str(path / "none.parquet"), ["hash"], [])) == []
