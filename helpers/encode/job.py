"""The commit protocol of a preprocessing job.

The input is divided into segments of whole files. A segment is committed when its entry `segments/{index}.json` exists.
Files without such an entry were left by a killed job, and are deleted. When all segments are committed, `manifest.json`
is made of their entries. A job that is run again does the missing segments; a finished job does nothing. The entries
are kept after the job has finished, so that a damaged manifest can be made again from them. If an entry is damaged too,
its segment is encoded again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import ray

from .. import cluster, storage
from ..config import PreprocessingConfig, refuse_change
from ..latents.manifest import SCHEMA_VERSION, Manifest, add_up, read_manifest, read_segments, write_manifest
from ..notebook import keep_executed_notebook, printable, with_interrupt_hint
from ..raw import inputs

ROWS_PER_SEGMENT = 200_000  # per encoder: half an hour of an A10G at 256 pixels, 2.5 hours at 256 and 512 (est.)
STOPPED = "Stopped: {:,} of {:,} rows are encoded and kept. Running this cell again encodes the others."
SEGMENTS, JOB = "segments", "job.json"  # the folder of an unfinished job's entries, and the job's description in it
# Entries of a report of `stages.write_latents`, by how they are added up.
LISTS, COUNTS = ("files", "rejects", "calls"), ("rejected", "noted", "buckets")
SUMS = ("written", "bytes", "transform_seconds", "encode_seconds", "write_seconds")
FILE_NAME = re.compile(r"\d{6,}-[0-9a-f]{12}\.parquet")  # files that a job writes, and deletes if not committed


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive input files that are committed together.

    `limit`: the maximum number of their rows; None: all. `unreadable`: files of the input that cannot be read. The last
    segment lists all of them.
    """

    index: int
    paths: list[str]
    rows: int
    limit: int | None = None
    unreadable: list[str] = dataclasses.field(default_factory=list)


def plan_segments(paths: list[str], config, rows_per_segment: int = ROWS_PER_SEGMENT) -> list[Segment]:
    """The files in segments of about `rows_per_segment` rows, up to `config.limit` rows in all.

    The segments depend only on the files' row counts. Raises ValueError if there are no rows.
    """
    segments, sources, rows, unreadable = [], [], 0, []
    for path, taken, is_cut in inputs.rows_to_read(paths, config):
        if taken is None:
            print(printable(f"{path} cannot be read, and is left out."))
            unreadable.append(inputs.name_of(path, config))
        if not taken:
            continue
        sources.append(path)
        rows += taken
        if rows >= rows_per_segment or is_cut:
            # Set a limit only where it ends inside a file, because reading and converting are then two tasks.
            segments.append(Segment(len(segments), sources, rows, rows if is_cut else None))
            sources, rows = [], 0
    if sources:
        segments.append(Segment(len(segments), sources, rows))
    if not segments:
        raise ValueError(
            f"The input holds no rows ({len(paths)} files, {len(unreadable)} of which cannot be read; the first is "
            f"{paths[0]}): give other data."
        )
    segments[-1].unreadable.extend(unreadable)
    return segments


def finished_manifest(latents_uri: str) -> Manifest | None:
    """The manifest of a finished job; None if it or the list of files is missing or damaged, and has to be made."""
    with contextlib.suppress(FileNotFoundError, storage.DamagedFile):
        read_segments(latents_uri)
        return read_manifest(latents_uri)
    return None


def begun_with(latents_uri: str) -> dict[str, Any] | None:
    """`Job.parameters` of the job at `latents_uri`, finished or not; None if there is none."""
    if finished := finished_manifest(latents_uri):
        return finished.job
    job_uri = storage.join(latents_uri, SEGMENTS, JOB)
    remedy = f"give another latents_uri, or delete {latents_uri} and encode the data again"
    if not storage.exists(job_uri):
        return None
    begun = storage.read_json(job_uri, remedy)["parameters"]
    check_begun(latents_uri, begun, {"schema_version": SCHEMA_VERSION}, ["schema_version"])
    return begun


def check_begun(latents_uri: str, begun: dict | None, now: dict, names: Iterable[str] | None = None) -> None:
    """Raises ValueError naming the first parameter that differs from those of a job. `names`: to compare; None: all."""
    what, remedy = f"latents_uri={latents_uri!r}", "give another latents_uri, or delete that folder"
    refuse_change(what, begun or now, now, remedy, names)


Pipeline = Callable[[Segment], ray.data.Dataset]  # a segment -> a dataset of its write stage's reports


