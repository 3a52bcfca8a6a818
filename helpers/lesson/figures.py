"""Figures of the notebooks, drawn from plain arrays and frames.

Each function returns a `DescribedFigure`: as the last expression of a cell, or by `display`, it is shown once, with an
alternative text that says what it shows. Images are (H, W, 3) uint8 arrays or PIL images.
"""

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch
from matplotlib.text import Text
from PIL import Image

from .. import storage
from ..notebook import printable
from ..production.extras import results
from ..train.metrics import read_metrics

# Okabe & Ito's colours, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#7A7A7A"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)  # red is kept for what needs attention
WIDTH, DPI, SMALL = 10, 100, 9
CHARACTER = 0.072  # inches, width of an average character of the SMALL font
Images = Sequence[Any]
LINE = 0.16  # inches, height of a line of the SMALL font
STAGES = {"transform": SKY, "encode": ORANGE, "transform + encode": ORANGE, "write": GREEN}  # of preprocessing
PHASES = {"data": GREY, "encode": ORANGE, "forward": BLUE, "backward": SKY, "optimizer": GREEN}  # of a training step
NEAR = 0.01  # share of held-out rows; a generated image nearer than all but these may be a copy
# Columns of `results.scores`, in the order of their panels: label and colour.
SCORES = {"clip_score": ("CLIP score", GREEN), "cmmd": ("CMMD", ORANGE), "agreement": ("agreement", PURPLE)}
LOSSES = {"validation_loss": ("held out", RED), "validation_set_loss": ("validation set", ORANGE)}
NOISE = "loss_by_noise/"
NUM_PROMPTS = 4  # rows of images
MOST_STEPS = 6  # columns of images
COLOUR_STEP = 3  # stored colours are its multiples: nobody sees it, and a notebook has a third fewer bytes
PANELS_PER_ROW = 3


# ---- what figures share


class DescribedFigure(Figure):
    """A matplotlib Figure with `alt_text`, which Jupyter stores beside the image.

    The notebook gets it as the output's `metadata["image/png"]["alt"]`, the key that IPython and nbconvert use, and as
    its plain text, for viewers that show no images. `height`, `width`: inches.
    """

    alt_text = ""

    def __init__(self, height: float, width: float = WIDTH):
        super().__init__(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(self)  # not through pyplot, which would draw every open figure a second time

    def described(self, text: str) -> "DescribedFigure":
        """This figure, with an alternative text."""
        self.alt_text = " ".join(printable(text).split())
        return self

    def draw(self, renderer: Any) -> None:
        """No text is a formula: captions and names of runs may have dollar signs."""
        with matplotlib.rc_context({"text.parse_math": False}):  # for the ticks, which are made while drawing
            for text in self.findobj(Text):
                text.set(parse_math=False, text=drawable(text.get_text()))
            super().draw(renderer)

    def _repr_mimebundle_(self, include=None, exclude=None):
        drawn, png = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", bbox_inches="tight")
        values_HWC = np.asarray(Image.open(drawn).convert("RGB"), dtype=np.float32)
        coarse_HWC = np.round(values_HWC / COLOUR_STEP) * COLOUR_STEP
        Image.fromarray(coarse_HWC.astype(np.uint8)).save(png, "PNG", optimize=True)
        return {"image/png": png.getvalue(), "text/plain": self.alt_text}, {"image/png": {"alt": self.alt_text}}


def panels(fig: FigureBase, *shape: int, grid: str = "y", **options: Any) -> Any:
    """Axes with a light grid and no frame on the right and top: one, or an array of them in a given `shape`."""
    made = fig.subplots(*shape, **options)
    for ax in np.atleast_1d(made).flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis=grid, color="0.9")
        ax.set_axisbelow(True)
    return made


def label_steps(ax: Axes, label: str, most_ticks: int = 10) -> None:
    """Label axes whose x is a run's step. Steps may have six digits: a third of a figure has room for four ticks."""
    ax.set(xlabel="step", ylabel=label)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(most_ticks, integer=True))


def add_legend(target: Axes | Figure, **where: Any) -> None:
    target.legend(frameon=False, fontsize=SMALL, **where)


def legend_label(name: str) -> str:
    """The name of a curve that a user has chosen: matplotlib leaves out a label that is empty or begins with "_"."""
    return name if name and not name.startswith("_") else f" {name}"


