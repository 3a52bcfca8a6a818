"""Files in a local folder or an object store, by one path or URI: all access goes through `pyarrow.fs`."""

import contextlib
import functools
import json
import os
import pathlib
import random
import re
import shutil
import stat
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from pyarrow import fs

# pyarrow does not retry a read if the store's error message is longer than the file. It
# raises an OSError with this text.
SHORT_READ_ERROR = "Failed to flush response stream"
PAUSES = (1, 5, 25)  # seconds before `retry` tries again
REMEDY = "delete it, and start the same command again"  # for a damaged file
CHECKSUM = "crc32"  # the key of a JSON file's checksum, its last entry
LOCAL = fs.LocalFileSystem()
MOST_COPIED = 5 * 2**30  # bytes of an object that S3 copies by one request


class DamagedFile(ValueError):
    """A JSON file that is cut short, or holds something else."""


def resolve(uri: str | os.PathLike) -> str:
    """An absolute local path, or a URI as it is, without a trailing slash.

    Relative paths must be resolved on the driver: Ray workers run in folders of their own.
    """
    uri = str(uri)
    if not uri.isascii() and uri != uri.encode(errors="replace").decode():
        raise ValueError(f"{uri!r} is no name in UTF-8: rename it.")
    scheme, mark, path = uri.partition("://")
    return scheme + mark + path.rstrip("/") if mark else os.path.abspath(os.path.expanduser(uri))


def shown(uri: str | os.PathLike) -> str:
    """The URI without user, password and query, such as a token: what may be printed, logged or stored.

    Local paths stay, and so do Azure's container and the user "anonymous".
    """
    scheme, mark, path = str(uri).partition("://")
    if not mark:
        return str(uri)
    user = r"^(?!anonymous@)([^/:@]*)(:(?!\d+/)[^@]*)?@([^/@]*@)*"  # a password may hold "/"; ":8080/" is a port
    path = re.sub(user, r"\1@" if scheme.startswith("abfs") else "", path)
    return scheme + mark + re.sub(r"[?#][^/]*=.*", "", path, flags=re.DOTALL)


def open_filesystem(uri: str | os.PathLike) -> tuple[fs.FileSystem, str]:
    """`(filesystem, path)` of a local path or a URI of `SCHEMES`; credentials come from the environment.

    Raises ValueError for a URI of no known store or without a bucket, and for what `shown` would remove, so no secret
    gets into a config, a manifest or a card.
    """
    uri = resolve(uri)
    if "://" not in uri:
        return LOCAL, uri
    scheme, _, path = uri.partition("://")  # not parsed as a URI: keys may hold spaces, umlauts, "#"
    if scheme not in SCHEMES or not path.partition("/")[0] or shown(uri) != uri:
        raise ValueError(
            f"{shown(uri)} cannot be opened: give a folder, or a URI such as {' or '.join(EXAMPLES)}, without a "
            "password or query, because credentials come from the environment."
        )
    return SCHEMES[scheme](uri)


def open_s3(uri: str) -> tuple[fs.FileSystem, str]:
    env, path = os.environ, uri.removeprefix("s3://")
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    return _s3_client(path.partition("/")[0], endpoint, region), path


@functools.lru_cache(maxsize=16)
def _s3_client(bucket: str, endpoint: str | None, region: str | None) -> fs.S3FileSystem:
    """A cached client: making one looks up the bucket's region.

    A request is tried `max_attempts()` times with growing pauses, so a store that fails now and then, or is away for
    seconds, stops no job. `allow_delayed_open` writes a small file with one request instead of three.
    """
    where = {}
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        where = {"endpoint_override": host, "scheme": scheme or "https"}
    else:
        region = region or fs.resolve_s3_region(bucket)
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=max_attempts())
    return fs.S3FileSystem(region=region, retry_strategy=retries, allow_delayed_open=True, **where)


