"""Seconds to the first batch when a run starts at a step of an epoch of 1,000,000 samples: at its beginning and later.

    python -m tests.benchmarks.resume_cost [--rows 1000000] [--rounds 3]

Rows are small (0.4 kB), so that what is measured is the plan and Ray Data, not the disk. The starts take turns.
"""

import argparse
import contextlib
import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa

from helpers import ingest, preprocess, schema, session, storage
from helpers.config import TrainingConfig

SHAPES = {"image_latents_32": [2, 4, 4, 4], "caption_embeddings": [4, 16]}
FILE = 20_000


def write_data(uri, num_rows):
    segment = {
        "index": 0, "files": [], "rejects": [], "read": num_rows, "written": num_rows, "rejected": {}, "filtered": 0,
    }  # fmt: skip
    for start in range(0, num_rows, FILE):
        columns = {"id": pa.array(range(start, start + FILE)), "caption": pa.array(["a caption"] * FILE)}
        columns.update({column: schema.to_binary(np.zeros((FILE, *shape))) for column, shape in SHAPES.items()})
        name, (full, rest) = f"{start:08d}.parquet", divmod(FILE, schema.ROWS_PER_ROW_GROUP)
        preprocess.write_parquet(pa.table(columns), storage.join(uri, "data", name))
        segment["files"].append({"name": name, "row_groups": [schema.ROWS_PER_ROW_GROUP] * full + [rest] * (rest > 0)})
    manifest = schema.Manifest(
        encoder={"model": "none", "revision": "0", "precision": "fp16"}, resolutions=[32], shapes=SHAPES, scaling_factor=1.0,
        id_type="int64", empty_caption_embedding=schema.encode_embedding(np.zeros(SHAPES["caption_embeddings"])), job={},
        segments=[segment],
    )  # fmt: skip
    storage.write_json(storage.join(uri, "manifest.json"), manifest.to_dict())


def first_batch(config, step):
    """Seconds from nothing to the first unit of a step, the plan included."""
    started = time.perf_counter()
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    data = ingest.stream(plan, step, plan.steps_per_epoch, resolution=32, validation_share=0.02)
    wanted = step * plan.units_per_step
    # Closed, or the rest of the epoch would be read beside the next measurement.
    with contextlib.closing(iter(data.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
        while wanted not in np.asarray(next(batches)[ingest.UNIT]):
            pass
        return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    session.connect()
    with tempfile.TemporaryDirectory() as uri:
        write_data(uri, arguments.rows)
        config = TrainingConfig(latents_uri=uri, resolution=32, global_batch_size=64)
        steps = arguments.rows // 64
        starts = [0, steps // 4, steps // 2, 3 * steps // 4, steps - 10]
        first_batch(config, 0)  # starts Ray's processes
        found = {step: [] for step in starts}
        for _ in range(arguments.rounds):
            for step in starts:
                found[step].append(first_batch(config, step))
    for step, seconds in found.items():
        print(f"start at step {step:7,} of {steps:,}: {statistics.median(seconds):.2f} s to the first batch")


if __name__ == "__main__":
    main()
