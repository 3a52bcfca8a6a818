"""Figures of the notebooks, drawn from plain arrays and frames. Needs only numpy, pandas and matplotlib.

Each function returns a `DescribedFigure`: as the last expression of a cell, or by `display`, it is shown once, with an
alternative text that says what is on it. Figures are about 10 inches wide at 100 dpi. Pictures are (H, W, 3) uint8
arrays or PIL images. ValueError for what cannot be drawn.

    python -m helpers.lesson.figures .github/architecture.png     # the diagram in README
"""

import sys

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.colors import to_rgb
from matplotlib.patches import Ellipse, FancyBboxPatch, Patch, Rectangle

from ..evaluation.drawing import BLUE, CYCLE, GREEN, GREY, LINE, ORANGE, PURPLE, RED, SKY, SMALL, WIDTH, DescribedFigure
from ..evaluation.drawing import aspect as _aspect
from ..evaluation.drawing import axes as _axes
from ..evaluation.drawing import listed as _listed
from ..evaluation.drawing import show as _show
from ..evaluation.drawing import wrap as _wrap

# A stage has the same colour in every figure, found by these words in its name.
STAGES = {"read": GREY, "transform": SKY, "encode": ORANGE, "write": GREEN, "train": BLUE, "sample": PURPLE}
PHASES = {"data": GREY, "encode": ORANGE, "forward": BLUE, "backward": SKY, "optimizer": GREEN}  # of a training step


def _whole_steps(ax, **labels):
    ax.set(xlabel="step", **labels)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))


def _frame(frame, what, *names):
    frame = pd.DataFrame(frame)
    if missing := [name for name in names if name not in frame]:
        raise ValueError(f"{what} has no column {missing[0]!r}: it needs {', '.join(names)}.")
    if frame.empty:
        raise ValueError(f"{what} has no rows: there is nothing to draw yet.")
    return frame


def _last_attempt(frame, what, *names):
    """One row a step, in order: of a step that was repeated after a failure, the last one."""
    frame = _frame(frame, what, "step", *names)
    return frame.drop_duplicates("step", keep="last").sort_values("step")


def _size(picture):
    height, width = np.asarray(picture).shape[:2]
    return f"{width} x {height} px"


def _vertical_note(ax, x, text, *, left=False, color="0.2"):
    """`text` along a vertical line at `x`, on its right or left."""
    ax.axvline(x, color=color, ls=":", lw=1.2)
    ax.annotate(
        text,
        (x, 1),
        (-3 if left else 4, -4),
        xycoords=ax.get_xaxis_transform(),
        textcoords="offset points",
        rotation=90,
        ha="right" if left else "left",
        va="top",
        fontsize=SMALL,
        color=color,
        parse_math=False,
        bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5},
    )


def architecture(
    mode="offline",
    *,
    num_transform_workers=1,
    num_encoders=1,
    num_training_workers=1,
    encoder_device="CPU",
    training_device="CPU",
    highlight=None,
):
    """The pipeline as boxes and arrows, with how many processes do each part, and on what.

    `mode`: "offline" keeps latents in a store between two jobs, "online" streams them through one. `highlight`:
    "preprocessing" or "training" dims the other half. `num_encoders` and `num_training_workers` may be pairs (least,
    most).
    """
    if mode not in ("offline", "online"):
        raise ValueError(f'mode={mode!r} is unknown: choose "offline" or "online".')
    if highlight not in (None, "preprocessing", "training"):
        raise ValueError(f'highlight={highlight!r} is unknown: choose "preprocessing", "training" or None.')
    most_encoders, most = np.max(num_encoders), np.max(num_training_workers)
    transforms = f"{num_transform_workers} {'task' if num_transform_workers == 1 else 'tasks'}\non CPU"
    encoders, trainers = ("-".join(map(str, np.unique(count))) for count in (num_encoders, num_training_workers))
    encoders = f"{encoders} {'actor' if most_encoders == 1 else 'actors'}\non {encoder_device}"
    trainers = f"{trainers} {'worker' if most == 1 else 'workers'}\non {training_device}"
    first, last = "preprocessing", "training"
    # half, colour, title, what it does, where, number of processes (0: a store), what flows on to the next box
    boxes = [
        (first, GREY, "Raw data", "images and\ncaptions", "local\nor s3://", 1, "rows"),
        (
            first,
            SKY,
            "Transform",
            "decode, crop\nresize\ntokenise",
            transforms,
            num_transform_workers,
            "pixels\ntokens",
        ),
        (first, ORANGE, "Encode", "VAE and\ntext encoder", encoders, most_encoders, "latents\ntext"),
        ("both", GREEN, "Latents", "Parquet and\nmanifest", "local\nor s3://", 0, "batches"),
        (last, BLUE, "Train", "U-Net only", trainers, most, "weights"),
        (last, PURPLE, "Sample", "prompts to\npictures", "diffusers\npipeline", 1, ""),
    ]
    if mode == "online":
        del boxes[3]

    height, bottom, tall, margin, gap, card = 2.9, 0.3, 1.85, 0.25, 0.66, 0.045  # inches, as the axes
    wide = (WIDTH - 2 * margin - gap * (len(boxes) - 1)) / len(boxes)
    left = [margin + i * (wide + gap) for i in range(len(boxes))]
    fig = DescribedFigure(height, layout="none")  # every part has a fixed place
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))
    ax.set_axis_off()
    style = {"ha": "center", "va": "center", "linespacing": 1.3, "parse_math": False}

    def tint(color, share, half="both"):
        """`color` mixed with white; paler still in the half that is not highlighted."""
        share *= 0.3 if highlight and half not in ("both", highlight) else 1
        return tuple(1 - share * (1 - np.array(to_rgb(color))))

    def rounded(x, y, width, height, **colors):
        ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", **colors))

    def band(half, begin, end, label):
        x, right = left[begin] - 0.15, left[end] + wide + 0.2
        rounded(x, 0.1, right - x, height - 0.15, fc=tint("0.5", 0.1, half), ec="none", zorder=0)
        ink = tint("0.2", 1, half)
        ax.text((x + right) / 2, height - 0.25, label, fontsize=11, weight="bold", color=ink, **style)

    band(first, 0, 2, "Preprocessing: Ray Data" if mode == "offline" else "Ray Data, streaming; no store")
    band(last, len(boxes) - 2, len(boxes) - 1, "Training: Ray Train")

    for i, (half, color, title, does, where, processes, flow) in enumerate(boxes):
        face, edge, ink = tint(color, 0.14, half), tint(color, 1, half), tint("0.1", 1, half)
        x, middle, title_y = left[i], left[i] + wide / 2, bottom + tall - 0.19
        title_color = "white" if np.dot(to_rgb(color), (0.3, 0.6, 0.1)) < 0.5 else ink
        if processes == 0:  # a cylinder
            lid = 0.3
            ax.add_patch(Rectangle((x, bottom + lid / 2), wide, tall - lid, fc=face, ec="none"))
            ax.add_patch(Ellipse((middle, bottom + lid / 2), wide, lid, fc=face, ec=edge, lw=1.6, zorder=0.9))
            ax.add_patch(Ellipse((middle, bottom + tall - lid / 2), wide, lid, fc=edge, ec=edge, lw=1.6))
            ax.vlines([x, x + wide], bottom + lid / 2, bottom + tall - lid / 2, color=edge, lw=1.6)
            title_y, title_color = title_y - lid + 0.05, edge
        else:  # a pile of cards
            for behind in range(min(processes, 3) - 1, -1, -1):
                rounded(x + card * behind, bottom + card * behind, wide, tall, ec=edge, fc=face, lw=1.6)
            rounded(x, bottom + tall - 0.38, wide, 0.38, ec=edge, fc=edge, lw=1.6)
        ax.text(middle, title_y, title, fontsize=11, weight="bold", color=title_color, **style)
        ax.text(middle, bottom + 1.02, does, fontsize=10, color=ink, **style)
        ax.text(middle, bottom + 0.34, where, fontsize=SMALL, color=ink, weight="bold", **style)
        if flow:
            color = tint("0.25", 1, half if half == boxes[i + 1][0] else "both")
            start, end = x + wide + card * max(0, min(processes, 3) - 1) + 0.04, left[i + 1] - 0.03
            arrow = {"arrowstyle": "-|>", "lw": 1.6, "color": color, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (end, bottom + 0.85), (start, bottom + 0.85), arrowprops=arrow)
            ax.text((start + end) / 2, bottom + 0.94, flow, ha="center", va="bottom", fontsize=SMALL, color=color)
    parts = " -> ".join(f"{title} ({where})" for _, _, title, _, where, _, _ in boxes)
    return fig.described(f"Diagram of the {mode} pipeline: {parts}.")