@dataclasses.dataclass(eq=False)
class Job:
    """A preprocessing job: the segments of its input, which of them are committed, and the manifest at the end.

    Args:
        config: the job's parameters with the commits of its models (`prepare.prepare_job`). The notebook builds the
            pipeline from it.
        parameters: those that fix the output; a rerun must have the same ones.
        description: the encoder's part of the manifest (`prepare.describe_encoder`).
        plan: returns the segments (`plan_segments`). It is called once per job, because it reads the footers of the
            whole input; a rerun reads the segments from `segments/job.json`.

    Raises ValueError if `config.latents_uri` holds other files, or data that was made with other parameters.
    """

    config: PreprocessingConfig
    parameters: dict
    description: dict
    plan: Callable[[], list[Segment]]
    guard = None  # of the current `run`

    def __post_init__(self):
        parameters = {"schema_version": SCHEMA_VERSION, **self.parameters, "encoder": self.description["encoder"]}
        self.parameters = json.loads(json.dumps(parameters))  # tuples become lists, as in the stored parameters
        self.segments = self.known_segments() or self.plan()

    def uri(self, *parts: str) -> str:
        return storage.join(self.config.latents_uri, *parts)

    def known_segments(self) -> list[Segment]:
        """The segments that an earlier run planned; [] without one.

        Raises ValueError if the folder holds other files, or data that was made with other parameters.
        """
        latents_uri = self.config.latents_uri
        begun = begun_with(latents_uri)
        check_begun(latents_uri, begun, self.parameters)
        if storage.exists(self.uri(SEGMENTS, JOB)):
            return [Segment(**segment) for segment in storage.read_json(self.uri(SEGMENTS, JOB))["segments"]]
        if not begun and (files := self.written_files()):
            raise ValueError(
                f"latents_uri={latents_uri!r} holds files that do not belong to an unfinished job ({files[0]}): "
                "give another latents_uri, or delete them."
            )
        return []

    def save(self) -> None:
        """Write the segments and parameters, which a rerun reads."""
        segments = [dataclasses.asdict(segment) for segment in self.segments]
        storage.write_json(self.uri(SEGMENTS, JOB), {"parameters": self.parameters, "segments": segments})

    def written_files(self) -> list[str]:
        """All files in `data/` and `rejects/`."""
        return storage.list_files(self.uri("data")) + storage.list_files(self.uri("rejects"))

    def committed(self) -> dict[int, dict]:
        """{index: entry} of the committed segments, in order. Damaged entries are deleted: `run` redoes them."""
        uris = [uri for uri in storage.list_files(self.uri(SEGMENTS), ".json") if storage.name(uri) != JOB]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # object stores are slow to answer
            entries = filter(None, pool.map(read_entry, uris))
            return {entry["index"]: entry for entry in sorted(entries, key=lambda entry: entry["index"])}

    def pending(self) -> list[Segment]:
        """The segments that are not committed."""
        done = self.committed()
        return [segment for segment in self.segments if segment.index not in done]

    @property
    def rows_per_file(self) -> int:
        """Rows per call of the write stage, which writes one file.

        The number grows with the number of shapes, so that each shape fills its row groups. With equally frequent
        shapes and 2% of the rows held out, row groups hold at least 48 of at most 64 rows on average.
        """
        return 1024 * -(-sum(spec.resolution is not None for spec in self.description["columns"]) // 2)

    def write_arguments(self, segment: Segment) -> dict[str, Any]:
        """Arguments of `stages.write_latents` besides the rows."""
        return {
            "latents_uri": self.config.latents_uri,
            "segment_index": segment.index,
            "columns": self.description["columns"],
            "validation_share": self.parameters["validation_share"],
        }

    def run(
        self,
        pipeline: Pipeline,
        progress: Callable[[int, int], None] | None = None,
        guard: contextlib.AbstractContextManager | None = None,
    ) -> Manifest:
        """Run the missing segments, one at a time; returns the manifest.

        `pipeline(segment)`: a lazy dataset, which this job iterates over. `progress(rows, of_rows)`: called as files
        are written. `guard`: entered for the run; its `check()` is called before files are deleted or committed, and
        raises if another driver does this job (`production.lease.hold`). An interrupted segment's files are deleted.
        Raises RuntimeError if a segment failed for good.
        """
        with guard or contextlib.nullcontext() as self.guard:
            keep_executed_notebook(self.config.latents_uri)
            if manifest := finished_manifest(self.config.latents_uri):
                print(f"Nothing to do: all {manifest.read:,} rows are encoded at {self.config.latents_uri}")
                return manifest
            self.segments = self.known_segments() or self.segments  # another driver may have worked on it since
            self.save()
            self.delete_uncommitted()
            total, pending = sum(segment.rows for segment in self.segments), self.pending()
            done = total - sum(segment.rows for segment in pending)
            progress = progress or (lambda rows, of_rows: None)
            progress(done, total)
            for segment in pending:
                failed = f"The same command resumes the job, whose segment {segment.index} failed"
                stopped = functools.partial(STOPPED.format, done, total)
                with cluster.one_line_error(failed, OSError), with_interrupt_hint(stopped):
                    self.run_segment(pipeline, segment, lambda rows, done=done: progress(done + rows, total))
                done += segment.rows
            return self.finish()

    def run_segment(self, pipeline: Pipeline, segment: Segment, progress: Callable[[int], None]) -> None:
        """Run a segment and commit it; retry up to `config.max_failures` times if a node, actor or worker is lost.

        Ray retries the pipeline's tasks and restarts its actors. Ray gives up in two cases: a lost block cannot be
        recomputed, or a reading task has used up its retries (`inputs.RETRIES`). In both cases the segment is retried.
        """
        for failures in itertools.count(1):
            try:
                entry = self.collect(pipeline(segment), segment, progress)
                self.check_guard()
                storage.write_json(self.uri(SEGMENTS, f"{segment.index:06d}.json"), entry)
                return
            except BaseException as error:  # an interrupted cell (KeyboardInterrupt) too
                with contextlib.suppress(OSError):  # it cannot be reached
                    while self.delete_uncommitted():
                        time.sleep(0.5)  # cancelled tasks end a moment later, and may write until then
                if 0 <= self.config.max_failures < failures or not cluster.was_lost(error):
                    raise
                reason = cluster.summarize_error(str(error))
                print(f"Segment {segment.index} is restarted (failure {failures}): {reason}")

    def collect(self, reports: ray.data.Dataset, segment: Segment, progress: Callable[[int], None]) -> dict:
        """Run a segment's pipeline; returns the segment's entry, the sum of its write tasks' reports.

        Raises RuntimeError if rows are missing and the job has no row filter, or if more came out than were read.
        """
        started, tables, rows = time.perf_counter(), [], 0
        # Closed explicitly, because an interrupt must stop the tasks before their files are deleted.
        with contextlib.closing(iter(reports.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
            for batch in batches:
                tables.append(batch)
                rows += sum(batch["rows"].to_pylist())
                progress(rows)
        entry = segment_entry(segment, tables) | {"seconds": time.perf_counter() - started}
        if entry["filtered"] < 0 or (entry["filtered"] and not self.parameters.get("row_filter")):
            raise RuntimeError(
                f"Segment {entry['index']}: {entry['read']} rows read, {entry['written']} written and "
                f"{sum(entry['rejected'].values())} rejected; the rest is unaccounted for, so nothing was committed."
            )
        return entry

    def check_guard(self) -> None:
        if self.guard:
            self.guard.check()

    def delete_uncommitted(self) -> int:
        """Delete this job's files that belong to no committed segment; returns how many."""
        self.check_guard()
        entries = self.committed().values()
        kept = {name for entry in entries for name in [*(file["name"] for file in entry["files"]), *entry["rejects"]]}
        names = {uri: storage.name(uri) for uri in self.written_files()}
        left = [uri for uri, name in names.items() if name not in kept and FILE_NAME.fullmatch(name)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:  # object stores are slow to answer
            list(pool.map(storage.delete, left))
        return len(left)

    def finish(self) -> Manifest:
        """Write the manifest, which marks the job as finished. Raises ValueError if no row can be used."""
        self.delete_uncommitted()
        entries = list(self.committed().values())
        manifest = Manifest.of(
            entries,
            **self.description,
            resolutions=list(self.parameters["resolutions"]),
            id_type=str(pa.string()),
            job=self.parameters,
        )
        check_rows(manifest, self.config, f"delete {self.config.latents_uri} or give another latents_uri")
        write_manifest(self.config.latents_uri, manifest, entries)
        return manifest


def check_rows(manifest: Manifest, config: PreprocessingConfig, remedy: str) -> None:
    """Raises ValueError with the reasons if no row can be used. `remedy`: what to do after they are mended."""
    if not manifest.written:
        reasons = [f"{count:,} rejected: {reason}" for reason, count in manifest.rejected.items()]
        if manifest.filtered:
            reasons.append(f"{manifest.filtered:,} left out by row_filter={config.row_filter!r}")
        raise ValueError(
            f"No row of input_uri={config.data_uri!r} can be used, of {manifest.read:,} that were read "
            f"({'; '.join(reasons) or 'no file with rows'}): change what these reasons name, then {remedy}."
        )


def read_entry(uri: str) -> dict | None:
    """A segment's entry; None for a damaged one, which is deleted."""
    return storage.read_json(uri, "its segment is encoded again", lambda said: print(said) or storage.delete(uri))


def segment_entry(segment: Segment, tables: Iterable[pa.Table]) -> dict:
    """A segment's entry, the sum of its write tasks' reports. `tables`: what `stages.write_latents` returned.

    `filtered` counts the rows that were neither written nor rejected: read = written + sum(rejected) + filtered.
    `transform_seconds`, `encode_seconds` and `write_seconds` are sums over each stage's workers. `encoding_seconds` is
    the time from the first encoder call to the last. The caller sets `seconds`, the time from start to end.
    """
    reports = [json.loads(text) for table in tables for text in table["report"].to_pylist()]
    total = {name: [item for report in reports for item in report[name]] for name in LISTS}
    total |= {name: add_up(report[name] for report in reports) for name in COUNTS}
    total |= {name: sum(report[name] for report in reports) for name in SUMS}
    calls = total.pop("calls")
    return {
        "index": segment.index,
        "sources": segment.paths,
        "limit": segment.limit,
        "unreadable": segment.unreadable,
        "read": segment.rows,
        "filtered": segment.rows - total["written"] - sum(total["rejected"].values()),
        **total,
        "seconds": 0.0,
        "encoders": len({call["encoder"] for call in calls}),
        "encoding_seconds": max(c["ended"] for c in calls) - min(c["started"] for c in calls) if calls else 0.0,
    }
