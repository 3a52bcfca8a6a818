"""Figures of the notebooks, from plain arrays and frames, so that one can be copied alone.

Each function returns a closed matplotlib Figure: as a cell's last expression it shows once. Figures are about 10 inches
wide at 100 dpi. Pictures are (H, W, 3) uint8 arrays or PIL images. ValueError for what cannot be drawn.
Only numpy, pandas and matplotlib. Colours: Okabe & Ito, https://jfly.uni-koeln.de/color.
"""

import textwrap
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Ellipse, FancyBboxPatch, Rectangle

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#7A7A7A",
)
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)  # red is kept for what needs attention
# The same thing has the same colour in every figure; a stage is found by these words in its name.
STAGES = {
    "read": GREY,
    "transform": SKY,
    "encode": ORANGE,
    "write": GREEN,
    "store": GREEN,
    "train": BLUE,
    "sample": PURPLE,
}
PHASES = {"data": GREY, "encode": ORANGE, "forward": BLUE, "backward": SKY, "optimizer": GREEN}  # of a training step
WIDTH, DPI, SMALL = 10, 100, 9
CHARACTER = 0.072  # inches, an average character of the SMALL font
LINE = 0.16  # inches, a line of it


def _figure(height, width=WIDTH):
    fig = plt.figure(figsize=(width, height), dpi=DPI, layout="constrained")
    plt.close(fig)  # pyplot forgets it, so that a notebook does not draw it a second time
    return fig


def _plain(ax, grid):
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color="0.9")
    ax.set_axisbelow(True)
    return ax


def _columns(frame, what, *names):
    frame = pd.DataFrame(frame)
    if missing := [name for name in names if name not in frame]:
        raise ValueError(f"{what} has no column {missing[0]!r}: it needs {', '.join(names)}.")
    if frame.empty:
        raise ValueError(f"{what} has no rows: there is nothing to draw yet.")
    return frame


def _last_attempt(frame, what, *names):
    """In order of steps; of a step that was redone after a failure the last row counts."""
    frame = _columns(frame, what, "step", *names)
    return frame.drop_duplicates("step", keep="last").sort_values("step")


