"""What the preprocessing pipeline maps: `transform` on CPU tasks and `write_latents` at the end; checks and the report."""

import collections
import functools
import itertools
import json
import time
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from . import encoder, images, resumable_job, schema, storage
from .data_io import filters, inputs, readers


def transform(rows, *, config, augment=None):
    """An Arrow table of raw rows -> a table for the encoder; every row stays, bad ones with a `reason`.

    Columns: id, caption, `reason` (empty for good rows), source, `caption_ids` (L int32 token ids) and, for each
    resolution R, `pixels_R` (R x R x 3 bytes; null where the picture is smaller than that, unless `upscale` is set).
    Arrays travel as plain bytes: between the stages nothing is parsed or converted. `augment`: for each row a function
    from the decoded picture to a square one; None: the largest centre square.
    """
    started = time.perf_counter()
    ids = row_ids(rows[config.id_column])
    results = [
        transform_row(data, caption, row_id, config, cut)
        for data, caption, row_id, cut in zip(
            image_bytes(rows, config),
            text_column(rows[config.caption_column]),
            ids.to_pylist(),
            augment or itertools.repeat(images.center_square, len(rows)),
            strict=True,
        )
    ]
    captions = [caption for _, caption, _ in results]
    caption_ids = images.tokenize(captions, images.load_tokenizer(config.encoder_model))
    columns = {
        schema.ID: ids,
        schema.CAPTION: pa.array(captions, pa.string()),
        schema.REASON: pa.array([reason for _, _, reason in results], pa.string()),
        schema.SOURCE: relative_paths(rows["path"], config),
        "caption_ids": schema.to_binary(caption_ids, dtype=np.int32),
    }
    for resolution in config.resolutions:
        fits = np.array([resolution in pixels for pixels, _, _ in results], dtype=bool)
        pixels_BHWC = np.zeros((len(results), resolution, resolution, 3), dtype=np.uint8)
        for row in np.flatnonzero(fits):
            pixels_BHWC[row] = results[row][0][resolution]
        columns[f"pixels_{resolution}"] = schema.to_binary(pixels_BHWC, fits, np.uint8)
    seconds = (time.perf_counter() - started) / len(results)
    columns["transform_seconds"] = pa.repeat(pa.scalar(seconds, pa.float32()), len(results))
    return pa.table(columns)


def transform_row(data, caption, row_id, config, cut=images.center_square):
    """`(resolution -> pixels, caption, reason)` of one raw row; `reason` is empty for a good one.

    `data`: the bytes of a picture, or the `BadImage` that was found in their place.
    """
    if row_id is None or row_id == "":
        return {}, caption or "", "no id"
    if caption is None:
        return {}, "", "no caption"
    if not caption.strip():
        return {}, "", "empty caption"
    try:
        if isinstance(data, images.BadImage):
            raise data
        picture = images.decode(data, config.max_pixels)
        if config.max_aspect_ratio is not None and max(picture.size) > config.max_aspect_ratio * min(picture.size):
            raise images.BadImage(f"longer than {config.max_aspect_ratio:g} times its shorter side")
    except images.BadImage as bad:
        return {}, caption, str(bad)
    # One decode for all sizes; a size that the picture does not reach is left out rather than blown up, unless asked.
    square = cut(picture)
    fits = [r for r in config.resolutions if config.upscale or min(picture.size) >= r]
    pixels = {r: images.to_pixels(images.resize(square, r)) for r in fits}
    return pixels, caption, "" if pixels else f"smaller than {config.resolutions[0]} pixels"


def relative_paths(paths, config):
    """Input files' paths below `input_uri`."""
    folder = storage.open_filesystem(inputs.base_folder(config.input_uri or config.raw_uri))[1].rstrip("/")
    short = {path: path.partition(folder)[2].lstrip("/") or storage.name(path) for path in paths.unique().to_pylist()}
    return pa.array([short[path] for path in paths.to_pylist()], pa.string())


def image_bytes(rows, config):
    """Bytes, None or a `BadImage` a row: from a binary column, the {"bytes", "path"} structs that Hugging Face writes, or
    a column of paths, relative to the input's folder (in image folders to that of the row's table)."""
    column = rows[config.image_column]
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, "bytes")
    if not is_text(column.type):
        return column.to_pylist()
    base = inputs.base_folder(config.input_uri or config.raw_uri)
    beside_table = config.input_format == "imagefolder"
    folders = [path.rpartition("/")[0] if beside_table else base for path in rows["path"].to_pylist()]
    return readers.read_pictures(text_column(column), folders, base)


