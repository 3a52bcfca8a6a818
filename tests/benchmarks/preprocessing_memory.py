"""Peak memory of preprocessing: 20,000 rows against 2,000.

    python -m tests.benchmarks.preprocessing_memory [--rows 2000 20000]

Each size runs in a process of its own with a Ray of its own. Memory is the proportional set size (shared pages counted
once) of the driver and all Ray processes, sampled twice a second, the object store among them. Linux only.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import threading

from helpers import captioned_shapes, session
from helpers.config import PreprocessingConfig
from tests.pipelines import encode


def session_memory(session_id):
    """MiB of all processes in one Unix session and of what Ray started, by proportional set size."""
    total = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[3]) == session_id:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the listing
    return total / 1024


def measure(rows):
    """Peak MiB while `rows` rows are preprocessed in a new session of processes."""
    child = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.preprocessing_memory", "--child", str(rows)], start_new_session=True)
    peak, stop = 0, threading.Event()
    while child.poll() is None:
        peak = max(peak, session_memory(child.pid))
        stop.wait(0.5)
    if child.returncode:
        raise SystemExit(f"preprocessing {rows} rows failed")
    return peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs=2, default=[2_000, 20_000])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            config = PreprocessingConfig(storage=folder)
            captioned_shapes.write_parquet(config.raw_uri, arguments.child)
            session.connect()
            encode(config)
        return
    few, many = (measure(rows) for rows in arguments.rows)
    print(f"peak memory: {arguments.rows[0]:,} rows {few:.0f} MiB, {arguments.rows[1]:,} rows {many:.0f} MiB, ratio {many / few:.3f}")


if __name__ == "__main__":
    main()
