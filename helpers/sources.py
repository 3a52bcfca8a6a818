"""What a job reads: the input's files in any format (see `formats`), their rows through Ray Data, filters on their columns."""

import ast
import concurrent.futures
import functools
import itertools
import operator
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import ray
from ray.data.expressions import col

from . import formats, storage

COMPARISONS = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
OPPOSITES = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


# --- files --------------------------------------------------------------------------------------------


def reader(config):
    """The reader of `input_format`, knowing the types of the columns that are used."""
    return formats.READERS[config.input_format](column_types(config))


def list_inputs(input_uri, input_format="parquet"):
    """Sorted paths of the files of one format: one file, those in a folder (nested ones too), or those of a glob.

    Raises FileNotFoundError if there is none.
    """
    kind = formats.READERS[input_format]
    advice = f"give a {kind.what}, a folder of them or a pattern such as '{input_uri}/*{kind.suffixes[0]}'."
    if is_glob(input_uri):
        pattern = glob_pattern(storage.resolve(input_uri))
        paths = [path for path in storage.list_files(base_folder(input_uri), recursive=True) if pattern.fullmatch(path)]
        if not paths:
            raise FileNotFoundError(f"input_uri={input_uri!r} matches no file: {advice}")
        return paths
    if not storage.exists(input_uri):
        raise FileNotFoundError(f"input_uri={input_uri!r} does not exist: {advice}")
    if storage.is_file(input_uri):
        return [storage.resolve(input_uri)]
    paths = storage.list_files(input_uri, kind.suffixes, recursive=True)
    if not paths:
        raise FileNotFoundError(f"input_uri={input_uri!r} holds no {kind.what}: {advice}")
    return paths


def is_glob(input_uri):
    """Whether a path has wildcards (`*`, `?`, `[`), and is no file or folder that is called so."""
    has_wildcards = any(character in str(input_uri) for character in "*?[")
    return has_wildcards and ("://" in str(input_uri) or not storage.exists(input_uri))


def glob_pattern(path):
    """A path with wildcards as a regular expression: `*` and `?` stay within a folder, `**/` is any number of them."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", path)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(
        known.get(part) or (part.replace("[!", "[^") if part.startswith("[") and part.endswith("]") else re.escape(part))
        for part in parts
    ))  # fmt: skip


@functools.lru_cache(maxsize=16)
def base_folder(input_uri):
    """The folder that the input's files lie below: of a glob the part in front of its wildcards."""
    uri = storage.resolve(input_uri)
    if is_glob(input_uri):
        return re.split(r"[*?[]", uri, maxsplit=1)[0].rpartition("/")[0]
    return uri.rpartition("/")[0] if storage.is_file(uri) else uri


def below(path, folder):
    """A path or URI relative to a folder that it lies in."""
    return path[len(folder) + 1 :]


def listing(paths, input_uri):
    """{path below the input's folder: bytes}, by which a rerun knows its input again; a folder's other files count too."""
    if is_glob(input_uri):
        folder = base_folder(input_uri)
        sizes = storage.sizes(folder)
        return {below(path, folder): sizes[below(path, folder)] for path in paths}
    return storage.sizes(input_uri)


def check_columns(path, columns, found):
    """`columns`: parameter name -> column name. Raises ValueError naming the first that the schema `found` lacks."""
    for parameter, column in columns.items():
        if column not in found.names:
            raise ValueError(f"{parameter}={column!r} is not a column of {path}: it has {', '.join(found.names)}.")


def index(paths, config):
    """`row_groups` of each file. Read in parallel: by threads here, or, where that means reading the files, by Ray."""
    if config.input_format == "webdataset" and ray.is_initialized():
        task = ray.remote(num_cpus=0.5)(row_groups)
        return ray.get([task.remote(path, config) for path in paths])
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(functools.partial(row_groups, config=config), paths))


def row_groups(path, config):
    """(rows of each row group of a file, their offsets where the format has such)"""
    return reader(config).row_groups(path)


def count_rows(paths, config):
    """Rows of each file."""
    return [sum(rows) for rows, _ in index(paths, config)]


def used_columns(config):
    """The columns that a job reads: id, caption, picture, and those of the filter."""
    columns = [config.id_column, config.caption_column, config.image_column, *filter_columns(config.row_filter)]
    return list(dict.fromkeys(columns))


def column_types(config):
    """Arrow types of the used columns in formats that have none: ids and captions are text, a filter's columns what they
    are compared with."""
    types = filter_types(config.row_filter)
    types[config.image_column] = pa.binary() if config.image_column == "jpg" else pa.string()
    return {**types, config.caption_column: pa.string(), config.id_column: pa.string()}


