"""A run over time: what its figure shows."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from helpers import storage
from helpers.lesson.figures import run_over_time
from helpers.production.extras import results
from helpers.train.metrics import MetricsLog

PROMPTS = ["a large red circle in the centre on a blue background", "a small white square"]
SPEED = {"images_per_second": 10.0, "step_seconds": 1.0, "checkpoint_seconds": 0.0, "data_wait_share": 0.1}


def picture(step, size=16):
    return np.full((size, size, 3), 2 * step, np.uint8)


@pytest.fixture
def build_run(tmp_path):
    """A function that makes a run's folder: 60 steps, evaluated at 20 and 60, skipped at 40."""

    def build(name, level=1.0, evaluated=(20, 60)):
        uri = str(tmp_path / "runs" / name)
        storage.write_text(storage.join(uri, "config.json"), "{}")
        log = MetricsLog(uri)
        for step in range(1, 61):
            line = {"loss": level / step, "grad_norm": 1.0, "learning_rate": 1e-3, "num_kept": 1, **SPEED}
            log.write(step, line, [step])
        for step in evaluated:
            by_noise = {str(timestep): level * timestep / step for timestep in (62, 500, 937)}
            found = {"step": step, "validation_loss": level / step, "unweighted": 1.0, "rows": 4, "prompts": 2}
            results.write_result(
                uri, {**found, "loss_by_noise": by_noise, "clip_score": 20 + step / 10, "agreement": step / 60}
            )
            folder = storage.join(uri, "evaluation", f"{step:09d}")
            for place, shown in enumerate((picture(step), picture(step))):
                png = io.BytesIO()
                Image.fromarray(shown).save(png, format="PNG")
                storage.write_bytes(storage.join(folder, f"{place:02d}.png"), png.getvalue())
            storage.write_text(storage.join(folder, "prompts.json"), json.dumps(PROMPTS))
        if evaluated:
            results.note(uri, 40, skipped="the checkpoint of step 60 is newer and is evaluated instead")
        return uri

    return build


def drawn(fig):
    fig.canvas.draw()
    return fig


def test_a_run_over_time_is_one_figure(build_run):
    fig = drawn(run_over_time(build_run("first")))
    labels = {ax.get_ylabel().partition(" (")[0] for ax in fig.axes}  # what stands in brackets is said of the axis
    assert {"loss", "loss by noise level", "CLIP score", "agreement"} <= labels and "CMMD" not in labels
    pictures = [ax for ax in fig.axes if ax.images]
    assert len(pictures) == 4 and {ax.get_title() for ax in pictures} >= {"step 20", "step 60"}
    assert "loss from 0.245 to 0.0186" in fig.alt_text and "agreement from 0.333 to 1" in fig.alt_text


def test_a_run_that_was_not_evaluated_shows_its_loss(build_run):
    fig = drawn(run_over_time(build_run("first", evaluated=())))
    (ax,) = fig.axes
    assert ax.get_ylabel().startswith("loss")


def test_a_run_without_a_step_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="no step in .*/nobody: give the folder of a run"):
        run_over_time(str(tmp_path / "nobody"))
