"""Figures of the notebooks, drawn from plain arrays and frames. Needs only numpy, pandas and matplotlib.

Each function returns a `DescribedFigure`: as the last expression of a cell, or by `display`, it is shown once, with an
alternative text that says what is on it. Figures are about 10 inches wide at 100 dpi. Pictures are (H, W, 3) uint8
arrays or PIL images. ValueError for what cannot be drawn.
"""

import itertools

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.patches import Patch

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


def _vertical_note(ax, x, text, *, color="0.2"):
    """`text` along a vertical line at `x`."""
    ax.axvline(x, color=color, ls=":", lw=1.2)
    where = {"xycoords": ax.get_xaxis_transform(), "xytext": (4, -4), "textcoords": "offset points"}
    style = {"fontsize": SMALL, "color": color, "bbox": {"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5}}
    ax.annotate(text, (x, 1), rotation=90, va="top", parse_math=False, **where, **style)


def stage_throughput(frame):
    """Points of images/s by stage. `frame`: columns stage, images_per_second (all workers together), workers."""
    frame = _frame(frame, "the stages' frame", "stage", "images_per_second", "workers")
    rates = frame["images_per_second"].to_numpy(float)
    fig = DescribedFigure(0.9 + 0.42 * len(frame))
    ax = _axes(fig, grid="x")
    labels = []
    for row, (stage, rate, workers) in enumerate(zip(frame["stage"], rates, frame["workers"], strict=True)):
        slowest = rate == rates.min()
        labels.append(f"{rate:,.0f} images/s, {workers} worker{'s' if workers != 1 else ''}")
        labels[-1] += "  ◀ bottleneck" if slowest else ""
        color = next((c for word, c in STAGES.items() if word in str(stage).lower()), GREY)
        ax.plot(rate, row, "o", color=color, ms=11, mec=RED if slowest else "white", mew=2)
        where = {"xytext": (10, 0), "textcoords": "offset points", "va": "center"}
        ax.annotate(labels[-1], (rate, row), color=RED if slowest else "0.2", **where)
    ax.set(yticks=range(len(frame)), yticklabels=frame["stage"], ylim=(len(frame) - 0.5, -0.5))
    # Writing is a hundred times faster than encoding; points, as a bar's length has no meaning on a log scale.
    ax.set(xscale="log", xlim=(rates.min() / 2, rates.max() * 30))
    ax.set_xlabel("images/s, all workers of a stage together (log scale)")
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


def _grid(rows, texts, side):
    """`(figure, axes (rows, columns))` of rows of pictures with wrapped texts underneath; rows may end early.

    `side`: inches of a cell's width.
    """
    columns = max(map(len, rows))
    lines = [max(text.count("\n") + bool(text) for text in line) for line in texts]
    tall = (side - 0.1) * _aspect([picture for row in rows for picture in row])
    fig = DescribedFigure(sum(tall + LINE * most + 0.12 for most in lines), columns * side)
    axes = fig.subplots(len(rows), columns, squeeze=False)
    for row, line, places in zip(rows, texts, axes, strict=True):
        for ax in places[len(row) :]:
            ax.set_axis_off()
        for ax, picture, text in zip(places, row, line, strict=False):
            _show(ax, picture)
            ax.set_xlabel(text, fontsize=SMALL, parse_math=False)
    return fig, axes


def _chunks(values, size):
    return [values[start : start + size] for start in range(0, len(values), size)]


def pictures(images, captions=None, *, marks=None, columns=6):
    """A grid of pictures with captions underneath (cut after six lines).

    `marks`: for each picture what is wrong with it, "" where nothing is. Below the caption stands a check mark, or a
    cross and what is wrong, in the colour of the frame.
    """
    images = list(images)
    if not images:
        raise ValueError("images is empty: give at least one picture.")
    for name, given in (("captions", captions), ("marks", marks)):
        if given is not None and len(given) != len(images):
            raise ValueError(f"{len(images)} pictures and {len(given)} {name}: give as many of each.")
    columns = min(columns, len(images))
    side = min(WIDTH / columns, 2.5)
    texts = [_wrap(caption, side - 0.15, 6) for caption in captions or [""] * len(images)]
    if marks is not None:
        said = [f"✗ {mark}" if mark else "✓ right" for mark in marks]
        texts = [f"{text}\n{_wrap(mark, side - 0.15, 3)}".strip() for text, mark in zip(texts, said, strict=True)]
    fig, axes = _grid(_chunks(images, columns), _chunks(texts, columns), side)
    shown = f"{len(images)} picture{'s' if len(images) > 1 else ''}"
    if marks is not None:
        for ax, mark in zip(axes.flat, marks, strict=False):
            ax.spines[:].set(visible=True, color=RED if mark else GREEN, linewidth=3)
            ax.xaxis.label.set_color(RED if mark else "0.1")
        shown += f", {sum(not mark for mark in marks)} of them right"
    return fig.described(shown + (f": {_listed(texts)}." if any(texts) else "."))


def transform_steps(steps):
    """A picture after each of some steps, all drawn at the same scale. `steps`: name -> picture; titles give sizes."""
    if not steps:
        raise ValueError("steps is empty: give at least one name and picture.")
    across = [np.asarray(picture).shape[1] for picture in steps.values()]
    shares = np.maximum(across, 0.15 * max(across))  # a title needs some room
    tall = max(np.asarray(picture).shape[0] for picture in steps.values()) / sum(shares)
    fig = DescribedFigure(min(0.6 + WIDTH * tall, 5))
    for ax, (name, picture) in zip(_axes(fig, 1, len(steps), width_ratios=shares), steps.items(), strict=True):
        _show(ax, picture)
        ax.set_anchor("N")
        ax.set_title(f"{_wrap(name, 1.5, 2)}\n{_size(picture)}", fontsize=10, parse_math=False)
    made = ", then ".join(f"{name} ({_size(picture)})" for name, picture in steps.items())
    return fig.described(f"A picture {made}, at the same scale.")


def latents_panel(picture, moments_2CHW, reconstruction):
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
        fig.colorbar(shown, ax=axes[row, 1:], aspect=12, pad=0.02)
    error = np.mean((np.asarray(picture, np.float64) - np.asarray(reconstruction, np.float64)) ** 2)
    psnr = f"PSNR {10 * np.log10(255**2 / max(error, 1e-9)):.1f} dB"
    for ax, shown, name in ((axes[0, 0], picture, _size(picture)), (axes[1, 0], reconstruction, psnr)):
        _show(ax, shown)
        ax.set_title(f"picture, {name}" if shown is picture else f"decoded mean, {name}", fontsize=10)
    return fig.described(
        f"Picture of {_size(picture)} and its latents, {channels} channels of {width} x {height}, as mean and std; "
        f"decoding the mean gives the picture back with {psnr}."
    )


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
    side = min(WIDTH / columns, 2.2)
    rows, texts = [], []
    for band in _chunks(range(len(prompts)), columns):
        rows += [[before[number] for number in band], [after[number] for number in band]]
        texts += [[""] * len(band), [_wrap(prompts[number], side - 0.2, 6) for number in band]]
    fig, axes = _grid(rows, texts, side)
    for number, ax in enumerate(axes[:, 0]):
        label = labels[number % 2]
        ax.set_ylabel(label, fontsize=11, color=_label_color(label))
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


def block_costs(frame):
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


def loss_curves(runs, *, smooth=25, marks=()):
    """Loss over steps: each step faint, the mean over `smooth` steps strong.

    `runs`: label -> frame with step, loss. `marks`: (step, text) pairs, drawn as vertical lines. Of a step that was
    repeated the last row counts.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one label and frame.")
    fig = DescribedFigure(3.8)
    ax = _axes(fig, grid="both")
    said = []
    for number, (label, frame) in enumerate(runs.items()):
        frame = _last_attempt(frame, f"run {label!r}", "loss")
        curve, color = frame["loss"].rolling(smooth, min_periods=1, center=True).mean(), _label_color(label, number)
        # Later runs are thinner, so that two which coincide are both seen.
        style = {"lw": max(3.2 - 1.4 * number, 1.4), "ls": "-" if number == 0 else "--"}
        ax.plot(frame["step"], frame["loss"], color=color, alpha=0.25, lw=0.8)
        ax.plot(frame["step"], curve, color=color, label=label, **style)
        steps = f"steps {frame['step'].iloc[0]:,} to {frame['step'].iloc[-1]:,}"
        said.append(f"{label}: from {curve.iloc[0]:.3g} to {curve.iloc[-1]:.3g} over {steps}")
    for step, text in marks:
        _vertical_note(ax, step, text)
        said.append(f"{text} at step {step:,}")
    _whole_steps(ax, ylabel="loss")
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


def training_throughput(metrics, rate, waiting):
    """images/s over steps, and the share of time that training waits for data.

    `metrics`: columns step, images_per_second (all workers together), data_wait_share (0 to 1). `rate`, `waiting`: of
    the whole run, as `metrics.throughput(metrics)` gives them, for the title.
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


def _stacked_bars(ax, table, colors):
    """A bar a row of `table` (column -> share, 0 to 1), split into its columns, each in its colour."""
    names, left = [str(name) for name in table.index], 0.0
    for column in table:
        ax.barh(names, 100 * table[column], left=left, color=colors[column], label=column)
        left = left + 100 * table[column]
    ax.set(xlim=(0, 100))
    ax.invert_yaxis()


def _said_shares(table):
    """Each row of a table of shares in words."""
    rows = [", ".join(f"{name} {share:.0%}" for name, share in row.items()) for _, row in table.iterrows()]
    return "; ".join(f"{name}: {row}" for name, row in zip(table.index, rows, strict=True))


def iteration(phases, memory, *, published=None, device="cpu"):
    """Where the time and the memory of some steps go: memory over time, each phase of a step in its colour.

    `phases`: columns phase (of `PHASES`), start, seconds. `memory`: columns second, gib. `published`: a sentence about
    the published run, printed underneath. The memory axis does not start at zero: what the weights always take would
    hide what changes within a step.
    """
    phases = _frame(phases, "the phases' frame", "phase", "start", "seconds")
    memory = _frame(memory, "the memory's frame", "second", "gib")
    seconds = phases.groupby("phase", sort=False)["seconds"].sum()
    fig = DescribedFigure(4.4)
    top, bottom = _axes(fig, 2, 1, height_ratios=(4, 1))
    for phase in phases.itertuples():
        top.axvspan(phase.start, phase.start + phase.seconds, color=PHASES[phase.phase], alpha=0.35, lw=0)
    top.plot(memory["second"], memory["gib"], color="0.15", lw=1.2)
    what = "allocated on the GPU" if device == "cuda" else "of the process (resident set)"
    peak, low = memory["gib"].max(), memory["gib"].min()
    room = 0.1 * max(peak - low, 0.05 * peak)
    title = f"memory {what}: {low:.2f} to {peak:.2f} GiB"
    end = float((phases["start"] + phases["seconds"]).iloc[-1])
    top.set(xlabel="seconds", ylabel="GiB", xlim=(0, end), ylim=(low - room, peak + room), title=title)
    table = pd.DataFrame((seconds / seconds.sum()).rename("a step")).T
    _stacked_bars(bottom, table, PHASES)
    bottom.set(yticks=[], xlabel="share of a step's time, %")
    labels = [f"{name} {share:.0%}" for name, share in table.iloc[0].items()]
    legend = [Patch(color=PHASES[name], label=label) for name, label in zip(table, labels, strict=True)]
    fig.legend(handles=legend, loc="outside upper center", ncols=len(legend), frameon=False, fontsize=SMALL)
    if published:
        fig.supxlabel(published, fontsize=SMALL, color="0.35")
    return fig.described(f"Time of a training step: {_said_shares(table)}; {title}.")


def throughput_over_encoders(measured, predicted, *, ceiling, others="trainers"):
    """Throughput over the number of encoders: what was measured, what is predicted, and the limit that others set.

    `measured` and `predicted`: frames with num_encoders and images_per_second. `ceiling`: images/s of the `others`
    alone: of the trainers online, of the transforms in preprocessing.
    """
    columns = ("num_encoders", "images_per_second")
    measured, predicted = (
        _frame(frame, name, *columns) for frame, name in ((measured, "measured"), (predicted, "the prediction"))
    )
    fig = DescribedFigure(3.8)
    ax = _axes(fig, grid="both")
    # wide and pale, so that the prediction is seen where both coincide
    ax.axhline(ceiling, color=GREEN, lw=8, alpha=0.3, label=f"{others} alone: {ceiling:,.0f} images/s")
    label = f"predicted: min(n x encoder, {others})"
    ax.plot(predicted["num_encoders"], predicted["images_per_second"], color="0.3", ls="--", marker=".", label=label)
    style = {"color": BLUE, "marker": "o", "ms": 9, "mec": "white"}
    ax.plot(measured["num_encoders"], measured["images_per_second"], ls="", zorder=3, label="measured", **style)
    top = max(ceiling, measured["images_per_second"].max(), predicted["images_per_second"].max())
    ax.set(xlabel="encoders", ylabel="images/s", ylim=(0, 1.15 * top))
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize=SMALL, loc="lower right")
    said = ", ".join(f"{rate:,.0f} with {count}" for count, rate in measured[list(columns)].itertuples(index=False))
    return fig.described(
        f"Images a second over the number of encoders. {others} alone allow {ceiling:,.0f} images/s; measured: {said}."
    )


def bandwidth_by_size(table, *, expected=None):
    """Bus bandwidth over the size of the message, one line a collective.

    `table`: columns collective, bytes, "bus bandwidth, GB/s" (`network.measure_bandwidth`). `expected`: label -> GB/s.
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

    `table`: one row a run, with columns data, communication, checkpoints (0 to 1): `metrics.speed_summary`.
    """
    lost = _frame(table, "table", "data", "communication", "checkpoints").fillna(0.0)
    names = {"data": "waits for data", "communication": "communication", "checkpoints": "checkpoints"}
    lost = lost[list(names)].rename(columns=names)
    lost.insert(0, "computes", 1 - lost.sum(axis=1))
    fig = DescribedFigure(1.1 + 0.4 * len(lost))
    ax = _axes(fig, grid="x")
    _stacked_bars(ax, lost, dict(zip(lost, (BLUE, ORANGE, PURPLE, GREEN), strict=True)))
    ax.set(xlabel="% of the time")
    fig.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=SMALL)
    return fig.described(f"Where the time of runs goes: {_said_shares(lost)}.")