def first_rows(config, num_rows):
    """The first rows as an Arrow table with `path`, for a look at the data before any pipeline is built."""
    tables, left, read = [], num_rows, reader(config)
    for path in list_inputs(config.input_uri or config.raw_uri, config.input_format):
        for table in read.stream(path, used_columns(config)):
            tables.append(table[:left].append_column("path", pa.repeat(path, min(left, len(table)))))
            left -= len(tables[-1])
            if left == 0:
                return pa.concat_tables(tables, promote_options="permissive")
    if not tables:
        raise ValueError(f"The input holds no rows ({config.input_uri or config.raw_uri}): give other data.")
    return pa.concat_tables(tables, promote_options="permissive")


def random_rows(config, num_rows, seed=0):
    """Rows of up to 16 random files, as an Arrow table with `path`: of `num_rows` those that `row_filter` leaves in.

    Of each file the first rows of some random row groups; of a tar, which would have to be read as a whole to find a place
    in it, its first rows. Where the filter leaves none, that is said, and all are given.
    """
    random, read = np.random.default_rng(seed), reader(config)
    paths = list_inputs(config.input_uri or config.raw_uri, config.input_format)
    chosen, tables = [paths[place] for place in random.permutation(len(paths))[:16]], []
    wanted = -(-num_rows // len(chosen))
    for path in chosen:
        if config.input_format == "webdataset":
            places = [None]
        else:
            places = [[int(group)] for group in random.permutation(len(read.row_groups(path)[0]))]
        left = wanted
        for place in places:
            share = max(wanted // 4, wanted // len(places), 1)  # of one row group, which may be all there is
            for table in read.stream(path, used_columns(config), place):
                table = table[: min(left, share)]
                tables.append(table.append_column("path", pa.repeat(path, len(table))))
                left, share = left - len(table), share - len(table)
                if min(left, share) <= 0:
                    break
            if left <= 0:
                break
    rows = pa.concat_tables(tables, promote_options="permissive")
    rows = rows.take(random.permutation(len(rows))[:num_rows])
    expression = parse_filter(config.row_filter)
    kept = rows if expression is None else rows.filter(expression.to_pyarrow())
    if len(kept) == 0 and len(rows):
        print(f"row_filter={config.row_filter!r} leaves none of {len(rows):,} random rows: they are shown without it.")
        return rows
    return kept


# --- rows ---------------------------------------------------------------------------------------------


def read_rows(segment, config):
    """The rows of one segment as a lazy Ray dataset: the columns that are used, and `path`, the file each came from."""
    rows = read_parquet(segment, config) if config.input_format == "parquet" else read_others(segment, config)
    if segment.limit is not None:
        rows = rows.limit(segment.limit)
    expression = parse_filter(config.row_filter)
    return rows.filter(expr=expression) if expression is not None else rows


def read_parquet(segment, config):
    """Ray Data pushes the columns, and a filter on them, down into this read (see `explain()`)."""
    return ray.data.read_parquet(
        segment.paths, include_paths=True, partitioning=None, file_extensions=None,
        filesystem=storage.open_filesystem(segment.paths[0])[0],
    ).select_columns([*used_columns(config), "path"])  # fmt: skip


def read_others(segment, config):
    """One task a file."""
    read = functools.partial(read_files, columns=used_columns(config), read=reader(config))
    tasks = ray.data.from_items([{"path": path} for path in segment.paths], override_num_blocks=len(segment.paths))
    return tasks.map_batches(read, batch_size=1)


def read_files(batch, *, columns, read):
    """Tables of the rows of a batch of files."""
    for path in batch["path"].tolist():
        for table in read.stream(path, columns):
            yield table.append_column("path", pa.repeat(path, len(table)))


def read_pieces(pieces, config, index_uri, columns=None):
    """The rows of `pieces` (see `ingest.Plan.chunk`), laid end to end, and `path`; each file is opened once.

    `index_uri`: where `write_index` left the offsets of tars. `columns`: all that are used, if None.
    """
    columns = columns or used_columns(config)
    base, read, tables = base_folder(config.input_uri or config.raw_uri), reader(config), [None] * len(pieces)
    for name in dict.fromkeys(piece[0] for piece in pieces):
        mine = [position for position, piece in enumerate(pieces) if piece[0] == name]
        path = f"{base}/{name}"
        found = read.read(path, [pieces[position][1] for position in mine], columns, offsets_of(index_uri, name, config))
        for position, table in zip(mine, found, strict=True):
            _, _, first, num_rows = pieces[position]
            tables[position] = table.slice(first, num_rows).append_column("path", pa.repeat(path, num_rows))
    return pa.concat_tables(tables).combine_chunks()


def write_index(index_uri, name, offsets):
    """Keep the offsets of a tar's groups, one small file a tar, for whoever reads single groups."""
    storage.write_json(storage.join(index_uri, f"{name}.json"), offsets)


@functools.lru_cache(maxsize=256)
def _read_index(uri, version):
    return storage.read_json(uri)


def offsets_of(index_uri, name, config):
    """The offsets of a tar's groups; None for formats without."""
    uri = storage.join(index_uri, f"{name}.json")
    return _read_index(uri, storage.version(uri)) if config.input_format == "webdataset" else None


# --- filters ------------------------------------------------------------------------------------------


def parse_filter(text):
    """`"aesthetic >= 4.5 and width >= 256"` -> a Ray Data expression; None for an empty text.

    Comparisons of a column with a number or a quoted text, joined by `and`, `or`, `not` and parentheses. The text is
    parsed, never evaluated. Null and NaN fulfil no comparison, and no negated one. Raises ValueError naming the part that is
    something else.
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


def clauses(text):
    """The parts of a filter that are joined by its outermost `and`s, as texts; a filter without one is its only clause."""
    if not text.strip():
        return []
    parse_filter(text)
    tree = ast.parse(text.strip(), mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(part) for part in parts]


def scan_filter(config):
    """What `row_filter` drops, by clause: a frame with columns clause, dropped, dropped_by_it_alone; "all" is the last row.

    Reads only the columns of the filter (of tars, which have none, all there is), of the whole input or its first `limit`
    rows. A row counts for each clause that it does not meet, so the clauses may add up to more than "all".
    """
    texts, columns = clauses(config.row_filter), filter_columns(config.row_filter)
    if not texts:
        raise ValueError("row_filter='' drops nothing: there is nothing to count.")
    paths = list_inputs(config.input_uri or config.raw_uri, config.input_format)
    if config.input_format == "parquet":
        rows = ray.data.read_parquet(
            paths, partitioning=None, file_extensions=None, filesystem=storage.open_filesystem(paths[0])[0]
        ).select_columns(columns)
    else:
        read = functools.partial(read_files, columns=columns, read=reader(config))
        rows = ray.data.from_items([{"path": path} for path in paths], override_num_blocks=len(paths)).map_batches(read, batch_size=1)
    if config.limit is not None:
        rows = rows.limit(config.limit)
    counted = rows.map_batches(functools.partial(count_dropped, texts=texts), batch_format="pyarrow").to_pandas().sum()
    return pd.DataFrame({
        "clause": [*texts, "all"],
        "dropped": [int(counted[f"dropped {number}"]) for number in range(len(texts))] + [int(counted["dropped"])],
        "dropped_by_it_alone": [int(counted[f"alone {number}"]) for number in range(len(texts))] + [int(counted["dropped"])],
        "of_rows": int(counted["rows"]),
    })  # fmt: skip


def count_dropped(rows, *, texts):
    """One row of counts of a table: rows that each clause drops, that it alone drops, and that any drops."""
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


def filter_types(text):
    """{column: Arrow type} of a filter's columns by what they are compared with: text where a quoted text stands, else
    numbers."""
    types = dict.fromkeys(filter_columns(text), pa.float64())
    for node in ast.walk(ast.parse(text.strip(), mode="eval")) if types else ():
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides):
                types.update({side.id: pa.string() for side in sides if isinstance(side, ast.Name)})
    return types


def _build(node, text, negated=False):
    # `not` is carried inwards to the comparisons, and "!=" is "<" or ">": then NaN fulfils none of them, as null does not.
    # A negated comparison would be true of it, but for the statistics of a row group, which know of no NaN.
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
        f"row_filter={text!r}: {ast.unparse(node)!r} is no comparison of a column with a number or a text, joined by and, or, not."
    )


def _compare(kind, left, right):
    if kind is ast.NotEq and not isinstance(left, bool) and not isinstance(right, bool):  # truth values have no order
        return (left < right) | (left > right)
    return COMPARISONS[kind](left, right)


def _operand(node, text):
    if isinstance(node, ast.Name):
        return col(node.id)
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    if negative and isinstance(node.operand.value, (int, float)):
        return -node.operand.value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        return node.value
    raise ValueError(f"row_filter={text!r}: {ast.unparse(node)!r} is neither a column, a number nor a quoted text.")
