"""Readers of what people bring, and filters on their columns."""

import ast
import concurrent.futures
import functools
import itertools
import operator

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data.expressions import col

from . import storage

COMPARISONS = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def list_parquet(input_uri):
    """Sorted paths of the Parquet files of a file or folder (nested ones too); a clear error if there is none."""
    if not storage.exists(input_uri):
        raise FileNotFoundError(f"input_uri={input_uri!r} does not exist: give a Parquet file or a folder of them.")
    if storage.is_file(input_uri):
        return [storage.resolve(input_uri)]
    paths = storage.list_files(input_uri, ".parquet", recursive=True)
    if not paths:
        raise FileNotFoundError(f"input_uri={input_uri!r} holds no .parquet file: give a Parquet file or a folder of them.")
    return paths


def open_parquet(path):
    """A `ParquetFile` on any storage; ValueError naming a file that is not Parquet."""
    filesystem, inner = storage.open_filesystem(path)
    try:
        return pq.ParquetFile(inner, filesystem=filesystem)
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowInvalid, OSError) as error:  # OSError: a footer that is there and makes no sense
        raise ValueError(f"{path} is not a readable Parquet file: remove or replace it. ({error})") from None


def check_columns(path, columns):
    """`columns`: parameter name -> column name. Raises ValueError naming the first that the file does not hold."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
    for parameter, column in columns.items():
        if column not in schema.names:
            raise ValueError(f"{parameter}={column!r} is not a column of {path}: it has {', '.join(schema.names)}.")
    return schema


def count_rows(paths):
    """Rows of each Parquet file, from the footers, read in parallel."""

    def rows(path):
        with open_parquet(path) as file:
            return file.metadata.num_rows

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(rows, paths))


def first_rows(input_uri, columns, num_rows):
    """The first rows as a list of dicts, for a look at the data before any pipeline is built."""
    rows = []
    for path in list_parquet(input_uri):
        with open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=num_rows, columns=columns):
                rows += batch.to_pylist()
                if len(rows) >= num_rows:
                    return rows[:num_rows]
    return rows


def read_rows(segment, config):
    """The rows of one segment as a lazy Ray dataset: the columns that are used, and the file each came from."""
    expression = parse_filter(config.row_filter)
    columns = [config.id_column, config.caption_column, config.image_column]
    columns += [name for name in filter_columns(config.row_filter) if name not in columns]
    rows = ray.data.read_parquet(
        segment.paths, include_paths=True, partitioning=None, file_extensions=None,
        filesystem=storage.open_filesystem(segment.paths[0])[0],
    ).select_columns([*columns, "path"])  # fmt: skip
    if segment.limit is not None:
        rows = rows.limit(segment.limit)
    return rows.filter(expr=expression) if expression is not None else rows


def parse_filter(text):
    """`"aesthetic >= 4.5 and width >= 256"` -> a Ray Data expression; None for an empty text.

    Comparisons of a column with a number or a quoted text, joined by `and`, `or`, `not` and parentheses. The text is
    parsed, never evaluated. Raises ValueError naming the part that is something else.
    """
    if not text.strip():
        return None
    try:
        return _build(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        raise ValueError(f"row_filter={text!r} is not an expression such as 'width >= 256 and height >= 256'.") from None


def check_filter(text, found):
    """Raises ValueError for a filter that compares a column of the Arrow schema `found` with what it cannot be."""
    if not text.strip():
        return
    try:
        found.empty_table().filter(parse_filter(text).to_pyarrow())
    except (pa.ArrowException, OverflowError, TypeError) as error:
        types = ", ".join(f"{name} holds {found.field(name).type}" for name in filter_columns(text))
        raise ValueError(f"row_filter={text!r} compares what cannot be compared ({types}): change it. ({error})") from None


def filter_columns(text):
    """The columns that a filter names, in order."""
    if not text.strip():
        return []
    parse_filter(text)
    names = [node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(names))


def _build(node, text):
    if isinstance(node, ast.BoolOp):
        join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        return functools.reduce(join, [_build(value, text) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_build(node.operand, text)
    if isinstance(node, ast.Compare) and all(type(op) in COMPARISONS for op in node.ops):
        nodes = [node.left, *node.comparators]
        sides = [_operand(side, text) for side in nodes]
        if all(isinstance(left, ast.Name) or isinstance(right, ast.Name) for left, right in itertools.pairwise(nodes)):
            pairs = [COMPARISONS[type(op)](sides[i], sides[i + 1]) for i, op in enumerate(node.ops)]
            return functools.reduce(operator.and_, pairs)
    raise ValueError(
        f"row_filter={text!r}: {ast.unparse(node)!r} is no comparison of a column with a number or a text, joined by "
        "and, or, not."
    )


def _operand(node, text):
    if isinstance(node, ast.Name):
        return col(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        if isinstance(node.operand.value, (int, float)):
            return -node.operand.value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        return node.value
    raise ValueError(f"row_filter={text!r}: {ast.unparse(node)!r} is neither a column, a number nor a quoted text.")
