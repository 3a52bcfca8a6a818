"""Folders of captioned photographs as other tools write them."""

import io
import json
import shutil
import tarfile

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import cbook
from PIL import Image


def photographs(num_rows=120):
    """`[(name, JPEG, caption)]`: cuts of a photograph, of many sizes."""
    with Image.open(cbook.get_sample_data("grace_hopper.jpg")) as photograph:
        photograph.load()
    random = np.random.default_rng(0)
    for number in range(num_rows):
        width, height = random.integers(40, 400, size=2)
        left, top = random.integers(0, photograph.width - width + 1), random.integers(0, photograph.height - height + 1)
        data = io.BytesIO()
        photograph.crop((left, top, left + width, top + height)).save(data, "JPEG", quality=90)
        yield f"{number:05d}", data.getvalue(), f"a cut of {width} by {height} pixels"


def write_kohya(folder):
    """As kohya's trainers take them: folders with repeats in their names, a text beside each picture."""
    for name, data, caption in photographs():
        beside = folder / ("1_first" if name < "00060" else "2_second")
        beside.mkdir(parents=True, exist_ok=True)
        (beside / f"{name}.jpg").write_bytes(data)
        (beside / f"{name}.txt").write_text(f"{caption}\n")


def hugging_face():
    rows = [{"image": {"bytes": data, "path": None}, "text": caption} for _, data, caption in photographs()]
    return datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())


def write_to_disk(folder):
    datasets.DatasetDict({"train": hugging_face()}).save_to_disk(folder)


def write_img2dataset(folder, output_format):
    """As img2dataset writes its output of this format; a picture that was not downloaded has a row in the tables."""
    folder.mkdir()
    rows = [
        {"url": f"https://a.b/{key}.jpg", "key": key, "caption": caption, "status": "success", "jpg": data}
        for key, data, caption in photographs()
    ]
    failed = {**rows[0], "key": "00120", "status": "failed_to_download", "jpg": None}
    table = pa.Table.from_pylist([*rows, failed])
    pq.write_table(table if output_format == "parquet" else table.drop_columns("jpg"), folder / "00000.parquet")
    (folder / "00000_stats.json").write_text(json.dumps({"count": 121, "successes": 120}))
    if output_format == "parquet":
        return
    shard = folder / "00000"
    shard.mkdir()
    for row in rows:
        about = {name: value for name, value in row.items() if name != "jpg"}
        (shard / f"{row['key']}.jpg").write_bytes(row["jpg"])
        (shard / f"{row['key']}.txt").write_text(row["caption"])
        (shard / f"{row['key']}.json").write_text(json.dumps(about))
    if output_format == "webdataset":
        with tarfile.open(folder / "00000.tar", "w") as tar:
            for path in sorted(shard.iterdir()):
                tar.add(path, path.name)
        shutil.rmtree(shard)
