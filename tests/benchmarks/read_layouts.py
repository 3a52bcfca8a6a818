"""Pictures a second from each layout to RGB pixels, in one process without Ray, against a library's plainest loop.

    python -m tests.benchmarks.read_layouts [--rows 2000] [--rounds 5] [--side 256] [--files 1000000]

The same JPEGs and captions are written in each layout. Ours reads them as a job's tasks do: the layout is found, rows
become raw rows, pictures are decoded with all checks. The plainest loop makes the same pixels: Pillow over files,
pyarrow over batches, `tarfile` over members. `datasets` and `webdataset` take part where they are installed. Readers
take turns; all read from the page cache. Goal: at least 0.9 of each loop.

And how long a process takes to say what lies in folders of `--files` pictures and texts, and its peak of memory. Goal:
a million in 60 s and 1 GiB.
"""

import csv
import importlib.util
import io
import multiprocessing
import os
import pathlib
import resource
import tarfile
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from helpers.config import PreprocessingConfig
from helpers.production.readers import detect
from helpers.raw import images, inputs
from tests.benchmarks import record

SHARD = 500  # pictures of a file or folder


def draw(side):
    """A JPEG of smooth noise: as large as a photograph's."""
    random = np.random.default_rng(0)
    small = random.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    while True:
        picture = Image.fromarray(np.roll(small, random.integers(side), axis=0)).resize((side, side), Image.BICUBIC)
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=90)
        yield data.getvalue()


