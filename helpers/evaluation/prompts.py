"""Prompts for evaluation: from a list, or from a file in its published format."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from .. import images, storage

COLUMNS = ("prompt", "caption", "text", "Prompts")  # the last one: as DrawBench and PartiPrompts are published


def read_prompts(
    prompts: list[str] | str,
    *,
    number: int | None = None,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[str]:
    """The prompts of a list, or of a file (path or URI).

    `.txt`: one per line; `.json`: a list of texts or objects, or COCO's captions_*.json as published, from which each
    image gives its caption with the lowest annotation id, in order of image ids; `.jsonl`: a text or object per line;
    `.csv` (`.tsv`) and `.parquet`: one per row. The column or object key is the first of `COLUMNS` that exists, or the
    only one. Blank lines are skipped; spaces around a prompt are removed.

    Args:
        number: sample this many by `seed`, without replacement and in order, as COCO's 30,000 captions are; None: all.
        tokenizer: rejects prompts that are longer than its limit.

    Duplicate prompts are kept and reported: each makes its own picture. Raises ValueError for files without prompts
    and, naming the line (or row), for text that is not UTF-8 and for prompts that are empty or too long.
    """
    if isinstance(prompts, str):
        where, found = repr(prompts), _read(prompts)
    else:
        where, found = "prompts", list(enumerate(prompts, 1))
    found = [(line, _text(value, where, line)) for line, value in found]
    if not found:
        raise ValueError(f"{where} holds no prompt: give at least one.")
    if tokenizer is not None:
        _check_lengths(found, where, tokenizer)
    if number is not None:
        if not 0 < number <= len(found):
            raise ValueError(
                f"number={number:,}, but {where} holds {len(found):,} prompts: give a number from 1 to {len(found):,}."
            )
        chosen = np.random.default_rng(seed).permutation(len(found))[:number]
        found = [found[place] for place in sorted(chosen)]
    _report_duplicates(found, where)
    return [text for _, text in found]


def _text(value: object, where: str, line: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}, line {line:,}: {value!r} is not text: prompts must be strings.")
    if not value.strip():
        raise ValueError(f"{where}, line {line:,} is empty: write a prompt, or leave the line out.")
    return " ".join(value.split())


def _check_lengths(found: list[tuple[int, str]], where: str, tokenizer: PreTrainedTokenizerBase) -> None:
    most = tokenizer.model_max_length
    counts = images.count_tokens([text for _, text in found], tokenizer)
    long = [(line, count) for (line, _), count in zip(found, counts, strict=True) if count > most]
    if long:
        line, count = long[0]
        raise ValueError(
            f"{where}, line {line:,} has {count:,} tokens; the text encoder reads {most}, with start and end, and "
            f"{len(long):,} of {len(found):,} prompts are longer: shorten or remove them."
        )


def _report_duplicates(found: list[tuple[int, str]], where: str) -> None:
    first, again = {}, []
    for line, text in found:
        if first.setdefault(text, line) != line:
            again.append((line, text))
    if again:
        line, text = again[0]
        print(
            f"{where} repeats {len(again):,} prompt(s), for example {text!r} in lines {first[text]:,} and {line:,}: "
            "each is used."
        )


def _read(uri: str) -> list[tuple[int, object]]:
    """[(line or row, counted from 1, value)] of a file."""
    kind = re.search(r"\.(txt|json|jsonl|csv|tsv|parquet)$", uri.lower())
    if not kind:
        raise ValueError(
            f"prompts={uri!r} is not a .txt, .json, .jsonl, .csv, .tsv or .parquet file: give one, or a list."
        )
    if not storage.is_file(uri):
        raise FileNotFoundError(f"prompts={uri!r} does not exist: give a file of prompts, or a list of them.")
    filesystem, path = storage.open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        data = file.readall()
    if kind[1] == "parquet":
        try:
            table = pq.read_table(pa.BufferReader(data))
            return list(enumerate(table[_column(table.column_names, uri)].to_pylist(), 1))
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise ValueError(
                f"prompts={uri!r} is not a Parquet file with UTF-8 text ({error}): give another."
            ) from None
    text = _decode(data, uri)
    if kind[1] in ("csv", "tsv"):
        rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if kind[1] == "tsv" else ",")
        try:
            numbered = [(rows.line_num, row) for row in rows if row]
        except csv.Error as error:
            raise ValueError(
                f"prompts={uri!r}, line {rows.line_num:,} is not valid CSV ({error}): correct it."
            ) from None
        if not numbered:
            return []
        names = numbered[0][1]
        place = names.index(_column(names, uri))
        return [(line, row[place] if place < len(row) else "") for line, row in numbered[1:]]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if kind[1] == "txt":
        return lines
    if kind[1] == "jsonl":
        values = [(number, _json(line, uri, number)) for number, line in lines]
    else:
        whole = _json(text, uri) if text.strip() else []
        if not isinstance(whole, (list, dict)):
            raise ValueError(f"prompts={uri!r} holds {whole!r}, not a list: give a list of prompts.")
        values = list(enumerate(whole if isinstance(whole, list) else _coco(whole, uri), 1))
    return [(line, v[_column(list(v), uri)] if isinstance(v, dict) else v) for line, v in values]


def _json(text: str, uri: str, line: int | None = None) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = line or error.lineno
        raise ValueError(f"prompts={uri!r}, line {where:,} is not valid JSON ({error.msg}): correct it.") from None


def _coco(whole: dict, uri: str) -> list[str]:
    """One caption per image, the one with the lowest annotation id, in order of image ids."""
    notes, needed = whole.get("annotations"), {"id", "image_id", "caption"}
    if not isinstance(notes, list) or not all(isinstance(note, dict) and needed <= note.keys() for note in notes):
        raise ValueError(
            f"prompts={uri!r} holds an object without `annotations` that have id, image_id and caption: give a list of "
            "prompts, or one of COCO's captions_*.json."
        )
    by_image = {}
    for note in sorted(notes, key=lambda note: note["id"]):
        by_image.setdefault(note["image_id"], note["caption"])
    return [by_image[image] for image in sorted(by_image)]


def _decode(data: bytes, uri: str) -> str:
    try:
        return data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"prompts={uri!r}, line {line:,} is not UTF-8: save the file as UTF-8.") from None


def _column(names: list[str], uri: str) -> str:
    found = next((name for name in COLUMNS if name in names), names[0] if len(names) == 1 else None)
    if found is None:
        raise ValueError(f"prompts={uri!r} has the columns {', '.join(names)}: name the prompts' one 'prompt'.")
    return found
