"""A blind side-by-side of two models: which image is better, and which fits its prompt better?

    pairs = side_by_side.pair_up(images_of_theirs, images_of_ours, prompts)
    judging = side_by_side.SideBySide(pairs, "storage/choices.csv", names=("theirs", "ours"))
    judging                                              # in a cell of its own: a reader judges pair by pair
    side_by_side.report(judging.choices, judging.names)  # preferences with 95 % intervals

Choices are stored as CSV, one row per pair: `pair` (its prompt's index), `prompt`, `pictures` (checksum of both),
`quality` and `alignment`. The last two hold the preferred model's name, "no preference", or nothing if a reader gave no
answer. A file that was filled in elsewhere needs only these two columns.
"""

from __future__ import annotations

import html
import io
import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import pandas as pd

from .. import storage
from ..notebook import printable
from ..sample import to_png

QUESTIONS = {"quality": "Which image is better?", "alignment": "Which fits the prompt better?"}
NO_PREFERENCE = "no preference"
COLUMNS = ["pair", "prompt", "pictures", *QUESTIONS]
SIDE = 320  # least pixels of an image's longer side on the screen


@dataclass(frozen=True)
class Pair:
    """Two models' images of a prompt, (H, W, 3) uint8. `number`: the prompt's index. `left_model`: 0 or 1."""

    number: int
    prompt: str
    by_model: tuple[np.ndarray, np.ndarray]
    left_model: int

    @property
    def checksum(self) -> str:
        return format(zlib.crc32(b"".join(np.ascontiguousarray(one).tobytes() for one in self.by_model)), "08x")


def pair_up(
    pictures_a: Sequence[np.ndarray], pictures_b: Sequence[np.ndarray], prompts: Sequence[str], seed: int = 0
) -> list[Pair]:
    """Pairs in random order; each model's images are on the left in a random half of them.

    Images are (H, W, 3) uint8, one per prompt. Raises ValueError for lists of different lengths, or empty ones.
    """
    if not len(pictures_a) == len(pictures_b) == len(prompts) > 0:
        counts = f"{len(pictures_a)} and {len(pictures_b)} pictures for {len(prompts)} prompts"
        raise ValueError(f"{counts}: give one of each model for each prompt, and at least one prompt.")
    random = np.random.default_rng(seed)
    left_models = random.permutation(np.arange(len(prompts)) % 2).tolist()
    pictures = list(zip(pictures_a, pictures_b, strict=True))
    order = random.permutation(len(prompts)).tolist()
    return [Pair(number, prompts[number], pictures[number], left_models[number]) for number in order]


class SideBySide(widgets.VBox):
    """Shows pairs one by one and saves a reader's choices about each to a CSV file.

    Created again with the same file, it continues at the first pair without choices.

    Args:
        pairs: what `pair_up` returned.
        uri: file of the choices.
        names: names of the two models, in the order of a pair's images. They are not shown.

    Raises ValueError if the file holds choices about other images or models, and as `read_choices` does.
    """

    def __init__(self, pairs: Sequence[Pair], uri: str, names: Sequence[str]):
        super().__init__()
        self.pairs, self.uri, self.names = {str(pair.number): pair for pair in pairs}, uri, check_model_names(names)
        self.choices = read_choices(uri, names) if storage.exists(uri) else pd.DataFrame(columns=COLUMNS)
        judged = set(self.choices[["pair", "prompt", "pictures"]].itertuples(index=False, name=None))
        if judged - {(number, csv_cell(pair.prompt), pair.checksum) for number, pair in self.pairs.items()}:
            raise ValueError(f"{uri} holds choices about other pictures: give another file for these, or delete it.")
        self.title, self.prompt, self.said = widgets.Label(), widgets.HTML(), widgets.Label()
        self.pictures = widgets.HBox([widgets.Image(), widgets.Image()])
        options, style = ["left", NO_PREFERENCE, "right"], {"description_width": "15em"}
        self.questions = [
            widgets.ToggleButtons(options=options, value=None, description=text, style=style)
            for text in QUESTIONS.values()
        ]
        self.next = widgets.Button(description="Next")
        self.next.on_click(self.save)
        self.show()

    def show(self) -> None:
        """Show the first pair without choices; after the last one, a note that all are judged.

        The widgets stay and get other values, so that the keyboard's focus stays where it is.
        """
        judged = set(self.choices["pair"])
        self.pair = next((pair for number, pair in self.pairs.items() if number not in judged), None)
        if self.pair is None:
            self.title.value = f"All {len(self.pairs)} pairs are judged."
            self.children = [self.title]
            return
        self.title.value = f"Pair {len(judged) + 1} of {len(self.pairs)}"
        self.prompt.value = html.escape(printable(self.pair.prompt))  # a Label would show formulas
        left = self.pair.left_model
        for widget, model in zip(self.pictures.children, (left, 1 - left), strict=True):
            widget.value = enlarged_png(self.pair.by_model[model])
        for buttons in self.questions:
            buttons.value = None
        self.said.value = ""
        self.children = [self.title, self.prompt, self.pictures, *self.questions, self.next, self.said]

    def save(self, _) -> None:
        if any(buttons.value is None for buttons in self.questions):
            self.said.value = "Answer both questions first."
            return
        left_model = self.pair.left_model
        names = {"left": self.names[left_model], "right": self.names[1 - left_model], NO_PREFERENCE: NO_PREFERENCE}
        answers = [names[buttons.value] for buttons in self.questions]
        self.choices.loc[len(self.choices)] = [
            str(self.pair.number),
            csv_cell(self.pair.prompt),
            self.pair.checksum,
            *answers,
        ]
        storage.write_text(self.uri, self.choices.to_csv(index=False))
        self.show()


