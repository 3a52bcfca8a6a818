"""What lies at the input: its files by kind, the layout that they are read as, and the columns that a job takes.

`look` decides it from names alone and from the first rows of a few files. Each file is read, or left out for a reason.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import posixpath
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ... import storage
from ...config import PreprocessingConfig
from ...latents.parquet import is_extension
from ...raw import readers
from ...raw.readers import PICTURES, PLACE, READERS, TEXTS

TABLE, PICTURE, SIDE_CAR, TAR = READERS["imagefolder"].what, "picture", "caption or JSON file", "compressed tar"
HIDDEN, BROKEN, OTHER_TABLE, OTHER = "hidden or temporary file", "broken link", "table of another name", "other file"
KINDS = {
    suffix.lstrip("."): reader.what for reader in READERS.values() for suffix in reader.suffixes if "/" not in suffix
}
KINDS |= dict.fromkeys(PICTURES, PICTURE) | dict.fromkeys(TEXTS, SIDE_CAR)
KINDS |= dict.fromkeys(["csv", "tsv", "jsonl"], OTHER_TABLE)
COMPRESSED_TARS = (".tgz", *(f".tar.{name}" for name in ("gz", "bz2", "xz", "zst", "lz4")))
WHY_LEFT_OUT = {
    TABLE: "no layout but imagefolder reads them",
    PICTURE: "no caption beside them or, below a table, not named by it",
    SIDE_CAR: "no picture has their names, a .txt has, or a table above has the captions",
    TAR: "they must be decompressed first",
    "Arrow file": "caches of `datasets`",
    HIDDEN: 'names that begin with "." or "_"',
    BROKEN: "links that lead nowhere, no regular files, or names that are not UTF-8",
    OTHER_TABLE: "not called metadata.csv or metadata.jsonl",
}
UNUSED = (HIDDEN, BROKEN)
CHOSEN = ("input_format", "image_column", "caption_column", "id_column")  # parameters that may be left open
IMAGE_COLUMNS, CAPTION_COLUMNS = ("jpg", "image", "file_name"), ("caption", "text", "txt")
ID_COLUMNS = ("hash", "key", "__key__", "id")
UNIT_PICTURES = 10_000  # pictures with side-cars that are read as one file
COUNTED_BYTES = 2**26  # of the files that are counted to compare layouts


@dataclasses.dataclass(frozen=True)
class InputFiles:
    """The files below an input.

    Args:
        folder: that contains them all.
        is_named: whether the input is a file or a pattern, and not a folder.
        sizes: {path below the folder: bytes} of those that are neither hidden nor broken, sorted.
        kinds: {kind: paths}.
    """

    uri: str
    folder: str
    is_named: bool
    sizes: dict[str, int]
    kinds: dict[str, list[str]]

    def path(self, name: str) -> str:
        return storage.join(self.folder, name)

    def __str__(self) -> str:
        """Such as "2 .jpg, 2 .txt"."""
        counts = collections.Counter(posixpath.splitext(name)[1].lower() or "without suffix" for name in self.sizes)
        found = counts.most_common(5) + [(kind, len(self.kinds[kind])) for kind in UNUSED if kind in self.kinds]
        return ", ".join(f"{count:,} {suffix}" for suffix, count in found)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a job will read.

    Args:
        config: the parameters, with those of `CHOSEN` that were left open.
        paths: what is read as one file each.
        listing: `InputFiles.sizes`.
        files: [(kind, found, read, why the rest is left out)].
        columns: [(parameter, its value, why)].
    """

    config: PreprocessingConfig
    paths: list[str]
    listing: dict[str, int]
    files: list[tuple[str, int, int, str]]
    columns: list[tuple[str, Any, str]]

    @property
    def counts(self) -> dict[str, Any]:
        """What the manifest says of the files: found = read + sum(left_out)."""
        found, read = (sum(row[column] for row in self.files) for column in (1, 2))
        left_out = collections.Counter()
        for _, of_kind, used, why in self.files:
            left_out[why] += of_kind - used
        return {"found": found, "read": read, "left_out": dict(+left_out)}


