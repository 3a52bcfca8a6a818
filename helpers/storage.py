"""Files in a local folder or an object store, by one path or URI: all access goes through `pyarrow.fs`."""

import contextlib
import functools
import json
import os
import pathlib
import random
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyarrow import fs

# pyarrow does not retry a read if the store's error message is longer than the file. It
# raises an OSError with this text.
SHORT_READ_ERROR = "Failed to flush response stream"
PAUSES = (1, 5, 25)  # seconds before `retry` tries again
REMEDY = "delete it, and start the same command again"  # for a damaged file
LOCAL = fs.LocalFileSystem()
MOST_COPIED = 5 * 2**30  # bytes of an object that S3 copies by one request


class DamagedFile(ValueError):
    """A JSON file that is cut short, or holds something else."""


def resolve(uri: str | os.PathLike) -> str:
    """An absolute local path, or the URI as it is, without a trailing slash.

    Relative paths must be resolved on the driver: Ray workers run in folders of their own.
    """
    uri = str(uri)
    if not uri.isascii() and uri != uri.encode(errors="replace").decode():
        raise ValueError(f"{uri!r} is no name in UTF-8: rename it.")
    scheme, mark, path = uri.partition("://")
    if mark:
        return scheme + mark + path.rstrip("/")
    return os.path.abspath(os.path.expanduser(uri))


def open_filesystem(uri: str | os.PathLike) -> tuple[fs.FileSystem, str]:
    """`(filesystem, path)` of a local path or a URI of `SCHEMES`; credentials come from the environment.

    Raises ValueError for a URI of no known store, without a bucket, or of Azure without an account.
    """
    uri = resolve(uri)
    if "://" not in uri:
        return LOCAL, uri
    scheme, _, path = uri.partition("://")  # not parsed as a URI: keys may hold spaces, umlauts, "#"
    if scheme == "file":
        return LOCAL, path
    if scheme not in SCHEMES or not path.partition("/")[0]:
        raise ValueError(f"{uri} cannot be opened: give a folder, or a URI such as {' or '.join(EXAMPLES)}.")
    return SCHEMES[scheme](path)


def open_s3(path: str) -> tuple[fs.FileSystem, str]:
    env = os.environ
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


def open_azure(path: str) -> tuple[fs.FileSystem, str]:
    bucket, slash, below = path.partition("/")
    container, _, host = bucket.partition("@")
    account = host.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise ValueError(
            f"abfs://{path} names no storage account: write abfs://{container}@account.dfs.core.windows.net/..., or "
            "set AZURE_STORAGE_ACCOUNT."
        )
    names = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SERVICE_ENDPOINT")
    return _azure_client(account, *map(os.environ.get, names)), container + slash + below


@functools.lru_cache(maxsize=16)
def _azure_client(account: str, key: str | None, sas_token: str | None, endpoint: str | None) -> fs.AzureFileSystem:
    """A key, else a token, else Azure's default credentials; `endpoint` is an emulator's, as `http://localhost:10000`."""
    where = {}
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        authority, scheme = host.partition("/")[0], scheme or "https"
        where = {"blob_storage_authority": authority, "blob_storage_scheme": scheme}
        where |= {"dfs_storage_authority": authority, "dfs_storage_scheme": scheme}
    secret = {"account_key": key} if key else {"sas_token": sas_token} if sas_token else {}
    return fs.AzureFileSystem(account, **secret, **where)


# {scheme: function of the path after "://" that returns (filesystem, path)}
SCHEMES = {
    "s3": open_s3,
    "gs": lambda path: fs.FileSystem.from_uri(f"gs://{path}"),
    "abfs": open_azure,
    "abfss": open_azure,
}
EXAMPLES = "s3://bucket/folder", "gs://bucket/folder", "abfs://container@account.dfs.core.windows.net/folder"


def max_attempts() -> int:
    return int(os.environ.get("AWS_MAX_ATTEMPTS", 10))


def retry(action: Callable[[], None]) -> None:
    """Call `action()`, again after each of `PAUSES` while it raises an OSError, but for a file that does not exist.

    pyarrow repeats single requests (`max_attempts`). This is for work that is lost if the store is busy for longer.
    """
    for pause in (*PAUSES, None):
        try:
            return action()
        except OSError as error:
            if pause is None or isinstance(error, FileNotFoundError):
                raise
            time.sleep(pause * random.uniform(0.8, 1.2))  # the workers that were refused do not all come back at once


