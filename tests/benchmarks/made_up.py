"""Latents that no picture was encoded for, of any shape, as a finished job leaves them; a trainer that only takes
time."""

import time

import numpy as np
import pyarrow as pa

from helpers.latents import schema
from helpers.train import loop
from helpers.train.step import TrainStep
from tests.latents import write_job


def write_latents(uri, num_rows, shapes, rows_per_file, small_share=0.0, validation_share=0.0, job=None):
    """Random latents, and their manifest. `shapes`: column -> shape of one row; SD2's at 256 pixels are `SD2_256`.

    `small_share` of the rows have no latents in the last column of `shapes` but that of captions.
    """
    random, specs = np.random.default_rng(0), [schema.ColumnSpec(column, shape) for column, shape in shapes.items()]

    def rows(start):
        count = min(rows_per_file, num_rows - start)
        columns = {schema.ID: pa.array(range(start, start + count)), schema.CAPTION: pa.array(["a caption"] * count)}
        large = random.permutation(count) >= round(small_share * count)
        for spec in specs:
            bits = random.integers(0, 2**14, size=(count, *spec.shape), dtype=np.uint16)
            columns[spec.name] = spec.encode(bits.view(schema.DTYPE), large if spec is specs[-2] else None)  # no NaN
        empty = {"encoder_call": pa.nulls(count), "transform_seconds": pa.nulls(count)}
        return pa.table({**columns, **dict.fromkeys([schema.REASON, "note"], pa.array([""] * count)), **empty})

    return write_job(uri, num_rows, map(rows, range(0, num_rows, rows_per_file)), specs, validation_share, job)


def train_in(step_seconds, config, **options):
    """The worker loop, with steps that take a fixed time and compute nothing."""

    def played_step(self, step, units):
        time.sleep(step_seconds)
        num_kept = sum(int(unit.keep_U.sum()) for unit in units)
        return {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.0, "num_kept": num_kept}

    TrainStep.step = played_step
    loop.train_loop_per_worker(config, **options)


SD2_256 = {"image_latents_256": (2, 4, 32, 32), "caption_embeddings": (77, 1024)}
SMALL = {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (4, 16)}
