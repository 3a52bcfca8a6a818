"""The optional cells of a notebook: those that begin with `# section: NAME`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from IPython import get_ipython

from ..config import evaluate_texts

chosen_sections: list[str] = []


def choose_sections(sections: Sequence[str], known: Sequence[str]) -> None:
    """From now on, leave out cells that begin with `# section: NAME` of a section that is not chosen.

    Raises ValueError if `sections` names one that the notebook does not have.
    """
    choices, sections = ", ".join(map(repr, known)), evaluate_texts(sections)
    if not isinstance(sections, (list, tuple)):
        raise ValueError(f"sections={sections!r} must be a list of {choices}, or [] for what a job needs.")
    for section in sections:
        if section not in known:
            raise ValueError(f"sections={section!r} is unknown: choose one of {choices}.")
    chosen_sections[:] = sections
    shell = get_ipython()
    if shell is not None and only_chosen not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(only_chosen)


def only_chosen(lines: list[str]) -> list[str]:
    """A cell's lines, or one that says that its section is left out: an input transformer of IPython."""
    found = re.match(r"# section: ([\w-]+)", lines[0]) if lines else None
    if found is None or found[1] in chosen_sections:
        return lines
    return [f"print('left out: `sections` does not name {found[1]}')\n"]
