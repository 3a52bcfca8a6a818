"""A run's folder: its checkpoints, where it resumes, why workers were lost, why it ended. No PyTorch.

Ray's own processes load this module, and PyTorch would cost each of them seconds and 300 MB.

A checkpoint is complete if its `progress.json` is there, and all files that this names have the size that it names. It
is intact if their checksums agree too.
"""

from __future__ import annotations

import contextlib
import re
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray.train
from pyarrow import fs

from .. import storage

if TYPE_CHECKING:
    from ..config import TrainingConfig

# In every checkpoint, written last: {"step", "files": sizes, "checksums", "run": its id}. Deleted from a damaged one.
PROGRESS = "progress.json"
BEST = "best"  # in a run's folder: a copy of its best checkpoint
RESUME = "resume.json"  # in a run's folder: where the current group of workers resumes
ID = "id.json"  # in a run's folder: see `run_id`
ENDED = "ended.json"  # in a run's folder: why its workers ended it
PART_BYTES, CHUNK_BYTES, THREADS = 64 * 2**20, 4 * 2**20, 8  # of a file with a checksum; of a read; that read


# ---- checkpoints


def checkpoint_name(step: int, attempt: int) -> str:
    """A folder name that is unique for each save: a repeated step never writes into an earlier attempt's folder."""
    return f"checkpoint-{step:09d}-{attempt:03d}"


def step_and_attempt(name: str) -> tuple[int, int] | None:
    """The numbers in the name or URI of a checkpoint's folder; None for another folder."""
    found = re.fullmatch(r"checkpoint-(\d{9,})-(\d{3,})", storage.name(name))
    return found and (int(found[1]), int(found[2]))


def step_of_name(name: str) -> int:
    """The step in the name or URI of a checkpoint's folder."""
    return step_and_attempt(name)[0]


def read_progress(checkpoint_uri: str) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises FileNotFoundError, and storage.DamagedFile."""
    shape = {"step": int, "files": dict, "checksums": dict}
    return storage.read_json(storage.join(checkpoint_uri, PROGRESS), "use another checkpoint", shape=shape)


def step_of(checkpoint_uri: str) -> int:
    """Steps done at a checkpoint."""
    return read_progress(checkpoint_uri)["step"]


def list_checkpoints(run_uri: str) -> list[str]:
    """URIs of a run's checkpoint folders, complete or not, newest step first."""
    return sorted(filter(step_and_attempt, storage.list_folders(run_uri)), key=step_and_attempt, reverse=True)


def is_checkpoint(folder: str) -> bool:
    return storage.exists(storage.join(folder, PROGRESS))


def find_corruption(checkpoint_uri: str) -> str | None:
    """Why a checkpoint folder is not complete, in a few words; None if it is.

    `last_sound` also reads the bytes.
    """
    try:
        progress = read_progress(checkpoint_uri)
    except FileNotFoundError:
        return f"it has no {PROGRESS}"
    except storage.DamagedFile:
        return f"its {PROGRESS} is damaged"
    numbers = step_and_attempt(checkpoint_uri)
    if numbers and numbers[0] != progress["step"]:
        return f"its {PROGRESS} says step {progress['step']}"
    sizes = storage.sizes(checkpoint_uri)
    for name, size in progress["files"].items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != size:
            return f"its file {name} has {sizes[name]:,} bytes of {size:,}"
    return None


def sum_part(uri: str, part: int) -> int:
    """CRC-32 of part number `part` of a file: `PART_BYTES` bytes, or what is left."""
    filesystem, path = storage.open_filesystem(uri)
    found, left = 0, PART_BYTES
    with filesystem.open_input_file(path) as file:
        file.seek(part * PART_BYTES)
        while data := file.read(min(CHUNK_BYTES, left)):
            found, left = zlib.crc32(data, found), left - len(data)
    return found


