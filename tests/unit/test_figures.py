import inspect
import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex
from PIL import Image

from helpers.lesson import figures

matplotlib.use("Agg")
RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)
CAPTION = "a large red circle in the top left on a blue background"
STAGES = pd.DataFrame(
    {
        "stage": ["read", "transform", "encode", "write"],
        "images_per_second": [9000, 800, 300, 5000],
        "workers": [1, 2, 1, 1],
    }
)
TIMELINE = pd.DataFrame(
    {"seconds": [5.0, 6.0, 7.0], "busy": [0.9, 0.96, 1.0], "images_per_second": [500.0, 600.0, 610.0]}
)
SHAPES = pd.DataFrame(
    [(64, "64x64", 20, 0.5, 0.0), (64, "80x48", 10, 0.25, 0.15), (64, "too small", 10, 0.25, np.nan)],
    columns=["resolution", "shape", "pictures", "share", "cut"],
)
SURVEY = pd.DataFrame(
    {"tokens": [12, 30, 77, 120], "width": [256.0, 640, 300, np.nan], "height": [300.0, 512, 900, np.nan]}
)
BLOCKS = pd.DataFrame({"block": ["down", "mid", "up"], "parameters": [300e3, 500e3, 200e3], "gflops": [0.1, 0.05, 0.2]})
RUN = pd.DataFrame({"step": range(1, 101), "loss": np.linspace(1, 0.1, 100)})
METRICS = RUN.assign(images_per_second=600.0, data_wait_share=0.02)
SCORES = {"before": {"color": 0.1, "shape": 0.3, "all": 0.0}, "after": {"color": 1.0, "shape": 0.9, "all": 0.88}}
ALPHAS = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
ATTEMPTS = pd.concat(
    [
        pd.DataFrame({"step": range(1, 46), "attempt": 1, "loss": 1.0}),
        pd.DataFrame({"step": range(26, 101), "attempt": 2, "loss": 0.5}),
    ]
)
PHASES = pd.DataFrame(
    {"phase": ["data", "encode", "forward"] * 2, "start": [0, 0.1, 0.5, 1, 1.1, 1.5], "seconds": [0.1, 0.4, 0.5] * 2}
)
MEMORY = pd.DataFrame({"second": np.linspace(0, 2, 50), "gib": np.linspace(0.5, 0.7, 50)})
ENCODERS = pd.DataFrame({"num_encoders": [1, 2, 4], "images_per_second": [100.0, 200, 350]})
PLANS = pd.DataFrame({"path": ["offline", "online"], "hours": [80.0, 120.0], "dollars": [15_000.0, 16_000.0]})
DRAWS = pd.DataFrame({"draw": range(20), "hours": np.linspace(400, 420, 20), "dollars": np.linspace(9e4, 9.5e4, 20)})
NETWORK = pd.DataFrame({"collective": "all-reduce", "bytes": [2**20, 2**24], "bus bandwidth, GB/s": [0.5, 2.0]})
EVERY = {
    "cost_over_time": lambda: figures.cost_over_time(PLANS, best=PLANS.iloc[0], deadline_hours=100),
    "run_distribution": lambda: figures.run_distribution(DRAWS, DRAWS[:1]),
    "bus_bandwidth": lambda: figures.bus_bandwidth(NETWORK, expected={"EFA": 50.0}),
    "architecture": lambda: figures.architecture(),
    "pictures": lambda: figures.pictures([PICTURE] * 7, [CAPTION] * 7, marks=["", "not a circle"] + [""] * 5),
    "transform_steps": lambda: figures.transform_steps(
        {"decoded": PICTURE, "cropped": PICTURE[:8, :8]}, {"small": PICTURE[:4, :4], "large": PICTURE[:8, :8]}
    ),
    "latents_panel": lambda: figures.latents_panel(PICTURE, RNG.normal(size=(2, 4, 2, 2)), PICTURE),
    "stage_throughput": lambda: figures.stage_throughput(STAGES),
    "encoder_utilization": lambda: figures.encoder_utilization(TIMELINE),
    "distribution": lambda: figures.distribution(SURVEY, max_tokens=77, resolutions=[256, 512]),
    "shapes": lambda: figures.shapes(SHAPES),
    "noise_schedule_curves": lambda: figures.noise_schedule_curves(ALPHAS),
    "noised_strip": lambda: figures.noised_strip([PICTURE] * 3, [0, 500, 999]),
    "blocks": lambda: figures.blocks(BLOCKS),
    "interrupted_run": lambda: figures.interrupted_run(RUN, ATTEMPTS),
    "loss_curves": lambda: figures.loss_curves({"training": RUN}),
    "throughput": lambda: figures.throughput(METRICS, 600, 0.02),
    "before_after": lambda: figures.before_after([PICTURE] * 3, [PICTURE] * 3, [CAPTION] * 3),
    "iteration": lambda: figures.iteration(PHASES, MEMORY),
    "throughput_over_encoders": lambda: figures.throughput_over_encoders(ENCODERS, ENCODERS),
    "agreement": lambda: figures.agreement(SCORES),
    "training_phases": lambda: figures.training_phases({"32 px": RUN, "64 px": RUN}),
    "time_shares": lambda: figures.time_shares(
        pd.DataFrame({"data": [0.1], "communication": [0.2], "checkpoints": [0.1]}, index=["run"])
    ),
}


