"""The commit protocol of a preprocessing job.

The input is cut into segments of whole files. A segment is committed when its entry `segments/{index}.json` is there;
before that it never happened, whatever files a killed job left. When all segments are committed their entries become
`manifest.json`, which is written last. Running a job again does what is missing; running a finished one does nothing.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import statistics
import time
import zlib

from . import schema, storage
from .data_io import inputs

ROWS_PER_SEGMENT = 200_000  # for each encoder: some twenty minutes of an A10G at 256 pixels
TIMELINE = 60  # points a segment in the report
JOB, PLAN = "job.json", "plan.json"  # beside the segments' entries, while a job is not finished
FILE_NAME = re.compile(
    r"\d{6}-[0-9a-f]{12}\.parquet"
)  # what a job calls its files, and deletes of an uncommitted segment


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive input files that are committed together. `limit`: rows to take of them at most, None for all."""

    index: int
    paths: list
    rows: int
    limit: int | None = None


def plan_segments(paths, config, rows_per_segment=ROWS_PER_SEGMENT):
    """Cut files into segments of about `rows_per_segment` rows, up to `config.limit` rows in all.

    A pure function of the files' row counts. Raises ValueError when there is no row at all.
    """
    segments, batch, rows, left = [], [], 0, config.limit
    for start in range(0, len(paths), 256):  # files are counted a group at a time: a limit stops early
        group = paths[start : start + 256]
        for path, num_rows in zip(group, inputs.count_rows(group, config), strict=True):
            taken = num_rows if left is None else min(num_rows, left)
            if taken == 0:
                continue
            batch.append(path)
            rows += taken
            left = None if left is None else left - taken
            if rows >= rows_per_segment or left == 0:
                # A limit only where a file is cut: it would keep a filter from being pushed down into the read.
                segments.append(Segment(len(segments), batch, rows, rows if taken < num_rows else None))
                batch, rows = [], 0
        if left == 0:
            break
    if batch:
        segments.append(Segment(len(segments), batch, rows))
    if not segments:
        raise ValueError(f"The input holds no rows ({len(paths)} files, the first is {paths[0]}): give other data.")
    return segments