def stage_throughput(frame):
    """Points of images/s by stage. `frame`: columns stage, images_per_second (all workers together), workers."""
    frame = _frame(frame, "the stages' frame", "stage", "images_per_second", "workers")
    rates = frame["images_per_second"].to_numpy(float)
    slowest = int(rates.argmin()) if len(rates) > 1 else None
    fig = DescribedFigure(0.9 + 0.42 * len(frame))
    ax = _axes(fig, grid="x")
    labels = []
    for row, (stage, rate, workers) in enumerate(zip(frame["stage"], rates, frame["workers"], strict=True)):
        labels.append(f"{rate:,.0f} images/s, {workers} worker{'s' if workers != 1 else ''}")
        labels[-1] += "  ◀ bottleneck" if row == slowest else ""
        color = next((c for word, c in STAGES.items() if word in str(stage).lower()), GREY)
        ax.plot(rate, row, "o", color=color, ms=11, mec=RED if row == slowest else "white", mew=2)
        ax.annotate(
            labels[-1],
            (rate, row),
            (10, 0),
            textcoords="offset points",
            va="center",
            color=RED if row == slowest else "0.2",
        )
    ax.set(
        yticks=range(len(frame)),
        yticklabels=frame["stage"],
        ylim=(len(frame) - 0.5, -0.5),
        xlabel="images/s, all workers of a stage together (log scale)",
        xscale="log",  # writing is a hundred times faster than encoding; points, as a bar's length has no meaning here
        xlim=(rates.min() / 2, rates.max() * 30),
    )
    ax.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    stages = "; ".join(f"{stage}: {label}" for stage, label in zip(frame["stage"], labels, strict=True))
    return fig.described(f"Throughput of each stage. {stages.replace('  ◀ ', ', the ')}.")