def texts(fig):
    """Everything that can be read on the figure, in one string."""
    found = fig.findobj(lambda artist: isinstance(artist, matplotlib.text.Text) and artist.get_visible())
    return "\n".join(artist.get_text() for artist in found)


def widths(ax):
    return [patch.get_width() for patch in ax.patches]


def line(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


# --- what holds for every figure --------------------------------------------------------------------


def test_every_figure_is_tested_here():
    public = {
        name
        for name, value in vars(figures).items()
        if inspect.isfunction(value) and value.__module__ == figures.__name__ and name[0] != "_"
    }
    assert public == set(EVERY)


@pytest.mark.parametrize("draw", EVERY.values(), ids=EVERY)
def test_a_figure_has_an_alternative_text_beside_its_png(draw):
    data, metadata = draw()._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    alt = metadata["image/png"]["alt"]
    assert len(alt) > 20 and alt.endswith(".") and "\n" not in alt and alt == data["text/plain"]


def test_a_notebook_output_keeps_the_alternative_text():
    formatter = DisplayFormatter()
    for inline_backend in (False, True):
        if inline_backend:  # its own PNG replaces the figure's
            formatter.formatters["image/png"].for_type(matplotlib.figure.Figure, lambda fig: b"PNG")
        data, metadata = formatter.format(figures.loss_curves({"training": RUN}))
        assert (data["image/png"] == b"PNG") == inline_backend
        assert metadata["image/png"]["alt"] == data["text/plain"]
        assert "from 0.945 to 0.155 over steps 1 to 100" in data["text/plain"]


@pytest.mark.parametrize("draw", EVERY.values(), ids=EVERY)
def test_a_figure_shows_once_draws_without_warnings_and_leaves_settings_alone(draw):
    settings = matplotlib.rcParams.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = draw()
        fig.canvas.draw()
    assert plt.get_fignums() == []  # what pyplot still holds, a notebook draws a second time
    assert matplotlib.rcParams == settings


@pytest.mark.parametrize("draw", EVERY.values(), ids=EVERY)
def test_a_figure_fits_a_notebook_and_can_be_read(draw):
    fig = draw()
    fig.canvas.draw()
    assert fig.get_figwidth() <= 10.5 and fig.dpi == 100
    for text in fig.findobj(matplotlib.text.Text):
        assert not text.get_text() or text.get_fontsize() >= 9, text.get_text()


@pytest.mark.parametrize(
    "name", ["stage_throughput", "noise_schedule_curves", "blocks", "loss_curves", "throughput", "agreement"]
)
def test_axes_of_a_plot_are_labelled(name):
    for ax in EVERY[name]().axes:
        assert ax.get_xlabel() or ax.get_ylabel()


# --- the pipeline -----------------------------------------------------------------------------------


def test_architecture_shows_counts_and_devices():
    shown = texts(
        figures.architecture(
            num_transform_workers=240,
            num_encoders=40,
            num_training_workers=32,
            encoder_device="A10G",
            training_device="A100",
        )
    )
    for expected in ("240 tasks", "40 actors\non A10G", "32 workers\non A100"):
        assert expected in shown
    assert "1 worker\n" in texts(figures.architecture())


def test_architecture_shows_a_range_of_workers():
    shown = texts(figures.architecture(num_encoders=[2, 8], num_training_workers=(1, 4)))
    assert "2-8 actors" in shown and "1-4 workers" in shown


def test_only_the_offline_pipeline_has_a_store():
    assert "manifest" in texts(figures.architecture("offline"))
    assert "manifest" not in texts(figures.architecture("online"))


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_architecture_keeps_its_text_inside_its_boxes(mode):
    fig = figures.architecture(
        mode,
        num_transform_workers=240,
        num_encoders=128,
        num_training_workers=128,
        encoder_device="A100-80G",
        training_device="A100-80G",
    )
    fig.canvas.draw()
    ax = fig.axes[0]
    boxes = [patch.get_window_extent() for patch in ax.patches]
    for text in ax.texts:
        if "\non " in text.get_text():
            extent = text.get_window_extent()
            assert any(
                box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.height > 100 and box.width < 200 for box in boxes
            ), text.get_text()


@pytest.mark.parametrize(
    "half, dimmed, kept", [("preprocessing", "Training", "Preprocessing"), ("training", "Preprocessing", "Training")]
)
def test_highlight_dims_the_other_half(half, dimmed, kept):
    lightness = {
        text.get_text().split(":")[0]: np.mean(matplotlib.colors.to_rgb(text.get_color()))
        for text in figures.architecture(highlight=half).axes[0].texts
    }
    assert lightness[dimmed] > 0.6 > 0.3 > lightness[kept]


def test_encoders_busy_shows_the_median_and_the_goal():
    found = texts(figures.encoder_utilization(TIMELINE))
    assert "96% of their time" in found and "goal 95 %" in found


def test_utilization_starts_with_the_encoders_first_batch():
    assert figures.encoder_utilization(TIMELINE).axes[0].lines[0].get_xdata().tolist() == [0, 1, 2]
    assert len(figures.encoder_utilization(TIMELINE.assign(encoders=2)).axes) == 2
    growing = figures.encoder_utilization(TIMELINE.assign(encoders=[1, 2, 3]))
    assert growing.axes[-1].get_ylabel() == "encoders" and "1 to 3 encoders" in growing.alt_text


def test_distribution_says_what_is_cut_off_and_what_is_large_enough():
    found = texts(figures.distribution(SURVEY, max_tokens=77, resolutions=[256, 512]))
    assert "25.0% are cut at 77" in found and "256: 75%, 512: 25%" in found and "33% are longer than 2 : 1" in found
    nothing = SURVEY.assign(width=np.nan, height=np.nan)
    assert "256: 0%" in texts(figures.distribution(nothing, max_tokens=77, resolutions=[256]))


def test_shapes_say_how_many_pictures_each_gets_and_what_is_cut():
    fig = figures.shapes(SHAPES)
    assert [ax.get_title() for ax in fig.axes] == ["64 pixels: crops cut 5.0% away"]
    assert "50%, 0% cut away" in texts(fig) and "25%, 15% cut away" in texts(fig) and "80x48 25%" in fig.alt_text


def test_stage_throughput_draws_the_rates_and_marks_the_slowest():
    fig = figures.stage_throughput(STAGES)
    ax = fig.axes[0]
    assert [point.get_xdata()[0] for point in ax.lines] == STAGES["images_per_second"].tolist()
    assert [label.get_text() for label in ax.get_yticklabels()] == STAGES["stage"].tolist()
    marked = [text.get_text() for text in ax.texts if "bottleneck" in text.get_text()]
    assert len(marked) == 1 and marked[0].startswith("300 images/s, 1 worker")


# --- pictures ---------------------------------------------------------------------------------------


def test_pictures_shows_each_with_its_caption():
    captions = [f"caption {number}" for number in range(7)]
    fig = figures.pictures([PICTURE] * 7, captions, columns=4, title="Rows")
    shown = [ax for ax in fig.axes if ax.images]
    assert [ax.get_xlabel() for ax in shown] == captions
    assert fig.get_suptitle() == "Rows"


def test_pictures_say_in_text_what_is_wrong():
    fig = figures.pictures([PICTURE] * 3, ["a", "b", "c"], marks=["", "not a circle", ""])
    assert [ax.get_xlabel() for ax in fig.axes] == ["a\n✓ right", "b\n✗ not a circle", "c\n✓ right"]
    frames = [to_hex(ax.spines["left"].get_edgecolor()).upper() for ax in fig.axes]
    assert frames == [figures.GREEN, figures.RED, figures.GREEN]
    assert "2 of them right" in fig.alt_text


def test_pictures_takes_pil_images_grey_ones_and_different_sizes():
    fig = figures.pictures([Image.fromarray(PICTURE), PICTURE[..., 0], PICTURE[:4]])
    assert len([ax for ax in fig.axes if ax.images]) == 3


@pytest.mark.parametrize("caption", ["costs $5, not $6", "中文 🫠", "", "word " * 300, "x" * 500, r"\frac{ $ _^"])
def test_any_caption_can_be_drawn(caption):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = figures.pictures([PICTURE] * 2, [caption, "short"])
        fig.canvas.draw()
    extents = [ax.get_window_extent() for ax in fig.axes]
    assert all(extent.width > 50 for extent in extents)  # text has not squeezed the pictures away


def test_transform_steps_says_each_size():
    steps = {"decoded": np.zeros((30, 50, 3), np.uint8), "square": np.zeros((8, 8, 3), np.uint8)}
    fig = figures.transform_steps(steps)
    assert [ax.get_title() for ax in fig.axes] == ["decoded\n50 x 30 px", "square\n8 x 8 px"]


def test_every_size_has_an_arrow_from_the_last_step():
    square = np.zeros((8, 8, 3), np.uint8)
    fig = figures.transform_steps({"decoded": square, "square": square}, {"a": square, "b": square, "c": square})
    arrows = [(text.anncoords, ax.transAxes) for ax in fig.axes for text in ax.texts if text.arrow_patch]
    starts = [next(i for i, ax in enumerate(fig.axes) if ax.transAxes == start) for start, _ in arrows]
    assert starts == [0, 1, 1, 1]


def test_latents_share_one_scale_around_zero():
    moments = RNG.normal(size=(2, 4, 2, 2))
    moments[0, 0, 0, 0] = -9
    fig = figures.latents_panel(PICTURE, moments, PICTURE)
    means = [ax.images[0] for ax in fig.axes if ax.get_title().startswith("mean")]
    assert len(means) == 4 and {image.get_clim() for image in means} == {(-9.0, 9.0)}
    assert len([ax for ax in fig.axes if ax.get_title().startswith("std")]) == 4


def test_latents_stand_in_a_grid_with_the_picture_and_its_reconstruction():
    fig = EVERY["latents_panel"]()
    fig.canvas.draw()
    boxes = [ax.get_window_extent() for ax in fig.axes if ax.images and ax.get_title()]
    assert len(boxes) == 10
    for row in (boxes[:5], boxes[5:]):
        assert np.ptp([box.y0 for box in row]) < 1 and np.ptp([box.height for box in row]) < 1


def test_latents_gives_the_psnr_of_the_reconstruction():
    off_by_16 = np.clip(PICTURE, 0, 239) + np.uint8(16)
    psnr = 10 * np.log10(255**2 / 16**2)
    shown = texts(figures.latents_panel(np.clip(PICTURE, 0, 239), np.zeros((2, 4, 2, 2)), off_by_16))
    assert f"PSNR {psnr:.1f} dB" in shown
    assert "reconstruction" not in texts(figures.latents_panel(PICTURE, np.zeros((2, 4, 2, 2), np.float16)))


def test_noised_strip_names_the_timesteps():
    assert [ax.get_title() for ax in EVERY["noised_strip"]().axes] == ["t = 0", "t = 500", "t = 999"]


def test_before_after_pairs_pictures_of_a_prompt():
    before, after = (np.full((8, 4, 4, 3), value, np.uint8) for value in (10, 200))
    fig = figures.before_after(before, after, [f"prompt {number}" for number in range(8)])
    shown = [ax for ax in fig.axes if ax.images]
    assert sorted(ax.get_xlabel() for ax in shown if ax.get_xlabel()) == [f"prompt {number}" for number in range(8)]
    assert {ax.images[0].get_array().max() for ax in shown if ax.get_xlabel()} == {200}
    assert [ax.get_ylabel() for ax in shown if ax.get_ylabel()] == ["before", "after"] * 2


# --- the model --------------------------------------------------------------------------------------


def test_noise_schedule_draws_signal_noise_and_their_ratio():
    left, right = figures.noise_schedule_curves(ALPHAS, min_snr_gamma=5).axes
    signal, noise = (curve.get_ydata() for curve in left.lines)
    np.testing.assert_allclose(signal**2 + noise**2, 1)
    np.testing.assert_allclose(10 ** right.lines[0].get_ydata(), ALPHAS / (1 - ALPHAS))
    assert right.lines[1].get_ydata()[0] == pytest.approx(np.log10(5))


def test_noise_schedule_takes_zero_terminal_snr():
    fig = figures.noise_schedule_curves(np.linspace(1, 0, 11))
    fig.canvas.draw()


def test_blocks_draws_parameters_and_flops_in_the_same_order():
    fig = figures.blocks(BLOCKS)
    parameters, flops = fig.axes
    assert widths(parameters) == BLOCKS["parameters"].tolist()
    assert widths(flops) == pytest.approx(1e9 * BLOCKS["gflops"])
    assert [label.get_text() for label in parameters.get_yticklabels()] == ["down", "mid", "up"]
    assert "parameters: 1 M" in parameters.get_title() and "350 M" in flops.get_title()


@pytest.mark.parametrize(
    "number, short",
    [
        (865_910_724, "866 M"),
        (0, "0"),
        (999, "999"),
        (999_600, "1 M"),
        (1_034_000, "1.03 M"),
        (0.804e12, "804 G"),
        (1e13, "10 T"),
    ],
)
def test_large_numbers_are_short(number, short):
    assert figures._short(number) == short


# --- a run ------------------------------------------------------------------------------------------


def test_losses_draws_each_run_smoothed_and_validation_as_points():
    validation = pd.DataFrame({"step": [50, 100], "validation_loss": [0.5, 0.2]})
    ax = figures.loss_curves({"a": RUN, "b": RUN}, validation=validation, smooth=1, title="Loss").axes[0]
    np.testing.assert_allclose(line(ax, "a").get_ydata(), RUN["loss"])
    np.testing.assert_allclose(line(ax, "validation").get_ydata(), [0.5, 0.2])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "validation"]
    assert ax.get_title() == "Loss" and ax.get_yscale() == "log"