def look(config: PreprocessingConfig, begun: dict | None = None) -> Found:
    """What lies at `config.data_uri`, and the parameters of `CHOSEN` that it comes to.

    `begun`: what a job began with (`job.Job.parameters`), which it keeps if the files are the same. Raises
    FileNotFoundError or ValueError that says what is there and what to change.
    """
    files = scan(config.data_uri)
    begun = begun if begun and begun.get("input_crc32") == checksum(files.sizes) else {}
    chosen, is_auto = {name: (getattr(config, name), "given") for name in CHOSEN}, config.input_format == "auto"
    is_open = [name for name, (value, _) in chosen.items() if value in (None, "auto")]
    chosen |= {name: (begun[name], "as the job began") for name in is_open if name in begun}
    if chosen["input_format"][0] == "auto":
        chosen["input_format"] = choose_format(files, config.image_column)
    config = dataclasses.replace(config, **{name: value for name, (value, _) in chosen.items()})
    input_format = config.input_format
    names, read, _ = units(files, input_format, config.image_column)
    check_units(files, input_format, names)
    paths = list(map(files.path, names))
    is_open = [name for name, (value, _) in chosen.items() if value is None]
    chosen |= choose_columns(paths, config, files) if is_open else {}
    config = dataclasses.replace(config, **{name: chosen[name][0] for name in is_open})
    config.set_derived(image_column_is_found=chosen["image_column"][1] != "given")
    tables = list(filter(names_pictures_beside, files.sizes if is_auto else names))
    if len(tables) > 1:
        claimed_pictures(files, tables, config.image_column)
    if TABLE in files.kinds and "image_column" in is_open:
        read = units(files, input_format, config.image_column)[1]
    if PICTURE in files.kinds and any(reads_paths(path, config) for path in paths[:4]):
        read[PICTURE] = len(files.kinds[PICTURE])
    rows = [
        (kind, len(found), read.get(kind, 0), why(kind, input_format, files)) for kind, found in files.kinds.items()
    ]
    return Found(config, paths, files.sizes, rows, [(name, *pair) for name, pair in chosen.items()])


def settled(config: PreprocessingConfig) -> PreprocessingConfig:
    """A config that leaves nothing of `CHOSEN` open: `config` itself, or that of `look`, which lists the input."""
    return look(config).config if any(getattr(config, name) in (None, "auto") for name in CHOSEN) else config


def list_inputs(input_uri: str, input_format: str = "auto") -> list[str]:
    """Sorted paths of what is read as one file each: one file, those in a folder (recursively), or a pattern's matches.

    Raises as `look` does.
    """
    files = scan(input_uri)
    input_format = choose_format(files)[0] if input_format == "auto" else input_format
    names = units(files, input_format)[0]
    check_units(files, input_format, names)
    return list(map(files.path, names))


def checksum(listing: dict[str, int]) -> int:
    return zlib.crc32(json.dumps(sorted(listing.items())).encode())


# ---- files


def scan(input_uri: str) -> InputFiles:
    """The files below a folder, a file, or the matches of a pattern, by their names."""
    folder, is_file = base_folder(input_uri), storage.is_file(input_uri)
    pattern = glob_pattern(storage.resolve(input_uri)) if is_glob(input_uri) else None
    found = [(storage.name(input_uri), storage.sizes(input_uri)[""])] if is_file else storage.walk(folder)
    sizes, kinds = {}, collections.defaultdict(list)
    for name, size in sorted(found, key=lambda one: one[0]):
        if pattern is None or pattern.fullmatch(storage.join(folder, name)):
            kind = kind_of(name.lstrip("._") if is_file else name, size)
            kinds[kind].append(name)
            if kind not in UNUSED:
                sizes[name] = size
    return InputFiles(input_uri, folder, is_file or pattern is not None, sizes, dict(sorted(kinds.items())))


def kind_of(name: str, size: int | None) -> str:
    """The kind of a file, by its path. Cameras begin names of pictures with "_"."""
    *folders, file = name.lower().split("/")
    if file.startswith(".") or any(folder.startswith((".", "_")) for folder in folders):
        return HIDDEN
    if file in ("metadata.csv", "metadata.jsonl"):
        kind = TABLE
    else:
        kind = TAR if file.endswith(COMPRESSED_TARS) else KINDS.get(file.rpartition(".")[2], OTHER)
    if file.startswith("_") and kind not in (PICTURE, SIDE_CAR):
        return HIDDEN
    return BROKEN if size is None else kind


