"""A blind side-by-side of two models: which picture is better, and which fits its prompt better?

    pairs = side_by_side.pairs(pictures_a, pictures_b, prompts, seed=0)
    judging = side_by_side.SideBySide(pairs, "storage/choices.csv", names=("step 800", "step 2400"))
    judging                                              # in a cell of its own: a reader judges pair by pair
    side_by_side.report(judging.choices, judging.names)  # preferences with 95 % intervals

Choices are stored as CSV, one row per pair: `pair` (its prompt's index), `prompt`, `pictures` (checksum of both),
`quality` and `alignment`. The last two hold the preferred model's name, "no preference", or nothing if not answered. A
file that was filled in elsewhere needs only these two columns.
"""

from __future__ import annotations

import io
import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import pandas as pd
from PIL import Image

from .. import storage

QUESTIONS = {"quality": "Which picture is better?", "alignment": "Which fits the prompt better?"}
NO_PREFERENCE = "no preference"
COLUMNS = ["pair", "prompt", "pictures", *QUESTIONS]
SIDE = 320  # least pixels of a picture's longer side on the screen


@dataclass(frozen=True)
class Pair:
    """Two pictures of a prompt, (H, W, 3) uint8. `number`: the prompt's index. `left_model`: 0 or 1."""

    number: int
    prompt: str
    left: np.ndarray
    right: np.ndarray
    left_model: int

    @property
    def by_model(self) -> tuple[np.ndarray, np.ndarray]:
        return (self.left, self.right) if self.left_model == 0 else (self.right, self.left)

    @property
    def checksum(self) -> str:
        return format(zlib.crc32(b"".join(np.ascontiguousarray(one).tobytes() for one in self.by_model)), "08x")


def pairs(
    pictures_a: Sequence[np.ndarray], pictures_b: Sequence[np.ndarray], prompts: Sequence[str], seed: int = 0
) -> list[Pair]:
    """Pairs in random order; each model's pictures are on the left in a random half of them.

    Pictures are (H, W, 3) uint8, one per prompt. Raises ValueError for lists of different lengths, or empty ones.
    """
    if not len(pictures_a) == len(pictures_b) == len(prompts) > 0:
        raise ValueError(
            f"{len(pictures_a)} and {len(pictures_b)} pictures for {len(prompts)} prompts: give one of each model for "
            "each prompt, and at least one prompt."
        )
    random = np.random.default_rng(seed)
    left_models = random.permutation(np.arange(len(prompts)) % 2)
    found = []
    for number in random.permutation(len(prompts)).tolist():
        both, left = (pictures_a[number], pictures_b[number]), int(left_models[number])
        found.append(Pair(number, prompts[number], np.asarray(both[left]), np.asarray(both[1 - left]), left))
    return found


