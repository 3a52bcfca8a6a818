"""Figures of evaluation, drawn from plain arrays and frames; see `drawing` for what they return."""

import io

import matplotlib.ticker
import numpy as np
import pandas as pd
from PIL import Image

from .. import storage
from ..runtime import metrics_log, results
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

# The scores in the order of their curves: column of `results.scores`, label, colour.
SCORES = [("clip_score", "CLIP score", GREEN), ("cmmd", "CMMD", ORANGE), ("agreement", "agreement", PURPLE)]
NOISE = "loss_by_noise/"
DISTANCES = {"fid": "FID", "cmmd": "CMMD", "kid": "KID"}


def run_over_time(run_uri, *, num_prompts=4, num_steps=6, smooth=25):
    """Loss, held-out loss by noise level, scores, and pictures of the same prompts at each checkpoint, in one figure.

    `num_prompts`: how many prompts, one row each; `num_steps`: how many checkpoints at most, evenly chosen. Raises
    ValueError if the run has not made a step.
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
    """Several runs in one figure: training loss, held-out loss, final loss by noise level, and scores.

    `runs`: {name: URI of the run}. Panels without data from any run are left out. Compare losses only of runs that
    share `min_snr_gamma` and `prediction_type`, and scores only of those that share their prompts.
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


# ---- parts of the figures of runs


def read_metrics(run_uri):
    metrics = metrics_log.read_metrics(run_uri)
    if not len(metrics):
        raise ValueError(f"no step in {run_uri}: give the folder of a run that has trained, storage/runs/run_name.")
    return metrics


def read_pictures(run_uri):
    """{step: {prompt: picture}} from a run's evaluations."""
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
    """At most `most` of a list's values, evenly chosen, including the first and the last."""
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
    """A grid of pictures: one row per prompt, one column per checkpoint."""
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


# ---- trials, preferences, memorisation


def paired_differences(results, compared):
    """Trials paired by seed. Left: the first metric, one line per seed. Right: differences with their intervals.

    `results`: columns setting, seed, metric, value (`trials.run`). `compared`: `trials.compare` of it. Differences are
    in percent of the first setting's mean; one whose interval includes 0 may be chance.
    """
    if not len(compared):
        raise ValueError("compared has no rows: compare two or more settings.")
    names, metric = list(dict.fromkeys(results["setting"])), results["metric"].iloc[0]
    metrics, others = list(dict.fromkeys(compared["metric"])), names[1:]
    fig = DescribedFigure(max(3.2, 1.2 + 0.25 * len(metrics) * len(others)))
    by_seed, right = axes(fig, 1, 2, width_ratios=[1, 2])
    values = results[results["metric"] == metric].pivot(index="seed", columns="setting", values="value")[names]
    by_seed.plot(range(len(names)), values.T, color="0.6", lw=1)
    for number, name in enumerate(names):
        by_seed.plot([number] * len(values), values[name], "o", color=CYCLE[number % len(CYCLE)])
    by_seed.set(xticks=range(len(names)), xticklabels=names, ylabel=metric, xlim=(-0.4, len(names) - 0.6))
    by_seed.set_title(f"{len(values)} seeds, a line each", fontsize=SMALL)
    right.axvline(0, color="0.3", lw=1)
    for number, name in enumerate(others):
        rows = compared[compared["setting"] == name].set_index("metric").loc[metrics]
        low, middle, high = (100 * rows[column] / rows["baseline"].abs() for column in ("low", "difference", "high"))
        places = np.arange(len(metrics)) + 0.2 * (number - (len(others) - 1) / 2)
        color = CYCLE[(number + 1) % len(CYCLE)]
        right.errorbar(middle, places, xerr=[middle - low, high - middle], fmt="o", color=color, capsize=3, label=name)
    right.set(yticks=range(len(metrics)), yticklabels=metrics, xlabel=f"difference from {names[0]}, %")
    right.invert_yaxis()
    right.grid(axis="x", color="0.9")
    right.legend(frameon=False, fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(others))
    said = [
        f"{row.setting}, {row.metric}: {row.difference:.3g} ({row.low:.3g} to {row.high:.3g})"
        for row in compared.itertuples()
    ]
    return fig.described(f"Differences from {names[0]} over {len(values)} seeds: {'; '.join(said)}.")


def preferences(report, *, title=None):
    """Which of two models readers prefer, by question, with 95 % intervals; as in MosaicML's Figure 5.

    `report`: what `side_by_side.report` returned. Bars are shares of the choices that prefer one of the two.
    """
    first, undecided, second = report.columns[:3]
    fig = DescribedFigure(3.4, width=7)
    titles, said = {"quality": "image quality", "alignment": "prompt alignment"}, []
    for ax, (question, row) in zip(axes(fig, 1, len(report), sharey=True), report.iterrows(), strict=True):
        heights = 100 * np.array([1 - row["preferred"], row["preferred"]])
        errors = 100 * np.array([[row["preferred"] - row["low"]], [row["high"] - row["preferred"]]])
        below_above = np.hstack([errors[::-1], errors])
        if not np.isnan(heights).any():
            ax.bar([0, 1], heights, 0.6, color=[ORANGE, BLUE], yerr=below_above, capsize=6, ecolor="0.2")
        ax.axhline(50, color=GREY, ls="--", lw=1)
        ax.set(xticks=[0, 1], xticklabels=[f"{first}\n({row[first]:.0f})", f"{second}\n({row[second]:.0f})"])
        ax.set(ylim=(0, 100), xlim=(-0.6, 1.6), title=titles.get(question, question))
        ax.set_xlabel(f"{undecided}: {row[undecided]:.0f}", fontsize=SMALL)
        share = f"{row['preferred']:.0%} ({row['low']:.0%} to {row['high']:.0%})" if row["preferred"] >= 0 else "no one"
        said.append(f"{titles.get(question, question)}: {second} preferred by {share}")
    fig.axes[0].set(ylabel="preferred, %")
    if title:
        fig.suptitle(title, parse_math=False)
    return fig.described(f"{title + '. ' if title else ''}{'; '.join(said)}; of those who prefer {first} or {second}.")