def enlarged_png(picture: np.ndarray) -> bytes:
    """Images smaller than `SIDE` are enlarged by an integer factor, without smoothing: their pixels are visible."""
    factor = -(-SIDE // max(picture.shape))
    return to_png(picture.repeat(factor, axis=0).repeat(factor, axis=1))


def csv_cell(text: object) -> str:
    """A text for a cell of a table that spreadsheets open: they would calculate a formula."""
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def check_model_names(names: Sequence[str]) -> tuple[str, str]:
    if len(names) != 2 or len({*names, NO_PREFERENCE, ""}) < 4 or any(csv_cell(name) != name for name in names):
        raise ValueError(
            f"names={names!r} must be two different names, neither empty nor {NO_PREFERENCE!r}, nor formulas for a "
            "spreadsheet, which begin with =, +, - or @."
        )
    return tuple(names)


def read_choices(uri: str, names: Sequence[str]) -> pd.DataFrame:
    """The choices in a CSV file, as text in the columns `COLUMNS`. ValueError for another table or other names."""
    choices = pd.read_csv(io.StringIO(storage.read_text(uri)), dtype=str, keep_default_na=False)
    allowed = [*check_model_names(names), NO_PREFERENCE, ""]
    if not {*QUESTIONS} <= {*choices.columns} or not choices[[*QUESTIONS]].isin(allowed).all(axis=None):
        known = ", ".join(map(repr, allowed))
        raise ValueError(f"{uri} is no table of choices: its columns {' and '.join(QUESTIONS)} hold {known}.")
    return choices.reindex(columns=COLUMNS, fill_value="")


def judge(pairs: Sequence[Pair], names: Sequence[str], **scores: Callable[[np.ndarray, str], float]) -> pd.DataFrame:
    """The choices of a program: the image with the higher `score(image, prompt)`.

    `scores`: a score for each question, "quality" and "alignment". Equal scores, and NaN, mean no preference.
    """

    def prefer(pair, score):
        a, b = (score(picture, pair.prompt) for picture in pair.by_model)
        return names[0] if a > b else names[1] if b > a else NO_PREFERENCE

    return pd.DataFrame({question: [prefer(pair, scores[question]) for pair in pairs] for question in QUESTIONS})


def report(choices: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """How often each model was preferred, by question.

    Columns: for each of `names` and "no preference" the number of choices; `preferred`, the share of the second model
    among those that prefer one; `low` and `high`, its 95 % interval by Wilson. An interval that excludes 0.5 shows a
    preference; if several readers judge the same prompt, their choices are not independent and the interval is too
    narrow.
    """
    rows, (first, second) = {}, check_model_names(names)
    for question in QUESTIONS:
        counts = {answer: int((choices[question] == answer).sum()) for answer in (first, NO_PREFERENCE, second)}
        decided = counts[first] + counts[second]
        low, high = wilson_interval(counts[second], decided)
        preferred = counts[second] / decided if decided else math.nan
        rows[question] = {**counts, "preferred": preferred, "low": low, "high": high}
    return pd.DataFrame.from_dict(rows, orient="index")


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share (Wilson, 1927); (0, 1) without trials."""
    z = statistics.NormalDist().inv_cdf(0.975)
    middle = (successes + z**2 / 2) / (trials + z**2)
    variance = successes * (trials - successes) / max(1, trials) + z**2 / 4
    half = z * math.sqrt(variance) / (trials + z**2)
    return max(0.0, middle - half), min(1.0, middle + half)
