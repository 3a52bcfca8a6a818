"""Rows a second from Parquet files of different layouts, in one thread and in two: why latents are laid out as they
are.

    python -m tests.benchmarks.read_layout [--rows 2048] [--rounds 5]

The rows are of Stable Diffusion 2's shapes at 256 pixels (8 x 32 x 32 and 77 x 1024 numbers, 174 kB), made up. Row
groups are read in a permuted order, as the epoch plan does, all columns to NumPy arrays; the files are in the page
cache. Layouts take turns, medians are printed. "chunk": bytes that a reader holds to mix 16 row groups with each
other.
"""

import concurrent.futures
import itertools
import pathlib
import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from helpers import schema
from tests.benchmarks import made_up, record

PLAIN = {"compression": "none", "use_dictionary": False, "write_statistics": False}
# name -> (row group, rows a file, how tensors are stored, writer's options)
LAYOUTS = {
    "16 rows a group": (16, 1024, "binary", PLAIN),
    "64 rows a group (default)": (64, 1024, "binary", PLAIN),
    "256 rows a group": (256, 1024, "binary", PLAIN),
    "1024 rows a group": (1024, 1024, "binary", PLAIN),
    "64, files of 128 rows": (64, 128, "binary", PLAIN),
    "64, files of 2048 rows": (64, 2048, "binary", PLAIN),
    "64, zstd": (64, 1024, "binary", PLAIN | {"compression": "zstd"}),
    "64, dictionary and statistics": (64, 1024, "binary", {"compression": "none"}),
    "64, lists of floats": (64, 1024, "list", PLAIN),
}


def column(values, kind):
    if kind == "binary":
        return schema.to_binary(values)
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values[0].size)


def write(folder, rows, layout):
    """Files of one layout: their paths and bytes."""
    group, per_file, kind, options = layout
    random, paths = np.random.default_rng(0), []
    for start in range(0, rows, per_file):
        count = min(per_file, rows - start)
        columns = {"id": pa.array(range(start, start + count)), "caption": pa.array(["a caption"] * count)}
        for name, shape in made_up.SD2_256.items():
            columns[name] = column(random.normal(size=(count, *shape)).astype(np.float16), kind)
        paths.append(folder / f"{start:06d}.parquet")
        pq.write_table(pa.table(columns), paths[-1], row_group_size=group, **options)
    return paths, sum(path.stat().st_size for path in paths)


def read(paths, threads):
    """Rows a second of all row groups, in a permuted order."""
    groups = [(path, group) for path in paths for group in range(pq.read_metadata(path).num_row_groups)]
    order = [groups[place] for place in np.random.default_rng(1).permutation(len(groups))]

    def take(mine):
        rows = 0
        for file, group in mine:
            table = file.read_row_group(group, use_threads=False)
            for name, shape in made_up.SD2_256.items():
                if pa.types.is_fixed_size_binary(table[name].type):
                    values, _ = schema.from_binary(table[name], shape)
                else:
                    values = table[name].combine_chunks().flatten().to_numpy().reshape(-1, *shape)
                assert values.shape == (len(table), *shape)
            rows += len(table)
        return rows

    # A file's reader must not be shared: each thread opens its own.
    shares = [[(pq.ParquetFile(path), group) for path, group in order[n::threads]] for n in range(threads)]
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        rows = sum(pool.map(take, shares))
    return rows / (time.perf_counter() - started)


def main():
    given = record.options(__doc__, rows=2048, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        found, sizes = {}, {}
        for name, layout in LAYOUTS.items():
            place = pathlib.Path(folder, name)
            place.mkdir()
            found[name], sizes[name] = write(place, given.rows, layout)
        rates = {(name, threads): [] for name in LAYOUTS for threads in (1, 2)}
        for _, (name, threads) in itertools.product(range(given.rounds), rates):
            rates[name, threads].append(read(found[name], threads))
        print(f"{'layout':32} {'1 thread':>9} {'2 threads':>10} {'kB a row':>9} {'chunk, MB':>10}")
        measured = {}
        for name, (group, *_) in LAYOUTS.items():
            one, two = (statistics.median(rates[name, threads]) for threads in (1, 2))
            size = sizes[name] / given.rows
            measured[name] = {"one thread": one, "two threads": two, "bytes a row": size}
            print(f"{name:32} {one:9,.0f} {two:10,.0f} {size / 1e3:9.1f} {16 * group * size / 1e6:10,.0f}")
    ours = measured["64 rows a group (default)"]
    record.write(
        "read_layout",
        {
            "reading the stored layout in the plan's order, one thread and two": f"{ours['one thread']:,.0f}, "
            f"{ours['two threads']:,.0f} rows/s"
        },
        layouts=measured,
    )


if __name__ == "__main__":
    main()
