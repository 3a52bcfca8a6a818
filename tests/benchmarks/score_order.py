"""Do the scores order a run's checkpoints as agreement does? CLIP score and CMMD by tiny-clip, over several seeds.

    python -m tests.benchmarks.score_order [--seeds 0 1 2] [--steps 1200] [--prompts 96] [--threads 1] [--add]

The recipe of Training.ipynb, shortened to `--steps`, trains without Ray on drawn pictures, as in `picture_quality`. At
each of eight checkpoints, spaced by a constant factor, the averaged weights draw held-out prompts (DDIM, 20 steps,
guidance 2, the same noise each time). Reported is Spearman's rank correlation over the checkpoints of each seed between
agreement (the share of pictures that are right in every attribute) and the CLIP score, and between agreement and CMMD
to as many real pictures of the same prompts, with the sign changed, because a smaller distance is better. `--add` keeps
the seeds that an earlier call has measured: a seed takes about ten minutes of one core.
"""

import argparse
import json

import numpy as np
import pandas as pd
import torch

from helpers.evaluation import scores
from helpers.lesson import captioned_shapes
from tests.benchmarks import picture_quality, record

CHECKPOINTS = 8


def rank_correlations(rows):
    """{score: Spearman's correlation with agreement} of rows (step, agreement, clip_score, cmmd) of one run."""
    table = pd.DataFrame(rows, columns=["step", "agreement", "clip_score", "cmmd"])
    table["cmmd"] *= -1
    return table.corr(method="spearman")["agreement"][["clip_score", "cmmd"]].to_dict()


def measure(seed, steps, prompts, table, manifest):
    """Rows (step, agreement, CLIP score, CMMD), one for each checkpoint."""
    clip = scores.CLIP()
    drawn = [captioned_shapes.draw(captioned_shapes.parse(prompt), [seed, i, 8]) for i, prompt in enumerate(prompts)]
    real, texts = clip.images([np.asarray(picture) for picture in drawn]), clip.texts(prompts)
    recipe = {**picture_quality.lesson_recipe(), "max_steps": steps}
    run, rows = picture_quality.Training(recipe, seed, table, manifest), []
    for step in np.unique(np.geomspace(max(1, steps // 8), steps, CHECKPOINTS).astype(int)).tolist():
        run.advance(step)
        pictures = run.draw(prompts)
        seen = clip.images(pictures)
        right = captioned_shapes.agreement(pictures, prompts)["all"]
        rows.append((step, right, scores.clip_score(seen, texts), scores.cmmd(seen, real)))
        print(f"seed {seed}", "step {}: agreement {:.3f}, CLIP score {:.2f}, CMMD {:.3f}".format(*rows[-1]), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--add", action="store_true", help="to the seeds that were measured before")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = record.folder() / "score_order.json"
    found = json.loads(path.read_text())["details"]["rows"] if arguments.add and path.exists() else {}
    table, manifest = picture_quality.encoded_rows(arguments.rows)
    prompts = captioned_shapes.held_out_prompts(arguments.prompts)
    for seed in arguments.seeds:
        found[str(seed)] = measure(seed, arguments.steps, prompts, table, manifest)
    by_seed = {seed: rank_correlations(rows) for seed, rows in found.items()}
    what = f"rank correlation with agreement, {CHECKPOINTS} checkpoints, {len(found)} seeds: "
    summary = {
        what + name: ", ".join(f"{values[column]:.2f}" for values in by_seed.values())
        for name, column in (("CLIP score", "clip_score"), ("CMMD", "cmmd"))
    }
    print(json.dumps(summary, indent=1))
    record.write("score_order", summary, rows=found, correlations=by_seed)


if __name__ == "__main__":
    main()