def is_text(kind):
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_bytes(kind):
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def text_column(column):
    """A column of text, or of bytes that are text, as a list; what is no UTF-8, which no reader of Parquet checks, is None."""
    found = []
    for value in column.cast(pa.large_binary()).to_pylist():
        try:
            found.append(value if value is None else value.decode())
        except UnicodeDecodeError:
            found.append(None)
    return found


def row_ids(column):
    """Ids as they are stored (`id_type`); bytes that are no UTF-8, such as a raw hash, by their hexadecimal digits."""
    if not (is_text(column.type) or is_bytes(column.type)):
        return column.cast(id_type(column.type))
    values = column.cast(pa.large_binary()).to_pylist()
    texts = text_column(column)
    return pa.array(
        [value and value.hex() if text is None else text for value, text in zip(values, texts, strict=True)],
        pa.string(),
    )


def id_type(column_type):
    """How ids are stored: whole numbers as int64, all else as text (uint64 too, half of which int64 cannot hold)."""
    return pa.int64() if pa.types.is_integer(column_type) and column_type != pa.uint64() else pa.string()


def write_latents(rows, *, latents_uri, segment, shapes, ids, text_precision="fp16"):
    """Write a table of encoded rows as one Parquet file of latents and one of rejects; return one row of accounts.

    File names are new on every try, so a retried task can never leave a half-written file under a committed name.
    """
    started = time.perf_counter()
    name = f"{segment.index:06d}-{uuid.uuid4().hex[:12]}.parquet"
    is_good = pc.equal(rows[schema.REASON], "")
    good, bad = rows.filter(is_good), rows.filter(pc.invert(is_good))
    report = {"files": [], "rejects": [], "written": len(good), "rejected": {}, "bytes": 0}
    if len(good):
        layout = schema.latents_schema(ids, shapes, text_precision)
        report["bytes"] = write_parquet(good.select(layout.names).cast(layout), storage.join(latents_uri, "data", name))
        report["files"] = [{"name": name, "row_groups": schema.row_groups(len(good))}]
        report["at"] = {name: len(good) - good[name].null_count for name in shapes if name != schema.EMBEDDINGS}
    if len(bad):
        report["rejected"] = dict(collections.Counter(bad[schema.REASON].to_pylist()))
        layout = schema.rejects_schema(ids)
        write_parquet(bad.select(layout.names).cast(layout), storage.join(latents_uri, "rejects", name))
        report["rejects"] = [name]
    calls = encoder_calls(rows)
    report["encoded"] = [min(ended - seconds for ended, (seconds, _) in calls.items()), max(calls)]
    report["encoders"] = pc.unique(rows["encoded_by"]).to_pylist()
    report["busy"] = busy_seconds(calls)
    report["stages"] = {
        "transform": pc.sum(rows["transform_seconds"]).as_py(),
        "encode": pc.sum(rows["encode_seconds"]).as_py(),
        "write": time.perf_counter() - started,
    }
    return pa.table({"report": [json.dumps(report)]})


def encoder_calls(rows):
    """{when a call of an encoder ended, in seconds since 1970: [seconds that it took, rows]} of a table of encoded rows."""
    calls = collections.defaultdict(lambda: [0.0, 0])
    for ended, seconds in zip(rows["encoded_at"].to_pylist(), rows["encode_seconds"].to_pylist(), strict=True):
        calls[ended][0] += seconds
        calls[ended][1] += 1
    return calls


def busy_seconds(calls):
    """{second since 1970: [seconds that encoders computed in it, rows that they finished]} of `encoder_calls`."""
    busy = {}
    for ended, (seconds, finished) in calls.items():
        started = ended - seconds
        for second in range(int(started), int(ended) + 1):
            part = busy.setdefault(second, [0.0, 0])
            part[0] += max(0.0, min(ended, second + 1) - max(started, second))
            part[1] += finished if second == int(ended) else 0
    return busy