def why(kind: str, input_format: str, files: InputFiles) -> str:
    """Why files of a kind are left out."""
    layouts = {reader.what: name for name, reader in READERS.items()}
    if PICTURE in files.kinds:  # else no picture has the names of JSON files
        layouts |= dict.fromkeys((PICTURE, SIDE_CAR), "imagefolder")
    other = layouts.get(kind, input_format)
    if other != input_format:
        return f"of another layout: input_format={other!r} reads them"
    return WHY_LEFT_OUT.get(kind, "of no layout")


def units(
    files: InputFiles, input_format: str, image_column: str | None = None
) -> tuple[list[str], dict[str, int], int]:
    """`(what is read as one file each, {kind: files read}, pictures if their number is known)` in a layout."""
    kind = READERS[input_format].what
    if input_format == "imagefolder" and not files.is_named:
        return image_folder(files, image_column)
    names = files.kinds.get(kind, [])
    if input_format == "arrow":
        names = [name for name in names if not posixpath.basename(name).startswith("cache-")]
    if files.is_named and not names:  # whatever their suffixes
        used = {kind: found for kind, found in files.kinds.items() if kind not in UNUSED}
        return list(files.sizes), {kind: len(found) for kind, found in used.items()}, 0
    return names, {kind: len(names)}, 0


def check_units(files: InputFiles, input_format: str, names: list[str]) -> None:
    """Raises ValueError for files of a layout that cannot be read, and FileNotFoundError if there are none."""
    for name in files.kinds.get(BROKEN, ()):
        if f"/{name}".lower().endswith(READERS[input_format].suffixes):
            raise ValueError(
                f"{files.path(name)} is a link that leads nowhere, no regular file, or its name is not UTF-8: rename "
                "or remove it."
            )
    if input_format == "webdataset" and (compressed := files.kinds.get(TAR)):
        raise ValueError(readers.COMPRESSED_TAR.format(files.path(compressed[0])))
    if not names:
        raise FileNotFoundError(nothing_found(files, input_format))


def reads_paths(path: str, config: PreprocessingConfig) -> bool:
    """Whether the first rows of a file with types hold paths of pictures, and not their bytes."""
    values = []
    with contextlib.suppress(readers.Unreadable, KeyError):
        if READERS[config.input_format].typed:
            values = values_of(first_rows_of(path, READERS[config.input_format]())[1][config.image_column][:16])
    return any(isinstance(value, str) or (isinstance(value, dict) and not value.get("bytes")) for value in values)


def image_folder(files: InputFiles, image_column: str | None) -> tuple[list[str], dict[str, int], int]:
    """`units` of tables and the pictures that they name; and, in folders below no table, of pictures with side-cars."""
    tables = files.kinds.get(TABLE, [])
    claimed = claimed_pictures(files, tables, image_column)
    read = collections.Counter(kind_of(name, 0) for name in claimed if name in files.sizes)
    read[TABLE], folders, beside = len(tables), collections.defaultdict(list), set(map(posixpath.dirname, tables))

    @functools.cache
    def is_below_table(folder: str) -> bool:
        return folder in beside or (folder != "" and is_below_table(posixpath.dirname(folder)))

    for name in itertools.chain(files.kinds.get(PICTURE, ()), files.kinds.get(SIDE_CAR, ())):
        folder, _, file = name.rpartition("/")
        if not is_below_table(folder):
            folders[folder].append(file)
    names, num_pictures = list(tables), len(claimed)
    for folder, within in folders.items():
        samples = readers.pair_names(within)
        for start in range(0, len(samples), UNIT_PICTURES):
            some = samples[start : start + UNIT_PICTURES]
            names.append(posixpath.join(folder, f"{some[0][0]}#{len(some)}"))
        read[PICTURE] += len(samples)
        read[SIDE_CAR] += len({name for sample in samples for name in sample[1:]})
        num_pictures += len(samples)
    return sorted(names), read, num_pictures


def names_pictures_beside(name: str) -> bool:
    """Whether a file names pictures beside it, as `datasets` takes them."""
    return f"/{name}".lower().endswith((*READERS["imagefolder"].suffixes, "/metadata.parquet"))


