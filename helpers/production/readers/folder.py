"""Folders of images, with a table of captions (Hugging Face's ImageFolder) or with captions beside the images."""

from __future__ import annotations

import bisect
import collections
import csv
import functools
import io
import itertools
import os
import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyarrow import fs

from ... import storage
from ...config import PreprocessingConfig
from ...latents import schema
from ...raw import inputs
from ...raw.images import BadImage
from ...raw.readers import (
    GROUP_ROWS,
    MAX_BYTES,
    MAX_TEXT_BYTES,
    PATH,
    PROBLEM,
    ROW,
    ROW_NUMBER,
    Reader,
    Unreadable,
    check_names,
    in_parallel,
    is_image,
    is_text,
    parse_json,
    texts,
    within_seconds,
)

FILES = "__files__"  # where a row is in its folder: the names of its image, and of what stands beside it
MAX_TABLE_BYTES = 2**30
UNIT_IMAGES = 10_000  # images with side-cars that are read as one file


class ImageFolder(Reader):
    """A `metadata.csv` or `metadata.jsonl`, or the images of a folder with side-cars.

    A table has a column `file_name`, relative to its folder, and one of captions. Empty fields of a CSV are empty text.
    Side-cars are files with an image's name and another suffix: its caption (`a.txt`, `a.caption`; the column "text"),
    and a JSON file whose keys are columns. Images of one folder are read as "{folder}/{first image}#{how many}". Their
    bytes are not read here: `fetch_images` fetches them.
    """

    what = "metadata.csv, metadata.jsonl, or images with a text of the same name"
    suffixes, location = ("/metadata.csv", "/metadata.jsonl"), (ROW, FILES)

    @classmethod
    def files(cls, names: Iterable[str], input_uri: str) -> list[str]:
        """Tables, and images with side-cars in folders below no table; what links show again is left out."""
        names, root = list(names), inputs.base_folder(input_uri)
        tables = super().files(names, input_uri)
        folders = samples_by_folder(names, tables)
        is_pattern = inputs.is_glob(input_uri)
        repeated = repeated_tables(tables, root) | repeated_images(folders, root) if storage.is_local(root) else set()
        found = [table for table in tables if table not in repeated]
        for within, samples in folders.items():
            images = {image for image, *_ in samples if posixpath.join(within, image) not in repeated}
            if is_pattern:  # the folder may hold more images than it matches
                samples = list_samples(posixpath.join(root, within))
            found += [posixpath.join(within, unit) for unit in split_samples(samples, images)]
        return sorted(found)

    def schema(self, path: str) -> pa.Schema:
        rows = self.rows(path)
        groups = (rows[start : start + GROUP_ROWS] for start in range(0, len(rows), GROUP_ROWS))
        return self.schema_of(itertools.chain.from_iterable(self.load(path, group) for group in groups))

    def row_groups(self, path: str) -> list[int]:
        """Rows of each group."""
        return schema.row_groups(len(load_table(path)) if is_table(path) else split_unit(path)[2])

    def stream(self, path: str, columns: Sequence[str], groups: Sequence[int] | None = None) -> Iterator[pa.Table]:
        """All rows, or those of some groups, a group at a time."""
        rows = self.rows(path)
        for group in range(-(-len(rows) // GROUP_ROWS)) if groups is None else groups:
            yield self.table_of(path, rows[group * GROUP_ROWS : (group + 1) * GROUP_ROWS], columns)

    def read_rows(self, path: str, pieces: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of each of `pieces`, by `location`."""
        rows = self.rows(path) if is_table(path) else []
        for piece in pieces:
            if is_table(path):
                yield self.table_of(path, [rows[row] for row in piece[ROW].to_pylist()], columns)
            else:
                yield self.table_of(path, list(map(sidecar_row, piece[FILES].to_pylist())), columns)

    def rows(self, path: str) -> list[dict]:
        """Those of a table, or the names of some images and their side-cars."""
        if is_table(path):
            return [{**row, ROW: number} for number, row in enumerate(load_table(path))]
        folder, first, count = split_unit(path)
        found = list_samples(folder)
        start = bisect.bisect_left(found, (first,))
        return list(map(sidecar_row, found[start : start + count]))

    def load(self, path: str, rows: list[dict], columns: Sequence[str] = ("",)) -> list[dict]:
        """The rows, with what the side-cars hold that some of `columns` may need."""
        if is_table(path) or not set(columns) - {"file_name", *self.location}:
            return rows

        def read(row: dict) -> dict:
            for name in row[FILES][1:]:
                data = storage.read_bytes(f"{split_unit(path)[0]}/{name}")[:MAX_TEXT_BYTES]
                is_json = name.lower().endswith(".json")
                row = {**parse_json(data), **row} if is_json else {**row, "text": data.rstrip(b"\r\n")}
            return row

        return in_parallel(path, read, rows)

    def table_of(self, path: str, rows: list[dict], columns: Sequence[str]) -> pa.Table:
        """`table`; of images with side-cars also `PATH`, that of the image, and no `ROW_NUMBER`."""
        table = self.table(self.load(path, rows, columns), columns)
        if is_table(path):
            return table
        paths = pa.array([f"{split_unit(path)[0]}/{row[FILES][0]}" for row in rows], pa.string())
        return table.append_column(PATH, paths).append_column(ROW_NUMBER, pa.nulls(len(rows), pa.int64()))


def sidecar_row(files: Sequence[str]) -> dict:
    return {"file_name": files[0], FILES: files}


def same_name(name: str) -> str:
    """A name in Unicode's composed form: macOS stores names in the other one."""
    return unicodedata.normalize("NFC", name)


def is_table(path: str) -> bool:
    """Whether a path is that of a table, whatever its name."""
    return not re.search(r"#\d+$", path)


def split_unit(path: str) -> tuple[str, str, int]:
    """`(folder, first image, number of images)` of what `ImageFolder` reads as one file."""
    names, _, count = path.rpartition("#")
    folder, _, first = names.rpartition("/")
    return folder, first, int(count)


def split_samples(samples: list[tuple[str, ...]], images: set[str]) -> Iterator[str]:
    """Those of `images`, among all samples of their folder, as "{first image}#{how many}" of neighbours."""
    for is_read, group in itertools.groupby(samples, lambda sample: sample[0] in images):
        neighbours = list(group) if is_read else []
        for start in range(0, len(neighbours), UNIT_IMAGES):
            some = neighbours[start : start + UNIT_IMAGES]
            yield f"{some[0][0]}#{len(some)}"


def repeated_tables(tables: list[str], root: str) -> set[str]:
    """Tables that are links to an earlier one, in folders of links to the same images."""
    inodes = {table: storage.inode(posixpath.join(root, table)) for table in tables}
    counts = collections.Counter(inodes.values())
    seen, repeated = set(), set()
    for table in (table for table in tables if counts[inodes[table]] > 1):
        folder = posixpath.join(root, posixpath.dirname(table))
        images = [name for name, size in storage.walk(folder) if size is not None and is_image(name)]
        identity = inodes[table], *((name, storage.inode(posixpath.join(folder, name))) for name in sorted(images))
        if images and identity in seen:  # without images below, it names others
            repeated.add(table)
        seen.add(identity)
    return repeated


def repeated_images(folders: dict[str, list[tuple[str, ...]]], root: str) -> set[str]:
    """Images that are, as is what stands beside them, links of the same names to those of an earlier folder."""
    counts = collections.Counter(itertools.chain.from_iterable(folders.values()))
    seen, repeated = set(), set()
    for folder, samples in folders.items():
        for sample in (sample for sample in samples if counts[sample] > 1):
            identity = sample, *(storage.inode(posixpath.join(root, folder, file)) for file in sample)
            if identity in seen:
                repeated.add(posixpath.join(folder, sample[0]))
            seen.add(identity)
    return repeated


def below_tables(tables: Iterable[str]) -> Callable[[str], bool]:
    """Whether a folder is, or lies below, the folder of one of some tables."""
    with_table = set(map(posixpath.dirname, tables))

    @functools.cache
    def is_below(folder: str) -> bool:
        return folder in with_table or (folder != "" and is_below(posixpath.dirname(folder)))

    return is_below


def samples_by_folder(names: Iterable[str], tables: list[str]) -> dict[str, list[tuple[str, ...]]]:
    """{folder: `pair_names` of its files} of the folders below no table."""
    is_below, folders = below_tables(tables), collections.defaultdict(list)
    for folder, file in map(posixpath.split, names):
        if not is_below(folder):
            folders[folder].append(file)
    return {folder: samples for folder, within in folders.items() if (samples := pair_names(within))}


def list_samples(folder: str) -> list[tuple[str, ...]]:
    """`pair_names` of a folder's files."""
    return pair_names(name for name, size in storage.walk(folder, recursive=False) if size is not None)


def pair_names(names: Iterable[str]) -> list[tuple[str, ...]]:
    """[(image, what stands beside it, ...)] of the files of one folder, sorted; images alone are left out.

    An image has at most one JSON file and one text: of several texts the last, "a.txt" and not "a.caption". They are
    called after the image's name with or without its suffix. A file that is called after no image as it is belongs to
    the image of that name in another form of Unicode.
    """
    images, files = [], []
    for name in sorted(names):
        stem, _, suffix = name.rpartition(".")
        if is_text(suffix):
            files.append((name, stem, "json" if suffix.lower() == "json" else "text"))
        elif stem and is_image(suffix) and not name.startswith("."):
            images.append((name, stem))
    known = set(itertools.chain.from_iterable(images))
    beside, others = collections.defaultdict(dict), collections.defaultdict(dict)
    for name, stem, kind in files:
        if stem in known:
            beside[stem][kind] = name
        else:
            others[same_name(stem)][kind] = name
    found = []
    for name, stem in images:
        of_image = others.get(same_name(stem), {}) | others.get(same_name(name), {})
        of_image |= beside.get(stem, {}) | beside.get(name, {})
        if of_image:
            found.append((name, *sorted(of_image.values())))
    return found


def load_table(path: str) -> list[dict]:
    """The rows of a `metadata.csv` (all text) or `metadata.jsonl`; a few lines that are no JSON hold a `PROBLEM`."""
    return _load_table(path, storage.version(path))  # cached: an epoch reads the same few tables


@functools.lru_cache(maxsize=1)
def _load_table(path: str, version: tuple[int, int]) -> list[dict]:
    if version[0] > MAX_TABLE_BYTES:
        raise Unreadable(f"{path} has {version[0]:,} bytes, and a table has at most {MAX_TABLE_BYTES:,}: split it.")
    data = storage.read_bytes(path)
    if b"\0" in data[:1000]:
        raise Unreadable(f"{path} is not UTF-8: save it as UTF-8.")
    is_jsonl = path.lower().endswith(".jsonl")
    try:
        rows = list(within_seconds(jsonl_rows(data) if is_jsonl else csv_rows(path, data)))
        if any(None in row for row in rows):
            raise csv.Error("its rows have more fields than its first line has names")
    except (csv.Error, pa.ArrowInvalid) as error:
        raise Unreadable(f"{path} is not a readable table: correct it. ({error})") from None
    if is_jsonl and 2 * sum(PROBLEM in row for row in rows) > len(rows):
        raise Unreadable(
            f"{path} holds no JSON Lines: write one object a line, with each key once (jq -c '.[]' does it of a list)."
        )
    return rows


def jsonl_rows(data: bytes) -> Iterator[dict]:
    return (parse_json(line) for line in data.split(b"\n") if line.strip())


def csv_rows(path: str, data: bytes) -> csv.DictReader:
    csv.field_size_limit(MAX_BYTES)
    text = io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline="")
    table = csv.DictReader(text, restval="", strict=True)
    check_names(table.fieldnames or [], path)
    return table


def files_read(names: Iterable[str], input_uri: str) -> set[str]:
    """The files that `ImageFolder` reads: tables and the images below them, images with side-cars and these."""
    names = list(names)
    tables = Reader.files.__func__(ImageFolder, names, input_uri)
    is_below = below_tables(tables)
    below = [name for name in names if is_image(name) and is_below(posixpath.dirname(name))]
    samples = samples_by_folder(names, tables).items()
    return {*tables, *below, *(posixpath.join(folder, file) for folder, of in samples for some in of for file in some)}


# ---- images behind paths


def fetch_images(
    column: pa.ChunkedArray, names: pa.ChunkedArray, files: list[str], config: PreprocessingConfig
) -> tuple[pa.Array, pa.Array]:
    """`(bytes, errors)` of images given by paths, of any format: see `raw.inputs.image_bytes`.

    Paths are relative to the input's folder or, in image folders, to the folder of the row's table.

    Args:
        column: the images' bytes, some of which are null; or their paths.
        names: the images' paths.
        files: the file of each row.
    """
    base, is_beside = inputs.base_folder(config.data_uri), config.input_format == "imagefolder"
    found = [None] * len(files) if inputs.is_text(column.type) else column.cast(pa.large_binary()).to_pylist()
    missing = [row for row, data in enumerate(found) if data is None]
    folders = [files[row].rpartition("/")[0] if is_beside else base for row in missing]
    fetched = in_parallel(base, functools.partial(fetch_image, base=base), texts(names.take(missing)), folders)
    for row, data in zip(missing, fetched, strict=True):
        found[row] = data
    images = [None if isinstance(data, BadImage) else data for data in found]
    errors = [str(data) if isinstance(data, BadImage) else None for data in found]
    return pa.array(images, pa.large_binary()), pa.array(errors, pa.string())


def fetch_image(name: str | None, folder: str, base: str) -> bytes | BadImage:
    """The bytes of the image at a path, or a `BadImage` that says why there are none.

    Args:
        name: relative to `folder`, or absolute; None for a row without one.
        base: the folder that paths may not leave.
    """
    if not name:
        return BadImage("no image path")
    filesystem, root = storage.open_filesystem(base)
    is_local = isinstance(filesystem, fs.LocalFileSystem)
    scheme, is_uri, inner = name.rpartition("://")
    prefix = f"{storage.open_filesystem(folder)[1]}/" if not is_uri and not inner.startswith("/") else ""
    # Unicode has two forms of "é", and macOS stores the longer one.
    forms = [inner] + [unicodedata.normalize(form, inner) for form in ("NFC", "NFD")] * (not inner.isascii())
    paths = [posixpath.normpath(prefix + form) for form in forms]
    inner = next(filter(os.path.exists, paths), paths[0]) if is_local else paths[0]
    is_elsewhere = is_uri and scheme != base.rpartition("://")[0]
    if is_elsewhere or not inner.startswith(root.rstrip("/") + "/"):
        return BadImage("image path outside of the input")
    try:
        found, most = filesystem.get_file_info(inner) if is_local else None, MAX_BYTES
        if found and found.type == fs.FileType.Unknown:
            return BadImage("not a regular file")  # to open a FIFO would wait for ever
        if found and found.is_file:
            most = min(found.size, most)  # memory is taken for all that may come
        with filesystem.open_input_stream(inner) as stream:
            data = stream.read(most + 1)
        return data if len(data) <= MAX_BYTES else BadImage("too many bytes")
    except FileNotFoundError:
        return BadImage("image file not found")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not is_local:
            raise  # the store did not answer: the job stops, and a rerun reads it again
        return BadImage("image file not readable")  # a folder, no permission, no name of a file
