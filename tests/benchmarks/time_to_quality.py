"""CPU seconds of training until images obey their prompts: a table of records, one line for each recipe.

    python -m tests.benchmarks.time_to_quality [--recipes NAME ...] [--tune]

A recipe is a record if, after its steps, at least 0.97 of the 295 held-out prompts are right in every attribute on the
mean of five seeds, and at least 0.95 with each seed. Seconds are the CPU time of the training steps in one thread,
with the batches that they take; encoding, building the model, and drawing are apart. Recipes train without Ray, from
the same 6,000 drawn images, encoded once. They run in turns, seed by seed, so that a slow minute slows all of them.

Images, prompts and detector are locked: the benchmark ends if their checksums have changed. Recipes are tuned with
`--tune`, which draws captions of the training images, from other seeds, and stores nothing.

`--seeds`, `--rows`, `--prompts` and `--scale` (of the steps) make a call smaller; its results are no records.

Tried, each with one tuning seed and 192 prompts, at about 155 CPU seconds a run (share of right images):

    AdamW, 1,000 steps                          0.818
        learning rate 5e-3 in place of 3e-3     0.635
        min_snr_gamma 2 in place of 5           0.797
    Muon, 900 steps, its rate 4e-3              0.917
        8e-3                                    0.891
        and three Newton-Schulz steps, a linear schedule, a shorter warm-up     0.880
        and three steps of Polar Express, AdamW's rate 5e-3                     0.854
        6e-3, caption_dropout 0.05 in place of 0.1                              0.849
    Muon, batches of 64, 500 steps, rates 4e-3 to 2e-2                 0.78 to 0.85
    Muon, batches of 64, 300 steps at 32 pixels, then 350 at 64                 0.635

With caption_dropout 0.05, guidance 1.5 and an EMA of 0.98, 256 prompts, seeds 100 and 101, about 95 CPU seconds a run:

    AdamW, 1,000 steps                                          0.883, 0.844
        guidance 2                                              0.832, 0.777
        caption_dropout 0.02                                    0.840
        attention at both sizes, 670 steps, which take as long  0.809, 0.824
        attention to captions in the middle block, a quarter longer             0.805
        time embeddings that scale and shift                    0.848, 0.832
        batches of 16, 2,000 steps, rate 2e-3, a third longer   0.910
        captions without padding (maximum_tokens 24)            0.477
        channels_last, hardly faster with the other core busy   0.883
    AdamW, 1,000 steps, caption_dropout 0.1                     0.820, 0.844
        guidance 2                                              0.781, 0.875
        guidance 2, an EMA of 0.99; 0.995 (the lesson's)        0.758; 0.758
        guidance 3; 4                                           0.707; 0.578
        min_snr_gamma None                                      0.363, 0.477
        flow matching with a shift of 0.5; 1; 2                 0.742; 0.773; 0.836

Between seeds, one recipe changes by up to 0.09. None of these is better by more, so none became a recipe. Muon (Jordan
et al., 2024) took the blocks' matrices and convolutions, with updates as large as AdamW's (Liu et al., 2025). With the
locked prompts and two seeds, 1,200 of its steps reached 0.966 and 0.983 in 219 and 223 CPU seconds, 1,800 of AdamW's
0.983 and 0.983 in 270 and 262. A step of Muon takes a fifth longer, so it gains about a tenth of the time: too little
for 200 more lines. Matrix products in bf16 made a step eight times as slow on a CPU without instructions for them.
"""

import datetime
import hashlib
import json
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

from helpers.config import PreprocessingConfig
from helpers.lesson import captioned_shapes
from tests.benchmarks import picture_quality, record

MEAN, EACH = 0.97, 0.95  # shares of right images that a record needs
SIZE = {"seeds": 5, "rows": 6000, "prompts": 295, "scale": 1.0}  # of a record
FIRST_TUNING_SEED, TUNING_PROMPTS = 100, 256
LOCKED = {"images": "8e8556a373d4210d", "prompts": "69fdb37cfac7b614", "detector": "961b0c6752a6024d"}
TITLE = "## Records: CPU seconds to a fixed quality"


class Recipe(NamedTuple):
    """`parameters`: those that differ from Training.ipynb's."""

    change: str
    parameters: dict


# Oldest first.
RECIPES = {
    "adamw": Recipe("the lesson's recipe, in as few steps as reach it", {"max_steps": 1700}),
}


# ---- what is locked