def test_smoothing_is_a_mean_over_steps():
    run = pd.DataFrame({"step": range(100), "loss": [1.0, 3.0] * 50})
    smoothed = line(figures.loss_curves({"a": run}, smooth=20).axes[0], "a").get_ydata()
    np.testing.assert_allclose(smoothed[10:-10], 2)


def test_losses_that_barely_differ_or_are_negative_stay_linear():
    for shift in (1, -2):
        run = RUN.assign(loss=RUN["loss"] + shift)
        assert figures.loss_curves({"a": run}).axes[0].get_yscale() == "linear"


def test_of_a_step_that_was_redone_the_last_row_counts():
    redone = pd.DataFrame({"step": [1, 2, 3, 2, 3], "loss": [3.0, 9.0, 9.0, 2.0, 1.0]})
    curve = line(figures.loss_curves({"a": redone}, smooth=1).axes[0], "a")
    assert curve.get_xdata().tolist() == [1, 2, 3] and curve.get_ydata().tolist() == [3, 2, 1]


def test_an_interrupted_run_shows_its_attempts_and_the_steps_that_were_done_again():
    ax = figures.interrupted_run(RUN, ATTEMPTS).axes[0]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["not interrupted", "attempt 1", "attempt 2", "20 steps done again"]
    assert line(ax, "attempt 2").get_xdata().tolist() == list(range(26, 101))