def claimed_pictures(files: InputFiles, tables: list[str], image_column: str | None) -> dict[str, str]:
    """{picture: table} of what tables name. Raises ValueError for a picture that two of them name."""
    claimed = {}
    for table in tables:
        for name in pictures_of(files, table, image_column):
            if claimed.setdefault(name, table) != table:
                raise ValueError(
                    f"{files.path(claimed[name])} and {files.path(table)} both name the picture {name}: remove one of "
                    "the two tables."
                )
    return claimed


def pictures_of(files: InputFiles, table: str, image_column: str | None) -> Iterator[str]:
    """The pictures that a table names, by their paths below the input; none of one that cannot be read."""
    path, columns, parquet = files.path(table), (image_column, *IMAGE_COLUMNS), READERS["parquet"]()
    with contextlib.suppress(ValueError):
        if path.lower().endswith(parquet.suffixes):
            names = [field.name for field in parquet.schema(path) if field.name in columns and is_text(field.type)]
            rows = itertools.chain.from_iterable(rows.to_pylist() for rows in parquet.stream(path, names))
        else:
            rows = readers.load_metadata(path)
        for row in rows:
            name = next(filter(None, map(row.get, columns)), None)
            if isinstance(name, str):
                yield posixpath.normpath(posixpath.join(posixpath.dirname(table), name)).removeprefix(
                    f"{files.folder}/"
                )


def choose_format(files: InputFiles, image_column: str | None = None) -> tuple[str, str]:
    """`(the layout with most pictures, why)`. Raises FileNotFoundError if there is none."""
    by_kind = {reader.what: name for name, reader in READERS.items()} | {TAR: "webdataset"}
    by_kind |= {OTHER_TABLE: "imagefolder"} if files.is_named else {}
    kinds = sorted(by_kind.keys() & files.kinds.keys(), key=lambda kind: len(files.kinds[kind]))
    if files.is_named and kinds:
        return by_kind[kinds[-1]], "by the names"
    if files.is_named and files.sizes and PICTURE not in files.kinds:
        return "parquet", "as the names do not tell"
    found = {name: units(files, name) for name in READERS if not files.is_named}
    found = {name: given for name, given in found.items() if given[0]}
    if len(found) > 1:
        counts = {
            name: number or count_pictures(files, names, reader_of(name, image_column))
            for name, (names, _, number) in found.items()
        }
        most = max(counts, key=counts.get)
        return most, "most pictures; " + ", ".join(f"{name}: about {count:,}" for name, count in counts.items())
    if not found and TAR not in files.kinds:
        raise FileNotFoundError(nothing_found(files, "auto"))
    return next(iter(found), "webdataset"), "the layout that is there"


def reader_of(input_format: str, image_column: str | None) -> readers.Reader:
    """A reader of files of which at most the column of pictures is known."""
    return READERS[input_format]({image_column: pa.binary()} if readers.names_picture(image_column or "") else None)


def count_pictures(files: InputFiles, names: list[str], reader: readers.Reader) -> int:
    """The number of rows with pictures in files, from the first ones."""
    rows, size = 0, 0
    try:
        if reader.typed and not picture_columns(*first_rows_of(files.path(names[0]), reader))[0]:
            return 0
        for name in names:
            rows += sum(reader.row_groups(files.path(name)))
            size += files.sizes[name]
            if size > COUNTED_BYTES:
                break
    except readers.Unreadable:
        pass
    except ValueError:  # a file that will be refused, in a sentence of its own, unless another layout has pictures
        rows = rows or 1
    return round(rows * sum(map(files.sizes.get, names)) / max(size, 1))