def nearest_neighbours(pictures, neighbours, found, held_out, *, columns=8, near=0.01):
    """Generated pictures above their nearest training pictures, with the distances.

    `pictures` and `neighbours`: one for each row of `found` (columns query, distance, nearer: `memorisation.search`
    with k=1); those with the smallest distance are shown. `held_out`: distances of held-out rows to their nearest
    training rows. Pictures nearer than all but a share `near` of these are framed in red: they may be copies.
    """
    if not len(found):
        raise ValueError("found has no rows: search for at least one picture.")
    order = np.argsort(found["distance"].to_numpy(), kind="stable")[:columns]
    side = WIDTH / columns
    fig = DescribedFigure(2 * side * aspect([pictures[place] for place in order]) + 3.4)
    top, bottom = fig.subfigures(2, 1, height_ratios=[2 * side * aspect([pictures[order[0]]]) + 0.6, 2.8])
    grid = top.subplots(2, columns, squeeze=False)
    for ax in grid[:, len(order) :].flat:
        ax.set_axis_off()
    suspects = (found["nearer"] <= near).to_numpy()
    for (above, below), place in zip(grid.T, order, strict=False):
        show(above, pictures[place])
        show(below, neighbours[place])
        below.set_xlabel(f"{found['distance'].iloc[place]:.2f}", fontsize=SMALL)
        if suspects[place]:
            for ax in (above, below):
                ax.spines[:].set(visible=True, color=RED, linewidth=3)
    for ax, name in zip(grid[:, 0], ("generated", "nearest in\ntraining data"), strict=True):
        ax.set_ylabel(name, fontsize=SMALL)
    ax = axes(bottom)
    if len(held_out):
        ax.hist(held_out, 30, color=SKY, label=f"{len(held_out)} held-out rows")
        ax.legend(frameon=False)
    ax.plot(found["distance"], np.zeros(len(found)), "|", color=BLUE, ms=18, mew=1.5, clip_on=False)
    ax.plot(found["distance"][suspects], np.zeros(suspects.sum()), "|", color=RED, ms=18, mew=2, clip_on=False)
    ax.set(xlabel="distance to the nearest training row (generated pictures: marks on the axis)", ylabel="rows", xlim=0)
    baseline = f"; of {len(held_out)} held-out rows {np.median(held_out):.2f}" if len(held_out) else ""
    return fig.described(
        f"Nearest training rows of {len(found)} generated pictures: median distance {found['distance'].median():.2f}"
        f"{baseline}. {suspects.sum()} are nearer than all but {near:.0%} of the held-out rows."
    )


# ---- guidance


def guidance_curve(tables, *, distance=None):
    """A distance from real pictures against the CLIP score, along guidance scales.

    `tables`: what `generation.guidance_sweep` returned, or {name: table} of several models or checkpoints. `distance`:
    "fid", "cmmd" or "kid"; None: the first of these that the table has. Each point is labelled with its guidance scale;
    down and to the right is better. Raises ValueError for a table without a distance.
    """
    tables = {"": pd.DataFrame(tables)} if "clip_score" in tables else dict(tables)
    first = next(iter(tables.values()))
    distance = distance or next((name for name in DISTANCES if name in first), "cmmd")
    fig = DescribedFigure(4.2, width=7)
    ax, said = axes(fig, grid="both"), []
    for (name, table), color in zip(tables.items(), CYCLE, strict=False):
        if missing := [column for column in ("guidance_scale", "clip_score", distance) if column not in table]:
            raise ValueError(
                f"A sweep has no column {missing[0]!r}: give guidance_sweep the features of real pictures."
            )
        table = table.sort_values("guidance_scale")
        ax.plot(table["clip_score"], table[distance], "o-", color=color, label=name)
        for scale, score, value in table[["guidance_scale", "clip_score", distance]].itertuples(index=False):
            ax.annotate(f"{scale:g}", (score, value), (5, 4), textcoords="offset points", fontsize=SMALL)
            said.append(f"{name + ', ' if name else ''}{scale:g}: {score:.1f}, {value:.3g}")
    ax.set(xlabel="CLIP score", ylabel=DISTANCES[distance])
    if len(tables) > 1:
        ax.legend(frameon=False)
    return fig.described(f"{DISTANCES[distance]} against CLIP score by guidance scale: {'; '.join(said)}.")
