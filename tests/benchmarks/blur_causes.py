"""Why generated images are blurry or wrong: for each cause, images beside those of the lesson's recipe, and scores.

    python -m tests.benchmarks.blur_causes [CAUSE ...] [--scale 1.0] [--prompts 96] [--rows 6000] [--threads 1]

The page helpers/docs/BLURRY.md explains the causes. The runs train without Ray, on the lesson's drawn images, encoded
once and kept in memory; each run trains once, when the first cause asks for it. All have the same seed, and all
settings of a cause draw the same held-out prompts from the same noise. Written are, after each cause,

- `blur_causes.json`: for each setting the share of images that are right in every attribute of their prompt, and the
  shape overlap (IoU) with the best-fitting ideal shape, as `picture_quality` measures them;
- `blurry-CAUSE.png`, in --pictures: the first images of each setting, a row each.

`--scale` multiplies the steps.
"""

import argparse
import functools
import pathlib

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers import sample
from helpers.config import PreprocessingConfig
from helpers.encode.encoder import LatentEncoder
from helpers.lesson import captioned_shapes
from helpers.model.denoisers import build_denoiser
from helpers.model.diffusion import EMA
from helpers.sample import generate, pipeline_of_run
from tests.benchmarks import record
from tests.benchmarks.picture_quality import FLOW, Training, drawn_rows, encode, lesson_recipe, shape_score

PICTURES = record.ROOT / "helpers" / "docs" / "pictures"
STOPS = [0.05, 0.1, 0.25, 0.5, 1]  # shares of the steps after which weights are kept
LONG = 0.9999  # decay of the averages that are kept beside the recipe's
FEW_ROWS = 200
SHOWN, ZOOM, GAP, LABEL = 6, 2, 4, 170  # images in a row, pixels for one, between two, for the row's name


class Lab:
    """The data, the runs that train on it, and the images that they draw."""

    def __init__(self, scale, prompts, rows, threads):
        self.recipe, self.prompts = lesson_recipe(), captioned_shapes.held_out_prompts(prompts)
        self.recipe["max_steps"] = max(len(STOPS), round(self.recipe["max_steps"] * scale))
        self.table, self.manifest = encode(PreprocessingConfig(resolutions=[64]), drawn_rows(rows))
        self.run = functools.cache(self.train)
        torch.set_num_threads(threads)

    def train(self, rows=None, **changes):
        """A finished run; its `weights`: {step: {which: weights}}, for each stop."""
        run = Training({**self.recipe, **changes}, 0, self.table.slice(0, rows), self.manifest)
        denoiser, run.weights = run.train_step.denoiser, {}
        averages = {"averaged": run.train_step.ema, "long average": EMA(denoiser, LONG)}
        plain = AveragedModel(denoiser, multi_avg_fn=get_ema_multi_avg_fn(LONG))
        plain.n_averaged += 1  # the first weights count
        stops = [max(1, round(run.config.max_steps * share)) for share in STOPS]
        for step in range(1, run.config.max_steps + 1):
            run.advance(step)
            averages["long average"].update(step)
            plain.update_parameters(denoiser)
            if step in stops:
                kept = {name: average.state_dict() for name, average in averages.items()}
                kept |= {"last": denoiser.state_dict(), "plain average": plain.module.state_dict()}
                run.weights[step] = {
                    name: {key: tensor.clone() for key, tensor in weights.items()} for name, weights in kept.items()
                }
                print(f"{changes or 'the recipe'}, {len(run.rows)} rows: step {step}", flush=True)
        return run

    def draw(self, run, which="averaged", step=None, prompts=None, guidance_scale=2.0):
        """`(images, prompts)` of a run's weights, the last by default."""
        denoiser = build_denoiser(run.config.unet_config)
        denoiser.load_state_dict(run.weights[step or run.done][which])
        pipeline, prompts = pipeline_of_run(denoiser, self.manifest, run.config), prompts or self.prompts
        return generate(pipeline, prompts, resolution=64, guidance_scale=guidance_scale, batch_size=64), prompts


def steps(lab):
    return {f"{step:,} steps": lab.draw(lab.run(), step=step) for step in lab.run().weights}


def guidance(lab):
    return {f"guidance_scale {scale}": lab.draw(lab.run(), guidance_scale=scale) for scale in (1, 2, 4, 10)}


