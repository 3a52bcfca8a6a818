"""Raw data in all formats, and the rows that a job and an online run make of it, without Ray."""

import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import job, stages
from helpers.online import encode
from helpers.online import prepare as prepare_online
from helpers.online.config import OnlineConfig
from helpers.production.readers import detect
from helpers.raw import inputs
from tests.latents import plan_for


def image(colour=(200, 40, 40), kind="PNG", size=(64, 64)):
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, kind)
    return data.getvalue()


def table(ids=("1", "2"), **changes):
    columns = {"jpg": pa.array([image()] * len(ids)), "caption": list("abcdefgh"[: len(ids)]), "hash": list(ids)}
    return pa.table({**columns, **changes})


def hugging_face(numbers):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": image(), "path": f"{number}.png"} for number in numbers], kind)
    return pa.table({"image": images, "text": [f"a cat {number}" for number in numbers]})


def captioned(numbers, folder="", end="txt"):
    """{name: data} of images with their captions beside them."""
    files = {f"{folder}{number}.jpg": image(kind="JPEG") for number in numbers}
    return files | {f"{folder}{number}.{end}": f"a cat {number}" for number in numbers}


def write(path, **files):
    """Files in a folder; values are tables, bytes or texts."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, pa.Table):
            pq.write_table(data, path / name)
        else:
            (path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def tar_of(members):
    """A tar's bytes, of {name: data}."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def as_arrow(rows, is_stream=True, batch_rows=100):
    data = pa.BufferOutputStream()
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(data, rows.schema) as file:
        file.write_table(rows, max_chunksize=batch_rows)
    return data.getvalue().to_pybytes()


def config_of(uri, kind=PreprocessingConfig, **parameters):
    return kind(storage=f"{uri}-storage", input_uri=str(uri), resolutions=[32], **parameters)


def found(uri, kind=PreprocessingConfig, **parameters):
    return detect.detect(config_of(uri, kind, **parameters))


def transformed(uri, **parameters):
    """All rows of an input as dicts, by detection, readers and transform."""
    given = found(uri, **parameters)
    config, reader = given.config, inputs.reader(given.config)
    options = {"columns": inputs.used_columns(config), "reader": reader}
    for segment in job.plan_segments(given.paths, config):
        for part in [part for path in segment.paths for part in inputs.parts(reader, path)]:
            for block in inputs.read_part(pa.Table.from_pylist([part]), **options):
                yield from stages.transform(inputs.to_raw_rows(block, config), config=config).to_pylist()


def job_rows(uri, **parameters):
    """{id: (caption, reason)} of all rows of an input."""
    return {row["id"]: (row["caption"], row["reason"]) for row in transformed(uri, **parameters)}


def online_rows(uri, **parameters):
    """`({id: (caption, reason)} of an epoch of an online run, {reason: rows that its index rejected})`."""
    config = found(uri, OnlineConfig, **parameters).config
    options = {"storage": config.storage, "latents_uri": f"{config.storage}/online", "validation_share": 0.0}
    training = TrainingConfig(**options, global_batch_size=1, resolution=32)
    manifest, config = prepare_online.prepare_run(config, training)
    plan, rows = plan_for(training), {}
    for number in range(plan.chunks_per_epoch):
        ((source, ranges),) = plan.chunk_rows(number)[0]
        raw = encode.read_raw(ranges, source, config=config)
        done = stages.transform(raw, config=config)
        rows |= {row["id"]: (row["caption"], row["reason"]) for row in done.to_pylist()}
    return rows, manifest.rejected


def rows_of(uri, **parameters):
    """The rows of a job, which are those of an online run."""
    rows = job_rows(uri, **parameters)
    trained_on, rejected = online_rows(uri, **parameters)
    assert trained_on | {key: row for key, row in rows.items() if row[1] in rejected} == rows
    return rows


def good(*captions):
    return dict(zip("123456789", ((caption, "") for caption in captions), strict=False))


def refusal(uri, **parameters):
    """The one sentence by which an input is refused."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        paths = found(uri, **parameters)
        job.plan_segments(paths.paths, paths.config)
    assert len(str(error.value)) < 600
    return str(error.value)
