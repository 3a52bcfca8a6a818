"""What lies at an input: the format that it is read as, and its columns of images, captions and ids.

`detect` decides it from the files' names and sizes, and from the first rows of a few files. What cannot be used is then
refused in one sentence (`production.checks.inputs`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import posixpath
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from ...config import PreprocessingConfig
from ...latents.parquet import is_extension
from ...raw import inputs, readers
from ...raw.inputs import CHOSEN, is_text
from ..checks import inputs as checks
from ..checks.inputs import MOST_FILES, is_text_or_bytes
from . import folder

TABLE, IMAGE, SIDE_CAR, OTHER = "metadata.csv or metadata.jsonl", "image", "caption or JSON file", "other file"
TAR, HIDDEN, BROKEN = checks.COMPRESSED_TAR, "hidden or temporary file", checks.BROKEN
FORMATS = {"Parquet file": "parquet", "WebDataset tar": "webdataset", "Arrow file": "arrow", TABLE: "imagefolder"}
COMPRESSED_TARS = (".tgz", *(f".tar.{name}" for name in ("gz", "bz2", "xz", "zst", "lz4")))
WHY_LEFT_OUT = {
    IMAGE: "no caption beside them, and no table names them",
    SIDE_CAR: "no image has their names, or a table has the captions",
    TAR: "they must be decompressed first",
    HIDDEN: 'names that begin with "." or "_"',
    BROKEN: "links that lead nowhere, no regular files, or names that are not UTF-8",
    OTHER: "of no format",
}
IMAGE_COLUMNS = ("image", "jpg", "file_name")
ID_COLUMNS = ("hash", "key", "__key__", "id")
IMAGE_BYTES = re.compile(rb"\xff\xd8\xff|\x89PNG|RIFF|GIF8|BM|II\*\0|MM\0\*|....ftyp", re.DOTALL)
FIRST_FILES, FIRST_ROWS = 4, 64  # that decide on the columns; more files if these have no captions
SPLITS = re.compile(r"(?:^|/)(train|test|validation|valid|val|dev)(?=[/.-])", re.IGNORECASE)  # in a file's path


@dataclasses.dataclass(frozen=True)
class Found:
    """What a job will read.

    Args:
        config: the parameters, with those of `CHOSEN` that were left open.
        paths: what is read as one file each.
        listing: {path below the input: bytes} of all files, without hidden and broken ones.
        files: [(kind, found, read, why the rest is left out)].
        columns: [(parameter, its value, why)].
    """

    config: PreprocessingConfig
    paths: list[str]
    listing: dict[str, int]
    files: list[tuple[str, int, int, str]]
    columns: list[tuple[str, Any, str]]


def detect(config: PreprocessingConfig, begun: dict[str, Any] | None = None) -> Found:
    """What lies at `config.data_uri`, and the parameters of `CHOSEN` that it comes to.

    `begun`: what a job began with (`encode.job.begun_with`), which it keeps if the files are the same; they are not
    checked again. Raises FileNotFoundError or ValueError that says what is there and what to change.
    """
    walked = inputs.walk_input(config)
    listing = inputs.visible_files(walked, config.data_uri)
    kinds = {name: BROKEN if size is None else kind_of(name) if name in listing else HIDDEN for name, size in walked}
    begun = begun if begun and begun.get("input_crc32") == inputs.checksum(listing) else {}
    checks.refuse(() if begun else checks.folder_problems(config))
    chosen = {name: (getattr(config, name), "given") for name in CHOSEN}
    is_open = [name for name in CHOSEN if chosen[name][0] in (None, "auto")]
    chosen |= {name: (begun[name], "as the job began") for name in is_open if name in begun}

    if chosen["input_format"][0] == "auto":
        chosen["input_format"] = choose_format(listing, kinds, config.data_uri)
    config = with_chosen(config, chosen)
    checks.refuse(checks.files_problems(kinds, config))
    paths = inputs.input_paths(listing, config)
    names = [path.removeprefix(inputs.base_folder(config.data_uri)) for path in paths]
    if len(splits := sorted({found[1] for found in map(SPLITS.search, names) if found})) > 1:
        value, why = chosen["input_format"]
        chosen["input_format"] = value, f"{why}; {' and '.join(splits)} are read together: name one to read it alone"

    is_open = [name for name, (value, _) in chosen.items() if value is None]
    chosen |= choose_columns(paths, config, is_open) if is_open else {}
    config = with_chosen(config, chosen)

    checks.refuse(() if begun else checks.column_problems(paths, config))
    files = count_files(kinds, listing, config, has_image_paths(paths, config))
    return Found(config, paths, listing, files, [(name, *pair) for name, pair in chosen.items()])


def with_chosen(config: PreprocessingConfig, chosen: dict[str, tuple[Any, str]]) -> PreprocessingConfig:
    return dataclasses.replace(config, **{name: value for name, (value, _) in chosen.items()})


def first_rows(config: PreprocessingConfig, num_rows: int) -> pa.Table:
    """The first rows as the files store them, with `path`, to look at before any pipeline is built.

    `config`: that of `Found`. Texts of a column are bytes if some are not UTF-8, because such text cannot be shown.
    """
    reader, tables = inputs.reader(config), []
    for path in inputs.list_inputs(config)[0]:
        with contextlib.suppress(readers.Unreadable):
            for table in reader.stream(path, inputs.used_columns(config)):
                tables.append(inputs.with_path(table, path)[:num_rows])
                num_rows -= len(tables[-1])
                if num_rows <= 0:
                    return as_shown(join_alike(tables))
    if not tables:
        raise ValueError(f"The input holds no rows ({config.data_uri}): give other data.")
    return as_shown(join_alike(tables))


def as_shown(table: pa.Table) -> pa.Table:
    for number, (field, column) in enumerate(zip(table.schema, table.columns, strict=True)):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            kind = pa.list_(pa.binary()) if inputs.is_list(field.type) else pa.binary()
            table = table.set_column(number, field.name, column.cast(kind))
    return table


def join_alike(tables: list[pa.Table]) -> pa.Table:
    """Rows of several files to look at; those of the first file's types, if the files' types cannot be joined."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.concat_tables([table for table in tables if table.schema == tables[0].schema])


