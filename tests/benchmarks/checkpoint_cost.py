"""Seconds to load a checkpoint of 10 GB with its checksums and without, and to compute them after saving.

    python -m tests.benchmarks.checkpoint_cost [--gigabytes 10] [--rounds 3] [--folder /tmp]

One process saves and loads a dictionary of tensors, in turns: as `torch.distributed.checkpoint` (DCP) does alone, and
as a run does (`checkpoint_io.read`), which checks each piece before its bytes are used. Before a group of workers
starts, the checkpoint that is chosen is read once more (`integrity.find_damage`), in eight threads. The checksums of a
save are computed in the thread that writes the files, while training goes on. Needs one and a half times the memory.
Reads come from the page cache, as far as it reaches.

Goal: loading takes at most 1.5 times as long as DCP alone.
"""

import functools
import json
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed.checkpoint as dcp

from helpers.train import checkpoint, checkpoint_io, integrity
from tests.benchmarks import record

PIECE = 2**24  # numbers in a tensor: 64 MiB


def timed(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main():
    given = record.options(__doc__, gigabytes=10.0, rounds=3, folder=tempfile.gettempdir())
    num_tensors = max(1, int(given.gigabytes * 1e9 / 4 / PIECE))
    state = {f"{number}": torch.randn(PIECE) for number in range(num_tensors)}
    saves = {dcp.FileSystemWriter: [], integrity.SummingWriter: []}
    for _ in range(given.rounds):
        for kind, found in saves.items():
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                found.append(timed(functools.partial(dcp.save, state, storage_writer=kind(folder), no_dist=True)))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        pieces, writer = {}, integrity.SummingWriter(folder)
        dcp.save(state, storage_writer=writer, no_dist=True)
        sums = timed(lambda: pieces.update(writer.sum_pieces()))
        pathlib.Path(folder, checkpoint.PROGRESS).write_text(json.dumps({"step": 1, "checksums": pieces}))
        measures = {
            "DCP alone": lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True),
            "choosing": lambda: integrity.find_damage(folder, pieces),
            "checked": lambda: checkpoint_io.read(folder, state, no_dist=True),
        }
        seconds = {name: [] for name in measures}
        for _ in range(given.rounds):
            for name, measure in measures.items():
                seconds[name].append(timed(measure))
                print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    alone, choosing, checked, plain, save = map(statistics.median, [*seconds.values(), *saves.values()])
    summary = {
        f"loading {given.gigabytes:g} GB, DCP alone and checked": (
            f"{alone:.1f}, {checked:.1f} s: {checked / alone:.2f} times"
        ),
        "reading it to choose it, before": f"{choosing:.1f} s",
        "saving it, DCP alone and as a run does": f"{plain:.1f}, {save:.1f} s",
        "its checksums, beside the training": f"{sums:.1f} s",
    }
    saved = {kind.__name__: found for kind, found in saves.items()}
    record.write("checkpoint_cost", summary, seconds=seconds, saves=saved, sums=sums)


if __name__ == "__main__":
    main()