def nothing_found(files: InputFiles, input_format: str) -> str:
    """The sentence that says what is there, in place of the layout that is looked for."""
    pictures, uri = len(files.kinds.get(PICTURE, ())), files.uri
    if files.is_named and pictures:
        return f"input_uri={uri!r} names pictures, whose captions are looked for in folders: give {files.folder!r}."
    if input_format in ("auto", "imagefolder") and pictures:
        return (
            f"input_uri={uri!r} holds {pictures:,} pictures and captions for none of them (it has {files}): write each "
            "one's caption to a file beside it (a.txt for a.jpg), or name it in a metadata.csv (file_name, text)."
        )
    what, example = "file of captioned pictures", "a folder of pictures with captions, Parquet files or tars"
    if input_format != "auto":
        what, (suffix, *_) = READERS[input_format].what, READERS[input_format].suffixes
        example = f"a {what}, a folder of them or a pattern such as '{uri}/*{suffix}'"
    problem = f"holds no {what}" if storage.exists(base_folder(uri)) else "does not exist"
    has = f" (it has {files})" if files.kinds and not files.is_named else ""
    others = "" if input_format == "auto" else ', or input_format="auto", which reads what is there' * bool(has)
    return f"input_uri={uri!r} {'matches no file' if files.is_named else problem}{has}: give {example}{others}."


def is_glob(input_uri: str) -> bool:
    """Whether a path has wildcards (`*`, `?`, `[`) and is not the name of a file or folder."""
    has_wildcards = any(character in input_uri for character in "*?[")
    return has_wildcards and ("://" in input_uri or not storage.exists(input_uri))


