"""Whether it pays to begin with small pictures: 32, then 64 pixels, against 64 pixels alone for as many FLOPs.

    python -m tests.benchmarks.two_phases [--seeds 5] [--small 300] [--large 120]

The runs of the section "Two phases" of Scaling.ipynb, without Ray, with several seeds. Phase 2 takes phase 1's weights
and begins its optimizer, schedule and average afresh, as `init_from` does. With the same seed, phase 2 and the control
see the same rows and noise in their first steps. Compared is the loss on held-out rows of 64 pixels, of the averaged
weights and of the last ones, seed by seed: a negative difference says that phase 1 pays.
"""

import pandas as pd

from helpers.config import PreprocessingConfig
from helpers.evaluate import validation_loss
from helpers.lesson import trials
from helpers.lesson.step_costs import count_flops
from tests.benchmarks import record
from tests.benchmarks.picture_quality import Training, drawn_rows, encode, lesson_recipe

RECIPE = {"learning_rate": 1e-3, "lr_schedule": "constant", "warmup_steps": 20}


def train(seed, data, steps, resolution, weights=None):
    run = Training({**lesson_recipe(), **RECIPE, "max_steps": steps, "resolution": resolution}, seed, *data)
    if weights is not None:
        run.train_step.denoiser.load_state_dict(weights)
    run.advance(steps)
    return run


def held_out_losses(run):
    """{"averaged weights": loss, "last weights": loss}"""

    def loss(denoiser):
        return validation_loss(denoiser, run.manifest, run.held_out, run.config)[0]

    with run.train_step.averaged() as denoiser:
        averaged = loss(denoiser)
    return {"averaged weights": averaged, "last weights": loss(run.train_step.denoiser)}


def main():
    given = record.options(__doc__, seeds=5, small=300, large=120, rows=6000)
    data = encode(PreprocessingConfig(resolutions=[32, 64]), drawn_rows(given.rows))
    manifest, rows = data[1], []
    shapes = [(manifest.latents_at(side)[0].shape[1:], manifest.embeddings.shape) for side in (32, 64)]
    small, large = (count_flops("tiny", *shape)["gflops"].sum() for shape in shapes)
    alone = round(given.large + given.small * small / large)
    for seed in range(given.seeds):
        first = train(seed, data, given.small, 32)
        with first.train_step.averaged() as denoiser:
            second = train(seed, data, given.large, 64, denoiser.state_dict())
        runs = {"64 alone": train(seed, data, alone, 64), "32, then 64": second}
        for name, run in runs.items():
            losses = held_out_losses(run)
            rows += [(name, seed, metric, value) for metric, value in losses.items()]
            print(f"seed {seed}, {name}: {losses}", flush=True)
    results = pd.DataFrame(rows, columns=["setting", "seed", "metric", "value"])
    compared = trials.compare_settings(results)
    summary = {}
    for row in compared.itertuples():
        what = f"{given.small} steps at 32 and {given.large} at 64 pixels against {alone} at 64, {row.metric}"
        summary[what] = (
            f"held-out loss {row.value:.4f} against {row.baseline:.4f}; "
            f"difference {row.difference:.4f}, 95 % interval {row.low:.4f} to {row.high:.4f}, {row.seeds} seeds"
        )
    record.write("two_phases", summary, losses=results.to_dict("records"))


if __name__ == "__main__":
    main()
