"""The order of samples, recorded: a run that is resumed with newer code goes on with the same batches.

`golden_plans.json` holds, for each case, a CRC of the ids of each step in their order, and the column that the step
trains on. `python -m tests.unit.latents.test_golden_plans` records it again, which changes what every resumed run
trains on.
"""

import dataclasses
import json
import pathlib
import zlib

import pyarrow as pa
import pytest

from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.latents.manifest import DataSets, Manifest
from helpers.latents.plan import Files, plan_run
from tests.latents import receive_steps

GOLDEN = pathlib.Path(__file__).with_name("golden_plans.json")
SHAPES = {
    "image_latents_32": (32, (2, 4, 4, 4)),
    "image_latents_48x16": (32, (2, 4, 2, 6)),
    "image_latents_64": (64, (2, 4, 8, 8)),
    "image_latents_80x48": (64, (2, 4, 6, 10)),
}
SQUARES = [{"32+64": [64, 64, 17]}, {"32+64": [64, 9], "held out 32+64": [5]}, {"32+64": [64, 64, 64, 30]}]
MIXED_SHAPES = [
    {"32": [31], "48x16": [20, 7], "32+64": [64, 64, 11], "32+80x48": [40], "held out 32": [6]},
    {"48x16": [12], "32+64": [50, 3], "48x16+80x48": [64, 29], "held out 48x16+80x48": [4]},
]
ONLINE = {"online": {}, "raw_row_bytes": 500_000}
# data sets, parameters, and what differs in their manifest
CASES = {
    "one data set": ([SQUARES], {"seed": 1}, {}),
    "another seed, one unit a step": ([SQUARES], {"seed": 2, "units_per_step": 1}, {}),
    "large rows": ([SQUARES], {"seed": 1}, {"embeddings": (2000, 1024)}),
    "two data sets": ([SQUARES, SQUARES[:2]], {"seed": 3, "proportions": (0.7, 0.3)}, {}),
    "aspect ratios": ([MIXED_SHAPES], {"seed": 4, "resolution": 32, "global_batch_size": 16}, {}),
    "two resolutions of two data sets": (
        [MIXED_SHAPES, SQUARES],
        {"seed": 5, "resolution": {32: 0.4, 64: 0.6}, "proportions": (0.5, 0.5), "global_batch_size": 16},
        {},
    ),
    "online": ([SQUARES], {"seed": 6, "global_batch_size": 16}, {"job": ONLINE}),
    "online by shape": ([MIXED_SHAPES], {"seed": 7, "resolution": 64, "global_batch_size": 16}, {"job": ONLINE}),
}


def make_manifest(files, embeddings=(6, 128), job=None):
    """`(manifest, entries of its files)` of files that are {bucket: rows of its row groups} each."""
    entries, buckets = [], {}
    for number, groups in enumerate(files):
        entry = {"name": f"{number}.parquet", "row_groups": sum(groups.values(), [])}
        entries.append(entry | {"buckets": {bucket: len(rows) for bucket, rows in groups.items()}})
        for bucket, rows in groups.items():
            buckets[bucket] = buckets.get(bucket, 0) + sum(rows)
    num_rows = sum(buckets.values())
    segment = {"files": entries, "read": num_rows, "written": num_rows, "filtered": 0, "rejected": {}}
    columns = [schema.ColumnSpec(name, shape, resolution=size) for name, (size, shape) in SHAPES.items()]
    manifest = Manifest.of(
        [segment | {"buckets": buckets}],
        encoder={},
        resolutions=[32, 64],
        columns=[*columns, schema.ColumnSpec(schema.EMBEDDINGS, embeddings)],
        scaling_factor=1.0,
        id_type="string",
        empty_caption_embedding="",
        job={"validation_share": 0.0, **(job or {})},
    )
    return manifest, entries


def make_plan(case):
    """The plan of a case."""
    data_sets, parameters, changes = CASES[case]
    parameters = {"global_batch_size": 32, "units_per_step": 4, **parameters}
    shares = parameters.pop("proportions", [1.0] * len(data_sets))
    uris = [f"/data-{number}" for number in range(len(data_sets))]
    config = TrainingConfig(latents_uri=dict(zip(uris, shares, strict=True)), **parameters)
    made = {uri: make_manifest(files, **changes) for uri, files in zip(uris, data_sets, strict=True)}
    manifests = {uri: manifest for uri, (manifest, _) in made.items()}
    files = {uri: Files.of(uri, entries) for uri, (_, entries) in made.items()}
    plan = plan_run(DataSets(manifests, config.proportions), config, files)
    return dataclasses.replace(plan, worker_counts=range(1, 5))


def read_ids(row_ranges, source):
    """In place of reading rows: their places as ids."""
    ids = [
        f"{source.files.uri}/{file}/{group}/{first + row}"
        for file, group, first, count, *_ in row_ranges
        for row in range(count)
    ]
    return pa.table({"id": pa.array(ids, pa.string())})


def ids_of_steps(plan, first_step, end_step, num_workers):
    """The ids of each global batch in their order, received by workers as Ray Data deals out the plan's blocks."""
    steps = receive_steps(plan, read_ids, first_step, end_step, num_workers)
    return [[row for rows in units.values() for row in rows["id"].to_pylist()] for units in steps]


def fingerprints(batches):
    return [zlib.crc32("\n".join(batch).encode()) for batch in batches]


def record(case):
    """What is recorded of a case: three epochs and a bit, from the first step on, on one worker."""
    plan = make_plan(case)
    end_step = 3 * plan.steps_per_epoch + 2
    columns = sorted(SHAPES)
    latents = [columns.index(plan.latents_at(step).name) for step in range(end_step)]
    return {
        "steps_per_epoch": plan.steps_per_epoch,
        "latents": "".join(map(str, latents)),
        "steps": fingerprints(ids_of_steps(plan, 0, end_step, 1)),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_samples_is_the_recorded_one(case):
    assert record(case) == json.loads(GOLDEN.read_text())[case]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({case: record(case) for case in CASES}, indent=None) + "\n")
