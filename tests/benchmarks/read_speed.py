"""Samples a second, from Parquet on the local disk into a worker's tensors: in the plan's order, and without any.

    python -m tests.benchmarks.read_speed [--rows 8192] [--rounds 3]

Rows have the size of Stable Diffusion 2's at 256 pixels: 8 x 32 x 32 fp16 moments and 77 x 1024 fp16 text, 174 kB.
The same files are read by the epoch plan in units of 128 rows, by Ray's `read_parquet` with `iter_torch_batches` in
no order, and by pyarrow in one thread, a row group at a time. Rates count from the first batch on, whose time
stands apart. The readers take turns; medians are printed. All read from the page cache, where the files are after
they were written.
"""

import argparse
import statistics
import tempfile
import time

import pyarrow.parquet as pq
import ray
import torch
from ray.data.collate_fn import ArrowBatchCollateFn

from helpers import ingest, schema, storage
from helpers.config import TrainingConfig
from helpers.runtime import session
from helpers.train_step import Unit
from tests.benchmarks import made_up, record

UNIT, FILE = 128, 1024


def by_plan(uri, num_rows):
    """Units in order."""
    config = TrainingConfig(
        latents_uri=uri, resolution=256, global_batch_size=UNIT, validation_share=0, max_steps=num_rows // UNIT
    )
    manifests = ingest.read_manifests(config)
    plan = ingest.plan_run(manifests, config)
    data = ingest.latents_dataset(plan, 0, config.max_steps, resolution=256, validation_share=0)
    shard = data.streaming_split(1, equal=True)[0]  # what a worker of Ray Train gets
    for table in shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4):
        yield Unit.from_arrow(table, manifests[uri], 256, 0).text


class ToTensors(ArrowBatchCollateFn):
    """`iter_torch_batches` cannot convert fixed-size binary columns by itself."""

    def __call__(self, table):
        arrays = {column: schema.from_binary(table[column], shape)[0] for column, shape in made_up.SD2_256.items()}
        return {column: torch.from_numpy(array.copy()) for column, array in arrays.items()}


def unordered(uri, num_rows):
    """Ray's own reader."""
    data = ray.data.read_parquet(f"{uri}/data")
    data.context.execution_options.preserve_order = False
    for batch in data.iter_torch_batches(batch_size=UNIT, collate_fn=ToTensors(), prefetch_batches=4):
        yield batch["caption_embeddings"]


def by_pyarrow(uri, num_rows):
    """What the disk and the format give."""
    for path in storage.list_files(f"{uri}/data"):
        with pq.ParquetFile(path) as file:
            for group in range(0, file.metadata.num_row_groups, UNIT // schema.ROWS_PER_ROW_GROUP):
                table = file.read_row_groups([group, group + 1], use_threads=False)
                yield ToTensors()(table)["caption_embeddings"]


def measure(reader, uri, num_rows):
    """(samples a second after the first batch, seconds to the first batch)"""
    started, first, count = time.perf_counter(), None, 0
    for tensor in reader(uri, num_rows):
        if first is None:
            first = time.perf_counter()
        else:
            count += len(tensor)
    return count / (time.perf_counter() - first), first - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    session.connect()
    readers = {"in the plan's order": by_plan, "read_parquet, no order": unordered, "pyarrow, one thread": by_pyarrow}
    found = {name: [] for name in readers}
    with tempfile.TemporaryDirectory() as uri:
        made_up.write_latents(uri, arguments.rows, made_up.SD2_256, FILE)
        for _ in range(arguments.rounds):
            for name, reader in readers.items():
                found[name].append(measure(reader, uri, arguments.rows))
    print(f"{'':24}{'samples/s':>12}{'first batch, s':>16}")
    medians = {}
    for name, results in found.items():
        medians[name], first = (statistics.median(values) for values in zip(*results, strict=True))
        print(f"{name:24}{medians[name]:12,.0f}{first:16.2f}")
    ratio = medians["in the plan's order"] / medians["read_parquet, no order"]
    print(f"in order against no order: {ratio:.2f}")
    record.write(
        "read_speed",
        {
            "reading SD2's latents in the plan's order; Ray's read_parquet in no order; pyarrow, one thread": ", ".join(
                f"{medians[name]:,.0f}" for name in readers
            )
            + " samples/s"
        },
        samples_per_second=medians,
        ratio=ratio,
    )


if __name__ == "__main__":
    main()
