"""What several aspect ratios bring on the drawn pictures, of which a third is not square: less is cut away, while the
model draws as well as one that was trained on squares.

    python -m tests.benchmarks.aspect_buckets [--rows 6000] [--scale 1]

The same rows are encoded once as squares and once in seven shapes, by jobs as in `Preprocessing.ipynb`; a U-Net is
trained on each by the recipe of `Training.ipynb` (`--scale` of its steps), on the batches of the run, in this process.
Both draw squares of the held-out prompts, which the detector judges; 295 are all of them.
"""

import tempfile

import numpy as np

from helpers.config.notebook import PreprocessingConfig, TrainingConfig
from helpers.latents.manifest import DataSets, read_manifest
from helpers.latents.plan import load_plan
from helpers.lesson import captioned_shapes, looks, trials
from helpers.runtime import session
from helpers.sample.from_checkpoint import pipeline_of_run
from helpers.sample.pipeline import generate
from helpers.train import setup
from tests.benchmarks import record
from tests.benchmarks.picture_quality import lesson_recipe, shape_score
from tests.pipelines import encode

RATIOS = {"squares": [1], "seven ratios": [0.5, 0.67, 0.75, 1, 1.33, 1.5, 2]}


def main():
    given = record.options(__doc__, rows=6000, scale=1.0, prompts=295)
    session.connect()
    prompts, summary, buckets = captioned_shapes.held_out_prompts(given.prompts), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        captioned_shapes.write_data_set(f"{folder}/raw", given.rows)
        for name, ratios in RATIOS.items():
            raw = PreprocessingConfig(
                storage=folder,
                input_uri=f"{folder}/raw",
                latents_uri=f"{folder}/{name}",
                resolutions=[64],
                aspect_ratios=ratios,
            )
            stats, *_ = looks.dataset_stats(raw, num_rows=2000)
            table = looks.shape_table(stats, raw).dropna()
            cut = float(np.average(table["cut"], weights=table["pictures"]))
            encode(raw)
            recipe = {**lesson_recipe(), "latents_uri": raw.latents_uri, "storage": folder, "validate_every": 0}
            recipe["max_steps"] = max(1, round(recipe["max_steps"] * given.scale))
            config = TrainingConfig(**recipe)
            buckets[name] = setup.describe_shapes(load_plan(DataSets.open(config.proportions), config))
            pipeline = pipeline_of_run(trials.train(config), read_manifest(raw.latents_uri), config)
            pictures = generate(pipeline, prompts, resolution=64, batch_size=64)
            right = captioned_shapes.agreement(pictures, prompts)["all"]
            summary[name] = (
                f"crops cut away {cut:.1%}; agreement over {len(prompts)} held-out prompts {right:.3f}, shape overlap "
                f"{shape_score(pictures, prompts):.3f}"
            )
    record.write("aspect_buckets", summary, buckets=buckets)


if __name__ == "__main__":
    main()
