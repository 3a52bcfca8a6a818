"""`row_filter`: a text such as "width >= 256" that rows must satisfy. It is parsed, never evaluated as Python."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

COMPARISONS = {
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
}
MAX_CHARACTERS, MAX_DEPTH = 10_000, 100
MAX_SHOWN = 200  # characters of a text that an error repeats


def parse_filter(text: str) -> ast.expr | None:
    """`"aesthetic >= 4.5 and width >= 256"` -> its tree; None for an empty text.

    The text compares columns with numbers or quoted texts; `and`, `or`, `not` and parentheses join the comparisons.
    Null and NaN satisfy no comparison, negated or not. Raises ValueError naming a part that is anything else.
    """
    if not text.strip():
        return None
    part = text[:MAX_SHOWN]
    with contextlib.suppress(SyntaxError, UnicodeError, RecursionError, MemoryError):
        if len(text) <= MAX_CHARACTERS:
            tree = ast.parse(text.strip(), mode="eval").body
            part = next(_wrong_parts(tree), None)
            if part is None:
                return tree
    raise ValueError(
        f"row_filter={text[:MAX_SHOWN]!r}: {part!r} is not a comparison of a column with a number or a quoted text, "
        f"joined by and, or, not, as in 'width >= 256 and height >= 256', in at most {MAX_CHARACTERS:,} characters."
    )


def kept_rows(rows: pa.Table, text: str) -> np.ndarray:
    """(B,) bool: the rows that a filter keeps. Raises `pa.ArrowException` for a column of another type."""
    tree = parse_filter(text)
    if tree is None:
        return np.ones(len(rows), dtype=bool)
    return pc.fill_null(_value(tree, rows), False).to_numpy()


def filter_columns(text: str) -> list[str]:
    """The columns that a filter names."""
    return list(filter_types(text))


def filter_types(text: str) -> dict[str, pa.DataType]:
    """{column: Arrow type} of a filter's columns: text if compared with a quoted text, else numbers."""
    tree, types = parse_filter(text), {}
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Compare):
            is_text = any(isinstance(_constant(side), str) for side in _sides(node))
            for name in [side.id for side in _sides(node) if isinstance(side, ast.Name)]:
                types[name] = pa.string() if is_text else types.get(name, pa.float64())
    return types


def _wrong_parts(node: ast.expr, depth: int = 0) -> Iterator[str]:
    """The parts that are no comparison. Raises RecursionError for a tree that is too deep to walk."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _wrong_parts(value, depth + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _wrong_parts(node.operand, depth + 1)
    elif not _is_comparison(node):
        yield ast.unparse(node)[:MAX_SHOWN]


def _is_comparison(node: ast.expr) -> bool:
    """Whether a node compares columns with columns, numbers or texts, and nothing else."""
    if not isinstance(node, ast.Compare) or not all(type(op) in COMPARISONS for op in node.ops):
        return False
    is_column = [isinstance(side, ast.Name) for side in _sides(node)]
    is_usable = [isinstance(_constant(side), (int, float, str)) for side in _sides(node)]
    return all(map(max, is_column, is_usable)) and all(map(max, itertools.pairwise(is_column)))


def _sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)  # evaluates only constants, which may have a sign
    except (ValueError, TypeError):
        return None


def _value(node: ast.expr, rows: pa.Table) -> pa.ChunkedArray:
    """(B,) true, false or null (unknown), as in SQL."""
    if isinstance(node, ast.BoolOp):
        join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        return functools.reduce(join, [_value(value, rows) for value in node.values])
    if isinstance(node, ast.UnaryOp):
        return pc.invert(_value(node.operand, rows))
    sides = [rows[side.id] if isinstance(side, ast.Name) else pa.scalar(_constant(side)) for side in _sides(node)]
    pairs = zip(node.ops, itertools.pairwise(sides), strict=True)
    return functools.reduce(pc.and_kleene, [COMPARISONS[type(op)](*_comparable(*pair)) for op, pair in pairs])


def _comparable(*sides: Any) -> Sequence[Any]:
    """Two columns or values, both in one type if they are numbers: exact for whole numbers; NaN is null."""
    is_whole = [pa.types.is_integer(side.type) for side in sides]
    is_number = [pa.types.is_floating(side.type) or pa.types.is_decimal(side.type) for side in sides]
    if all(is_whole):
        return [pc.cast(side, pa.decimal128(20)) for side in sides] if sides[0].type != sides[1].type else sides
    if not all(map(max, is_whole, is_number)):
        return sides
    floats = [pc.cast(side, pa.float64(), safe=False) for side in sides]  # safe: refuses whole numbers above 2^53
    return [pc.if_else(pc.is_nan(side), None, side) for side in floats]
