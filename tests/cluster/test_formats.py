"""The same rows in each format, read and transformed through Ray Data."""

import functools

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.encode import job, stages
from helpers.raw import inputs
from tests.raw_data import found, table, write
from tests.unit.raw.test_kinds import FORMATS, files_of


def test_every_format_is_read_and_transformed_alike(cluster, tmp_path):
    """The readers of all formats come to Ray's workers: the same ids, captions, pixels and reasons."""
    rows = [{"key": f"{number:05d}", "caption": "a cat" if number % 50 else ""} for number in range(150)]
    results = {}
    for kind in FORMATS:
        given = found(write(tmp_path / kind, **files_of(rows, kind)), id_column="key")
        (segment, *others) = job.plan_segments(given.paths, given.config)
        transform = functools.partial(stages.transform, config=given.config)
        done = inputs.read_rows(segment, given.config).map_batches(transform, batch_format="pyarrow").take_all()
        results[kind] = sorted(
            tuple(str(row[name]) for name in ("id", "caption", "reason", "pixels_32")) for row in done
        )
        assert not others
    expected = results["parquet"]
    assert results == dict.fromkeys(FORMATS, expected) and [row[0] for row in expected] == [row["key"] for row in rows]
    assert [row[2] for row in expected].count("empty caption") == 3


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
