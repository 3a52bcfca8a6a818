"""A run over time in one figure: loss, held-out loss by noise level, scores, and images at each checkpoint."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from .. import storage
from ..production.extras import results
from ..train.metrics import read_metrics
from .drawing import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SMALL,
    WIDTH,
    DescribedFigure,
    add_legend,
    label_steps,
    panels,
    show_image,
    wrap,
)

# Columns of `results.scores`, in the order of their panels: label and colour.
SCORES = {"clip_score": ("CLIP score", GREEN), "cmmd": ("CMMD", ORANGE), "agreement": ("agreement", PURPLE)}
LOSSES = {"validation_loss": ("held out", RED), "validation_set_loss": ("validation set", ORANGE)}
NOISE = "loss_by_noise/"
NUM_PROMPTS = 4  # rows of images
MOST_STEPS = 6  # columns of images
PANELS_PER_ROW = 3


def run_over_time(run_uri: str) -> DescribedFigure:
    """Loss, held-out loss by noise level, scores, and images of the same prompts at each checkpoint.

    At most `MOST_STEPS` checkpoints have images; they are evenly chosen. Raises ValueError for a run without a step.
    """
    metrics, scores, images = read_metrics(run_uri), results.scores(run_uri), read_evaluated_images(run_uri)
    if metrics.empty:
        raise ValueError(f"no step in {run_uri}: give the folder of a run that has trained, storage/runs/run_name.")
    by_noise = [name for name in scores if name.startswith(NOISE)]
    known = [column for column in SCORES if column in scores and scores[column].notna().any()]
    steps = choose_evenly(sorted(images), MOST_STEPS)
    prompts = list(images[steps[0]])[:NUM_PROMPTS] if steps else []
    num_panels = 1 + bool(by_noise) + len(known)
    heights = [2.6 * -(-num_panels // PANELS_PER_ROW)]
    if prompts:
        heights.append(min(1.6, (WIDTH - 2) / len(steps)) * len(prompts) + 0.4)
    fig = DescribedFigure(sum(heights))
    top, *bottom = np.atleast_1d(fig.subfigures(len(heights), 1, height_ratios=heights))
    loss_ax, *score_axes = first_panels(top, num_panels)
    said = [draw_loss(loss_ax, metrics, scores)]
    if by_noise:
        said.append(draw_by_noise(score_axes.pop(0), scores, by_noise))
    said += [draw_score(ax, scores, column) for ax, column in zip(score_axes, known, strict=True)]
    if prompts:
        said.append(draw_images(bottom[0], images, steps, prompts))
    return fig.described(f"A run over {metrics['step'].iloc[-1]:,} steps: {'; '.join(said)}.")


def read_evaluated_images(run_uri: str) -> dict[int, dict[str, np.ndarray]]:
    """{step: {prompt: image}} from a run's evaluations."""
    found = {}
    for folder in storage.list_folders(storage.join(run_uri, "evaluation")):
        prompts = storage.join(folder, "prompts.json")
        if storage.exists(prompts):
            found[int(storage.name(folder))] = {
                prompt: results.read_png(storage.join(folder, f"{number:02d}.png"))
                for number, prompt in enumerate(storage.read_json(prompts))
            }
    return found


def choose_evenly(values: Sequence[int], most: int) -> list[int]:
    """At most `most` values, evenly chosen, including the first and the last."""
    positions = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[position] for position in positions]


def first_panels(fig: FigureBase, count: int) -> list[Axes]:
    """Axes in rows of `PANELS_PER_ROW`; the first row has what is left, and wider ones."""
    sizes = [PANELS_PER_ROW] * (count // PANELS_PER_ROW)
    if left := count % PANELS_PER_ROW:
        sizes.insert(0, left)
    rows = zip(fig.subfigures(len(sizes), 1, squeeze=False).ravel(), sizes, strict=True)
    return [ax for row, size in rows for ax in panels(row, 1, size, grid="both", squeeze=False).ravel()]


def draw_loss(ax: Axes, metrics: pd.DataFrame, scores: pd.DataFrame) -> str:
    """The loss of each step, faint; its moving average; the held-out losses of checkpoints. Returns it in words."""
    curve = metrics["loss"].rolling(25, min_periods=1, center=True).mean()
    ax.plot(metrics["step"], metrics["loss"], color=BLUE, alpha=0.25, lw=0.8)
    ax.plot(metrics["step"], curve, color=BLUE, label="training")
    for column, (label, color) in LOSSES.items():
        if column in scores:
            ax.plot(scores["step"], scores[column], "o", color=color, ms=5, mec="white", label=label)
    ax.set_ylim(0, 1.3 * np.nanquantile(metrics["loss"].astype(float), 0.98))
    add_legend(ax)
    label_steps(ax, "loss", most_ticks=4)
    return f"loss from {curve.iloc[0]:.3g} to {curve.iloc[-1]:.3g}"


def draw_by_noise(ax: Axes, scores: pd.DataFrame, columns: list[str]) -> str:
    """A curve for each of at most four checkpoints, from light (the first) to dark.

    Returns the first and the last in words.
    """
    known = scores.dropna(subset=columns)
    known = known.iloc[choose_evenly(range(len(known)), 4)]
    timesteps = [int(column.removeprefix(NOISE)) for column in columns]
    for shade, (_, row) in zip(np.linspace(0.4, 1, len(known)), known.iterrows(), strict=True):
        ax.plot(timesteps, row[columns], color=BLUE, alpha=shade, lw=1.6, label=f"step {row['step']:,.0f}")
    ax.set(xlabel="timestep (noise level)", ylabel="loss by noise level")
    add_legend(ax)
    first, last = known.iloc[0][columns], known.iloc[-1][columns]
    return f"by noise level from {first.min():.3g} to {first.max():.3g} at first, {last.min():.3g} to {last.max():.3g}"


def draw_score(ax: Axes, scores: pd.DataFrame, column: str) -> str:
    """A score at each checkpoint that has it. Returns the first and the last in words."""
    label, color = SCORES[column]
    known = scores.dropna(subset=[column])
    ax.plot(known["step"], known[column], "o-", color=color, ms=4)
    label_steps(ax, label, most_ticks=4)
    return f"{label} from {known[column].iloc[0]:.3g} to {known[column].iloc[-1]:.3g}"


def draw_images(fig: FigureBase, images: dict[int, dict[str, np.ndarray]], steps: list[int], prompts: list[str]) -> str:
    """A grid of images: a row for each prompt, a column for each step. Returns its contents in words."""
    grid = fig.subplots(len(prompts), len(steps), squeeze=False)
    for column, step in zip(grid.T, steps, strict=True):
        column[0].set_title(f"step {step:,}", fontsize=SMALL)
        for ax, prompt in zip(column, prompts, strict=True):
            if prompt in images[step]:
                show_image(ax, images[step][prompt])
            else:
                ax.set_axis_off()
    for ax, prompt in zip(grid[:, 0], prompts, strict=True):
        ax.set_ylabel(wrap(prompt, 1.6, 7), fontsize=SMALL, rotation=0, ha="right", va="center")
    return f"images of {'; '.join(prompts)} at steps {', '.join(f'{step:,}' for step in steps)}"