def agreement_by_attribute(scores, *, goal):
    """Share of pictures that show what their prompt says, by attribute; "all" (every attribute right) set apart.

    `scores`: label -> attribute -> share (0 to 1), with "all" last. `goal`: a share, for "all".
    """
    if not scores or not all(scores.values()):
        raise ValueError("scores is empty: give at least one label with one attribute's share.")
    attributes = [name for name in next(iter(scores.values())) if name != "all"]
    positions = {**{name: float(place) for place, name in enumerate(attributes)}, "all": len(attributes) + 0.5}
    fig = DescribedFigure(3.4)
    ax = _axes(fig)
    wide = 0.8 / len(scores)
    for number, (label, shares) in enumerate(scores.items()):
        shift = (number - (len(scores) - 1) / 2) * wide
        places, heights = [positions[name] + shift for name in shares], [100 * share for share in shares.values()]
        bars = ax.bar(places, heights, 0.94 * wide, color=_label_color(label, number), label=label)
        ax.bar_label(bars, [f"{height:.0f}" for height in heights], padding=2, fontsize=SMALL)
    ax.axvline(len(attributes) - 0.25, color="0.8")
    middle = positions["all"]
    ax.plot([middle - 0.5, middle + 0.5], [100 * goal] * 2, color=RED, ls="--", lw=1.6)
    where = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
    ax.annotate(f"goal {100 * goal:.0f} %", (middle + 0.5, 100 * goal), fontsize=SMALL, color=RED, **where)
    ax.set(ylabel="pictures that agree, %", ylim=(0, 108), yticks=range(0, 101, 20))
    ax.set(xticks=list(positions.values()), xticklabels=list(positions))
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(scores), borderaxespad=0)
    said = [f"{label} {', '.join(f'{k} {v:.0%}' for k, v in shares.items())}" for label, shares in scores.items()]
    return fig.described(f"Share of pictures that agree with their prompt: {'; '.join(said)}.")