def add_note(ax: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write a small text beside a point, at an `offset` in typographic points."""
    ax.annotate(text, point, offset, textcoords="offset points", fontsize=SMALL, **style)


def show_image(ax: Axes, image: Any) -> None:
    """Show an image without ticks and frame."""
    ax.imshow(np.asarray(image), cmap="gray", interpolation="nearest")  # cmap: for images of one channel
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def wrap(text: str, inches: float, lines: int) -> str:
    """`text` in lines of the SMALL font, of a width in inches, cut after a number of `lines`."""
    width = max(8, int(inches / CHARACTER))
    return "\n".join(textwrap.wrap(printable(text), width, max_lines=lines, placeholder=" …"))


def drawable(text: str) -> str:
    """A text in the glyphs that the font has: captions come in all scripts, and a missing glyph causes a warning."""
    if text.isascii() and text.isprintable():
        return text
    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(c if c == "\n" or ord(c) in known and c.isprintable() else "□" for c in text)


# ---- images


def pictures(
    images: Images, captions: Sequence[str], *, marks: Sequence[str] | None = None, columns: int = 6
) -> DescribedFigure:
    """A grid of images with captions underneath, each cut after six lines.

    `marks`: what is wrong with each image, "" where nothing is. Below the caption stands a check mark, or a cross and
    what is wrong, in the colour of the frame.
    """
    if not len(images):
        return DescribedFigure(0.4).described("No image can be shown.")
    columns = min(columns, len(images))
    side = min(WIDTH / columns, 2.5)
    texts = [wrap(caption, side - 0.15, 6) for caption in captions]
    shown = f"{len(images)} image{'s' if len(images) > 1 else ''}"
    if marks:
        judged = [wrap(f"✗ {mark}" if mark else "✓ right", side - 0.15, 3) for mark in marks]
        texts = [f"{text}\n{mark}" for text, mark in zip(texts, judged, strict=True)]
        shown += f", {sum(not mark for mark in marks)} of them right"
    fig, axes = _grid(_chunks(images, columns), _chunks(texts, columns), side)
    for ax, mark in zip(axes.flat, marks or [], strict=False):
        ax.spines[:].set(visible=True, color=RED if mark else GREEN, linewidth=3)
        ax.xaxis.label.set_color(RED if mark else "0.1")
    return fig.described(f"{shown}: {_listed(texts)}.")


def before_after(
    before: Images, after: Images, prompts: Sequence[str], *, labels: tuple[str, str] = ("before", "after")
) -> DescribedFigure:
    """Pairs of images, one above the other, with their prompt underneath; six columns a band.

    By default, images of the same prompts before and after training; `labels` names the two rows.
    """
    columns = min(6, len(prompts))
    side = min(WIDTH / columns, 2.2)
    texts = [wrap(prompt, side - 0.2, 6) for prompt in prompts]
    rows, lines = [], []
    for above, below, under in zip(*(_chunks(values, columns) for values in (before, after, texts)), strict=True):
        rows += [above, below]
        lines += [[""] * len(above), under]
    fig, axes = _grid(rows, lines, side)
    for ax, (label, color) in zip(axes[:, 0], itertools.cycle(zip(labels, (GREY, BLUE), strict=True)), strict=False):
        ax.set_ylabel(label, fontsize=11, color=color)
    return fig.described(f"{len(prompts)} pairs of images, {labels[0]} and {labels[1]}: {_listed(prompts)}.")


def latents_panel(picture: np.ndarray, moments_2CHW: np.ndarray, reconstruction: np.ndarray) -> DescribedFigure:
    """An image, the mean and std of its latents by channel, and what the decoder makes of the mean.

    `moments_2CHW`: (2, channels, H, W), posterior mean and std, unscaled. PSNR in dB compares `reconstruction` with
    `picture`, both uint8 and of one size.
    """
    _, channels, height, width = moments_2CHW.shape
    fig = DescribedFigure(2 * (WIDTH - 0.6) / (channels + 1) + 0.6)
    axes = fig.subplots(2, channels + 1)
    mean_limit, std_limit = np.abs(moments_2CHW).max(axis=(1, 2, 3))  # shared by all channels
    scales = [
        ("mean", {"cmap": "RdBu_r", "vmin": -mean_limit, "vmax": mean_limit}),  # white is zero
        ("std", {"cmap": "Greys", "vmin": 0, "vmax": std_limit}),
    ]
    for row, moment_CHW, (name, scale) in zip(axes, moments_2CHW, scales, strict=True):
        for channel, (ax, values_HW) in enumerate(zip(row[1:], moment_CHW, strict=True)):
            shown = ax.imshow(values_HW, interpolation="nearest", **scale)
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"{name} {channel}", fontsize=10)
        fig.colorbar(shown, ax=row[1:], aspect=12, pad=0.02, label=name)
    error = np.mean((np.asarray(picture, float) - np.asarray(reconstruction, float)) ** 2)
    psnr = f"PSNR {10 * np.log10(255**2 / max(error, 1e-9)):.1f} dB"
    titles = f"image, {_size(picture)}", f"decoded, {psnr}"
    for ax, image, title in zip(axes[:, 0], (picture, reconstruction), titles, strict=True):
        show_image(ax, image)
        ax.set_title(title, fontsize=10)
    return fig.described(
        f"Image of {_size(picture)} and its latents, {channels} channels of {width} x {height}, as mean and std; "
        f"decoding the mean gives the image back with {psnr}."
    )


def nearest_neighbours(
    images: Images, neighbours: Images, nearest: pd.DataFrame, held_out: np.ndarray
) -> DescribedFigure:
    """The eight generated images that are nearest to a training image, above that image; and all distances.

    `images`, `neighbours`: one for each row of `nearest` (`memorisation.search`). `held_out`: distances of held-out
    rows to their nearest training rows. Images nearer than all but a share `NEAR` of these are framed in red.
    """
    columns = 8
    order = nearest["distance"].argsort(kind="stable").to_numpy()[:columns]
    height = 2 * WIDTH / columns * _aspect([images[number] for number in order]) + 0.6
    fig = DescribedFigure(height + 2.8)
    top, bottom = fig.subfigures(2, 1, height_ratios=[height, 2.8])
    grid = top.subplots(2, columns, squeeze=False)
    for ax in grid[:, len(order) :].flat:
        ax.set_axis_off()
    suspects = (nearest["nearer"] <= NEAR).to_numpy()
    for pair, number in zip(grid.T, order, strict=False):
        for ax, image in zip(pair, (images[number], neighbours[number]), strict=True):
            show_image(ax, image)
            if suspects[number]:
                ax.spines[:].set(visible=True, color=RED, linewidth=3)
        pair[1].set_xlabel(f"{nearest['distance'].iloc[number]:.2f}", fontsize=SMALL)
    grid[0, 0].set_ylabel("generated", fontsize=SMALL)
    grid[1, 0].set_ylabel("nearest in\ntraining data", fontsize=SMALL)
    ax = panels(bottom)
    ax.hist(held_out, 30, color=SKY, label=f"{len(held_out)} held-out rows")
    ax.plot(nearest["distance"], np.zeros(len(nearest)), "|", color="0.15", ms=24, mew=1.5)
    ax.set(xlabel="distance to the nearest training row (generated images: marks on the axis)", ylabel="rows", xlim=0)
    add_legend(ax)
    baseline = f"; of {len(held_out)} held-out rows {np.median(held_out):.2f}" if len(held_out) else ""
    median = nearest["distance"].median()
    return fig.described(
        f"Nearest training rows of {len(nearest)} generated images: median distance {median:.2f}{baseline}. "
        f"{suspects.sum()} are nearer than all but {NEAR:.0%} of the held-out rows."
    )


def _grid(rows: Sequence[Images], texts: Sequence[Sequence[str]], side: float) -> tuple[DescribedFigure, np.ndarray]:
    """`(figure, axes (rows, columns))` of rows of images with texts underneath; rows may end early.

    `side`: inches of a cell's width.
    """
    columns = max(map(len, rows))
    lines = [max(text.count("\n") + bool(text) for text in row) for row in texts]
    tall = (side - 0.1) * _aspect([image for row in rows for image in row])
    fig = DescribedFigure(sum(tall + LINE * most + 0.12 for most in lines), columns * side)
    axes = fig.subplots(len(rows), columns, squeeze=False)
    for row, row_texts, row_axes in zip(rows, texts, axes, strict=True):
        for ax in row_axes[len(row) :]:
            ax.set_axis_off()
        for ax, image, text in zip(row_axes, row, row_texts, strict=False):
            show_image(ax, image)
            ax.set_xlabel(text, fontsize=SMALL)
    return fig, axes


def _chunks(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _aspect(images: Images) -> float:
    """Height over width of the tallest image, clipped to what a row of a grid can show."""
    shapes = [np.asarray(image).shape for image in images]
    return float(np.clip(max(height / width for height, width, *_ in shapes), 0.3, 2))


def _size(image: Any) -> str:
    height, width = np.asarray(image).shape[:2]
    return f"{width} x {height} px"


def _listed(texts: Sequence[str], most: int = 12) -> str:
    texts = list(dict.fromkeys(texts))
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} more" if len(texts) > most else "")


# ---- a run's steps


def loss_curves(runs: Mapping[str, pd.DataFrame], *, consecutive: bool = False, x: str = "step") -> DescribedFigure:
    """Loss over steps: each step faint, the moving average strong.

    `runs`: label -> frame with step, loss; or, in place of the step, the column `x`. `consecutive`: each run starts
    from the weights of the one before, and its steps are counted on; a vertical line marks where it begins.
    """
    fig = DescribedFigure(3.8)
    ax, said, start = panels(fig, grid="both"), [], 0
    for number, (label, frame) in enumerate(runs.items()):
        steps, curve = frame[x] + start, frame["loss"].rolling(25, min_periods=1, center=True).mean()
        # Later runs are thinner, so that two which coincide are both seen.
        style = {"color": CYCLE[number % len(CYCLE)], "lw": 1.8 if number else 3.2, "ls": "--" if number else "-"}
        ax.plot(steps, frame["loss"], color=style["color"], alpha=0.25, lw=0.8)
        ax.plot(steps, curve, label=legend_label(label), **style)
        over = f"over {x.removesuffix('s')}s {steps.iloc[0]:,.0f} to {steps.iloc[-1]:,.0f}"
        said.append(f"{label}: from {curve.iloc[0]:.3g} to {curve.iloc[-1]:.3g} {over}")
        if start:
            _mark_step(ax, start, label)
        start = steps.iloc[-1] if consecutive else 0
    label_steps(ax, "loss")
    ax.set(xlabel=x, ylim=(0, None))
    add_legend(ax)
    return fig.described(f"Loss over {x.removesuffix('s')}s. {'; '.join(said)}.")


def interrupted_run(straight: pd.DataFrame, attempts: pd.DataFrame) -> DescribedFigure:
    """The loss of a run that lost workers, over that of one that did not, and the steps that were repeated.

    `straight`: frame with step, loss. `attempts`: frame with step, attempt, loss, all attempts of the interrupted run.
    """
    fig = DescribedFigure(3.8)
    ax, said, last = panels(fig, grid="both"), [], None
    ax.plot(straight["step"], straight["loss"], color="0.75", lw=5, label="not interrupted")
    for number, (attempt, rows) in enumerate(attempts.sort_values("step").groupby("attempt")):
        # Later attempts are dashed, so that the one below is seen.
        style = {"color": CYCLE[number % len(CYCLE)], "lw": 1.8, "ls": (0, (4, 3)) if number else "-"}
        ax.plot(rows["step"], rows["loss"], label=f"attempt {attempt}", **style)
        first = rows["step"].iloc[0]
        if last is not None:
            said.append(f"a worker is killed after step {last}")
            if last >= first:
                said.append(f"{last - first + 1} steps done again")
                ax.axvspan(first - 0.5, last + 0.5, color=RED, alpha=0.15, lw=0, label=said[-1])
            _mark_step(ax, last + 0.5, "a worker is killed", color=RED)
        last = rows["step"].iloc[-1]
    ax.set_ylim(0, None)
    label_steps(ax, "loss")
    add_legend(ax)
    return fig.described(
        f"Loss of an interrupted run over that of one that was not: {', '.join(said) or 'no failure'}."
    )


def _mark_step(ax: Axes, step: float, text: str, *, color: str = "0.2") -> None:
    """`text` along a vertical line at a step."""
    ax.axvline(step, color=color, ls=":", lw=1.2)
    box = {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5}
    across = {"xycoords": ax.get_xaxis_transform(), "rotation": 90, "va": "top"}  # y from 0, the bottom, to 1
    add_note(ax, text, (step, 1), (4, -4), color=color, bbox=box, **across)


def training_throughput(metrics: pd.DataFrame, rate: float, waiting: float) -> DescribedFigure:
    """images/s over steps, and the share of time that training waits for data.

    `metrics`: columns step, images_per_second (all workers together), data_wait_share (0 to 1). `rate`, `waiting`:
    those of the whole run, by `metrics.throughput`.
    """
    fig = DescribedFigure(3.6)
    top, bottom = panels(fig, 2, 1, sharex=True, height_ratios=(3, 2))
    rates, waits = metrics["images_per_second"], 100 * metrics["data_wait_share"]
    for ax, values, color in ((top, rates, BLUE), (bottom, waits, ORANGE)):
        ax.plot(metrics["step"], values, color=color, alpha=0.3, lw=0.8)
        ax.plot(metrics["step"], values.rolling(15, min_periods=1, center=True).median(), color=color, lw=2)
    title = f"{rate:,.0f} images/s; {waiting:.1%} of the time waiting for data"
    top.set(ylabel="images/s", ylim=(0, 1.15 * rates.quantile(0.99)), title=title)
    label_steps(bottom, "waits for data, %")
    bottom.set_ylim(0, np.clip(1.2 * waits.quantile(0.98), 10, 100))
    return fig.described(f"Training throughput over {len(metrics):,} steps: {title}.")


def iteration(phases: pd.DataFrame, memory: pd.DataFrame, *, published: str, device: str) -> DescribedFigure:
    """Where the time and, on a GPU, the memory of some steps go: each phase of a step in its colour.

    `phases`: columns phase (of `PHASES`), start, seconds. `memory`: columns second, gib; it is shown for the device
    "cuda", with a line where a step begins. A process on a CPU keeps what it has allocated. `published`: a sentence
    about the published run, printed underneath.
    """
    seconds = phases.groupby("phase", sort=False)["seconds"].sum()
    shares = 100 * seconds / seconds.sum()
    labels = [f"{phase} {share:.0f}%" for phase, share in shares.items()]
    said = f"Time of a training step: {', '.join(labels)}"
    if device == "cuda":
        fig = DescribedFigure(4.4)
        top, bottom = panels(fig, 2, 1, height_ratios=(4, 1))
        for phase in phases.itertuples():
            top.axvspan(phase.start, phase.start + phase.seconds, color=PHASES[phase.phase], alpha=0.35, lw=0)
        for start in phases.loc[phases["phase"] == phases["phase"].iloc[0], "start"]:
            top.axvline(start, color="0.3", lw=1)
        top.plot(memory["second"], memory["gib"], color="0.15", lw=1.2)
        title = f"memory allocated on the GPU: {memory['gib'].min():.2f} to {memory['gib'].max():.2f} GiB"
        end = (phases["start"] + phases["seconds"]).iloc[-1]
        top.set(xlabel="seconds", ylabel="GiB", xlim=(0, end), ylim=(0, None), title=title)
        said += f"; {title}"
    else:
        fig = DescribedFigure(1.6)
        bottom = panels(fig)
    colors = [PHASES[phase] for phase in shares.index]
    bottom.barh([0] * len(shares), shares, left=shares.cumsum() - shares, color=colors)
    bottom.set(yticks=[], xlim=(0, 100), xlabel="share of a step's time, %")
    patches = [Patch(color=color, label=label) for color, label in zip(colors, labels, strict=True)]
    add_legend(fig, handles=patches, loc="outside upper center", ncols=len(patches))
    fig.supxlabel(published, fontsize=SMALL, color="0.35")
    return fig.described(f"{said}.")


# ---- throughput


def timeline(runs: Mapping[str, pd.DataFrame]) -> DescribedFigure:
    """When the stages of a pipeline worked: a panel for each run, a row for each stage.

    `runs`: label -> frame with stage, start, seconds, a row for each task. Stages stand in the order of their first
    task.
    """
    stages = {label: list(frame.sort_values("start")["stage"].unique()) for label, frame in runs.items()}
    heights = [1 + len(names) for names in stages.values()]
    fig = DescribedFigure(0.3 + 0.3 * sum(heights))
    axes, said = panels(fig, len(runs), 1, grid="x", sharex=True, squeeze=False, height_ratios=heights), []
    for ax, (label, frame) in zip(axes.flat, runs.items(), strict=True):
        for row, stage in enumerate(stages[label]):
            tasks = frame.loc[frame["stage"] == stage, ["start", "seconds"]]
            ax.broken_barh(tasks.to_numpy(), (row - 0.35, 0.7), color=STAGES.get(stage, GREY), ec="white", lw=0.5)
            end = tasks.sum(axis=1).max()
            said.append(f"{label}, {stage}: {len(tasks)} tasks from {tasks['start'].min():.1f} to {end:.1f} s")
        ax.set(yticks=range(len(stages[label])), yticklabels=stages[label], ylim=(len(stages[label]) - 0.5, -0.5))
        ax.set_title(label, fontsize=10, loc="left")
    axes[-1, 0].set(xlabel="seconds", xlim=(0, None))
    return fig.described(f"When each stage worked. {'; '.join(said)}.")


def throughput_over_encoders(measured: pd.DataFrame, predicted: pd.DataFrame, *, ceiling: float) -> DescribedFigure:
    """Throughput over the number of encoders: what was measured, what is predicted, and the limit that trainers set.

    `measured` and `predicted`: columns num_encoders and images_per_second. `ceiling`: images/s of the trainers alone.
    """
    fig = DescribedFigure(3.8)
    ax = panels(fig, grid="both")
    limit = f"trainers alone: {ceiling:,.0f} images/s"
    # wide and pale, so that the prediction is seen where both coincide
    ax.axhline(ceiling, color=GREEN, lw=8, alpha=0.3, label=limit)
    label = "predicted: min(n x encoder, trainers)"
    columns = ["num_encoders", "images_per_second"]
    ax.plot(*predicted[columns].to_numpy().T, color="0.3", ls="--", marker=".", label=label)
    ax.plot(*measured[columns].to_numpy().T, "o", color=BLUE, ms=9, mec="white", zorder=3, label="measured")
    top = max(ceiling, measured["images_per_second"].max(), predicted["images_per_second"].max())
    ax.set(xlabel="encoders", ylabel="images/s", ylim=(0, 1.15 * top))
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    add_legend(ax, loc="lower right")
    said = ", ".join(f"{rate:,.0f} with {count}" for count, rate in measured[columns].itertuples(index=False))
    return fig.described(f"Images a second over the number of encoders. {limit}; measured: {said}.")


# ---- the model


def timestep_curves(curves: Mapping[str, Any], label: str) -> DescribedFigure:
    """Curves over the timesteps, from clean to noise. `curves`: name -> (T,) values. `label`: of the vertical axis."""
    fig = DescribedFigure(2.8)
    ax, said = panels(fig, grid="both"), []
    for name, values in curves.items():
        values = np.asarray(values, np.float64)
        ax.plot(values, lw=2, label=legend_label(name))
        said.append(f"{name} from {values[0]:.2f} at t = 0 to {values[-1]:.2f} at t = {len(values) - 1}")
    ax.set(xlabel="timestep t", ylabel=label, ylim=(0, None))
    add_legend(ax)
    return fig.described(f"Over the timesteps, {label}: {', '.join(said)}.")


# ---- comparisons


def paired_differences(results: pd.DataFrame, compared: pd.DataFrame) -> DescribedFigure:
    """Trials paired by seed. Left: the first metric, one line per seed. Right: differences with their intervals.

    `results`: columns setting, seed, metric, value (`trials.run`). `compared`: `trials.compare_settings` of them.
    Differences are in percent of the first setting's mean; one whose interval includes 0 may be chance.
    """
    names, metric = list(results["setting"].unique()), results["metric"].iloc[0]
    metrics, others = list(compared["metric"].unique()), names[1:]
    fig = DescribedFigure(max(3.2, 1.2 + 0.25 * len(metrics) * len(others)))
    left, right = panels(fig, 1, 2, width_ratios=[1, 2])
    values = results[results["metric"] == metric].pivot(index="seed", columns="setting", values="value")[names]
    left.plot(range(len(names)), values.T, "o-", color="0.6", lw=1)
    left.set(xticks=range(len(names)), xticklabels=map(drawable, names), xlim=(-0.4, len(names) - 0.6))
    left.set_ylabel(f"{metric} (axis is cut)")
    left.set_title(f"{len(values)} seeds, a line each", fontsize=SMALL)
    right.axvline(0, color="0.3", lw=1)
    for number, (name, color) in enumerate(zip(others, itertools.cycle(CYCLE), strict=False)):
        rows = compared[compared["setting"] == name].set_index("metric").loc[metrics]
        low, middle, high = (100 * rows[column] / rows["baseline"].abs() for column in ("low", "difference", "high"))
        heights = np.arange(len(metrics)) + 0.2 * (number - (len(others) - 1) / 2)
        style = {"fmt": "o", "color": color, "capsize": 3, "label": legend_label(name)}
        right.errorbar(middle, heights, xerr=[middle - low, high - middle], **style)
    right.set(yticks=range(len(metrics)), yticklabels=map(drawable, metrics), xlabel=f"difference from {names[0]}, %")
    right.invert_yaxis()
    add_legend(right, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(others))
    said = [
        f"{row.setting}, {row.metric}: {row.difference:.3g} ({row.low:.3g} to {row.high:.3g})"
        for row in compared.itertuples()
    ]
    return fig.described(f"Differences from {names[0]} over {len(values)} seeds: {'; '.join(said)}.")


def guidance_curve(tables: pd.DataFrame | Mapping[str, pd.DataFrame]) -> DescribedFigure:
    """CMMD, a distance from real images, against the CLIP score, along guidance scales.

    `tables`: what `generation.guidance_sweep` returned, or {name: table} of several models or checkpoints. Each point
    is labelled with its guidance scale; down and to the right is better.
    """
    tables = {"this model": tables} if isinstance(tables, pd.DataFrame) else tables
    fig = DescribedFigure(4.2, width=7)
    ax, said = panels(fig, grid="both"), []
    for (name, table), color in zip(tables.items(), itertools.cycle(CYCLE), strict=False):
        points = table.sort_values("guidance_scale")[["guidance_scale", "clip_score", "cmmd"]]
        ax.plot(points["clip_score"], points["cmmd"], "o-", color=color, label=legend_label(name))
        for number, (scale, score, value) in enumerate(points.itertuples(index=False)):
            offset = (5, 4) if number % 2 else (-10, -13)  # neighbours on the curve may lie close to each other
            add_note(ax, f"{scale:g}", (score, value), offset)
            said.append(f"{name}, {scale:g}: {score:.1f}, {value:.3g}")
    ax.margins(0.08)
    ax.set(xlabel="CLIP score, higher is better (axis is cut)", ylabel="CMMD, lower is better", ylim=(0, None))
    if len(tables) > 1:
        ax.legend(frameon=False)
    return fig.described(f"CMMD against CLIP score by guidance scale: {'; '.join(said)}.")


# ---- a run over time


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
                for number, prompt in enumerate(storage.read_json(prompts, shape=list))
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
    top = 1.3 * np.nanquantile(metrics["loss"].astype(float), 0.98)
    ax.set_ylim(0, top)
    add_legend(ax)
    label_steps(ax, "loss" if metrics["loss"].max() <= top else "loss (first steps lie above)", most_ticks=4)
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
    ax.set(xlabel="timestep (noise level)", ylabel="loss by noise level", ylim=(0, None))
    add_legend(ax)
    first, last = known.iloc[0][columns], known.iloc[-1][columns]
    return f"by noise level from {first.min():.3g} to {first.max():.3g} at first, {last.min():.3g} to {last.max():.3g}"


def draw_score(ax: Axes, scores: pd.DataFrame, column: str) -> str:
    """A score at each checkpoint that has it. Returns the first and the last in words."""
    label, color = SCORES[column]
    known = scores.dropna(subset=[column])
    ax.plot(known["step"], known[column], "o-", color=color, ms=4)
    if column == "clip_score":  # of any image and caption it is far from 0
        label += " (axis is cut)"
    else:
        ax.set_ylim(0, None)
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
