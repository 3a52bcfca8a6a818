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
RUN = pd.DataFrame({"step": range(1, 101), "loss": np.linspace(1, 0.1, 100)})
RATES = pd.DataFrame({"images_per_second": [9000, 300, 600], "num_encoders": [1, 2, 4], "data_wait_share": 0.02})
STAGES = RATES[:2].assign(stage=["transform", "encode"], workers=[1, 2])[["stage", "images_per_second", "workers"]]
SCORES = {"before": {"color": 0.1, "all": 0.0, "shape": 0.3}, "after": {"color": 1.0, "all": 0.88, "shape": 0.9}}
ALPHAS = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
ATTEMPTS = pd.concat([RUN[:45].assign(attempt=1), RUN[25:].assign(attempt=2)])
PHASES = pd.DataFrame({"phase": ["data", "encode", "forward"], "start": [0, 0.1, 0.5], "seconds": [0.1, 0.4, 0.5]})
MEMORY = pd.DataFrame({"second": np.linspace(0, 1, 50), "gib": np.linspace(0.5, 0.7, 50)})
NETWORK = pd.DataFrame({"collective": "all-reduce", "bytes": [2**20, 2**24], "bus bandwidth, GB/s": [0.5, 2.0]})
SHARES = pd.DataFrame({"data": [0.1, 0.2], "communication": [0.3, np.nan], "checkpoints": [0.0, 0.1]}, index=["a", "b"])
STEPS = {"decoded": np.zeros((64, 96, 3), np.uint8), "small": np.zeros((32, 32, 3), np.uint8)}
NEAREST = pd.DataFrame({"distance": [0.5, 0.01, 0.6], "nearer": [0.5, 0.0, 0.7]})
CHOICES = pd.DataFrame({"quality": ["late"] * 3 + ["early"], "alignment": "no preference"})
SWEEP = pd.DataFrame({"guidance_scale": [1.0, 2.0, 7.5], "clip_score": [20.0, 25, 27], "cmmd": [0.5, 0.3, 0.4]})
VALUES = {"setting": ["v", "v", "flow", "flow"], "seed": [0, 1, 0, 1], "metric": "loss", "value": [1.0, 2.0, 1.5, 2.5]}
TRIALS = pd.DataFrame(VALUES)


def latents():
    return figures.latents_panel(PICTURE // 2, RNG.normal(size=(2, 4, 2, 2)), PICTURE // 2 + np.uint8(16))


def nearest(held_out, found=NEAREST):
    return figures.nearest_neighbours([PICTURE] * 3, [PICTURE] * 3, found, held_out)


# Each figure, with a part of its alternative text.
EVERY = {
    "bandwidth_by_size": (lambda f: f(NETWORK, expected={"EFA": 50.0}), "all-reduce 2 GB/s at most"),
    "pictures": (
        lambda f: f([PICTURE, PICTURE[..., 0]], [CAPTION] * 2, marks=["", "no"]),
        "2 images, 1 of them right",
    ),
    "transform_steps": (lambda f: f(STEPS), "decoded (96 x 64 px), then small (32 x 32 px)"),
    "latents_panel": (lambda _: latents(), "4 channels of 2 x 2, as mean and std; decoding the mean gives the image"),
    "stage_throughput": (lambda f: f(STAGES), "encode: 300 images/s, 2 workers, the bottleneck"),
    "noise_schedule_curves": (lambda f: f(ALPHAS), "from 1.00 to 0.07"),
    "interrupted_run": (lambda f: f(RUN, ATTEMPTS), "a worker is killed after step 45, 20 steps done again"),
    "loss_curves": (
        lambda f: f({"a": RUN[:30], "b": RUN[:10]}, consecutive=True),
        "b: from 0.959 to 0.959 over steps 31",
    ),
    "training_throughput": (lambda f: f(RUN[:3].join(RATES), 600, 0.02), "600 images/s; 2.0% of the time waiting"),
    "before_after": (lambda f: f([PICTURE] * 8, [PICTURE] * 8, [CAPTION] * 8), "8 pairs of images, before and after"),
    "iteration": (
        lambda f: f(PHASES, MEMORY, published="39 %", device="cpu"),
        "encode 40%, forward 50%; memory of the",
    ),
    "throughput_over_encoders": (
        lambda f: f(RATES[:2], RATES, ceiling=350),
        "trainers alone: 350 images/s; measured: 9,000",
    ),
    "agreement_by_attribute": (lambda f: f(SCORES, goal=0.85), "after color 100%, shape 90%, all 88%"),
    "time_shares": (lambda f: f(SHARES), "a: computes 60%, waits for data 10%, communication 30%, checkpoints 0%; b: "),
    "paired_differences": (lambda f: f(TRIALS, trials.compare_settings(TRIALS)), "flow, loss: 0.5 (0.5 to 0.5)"),
    "preferences": (
        lambda f: f(side_by_side.report(CHOICES, ("early", "late")), title="who"),
        "quality: late preferred by 75% (30% to 95%); alignment: nobody prefers either",
    ),
    "nearest_neighbours": (
        lambda _: nearest(np.linspace(0.3, 0.8, 50)),
        "1 are nearer than all but 1% of the held-out",
    ),
    "guidance_curve": (lambda f: f({"early": SWEEP, "late": SWEEP}), "early, 7.5: 27.0, 0.4; late, 1: 20.0, 0.5"),
}


def test_every_figure_is_tested_here():
    functions = inspect.getmembers(figures, inspect.isfunction)
    assert {name for name, f in functions if f.__module__ == figures.__name__ and name[0] != "_"} == set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_a_figure_is_a_png_whose_alternative_text_says_what_it_shows(name):
    """It draws without warnings, once (what pyplot holds, a notebook draws again), and leaves settings alone."""
    (draw, said), settings = EVERY[name], matplotlib.rcParams.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data, metadata = draw(getattr(figures, name))._repr_mimebundle_()
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


def test_the_nearest_neighbours_come_first_and_may_lack_held_out_rows():
    fig = nearest(np.zeros(0), NEAREST.assign(nearer=np.nan))
    assert [ax.get_xlabel() for ax in fig.subfigs[0].axes if ax.get_xlabel()] == ["0.01", "0.50", "0.60"]