# ---- trials, preferences, memorisation


def paired_differences(results, compared):
    """Trials paired by seed. Left: the first metric, one line per seed. Right: differences with their intervals.

    `results`: columns setting, seed, metric, value (`trials.run`). `compared`: `trials.compare_settings` of them.
    Differences are in percent of the first setting's mean; one whose interval includes 0 may be chance.
    """
    names, metric = list(dict.fromkeys(results["setting"])), results["metric"].iloc[0]
    metrics, others = list(dict.fromkeys(compared["metric"])), names[1:]
    fig = DescribedFigure(max(3.2, 1.2 + 0.25 * len(metrics) * len(others)))
    by_seed, right = _axes(fig, 1, 2, width_ratios=[1, 2])
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
    ax, said = _axes(fig, grid="x"), []
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
    height = 2 * WIDTH / columns * _aspect([pictures[number] for number in order]) + 0.6
    fig = DescribedFigure(height + 2.8)
    top, bottom = fig.subfigures(2, 1, height_ratios=[height, 2.8])
    grid = top.subplots(2, columns, squeeze=False)
    for ax in grid[:, len(order) :].flat:
        ax.set_axis_off()
    suspects = (nearest["nearer"] <= near).to_numpy()
    for (above, below), number in zip(grid.T, order, strict=False):
        _show(above, pictures[number])
        _show(below, neighbours[number])
        below.set_xlabel(f"{nearest['distance'].iloc[number]:.2f}", fontsize=SMALL)
        if suspects[number]:
            for ax in (above, below):
                ax.spines[:].set(visible=True, color=RED, linewidth=3)
    grid[0, 0].set_ylabel("generated", fontsize=SMALL)
    grid[1, 0].set_ylabel("nearest in\ntraining data", fontsize=SMALL)
    ax = _axes(bottom)
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


