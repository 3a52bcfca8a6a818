"""What the notebooks show of raw rows, of a finished job and of held-out prompts, as frames and pictures."""

import functools
import io
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from PIL import Image

from .. import images, ingest, preprocess, schema, storage
from ..config import OnlineConfig
from ..data_io import filters, inputs
from . import captioned_shapes


def stage_rates(manifest, config):
    """Images a second of each stage, all its workers together: a frame for `figures.stage_throughput`."""
    workers = {"transform": config.num_transform_workers, "encode": config.num_encoders, "write": 1}
    one = manifest.report["images_per_second_by_stage"]
    rates = [(stage, rate * workers[stage], workers[stage]) for stage, rate in one.items()]
    return pd.DataFrame(rates, columns=["stage", "images_per_second", "workers"])


def encoder_timeline(manifest):
    """A frame for `figures.encoder_utilization`: columns seconds, busy (share of the encoders' time), images_per_second."""
    return pd.DataFrame(manifest.report["timeline"], columns=["seconds", "busy", "images_per_second"])


def dataset_stats(config, num_rows=2000, seed=0):
    """A look at random rows, on which one decides what a data set is good for: `(frame, pictures, captions)`.

    The frame has a row each: `tokens` (of the whole caption, with begin and end), `width`, `height` (NaN where the picture
    cannot be opened; nothing but its header is decoded). The twelve pictures are decoded, with their captions.
    """
    rows = random_rows(config, num_rows, seed)
    data, captions = preprocess.image_bytes(rows, config), preprocess.text_column(rows[config.caption_column])
    sizes = [picture_size(value) or (None, None) for value in data]
    frame = pd.DataFrame(
        {
            "tokens": images.count_tokens(
                [caption or "" for caption in captions], images.load_tokenizer(config.encoder_model)
            ),
            "width": pd.Series([width for width, _ in sizes], dtype=float),
            "height": pd.Series([height for _, height in sizes], dtype=float),
        }
    )
    shown = []
    for value, caption, row_id in zip(
        data, captions, preprocess.row_ids(rows[config.id_column]).to_pylist(), strict=True
    ):
        if len(shown) < 12 and preprocess.transform_row(value, caption, row_id, config)[2] == "":
            shown.append((images.decode(value, config.max_pixels), caption))
    return frame, [picture for picture, _ in shown], [caption for _, caption in shown]


def preview(config, num_rows):
    """`[(row id, picture, caption)]` of the first good raw rows, decoded here, for a look before any pipeline is built.

    Raises ValueError if there are none.
    """
    rows = inputs.first_rows(config, 4 * num_rows)
    ids, captions = (
        preprocess.row_ids(rows[config.id_column]).to_pylist(),
        preprocess.text_column(rows[config.caption_column]),
    )
    found = []
    for row_id, caption, data in zip(ids, captions, preprocess.image_bytes(rows, config), strict=True):
        if preprocess.transform_row(data, caption, row_id, config)[2] == "":
            found.append((row_id, images.decode(data, config.max_pixels), caption))
    if not found:
        raise ValueError(
            f"None of the first {len(rows)} rows of {config.input_uri or config.raw_uri} can be used at "
            f"resolutions={list(config.resolutions)}: give smaller ones, upscale=True, or other data."
        )
    return found[:num_rows]


def summary(manifest):
    """What a job did with its rows, as a frame: read = written + rejected (by reason) + filtered."""
    rows = [("read", "", manifest.total("read")), ("written", "", manifest.total("written"))]
    rows += [("rejected", reason, count) for reason, count in manifest.rejected.items()]
    rows += [("filtered", "", manifest.total("filtered"))]
    return pd.DataFrame(rows, columns=["what", "reason", "rows"])


def read_rejects(latents_uri, max_files=None):
    """Rejected rows as a frame with columns id, reason, source: all, or those of the first `max_files` files."""
    tables = []
    for uri in storage.list_files(storage.join(latents_uri, "rejects"), ".parquet")[:max_files]:
        filesystem, path = storage.open_filesystem(uri)
        tables.append(pq.read_table(path, filesystem=filesystem))
    columns = [schema.ID, schema.REASON, schema.SOURCE]
    return pa.concat_tables(tables).to_pandas() if tables else pd.DataFrame(columns=columns)


