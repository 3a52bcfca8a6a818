"""What several aspect ratios bring on the drawn pictures, of which a third is not square: less is cut away, while the
model draws as well as one that was trained on squares.

    python -m tests.benchmarks.aspect_buckets [--rows 6000] [--scale 1]

The same rows are encoded once as squares and once in seven shapes; a U-Net is trained on each by the recipe of
`Training.ipynb` (`--scale` of its steps), on the batches of the run, in this process. Both draw squares of the held-out
prompts, which the detector judges.
"""

import argparse
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from helpers import encoder, ingest, preprocess, resumable_job, sampling, schema, storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.data_io import inputs
from helpers.evaluation import trials
from helpers.lesson import captioned_shapes, looks
from tests.benchmarks import record
from tests.benchmarks.picture_quality import lesson_recipe, shape_score

RATIOS = {"squares": [1], "seven ratios": [0.5, 0.67, 0.75, 1, 1.33, 1.5, 2]}


def encode(config, folder):
    """Encode a folder of Parquet files in this process; returns the manifest, which lies in `config.latents_uri`."""
    paths = inputs.list_inputs(folder)
    raw = inputs.with_path(pa.concat_tables([pq.read_table(path) for path in paths]), paths[0])
    threads = torch.get_num_threads()
    latent_encoder = encoder.LatentEncoder(*encoder.arguments(config), num_threads=threads, batch_size=64)
    blocks = []
    for start in range(0, len(raw), 500):
        rows = inputs.to_raw_rows(raw[start : start + 500].combine_chunks(), config)
        blocks.append(latent_encoder(preprocess.transform(rows, config=config)))
    description, segment = preprocess.describe(config), resumable_job.Segment(0, [], len(raw))
    report = preprocess.write_latents(
        pa.concat_tables(blocks).combine_chunks(),
        latents_uri=config.latents_uri,
        segment=segment,
        columns=description["columns"],
        id_type=pa.int64(),
        validation_share=config.validation_share,
    )
    entry = resumable_job.segment_entry(segment, [report])
    job = {"validation_share": config.validation_share}
    manifest = schema.Manifest(
        **description, resolutions=list(config.resolutions), id_type="int64", job=job, segments=[entry]
    )
    storage.write_json(storage.join(config.latents_uri, schema.MANIFEST), manifest.to_dict())
    return manifest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=295, help="295 is all of them")
    given = parser.parse_args()
    prompts, summary, buckets = captioned_shapes.held_out_prompts(given.prompts), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        captioned_shapes.write_parquet(f"{folder}/raw", given.rows)
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
            manifest = encode(raw, f"{folder}/raw")
            recipe = {**lesson_recipe(), "latents_uri": raw.latents_uri, "storage": folder, "validate_every": 0}
            recipe["max_steps"] = max(1, round(recipe["max_steps"] * given.scale))
            config = TrainingConfig(**recipe)
            buckets[name] = ingest.plan_run({raw.latents_uri: manifest}, config).describe_buckets()
            pipeline = sampling.build_pipeline(trials.train(config), "tiny-sd", config.prediction_type)
            pictures = sampling.generate(pipeline, prompts, resolution=64, batch_size=64)
            right = captioned_shapes.agreement(pictures, prompts)["all"]
            summary[name] = (
                f"crops cut away {cut:.1%}; agreement over {len(prompts)} held-out prompts {right:.3f}, shape overlap "
                f"{shape_score(pictures, prompts):.3f}"
            )
            print(f"{name}: {summary[name]}", flush=True)
    record.write("aspect_buckets", summary, buckets=buckets)


if __name__ == "__main__":
    main()
