"""How well the lesson's recipe draws, beside others: flow matching, and a transformer; in the same time.

    python -m tests.benchmarks.picture_quality [--seeds 3] [--scale 1.0] [--prompts 295] [--threads 2] [--changes JSON]

The recipes train without Ray on the same 6,000 drawn images, encoded once and kept in memory, with the same seeds. Each
takes as many steps as fit the time of the lesson's, by the CPU time of its first steps. Then it draws the held-out
prompts from its averaged weights (20 steps, guidance 2). Measured are

- agreement: the share of images that are right in every attribute of their prompt;
- shape overlap: of the drawn shape with the best-fitting ideal one, of any size;
- steps, and images that are trained on in a second of CPU time.

`--scale` multiplies the steps, `--changes` (JSON) are changes of the lesson's recipe, which is then alone; 295 are all
prompts.
"""

import json
import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from helpers import cluster, storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.latents import schema
from helpers.lesson import captioned_shapes
from helpers.sample import generate, pipeline_of_run
from helpers.train.step import TrainStep, Unit
from tests.benchmarks import record
from tests.pipelines import TRAINING, defaults, encode

TIMED_STEPS = 20
FLOW = {"prediction_type": "flow", "min_snr_gamma": None, "timestep_sampling": "logit_normal"}
TRANSFORMER = {"unet_config": "tiny-transformer", "learning_rate": 4e-3}
NAMES = ["max_steps", "global_batch_size", "learning_rate", "warmup_steps", "adam_beta2", "weight_decay"]
NAMES += ["min_snr_gamma", "timestep_sampling", "ema_decay", "caption_dropout", "unet_config", "validation_share"]


def encoded(num_rows, **changes):
    """(table of latents, manifest) of drawn images."""
    with tempfile.TemporaryDirectory() as folder:
        config = PreprocessingConfig(storage=folder, resolutions=[64], **changes)
        captioned_shapes.write_data_set(config.raw_uri, num_rows)
        manifest = encode(config)
        files = storage.list_files(storage.join(config.latents_uri, "data"))
        return pa.concat_tables([pq.read_table(file) for file in files]).combine_chunks(), manifest


class Training:
    """A recipe in training without Ray."""

    def __init__(self, recipe, seed, table, manifest):
        self.config = TrainingConfig(**recipe, seed=seed)
        held_out = schema.held_out_mask(table[schema.ID].to_pylist(), self.config.validation_share)
        self.rows, self.manifest = table.filter(pa.array(~held_out)).combine_chunks(), manifest
        self.train_step = TrainStep(self.config, manifest)
        self.random, self.order, self.done = np.random.default_rng(seed), np.empty(0, dtype=np.int64), 0

    def batch(self):
        size = self.config.global_batch_size
        while len(self.order) < size:
            self.order = np.concatenate([self.order, self.random.permutation(len(self.rows))])
        rows, self.order = self.rows.take(self.order[:size]).combine_chunks(), self.order[size:]
        return Unit.from_arrow(rows, self.manifest, self.manifest.latents(self.config.largest_resolution), 0)

    def advance(self, until):
        """Take steps until so many are done."""
        for step in range(self.done, until):
            self.train_step.step(step, [self.batch()])
        self.done = until

    def draw(self, prompts):
        with self.train_step.averaged() as denoiser:
            pipeline = pipeline_of_run(denoiser, self.manifest, self.config)
            return generate(pipeline, prompts, resolution=64, batch_size=64)


def score(images, prompts):
    """(agreement, shape overlap); an image without any shape overlaps with none."""
    overlaps = [captioned_shapes.shape_overlap(*pair) for pair in zip(images, prompts, strict=True)]
    return captioned_shapes.agreement(images, prompts)["all"], float(np.mean(np.nan_to_num(overlaps)))


def seconds_of_a_step(recipe, table, manifest):
    """CPU seconds."""
    trial = Training({**recipe, "max_steps": 100}, 0, table, manifest)
    trial.advance(5)
    started = time.process_time()
    trial.advance(5 + TIMED_STEPS)
    return (time.process_time() - started) / TIMED_STEPS


def main():
    given = record.options(__doc__, seeds=3, scale=1.0, prompts=295, rows=6000, threads=2, changes="{}")
    changes, parameters = json.loads(given.changes), defaults(TRAINING)
    lesson = {**{name: parameters[name] for name in NAMES}, **changes}
    cluster.connect()
    padded = encoded(given.rows)
    recipes = {"lesson (U-Net, v)": (lesson, *padded)}
    if not changes:
        bare = encoded(given.rows, maximum_tokens=24)
        recipes["U-Net, flow"] = ({**lesson, **FLOW}, *padded)
        recipes["transformer, v"] = ({**lesson, **TRANSFORMER}, *bare)
        recipes["transformer, flow"] = ({**lesson, **FLOW, **TRANSFORMER}, *bare)
    prompts = captioned_shapes.held_out_prompts(given.prompts)
    torch.set_num_threads(given.threads)
    seconds = {name: seconds_of_a_step(*recipe) for name, recipe in recipes.items()}
    in_all = given.scale * lesson["max_steps"] * seconds["lesson (U-Net, v)"]
    steps = {name: max(1, round(in_all / one)) for name, one in seconds.items()}
    found = {name: [] for name in recipes}
    for seed in range(given.seeds):
        for name, (recipe, *data) in recipes.items():
            run = Training({**recipe, "max_steps": steps[name]}, seed, *data)
            run.advance(steps[name])
            found[name].append(score(run.draw(prompts), prompts))
            print(f"seed {seed} {name:18}", "agreement {:.3f}, shape {:.3f}".format(*found[name][-1]), flush=True)
    summary = {}
    for name, values in found.items():
        right, shape = (statistics.mean(column) for column in zip(*values, strict=True))
        speed = f"{steps[name]:,} steps, {lesson['global_batch_size'] / seconds[name]:.0f} images a CPU second"
        what = f"{name}, {given.seeds} seeds, {given.prompts} held-out prompts"
        summary[what] = f"agreement {right:.3f}, shape overlap {shape:.3f}; {speed}"
    record.write("picture_quality", summary, values=found, steps=steps, cpu_seconds_a_step=seconds)


if __name__ == "__main__":
    main()
