"""Files on a local folder or an object store, by one path or URI: everything goes through `pyarrow.fs`."""

import functools
import json
import os
import pathlib
import time
import uuid

from pyarrow import fs

# What pyarrow's S3 client says, and does not retry, where a store's message of an error is longer than the bytes asked for.
LONG_MESSAGE = "Failed to flush response stream"


def resolve(uri):
    """An absolute local path, or the URI as it is, without a trailing slash.

    Relative paths are resolved here, on the driver: Ray workers run in folders of their own.
    """
    uri = str(uri)
    if "://" in uri:
        return uri.rstrip("/")
    return os.path.abspath(os.path.expanduser(uri))


def resolve_folder(name):
    """The absolute path of a local file or folder; a name that is none (a preset, a hub id) stays as it is."""
    return os.path.abspath(name) if os.sep in name and os.path.exists(name) else name


def open_filesystem(uri):
    """`(filesystem, path)` of a local path or URI (`s3://`, `gs://`, ...; credentials from the environment)."""
    uri = resolve(uri)
    if uri.startswith("s3://"):
        path = uri.removeprefix("s3://")  # not parsed as a URI: keys may hold spaces, umlauts, "#"
        environment = [
            os.environ.get(name)
            for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
        ]
        return _open_s3(
            path.partition("/")[0], environment[0] or environment[1], environment[2] or environment[3]
        ), path
    return fs.FileSystem.from_uri(uri)


@functools.lru_cache(maxsize=16)
def _open_s3(bucket, endpoint, region):
    """A client that is kept: making one looks up the bucket's region. A request is tried ten times (or `AWS_MAX_ATTEMPTS`),
    with growing pauses, so that a store which fails now and then, or is away for some seconds, stops no job. What fits into
    one part is written by one request in place of three (`allow_delayed_open`)."""
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        where = {"endpoint_override": host, "scheme": scheme or "https"}
    else:
        where = {}
        region = region or fs.resolve_s3_region(bucket)
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=max_attempts())
    return fs.S3FileSystem(region=region, retry_strategy=retries, allow_delayed_open=True, **where)


def max_attempts():
    return int(os.environ.get("AWS_MAX_ATTEMPTS", 10))


def is_local(uri):
    return isinstance(open_filesystem(uri)[0], fs.LocalFileSystem)


def join(uri, *parts):
    return "/".join([resolve(uri), *parts])


def name(uri):
    """The last part of a path or URI."""
    return str(uri).rstrip("/").rsplit("/", 1)[-1]


def exists(uri):
    filesystem, path = open_filesystem(uri)
    return filesystem.get_file_info(path).type != fs.FileType.NotFound


def is_file(uri):
    filesystem, path = open_filesystem(uri)
    return filesystem.get_file_info(path).type == fs.FileType.File


def version(uri):
    """(bytes, time of the last change) of a file, by which a kept copy of what it says is known to be out of date."""
    filesystem, path = open_filesystem(uri)
    info = filesystem.get_file_info(path)
    return info.size, info.mtime_ns


def list_files(uri, suffix="", recursive=False):
    """Sorted paths or URIs of the files under `uri` that end in `suffix` (or one of several); none if there is no folder."""
    filesystem, path = open_filesystem(uri)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=recursive))
    inside = sorted(info.path[len(path) :].lstrip("/") for info in found if info.type == fs.FileType.File)
    return [join(uri, relative) for relative in inside if relative.endswith(suffix)]


def list_folders(uri):
    """Sorted paths or URIs of the folders directly under `uri`; none if it does not exist."""
    filesystem, path = open_filesystem(uri)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [
        join(uri, info.base_name) for info in sorted(found, key=lambda i: i.path) if info.type == fs.FileType.Directory
    ]


def sizes(uri):
    """{path below `uri`: bytes} of all files under it; of a file {"": bytes}."""
    filesystem, path = open_filesystem(uri)
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.File:
        return {"": info.size}
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    return {info.path[len(path) :].lstrip("/"): info.size for info in found if info.type == fs.FileType.File}


def size_bytes(uri):
    """Bytes of all files under `uri`."""
    return sum(sizes(uri).values())


def read_text(uri):
    """The text of a file; `FileNotFoundError` if it is not there."""
    filesystem, path = open_filesystem(uri)
    for left in reversed(range(max_attempts())):
        try:
            with filesystem.open_input_stream(path) as stream:
                return stream.read().decode()
        except OSError as error:
            if LONG_MESSAGE not in str(error) or not left:
                raise
            time.sleep(0.1)


def write_text(uri, text):
    """`write_bytes` of a text, which is encoded before anything is opened."""
    write_bytes(uri, text.encode())


def write_bytes(uri, data):
    """Write a file so that a reader sees all of it or the file before it, never a part.

    Object stores make an object visible when its upload ends; on a file system a rename does that.
    """
    filesystem, path = open_filesystem(uri)
    local = isinstance(filesystem, fs.LocalFileSystem)
    if local:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    target = f"{path}.{uuid.uuid4().hex}.part" if local else path
    try:
        with filesystem.open_output_stream(target) as stream:
            stream.write(data)
        if local:
            os.replace(target, path)
    except BaseException:  # an interrupted cell (KeyboardInterrupt) too
        if local:
            pathlib.Path(target).unlink(missing_ok=True)
        raise


def read_json(uri):
    return json.loads(read_text(uri))


def write_json(uri, value):
    write_text(uri, json.dumps(value, indent=1))


def delete(uri):
    """Delete a file, or a folder with all that is in it; nothing happens if it is not there."""
    filesystem, path = open_filesystem(uri)
    kind = filesystem.get_file_info(path).type
    if kind == fs.FileType.File:
        filesystem.delete_file(path)
    elif kind == fs.FileType.Directory:
        filesystem.delete_dir(path)


def copy_folder(source, target):
    """Copy all files of a folder to another path or URI."""
    (from_filesystem, from_path), (to_filesystem, to_path) = open_filesystem(source), open_filesystem(target)
    to_filesystem.create_dir(to_path)
    fs.copy_files(from_path, to_path, source_filesystem=from_filesystem, destination_filesystem=to_filesystem)
