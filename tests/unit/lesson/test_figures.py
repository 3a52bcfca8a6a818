"""The notebooks' figures: what each shows, and its alternative text."""

import inspect
import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

from helpers.lesson import figures, side_by_side, trials

pytestmark = pytest.mark.slow
matplotlib.use("Agg")
RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)
CAPTION = "a large red circle in the top left on a blue background"
STAGES = pd.DataFrame({"stage": ["transform", "encode"], "images_per_second": [9000, 300], "workers": [1, 2]})
TIMELINE = pd.DataFrame({"seconds": [5.0, 6, 7], "busy": [0.9, 0.96, 1.0], "images_per_second": [500.0, 600, 610]})
BLOCKS = pd.DataFrame({"block": ["down", "mid"], "parameters": [865_910_724, 500e3], "gflops": [0.1, 0.25]})
RUN = pd.DataFrame({"step": range(1, 101), "loss": np.linspace(1, 0.1, 100)})
METRICS = RUN.assign(images_per_second=600.0, data_wait_share=0.02)
SCORES = {"before": {"color": 0.1, "all": 0.0, "shape": 0.3}, "after": {"color": 1.0, "all": 0.88, "shape": 0.9}}
ALPHAS = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
ATTEMPTS = pd.concat([RUN[:45].assign(attempt=1), RUN[25:].assign(attempt=2)])
PHASES = pd.DataFrame(
    {"phase": ["data", "encode", "forward"] * 2, "start": [0, 0.1, 0.5, 1, 1.1, 1.5], "seconds": [0.1, 0.4, 0.5] * 2}
)
MEMORY = pd.DataFrame({"second": np.linspace(0, 2, 50), "gib": np.linspace(0.5, 0.7, 50)})
ENCODERS = pd.DataFrame({"num_encoders": [1, 2, 4], "images_per_second": [100.0, 200, 350]})
NETWORK = pd.DataFrame({"collective": "all-reduce", "bytes": [2**20, 2**24], "bus bandwidth, GB/s": [0.5, 2.0]})
SHARES = pd.DataFrame({"data": [0.1, 0.2], "communication": [0.3, np.nan], "checkpoints": [0.0, 0.1]}, index=["a", "b"])
STEPS = {"decoded": np.zeros((64, 96, 3), np.uint8), "small": np.zeros((32, 32, 3), np.uint8)}
NEAREST = pd.DataFrame({"distance": [0.5, 0.01, 0.6], "nearer": [0.5, 0.0, 0.7]})
CHOICES = pd.DataFrame({"quality": ["late"] * 3 + ["early"], "alignment": "no preference"})
SWEEP = pd.DataFrame({"guidance_scale": [1.0, 2.0, 7.5], "clip_score": [20.0, 25, 27], "cmmd": [0.5, 0.3, 0.4]})
TRIALS = pd.DataFrame(
    [(name, seed, "loss", value + seed) for name, value in (("v", 1.0), ("flow", 1.5)) for seed in (0, 1)],
    columns=["setting", "seed", "metric", "value"],
)
# Each figure with what its alternative text says.
EVERY = {
    "bandwidth_by_size": (
        lambda: figures.bandwidth_by_size(NETWORK, expected={"EFA": 50.0}),
        "all-reduce 2 GB/s at most",
    ),
    "pictures": (
        lambda: figures.pictures([PICTURE, PICTURE[..., 0]] * 4, [CAPTION] * 8, marks=["", "not a circle"] * 4),
        "8 pictures, 4 of them right: a large red circle in the top left on a blue background ✓ right; a large red",
    ),
    "transform_steps": (lambda: figures.transform_steps(STEPS), "decoded (96 x 64 px), then small (32 x 32 px)"),
    "latents_panel": (
        lambda: figures.latents_panel(PICTURE // 2, RNG.normal(size=(2, 4, 2, 2)), PICTURE // 2 + np.uint8(16)),
        "4 channels of 2 x 2, as mean and std; decoding the mean gives the picture back with PSNR 24.0 dB",
    ),
    "stage_throughput": (lambda: figures.stage_throughput(STAGES), "encode: 300 images/s, 2 workers, the bottleneck"),
    "encoder_utilization": (
        lambda: figures.encoder_utilization(TIMELINE),
        "Over 2 seconds encoders compute for 96% of their time (median), at 600 images/s",
    ),
    "noise_schedule_curves": (lambda: figures.noise_schedule_curves(ALPHAS), "from 1.00 to 0.07"),
    "block_costs": (lambda: figures.block_costs(BLOCKS), "down: 866 M parameters, 100 M FLOPs; mid: 500 k parameters"),
    "interrupted_run": (
        lambda: figures.interrupted_run(RUN, ATTEMPTS),
        "a worker is killed after step 45, 20 steps done again",
    ),
    "loss_curves": (
        lambda: figures.loss_curves({"32 px": RUN[:30], "64 px": RUN[:10]}, consecutive=True),
        "32 px: from 0.945 to 0.791 over steps 1 to 30; 64 px: from 0.959 to 0.959 over steps 31 to 40",
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
        lambda: figures.iteration(PHASES, MEMORY, published="documents: 39 %", device="cpu"),
        "data 10%, encode 40%, forward 50%; memory of the process (resident set): 0.50 to 0.70 GiB",
    ),
    "throughput_over_encoders": (
        lambda: figures.throughput_over_encoders(ENCODERS[:2], ENCODERS, ceiling=350),
        "trainers alone: 350 images/s; measured: 100 with 1, 200 with 2",
    ),
    "agreement_by_attribute": (
        lambda: figures.agreement_by_attribute(SCORES, goal=0.85),
        "after color 100%, shape 90%, all 88%",
    ),
    "time_shares": (
        lambda: figures.time_shares(SHARES),
        "a: computes 60%, waits for data 10%, communication 30%, checkpoints 0%; b: computes 70%",
    ),
    "paired_differences": (
        lambda: figures.paired_differences(TRIALS, trials.compare_settings(TRIALS)),
        "Differences from v over 2 seeds: flow, loss: 0.5 (0.5 to 0.5)",
    ),
    "preferences": (
        lambda: figures.preferences(side_by_side.report(CHOICES, ("early", "late")), title="who"),
        "quality: late preferred by 75% (30% to 95%); alignment: late preferred by no one",
    ),
    "nearest_neighbours": (
        lambda: figures.nearest_neighbours([PICTURE] * 3, [PICTURE] * 3, NEAREST, np.linspace(0.3, 0.8, 50)),
        "median distance 0.50; of 50 held-out rows 0.55. 1 are nearer than all but 1% of the held-out rows",
    ),
    "guidance_curve": (
        lambda: figures.guidance_curve({"early": SWEEP, "late": SWEEP}),
        "early, 7.5: 27.0, 0.4; late, 1: 20.0, 0.5",
    ),
}


def test_every_figure_is_tested_here():
    functions = inspect.getmembers(figures, inspect.isfunction)
    assert {name for name, f in functions if f.__module__ == figures.__name__ and name[0] != "_"} == set(EVERY)


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


@pytest.mark.parametrize("caption", ["中文 🫠", "", "word " * 300, "x" * 500, r"costs $5, \frac{ $ _^"])
def test_any_caption_can_be_drawn(caption):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = figures.pictures([PICTURE] * 2, [caption, "short"])
        fig.canvas.draw()
    assert all(ax.get_window_extent().width > 50 for ax in fig.axes)  # text has not squeezed the pictures away


def test_agreement_sets_all_apart_and_draws_its_goal():
    ax = figures.agreement_by_attribute(SCORES, goal=0.85).axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["color", "shape", "all"]
    heights = [bar.get_height() for container in ax.containers for bar in container]
    assert heights == pytest.approx([10, 30, 0, 100, 90, 88])
    assert any(list(curve.get_ydata()) == [85, 85] for curve in ax.lines)
