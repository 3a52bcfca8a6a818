"""The commit protocol of a preprocessing job.

The input is divided into segments of whole files. A segment is committed when its entry `segments/{index}.json` exists;
without it, files that a killed job left are ignored. When all segments are committed, their entries become
`manifest.json`, which is written last. Rerunning a job does the missing segments; rerunning a finished job does
nothing.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import re
import statistics
import time
import zlib
from collections.abc import Callable

import pyarrow as pa
import ray

from . import ingest, schema, storage
from .config import least_and_most
from .data_io import inputs
from .runtime import lease

ROWS_PER_SEGMENT = 200_000  # per encoder: half an hour of an A10G at 256 pixels, 2.5 hours at 256 and 512 (est.)
TIMELINE = 60  # points per segment in the report
SEGMENTS, JOB, PLAN = "segments", "job.json", "plan.json"  # the folder of an unfinished job's entries, and files in it
FILE_NAME = re.compile(r"\d{6,}-[0-9a-f]{12}\.parquet")  # files that a job writes, and deletes if not committed
STAGES = ("transform", "encode", "write")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive input files that are committed together. `limit`: the most rows to take from them, None for all."""

    index: int
    paths: list[str]
    rows: int
    limit: int | None = None


def plan_segments(paths: list[str], config, rows_per_segment: int = ROWS_PER_SEGMENT) -> list[Segment]:
    """Divide files into segments of about `rows_per_segment` rows, up to `config.limit` rows in all.

    A pure function of the files' row counts. Raises ValueError if there are no rows.
    """
    segments, mine, rows, left = [], [], 0, config.limit
    for start in range(0, len(paths), 256):  # files are counted in groups, so that a limit stops early
        group = paths[start : start + 256]
        for path, num_rows in zip(group, inputs.count_rows(group, config), strict=True):
            taken = num_rows if left is None else min(num_rows, left)
            if taken == 0:
                continue
            mine.append(path)
            rows += taken
            left = None if left is None else left - taken
            if rows >= rows_per_segment or left == 0:
                # Set a limit only where it ends inside a file, because it prevents filter pushdown into the read.
                segments.append(Segment(len(segments), mine, rows, rows if taken < num_rows else None))
                mine, rows = [], 0
        if left == 0:
            break
    if mine:
        segments.append(Segment(len(segments), mine, rows))
    if not segments:
        raise ValueError(f"The input holds no rows ({len(paths)} files, the first is {paths[0]}): give other data.")
    return segments


