"""A user's text (a caption, a prompt, a name) where it is shown: nothing but text. For URIs: `storage.shown`."""

from __future__ import annotations

import re

# Control characters, of which terminals make commands; marks that reorder a line; halves of characters.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MARKDOWN = re.compile(r"[\\`*{}\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is only that


def printable(text: object) -> str:
    """For a terminal, a widget or a description. Tabs and ends of lines stay."""
    return UNPRINTABLE.sub("\ufffd", str(text))


def csv_cell(text: object) -> str:
    """For a cell of a table that spreadsheets open: they would calculate a formula."""
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def markdown_cell(text: object) -> str:
    """For a cell of a Markdown table."""
    return MARKDOWN.sub(r"\\\g<0>", " ".join(printable(text).split()))
