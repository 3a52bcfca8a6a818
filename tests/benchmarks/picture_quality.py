"""How well the lesson's recipe draws, beside today's: flow matching, and a transformer; in the same time.

    python -m tests.benchmarks.picture_quality [--seeds 3] [--scale 1.0] [--prompts 295] [--threads 2] [--changes JSON]

The recipes train without Ray on the same 6,000 drawn pictures, encoded once and kept in memory, with the same seeds.
Each takes as many steps as fit the time of the lesson's, by the CPU time of its first steps, which is meaningful on a
busy machine too. Then it draws the held-out prompts from its averaged weights (20 steps, guidance 2). Measured are

- agreement: the share of pictures that are right in every attribute of their prompt;
- shape overlap: of the drawn shape with the best-fitting ideal one, of any size, beside the ceiling: the overlap of
  real pictures, and of the VAE's reconstructions of real pictures;
- steps, and images that are trained on in a second of CPU time.

`--scale` multiplies the steps, `--changes` (JSON) are changes of the lesson's recipe, which is then alone; 295 are all
prompts.
"""

import dataclasses
import json
import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from helpers import sample
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder, prepare, stages
from helpers.latents import schema
from helpers.latents.manifest import Manifest
from helpers.lesson import captioned_shapes
from helpers.raw import inputs
from helpers.sample import generate, pipeline_of_run
from helpers.train.step import TrainStep, Unit
from tests.benchmarks import record
from tests.pipelines import TRAINING, defaults

TIMED_STEPS = 20
FLOW = {"prediction_type": "flow", "min_snr_gamma": None, "timestep_sampling": "logit_normal", "sampler": "dpm++"}
TRANSFORMER = {"unet_config": "tiny-transformer", "learning_rate": 4e-3}
NAMES = ["max_steps", "global_batch_size", "learning_rate", "warmup_steps", "adam_beta2", "weight_decay"]
NAMES += ["min_snr_gamma", "timestep_sampling", "ema_decay", "caption_dropout", "unet_config"]


def lesson_recipe():
    """The parameters of Training.ipynb that decide what is learned."""
    given = defaults(TRAINING)
    return {name: given[name] for name in NAMES}


def drawn_rows(num_rows):
    """The lesson's drawn pictures, as they are read from files."""
    with tempfile.TemporaryDirectory() as folder:
        captioned_shapes.write_data_set(folder, num_rows)
        paths = inputs.list_inputs(folder)
        return inputs.with_path(pa.concat_tables([pq.read_table(path) for path in paths]), paths[0])


def encode(config, raw):
    """(table of latents without rejected rows, manifest) of raw rows, in this process."""
    columns = {"image_column": "jpg", "caption_column": "caption", "id_column": "hash", "input_format": "parquet"}
    config, found = dataclasses.replace(config, **columns), []
    latent_encoder = encoder.LatentEncoder(**prepare.encoder_arguments(config), num_threads=2)
    for start in range(0, len(raw), 1000):
        rows = inputs.to_raw_rows(raw[start : start + 1000].combine_chunks(), config)
        found.append(latent_encoder(stages.transform(rows, config=config)))
    made = {"resolutions": list(config.resolutions), "id_type": "int64", "job": {"validation_share": 0.0}}
    manifest = Manifest.of([], **prepare.describe_encoder(config), **made)
    layout = schema.latents_schema(pa.int64(), manifest.columns)
    table = pa.concat_tables(found).select(layout.names).cast(layout)
    return table.filter(pc.is_valid(table[schema.EMBEDDINGS])).combine_chunks(), manifest


def split(table, share):
    """(rows to train on, held-out rows)"""
    held_out = schema.held_out_mask(table[schema.ID].to_pylist(), share)
    return table.filter(pa.array(~held_out)).combine_chunks(), table.filter(pa.array(held_out)).combine_chunks()


class Training:
    """A recipe in training without Ray."""

    def __init__(self, recipe, seed, table, manifest):
        self.config = TrainingConfig(**recipe, seed=seed, validate_every=0)
        self.rows, self.held_out = split(table, self.config.validation_share)
        self.manifest, self.train_step = manifest, TrainStep(self.config, manifest)
        self.random, self.order = np.random.default_rng(seed), np.empty(0, dtype=np.int64)
        self.done = 0

    def batch(self):
        size = self.config.global_batch_size
        while len(self.order) < size:
            self.order = np.concatenate([self.order, self.random.permutation(len(self.rows))])
        places, self.order = self.order[:size], self.order[size:]
        side = self.config.largest_resolution
        return Unit.from_arrow(self.rows.take(places).combine_chunks(), self.manifest, self.manifest.latents(side), 0)

    def advance(self, until):
        """Take steps until so many are done."""
        for step in range(self.done, until):
            self.train_step.step(step, [self.batch()])
        self.done = until

    def draw(self, prompts):
        with self.train_step.averaged() as denoiser:
            pipeline = pipeline_of_run(denoiser, self.manifest, self.config)
            return generate(pipeline, prompts, resolution=64, batch_size=64)