def write_layouts(root, num_rows, side):
    """{layout: its folder} with the same pictures."""
    pictures = [data for data, _ in zip(draw(side), range(num_rows), strict=False)]
    for start in range(0, num_rows, SHARD):
        some = {f"{start + n:06d}": data for n, data in enumerate(pictures[start : start + SHARD])}
        captions = {key: f"picture {key}" for key in some}
        columns = {"image": list(some.values()), "text": list(captions.values())}
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        struct = pa.array([{"bytes": data, "path": None} for data in some.values()], kind)
        for name in ("parquet", "arrow", "webdataset", f"files/{start:06d}", f"table/{start:06d}"):
            (root / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), root / f"parquet/{start}.parquet", row_group_size=100)
        rows = pa.table({**columns, "image": struct})
        with (
            pa.OSFile(str(root / f"arrow/{start}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, rows.schema) as stream,
        ):
            stream.write_table(rows, max_chunksize=100)
        with tarfile.open(root / f"webdataset/{start}.tar", "w") as tar:
            for key, data in some.items():
                for end, content in (("jpg", data), ("txt", captions[key].encode())):
                    member = tarfile.TarInfo(f"{key}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        for name in ("files", "table"):
            for key, data in some.items():
                (root / name / f"{start:06d}" / f"{key}.jpg").write_bytes(data)
        for key, text in captions.items():
            (root / f"files/{start:06d}/{key}.txt").write_text(text)
        lines = [("file_name", "text"), *((f"{key}.jpg", text) for key, text in captions.items())]
        with open(root / f"table/{start:06d}/metadata.csv", "w", newline="") as file:
            csv.writer(file).writerows(lines)
    return {name: root / name for name in ("parquet", "arrow", "webdataset", "files", "table")}


# ---- readers: each yields (pixels, caption)


def ours(folder):
    found = detect.look(PreprocessingConfig(storage=f"{folder}-storage", input_uri=str(folder)))
    config = found.config
    for path in found.paths:
        for rows in inputs.stream_file(path, inputs.used_columns(config), inputs.reader(config)):
            raw = inputs.to_raw_rows(rows, config)
            for data, caption in zip(raw["image"].to_pylist(), raw["caption"].to_pylist(), strict=True):
                yield np.asarray(images.decode(data)), caption


def pixels(file):
    return np.asarray(Image.open(file).convert("RGB"))


def parquet_loop(folder):
    for path in sorted(folder.iterdir()):
        for batch in pq.ParquetFile(path).iter_batches(batch_size=64):
            for data, caption in zip(batch["image"], batch["text"], strict=True):
                yield pixels(io.BytesIO(data.as_py())), caption.as_py()


def arrow_loop(folder):
    for path in sorted(folder.iterdir()):
        for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
            for picture, caption in zip(batch["image"], batch["text"], strict=True):
                yield pixels(io.BytesIO(picture["bytes"].as_py())), caption.as_py()


def tar_loop(folder):
    for path in sorted(folder.iterdir()):
        with tarfile.open(path) as tar:
            for member in tar:
                data = tar.extractfile(member).read()
                if member.name.endswith(".jpg"):
                    picture = pixels(io.BytesIO(data))
                else:
                    yield picture, data.decode()


def files_loop(folder):
    for path in sorted(folder.glob("*/*.jpg")):
        yield pixels(path), path.with_suffix(".txt").read_text()


def table_loop(folder):
    for path in sorted(folder.glob("*/metadata.csv")):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                yield pixels(path.parent / row["file_name"]), row["text"]


def datasets_loop(kind, folder):
    import datasets

    files = [str(path) for path in sorted(folder.iterdir())]
    rows = datasets.load_dataset(kind, data_files=files, split="train", cache_dir=f"{folder}-cache")
    for row in rows.cast_column("image", datasets.Image()):
        yield np.asarray(row["image"].convert("RGB")), row["text"]


def webdataset_loop(folder):
    import webdataset

    urls = [str(path) for path in sorted(folder.iterdir())]
    yield from webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("jpg", "txt")


LOOPS = {
    "parquet": {"pyarrow": parquet_loop},
    "arrow": {"pyarrow": arrow_loop},
    "webdataset": {"tarfile": tar_loop},
    "files": {"Pillow": files_loop},
    "table": {"Pillow": table_loop},
}
if importlib.util.find_spec("datasets"):
    LOOPS["parquet"]["datasets"] = lambda folder: datasets_loop("parquet", folder)
if importlib.util.find_spec("webdataset"):
    LOOPS["webdataset"]["webdataset"] = webdataset_loop


def rate(read, folder):
    """Pictures a second, from the first call to the last picture, and a checksum of all pixels and captions."""
    started, count, total = time.perf_counter(), 0, 0
    for picture, caption in read(folder):
        count += 1
        total += int(picture[::16, ::16].sum()) + len(caption)
    return count / (time.perf_counter() - started), (count, total)


def write_many(root, num_files):
    """Pictures with a text beside each, in folders of 10,000 files; links to one picture and one text each."""
    data = next(draw(64))
    for start in range(0, num_files // 2, 5000):
        folder = root / f"{start:09d}"
        folder.mkdir(parents=True)
        (folder / "0.jpg").write_bytes(data)
        (folder / "0.txt").write_text("a picture")
        for number, end in ((n, end) for n in range(1, min(5000, num_files // 2 - start)) for end in ("jpg", "txt")):
            os.link(folder / f"0.{end}", folder / f"{number}.{end}")


def look_at(folder):
    """`(files read, seconds, MiB at most)` of `detect.look`."""
    started = time.perf_counter()
    found = detect.look(PreprocessingConfig(storage=f"{folder}-storage", input_uri=str(folder)))
    seconds = time.perf_counter() - started
    return found.counts["read"], seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main():
    given = record.options(__doc__, rows=2000, rounds=5, side=256, files=1_000_000)
    with tempfile.TemporaryDirectory() as root:
        folders, shown = write_layouts(pathlib.Path(root), given.rows, given.side), {}
        for name, loops in LOOPS.items():
            readers, seen = {"ours": ours, **loops}, {}

            def measure(number, read, label):
                found, seen[label] = rate(read, folders[name])  # noqa: B023
                return found

            measures = {
                label: lambda number, read=read, label=label: measure(number, read, label)  # noqa: B023
                for label, read in readers.items()
            }
            rates = record.in_turns(given.rounds, measures)
            assert len(set(seen.values())) == 1 and seen["ours"][0] == given.rows, seen  # the same pixels and captions
            for label in loops:
                shown[f"{name}, against {label}"] = record.compare(rates, "ours", label)[1]
    with tempfile.TemporaryDirectory() as root, multiprocessing.get_context("spawn").Pool(1) as pool:
        write_many(pathlib.Path(root, "many"), given.files)
        read, seconds, most = pool.apply(look_at, (pathlib.Path(root, "many"),))
        shown[f"what lies in folders of {read:,} files"] = f"{seconds:.1f} s, {most:,.0f} MiB"
    record.write("read_layouts", shown)


if __name__ == "__main__":
    main()
