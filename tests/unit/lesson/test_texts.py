"""A user's text is shown as it stands: no formula, no escape sequence, no cell that a spreadsheet or Markdown reads."""

import csv
import html
import io
import re
import warnings

import mistune
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matplotlib.mathtext import MathTextParser

from helpers import notebook, storage
from helpers.config import TrainingConfig
from helpers.lesson import display, figures, side_by_side, trials
from helpers.production.card import model_card
from tests.unit.lesson.test_figures import PICTURE, RUN, SWEEP
from tests.unit.sample.test_export import data_sets

ODD = [
    "$x",
    "a $b$ c",
    r"\$\frac{$",
    "|\n| --- |",
    "=1+1",
    "\t=1",
    "\x1b[31mred",
    "\x9b2J",
    "\ud800",
    "<b>",
    "\u202eabc",
]
ODD += [
    "![i](https://a.b/c)",
    "*a* _b_ `c` ~~d~~",
    "# a",
    "{{ a }}",
    "{0}%s",
    "\0",
    "",
    " ",
    "中 \U0001f600 a\u0301",
    "a\\",
]
TEXTS = st.sampled_from(ODD) | st.text(st.characters(), max_size=40)
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PAIRS = {"seed": [0, 1, 0, 1], "value": [1.0, 2.0, 1.5, 2.5]}


def drawn_images(text):
    fig = figures.DescribedFigure(2)
    return fig.described(figures.draw_images(fig, {1: {text: PICTURE}}, [1], [text]))


def whole(text):
    """Without halves of characters, which pandas cannot hold."""
    return text.encode("utf-8", "replace").decode()


def paired(text):
    text = whole(text)
    frame = pd.DataFrame({"setting": [text] * 2 + [f"{text} other"] * 2, "metric": text, **PAIRS})
    return figures.paired_differences(frame, trials.compare_settings(frame))


FIGURES = {
    "pictures": lambda text: figures.pictures([PICTURE], [text], marks=[text]),
    "before_after": lambda text: figures.before_after([PICTURE], [PICTURE], [text], labels=(text, "b")),
    "loss_curves": lambda text: figures.loss_curves({text: RUN, f"{text} other": RUN}, consecutive=True),
    "guidance_curve": lambda text: figures.guidance_curve({text: SWEEP, f"{text} other": SWEEP}),
    "paired_differences": paired,
    "timestep_curves": lambda text: figures.timestep_curves({text: [1.0, 2.0], f"{text} other": [2.0, 1.0]}, "loss"),
    "run_over_time": drawn_images,
}


@pytest.mark.parametrize("name", FIGURES)
@few
@given(text=TEXTS)
@example(text="a $b$ c \x1b[31m \ud800")
@example(text="_a")
@example(text="")
def test_a_figure_draws_any_text_as_it_stands(name, text, monkeypatch):
    monkeypatch.setattr(MathTextParser, "parse", lambda *_: pytest.fail("a text was read as a formula"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data, _ = FIGURES[name](text)._repr_mimebundle_()
    assert data["image/png"] and data["text/plain"] == notebook.printable(data["text/plain"])


@given(text=TEXTS)
def test_a_printed_text_moves_no_cursor_and_is_utf8(text):
    found = notebook.printable(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", found) and found.encode() is not None
    (shown,) = display.as_text(pd.DataFrame({"a": [whole(text)]}))["a"]
    assert shown == notebook.printable(whole(text))


@few
@given(text=TEXTS)
def test_the_card_shows_any_text_in_its_cell(text):
    data = data_sets()
    data.first.job["input_uri"] = f"s3://bucket/{text}"
    body = model_card(TrainingConfig(resolution=32), data, 7).text
    rendered = mistune.create_markdown(plugins=["table", "strikethrough"])(body[body.index("| | |") :])
    cells = dict(re.findall("<td>(.*?)</td>\\s*<td>(.*?)</td>", rendered))
    shown = " ".join(notebook.printable(f"1,234 rows of {storage.shown(f's3://bucket/{text}')}").split())
    assert html.unescape(cells["data"]) == shown and len(cells) == 18


@few
@given(prompts=st.lists(TEXTS, min_size=2, max_size=2))
@example(prompts=["=1+1", "-2"])
def test_choices_are_kept_for_any_prompt_and_are_no_formula(prompts, tmp_path):
    pairs, uri = side_by_side.pair_up([PICTURE] * 2, [PICTURE + np.uint8(1)] * 2, prompts), str(tmp_path / "c.csv")
    storage.delete(uri)
    judging = side_by_side.SideBySide(pairs, uri, ("a", "b"))
    for question in judging.questions:
        question.value = "left"
    judging.next.click()
    cells = [cell for row in csv.reader(io.StringIO(storage.read_text(uri))) for cell in row]
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@")) for cell in cells)
    assert side_by_side.SideBySide(pairs, uri, ("a", "b")).children[0].value == "Pair 2 of 2"