# ---- files


def kind_of(name: str) -> str:
    """The kind of a file, by its path."""
    path = f"/{name}".lower()
    for kind, input_format in FORMATS.items():
        if path.endswith(readers.reader_class(input_format).suffixes):
            return kind
    if path.endswith(COMPRESSED_TARS):
        return TAR
    return IMAGE if readers.is_image(path) else SIDE_CAR if readers.is_text(path) else OTHER


def files_read(input_format: str, names: Iterable[str], input_uri: str) -> set[str]:
    """The files, of those below an input, that a format reads."""
    if input_format == "imagefolder":
        return folder.files_read(names, input_uri)
    return set(readers.reader_class(input_format).files(names, input_uri))


def choose_format(listing: dict[str, int], kinds: dict[str, str], input_uri: str) -> tuple[str, str]:
    """`(the format with most bytes, why)`. Raises FileNotFoundError if there is none."""
    read = {input_format: files_read(input_format, listing, input_uri) for input_format in readers.READERS}
    sizes = {input_format: sum(map(listing.get, names)) for input_format, names in read.items() if names}
    if sizes:
        others = "; ".join(f"{input_format}: {size / 2**20:,.1f} MiB" for input_format, size in sizes.items())
        return max(sizes, key=sizes.get), f"most bytes; {others}" if len(sizes) > 1 else "the format that is there"
    if TAR in kinds.values():
        return "webdataset", "the format that is there"
    has, num_images = inputs.count_suffixes(listing), sum(kind == IMAGE for kind in kinds.values())
    if num_images:
        raise FileNotFoundError(
            f"input_uri={input_uri!r} holds {num_images:,} images without captions (it has {has}): give a "
            "folder in which each has its caption beside it (a.txt for a.jpg) or in a metadata.csv (file_name, text)."
        )
    raise FileNotFoundError(
        f"input_uri={input_uri!r} holds no captioned images (it has {has}): give a folder of images with captions, "
        "Parquet files or tars."
    )


