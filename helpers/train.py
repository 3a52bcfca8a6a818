"""The Ray Train side: the worker loop, what a run writes, resume. The only module that knows Ray Train."""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
import zlib

import pandas as pd
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from . import checkpoint, ingest, parallel, schema, session, storage
from .config import TrainingConfig
from .learner import Learner, Unit


def train_loop_per_worker(config):
    """What every training worker runs: restore, then one step after another until `max_steps`."""
    config = TrainingConfig.from_dict(config)
    manifest = schema.Manifest.read(config.latents_uri)
    use_all_cores(ray.train.get_context().get_local_world_size())
    learner = Learner(config, manifest, ray.train.torch.get_device())
    step = restore(learner)
    log = MetricsLog(config.run_uri) if ray.train.get_context().get_world_rank() == 0 else None

    for units, data_seconds, started in steps(config, manifest, step):
        metrics = learner.step(step, units)
        step += 1
        ids = gather_ids(units)
        if log:
            seconds = time.perf_counter() - started
            log.write(
                step, metrics, ids,
                images_per_second=config.global_batch_size / seconds, data_wait_share=data_seconds / seconds,
            )  # fmt: skip
        if step % config.checkpoint_every == 0 or step == config.max_steps:
            save(learner, step, log)


def steps(config, manifest, first_step):
    """Yield `(units, seconds waited for data, start)` of each step: this worker's share of each global batch."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    batches = iter(
        ray.train.get_dataset_shard("train").iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4)
    )
    for step in range(first_step, config.max_steps):
        started = time.perf_counter()
        units = []
        for slot in range(rank, config.units_per_step, world):
            table = next(batches, None)
            expected = step * config.units_per_step + slot
            found = None if table is None else (table[ingest.UNIT][0].as_py(), table[ingest.UNIT][-1].as_py(), len(table))
            if found != (expected, expected, config.unit_rows):
                raise RuntimeError(f"Worker {rank} got (first unit, last unit, rows) {found} in place of unit {expected}.")
            units.append(Unit.from_arrow(table, manifest, config.resolution, slot * config.unit_rows))
        yield units, time.perf_counter() - started, started


def remaining_steps(config):
    """The training data from the run's last checkpoint on, for Ray Train's `datasets`.

    Ray Train calls it anew for each group of workers, so a group that replaces a failed one starts where its
    checkpoint does.
    """
    manifest = schema.Manifest.read(config.latents_uri)
    plan = ingest.plan_run(manifest, config)
    return ingest.stream(
        plan, last_step(config), config.max_steps, latents_uri=config.latents_uri, resolution=config.resolution,
        validation_share=config.validation_share,
    )  # fmt: skip


def last_checkpoint(config):
    """The run's last registered checkpoint, or None."""
    if not storage.exists(storage.join(config.run_uri, "checkpoint_manager_snapshot.json")):
        return None
    return ray.train.Result.from_path(config.run_uri).checkpoint


def last_step(config):
    """Steps done at the run's last checkpoint; 0 without one."""
    found = last_checkpoint(config)
    return 0 if found is None else int(storage.read_json(f"{checkpoint_uri(found)}/{checkpoint.PROGRESS}")["step"])


def checkpoint_uri(found):
    """A path or URI of a Ray Train checkpoint (Ray gives a filesystem and a path in it)."""
    kind = found.filesystem.type_name
    return found.path if kind == "local" else f"{kind}://{found.path}"


def restore(learner):
    """Load the checkpoint that Ray Train hands to this worker group; returns the steps done."""
    found = ray.train.get_checkpoint()
    if found is None:
        initialise(learner)
        return 0
    with found.as_directory() as folder:
        return checkpoint.load(folder, model=learner.model, optimizer=learner.optimizer, ema=learner.ema)


def initialise(learner):
    """Start from `init_from`: another run's weights and EMA, or a U-Net in diffusers layout; with a fresh schedule."""
    config = learner.config
    if config.init_from is None:
        return
    run_uri = storage.join(config.storage, "runs", config.init_from)
    if storage.exists(run_uri):
        with ray.train.Result.from_path(run_uri).checkpoint.as_directory() as folder:
            checkpoint.load_weights(folder, learner.unet, "ema")
            averaged = learner.ema.copy()
            checkpoint.load_weights(folder, learner.unet, "model")
    else:
        weights = UNet2DConditionModel.from_pretrained(config.init_from, torch_dtype=torch.float32, use_safetensors=True)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(learner.unet, weights.state_dict(), options=options)
        averaged = learner.ema.copy()
    if config.ema_start == 0:
        learner.ema.shadow = averaged


def check_init_from(config):
    """Raises ValueError if `init_from` names neither a run with a checkpoint nor a U-Net's folder."""
    if config.init_from is None:
        return
    run_uri = storage.join(config.storage, "runs", config.init_from)
    if storage.exists(storage.join(run_uri, "checkpoint_manager_snapshot.json")):
        return
    if not storage.exists(f"{config.init_from}/config.json"):
        raise ValueError(
            f"init_from={config.init_from!r} is neither a run with a checkpoint under {storage.join(config.storage, 'runs')} "
            "nor a folder with a U-Net in diffusers layout: give one of these, or None."
        )