def test_marks_stand_at_their_steps():
    ax = figures.loss_curves({"a": RUN}, marks=[(40, "killed"), (41, "resumed")]).axes[0]
    assert {"killed", "resumed"} <= {text.get_text() for text in ax.texts}
    assert {40, 41} <= {curve.get_xdata()[0] for curve in ax.lines if len(curve.get_xdata()) == 2}


def test_throughput_has_a_panel_for_rate_and_one_for_waiting():
    rate, wait = EVERY["throughput"]().axes
    assert set(rate.lines[0].get_ydata()) == {600} and set(wait.lines[0].get_ydata()) == {2}
    assert "%" in wait.get_ylabel() and rate.get_title() == "600 images/s; 2.0% of the time waiting for data"


def test_agreement_draws_percentages_with_all_set_apart():
    ax = figures.agreement(SCORES).axes[0]
    heights = [bar.get_height() for container in ax.containers for bar in container]
    assert heights == pytest.approx([10, 30, 0, 100, 90, 88])
    names = dict(zip([text.get_text() for text in ax.get_xticklabels()], ax.get_xticks(), strict=True))
    assert names["all"] - names["shape"] > names["shape"] - names["color"]


@pytest.mark.parametrize("scores", [SCORES, {"a": {"color": 0.5}}, {"a": {"all": 0.5}}])
def test_the_goal_is_a_line_at_its_height(scores):
    fig = figures.agreement(scores, goal=0.85)
    assert "goal 85 %" in texts(fig)
    assert any(list(curve.get_ydata()) == [85, 85] for curve in fig.axes[0].lines)