class SideBySide(widgets.VBox):
    """Shows pairs one by one and saves each of the reader's choices to a CSV file at once.

    Created again with the same file, it continues at the first pair that lacks an answer.

    Args:
        pairs: what `pairs` returned.
        uri: the file of the choices.
        names: of the two models, in the order in which `pairs` got their pictures. They are not shown.

    Raises ValueError if the file holds choices about other pictures or models, and as `read_choices` does.
    """

    def __init__(self, pairs: Sequence[Pair], uri: str, names: Sequence[str] = ("a", "b")):
        self.pairs, self.uri, self.names = list(pairs), uri, check_names(names)
        self.answers = self.read_answers() if storage.exists(uri) else {}
        self.title, self.prompt = widgets.Label(), widgets.Label()
        self.left, self.right = widgets.Image(), widgets.Image()
        self.questions = {}
        for question, text in QUESTIONS.items():
            options = [("left", "left"), (NO_PREFERENCE, NO_PREFERENCE), ("right", "right")]
            style = {"description_width": "15em"}
            self.questions[question] = widgets.ToggleButtons(options=options, value=None, description=text, style=style)
            self.questions[question].observe(self.chosen, "value")
        self.back, self.next = widgets.Button(description="Back"), widgets.Button(description="Next")
        self.back.on_click(lambda _: self.show(self.place - 1))
        self.next.on_click(lambda _: self.show(self.place + 1))
        super().__init__()
        unanswered = [place for place, pair in enumerate(self.pairs) if len(self.answers.get(pair.number, {})) < 2]
        self.show(unanswered[0] if unanswered else len(self.pairs))

    def read_answers(self) -> dict[int, dict[str, str]]:
        """{pair's number: {question: answer}} of the file."""
        choices, known = read_choices(self.uri, self.names), {pair.number: pair for pair in self.pairs}
        answers = {}
        for row in choices.to_dict("records"):
            pair = known.get(int(row["pair"])) if str(row.get("pair", "")).isdigit() else None
            if pair is None or (row.get("prompt"), row.get("pictures")) != (pair.prompt, pair.checksum):
                raise ValueError(
                    f"{self.uri} holds choices about other pictures ({row.get('prompt', 'without a prompt')!r}): give "
                    "another file for these, or delete it."
                )
            answers[pair.number] = {question: row[question] for question in QUESTIONS if row[question]}
        return answers

    def show(self, place: int) -> None:
        """Show the pair at index `place` of `pairs`; after the last one, a note that all are judged."""
        self.place = place
        if place >= len(self.pairs):
            self.title.value = f"All {len(self.pairs)} pairs are judged."
            self.children = [self.title, widgets.HBox([self.back])]
            self.back.disabled = False
            return
        pair = self.pairs[place]
        self.title.value, self.prompt.value = f"Pair {place + 1} of {len(self.pairs)}", pair.prompt
        self.left.value, self.right.value = to_png(pair.left), to_png(pair.right)
        answers, (left, right) = self.answers.get(pair.number, {}), self.sides(pair)
        for question, buttons in self.questions.items():
            buttons.value = {left: "left", right: "right", NO_PREFERENCE: NO_PREFERENCE}.get(answers.get(question))
        self.update_buttons()
        both = widgets.HBox([self.left, self.right])
        self.children = [
            *(self.title, self.prompt, both),
            *self.questions.values(),
            widgets.HBox([self.back, self.next]),
        ]

    def sides(self, pair: Pair) -> tuple[str, str]:
        """The names of the models whose pictures are on the left and on the right."""
        return self.names[pair.left_model], self.names[1 - pair.left_model]

    def chosen(self, change: dict) -> None:
        """Save the answer of a reader's click. Also called when showing another pair sets the buttons."""
        pair = self.pairs[self.place]
        left, right = self.sides(pair)
        shown = {question: buttons.value for question, buttons in self.questions.items()}
        question = next(name for name, buttons in self.questions.items() if buttons is change["owner"])
        answer = {"left": left, "right": right}.get(shown[question], shown[question])
        if answer and self.answers.get(pair.number, {}).get(question) != answer:
            self.answers.setdefault(pair.number, {})[question] = answer
            storage.write_text(self.uri, self.choices.to_csv(index=False))
        self.update_buttons()

    def update_buttons(self) -> None:
        self.back.disabled = self.place == 0
        self.next.disabled = len(self.answers.get(self.pairs[self.place].number, {})) < len(QUESTIONS)

    @property
    def choices(self) -> pd.DataFrame:
        """The choices so far, in the columns of the file; "" where a question is not answered yet."""
        known = {pair.number: pair for pair in self.pairs}
        rows = [
            [number, known[number].prompt, known[number].checksum, *(answers.get(one, "") for one in QUESTIONS)]
            for number, answers in sorted(self.answers.items())
        ]
        return pd.DataFrame(rows, columns=COLUMNS)


def to_png(picture: np.ndarray) -> bytes:
    """Pictures smaller than `SIDE` are enlarged by an integer factor, without smoothing: their pixels are visible."""
    shown, data = Image.fromarray(picture), io.BytesIO()
    factor = -(-SIDE // max(shown.size))
    shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST).save(data, "PNG")
    return data.getvalue()


