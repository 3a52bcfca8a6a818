"""The notebooks' pipelines through Ray on one GPU: pictures are encoded, a run is killed and goes on.

    python -m tests.benchmarks.gpu_pipeline [--rows 4000] [--steps 80] [--unet small] [--precision bf16]

- encode: drawn pictures, by an encoder actor on the GPU (tiny-sd's VAE stays in fp32); how far its latents are from
  those of a CPU, in standard deviations of the latents.
- killed: a run whose worker is killed by SIGKILL halfway, against one that nobody disturbs: the steps with the same
  samples, and with the same loss, bit by bit. With `deterministic`, and without.
"""

import dataclasses
import tempfile

import numpy as np
import torch

from helpers import cluster
from helpers.config import PreprocessingConfig
from helpers.latents.read import example_rows
from helpers.lesson import captioned_shapes, fault_injection
from helpers.train.metrics import read_metrics
from tests.benchmarks import record
from tests.pipelines import encode, fit, short_run


def latent_means(config, spec):
    """{id: its mean at a size} of the first rows."""
    rows = example_rows(config.latents_uri, 256)
    moments, _ = spec.decode(rows[spec.name])
    return dict(zip(rows["id"].to_pylist(), moments[:, 0].astype(np.float32), strict=True))


def encode_on_gpu(given, storage, on_gpu):
    config = PreprocessingConfig(
        storage=storage,
        resolutions=[32, 64],
        encoder_precision="fp16" if on_gpu else "fp32",
        encoder_batch_size=256,
        gpus_per_encoder=int(on_gpu),
        num_transform_workers=4,
        validation_share=0.05,
    )
    captioned_shapes.write_data_set(config.raw_uri, given.rows)
    manifest = encode(config)
    reference = dataclasses.replace(
        config, latents_uri=f"{storage}/by-cpu", limit=512, encoder_precision="fp32", gpus_per_encoder=0
    )
    encode(reference)
    found, expected = (latent_means(one, manifest.latents(64)) for one in (config, reference))
    both = sorted(found.keys() & expected.keys())
    difference = np.stack([found[row] - expected[row] for row in both])
    return {
        "rows": manifest.written,
        "compared": len(both),
        "largest difference": float(np.abs(difference).max() / np.stack(list(expected.values())).std()),
    }


def kill_and_compare(given, storage, on_gpu, deterministic):
    """Of the steps of a killed run, how many are those of an undisturbed one."""
    runs = {}
    for name in ("undisturbed", "killed"):
        config = short_run(
            storage,
            f"{name}-{deterministic}",
            resolution=64,
            unet_config=given.unet,
            max_steps=given.steps,
            checkpoint_every=given.steps // 4,
            global_batch_size=given.batch,
            learning_rate=1e-3,
            use_gpu=on_gpu,
            precision=given.precision,
            deterministic=deterministic,
            max_failures=2,
        )
        if name == "killed":
            with fault_injection.inject_worker_failure(config, rank=0, at_step=given.steps // 2 + 2):
                fit(config)
        else:
            fit(config)
        runs[name] = read_metrics(config.run_uri)
    straight, redone = runs.values()
    same = {column: int((straight[column] == redone[column]).sum()) for column in ("samples_crc32", "loss")}
    return {
        "steps": len(straight),
        "attempts": int(redone["attempt"].nunique()),
        "same samples": same["samples_crc32"],
        "same loss": same["loss"],
        "first loss": straight["loss"].iloc[0],
        "last loss": straight["loss"].tail(10).mean(),
    }


def main():
    given = record.options(__doc__, rows=4000, steps=80, unet="small", precision="bf16", batch=64)
    on_gpu = torch.cuda.is_available()

    def summarise(rows):
        said = {}
        for row in rows:
            if "same loss" in row:
                what = f"a run through Ray, killed and gone on with, deterministic={row['deterministic']}"
                said[what] = f"{row['same samples']} of {row['steps']} samples and {row['same loss']} losses the same"
            else:
                what = "latents of tiny-sd encoded through Ray on the GPU, against a CPU's"
                said[what] = f"differ by at most {row['largest difference']:.4f} standard deviations"
        return said

    results = record.Rows("gpu_pipeline", summarise)
    cluster.connect("local", num_cpus=8)
    with tempfile.TemporaryDirectory() as storage:
        results.add({"part": "encode"}, lambda: encode_on_gpu(given, storage, on_gpu))
        for deterministic in (True, False):

            def compare(deterministic=deterministic):
                return kill_and_compare(given, storage, on_gpu, deterministic)

            results.add({"part": "killed", "deterministic": deterministic}, compare)


if __name__ == "__main__":
    main()
