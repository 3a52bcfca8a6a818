"""Whether REPA pays on the lesson's data: paired seeds with and without it, judged by the detector alone.

    python -m tests.benchmarks.repa [--seeds 5] [--steps 1700] [--every 300] [--prompts 295] [--weight 0.01]
                                    [--end-step 0] [--transformer] [--threads 2]

Both settings train without Ray on the same drawn images, encoded once and kept in memory, with the same weights and
batches for a seed. Every so many steps they draw the held-out prompts from their averaged weights (20 steps, guidance
2). The features are those of tiny-clip's image tower, which judges nothing here. Measured are

- agreement: the share of images that are right in every attribute of their prompt;
- CPU seconds of training until then; those of the image encoder over the rows that were trained on stand apart, as an
  online run pays them. Stored features cost one pass over the data set.

`--end-step 0` keeps the loss until the end. The weight was chosen with other prompts, captions of the training data,
and seed 100. Shares of right images (U-Net after 850 steps; transformer after 1,200):

| weight | none | 0.003 | 0.01 | 0.1 | 0.5 | 0.5 for the first half | 2 |
|---|---|---|---|---|---|---|---|
| U-Net | 0.677 | 0.651 | 0.656 | 0.620 | 0.057 | 0.094 | 0.177 |
| transformer | 0.547 | 0.516 | 0.562 | 0.427 | 0.266 | | 0.104 |
"""

import dataclasses
import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from helpers import cluster, storage
from helpers.config import PreprocessingConfig
from helpers.latents import schema
from helpers.lesson import captioned_shapes
from helpers.production import features
from helpers.production.extras.repa import Projection, block_output, default_block
from helpers.production.image_encoder import ImageEncoder
from helpers.train.step import AuxiliaryLoss, TrainStep
from tests.benchmarks import record
from tests.benchmarks.picture_quality import NAMES, TRANSFORMER, Training, score
from tests.pipelines import TRAINING, defaults, encode, prepare_job

MODEL, RESOLUTION = "tiny-clip", 64
PLAIN, ALIGNED = "without", "with REPA"


def encoded(num_rows, **changes):
    """(table of latents with features, manifest) of drawn images."""
    with tempfile.TemporaryDirectory() as folder:
        config = PreprocessingConfig(storage=folder, resolutions=[RESOLUTION], **changes)
        captioned_shapes.write_data_set(config.raw_uri, num_rows)
        manifest = encode(config)
        features.store(prepare_job(dataclasses.replace(config, image_encoder_model=MODEL)))
        listed, latents_uri = features.read_list(config.latents_uri, MODEL)["files"], config.latents_uri
        latents, found = (
            pa.concat_tables(pq.read_table(storage.join(uri, "data", file["name"])) for file in listed)
            for uri in (latents_uri, features.folder_of(latents_uri, MODEL))
        )
        column = found[f"{schema.FEATURES}_{RESOLUTION}"]
        return latents.append_column(schema.FEATURES, column).combine_chunks(), manifest


def aligned(training, channels, given):
    """The training with REPA's loss."""
    config, block = training.config, default_block(training.config.unet_config)
    width, _ = block_output(config.unet_config, training.manifest, training.manifest.latents(RESOLUTION), block)
    torch.manual_seed(config.seed)
    projection = Projection(width, 256, channels)
    loss = AuxiliaryLoss("repa", projection, block, given.weight, given.end_step or None)
    training.train_step = TrainStep(config, training.manifest, auxiliary=[loss])
    return training


def teacher_seconds():
    """CPU seconds of the image encoder for each image."""
    images, pixels = ImageEncoder(MODEL), np.random.default_rng(0).integers(0, 256, (256, 64, 64, 3), dtype=np.uint8)
    images.encode(pixels[:32], (4, 4))
    started = time.process_time()
    images.encode(pixels, (4, 4))
    return (time.process_time() - started) / len(pixels)


def trial(training, prompts, given):
    """[(steps, CPU seconds of training, agreement, shape overlap)]"""
    found, seconds = [], 0.0
    for until in range(given.every, given.steps + 1, given.every):
        started = time.process_time()
        training.advance(until)
        seconds += time.process_time() - started
        found.append((until, seconds, *score(training.draw(prompts), prompts)))
        print("  step {}, {:.0f} CPU s: agreement {:.3f}, shape {:.3f}".format(*found[-1]), flush=True)
    return found


def main():
    options = dict(seeds=5, steps=1700, every=300, prompts=295, rows=6000, weight=0.01, end_step=0, threads=2)
    given = record.options(__doc__, **options, transformer=False)
    parameters = defaults(TRAINING)
    recipe = {name: parameters[name] for name in NAMES} | (TRANSFORMER if given.transformer else {})
    recipe["max_steps"] = given.steps
    cluster.connect()
    table, manifest = encoded(given.rows, **({"maximum_tokens": 24} if given.transformer else {}))
    channels = np.prod(schema.from_binary(table[schema.FEATURES], (-1,))[0].shape[1:]) // (RESOLUTION // 16) ** 2
    prompts = captioned_shapes.held_out_prompts(given.prompts)
    torch.set_num_threads(given.threads)
    teacher, found = teacher_seconds(), {PLAIN: [], ALIGNED: []}
    for seed in range(given.seeds):
        for name, trials in found.items():
            print(f"seed {seed}, {name}", flush=True)
            rows = table if name == ALIGNED else table.drop_columns([schema.FEATURES])
            training = Training(recipe, seed, rows, manifest)
            training = aligned(training, int(channels), given) if name == ALIGNED else training
            trials.append(trial(training, prompts, given))
    summary = {}
    for point, (steps, *_) in enumerate(found[PLAIN][0]):
        for name, trials in found.items():
            seconds, right = (statistics.mean(one[point][column] for one in trials) for column in (1, 2))
            encoder = steps * recipe["global_batch_size"] * teacher if name == ALIGNED else 0
            what = f"{name}, step {steps:,}, {given.seeds} seeds, {given.prompts} held-out prompts"
            summary[what] = f"agreement {right:.3f}, {seconds:.0f} CPU s, image encoder {encoder:.0f} CPU s more"
        pairs = zip(found[PLAIN], found[ALIGNED], strict=True)
        differences = [aligned[point][2] - plain[point][2] for plain, aligned in pairs]
        summary[f"difference of the pairs at step {steps:,}"] = ", ".join(f"{one:+.3f}" for one in differences)
    for what, text in summary.items():
        print(f"{what}: {text}")
    record.write(
        "repa_transformer" if given.transformer else "repa",
        summary,
        values=found,
        teacher_cpu_seconds_an_image=teacher,
        options=vars(given),
    )


if __name__ == "__main__":
    main()
