"""The notebooks' figures: each is drawn without a warning, and says in words what it shows."""

import io
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from helpers.lesson import figures, trials

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)
CAPTION = "a large red circle in the top left on a blue background"
RUN = pd.DataFrame({"step": range(1, 101), "loss": np.linspace(1, 0.1, 100)})
RATES = pd.DataFrame({"images_per_second": [9000, 300, 600], "num_encoders": [1, 2, 4], "data_wait_share": 0.02})
TASKS = pd.DataFrame({"stage": ["encode", "transform", "encode"], "start": [1.0, 0.0, 2.0], "seconds": [1.0, 1.5, 1.0]})
ALPHAS = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
ATTEMPTS = pd.concat([RUN[:45].assign(attempt=1), RUN[25:].assign(attempt=2)])
PHASES = pd.DataFrame({"phase": ["data", "encode", "forward"], "start": [0, 0.1, 0.5], "seconds": [0.1, 0.4, 0.5]})
MEMORY = pd.DataFrame({"second": np.linspace(0, 1, 50), "gib": np.linspace(0.5, 0.7, 50)})
NEAREST = pd.DataFrame({"distance": [0.5, 0.01, 0.6], "nearer": [0.5, 0.0, 0.7]})
SWEEP = pd.DataFrame({"guidance_scale": [1.0, 2.0, 7.5], "clip_score": [20.0, 25, 27], "cmmd": [0.5, 0.3, 0.4]})
VALUES = {"setting": ["v", "v", "flow", "flow"], "seed": [0, 1, 0, 1], "metric": "loss", "value": [1.0, 2.0, 1.5, 2.5]}
TRIALS = pd.DataFrame(VALUES)


# Each figure, with a part of its alternative text.
EVERY = {
    "pictures": (lambda f: f([PICTURE, PICTURE[..., 0]], ["中文 $_", CAPTION], marks=["", "no"]), "1 of them right"),
    "latents_panel": (lambda f: f(PICTURE // 2, RNG.normal(size=(2, 4, 2, 2)), PICTURE // 2 + np.uint8(16)), "2 x 2"),
    "timeline": (lambda f: f({"apart": TASKS}), "apart, encode: 2 tasks from 1.0 to 3.0 s"),
    "timestep_curves": (lambda f: f({"signal": ALPHAS**0.5}, "weight"), "weight: signal from 1.00 at t = 0 to 0.07"),
    "interrupted_run": (lambda f: f(RUN, ATTEMPTS), "a worker is killed after step 45, 20 steps done again"),
    "loss_curves": (lambda f: f({"a": RUN[:30], "b": RUN[:10]}, consecutive=True), "over steps 31"),
    "training_throughput": (lambda f: f(RUN[:3].join(RATES), 600, 0.02), "600 images/s; 2.0% of the time waiting"),
    "before_after": (lambda f: f([PICTURE] * 8, [PICTURE] * 8, [CAPTION] * 8), "8 pairs of images, before and after"),
    "iteration": (lambda f: f(PHASES, MEMORY, published="39 %", device="cuda"), "encode 40%, forward 50%; memory"),
    "throughput_over_encoders": (lambda f: f(RATES[:2], RATES, ceiling=350), "alone: 350 images/s; measured: 9,000"),
    "paired_differences": (lambda f: f(TRIALS, trials.compare_settings(TRIALS)), "flow, loss: 0.5 (0.5 to 0.5)"),
    "nearest_neighbours": (
        lambda f: f([PICTURE] * 3, [PICTURE] * 3, NEAREST, np.linspace(0.3, 0.8, 50)),
        "1 are nearer than all but 1% of the held-out",
    ),
    "guidance_curve": (lambda f: f({"early": SWEEP, "late": SWEEP}), "early, 7.5: 27.0, 0.4; late, 1: 20.0, 0.5"),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_figure_is_a_png_whose_alternative_text_says_what_it_shows(name):
    """Drawn once: what pyplot holds, a notebook draws again."""
    draw, said = EVERY[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data, metadata = draw(getattr(figures, name))._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert said in metadata["image/png"]["alt"] == data["text/plain"]
    assert plt.get_fignums() == []


def test_no_image_at_all_is_a_figure_that_says_so():
    """As of a sample of raw rows of which none can be decoded."""
    data, _ = figures.pictures([], [])._repr_mimebundle_()
    assert data["text/plain"] == "No image can be shown."


def test_a_stored_figure_has_the_colours_that_matplotlib_draws():
    figure, drawn = EVERY["timeline"][0](figures.timeline), io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    data, _ = figure._repr_mimebundle_()
    as_drawn, stored = (
        np.asarray(Image.open(png).convert("RGB"), int) for png in (drawn, io.BytesIO(data["image/png"]))
    )
    assert (stored[0, 0] == 255).all()  # the white margin
    assert np.abs(stored - as_drawn).max() <= 2
