"""Nothing in a Parquet file is run: columns of extension types are refused before a value is touched."""

import ast
import dataclasses
import pathlib
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data  # registers the extension type whose values Ray unpickles

from helpers.config import PreprocessingConfig
from helpers.latents import held_out, read
from helpers.latents.manifest import write_manifest
from helpers.latents.parquet import open_parquet, read_parquet, write_latents_file
from helpers.latents.plan import RowRange, read_files
from helpers.production.readers import detect
from tests.latents import build_segment

ROOT = pathlib.Path(__file__).parents[3]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "helpers").rglob("*.py")}
PICKLED = {b"ARROW:extension:name": b"ray.data.arrow_pickled_object", b"ARROW:extension:metadata": b""}


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


@pytest.fixture
def canary(tmp_path):
    """Where a file is once somebody has unpickled a value."""
    yield tmp_path / "canary"
    assert ray.data is not None and not (tmp_path / "canary").exists()


@pytest.fixture
def hostile(tmp_path, canary):
    """A file with one row, whose id runs code when it is unpickled."""
    payload = pickle.dumps(Canary(str(canary)))
    fields = [pa.field("hash", pa.large_binary(), metadata=PICKLED)]
    fields += [("caption", pa.string()), ("jpg", pa.binary()), ("id", pa.int64())]
    path = tmp_path / "raw" / "hostile.parquet"
    path.parent.mkdir()
    table = pa.table([[payload], ["a caption"], [b"x"], [1]], schema=pa.schema(fields))
    pq.write_table(table, path)
    assert isinstance(pq.read_schema(path).field("hash").type, pa.BaseExtensionType)
    return path


REFUSED = r"hostile\.parquet: the column 'hash' has the type .*, whose values could run code when they are read: store"


@pytest.mark.parametrize("columns", [None, ["hash"], ["caption", "hash"]])
def test_a_column_of_pickled_objects_is_refused_by_every_way_to_read(hostile, columns):
    ways = {
        "read": lambda file: file.read(columns),
        "iter_batches": lambda file: list(file.iter_batches(columns=columns)),
    }
    for way, act in ways.items():
        with open_parquet(hostile) as file, pytest.raises(ValueError, match=REFUSED):
            act(file)
            pytest.fail(way)


ITEM = pa.field("item", pa.large_binary(), metadata=PICKLED)


@pytest.mark.parametrize(("kind", "value"), [(pa.list_(ITEM), [b"x"]), (pa.struct([ITEM]), {"item": b"x"})])
def test_extension_types_inside_of_others_are_refused(tmp_path, kind, value):
    pq.write_table(pa.table({"b": pa.array([value], kind)}), tmp_path / "nested.parquet")
    with pytest.raises(ValueError, match="column 'b' has the type"):
        read_parquet(tmp_path / "nested.parquet")


def test_raw_data_with_such_an_id_is_refused_before_a_job(hostile):
    config = PreprocessingConfig(input_uri=str(hostile.parent), id_column="hash")
    with pytest.raises(ValueError, match=REFUSED):
        detect.detect(config)
    fine = detect.detect(dataclasses.replace(config, id_column="id")).config
    assert detect.first_rows(fine, 5)["id"].to_pylist() == [1]


def test_latents_validation_rows_and_rejects_with_such_a_column_are_refused(hostile, tmp_path, build_manifest):
    folder = tmp_path / "latents"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / hostile.name).write_bytes(hostile.read_bytes())
    segment = build_segment([(hostile.name, [1])])
    write_manifest(str(folder), build_manifest(segments=[segment]), [segment])
    with pytest.raises(ValueError, match=REFUSED):
        read.read_row_ranges([RowRange(hostile.name, 0, 0, 1, 0)], ["hash", "caption"], read_files(str(folder)))
    assert held_out.read_parquet is read_parquet


def test_parquet_and_arrow_files_are_opened_in_one_place():
    """A module that opens them in another way must use `latents.parquet`, or be listed here with the reason."""
    known = {
        ("helpers.latents.parquet", "ParquetFile"),  # the place
        ("helpers.production.readers.arrow", "open_stream"),  # Arrow files, whose types are checked there
    }
    openers = {"ParquetFile", "ParquetDataset", "read_table", "read_schema", "read_metadata", "read_pandas"}
    openers |= {"read_parquet", "read_feather", "open_stream", "open_file", "RecordBatchFileReader", "dataset"}
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            is_opener = isinstance(node, ast.Attribute) and node.attr in openers
            owner = ast.unparse(node.value) if is_opener else ""
            if owner in ("pq", "pa", "pd", "ds", "feather", "ipc", "pa.ipc", "ray.data", "pa.dataset", "datasets"):
                found.add((module, node.attr))
    assert found == known


def test_nothing_is_unpickled_but_the_metadata_of_checkpoints_and_what_a_child_process_sends():
    """By an unpickler that knows DCP's classes alone; `np.load` reads no pickles by default."""
    loaders = {"pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.loads", "torch.load"}
    for module, path in MODULES.items():
        source = path.read_text()
        found = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        may_unpickle = module.startswith(("helpers.train.", "helpers.production.decode."))
        assert may_unpickle or not found & loaders, module
        assert "allow_pickle=True" not in source, module


def test_a_page_that_was_changed_is_noticed(tmp_path):
    values = pa.array([bytes([number]) * 4096 for number in range(64)], pa.binary(4096))
    write_latents_file([pa.table({"latents": values})], str(tmp_path / "a.parquet"))
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    start = data.index(bytes([20]) * 4096)
    data[start : start + 4096] = np.random.default_rng(0).bytes(4096)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(OSError, match=r"a\.parquet cannot be read: .*CRC checksum"):
        read_parquet(tmp_path / "a.parquet")
