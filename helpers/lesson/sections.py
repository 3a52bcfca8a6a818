"""The cells of a notebook: which optional ones run (`# section: NAME`), which names its parameters cells may set."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence

from IPython import get_ipython

from ..config import PARAMETERS_PAGE, TrainingConfig, names_of
from ..online.config import OnlineConfig

chosen_sections: list[str] = []
# What may be given to a notebook: one profile serves all.
NAMES = {*names_of(OnlineConfig), *names_of(TrainingConfig), "ray_address", "sections", "own_pictures"}
NAMES |= {"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH", "other_pipeline", "other_prompts", "clip_model"}
NAMES |= {"online_run_name", "measured_steps", "phase_steps", "trainer_gpus", "encoder_gpu"}


def choose_sections(sections: Sequence[str], known: Sequence[str]) -> None:
    """From now on, leave out cells that begin with `# section: NAME` of a section that is not chosen.

    Raises ValueError if `sections` names one that the notebook does not have.
    """
    choices = ", ".join(map(repr, known))
    if not isinstance(sections, (list, tuple)):
        raise ValueError(
            f"sections={sections!r} must be a list of {choices}, or [] for what a job needs (papermill -y)."
        )
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


def check_names(cells: Sequence[str]) -> None:
    """Raises ValueError if a parameters cell sets a name that is no parameter. `cells`: those run so far (`In`).

    A cell counts until a later one sets one of its names again: a cell that was mended takes the place of what it was.
    papermill puts what it is given (`-p`, `-f`) into a cell of its own. Parameters of other notebooks are allowed, as a
    profile serves all.
    """
    seen: set[str] = set()
    for cell in reversed(cells):
        names = names_set(cell)
        if seen.isdisjoint(names):
            for name in names:
                if name not in NAMES:
                    close = difflib.get_close_matches(name, NAMES, 1)
                    meant = f" (did you mean {close[0]}?)" if close else ""
                    raise ValueError(f"{name} is not a parameter{meant}: see {PARAMETERS_PAGE}.")
        seen.update(names)


def names_set(cell: str) -> list[str]:
    """The names that a parameters cell sets; [] of another cell.

    It consists of assignments alone, and sets a parameter or begins with papermill's comment.
    """
    try:
        statements = ast.parse(cell).body
    except SyntaxError:  # magic, such as "%time"
        return []
    targets = [getattr(statement, "targets", [None])[0] for statement in statements]
    if not all(isinstance(target, ast.Name) for target in targets):
        return []
    names = [target.id for target in targets]
    return names if cell.startswith("# Parameters\n") or NAMES.intersection(names) else []
