"""The files and rows of the raw data in any format, and how Ray Data reads them."""

import concurrent.futures
import functools
import re

import pyarrow as pa
import ray

from .. import storage
from . import filters, readers


def reader(config):
    """The reader of `input_format`, knowing the types of the columns that are used."""
    return readers.READERS[config.input_format](column_types(config))


def list_inputs(input_uri, input_format="parquet"):
    """Sorted paths of the files of one format: one file, those in a folder (nested ones too), or those of a glob.

    Raises FileNotFoundError if there is none.
    """
    kind = readers.READERS[input_format]
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
    return re.compile(
        "".join(
            known.get(part)
            or (part.replace("[!", "[^") if part.startswith("[") and part.endswith("]") else re.escape(part))
            for part in parts
        )
    )


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
    columns = [config.id_column, config.caption_column, config.image_column, *filters.filter_columns(config.row_filter)]
    return list(dict.fromkeys(columns))


def column_types(config):
    """Arrow types of the used columns in formats that have none: ids and captions are text, a filter's columns what they
    are compared with."""
    types = filters.filter_types(config.row_filter)
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


def read_rows(segment, config):
    """The rows of one segment as a lazy Ray dataset: the columns that are used, and `path`, the file each came from."""
    rows = read_parquet(segment, config) if config.input_format == "parquet" else read_others(segment, config)
    if segment.limit is not None:
        rows = rows.limit(segment.limit)
    expression = filters.parse_filter(config.row_filter)
    return rows.filter(expr=expression) if expression is not None else rows


def read_parquet(segment, config):
    """Ray Data pushes the columns, and a filter on them, down into this read (see `explain()`)."""
    return ray.data.read_parquet(
        segment.paths,
        include_paths=True,
        partitioning=None,
        file_extensions=None,
        filesystem=storage.open_filesystem(segment.paths[0])[0],
    ).select_columns([*used_columns(config), "path"])


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
        found = read.read(
            path, [pieces[position][1] for position in mine], columns, offsets_of(index_uri, name, config)
        )
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