def write_parquet(table, uri):
    """One Parquet file in the layout that trains fastest (`tests/benchmarks/read_layout.py`); returns its bytes."""
    filesystem, path = storage.open_filesystem(uri)
    if storage.is_local(uri):
        filesystem.create_dir(path.rsplit("/", 1)[0])
    pq.write_table(
        table,
        path,
        filesystem=filesystem,
        row_group_size=schema.ROWS_PER_ROW_GROUP,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    return filesystem.get_file_info(path).size


def prepare(config, rows_per_segment=None):
    """Check a preprocessing job and plan it, before any worker starts; draws nothing and encodes one empty caption.

    Returns the `resumable_job.Job`. Raises FileNotFoundError or ValueError with what to change.
    """
    job = check(config)
    # Encoders start anew with each segment: the more there are, the more rows it takes to make that worth it.
    rows_per_segment = rows_per_segment or resumable_job.ROWS_PER_SEGMENT * config.num_encoders
    return resumable_job.Job(
        config.latents_uri,
        job["parameters"],
        job["description"],
        functools.partial(resumable_job.plan_segments, job["paths"], config, rows_per_segment),
        job["listing"],
        job["id_type"],
        config.dollars_per_hour,
        config.num_encoders,
    )


def check(config):
    """Check raw data and encoder before any worker starts; what a job is made of, as a dict.

    Raises FileNotFoundError or ValueError with what to change.
    """
    input_uri = config.input_uri or config.raw_uri
    paths = inputs.list_inputs(input_uri, config.input_format)
    columns = {name: getattr(config, name) for name in ("id_column", "caption_column", "image_column")}
    found = inputs.reader(config).schema(paths[0])
    inputs.check_columns(paths[0], columns, found)
    for column in filters.filter_columns(config.row_filter):
        inputs.check_columns(paths[0], {"row_filter": column}, found)
    if "path" in inputs.used_columns(config):
        raise ValueError(
            "A column called 'path' cannot be used, because readers note the file of each row there: rename it."
        )
    filters.check_filter(config.row_filter, found)
    check_types(found, config)
    check_no_urls(found, config)

    deciding = (
        "row_filter",
        "limit",
        "resolutions",
        "input_format",
        "upscale",
        "max_aspect_ratio",
        "max_pixels",
        "latents",
        "text_precision",
    )
    parameters = {name: getattr(config, name) for name in (*columns, *deciding)}
    parameters["input_uri"] = input_uri
    return {
        "paths": paths,
        "listing": inputs.listing(paths, input_uri),
        "parameters": parameters,
        "description": encoder.describe(*encoder.arguments(config)),
        "id_type": id_type(found.field(config.id_column).type),
    }


def check_types(found, config):
    """Raises ValueError for a column that cannot be what it is said to be."""
    image = found.field(config.image_column).type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not (is_bytes(image) or is_text(image)):
        raise ValueError(
            f"image_column={config.image_column!r} holds {image}, neither the bytes of encoded pictures nor their paths: name "
            "the column that does."
        )
    caption = found.field(config.caption_column).type
    if not (is_text(caption) or is_bytes(caption)):
        raise ValueError(
            f"caption_column={config.caption_column!r} holds {caption}, not text: name the column that does."
        )
    ids = found.field(config.id_column).type
    if pa.types.is_nested(ids):
        raise ValueError(
            f"id_column={config.id_column!r} holds {ids}, neither numbers nor text: name the column that does."
        )


def check_no_urls(found, config):
    """Raises ValueError if the first pictures are named by URLs."""
    if is_text(found.field(config.image_column).type):
        names = text_column(inputs.first_rows(config, num_rows=64)[config.image_column])
        if url := next((name for name in names if readers.is_url(name)), None):
            raise ValueError(
                f"image_column={config.image_column!r} holds URLs ({url[:60]}): download the pictures first, for example "
                "with img2dataset, whose Parquet and WebDataset output is read here."
            )


def first_latents(latents_uri, num_rows):
    """The first rows of a finished job as an Arrow table: what the trainer reads."""
    name, row_groups = schema.Manifest.read(latents_uri).files[0]
    filesystem, path = storage.open_filesystem(storage.join(latents_uri, "data", name))
    with pq.ParquetFile(path, filesystem=filesystem) as file:
        return file.read_row_groups(range(min(len(row_groups), -(-num_rows // row_groups[0])))).slice(0, num_rows)
