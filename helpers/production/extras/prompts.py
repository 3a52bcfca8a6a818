"""Prompts for evaluation: from a list, or from a file in its published format."""

from __future__ import annotations

import csv
import io
import pathlib

import transformers

from ... import storage
from ...encode import captions

COLUMNS = ("prompt", "caption", "text", "Prompts")  # the last one: as DrawBench and PartiPrompts are published
KINDS = (".txt", ".csv", ".tsv")


def read_prompts(
    prompts: list[str] | str, *, tokenizer: transformers.PreTrainedTokenizerBase | None = None
) -> list[str]:
    """The prompts of a list, or of a file (path or URI).

    `.txt`: one per line; `.csv` and `.tsv`: one per row, from the first of `COLUMNS` that exists, or the only column.
    Blank lines are skipped; spaces around a prompt are removed. Duplicate prompts are kept and reported: each gives an
    image of its own.

    `tokenizer`: rejects prompts that are longer than its limit. Raises ValueError for files without prompts and, naming
    the line, for text that is not UTF-8 and for prompts that are empty or too long.
    """
    where = repr(prompts) if isinstance(prompts, str) else "prompts"
    values = read_file(prompts) if isinstance(prompts, str) else list(enumerate(prompts, 1))
    if not values:
        raise ValueError(f"{where} holds no prompt: give at least one.")
    for line, value in values:
        if not isinstance(value, str):
            raise ValueError(f"{where}, line {line:,}: {value!r} is not text: prompts must be strings.")
        if not value.strip():
            raise ValueError(f"{where}, line {line:,} is empty: write a prompt, or leave the line out.")
    texts = {line: " ".join(value.split()) for line, value in values}
    if tokenizer is not None:
        check_lengths(texts, where, tokenizer)
    if repeated := len(texts) - len(set(texts.values())):
        print(f"{where} repeats {repeated:,} prompt(s): each is used.")
    return list(texts.values())


def check_lengths(texts: dict[int, str], where: str, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    most = tokenizer.model_max_length
    counts = dict(zip(texts, captions.count_tokens(list(texts.values()), tokenizer), strict=True))
    long = [line for line, count in counts.items() if count > most]
    if long:
        raise ValueError(
            f"{where}, line {long[0]:,} has {counts[long[0]]:,} tokens; the text encoder reads {most}, with start and "
            f"end, and {len(long):,} of {len(texts):,} prompts are longer: shorten or remove them."
        )


def read_file(uri: str) -> list[tuple[int, str]]:
    """[(line, counted from 1, its text)] of a file."""
    kind = pathlib.PurePath(uri.lower()).suffix
    if kind not in KINDS:
        raise ValueError(f"prompts={uri!r} is not a {', '.join(KINDS)} file: give one, or a list.")
    if not storage.is_file(uri):
        raise FileNotFoundError(f"prompts={uri!r} does not exist: give a file of prompts, or a list of them.")
    data = storage.read_bytes(uri)
    try:
        text = data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"prompts={uri!r}, line {line:,} is not UTF-8: save the file as UTF-8.") from None
    if kind == ".txt":
        return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if kind == ".tsv" else ",")
    column = choose_column(rows.fieldnames, uri) if rows.fieldnames else ""
    return [(rows.line_num, row[column] or "") for row in rows]


def choose_column(names: list[str], uri: str) -> str:
    known = [name for name in COLUMNS if name in names] or (names if len(names) == 1 else [])
    if not known:
        raise ValueError(f"prompts={uri!r} has the columns {', '.join(names)}: name the prompts' one 'prompt'.")
    return known[0]
