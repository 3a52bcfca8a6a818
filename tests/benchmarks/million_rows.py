"""A long preprocessing job: whether throughput and memory stay what they were at its beginning.

    python -m tests.benchmarks.million_rows [--rows 1000000] [--rows-per-segment 200000] [--stand-in]

Drawn pictures of 64 pixels go through the pipeline of Preprocessing.ipynb, in half an hour on two cores. With
`--stand-in` the encoder is no network but a pooling of pixels and a table of numbers for tokens: all else is the
same (files, decoding, blocks, commits), in a third of the time. Measured are, for each tenth of the rows, rows a second
and the memory of the driver and all Ray processes (proportional set size, Linux). Rates run from the first rows that
are written; the pauses in which a new segment starts its workers are in them. Then the costs of a file, a row and a
commit.
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

from helpers import cluster, storage
from helpers.config import PreprocessingConfig
from helpers.encode import encoder, prepare
from helpers.latents.manifest import read_segments
from helpers.lesson import captioned_shapes
from helpers.raw import inputs
from tests.benchmarks import record
from tests.pipelines import build_pipeline

STAGES = ("transform", "encode", "write")


class StandInLatentEncoder(encoder.LatentEncoder):
    """Latents and embeddings of the right shapes, by arithmetic that costs next to nothing. No model."""

    def __init__(self, model, columns, **options):
        self.columns, self.name = columns, f"{os.getpid()}"
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
    """MiB of all processes in one Unix session."""
    total = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[3]) == session_id:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the listing
    return total / 1024


class Progress:
    """(seconds, rows, MiB) at every hundredth of the rows."""

    def __init__(self):
        self.points, self.session = [], os.getsid(0)

    def __call__(self, done, total):
        if not self.points or done - self.points[-1][1] >= total / 100:
            self.points.append((time.perf_counter(), done, session_memory(self.session)))


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
        draw(config.input_uri, given.rows)
        cluster.connect()
        job, progress = prepare.prepare_job(config, given.rows_per_segment), Progress()
        kind = StandInLatentEncoder if given.stand_in else encoder.LatentEncoder
        manifest = job.run(build_pipeline(job, latent_encoder=kind), progress)
        points = np.array(progress.points)
        edges = np.linspace(points[0, 1], points[-1, 1], 11)
        rates = np.diff(edges) / np.diff(np.interp(edges, points[:, 1], points[:, 0]))
        places = np.searchsorted(points[:, 1], edges)  # a file's rows are reported together: a tenth may have no point
        memory = np.array([points[low : high + 1, 2].max() for low, high in itertools.pairwise(places)])
        segments = read_segments(config.latents_uri)
        shares = [share for segment in segments for _, share, _ in segment["timeline"]]
        said = f"rate {rates[-1] / rates[0]:.2f}, memory {memory[-1] / memory[0]:.2f}"
        if shares:
            said += f", encoder busy {statistics.median(shares):.0%}"
        record.write(
            "million_rows",
            {f"{given.rows:,} rows preprocessed, the last tenth against the first": said},
            rows_per_second=rates.tolist(),
            memory_mib=memory.tolist(),
            costs=costs(manifest, segments, config, given.rows),
        )


def costs(manifest, segments, config, rows):
    """Seconds and bytes of a file, a row, a segment and a commit: of these README estimates two billion rows."""
    paths = inputs.list_inputs(config.input_uri)
    started = time.perf_counter()
    inputs.count_rows(paths, config)
    count_seconds = (time.perf_counter() - started) / len(paths)
    pauses = [segment["seconds"] - segment["encoding_seconds"] for segment in segments]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        storage.write_json(storage.join(folder, "entry.json"), segments[0])
        commit_seconds = time.perf_counter() - started
    num_files = sum(len(segment["files"]) for segment in segments)
    return {
        "seconds to count a file's rows": count_seconds,
        "seconds of a segment in which nothing is encoded": statistics.median(pauses),
        "seconds of a commit": commit_seconds,
        "bytes of files.json for a written file": len(json.dumps(segments)) / num_files,
        **{f"seconds of a row, {stage}": manifest.work[f"{stage}_seconds"] / rows for stage in STAGES},
    }


if __name__ == "__main__":
    main()