def glob_pattern(path: str) -> re.Pattern:
    """A path with wildcards as a regular expression: `*` and `?` stay within a folder, `**/` crosses folders."""
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def expression(part: str) -> str:
        if re.fullmatch(r"\[.*\]", part):
            return part.replace("[!", "[^")
        return wildcards.get(part) or re.escape(part)

    return re.compile("".join(map(expression, re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", path))))


@functools.lru_cache(maxsize=16)
def base_folder(input_uri: str) -> str:
    """The folder that contains all files of the input: for a glob, the part before its wildcards."""
    uri = storage.resolve(input_uri)
    if is_glob(input_uri):
        return re.split(r"[*?[]", uri, maxsplit=1)[0].rpartition("/")[0]
    return uri.rpartition("/")[0] if storage.is_file(uri) else uri


# ---- columns


def choose_columns(paths: list[str], config: PreprocessingConfig, files: InputFiles) -> dict[str, tuple[Any, str]]:
    """{parameter: (column, why)} of the columns that are open, by the first rows of the first files that can be read.

    Raises ValueError that names the columns that are there.
    """
    readable, error, reader = [], None, reader_of(config.input_format, config.image_column)
    if config.input_format == "imagefolder":  # of each folder once
        paths = list({posixpath.dirname(path): path for path in paths[::-1]}.values())[::-1]
    for path in paths[:16]:
        try:
            readable.append((path, *first_rows_of(path, reader)))
        except readers.Unreadable as found:
            error = error or found
        if len(readable) == 4:
            break
    if not readable:
        raise error
    readable = [one for one in readable if one[2].column_names and len(one[2])] or readable
    path, columns, _ = readable[0]
    if not columns.names:
        raise ValueError(f"The input holds no rows ({len(paths)} files, the first is {paths[0]}): give other data.")
    tables = [rows for _, _, rows in readable]
    choose = {"image_column": choose_image, "caption_column": choose_caption, "id_column": choose_id}
    try:
        return {name: choose[name](columns, tables) for name in choose if getattr(config, name) is None}
    except ValueError as error:
        found = f"its columns: {', '.join(columns.names)}; the input has {files}"
        raise ValueError(f"{path} {error} ({found}).") from None


def first_rows_of(path: str, reader: readers.Reader) -> tuple[pa.Schema, pa.Table]:
    """`(columns, first rows)` of a file; of columns that may hold pictures, captions or ids."""
    columns = reader.schema(path)
    names = [field.name for field in columns if may_be_used(field.type)]
    types, captions = {**reader.types, **{name: columns.field(name).type for name in names}}, ()
    if reader.typed:
        types, captions = {}, [name for name in names if name.lower() in CAPTION_COLUMNS]
    rows = next(type(reader)(types, captions).stream(path, names), columns.empty_table())
    return columns, rows.select(names).slice(0, 64)


def may_be_used(kind: pa.DataType) -> bool:
    """Whether a column may hold pictures, captions or ids, and its values are plain."""
    if is_extension(kind):
        return False
    in_list = hasattr(kind, "value_type") and is_text_or_bytes(kind.value_type)
    return in_list or not pa.types.is_nested(picture_type(kind))


def picture_type(kind: pa.DataType) -> pa.DataType:
    """The type of a struct's `bytes` or, if it has none, of its `path`; other types as they are."""
    if pa.types.is_struct(kind):
        return next((kind.field(name).type for name in ("bytes", "path") if kind.get_field_index(name) >= 0), kind)
    return kind


def picture_columns(columns: pa.Schema, rows: pa.Table) -> tuple[list[str], list[str]]:
    """`(columns of pictures' bytes, columns of their paths)`, by the values of some rows."""
    in_bytes, in_paths = [], []
    for name in (field.name for field in rows.schema if not hasattr(field.type, "value_type")):
        values = [value for value in values_of(rows[name].drop_null()[:16]) if value]
        values = [value.get("bytes") or value.get("path") if isinstance(value, dict) else value for value in values]
        if any(isinstance(value, bytes) and readers.IMAGE_BYTES.match(value) for value in values):
            in_bytes.append(name)
        elif any(isinstance(value, str) and is_place(value) for value in values) or name == "file_name":
            in_paths.append(name)
    return in_bytes, in_paths


def values_of(column: pa.ChunkedArray) -> list:
    """The values of a column; text that is not UTF-8 is None."""
    return readers.texts(column) if is_text(column.type) else column.to_pylist()


def is_place(text: str) -> bool:
    """Whether a text is the path or URL of a picture, or a picture itself in base64."""
    suffix = posixpath.splitext(text.lower())[1]
    return suffix[1:] in PICTURES or readers.is_url(text) or readers.is_base64(text)


def choose_image(columns: pa.Schema, tables: list[pa.Table]) -> tuple[str, str]:
    of_tables = zip(*(picture_columns(columns, rows) for rows in tables), strict=True)
    in_bytes, in_paths = (list(dict.fromkeys(itertools.chain.from_iterable(names))) for names in of_tables)
    by_name = [name for name in IMAGE_COLUMNS if name in columns.names]
    # Of img2dataset's pictures the first ones may all be missing.
    missing = [
        name for name in by_name if is_bytes(columns.field(name).type) or pa.types.is_null(columns.field(name).type)
    ]
    found = in_bytes or missing or in_paths or by_name
    named = [name for name in IMAGE_COLUMNS if name in found]
    if len(found) > 1 and not named:
        raise ValueError(f"holds images in {', '.join(found)}: name one, such as image_column={found[0]!r}")
    if not found:
        raise ValueError("holds nothing that is an image: name the column of images or their paths by image_column")
    others = f"; {', '.join(set(found) - set(named[:1]))} too" if len(found) > 1 else ""
    reason = "holds images" if in_bytes else "holds paths of images" if found == in_paths else "by its name"
    return (named or found)[0], reason + others


def choose_caption(columns: pa.Schema, tables: list[pa.Table]) -> tuple[str, str]:
    named = {name.lower(): name for name in reversed(columns.names)}
    found = [named[name] for name in CAPTION_COLUMNS if name in named]
    if not found:
        raise ValueError("has no column caption, text or txt: name the column of captions by caption_column")
    filled = {
        name: sum(len(rows) - rows[name].null_count for rows in tables if name in rows.column_names) for name in found
    }
    return max(filled, key=filled.get), f"first filled one of {', '.join(CAPTION_COLUMNS)}"


def choose_id(columns: pa.Schema, tables: list[pa.Table]) -> tuple[str, str]:
    for name in (name for name in ID_COLUMNS if name in columns.names):
        found = [values_of(rows[name]) if name in rows.column_names else [None] for rows in tables]
        values = list(itertools.chain.from_iterable(found))
        if None not in values and "" not in values and len(set(map(str, values))) == len(values):
            return name, f"no value is missing or repeated in {len(values)} rows"
    return PLACE, f"made of the file's path and the row's place: no {', '.join(ID_COLUMNS)} without gaps and repeats"


def is_text_or_bytes(kind: pa.DataType) -> bool:
    return is_text(kind) or is_bytes(kind) or pa.types.is_null(kind)  # null: no row has a value


def is_text(column_type: pa.DataType) -> bool:
    return pa.types.is_string(column_type) or pa.types.is_large_string(column_type)


def is_bytes(column_type: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(column_type) or types.is_large_binary(column_type) or types.is_fixed_size_binary(column_type)
