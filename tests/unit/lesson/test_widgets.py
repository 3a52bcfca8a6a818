"""The widgets, without a browser: a prompt box, and the blind side-by-side with its choices."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from helpers import storage
from helpers.config import TrainingConfig
from helpers.lesson import prompt_box, side_by_side
from helpers.lesson.side_by_side import NO_PREFERENCE, SideBySide
from helpers.sample import export_pipeline
from tests.pipelines import untrained_pipeline

NAMES = ("early", "late")
PROMPTS = [f'a "red", square number {number}' for number in range(6)]
A, B = ([np.full((8, 8, 3), 40 * model + number, np.uint8) for number in range(6)] for model in (1, 2))


@pytest.mark.usefixtures("one_thread")
def test_a_typed_prompt_is_drawn_and_again_from_other_noise(tmp_path):
    config = TrainingConfig(storage=str(tmp_path), run_name="a")
    with pytest.raises(FileNotFoundError, match="run_name='a' has no pipeline"):
        prompt_box.PromptBox(config)
    export_pipeline(untrained_pipeline(config), storage.join(config.run_uri, "pipeline"))
    box = prompt_box.PromptBox(config)
    box.text.value = "a <red> circle"
    assert box.said.value == "a &lt;red&gt; circle"
    first = box.shown.value
    assert first == side_by_side.enlarged_png(box.draw("a <red> circle"))
    box.again.click()
    assert box.shown.value != first
    box.text.value = " "
    assert "The prompt is empty" in box.said.value


def shown_models(judging):
    """{side: the model whose image is there on the screen}"""
    seen = [np.asarray(Image.open(io.BytesIO(image.value)))[0, 0, 0] for image in judging.children[2].children]
    return {side: NAMES[value // 40 - 1] for side, value in zip(("left", "right"), seen, strict=True)}


def test_pairs_are_shuffled_and_each_model_is_on_the_left_as_often():
    pairs = side_by_side.pair_up(A * 50, B * 50, PROMPTS * 50, seed=1)
    numbers = [pair.number for pair in pairs]
    assert sorted(numbers) == list(range(300)) != numbers and sum(pair.left_model for pair in pairs) == 150
    for pair in pairs:
        assert (pair.by_model[0] == A[pair.number % 6]).all() and (pair.by_model[1] == B[pair.number % 6]).all()


def test_choices_are_kept_pair_by_pair_and_resumed(tmp_path):
    pairs, uri = side_by_side.pair_up(A, B, PROMPTS), str(tmp_path / "choices.csv")
    judging, expected = SideBySide(pairs, uri, NAMES), {}
    for place in range(3):
        models = shown_models(judging)
        judging.questions[0].value = "left"
        judging.next.click()
        assert judging.said.value == "Answer both questions first." and len(judging.choices) == place
        judging.questions[1].value = ["right", NO_PREFERENCE, "left"][place]
        expected[pairs[place].prompt] = [models["left"], models.get(judging.questions[1].value, NO_PREFERENCE)]
        judging.next.click()
    kept = side_by_side.read_choices(uri, NAMES)
    assert kept.set_index("prompt")[["quality", "alignment"]].T.to_dict("list") == expected
    again = SideBySide(pairs, uri, NAMES)  # in another kernel
    assert again.children[0].value == "Pair 4 of 6"
    with pytest.raises(ValueError, match="other pictures"):
        SideBySide(side_by_side.pair_up(B, A, PROMPTS), uri, NAMES)
    with pytest.raises(ValueError, match="no table of choices"):
        SideBySide(pairs, uri, ("first", "second"))


def test_a_report_has_wilsons_interval():
    choices = pd.DataFrame({"quality": ["late"] * 8 + ["early"] * 2, "alignment": NO_PREFERENCE})
    found = side_by_side.report(choices, NAMES)
    assert found.loc["quality", ["early", "late", "preferred"]].tolist() == [2, 8, 0.8]
    assert found.loc["quality", ["low", "high"]].tolist() == pytest.approx([0.490, 0.943], abs=1e-3)
    assert found.loc["alignment", ["low", "high"]].tolist() == [0, 1]


def test_a_program_can_judge_in_place_of_a_reader():
    scores = dict(quality=lambda picture, _: picture.mean(), alignment=lambda picture, _: float("nan"))
    judged = side_by_side.judge(side_by_side.pair_up(A, B, PROMPTS), NAMES, **scores)
    assert set(judged["quality"]) == {"late"} and set(judged["alignment"]) == {NO_PREFERENCE}
