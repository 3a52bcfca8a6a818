"""A long preprocessing job: whether throughput and memory stay what they were at its beginning.

    python -m tests.benchmarks.million_rows [--rows 1000000] [--rows-per-segment 200000] [--stand-in]

Drawn pictures of 64 pixels go through the pipeline of Preprocessing.ipynb, in half an hour on two cores. With
`--stand-in` the encoder is no network but a pooling of pixels and a table of numbers for tokens: all else is the
same (files, decoding, blocks, commits), in a third of the time. Printed for each tenth of the rows: rows a second,
and the memory of the driver and all Ray processes (proportional set size, Linux), whose number varies: Ray keeps
some that wait for work. Rates run from the first rows that are written; the pauses in which a new segment starts
its workers are in them. Then the costs of a file, a row and a commit, and what they make of 2 billion rows.
"""

import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from helpers import storage
from helpers.config.notebook import PreprocessingConfig
from helpers.encode import encoder, prepare
from helpers.encode.job import ROWS_PER_SEGMENT
from helpers.latents.manifest import read_segments
from helpers.lesson import captioned_shapes
from helpers.raw import inputs
from helpers.runtime import session
from tests.benchmarks import record
from tests.pipelines import build_pipeline


class StandInLatentEncoder(encoder.LatentEncoder):
    """Latents and embeddings by a `StandInEncoder`."""

    def __init__(self, model, columns, *arguments, **options):
        self.encoder, self.columns, self.name = StandInEncoder(), columns, f"{os.getpid()}"
        self.several_shapes = False