def open_by_default(uri: str) -> tuple[fs.FileSystem, str]:
    """By pyarrow's own client of the store, with its default credentials."""
    scheme, _, bucket, *below = uri.split("/")
    filesystem, root = _default_client(f"{scheme}//{bucket}")
    return filesystem, "/".join([root.rstrip("/"), *below])


_default_client = functools.lru_cache(maxsize=16)(fs.FileSystem.from_uri)
# {scheme: function of a URI that returns (filesystem, path)}
SCHEMES = {"s3": open_s3, "gs": open_by_default, "abfs": open_by_default, "abfss": open_by_default}
EXAMPLES = "s3://bucket/folder", "gs://bucket/folder", "abfs://container@account.dfs.core.windows.net/folder"


def max_attempts() -> int:
    return int(os.environ.get("AWS_MAX_ATTEMPTS", 10))


def retry(action: Callable[[], Any], pauses: Iterable[float] = PAUSES, message: str = "") -> Any:
    """What `action()` returns, called again after each pause (seconds) while it raises an OSError.

    pyarrow repeats single requests (`max_attempts`). This is for work that is lost if the store is busy for longer. An
    error without `message`, or that a file does not exist, is raised at once.
    """
    for pause in (*pauses, None):
        try:
            return action()
        except OSError as error:
            if pause is None or isinstance(error, FileNotFoundError) or message not in str(error):
                raise
            time.sleep(pause * random.uniform(0.8, 1.2))  # the workers that were refused do not all come back at once


def is_local(uri: str | os.PathLike) -> bool:
    return isinstance(open_filesystem(uri)[0], fs.LocalFileSystem)


def real_path(uri: str | os.PathLike) -> str:
    """A local path without links; a URI as it is."""
    return os.path.realpath(uri) if is_local(uri) else resolve(uri)


def join(uri: str | os.PathLike, *parts: str) -> str:
    return "/".join([resolve(uri), *parts])


def name(uri: str | os.PathLike) -> str:
    """The last part of a path or URI."""
    return str(uri).rstrip("/").rsplit("/", 1)[-1]


def _info(uri: str | os.PathLike) -> fs.FileInfo:
    filesystem, path = open_filesystem(uri)
    return filesystem.get_file_info(path)


def exists(uri: str | os.PathLike) -> bool:
    return _info(uri).type != fs.FileType.NotFound


def is_file(uri: str | os.PathLike) -> bool:
    """An empty object beside objects below it is a folder: Hadoop marked folders so."""
    info = _info(uri)
    return info.is_file and (info.size > 0 or not any(walk(uri, recursive=False)))


def version(uri: str | os.PathLike) -> tuple[int, int]:
    """(bytes, time of the last change) of a file: a cached copy of it is stale when they differ."""
    found = _info(uri)
    return found.size, found.mtime_ns


def inode(path: str | os.PathLike) -> tuple[int, int]:
    """(device, number) of a local file or folder: the same for all links to it."""
    about = os.stat(path)
    return about.st_dev, about.st_ino


def walk(uri: str | os.PathLike, recursive: bool = True) -> Iterator[tuple[str, int | None]]:
    """Yield `(path below uri, bytes)` of the files in a folder, in any order; nothing if there is no folder.

    Bytes are None for what cannot be opened: a link that leads nowhere, a FIFO, a folder that may not be read, a name
    that is not UTF-8 (with "?" for its odd bytes). Raises ValueError for a key with an empty part, which pyarrow cannot
    open.
    """
    filesystem, path = open_filesystem(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        yield from _walk_disk(path, recursive)
        return
    for item in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=recursive)):
        if "//" in item.path:
            raise ValueError(f"{shown(uri)} holds the key {item.path!r}, which has an empty part (//): rename it.")
        if item.is_file:
            yield item.path[len(path) :].lstrip("/"), item.size