def count_files(
    kinds: dict[str, str], listing: dict[str, int], config: PreprocessingConfig, has_paths: bool
) -> list[tuple[str, int, int, str]]:
    """`Found.files`. `has_paths`: whether rows of Parquet or Arrow files hold paths; all images then count as read."""
    read = files_read(config.input_format, listing, config.data_uri)
    counts, used = collections.Counter(kinds.values()), collections.Counter(kinds[name] for name in read)
    if has_paths:
        used[IMAGE] = counts[IMAGE]
    rows = []
    for kind, count in sorted(counts.items()):
        other = FORMATS.get(kind, config.input_format)
        is_other = other != config.input_format
        why = f"of another format: input_format={other!r} reads them" if is_other else WHY_LEFT_OUT.get(kind, "")
        rows.append((kind, count, used[kind], why))
    return rows


def has_image_paths(paths: list[str], config: PreprocessingConfig) -> bool:
    reader = inputs.reader(config)
    columns = checks.joined_schema(paths, reader, [config.image_column])[1]
    kinds = [field.type for field in columns if field.name == config.image_column and reader.typed]
    return any(is_text(checks.image_type(kind)) for kind in kinds)


# ---- columns


def choose_columns(paths: list[str], config: PreprocessingConfig, is_open: list[str]) -> dict[str, tuple[Any, str]]:
    """{parameter: (column, why)} of the open columns, by the first rows of the first files that can be read.

    Raises ValueError that names the columns that are there.
    """
    path, columns, tables = first_tables(paths, config)
    usual = () if readers.reader_class(config.input_format).typed else readers.CAPTIONS
    choose_captions = functools.partial(choose_caption, usual=usual)
    choose = {"image_column": choose_image, "caption_column": choose_captions, "id_column": choose_id}
    try:
        return {name: choose[name](columns, tables) for name in is_open}
    except ValueError as error:
        raise ValueError(f"{path} {error} (its columns: {', '.join(columns.names)}).") from None


def first_tables(paths: list[str], config: PreprocessingConfig) -> tuple[str, pa.Schema, list[pa.Table]]:
    """`(path, columns, first rows of each)` of the first files that can be read, with rows if some have any."""
    found, error = [], None
    if config.input_format == "imagefolder":  # of each folder once
        paths = list({posixpath.dirname(path): path for path in paths[::-1]}.values())[::-1]
    for path in paths[:MOST_FILES]:
        try:
            found.append((path, *first_table(path, readers.reader_class(config.input_format))))
        except readers.Unreadable as unreadable:
            error = error or unreadable
        captions = [name for _, _, table in found for name in table.column_names if name.lower() in readers.CAPTIONS]
        if len(found) >= FIRST_FILES and captions:
            break
    if not found:
        raise error
    found = [one for one in found if one[1].names and len(one[2])] or found
    path, columns, _ = found[0]
    for _, others, _ in found[1:]:
        columns = pa.schema([*columns, *(field for field in others if field.name not in columns.names)])
    if not columns.names:
        raise ValueError(f"The input holds no rows ({len(paths)} files, the first is {paths[0]}): give other data.")
    return path, columns, [table for _, _, table in found]


def first_table(path: str, reader: type[readers.Reader]) -> tuple[pa.Schema, pa.Table]:
    """`(columns, first rows)` of a file; of columns that may hold images, captions or ids."""
    columns = reader().schema(path)
    types = {field.name: field.type for field in columns if may_be_used(field.type)}
    rows = next(reader({} if reader.typed else types).stream(path, list(types)), columns.empty_table())
    return columns, rows.select(list(types)).slice(0, FIRST_ROWS)


def may_be_used(kind: pa.DataType) -> bool:
    """Whether a column may hold images, captions or ids, and its values are plain."""
    in_list = hasattr(kind, "value_type") and is_text_or_bytes(kind.value_type)
    return not is_extension(kind) and (in_list or not pa.types.is_nested(checks.image_type(kind)))


