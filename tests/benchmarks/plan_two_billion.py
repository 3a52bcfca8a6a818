"""Planning an epoch of two billion samples in 200,000 files, from a made-up manifest: seconds and peak memory.

    python -m tests.benchmarks.plan_two_billion [--files 200000] [--rows-per-file 10000] [--buckets 12]

What a training run does before its first batch: read the manifest, describe it in config.json (the driver), plan (Ray
Train's controller), order the epoch, cut one chunk. And what its processes hold: a training worker plans from the
manifest's head; of the plan and the epoch's order, which travel in Ray's object store, a node holds one copy, and each
process that reads only what is no array. With all rows of one shape, and with `--buckets` shapes; the goal: at most 1.5
times the seconds and the memory.
"""

import dataclasses
import itertools
import json
import multiprocessing
import pathlib
import pickle
import resource
import tempfile
import time

from helpers.config import TrainingConfig
from helpers.latents import schema
from helpers.latents.manifest import FILES, MANIFEST, DataSets, Manifest
from helpers.latents.plan import load_plan, plan_run
from helpers.train import setup
from tests.benchmarks import record


def write_manifest(folder, num_files, rows_per_file, num_buckets):
    """As `manifest.write_manifest`, but one file at a time, so that writing it takes no memory of its own."""
    sizes = [(256 + 64 * (number // 4), 256 - 64 * (number % 4)) for number in range(num_buckets)]
    columns = [
        schema.ColumnSpec(schema.latents_column(*size), (2, 4, size[1] // 8, size[0] // 8), resolution=256)
        for size in sizes
    ]
    # A fiftieth of the rows is held out.
    held_out = rows_per_file // 50 // num_buckets
    rows = {}
    for number, column in enumerate(columns):
        mine = rows_per_file // num_buckets + (number < rows_per_file % num_buckets)
        rows[schema.bucket_name([column.name], held_out=False)] = mine - held_out
        rows[schema.bucket_name([column.name], held_out=True)] = held_out
    row_groups = {bucket: schema.row_groups(count) for bucket, count in rows.items()}
    groups = json.dumps(list(itertools.chain.from_iterable(row_groups.values())))
    buckets = json.dumps({bucket: len(groups) for bucket, groups in row_groups.items()})
    head = {
        "encoder": {"model": "none", "revision": "0", "precision": "fp16"},
        "resolutions": [256],
        "columns": [*columns, schema.ColumnSpec(schema.EMBEDDINGS, (77, 1024))],
        "scaling_factor": 0.18215,
        "id_type": "int64",
        "empty_caption_embedding": "",
        "job": {"validation_share": 0.0},
    }
    written = num_files * rows_per_file
    counts = {"index": 0, "rejects": [], "read": written, "written": written, "rejected": {}, "filtered": 0}
    counts["buckets"] = {bucket: num_files * count for bucket, count in rows.items()}
    with open(pathlib.Path(folder, FILES), "w") as file:
        file.write("[" + json.dumps(counts)[:-1] + ', "files": [')
        for number in range(num_files):
            name = f"{number:06d}-0123456789ab.parquet"
            file.write(("," if number else "") + f'{{"name": "{name}", "row_groups": {groups}, "buckets": {buckets}}}')
        file.write("]}]")
    manifest = Manifest.of([{**counts, "files": []}], **head)
    pathlib.Path(folder, MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest)))


def peak_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(num_files, rows_per_file, num_buckets):
    """{"seconds" by part, "memory_gib", ...} of this process, which must not have planned before."""
    seconds, last = {}, 0.0

    def clock(what=None):
        nonlocal last
        now = time.perf_counter()
        if what:
            seconds[what] = now - last
        last = now

    with tempfile.TemporaryDirectory() as folder:
        write_manifest(folder, num_files, rows_per_file, num_buckets)
        config = TrainingConfig(latents_uri=folder, resolution=256, global_batch_size=4096, units_per_step=32)
        clock()
        data = DataSets.open(config.proportions)
        clock("read the manifest")
        setup.describe_data(data)
        clock("describe the data in config.json")
        driver_gib = peak_gib()
        clock()
        plan = load_plan(data, config)
        clock("read files.json, plan")
        plan.chunk_rows(plan.chunks_per_epoch - 1)
        clock("order the epoch, cut its last chunk")
        memory_gib, plan_seconds = peak_gib(), sum(seconds.values())
        head = plan_run(DataSets.open(config.proportions), config)
        clock("plan on a training worker")
        assert head.steps_per_epoch == plan.steps_per_epoch
    buffers = []
    own = len(pickle.dumps((plan, plan.epoch_orders(0)), protocol=5, buffer_callback=buffers.append))
    shared = sum(buffer.raw().nbytes for buffer in buffers)
    return {
        "rows": plan.num_rows,
        "seconds": seconds,
        "plan_seconds": plan_seconds,
        "memory_gib": memory_gib,
        "driver_gib": driver_gib,
        "shared_mib": shared / 2**20,
        "own_mib": own / 2**20,
    }


def main():
    given = record.options(__doc__, files=200_000, rows_per_file=10_000, buckets=12)
    found = {}
    for count in (1, given.buckets):
        with multiprocessing.get_context("fork").Pool(1) as pool:  # for its own peak of memory
            found[count] = pool.apply(measure, (given.files, given.rows_per_file, count))
    one, several = found[1], found[given.buckets]
    slower, larger = (several[name] / one[name] for name in ("plan_seconds", "memory_gib"))
    record.write(
        "plan_two_billion",
        {
            f"planning {one['rows']:,} samples in {given.files:,} files": (
                f"{one['plan_seconds']:.1f} s, {one['memory_gib']:.1f} GiB (the driver {one['driver_gib']:.1f}); "
                f"a training worker {one['seconds']['plan on a training worker']:.2f} s; "
                f"{one['shared_mib']:,.0f} MiB a node, {one['own_mib']:.2f} MiB a reading process"
            ),
            f"the same in {given.buckets} buckets": f"{slower:.2f} times the seconds, {larger:.2f} times the memory",
        },
        by_bucket=found,
    )


if __name__ == "__main__":
    main()