def _wrap(text, inches, lines):
    text = str(text)
    if not text.isascii():  # captions come in all scripts: what the font lacks would be a warning at each drawing
        known = get_font(findfont(FontProperties())).get_charmap()
        text = "".join(c if ord(c) in known else "□" for c in text)
    width = max(8, int(inches / CHARACTER))
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def _show(ax, picture, **how):
    ax.imshow(np.asarray(picture), cmap="gray", **how)  # cmap: for pictures of one channel
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def _aspect(pictures):
    """Height over width of the tallest, within what a row of a grid can show."""
    shapes = [np.asarray(picture).shape for picture in pictures]
    return float(np.clip(max(height / width for height, width, *_ in shapes), 0.3, 2))


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
    "preprocessing" or "training" dims the other half. `num_training_workers` may be a pair (least, most).
    """
    if mode not in ("offline", "online"):
        raise ValueError(f'mode={mode!r} is unknown: choose "offline" or "online".')
    if highlight not in (None, "preprocessing", "training"):
        raise ValueError(f'highlight={highlight!r} is unknown: choose "preprocessing", "training" or None.')
    elastic = isinstance(num_training_workers, (tuple, list))
    most = max(num_training_workers) if elastic else num_training_workers
    trainers = "{}-{}".format(*num_training_workers) if elastic else num_training_workers

    def count(number, noun, many=None):
        return f"{number} {noun}" + ("s" if (many or number) != 1 else "")

    # half, colour, title, what it does, where, processes (0: a store), what flows on to the next
    data = ("preprocessing", GREY, "Raw data", "images and\ncaptions", "local\nor s3://", 1, "rows")
    transform = (
        "preprocessing",
        SKY,
        "Transform",
        "decode, crop\nresize\ntokenise",
        f"{count(num_transform_workers, 'task')}\non CPU",
        num_transform_workers,
        "pixels\ntokens",
    )
    encode = (
        "preprocessing",
        ORANGE,
        "Encode",
        "VAE and\ntext encoder",
        f"{count(num_encoders, 'actor')}\non {encoder_device}",
        num_encoders,
        "latents\ntext",
    )
    store = ("both", GREEN, "Latents", "Parquet and\nmanifest", "local\nor s3://", 0, "batches")
    train = (
        "training",
        BLUE,
        "Train",
        "U-Net only",
        f"{count(trainers, 'worker', most)}\non {training_device}",
        most,
        "weights",
    )
    result = ("training", PURPLE, "Sample", "prompts to\npictures", "diffusers\npipeline", 1, "")
    boxes = [data, transform, encode, *([store] if mode == "offline" else []), train, result]

    height, bottom, tall, margin, gap, card = 2.9, 0.3, 1.85, 0.25, 0.66, 0.045  # inches, as the axes
    wide = (WIDTH - 2 * margin - gap * (len(boxes) - 1)) / len(boxes)
    left = [margin + i * (wide + gap) for i in range(len(boxes))]
    fig = _figure(height)
    fig.set_layout_engine("none")  # everything has its place already
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))
    ax.set_axis_off()

    def tint(color, share, half="both"):
        """`color` mixed with white; what is not highlighted is paler still."""
        share *= 0.3 if highlight and half not in ("both", highlight) else 1
        return tuple(1 - share * (1 - np.array(to_rgb(color))))

    def rounded(x, y, width, height, **style):
        ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", **style))

    def band(half, first, last, label):
        x, right = left[first] - 0.15, left[last] + wide + 0.2
        rounded(x, 0.1, right - x, height - 0.15, fc=tint("0.5", 0.1, half), ec="none", zorder=0)
        ax.text(
            (x + right) / 2,
            height - 0.25,
            label,
            ha="center",
            va="center",
            fontsize=11,
            weight="bold",
            color=tint("0.2", 1, half),
        )

    band("preprocessing", 0, 2, "Preprocessing: Ray Data" if mode == "offline" else "Ray Data, streaming; no store")
    band("training", len(boxes) - 2, len(boxes) - 1, "Training: Ray Train")

    for i, (half, color, title, does, where, processes, flow) in enumerate(boxes):
        face, edge, ink = tint(color, 0.14, half), tint(color, 1, half), tint("0.1", 1, half)
        x, middle, title_y = left[i], left[i] + wide / 2, bottom + tall - 0.19
        title_color = "white" if np.dot(to_rgb(color), (0.3, 0.6, 0.1)) < 0.5 else ink
        if processes == 0:  # a cylinder
            lid = 0.3
            ax.add_patch(Rectangle((x, bottom + lid / 2), wide, tall - lid, fc=face, ec="none"))
            ax.add_patch(Ellipse((middle, bottom + lid / 2), wide, lid, fc=face, ec=edge, lw=1.6, zorder=0.9))
            ax.add_patch(Ellipse((middle, bottom + tall - lid / 2), wide, lid, fc=edge, ec=edge, lw=1.6))
            for side in (x, x + wide):
                ax.plot([side, side], [bottom + lid / 2, bottom + tall - lid / 2], color=edge, lw=1.6)
            title_y, title_color = bottom + tall - lid - 0.14, edge
        else:  # a pile of cards
            for behind in range(min(processes, 3) - 1, -1, -1):
                rounded(x + card * behind, bottom + card * behind, wide, tall, ec=edge, fc=face, lw=1.6)
            rounded(x, bottom + tall - 0.38, wide, 0.38, ec=edge, fc=edge, lw=1.6)
        text = {"ha": "center", "va": "center", "linespacing": 1.3, "parse_math": False}
        ax.text(middle, title_y - 0.05, title, fontsize=11, weight="bold", color=title_color, ha="center")
        ax.text(middle, bottom + 1.02, does, fontsize=10, color=ink, **text)
        ax.text(middle, bottom + 0.34, where, fontsize=SMALL, color=ink, weight="bold", **text)
        if i + 1 < len(boxes):
            color = tint("0.25", 1, half if half == boxes[i + 1][0] else "both")
            start, end = x + wide + card * max(0, min(processes, 3) - 1) + 0.04, left[i + 1] - 0.03
            ax.annotate(
                "",
                (end, bottom + 0.85),
                (start, bottom + 0.85),
                arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": color, "shrinkA": 0, "shrinkB": 0},
            )
            ax.text((start + end) / 2, bottom + 0.94, flow, ha="center", va="bottom", fontsize=SMALL, color=color)
    return fig


def stage_throughput(frame):
    """Bars of images/s by stage. `frame`: columns stage, images_per_second (all workers together), workers."""
    frame = _columns(frame, "the stages' frame", "stage", "images_per_second", "workers")
    rates, slowest = frame["images_per_second"].to_numpy(float), int(frame["images_per_second"].to_numpy().argmin())
    fig = _figure(0.9 + 0.42 * len(frame))
    ax = _plain(fig.subplots(), "x")
    colors = [next((c for word, c in STAGES.items() if word in str(stage).lower()), GREY) for stage in frame["stage"]]
    bars = ax.barh(range(len(frame)), rates, color=colors, height=0.65)
    labels = [
        f"{rate:,.0f} images/s, {workers} worker{'s' if workers != 1 else ''}"
        for rate, workers in zip(rates, frame["workers"], strict=True)
    ]
    if len(frame) > 1:
        labels[slowest] += "  ◀ bottleneck"
        bars[slowest].set(edgecolor=RED, linewidth=2)
    for text in ax.bar_label(bars, labels, padding=6, fontsize=10):
        text.set(color=RED if "bottleneck" in text.get_text() else "0.2")
    ax.set(
        yticks=range(len(frame)),
        yticklabels=frame["stage"],
        xlabel="images/s, all workers of a stage together",
        xscale="log",  # writing is a hundred times faster than encoding
        xlim=(rates.min() / 10, rates.max() * 30),
    )
    ax.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    return fig


def encoder_utilization(frame, *, goal=0.95):
    """Share of their time that the encoders computed, and images/s, over a job. `frame`: columns seconds, busy (0 to 1),
    images_per_second."""
    frame = _columns(frame, "the timeline", "seconds", "busy", "images_per_second")
    fig = _figure(3.6)
    top, bottom = (_plain(ax, "y") for ax in fig.subplots(2, 1, sharex=True, height_ratios=(3, 2)))
    top.plot(frame["seconds"], 100 * frame["busy"], color=ORANGE, lw=2, marker="o", ms=3)
    top.axhline(100 * goal, color=RED, ls="--", lw=1.6)
    top.annotate(
        f"goal {100 * goal:.0f} %",
        (1, 100 * goal),
        (3, 0),
        xycoords=top.get_yaxis_transform(),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
        color=RED,
    )
    median = frame["busy"].median()
    top.set(
        ylabel="encoders compute, %", ylim=(0, 108), title=f"encoders compute for {median:.0%} of their time (median)"
    )
    bottom.plot(frame["seconds"], frame["images_per_second"], color=BLUE, lw=2)
    bottom.set(xlabel="seconds", ylabel="images/s", ylim=(0, 1.15 * max(frame["images_per_second"].max(), 1e-9)))
    return fig


def distribution(frame, *, max_tokens, resolutions):
    """What a data set is good for: caption lengths and what is cut off, the shorter sides and what they allow, aspect ratios.

    `frame`: columns tokens, width, height, a row each. `max_tokens`: what the text encoder takes.
    """
    frame = _columns(frame, "the survey", "tokens", "width", "height")
    fig = _figure(3.2)
    left, middle, right = (_plain(ax, "y") for ax in fig.subplots(1, 3))
    cut = frame["tokens"] > max_tokens
    edges = np.arange(0, max(frame["tokens"].quantile(0.99), max_tokens) * 1.1 + 2)
    left.hist(frame["tokens"].clip(upper=edges[-1]), bins=edges if len(edges) < 60 else 50, color=BLUE)
    left.axvline(max_tokens + 0.5, color=RED, ls="--", lw=1.6)
    left.set(xlabel="tokens of a caption", ylabel="rows")
    left.set_title(f"{cut.mean():.1%} are cut at {max_tokens}", fontsize=10)
    known = frame.dropna(subset=["width", "height"])
    shorter, longer = known[["width", "height"]].min(axis=1), known[["width", "height"]].max(axis=1)
    if len(known):
        # Room on both sides: data sets whose pictures are all of one size exist.
        span = np.geomspace(max(1, min(shorter.min(), *resolutions)) * 0.7, max(shorter.max(), *resolutions) * 1.4, 30)
        middle.hist(shorter, bins=span, color=GREEN)
        middle.set_xscale("log", base=2)
        middle.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        middle.xaxis.set_minor_formatter(ticker.NullFormatter())
        right.hist((longer / shorter.clip(lower=1)).clip(upper=4), bins=30, range=(1, 4), color=PURPLE)
    for resolution in resolutions:
        middle.axvline(resolution, color=RED, ls="--", lw=1.6)
    allowed = ", ".join(f"{resolution}: {(shorter >= resolution).sum() / len(frame):.0%}" for resolution in resolutions)
    middle.set(xlabel="shorter side, pixels")
    middle.set_title(f"large enough for {allowed}", fontsize=10)
    beyond = (longer > 2 * shorter).sum() / max(1, len(known))
    right.set(xlabel="longer side / shorter side")
    right.set_title(f"{beyond:.0%} are longer than 2 : 1", fontsize=10)
    return fig


def pictures(images, captions=None, *, columns=6, title=None):
    """A grid of pictures, captions wrapped underneath (cut after six lines)."""
    images = list(images)
    if not images:
        raise ValueError("images is empty: give at least one picture.")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(images)} pictures and {len(captions)} captions: give as many of each.")
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    side = min(WIDTH / columns, 2.5)
    wrapped = [_wrap(caption, side - 0.15, 6) for caption in captions or []]
    text_height = LINE * max((caption.count("\n") + 1 for caption in wrapped), default=0)
    fig = _figure(rows * ((side - 0.1) * _aspect(images) + text_height + 0.12) + 0.35 * bool(title), columns * side)
    for number, ax in enumerate(fig.subplots(rows, columns, squeeze=False).flat):
        if number >= len(images):
            ax.set_axis_off()
            continue
        _show(ax, images[number])
        if wrapped:
            ax.set_xlabel(wrapped[number], fontsize=SMALL, parse_math=False)
    if title:
        fig.suptitle(_wrap(title, columns * side, 2), parse_math=False)
    return fig


def transform_steps(steps):
    """One picture after each step. `steps`: name -> picture; sizes may differ, and stand in the titles."""
    if not steps:
        raise ValueError("steps is empty: give at least one name and picture.")
    fig = _figure(0.55 + (WIDTH / len(steps) - 0.4) * min(_aspect(steps.values()), 1.3))
    axes = fig.subplots(1, len(steps), squeeze=False)[0]
    fig.get_layout_engine().set(w_pad=0.18)  # room for the arrows
    for ax, (name, picture) in zip(axes, steps.items(), strict=True):
        _show(ax, picture)
        height, width = np.asarray(picture).shape[:2]
        name = _wrap(name, WIDTH / len(steps) - 0.3, 2)
        ax.set_title(f"{name}\n{width} x {height} px", fontsize=10, parse_math=False)
    for ax, following in pairwise(axes):
        following.annotate(
            "",
            (0, 0.5),
            (1, 0.5),
            xycoords=following.transAxes,
            textcoords=ax.transAxes,
            arrowprops={
                "arrowstyle": "-|>",
                "lw": 1.8,
                "color": "0.35",
                "mutation_scale": 16,
                "shrinkA": 4,
                "shrinkB": 4,
            },
        ).set_in_layout(False)
    return fig


def latents_panel(picture, moments_2CHW, reconstruction=None):
    """A picture, the mean and std of its latents by channel, and what the decoder makes of the mean.

    `moments_2CHW`: (2, channels, H, W), posterior mean and std, unscaled. PSNR in dB compares `reconstruction` with
    `picture`, both 8 bit and of one size.
    """
    moments_2CHW = np.asarray(moments_2CHW, np.float32)
    if moments_2CHW.ndim != 4 or len(moments_2CHW) != 2:
        raise ValueError(f"moments_2CHW of shape {moments_2CHW.shape} must be (2, channels, H, W): mean and std.")
    mean_CHW, std_CHW = moments_2CHW
    channels = len(mean_CHW)
    fig = _figure(3.4)
    grid = fig.add_gridspec(2, channels + 3, height_ratios=(1.6, 1), width_ratios=[1.3, *[1] * channels, 0.07, 1.3])
    ax = fig.add_subplot(grid[:, 0])
    _show(ax, picture)
    height, width = np.asarray(picture).shape[:2]
    ax.set_title(f"picture\n{width} x {height} px, 3 channels", fontsize=10)
    limit = float(np.abs(mean_CHW).max()) or 1.0  # symmetric, so that white is zero in every channel
    rows = [
        ("mean", mean_CHW, {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}),
        ("std", std_CHW, {"cmap": "Greys", "vmin": 0, "vmax": float(std_CHW.max()) or 1.0}),
    ]
    for row, (name, values_CHW, scale) in enumerate(rows):
        for channel, values_HW in enumerate(values_CHW):
            ax = fig.add_subplot(grid[row, 1 + channel])
            shown = ax.imshow(values_HW, interpolation="nearest", **scale)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{name} {channel}", fontsize=10)
            if row == 0:
                ax.set_xlabel("{1} x {0}".format(*values_HW.shape), fontsize=SMALL)
        bar = fig.colorbar(shown, cax=fig.add_subplot(grid[row, 1 + channels]))
        bar.locator = ticker.MaxNLocator(4)
        bar.ax.tick_params(labelsize=SMALL)
    if reconstruction is not None:
        ax = fig.add_subplot(grid[:, -1])
        _show(ax, reconstruction)
        ax.set_title(f"reconstruction\nPSNR {_psnr(picture, reconstruction):.1f} dB", fontsize=10)
    return fig


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
    fig = _figure(0.3 + side * _aspect(images), side * len(images))
    for ax, picture, timestep in zip(fig.subplots(1, len(images), squeeze=False)[0], images, timesteps, strict=True):
        _show(ax, picture, interpolation="nearest")  # noise as it is, and a smaller PNG
        ax.set_title(f"t = {timestep}", fontsize=10)
    return fig


def before_after(before, after, prompts):
    """Pictures from the same prompts before training and after, prompts underneath; six columns a band."""
    before, after, prompts = list(before), list(after), list(prompts)
    if not len(before) == len(after) == len(prompts) or not prompts:
        raise ValueError(
            f"{len(before)} pictures before, {len(after)} after, {len(prompts)} prompts: "
            "give as many of each, at least one."
        )
    columns = min(6, len(prompts))
    bands = -(-len(prompts) // columns)
    side = min(WIDTH / columns, 2.2)
    wrapped = [_wrap(prompt, side - 0.2, 6) for prompt in prompts]
    text_height = LINE * max(prompt.count("\n") + 1 for prompt in wrapped)
    fig = _figure(bands * (2 * (side - 0.15) * _aspect(before + after) + text_height + 0.2), columns * side + 0.2)
    axes = fig.subplots(2 * bands, columns, squeeze=False)
    for number in range(bands * columns):
        band, column = divmod(number, columns)
        for row, name, images in ((2 * band, "before", before), (2 * band + 1, "after", after)):
            if number >= len(prompts):
                axes[row, column].set_axis_off()
                continue
            _show(axes[row, column], images[number])
            if column == 0:
                axes[row, column].set_ylabel(name, fontsize=11, color=_label_color(name))
        if number < len(prompts):
            axes[2 * band + 1, column].set_xlabel(wrapped[number], fontsize=SMALL, parse_math=False)
    return fig


def noise_schedule_curves(alphas_cumprod, *, min_snr_gamma=None):
    """Signal sqrt(a) and noise sqrt(1 - a) over the timesteps, and the signal-to-noise ratio a / (1 - a).

    `alphas_cumprod`: (T,), falling (Ho et al. 2020, eq. 4). `min_snr_gamma`: where min-SNR weighting clips
    (Hang et al. 2023, sec. 3.4).
    """
    alphas = np.asarray(alphas_cumprod, np.float64)
    if alphas.ndim != 1 or not ((alphas >= 0) & (alphas <= 1)).all():
        raise ValueError(f"alphas_cumprod of shape {alphas.shape} must have one dimension and lie between 0 and 1.")
    timesteps = np.arange(len(alphas))
    fig = _figure(3.2)
    left, right = (_plain(ax, "both") for ax in fig.subplots(1, 2))
    left.plot(timesteps, np.sqrt(alphas), color=BLUE, lw=2, label=r"signal $\sqrt{\bar\alpha_t}$")
    left.plot(timesteps, np.sqrt(1 - alphas), color=ORANGE, lw=2, label=r"noise $\sqrt{1-\bar\alpha_t}$")
    left.set(xlabel="timestep t", ylabel="weight in the noised latents", ylim=(0, 1.02))
    left.legend(frameon=False)
    with np.errstate(divide="ignore"):  # a schedule with zero terminal SNR ends at minus infinity: not drawn
        log_snr = np.log10(alphas) - np.log10(1 - alphas)
    right.plot(timesteps, log_snr, color=GREEN, lw=2)
    right.set(xlabel="timestep t", ylabel="log10 of signal-to-noise ratio")
    if min_snr_gamma is not None:
        right.axhline(np.log10(min_snr_gamma), color="0.3", ls="--")
        text = f"min-SNR γ = {min_snr_gamma:g}: weights are clipped above"
        right.annotate(
            text,
            (1, np.log10(min_snr_gamma)),
            (0, 4),
            xycoords=right.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
        )
    return fig


def _short(number):
    """Three digits and a unit: 865,910,724 -> "866 M"."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def blocks(frame):
    """Parameters and forward FLOPs by block, same order. `frame`: columns block, parameters, gflops."""
    frame = _columns(frame, "the blocks' frame", "block", "parameters", "gflops")
    fig = _figure(1.0 + 0.3 * len(frame))
    axes = fig.subplots(1, 2, sharey=True)
    panels = [("parameters", frame["parameters"], BLUE), ("FLOPs of a forward pass", 1e9 * frame["gflops"], ORANGE)]
    for ax, (name, values, color) in zip(axes, panels, strict=True):
        _plain(ax, "x")
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
    return fig


