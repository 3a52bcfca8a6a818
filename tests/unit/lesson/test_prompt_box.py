"""The prompt box: what it draws, and what it says instead."""

import numpy as np
import pytest

from helpers import storage
from helpers.config import TrainingConfig
from helpers.lesson import prompt_box
from helpers.sample import export_pipeline, generate
from tests.pipelines import untrained_pipeline


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a finished run, which has a pipeline."""
    config = TrainingConfig(storage=str(tmp_path_factory.mktemp("storage")), run_name="a", sampling_steps=2)
    export_pipeline(untrained_pipeline(config), storage.join(config.run_uri, "pipeline"))
    return config


@pytest.fixture
def box(config):
    return prompt_box.PromptBox(config)


def said_and_png(box):
    return box.said.value, box.shown.value


def test_a_typed_prompt_is_drawn_as_the_pipeline_draws_it_and_again_from_other_noise(box, config):
    box.text.value = "a <red> circle"
    said, first = said_and_png(box)
    assert said == "a &lt;red&gt; circle" and box.shown.layout.display == "block"
    expected = generate(box.pipeline, ["a <red> circle"], resolution=64, steps=2, guidance_scale=config.guidance_scale)[
        0
    ]
    assert first == prompt_box.enlarged_png(expected)
    assert np.array_equal(box.draw("a <red> circle"), expected)
    box.again.click()
    assert box.shown.value != first


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (" ", "The prompt is empty: type what the image should show."),
        ("a" * 10_000, "The prompt has 10,000 characters: give at most 1,000."),
    ],
)
def test_a_bad_prompt_is_one_sentence_in_the_box(box, prompt, sentence):
    box.text.value = prompt
    assert said_and_png(box) == (sentence, b"")


def test_a_run_that_is_not_finished_or_was_deleted_is_one_sentence(config, tmp_path):
    unfinished = TrainingConfig(storage=str(tmp_path), run_name="b")
    with pytest.raises(FileNotFoundError, match="^run_name='b' has no pipeline in .*: run the cells that train it"):
        prompt_box.PromptBox(unfinished)
    storage.copy_folder(config.run_uri, unfinished.run_uri)
    box = prompt_box.PromptBox(unfinished)
    storage.delete(unfinished.run_uri)
    box.text.value = "a red circle"
    assert box.said.value.startswith("run_name=&#x27;b&#x27; has no pipeline in ")
