"""`row_filter`: a text such as "width >= 256" -> a Ray Data expression. It is parsed, never evaluated."""

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

    The text compares columns with numbers or quoted texts; `and`, `or`, `not` and parentheses join the comparisons.
    Null and NaN satisfy no comparison, negated or not. Raises ValueError naming a part that is anything else.
    """
    if not text.strip():
        return None
    try:
        return _build(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        raise ValueError(
            f"row_filter={text!r} is not an expression such as 'width >= 256 and height >= 256'."
        ) from None


def kept_rows(rows: pa.Table, text: str) -> np.ndarray:
    """(B,) bool: the rows that a filter keeps."""
    kept_B, expression = np.ones(len(rows), dtype=bool), parse_filter(text)
    if expression is not None:
        numbered = rows.append_column("row number", pa.array(range(len(rows)), pa.int64()))
        kept_B[:] = False
        kept_B[numbered.filter(expression.to_pyarrow())["row number"].to_numpy()] = True
    return kept_B


def filter_columns(text: str) -> list[str]:
    """The columns that a filter names, in order."""
    if parse_filter(text) is None:
        return []
    names = [node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(names))


def filter_types(text: str) -> dict[str, pa.DataType]:
    """{column: Arrow type} of a filter's columns: text if compared with a quoted text, else numbers."""
    types = dict.fromkeys(filter_columns(text), pa.float64())
    for node in ast.walk(ast.parse(text.strip(), mode="eval")) if types else ():
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides):
                types.update({side.id: pa.string() for side in sides if isinstance(side, ast.Name)})
    return types


def _build(node, text, negated=False):
    # `not` moves down to the comparisons, and "!=" becomes "< or >": then NaN satisfies none of them, like null. A
    # negated comparison would be true for NaN, unless a row group is skipped by its statistics, which ignore NaN.
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
    try:
        value = ast.literal_eval(node)  # evaluates only constants, which may have a sign
    except (ValueError, TypeError):
        value = None
    if not isinstance(value, (int, float, str)):
        raise ValueError(f"row_filter={text!r}: {ast.unparse(node)!r} is neither a column, a number nor a quoted text.")
    return value
