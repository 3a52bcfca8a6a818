"""MosaicML's StreamingDataset over rows of Stable Diffusion 2's size, for `read_speed --peer-python`.

It pins older packages than this project, so it runs in an environment of its own, without this project's modules:

    python3 -m venv peer && peer/bin/pip install mosaicml-streaming==0.13
    peer/bin/python tests/benchmarks/streaming_peer.py FOLDER --rows 8192 --workers 0

Prints `{"rate": samples a second after the first batch, "first": seconds to the first batch}`. The folder is written
by the first call.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import torch
from streaming import MDSWriter, StreamingDataset

BATCH = 128
SHAPES = {"image_latents_256": (2, 4, 32, 32), "caption_embeddings": (77, 1024)}


def write(folder, num_rows):
    random = np.random.default_rng(0)
    columns = {"id": "int", "caption": "str", **dict.fromkeys(SHAPES, "bytes")}
    with MDSWriter(out=folder, columns=columns) as writer:
        for row in range(num_rows):
            tensors = {
                name: random.integers(0, 2**14, size=shape, dtype=np.uint16).tobytes() for name, shape in SHAPES.items()
            }
            writer.write({"id": row, "caption": "a caption", **tensors})


def collate(rows):
    return {
        name: torch.from_numpy(np.stack([np.frombuffer(row[name], np.float16).reshape(shape) for row in rows]))
        for name, shape in SHAPES.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    if not pathlib.Path(arguments.folder, "index.json").exists():
        write(arguments.folder, arguments.rows)
    data = StreamingDataset(local=arguments.folder, shuffle=True, batch_size=BATCH)
    loader = torch.utils.data.DataLoader(data, BATCH, num_workers=arguments.workers, collate_fn=collate)
    started, first, count = time.perf_counter(), None, 0
    for batch in loader:
        if first is None:
            first = time.perf_counter()
        else:
            count += len(batch["caption_embeddings"])
    print(json.dumps({"rate": count / (time.perf_counter() - first), "first": first - started}))


if __name__ == "__main__":
    main()