def sum_parts(uri: str, num_bytes: int) -> list[int]:
    """CRC-32 of each part of a file."""
    return [sum_part(uri, part) for part in range(-(-num_bytes // PART_BYTES))]


def find_damage(checkpoint_uri: str) -> str | None:
    """The first file of a complete checkpoint whose bytes have changed, in a few words; None if it is intact.

    Reads the whole checkpoint, in threads, because an object store gives a single request few bytes a second.
    """
    sums = read_progress(checkpoint_uri)["checksums"]
    parts = [(name, part, expected) for name in sums for part, expected in enumerate(sums[name])]

    def check(item: tuple[str, int, int]) -> str | None:
        name, part, expected = item
        if sum_part(storage.join(checkpoint_uri, name), part) != expected:
            return f"its file {name} is damaged after byte {part * PART_BYTES:,}"
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return next(filter(None, pool.map(check, parts)), None)


def last_complete(run_uri: str) -> str | None:
    """URI of the newest complete checkpoint; None if there is none.

    Ray Train's own list of checkpoints says what was reported, not what the storage still holds.
    """
    return next((uri for uri in list_checkpoints(run_uri) if find_corruption(uri) is None), None)


def last_sound(run_uri: str) -> tuple[str | None, dict[str, str]]:
    """`(URI of the newest intact checkpoint or None, {name of a newer one: why it cannot be used})`.

    A damaged checkpoint loses its `progress.json`, so that it is not complete any more. One that cannot be read now
    keeps it, as it may be read later. Raises OSError if no other one is left, and ValueError for a checkpoint of
    another run.
    """
    problems, unread = {}, None
    for uri in list_checkpoints(run_uri):
        name = storage.name(uri)
        try:
            if find_corruption(uri):
                continue
            if read_progress(uri).get("run") not in (None, run_id(run_uri)):
                raise ValueError(f"{uri} is of another run: move it elsewhere, or give it to a new run as init_from.")
            if (why := find_damage(uri)) is None:
                return uri, problems
            problems[name] = why
            storage.delete(storage.join(uri, PROGRESS))
        except OSError as error:
            unread, problems[name] = error, f"it cannot be read: {error}"
    if unread:
        raise unread
    return None, problems


def describe_problems(problems: dict[str, str], resume_from: str | None) -> list[str]:
    """Sentences about checkpoints that cannot be used, and where the run resumes; [] without problems."""
    end = f"The run resumes from {storage.name(resume_from)}." if resume_from else "The run starts over."
    return [*(f"{name} cannot be used: {why}." for name, why in problems.items()), end] if problems else []


def run_id(run_uri: str) -> str:
    """A random name of the run, the same wherever its folder is. The first call makes it."""
    uri = storage.join(run_uri, ID)
    if not storage.exists(uri):
        earlier = last_complete(run_uri)
        known = read_progress(earlier).get("run") if earlier else None
        storage.write_json(uri, {"id": known or uuid.uuid4().hex})
    return storage.read_json(uri, shape={"id": str})["id"]


def last_step(config: TrainingConfig) -> int:
    """Steps done at the run's newest complete checkpoint; 0 without one."""
    uri = last_complete(config.run_uri)
    return 0 if uri is None else step_of(uri)


def last_checkpoint(config: TrainingConfig) -> ray.train.Checkpoint | None:
    """The run's newest complete checkpoint; None without one."""
    uri = last_complete(config.run_uri)
    return uri and as_checkpoint(uri)


def as_checkpoint(uri: str) -> ray.train.Checkpoint:
    """A folder as Ray Train's `Checkpoint`."""
    filesystem, path = storage.open_filesystem(uri)
    return ray.train.Checkpoint(path, filesystem)


def find_run(given: str, runs_uri: str) -> tuple[str, int | None]:
    """`(URI of a run, step or None)` of "run" or "run@step": a name below `runs_uri`, or a folder."""
    uri = storage.resolve(given) if "/" in given else storage.join(runs_uri, given)
    name, _, step = uri.rpartition("@")
    return (name, int(step)) if step.isdecimal() and not storage.exists(uri) else (uri, None)


def find_checkpoint(given: str, runs_uri: str) -> str:
    """URI of the checkpoint that `init_from` names by "run" (the newest complete one) or by "run@step" (`find_run`).

    Raises ValueError if it is missing or incomplete.
    """
    uri, step = find_run(given, runs_uri)
    folders = [*list_checkpoints(uri), *list_checkpoints(storage.join(uri, BEST))]
    by_step = {step_of(folder): folder for folder in reversed(folders) if find_corruption(folder) is None}
    if not by_step:
        raise ValueError(
            f"init_from={given!r}: {uri} holds no complete checkpoint and no denoiser in diffusers layout: check the "
            "name."
        )
    step = max(by_step) if step is None else step
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise ValueError(f"init_from={given!r}: {uri} has no complete checkpoint of that step, but of {steps}.")
    return by_step[step]


def choose_resume_point(run_uri: str) -> dict[str, Any]:
    """Choose the newest intact checkpoint, and write the choice to the run's `resume.json`.

    Returns {"checkpoint": URI, "step": steps done}; the URI is None if the run starts from step 0. Damaged checkpoints
    are noted as failures. Called once for each group of workers: when the group's dataset is built, or by rank 0 if the
    group has no dataset. A worker of the previous group may complete a checkpoint's upload after the choice. The new
    group ignores that checkpoint.
    """
    uri, problems = last_sound(run_uri)
    if problems:
        write_failure(run_uri, " ".join(describe_problems(problems, uri)))
    point = {"checkpoint": uri, "step": 0 if uri is None else step_of(uri)}
    storage.write_json(storage.join(run_uri, RESUME), point)
    return point


class LostCheckpoint(ray.train.Checkpoint):
    """What rank 0 reports to Ray Train in place of a checkpoint that a worker could not upload; `why`: a sentence.

    It is falsy. Ray Train registers only truthy checkpoints, so a lost one replaces no older checkpoint. This project's
    code recognises it by `isinstance`.
    """

    def __init__(self, path: str, filesystem: fs.FileSystem, why: str):
        super().__init__(path, filesystem)
        self.why = why

    def __bool__(self) -> bool:
        return False


# ---- failures, and the end


def write_failure(run_uri: str, error: str) -> None:
    """Print why workers or a checkpoint were lost, and record it in the run's `failures/`.

    If the storage refuses the record, the reason is only printed.
    """
    print(error)
    try:
        errors = read_failures(run_uri)
        if errors[-1:] != [error]:  # Ray Train may report a failure twice
            storage.write_json(storage.join(run_uri, "failures", f"{len(errors) + 1:03d}.json"), {"error": error})
    except OSError as refused:
        print(f"This could not be recorded: {refused}")


def read_failures(run_uri: str) -> list[str]:
    """One short text for each group of workers and each checkpoint that was lost, oldest first."""
    uris = storage.list_files(storage.join(run_uri, "failures"), ".json")
    return [storage.read_json(uri, "left out", lambda text: {"error": text}, {"error": str})["error"] for uri in uris]


def end_run(run_uri: str, error: str) -> None:
    """End the run with `error`: call it in one worker, then return from all. Ray Train does not restart the run."""
    storage.write_json(storage.join(run_uri, ENDED), {"error": error})


@contextlib.contextmanager
def raise_end(run_uri: str) -> Iterator[None]:
    """Wrap `trainer.fit()` in it. Raises RuntimeError with the error of `end_run`, if a worker called that."""
    storage.delete(storage.join(run_uri, ENDED))
    yield
    if storage.exists(ended := storage.join(run_uri, ENDED)):
        raise RuntimeError(storage.read_json(ended, shape={"error": str})["error"])