def random_rows(config, num_rows, seed=0):
    """Rows of up to 16 random files, as an Arrow table with `path`: of `num_rows` those that `row_filter` leaves in.

    Of each file the first rows of some random row groups; of a tar, which would have to be read as a whole to find a place
    in it, its first rows. Where the filter leaves none, that is said, and all are given.
    """
    random, read = np.random.default_rng(seed), inputs.reader(config)
    paths = inputs.list_inputs(config.input_uri or config.raw_uri, config.input_format)
    chosen, tables = [paths[place] for place in random.permutation(len(paths))[:16]], []
    wanted = -(-num_rows // len(chosen))
    for path in chosen:
        if config.input_format == "webdataset":
            places = [None]
        else:
            places = [[int(group)] for group in random.permutation(len(read.row_groups(path)[0]))]
        left = wanted
        for place in places:
            share = max(wanted // 4, wanted // len(places), 1)  # of one row group, which may be all there is
            for table in read.stream(path, inputs.used_columns(config), place):
                table = table[: min(left, share)]
                tables.append(table.append_column("path", pa.repeat(path, len(table))))
                left, share = left - len(table), share - len(table)
                if min(left, share) <= 0:
                    break
            if left <= 0:
                break
    rows = pa.concat_tables(tables, promote_options="permissive")
    rows = rows.take(random.permutation(len(rows))[:num_rows])
    expression = filters.parse_filter(config.row_filter)
    kept = rows if expression is None else rows.filter(expression.to_pyarrow())
    if len(kept) == 0 and len(rows):
        print(f"row_filter={config.row_filter!r} leaves none of {len(rows):,} random rows: they are shown without it.")
        return rows
    return kept


def scan_filter(config):
    """What `row_filter` drops, by clause: a frame with columns clause, dropped, dropped_by_it_alone; "all" is the last row.

    Reads only the columns of the filter (of tars, which have none, all there is), of the whole input or its first `limit`
    rows. A row counts for each clause that it does not meet, so the clauses may add up to more than "all".
    """
    texts, columns = filters.clauses(config.row_filter), filters.filter_columns(config.row_filter)
    if not texts:
        raise ValueError("row_filter='' drops nothing: there is nothing to count.")
    paths = inputs.list_inputs(config.input_uri or config.raw_uri, config.input_format)
    if config.input_format == "parquet":
        rows = ray.data.read_parquet(
            paths, partitioning=None, file_extensions=None, filesystem=storage.open_filesystem(paths[0])[0]
        ).select_columns(columns)
    else:
        read = functools.partial(inputs.read_files, columns=columns, read=inputs.reader(config))
        rows = ray.data.from_items([{"path": path} for path in paths], override_num_blocks=len(paths)).map_batches(
            read, batch_size=1
        )
    if config.limit is not None:
        rows = rows.limit(config.limit)
    counted = (
        rows.map_batches(functools.partial(filters.count_dropped, texts=texts), batch_format="pyarrow")
        .to_pandas()
        .sum()
    )
    return pd.DataFrame(
        {
            "clause": [*texts, "all"],
            "dropped": [int(counted[f"dropped {number}"]) for number in range(len(texts))] + [int(counted["dropped"])],
            "dropped_by_it_alone": [int(counted[f"alone {number}"]) for number in range(len(texts))]
            + [int(counted["dropped"])],
            "of_rows": int(counted["rows"]),
        }
    )


def first_captions(training, num_rows):
    """Captions of the first rows that a run is trained on, raw or encoded before."""
    uri = next(iter(training.proportions))
    raw = schema.Manifest.read(uri).online
    if raw is None:
        return preprocess.first_latents(uri, num_rows)[schema.CAPTION].to_pylist()
    config = OnlineConfig.from_dict(raw)
    rows = inputs.first_rows(config, num_rows)
    return [caption for caption in preprocess.text_column(rows[config.caption_column]) if caption]


def read_run_rejects(run_uri):
    """The bad rows that a run met, each once: a frame with columns id, reason, source."""
    return read_rejects(run_uri).drop_duplicates().reset_index(drop=True)


def held_out_prompts(config, num_prompts):
    """`(prompts, detector)`: captions that training does not see, and what scores pictures of them.

    For the drawn sample data: captions that no drawn picture has, and `captioned_shapes.agreement`. For other data:
    the captions of held-out rows, and None.
    """
    rows = ingest.validation_rows(config, num_prompts)
    # Where nothing is held out, what it was trained on has to do.
    captions = first_captions(config, num_prompts) if rows is None else rows[schema.CAPTION].to_pylist()
    try:
        for caption in captions:
            captioned_shapes.parse(caption)
    except ValueError:
        return captions, None
    return captioned_shapes.held_out_prompts(num_prompts), captioned_shapes.agreement


def picture_size(data):
    """(width, height) from the header of encoded bytes, before EXIF orientation; None if they are not a picture."""
    if not data or isinstance(data, images.BadImage):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data), formats=images.FORMATS).size
    except Exception:  # Pillow's parsers raise exceptions of many types; `images.decode` gives the reason
        return None
