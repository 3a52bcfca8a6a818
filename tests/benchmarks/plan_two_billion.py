"""Planning an epoch of two billion samples in 200,000 files, from a made-up manifest: seconds and peak memory.

    python -m tests.benchmarks.plan_two_billion [--files 200000] [--rows-per-file 10000]

What a training run does before its first batch: read the manifest, describe it in config.json, plan, order the epoch,
cut one chunk. And what its processes hold: a training worker plans from the manifest's head; of the plan and the
epoch's order, which travel in Ray's object store, a node holds one copy, and each process that reads only what is no
array.
"""

import argparse
import json
import pathlib
import pickle
import resource
import tempfile
import time

from helpers import ingest, run_setup, schema
from helpers.config import TrainingConfig
from tests.benchmarks import record


def write_manifest(folder, num_files, rows_per_file):
    """As `schema.Manifest.to_dict` gives it, but one file at a time, so that writing it takes no memory of its own."""
    groups = json.dumps(schema.row_groups(rows_per_file))
    head = {
        "schema_version": schema.SCHEMA_VERSION,
        "encoder": {"model": "none", "revision": "0", "precision": "fp16"},
        "resolutions": [256],
        "columns": [
            {"name": schema.latents_column(256), "shape": [2, 4, 32, 32]},
            {"name": schema.EMBEDDINGS, "shape": [77, 1024]},
        ],
        "scaling_factor": 0.18215,
        "id_type": "int64",
        "empty_caption_embedding": "",
        "job": {},
    }
    rows = num_files * rows_per_file
    counts = {"index": 0, "rejects": [], "read": rows, "written": rows, "rejected": {}, "filtered": 0}
    with open(pathlib.Path(folder, "manifest.json"), "w") as file:
        file.write(json.dumps({**head, **counts})[:-1] + ', "segments": [' + json.dumps(counts)[:-1] + ', "files": [')
        for number in range(num_files):
            file.write(
                ("," if number else "") + f'{{"name": "{number:06d}-0123456789ab.parquet", "row_groups": {groups}}}'
            )
        file.write("]}]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--rows-per-file", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(folder, arguments.files, arguments.rows_per_file)
        size = pathlib.Path(folder, "manifest.json").stat().st_size
        started = time.perf_counter()
        config = TrainingConfig(latents_uri=folder, resolution=256, global_batch_size=4096, units_per_step=32)
        manifests = ingest.read_manifests(config)
        seconds = {"read the manifest": time.perf_counter() - started}
        run_setup.describe_data(manifests, config)
        seconds["describe the data in config.json"] = time.perf_counter() - started - sum(seconds.values())
        plan = ingest.plan_run(manifests, config)
        del manifests
        seconds["plan"] = time.perf_counter() - started - sum(seconds.values())
        plan.chunk_rows(plan.chunks_per_epoch - 1)
        seconds["order the epoch, cut its last chunk"] = time.perf_counter() - started - sum(seconds.values())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        started = time.perf_counter()
        head = ingest.plan_run(ingest.read_manifests(config, heads=True), config)
        worker_seconds = time.perf_counter() - started
        assert head.steps_per_epoch == plan.steps_per_epoch
    buffers = []
    own = len(pickle.dumps((plan, plan.row_group_order(0)), protocol=5, buffer_callback=buffers.append))
    shared = sum(buffer.raw().nbytes for buffer in buffers)
    print(
        f"{plan.num_rows:,} samples in {arguments.files:,} files, {len(plan.sources[0].group_rows):,} row groups; "
        f"manifest of {size / 2**20:.0f} MiB; {plan.steps_per_epoch:,} steps, {plan.chunks_per_epoch:,} chunks"
    )
    for what, took in seconds.items():
        print(f"{what:40}{took:8.1f} s")
    print(f"{'all':40}{sum(seconds.values()):8.1f} s")
    print(f"peak memory of the process {memory:.2f} GiB")
    print(f"a training worker plans in {worker_seconds:.2f} s")
    print(f"plan and order: {shared / 2**20:,.0f} MiB a node, {own / 2**20:.2f} MiB besides in each process that reads")
    record.write(
        "plan_two_billion",
        {
            f"planning {plan.num_rows:,} samples in {arguments.files:,} files": (
                f"{sum(seconds.values()):.1f} s, {memory:.1f} GiB; a training worker {worker_seconds:.2f} s; "
                f"{shared / 2**20:,.0f} MiB a node, {own / 2**20:.2f} MiB a reading process"
            )
        },
        seconds=seconds,
        memory_gib=memory,
        worker_seconds=worker_seconds,
        shared_mib=shared / 2**20,
        own_mib=own / 2**20,
    )


if __name__ == "__main__":
    main()
