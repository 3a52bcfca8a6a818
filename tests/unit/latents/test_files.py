"""Latents that were changed after they were encoded are noticed, whoever reads them."""

import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.latents.held_out import example_rows
from helpers.latents.manifest import DataSets, read_manifest
from helpers.latents.parquet import write_latents_file
from helpers.latents.plan import load_plan
from helpers.latents.read import latents_reader
from helpers.lesson import display
from helpers.production.checks import training
from helpers.production.data.validation_set import ValidationSet
from helpers.train import start
from tests.latents import read_steps, write_job

SPECS = [
    schema.ColumnSpec("image_latents_32", (2, 4, 4, 4)),
    schema.ColumnSpec(schema.EMBEDDINGS, (6, 8), ragged=True),
]
ROWS = 200


@pytest.fixture
def latents(tmp_path):
    """A folder of latents with one file of four row groups."""
    random = np.random.default_rng(0)
    latents, embeddings = (random.normal(size=(ROWS, *spec.shape)).astype(np.float16) for spec in SPECS)
    rows = {
        schema.ID: range(ROWS),
        schema.CAPTION: [f"caption {number % 7}" for number in range(ROWS)],
        SPECS[0].name: SPECS[0].encode(latents),
        SPECS[1].name: SPECS[1].encode(embeddings, num_tokens_B=random.integers(1, 6, ROWS)),
        schema.REASON: [""] * ROWS,
        schema.SOURCE: ["a"] * ROWS,
        "note": ["no 'key': an id was made"] * 2 + [""] * (ROWS - 2),
        "encoder_call": pa.nulls(ROWS, pa.struct([])),
        "transform_seconds": pa.nulls(ROWS, pa.float64()),
    }
    write_job(str(tmp_path / "latents"), ROWS, [pa.table(rows)], SPECS, validation_share=0.3)
    return tmp_path / "latents"


def file_of(latents):
    (file,) = (latents / "data").iterdir()
    return file


def write_again(latents):
    """The file as its own writer would write it, with other rows."""
    file = file_of(latents)
    table = pq.read_table(file)
    rows = table.take(pa.array(np.random.default_rng(1).permutation(len(table))))
    write_latents_file([rows], str(file))


def damage(latents):
    """One value is another one."""
    file = file_of(latents)
    data, value = bytearray(file.read_bytes()), pq.read_table(file)[SPECS[0].name][70].as_py()
    data[data.index(value)] ^= 1
    file.write_bytes(data)


def train(latents):
    config = TrainingConfig(
        latents_uri=str(latents), resolution=32, global_batch_size=8, unet_config="tiny", validation_share=0.3
    )
    plan = load_plan(DataSets.open(config.proportions), config)
    return list(read_steps(plan, latents_reader(plan)))


def validate(latents):
    return list(ValidationSet(str(latents), 32)(SPECS[0]))


READERS = [train, validate, lambda latents: example_rows(str(latents), 100)]


@pytest.mark.parametrize("read", READERS, ids=["training", "validation", "first rows"])
@pytest.mark.parametrize("write", [write_again, lambda latents: pq.write_table(pa.table({"a": [1]}), file_of(latents))])
def test_another_file_of_the_same_name_is_named(latents, read, write):
    read(latents)
    write(latents)
    with pytest.raises(ValueError, match=rf"{file_of(latents).name} is not the file that was encoded"):
        read(latents)


@pytest.mark.parametrize("read", READERS, ids=["training", "validation", "first rows"])
def test_a_damaged_value_is_noticed(latents, read):
    damage(latents)
    with pytest.raises(OSError, match=rf"{file_of(latents).name} cannot be read: .*CRC checksum"):
        read(latents)


@pytest.mark.parametrize("fault", ["missing", "cut short"])
def test_a_run_does_not_start_on_a_file_that_is_missing_or_cut_short(latents, tmp_path, fault):
    file = file_of(latents)
    if fault == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises((ValueError, OSError), match=file.name):
        train(latents)
    config = TrainingConfig(storage=str(tmp_path), latents_uri=str(latents), resolution=32, validation_share=0.3)
    with pytest.raises(ValueError, match=f"{file.name} (is missing|has .* bytes in place of .*): restore the file"):
        start.open_run(config, checks=[training.files_are_there])
    assert not pathlib.Path(config.run_uri).exists()


def test_rows_of_which_something_was_made_are_counted_among_those_that_are_used(latents):
    manifest = read_manifest(str(latents))
    assert (manifest.written, manifest.noted) == (ROWS, {"no 'key': an id was made": 2})
    shown = display.summary(manifest).set_index("reason")["number"]
    assert shown["no 'key': an id was made"] == 2
