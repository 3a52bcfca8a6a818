"""Figures of evaluation, drawn from plain arrays and frames; see `drawing` for what they return."""

import pandas as pd

from .drawing import CYCLE, SMALL, DescribedFigure, axes

DISTANCES = {"fid": "FID", "cmmd": "CMMD", "kid": "KID"}


def guidance_curve(tables, *, distance=None):
    """A distance from real pictures against the CLIP score, along guidance scales; as in MosaicML's Figure 4.

    `tables`: what `generation.guidance_sweep` returned, or {name: table} of several models or checkpoints. `distance`:
    "fid", "cmmd" or "kid"; None: the first of these that is there. Each point is labelled with its guidance scale; down
    and to the right is better. ValueError for a table without a distance.
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
