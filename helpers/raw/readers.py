"""Readers of raw data: Parquet files and WebDataset tars. `READERS` names all, and imports one on its first use.

A reader has four methods, which take a file:
    schema       its columns, with types
    row_groups   the number of rows of each row group
    stream       all rows, some at a time; on request with the columns `location`, which say where a row is
    read_rows    some rows, from where they are

Nothing here runs code from data: tars are never unpacked, JSON is parsed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import importlib
import io
import itertools
import json
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .. import storage
from ..latents import schema
from ..latents.parquet import PlainParquetFile, check_types, open_parquet, plain_type

READERS = {
    "parquet": "raw.readers:Parquet",
    "webdataset": "raw.readers:WebDataset",
    "imagefolder": "production.readers.folder:ImageFolder",
    "arrow": "production.readers.arrow:Arrow",
}
FETCH_IMAGES = "production.readers.folder:fetch_images"  # for a column that holds paths
GROUP, ROW, START, STOP = "__group__", "__row__", "__start__", "__stop__"  # where a row is in its file
PATH, ROW_NUMBER = "path", "__row_number__"  # added columns: the file of each row, and the row's number in it
PROBLEM = "__problem__"  # in a row whose JSON cannot be used: `NOT_JSON` or `REPEATED_KEY`
KEY, ONLY_IMAGE = "__key__", "image"  # of a WebDataset sample: its name in the tar; its image, if it has only one
# Files of these names are images. Those of the second line are not decoded, but rejected by name.
IMAGES = ("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
IMAGES += ("heic", "heif", "jxl", "jp2", "psd")
TEXTS = ("txt", "caption", "json")
CAPTIONS = ("caption", "text", "txt")  # usual names of columns of captions
# Each stands in place of a caption, and says why there is none.
NOT_UTF8 = "\0caption is not UTF-8"
NOT_JSON = "\0no caption: no readable JSON object"
REPEATED_KEY = "\0no caption: JSON with a key twice"
NO_CAPTIONS = (NOT_UTF8, NOT_JSON, REPEATED_KEY)
MAX_BYTES = 2**28  # of one image; a larger one is not read
MAX_CHUNK_BYTES, MAX_RATIO = 2**22, 100  # that a column may unpack to: bytes, or bytes for each of its bytes and rows
MAX_TEXT_BYTES = 2**22  # of one text or JSON; a larger one is not read
MAX_CAPTION_BYTES = 2**16
MAX_NAME_BYTES = 2**20  # of a tar's members that are no files
MAX_SECONDS = 600  # of one core, to find the rows of a file; waiting for its storage does not count
BUFFER_BYTES = 2**20  # of a Parquet column read at a time; without it, a row group's whole column is read
LARGE_BATCH_BYTES = 2**24
GROUP_ROWS = schema.ROWS_PER_ROW_GROUP  # for formats without row groups, see `schema.row_groups`


DAMAGES = (pa.ArrowException, tarfile.TarError, OSError, KeyError, OverflowError, RecursionError, MemoryError)
DAMAGES += (UnicodeDecodeError,)  # of a name of a column


class Unreadable(ValueError):
    """A whole file cannot be read; other files may be."""


def load(name: str) -> Any:
    """What "module:name" of this package stands for, imported on its first use."""
    module, _, name = name.partition(":")
    return getattr(importlib.import_module(f"..{module}", __package__), name)


def reader_class(input_format: str) -> type[Reader]:
    return load(READERS[input_format])


class Reader:
    """What the readers have in common.

    Args:
        types: Arrow types of the used columns (`inputs.column_types`), for formats whose files have none; a value of
            another type becomes null.
        captions: those of the columns that hold captions.
        by_line: whether a text holds a caption a line.
    """

    what, suffixes = "", ()
    typed = False  # whether its files have types
    location: tuple[str, ...] = ()  # columns that `stream` adds on request, and `read_rows` takes

    def __init__(
        self, types: dict[str, pa.DataType] | None = None, captions: Sequence[str] = (), by_line: bool = False
    ):
        self.types, self.captions, self.by_line = types or {}, captions, by_line

    @classmethod
    def files(cls, names: Iterable[str], input_uri: str) -> list[str]:
        """What is read as one file each, of the names below an input's folder."""
        return [name for name in names if f"/{name}".lower().endswith(cls.suffixes)]

    def schema_of(self, rows: Iterable[dict]) -> pa.Schema:
        """The columns of the first rows, up to one with a caption; unused ones are text, or bytes."""
        kinds, captions = {}, self.captions or CAPTIONS
        for number, row in enumerate(rows):
            if number >= GROUP_ROWS and any(name in kinds for name in captions):
                break
            kinds |= {name: pa.binary() if isinstance(row[name], bytes) else pa.string() for name in row}
        hidden = (*self.location, PROBLEM)
        kinds = {name: self.types.get(name, kind) for name, kind in kinds.items() if name not in hidden}
        return pa.schema([(text_bytes(name).decode(errors="replace"), kind) for name, kind in kinds.items()])

    def table(self, rows: list[dict], columns: Sequence[str]) -> pa.Table:
        """Columns of rows that are dicts, in `types`."""
        arrays = {}
        for name in columns:
            values = [row.get(name) for row in rows]
            if name in self.captions:
                values = [row.get(name, row.get(PROBLEM)) for row in rows]
            if name in self.captions and self.by_line:
                values = [text.splitlines() if isinstance(text, (str, bytes)) else text for text in values]
            arrays[name] = pa.array(values) if name in self.location else convert(values, self.types[name])
        return pa.table(arrays)