def test_before_and_after_keep_their_colours():
    for scores in (SCORES, dict(reversed(SCORES.items()))):
        bars = {container.get_label(): container[0] for container in figures.agreement(scores).axes[0].containers}
        assert to_hex(bars["after"].get_facecolor()).upper() == figures.BLUE


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: figures.architecture("both"), "mode='both'"),
        (lambda: figures.architecture(highlight="all"), "highlight='all'"),
        (lambda: figures.pictures([]), "images is empty"),
        (lambda: figures.pictures([PICTURE], ["a", "b"]), "1 pictures and 2 captions"),
        (lambda: figures.pictures([PICTURE], marks=[]), "1 pictures and 0 marks"),
        (lambda: figures.transform_steps({}), "steps is empty"),
        (lambda: figures.latents_panel(PICTURE, np.zeros((2, 4, 2, 2)), PICTURE[:4]), "(4, 16, 3)"),
        (lambda: figures.latents_panel(PICTURE, np.zeros((8, 2, 2))), "(8, 2, 2)"),
        (lambda: figures.noised_strip([PICTURE], [1, 2]), "1 pictures and 2 timesteps"),
        (lambda: figures.before_after([PICTURE], [], ["a"]), "0 after"),
        (lambda: figures.noise_schedule_curves([2.0]), "alphas_cumprod"),
        (lambda: figures.blocks(BLOCKS.drop(columns="gflops")), "'gflops'"),
        (lambda: figures.loss_curves({}), "runs is empty"),
        (lambda: figures.loss_curves({"mine": RUN[:0]}), "run 'mine' has no rows"),
        (lambda: figures.throughput(RUN, 1, 0), "'images_per_second'"),
        (lambda: figures.agreement({}), "scores is empty"),
    ],
)
def test_what_cannot_be_drawn_is_named_in_one_sentence(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value) and "\n" not in str(error.value)
    assert plt.get_fignums() == []


