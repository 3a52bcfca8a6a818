"""Figures of evaluation, drawn from plain arrays and frames; see `drawing` for what they return."""

import io

import matplotlib.ticker
import numpy as np
from PIL import Image

from .. import storage
from ..runtime import metrics_log
from . import results
from .drawing import BLUE, CYCLE, GREEN, LINE, ORANGE, PURPLE, RED, SMALL, WIDTH, DescribedFigure, axes, show, wrap

# ---- a run over time

# The scores in the order of their curves: column of `results.scores`, label, colour.
SCORES = [("clip_score", "CLIP score", GREEN), ("cmmd", "CMMD", ORANGE), ("agreement", "agreement", PURPLE)]
NOISE = "loss_by_noise/"


def run_over_time(run_uri, *, num_prompts=4, num_steps=6, smooth=25):
    """Loss, held-out loss by noise level, scores, and pictures of the same prompts at each checkpoint, in one figure.

    `num_prompts`: how many of the prompts, a row each; `num_steps`: of how many checkpoints at most, evenly chosen.
    Raises ValueError if the run has made no step.
    """
    metrics, scores, pictures = read_metrics(run_uri), results.scores(run_uri), read_pictures(run_uri)
    found = [(name, label, color) for name, label, color in SCORES if name in scores and scores[name].notna().any()]
    by_noise = [name for name in scores if name.startswith(NOISE)]
    steps = chosen(sorted(pictures), num_steps)
    prompts = list(next(iter(pictures.values())))[:num_prompts] if steps else []
    num_curves = 1 + bool(by_noise) + len(found)
    side = min(1.6, (WIDTH - 2) / max(1, len(steps)))
    heights = [2.6 * -(-num_curves // 3)] + ([side * len(prompts) + 0.4] if prompts else [])
    fig = DescribedFigure(sum(heights))
    parts = np.atleast_1d(fig.subfigures(len(heights), 1, height_ratios=heights))
    flat = list(np.atleast_1d(axes(parts[0], -(-num_curves // 3), min(3, num_curves), grid="both")).flat)
    for ax in flat[num_curves:]:
        ax.remove()
    said = [draw_loss(flat[0], metrics, scores, smooth)]
    if by_noise:
        said.append(draw_by_noise(flat[1], scores, by_noise))
    for ax, (name, label, color) in zip(flat[1 + bool(by_noise) :], found, strict=False):
        said.append(draw_score(ax, scores, name, label, color))
    if prompts:
        said.append(draw_pictures(parts[1], pictures, steps, prompts))
    return fig.described(f"A run over {metrics['step'].iloc[-1]:,} steps: {'; '.join(said)}.")


def compare_runs(runs, *, smooth=25):
    """Several runs in one figure: training loss, held-out loss, its shape over noise levels at the end, and scores.

    `runs`: {name: URI of the run}. What none of the runs has is left out. Compare losses only of runs that share
    `min_snr_gamma` and `prediction_type`, and scores only of those that share their prompts.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one name and URI.")
    metrics = {name: read_metrics(uri) for name, uri in runs.items()}
    scores = {name: results.scores(uri) for name, uri in runs.items()}
    panels = [("validation_loss", "held-out loss"), *((name, label) for name, label, _ in SCORES)]
    panels = [(name, label) for name, label in panels if any(name in frame for frame in scores.values())]
    by_noise = any(name.startswith(NOISE) for frame in scores.values() for name in frame)
    num = 1 + by_noise + len(panels)
    fig = DescribedFigure(2.8 * -(-num // 3), width=WIDTH if num > 1 else 6)
    flat = list(np.atleast_1d(axes(fig, -(-num // 3), min(3, num), grid="both")).flat)
    for ax in flat[num:]:
        ax.remove()
    said = []
    for (name, frame), color in zip(metrics.items(), CYCLE * len(metrics), strict=False):
        curve = frame["loss"].rolling(smooth, min_periods=1, center=True).mean()
        flat[0].plot(frame["step"], curve, color=color, label=name)
        last = scores[name].ffill().iloc[-1] if len(scores[name]) else {}
        for ax, (column, _) in zip(flat[1:], panels, strict=False):
            if column in scores[name]:
                known = scores[name].dropna(subset=[column])
                ax.plot(known["step"], known[column], "o-", color=color, ms=4, label=name)
        if by_noise:
            levels = [column for column in scores[name] if column.startswith(NOISE)]
            flat[num - 1].plot([int(c.removeprefix(NOISE)) for c in levels], [last[c] for c in levels], color=color)
        numbers = [f"{label} {last[column]:.3g}" for column, label in panels if column in last]
        said.append(f"{name}: " + ", ".join([f"loss {curve.iloc[-1]:.3g}", *numbers]))
    for ax, label in zip(flat, ["loss", *(label for _, label in panels)], strict=False):
        over_steps(ax, label)
    if by_noise:
        flat[num - 1].set(xlabel="timestep (noise level)", ylabel="loss by noise level, at the end")
    flat[0].legend(frameon=False, fontsize=SMALL)
    return fig.described(f"{len(runs)} runs over their steps. {'; '.join(said)}.")


def strip(run_uri, prompt, *, num_steps=8):
    """One prompt's picture at the checkpoints of a run, `num_steps` of them at most, evenly chosen."""
    pictures = pictures_of(run_uri, prompt)
    steps = chosen(sorted(pictures), num_steps)
    side = min(WIDTH / len(steps), 2.2)
    fig = DescribedFigure(side + 0.5, max(4, side * len(steps)))
    for ax, step in zip(fig.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        show(ax, pictures[step])
        ax.set_title(f"step {step:,}", fontsize=SMALL)
    fig.suptitle(wrap(prompt, fig.get_figwidth(), 2), fontsize=SMALL + 1, parse_math=False)
    return fig.described(f"Pictures of {prompt!r} at steps {', '.join(f'{step:,}' for step in steps)}.")


def animation(run_uri, prompt, path, *, size=256, seconds=0.6):
    """Write one prompt's pictures over the checkpoints as an animated GIF; returns `path`, a file or URI.

    `size`: pixels of its longer side; `seconds`: how long each picture is seen, the last one three times as long.
    """
    pictures = pictures_of(run_uri, prompt)
    frames = []
    for step in sorted(pictures):
        frame = Image.fromarray(pictures[step])
        scale = size / max(frame.size)
        frames.append(frame.resize([max(1, round(side * scale)) for side in frame.size], Image.Resampling.NEAREST))
    durations = [1000 * seconds] * (len(frames) - 1) + [3000 * seconds]
    gif = io.BytesIO()
    frames[0].save(gif, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    storage.write_bytes(path, gif.getvalue())
    return path


# ---- what the figures of runs read and draw


def read_metrics(run_uri):
    metrics = metrics_log.read_metrics(run_uri)
    if not len(metrics):
        raise ValueError(f"no step in {run_uri}: give the folder of a run that has trained, storage/runs/run_name.")
    return metrics


def read_pictures(run_uri):
    """{step: {prompt: picture}} that evaluations of a run have left."""
    found = {}
    for folder in storage.list_folders(storage.join(run_uri, "evaluation")):
        texts = storage.join(folder, "prompts.json")
        if storage.name(folder).isdigit() and storage.exists(texts):
            uris = {
                text: storage.join(folder, f"{place:02d}.png") for place, text in enumerate(storage.read_json(texts))
            }
            found[int(storage.name(folder))] = {text: results.read_picture(uri) for text, uri in uris.items()}
    return dict(sorted(found.items()))


def pictures_of(run_uri, prompt):
    """{step: picture} of a prompt."""
    found = read_pictures(run_uri)
    if not found:
        raise ValueError(f"no pictures of checkpoints in {run_uri}: train with validate_every of more than 0.")
    pictures = {step: pictures[prompt] for step, pictures in found.items() if prompt in pictures}
    if not pictures:
        known = "; ".join(map(repr, next(reversed(found.values()))))
        raise ValueError(f"{prompt!r} is none of the prompts whose pictures {run_uri} keeps: {known}.")
    return pictures


def chosen(values, most):
    """At most so many of a list, evenly, with the first and the last."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[place] for place in dict.fromkeys(places.tolist())]


def over_steps(ax, label):
    ax.set(xlabel="step", ylabel=label)
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))


def draw_loss(ax, metrics, scores, smooth):
    curve = metrics["loss"].rolling(smooth, min_periods=1, center=True).mean()
    ax.plot(metrics["step"], metrics["loss"], color=BLUE, alpha=0.25, lw=0.8)
    ax.plot(metrics["step"], curve, color=BLUE, label="training")
    if "validation_loss" in scores:
        ax.plot(scores["step"], scores["validation_loss"], "o", color=RED, ms=5, mec="white", label="held out")
    ax.set_ylim(0, 1.3 * np.nanquantile(metrics["loss"].astype(float), 0.98))
    ax.legend(frameon=False, fontsize=SMALL)
    over_steps(ax, "loss")
    return f"loss from {curve.iloc[0]:.3g} to {curve.iloc[-1]:.3g}"


def draw_by_noise(ax, scores, columns):
    """A line for each checkpoint, from light (the first) to dark."""
    known = scores.dropna(subset=columns)
    timesteps = [int(column.removeprefix(NOISE)) for column in columns]
    for place, (_, row) in enumerate(known.iterrows()):
        shade = 0.25 + 0.75 * (place + 1) / len(known)
        label = f"step {int(row['step']):,}" if place in (0, len(known) - 1) else None
        ax.plot(timesteps, row[columns], "-", color=BLUE, alpha=shade, lw=1.6, label=label)
    ax.set(xlabel="timestep (noise level)", ylabel="loss by noise level")
    ax.legend(frameon=False, fontsize=SMALL)
    first, last = known.iloc[0][columns], known.iloc[-1][columns]
    return f"by noise level from {first.min():.3g} to {first.max():.3g} at first, {last.min():.3g} to {last.max():.3g}"


def draw_score(ax, scores, name, label, color):
    known = scores.dropna(subset=[name])
    ax.plot(known["step"], known[name], "o-", color=color, ms=4)
    over_steps(ax, label)
    return f"{label} from {known[name].iloc[0]:.3g} to {known[name].iloc[-1]:.3g}"


def draw_pictures(fig, pictures, steps, prompts):
    """A row of pictures a prompt, a column a checkpoint."""
    grid = fig.subplots(len(prompts), len(steps), squeeze=False)
    lines = int(fig.bbox.height / fig.dpi / len(prompts) / LINE) - 1
    for ax, step in zip(grid[0], steps, strict=True):
        ax.set_title(f"step {step:,}", fontsize=SMALL)
    for row, prompt in zip(grid, prompts, strict=True):
        for ax, step in zip(row, steps, strict=True):
            if prompt in pictures[step]:
                show(ax, pictures[step][prompt])
            else:
                ax.set_axis_off()
        row[0].set_ylabel(wrap(prompt, 1.6, max(1, lines)), fontsize=SMALL, rotation=0, ha="right", va="center")
    return f"pictures of {len(prompts)} prompts at steps {', '.join(f'{step:,}' for step in steps)}"