def choose_image(columns: pa.Schema, tables: list[pa.Table]) -> tuple[str, str]:
    by_table = [image_columns(table) for table in tables]
    in_bytes, in_paths = (list(dict.fromkeys(itertools.chain(*names))) for names in zip(*by_table, strict=True))
    by_name = [name for name in IMAGE_COLUMNS if name in columns.names]
    # Of img2dataset's images the first ones may all be missing.
    missing = [name for name in by_name if not is_text(columns.field(name).type)]
    found = in_bytes or missing or in_paths or by_name
    named = [name for name in IMAGE_COLUMNS if name in found]
    if not found:
        raise ValueError("holds nothing that is an image: name the column of images or their paths by image_column")
    if len(found) > 1 and not named:
        raise ValueError(f"holds images in {', '.join(found)}: name one, such as image_column={found[0]!r}")
    column = (named or found)[0]
    reason = "holds images" if column in in_bytes else "holds paths of images" if column in in_paths else "by its name"
    others = [name for name in found if name != column]
    return column, f"{reason}; {', '.join(others)} too" if others else reason


def image_columns(table: pa.Table) -> tuple[list[str], list[str]]:
    """`(columns of images' bytes, columns of their paths)`, by the first values."""
    in_bytes, in_paths = [], []
    for name in (field.name for field in table.schema if not hasattr(field.type, "value_type")):
        values = [value for value in values_of(table[name].drop_null()[:16]) if value]
        values = [value.get("bytes") or value.get("path") if isinstance(value, dict) else value for value in values]
        if any(isinstance(value, bytes) and IMAGE_BYTES.match(value) for value in values):
            in_bytes.append(name)
        elif name == "file_name" or any(isinstance(value, str) and is_path(value) for value in values):
            in_paths.append(name)
    return in_bytes, in_paths


def is_path(text: str) -> bool:
    """Whether a text is the path or the URL of an image."""
    return readers.is_image(posixpath.splitext(text)[1]) or checks.is_url(text)


def values_of(column: pa.ChunkedArray) -> list:
    """The values of a column; text that is not UTF-8 is None."""
    return readers.texts(column) if is_text(column.type) else column.to_pylist()


def choose_caption(columns: pa.Schema, tables: list[pa.Table], usual: Sequence[str] = ()) -> tuple[str, str]:
    """`usual`: columns that later rows may have, of formats whose rows differ."""
    named = {name.lower(): name for name in reversed(columns.names)}
    found = [named[name] for name in readers.CAPTIONS if name in named]
    if not found:
        raise ValueError("has no column caption, text or txt: name the column of captions by caption_column")
    counts = {name: sum(num_filled(table[name]) for table in tables if name in table.column_names) for name in found}
    first = max(found, key=counts.get)
    if not is_text_or_bytes(columns.field(first).type):
        return first, "holds captions"
    others = [name for name in found if is_text_or_bytes(columns.field(name).type)]
    others += [name for name in usual if name not in named]
    others.remove(first)
    return "|".join([first, *others]), " and, where it is empty, ".join(["holds captions", *others])


def num_filled(column: pa.ChunkedArray) -> int:
    """The rows that have a usable caption."""
    if not (is_text_or_bytes(column.type) or inputs.is_list(column.type)):
        return 0
    return sum(any(not inputs.caption_reason(one) for one in captions) for captions in inputs.text_lists(column))


def choose_id(columns: pa.Schema, tables: list[pa.Table]) -> tuple[str, str]:
    kinds = {field.name: field.type for field in columns if not pa.types.is_nested(field.type)}
    for name in (name for name in ID_COLUMNS if name in kinds):
        found = [values_of(table[name]) for table in tables if name in table.column_names]
        values = [value for value in itertools.chain.from_iterable(found) if value not in (None, "")]
        if values and len(set(map(str, values))) == len(values):
            return name, f"no value is repeated in {len(values)} rows; rows without one get an id that is made"
    return (
        readers.ROW_NUMBER,
        f"made of the file's path and the row's number: no {', '.join(ID_COLUMNS)} without repeats",
    )