def checksum(*parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
    return digest.hexdigest()[:16]


def checksums(raw, prompts):
    """{"images", "prompts", "detector"}: of the raw rows, of the prompts, and of what the detector says of images.

    The detector sees held-out images as they are drawn, and with more and more noise.
    """
    rows = zip(raw["jpg"].to_pylist(), raw["caption"].to_pylist(), strict=True)
    random, said = np.random.default_rng(0), []
    for index in range(64):
        image, caption = captioned_shapes.draw_sample(index, seed=3, split="held_out")
        noise = random.normal(scale=2 * index, size=np.asarray(image).shape)
        noisy = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
        said.append(sorted(captioned_shapes.agreement([noisy], [caption]).items()))
    return {
        "images": checksum(*(part for row in rows for part in row)),
        "prompts": checksum(*prompts),
        "detector": checksum(said),
    }


def check_locked(found):
    """Raises SystemExit that names what has changed; `found`: of `checksums`."""
    changed = [name for name, value in found.items() if LOCKED[name] != value]
    if changed:
        raise SystemExit(
            f"The {' and the '.join(changed)} are not those of the records (LOCKED in {__file__}): undo the change, or "
            "begin a new table."
        )


# ---- measuring


def train_and_draw(parameters, seed, data, prompts):
    """{"seed", "right", "overlap", "seconds"} of one run."""
    run = picture_quality.Training(parameters, seed, *data)
    started = time.process_time()
    run.advance(run.config.max_steps)
    seconds = time.process_time() - started
    images = run.draw(prompts)
    right, overlap = captioned_shapes.agreement(images, prompts)["all"], picture_quality.shape_score(images, prompts)
    return {"seed": seed, "right": right, "overlap": overlap, "seconds": seconds}


def line_of(name, steps, runs):
    """What is said of a recipe; `runs`: those of all seeds."""
    right, seconds = ([run[key] for run in runs] for key in ("right", "seconds"))
    return {
        "recipe": name,
        "date": datetime.date.today().isoformat(),
        "commit": record.revision(),
        "steps": steps,
        "right": statistics.mean(right),
        "lowest": min(right),
        "overlap": statistics.mean(run["overlap"] for run in runs),
        "seconds": [statistics.median(seconds), min(seconds), max(seconds)],
        "reached": statistics.mean(right) >= MEAN and min(right) >= EACH,
    }


def sentence(line):
    seconds = "{:.0f} CPU s ({:.0f} to {:.0f})".format(*line["seconds"])
    right = f"{line['right']:.3f} right, lowest {line['lowest']:.3f}, shape overlap {line['overlap']:.3f}"
    return f"{seconds}, {line['steps']:,} steps, {right}" + ("" if line["reached"] else "; below the bar")


def records_with(lines):
    """The stored records, with those of `lines` that reached the bar in place of older ones; oldest recipe first."""
    path = record.folder() / "time_to_quality.json"
    stored = json.loads(path.read_text())["details"]["records"] if path.exists() else []
    found = {line["recipe"]: line for line in [*stored, *(line for line in lines if line["reached"])]}
    return [found[name] for name in RECIPES if name in found]


def table(records):
    """The lines of README.md's section."""
    lines = ["", TITLE, "", "| date | commit | what changed | steps | CPU s: median | lowest | highest | right |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for line in records:
        seconds = " | ".join(f"{value:.0f}" for value in line["seconds"])
        right = f"{line['right']:.3f}, lowest {line['lowest']:.3f}"
        what = RECIPES[line["recipe"]].change
        lines.append(f"| {line['date']} | {line['commit']} | {what} | {line['steps']:,} | {seconds} | {right} |")
    return lines


def main():
    given = record.options(__doc__, recipes=list(RECIPES), **SIZE, tune=False)
    if unknown := set(given.recipes) - RECIPES.keys():
        raise SystemExit(f"--recipes {' '.join(sorted(unknown))}: there are {', '.join(RECIPES)}.")
    is_record = all(getattr(given, name) == value for name, value in SIZE.items())
    raw = picture_quality.drawn_rows(given.rows)
    prompts, first_seed = captioned_shapes.held_out_prompts(given.prompts), 0
    if is_record:
        check_locked(checksums(raw, prompts))
    if given.tune:
        captions = (captioned_shapes.draw_sample(index, seed=991)[1] for index in range(1000))
        prompts, first_seed = list(dict.fromkeys(captions))[:TUNING_PROMPTS], FIRST_TUNING_SEED
    data = picture_quality.encode(PreprocessingConfig(resolutions=[64]), raw)
    torch.set_num_threads(1)
    recipes = {name: {**picture_quality.lesson_recipe(), **RECIPES[name].parameters} for name in given.recipes}
    for parameters in recipes.values():
        parameters["max_steps"] = max(1, round(parameters["max_steps"] * given.scale))
    runs = {name: [] for name in recipes}
    for seed in range(first_seed, first_seed + given.seeds):
        for name, parameters in recipes.items():
            runs[name].append(train_and_draw(parameters, seed, data, prompts))
            print(name, json.dumps(runs[name][-1]), flush=True)
    lines = [line_of(name, recipes[name]["max_steps"], of_name) for name, of_name in runs.items()]
    if given.tune:
        print("\n".join(f"{line['recipe']}: {sentence(line)}" for line in lines))
        return
    size = f"{given.seeds} seeds, {len(prompts)} held-out prompts"
    summary = {f"time to quality, {line['recipe']}, {size}": sentence(line) for line in lines}
    record.write("time_to_quality", summary, records=records_with(lines if is_record else []), runs=runs)


if __name__ == "__main__":
    main()