def encoder_utilization(frame, *, goal=0.95):
    """Share of their time that the encoders compute, and images/s, since the encoders' first batch.

    `frame`: columns seconds, busy (0 to 1), images_per_second; and encoders, whose number is drawn if it changes. The
    time before the first row, in which models are loaded, is left out.
    """
    frame = _frame(frame, "the timeline", "seconds", "busy", "images_per_second")
    seconds, busy, rate = frame["seconds"] - frame["seconds"].iloc[0], 100 * frame["busy"], frame["images_per_second"]
    fig = DescribedFigure(3.6)
    top, bottom = _axes(fig, 2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(seconds, busy, color=ORANGE, lw=2, marker="o", ms=3)
    top.axhline(100 * goal, color=RED, ls="--", lw=1.6, label=f"goal {100 * goal:.0f} %")
    top.legend(frameon=False, loc="lower right", fontsize=SMALL)
    title = f"encoders compute for {busy.median():.0f}% of their time (median)"
    top.set(ylabel="encoders compute, %", ylim=(0, 108), title=title)
    bottom.plot(seconds, rate, color=BLUE, lw=2)
    bottom.set(xlabel="seconds since the first batch", ylabel="images/s", ylim=(0, 1.15 * max(rate.max(), 1e-9)))
    said = f"Over {seconds.iloc[-1]:.0f} seconds {title}, at {rate.median():,.0f} images/s"
    if frame.get("encoders", pd.Series()).nunique() > 1:
        number = bottom.twinx()
        number.step(seconds, frame["encoders"], where="post", color=ORANGE, lw=1.6)
        number.set(ylabel="encoders", ylim=(0, 1.15 * frame["encoders"].max()))
        said += f"; {frame['encoders'].min():g} to {frame['encoders'].max():g} encoders"
    return fig.described(f"{said}.")


def distribution(frame, *, max_tokens, resolutions):
    """Statistics of raw rows: caption lengths and truncation, which resolutions the pictures allow, aspect ratios.

    `frame`: columns tokens, width, height, one row a picture. `max_tokens`: what the text encoder takes.
    """
    frame = _frame(frame, "the dataset's statistics", "tokens", "width", "height")
    fig = DescribedFigure(3.2)
    left, middle, right = _axes(fig, 1, 3)
    most = max(frame["tokens"].quantile(0.99), max_tokens) * 1.1 + 2
    bins = np.arange(0, most) - 0.5 if most < 120 else 50
    left.hist(frame["tokens"].clip(upper=int(most) - 1), bins=bins, color=BLUE)
    left.axvline(max_tokens + 0.5, color=RED, ls="--", lw=1.6)
    cut = f"{(frame['tokens'] > max_tokens).mean():.1%} are cut at {max_tokens}"
    left.set(xlabel="tokens of a caption", ylabel="rows")
    known = frame.dropna(subset=["width", "height"])
    shorter, longer = known[["width", "height"]].min(axis=1), known[["width", "height"]].max(axis=1)
    shares = [(shorter >= resolution).sum() / len(frame) for resolution in resolutions]
    if len(known):
        share = 100 * np.arange(len(shorter), 0, -1) / len(frame)  # of rows whose shorter side is at least this
        low, high = min(shorter.min(), *resolutions) / 1.4, max(shorter.max(), *resolutions) * 1.4
        middle.step([low, *shorter.sort_values(), shorter.max()], [share[0], *share, 0], where="pre", color=GREEN, lw=2)
        middle.set(xlim=(low, high))
        middle.set_xscale("log", base=2)
        middle.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        middle.xaxis.set_minor_formatter(ticker.NullFormatter())
        right.hist((longer / shorter.clip(lower=1)).clip(upper=4), bins=30, range=(1, 4), color=PURPLE)
    middle.plot(resolutions, [100 * share for share in shares], "o", color=RED, ms=7, mec="white", zorder=3)
    allowed = ", ".join(f"{resolution}: {share:.0%}" for resolution, share in zip(resolutions, shares, strict=True))
    middle.set(xlabel="shorter side at least, pixels", ylabel="% of rows", ylim=(0, 108))
    long = f"{(longer > 2 * shorter).sum() / max(1, len(known)):.0%} are longer than 2 : 1"
    right.set(xlabel="longer side / shorter side", ylabel="rows")
    for ax, title in ((left, cut), (middle, f"large enough for {allowed}"), (right, long)):
        ax.set_title(title, fontsize=10)
    return fig.described(
        f"Statistics of {len(frame):,} rows: captions have {frame['tokens'].median():.0f} tokens (median), {cut}; "
        f"share of pictures large enough for {allowed}; {long}."
    )


def shapes(table):
    """How many pictures each shape gets and what crops cut away, at each resolution.

    `table`: columns resolution, shape, pictures, share, cut (`looks.shape_table`).
    """
    table = _frame(table, "the table of shapes", "resolution", "shape", "pictures", "share", "cut")
    by_resolution = dict(list(table.groupby("resolution")))
    fig = DescribedFigure(0.9 + 0.3 * max(map(len, by_resolution.values())))
    said = []
    for ax, (resolution, mine) in zip(
        np.atleast_1d(_axes(fig, 1, len(by_resolution), grid="x")), by_resolution.items(), strict=True
    ):
        small = mine["shape"] == "too small"
        ax.barh(mine["shape"], 100 * mine["share"], color=np.where(small, GREY, SKY))
        for place, (share, cut) in enumerate(zip(mine["share"], mine["cut"], strict=True)):
            text = f" {share:.0%}" + ("" if np.isnan(cut) else f", {cut:.0%} cut away")
            ax.annotate(text, (100 * share, place), va="center", fontsize=SMALL)
        used = mine[~small & (mine["pictures"] > 0)]
        mean = np.average(used["cut"], weights=used["pictures"]) if len(used) else 0
        title = f"{resolution} pixels: crops cut {mean:.1%} away"
        ax.set(xlabel="% of pictures", xlim=(0, 160 * max(mine["share"].max(), 0.01)))
        ax.set_title(title, fontsize=10)
        ax.invert_yaxis()
        largest = ", ".join(f"{shape} {share:.0%}" for shape, share in zip(mine["shape"], mine["share"], strict=True))
        said.append(f"{title}; {largest}")
    return fig.described(f"Shapes of {by_resolution[resolution]['pictures'].sum():,} pictures. {'. '.join(said)}.")


def pictures(images, captions=None, *, marks=None, columns=6, title=None):
    """A grid of pictures with captions underneath (cut after six lines).

    `marks`: for each picture what is wrong with it, "" where nothing is. Below the caption stands a check mark, or a
    cross and what is wrong, in the colour of the frame.
    """
    images = list(images)
    if not images:
        raise ValueError("images is empty: give at least one picture.")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(images)} pictures and {len(captions)} captions: give as many of each.")
    if marks is not None and len(marks) != len(images):
        raise ValueError(f"{len(images)} pictures and {len(marks)} marks: give as many of each.")
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    side = min(WIDTH / columns, 2.5)
    texts = [_wrap(caption, side - 0.15, 6) for caption in captions] if captions is not None else [""] * len(images)
    if marks is not None:
        marks = [f"✗ {mark}" if mark else "✓ right" for mark in marks]
        texts = [f"{text}\n{_wrap(mark, side - 0.15, 3)}".strip() for text, mark in zip(texts, marks, strict=True)]
    text_height = LINE * max(text.count("\n") + 1 if text else 0 for text in texts)
    height = rows * ((side - 0.1) * _aspect(images) + text_height + 0.12) + 0.35 * bool(title)
    fig = DescribedFigure(height, columns * side)
    for number, ax in enumerate(fig.subplots(rows, columns, squeeze=False).flat):
        if number >= len(images):
            ax.set_axis_off()
            continue
        _show(ax, images[number])
        ax.set_xlabel(texts[number], fontsize=SMALL, parse_math=False)
        if marks is not None:
            color = RED if marks[number].startswith("✗") else GREEN
            ax.spines[:].set(visible=True, color=color, linewidth=3)
            ax.xaxis.label.set_color(RED if color == RED else "0.1")
    if title:
        fig.suptitle(_wrap(title, columns * side, 2), parse_math=False)
    shown = f"{len(images)} picture{'s' if len(images) > 1 else ''}" + (f" ({title})" if title else "")
    if marks is not None:
        right = sum(mark.startswith("✓") for mark in marks)
        shown += f", {right} of them right"
    return fig.described(shown + (f": {_listed(texts)}." if any(texts) else "."))


