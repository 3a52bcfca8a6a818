"""Readers of raw data: Parquet files and WebDataset tars. `READERS` names all, and imports one on its first use.

A reader has four methods, which take a file:
    schema       its columns, with types
    row_groups   the number of rows of each row group
    stream       all rows, some at a time; on request with the columns `location`, which say where a row is
    read_rows    some rows, from where they are

Nothing here runs code from data: tars are never unpacked, JSON is parsed.
"""

from __future__ import annotations

import codecs
import collections
import concurrent.futures
import contextlib
import importlib
import io
import itertools
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from .. import storage
from ..latents import schema
from ..latents.parquet import PlainParquetFile, check_types, open_parquet, plain_type

READERS = {
    "parquet": "raw.readers:Parquet",
    "webdataset": "raw.readers:WebDataset",
    "imagefolder": "production.readers.folder:ImageFolder",
    "arrow": "production.readers.arrow:Arrow",
}
GROUP, ROW, START, STOP = "__group__", "__row__", "__start__", "__stop__"  # where a row is in its file
PATH, ROW_NUMBER = "path", "__row_number__"  # added columns: the file of each row, and the row's number in it
KEY, ONLY_IMAGE = "__key__", "image"  # of a WebDataset sample: its name in the tar; its image, if it has only one
# Files of these names are images. Those of the second line are not decoded, but rejected by name.
IMAGES = ("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
IMAGES += ("heic", "heif", "jxl", "jp2", "psd")
TEXTS = ("txt", "caption", "json")
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
COMPRESSED_TAR = "{} is a compressed tar, in which no sample can be found: decompress it (gunzip, xz -d, zstd -d)."
UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
HALF_PAIRS = re.compile("[\udc80-\udcff]")  # what `decode_text` makes of bytes that are not UTF-8
# What stands in place of a caption that cannot be used, and says why.
NOT_UTF8, NOT_TEXT = "\0caption is not UTF-8", "\0caption is neither a text nor a list of texts"
MAX_BYTES = 2**28  # of one image or text; a larger one is not read
MAX_CAPTION_BYTES = 2**16
BUFFER_BYTES = 2**20  # of a Parquet column read at a time; without it, a row group's whole column is read
LARGE_BATCH_BYTES = 2**24
GROUP_ROWS = schema.ROWS_PER_ROW_GROUP  # for formats without row groups, see `schema.row_groups`


class Unreadable(ValueError):
    """A whole file cannot be read; other files may be."""


def reader_class(input_format: str) -> type[Reader]:
    module, _, name = READERS[input_format].partition(":")
    return getattr(importlib.import_module(f"..{module}", __package__), name)


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
    def files(cls, names: Iterable[str]) -> list[str]:
        """What is read as one file each, of the names below an input."""
        return [name for name in names if f"/{name}".lower().endswith(cls.suffixes)]

    def schema_of(self, rows: Iterable[dict]) -> pa.Schema:
        """The columns of some rows; unused ones are typed as text, or as bytes if they hold these."""
        kinds = {name: pa.binary() if isinstance(row[name], bytes) else pa.string() for row in rows for name in row}
        kinds = {name: self.types.get(name, kind) for name, kind in kinds.items() if name not in self.location}
        return pa.schema([(text_bytes(name).decode(errors="replace"), kind) for name, kind in kinds.items()])

    def table(self, rows: list[dict], columns: Sequence[str]) -> pa.Table:
        """Columns of rows that are dicts, in `types`."""
        arrays = {}
        for name in columns:
            values = [row.get(name) for row in rows]
            if name in self.captions and self.by_line:
                values = [text.splitlines() if isinstance(text, str) else text for text in values]
            is_location = name in self.location
            arrays[name] = pa.array(values) if is_location else convert(values, self.types[name], name in self.captions)
        return pa.table(arrays)


class Parquet(Reader):
    """Parquet files, with their own row groups and types."""

    what, suffixes, typed, location = "Parquet file", (".parquet", ".parq"), True, (GROUP, ROW)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[PlainParquetFile]:
        """A file on any storage. Raises ValueError naming one that is not Parquet, or is damaged where it is read."""
        try:
            with open_parquet(path, buffer_size=BUFFER_BYTES) as file:
                yield file
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(path, self.what, error) from None

    def schema(self, path: str) -> pa.Schema:
        """Raises ValueError as `plain_schema`."""
        with self.open(path) as file:
            return plain_schema(file.schema_arrow, path, list(self.types))

    def row_groups(self, path: str) -> list[int]:
        with self.open(path) as file:
            return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]

    def stream(self, path: str, columns: Sequence[str], groups: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some row groups, a few at a time, because a row group may be larger than memory."""
        with self.open(path) as file:
            for group in range(file.metadata.num_row_groups) if groups is None else groups:
                first = 0
                for batch in batches(file, group, columns):
                    table, rows = pa.Table.from_batches([batch]), np.arange(first, first + len(batch), dtype=np.int32)
                    where = {GROUP: np.full_like(rows, group), ROW: rows}
                    for name in (name for name in self.location if name in columns):
                        table = table.append_column(name, pa.array(where[name]))
                    yield table
                    first += len(batch)

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
                yield pa.Table.from_batches(found)


def batches(file: PlainParquetFile, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Columns of a row group, `GROUP_ROWS` at a time.

    After a large batch, unused memory goes back to the system: Arrow's pool may keep that of each batch before it.
    """
    stored = [name for name in columns if name not in (GROUP, ROW)]
    for batch in file.iter_batches(batch_size=GROUP_ROWS, row_groups=[group], columns=stored, use_threads=False):
        yield batch
        if batch.nbytes > LARGE_BATCH_BYTES:
            pa.default_memory_pool().release_unused()


def plain_schema(stored: pa.Schema, path: str, used: list[str]) -> pa.Schema:
    """Columns as they are read (`plain_type`). Raises ValueError for a used extension type, and for two equal names."""
    check_types(stored, path, used)
    if repeated := [name for name, count in collections.Counter(stored.names).items() if count > 1]:
        raise ValueError(f"{path} has several columns called {repeated[0]!r}: rename them.")
    return pa.schema([field.with_type(plain_type(field.type)) for field in stored])


def unreadable(path: str, what: str, error: Exception) -> Exception:
    """What to raise for an error of pyarrow: `error` if the file is not there, or if its storage did not answer."""
    is_damage = "thrift" in str(error) or (storage.is_local(path) and getattr(error, "errno", None) is None)
    if isinstance(error, OSError) and not is_damage:
        return error
    return Unreadable(f"{path} is not a readable {what}: remove or replace it. ({error})")


class WebDataset(Reader):
    """Tars as img2dataset writes them: consecutive members whose names are equal up to the first dot are a sample.

    Columns: "__key__", the name; "txt", "caption" and the keys of the `.json`; "jpg", "png", "input.jpg" and others,
    the bytes of the images; "image", those of the only one whose name has no second dot. Finding a sample takes a pass
    over all headers: fast on a disk, but an object store sends the whole tar.
    """

    what, suffixes, location = "WebDataset tar", (".tar",), (START, STOP)

    def schema(self, path: str) -> pa.Schema:
        """The columns of the first samples."""
        with open_tar(path) as tar:
            return self.schema_of(map(sample_row, itertools.islice(samples(tar), GROUP_ROWS)))

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
    try:
        with opened as file, tarfile.open(fileobj=file, mode="r:" if local else "r|") as tar:
            yield tar
    except BadTar as error:
        raise ValueError(f"{path}: {error}") from None
    except tarfile.TarError as error:
        with filesystem.open_input_file(inner) as file:
            is_compressed = file.read(8).startswith(COMPRESSED)
        if is_compressed:
            raise ValueError(COMPRESSED_TAR.format(path)) from None
        raise Unreadable(f"{path} is not a readable WebDataset tar: remove or replace it. ({error})") from None


def samples(tar: tarfile.TarFile, is_read: Callable[[str], bool] = lambda extension: True) -> Iterator[dict]:
    """A tar's samples: {`KEY`, `START`, `STOP`, extension: bytes of an image or a text, or None if it is not read}.

    Raises BadTar for members of one name that do not stand together, and for links.
    """
    sample, keys = {}, set()
    for member in tar:
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
    row |= {name: decode_caption(row[name]) for name in row if is_text(name)}
    row |= {ONLY_IMAGE: row[images[0]]} if len(images) == 1 else {}
    return {**parse_json(sample.get("json") or b""), **row}


def is_image(name: str) -> bool:
    """Whether a file, an extension, or the column of that extension is an image, such as "input.jpg"."""
    return name.lower().rpartition(".")[2] in IMAGES


def is_text(name: str) -> bool:
    """Whether a file or an extension is a caption, or JSON, such as "txt"."""
    return name.lower().rpartition(".")[2] in TEXTS


def member_bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The bytes of a tar's member; empty if it is too large, or sparse (a few bytes may claim to be terabytes)."""
    return b"" if member.issparse() or member.size > MAX_BYTES else tar.extractfile(member).read()


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


def decode_text(data: bytes) -> str:
    """Text in UTF-8 or, by its byte order mark, UTF-16. Bytes that are neither become halves of surrogate pairs."""
    with contextlib.suppress(UnicodeDecodeError):  # nor is it UTF-8
        if data.startswith(UTF_16) and data[2:4] != b"\0\0":  # that would be UTF-32
            return data.decode("utf-16")
    return data.decode("utf-8-sig", "surrogateescape")


def is_utf16(text: str) -> bool:
    """Whether a text is UTF-16 that lacks its byte order mark, and was taken for UTF-8."""
    return text.count("\0") * 3 > len(text)


def shorten(value: Any) -> Any:
    """A text of at most a character more than `MAX_CAPTION_BYTES`, by which it is known to be too long; others stay."""
    return value[: MAX_CAPTION_BYTES + 1] if isinstance(value, str) else value


def decode_caption(data: bytes) -> str:
    """`decode_text` of a file that holds a caption, without the end of its last line, shortened."""
    return shorten(decode_text(data).rstrip("\r\n"))


def as_caption(value: bytes | None) -> str | None:
    """A caption as it is stored, shortened, or `NOT_UTF8`; None for null."""
    text = None if value is None else shorten(decode_text(value))
    is_damaged = text and (is_utf16(text) or HALF_PAIRS.search(text))
    return NOT_UTF8 if is_damaged and text != NOT_TEXT else text


def parse_json(text: str | bytes) -> dict:
    """A JSON object as a dict, with its texts shortened; {} for anything else."""
    try:
        value = json.loads(decode_text(text) if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return {}
    return {key: shorten(one) for key, one in value.items()} if isinstance(value, dict) else {}


def convert(values: list, kind: pa.DataType, is_caption: bool = False) -> pa.Array:
    """Values from JSON, CSV or a tar as an Arrow array of a type; a value of another type becomes null.

    Text may hold bytes that are not UTF-8, as Parquet's text may. If `kind` is text, the first caption is taken.
    """
    if is_caption or pa.types.is_list(kind):
        values = [caption_texts(value) for value in values]
        if pa.types.is_list(kind):
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
    try:
        return float(value) if isinstance(value, (bool, int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def text_bytes(value: Any) -> bytes | None:
    """A value as text in UTF-8, with the bytes that `decode_text` kept. Half a surrogate pair in JSON becomes "?"."""
    if value is None:
        return None
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
