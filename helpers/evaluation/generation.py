"""Pictures of many prompts, 30,000 for example, and their CLIP embeddings: made by Ray Data, resumable.

The prompts are split into parts of consecutive prompts. One of many actors makes a part's pictures, embeds them, and
writes both atomically as one Parquet file: a part is done when its file exists. A rerun makes the missing parts.
Picture i depends only on prompt i and seed + i, for any number of actors. Scores read the embeddings of all parts, but
no pictures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile
import zlib
from collections.abc import Callable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from diffusers import DiffusionPipeline
from ray.data import ActorPoolStrategy

from .. import storage
from ..config.parameters import first_difference
from ..encode import encoder
from ..encode.models import model_folder, pin_model
from ..latents import schema
from ..runtime import session
from ..sample import pipeline as sampling
from ..sample.pipeline import to_png, without_warnings
from . import scores

PARTS, JOB = "parts", "job.json"
# Columns of a part.
INDEX, PROMPT, PICTURE = "index", "prompt", "picture"
IMAGE_EMBEDDING, TEXT_EMBEDDING = "image_embedding", "text_embedding"
FINGERPRINT_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Settings:
    """What determines the pictures and their embeddings; a rerun into the same folder must have the same settings.

    Args:
        pipeline: a folder or URI in diffusers layout (`pipeline.export_checkpoint`), or a hub id.
        resolution: side of a picture in pixels.
        guidance_scale, steps, seed: as in `pipeline.generate`.
        precision: of the pipeline on a GPU, "fp32", "fp16" or "bf16"; on a CPU it is fp32.
        clip: see `scores.CLIP`.
        rows_per_part: prompts that are committed together; a killed actor's part is repeated.
    """

    pipeline: str
    resolution: int
    guidance_scale: float = 2.0
    steps: int = 20
    seed: int = 0
    precision: str = "fp32"
    clip: str = scores.TINY_CLIP
    rows_per_part: int = 128


@dataclasses.dataclass(frozen=True)
class Placement:
    """The number of actors and their resources. None of it changes a picture's content."""

    num_generators: int = 1
    gpus_per_generator: float = 0
    accelerator_type: str | None = None
    batch_size: int = 32  # pictures per pass of the pipeline


