"""The blind side-by-side: pairs, the widget without a browser, choices in files, preferences with intervals."""

import csv
import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats

from helpers.evaluation import figures, side_by_side
from helpers.evaluation.side_by_side import NO_PREFERENCE, SideBySide

NAMES = ("early", "late")
PROMPTS = [f'a "red", square number {number}' for number in range(6)]
A, B = ([np.full((8, 8, 3), 40 * model + number, np.uint8) for number in range(6)] for model in (1, 2))


def shown_model(picture):
    """The model whose picture is on the screen."""
    return NAMES[np.asarray(Image.open(io.BytesIO(picture.value)))[0, 0, 0] // 40 - 1]


def test_pairs_are_shuffled_and_sides_are_blind():
    found = side_by_side.pairs(A * 50, B * 50, PROMPTS * 50, seed=1)
    assert sorted(pair.number for pair in found) == list(range(300))
    assert [pair.number for pair in found] != list(range(300))
    assert sum(pair.left_model for pair in found) == 150  # each model is on the left as often
    sides = [pair.left_model for pair in found]
    assert 100 < sum(one != other for one, other in zip(sides, sides[1:], strict=False)) < 200  # no pattern
    for pair in found:
        assert pair.prompt == (PROMPTS * 50)[pair.number]
        assert (pair.by_model[0] == A[pair.number % 6]).all() and (pair.by_model[1] == B[pair.number % 6]).all()
    again, other = (side_by_side.pairs(A, B, PROMPTS, seed) for seed in (0, 1))
    assert [one.number for one in again] == [one.number for one in side_by_side.pairs(A, B, PROMPTS, 0)]
    assert [one.number for one in again] != [one.number for one in other]
    with pytest.raises(ValueError, match="^6 and 5 pictures for 6 prompts: give one of each model"):
        side_by_side.pairs(A, B[:5], PROMPTS)


def test_choices_are_kept_as_they_are_made_and_resumed(tmp_path):
    found, uri = side_by_side.pairs(A, B, PROMPTS), str(tmp_path / "choices.csv")
    judging = SideBySide(found, uri, NAMES)
    expected = {}
    for place in range(3):
        assert judging.title.value == f"Pair {place + 1} of 6" and judging.next.disabled
        assert judging.prompt.value == found[place].prompt
        models = {"left": shown_model(judging.left), "right": shown_model(judging.right)}
        assert set(models.values()) == set(NAMES)
        judging.questions["quality"].value = "left"
        assert judging.next.disabled
        judging.questions["alignment"].value = ["right", NO_PREFERENCE, "left"][place]
        expected[found[place].prompt] = (
            models["left"],
            models.get(judging.questions["alignment"].value, NO_PREFERENCE),
        )
        judging.next.click()
    assert not any(buttons.value for buttons in judging.questions.values())
    judging.questions["quality"].value = "right"  # and the kernel ends here
    last = shown_model(judging.right)
    with open(uri, newline="") as file:
        kept = {row["prompt"]: (row["quality"], row["alignment"]) for row in csv.DictReader(file)}
    assert kept == {**expected, found[3].prompt: (last, "")}
    again = SideBySide(found, uri, NAMES)
    assert again.title.value == "Pair 4 of 6" and again.questions["quality"].value == "right"
    again.back.click()
    assert again.questions["alignment"].value == "left" and not again.next.disabled
    again.questions["alignment"].value = "right"  # a changed mind
    assert (
        SideBySide(found, uri, NAMES).choices.set_index("prompt").loc[found[2].prompt, "alignment"]
        != expected[found[2].prompt][1]
    )


def test_all_pairs_judged_is_said(tmp_path):
    judging = SideBySide(side_by_side.pairs(A[:2], B[:2], PROMPTS[:2]), str(tmp_path / "choices.csv"), NAMES)
    for _ in range(2):
        for buttons in judging.questions.values():
            buttons.value = NO_PREFERENCE
        judging.next.click()
    assert judging.title.value == "All 2 pairs are judged." and len(judging.choices) == 2


def test_choices_about_other_pictures_are_not_resumed(tmp_path):
    uri = str(tmp_path / "choices.csv")
    judging = SideBySide(side_by_side.pairs(A, B, PROMPTS), uri, NAMES)
    judging.questions["quality"].value = "left"
    for others in (side_by_side.pairs(B, A, PROMPTS), side_by_side.pairs(A, B, PROMPTS[::-1])):
        with pytest.raises(ValueError, match=f"^{uri} holds choices about other pictures .*: give another file"):
            SideBySide(others, uri, NAMES)
    with pytest.raises(ValueError, match=f"^{uri}, row 1: quality='.*' is none of 'x', 'y', 'no preference'"):
        SideBySide(judging.pairs, uri, ("x", "y"))


def test_a_report_counts_preferences_and_ties():
    rows = [("late", "late")] * 6 + [("early", "late")] * 3 + [(NO_PREFERENCE, "late")] * 2 + [("early", "")]
    choices = pd.DataFrame(rows, columns=["quality", "alignment"])
    found = side_by_side.report(choices, NAMES)
    assert found.loc["quality", ["early", NO_PREFERENCE, "late"]].tolist() == [4, 2, 6]
    assert found.loc["alignment", ["early", NO_PREFERENCE, "late"]].tolist() == [0, 0, 11]
    assert found.loc["quality", "preferred"] == 0.6 and found.loc["alignment", "preferred"] == 1
    wilson = stats.binomtest(6, 10).proportion_ci(method="wilson")
    assert found.loc["quality", ["low", "high"]].tolist() == pytest.approx([wilson.low, wilson.high])


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilson_intervals_agree_with_scipy(confidence):
    for successes, trials in [(0, 1), (1, 1), (3, 10), (50, 100), (999, 1000)]:
        expected = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
        found = side_by_side.wilson_interval(successes, trials, confidence)
        assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert side_by_side.wilson_interval(0, 0) == (0, 1)


BAD = {
    "does not exist: judge some pairs first": None,
    "is not UTF-8: save it as CSV": b"quality,alignment\nearl\xff,late\n",
    "is not a CSV table": b"",
    "is not a CSV table ": b"quality,alignment\nlate,late\nlate,late,late\n",
    "has no column 'alignment': it needs quality and alignment": b"quality\nlate\n",
    "holds no choices: judge at least one pair": b"quality,alignment\n",
    ", row 2: quality='best' is none of 'early', 'late', 'no preference'": b"quality,alignment\nlate,\nbest,late\n",
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_bad_file_of_choices_is_refused(sentence, tmp_path):
    path = tmp_path / "choices.csv"
    if BAD[sentence] is not None:
        path.write_bytes(BAD[sentence])
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        side_by_side.read_choices(str(path), NAMES)
    assert str(error.value).startswith(str(path)) and sentence.strip() in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_filled_in_elsewhere_is_reported(tmp_path):
    path = tmp_path / "choices.csv"
    path.write_text("reader,quality,alignment\nann,late,early\nbob,no preference,\n")
    found = side_by_side.report(side_by_side.read_choices(str(path), NAMES), NAMES)
    assert found[["early", NO_PREFERENCE, "late"]].values.tolist() == [[0, 1, 1], [1, 0, 0]]


def test_names_must_tell_the_models_apart(tmp_path):
    for names in (["one"], ["same", "same"], ["late", NO_PREFERENCE], ["", "late"]):
        with pytest.raises(ValueError, match="^names=.* must be two different names"):
            SideBySide(side_by_side.pairs(A, B, PROMPTS), str(tmp_path / "choices.csv"), names)


def test_a_program_can_judge_in_place_of_a_reader():
    found = side_by_side.pairs(A, B, PROMPTS)
    judged = side_by_side.judge(
        found, NAMES, quality=lambda picture, _: picture.mean(), alignment=lambda picture, _: float("nan")
    )
    assert set(judged["quality"]) == {"late"} and set(judged["alignment"]) == {NO_PREFERENCE}


def test_the_figure_says_who_is_preferred():
    rows = [("late", NO_PREFERENCE)] * 3 + [("early", NO_PREFERENCE)]
    report = side_by_side.report(pd.DataFrame(rows, columns=["quality", "alignment"]), NAMES)
    figure = figures.preferences(report, title="who")
    assert "image quality: late preferred by 75% (30% to 95%)" in figure.alt_text
    assert "prompt alignment: late preferred by no one" in figure.alt_text
    left, right = figure.axes
    assert [bar.get_height() for bar in left.patches] == [25, 75] and not right.patches
    figure.canvas.draw()