def save(learner, step, log):
    """Every worker writes its part of the checkpoint, and Ray Train puts them together under the run's folder."""
    config = learner.config
    with tempfile.TemporaryDirectory() as folder:
        # Workers on one machine and on several: each uploads the files of its own folder.
        checkpoint.save(folder, model=learner.model, optimizer=learner.optimizer, ema=learner.ema, step=step)
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=f"checkpoint-{step:09d}",
            validation=bool(config.validate_every) and (step % config.validate_every == 0 or step == config.max_steps),
        )
    if log:
        log.flush()


def gather_ids(units):
    """The ids of the unmasked rows of the whole global batch, on rank 0; None elsewhere."""
    mine = [i for unit in units for i, keep in zip(unit.ids, unit.keep_U.tolist(), strict=True) if keep]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts)
    return [i for part in parts for i in part] if parts else None


def samples_crc32(ids):
    """CRC-32 of the ids as text, sorted, joined by newlines: the same for the same set of samples."""
    return zlib.crc32("\n".join(sorted(map(str, ids))).encode())


class MetricsLog:
    """`metrics.jsonl` of a run, one line a step, written by rank 0.

    Locally lines are appended as they come; an object store cannot append, so there the lines between two checkpoints
    make one object, `metrics-{attempt}-{step}.jsonl`. Steps that are redone after a failure appear again with a higher
    `attempt`: readers take the last (`read_metrics`).
    """

    def __init__(self, run_uri):
        self.run_uri = run_uri
        earlier = read_metrics(run_uri)
        self.attempt = 1 if earlier.empty else int(earlier["attempt"].max()) + 1
        self.samples_seen = None
        self.seen = {} if earlier.empty else dict(zip(earlier["step"], earlier["samples_seen"], strict=True))
        self.lines = []
        self.file = None
        if storage.is_local(run_uri):
            path = storage.join(run_uri, "metrics.jsonl")
            torn = os.path.exists(path) and not storage.read_text(path).endswith("\n") and os.path.getsize(path) > 0
            self.file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the worker lives)
            if torn:  # a killed worker's last line
                self.file.write("\n")

    def write(self, step, metrics, ids, **speed):
        if self.samples_seen is None:
            self.samples_seen = int(self.seen.get(step - 1, 0))
        self.samples_seen += len(ids)
        line = {
            "step": step, "attempt": self.attempt, **metrics, **speed,
            "samples_seen": self.samples_seen, "samples_crc32": samples_crc32(ids),
        }  # fmt: skip
        self.lines.append(json.dumps(line))
        if self.file:
            self.file.write(self.lines.pop() + "\n")

    def flush(self):
        if self.lines:
            last = json.loads(self.lines[-1])["step"]
            storage.write_text(
                storage.join(self.run_uri, f"metrics-{self.attempt:04d}-{last:09d}.jsonl"), "\n".join(self.lines) + "\n"
            )
            self.lines = []


def read_metrics(run_uri, all_attempts=False):
    """A run's metrics as a frame, one row a step: of steps that were done more than once, the last attempt."""
    rows = []
    for uri in storage.list_files(run_uri, ".jsonl"):
        for line in storage.read_text(uri).splitlines():
            if line.endswith("}"):  # a killed worker's last line may be cut
                rows.append(json.loads(line))
    if not rows:
        return pd.DataFrame(columns=["step", "attempt", "loss", "samples_seen"])
    frame = pd.DataFrame(rows).sort_values(["step", "attempt"], kind="stable").reset_index(drop=True)
    return frame if all_attempts else frame.drop_duplicates("step", keep="last").reset_index(drop=True)


@contextlib.contextmanager
def follow(config, every=1.0):
    """Show how far a run is, from its `metrics.jsonl`, while the block (`trainer.fit()`) runs."""
    progress, stop = session.Progress(f"run {config.run_name}", "steps"), threading.Event()

    def show():
        metrics = read_metrics(config.run_uri)
        if len(metrics):
            last = metrics.iloc[-1]
            progress(
                int(last["step"]), config.max_steps,
                f"- loss {metrics['loss'].tail(50).mean():.3f}, {metrics['images_per_second'].tail(20).median():.0f} images/s",
            )  # fmt: skip

    def watch():
        while not stop.wait(every):
            show()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        show()


def open_run(config):
    """Check a run before anything starts, and write its `config.json`; returns the manifest of its latents.

    Raises FileNotFoundError without latents, ValueError for latents that do not fit the U-Net, and for a run of this
    name that was started with other parameters.
    """
    manifest = schema.Manifest.read(config.latents_uri)
    parallel.check_latents(manifest, config)
    ingest.plan_run(manifest, config)
    check_init_from(config)
    uri = storage.join(config.run_uri, "config.json")
    data = {name: manifest.to_dict()[name] for name in ("encoder", "written", "scaling_factor")}
    if storage.exists(uri) and len(read_metrics(config.run_uri)):  # not where a first try failed before its first step
        earlier = storage.read_json(uri)
        config.check_resume(earlier["parameters"])
        if earlier["data"] != data:
            raise ValueError(
                f"run_name={config.run_name!r} was started on other latents than {config.latents_uri} holds now: "
                "give another run_name."
            )
    packages = ("ray", "torch", "diffusers", "transformers", "pyarrow", "numpy")
    storage.write_json(uri, {
        "parameters": config.to_dict(),
        "data": data,
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}},
        "git_revision": git_revision(),
    })  # fmt: skip
    return manifest


def git_revision():
    """The commit of the folder that this runs in, None outside of a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def use_all_cores(workers_here):
    """Share this machine's cores among its workers: Ray sets one thread a logical CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // workers_here))
