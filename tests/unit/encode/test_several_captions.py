"""Several captions a row: all are stored, and each epoch trains on one of them."""

import functools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder, prepare, stages
from helpers.latents import schema
from helpers.latents.plan import draw_caption
from helpers.latents.read import latents_reader
from helpers.online import encode as online
from helpers.online import prepare as prepare_online
from helpers.online.config import OnlineConfig
from helpers.production.readers import detect
from helpers.raw import inputs
from tests.latents import plan_for, read_steps, receive_steps, write_job
from tests.unit.online.test_index import picture

NUM_ROWS = 96
SHORT, LONG = "a red circle", "a large red circle in the top left on a blue background"


def raw_table(num_rows=NUM_ROWS):
    """Two captions a row; every third row has no second one."""
    long = [f"{LONG} {number}" if number % 3 else None for number in range(num_rows)]
    short = [f"{SHORT} {number}" for number in range(num_rows)]
    pictures = [picture((32, 32), number) for number in range(num_rows)]
    columns = {"hash": [f"id {number}" for number in range(num_rows)], "jpg": pictures, "short": short, "long": long}
    lists = [[one for one in captions if one] for captions in zip(long, short, strict=True)]
    return pa.table({**columns, "all": lists})


def write_raw(folder, table=None):
    (folder / "raw").mkdir()
    pq.write_table(raw_table() if table is None else table, folder / "raw" / "0.parquet", row_group_size=32)
    columns = {"input_format": "parquet", "image_column": "jpg", "id_column": "hash"}
    return {"storage": str(folder), "input_uri": str(folder / "raw"), "resolutions": [32], **columns}


def encode(config):
    """A job without Ray, all rows in one file: `(manifest, stored rows, the job's config)`."""
    job = prepare.prepare_job(config)
    config = job.config
    rows = inputs.to_raw_rows(detect.first_rows(config, NUM_ROWS), config)
    encoded = encoder.LatentEncoder(**prepare.encoder_arguments(config))(stages.transform(rows, config=config))
    fields = {"job": job.parameters, **job.description}
    manifest = write_job(config.latents_uri, len(rows), [encoded], **fields)
    return manifest, pq.read_table(f"{config.latents_uri}/data"), config


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(config, manifest, stored rows) of two captions a row."""
    config = PreprocessingConfig(**write_raw(tmp_path_factory.mktemp("captions")), caption_column=["short", "long"])
    manifest, rows, _ = encode(config)
    return config, manifest, rows


def training(folder, **changes):
    values = {"global_batch_size": 8, "units_per_step": 4, "resolution": 32, "num_training_workers": (1, 4)}
    return TrainingConfig(storage=folder, **{**values, **changes})


def steps_of(plan, first_step, end_step, num_workers=1):
    """{step: [(id, caption, embedding)] of its rows in their order}, as so many workers receive them."""
    found, names = {}, ("id", "caption", schema.EMBEDDINGS)
    for step, units in enumerate(receive_steps(plan, latents_reader(plan), first_step, end_step, num_workers)):
        rows = pa.concat_tables(units.values())
        found[first_step + step] = list(zip(*(rows[name].to_pylist() for name in names), strict=True))
    return found


def test_all_captions_of_a_row_are_stored_and_a_row_with_fewer_repeats_its_own(stored):
    config, manifest, rows = stored
    assert manifest.num_captions == 2
    for row in rows.to_pylist():
        number = int(row["id"].split()[1])
        long = f"{LONG} {number}" if number % 3 else f"{SHORT} {number}"
        assert (row["caption"], row["caption_2"]) == (f"{SHORT} {number}", long)
        assert (row["caption_embeddings"] == row["caption_embeddings_2"]) == (number % 3 == 0)


def test_each_epoch_draws_one_caption_for_a_row_group_in_the_shares_that_are_asked_for(stored):
    config, _, rows = stored
    captions = {row["id"]: (row["caption"], row["caption_2"]) for row in rows.to_pylist()}
    plan = plan_for(training(config.storage, caption_shares=[0.25, 0.75]))
    places = {row["id"]: number // schema.ROWS_PER_ROW_GROUP for number, row in enumerate(rows.to_pylist())}
    drawn, num_epochs = [], 24
    found = steps_of(plan, 0, num_epochs * plan.steps_per_epoch)
    for epoch in range(num_epochs):
        of_group = {}
        for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            for row_id, caption, _ in found[step]:
                if len(set(captions[row_id])) == 2:
                    of_group.setdefault(places[row_id], set()).add(captions[row_id].index(caption))
        assert all(len(numbers) == 1 for numbers in of_group.values())
        drawn.append([of_group[group] for group in sorted(of_group)])
    assert len({json.dumps(sorted(map(list, epoch))) for epoch in drawn}) > 1  # epochs differ
    numbers = [draw_caption((0.25, 0.75), 0, epoch, f"file/{group}") for epoch in range(20) for group in range(100)]
    assert 0.72 < np.mean(np.equal(numbers, 2)) < 0.78


@pytest.mark.parametrize("num_workers", [2, 4])
def test_any_number_of_workers_resumes_with_the_same_captions(stored, num_workers):
    plan = plan_for(training(stored[0].storage))
    end = 2 * plan.steps_per_epoch
    undisturbed = steps_of(plan, 0, end)
    assert steps_of(plan, 5, end, num_workers) == {step: undisturbed[step] for step in range(5, end)}


def online_rows(folder, **changes):
    """`(config, transformed rows of the first epoch, encoded rows)` of an online run."""
    values = {**write_raw(folder), "caption_column": ["short", "long"], **changes}
    raw, run = OnlineConfig(**values), training(str(folder), latents_uri=str(folder / "online"), validation_share=0)
    prepare_online.prepare_run(raw, run)
    plan = plan_for(run)
    blocks = pa.concat_tables(read_steps(plan, functools.partial(online.read_raw, config=raw))).combine_chunks()
    draws = {"units_per_epoch": plan.units_per_epoch, "caption_shares": plan.caption_shares}
    rows = online.transform_for_epoch(blocks, config=raw, **draws)
    return plan, rows, encoder.LatentEncoder(**prepare.encoder_arguments(raw, num_captions=1))(rows)


def test_online_each_epoch_encodes_one_drawn_caption_of_a_row(tmp_path):
    plan, rows, encoded = online_rows(tmp_path)
    assert plan.caption_shares == (1.0, 1.0)
    assert "caption_2" not in rows.column_names and "caption_embeddings_2" not in encoded.column_names
    long = np.array([LONG in caption for caption in rows["caption"].to_pylist()])
    assert 0.15 < long.mean() < 0.55  # a half of two thirds