def check_names(names: Sequence[str]) -> tuple[str, str]:
    if len(names) != 2 or len({*names, NO_PREFERENCE, ""}) < 4:
        raise ValueError(f"names={names!r} must be two different names, neither empty nor {NO_PREFERENCE!r}.")
    return tuple(names)


def read_choices(uri: str, names: Sequence[str]) -> pd.DataFrame:
    """The choices in a CSV file, as text: `quality`, `alignment` and any other columns.

    Raises FileNotFoundError, and ValueError if it is not such a table: the message names the file and, for a value that
    is not one of `names`, "no preference" or empty, the row.
    """
    if not storage.is_file(uri):
        raise FileNotFoundError(f"{uri} does not exist: judge some pairs first, or give the file that holds choices.")
    try:
        choices = pd.read_csv(io.StringIO(storage.read_text(uri)), dtype=str, keep_default_na=False)
    except UnicodeDecodeError:
        raise ValueError(f"{uri} is not UTF-8: save it as CSV in UTF-8.") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{uri} is not a CSV table ({' '.join(str(error).split())}).") from None
    return check_choices(choices, names, uri)


def check_choices(choices: pd.DataFrame, names: Sequence[str], what: str = "choices") -> pd.DataFrame:
    """The choices, if they have the required columns and valid values; else raises ValueError."""
    allowed = [*check_names(names), NO_PREFERENCE]
    for question in QUESTIONS:
        if question not in choices:
            raise ValueError(f"{what} has no column {question!r}: it needs {' and '.join(QUESTIONS)}.")
        for row, value in enumerate(choices[question], start=1):
            if value not in [*allowed, ""]:
                raise ValueError(f"{what}, row {row}: {question}={value!r} is none of {', '.join(map(repr, allowed))}.")
    if not any(choices[question].astype(bool).any() for question in QUESTIONS):
        raise ValueError(f"{what} holds no choices: judge at least one pair.")
    return choices


def judge(pairs: Sequence[Pair], names: Sequence[str], **scores: Callable[[np.ndarray, str], float]) -> pd.DataFrame:
    """A program's choices, for data that one can judge: the picture with the higher `score(picture, prompt)`.

    `scores`: one for each question, "quality" and "alignment". Equal scores, and NaN, mean no preference.
    """
    rows = []
    for pair in pairs:
        answers = []
        for question in QUESTIONS:
            a, b = (scores[question](picture, pair.prompt) for picture in pair.by_model)
            answers.append(names[0] if a > b else names[1] if b > a else NO_PREFERENCE)
        rows.append([pair.number, pair.prompt, pair.checksum, *answers])
    return pd.DataFrame(rows, columns=COLUMNS)


def report(choices: pd.DataFrame, names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """How often each model was preferred, by question.

    Columns: for each of `names` and "no preference" the number of choices; `preferred`, the share of the second model
    among those that prefer one; `low` and `high`, its Wilson interval. An interval that excludes 0.5 shows a
    preference; if several readers judge the same prompt, their choices are not independent and the interval is too
    narrow. Raises ValueError as `read_choices` does.
    """
    rows, (first, second) = {}, check_names(names)
    check_choices(choices, names)
    for question in QUESTIONS:
        counts = {answer: int((choices[question] == answer).sum()) for answer in (first, NO_PREFERENCE, second)}
        decided = counts[first] + counts[second]
        low, high = wilson_interval(counts[second], decided, confidence)
        preferred = counts[second] / decided if decided else math.nan
        rows[question] = {**counts, "preferred": preferred, "low": low, "high": high}
    return pd.DataFrame.from_dict(rows, orient="index")


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson, 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    z, share = statistics.NormalDist().inv_cdf(0.5 + confidence / 2), successes / trials
    middle = share + z**2 / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