def is_local(uri: str | os.PathLike) -> bool:
    return isinstance(open_filesystem(uri)[0], fs.LocalFileSystem)


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
    return _info(uri).is_file


def version(uri: str | os.PathLike) -> tuple[int, int]:
    """(bytes, time of the last change) of a file: a cached copy of it is stale when they differ."""
    found = _info(uri)
    return found.size, found.mtime_ns


def walk(uri: str | os.PathLike, recursive: bool = True) -> Iterator[tuple[str, int | None]]:
    """Yield `(path below uri, bytes)` of the files in a folder, in any order; nothing if there is no folder.

    Bytes are None for what cannot be opened: a link that leads nowhere, a FIFO, a name that is not UTF-8 (with "?" for
    its odd bytes). A link that leads back to a folder above is not followed.
    """
    filesystem, path = open_filesystem(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        yield from _walk_disk(path.rstrip("/"), "", recursive)
        return
    for item in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=recursive)):
        if item.is_file:
            yield item.path[len(path) :].lstrip("/"), item.size


def _walk_disk(folder: str, prefix: str, recursive: bool, above: tuple = ()) -> Iterator[tuple[str, int | None]]:
    real = os.path.realpath(folder or "/")
    if not os.path.isdir(real) or real in above:
        return
    try:
        entries = os.scandir(folder or "/")
    except PermissionError:  # such as lost+found
        yield prefix.rstrip("/"), None
        return
    for entry in entries:
        below = prefix + entry.name
        is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
        if not is_folder:
            yield below.encode(errors="replace").decode(), _regular_size(entry)
        elif recursive:
            yield from _walk_disk(entry.path, f"{below}/", recursive, (*above, real))


def _regular_size(entry: os.DirEntry) -> int | None:
    try:
        entry.path.encode()
        found = entry.stat()
    except (OSError, UnicodeEncodeError):  # a link that leads nowhere, or to itself; a name that is not UTF-8
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def list_files(uri: str | os.PathLike, suffix: str | tuple[str, ...] = "", recursive: bool = False) -> list[str]:
    """Sorted paths or URIs of the files in a folder that end in `suffix` (or one of several)."""
    found = sorted(below for below, size in walk(uri, recursive) if size is not None and below.endswith(suffix))
    return [join(uri, below) for below in found]


def list_folders(uri: str | os.PathLike) -> list[str]:
    """Sorted paths or URIs of the folders directly in a folder."""
    filesystem, path = open_filesystem(uri)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(join(uri, name(item.path)) for item in found if item.type == fs.FileType.Directory)


def sizes(uri: str | os.PathLike, recursive: bool = True) -> dict[str, int]:
    """{path below `uri`: bytes} of all files in a folder; {"": bytes} of a file."""
    if _info(uri).is_file:
        return {"": _info(uri).size}
    return dict(sorted(found for found in walk(uri, recursive) if found[1] is not None))


def read_text(uri: str | os.PathLike) -> str:
    """A whole file. Raises FileNotFoundError if it does not exist."""
    return read_bytes(uri).decode()


def read_bytes(uri: str | os.PathLike, offset: int = 0) -> bytes:
    """A file from a byte on. Raises FileNotFoundError if it does not exist."""
    filesystem, path = open_filesystem(uri)
    for attempt in range(1, max_attempts() + 1):
        try:
            with filesystem.open_input_file(path) as file:
                file.seek(offset)
                return file.read()
        except OSError as error:
            if SHORT_READ_ERROR not in str(error) or attempt == max_attempts():
                raise
            time.sleep(0.1)


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


def read_json(uri: str | os.PathLike, remedy: str = REMEDY, otherwise: Callable[[str], Any] | None = None) -> Any:
    """The content of a JSON file. Raises FileNotFoundError, and DamagedFile with the path and what to do: `remedy`.

    `otherwise(sentence)`: returns what takes the place of a damaged file's content, if it need not be raised.
    """
    data = read_bytes(uri)
    try:
        return json.loads(data)
    except ValueError:
        sentence = f"{uri} is damaged or cut short ({len(data):,} bytes): {remedy}."
    if otherwise is None:
        raise DamagedFile(sentence)
    return otherwise(sentence)


def write_json(uri: str | os.PathLike, value: Any) -> None:
    write_text(uri, json.dumps(value, indent=1))


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