def test_an_iteration_shows_each_phase_with_its_share_of_the_time_and_the_memory_below_it():
    fig = figures.iteration(PHASES, MEMORY, published="documents: 39 %")
    assert all(part in texts(fig) for part in ("encode\n40%", "forward\n50%", "documents: 39 %"))
    assert fig.axes[0].get_xlim() == (0, 2)
    assert len(fig.axes[0].patches) == 6
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["data", "encode", "forward"]


def test_the_throughput_over_encoders_keeps_measured_and_predicted_apart_and_draws_the_ceiling():
    ax = figures.throughput_over_encoders(ENCODERS[:2], ENCODERS, ceiling=350).axes[0]
    assert line(ax, "measured").get_xdata().tolist() == [1, 2]
    assert line(ax, "predicted: min(n x encoder, trainers)").get_ydata().tolist() == [100, 200, 350]
    assert line(ax, "trainers alone: 350 images/s").get_ydata()[0] == 350
    both = figures.throughput_over_encoders({"here": ENCODERS[:2], "simulated": ENCODERS}, ENCODERS).axes[0]
    assert len(line(both, "here").get_xdata()) == 2 and len(line(both, "simulated").get_xdata()) == 3
    only = figures.throughput_over_encoders([], ENCODERS).axes[0]
    assert "measured" not in [entry.get_label() for entry in only.lines]


def test_phases_follow_each_other_with_a_line_where_one_begins():
    first = pd.DataFrame({"step": range(1, 31), "loss": np.linspace(1, 0.5, 30)})
    second = pd.DataFrame({"step": range(1, 11), "loss": np.linspace(0.7, 0.6, 10)})
    (ax,) = figures.training_phases({"32 px": first, "64 px": second}).axes
    drawn = [line.get_xdata() for line in ax.lines]
    assert max(max(x) for x in drawn) == 40 and [30, 30] in [list(x) for x in drawn]


def test_time_shares_fill_the_whole_bar():
    table = pd.DataFrame(
        {"data": [0.1, 0.2], "communication": [0.3, np.nan], "checkpoints": [0.0, 0.1]}, index=["a", "b"]
    )
    (ax,) = figures.time_shares(table).axes
    widths = np.array([bar.get_width() for bar in ax.patches]).reshape(4, 2)
    assert np.allclose(widths.sum(axis=0), 100) and np.allclose(widths[0], [60, 70])
