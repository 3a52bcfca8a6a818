"""Images a second: the encoder in a bare loop on prepared batches, against the whole Ray pipeline around it.

    python -m tests.benchmarks.encode_through_ray [--rows 12000] [--rounds 3]

Bare: one thread encodes batches that are already decoded and in memory. Ray: Parquet is read, pictures are decoded
and resized, encoded by one actor with one thread, and latents are written; its rate runs from the end of the first
batch that the actor encodes to the end of the last, so that starting the workers is left out. The two alternate;
the ratio of their medians is printed. Wants an otherwise idle machine with two cores or more.
"""

import tempfile
import time

import pyarrow.parquet as pq

from helpers import cluster
from helpers.config import PreprocessingConfig
from helpers.encode import encoder, prepare, stages
from helpers.lesson import captioned_shapes
from helpers.production.readers import detect
from helpers.raw import inputs
from tests.benchmarks import record
from tests.pipelines import encode


def bare(config, rows):
    """Images a second of `LatentEncoder` alone."""
    config = detect.detect(config).config
    paths, _ = inputs.list_inputs(config)
    table = pq.read_table(paths[0]).slice(0, 1024)
    prepared = stages.transform(inputs.to_raw_rows(inputs.with_path(table, paths[0]), config), config=config)
    latent_encoder = encoder.LatentEncoder(**prepare.encoder_arguments(config))
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
    rows, seconds = manifest.read, manifest.work["encoding_seconds"]
    print(f"    the encoder is busy for {manifest.work['encode_seconds'] / seconds:.1%} of the time")
    return (rows - config.encoder_batch_size) / seconds


def main():
    given = record.options(__doc__, rows=12_000, rounds=3)
    cluster.connect()
    with tempfile.TemporaryDirectory() as folder:
        config = PreprocessingConfig(storage=folder)
        captioned_shapes.write_data_set(config.raw_uri, given.rows)

        def job(number):
            return through_ray(PreprocessingConfig(storage=folder, latents_uri=f"{folder}/latents-{number}"))

        rates = record.in_turns(given.rounds, {"bare": lambda _: bare(config, given.rows // 2), "ray": job})
    ratio, said = record.compare(rates, "ray", "bare")
    what = "encoding through Ray, decoding included, against the encoder in a bare loop"
    record.write("encode_through_ray", {what: said}, images_per_second=rates, ratio=ratio)


if __name__ == "__main__":
    main()
