"""Latents that were changed after they were encoded are noticed, whoever reads them."""

import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.config import TrainingConfig
from helpers.latents import digests, held_out, schema
from helpers.latents.manifest import DataSets, read_files, read_manifest
from helpers.latents.plan import load_plan
from helpers.latents.read import first_latents, latents_reader
from helpers.lesson import display
from helpers.train import setup
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
        "note": ["broken colour profile"] * 2 + [""] * (ROWS - 2),
        "encoder_call": pa.nulls(ROWS, pa.struct([])),
        "transform_seconds": pa.nulls(ROWS, pa.float64()),
    }
    write_job(str(tmp_path / "latents"), ROWS, [pa.table(rows)], SPECS, validation_share=0.3)
    return tmp_path / "latents"


def file_of(latents):
    (file,) = (latents / "data").iterdir()
    return file


def write_again(latents, change):
    """The file as its own writer would write it, footer's metadata included, with other rows."""
    file = file_of(latents)
    metadata = {digests.KEY: pq.read_metadata(file).metadata[digests.KEY.encode()].decode()}
    table = change(pq.read_table(file))
    with pq.ParquetWriter(
        file, table.schema, compression="none", use_dictionary=False, write_page_checksum=True
    ) as new:
        new.write_table(table, row_group_size=schema.ROWS_PER_ROW_GROUP)
        new.add_key_value_metadata(metadata)


def train(latents):
    config = TrainingConfig(
        latents_uri=str(latents), resolution=32, global_batch_size=8, unet_config="tiny", validation_share=0.3
    )
    plan = load_plan(DataSets.open(config.proportions), config)
    return list(read_steps(plan, latents_reader(plan)))


def validate(latents):
    return list(held_out.ValidationSet(str(latents), 32)(SPECS[0]))


READERS = [train, validate, lambda latents: first_latents(str(latents), 100)]


def other_order(table):
    return table.take(pa.array(np.random.default_rng(1).permutation(len(table))))


def other_latents(table):
    """The latents of one row are those of another one."""
    rows = np.arange(len(table))
    rows[[3, 190]] = 4, 189
    return table.set_column(2, table.schema.field(2), table.column(2).take(pa.array(rows)))


def other_caption(table):
    captions = table["caption"].to_pylist()
    captions[5], captions[130] = "another one", "another one"
    return table.set_column(1, table.schema.field(1), pa.array(captions))


@pytest.mark.parametrize("read", READERS, ids=["training", "validation", "first rows"])
@pytest.mark.parametrize("change", [other_order, other_latents, other_caption])
def test_a_file_of_the_same_name_with_other_rows_is_named(latents, change, read):
    read(latents)
    write_again(latents, change)
    if read is validate and change is other_caption:  # captions are not read there
        return
    with pytest.raises(
        ValueError, match=rf"{file_of(latents).name} has other values in the column '.*' than were encoded: restore"
    ):
        read(latents)


@pytest.mark.parametrize("read", READERS, ids=["training", "validation", "first rows"])
def test_a_file_that_another_writer_wrote_under_the_name_is_named(latents, read):
    table = pq.read_table(file_of(latents))
    pq.write_table(table, file_of(latents), row_group_size=schema.ROWS_PER_ROW_GROUP)
    with pytest.raises(ValueError, match=rf"{file_of(latents).name} is not the file that was encoded .* restore"):
        read(latents)


def test_a_column_of_another_type_is_named(latents):
    def as_text(table):
        return table.set_column(0, "id", table["id"].cast(pa.string()))

    write_again(latents, as_text)
    with pytest.raises(ValueError, match="has other values in the column 'id' than were encoded: restore"):
        first_latents(str(latents), 10)


@pytest.mark.parametrize("fault", ["missing", "cut short"])
def test_a_run_does_not_start_on_a_file_that_is_missing_or_cut_short(latents, tmp_path, fault, monkeypatch):
    file = file_of(latents)
    if fault == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises((ValueError, OSError), match=file.name):
        train(latents)
    monkeypatch.setattr(setup, "check_run", lambda config, data: None)  # the made-up latents fit no U-Net
    monkeypatch.setattr(setup, "describe_shapes", lambda plan: [])
    config = TrainingConfig(storage=str(tmp_path), latents_uri=str(latents), resolution=32, validation_share=0.3)
    with pytest.raises(ValueError, match=f"{file.name} (is missing|has .* bytes in place of .*): restore the file"):
        setup.open_run(config)
    assert not pathlib.Path(config.run_uri).exists()


def test_latents_of_earlier_versions_are_read_unchecked(latents):
    files = read_files(str(latents))
    assert (files.digests != digests.UNKNOWN).all()
    pathlib.Path(latents, "files.json").write_text(
        pathlib.Path(latents, "files.json").read_text().replace('"digest"', '"no_digest"')
    )
    assert (read_files(str(latents)).digests == digests.UNKNOWN).all()
    write_again(latents, other_order)
    assert len(train(latents))


def test_pictures_with_a_broken_profile_are_counted_among_those_that_are_used(latents):
    manifest = read_manifest(str(latents))
    assert (manifest.written, manifest.noted) == (ROWS, {"broken colour profile": 2})
    shown = display.summary(manifest).set_index("reason")["number"]
    assert shown["broken colour profile"] == 2
