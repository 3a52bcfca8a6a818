"""Latents that no picture was encoded for, of any shape, as a finished job leaves them; a trainer that only takes
time."""

import time

import numpy as np
import pyarrow as pa

from helpers.encode import stages
from helpers.encode.job import Segment, segment_entry
from helpers.latents import schema
from helpers.latents.manifest import Manifest, encode_embedding, write_manifest
from helpers.train import loop
from helpers.train.step import TrainStep


def write_latents(uri, num_rows, shapes, rows_per_file, small_share=0.0, validation_share=0.0, job=None):
    """Random latents, and their manifest. `shapes`: column -> shape of one row; SD2's at 256 pixels are `SD2_256`.

    `small_share` of the rows have no latents in the last column of `shapes` but that of captions.
    """
    random, specs = np.random.default_rng(0), [schema.ColumnSpec(column, shape) for column, shape in shapes.items()]
    segment, reports = Segment(0, [], num_rows), []
    for start in range(0, num_rows, rows_per_file):
        count = min(rows_per_file, num_rows - start)
        columns = {schema.ID: pa.array(range(start, start + count)), schema.CAPTION: pa.array(["a caption"] * count)}
        largest = random.permutation(count) >= round(small_share * count)
        for spec in specs:
            values = random.integers(0, 2**14, size=(count, *spec.shape), dtype=np.uint16).view(
                schema.DTYPE
            )  # 0 to 2, no NaN
            is_last = spec.name == [name for name in shapes if name != schema.EMBEDDINGS][-1]
            columns[spec.name] = spec.encode(values, largest if is_last else None)
        rows = pa.table(columns).append_column(schema.REASON, pa.array([""] * count))
        rows = rows.append_column("encoder_call", pa.nulls(count)).append_column("transform_seconds", pa.nulls(count))
        report = stages.write_latents(
            rows,
            latents_uri=uri,
            segment_index=segment.index,
            columns=specs,
            id_type=pa.int64(),
            validation_share=validation_share,
        )
        reports.append(report)
    segments = [segment_entry(segment, reports)]
    manifest = Manifest.of(
        segments,
        encoder={"model": "none", "revision": "0", "precision": "fp16"},
        resolutions=[int(column.rsplit("_", 1)[1]) for column in shapes if column != schema.EMBEDDINGS],
        columns=specs,
        scaling_factor=1.0,
        id_type="int64",
        empty_caption_embedding=encode_embedding(np.zeros(shapes[schema.EMBEDDINGS])),
        job={"validation_share": 0.0, **(job or {})},
    )
    write_manifest(uri, manifest, segments)
    return manifest


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
