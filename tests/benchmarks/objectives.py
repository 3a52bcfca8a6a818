"""What each part of the lesson's objective gains: the plain noise loss, then one difference at a time.

    python -m tests.benchmarks.objectives [--seeds 3] [--steps 400 2000] [--prompts 295] [--threads 2] [--pictures DIR]

Four objectives, each with one change more than the one before: epsilon, v, min-SNR weights, importance sampling of
timesteps. All else is the lesson's recipe: 6,000 drawn images, and for each seed the same rows, first weights and
noise. Each is trained anew for each number of steps, because the learning rate falls to 0 at the end. Then it draws the
held-out prompts from its averaged weights, without guidance and with it, and from its last weights (20 steps). Printed
is the share of images that are right in every attribute of their prompt.

`--pictures`: a folder for a file for each run, {steps}-{objective}-{seed}.npz, with the first twelve images of each way
to draw.
"""

import pathlib
import statistics

import numpy as np
import torch

from helpers import cluster
from helpers.lesson import captioned_shapes
from helpers.sample import generate, pipeline_of_run
from tests.benchmarks import record
from tests.benchmarks.picture_quality import NAMES, Training, encoded, score
from tests.pipelines import TRAINING, defaults

PLAIN = {"prediction_type": "epsilon", "min_snr_gamma": None, "timestep_sampling": "uniform"}
OBJECTIVES = {
    "epsilon": PLAIN,
    "v": {**PLAIN, "prediction_type": "v_prediction"},
    "v, weights": {"prediction_type": "v_prediction", "min_snr_gamma": 5.0, "timestep_sampling": "uniform"},
    "v, weights, sampling": {
        "prediction_type": "v_prediction",
        "min_snr_gamma": 5.0,
        "timestep_sampling": "importance",
    },
}
WAYS = ("unguided", "guided", "last weights, guided")


def draw(run, denoiser, prompts, guidance):
    pipeline = pipeline_of_run(denoiser, run.manifest, run.config)
    return generate(pipeline, prompts, resolution=64, batch_size=64, guidance_scale=guidance)


def ways_to_draw(run, prompts):
    """{way: images} of a trained run."""
    with run.train_step.averaged() as averaged:
        images = [draw(run, averaged, prompts, guidance) for guidance in (1.0, 2.0)]
    images.append(draw(run, run.train_step.denoiser, prompts, 2.0))
    return dict(zip(WAYS, images, strict=True))


def main():
    given = record.options(__doc__, seeds=3, steps=[400, 2000], prompts=295, rows=6000, threads=2, pictures="")
    parameters = defaults(TRAINING)
    recipe = {name: parameters[name] for name in NAMES}
    cluster.connect()
    data = encoded(given.rows)
    prompts = captioned_shapes.held_out_prompts(given.prompts)
    torch.set_num_threads(given.threads)
    found = {}
    for steps in given.steps:
        for seed in range(given.seeds):
            for name, objective in OBJECTIVES.items():
                run = Training({**recipe, **objective, "max_steps": steps}, seed, *data)
                run.advance(steps)
                images = ways_to_draw(run, prompts)
                if given.pictures:
                    first = {way: np.stack(list(drawn)[:12]) for way, drawn in images.items()}
                    np.savez_compressed(pathlib.Path(given.pictures, f"{steps}-{name}-{seed}.npz"), **first)
                for way, drawn in images.items():
                    found.setdefault((steps, name, way), []).append(score(drawn, prompts))
                    right, shape = found[steps, name, way][-1]
                    print(
                        f"{steps} steps, {name}, {way}, seed {seed}: right {right:.3f}, shape {shape:.3f}", flush=True
                    )
    summary = {}
    for steps in given.steps:
        for name in OBJECTIVES:
            shares = {way: [right for right, _ in found[steps, name, way]] for way in WAYS}
            said = [f"{way} {statistics.mean(of):.3f} ({min(of):.3f} to {max(of):.3f})" for way, of in shares.items()]
            what = f"{name}, {steps:,} steps, {given.seeds} seeds, {given.prompts} held-out prompts: right"
            summary[what] = "; ".join(said)
    values = {f"{name}, {steps} steps, {way}": scores for (steps, name, way), scores in found.items()}
    record.write("objectives", summary, values=values)


if __name__ == "__main__":
    main()
