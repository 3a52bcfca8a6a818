"""A run over time in one figure: loss, held-out loss, scores, and pictures at each checkpoint."""

import matplotlib.ticker
import numpy as np

from .. import storage
from ..train import results
from ..train.metrics import read_metrics
from .drawing import (
    BLUE,
    GREEN,
    LINE,
    ORANGE,
    PURPLE,
    RED,
    SMALL,
    WIDTH,
    DescribedFigure,
    axes,
    show,
    wrap,
)

# Of the columns of `results.scores`, in the order of their curves.
LABELS = {"validation_loss": "held-out loss", "clip_score": "CLIP score", "cmmd": "CMMD", "agreement": "agreement"}
SCORE_COLORS = {"clip_score": GREEN, "cmmd": ORANGE, "agreement": PURPLE}
NOISE = "loss_by_noise/"


def run_over_time(run_uri, *, num_prompts=4, num_steps=6):
    """Loss, held-out loss by noise level, scores, and pictures of the same prompts at each checkpoint, in one figure.

    `num_prompts`: how many prompts, one row each; `num_steps`: how many checkpoints at most, evenly chosen. Raises
    ValueError if the run has not made a step.
    """
    metrics, scores, pictures = read_metrics(run_uri), results.scores(run_uri), pictures_by_step(run_uri)
    if metrics.empty:
        raise ValueError(f"no step in {run_uri}: give the folder of a run that has trained, storage/runs/run_name.")
    by_noise = [name for name in scores if name.startswith(NOISE)]
    known = [column for column in SCORE_COLORS if column in scores and scores[column].notna().any()]
    steps = choose_evenly(sorted(pictures), num_steps)
    prompts = list(next(iter(pictures.values())))[:num_prompts] if steps else []
    side = min(1.6, (WIDTH - 2) / max(1, len(steps)))
    num_panels = 1 + bool(by_noise) + len(known)
    heights = [2.6 * -(-num_panels // 3)] + ([side * len(prompts) + 0.4] if prompts else [])
    fig = DescribedFigure(sum(heights))
    top, *bottom = np.atleast_1d(fig.subfigures(len(heights), 1, height_ratios=heights))
    loss_ax, *score_axes = panel_axes(top, num_panels)
    said = [draw_loss(loss_ax, metrics, scores)]
    if by_noise:
        said.append(draw_by_noise(score_axes.pop(0), scores, by_noise))
    said += [draw_score(ax, scores, column, SCORE_COLORS[column]) for ax, column in zip(score_axes, known, strict=True)]
    if prompts:
        said.append(draw_pictures(bottom[0], pictures, steps, prompts))
    return fig.described(f"A run over {metrics['step'].iloc[-1]:,} steps: {'; '.join(said)}.")


def pictures_by_step(run_uri):
    """{step: {prompt: picture}} from a run's evaluations."""
    pictures = {}
    for folder in storage.list_folders(storage.join(run_uri, "evaluation")):
        prompts = storage.join(folder, "prompts.json")
        if storage.exists(prompts):
            pictures[int(storage.name(folder))] = {
                prompt: results.read_picture(storage.join(folder, f"{number:02d}.png"))
                for number, prompt in enumerate(storage.read_json(prompts))
            }
    return dict(sorted(pictures.items()))


def choose_evenly(values, most):
    """At most `most` of a list's values, evenly chosen, including the first and the last."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[place] for place in places]


def panel_axes(fig, num_panels):
    """Axes in rows of three."""
    made = list(np.atleast_1d(axes(fig, -(-num_panels // 3), min(3, num_panels), grid="both")).flat)
    for ax in made[num_panels:]:
        ax.remove()
    return made[:num_panels]


def label_over_steps(ax, label):
    ax.set(xlabel="step", ylabel=label)
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))


def smoothed_loss(metrics):
    return metrics["loss"].rolling(25, min_periods=1, center=True).mean()


def draw_loss(ax, metrics, scores):
    curve = smoothed_loss(metrics)
    ax.plot(metrics["step"], metrics["loss"], color=BLUE, alpha=0.25, lw=0.8)
    ax.plot(metrics["step"], curve, color=BLUE, label="training")
    losses = {"validation_loss": (RED, "held out"), "validation_set_loss": (ORANGE, "validation set")}
    for column, (color, label) in losses.items():
        if column in scores:
            ax.plot(scores["step"], scores[column], "o", color=color, ms=5, mec="white", label=label)
    ax.set_ylim(0, 1.3 * np.nanquantile(metrics["loss"].astype(float), 0.98))
    ax.legend(frameon=False, fontsize=SMALL)
    label_over_steps(ax, "loss")
    return f"loss from {curve.iloc[0]:.3g} to {curve.iloc[-1]:.3g}"


def draw_by_noise(ax, scores, columns):
    """A line for each checkpoint, from light (the first) to dark."""
    known = scores.dropna(subset=columns)
    timesteps = [int(column.removeprefix(NOISE)) for column in columns]
    for number, (_, row) in enumerate(known.iterrows()):
        shade = 0.25 + 0.75 * (number + 1) / len(known)
        label = f"step {int(row['step']):,}" if number in (0, len(known) - 1) else None
        ax.plot(timesteps, row[columns], "-", color=BLUE, alpha=shade, lw=1.6, label=label)
    ax.set(xlabel="timestep (noise level)", ylabel="loss by noise level")
    ax.legend(frameon=False, fontsize=SMALL)
    first, last = known.iloc[0][columns], known.iloc[-1][columns]
    return f"by noise level from {first.min():.3g} to {first.max():.3g} at first, {last.min():.3g} to {last.max():.3g}"


def draw_score(ax, scores, column, color):
    known = scores.dropna(subset=[column])
    ax.plot(known["step"], known[column], "o-", color=color, ms=4)
    label_over_steps(ax, LABELS[column])
    return f"{LABELS[column]} from {known[column].iloc[0]:.3g} to {known[column].iloc[-1]:.3g}"


def draw_pictures(fig, pictures, steps, prompts):
    """A grid of pictures: one row per prompt, one column per checkpoint."""
    grid = fig.subplots(len(prompts), len(steps), squeeze=False)
    lines = int(fig.bbox.height / fig.dpi / len(prompts) / LINE) - 1
    for column, step in zip(grid.T, steps, strict=True):
        column[0].set_title(f"step {step:,}", fontsize=SMALL)
        for ax, prompt in zip(column, prompts, strict=True):
            if prompt in pictures[step]:
                show(ax, pictures[step][prompt])
            else:
                ax.set_axis_off()
    for ax, prompt in zip(grid[:, 0], prompts, strict=True):
        ax.set_ylabel(wrap(prompt, 1.6, max(1, lines)), fontsize=SMALL, rotation=0, ha="right", va="center")
    return f"pictures of {'; '.join(prompts)} at steps {', '.join(f'{step:,}' for step in steps)}"
