"""Whether scores order the checkpoints of the lesson's run as the detector does: rank correlations with agreement.

    python -m tests.benchmarks.scores_and_agreement [--seeds 3] [--at 75 150 300 600 1200 2400] [--prompts 295]

The recipe of Training.ipynb trains without Ray on its drawn pictures, with several seeds. At each of `--at` steps the
averaged weights draw the held-out prompts, as at a checkpoint, and are scored: held-out loss, CLIP score and CMMD by
the repository's small CLIP, agreement by the detector. Printed is Spearman's rank correlation of each score with
agreement over a seed's checkpoints, with the sign that a good score has: 1 is the same order. The goal is 0.8 for every
score. Checkpoints double their steps, because after a third of the run almost every prompt is right, and the order of
checkpoints that are equally good is chance.
"""

import statistics

import numpy as np
import pandas as pd
import torch

from helpers import sample
from helpers.config import PreprocessingConfig
from helpers.evaluate import validation_loss
from helpers.lesson import captioned_shapes
from helpers.production.extras import results, scores
from helpers.production.extras.scores import CLIP
from tests.benchmarks import record
from tests.benchmarks.picture_quality import Training, drawn_rows, encode, lesson_recipe

SCORES = ["validation_loss", "clip_score", "cmmd"]


def score_checkpoints(run, at, prompts, clip):
    """A dict of scores for each of `at` steps."""
    real = clip.images(list(sample.reconstruct("tiny-sd", moments_of(run.held_out, run.manifest))))
    texts, found = clip.texts(prompts), []
    for step in at:
        run.advance(step)
        pictures = run.draw(prompts)
        embedded = clip.images(pictures)
        with run.train_step.averaged() as denoiser:
            loss = validation_loss(denoiser, run.manifest, run.held_out, run.config)[0]
        found.append(
            {
                "step": step,
                "validation_loss": loss,
                "clip_score": scores.clip_score(embedded, texts),
                "cmmd": scores.cmmd(embedded, real),
                "agreement": captioned_shapes.agreement(pictures, prompts)["all"],
            }
        )
        print(", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), flush=True)
    return found


def moments_of(rows, manifest):
    moments, valid = manifest.latents(64).decode(rows["image_latents_64"])
    return moments[np.asarray(valid)]


def correlations(found):
    """{score: Spearman's rank correlation with agreement}, 1 for the same order."""
    ranks = pd.DataFrame(found).rank()
    values = {name: float(ranks[name].corr(ranks["agreement"])) for name in SCORES}
    return {name: value if name in results.HIGHER_IS_BETTER else -value for name, value in values.items()}


def main():
    given = record.options(__doc__, seeds=3, at=[75, 150, 300, 600, 1200, 2400], prompts=295, rows=6000, threads=2)
    torch.set_num_threads(given.threads)
    table, manifest = encode(PreprocessingConfig(resolutions=[64]), drawn_rows(given.rows))
    prompts, clip, found = captioned_shapes.held_out_prompts(given.prompts), CLIP("tiny-clip"), []
    for seed in range(given.seeds):
        run = Training({**lesson_recipe(), "max_steps": max(given.at)}, seed, table, manifest)
        found.append(score_checkpoints(run, given.at, prompts, clip))
    by_seed = [correlations(one) for one in found]
    summary = {}
    for name in SCORES:
        values = [one[name] for one in by_seed]
        what = f"rank correlation of {name} with agreement, {len(given.at)} checkpoints, {given.seeds} seeds"
        summary[what] = f"{statistics.mean(values):.2f} (lowest {min(values):.2f})"
    record.write("scores_and_agreement", summary, correlations=by_seed, scores=found)


if __name__ == "__main__":
    main()