def ema(lab):
    run, found = lab.run(), {}
    early = list(run.weights)[1]
    for step in (early, run.done):
        for which in ("averaged", "last"):
            found[f"{which}, step {step:,}"] = lab.draw(run, which, step)
    found[f"ema_decay {LONG}"] = lab.draw(run, "long average")
    found[f"{LONG} at once"] = lab.draw(run, "plain average")
    return found


def vae(lab):
    scenes = [captioned_shapes.parse(prompt) for prompt in lab.prompts]
    real = [np.asarray(captioned_shapes.draw_scene(scene, number)) for number, scene in enumerate(scenes)]
    moments, _ = LatentEncoder("tiny-sd", num_threads=torch.get_num_threads()).encode_images(np.stack(real))
    reconstructed = list(sample.reconstruct("tiny-sd", moments))
    return {
        "real": (real, lab.prompts),
        "through the VAE": (reconstructed, lab.prompts),
        "generated": lab.draw(lab.run()),
    }


def dropout(lab):
    found, runs = {}, {0.1: lab.run(), 0: lab.run(caption_dropout=0.0)}
    for share, run in runs.items():
        for scale in (1, 2, 4):
            found[f"dropout {share}, guidance {scale}"] = lab.draw(run, guidance_scale=scale)
    return found


def timesteps(lab):
    return {"importance": lab.draw(lab.run()), "uniform": lab.draw(lab.run(timestep_sampling="uniform"))}


def shift(lab):
    return {f"flow, shift {shift}": lab.draw(lab.run(**FLOW, timestep_shift=shift)) for shift in (1, 8)}


def rows(lab):
    few = lab.run(rows=FEW_ROWS)
    own = list(dict.fromkeys(few.rows["caption"].to_pylist()))[: len(lab.prompts)]
    return {
        f"{len(lab.table):,} rows": lab.draw(lab.run()),
        f"{FEW_ROWS} rows": lab.draw(few),
        f"{FEW_ROWS} rows, their captions": lab.draw(few, prompts=own),
    }


CAUSES = {cause.__name__: cause for cause in (steps, guidance, ema, vae, dropout, timesteps, rows, shift)}


def strip(rows):
    """{name: images} as one image of few colours, a row for each name."""
    side = ZOOM * rows[next(iter(rows))][0].shape[0]
    picture = Image.new("RGB", (LABEL + SHOWN * (side + GAP), len(rows) * (side + GAP)), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=14)
    for row, (name, images) in enumerate(rows.items()):
        pen.text((GAP, row * (side + GAP) + side // 2), name, "black", font, anchor="lm")
        for column, image in enumerate(images[:SHOWN]):
            large = Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST)
            picture.paste(large, (LABEL + column * (side + GAP), row * (side + GAP)))
    return picture.quantize(128, dither=Image.Dither.NONE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=", ".join(CAUSES))
    for name, default in {"scale": 1.0, "prompts": 96, "rows": 6000, "threads": 1, "pictures": PICTURES}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    if unknown := set(given.causes) - CAUSES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: the causes are {', '.join(CAUSES)}")
    pathlib.Path(given.pictures).mkdir(parents=True, exist_ok=True)
    lab, found = Lab(given.scale, given.prompts, given.rows, given.threads), {}
    for cause in given.causes or CAUSES:
        drawn = CAUSES[cause](lab)
        found[cause] = {
            name: {"right": captioned_shapes.agreement(*pair)["all"], "overlap": shape_score(*pair)}
            for name, pair in drawn.items()
        }
        shown = {name: images for name, (images, prompts) in drawn.items() if prompts is lab.prompts}
        strip(shown).save(given.pictures / f"blurry-{cause}.png", optimize=True)
        summary = summarise(found, given.prompts)
        print(*list(summary.items())[-1], sep=": ", flush=True)
        record.save("blur_causes", summary, settings=found, shown=lab.prompts[:SHOWN])


def summarise(found, prompts):
    """The lines of the table."""
    summary = {}
    for cause, scores in found.items():
        of_each = [f"{name}: {score['right']:.3f}, {score['overlap']:.3f}" for name, score in scores.items()]
        summary[f"blurry by {cause}, {prompts} held-out prompts, one seed: right, shape overlap"] = "; ".join(of_each)
    return summary


if __name__ == "__main__":
    main()