class GenerationJob:
    """The parts of a list of prompts, and which of them are done. Hub ids are pinned to a commit (`models.pin_model`).

    Raises ValueError if `uri` holds pictures of other prompts, settings or weights.
    """

    def __init__(self, prompts: list[str], uri: str, settings: Settings):
        if not prompts:
            raise ValueError("There are no prompts: give at least one.")
        self.prompts, self.uri = prompts, storage.resolve(uri)
        job_uri = storage.join(self.uri, JOB)
        before = storage.read_json(job_uri) if storage.exists(job_uri) else {}
        models = {name: pin_model(getattr(settings, name), before.get(name), name) for name in ("pipeline", "clip")}
        self.settings = dataclasses.replace(settings, **models)
        values = {"prompts": len(prompts), "prompts_crc32": zlib.crc32(json.dumps(prompts).encode())}
        self.values = {**dataclasses.asdict(self.settings), **values, "weights": fingerprint(settings.pipeline)}
        if before and (found := first_difference(before, self.values)):
            name, value_before, value = found
            raise ValueError(
                f"{uri!r} holds pictures that were made with {name}={value_before!r}, not {value!r}: give another "
                "folder, or delete that one."
            )

    def pending(self) -> list[int]:
        """Numbers of the parts still to be made."""
        done = {storage.name(path) for path in storage.list_files(storage.join(self.uri, PARTS), ".parquet")}
        num_parts = -(-len(self.prompts) // self.settings.rows_per_part)
        return [number for number in range(num_parts) if part_name(number) not in done]

    def part(self, number: int) -> dict:
        """A part as a row of Ray Data: its file, the index of its first prompt, its prompts, the guidance scale."""
        first = number * self.settings.rows_per_part
        return {
            "file": storage.join(self.uri, PARTS, part_name(number)),
            "first": first,
            "prompts": self.prompts[first : first + self.settings.rows_per_part],
            "guidance_scale": float(self.settings.guidance_scale),
        }


def part_name(number: int) -> str:
    return f"{number:06d}.parquet"


def fingerprint(pipeline: str) -> int | None:
    """A CRC of the last bytes of a folder's weight files, which differ between checkpoints; None for a hub id."""
    files = storage.list_files(pipeline, ".safetensors", recursive=True)
    if not files:
        return None
    crc32 = 0
    for path in files:
        filesystem, name = storage.open_filesystem(path)
        with filesystem.open_input_file(name) as file:
            size = min(file.size(), FINGERPRINT_BYTES)
            crc32 = zlib.crc32(file.read_at(size, file.size() - size), crc32)
    return crc32


def load_pipeline(pipeline: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """A pipeline from a folder, a URI or a hub id, without its safety checker."""
    with contextlib.ExitStack() as stack:
        if "://" in pipeline:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            storage.copy_folder(pipeline, folder)
            pipeline = folder
        folder = model_folder(pipeline, "model_index.json", "*/*")
        options = {"dtype": dtype, "use_safetensors": True}
        if "safety_checker" in DiffusionPipeline.load_config(folder):
            options["safety_checker"] = None
        with without_warnings():
            loaded = DiffusionPipeline.from_pretrained(folder, **options)
    loaded.set_progress_bar_config(disable=True)
    return loaded


# ---- actors


class PartGenerator:
    """A Ray Data actor: parts (`GenerationJob.part`) -> their files; returns how many pictures each has."""

    def __init__(self, settings: Settings, placement: Placement):
        self.settings, self.batch_size = settings, placement.batch_size
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = encoder.PRECISIONS[settings.precision] if device == "cuda" else torch.float32
        self.pipeline = load_pipeline(settings.pipeline, dtype).to(device)
        self.clip = scores.CLIP(settings.clip, device)

    def __call__(self, part: dict) -> dict:
        first, prompts = int(part["first"]), [str(prompt) for prompt in part["prompts"]]
        pictures = sampling.generate(
            self.pipeline,
            prompts,
            resolution=self.settings.resolution,
            seed=self.settings.seed + first,
            steps=self.settings.steps,
            guidance_scale=float(part["guidance_scale"]),
            batch_size=self.batch_size,
        )
        columns = {
            INDEX: pa.array(range(first, first + len(prompts)), pa.int64()),
            PROMPT: pa.array(prompts, pa.string()),
            PICTURE: pa.array([to_png(picture) for picture in pictures], pa.binary()),
            IMAGE_EMBEDDING: schema.to_binary(self.clip.images(pictures), dtype=np.float32),
            TEXT_EMBEDDING: schema.to_binary(self.clip.texts(prompts), dtype=np.float32),
        }
        data = io.BytesIO()
        pq.write_table(pa.table(columns), data, compression="none")
        storage.write_bytes(part["file"], data.getvalue())
        return {"pictures": len(prompts)}


# ---- what a notebook calls


def generate_all(
    jobs: list[GenerationJob], placement: Placement | None = None, progress: Callable[[int, int], None] | None = None
) -> int:
    """Make the pictures that are missing in the jobs' folders; returns how many were made.

    The same actors work for all jobs, which may differ in their prompts, folder and guidance scale. Ray Data restarts
    an actor that dies and repeats its part. `progress(pictures, of_pictures)` is called as parts are written.
    """
    placement = placement or Placement()
    parts = [job.part(number) for job in jobs for number in job.pending()]
    made, total = 0, sum(len(job.prompts) for job in jobs)
    already = total - sum(len(part["prompts"]) for part in parts)
    for job in jobs:
        session.check_shared(job.uri, "uri")
        storage.write_json(storage.join(job.uri, JOB), job.values)
    if not parts:
        return 0
    written = ray.data.from_items(parts, override_num_blocks=len(parts)).map(
        PartGenerator,
        fn_constructor_args=(jobs[0].settings, placement),
        compute=ActorPoolStrategy(size=placement.num_generators),
        num_cpus=1,
        num_gpus=placement.gpus_per_generator or None,
        accelerator_type=placement.accelerator_type,
    )
    # Closed explicitly, so that an interrupted cell stops the actors.
    with contextlib.closing(iter(written.iter_batches(batch_size=None))) as batches:
        for batch in batches:
            made += int(sum(batch["pictures"]))
            if progress:
                progress(already + made, total)
    return made


def embeddings(table: pa.Table, column: str) -> np.ndarray:
    """(N, D) float32."""
    return schema.from_binary(table[column], (-1,), np.float32)[0]


def read_saved(uri: str, columns: list[str]) -> pa.Table:
    """Columns of all parts of a folder, in the order of the prompts. Raises ValueError if parts are missing."""
    values = storage.read_json(storage.join(uri, JOB))
    files = storage.list_files(storage.join(uri, PARTS), ".parquet")
    expected = -(-values["prompts"] // values["rows_per_part"])
    if len(files) < expected:
        raise ValueError(
            f"{uri!r} has {len(files):,} of {expected:,} parts: run `generate_all` again, which makes the others."
        )

    filesystem, _ = storage.open_filesystem(uri)
    paths = [storage.open_filesystem(file)[1] for file in files]
    return pq.read_table(paths, filesystem=filesystem, columns=columns)


def score(uri: str, real: np.ndarray | None = None, real_folder: str | None = None) -> dict[str, float]:
    """Scores of a folder's pictures: their number ("pictures"), "clip_score", and distances to real pictures.

    Args:
        real: (N, D) embeddings of real pictures by the same CLIP (`scores.CLIP.images`), for "cmmd".
        real_folder: of real pictures as files on disk, for "fid" and "kid"; their centre squares are resized.

    Raises ValueError and ImportError as `scores` does.
    """
    table = read_saved(uri, [IMAGE_EMBEDDING, TEXT_EMBEDDING])
    pictures = embeddings(table, IMAGE_EMBEDDING)
    values = {"pictures": len(pictures)}
    values["clip_score"] = scores.clip_score(pictures, embeddings(table, TEXT_EMBEDDING))
    if real is not None:
        values["cmmd"] = scores.cmmd(pictures, real)
    if real_folder:
        side = storage.read_json(storage.join(uri, JOB))["resolution"]
        with tempfile.TemporaryDirectory() as folder:
            for number, picture in enumerate(read_saved(uri, [PICTURE])[PICTURE]):
                pathlib.Path(folder, f"{number:09d}.png").write_bytes(picture.as_py())
            values |= scores.fid_and_kid(folder, real_folder, samples_resize_and_crop=side)
    return values


def guidance_sweep(
    prompts: list[str],
    uri: str,
    settings: Settings,
    scales: list[float],
    placement: Placement | None = None,
    progress: Callable[[int, int], None] | None = None,
    **real,
) -> pd.DataFrame:
    """The same prompts and noise at several guidance scales: one row each, with `guidance_scale` and what `score`
    returns.

    Pictures go to `guidance-{scale}` under `uri`; a rerun makes the missing ones. `real`: as for `score`.
    """
    folders = {scale: storage.join(uri, f"guidance-{scale:g}") for scale in sorted(set(scales))}
    settings_of = {scale: dataclasses.replace(settings, guidance_scale=scale) for scale in folders}
    generate_all(
        [GenerationJob(prompts, folder, settings_of[scale]) for scale, folder in folders.items()], placement, progress
    )
    return pd.DataFrame([{"guidance_scale": scale, **score(folder, **real)} for scale, folder in folders.items()])
