"""Samples a second, from Parquet on the local disk into a worker's tensors: in the plan's order, and without any.

    python -m tests.benchmarks.read_speed [--rows 8192] [--rounds 3]

Rows have the size of Stable Diffusion 2's at 256 pixels: 8 x 32 x 32 fp16 moments and 77 x 1024 fp16 text, 174 kB.
The same files are read by the epoch plan in units of 128 rows, by Ray's `read_parquet` with `iter_torch_batches` in
no order, and by pyarrow in one thread, a row group at a time. Each round starts Ray anew: a worker reads the plan's
epoch twice, cold and with all processes warm. Rates count from the first batch on, whose time, from a worker's first
`next()`, stands apart. The readers take turns. All read from the page cache, where the files are after they were
written.

Goals: warm at least 0.5 of pyarrow's loop, first batch within 1 s; cold 3 s. A row is copied four times: by pyarrow
when it is read, into its position in the plan's order, into Ray's object store, and into the worker's memory.
"""

import os
import statistics
import sys
import tempfile
import time

import pyarrow.parquet as pq
import ray
import torch
from ray import cloudpickle
from ray.data.collate_fn import ArrowBatchCollateFn

from helpers import cluster, storage
from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.latents.manifest import DataSets
from helpers.latents.plan import load_plan
from helpers.latents.read import execution_options, latents_dataset
from helpers.train.step import Unit
from tests.benchmarks import made_up, record

UNIT_ROWS, FILE = 128, 1024
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def planned(uri, num_rows):
    """`(dataset of the plan's blocks, manifest)` of an epoch."""
    config = TrainingConfig(
        latents_uri=uri,
        resolution=256,
        global_batch_size=UNIT_ROWS,
        validation_share=0,
        max_steps=num_rows // UNIT_ROWS,
    )
    data = DataSets.open(config.proportions)
    rows = latents_dataset(load_plan(data, config), 0, config.max_steps)
    rows.context.execution_options = execution_options(data.row_bytes, UNIT_ROWS)  # as Ray Train sets them
    return rows, data.first


class Worker:
    """What a worker of Ray Train does with its shard."""

    def measure(self, shard, manifest, times):
        """`timed` of each of several passes over the shard."""
        passes = (shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4) for _ in range(times))
        return [
            timed(Unit.from_arrow(block, manifest, manifest.latents(256), 0).text for block in blocks)
            for blocks in passes
        ]


def by_plan(uri, num_rows, times=1):
    """Units in order, once or several times by the same processes: `timed` of each pass."""
    data, manifest = planned(uri, num_rows)
    shard = data.streaming_split(1, equal=True)[0]
    worker = ray.remote(Worker).options(num_cpus=1).remote()
    return ray.get(worker.measure.remote(shard, manifest, times))


class ToTensors(ArrowBatchCollateFn):
    """`iter_torch_batches` cannot convert fixed-size binary columns by itself."""

    def __call__(self, table):
        arrays = {column: schema.from_binary(table[column], shape)[0] for column, shape in made_up.SD2_256.items()}
        return {column: torch.from_numpy(array.copy()) for column, array in arrays.items()}


def unordered(uri, num_rows):
    """Ray's own reader."""
    data = ray.data.read_parquet(f"{uri}/data")
    data.context.execution_options.preserve_order = False
    batches = data.iter_torch_batches(batch_size=UNIT_ROWS, collate_fn=ToTensors(), prefetch_batches=4)
    return timed(batch["caption_embeddings"] for batch in batches)


def by_pyarrow(uri, num_rows):
    """What the disk and the format give."""

    def batches():
        for path in storage.list_files(f"{uri}/data"):
            with pq.ParquetFile(path) as file:
                for group in range(0, file.metadata.num_row_groups, UNIT_ROWS // schema.ROWS_PER_ROW_GROUP):
                    table = file.read_row_groups([group, group + 1], use_threads=False)
                    yield ToTensors()(table)["caption_embeddings"]

    return timed(batches())


def timed(tensors):
    """(samples a second after the first batch, seconds to the first batch)"""
    started, first, count = time.perf_counter(), None, 0
    for tensor in tensors:
        if first is None:
            first = time.perf_counter()
        else:
            count += len(tensor)
    return count / (time.perf_counter() - first), first - started


def main():
    given = record.options(__doc__, rows=8192, rounds=3)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{folder}/latents"
        made_up.write_latents(uri, given.rows, made_up.SD2_256, FILE)
        readers = {"read_parquet, no order": unordered, "pyarrow, one thread": by_pyarrow}
        for _ in range(given.rounds):
            ray.shutdown()
            cluster.connect()
            os.environ["PRETRAIN_LOCAL_RAY"] = "1"  # as in the process that makes a run's dataset
            passes = by_plan(uri, given.rows, times=2)
            results = dict(zip(("in the plan's order, cold", "in the plan's order, warm"), passes, strict=True))
            for name, one in (results | {name: reader(uri, given.rows) for name, reader in readers.items()}).items():
                found.setdefault(name, []).append(one)
    said = []
    for name, rows in found.items():
        rate, first = map(statistics.median, zip(*rows, strict=True))
        said.append(f"{name}: {rate:,.0f} samples/s, first batch after {first:.1f} s")
    summary = {"reading SD2's latents": "; ".join(said)}
    record.write("read_speed", summary, samples_per_second_and_first_batch_seconds=found)


if __name__ == "__main__":
    main()
