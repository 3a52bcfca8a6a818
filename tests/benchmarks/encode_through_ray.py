"""Images a second: the encoder in a bare loop on prepared batches, against the whole Ray pipeline around it.

    python -m tests.benchmarks.encode_through_ray [--rows 12000] [--rounds 3]

Bare: one thread encodes batches that are already decoded and in memory. Ray: Parquet is read, pictures are decoded
and resized, encoded by one actor with one thread, and latents are written; its rate runs from the end of the first
batch that the actor encodes to the end of the last, so that starting the workers is left out. The two alternate;
the ratio of their medians is printed. Wants an otherwise idle machine with two cores or more.
"""

import argparse
import statistics
import tempfile
import time

import numpy as np
import pyarrow.parquet as pq

from helpers import encoder, preprocess
from helpers.config import PreprocessingConfig
from helpers.data_io import inputs
from helpers.lesson import captioned_shapes
from helpers.runtime import session
from tests.benchmarks import record
from tests.pipelines import encode


def bare(config, rows):
    """Images a second of `LatentEncoder` alone."""
    paths = inputs.list_inputs(config.raw_uri)
    table = pq.read_table(paths[0]).slice(0, 1024)
    prepared = preprocess.transform(inputs.to_raw_rows(inputs.with_path(table, paths[0]), config), config=config)
    latent_encoder = encoder.LatentEncoder(*encoder.arguments(config), num_threads=1)
    size = config.encoder_batch_size
    batches = [prepared.slice(start, size) for start in range(0, len(prepared), size)]
    latent_encoder(batches[0])
    started, done = time.perf_counter(), 0
    while done < rows:
        for batch in batches:
            done += len(latent_encoder(batch))
    return done / (time.perf_counter() - started)


def through_ray(config):
    """Images a second of the pipeline of Preprocessing.ipynb."""
    manifest = encode(config)
    rows, seconds = manifest.total("read"), manifest.total("encoding_seconds")
    print(f"    the encoder is busy for {manifest.total('encode_seconds') / seconds:.1%} of the time")
    return (rows - config.encoder_batch_size) / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    session.connect()
    rates = {"bare": [], "ray": []}
    with tempfile.TemporaryDirectory() as folder:
        config = PreprocessingConfig(storage=folder)
        captioned_shapes.write_parquet(config.raw_uri, arguments.rows)
        for number in range(arguments.rounds):
            rates["bare"].append(bare(config, arguments.rows // 2))
            round_config = PreprocessingConfig(storage=folder, latents_uri=f"{folder}/latents-{number}")
            rates["ray"].append(through_ray(round_config))
            print(f"round {number + 1}: bare {rates['bare'][-1]:.0f}, through Ray {rates['ray'][-1]:.0f} images/s")
    ratio = statistics.median(rates["ray"]) / statistics.median(rates["bare"])
    print(
        f"medians: bare {np.median(rates['bare']):.0f}, through Ray {np.median(rates['ray']):.0f} images/s, "
        f"ratio {ratio:.3f}"
    )
    medians = {name: statistics.median(found) for name, found in rates.items()}
    record.write(
        "encode_through_ray",
        {
            "encoding through Ray, decoding included, against the encoder in a bare loop": f"{medians['ray']:.0f} of "
            f"{medians['bare']:.0f} images/s: {ratio:.2f}"
        },
        images_per_second=medians,
        ratio=ratio,
    )


if __name__ == "__main__":
    main()