def transform_steps(steps, resized=None):
    """A picture after each of some steps, and then in several sizes, all made from the last step.

    `steps` and `resized`: name -> picture. Arrows say what is made from what; sizes stand in the titles.
    """
    if not steps:
        raise ValueError("steps is empty: give at least one name and picture.")
    resized = resized or {}
    columns = len(steps) + bool(resized)
    wide = WIDTH / columns - 0.4
    fig = DescribedFigure(max(0.55 + wide * min(_aspect(steps.values()), 1.3), 1.7 * len(resized)))
    fig.get_layout_engine().set(w_pad=0.18)  # room for the arrows
    grid = fig.add_gridspec(max(1, len(resized)), columns)
    axes = [fig.add_subplot(grid[:, column]) for column in range(len(steps))]
    last = [fig.add_subplot(grid[row, -1]) for row in range(len(resized))]
    for ax, (name, picture) in zip([*axes, *last], [*steps.items(), *resized.items()], strict=True):
        _show(ax, picture)
        ax.set_title(f"{_wrap(name, wide, 2)}\n{_size(picture)}", fontsize=10, parse_math=False)
    arrow = {"arrowstyle": "-|>", "lw": 1.8, "color": "0.35", "mutation_scale": 16, "shrinkA": 4, "shrinkB": 4}
    for ax, following in [*zip(axes, axes[1:], strict=False), *((axes[-1], ax) for ax in last)]:
        places = {"xycoords": following.transAxes, "textcoords": ax.transAxes}
        following.annotate("", (0, 0.5), (1, 0.5), arrowprops=arrow, **places).set_in_layout(False)
    made = ", then ".join(f"{name} ({_size(picture)})" for name, picture in steps.items())
    sizes = " and ".join(f"{name} ({_size(picture)})" for name, picture in resized.items())
    return fig.described(f"A picture {made}" + (f"; from the last one {sizes}." if sizes else "."))


def latents_panel(picture, moments_2CHW, reconstruction=None):
    """A picture, the mean and std of its latents by channel, and what the decoder makes of the mean.

    `moments_2CHW`: (2, channels, H, W), posterior mean and std, unscaled. PSNR in dB compares `reconstruction` with
    `picture`, both 8 bit and of one size.
    """
    moments_2CHW = np.asarray(moments_2CHW, np.float32)
    if moments_2CHW.ndim != 4 or len(moments_2CHW) != 2:
        raise ValueError(f"moments_2CHW of shape {moments_2CHW.shape} must be (2, channels, H, W): mean and std.")
    _, channels, height, width = moments_2CHW.shape
    fig = DescribedFigure(2 * (WIDTH - 0.6) / (channels + 1) + 0.6)
    axes = fig.subplots(2, channels + 1)
    limit = np.abs(moments_2CHW).max(axis=(1, 2, 3)) + 1e-12  # the means' is symmetric: white is zero in every channel
    scales = [{"cmap": "RdBu_r", "vmin": -limit[0], "vmax": limit[0]}, {"cmap": "Greys", "vmin": 0, "vmax": limit[1]}]
    for row, (name, scale) in enumerate(zip(("mean", "std"), scales, strict=True)):
        for channel, values_HW in enumerate(moments_2CHW[row]):
            ax = axes[row, 1 + channel]
            shown = ax.imshow(values_HW, interpolation="nearest", **scale)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{name} {channel}", fontsize=10)
        bar = fig.colorbar(shown, ax=axes[row, 1:], aspect=12, pad=0.02)
        bar.locator = ticker.MaxNLocator(4)
        bar.ax.tick_params(labelsize=SMALL)
    axes[0, 0].set_title(f"picture, {_size(picture)}", fontsize=10)
    _show(axes[0, 0], picture)
    text = f"Picture of {_size(picture)} and its latents, {channels} channels of {width} x {height}, as mean and std"
    if reconstruction is None:
        axes[1, 0].set_axis_off()
        return fig.described(text + ".")
    psnr = f"PSNR {_psnr(picture, reconstruction):.1f} dB"
    _show(axes[1, 0], reconstruction)
    axes[1, 0].set_title(f"decoded mean, {psnr}", fontsize=10)
    return fig.described(f"{text}; decoding the mean gives the picture back with {psnr}.")