def _label_color(label, number=0):
    return {"before": GREY, "after": BLUE}.get(label, CYCLE[number % len(CYCLE)])


def _smoothed(values, window):
    return values.rolling(window, min_periods=1, center=True).mean()


def loss_curves(runs, *, validation=None, smooth=25, title=None, marks=()):
    """Loss over steps: each step faint, the mean over `smooth` steps strong.

    `runs`: label -> frame with step, loss. `validation`: frame with step, validation_loss, drawn as points. `marks`:
    (step, text) pairs, drawn as vertical lines. Of a step that was redone the last row counts.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one label and frame.")
    fig = _figure(3.8)
    ax = _plain(fig.subplots(), "both")
    curves = []
    for number, (label, frame) in enumerate(runs.items()):
        frame = _last_attempt(frame, f"run {label!r}", "loss")
        curve, color = _smoothed(frame["loss"], smooth), _label_color(label, number)
        # Later runs are thinner, so that two which coincide are both seen.
        style = {"lw": max(3.2 - 1.4 * number, 1.4) if len(runs) > 1 else 2, "ls": "-" if number == 0 else "--"}
        ax.plot(frame["step"], frame["loss"], color=color, alpha=0.25, lw=0.8)
        ax.plot(frame["step"], curve, color=color, label=label, **style)
        curves.append(curve)
    if validation is not None:
        validation = _last_attempt(validation, "validation", "validation_loss")
        points = validation["validation_loss"]
        ax.plot(validation["step"], points, "o", color=RED, ms=6, mec="white", label="validation")
        curves.append(points)
    values = pd.concat(curves)
    if values.min() > 0 and values.max() > 4 * values.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    before = -np.inf
    for step, text in sorted(marks):
        ax.axvline(step, color="0.3", ls=":", lw=1.2)
        near = step - before < 0.04 * np.ptp(ax.get_xlim())  # then its text goes to the other side of its line
        ax.annotate(
            text,
            (step, 1),
            (4 if near else -3, -4),
            xycoords=ax.get_xaxis_transform(),
            textcoords="offset points",
            rotation=90,
            ha="left" if near else "right",
            va="top",
            fontsize=SMALL,
            color="0.2",
            parse_math=False,
            bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5},
        )
        before = step
    ax.set(xlabel="step", ylabel="loss", title=title or "")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return fig


def training_phases(runs, *, smooth=15):
    """The loss of runs that went on from each other's weights, laid end to end, with a line where the next one begins.

    `runs`: label -> frame with step, loss, in their order.
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
    """The loss of a run that lost workers over that of one that did not, and the steps that were done twice.

    `straight`: frame with step, loss. `attempts`: frame with step, attempt, loss, all attempts of the interrupted run.
    """
    straight = _last_attempt(straight, "straight", "loss")
    attempts = _columns(attempts, "attempts", "step", "attempt", "loss")
    fig = _figure(3.8)
    ax = _plain(fig.subplots(), "both")
    ax.plot(straight["step"], straight["loss"], color="0.75", lw=5, label="not interrupted")
    groups = [(number, mine.sort_values("step")) for number, mine in attempts.groupby("attempt")]
    for number, ((attempt, mine), color) in enumerate(zip(groups, CYCLE * len(groups), strict=False)):
        # Later attempts are dashed, so that the one below is seen.
        ax.plot(
            mine["step"],
            mine["loss"],
            color=color,
            lw=1.8,
            ls=(0, (4, 3)) if number else "-",
            label=f"attempt {attempt}",
        )
        if number:
            first, last = mine["step"].iloc[0], groups[number - 1][1]["step"].iloc[-1]
            if last >= first:
                count = last - first + 1
                ax.axvspan(first - 0.5, last + 0.5, color=RED, alpha=0.15, lw=0, label=f"{count} steps done again")
            ax.axvline(last + 0.5, color=RED, ls=":", lw=1.5)
            ax.annotate(
                "a worker is killed",
                (last + 0.5, 1),
                (4, -4),
                xycoords=ax.get_xaxis_transform(),
                textcoords="offset points",
                rotation=90,
                ha="left",
                va="top",
                fontsize=SMALL,
                color=RED,
            )
    ax.set(xlabel="step", ylabel="loss")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.legend(frameon=False)
    return fig


