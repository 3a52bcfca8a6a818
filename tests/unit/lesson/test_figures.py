"""The notebooks' figures: what each shows, its alternative text, what cannot be drawn; the diagram of the pipeline."""

import inspect
import pathlib
import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

from helpers.lesson import architecture, figures

matplotlib.use("Agg")
RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)
CAPTION = "a large red circle in the top left on a blue background"
STAGES = pd.DataFrame(
    {"stage": ["read", "encode", "write"], "images_per_second": [9000, 300, 5000], "workers": [1, 2, 1]}
)
TIMELINE = pd.DataFrame({"seconds": [5.0, 6, 7], "busy": [0.9, 0.96, 1.0], "images_per_second": [500.0, 600, 610]})
BLOCKS = pd.DataFrame({"block": ["down", "mid"], "parameters": [865_910_724, 500e3], "gflops": [0.1, 0.25]})
RUN = pd.DataFrame({"step": range(1, 101), "loss": np.linspace(1, 0.1, 100)})
METRICS = RUN.assign(images_per_second=600.0, data_wait_share=0.02)
SCORES = {"before": {"color": 0.1, "shape": 0.3, "all": 0.0}, "after": {"color": 1.0, "shape": 0.9, "all": 0.88}}
ALPHAS = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
ATTEMPTS = pd.concat([RUN[:45].assign(attempt=1), RUN[25:].assign(attempt=2)])
PHASES = pd.DataFrame(
    {"phase": ["data", "encode", "forward"] * 2, "start": [0, 0.1, 0.5, 1, 1.1, 1.5], "seconds": [0.1, 0.4, 0.5] * 2}
)
MEMORY = pd.DataFrame({"second": np.linspace(0, 2, 50), "gib": np.linspace(0.5, 0.7, 50)})
ENCODERS = pd.DataFrame({"num_encoders": [1, 2, 4], "images_per_second": [100.0, 200, 350]})
NETWORK = pd.DataFrame({"collective": "all-reduce", "bytes": [2**20, 2**24], "bus bandwidth, GB/s": [0.5, 2.0]})
SHARES = pd.DataFrame({"data": [0.1, 0.2], "communication": [0.3, np.nan], "checkpoints": [0.0, 0.1]}, index=["a", "b"])
STEPS = {"decoded": np.zeros((30, 50, 3), np.uint8), "square": np.zeros((8, 8, 3), np.uint8)}
# Each figure with what its alternative text says.
EVERY = {
    "bandwidth_by_size": (
        lambda: figures.bandwidth_by_size(NETWORK, expected={"EFA": 50.0}),
        "all-reduce 2 GB/s at most",
    ),
    "pictures": (
        lambda: figures.pictures([PICTURE, PICTURE[..., 0]] * 4, [CAPTION] * 8, marks=["", "not a circle"] * 4),
        "8 pictures, 4 of them right",
    ),
    "transform_steps": (lambda: figures.transform_steps(STEPS), "decoded (50 x 30 px), then square (8 x 8 px)"),
    "latents_panel": (
        lambda: figures.latents_panel(PICTURE // 2, RNG.normal(size=(2, 4, 2, 2)), PICTURE // 2 + np.uint8(16)),
        "4 channels of 2 x 2, as mean and std; decoding the mean gives the picture back with PSNR 24.0 dB",
    ),
    "stage_throughput": (lambda: figures.stage_throughput(STAGES), "encode: 300 images/s, 2 workers, the bottleneck"),
    "encoder_utilization": (
        lambda: figures.encoder_utilization(TIMELINE.assign(encoders=[1, 2, 3])),
        "Over 2 seconds encoders compute for 96% of their time (median), at 600 images/s; 1 to 3 encoders",
    ),
    "noise_schedule_curves": (lambda: figures.noise_schedule_curves(ALPHAS, min_snr_gamma=5), "from 1.00 to 0.07"),
    "block_costs": (lambda: figures.block_costs(BLOCKS), "down: 866 M parameters, 100 M FLOPs; mid: 500 k parameters"),
    "interrupted_run": (
        lambda: figures.interrupted_run(RUN, ATTEMPTS),
        "a worker is killed after step 45, 20 steps done again",
    ),
    "loss_curves": (lambda: figures.loss_curves({"training": RUN}), "from 0.945 to 0.155 over steps 1 to 100"),
    "training_phases": (
        lambda: figures.training_phases({"32 px": RUN[:30], "64 px": RUN[:10]}),
        "64 px: from 0.968 to 0.95 over steps 31 to 40; 64 px at step 30",
    ),
    "training_throughput": (
        lambda: figures.training_throughput(METRICS, 600, 0.02),
        "600 images/s; 2.0% of the time waiting for data",
    ),
    "before_after": (
        lambda: figures.before_after([PICTURE] * 8, [PICTURE] * 8, [CAPTION] * 8),
        "8 pairs of pictures, before and after: a large red circle",
    ),
    "iteration": (
        lambda: figures.iteration(PHASES, MEMORY, published="documents: 39 %"),
        "data 10%, encode 40%, forward 50%; memory of the process (resident set): 0.50 to 0.70 GiB",
    ),
    "throughput_over_encoders": (
        lambda: figures.throughput_over_encoders(ENCODERS[:2], ENCODERS, ceiling=350),
        "trainers alone allow 350 images/s; measured: 100 with 1, 200 with 2",
    ),
    "agreement_by_attribute": (
        lambda: figures.agreement_by_attribute(SCORES, goal=0.85),
        "after color 100%, shape 90%, all 88%",
    ),
    "time_shares": (
        lambda: figures.time_shares(SHARES),
        "a: computes 60%, waits for data 10%, communication 30%, checkpoints 0%; b: computes 70%",
    ),
}


def line(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


def test_every_figure_is_tested_here():
    functions = inspect.getmembers(figures, inspect.isfunction)
    elsewhere = {"paired_differences", "preferences", "nearest_neighbours", "guidance_curve"}
    assert {name for name, f in functions if f.__module__ == figures.__name__ and name[0] != "_"} == set(
        EVERY
    ) | elsewhere


@pytest.mark.parametrize(("draw", "said"), EVERY.values(), ids=EVERY)
def test_a_figure_is_a_png_whose_alternative_text_says_what_it_shows(draw, said):
    """It draws without warnings, once (what pyplot holds, a notebook draws again), and leaves settings alone."""
    settings = matplotlib.rcParams.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data, metadata = draw()._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    alt = metadata["image/png"]["alt"]
    assert said in alt and alt.endswith(".") and "\n" not in alt and alt == data["text/plain"]
    assert plt.get_fignums() == [] and matplotlib.rcParams == settings


def test_a_notebook_output_keeps_the_alternative_text():
    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type(matplotlib.figure.Figure, lambda fig: b"PNG")  # as the inline backend
    data, metadata = formatter.format(figures.loss_curves({"training": RUN}))
    assert data["image/png"] == b"PNG" and metadata["image/png"]["alt"] == data["text/plain"]


@pytest.mark.parametrize("caption", ["costs $5, not $6", "中文 🫠", "", "word " * 300, "x" * 500, r"\frac{ $ _^"])
def test_any_caption_can_be_drawn(caption):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = figures.pictures([PICTURE] * 2, [caption, "short"])
        fig.canvas.draw()
    assert all(ax.get_window_extent().width > 50 for ax in fig.axes)  # text has not squeezed the pictures away


def test_pictures_say_in_text_what_is_wrong():
    fig = figures.pictures([PICTURE] * 3, ["a", "b", "c"], marks=["", "not a circle", ""])
    assert [ax.get_xlabel() for ax in fig.axes] == ["a\n✓ right", "b\n✗ not a circle", "c\n✓ right"]


def test_before_and_after_stand_above_each_other_in_bands():
    before, after = (np.full((8, 4, 4, 3), value, np.uint8) for value in (10, 200))
    fig = figures.before_after(before, after, [f"prompt {number}" for number in range(8)])
    shown = [ax for ax in fig.axes if ax.images]
    assert [ax.get_xlabel() for ax in shown if ax.get_xlabel()] == [f"prompt {number}" for number in range(8)]
    assert {ax.images[0].get_array().max() for ax in shown if ax.get_xlabel()} == {200}
    assert [ax.get_ylabel() for ax in shown if ax.get_ylabel()] == ["before", "after"] * 2


def test_steps_are_drawn_at_one_scale():
    fig = figures.transform_steps(
        {"decoded": np.zeros((64, 96, 3), np.uint8), "small": np.zeros((32, 32, 3), np.uint8)}
    )
    fig.canvas.draw()
    wide, small = (ax.get_window_extent() for ax in fig.axes)
    assert wide.width / small.width == pytest.approx(3, rel=0.1)
    assert wide.height / small.height == pytest.approx(2, rel=0.1)


def test_latents_share_one_scale_around_zero():
    moments = RNG.normal(size=(2, 4, 2, 2))
    moments[0, 0, 0, 0] = -9
    fig = figures.latents_panel(PICTURE, moments, PICTURE)
    means = [ax.images[0] for ax in fig.axes if ax.get_title().startswith("mean")]
    assert len(means) == 4 and {image.get_clim() for image in means} == {(-9.0, 9.0)}


def test_noise_schedule_draws_signal_noise_and_their_ratio():
    left, right = figures.noise_schedule_curves(ALPHAS, min_snr_gamma=5).axes
    signal, noise = (curve.get_ydata() for curve in left.lines)
    np.testing.assert_allclose(signal**2 + noise**2, 1)
    np.testing.assert_allclose(10 ** right.lines[0].get_ydata(), ALPHAS / (1 - ALPHAS))
    assert right.lines[1].get_ydata()[0] == pytest.approx(np.log10(5))
    figures.noise_schedule_curves(np.linspace(1, 0, 11)).canvas.draw()  # zero terminal SNR


def test_of_a_step_that_was_redone_the_last_row_counts():
    redone = pd.DataFrame({"step": [1, 2, 3, 2, 3], "loss": [3.0, 9.0, 9.0, 2.0, 1.0]})
    curve = line(figures.loss_curves({"a": redone}, smooth=1).axes[0], "a")
    assert curve.get_xdata().tolist() == [1, 2, 3] and curve.get_ydata().tolist() == [3, 2, 1]


def test_agreement_sets_all_apart_and_draws_its_goal():
    ax = figures.agreement_by_attribute(SCORES, goal=0.85).axes[0]
    heights = [bar.get_height() for container in ax.containers for bar in container]
    assert heights == pytest.approx([10, 30, 0, 100, 90, 88])
    assert any(list(curve.get_ydata()) == [85, 85] for curve in ax.lines)


def test_bars_of_shares_are_full():
    (ax,) = figures.time_shares(SHARES).axes
    assert np.array([bar.get_width() for bar in ax.patches]).reshape(4, 2).sum(axis=0) == pytest.approx([100, 100])


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: figures.pictures([]), "images is empty"),
        (lambda: figures.pictures([PICTURE], ["a", "b"]), "1 pictures and 2 captions"),
        (lambda: figures.pictures([PICTURE], marks=[]), "1 pictures and 0 marks"),
        (lambda: figures.transform_steps({}), "steps is empty"),
        (lambda: figures.latents_panel(PICTURE, np.zeros((8, 2, 2)), PICTURE), "(8, 2, 2)"),
        (lambda: figures.before_after([PICTURE], [], ["a"]), "0 after"),
        (lambda: figures.noise_schedule_curves([2.0]), "alphas_cumprod"),
        (lambda: figures.block_costs(BLOCKS.drop(columns="gflops")), "'gflops'"),
        (lambda: figures.loss_curves({}), "runs is empty"),
        (lambda: figures.loss_curves({"mine": RUN[:0]}), "run 'mine' has no rows"),
        (lambda: figures.agreement_by_attribute({}, goal=1), "scores is empty"),
    ],
)
def test_what_cannot_be_drawn_is_named_in_one_sentence(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value) and "\n" not in str(error.value)


def test_the_diagram_is_what_its_module_draws():
    assert pathlib.Path(architecture.FILE).read_text() == architecture.svg()


SWEEP = pd.DataFrame({"guidance_scale": [1.0, 2.0, 7.5], "clip_score": [20.0, 25, 27], "cmmd": [0.5, 0.3, 0.4]})


def test_the_guidance_curve_labels_each_point_with_its_scale():
    figure = figures.guidance_curve(SWEEP)
    ax = figure.axes[0]
    assert ax.get_ylabel() == "CMMD" and [text.get_text() for text in ax.texts] == ["1", "2", "7.5"]
    assert "7.5: 27.0, 0.4" in figure.alt_text
    both = figures.guidance_curve({"early": SWEEP, "late": SWEEP})
    assert [text.get_text() for text in both.axes[0].get_legend().get_texts()] == ["early", "late"]
    with pytest.raises(ValueError, match="no column 'cmmd': give guidance_sweep real pictures to compare with"):
        figures.guidance_curve(SWEEP.drop(columns="cmmd"))