class Job:
    """One preprocessing job: the segments of its input, which of them are committed, and the manifest at the end.

    Args:
        latents_uri: where the latents go.
        parameters: what decides the output, for the check that a rerun is the same job.
        description: the encoder's part of the manifest (`encoder.describe`).
        plan: function without arguments that gives the segments (`plan_segments`); it reads the footers of the whole
            input, so it is called once in the life of a job, and a rerun reads what it gave from `segments/plan.json`.
        listing: {path: bytes} of the input, by which a rerun knows it again.
        id_type: Arrow type of the ids.
        dollars_per_hour: price of the machines that the job runs on, for the report.
        num_encoders: how many there should be, for the share of time that they are busy.
    """

    def __init__(
        self, latents_uri, parameters, description, plan, listing, id_type, dollars_per_hour=0.0, num_encoders=1
    ):
        self.latents_uri, self.num_encoders = latents_uri, num_encoders
        self.dollars_per_hour = dollars_per_hour
        self.description = description
        self.id_type = id_type
        files = json.dumps(sorted(listing.items()))
        self.parameters = {**parameters, "encoder": description["encoder"], "input_crc32": zlib.crc32(files.encode())}
        self.check_same()
        if self.finished:
            self.segments = [
                Segment(e["index"], e["sources"], e["read"], e.get("limit"))
                for _, e in sorted(self.committed().items())
            ]
        elif storage.exists(self.uri("segments", PLAN)):
            self.segments = [Segment(**segment) for segment in storage.read_json(self.uri("segments", PLAN))]
        else:
            self.segments = plan()

    def uri(self, *parts):
        return storage.join(self.latents_uri, *parts)

    def check_same(self):
        """Raises ValueError naming a parameter in which the data that is already there differs, or files of something else."""
        earlier_uri = self.uri(schema.MANIFEST) if self.finished else self.uri("segments", JOB)
        if not storage.exists(earlier_uri):
            if found := [*storage.list_files(self.uri("data")), *storage.list_files(self.uri("rejects"))]:
                raise ValueError(
                    f"latents_uri={self.latents_uri!r} holds files that are of no job to go on with ({found[0]}): give another "
                    "latents_uri, or delete them."
                )
            return
        earlier = storage.read_json(earlier_uri)
        earlier = earlier["job"] if self.finished else earlier
        now = json.loads(json.dumps(self.parameters))
        for name, value in now.items():
            if earlier.get(name) != value:
                what = (
                    "the files of the input"
                    if name == "input_crc32"
                    else f"{name}={earlier.get(name)!r}, not {value!r}"
                )
                raise ValueError(
                    f"latents_uri={self.latents_uri!r} holds data that was made with other parameters ({what}): "
                    "give another latents_uri, or delete that folder."
                )

    @property
    def finished(self):
        return storage.exists(self.uri(schema.MANIFEST))

    def committed(self):
        """Entries of the committed segments by index."""
        if self.finished:
            return {entry["index"]: entry for entry in schema.Manifest.read(self.latents_uri).segments}
        entries = [
            uri for uri in storage.list_files(self.uri("segments"), ".json") if storage.name(uri) not in (JOB, PLAN)
        ]
        return {entry["index"]: entry for entry in map(storage.read_json, entries)}

    def pending(self):
        """The segments that are still to be done."""
        done = self.committed()
        return [segment for segment in self.segments if segment.index not in done]

    def run(self, pipeline, progress=None):
        """Do what is missing, a segment at a time, and return the manifest.

        `pipeline(segment)` returns the Ray dataset whose rows are the write stage's reports; taking them runs it.
        `progress(rows, of_rows)` is called as files are written. Whatever interrupts a segment, its files go.
        """
        pending = self.pending()
        if not pending and self.finished:
            manifest = schema.Manifest.read(self.latents_uri)
            print(f"Nothing to do: all {manifest.total('read'):,} rows are encoded at {self.latents_uri}")
            return manifest
        storage.write_json(self.uri("segments", JOB), self.parameters)
        storage.write_json(self.uri("segments", PLAN), [dataclasses.asdict(segment) for segment in self.segments])
        self.delete_uncommitted()
        total = sum(segment.rows for segment in self.segments)
        done = sum(entry["read"] for entry in self.committed().values())
        for segment in pending:
            try:
                entry = self.collect(
                    pipeline(segment), segment, lambda rows, done=done: progress and progress(done + rows, total)
                )
                storage.write_json(self.uri("segments", f"{segment.index:06d}.json"), entry)
            except BaseException as error:  # an interrupted cell (KeyboardInterrupt) too
                # Cancelled tasks end a moment later; what one still writes after this is never read, and goes at the
                # next run.
                try:
                    while self.delete_uncommitted():
                        time.sleep(0.5)
                except OSError as unreachable:
                    error.add_note(
                        f"{self.latents_uri} cannot be reached either; run the job again when it can. ({unreachable})"
                    )
                raise
            done += entry["read"]
        return self.finish()

    def write_arguments(self, segment):
        """What the write stage needs to know of the job and the segment."""
        return {
            "latents_uri": self.latents_uri,
            "segment": segment,
            "shapes": self.description["shapes"],
            "ids": self.id_type,
            "text_precision": self.description["text_precision"],
        }

    def collect(self, reports, segment, progress):
        """Run one segment's pipeline and sum up what its write tasks report into the segment's entry."""
        started = time.time()
        entry = new_entry(segment)
        handled = 0
        # Closed, not left to the garbage collector: an interrupt must stop the tasks before their files are deleted.
        with contextlib.closing(iter(reports.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
            for report in (json.loads(text) for batch in batches for text in batch["report"].to_pylist()):
                handled += report["written"] + sum(report["rejected"].values())
                add_report(entry, report)
                progress(handled)
        entry["filtered"] = entry["read"] - entry["written"] - sum(entry["rejected"].values())
        if entry["filtered"] < 0 or (entry["filtered"] and not self.parameters.get("row_filter")):
            raise RuntimeError(
                f"Segment {segment.index}: {entry['read']} rows read, {entry['written']} written and "
                f"{sum(entry['rejected'].values())} rejected; the rest is unaccounted for, so nothing was committed."
            )
        entry["seconds"] = time.time() - started
        # Of all encoders that there should be: one that got nothing to do was idle.
        entry["timeline"] = timeline(entry.pop("busy"), self.num_encoders, started)
        entry["encoders"] = len(entry["encoders"])
        return entry

    def delete_uncommitted(self):
        """Remove the files of segments that were not committed; returns how many."""
        kept = {
            name
            for entry in self.committed().values()
            for name in [f["name"] for f in entry["files"]] + entry["rejects"]
        }
        found = storage.list_files(self.uri("data")) + storage.list_files(self.uri("rejects"))
        left = [uri for uri in found if storage.name(uri) not in kept and FILE_NAME.fullmatch(storage.name(uri))]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # object stores answer late
            list(pool.map(storage.delete, left))
        return len(left)

    def finish(self):
        """Write the manifest, which makes the job finished, and remove the entries that it replaces."""
        entries = [entry for _, entry in sorted(self.committed().items())]
        self.delete_uncommitted()
        manifest = schema.Manifest(
            **self.description,
            resolutions=list(self.parameters["resolutions"]),
            id_type=str(self.id_type),
            job=json.loads(json.dumps(self.parameters)),
            segments=entries,
            report=report(entries, self.dollars_per_hour),
        )
        # On one line: of billions of rows it has millions of row groups.
        storage.write_text(self.uri(schema.MANIFEST), json.dumps(manifest.to_dict()))
        storage.delete(self.uri("segments"))
        return manifest


def new_entry(segment):
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
        "stages": {"transform": 0.0, "encode": 0.0, "write": 0.0},
        "encoded": None,
        "encoders": [],
        "busy": {},
    }


def add_report(entry, report):
    """Add one write task's accounts to a segment's."""
    entry["files"] += report["files"]
    entry["rejects"] += report["rejects"]
    entry["written"] += report["written"]
    entry["bytes"] += report["bytes"]
    first, last = entry["encoded"] or report["encoded"]
    entry["encoded"] = [min(first, report["encoded"][0]), max(last, report["encoded"][1])]
    entry["encoders"] = sorted({*entry["encoders"], *report["encoders"]})
    for second, (seconds, rows) in report["busy"].items():
        busy = entry["busy"].setdefault(int(second), [0.0, 0])  # JSON's keys are text
        busy[0], busy[1] = busy[0] + seconds, busy[1] + rows
    for column, rows in report.get("at", {}).items():
        entry["at"][column] = entry["at"].get(column, 0) + rows
    for reason, rows in report["rejected"].items():
        entry["rejected"][reason] = entry["rejected"].get(reason, 0) + rows
    for stage, seconds in report["stages"].items():
        entry["stages"][stage] += seconds


def timeline(busy, num_encoders, started):
    """[seconds since the segment's start, share of the encoders' time in use, rows a second], in at most `TIMELINE` pieces.

    `busy`: {second since 1970: [seconds that encoders computed in it, rows]}. The first and the last second, which are no
    whole ones, are left out.
    """
    whole, found = range(min(busy) + 1, max(busy)) if busy else range(0), []
    length = max(1, -(-len(whole) // TIMELINE))
    for start in range(0, len(whole), length):
        part = [busy.get(second, (0.0, 0)) for second in whole[start : start + length]]
        share = sum(used for used, _ in part) / (num_encoders * len(part))
        found.append(
            [round(whole[start] - started, 1), round(share, 4), round(sum(rows for _, rows in part) / len(part), 1)]
        )
    return found


def report(entries, dollars_per_hour=0.0):
    """What a job took, as JSON.

    `bytes` written, rows and images a second; `seconds` from start to end; `stage_seconds`, summed over each stage's
    workers, and `images_per_second_by_stage` of one worker; `encoding_seconds` between the encoders' first batch and their
    last, which leaves out the start of the workers; `timeline`, and of its shares `encoders_busy`, the median, and
    `encoders_busy_mean`; and what a million images cost.
    """
    stages = {stage: sum(entry["stages"][stage] for entry in entries) for stage in ("transform", "encode", "write")}
    seconds, points = sum(entry["seconds"] for entry in entries), []
    written, before = sum(entry["written"] for entry in entries), 0.0
    encoded = sum(entry["read"] - entry["filtered"] for entry in entries)
    for entry in entries:
        points += [[round(before + at, 1), share, rate] for at, share, rate in entry["timeline"]]
        before += entry["seconds"]
    dollars = seconds / 3600 * dollars_per_hour
    return {
        "bytes": sum(entry["bytes"] for entry in entries),
        "stage_seconds": stages,
        "images_per_second_by_stage": {stage: encoded / took for stage, took in stages.items() if took},
        "seconds": seconds,
        "encoding_seconds": sum(entry["encoded"][1] - entry["encoded"][0] for entry in entries if entry["encoded"]),
        "images_per_second": written / seconds if seconds else 0.0,
        "encoders": max((entry["encoders"] for entry in entries), default=0),
        "encoders_busy": statistics.median(share for _, share, _ in points) if points else None,
        "encoders_busy_mean": statistics.mean(share for _, share, _ in points) if points else None,
        "timeline": points,
        "dollars_per_hour": dollars_per_hour,
        "dollars": dollars,
        "dollars_per_million_images": dollars / written * 1e6 if written else 0.0,
    }