def throughput(metrics):
    """images/s over steps, and the share of time that training waits for data.

    `metrics`: columns step, images_per_second (all workers together), data_wait_share (0 to 1).
    """
    metrics = _last_attempt(metrics, "metrics", "images_per_second", "data_wait_share")
    fig = _figure(3.6)
    top, bottom = (_plain(ax, "y") for ax in fig.subplots(2, 1, sharex=True, height_ratios=(3, 2)))
    rate, wait = metrics["images_per_second"], 100 * metrics["data_wait_share"]
    for ax, values, color in ((top, rate, BLUE), (bottom, wait, ORANGE)):
        ax.plot(metrics["step"], values, color=color, alpha=0.3, lw=0.8)
        ax.plot(metrics["step"], values.rolling(15, min_periods=1, center=True).median(), color=color, lw=2)
    top.set(ylabel="images/s", ylim=(0, 1.15 * rate.quantile(0.99)), title=f"median {rate.median():,.0f} images/s")
    bottom.set(xlabel="step", ylabel="waits for data, %", ylim=(0, float(np.clip(1.2 * wait.quantile(0.98), 10, 100))))
    bottom.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return fig


def iteration(phases, memory, *, shares=None, published=None, device="cpu"):
    """Where the time and the memory of some steps go: memory over time, each phase of a step in its colour.

    `phases`: columns phase, start, seconds. `memory`: columns second, gib. `shares`: phase -> share of the time, for
    the bar below. `published`: text about the same in the documents, as the title's second line.
    """
    phases = _columns(phases, "the phases' frame", "phase", "start", "seconds")
    memory = _columns(memory, "the memory's frame", "second", "gib")
    names = list(dict.fromkeys(phases["phase"]))
    colors = {name: PHASES.get(name, CYCLE[number % len(CYCLE)]) for number, name in enumerate(names)}
    fig = _figure(4.4)
    top, bottom = fig.subplots(2, 1, height_ratios=(4, 1))
    _plain(top, "y")
    for phase in phases.itertuples():
        top.axvspan(phase.start, phase.start + phase.seconds, color=colors[phase.phase], alpha=0.35, lw=0)
    top.plot(memory["second"], memory["gib"], color="0.15", lw=1.2)
    what = "allocated on the GPU" if device == "cuda" else "of the process (resident set)"
    end = float((phases["start"] + phases["seconds"]).iloc[-1])
    top.set(
        xlabel="seconds",
        ylabel="GiB",
        xlim=(0, end),
        ylim=(0, 1.15 * memory["gib"].max()),
        title=f"memory {what}, by phase of a step",
    )
    if shares is None:
        seconds = phases.groupby("phase", sort=False)["seconds"].sum()
        shares = seconds / seconds.sum()
    left = 0.0
    for name, share in shares.items():
        bottom.barh([0], [100 * share], left=[left], color=colors.get(name, GREY), height=0.8)
        if share > 0.07:  # else the text would overlap
            bottom.text(left + 50 * share, 0, f"{name}\n{share:.0%}", ha="center", va="center", fontsize=SMALL)
        left += 100 * share
    bottom.set(xlim=(0, 100), yticks=[], xlabel="share of a step's time, %")
    bottom.spines[["top", "right", "left"]].set_visible(False)
    if published:
        fig.supxlabel(published, fontsize=SMALL, color="0.35")
    return fig


