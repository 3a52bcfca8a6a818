"""What a sample takes on disk, and what the options that shrink it cost a model.

    python -m tests.benchmarks.storage_cost [--rows 6000] [--steps 500] [--prompts 96] [--seeds 1]

First the bytes of a row of each part, of files that are written: Stable Diffusion 2's shapes at 256 and 512 pixels,
made-up numbers, against fp32 columns of latents and text as the template that this project follows writes them.
Then the drawn data at 64 pixels, encoded by the tiny model in each way; a tiny U-Net is trained on each, the same
steps from the same seeds, and measured alike: the loss on held-out rows that are stored in full, and held-out
prompts right in every attribute. `--steps 0` leaves the training out.
"""

import argparse
import dataclasses
import statistics
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from helpers import encoder, evaluate, images, preprocess, schema, storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.data_io import inputs
from helpers.lesson import captioned_shapes
from helpers.train_step import TrainStep, Unit
from helpers.unet import build_unet
from helpers.validation import validation_loss
from tests.benchmarks import record

OPTIONS = {
    "default": {},
    "latents=mean": {"latents": "mean"},
    "text_precision=fp8": {"text_precision": "fp8"},
    "both": {"latents": "mean", "text_precision": "fp8"},
}
TEXT = (77, 1024)


def bytes_on_disk(columns, rows=128):
    """Bytes a row of a Parquet file of random bytes: {column: bytes of a row} in this project's layout."""
    random = np.random.default_rng(0)
    table = pa.table(
        {
            "id": pa.array(range(rows)),
            "caption": pa.array(["a caption of about sixty characters, as they are on the web ..."] * rows),
            **{
                name: schema.to_binary(random.integers(0, 255, (rows, size), np.uint8), dtype=np.uint8)
                for name, size in columns.items()
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        return preprocess.write_parquet([table], storage.join(folder, "a.parquet")) / rows


def latents_spec(resolution, latents="moments"):
    """As Stable Diffusion 2's VAE makes them."""
    shape = (encoder.MOMENTS[latents], 4, resolution // 8, resolution // 8)
    return schema.ColumnSpec(schema.latents_column(resolution), shape)


def print_bytes():
    print("bytes a row            256 px    512 px   (of the fp32 columns)")
    for resolution in (256, 512):
        latents = int(np.prod(latents_spec(resolution).shape[1:]))
        print(
            f"  parts at {resolution}: mean {latents * 2:,}, std {latents * 2:,}, text fp16 {np.prod(TEXT) * 2:,}, "
            f"text fp8 {schema.ColumnSpec(schema.EMBEDDINGS, TEXT, 'fp8').row_bytes:,}"
        )
    before = {r: 4 * int(np.prod(latents_spec(r).shape[1:])) + 4 * int(np.prod(TEXT)) for r in (256, 512)}
    print(f"  fp32 columns         {before[256]:9,} {before[512]:9,}")
    for name, options in OPTIONS.items():
        found = []
        for resolution in (256, 512):
            latents = latents_spec(resolution, options.get("latents", "moments"))
            text = schema.ColumnSpec(schema.EMBEDDINGS, TEXT, options.get("text_precision", "fp16"))
            found.append(bytes_on_disk({spec.name: spec.row_bytes for spec in (latents, text)}))
        shares = [size / before[resolution] for size, resolution in zip(found, (256, 512), strict=True)]
        print(f"  {name:20} {found[0]:9,.0f} {found[1]:9,.0f}   ({shares[0]:.1%}, {shares[1]:.1%})")
    captions = [captioned_shapes.sample(index)[1] for index in range(2000)]
    tokenizer = images.load_tokenizer("tiny-sd")
    mean = statistics.mean(images.count_tokens(captions, tokenizer))
    print(
        f"  text without its padding: the drawn captions have {mean:.1f} of {tokenizer.model_max_length} tokens, so "
        f"{mean / tokenizer.model_max_length:.0%} of its bytes; a mean of 20 of 77 would leave {20 / 77:.0%}"
    )


def encode(config, raw):
    """(table of latents, manifest) of the raw rows, in this process."""
    found = []
    latent_encoder = encoder.LatentEncoder(*encoder.arguments(config), num_threads=2, batch_size=64)
    for start in range(0, len(raw), 1000):
        rows = inputs.to_raw_rows(raw[start : start + 1000].combine_chunks(), config)
        found.append(latent_encoder(preprocess.transform(rows, config=config)))
    description = preprocess.describe(config)
    manifest = schema.Manifest(
        **description, resolutions=list(config.resolutions), id_type="int64", job={"validation_share": 0.0}, segments=[]
    )
    layout = schema.latents_schema(pa.int64(), manifest.columns)
    return pa.concat_tables(found).select(layout.names).cast(layout).combine_chunks(), manifest


def train(config, table, manifest):
    """The averaged U-Net after `max_steps` of a bare loop over shuffled epochs."""
    learner, order = TrainStep(config, manifest), np.empty(0, dtype=np.int64)
    random = np.random.default_rng(config.seed)
    for step in range(config.max_steps):
        if len(order) < config.global_batch_size:
            order = random.permutation(len(table))
        rows, order = table.take(np.sort(order[: config.global_batch_size])), order[config.global_batch_size :]
        learner.step(step, [Unit.from_arrow(rows.combine_chunks(), manifest, config.resolution, 0)])
    unet = build_unet(config.unet_config)
    unet.load_state_dict({name: value.clone() for name, value in learner.ema.shadow.items()})
    return unet.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    print_bytes()
    if arguments.steps == 0:
        return
    config = PreprocessingConfig(resolutions=[64])
    with tempfile.TemporaryDirectory() as folder:
        captioned_shapes.write_parquet(folder, arguments.rows)
        paths = inputs.list_inputs(folder)
        raw = pa.concat_tables([pq.read_table(path) for path in paths])
        raw = inputs.with_path(raw, paths[0])
    full, full_manifest = encode(config, raw)
    held_out = schema.held_out(full["id"].to_pylist(), 0.05)
    prompts = captioned_shapes.held_out_prompts(arguments.prompts)
    print(
        f"{arguments.steps} steps of 64, {len(full) - held_out.sum():,} rows; "
        f"mean over {arguments.seeds} seeds (each in brackets)"
    )
    summary = {}
    for name, options in OPTIONS.items():
        table, manifest = encode(dataclasses.replace(config, **options), raw)
        losses, right = [], []
        for seed in range(arguments.seeds):
            training = TrainingConfig(max_steps=arguments.steps, seed=seed)
            unet = train(training, table.filter(pa.array(~held_out)), manifest)
            losses.append(validation_loss(unet, full_manifest, full.filter(pa.array(held_out)), training)[1])
            pictures = evaluate.generate(evaluate.build_pipeline(unet, "tiny-sd"), prompts, resolution=64)
            right.append(captioned_shapes.agreement(pictures, prompts)["all"])
        summary[f"{name}: validation loss and held-out prompts right after {arguments.steps} steps"] = (
            f"{statistics.mean(losses):.4f}, {statistics.mean(right):.0%}"
        )
        each = ", ".join(f"{loss:.4f} {share:.0%}" for loss, share in zip(losses, right, strict=True))
        print(
            f"  {name:20} validation loss {statistics.mean(losses):.4f}, "
            f"prompts right {statistics.mean(right):.0%} ({each})",
            flush=True,
        )
    record.write("storage_cost", summary)


if __name__ == "__main__":
    main()
