"""How the notebooks' parameters are declared and checked: types, fields, one sentence for a wrong value.

A config is a frozen dataclass, which pydantic checks when it is built. Each field says its type, its default, what it
is (the comment beside it in the notebooks' parameters cells) and, by the function that makes it, what it fixes. A wrong
value raises ValueError before anything starts, in one sentence that names the parameter, its value and what to change.
Building a config reads no storage.
"""

import ast
import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from ..storage import resolve


def resolve_model(name: str) -> str:
    """The absolute path of a local file or folder; other names (a preset, a hub id) stay as they are."""
    return os.path.abspath(name) if os.sep in name and os.path.exists(name) else name


def least_and_most(workers: int | Sequence[int]) -> tuple[int, int]:
    """Of a number of workers, or of a pair of them."""
    return (workers, workers) if isinstance(workers, int) else tuple(workers)


def check_order(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] > pair[1]:
        raise ValueError("the least number is larger than the most")
    return pair


def read_path(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


# ---- types of parameters that both classes have


def must_be(text: str, **limits: Any) -> Any:
    """`limits` of a value, and the text that completes the sentence "NAME=VALUE must be ..."."""
    return Field(description=text, **limits)


T = TypeVar("T")
Several = Annotated[tuple[T, ...], Field(strict=False)]  # a list or a tuple: papermill gives lists
Positive = Annotated[float, must_be("a number of more than 0", gt=0)]
Shares = Annotated[dict[T, Positive], Field(min_length=1)]
Text = Annotated[str, must_be("a text"), BeforeValidator(read_path)]
OptionalText = Annotated[Annotated[Text, Field(min_length=1)] | None, must_be("a text, or None")]
Location = Annotated[Text, AfterValidator(lambda uri: resolve(uri) if uri else "")]
Model = Annotated[Text, AfterValidator(resolve_model)]
Switch = Annotated[bool, must_be("True or False")]
Count = Annotated[int, must_be("a whole number of at least 1", ge=1)]
OptionalCount = Annotated[Count | None, must_be("a whole number of at least 1, or None")]
CountOrZero = Annotated[int, must_be("a whole number of at least 0", ge=0)]
Limit = Annotated[int, must_be("a whole number of at least 0, or -1 for no limit", ge=-1)]
Pair = Annotated[tuple[Count, Count], Field(strict=False), AfterValidator(check_order)]
Workers = Annotated[Count | Pair, must_be("a whole number of at least 1, or a pair (least, most) of them")]
Amount = Annotated[float, must_be("a number of at least 0", ge=0)]
Share = Annotated[float, must_be("a share: at least 0, less than 1", ge=0, lt=1)]


# ---- fields: what a parameter fixes, which must then be the same when a job or a run is resumed


def parameter(default: Any, text: str, *, fixes: str | None) -> Any:
    """A field: its default, the comment that stands beside it in each notebook, and what it fixes."""
    return dataclasses.field(default=default, metadata={"text": text, "fixes": fixes})


fixes_rows = functools.partial(parameter, fixes="rows")  # which rows are used, and at which size
fixes_latents = functools.partial(parameter, fixes="latents")  # what is stored of a row
fixes_run = functools.partial(parameter, fixes="run")  # what a run learns
free = functools.partial(parameter, fixes=None)  # nothing: it may change when a job or a run is resumed
LATENTS_URI = "encoded data; empty: storage/latents"
COMMIT = "REPLACE_WITH_COMMIT"  # in profiles: the commit of a model of the hub that is not known here
# What may be given to a notebook: `checked` adds the fields of each class.
NAMES = {"ray_address", "sections", "own_pictures", "PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}
NAMES |= {"other_pipeline", "other_prompts", "online_run_name"}  # of the lesson's other notebooks


def checked(cls: type) -> type:
    """`cls` as a frozen dataclass with checked fields. Pydantic's first finding becomes one plain ValueError."""
    # strict: True is no 1 and "1e-3" no number; an int may stand for a float.
    options = pydantic.ConfigDict(strict=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    cls = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=options)(cls)
    validate = cls.__init__

    def __init__(self, **values: Any) -> None:
        check_commits(values)
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            raise ValueError(describe_error(cls, error.errors()[0], values)) from None

    cls.__init__ = __init__
    NAMES.update(field.name for field in dataclasses.fields(cls))
    return cls


def check_commits(values: dict[str, Any]) -> None:
    """Raises ValueError for a model whose commit a profile leaves open."""
    for name, value in values.items():
        if isinstance(value, str) and value.endswith(COMMIT):
            raise ValueError(
                f"{name}={value!r} names no commit yet: put one from the model's history on the hub in the place of "
                f"{COMMIT}."
            )


def describe_error(cls: type, error: dict, values: dict) -> str:
    if not error["loc"]:  # from `__post_init__`, which checks what concerns several fields
        return str(error["ctx"]["error"])
    name = error["loc"][0]
    if error["type"] == "unexpected_keyword_argument":
        return f"{name}={values[name]!r} is not a parameter of {cls.__name__}: check its spelling."
    if error["type"] == "literal_error":
        return f"{name}={values[name]!r} is unknown: choose one of {error['ctx']['expected']}."
    quoted = f": write {values[name].strip()}, without quotes" if is_quoted(values[name]) else ""
    return f"{name}={values[name]!r} must be {cls.__pydantic_fields__[name].description}{quoted}."


def is_quoted(value: Any) -> bool:
    """Whether a value is a text that spells a number, a list, True, False or None."""
    if not isinstance(value, str):
        return False
    try:
        return not isinstance(ast.literal_eval(value.strip()), str)
    except (SyntaxError, ValueError):
        return False


def check_names(cells: Sequence[str]) -> None:
    """Raises ValueError if a parameters cell sets a name that is no parameter. `cells`: those run so far (`In`).

    A cell counts until a later one sets one of its names again: a cell that was mended takes the place of what it was.
    papermill puts what it is given (`-p`, `-f`) into a cell of its own. Parameters of other notebooks are allowed, as a
    profile serves all three: `NAMES` has those of all classes imported so far.
    """
    seen: set[str] = set()
    for cell in reversed(cells):
        names = names_set(cell)
        if seen.isdisjoint(names):
            for name in names:
                if name not in NAMES:
                    close = difflib.get_close_matches(name, NAMES, 1)
                    hint = f"did you mean {close[0]}?" if close else "check its spelling."
                    raise ValueError(f"{name} is not a parameter of any notebook: {hint}")
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


@checked
class Parameters:
    """What all notebooks share."""

    storage: Location = free("storage", "folder or URI of all data and results; on several nodes a shared one")
    validation_share: Share = fixes_rows(0.02, "share of rows held out for validation, chosen by a hash of their id")
    leave_out: Location = free("", "file of ids (or SHA-256 of raw images) to leave out, text or Parquet; empty: none")
    channels_last: Switch = free(False, "memory layout (B, H, W, C), which tensor cores prefer")
    max_failures: Limit = free(3, "restarts after lost workers, or of a failed segment; -1: no limit")

    @classmethod
    def from_parameters(cls, namespace: dict[str, Any]) -> Self:
        """The config of a notebook's variables (`globals()`) that have the names of parameters.

        Raises ValueError for a name in a parameters cell that no notebook has as a parameter.
        """
        check_names(namespace.get("In", ()))
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: namespace[name] for name in names if name in namespace})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def fixed(self, *what: str) -> dict[str, Any]:
        """{name: value} of the parameters that fix `what`: "rows", "latents" or "run"."""
        names = [field.name for field in dataclasses.fields(self) if field.metadata["fixes"] in what]
        return {name: getattr(self, name) for name in names}

    def set_derived(self, **values: Any) -> None:
        """Set fields that follow from others. Only `__post_init__` may: a config does not change afterwards."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def first_difference(
    before: dict[str, Any], now: dict[str, Any], names: Iterable[str] | None = None
) -> tuple[str, Any, Any] | None:
    """`(name, value before, value now)` of the first entry in which two dicts differ; None if they are equal.

    Values are compared as JSON stores them: a tuple equals a list. An entry that one dict lacks is None there.
    `names`: the entries to compare; None: all.
    """
    before, now = json.loads(json.dumps([before, now], default=dataclasses.asdict))
    for name in before | now if names is None else names:
        if before.get(name) != now.get(name):
            return name, before.get(name), now.get(name)
    return None
