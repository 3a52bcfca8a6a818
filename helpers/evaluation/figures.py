"""Figures of evaluation, drawn from plain arrays and frames; see `drawing` for what they return."""

import numpy as np

from .drawing import BLUE, CYCLE, GREY, ORANGE, RED, SKY, SMALL, WIDTH, DescribedFigure, aspect, axes, show


def paired_differences(results, compared):
    """Trials that are paired by seed. Left: the first metric, a line a seed. Right: differences, with their intervals.

    `results`: columns setting, seed, metric, value (`trials.run`). `compared`: `trials.compare` of it. Differences are
    given in percent of the first setting's mean; an interval that crosses 0 may be chance.
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
    """Generated pictures above the training pictures that are nearest to them, and how near that is.

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