class Job:
    """One preprocessing job: the segments of its input, which of them are committed, and the manifest at the end.

    Args:
        latents_uri: where the latents go.
        parameters: those that affect the output, to check that a rerun is the same job.
        description: the encoder's part of the manifest (`preprocess.describe`).
        plan: returns the segments (`plan_segments`). It reads the footers of the whole input, so it is called once per
            job; a rerun reads its result from `segments/plan.json`.
        listing: {path: bytes} of the input, so that a rerun detects changed input.
        id_type: Arrow type of the stored ids.
        dollars_per_hour: price of the job's machines, for the report.
        num_encoders: the expected number, or (least, most), to compute their utilization.
        max_failures: how often a segment is restarted after losing a node, an actor or a worker.

    Raises ValueError if `latents_uri` holds something else.
    """

    def __init__(
        self,
        latents_uri: str,
        parameters: dict,
        description: dict,
        plan: Callable[[], list[Segment]],
        listing: dict[str, int],
        id_type: pa.DataType,
        dollars_per_hour: float = 0.0,
        num_encoders: int | tuple[int, int] = 1,
        max_failures: int = 3,
    ):
        self.latents_uri, self.description, self.id_type = latents_uri, description, id_type
        self.dollars_per_hour, self.num_encoders, self.max_failures = dollars_per_hour, num_encoders, max_failures
        input_crc32 = zlib.crc32(json.dumps(sorted(listing.items())).encode())
        parameters = {**parameters, "encoder": description["encoder"], "input_crc32": input_crc32}
        self.parameters = json.loads(json.dumps(parameters))  # tuples become lists, as in the stored parameters
        self.entries = {}  # what `committed` has read
        self.check_same()
        self.segments = self.known_segments() or plan()

    def uri(self, *parts: str) -> str:
        return storage.join(self.latents_uri, *parts)

    @property
    def finished(self) -> bool:
        return storage.exists(self.uri(schema.MANIFEST))

    def known_segments(self) -> list[Segment]:
        """The segments planned by an earlier run; [] without one."""
        if self.finished:
            return [Segment(e["index"], e["sources"], e["read"], e.get("limit")) for e in self.committed().values()]
        if storage.exists(self.uri(SEGMENTS, PLAN)):
            return [Segment(**segment) for segment in storage.read_json(self.uri(SEGMENTS, PLAN))]
        return []

    def check_same(self) -> None:
        """Raises ValueError if the folder holds other files, or was made with other parameters, naming the first."""
        if self.finished:
            earlier = ingest.read_manifest(self.latents_uri).job
        elif storage.exists(self.uri(SEGMENTS, JOB)):
            earlier = storage.read_json(self.uri(SEGMENTS, JOB))
        elif files := self.written_files():
            raise ValueError(
                f"latents_uri={self.latents_uri!r} holds files that do not belong to an unfinished job ({files[0]}): "
                "give another latents_uri, or delete them."
            )
        else:
            return
        for name, value in self.parameters.items():
            if (before := earlier.get(name)) != value:
                what = f"{name}={before!r}, not {value!r}"
                raise ValueError(
                    f"latents_uri={self.latents_uri!r} holds data that was made with other parameters "
                    f"({'the files of the input' if name == 'input_crc32' else what}): give another latents_uri, or "
                    "delete that folder."
                )

    def written_files(self) -> list[str]:
        """All files in `data/` and `rejects/`."""
        return storage.list_files(self.uri("data")) + storage.list_files(self.uri("rejects"))

    def committed(self) -> dict[int, dict]:
        """Entries of the committed segments by index, in order."""
        if self.finished:
            entries = ingest.read_manifest(self.latents_uri).segments
        else:
            uris = storage.list_files(self.uri(SEGMENTS), ".json")
            new = [uri for uri in uris if uri not in self.entries and storage.name(uri) not in (JOB, PLAN)]
            with concurrent.futures.ThreadPoolExecutor(16) as pool:  # object stores are slow to answer
                self.entries |= zip(new, pool.map(storage.read_json, new), strict=True)
            entries = [self.entries[uri] for uri in uris if uri in self.entries]
        return {entry["index"]: entry for entry in sorted(entries, key=lambda entry: entry["index"])}

    def pending(self) -> list[Segment]:
        """The segments that are still to do."""
        done = self.committed()
        return [segment for segment in self.segments if segment.index not in done]

    @property
    def rows_per_file(self) -> int:
        """Rows that the write stage takes at a time: more shapes need more rows to fill row groups of each shape.

        With a fiftieth held out and equally many pictures of each shape, a row group has at least 48 rows on average.
        """
        return 1024 * -(-sum(spec.resolution is not None for spec in self.description["columns"]) // 2)

    def write_arguments(self, segment: Segment) -> dict:
        """Arguments of `preprocess.write_latents`."""
        columns = self.description["columns"]
        share = self.parameters.get("validation_share", 0.0)
        where = {"latents_uri": self.latents_uri, "segment": segment}
        return {**where, "columns": columns, "id_type": self.id_type, "validation_share": share}

    def run(
        self,
        pipeline: Callable[[Segment], ray.data.Dataset],
        progress: Callable[[int, int], None] | None = None,
    ) -> schema.Manifest:
        """Run the missing segments, one at a time, and return the manifest.

        `pipeline(segment)` returns a dataset of the write stage's reports; iterating over it runs the pipeline.
        `progress(rows, of_rows)` is called as files are written. An interrupted segment's files are deleted. Raises
        RuntimeError if another driver is running this job (`runtime.lease`).
        """
        if self.finished:
            manifest = ingest.read_manifest(self.latents_uri)
            print(f"Nothing to do: all {manifest.total('read'):,} rows are encoded at {self.latents_uri}")
            return manifest
        with lease.hold(self.latents_uri, f"latents_uri={self.latents_uri!r}") as self.lease:
            self.check_same()  # another driver may have worked on it since this job was planned
            self.segments = self.known_segments() or self.segments
            storage.write_json(self.uri(SEGMENTS, JOB), self.parameters)
            storage.write_json(self.uri(SEGMENTS, PLAN), [dataclasses.asdict(segment) for segment in self.segments])
            self.delete_uncommitted()
            total = sum(segment.rows for segment in self.segments)
            done = sum(entry["read"] for entry in self.committed().values())
            for segment in self.pending():
                report = functools.partial(lambda done, rows: progress and progress(done + rows, total), done)
                done += self.encode(pipeline, segment, report)["read"]
            return self.finish()

    def encode(
        self, pipeline: Callable[[Segment], ray.data.Dataset], segment: Segment, progress: Callable[[int], None]
    ) -> dict:
        """Run a segment and commit it; retry up to `max_failures` times if a node, an actor or a worker is lost.

        Ray itself retries the pipeline's tasks and replaces its actors, but not its internal actors that read Parquet
        footers, nor blocks that it cannot recompute. Returns the segment's entry.
        """
        from .runtime import fault_tolerance  # not at the top: see `preprocess`

        for failures in itertools.count(1):
            try:
                with self.cleaned_up():
                    entry = self.collect(pipeline(segment), segment, progress)
                    self.lease.check()
                    storage.write_json(self.uri(SEGMENTS, f"{segment.index:06d}.json"), entry)
                return entry
            except ray.exceptions.RayError as error:
                if failures > self.max_failures or not fault_tolerance.was_lost(error):
                    raise
                what = fault_tolerance.summarize_error(str(error))
                which = f"failure {failures} of max_failures={self.max_failures}"
                print(f"Segment {segment.index} is restarted ({which}): {what}")

    @contextlib.contextmanager
    def cleaned_up(self):
        """Delete a segment's files if anything interrupts it."""
        try:
            yield
        except BaseException as error:  # an interrupted cell (KeyboardInterrupt) too
            try:
                # Cancelled tasks end a moment later. Files that they write after this are never read; the next run
                # deletes them.
                while self.delete_uncommitted():
                    time.sleep(0.5)
            except OSError as unreachable:
                error.add_note(
                    f"{self.latents_uri} cannot be reached either; run the job again when it can. ({unreachable})"
                )
            raise

    def collect(self, reports: ray.data.Dataset, segment: Segment, progress: Callable[[int], None]) -> dict:
        """Run one segment's pipeline and return the segment's entry, the sum of its write tasks' reports."""
        started, calls, entry = time.time(), [], new_entry(segment)
        # Closed explicitly, because an interrupt must stop the tasks before their files are deleted.
        with contextlib.closing(iter(reports.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
            for text in (text for batch in batches for text in batch["report"].to_pylist()):
                report = json.loads(text)
                add_report(entry, report)
                calls += report["calls"]
                progress(entry["written"] + sum(entry["rejected"].values()))
        self.check_counts(entry)
        entry["seconds"] = time.time() - started
        entry["encoders"] = len({call["encoder"] for call in calls})
        if calls:
            entry["encoded"] = [min(call["started"] for call in calls), max(call["ended"] for call in calls)]
        entry["timeline"] = timeline(busy_seconds(calls), self.num_encoders, started)
        return entry

    def check_counts(self, entry: dict) -> None:
        """Set the count of filtered rows. Raises RuntimeError if rows are missing that no filter can have dropped."""
        rejected = sum(entry["rejected"].values())
        entry["filtered"] = entry["read"] - entry["written"] - rejected
        if entry["filtered"] < 0 or (entry["filtered"] and not self.parameters.get("row_filter")):
            raise RuntimeError(
                f"Segment {entry['index']}: {entry['read']} rows read, {entry['written']} written and {rejected} "
                "rejected; the rest is unaccounted for, so nothing was committed."
            )

    def delete_uncommitted(self) -> int:
        """Delete this job's files that belong to no committed segment; returns how many."""
        self.lease.check()
        kept = set()
        for entry in self.committed().values():
            kept.update(file["name"] for file in entry["files"])
            kept.update(entry["rejects"])
        names = {uri: storage.name(uri) for uri in self.written_files()}
        left = [uri for uri, name in names.items() if name not in kept and FILE_NAME.fullmatch(name)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # object stores are slow to answer
            list(pool.map(storage.delete, left))
        return len(left)

    def finish(self) -> schema.Manifest:
        """Write the manifest, which marks the job as finished, and delete the entries that it replaces."""
        self.delete_uncommitted()
        entries = list(self.committed().values())
        manifest = schema.Manifest(
            **self.description,
            resolutions=list(self.parameters["resolutions"]),
            id_type=str(self.id_type),
            job=self.parameters,
            segments=entries,
            report=summarize(entries, self.dollars_per_hour),
        )
        # On one line: for billions of rows it has millions of row groups.
        storage.write_text(self.uri(schema.MANIFEST), json.dumps(manifest.to_dict()))
        storage.delete(self.uri(SEGMENTS))
        return manifest


def new_entry(segment: Segment) -> dict:
    """A segment's entry before any of its rows is written."""
    return {
        "index": segment.index,
        "sources": segment.paths,
        "limit": segment.limit,
        "files": [],
        "rejects": [],
        "read": segment.rows,
        "written": 0,
        "rejected": {},
        "filtered": 0,
        "bytes": 0,
        "at": {},
        "buckets": {},
        "stages": dict.fromkeys(STAGES, 0.0),
        "encoded": None,
    }


def add_report(entry: dict, report: dict) -> None:
    """Add one write task's report to a segment's entry."""
    for name in ("files", "rejects", "written", "bytes"):
        entry[name] += report[name]
    for name in ("at", "buckets", "rejected", "stages"):
        for key, value in report[name].items():
            entry[name][key] = entry[name].get(key, 0) + value


def busy_seconds(calls: list[dict]) -> dict[int, list[float]]:
    """{Unix time in seconds: [seconds computed by encoders, rows finished, encoders]} of encoder calls.

    An encoder counts from its first call to its last.
    """
    busy, spans = collections.defaultdict(lambda: [0.0, 0, 0]), {}
    for call in calls:
        for second in range(int(call["started"]), int(call["ended"]) + 1):
            busy[second][0] += max(0.0, min(call["ended"], second + 1) - max(call["started"], second))
        busy[int(call["ended"])][1] += call["rows"]
        first, last = spans.get(call["encoder"], (call["started"], call["ended"]))
        spans[call["encoder"]] = min(first, call["started"]), max(last, call["ended"])
    for first, last in spans.values():
        for second in range(int(first), int(last) + 1):
            busy[second][2] += 1
    return dict(busy)


def timeline(busy: dict[int, list[float]], num_encoders: int | tuple[int, int], started: float) -> list[list[float]]:
    """[[seconds since the segment's start, encoder utilization (0 to 1), rows/s, encoders]].

    At most `TIMELINE` points, without the first and the last second, which are incomplete. Utilization is relative to
    the encoders that there should be, so one without work counts as idle; between the least and the most, it is
    relative to those that were present.
    """
    (least, most), points = least_and_most(num_encoders), []
    whole = range(min(busy) + 1, max(busy)) if busy else range(0)
    length = max(1, -(-len(whole) // TIMELINE))
    for start in range(0, len(whole), length):
        part = [busy.get(second, (0.0, 0, 0)) for second in whole[start : start + length]]
        encoders = sum(min(max(number, least), most) for *_, number in part)
        share, rate = sum(used for used, *_ in part) / encoders, sum(rows for _, rows, _ in part) / len(part)
        point = round(whole[start] - started, 1), round(share, 4), round(rate, 1), round(encoders / len(part), 1)
        points.append(list(point))
    return points


def summarize(entries: list[dict], dollars_per_hour: float = 0.0) -> dict:
    """A job's report, as JSON.

    `bytes` written and `images_per_second`; `seconds` from start to end; `stage_seconds`, summed over each stage's
    workers, and `images_per_second_by_stage` of one worker; `encoding_seconds` from the first encoder call to the last,
    without starting the workers; `timeline`, with its median utilization `encoders_busy` and mean `encoders_busy_mean`;
    and the cost of a million images.
    """
    stages = {stage: sum(entry["stages"][stage] for entry in entries) for stage in STAGES}
    seconds, written = (sum(entry[name] for entry in entries) for name in ("seconds", "written"))
    encoded = sum(entry["read"] - entry["filtered"] for entry in entries)
    points, before = [], 0.0
    for entry in entries:
        points += [[round(before + at, 1), *rest] for at, *rest in entry["timeline"]]
        before += entry["seconds"]
    shares = [share for _, share, *_ in points]
    dollars = seconds / 3600 * dollars_per_hour
    return {
        "bytes": sum(entry["bytes"] for entry in entries),
        "stage_seconds": stages,
        "images_per_second_by_stage": {stage: encoded / took for stage, took in stages.items() if took},
        "seconds": seconds,
        "encoding_seconds": sum(entry["encoded"][1] - entry["encoded"][0] for entry in entries if entry["encoded"]),
        "images_per_second": written / seconds if seconds else 0.0,
        "encoders": max((entry["encoders"] for entry in entries), default=0),
        "encoders_busy": statistics.median(shares) if shares else None,
        "encoders_busy_mean": statistics.mean(shares) if shares else None,
        "timeline": points,
        "dollars_per_hour": dollars_per_hour,
        "dollars": dollars,
        "dollars_per_million_images": dollars / written * 1e6 if written else 0.0,
    }