def throughput_over_encoders(measured, predicted, *, ceiling=None, others="trainers", title=None):
    """Throughput over the number of encoders: what was measured, what is predicted, and the limit that others set.

    `measured`, `predicted`: frames with num_encoders, images_per_second; `measured` may be empty. `ceiling`: images/s
    of the `others` alone: of the trainers online, of the transforms in preprocessing.
    """
    predicted = _columns(predicted, "the prediction", "num_encoders", "images_per_second")
    fig = _figure(3.8)
    ax = _plain(fig.subplots(), "both")
    ax.plot(
        predicted["num_encoders"],
        predicted["images_per_second"],
        color=GREY,
        ls="--",
        marker=".",
        label=f"predicted: min(n x encoder, {others})",
    )
    measured = pd.DataFrame(measured)
    if len(measured):
        measured = _columns(measured, "what was measured", "num_encoders", "images_per_second")
        ax.plot(measured["num_encoders"], measured["images_per_second"], "o", color=BLUE, ms=9, label="measured")
    if ceiling is not None:
        ax.axhline(ceiling, color=GREEN, lw=1.5, label=f"{others} alone: {ceiling:,.0f} images/s")
    top = max(
        predicted["images_per_second"].max(), ceiling or 0, measured["images_per_second"].max() if len(measured) else 0
    )
    ax.set(xlabel="encoders", ylabel="images/s", ylim=(0, 1.15 * top), title=title)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize=SMALL, loc="lower right")
    return fig


