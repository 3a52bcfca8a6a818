"""Figures of evaluation, drawn from plain arrays and frames; see `drawing` for what they return."""

import itertools

import matplotlib.ticker
import numpy as np

from .. import storage
from ..train import metrics as metrics_log
from ..train import results
from ..train.results import read_picture
from .drawing import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    SMALL,
    WIDTH,
    DescribedFigure,
    aspect,
    axes,
    show,
    wrap,
)

# ---- a run over time

# Of the columns of `results.scores`, in the order of their curves.
LABELS = {"validation_loss": "held-out loss", "clip_score": "CLIP score", "cmmd": "CMMD", "agreement": "agreement"}
SCORE_COLORS = {"clip_score": GREEN, "cmmd": ORANGE, "agreement": PURPLE}
NOISE = "loss_by_noise/"


def run_over_time(run_uri, *, num_prompts=4, num_steps=6):
    """Loss, held-out loss by noise level, scores, and pictures of the same prompts at each checkpoint, in one figure.

    `num_prompts`: how many prompts, one row each; `num_steps`: how many checkpoints at most, evenly chosen. Raises
    ValueError if the run has not made a step.
    """
    metrics, scores, pictures = read_metrics(run_uri), results.scores(run_uri), read_pictures(run_uri)
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


def compare_runs(runs):
    """Several runs in one figure: training loss, held-out loss and scores.

    `runs`: {name: URI of the run}. Panels without data from any run are left out. Compare losses only of runs that
    share `min_snr_gamma` and `prediction_type`, and scores only of those that share their prompts.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one name and URI.")
    scores = {name: results.scores(uri) for name, uri in runs.items()}
    columns = [column for column in LABELS if any(column in frame for frame in scores.values())]
    num_panels = 1 + len(columns)
    fig = DescribedFigure(2.8 * -(-num_panels // 3), width=WIDTH if columns else 6)
    loss_ax, *score_axes = panel_axes(fig, num_panels)
    label_over_steps(loss_ax, "loss")
    said = []
    for (name, uri), color in zip(runs.items(), itertools.cycle(CYCLE), strict=False):
        metrics = read_metrics(uri)
        curve = smoothed_loss(metrics)
        loss_ax.plot(metrics["step"], curve, color=color, label=name)
        said.append(f"{name}: loss {curve.iloc[-1]:.3g}")
        for ax, column in zip(score_axes, columns, strict=True):
            if column in scores[name]:
                said.append(draw_score(ax, scores[name], column, color))
    loss_ax.legend(frameon=False, fontsize=SMALL)
    return fig.described(f"{len(runs)} runs over their steps. {'; '.join(said)}.")


# ---- parts of the figures of runs


def read_metrics(run_uri):
    metrics = metrics_log.read_metrics(run_uri)
    if not len(metrics):
        raise ValueError(f"no step in {run_uri}: give the folder of a run that has trained, storage/runs/run_name.")
    return metrics


def read_pictures(run_uri):
    """{step: {prompt: picture}} from a run's evaluations."""
    pictures = {}
    for folder in storage.list_folders(storage.join(run_uri, "evaluation")):
        prompts = storage.join(folder, "prompts.json")
        if storage.exists(prompts):
            pictures[int(storage.name(folder))] = {
                prompt: read_picture(storage.join(folder, f"{number:02d}.png"))
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


# ---- trials, preferences, memorisation


def paired_differences(results, compared):
    """Trials paired by seed. Left: the first metric, one line per seed. Right: differences with their intervals.

    `results`: columns setting, seed, metric, value (`trials.run`). `compared`: `trials.compare` of it. Differences are
    in percent of the first setting's mean; one whose interval includes 0 may be chance.
    """
    names, metric = list(dict.fromkeys(results["setting"])), results["metric"].iloc[0]
    metrics, others = list(dict.fromkeys(compared["metric"])), names[1:]
    fig = DescribedFigure(max(3.2, 1.2 + 0.25 * len(metrics) * len(others)))
    by_seed, right = axes(fig, 1, 2, width_ratios=[1, 2])
    values = results[results["metric"] == metric].pivot(index="seed", columns="setting", values="value")[names]
    by_seed.plot(range(len(names)), values.T, "o-", color="0.6", lw=1)
    by_seed.set(xticks=range(len(names)), xticklabels=names, ylabel=metric, xlim=(-0.4, len(names) - 0.6))
    by_seed.set_title(f"{len(values)} seeds, a line each", fontsize=SMALL)
    right.axvline(0, color="0.3", lw=1)
    for number, (name, color) in enumerate(zip(others, itertools.cycle(CYCLE), strict=False)):
        rows = compared[compared["setting"] == name].set_index("metric").loc[metrics]
        low, middle, high = (100 * rows[column] / rows["baseline"].abs() for column in ("low", "difference", "high"))
        heights = np.arange(len(metrics)) + 0.2 * (number - (len(others) - 1) / 2)
        right.errorbar(middle, heights, xerr=[middle - low, high - middle], fmt="o", color=color, capsize=3, label=name)
    right.set(yticks=range(len(metrics)), yticklabels=metrics, xlabel=f"difference from {names[0]}, %")
    right.invert_yaxis()
    right.legend(frameon=False, fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(others))
    said = [
        f"{row.setting}, {row.metric}: {row.difference:.3g} ({row.low:.3g} to {row.high:.3g})"
        for row in compared.itertuples()
    ]
    return fig.described(f"Differences from {names[0]} over {len(values)} seeds: {'; '.join(said)}.")


def preferences(report, *, title=""):
    """Which of two models readers prefer, by question, with 95 % intervals; as in MosaicML's Figure 5.

    `report`: what `side_by_side.report` returned. Points are shares of the choices that prefer one of the two.
    """
    first, undecided, second = report.columns[:3]
    fig = DescribedFigure(2.2, width=7)
    ax, said = axes(fig, grid="x"), []
    for number, (question, row) in enumerate(report.iterrows()):
        low, share, high = 100 * row["low"], 100 * row["preferred"], 100 * row["high"]
        if row[first] + row[second] == 0:
            said.append(f"{question}: {second} preferred by no one")
            continue
        ax.errorbar(share, number, xerr=[[share - low], [high - share]], fmt="o", color=BLUE, capsize=6)
        said.append(f"{question}: {second} preferred by {share:.0f}% ({low:.0f}% to {high:.0f}%)")
    ax.axvline(50, color=GREY, ls="--", lw=1)
    counts = [
        f"{name}\n{row[first]:.0f} : {row[second]:.0f}, {undecided} {row[undecided]:.0f}"
        for name, row in report.iterrows()
    ]
    ax.set(yticks=range(len(report)), yticklabels=counts, ylim=(len(report) - 0.5, -0.5), xlim=(0, 100))
    ax.set(xlabel=f"{second} preferred to {first}, %")
    ax.set_title(title, parse_math=False)
    return fig.described(f"{title + '. ' if title else ''}{'; '.join(said)}; of those who prefer {first} or {second}.")


def nearest_neighbours(pictures, neighbours, nearest, held_out, *, columns=8, near=0.01):
    """Generated pictures above their nearest training pictures, with the distances.

    `pictures` and `neighbours`: one for each row of `nearest` (columns query, distance, nearer: `memorisation.search`);
    those with the smallest distance are shown. `held_out`: distances of held-out rows to their nearest training rows.
    Pictures nearer than all but a share `near` of these are framed in red: they may be copies.
    """
    if not len(nearest):
        raise ValueError("nearest has no rows: search for at least one picture.")
    order = np.argsort(nearest["distance"].to_numpy(), kind="stable")[:columns]
    height = 2 * WIDTH / columns * aspect([pictures[number] for number in order]) + 0.6
    fig = DescribedFigure(height + 2.8)
    top, bottom = fig.subfigures(2, 1, height_ratios=[height, 2.8])
    grid = top.subplots(2, columns, squeeze=False)
    for ax in grid[:, len(order) :].flat:
        ax.set_axis_off()
    suspects = (nearest["nearer"] <= near).to_numpy()
    for (above, below), number in zip(grid.T, order, strict=False):
        show(above, pictures[number])
        show(below, neighbours[number])
        below.set_xlabel(f"{nearest['distance'].iloc[number]:.2f}", fontsize=SMALL)
        if suspects[number]:
            for ax in (above, below):
                ax.spines[:].set(visible=True, color=RED, linewidth=3)
    grid[0, 0].set_ylabel("generated", fontsize=SMALL)
    grid[1, 0].set_ylabel("nearest in\ntraining data", fontsize=SMALL)
    ax = axes(bottom)
    ax.hist(held_out, 30, color=SKY, label=f"{len(held_out)} held-out rows")
    ax.plot(nearest["distance"], np.zeros(len(nearest)), "|", color=BLUE, ms=24, mew=1.5)
    ax.set(xlabel="distance to the nearest training row (generated pictures: marks on the axis)", ylabel="rows", xlim=0)
    ax.legend(frameon=False)
    baseline = f"; of {len(held_out)} held-out rows {np.median(held_out):.2f}" if len(held_out) else ""
    median = nearest["distance"].median()
    return fig.described(
        f"Nearest training rows of {len(nearest)} generated pictures: median distance {median:.2f}{baseline}. "
        f"{suspects.sum()} are nearer than all but {near:.0%} of the held-out rows."
    )


# ---- guidance


def guidance_curve(tables, *, distance="cmmd"):
    """A distance from real pictures against the CLIP score, along guidance scales.

    `tables`: what `generation.guidance_sweep` returned, or {name: table} of several models or checkpoints. `distance`:
    "cmmd", "fid" or "kid". Each point is labelled with its guidance scale; down and to the right is better. Raises
    ValueError for a table without the distance.
    """
    tables = tables if isinstance(tables, dict) else {"this model": tables}
    fig = DescribedFigure(4.2, width=7)
    ax, said = axes(fig, grid="both"), []
    for (name, table), color in zip(tables.items(), itertools.cycle(CYCLE), strict=False):
        if distance not in table:
            raise ValueError(f"A sweep has no column {distance!r}: give guidance_sweep real pictures to compare with.")
        table = table.sort_values("guidance_scale")
        ax.plot(table["clip_score"], table[distance], "o-", color=color, label=name)
        for number, (scale, score, value) in enumerate(table[["guidance_scale", "clip_score", distance]].to_numpy()):
            offset = (5, 4) if number % 2 else (-10, -13)  # neighbours on the curve may lie close to each other
            ax.annotate(f"{scale:g}", (score, value), offset, textcoords="offset points", fontsize=SMALL)
            said.append(f"{name}, {scale:g}: {score:.1f}, {value:.3g}")
    ax.margins(0.08)
    ax.set(xlabel="CLIP score", ylabel=distance.upper())
    if len(tables) > 1:
        ax.legend(frameon=False)
    return fig.described(f"{distance.upper()} against CLIP score by guidance scale: {'; '.join(said)}.")