def _walk_disk(root: str, recursive: bool) -> Iterator[tuple[str, int | None]]:
    """`walk`. A folder is found once, however many links lead there; a file, under each of its names."""
    seen = {inode(root)} if os.path.isdir(root) else set()

    def is_new(folder: str) -> bool:
        identity = inode(folder)
        return identity not in seen and not seen.add(identity)

    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(root, followlinks=True, onerror=unreadable.append):
        folders[:] = [one for one in sorted(folders) if recursive and is_new(os.path.join(folder, one))]
        for file in sorted(files):
            path = os.path.join(folder, file)
            below = os.path.relpath(path, root)
            try:
                path.encode()
                about = os.stat(path)
            except (OSError, UnicodeEncodeError):  # a link that leads nowhere; no UTF-8
                yield below.encode(errors="replace").decode(), None
                continue
            yield below, about.st_size if stat.S_ISREG(about.st_mode) else None
    for error in unreadable:
        if error.filename != root:
            yield os.path.relpath(error.filename, root), None
        elif isinstance(error, PermissionError):
            raise error


def list_files(uri: str | os.PathLike, suffix: str | tuple[str, ...] = "", recursive: bool = False) -> list[str]:
    """Sorted paths or URIs of the files in a folder that end in `suffix` (or one of several)."""
    found = sorted(below for below, size in walk(uri, recursive) if size is not None and below.endswith(suffix))
    return [join(uri, below) for below in found]


def list_folders(uri: str | os.PathLike) -> list[str]:
    """Sorted paths or URIs of the folders directly in a folder."""
    filesystem, path = open_filesystem(uri)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(join(uri, item.base_name) for item in found if item.type == fs.FileType.Directory)


def sizes(uri: str | os.PathLike, recursive: bool = True) -> dict[str, int]:
    """{path below `uri`: bytes} of all files in a folder; {"": bytes} of a file."""
    found, info = dict(sorted(found for found in walk(uri, recursive) if found[1] is not None)), _info(uri)
    if found and info.is_file and info.size:
        raise ValueError(f"{shown(uri)} is both an object and a folder of objects: rename one of them.")
    return found or ({"": info.size} if info.is_file else {})


def read_text(uri: str | os.PathLike) -> str:
    """A whole file. Raises FileNotFoundError if it does not exist."""
    return read_bytes(uri).decode()


def read_bytes(uri: str | os.PathLike, offset: int = 0) -> bytes:
    """A file from a byte on. Raises FileNotFoundError if it does not exist."""
    filesystem, path = open_filesystem(uri)

    def read() -> bytes:
        with filesystem.open_input_file(path) as file:
            file.seek(offset)
            return file.read()

    return retry(read, [0.1] * (max_attempts() - 1), SHORT_READ_ERROR)


def write_text(uri: str | os.PathLike, text: str) -> None:
    write_bytes(uri, text.encode())  # encoded before anything is opened


def write_bytes(uri: str | os.PathLike, data: bytes) -> None:
    """Write a file atomically: a reader sees the whole new file or the old one.

    Object stores show an object when its upload ends; a local file gets its name at the end. Raises OSError that names
    the file, for example on a full disk.
    """
    filesystem, path = open_filesystem(uri)
    local = isinstance(filesystem, fs.LocalFileSystem)
    if local:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    target = f"{path}.{uuid.uuid4().hex}.part" if local else path
    try:
        with naming(uri), filesystem.open_output_stream(target) as stream:
            stream.write(data)
        if local:
            os.replace(target, path)
    finally:  # after an interrupt (KeyboardInterrupt) too
        if local:
            pathlib.Path(target).unlink(missing_ok=True)