def time_shares(table):
    """Where the time of runs goes: a bar a run, of computing and of the shares that are lost.

    `table`: a row a run, with columns data, communication, checkpoints (0 to 1), as `metrics_log.speed_summary` gives.
    """
    table = _columns(table, "table", "data", "communication", "checkpoints").fillna(0.0)
    fig = _figure(1.1 + 0.4 * len(table))
    ax = _plain(fig.subplots(), "x")
    lost = {
        "waits for data": ("data", ORANGE),
        "communication": ("communication", PURPLE),
        "checkpoints": ("checkpoints", GREEN),
    }
    left = 100 * (1 - table[["data", "communication", "checkpoints"]].sum(axis=1))
    names = [str(name) for name in table.index]
    ax.barh(names, left, color=BLUE, label="computes")
    for label, (column, color) in lost.items():
        ax.barh(names, 100 * table[column], left=left, color=color, label=label)
        left = left + 100 * table[column]
    ax.set(xlim=(0, 100), xlabel="% of the time")
    ax.invert_yaxis()
    fig.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=SMALL)
    return fig


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
    fig = _figure(3.4)
    ax = _plain(fig.subplots(), "y")
    wide = 0.8 / len(scores)
    for number, (label, shares) in enumerate(scores.items()):
        shift = (number - (len(scores) - 1) / 2) * wide
        bars = ax.bar(
            [positions[name] + shift for name in shares],
            [100 * share for share in shares.values()],
            0.94 * wide,
            color=_label_color(label, number),
            label=label,
        )
        if wide * WIDTH / (len(positions) + 1) > 0.3:  # inches: else numbers would overlap
            ax.bar_label(bars, [f"{100 * share:.0f}" for share in shares.values()], padding=2, fontsize=SMALL)
    if with_all and attributes:
        ax.axvline(len(attributes) - 0.25, color="0.8")
    if goal is not None:
        middle, half = (positions["all"], 0.5) if with_all else ((len(attributes) - 1) / 2, len(attributes) / 2)
        ax.plot([middle - half, middle + half], [100 * goal] * 2, color=RED, ls="--", lw=1.6)
        ax.annotate(
            f"goal {100 * goal:.0f} %",
            (middle + half, 100 * goal),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=RED,
        )
    ax.set(
        ylabel="pictures that agree, %",
        ylim=(0, 108),
        yticks=range(0, 101, 20),
        xticks=list(positions.values()),
        xticklabels=list(positions),
    )
    ax.tick_params(axis="x", length=0)
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(scores), borderaxespad=0)
    return fig
