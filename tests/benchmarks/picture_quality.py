"""How well the lesson's U-Net draws: the recipe of Training.ipynb beside the one that it replaced.

    python -m tests.benchmarks.picture_quality [--seeds 3] [--scale 1.0] [--prompts 295] [--threads 2] [--changes JSON]

Both recipes train without Ray on the same 6,000 drawn pictures, encoded once and kept in memory. They take turns, a
twentieth of their steps at a time, so the ratio of their times is meaningful on a busy machine too. Then each draws the
held-out prompts from its averaged weights (DDIM, 20 steps, guidance 2). Printed are

- agreement: the share of pictures that are right in every attribute of their prompt;
- shape overlap: of the drawn shape with the best-fitting ideal one, of any size, beside the ceiling: the overlap of
  real pictures, and of the VAE's reconstructions of real pictures;
- the training time, relative to the replaced recipe's.

`--scale` multiplies the steps of both recipes.
"""

import argparse
import ast
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from helpers import encoder, evaluate, schema
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.data_io import inputs
from helpers.lesson import captioned_shapes
from helpers.train_step import TrainStep, Unit
from helpers.unet import build_unet, load_unet_config
from tests.benchmarks import record, storage_cost

TURNS = 20
NAMES = ["max_steps", "global_batch_size", "learning_rate", "warmup_steps", "adam_beta2", "weight_decay"]
NAMES += ["min_snr_gamma", "timestep_sampling", "ema_decay", "caption_dropout", "unet_config"]


def lesson_recipe():
    """The parameters of Training.ipynb that decide what is learned."""
    notebook = json.loads((record.ROOT / "Training.ipynb").read_text())
    cell = next(cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", []))
    assigned = {node.targets[0].id: node.value for node in ast.parse("".join(cell["source"])).body}
    return {name: ast.literal_eval(assigned[name]) for name in NAMES}


def replaced_recipe(folder):
    """1,200 steps of 64 rows, all timesteps equally often, and a U-Net with attention in its mid block."""
    path = pathlib.Path(folder, "unet.json")
    path.write_text(json.dumps({**load_unet_config("tiny"), "mid_block_type": "UNetMidBlock2DCrossAttn"}))
    before = {"max_steps": 1200, "global_batch_size": 64, "timestep_sampling": "uniform", "unet_config": str(path)}
    return {**lesson_recipe(), **before}


def encoded_rows(num_rows):
    """`(table of latents without rejected rows, manifest)` of the lesson's drawn pictures."""
    with tempfile.TemporaryDirectory() as folder:
        captioned_shapes.write_parquet(folder, num_rows)
        paths = inputs.list_inputs(folder)
        raw = inputs.with_path(pa.concat_tables([pq.read_table(path) for path in paths]), paths[0])
    table, manifest = storage_cost.encode(PreprocessingConfig(resolutions=[64]), raw)
    return table.filter(pc.is_valid(table[schema.EMBEDDINGS])).combine_chunks(), manifest


class Training:
    """A recipe in training: `advance` takes steps, `seconds` is the time that they took."""

    def __init__(self, recipe, seed, table, manifest):
        self.config = TrainingConfig(**recipe, seed=seed, validate_every=0)
        keep = ~schema.held_out(table["id"].to_pylist(), self.config.validation_share)
        self.rows = Unit.from_arrow(table.filter(pa.array(keep)).combine_chunks(), manifest, 64, 0)
        self.train_step = TrainStep(self.config, manifest)
        self.random, self.order = np.random.default_rng(seed), np.empty(0, dtype=np.int64)
        self.done, self.seconds = 0, 0.0

    def batch(self):
        size = self.config.global_batch_size
        while len(self.order) < size:
            self.order = np.concatenate([self.order, self.random.permutation(len(self.rows.ids))])
        places, self.order = self.order[:size], self.order[size:]
        ids = [self.rows.ids[place] for place in places]
        rows = self.rows
        tensors = rows.moments[places], rows.text[places], rows.keep_U[places]
        return Unit(*tensors, np.arange(size), ids, rows.latents_spec)

    def advance(self, until):
        started = time.perf_counter()
        for step in range(self.done, until):
            self.train_step.step(step, [self.batch()])
        self.seconds += time.perf_counter() - started
        self.done = until

    def draw(self, prompts):
        unet = build_unet(self.config.unet_config)
        unet.load_state_dict({name: value.clone() for name, value in self.train_step.ema.state_dict().items()})
        pipeline = evaluate.build_pipeline(unet.eval(), "tiny-sd")
        return evaluate.generate(pipeline, prompts, resolution=64, batch_size=64)


def shape_score(pictures, prompts):
    return float(np.mean([captioned_shapes.shape_overlap(*pair) for pair in zip(pictures, prompts, strict=True)]))


def ceilings(number):
    """`(real pictures of held-out captions, the VAE's reconstructions of them)`: their shape overlap."""
    samples = [captioned_shapes.sample(index, seed=7, split="held_out") for index in range(number)]
    pictures, captions = [np.asarray(picture) for picture, _ in samples], [caption for _, caption in samples]
    moments, _ = encoder.Encoder("tiny-sd", num_threads=torch.get_num_threads()).encode_images(np.stack(pictures))
    reconstructed = encoder.reconstruct("tiny-sd", moments)
    return shape_score(pictures, captions), shape_score(reconstructed, captions)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=295, help="295 is all of them")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--changes", type=json.loads, default={}, help="of the lesson's recipe, as JSON")
    arguments = parser.parse_args()
    table, manifest = encoded_rows(arguments.rows)
    prompts = captioned_shapes.held_out_prompts(arguments.prompts)
    real, vae = ceilings(arguments.prompts)
    print(f"shape overlap of real pictures {real:.3f}, of the VAE's reconstructions {vae:.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        recipes = {"replaced": replaced_recipe(folder), "lesson": {**lesson_recipe(), **arguments.changes}}
        for recipe in recipes.values():
            recipe["max_steps"] = max(1, round(recipe["max_steps"] * arguments.scale))
        found = {name: [] for name in recipes}
        for seed in range(arguments.seeds):
            torch.set_num_threads(arguments.threads)
            runs = {name: Training(recipe, seed, table, manifest) for name, recipe in recipes.items()}
            for turn in range(1, TURNS + 1):
                for run in runs.values():
                    run.advance(round(run.config.max_steps * turn / TURNS))
            for name, run in runs.items():
                pictures = run.draw(prompts)
                right = captioned_shapes.agreement(pictures, prompts)["all"]
                found[name].append((right, shape_score(pictures, prompts), run.seconds / runs["replaced"].seconds))
                print(f"seed {seed} {name:9}", "agreement {:.3f}, shape {:.3f}, time {:.2f}".format(*found[name][-1]))
    summary = {}
    for name, values in found.items():
        right, shape, ratio = (statistics.mean(column) for column in zip(*values, strict=True))
        summary[f"{name} recipe, {arguments.seeds} seeds, {arguments.prompts} held-out prompts"] = (
            f"agreement {right:.3f}, shape overlap {shape:.3f} (ceiling: VAE {vae:.3f}, real {real:.3f}), "
            f"training time {ratio:.2f}"
        )
    print(json.dumps(summary, indent=1))
    record.write("picture_quality", summary, values=found)


if __name__ == "__main__":
    main()