@contextlib.contextmanager
def naming(uri: str | os.PathLike) -> Iterator[None]:
    """Write a file in this block: the error of a disk, for example a full one, is then one sentence with its path."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not is_local(uri):  # a store names the object
            raise
        raise OSError(error.errno, f"{uri} cannot be written: {os.strerror(error.errno)}") from None


def read_json(
    uri: str | os.PathLike,
    remedy: str = REMEDY,
    otherwise: Callable[[str], Any] | None = None,
    shape: Any = MappingProxyType({}),
) -> Any:
    """The content of a JSON file: `write_json`'s, another program's, or an earlier version's, without a checksum.

    Raises FileNotFoundError, and DamagedFile with the path and what to do: `remedy`.

    Args:
        otherwise: given the sentence, returns what takes the place of a damaged file's content.
        shape: what the content must be (`has_shape`), such as {"step": int, "files": dict}; any object by default.
    """
    data = read_bytes(uri)
    with contextlib.suppress(ValueError, RecursionError):
        content, is_whole = split_checksum(json.loads(data))
        if is_whole and has_shape(content, shape):
            return content
    sentence = f"{shown(uri)} is damaged or cut short ({len(data):,} bytes): {remedy}."
    if otherwise is None:
        raise DamagedFile(sentence)
    return otherwise(sentence)


def has_shape(value: Any, shape: Any) -> bool:
    """`shape`: a type; {key: shape} of an object, which may have other keys; [shape] of a list's items."""
    if isinstance(shape, Mapping):
        return isinstance(value, dict) and all(key in value and has_shape(value[key], shape[key]) for key in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(has_shape(item, shape[0]) for item in value)
    return isinstance(value, shape)


def write_json(uri: str | os.PathLike, value: dict | list, indent: int | None = 1) -> None:
    """Write an object or a list; its last entry is a checksum, which `read_json` compares and removes."""
    content = json.loads(json.dumps(value))  # tuples become lists, keys become text: what the reader will check
    crc = zlib.crc32(json.dumps(content).encode())
    content = {**content, CHECKSUM: crc} if isinstance(content, dict) else [*content, crc]
    write_text(uri, json.dumps(content, indent=indent))


def split_checksum(content: Any) -> tuple[Any, bool]:
    """`(content without its checksum, whether it is whole)`; content without a checksum counts as whole."""
    if not content or not isinstance(content, (dict, list)):
        return content, True
    rest = content.copy()
    name, last = rest.popitem() if isinstance(rest, dict) else (CHECKSUM, rest.pop())
    if last == zlib.crc32(json.dumps(rest).encode()):  # its name may be damaged
        return rest, True
    return content, name != CHECKSUM or not isinstance(last, int)


def delete(uri: str | os.PathLike) -> None:
    """Delete a file or a whole folder, if it exists."""
    filesystem, path = open_filesystem(uri)
    if is_file(uri):
        filesystem.delete_file(path)
    elif exists(uri):
        filesystem.delete_dir_contents(path)
        if exists(uri):  # on a store it may end with its last file
            filesystem.delete_dir(path)


def copy_folder(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copy all files of a folder to another path or URI, each by `retry`; raises what the last attempt raised.

    `pyarrow.fs.copy_files` would ignore that a store refuses a file when it is closed, which is when it is uploaded.
    """
    (from_filesystem, from_path), (to_filesystem, to_path) = open_filesystem(source), open_filesystem(target)
    found = from_filesystem.get_file_info(fs.FileSelector(from_path, recursive=True))
    files = [item for item in found if item.is_file]

    def copy(file: fs.FileInfo) -> None:
        new = to_path + file.path[len(from_path) :]
        to_filesystem.create_dir(os.path.dirname(new))
        if from_filesystem == to_filesystem and file.size <= MOST_COPIED:
            return to_filesystem.copy_file(file.path, new)  # a store copies its objects itself
        with (
            from_filesystem.open_input_stream(file.path, compression=None) as data,
            to_filesystem.open_output_stream(new, compression=None) as written,
        ):
            shutil.copyfileobj(data, written, 2**23)

    def copy_in_attempts(file: fs.FileInfo) -> None:
        with naming(resolve(target) + file.path[len(from_path) :]):
            retry(functools.partial(copy, file))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy_in_attempts, files))
