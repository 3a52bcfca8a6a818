"""The notebooks' pipelines through Ray on one GPU: images are encoded, a run is killed and goes on.

    python -m tests.benchmarks.gpu_pipeline [--rows 4000] [--steps 80] [--unet small] [--precision bf16]

- encode: drawn images, by an encoder actor on the GPU (tiny-sd's VAE stays in fp32): how far its latents are from those
  of a CPU, in standard deviations of the latents.
- killed: a run whose worker is killed by SIGKILL halfway, against an undisturbed run: the steps with the same samples,
  and with the same loss, bit by bit. With `deterministic`, and without.
"""

import dataclasses
import tempfile

import numpy as np
import torch

from helpers import cluster
from helpers.config import PreprocessingConfig
from helpers.latents.held_out import example_rows
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
    by_cpu = {"latents_uri": f"{storage}/by-cpu", "limit": 512, "encoder_precision": "fp32", "gpus_per_encoder": 0}
    reference = dataclasses.replace(config, **by_cpu)
    encode(reference)
    found, expected = (latent_means(one, manifest.latents(64)) for one in (config, reference))
    both = sorted(found.keys() & expected.keys())
    difference = np.abs(np.stack([found[row] - expected[row] for row in both])).max()
    return {"compared": len(both), "largest difference": float(difference / np.stack(list(expected.values())).std())}


def kill_and_compare(given, storage, on_gpu, deterministic):
    """Of the steps of a killed run, how many are those of an undisturbed one."""
    recipe = {"resolution": 64, "unet_config": given.unet, "global_batch_size": given.batch, "learning_rate": 1e-3}
    recipe |= {"max_steps": given.steps, "checkpoint_every": given.steps // 4, "max_failures": 2}
    recipe |= {"use_gpu": on_gpu, "precision": given.precision, "deterministic": deterministic}
    straight, killed = (short_run(storage, f"{name}-{deterministic}", **recipe) for name in ("straight", "killed"))
    fit(straight)
    with fault_injection.inject_worker_failure(killed, rank=0, at_step=given.steps // 2 + 2):
        fit(killed)
    before, after = (read_metrics(config.run_uri) for config in (straight, killed))
    same = {f"same {column}": int((before[column] == after[column]).sum()) for column in ("samples_crc32", "loss")}
    return {"steps": len(before), "attempts": int(after["attempt"].nunique()), **same}


def summarise(rows):
    said = {}
    for row in rows:
        if row["part"] == "encode":
            what = "latents of tiny-sd encoded through Ray on the GPU, against a CPU's"
            said[what] = f"differ by at most {row['largest difference']:.4f} standard deviations"
        else:
            what = f"a run through Ray, killed and gone on with, deterministic={row['deterministic']}"
            same = f"{row['same samples_crc32']} of {row['steps']} samples and {row['same loss']} losses the same"
            said[what] = same
    return said


def main():
    given = record.options(__doc__, rows=4000, steps=80, unet="small", precision="bf16", batch=64)
    on_gpu, results = torch.cuda.is_available(), record.Rows("gpu_pipeline", summarise)
    cluster.connect("local", num_cpus=8)
    with tempfile.TemporaryDirectory() as storage:
        results.add({"part": "encode"}, lambda: encode_on_gpu(given, storage, on_gpu))
        for deterministic in (True, False):
            what = {"part": "killed", "deterministic": deterministic}
            results.add(what, lambda how=deterministic: kill_and_compare(given, storage, on_gpu, how))


if __name__ == "__main__":
    main()
