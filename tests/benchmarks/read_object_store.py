"""Ordered reading from an object store that answers late: samples a second against the same store without a delay.

    python -m tests.benchmarks.read_object_store [--rows 8192] [--rounds 5]

Rows of Stable Diffusion 2's size at 256 pixels are read by the epoch plan, in units of 128 rows, from an S3 server on
this machine (`tests/object_store/s3_server.py`): as it is, with 30 ms added to every request, and with one request in
fifty taking 2 s besides. The three take turns, and each round begins with another one. Each time, the same processes
read the rows twice, and the second reading counts: it does not measure how fast processes start. Rates count from the
first batch on, whose time stands apart. Goals: both delays at least 0.8 of the rate without; first batch within 2 s,
with late answers 5 s. The bytes and requests of a row say what a store must give: helpers/clusters/README.md.
"""

import contextlib
import math
import os
import subprocess
import sys

from helpers import cluster, storage
from tests.benchmarks import made_up, read_speed, record
from tests.object_store import s3_server

STORES = {
    "no delay": {"delay": 0, "late_every": 0},
    "30 ms a request": {"delay": 0.03, "late_every": 0},
    "30 ms, one in fifty 2 s": {"delay": 0.03, "late_every": 50},
}


@contextlib.contextmanager
def server():
    """The URL of an S3 server: the one that `AWS_ENDPOINT_URL` names, or one in a process of its own."""
    if url := os.environ.get("AWS_ENDPOINT_URL"):
        yield url
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.object_store.s3_server"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = process.stdout.readline().strip()
        names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
        os.environ.update({**names, "AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"})
        yield url
    finally:
        process.kill()


def main():
    given = record.options(__doc__, rows=8192, rounds=5)
    found = {name: [] for name in STORES}
    uri = "s3://bucket/read-object-store"
    with server() as url:
        cluster.connect()
        made_up.write_latents(uri, given.rows, made_up.SD2_256, read_speed.FILE)
        try:
            for number in range(given.rounds * len(STORES)):
                turn, place = divmod(number, len(STORES))
                name = list(STORES)[(turn + place) % len(STORES)]
                before = s3_server.configure(url, **STORES[name])
                found[name] += read_speed.by_plan(uri, given.rows, times=2)[1:]
                requests = (s3_server.configure(url) - before) / (2 * given.rows)
        finally:
            s3_server.configure(url, **STORES["no delay"])
            storage.delete(uri)
    rates = record.medians(found)
    alone = rates["no delay"][0]
    row_bytes = 2 * sum(map(math.prod, made_up.SD2_256.values()))
    record.write(
        "read_object_store",
        {
            "reading SD2's latents in order from a loopback S3 server: " + "; ".join(STORES): ", ".join(
                f"{rate:,.0f} ({rate / alone:.2f}, first batch {first:.1f} s)" for rate, first in rates.values()
            )
            + " samples/s",
            "the same: bytes and requests a row": f"{row_bytes:,}, {requests:.3f}",
        },
        samples_per_second_and_first_batch_seconds=found,
    )


if __name__ == "__main__":
    main()
