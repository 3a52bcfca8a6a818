"""Latents that no picture was encoded for, of any shape, as a finished job leaves them; a trainer that only takes
time."""

import time

import numpy as np
import pyarrow as pa

from helpers import preprocess, schema, storage, train
from helpers.train_step import TrainStep


def write_latents(uri, num_rows, shapes, rows_per_file):
    """Random latents, and their manifest. `shapes`: column -> shape of one row; SD2's at 256 pixels are `SD2_256`."""
    random = np.random.default_rng(0)
    segment = {
        "index": 0,
        "files": [],
        "rejects": [],
        "read": num_rows,
        "written": num_rows,
        "rejected": {},
        "filtered": 0,
    }
    for start in range(0, num_rows, rows_per_file):
        count = min(rows_per_file, num_rows - start)
        columns = {schema.ID: pa.array(range(start, start + count)), schema.CAPTION: pa.array(["a caption"] * count)}
        for column, shape in shapes.items():
            values = random.integers(0, 2**14, size=(count, *shape), dtype=np.uint16).view(
                schema.DTYPE
            )  # 0 to 2, no NaN
            columns[column] = schema.to_binary(values)
        name = f"{start:09d}.parquet"
        preprocess.write_parquet(pa.table(columns), storage.join(uri, "data", name))
        segment["files"].append({"name": name, "row_groups": schema.row_groups(count)})
    manifest = schema.Manifest(
        encoder={"model": "none", "revision": "0", "precision": "fp16"},
        resolutions=[int(column.rsplit("_", 1)[1]) for column in shapes if column != schema.EMBEDDINGS],
        columns=[schema.ColumnSpec(column, shape) for column, shape in shapes.items()],
        scaling_factor=1.0,
        id_type="int64",
        empty_caption_embedding=schema.encode_embedding(np.zeros(shapes[schema.EMBEDDINGS])),
        job={},
        segments=[segment],
    )
    storage.write_json(storage.join(uri, schema.MANIFEST), manifest.to_dict())
    return manifest


def train_in(step_seconds, values):
    """The worker loop, with steps that take a fixed time and compute nothing."""

    def played_step(self, step, units):
        time.sleep(step_seconds)
        num_kept = sum(int(unit.keep_U.sum()) for unit in units)
        return {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.0, "num_kept": num_kept}

    TrainStep.step = played_step
    train.train_loop_per_worker(values)


SD2_256 = {"image_latents_256": (2, 4, 32, 32), "caption_embeddings": (77, 1024)}
SMALL = {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (4, 16)}
