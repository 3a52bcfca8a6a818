"""What a sample takes on disk, and what the options that shrink it cost a model.

    python -m tests.benchmarks.storage_cost [--rows 6000] [--steps 500] [--prompts 96] [--seeds 1]

Bytes of a row, of files that are written: Stable Diffusion 2's shapes at 256 and 512 pixels, made-up numbers. Then the
drawn data at 64 pixels, encoded by the tiny model in each way; a tiny U-Net is trained on each, the same steps from the
same seeds, and measured alike: the loss on held-out rows that are stored in full, and held-out prompts right in every
attribute.
"""

import dataclasses
import math
import statistics
import tempfile

import numpy as np
import pyarrow as pa

from helpers import storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import prepare
from helpers.evaluate import validation_loss
from helpers.latents import schema
from helpers.latents.parquet import write_latents_file
from helpers.lesson import captioned_shapes
from tests.benchmarks import record
from tests.benchmarks.picture_quality import Training, drawn_rows, encode, split

LATENTS = ["moments", "mean"]
TEXT = (77, 1024)


def bytes_on_disk(latents, resolution, rows=128):
    """Bytes a row of a file with Stable Diffusion 2's shapes and random bytes."""
    random, shape = np.random.default_rng(0), (prepare.MOMENTS[latents], 4, resolution // 8, resolution // 8)
    columns = {schema.latents_column(resolution): shape, schema.EMBEDDINGS: TEXT}
    table = {"id": range(rows), "caption": ["a caption of about sixty characters, as they are on the web ..."] * rows}
    for column, shape in columns.items():
        values = random.integers(0, 255, (rows, 2 * math.prod(shape)), np.uint8)  # as fp16
        table[column] = schema.to_binary(values, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        return write_latents_file([pa.table(table)], storage.join(folder, "a.parquet"))[0] / rows


def main():
    given = record.options(__doc__, rows=6000, steps=500, prompts=96, seeds=1)
    config, raw, recipe = PreprocessingConfig(resolutions=[64]), drawn_rows(given.rows), {"max_steps": given.steps}
    full, full_manifest = encode(config, raw)
    held_out = split(full, TrainingConfig(**recipe).validation_share)[1]
    prompts, summary = captioned_shapes.held_out_prompts(given.prompts), {}
    for latents in LATENTS:
        table, manifest = encode(dataclasses.replace(config, latents=latents), raw)
        losses, right = [], []
        for seed in range(given.seeds):
            run = Training(recipe, seed, table, manifest)
            run.advance(given.steps)
            with run.train_step.averaged() as denoiser:
                losses.append(validation_loss(denoiser, full_manifest, held_out, run.config)[1])
            right.append(captioned_shapes.agreement(run.draw(prompts), prompts)["all"])
        sizes = [bytes_on_disk(latents, resolution) for resolution in (256, 512)]
        summary[f"latents={latents!r}: bytes a row of SD2's at 256 and 512 pixels; after {given.steps} steps"] = (
            f"{sizes[0]:,.0f}, {sizes[1]:,.0f}; validation loss {statistics.mean(losses):.4f}, "
            f"held-out prompts right {statistics.mean(right):.0%}"
        )
    record.write("storage_cost", summary)


if __name__ == "__main__":
    main()