def shape_score(pictures, prompts):
    overlaps = [captioned_shapes.shape_overlap(*pair) for pair in zip(pictures, prompts, strict=True)]
    return float(np.mean(np.nan_to_num(overlaps)))  # a picture without any shape overlaps with none


def ceilings(number):
    """`(real pictures of held-out captions, the VAE's reconstructions of them)`: their shape overlap."""
    samples = [captioned_shapes.draw_sample(index, seed=7, split="held_out") for index in range(number)]
    pictures, captions = [np.asarray(picture) for picture, _ in samples], [caption for _, caption in samples]
    moments, _ = encoder.LatentEncoder("tiny-sd", num_threads=torch.get_num_threads()).encode_images(np.stack(pictures))
    reconstructed = sample.reconstruct("tiny-sd", moments)
    return shape_score(pictures, captions), shape_score(reconstructed, captions)


def timed_steps(recipe, table, manifest, lesson_seconds=None):
    """`(steps that take as long as the lesson's, CPU seconds of one)`; `lesson_seconds`: of one of the lesson's."""
    trial = Training({**recipe, "max_steps": 100}, 0, table, manifest)
    trial.advance(5)
    started = time.process_time()
    trial.advance(5 + TIMED_STEPS)
    seconds = (time.process_time() - started) / TIMED_STEPS
    return round(recipe["max_steps"] * (lesson_seconds or seconds) / seconds), seconds


def main():
    given = record.options(__doc__, seeds=3, scale=1.0, prompts=295, rows=6000, threads=2, changes="{}")
    raw, changes = drawn_rows(given.rows), json.loads(given.changes)
    lesson = {**lesson_recipe(), **changes}
    lesson["max_steps"] = max(1, round(lesson["max_steps"] * given.scale))
    padded = encode(PreprocessingConfig(resolutions=[64]), raw)
    recipes = {"lesson (U-Net, v)": (lesson, *padded)}
    if not changes:
        without_padding = {"maximum_tokens": 24, "text_cleaning": "ftfy"}
        bare = encode(PreprocessingConfig(resolutions=[64], **without_padding), raw)
        recipes |= {
            "U-Net, flow": ({**lesson, **FLOW}, *padded),
            "transformer, v": ({**lesson, **TRANSFORMER}, *bare),
            "transformer, flow": ({**lesson, **FLOW, **TRANSFORMER}, *bare),
        }
    prompts = captioned_shapes.held_out_prompts(given.prompts)
    real, vae = ceilings(given.prompts)
    torch.set_num_threads(given.threads)
    _, lesson_seconds = timed_steps(lesson, *padded)
    seconds = {}
    for name, (recipe, *data) in recipes.items():
        recipe["max_steps"], seconds[name] = timed_steps(recipe, *data, lesson_seconds)
    found = {name: [] for name in recipes}
    for seed in range(given.seeds):
        for name, (recipe, *data) in recipes.items():
            run = Training(recipe, seed, *data)
            run.advance(run.config.max_steps)
            pictures = run.draw(prompts)
            found[name].append((captioned_shapes.agreement(pictures, prompts)["all"], shape_score(pictures, prompts)))
            print(f"seed {seed} {name:18}", "agreement {:.3f}, shape {:.3f}".format(*found[name][-1]), flush=True)
    summary = summarise(recipes, seconds, found, f"{given.seeds} seeds, {given.prompts} held-out prompts", vae, real)
    steps = {name: recipe["max_steps"] for name, (recipe, *_) in recipes.items()}
    record.write("picture_quality", summary, values=found, steps=steps, cpu_seconds_a_step=seconds)


def summarise(recipes, seconds, found, of_what, vae, real):
    """The lines of the table; `seconds`: CPU time of a step, in which all recipes have as much."""
    summary = {}
    for name, values in found.items():
        right, shape = (statistics.mean(column) for column in zip(*values, strict=True))
        recipe, *_ = recipes[name]
        summary[f"{name}, {of_what}"] = (
            f"agreement {right:.3f}, shape overlap {shape:.3f} (ceiling: VAE {vae:.3f}, real {real:.3f}); "
            f"{recipe['max_steps']:,} steps, {recipe['global_batch_size'] / seconds[name]:.0f} images a CPU second"
        )
    return summary


if __name__ == "__main__":
    main()