def _psnr(picture, other):
    a, b = np.asarray(picture, np.float64), np.asarray(other, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a picture of shape {a.shape} and a reconstruction of shape {b.shape} cannot be compared.")
    error = np.mean((a - b) ** 2)
    return 10 * np.log10(255**2 / error) if error else np.inf


def noised_strip(images, timesteps):
    """One picture noised more and more: `images` as many as `timesteps` of the noise schedule."""
    images, timesteps = list(images), [int(timestep) for timestep in timesteps]
    if len(images) != len(timesteps) or not images:
        raise ValueError(f"{len(images)} pictures and {len(timesteps)} timesteps: give as many of each, at least one.")
    side = min(WIDTH / len(images), 2.5)
    fig = DescribedFigure(0.3 + side * _aspect(images), side * len(images))
    for ax, picture, timestep in zip(fig.subplots(1, len(images), squeeze=False)[0], images, timesteps, strict=True):
        _show(ax, picture, interpolation="nearest")  # noise as it is, and a smaller PNG
        ax.set_title(f"t = {timestep}", fontsize=10)
    return fig.described(f"One picture with more and more noise, at timesteps {', '.join(map(str, timesteps))}.")


def before_after(before, after, prompts, *, labels=("before", "after")):
    """Pairs of pictures, one above the other, with their prompt underneath; six columns a band.

    By default of the same prompts before training and after; `labels` names the two rows.
    """
    before, after, prompts = list(before), list(after), list(prompts)
    if not len(before) == len(after) == len(prompts) or not prompts:
        raise ValueError(
            f"{len(before)} pictures {labels[0]}, {len(after)} {labels[1]}, {len(prompts)} prompts: "
            "give as many of each, at least one."
        )
    columns = min(6, len(prompts))
    bands = -(-len(prompts) // columns)
    side = min(WIDTH / columns, 2.2)
    wrapped = [_wrap(prompt, side - 0.2, 6) for prompt in prompts]
    text_height = LINE * max(prompt.count("\n") + 1 for prompt in wrapped)
    height = bands * (2 * (side - 0.15) * _aspect(before + after) + text_height + 0.2)
    fig = DescribedFigure(height, columns * side + 0.2)
    axes = fig.subplots(2 * bands, columns, squeeze=False)
    for number in range(bands * columns):
        band, column = divmod(number, columns)
        pair = axes[2 * band : 2 * band + 2, column]
        for ax, label, images in zip(pair, labels, (before, after), strict=True):
            if number >= len(prompts):
                ax.set_axis_off()
                continue
            _show(ax, images[number])
            if column == 0:
                ax.set_ylabel(label, fontsize=11, color=_label_color(label))
        if number < len(prompts):
            pair[1].set_xlabel(wrapped[number], fontsize=SMALL, parse_math=False)
    return fig.described(f"{len(prompts)} pairs of pictures, {labels[0]} and {labels[1]}: {_listed(prompts)}.")


def noise_schedule_curves(alphas_cumprod, *, min_snr_gamma=None):
    """Signal sqrt(a) and noise sqrt(1 - a) over the timesteps, and the signal-to-noise ratio a / (1 - a).

    `alphas_cumprod`: (T,), falling (Ho et al. 2020, eq. 4). `min_snr_gamma`: where min-SNR weighting clips
    (Hang et al. 2023, sec. 3.4).
    """
    alphas = np.asarray(alphas_cumprod, np.float64)
    if alphas.ndim != 1 or not ((alphas >= 0) & (alphas <= 1)).all():
        raise ValueError(f"alphas_cumprod of shape {alphas.shape} must have one dimension and lie between 0 and 1.")
    timesteps = np.arange(len(alphas))
    fig = DescribedFigure(3.2)
    left, right = _axes(fig, 1, 2, grid="both")
    left.plot(timesteps, np.sqrt(alphas), color=BLUE, lw=2, label=r"signal $\sqrt{\bar\alpha_t}$")
    left.plot(timesteps, np.sqrt(1 - alphas), color=ORANGE, lw=2, label=r"noise $\sqrt{1-\bar\alpha_t}$")
    left.set(xlabel="timestep t", ylabel="weight in the noised latents", ylim=(0, 1.02))
    left.legend(frameon=False)
    with np.errstate(divide="ignore"):  # a schedule with zero terminal SNR ends at minus infinity: not drawn
        log_snr = np.log10(alphas) - np.log10(1 - alphas)
    right.plot(timesteps, log_snr, color=GREEN, lw=2)
    right.set(xlabel="timestep t", ylabel="log10 of signal-to-noise ratio")
    if min_snr_gamma is not None:
        label = f"min-SNR γ = {min_snr_gamma:g}: weights are clipped above"
        right.axhline(np.log10(min_snr_gamma), color="0.3", ls="--", label=label)
        right.legend(frameon=False, fontsize=SMALL)
    return fig.described(
        f"Noise schedule over {len(alphas)} timesteps: the signal's weight falls from {alphas[0] ** 0.5:.2f} to "
        f"{alphas[-1] ** 0.5:.2f} while the noise's rises, so the signal-to-noise ratio falls throughout."
    )


def _short(number):
    """Three digits and a unit: 865,910,724 -> "866 M"."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def blocks(frame):
    """Parameters and forward FLOPs by block, same order. `frame`: columns block, parameters, gflops."""
    frame = _frame(frame, "the blocks' frame", "block", "parameters", "gflops")
    fig = DescribedFigure(1.0 + 0.3 * len(frame))
    axes = _axes(fig, 1, 2, grid="x", sharey=True)
    panels = [("parameters", frame["parameters"], BLUE), ("FLOPs of a forward pass", 1e9 * frame["gflops"], ORANGE)]
    for ax, (name, values, color) in zip(axes, panels, strict=True):
        bars = ax.barh(range(len(frame)), values, color=color, height=0.7)
        shares = values / (values.sum() or 1)
        labels = [f"{_short(value)} ({share:.0%})" for value, share in zip(values, shares, strict=True)]
        ax.bar_label(bars, labels, padding=4, fontsize=SMALL)
        ax.set(title=f"{name}: {_short(values.sum())}", xlabel=name, xlim=(0, 1.35 * (values.max() or 1)))
        ax.xaxis.set_major_locator(ticker.MaxNLocator(5))
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _short(value)))
        ax.tick_params(axis="y", length=0)
    axes[0].set(yticks=range(len(frame)), yticklabels=frame["block"])
    axes[0].invert_yaxis()
    rows = frame[["block", "parameters", "gflops"]].itertuples(index=False)
    parts = "; ".join(f"{name}: {_short(size)} parameters, {_short(1e9 * flops)} FLOPs" for name, size, flops in rows)
    return fig.described(f"Size and cost of the U-Net's blocks. {parts}.")


def _label_color(label, number=0):
    return {"before": GREY, "after": BLUE}.get(label, CYCLE[number % len(CYCLE)])


def _smoothed(values, window):
    return values.rolling(window, min_periods=1, center=True).mean()


def loss_curves(runs, *, validation=None, smooth=25, title=None, marks=()):
    """Loss over steps: each step faint, the mean over `smooth` steps strong.

    `runs`: label -> frame with step, loss. `validation`: frame with step, validation_loss, drawn as points. `marks`:
    (step, text) pairs, drawn as vertical lines. Of a step that was repeated the last row counts.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one label and frame.")
    fig = DescribedFigure(3.8)
    ax = _axes(fig, grid="both")
    curves, said = [], []
    for number, (label, frame) in enumerate(runs.items()):
        frame = _last_attempt(frame, f"run {label!r}", "loss")
        curve, color = _smoothed(frame["loss"], smooth), _label_color(label, number)
        # Later runs are thinner, so that two which coincide are both seen.
        style = {"lw": max(3.2 - 1.4 * number, 1.4) if len(runs) > 1 else 2, "ls": "-" if number == 0 else "--"}
        ax.plot(frame["step"], frame["loss"], color=color, alpha=0.25, lw=0.8)
        ax.plot(frame["step"], curve, color=color, label=label, **style)
        curves.append(curve)
        steps = f"steps {frame['step'].iloc[0]:,} to {frame['step'].iloc[-1]:,}"
        said.append(f"{label}: from {curve.iloc[0]:.3g} to {curve.iloc[-1]:.3g} over {steps}")
    if validation is not None:
        validation = _last_attempt(validation, "validation", "validation_loss")
        points = validation["validation_loss"]
        ax.plot(validation["step"], points, "o", color=RED, ms=6, mec="white", label="validation")
        curves.append(points)
        said.append(f"validation: {points.iloc[-1]:.3g} at step {validation['step'].iloc[-1]:,}")
    values = pd.concat(curves)
    if values.min() > 0 and values.max() > 4 * values.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    before = -np.inf
    for step, text in sorted(marks):
        # Beside a line that is too near, the text goes to the other side.
        _vertical_note(ax, step, text, left=step - before >= 0.04 * np.ptp(ax.get_xlim()))
        before = step
        said.append(f"{text} at step {step:,}")
    _whole_steps(ax, ylabel="loss", title=title or "")
    ax.legend(frameon=False)
    return fig.described(f"Loss over steps. {'; '.join(said)}.")


def training_phases(runs, *, smooth=15):
    """The loss of consecutive runs, each of which starts from the weights of the one before, on one axis.

    `runs`: label -> frame with step, loss, in their order. A vertical line marks where each begins.
    """
    shifted, marks, start = {}, [], 0
    for label, frame in runs.items():
        frame = _last_attempt(frame, f"run {label!r}", "loss")
        if shifted:
            marks.append((start, label))
        shifted[label] = frame.assign(step=frame["step"] + start)
        start = shifted[label]["step"].max()
    return loss_curves(shifted, smooth=smooth, marks=marks)


def interrupted_run(straight, attempts):
    """The loss of a run that lost workers, over that of one that did not, and the steps that were repeated.

    `straight`: frame with step, loss. `attempts`: frame with step, attempt, loss, all attempts of the interrupted run.
    """
    straight = _last_attempt(straight, "straight", "loss")
    attempts = _frame(attempts, "attempts", "step", "attempt", "loss")
    fig = DescribedFigure(3.8)
    ax = _axes(fig, grid="both")
    ax.plot(straight["step"], straight["loss"], color="0.75", lw=5, label="not interrupted")
    last, said = None, []
    for number, (attempt, mine) in enumerate(attempts.sort_values("step").groupby("attempt")):
        # Later attempts are dashed, so that the one below is seen.
        style = {"color": CYCLE[number % len(CYCLE)], "lw": 1.8, "ls": (0, (4, 3)) if number else "-"}
        ax.plot(mine["step"], mine["loss"], label=f"attempt {attempt}", **style)
        first = mine["step"].iloc[0]
        if last is not None:
            said.append(f"a worker is killed after step {last}")
            if last >= first:
                again = f"{last - first + 1} steps done again"
                said.append(again)
                ax.axvspan(first - 0.5, last + 0.5, color=RED, alpha=0.15, lw=0, label=again)
            _vertical_note(ax, last + 0.5, "a worker is killed", color=RED)
        last = mine["step"].iloc[-1]
    _whole_steps(ax, ylabel="loss")
    ax.legend(frameon=False)
    return fig.described(
        f"Loss of an interrupted run over that of one that was not: {', '.join(said) or 'no failure'}."
    )


def throughput(metrics, rate, waiting):
    """images/s over steps, and the share of time that training waits for data.

    `metrics`: columns step, images_per_second (all workers together), data_wait_share (0 to 1). `rate`, `waiting`: of
    the whole run, as `metrics_log.throughput(metrics)` gives them, for the title.
    """
    metrics = _last_attempt(metrics, "metrics", "images_per_second", "data_wait_share")
    fig = DescribedFigure(3.6)
    top, bottom = _axes(fig, 2, 1, sharex=True, height_ratios=(3, 2))
    rates, waits = metrics["images_per_second"], 100 * metrics["data_wait_share"]
    for ax, values, color in ((top, rates, BLUE), (bottom, waits, ORANGE)):
        ax.plot(metrics["step"], values, color=color, alpha=0.3, lw=0.8)
        ax.plot(metrics["step"], values.rolling(15, min_periods=1, center=True).median(), color=color, lw=2)
    title = f"{rate:,.0f} images/s; {waiting:.1%} of the time waiting for data"
    top.set(ylabel="images/s", ylim=(0, 1.15 * rates.quantile(0.99)), title=title)
    _whole_steps(bottom, ylabel="waits for data, %", ylim=(0, float(np.clip(1.2 * waits.quantile(0.98), 10, 100))))
    return fig.described(f"Training throughput over {len(metrics):,} steps: {title}.")


def iteration(phases, memory, *, shares=None, published=None, device="cpu"):
    """Where the time and the memory of some steps go: memory over time, each phase of a step in its colour.

    `phases`: columns phase, start, seconds. `memory`: columns second, gib. `shares`: phase -> share of the time, for
    the bar below. `published`: a sentence about the published run, printed underneath. The memory axis does not
    start at zero: what the weights always take would hide what changes within a step.
    """
    phases = _frame(phases, "the phases' frame", "phase", "start", "seconds")
    memory = _frame(memory, "the memory's frame", "second", "gib")
    names = list(dict.fromkeys(phases["phase"]))
    colors = {name: PHASES.get(name, CYCLE[number % len(CYCLE)]) for number, name in enumerate(names)}
    fig = DescribedFigure(4.4)
    top, bottom = _axes(fig, 2, 1, height_ratios=(4, 1))
    for phase in phases.itertuples():
        top.axvspan(phase.start, phase.start + phase.seconds, color=colors[phase.phase], alpha=0.35, lw=0)
    top.plot(memory["second"], memory["gib"], color="0.15", lw=1.2)
    what = "allocated on the GPU" if device == "cuda" else "of the process (resident set)"
    peak, low = memory["gib"].max(), memory["gib"].min()
    room = 0.1 * max(peak - low, 0.05 * peak)
    title = f"memory {what}: {low:.2f} to {peak:.2f} GiB"
    end = float((phases["start"] + phases["seconds"]).iloc[-1])
    top.set(xlabel="seconds", ylabel="GiB", xlim=(0, end), ylim=(low - room, peak + room), title=title)
    legend = [Patch(color=colors[name], alpha=0.35, label=name) for name in names]
    fig.legend(handles=legend, loc="outside upper center", ncols=len(names), frameon=False, fontsize=SMALL)
    if shares is None:
        seconds = phases.groupby("phase", sort=False)["seconds"].sum()
        shares = seconds / seconds.sum()
    left = 0.0
    for name, share in shares.items():
        bottom.barh([0], [100 * share], left=[left], color=colors.get(name, GREY), height=0.8)
        if share > 0.07:  # else the text would overlap; the legend names the colour
            ink = "white" if colors.get(name, GREY) in (BLUE, GREY) else "black"
            style = {"ha": "center", "va": "center", "fontsize": SMALL, "color": ink}
            bottom.text(left + 50 * share, 0, f"{name}\n{share:.0%}", **style)
        left += 100 * share
    bottom.set(xlim=(0, 100), yticks=[], xlabel="share of a step's time, %")
    bottom.spines[["left"]].set_visible(False)
    if published:
        fig.supxlabel(published, fontsize=SMALL, color="0.35")
    spent = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return fig.described(f"Time of a training step: {spent}; {title}.")


def throughput_over_encoders(measured, predicted, *, ceiling=None, others="trainers", title=None):
    """Throughput over the number of encoders: what was measured, what is predicted, and the limit that others set.

    `measured`: label -> frame, or one frame (label "measured"), and `predicted`, a frame, have num_encoders and
    images_per_second; measured frames may be empty. `ceiling`: images/s of the `others` alone: of the trainers online,
    of the transforms in preprocessing.
    """
    predicted = _frame(predicted, "the prediction", "num_encoders", "images_per_second")
    fig = DescribedFigure(3.8)
    ax = _axes(fig, grid="both")
    said, top = [], max(predicted["images_per_second"].max(), ceiling or 0)
    if ceiling is not None:  # wide and pale, so that the prediction is seen where both coincide
        ax.axhline(ceiling, color=GREEN, lw=8, alpha=0.3, label=f"{others} alone: {ceiling:,.0f} images/s")
        said.append(f"{others} alone allow {ceiling:,.0f} images/s")
    label = f"predicted: min(n x encoder, {others})"
    ax.plot(predicted["num_encoders"], predicted["images_per_second"], color="0.3", ls="--", marker=".", label=label)
    for number, (label, frame) in enumerate(
        (measured if isinstance(measured, dict) else {"measured": measured}).items()
    ):
        if len(frame):
            frame = _frame(frame, "what was measured", "num_encoders", "images_per_second")
            style = {"color": CYCLE[number % len(CYCLE)], "marker": "osD^v"[number % 5], "ms": 9, "mec": "white"}
            ax.plot(frame["num_encoders"], frame["images_per_second"], ls="", zorder=3, label=label, **style)
            pairs = zip(frame["num_encoders"], frame["images_per_second"], strict=True)
            said.append(f"{label}: " + ", ".join(f"{rate:,.0f} with {count}" for count, rate in pairs))
            top = max(top, frame["images_per_second"].max())
    ax.set(xlabel="encoders", ylabel="images/s", ylim=(0, 1.15 * top), title=title)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize=SMALL, loc="lower right")
    return fig.described(f"Images a second over the number of encoders. {'; '.join(said) or 'Prediction only'}.")


def cost_over_time(plans, *, best=None, deadline_hours=None, title=None):
    """Dollars over hours, one point a plan, in the colour of its path; both axes logarithmic.

    `plans`: columns path, hours, dollars (`planner.search`, `planner.compare`). `best`: a row of it, which is marked.
    """
    plans = _frame(pd.DataFrame(plans).reset_index(), "the plans' frame", "path", "hours", "dollars")
    fig = DescribedFigure(4.2)
    ax = _axes(fig, grid="both")
    said, size, alpha = [], *((10, 0.35) if len(plans) > 100 else (40, 0.9))
    for number, (path, mine) in enumerate(plans.groupby("path", sort=False)):
        ax.scatter(
            mine["hours"], mine["dollars"], s=size, alpha=alpha, lw=0, color=CYCLE[number % len(CYCLE)], label=path
        )
        said.append(f"{path} from ${mine['dollars'].min():,.0f} and from {mine['hours'].min():,.1f} hours")
    by_time = plans.sort_values("hours")
    front = by_time[by_time["dollars"] <= by_time["dollars"].cummin()]
    ax.step(front["hours"], front["dollars"], where="post", color="0.2", lw=1, label="the cheapest so far")
    if best is not None:
        ax.scatter([best["hours"]], [best["dollars"]], s=160, facecolors="none", edgecolors=RED, lw=2, zorder=4)
        where = {"textcoords": "offset points", "color": RED, "fontsize": SMALL, "va": "top", "zorder": 5}
        text = f"${best['dollars']:,.0f}, {best['hours']:,.1f} h"
        ax.annotate(
            text, (best["hours"], best["dollars"]), (12, -4), bbox={"fc": "white", "ec": "none", "pad": 1}, **where
        )
        ax.margins(y=0.12)
    if deadline_hours is not None:
        ax.axvline(deadline_hours, color=RED, ls=":", lw=1.4)
    ax.set(xscale="log", yscale="log", xlabel="hours", ylabel="$", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(ticker.NullFormatter())
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    legend = fig.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=SMALL)
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    return fig.described(f"Cost over time of {len(plans):,} plans: {'; '.join(said)}.")


def run_distribution(runs, calm):
    """How long simulated runs take and what they cost: a histogram of each over the draws.

    `runs`: columns draw, hours, dollars (`simulator.simulate`), a row for each draw and stage; `calm`: the same of one
    draw without losses, drawn as a line.
    """
    totals = _frame(runs, "the runs' frame", "draw", "hours", "dollars").groupby("draw")[["hours", "dollars"]].sum()
    without = _frame(calm, "the frame of the run without losses", "hours", "dollars")[["hours", "dollars"]].sum()
    fig = DescribedFigure(3.4)
    said = []
    for ax, name, unit, color in zip(_axes(fig, 1, 2), totals, ("hours", "$"), (BLUE, ORANGE), strict=True):
        ax.hist(totals[name], bins=min(30, max(5, len(totals) // 4)), color=color)
        _vertical_note(ax, without[name], f"without losses: {without[name]:,.0f}", left=True)
        first, last = min(without[name], totals[name].min()), max(without[name], totals[name].max())
        ax.set(xlabel=unit, ylabel="draws", xlim=(first - 0.1 * (last - first or 1), last + 0.02 * (last - first or 1)))
        low, middle, high = totals[name].quantile([0.1, 0.5, 0.9])
        said.append(f"{name} {low:,.0f} to {high:,.0f} in 80 % of them, {middle:,.0f} in the middle")
        ax.set_title(f"{unit}: {low:,.0f} to {high:,.0f} in 80 % of the draws", fontsize=10)
    return fig.described(f"{len(totals):,} simulated runs: {'; '.join(said)}.")


def bus_bandwidth(table, *, expected=None):
    """Bus bandwidth over the size of the message, one line a collective.

    `table`: columns collective, bytes, "bus bandwidth, GB/s" (`network.measure`). `expected`: label -> GB/s.
    """
    table = _frame(table, "the table", "collective", "bytes", "bus bandwidth, GB/s")
    fig = DescribedFigure(3.6)
    ax = _axes(fig, grid="both")
    said = []
    for number, (name, mine) in enumerate(table.groupby("collective", sort=False)):
        rates = mine["bus bandwidth, GB/s"]
        ax.plot(mine["bytes"] / 2**20, rates, marker=".", color=CYCLE[number % len(CYCLE)], label=name)
        said.append(f"{name} {rates.max():.3g} GB/s at most")
    for label, rate in (expected or {}).items():
        ax.axhline(rate, color=RED, ls="--", lw=1.2)
        ax.annotate(label, (table["bytes"].min() / 2**20, rate), (2, 3), textcoords="offset points", fontsize=SMALL)
    ax.set(xscale="log", yscale="log", xlabel="size of the message, MiB", ylabel="bus bandwidth, GB/s")
    ax.legend(frameon=False, fontsize=SMALL)
    return fig.described(f"Bus bandwidth by the size of the message: {'; '.join(said)}.")


def time_shares(table):
    """Where the time of runs goes: one bar a run, split into computing and the shares that are lost.

    `table`: one row a run, with columns data, communication, checkpoints (0 to 1): `metrics_log.speed_summary`.
    """
    table = _frame(table, "table", "data", "communication", "checkpoints").fillna(0.0)
    fig = DescribedFigure(1.1 + 0.4 * len(table))
    ax = _axes(fig, grid="x")
    lost = {
        "waits for data": table["data"],
        "communication": table["communication"],
        "checkpoints": table["checkpoints"],
    }
    shares = {"computes": 1 - sum(lost.values()), **lost}
    left, names = 0.0, [str(name) for name in table.index]
    for (label, share), color in zip(shares.items(), (BLUE, ORANGE, PURPLE, GREEN), strict=True):
        ax.barh(names, 100 * share, left=left, color=color, label=label)
        left = left + 100 * share
    ax.set(xlim=(0, 100), xlabel="% of the time")
    ax.invert_yaxis()
    fig.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=SMALL)
    runs = [
        f"{name} {', '.join(f'{label} {share.iloc[i]:.0%}' for label, share in shares.items())}"
        for i, name in enumerate(names)
    ]
    return fig.described(f"Where the time of runs goes: {'; '.join(runs)}.")


def agreement(scores, *, goal=None):
    """Share of pictures that show what their prompt says, by attribute; "all" (every attribute right) set apart.

    `scores`: label -> attribute -> share (0 to 1). `goal`: a share, for "all" where there is one.
    """
    attributes = list(dict.fromkeys(name for shares in scores.values() for name in shares if name != "all"))
    with_all = any("all" in shares for shares in scores.values())
    positions = {name: float(place) for place, name in enumerate(attributes)}
    if with_all:
        positions["all"] = len(attributes) + 0.5
    if not positions:
        raise ValueError("scores is empty: give at least one label with one attribute's share.")
    fig = DescribedFigure(3.4)
    ax = _axes(fig)
    wide = 0.8 / len(scores)
    for number, (label, shares) in enumerate(scores.items()):
        shift = (number - (len(scores) - 1) / 2) * wide
        places, heights = [positions[name] + shift for name in shares], [100 * share for share in shares.values()]
        bars = ax.bar(places, heights, 0.94 * wide, color=_label_color(label, number), label=label)
        if wide * WIDTH / (len(positions) + 1) > 0.3:  # inches: else numbers would overlap
            ax.bar_label(bars, [f"{height:.0f}" for height in heights], padding=2, fontsize=SMALL)
    if with_all and attributes:
        ax.axvline(len(attributes) - 0.25, color="0.8")
    if goal is not None:
        middle, half = (positions["all"], 0.5) if with_all else ((len(attributes) - 1) / 2, len(attributes) / 2)
        ax.plot([middle - half, middle + half], [100 * goal] * 2, color=RED, ls="--", lw=1.6)
        place, offset = (middle + half, 100 * goal), {"textcoords": "offset points", "va": "center"}
        ax.annotate(f"goal {100 * goal:.0f} %", place, (3, 0), fontsize=SMALL, color=RED, **offset)
    ax.set(ylabel="pictures that agree, %", ylim=(0, 108), yticks=range(0, 101, 20))
    ax.set(xticks=list(positions.values()), xticklabels=list(positions))
    ax.tick_params(axis="x", length=0)
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(scores), borderaxespad=0)
    said = [f"{label} {', '.join(f'{k} {v:.0%}' for k, v in shares.items())}" for label, shares in scores.items()]
    return fig.described(f"Share of pictures that agree with their prompt: {'; '.join(said)}.")


if __name__ == "__main__":
    # The numbers are those of the published run: 40 encoders on A10Gs, 32 trainers on A100s.
    published = {"num_transform_workers": 240, "num_encoders": 40, "num_training_workers": 32}
    architecture(**published, encoder_device="A10G", training_device="A100").savefig(sys.argv[1])
