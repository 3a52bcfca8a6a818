"""Peak memory at ten times the data: of preprocessing, and of an online run whose trainer is slower than its encoders.

    python -m tests.benchmarks.memory [--job preprocessing online] [--rows 2000 20000]

Each size runs in a process of its own with a Ray of its own. Memory is the proportional set size (shared pages
counted once) of the driver and all Ray processes, sampled twice a second, the object store among them; the object
store alone is of it the shared memory. The online run is one epoch, its trainer is played, a fifth of a second for
64 rows, and what may be made ahead of it is set so low (8 MiB) that the smaller data reaches it too. Linux only.
"""

import argparse
import functools
import pathlib
import subprocess
import sys
import tempfile
import threading

import pandas as pd
from ray import cloudpickle

from helpers import ingest, online
from helpers.config import OnlineConfig, TrainingConfig
from helpers.lesson import captioned_shapes
from helpers.runtime import session
from tests.benchmarks import made_up, record
from tests.pipelines import encode, fit, online_stream

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(made_up)


def session_memory(session_id):
    """(MiB of all processes in one Unix session, of these the object store's pages in use, number of processes)."""
    total, store, processes = 0, 0, 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[3]) == session_id:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
                store += next(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:"))
                processes += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the listing
    return total / 1024, store / 1024, processes


def measure(job, rows):
    """Peaks, in MiB, while `rows` rows go through a job in a new session of processes."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", "--child", job, str(rows)]
    child = subprocess.Popen(command, start_new_session=True)
    peaks, stop = (0, 0, 0), threading.Event()
    while child.poll() is None:
        peaks = tuple(map(max, peaks, session_memory(child.pid)))
        stop.wait(0.5)
    if child.returncode:
        raise SystemExit(f"{job} of {rows} rows failed")
    return peaks


def run(job, rows, folder):
    raw = OnlineConfig(storage=folder)
    captioned_shapes.write_parquet(raw.raw_uri, rows)
    session.connect()
    if job == "preprocessing":
        return encode(raw)
    config = TrainingConfig(
        storage=folder,
        latents_uri=f"{folder}/online",
        run_name="online",
        global_batch_size=64,
        max_steps=rows // 64,
        checkpoint_every=10_000,
        validate_every=0,
        validation_share=0,
    )
    online.prepare(raw, config)
    ingest.BACKPRESSURE_STEPS, ingest.BACKPRESSURE_BYTES = 1, 8 * 2**20
    fit(config, loop=functools.partial(made_up.train_in, 0.2), stream=online_stream(raw))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", nargs="+", default=["preprocessing", "online"], choices=["preprocessing", "online"])
    parser.add_argument("--rows", type=int, nargs=2, default=[2_000, 20_000])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            return run(arguments.child[0], int(arguments.child[1]), folder)
    table = {}
    for job in arguments.job:
        few, many = (measure(job, rows) for rows in arguments.rows)
        for part, one, ten in zip(("all processes", "object store", "number of processes"), few, many, strict=True):
            table[job, part] = [one, ten, ten / one]
    columns = [f"{rows:,} rows" for rows in arguments.rows] + ["ratio"]
    print("peaks, in MiB:")
    print(pd.DataFrame.from_dict(table, orient="index", columns=columns).round(3).to_string())
    record.write(
        "memory",
        {
            f"peak memory of all processes, {arguments.rows[1]:,} rows against {arguments.rows[0]:,}: {job}": (
                "{1:,.0f} against {0:,.0f} MiB: {2:.2f}".format(*table[job, "all processes"])
            )
            for job in arguments.job
        },
        peaks={f"{job}, {part}": values for (job, part), values in table.items()},
    )


if __name__ == "__main__":
    main()
