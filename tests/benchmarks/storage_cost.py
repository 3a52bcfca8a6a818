"""What a sample takes on disk, and what the options that shrink it cost a model.

    python -m tests.benchmarks.storage_cost [--rows 6000] [--steps 500] [--prompts 96] [--seeds 1]

First the bytes of a row of each part, of files that are written: Stable Diffusion 2's shapes at 256 and 512 pixels,
made-up numbers, against fp32 columns of latents and text as the template that this project follows writes them.
Then the drawn data at 64 pixels, encoded by the tiny model in each way; a tiny U-Net is trained on each, the same
steps from the same seeds, and measured alike: the loss on held-out rows that are stored in full, and held-out
prompts right in every attribute. `--steps 0` leaves the training out.
"""

import dataclasses
import statistics
import tempfile

import numpy as np
import pyarrow as pa

from helpers import storage
from helpers.config.notebook import PreprocessingConfig, TrainingConfig
from helpers.encode import prepare, stages
from helpers.encode.captions import count_tokens, load_tokenizer
from helpers.evaluation.validation_loss import validation_loss
from helpers.latents import schema
from helpers.lesson import captioned_shapes
from tests.benchmarks import record
from tests.benchmarks.picture_quality import Training, drawn_rows, encode, split

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
        return stages.write_parquet([table], storage.join(folder, "a.parquet")) / rows


def latents_spec(resolution, latents="moments"):
    """As Stable Diffusion 2's VAE makes them."""
    shape = (prepare.MOMENTS[latents], 4, resolution // 8, resolution // 8)
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
    captions = [captioned_shapes.draw_sample(index)[1] for index in range(2000)]
    tokenizer = load_tokenizer("tiny-sd")
    mean = statistics.mean(count_tokens(captions, tokenizer))
    print(
        f"  text without its padding: the drawn captions have {mean:.1f} of {tokenizer.model_max_length} tokens, so "
        f"{mean / tokenizer.model_max_length:.0%} of its bytes; a mean of 20 of 77 would leave {20 / 77:.0%}"
    )


def main():
    given = record.options(__doc__, rows=6000, steps=500, prompts=96, seeds=1)
    print_bytes()
    if given.steps == 0:
        return
    config, raw, recipe = PreprocessingConfig(resolutions=[64]), drawn_rows(given.rows), {"max_steps": given.steps}
    full, full_manifest = encode(config, raw)
    held_out = split(full, TrainingConfig(**recipe).validation_share)[1]
    prompts, summary = captioned_shapes.held_out_prompts(given.prompts), {}
    for name, options in OPTIONS.items():
        table, manifest = encode(dataclasses.replace(config, **options), raw)
        losses, right = [], []
        for seed in range(given.seeds):
            run = Training(recipe, seed, table, manifest)
            run.advance(given.steps)
            with run.train_step.averaged() as unet:
                losses.append(validation_loss(unet, full_manifest, held_out, run.config)[1])
            right.append(captioned_shapes.agreement(run.draw(prompts), prompts)["all"])
        said = f"{statistics.mean(losses):.4f}, {statistics.mean(right):.0%}"
        summary[f"{name}: validation loss and held-out prompts right after {given.steps} steps"] = said
        print(f"  {name:20} validation loss and prompts right {said}; by seed {losses}, {right}", flush=True)
    record.write("storage_cost", summary)


if __name__ == "__main__":
    main()
