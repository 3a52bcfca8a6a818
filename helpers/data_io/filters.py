"""`row_filter`: a text such as "width >= 256" as a Ray Data expression. Parsed, never evaluated."""

from __future__ import annotations

import ast
import functools
import itertools
import operator

import numpy as np
import pyarrow as pa
from ray.data.expressions import Expr, col

COMPARISONS = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
OPPOSITES = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def parse_filter(text: str) -> Expr | None:
    """`"aesthetic >= 4.5 and width >= 256"` -> a Ray Data expression; None for an empty text.

    Comparisons of a column with a number or a quoted text, joined by `and`, `or`, `not` and parentheses. The text is
    parsed, never evaluated. Null and NaN satisfy no comparison, negated or not. Raises ValueError naming a part that is
    anything else.
    """
    if not text.strip():
        return None
    try:
        return _build(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        raise ValueError(
            f"row_filter={text!r} is not an expression such as 'width >= 256 and height >= 256'."
        ) from None


def check_filter(text: str, found: pa.Schema) -> None:
    """Raises ValueError for a filter that compares a column of the schema `found` with a value of another type."""
    if not text.strip():
        return
    try:
        found.empty_table().filter(parse_filter(text).to_pyarrow())
    except (pa.ArrowException, OverflowError, TypeError) as error:
        types = ", ".join(f"{name} holds {found.field(name).type}" for name in filter_columns(text))
        raise ValueError(
            f"row_filter={text!r} compares values of different types ({types}): change it. ({error})"
        ) from None


def filter_columns(text: str) -> list[str]:
    """The columns that a filter names, in order."""
    if not text.strip():
        return []
    parse_filter(text)
    names = [node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(names))


def clauses(text: str) -> list[str]:
    """The parts of a filter between its outermost `and`s; a filter without one is a single clause."""
    if not text.strip():
        return []
    parse_filter(text)
    tree = ast.parse(text.strip(), mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(part) for part in parts]


def count_dropped(rows: pa.Table, *, texts: list[str]) -> pa.Table:
    """One row of counts: rows that each clause drops, that it alone drops, and that any clause drops."""
    numbers = rows.append_column("row number", pa.array(range(len(rows))))
    met = np.zeros((len(texts), len(rows)), dtype=bool)
    for place, text in enumerate(texts):
        met[place, numbers.filter(parse_filter(text).to_pyarrow())["row number"].to_numpy()] = True
    failed = (~met).sum(axis=0)
    counts = {"rows": len(rows), "dropped": int((failed > 0).sum())}
    for place in range(len(texts)):
        counts[f"dropped {place}"] = int((~met[place]).sum())
        counts[f"alone {place}"] = int((~met[place] & (failed == 1)).sum())
    return pa.Table.from_pylist([counts])


def filter_types(text: str) -> dict[str, pa.DataType]:
    """{column: Arrow type} of a filter's columns: text for those compared with a quoted text, else numbers."""
    types = dict.fromkeys(filter_columns(text), pa.float64())
    for node in ast.walk(ast.parse(text.strip(), mode="eval")) if types else ():
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides):
                types.update({side.id: pa.string() for side in sides if isinstance(side, ast.Name)})
    return types


def _build(node, text, negated=False):
    # `not` is pushed down to the comparisons, and "!=" becomes "< or >", so that NaN satisfies none of them, like null.
    # A negated comparison would be true for NaN, except where a row group's statistics, which ignore NaN, skip it.
    if isinstance(node, ast.BoolOp):
        join = operator.and_ if isinstance(node.op, ast.And) is not negated else operator.or_
        return functools.reduce(join, [_build(value, text, negated) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _build(node.operand, text, not negated)
    if isinstance(node, ast.Compare) and all(type(op) in COMPARISONS for op in node.ops):
        nodes = [node.left, *node.comparators]
        sides = [_operand(side, text) for side in nodes]
        if all(isinstance(left, ast.Name) or isinstance(right, ast.Name) for left, right in itertools.pairwise(nodes)):
            kinds = [OPPOSITES[type(op)] if negated else type(op) for op in node.ops]
            pairs = [_compare(kind, *pair) for kind, pair in zip(kinds, itertools.pairwise(sides), strict=True)]
            return functools.reduce(operator.or_ if negated else operator.and_, pairs)
    raise ValueError(
        f"row_filter={text!r}: {ast.unparse(node)!r} is not a comparison of a column with a number or a text, joined "
        "by and, or, not."
    )


def _compare(kind, left, right):
    if kind is ast.NotEq and not isinstance(left, bool) and not isinstance(right, bool):  # booleans have no order
        return (left < right) | (left > right)
    return COMPARISONS[kind](left, right)


def _operand(node, text):
    if isinstance(node, ast.Name):
        return col(node.id)
    negative = (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    )
    if negative and isinstance(node.operand.value, (int, float)):
        return -node.operand.value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        return node.value
    raise ValueError(f"row_filter={text!r}: {ast.unparse(node)!r} is neither a column, a number nor a quoted text.")
