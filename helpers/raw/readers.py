"""Readers of raw data: Parquet, Arrow files of Hugging Face's `datasets`, WebDataset tars, folders of pictures.

Each reader has the same methods, which take a file:
    schema          its columns, with types
    row_groups      the number of rows of each row group
    stream          all rows, some at a time
    locate          some columns of all rows, and where each row is in the file
    read_located    some rows, from where they are

Nothing here runs code from data: tars are never unpacked, JSON and CSV are parsed, paths may not leave the input's
folder.
"""

from __future__ import annotations

import base64
import bisect
import codecs
import collections
import concurrent.futures
import contextlib
import csv
import functools
import io
import itertools
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import fs

from .. import storage
from ..latents import schema
from ..latents.parquet import PlainParquetFile, check_types, open_parquet, plain_type, to_plain
from ..latents.schema import ROWS_PER_ROW_GROUP
from .images import BadImage

GROUP, ROW, START, STOP = "__group__", "__row__", "__start__", "__stop__"  # where a row is in its file
FILES = "__files__"  # where a row is in its folder: the names of its picture, and of what stands beside it
PATH, PLACE = "path", "__place__"  # added columns: the file of each row, and the row's number in it
KEY = "__key__"  # a WebDataset sample's name within its tar, without the extensions
# A sample's picture is its column "jpg". Those of the second line are not decoded, but rejected by name.
PICTURES = ("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
PICTURES += ("heic", "heif", "jxl", "jp2", "psd")
TEXTS = ("txt", "caption", "json")
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
HALF_PAIRS = re.compile("[\udc80-\udcff]")  # what `decode_text` makes of bytes that are not UTF-8
IMAGE_BYTES = re.compile(rb"\xff\xd8\xff|\x89PNG|RIFF|GIF8|BM|II\*\0|MM\0\*|....ftyp", re.DOTALL)
COMPRESSED_TAR = "{} is a compressed tar, in which no sample can be found: decompress it (gunzip, xz -d, zstd -d)."
LINK = "{!r} is a link, which cannot be read alone: make the tar with `tar --dereference --hard-dereference`."
# What stands in place of a caption that cannot be used, and says why.
NOT_UTF8, NOT_TEXT = "\0caption is not UTF-8", "\0caption is neither a text nor a list of texts"
SEVERAL = b"\0several images in one sample"  # in place of a picture
MOST_PARTS = 64  # of a sample, such as "a.input.jpg", "a.target.jpg" and "a.txt"
FIRST_DOT = re.compile(r"(.*/)?[^/.]*")  # where a WebDataset sample's name ends
MAX_BYTES = 2**28  # of one picture or text; a larger one is not read
MAX_CAPTION_BYTES = 2**16
BUFFER_BYTES = 2**20  # of a Parquet column read at a time; without it, a row group's whole column is read
LARGE_BATCH_BYTES = 2**24
PART_ROWS = 2048  # that a task reads of a large Parquet file, or one row group
GROUP_ROWS = ROWS_PER_ROW_GROUP  # for formats without row groups, see `schema.row_groups`


class Unreadable(ValueError):
    """A whole file cannot be read; other files may be."""


def unreadable(path: str, what: str, error: Exception) -> Exception:
    """What to raise for an error of pyarrow: `error` if the file is not there, or if its storage did not answer."""
    is_damage = "thrift" in str(error) or (storage.is_local(path) and getattr(error, "errno", None) is None)
    if isinstance(error, OSError) and not is_damage:
        return error
    return Unreadable(f"{path} is not a readable {what}: remove or replace it. ({error})")


class Reader:
    """What the readers have in common. Formats without types have rows that are dicts.

    Args:
        types: Arrow types of the used columns (`inputs.column_types`); a value of another type becomes null.
        captions: those of the columns that hold captions (`caption_texts`).
        by_line: whether a text holds a caption a line.
    """

    what, suffixes, typed = "", (), False  # typed: whether its files have types
    is_found = False  # whether the column of pictures was found, and not given

    def __init__(
        self, types: dict[str, pa.DataType] | None = None, captions: Sequence[str] = (), by_line: bool = False
    ):
        self.types, self.captions, self.by_line = types or {}, captions, by_line

    def largest_group(self, path: str) -> int:
        """Rows of the largest row group that can only be read whole; 0 if rows can be read alone."""
        return 0

    def parts(self, path: str) -> list[tuple[int, list[int] | None]]:
        """What tasks read of the file, each for itself: `(first row, row groups)`; None stands for all groups."""
        return [(0, None)]

    def schema_of(self, rows: Iterable[dict]) -> pa.Schema:
        """The columns of some rows; unused ones are typed as text, or as bytes if they hold these."""
        kinds = {name: pa.binary() if isinstance(row[name], bytes) else pa.string() for row in rows for name in row}
        kinds = {name: self.types.get(name, kind) for name, kind in kinds.items() if name not in (START, FILES)}
        return pa.schema([(text_bytes(name).decode(errors="replace"), kind) for name, kind in kinds.items()])

    def table(self, rows: list[dict], columns: list[str]) -> pa.Table:
        values = {name: [row.get(name) for row in rows] for name in columns}
        for name in self.captions if self.by_line else ():
            values[name] = [text.splitlines() if isinstance(text, str) else text for text in values.get(name, ())]
        return pa.table({name: convert(values[name], self.types[name], name in self.captions) for name in columns})


class Typed(Reader):
    """A format whose files have types."""

    typed = True

    def schema(self, path: str) -> pa.Schema:
        """As they are read (`plain_type`). Raises ValueError for a used extension type, and for two equal names."""
        stored = self.stored_schema(path)
        if repeated := [name for name, count in collections.Counter(stored.names).items() if count > 1]:
            raise ValueError(f"{path} has several columns called {repeated[0]!r}: rename them.")
        return pa.schema([field.with_type(plain_type(field.type)) for field in stored])


class Parquet(Typed):
    """Parquet files, with their own row groups and types."""

    what, suffixes = "Parquet file", (".parquet", ".parq")

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[PlainParquetFile]:
        """A file on any storage. Raises ValueError naming one that is not Parquet, or is damaged where it is read."""
        try:
            with open_parquet(path, buffer_size=BUFFER_BYTES) as file:
                self.check_captions(path, file)
                yield file
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(path, self.what, error) from None

    def check_captions(self, path: str, file: PlainParquetFile) -> None:
        """Raises Unreadable for captions that are too long on average, because Arrow decodes whole pages of them."""
        metadata = file.metadata
        names = [metadata.schema.column(number).path.partition(".")[0] for number in range(metadata.num_columns)]
        for column in (number for number, name in enumerate(names) if name in self.captions):
            for group in range(metadata.num_row_groups):
                chunk = metadata.row_group(group).column(column)
                size = chunk.total_uncompressed_size
                if size > MAX_BYTES and size > chunk.num_values * MAX_CAPTION_BYTES:
                    what = f"{chunk.num_values:,} captions of the column {names[column]!r}"
                    remedy = f"more than {MAX_CAPTION_BYTES:,} each: shorten or remove them."
                    raise Unreadable(f"{path} holds {size:,} bytes in {what}, {remedy}")

    def stored_schema(self, path: str) -> pa.Schema:
        with self.open(path) as file:
            file.check_columns(list(self.types))
            return file.schema_arrow

    def row_groups(self, path: str) -> list[int]:
        """Rows of each row group, from the footer. Raises ValueError for a used column of an extension type."""
        with self.open(path) as file:
            file.check_columns(list(self.types))
            return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]

    def locate(self, path: str, columns: list[str]) -> Iterator[pa.Table]:
        """Columns of all rows, some at a time, with `GROUP` and, within it, `ROW`."""
        with self.open(path) as file:
            for group in range(file.metadata.num_row_groups):
                first = 0
                options = {"row_groups": [group], "columns": columns, "use_threads": False}
                for batch in file.iter_batches(batch_size=GROUP_ROWS, **options):
                    yield located(pa.Table.from_batches([batch]), group, first)
                    first += len(batch)
                    release_large(batch)

    def largest_group(self, path: str) -> int:
        return max(self.row_groups(path), default=0)

    def parts(self, path: str) -> list[tuple[int, list[int] | None]]:
        first_rows = np.cumsum([0, *self.row_groups(path)]).tolist()
        numbers = range(len(first_rows) - 1)
        parts = [list(of) for _, of in itertools.groupby(numbers, key=lambda group: first_rows[group] // PART_ROWS)]
        return [(first_rows[of[0]], of) for of in parts] or [(0, [])]  # a file without rows is read too

    def read_located(self, path: str, pieces: Iterable[pa.Table], columns: list[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`: some rows of one row group, as `locate` gives them.

        Parquet cannot be read by row: all rows before the last are decoded, some at a time.
        """
        with self.open(path) as file:
            for piece in pieces:
                rows, first, found = piece[ROW].to_numpy(), 0, []
                options = {"row_groups": [piece[GROUP][0].as_py()], "columns": columns, "use_threads": False}
                for batch in file.iter_batches(batch_size=GROUP_ROWS, **options):
                    found.append(batch.take(rows[(rows >= first) & (rows < first + len(batch))] - first))
                    first += len(batch)
                    release_large(batch)
                    if first > rows[-1]:
                        break
                yield pa.Table.from_batches(found)

    def stream(self, path: str, columns: list[str], groups: list[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some row groups, a few at a time, because a row group may be larger than memory."""
        with self.open(path) as file:
            for batch in file.iter_batches(batch_size=GROUP_ROWS, row_groups=groups, columns=columns):
                yield pa.Table.from_batches([batch])
                release_large(batch)


class Arrow(Typed):
    """Arrow files as Hugging Face's `save_to_disk` writes them (streams), and Arrow's file format; mapped on a disk.

    They are read in their order: finding a row on an object store sends what stands before it.
    """

    what, suffixes = "Arrow file", (".arrow",)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """`(schema, batches)`. Raises ValueError naming a file that is not Arrow's, or as `check_types`."""
        filesystem, inner = storage.open_filesystem(path)
        try:
            with pa.memory_map(inner) if storage.is_local(path) else filesystem.open_input_file(inner) as source:
                is_file = source.read_at(6, 0) == b"ARROW1"
                found = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                check_types(found.schema, path, list(self.types))
                yield found.schema, map(found.get_batch, range(found.num_record_batches)) if is_file else iter(found)
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(path, self.what, error) from None

    def batches(self, path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Columns of each record batch."""
        with self.open(path) as (stored, batches):
            check_types(stored, path, list(columns))
            for batch in batches:
                yield to_plain(pa.Table.from_batches([batch]).select(columns))

    def stored_schema(self, path: str) -> pa.Schema:
        with self.open(path) as (stored, _):
            return stored

    def row_groups(self, path: str) -> list[int]:
        """Rows of each record batch."""
        with self.open(path) as (_, batches):
            return [len(batch) for batch in batches]

    def stream(self, path: str, columns: list[str], groups: list[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some record batches, a few at a time."""
        for group, table in enumerate(self.batches(path, columns)):
            if groups is None or group in groups:
                yield from (table.slice(start, GROUP_ROWS) for start in range(0, len(table), GROUP_ROWS))

    def locate(self, path: str, columns: list[str]) -> Iterator[pa.Table]:
        """Columns of all rows, a record batch at a time, with `GROUP` and, within it, `ROW`."""
        for group, table in enumerate(self.batches(path, columns)):
            yield located(table, group, 0)

    def read_located(self, path: str, pieces: Iterable[pa.Table], columns: list[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`: some rows of one record batch, as `locate` gives them."""
        pieces = list(pieces)
        groups, found = [piece[GROUP][0].as_py() for piece in pieces], {}
        for group, table in enumerate(itertools.islice(self.batches(path, columns), max(groups) + 1)):
            numbers = (number for number, of_piece in enumerate(groups) if of_piece == group)
            found |= {number: rows_of(table, pieces[number]) for number in numbers}
        yield from (found[number] for number in range(len(pieces)))


class WebDataset(Reader):
    """Tars as img2dataset writes them: consecutive members with the same name are a sample.

    Columns: "jpg", "input.jpg", ..., the bytes of its picture of that name, and "jpg" those of its only picture; "txt",
    its `.txt`; the keys of its `.json`. A sample can be read alone from its offset in the tar. Finding the offsets
    takes a pass over all headers: fast on a disk, but an object store sends the whole tar.
    """

    what, suffixes = "WebDataset tar", (".tar",)

    def samples(self, tar: tarfile.TarFile, **options: Any) -> Iterator[dict]:
        """`samples`, with the column of pictures that is given."""
        named = next(filter(names_picture, self.types), None if self.types else "")
        return samples(tar, picture="" if self.is_found else named, **options)

    def schema(self, path: str) -> pa.Schema:
        """The columns of the first samples. Raises ValueError as `with_picture`."""
        with open_tar(path) as tar:
            found = self.samples(tar, is_strict=True)
            columns = self.schema_of(itertools.islice(found, GROUP_ROWS))
            if len(columns) == 2:  # a key and one member: the rest may stand apart, which raises Unusable
                collections.deque(found, maxlen=0)
            return columns

    def row_groups(self, path: str) -> list[int]:
        """Rows of each group, from the members' headers."""
        with open_tar(path) as tar:
            return schema.row_groups(sum(1 for _ in self.samples(tar, wanted=())))

    def locate(self, path: str, columns: list[str]) -> Iterator[pa.Table]:
        """Columns of all samples, with `START` and `STOP`: each sample's byte range in the tar."""
        with open_tar(path) as tar:
            rows = list(self.samples(tar, wanted=TEXTS))
            bounds = np.array([*(row[START] for row in rows), tar.offset])
        table = self.table(rows, columns)
        yield table.append_column(START, pa.array(bounds[:-1])).append_column(STOP, pa.array(bounds[1:]))

    def read_located(self, path: str, pieces: Iterable[pa.Table], columns: list[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`, as `locate` gives them: only these are read, neighbours by one request."""
        filesystem, inner = storage.open_filesystem(path)

        def read(start: int, stop: int) -> list[dict]:
            data = file.read_at(stop - start, start) + bytes(2 * tarfile.BLOCKSIZE)  # a tar's end
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                return list(self.samples(tar))

        with filesystem.open_input_file(inner) as file:
            for piece in pieces:
                starts, stops = piece[START].to_numpy(), piece[STOP].to_numpy()
                apart = starts[1:] != stops[:-1]
                spans = starts[np.append(True, apart)].tolist(), stops[np.append(apart, True)].tolist()
                yield self.table(list(itertools.chain.from_iterable(in_parallel(path, read, *spans))), columns)

    def stream(self, path: str, columns: list[str], groups: list[int] | None = None) -> Iterator[pa.Table]:
        """The whole tar from its start, a group at a time. `groups` is ignored, because it would need offsets."""
        with open_tar(path) as tar:
            rows = self.samples(tar)
            while group := list(itertools.islice(rows, GROUP_ROWS)):
                yield self.table(group, columns)


class ImageFolder(Reader):
    """Folders of pictures, with a `metadata.csv` or `metadata.jsonl` (Hugging Face's ImageFolder), or with side-cars.

    A table has a column `file_name`, relative to its folder, and one of captions. Empty fields of a CSV are empty text.
    Side-cars are files with a picture's name and another suffix: its caption (`a.txt`, `a.caption`; the column "text"),
    and a JSON file whose keys are columns. Pictures of one folder are read as "{folder}/{first picture}#{how many}".
    Pictures are not read here: `read_pictures` fetches them.
    """

    what, suffixes = "metadata.csv or metadata.jsonl", ("/metadata.csv", "/metadata.jsonl")

    def rows(self, path: str) -> list[dict]:
        """Those of a table, or the names of some pictures and their side-cars."""
        if is_table(path):
            return load_metadata(path)
        folder, first, count = split_unit(path)
        names = storage.walk(folder, recursive=False)
        found = pair_names(name for name, size in names if size is not None)
        start = bisect.bisect_left(found, (first,))
        return [{"file_name": files[0], FILES: files} for files in found[start : start + count]]

    def load(self, path: str, rows: list[dict], columns: Sequence[str] = ("",)) -> list[dict]:
        """The rows, with what the side-cars hold that some of `columns` may need."""
        wanted = {*columns} - {"file_name"}

        def read(row: dict) -> dict:
            """The row, with what its files hold."""
            for name in row[FILES][1:] if wanted else ():
                data = read_picture(name, folder, folder)
                if isinstance(data, BadImage):
                    continue
                is_json = name.lower().endswith(".json")
                row = {**parse_json(data), **row} if is_json else {**row, "text": decode_caption(data)}
            return row

        if rows and FILES in rows[0]:
            folder = split_unit(path)[0]
            rows = in_parallel(path, read, rows)
        return [fill_caption(row, wanted) for row in rows]

    def table_of(self, path: str, rows: list[dict], columns: list[str]) -> pa.Table:
        """`table`; of pictures with side-cars also `PATH`, that of the picture, and no `PLACE`."""
        table = self.table(self.load(path, rows, columns), columns)
        if not rows or FILES not in rows[0]:
            return table
        paths = pa.array([f"{split_unit(path)[0]}/{row[FILES][0]}" for row in rows], pa.string())
        return table.append_column(PATH, paths).append_column(PLACE, pa.nulls(len(rows), pa.int64()))

    def schema(self, path: str) -> pa.Schema:
        rows = self.rows(path)
        return self.schema_of(self.load(path, rows[:GROUP_ROWS]) + rows[GROUP_ROWS:])

    def row_groups(self, path: str) -> list[int]:
        """Rows of each group."""
        return schema.row_groups(len(load_metadata(path)) if is_table(path) else split_unit(path)[2])

    def stream(self, path: str, columns: list[str], groups: list[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some groups, a group at a time."""
        rows = self.rows(path)
        for start in range(0, len(rows), GROUP_ROWS) if groups is None else (group * GROUP_ROWS for group in groups):
            yield self.table_of(path, rows[start : start + GROUP_ROWS], columns)

    def locate(self, path: str, columns: list[str]) -> Iterator[pa.Table]:
        """Columns of all rows, some at a time, with `ROW` or, of pictures with side-cars, `FILES`."""
        rows = self.rows(path)
        for start in range(0, len(rows), GROUP_ROWS):
            some = rows[start : start + GROUP_ROWS]
            where = pa.array(range(start, start + len(some)), pa.int32())
            named = [row[FILES] for row in some if FILES in row]
            where = (FILES, pa.array(named, pa.list_(pa.string()))) if named else (ROW, where)
            yield self.table_of(path, some, columns).append_column(*where)

    def read_located(self, path: str, pieces: Iterable[pa.Table], columns: list[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`, as `locate` gives them."""
        rows = load_metadata(path) if is_table(path) else []
        for piece in pieces:
            if is_table(path):
                yield self.table([rows[row] for row in piece[ROW].to_pylist()], columns)
            else:
                some = [{"file_name": files[0], FILES: files} for files in piece[FILES].to_pylist()]
                yield self.table_of(path, some, columns)


READERS = {"parquet": Parquet, "webdataset": WebDataset, "imagefolder": ImageFolder, "arrow": Arrow}


def fill_caption(row: dict, wanted: set[str]) -> dict:
    """The row of an image folder; folders may call captions "text" or "caption", and one name serves all."""
    for name, other in (("text", "caption"), ("caption", "text")):
        if name in wanted and name not in row and other in row:
            return {**row, name: row[other]}
    return row


def is_table(path: str) -> bool:
    """Whether a path of an image folder is that of a table, whatever its name."""
    return not re.search(r"#\d+$", path)


def split_unit(path: str) -> tuple[str, str, int]:
    """`(folder, first picture, number of pictures)` of what `ImageFolder` reads as one file."""
    names, _, count = path.rpartition("#")
    folder, _, first = names.rpartition("/")
    return folder, first, int(count)


def pair_names(names: Iterable[str]) -> list[tuple[str, ...]]:
    """[(picture, what stands beside it, ...)] of the files of one folder, sorted; pictures alone are left out.

    A picture has at most one JSON file and one text: of several texts the last, "a.txt" and not "a.caption".
    """
    pictures, beside = [], collections.defaultdict(dict)
    for name in sorted(names):
        stem, _, suffix = name.rpartition(".")
        if suffix.lower() in TEXTS:
            beside[stem]["json" if suffix.lower() == "json" else "text"] = name
        elif stem and suffix.lower() in PICTURES and not name.startswith("."):
            pictures.append((name, stem))
    return [(name, *sorted(beside[stem].values())) for name, stem in pictures if stem in beside]


def located(table: pa.Table, group: int, first: int) -> pa.Table:
    """Rows of a row group, from its row `first` on, with `GROUP` and `ROW`."""
    rows = np.arange(first, first + len(table), dtype=np.int32)
    return table.append_column(ROW, pa.array(rows)).append_column(GROUP, pa.array(np.full_like(rows, group)))


def release_large(batch: pa.RecordBatch) -> None:
    """Return unused memory to the system after a large batch: Arrow's pool may keep that of each before it."""
    if batch.nbytes > LARGE_BATCH_BYTES:
        pa.default_memory_pool().release_unused()


def rows_of(table: pa.Table, piece: pa.Table) -> pa.Table:
    """The rows of a row group that `piece` locates, in ascending order.

    `take` would join a column's chunks, whose offsets have only 32 bits.
    """
    rows = piece[ROW].to_numpy()
    first, is_listed = int(rows[0]), np.zeros(rows[-1] + 1 - rows[0], dtype=bool)
    is_listed[rows - first] = True
    return table.slice(first, len(is_listed)).filter(pa.array(is_listed))


@contextlib.contextmanager
def open_tar(path: str) -> Iterator[tarfile.TarFile]:
    """A `TarFile` on any storage. Raises ValueError naming one that cannot be read to its end."""
    filesystem, inner = storage.open_filesystem(path)
    # Seeking from header to header is cheap on a disk; on an object store, each seek would be a request.
    local = storage.is_local(path)
    stream = {"buffer_size": 2**22, "compression": None}
    opened = filesystem.open_input_file(inner) if local else filesystem.open_input_stream(inner, **stream)
    try:
        with opened as file, tarfile.open(fileobj=file, mode="r:" if local else "r|") as tar:
            yield tar
    except Unusable as error:
        raise ValueError(f"{path}: {error}") from None
    except tarfile.TarError as error:
        with filesystem.open_input_file(inner) as file:
            is_compressed = file.read(8).startswith(COMPRESSED)
        if is_compressed:
            raise ValueError(COMPRESSED_TAR.format(path)) from None
        raise Unreadable(f"{path} is not a readable WebDataset tar: remove or replace it. ({error})") from None


# Consecutive members of a tar that differ in their last extension alone: {extension: bytes or None if not read}.
Part = collections.namedtuple("Part", "key start members")


class Unusable(tarfile.TarError):
    """A tar's samples cannot be told apart; the text says what to do."""


def samples(tar: tarfile.TarFile, wanted: Sequence[str] = (*PICTURES, *TEXTS), **options: Any) -> Iterator[dict]:
    """A tar's samples as dicts: `__key__`, `START`, pictures by extension, the text as "txt", the JSON's keys.

    A sample's only picture is "jpg" too. Raises Unusable for a sample whose members do not stand together, and for a
    second tar in the file.

    Args:
        wanted: the extensions that are read; () for the headers alone.
        options: of `with_picture`.
    """
    parts, keys = [], set()
    for part in read_parts(tar, wanted):
        if part.key in keys.difference(one.key for one in parts):
            raise Unusable(
                f"the members of the sample {part.key!r} do not stand together: sort the tar, for example by "
                "`mkdir d && tar -xf a.tar -C d && tar --sort=name -cf sorted.tar -C d .`"
            )
        keys.add(part.key)
        if len(parts) == MOST_PARTS or not may_be_one([*parts, part]):
            yield from (with_picture(one, **options) for one in joined(parts))
            parts = []
        parts.append(part)
    yield from (with_picture(one, **options) for one in joined(parts))
    check_end(tar)


def read_parts(tar: tarfile.TarFile, wanted: Sequence[str]) -> Iterator[Part]:
    part = Part("", 0, {})
    for member in tar:
        key, _, extension = member.name.rpartition(".")
        extension, is_link = extension.lower(), member.islnk() or member.issym()
        if not (member.isfile() or is_link) or "/" in extension or posixpath.basename(key).split(".")[0] == "":
            continue
        if is_link and wanted == TEXTS and extension in (*PICTURES, *TEXTS):  # the sample will be read alone
            raise Unusable(LINK.format(member.name))
        if key != part.key or extension in part.members:
            yield part
            part = Part(key, member.offset, {})
        part.members[extension] = member_bytes(tar, member) if extension in wanted else None
    yield part


def shared_name(parts: list[Part]) -> str | None:
    """The name that all parts begin with and one of them has, such as "a" of "a.input.jpg" and "a.txt"."""
    name = min((part.key for part in parts), key=len)
    return name if all(f"{part.key}.".startswith(f"{name}.") for part in parts) else None


def may_be_one(parts: list[Part]) -> bool:
    """Whether parts may be of one sample, whose name ends at a dot; a picture and its text are a sample of their own.

    So "a.input.jpg", "a.target.jpg" and "a.txt" are one, but not "a.1.jpg", "a.1.txt" and "a.txt".
    """
    texts, name = [len(part.members.keys() & TEXTS) for part in parts], shared_name(parts)
    if name is None:  # that of the samples may follow
        return not any(texts) and len({FIRST_DOT.match(part.key)[0] for part in parts}) == 1
    is_own = (0 < of < len(part.members) for of, part in zip(texts, parts, strict=True) if part.key != name)
    members = [(part.key, extension) for part in parts for extension in part.members]
    return len(set(members)) == len(members) and not any(is_own)


def joined(parts: list[Part]) -> list[dict]:
    """The sample of some parts, or one of each if none has the name of all: its members, by extension."""
    if (name := shared_name(parts)) is None:
        return [sample for part in parts for sample in joined([part])]
    sample = {KEY: name, START: parts[0].start}
    for part in parts:
        before = f"{part.key}."[len(name) + 1 :].lower()
        sample |= {before + extension: data for extension, data in part.members.items()}
    return [sample] if len(sample) > 2 else []


def check_end(tar: tarfile.TarFile) -> None:
    """Raises Unusable for a second tar in the file, and ReadError if the end of the only one is missing or damaged.

    `tarfile` stops without a word at a header that it cannot read, and at the end of a tar that was cut short.
    """
    is_ended = False
    while block := tar.fileobj.read(2**20):
        is_ended = True
        if rest := block.lstrip(b"\0"):
            start = (len(block) - len(rest)) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
            try:
                tarfile.TarInfo.frombuf(block[start : start + tarfile.BLOCKSIZE], tar.encoding, tar.errors)
            except tarfile.HeaderError:
                raise tarfile.ReadError("a header is damaged") from None
            raise Unusable("another tar follows in the same file, which tar would not read: split them into two files.")
    if not is_ended:
        raise tarfile.ReadError("its end is missing")


def names_picture(name: str) -> bool:
    """Whether an extension, or a column of that name, is that of a picture, such as "jpg" or "input.jpg"."""
    return name.rpartition(".")[2] in PICTURES


def with_picture(members: dict, picture: str | None, is_strict: bool = False) -> dict:
    """A sample with its texts decoded, and its only picture as "jpg". Several pictures become `SEVERAL`.

    Pictures of longer names ("a.mask.png") count if there is no other.

    Args:
        picture: the column that is given, of any number of pictures; "": none is, None: it is none of pictures.
        is_strict: raises Unusable for several pictures.
    """
    sample = {name: data for name, data in members.items() if data is not None and name != "json"}
    for name in sample.keys() - {KEY, START}:
        if not names_picture(name):
            sample[name] = decode_caption(sample[name])
    if members.get("json"):
        sample = {**sample, **parse_json(members["json"]), **sample}  # its other members go before its keys
    pictures = sorted(members.keys() & PICTURES) or sorted(filter(names_picture, members))
    if len(pictures) == 1 and pictures[0] in PICTURES and pictures[0] in sample:
        return {**sample, "jpg": sample[pictures[0]]}
    is_named = picture is None or picture in members
    if len(pictures) < 2 or is_named or (is_strict and pictures[0] not in PICTURES):  # columns that must be named
        return sample
    if not is_strict:
        return {**sample, **dict.fromkeys((*PICTURES, *pictures), SEVERAL)}
    raise Unusable(
        f"the sample {sample[KEY]!r} has {len(pictures)} pictures (.{', .'.join(pictures)}): name one, such as "
        f"image_column={pictures[0]!r}."
    )


def member_bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The bytes of a tar's member; empty if it is too large, or sparse (a few bytes may claim to be terabytes)."""
    if member.issparse() or member.size > MAX_BYTES:
        return b""
    try:
        return tar.extractfile(member).read(member.size or MAX_BYTES)  # a link has no size
    except (KeyError, tarfile.StreamError):
        raise Unusable(LINK.format(member.name)) from None


@functools.lru_cache(maxsize=1)
def _load_metadata(path: str, version: tuple[int, int]) -> list[dict]:
    filesystem, inner = storage.open_filesystem(path)
    with filesystem.open_input_stream(inner) as stream:
        data = stream.read()
    text = decode_text(data)
    if is_utf16(text):
        raise Unreadable(f"{path} is UTF-16 without a byte order mark: save it as UTF-8.")
    if path.lower().endswith(".jsonl"):
        return [parse_json(line) for line in text.split("\n") if line.strip()]
    csv.field_size_limit(MAX_BYTES)
    text = io.StringIO(text, newline="")
    try:
        rows = list(csv.DictReader(text, restval="", strict=True))
        if any(None in row for row in rows):
            raise csv.Error("its rows have more fields than its first line has names")
    except csv.Error as error:
        raise Unreadable(f"{path} is not a readable table: correct it. ({error})") from None
    return rows


def load_metadata(path: str) -> list[dict]:
    """The rows of a `metadata.csv` (all text) or `metadata.jsonl`; invalid JSON lines become rows of nulls."""
    return _load_metadata(path, storage.version(path))  # cached: an epoch reads the same few tables


def decode_text(data: bytes) -> str:
    """Text in UTF-8 or, by its byte order mark, UTF-16. Bytes that are neither become halves of surrogate pairs."""
    with contextlib.suppress(UnicodeDecodeError):  # nor is it UTF-8
        if data.startswith(UTF_16) and data[2:4] != b"\0\0":  # that would be UTF-32
            return data.decode("utf-16")
    return data.decode("utf-8-sig", "surrogateescape")


def parse_json(text: str | bytes) -> dict:
    """A JSON object as a dict, with its texts shortened (`shorten`); {} for anything else."""
    try:
        value = json.loads(decode_text(text) if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return {}
    return {key: shorten(one) for key, one in value.items()} if isinstance(value, dict) else {}


def convert(values: list, kind: pa.DataType, is_caption: bool = False) -> pa.Array:
    """Values from JSON, CSV or a tar as an Arrow array of a type; a value of another type becomes null.

    Text may hold bytes that are not UTF-8, as Parquet's text may. If `kind` is text, the first caption is taken.
    """
    in_list = pa.types.is_list(kind)
    if is_caption or in_list:
        values = [caption_texts(value) for value in values]
        if in_list:
            texts = [[text_bytes(one) for one in value] for value in values]
            return pa.array(texts, pa.list_(pa.binary())).cast(kind, safe=False)
        values = [next((one for one in value if str(one).strip()), *value[:1] or [None]) for value in values]
    if pa.types.is_floating(kind):
        return pa.array([as_number(value) for value in values], kind)
    if pa.types.is_string(kind):
        return pa.array([text_bytes(value) for value in values], pa.binary()).cast(kind, safe=False)
    return pa.array([value if isinstance(value, bytes) else None for value in values], kind)


def caption_texts(value: Any) -> list:
    """The captions in a value from JSON, CSV or a tar: a text, or those in a list, without nulls."""
    listed = value if isinstance(value, list) else [value]
    return [NOT_TEXT if isinstance(one, (dict, list)) else one for one in listed if one is not None and one != {}]


def as_number(value: Any) -> float | None:
    """A float, or None."""
    try:
        return float(value) if isinstance(value, (bool, int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def as_text(value: bytes | None) -> str | None:
    """Text, or None for bytes that are not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | None]:
    """The texts of a column of text or bytes; None for invalid UTF-8, which Parquet readers let through."""
    return [as_text(value) for value in column.cast(pa.large_binary()).to_pylist()]


def as_caption(value: bytes | None) -> str | None:
    """Text of at most a character more than a caption may have, or `NOT_UTF8`; None for null."""
    text = None if value is None else shorten(decode_text(value))
    is_damaged = text and (is_utf16(text) or HALF_PAIRS.search(text))
    return NOT_UTF8 if is_damaged and text != NOT_TEXT else text


def is_utf16(text: str) -> bool:
    """Whether a text is UTF-16 that lacks its byte order mark, and was taken for UTF-8."""
    return text.count("\0") * 3 > len(text)


def text_bytes(value: Any) -> bytes | None:
    """A value as text in UTF-8, with the bytes that `decode_text` kept. Half a surrogate pair in JSON becomes "?"."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="replace")


def shorten(value):
    """A text of at most a character more than `MAX_CAPTION_BYTES`, by which it is known to be too long; others stay."""
    return value[: MAX_CAPTION_BYTES + 1] if isinstance(value, str) else value


def decode_caption(data: bytes) -> str:
    """`decode_text` of a file that holds a caption, without the end of its last line, shortened (`shorten`)."""
    return shorten(decode_text(data).rstrip("\r\n"))


def is_url(text: str | None) -> bool:
    return str(text).lower().startswith(("http://", "https://"))


def is_base64(text: str | None) -> bool:
    """Whether a text is a picture in base64, perhaps as a `data:` URL."""
    try:
        start = re.sub(r"^data:[^,]*,|\s", "", str(text)[:256])[:64]
        return len(start) == 64 and bool(
            IMAGE_BYTES.match(base64.b64decode(start, altchars=b"-_" if "_" in start else None))
        )
    except ValueError:
        return False


def read_pictures(names: list[str | None], folders: list[str], base: str) -> list[bytes | BadImage]:
    """The bytes of the picture of each row, or a `BadImage` that says why there are none.

    Args:
        names: a path per row, relative to the row's folder or absolute; None for a row without one.
        folders: a path or URI per row.
        base: the folder that paths may not leave.
    """
    return in_parallel(base, functools.partial(read_picture, base=base), names, folders)


def in_parallel(uri: str, function: Callable, *arguments: Iterable) -> list:
    """The results of a function that reads, in parallel for an object store, which is slow to answer.

    On a disk, parallel requests are no faster.
    """
    if storage.is_local(uri):
        return list(map(function, *arguments))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(function, *arguments))


def read_picture(name: str | None, folder: str, base: str) -> bytes | BadImage:
    """The bytes of the picture at one path, or a `BadImage`; arguments as of `read_pictures`."""
    if not name:
        return BadImage("no image path")
    if is_url(name):
        return BadImage("a URL, not downloaded")
    if is_base64(name):
        return BadImage("base64 text, neither bytes nor a path")
    filesystem, root = storage.open_filesystem(base)
    is_local = isinstance(filesystem, fs.LocalFileSystem)
    scheme, is_uri, inner = name.rpartition("://")
    if is_uri and scheme != base.rpartition("://")[0]:
        return BadImage("image path outside of the input")
    if not is_uri:
        beside = storage.open_filesystem(folder)[1] if "://" in folder else folder
        inner = name if name.startswith("/") else f"{beside}/{name}"
    inner = posixpath.normpath(inner)
    if not inner.startswith(root.rstrip("/") + "/"):
        return BadImage("image path outside of the input")
    try:
        found, most = filesystem.get_file_info(inner) if is_local else None, MAX_BYTES
        if found and found.type == fs.FileType.Unknown:
            return BadImage("not a regular file")  # to open a FIFO would wait for ever
        if found and found.is_file:
            most = min(found.size, MAX_BYTES)  # memory is taken for all that may come
        with filesystem.open_input_stream(inner) as stream:
            data = stream.read(most + 1)
        return data if len(data) <= MAX_BYTES else BadImage("too many bytes")
    except FileNotFoundError:
        return BadImage("image file not found")
    except (pa.ArrowInvalid, ValueError, UnicodeError):
        return BadImage("invalid image path")
    except OSError:
        if not is_local:
            raise  # the store did not answer: the job stops, and a rerun reads it again
        return BadImage("image file not readable")  # a folder, a name that is too long, no permission
