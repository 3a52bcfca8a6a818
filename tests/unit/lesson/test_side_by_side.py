"""The blind side-by-side: pairs, the widget without a browser, choices in files, preferences with intervals."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from helpers import sample
from helpers.lesson import side_by_side
from helpers.lesson.side_by_side import NO_PREFERENCE, SideBySide
from tests.pipelines import untrained_pipeline

NAMES = ("early", "late")
PROMPTS = [f'a "red", square number {number}' for number in range(6)]
A, B = ([np.full((8, 8, 3), 40 * model + number, np.uint8) for number in range(6)] for model in (1, 2))


def shown_models(judging):
    """{side: the model whose picture is there on the screen}"""
    seen = [np.asarray(Image.open(io.BytesIO(image.value)))[0, 0, 0] for image in judging.children[2].children]
    return {side: NAMES[value // 40 - 1] for side, value in zip(("left", "right"), seen, strict=True)}


@pytest.mark.usefixtures("one_thread")
def test_two_pipelines_draw_the_same_prompts(tmp_path):
    folders = [str(tmp_path / name) for name in NAMES]
    for seed, folder in enumerate(folders):
        sample.export_pipeline(untrained_pipeline(seed=seed), folder)
    pairs = side_by_side.draw_pairs(folders, PROMPTS[:2], resolution=32, steps=1)
    for pair in pairs:
        first, second = pair.by_model
        assert pair.prompt == PROMPTS[pair.number] and first.shape == (32, 32, 3) and (first != second).any()


def test_pairs_are_shuffled_and_sides_are_blind():
    pairs = side_by_side.pair_up(A * 50, B * 50, PROMPTS * 50, seed=1)
    assert sorted(pair.number for pair in pairs) == list(range(300))
    assert [pair.number for pair in pairs] != list(range(300))
    sides = [pair.left_model for pair in pairs]
    assert sum(sides) == 150  # each model is on the left as often
    assert 100 < sum(one != other for one, other in zip(sides, sides[1:], strict=False)) < 200  # no pattern
    for pair in pairs:
        assert pair.prompt == (PROMPTS * 50)[pair.number]
        assert (pair.by_model[0] == A[pair.number % 6]).all() and (pair.by_model[1] == B[pair.number % 6]).all()
    orders = [[pair.number for pair in side_by_side.pair_up(A, B, PROMPTS, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match="^6 and 5 pictures for 6 prompts: give one of each model"):
        side_by_side.pair_up(A, B[:5], PROMPTS)


def test_choices_are_kept_pair_by_pair_and_resumed(tmp_path):
    pairs, uri = side_by_side.pair_up(A, B, PROMPTS), str(tmp_path / "choices.csv")
    judging, expected = SideBySide(pairs, uri, NAMES), {}
    for place in range(3):
        assert [label.value for label in judging.children[:2]] == [f"Pair {place + 1} of 6", pairs[place].prompt]
        models = shown_models(judging)
        assert set(models.values()) == set(NAMES)
        judging.questions[0].value = "left"
        judging.next.click()
        assert judging.said.value == "Answer both questions first." and len(judging.choices) == place
        judging.questions[1].value = ["right", NO_PREFERENCE, "left"][place]
        expected[pairs[place].prompt] = [models["left"], models.get(judging.questions[1].value, NO_PREFERENCE)]
        judging.next.click()
    kept = side_by_side.read_choices(uri, NAMES)
    assert kept.set_index("prompt")[["quality", "alignment"]].T.to_dict("list") == expected
    again = SideBySide(pairs, uri, NAMES)  # in another kernel
    for _ in range(3):
        for buttons in again.questions:
            buttons.value = NO_PREFERENCE
        again.next.click()
    assert again.children[0].value == "All 6 pairs are judged." and len(again.choices) == 6


def test_choices_about_other_pictures_are_not_resumed(tmp_path):
    uri, pairs = str(tmp_path / "choices.csv"), side_by_side.pair_up(A, B, PROMPTS)
    judging = SideBySide(pairs, uri, NAMES)
    for buttons in judging.questions:
        buttons.value = "left"
    judging.next.click()
    for others in (side_by_side.pair_up(B, A, PROMPTS), side_by_side.pair_up(A, B, PROMPTS[::-1])):
        with pytest.raises(ValueError, match=f"^{uri} holds choices about other pictures: give another file"):
            SideBySide(others, uri, NAMES)
    with pytest.raises(ValueError, match=f"^{uri}, row 1: quality='.*' is none of 'x', 'y', 'no preference'"):
        SideBySide(pairs, uri, ("x", "y"))


def test_a_report_counts_preferences_and_ties():
    rows = [("late", "late")] * 6 + [("early", "late")] * 3 + [(NO_PREFERENCE, "late")] * 2 + [("early", "")]
    choices = pd.DataFrame(rows, columns=["quality", "alignment"])
    found = side_by_side.report(choices, NAMES)
    assert found.loc["quality", ["early", NO_PREFERENCE, "late"]].tolist() == [4, 2, 6]
    assert found.loc["alignment", ["early", NO_PREFERENCE, "late"]].tolist() == [0, 0, 11]
    assert found.loc["quality", "preferred"] == 0.6 and found.loc["alignment", "preferred"] == 1
    wilson = [0.3126737697, 0.8318196703]  # scipy.stats.binomtest(6, 10).proportion_ci(method="wilson"), scipy 1.17
    assert found.loc["quality", ["low", "high"]].tolist() == pytest.approx(wilson)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"quality,alignment\nearl\xff,late\n", "is not a CSV table in UTF-8"),
        (b"quality,alignment\nlate,late\nlate,late,late\n", "is not a CSV table in UTF-8"),
        (b"quality\nlate\n", "has no column 'alignment': it needs quality and alignment"),
        (b"quality,alignment\nlate,\nbest,late\n", ", row 2: quality='best' is none of 'early', 'late', 'no pref"),
    ],
)
def test_a_bad_file_of_choices_is_refused(content, sentence, tmp_path):
    path = tmp_path / "choices.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        side_by_side.read_choices(str(path), NAMES)
    assert str(error.value).startswith(str(path)) and sentence in str(error.value) and "\n" not in str(error.value)


def test_a_file_filled_in_elsewhere_is_reported(tmp_path):
    path = tmp_path / "choices.csv"
    path.write_text("reader,quality,alignment\nann,late,early\nbob,no preference,\n")
    found = side_by_side.report(side_by_side.read_choices(str(path), NAMES), NAMES)
    assert found[["early", NO_PREFERENCE, "late"]].values.tolist() == [[0, 1, 1], [1, 0, 0]]


def test_names_must_tell_the_models_apart(tmp_path):
    for names in (["one"], ["same", "same"], ["late", NO_PREFERENCE], ["", "late"]):
        with pytest.raises(ValueError, match="^names=.* must be two different names"):
            SideBySide(side_by_side.pair_up(A, B, PROMPTS), str(tmp_path / "choices.csv"), names)


def test_a_program_can_judge_in_place_of_a_reader():
    pairs = side_by_side.pair_up(A, B, PROMPTS)
    judged = side_by_side.judge(
        pairs, NAMES, quality=lambda picture, _: picture.mean(), alignment=lambda picture, _: float("nan")
    )
    assert set(judged["quality"]) == {"late"} and set(judged["alignment"]) == {NO_PREFERENCE}