def guidance_curve(tables):
    """CMMD to real pictures against the CLIP score, along guidance scales.

    `tables`: what `generation.guidance_sweep` returned, or {name: table} of several models or checkpoints. Each point
    is labelled with its guidance scale; down and to the right is better. Raises ValueError for a table without CMMD.
    """
    tables = tables if isinstance(tables, dict) else {"this model": tables}
    fig = DescribedFigure(4.2, width=7)
    ax, said = _axes(fig, grid="both"), []
    for (name, table), color in zip(tables.items(), itertools.cycle(CYCLE), strict=False):
        if "cmmd" not in table:
            raise ValueError("A sweep has no column 'cmmd': give guidance_sweep real pictures to compare with.")
        table = table.sort_values("guidance_scale")
        ax.plot(table["clip_score"], table["cmmd"], "o-", color=color, label=name)
        for number, (scale, score, value) in enumerate(table[["guidance_scale", "clip_score", "cmmd"]].to_numpy()):
            offset = (5, 4) if number % 2 else (-10, -13)  # neighbours on the curve may lie close to each other
            ax.annotate(f"{scale:g}", (score, value), offset, textcoords="offset points", fontsize=SMALL)
            said.append(f"{name}, {scale:g}: {score:.1f}, {value:.3g}")
    ax.margins(0.08)
    ax.set(xlabel="CLIP score", ylabel="CMMD")
    if len(tables) > 1:
        ax.legend(frameon=False)
    return fig.described(f"CMMD against CLIP score by guidance scale: {'; '.join(said)}.")