class StandInEncoder:
    """Latents and embeddings of the right shapes, by arithmetic that costs next to nothing. No model."""

    def __init__(self):
        self.table = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float16)

    def encode_images(self, pixels_BHWC):
        rows, height, width, _ = pixels_BHWC.shape
        corners = pixels_BHWC[:, ::8, ::8].astype(np.float16).transpose(0, 3, 1, 2) / 255
        mean = np.concatenate([corners, corners[:, :1]], axis=1)
        moments = np.stack([mean, np.full_like(mean, 0.1)], axis=1).reshape(rows, 2, 4, height // 8, width // 8)
        return moments, np.ones(rows, bool)

    def encode_captions(self, caption_ids_BL):
        return self.table[np.asarray(caption_ids_BL) % 256], np.ones(len(caption_ids_BL), bool)


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


class Progress:
    """(seconds, rows, MiB, of these the object store's, processes) at every hundredth of the rows."""

    def __init__(self):
        self.points, self.session = [], os.getsid(0)

    def __call__(self, done, total):
        if not self.points or done - self.points[-1][1] >= total / 100:
            self.points.append((time.perf_counter(), done, *session_memory(self.session)))


def draw(folder, rows, parts=10):
    """Drawn pictures in as many folders, by all cores: each folder's seed makes rows, and ids, of its own."""
    write = functools.partial(captioned_shapes.write_data_set, num_rows=rows // parts, rows_per_file=10_000)
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for drawing in [pool.submit(write, f"{folder}/{part}", seed=part) for part in range(parts)]:
            drawing.result()


def main():
    given = record.options(__doc__, rows=1_000_000, rows_per_segment=200_000, stand_in=False)
    if os.getsid(0) != os.getpid():  # a session of its own, by which its processes' memory is told from others'
        command = [sys.executable, "-m", "tests.benchmarks.million_rows", *sys.argv[1:]]
        raise SystemExit(subprocess.call(command, start_new_session=True))
    with tempfile.TemporaryDirectory() as folder:
        config = PreprocessingConfig(storage=folder, resolutions=[64], input_uri=f"{folder}/drawn")
        started = time.perf_counter()
        draw(config.input_uri, given.rows)
        print(f"{given.rows:,} rows drawn in {time.perf_counter() - started:.0f} s", flush=True)
        session.connect()
        job, progress = prepare.prepare_job(config, given.rows_per_segment), Progress()
        kind = StandInEncoder if given.stand_in else encoder.LatentEncoder
        manifest = job.run(build_pipeline(job, latent_encoder=kind), progress)
        points = np.array(progress.points)
        edges = np.linspace(points[0, 1], points[-1, 1], 11)
        times = np.interp(edges, points[:, 1], points[:, 0])
        rates = np.diff(edges) / np.diff(times)
        places = np.searchsorted(points[:, 1], edges)  # a file's rows are reported together: a tenth may have no point
        tenths = [points[low : high + 1] for low, high in itertools.pairwise(places)]
        memory = np.array([tenth[:, 2:].max(axis=0) for tenth in tenths])
        each = (memory[:, 0] - memory[:, 1]) / memory[:, 2]
        print("tenth   rows/s   MiB   of it the object store   processes   MiB a process, the store apart")
        for number, (rate, (size, store, processes), one) in enumerate(zip(rates, memory, each, strict=True), start=1):
            print(f"{number:5} {rate:8.0f} {size:5.0f} {store:24.0f} {processes:11.0f} {one:32.0f}")
        print(
            f"last tenth / first tenth: throughput {rates[-1] / rates[0]:.3f}, "
            f"memory {memory[-1, 0] / memory[0, 0]:.3f}, a process {each[-1] / each[0]:.3f}"
        )
        segments = read_segments(config.latents_uri)
        shares = [share for segment in segments for _, share, _ in segment["timeline"]]
        busy = statistics.median(shares) if shares else None
        if busy is not None:
            print(f"the encoder computes for {busy:.1%} of its time (median over the job)")
        estimate(manifest, segments, config, given.rows)
        record.write(
            "million_rows",
            {
                f"{given.rows:,} rows preprocessed, the last tenth against the first": f"rate "
                f"{rates[-1] / rates[0]:.2f}, memory {memory[-1, 0] / memory[0, 0]:.2f}"
                + (f", encoder busy {busy:.0%}" if busy is not None else "")
            },
            rows_per_second=rates.tolist(),
            memory_mib=memory[:, 0].tolist(),
        )


def estimate(manifest, segments, config, rows, request_seconds=0.03, encoders=58):
    """Costs of a file, a row and a commit, and 2 billion rows of them on an object store."""
    paths = inputs.list_inputs(config.input_uri)
    started = time.perf_counter()
    inputs.count_rows(paths, config)
    footer = (time.perf_counter() - started) / len(paths)
    gaps = [segment["seconds"] - segment["encoding_seconds"] for segment in segments]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        storage.write_json(storage.join(folder, "entry.json"), segments[0])
        commit = time.perf_counter() - started
    stages = {stage: manifest.work[f"{stage}_seconds"] for stage in ("transform", "encode", "write")}
    files, size = sum(len(segment["files"]) for segment in segments), len(json.dumps(segments))
    print(f"a file: {footer * 1e3:.1f} ms to count its rows (16 at a time, on this disk)")
    print("a row: " + ", ".join(f"{seconds / rows * 1e3:.2f} ms {stage}" for stage, seconds in stages.items()))
    print(
        f"a segment: {statistics.median(gaps):.1f} s in which nothing is encoded, {commit * 1e3:.1f} ms for its commit"
    )
    print(f"a written file: {rows / files:.0f} rows, {size / files:.0f} bytes of files.json")
    scale, number = 2e9 / rows, 2e9 / (ROWS_PER_SEGMENT * encoders)
    print(
        f"2,000,000,000 rows in 200,000 files, {encoders} encoders, "
        f"three requests of {request_seconds * 1e3:.0f} ms a file: "
        f"{200_000 * (footer + 3 * request_seconds / 16) / 60:.0f} min of planning, {number:.0f} segments with "
        f"{number * statistics.median(gaps) / 60:.0f} min of pauses, {files * scale / 1e6:.1f} M files, "
        f"{size * scale / 1e6:.0f} MB of manifest"
    )


if __name__ == "__main__":
    main()
