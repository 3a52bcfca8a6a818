"""Rate of the preprocessing job over its number of encoders, each of which takes a fixed time for an image.

    python -m tests.benchmarks.encoder_scaling [--encoders 1 2 4 8 16] [--parts 3]

Encoders are simulated: each waits until its time for a batch is over, so that two cores can be sixteen encoders. All
else is the pipeline of Preprocessing.ipynb: files are read, images are decoded and resized, latents are written and
committed. Rows travel in the parts that tasks read, so each encoder gets `--parts` of them. The last job has one
encoder that does not wait: its rate is what the rest of the pipeline can do on these cores. Rates run from the end of
the first batch that is encoded to the end of the last.
"""

import os
import sys
import tempfile
import time

import numpy as np
from ray import cloudpickle

from helpers import cluster
from helpers.config import PreprocessingConfig
from helpers.encode import encoder
from helpers.lesson import captioned_shapes
from helpers.raw import inputs
from tests.benchmarks import record
from tests.pipelines import encode

ENCODER_RATE, BATCH = 80, 64  # images/s of an encoder; images of a call
# Workers cannot import this module: what they need of it travels with the encoder.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class StandInEncoder(encoder.LatentEncoder):
    """Latents and embeddings of the right shapes, without models."""

    def __init__(self, model, columns, **options):
        self.columns, self.name = columns, f"{os.getpid()}"

    def encode_images(self, pixels_BHWC):
        rows, height, width, _ = pixels_BHWC.shape
        return np.full((rows, 2, 4, height // 8, width // 8), 0.1, np.float16), np.ones(rows, bool)

    def encode_captions(self, caption_ids_BL):
        return np.zeros((*np.shape(caption_ids_BL), 128), np.float16), np.ones(len(caption_ids_BL), bool)


class SimulatedEncoder(StandInEncoder):
    """A call with n images takes n / ENCODER_RATE seconds."""

    def __call__(self, table):
        until = time.monotonic() + len(table) / ENCODER_RATE
        found = super().__call__(table)
        time.sleep(max(0.0, until - time.monotonic()))
        return found


def rate(uri, name, count, rows, kind):
    """Images/s of a job with `count` encoders of a kind."""
    config = PreprocessingConfig(
        storage=uri,
        latents_uri=f"{uri}/{name}",
        resolutions=[64],
        limit=rows,
        num_encoders=count,
        encoder_batch_size=BATCH // 8,
    )
    manifest = encode(config, latent_encoder=kind)
    found = (manifest.read - count * BATCH) / manifest.work["encoding_seconds"]
    print(f"{name}: {found:.0f} images/s", flush=True)
    return found


def main():
    given = record.options(__doc__, encoders=[1, 2, 4, 8, 16], parts=3)
    cluster.connect(num_cpus=max(given.encoders) + 4)
    rows = given.parts * inputs.PART_ROWS  # of each encoder
    with tempfile.TemporaryDirectory() as uri:
        captioned_shapes.write_data_set(PreprocessingConfig(storage=uri).raw_uri, max(given.encoders) * rows)
        rates = {}
        for count in given.encoders:
            rates[count] = rate(uri, f"encoders-{count}", count, count * rows, SimulatedEncoder)
        ceiling = rate(uri, "without-waiting", 1, max(rates) * rows, StandInEncoder)
    counts = ", ".join(map(str, rates))
    shares = ", ".join(f"{found / (count * ENCODER_RATE):.2f}" for count, found in rates.items())
    summary = {
        f"preprocessing with {counts} simulated encoders of {ENCODER_RATE} images/s, over their sum": shares,
        "the same with one encoder that does not wait": f"{ceiling:.0f} images/s",
    }
    record.write("encoder_scaling", summary, images_per_second=rates, ceiling=ceiling)


if __name__ == "__main__":
    main()