@contextlib.contextmanager
def naming(path: str, what: str) -> Iterator[None]:
    """Context manager for code that reads a file: what a damaged file raises becomes `Unreadable`, naming the file.

    An OSError is raised as it is if the file is not there, or if its storage did not answer.
    """
    try:
        yield
    except DAMAGES as error:
        is_damage = "thrift" in str(error) or (storage.is_local(path) and getattr(error, "errno", None) is None)
        if isinstance(error, OSError) and not is_damage:
            raise
        raise Unreadable(f"{path} is not a readable {what}: remove or replace it. ({error})") from None


def within_seconds(items: Iterable) -> Iterator:
    """What a file yields. Raises ArrowInvalid once that took one core more than `MAX_SECONDS` in all."""
    items, taken, end = iter(items), 0.0, object()
    while True:
        started = time.thread_time()
        item = next(items, end)
        taken += time.thread_time() - started
        if taken > MAX_SECONDS:
            raise pa.ArrowInvalid(f"finding its rows takes a core more than {MAX_SECONDS} s")
        if item is end:
            return
        yield item


class Parquet(Reader):
    """Parquet files, with their own row groups and types."""

    what, suffixes, typed, location = "Parquet file", (".parquet", ".parq"), True, (GROUP, ROW)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[PlainParquetFile]:
        """A file on any storage. Raises ValueError naming one that is not Parquet, or is damaged where it is read."""
        with naming(path, self.what), open_parquet(path, buffer_size=BUFFER_BYTES) as file:
            yield file

    def schema(self, path: str) -> pa.Schema:
        """Raises ValueError as `plain_schema`."""
        with self.open(path) as file:
            return plain_schema(file.schema_arrow, path, list(self.types))

    def row_groups(self, path: str) -> list[int]:
        with self.open(path) as file:
            groups = list(map(file.metadata.row_group, range(file.metadata.num_row_groups)))
            for group in groups:
                check_chunks(group, list(self.types))
                if group.num_rows > sum(group.column(one).total_compressed_size for one in range(group.num_columns)):
                    raise pa.ArrowInvalid(f"{group.num_rows:,} rows in fewer bytes")
            return [group.num_rows for group in groups]

    def stream(self, path: str, columns: Sequence[str], groups: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some row groups, a few at a time, because a row group may be larger than memory."""
        with self.open(path) as file:
            for group in range(file.metadata.num_row_groups) if groups is None else groups:
                yield from batches(file, group, columns)

    def read_rows(self, path: str, pieces: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`: some rows of one row group, in rising order, by `location`.

        Parquet cannot be read by row: all rows before the last are decoded, some at a time.
        """
        with self.open(path) as file:
            for piece in pieces:
                rows, first, found = piece[ROW].to_numpy(), 0, []
                for batch in batches(file, piece[GROUP][0].as_py(), columns):
                    found.append(batch.take(rows[(rows >= first) & (rows < first + len(batch))] - first))
                    first += len(batch)
                    if first > rows[-1]:
                        break
                yield pa.concat_tables(found)


def batches(file: PlainParquetFile, group: int, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Columns of a row group, `GROUP_ROWS` at a time, with `GROUP` and `ROW`; nulls for those that the file lacks.

    After a large batch, unused memory goes back to the system: Arrow's pool may keep that of each batch before it.
    """
    stored, first = [name for name in columns if name in file.schema_arrow.names], 0
    check_chunks(file.metadata.row_group(group), stored)
    found = file.iter_batches(batch_size=GROUP_ROWS, row_groups=[group], columns=stored, use_threads=False)
    for batch in within_seconds(found):
        table, rows = pa.Table.from_batches([batch]), np.arange(first, first + len(batch), dtype=np.int32)
        added = {GROUP: np.full_like(rows, group), ROW: rows}
        for name in (name for name in columns if name not in stored):
            table = table.append_column(name, pa.array(added[name]) if name in added else pa.nulls(len(batch)))
        yield table
        first += len(batch)
        if batch.nbytes > LARGE_BATCH_BYTES:
            pa.default_memory_pool().release_unused()


def check_chunks(group: pq.RowGroupMetaData, columns: Sequence[str]) -> None:
    """Raises ArrowInvalid if a column of a row group unpacks to far more bytes than its rows may need."""
    for one in map(group.column, range(group.num_columns)):
        is_read = not {one.path_in_schema, one.path_in_schema.partition(".")[0]}.isdisjoint(columns)
        most = max(MAX_CHUNK_BYTES, MAX_RATIO * (one.total_compressed_size + group.num_rows))
        if is_read and one.total_uncompressed_size > most:
            raise pa.ArrowInvalid(f"{one.path_in_schema!r} unpacks to {one.total_uncompressed_size:,} bytes")


def plain_schema(stored: pa.Schema, path: str, used: list[str]) -> pa.Schema:
    """Columns as they are read (`plain_type`). Raises ValueError for a used extension type, and for two equal names."""
    check_types(stored, path, used)
    check_names(stored.names, path)
    return pa.schema([field.with_type(plain_type(field.type)) for field in stored])


def check_names(columns: Sequence[str], path: str) -> None:
    """Raises ValueError for two columns of one name."""
    if repeated := [name for name, count in collections.Counter(columns).items() if name and count > 1]:
        raise ValueError(f"{path} has several columns called {repeated[0]!r}: rename them.")


class WebDataset(Reader):
    """Tars as img2dataset writes them: consecutive members whose names are equal up to the first dot are a sample.

    Columns: "__key__", the name; "txt", "caption" and the keys of the `.json`; "jpg", "png", "input.jpg" and others,
    the bytes of the images; "image", those of the only one whose name has no second dot. Finding a sample takes a pass
    over all headers: fast on a disk, but an object store sends the whole tar.
    """

    what, suffixes, location = "WebDataset tar (of those that are not compressed)", (".tar",), (START, STOP)

    def schema(self, path: str) -> pa.Schema:
        """The columns of the first samples."""
        with open_tar(path) as tar:
            return self.schema_of(map(sample_row, samples(tar)))

    def row_groups(self, path: str) -> list[int]:
        """Rows of each group, from the members' headers."""
        with open_tar(path) as tar:
            return schema.row_groups(sum(1 for _ in samples(tar, lambda extension: False)))

    def stream(self, path: str, columns: Sequence[str], groups: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """The whole tar from its start, a group at a time. `groups` is ignored, because it would need offsets."""
        needs_images = any(name == ONLY_IMAGE or is_image(name) for name in columns)
        with open_tar(path) as tar:
            rows = map(sample_row, samples(tar, lambda extension: needs_images or not is_image(extension)))
            while group := list(itertools.islice(rows, GROUP_ROWS)):
                yield self.table(group, columns)

    def read_rows(self, path: str, pieces: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`, by `location`: only these are read, neighbours by one request."""
        filesystem, inner = storage.open_filesystem(path)

        def read(start: int, stop: int) -> list[dict]:
            data = file.read_at(stop - start, start) + bytes(2 * tarfile.BLOCKSIZE)  # a tar's end
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                return list(map(sample_row, samples(tar)))

        with filesystem.open_input_file(inner) as file:
            for piece in pieces:
                starts, stops = piece[START].to_numpy(), piece[STOP].to_numpy()
                apart = starts[1:] != stops[:-1]
                spans = starts[np.append(True, apart)].tolist(), stops[np.append(apart, True)].tolist()
                yield self.table(list(itertools.chain.from_iterable(in_parallel(path, read, *spans))), columns)


class BadTar(tarfile.TarError):
    """A tar's samples cannot be told apart; the text says what to do."""


@contextlib.contextmanager
def open_tar(path: str) -> Iterator[tarfile.TarFile]:
    """A `TarFile` on any storage. Raises ValueError naming one that cannot be read to its end."""
    filesystem, inner = storage.open_filesystem(path)
    # Seeking from header to header is cheap on a disk; on an object store, each seek would be a request.
    local = storage.is_local(path)
    stream = {"buffer_size": 2**22, "compression": None}
    opened = filesystem.open_input_file(inner) if local else filesystem.open_input_stream(inner, **stream)
    with naming(path, WebDataset.what), opened as file:
        try:
            with tarfile.open(fileobj=file, mode="r:" if local else "r|", tarinfo=SafeInfo) as tar:
                yield tar
        except BadTar as error:
            raise ValueError(f"{path}: {error}") from None


class SafeInfo(tarfile.TarInfo):
    """A member's header; one of an impossible size ends the tar as a damaged header does."""

    @classmethod
    def frombuf(cls, *arguments: Any) -> tarfile.TarInfo:
        info = super().frombuf(*arguments)
        if info.size < 0 or not (info.isfile() or info.size <= MAX_NAME_BYTES):
            raise tarfile.InvalidHeaderError(f"a member of {info.size} bytes")
        return info


def samples(tar: tarfile.TarFile, is_read: Callable[[str], bool] = lambda extension: True) -> Iterator[dict]:
    """A tar's samples: {`KEY`, `START`, `STOP`, extension: bytes of an image or a text, or None if it is not read}.

    Raises BadTar for members of one name that do not stand together, and for links.
    """
    sample, keys = {}, set()
    for member in within_seconds(tar):
        if tar.offset <= member.offset:
            raise tarfile.ReadError(f"{member.name!r} has the size {member.size}")
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        key, extension, is_link = folder + slash + stem, extension.lower(), member.islnk() or member.issym()
        if not stem or not (is_image(extension) or is_text(extension)) or not (member.isfile() or is_link):
            continue
        if is_link:
            raise BadTar(f"{member.name!r} is a link: make the tar with `tar --dereference --hard-dereference`.")
        is_repeated = extension in sample
        if key != sample.get(KEY):
            if sample:
                yield sample
            sample, is_repeated = {KEY: key, START: member.offset}, key in keys
        if is_repeated:
            raise BadTar(
                f"the members of the sample {key!r} do not stand together: sort the tar, for example by "
                "`mkdir d && tar -xf a.tar -C d && tar --sort=name -cf sorted.tar -C d .`"
            )
        keys.add(key)
        sample |= {extension: member_bytes(tar, member) if is_read(extension) else None, STOP: tar.offset}
    if sample:
        yield sample
    check_end(tar)


def sample_row(sample: dict) -> dict:
    """A sample's columns: its texts decoded, the keys of its JSON, and `ONLY_IMAGE`."""
    row = {name: data for name, data in sample.items() if data is not None and name != "json"}
    images = [name for name in row if name in IMAGES]
    row |= {name: row[name].rstrip(b"\r\n") for name in row if is_text(name)}
    row |= {ONLY_IMAGE: row[images[0]]} if len(images) == 1 else {}
    return {**parse_json(sample["json"]), **row} if "json" in sample else row


def is_image(name: str) -> bool:
    """Whether a file, an extension, or the column of that extension is an image, such as "input.jpg"."""
    return name.lower().rpartition(".")[2] in IMAGES


def is_text(name: str) -> bool:
    """Whether a file or an extension is a caption, or JSON, such as "txt"."""
    return name.lower().rpartition(".")[2] in TEXTS


def member_bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The bytes of a tar's member; empty if it is too large, or sparse (a few bytes may claim to be terabytes)."""
    most = MAX_BYTES if is_image(member.name) else MAX_TEXT_BYTES
    return b"" if member.issparse() or member.size > most else tar.extractfile(member).read()


def check_end(tar: tarfile.TarFile) -> None:
    """Raises ReadError for a tar that was cut short, has a damaged header, or is followed by another one.

    `tarfile` takes each of them for the end.
    """
    is_ended = False
    while block := tar.fileobj.read(2**20):
        is_ended = True
        if block.strip(b"\0"):
            raise tarfile.ReadError("a header is damaged, or another tar follows")
    if not is_ended:
        raise tarfile.ReadError("its end is missing")


def in_parallel(uri: str, function: Callable, *arguments: Iterable) -> list:
    """The results of a function that reads, in parallel for an object store, which is slow to answer.

    On a disk, parallel requests are no faster.
    """
    if storage.is_local(uri):
        return list(map(function, *arguments))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(function, *arguments))


# ---- texts, and values of formats without types


def as_caption(value: bytes | None) -> str | None:
    """A caption as it is stored, without the NULs that fill it up, or `NOT_UTF8`; None for null.

    Of a long one, a character more than `MAX_CAPTION_BYTES` is kept, by which it is known to be too long.
    """
    if value is None:
        return None
    try:
        text = value.decode("utf-8-sig")[: MAX_CAPTION_BYTES + 1].rstrip("\0")
    except UnicodeDecodeError:
        return NOT_UTF8
    is_utf16 = 3 * text.count("\0") > len(text)  # without its byte order mark
    return NOT_UTF8 if is_utf16 else text


def parse_json(text: str | bytes) -> dict:
    """A JSON object as a dict, in which NaN is null; {`PROBLEM`: what is wrong} for anything else."""
    try:
        text = text.decode("utf-8-sig", "surrogateescape") if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=lambda name: None, object_pairs_hook=as_object)
    except (ValueError, RecursionError):
        return {PROBLEM: NOT_JSON}
    if isinstance(value, dict):
        return value
    return {PROBLEM: REPEATED_KEY if isinstance(value, tuple) else NOT_JSON}


def as_object(pairs: list[tuple[str, Any]]) -> dict | tuple:
    """The dict of a JSON object; the pairs of an object that holds a key twice."""
    value = dict(pairs)
    return value if len(value) == len(pairs) else tuple(pairs)


def convert(values: list, kind: pa.DataType) -> pa.Array:
    """Values from JSON, CSV or a tar as an Arrow array of a type; a value of another type becomes null.

    Text may hold bytes that are not UTF-8, as Parquet's text may. If `kind` is text, the first of a list is taken.
    """
    if pa.types.is_floating(kind):
        return pa.array([as_number(value) for value in values], kind)
    if pa.types.is_binary(kind):
        return pa.array([value if isinstance(value, bytes) else None for value in values], kind)
    lists = [value if isinstance(value, list) else [value] for value in values]
    texts = [[text for text in map(text_bytes, of_row) if text is not None] for of_row in lists]
    if pa.types.is_list(kind):
        return pa.array(texts, pa.list_(pa.binary())).cast(kind, safe=False)
    return pa.array([next(iter(of_row), None) for of_row in texts], pa.binary()).cast(kind, safe=False)


def as_number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (bool, int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def text_bytes(value: Any) -> bytes | None:
    """A text or a number as UTF-8, with the bytes that are not; None for others. Half a surrogate pair becomes "?"."""
    if not isinstance(value, (str, int, float)):
        return value if isinstance(value, bytes) else None
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="replace")


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | None]:
    """The texts of a column of text or bytes; None for invalid UTF-8, which Parquet readers let through."""
    return [as_text(value) for value in column.cast(pa.large_binary()).to_pylist()]


def as_text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
