"""The Ray Train side: the worker loop, checkpoints, failures, resume. The only module that knows Ray Train."""

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
import zlib

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from . import checkpoint, ingest, parallel, runs, schema, session, speed, storage
from .config import TrainingConfig
from .learner import Learner, Unit
from .watchdog import Watchdog


def train_loop_per_worker(config, steps=None):
    """What every training worker runs: restore, then one step after another until `max_steps`.

    `steps`: where this worker's share of each global batch comes from; None: `planned_steps`, from Ray Data.
    """
    config = TrainingConfig.from_dict(config)
    manifest = next(iter(ingest.read_manifests(config).values()))
    use_cores(ray.train.get_context().get_local_world_size(), online=bool(manifest.online))
    learner = Learner(config, manifest, ray.train.torch.get_device())
    step = restore(learner)
    log = runs.MetricsLog(config.run_uri) if ray.train.get_context().get_world_rank() == 0 else None
    note_workers(config, log)
    rejects, preemption, checkpoints = Rejects(config), PreemptionNotice(), Checkpoints(learner, log)
    meter, checkpoint_seconds = speed.Meter(config, manifest, learner.device), 0.0

    with Watchdog(config.hang_timeout, on_hang=note_hang(config)) as watchdog:
        for units, data_seconds, started in (steps or planned_steps)(config, manifest, step, rejects):
            with meter.watch():
                metrics = learner.step(step, units)
            step += 1
            ids, num_kept = gather_ids(units)
            seconds = time.perf_counter() - started
            if log:
                speeds = meter.line(config.resolution_at(step - 1), seconds, data_seconds, checkpoint_seconds)
                log.write(step, metrics, ids, num_kept, **speeds)
            checkpoint_seconds = 0.0
            watchdog.beat()
            if step % config.checkpoint_every == 0 or step == config.max_steps or preemption.arrived(seconds):
                rejects.write(step)
                checkpoint_seconds = checkpoints.save(step)
                watchdog.beat()


def ablation_per_worker(values):
    """What every worker runs to measure the ablation: `values` holds a `config`, as a dict, and the number of `steps`.

    No data is read and no checkpoint saved; rank 0 writes `hardware` and `rows` to `ablation.json` of the run.
    """
    config, context = TrainingConfig.from_dict(values["config"]), ray.train.get_context()
    use_cores(context.get_local_world_size())
    device = ray.train.torch.get_device()

    def save(rows):
        if context.get_world_rank() == 0:
            storage.write_json(storage.join(config.run_uri, "ablation.json"), {"hardware": speed.hardware(device), "rows": rows})

    speed.ablation(config, device, steps=values["steps"], done=save)


def planned_steps(config, manifest, first_step, rejects):
    """Yield `(units, seconds waited for data, start)` of each step: this worker's share of each global batch."""
    rank, world, _ = place()
    blocks = iter(ray.train.get_dataset_shard("train").iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4))
    waiting = {}  # unit number -> its rows: a block may hold the units of several steps
    for step in range(first_step, config.max_steps):
        started = time.perf_counter()
        wanted = [step * config.units_per_step + slot for slot in range(rank, config.units_per_step, world)]
        if wanted[0] not in waiting:
            for _ in wanted:
                block = next(blocks, None)
                if block is not None:
                    waiting.update(ingest.cut(block, config.unit_rows))
        if not waiting.keys() >= set(wanted):
            raise RuntimeError(f"Worker {rank} got units {sorted(waiting)} in place of {wanted}.")
        units = []
        for number in wanted:
            rows = waiting.pop(number)
            rejects.add(rows)
            first_position = number % config.units_per_step * config.unit_rows
            units.append(Unit.from_arrow(rows, manifest, config.resolution_at(step), first_position))
        waiting = {number: rows for number, rows in waiting.items() if number > wanted[0]}  # none from before a resume
        yield units, time.perf_counter() - started, started


def place():
    """`(rank, number of workers, device)` of this worker."""
    context = ray.train.get_context()
    return context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device()


def remaining_steps(config, stream=ingest.stream):
    """The training data from the run's last checkpoint on, for Ray Train's `datasets`.

    Ray Train calls it anew for each group of workers, so a group that replaces a failed one starts where its
    checkpoint does. `stream`: where latents come from; another than `ingest.stream` encodes them on the way.
    """
    plan = ingest.plan_run(ingest.read_manifests(config), config)
    return stream(plan, last_step(config), config.max_steps, resolution=config.resolution, validation_share=config.validation_share)


def open_checkpoint(run_uri):
    """A run's newest complete checkpoint as Ray Train's `Checkpoint`, or None."""
    uri = runs.last_complete(run_uri)
    if uri is None:
        return None
    filesystem, path = storage.open_filesystem(uri)
    return ray.train.Checkpoint(path, filesystem)


def last_checkpoint(config):
    """`open_checkpoint` of the run itself."""
    return open_checkpoint(config.run_uri)


def best_checkpoint(config):
    """`open_checkpoint` of the run's `best/`, the one with the lowest validation loss; None before the first validation."""
    return open_checkpoint(storage.join(config.run_uri, runs.BEST))


def first_checkpoint(config):
    """`open_checkpoint` of the run that `init_from` names; None if it names no run with one under this storage."""
    if config.init_from is None or "/" in config.init_from:
        return None
    return open_checkpoint(storage.join(config.storage, "runs", config.init_from))


def unet_folder(config):
    """The folder that `init_from` names, with a U-Net in diffusers layout, as Ray Train's `Checkpoint`."""
    filesystem, path = storage.open_filesystem(config.init_from)
    return ray.train.Checkpoint(path, filesystem)


def last_step(config):
    """Steps done at the run's newest complete checkpoint; 0 without one."""
    uri = runs.last_complete(config.run_uri)
    return 0 if uri is None else runs.step_of(uri)


@contextlib.contextmanager
def shared_folder(find):
    """The local folder of the `Checkpoint` that rank 0 gets from `find()`, None if it gets none; call it on all workers.

    They agree on it so, and workers on one node share a download: Ray Train knows the `Checkpoint` again.
    """
    found = find() if ray.train.get_context().get_world_rank() == 0 else None
    found = ray.train.collective.broadcast_from_rank_zero(found)
    if found is None:
        yield None
        return
    with found.as_directory() as folder:
        ray.train.collective.barrier()  # one that comes late downloads again, over what the others would be reading
        yield folder


def restore(learner):
    """Load the run's newest complete checkpoint into a worker; returns the steps done."""
    with shared_folder(lambda: last_checkpoint(learner.config)) as folder:
        if folder:
            return checkpoint.load(folder, model=learner.model, optimizer=learner.optimizer, ema=learner.ema)
    initialise(learner)
    return 0


def initialise(learner):
    """Start from `init_from`: another run's weights and EMA, or a U-Net in diffusers layout; with a fresh schedule."""
    config = learner.config
    if config.init_from is None:
        return
    with shared_folder(lambda: first_checkpoint(config) or unet_folder(config)) as folder:
        if os.path.exists(os.path.join(folder, runs.PROGRESS)):
            checkpoint.load_weights(folder, learner.unet, "ema")
            averaged = learner.ema.copy()
            checkpoint.load_weights(folder, learner.unet, "model")
        else:
            weights = UNet2DConditionModel.from_pretrained(folder, torch_dtype=torch.float32, use_safetensors=True)
            set_model_state_dict(learner.unet, weights.state_dict(), options=StateDictOptions(full_state_dict=True))
            averaged = learner.ema.copy()
    if config.ema_start == 0:
        learner.ema.shadow = averaged


def check_init_from(config):
    """Raises ValueError if `init_from` names neither a run with a checkpoint nor a U-Net's folder, or another U-Net's."""
    if config.init_from is None:
        return
    if first_checkpoint(config):
        run = storage.read_json(storage.join(config.storage, "runs", config.init_from, "config.json"))
        found = parallel.load_unet_config(run["parameters"]["unet_config"])
    elif storage.exists(storage.join(config.init_from, "config.json")):
        found = storage.read_json(storage.join(config.init_from, "config.json"))
    else:
        raise ValueError(
            f"init_from={config.init_from!r} is neither a run with a checkpoint under {storage.join(config.storage, 'runs')} "
            "nor a folder with a U-Net in diffusers layout: give one of these, or None."
        )
    for name, value in parallel.load_unet_config(config.unet_config).items():
        if name != "sample_size" and not name.startswith("_") and name in found and found[name] != value:
            raise ValueError(
                f"init_from={config.init_from!r} is a U-Net with {name}={found[name]}, and unet_config={config.unet_config!r} "
                f"has {value}: start from one of the same shape."
            )


class Checkpoints:
    """Saves a worker's checkpoints beside its training.

    Training stands still while the state is copied into the CPU's memory. Then a thread of Ray Train's writes it, each
    worker its part, and uploads it to the run's folder, where it counts once all of it is there (`runs.damage`).
    """

    def __init__(self, learner, log):
        self.learner, self.log = learner, log
        self.group = checkpoint.cpu_group()
        self.filesystem = ray.train.get_context().get_storage().storage_filesystem  # as Ray Train knows its own folder again
        self.done = threading.Event()  # whether the one before is written and uploaded
        self.done.set()

    def save(self, step):
        """Begin to save; returns the seconds that training had to wait, the rest of an earlier one's upload included."""
        started, config, learner = time.perf_counter(), self.learner.config, self.learner
        self.done.wait()
        # Workers on one machine and on several: each uploads the files of its own folder.
        folder = tempfile.mkdtemp()
        finish = checkpoint.start(folder, model=learner.model, optimizer=learner.optimizer, ema=learner.ema, step=step, group=self.group)
        self.done.clear()
        if self.log:
            self.log.flush()
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=runs.checkpoint_name(step, self.log.attempt) if self.log else None,  # rank 0's counts
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=functools.partial(self.upload, finish),
            delete_local_checkpoint_after_upload=False,
            validation=bool(config.validate_every) and (step % config.validate_every == 0 or step == config.max_steps),
        )
        return time.perf_counter() - started

    def upload(self, finish, local, name):
        """In Ray Train's thread: wait until the files are written, and copy them to `name` under the run's folder."""
        try:
            finish()
            uri = storage.join(self.learner.config.run_uri, name)
            storage.copy_folder(local.path, uri)
            return ray.train.Checkpoint(storage.open_filesystem(uri)[1], self.filesystem)
        finally:
            shutil.rmtree(local.path)
            self.done.set()


class Rejects:
    """Rows that could not be encoded on the way to this worker, for `rejects/` of the run.

    A file is written before the checkpoint that covers its steps, under a name that a redone step writes again.
    """

    def __init__(self, config):
        self.run_uri, self.found = config.run_uri, []

    def add(self, rows):
        if schema.REASON in rows.column_names:
            bad = rows.filter(pc.not_equal(rows[schema.REASON], ""))
            if len(bad):
                self.found.append(bad.select([schema.ID, schema.REASON, schema.SOURCE]))

    def write(self, step):
        if self.found:
            filesystem, path = storage.open_filesystem(storage.join(self.run_uri, "rejects"))
            filesystem.create_dir(path)
            rank = ray.train.get_context().get_world_rank()
            pq.write_table(pa.concat_tables(self.found), f"{path}/{step:09d}-{rank:05d}.parquet", filesystem=filesystem)
            self.found = []


class PreemptionNotice:
    """Asks Ray Train, every few seconds, whether a node is about to be taken away: then a checkpoint is due.

    All workers must ask at the same steps, so how many steps that are is agreed on after the first one.
    """

    def __init__(self, every_seconds=2.0):
        self.every_seconds = every_seconds
        self.every_steps = None
        self.step = 0
        self.answered = None  # the notice that a checkpoint was saved for

    def arrived(self, step_seconds):
        """Call once a step, on every worker; True at the first step that sees a new notice."""
        self.step += 1
        if self.every_steps is None or self.step == 20:  # the first step is slow, and the tenth profiled (`speed.Meter`)
            self.every_steps = max(1, round(self.every_seconds / slowest_worker(step_seconds)))
        if self.step % self.every_steps:
            return False
        info = ray.train.get_preemption_info()
        if info is None or info.preempted_node_ids == self.answered:
            return False
        self.answered = info.preempted_node_ids
        return True


def slowest_worker(seconds):
    """The largest of a number of seconds over all workers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    value = torch.tensor(seconds, device=ray.train.torch.get_device())
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


@functools.cache
def objects_group():
    """A process group for Python objects: gloo's, since NCCL would take them by way of the GPU. First called on all workers at once."""
    return dist.new_group(backend="gloo")


def note_workers(config, log):
    """Rank 0 writes `workers.json`: where the workers of this attempt run."""
    mine = {"rank": ray.train.get_context().get_world_rank(), "node_id": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}
    parts = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size() if log else None
        dist.gather_object(mine, parts, group=objects_group())
    if log:
        storage.write_json(storage.join(config.run_uri, "workers.json"), {"attempt": log.attempt, "workers": parts})


@contextlib.contextmanager
def accident(config, rank, at_step):
    """While the block (`trainer.fit()`) runs: kill a worker, really, as soon as the run has reached a step.

    SIGKILL, by a task on the worker's own node. What a lesson or a drill needs; nothing else does.
    """
    reader = runs.MetricsReader(config.run_uri)
    reader.read()  # what is there already does not count: a finished run that is run again loses nobody

    def strike():
        if any(line["step"] >= at_step for line in reader.read()):
            worker = storage.read_json(storage.join(config.run_uri, "workers.json"))["workers"][rank]
            session.kill(worker["node_id"], worker["pid"])
            return True

    with session.meanwhile(strike, every=0.05):
        yield


def note_hang(config):
    """What a worker that hangs does before it ends itself."""
    rank = ray.train.get_context().get_world_rank()
    return lambda seconds: runs.write_failure(config.run_uri, f"worker {rank} made no step in {seconds:.0f} s (hang_timeout) and was ended")


class RecordFailures(ray.train.UserCallback):
    """Ray Train's callback that notes in the run's folder why workers were lost; `follow` shows it."""

    def __init__(self, run_uri):
        self.run_uri = run_uri

    def after_exception(self, run_context, worker_exceptions):
        texts = [f"worker {rank}: {in_short(str(error))}" for rank, error in sorted(worker_exceptions.items())]
        runs.write_failure(self.run_uri, "; ".join(texts))


def in_short(text):
    """What an error says, in a sentence: below a stack the last line, else the one that tells what became of the worker."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or ["no message"]
    telling = [line for line in lines if any(word in line for word in (" dead", " died", "unavailable", "has been hanging"))]
    line = lines[-1] if "Traceback" in text else (telling or lines)[0]
    return line.split(". ")[0][:200]


def gather_ids(units):
    """`(ids, rows kept)` of the whole global batch, on rank 0; (None, None) elsewhere."""
    ids, kept = [i for unit in units for i in unit.ids], sum(int(unit.keep_U.sum()) for unit in units)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ids, kept
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((ids, kept), parts, group=objects_group())
    return ([i for part, _ in parts for i in part], sum(kept for _, kept in parts)) if parts else (None, None)


@contextlib.contextmanager
def follow(config, every=1.0):
    """Show how far a run is, and what was lost on the way, while the block (`trainer.fit()`) runs.

    An interrupt ends the run and raises KeyboardInterrupt.
    """
    progress = session.Progress(f"run {config.run_name}", "steps")
    reader, recent = runs.MetricsReader(config.run_uri), []
    shown = len(runs.read_failures(config.run_uri))

    def show():
        nonlocal shown
        recent.extend(reader.read())
        del recent[:-50]
        failures = runs.read_failures(config.run_uri)
        for failure in failures[shown:]:
            print(f"lost: {failure}")
        shown = len(failures)
        if recent:
            loss = sum(line["loss"] for line in recent) / len(recent)
            speed = sorted(line["images_per_second"] for line in recent)[len(recent) // 2]
            progress(recent[-1]["step"], config.max_steps, f"- loss {loss:.3f}, {speed:.0f} images/s")

    try:
        with session.interruptible(), session.meanwhile(show, every):
            yield
    finally:
        show()


def open_run(config):
    """Check a run before anything starts, and write its `config.json`; returns the manifest of its latents.

    Raises FileNotFoundError without latents, ValueError for latents that do not fit the U-Net, and for a run of this
    name that was started with other parameters. Damaged checkpoints are set aside, and said.
    """
    manifests = ingest.read_manifests(config)
    ingest.check_mixture(manifests)
    for uri, manifest in manifests.items():
        parallel.check_latents(manifest, config, uri)
    ingest.plan_run(manifests, config)
    check_init_from(config)
    uri = storage.join(config.run_uri, "config.json")
    data = [describe_data(manifest, share) for manifest, share in zip(manifests.values(), config.proportions.values(), strict=True)]
    if storage.exists(uri) and runs.metrics_files(config.run_uri):  # not where a first try failed before its first step
        earlier = storage.read_json(uri)
        config.check_resume(earlier["parameters"])
        check_same_data(config, earlier["data"], data)
    for sentence in runs.repair(config.run_uri):
        print(sentence)
    # A worker that is stopped cannot end itself: Ray Train asks after it, and waits for an answer as long as this.
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(config.hang_timeout)
    packages = ("ray", "torch", "diffusers", "transformers", "pyarrow", "numpy")
    storage.write_json(uri, {
        "parameters": config.to_dict(),
        "data": data,
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}},
        "git_revision": git_revision(),
    })  # fmt: skip
    return next(iter(manifests.values()))


def describe_data(manifest, proportion):
    """What a run depends on in a data set: its encoder, its files in order and their row groups, its share."""
    return {
        "encoder": manifest.encoder, "scaling_factor": manifest.scaling_factor, "written": manifest.total("written"),
        "files_crc32": zlib.crc32(json.dumps(manifest.files).encode()), "proportion": proportion,
        # Data that was moved is the same data; so is what more workers, or another batch size, made.
        "made_with": {name: value for name, value in manifest.job.items() if name not in ("input_uri", "online", "raw_row_bytes")},
    }  # fmt: skip


def check_same_data(config, before, now):
    """Raises ValueError if a run's data is not what it was started on; both as `describe_data` gives them."""
    now = json.loads(json.dumps(now))
    for uri, one, other in zip(config.proportions, before, now, strict=False):
        for name in one["made_with"].keys() & other["made_with"].keys() - {"listing_crc32"}:
            if one["made_with"][name] != other["made_with"][name]:
                raise ValueError(
                    f"run_name={config.run_name!r} was started on data of {uri} made with {name}={one['made_with'][name]!r}, "
                    f"not {other['made_with'][name]!r}: set it back to resume the run, or give another run_name."
                )
    if before != now:
        raise ValueError(
            f"run_name={config.run_name!r} was started on other data than {', '.join(config.proportions)} holds now: give another run_name."
        )


def git_revision():
    """The commit of the folder that this runs in, None outside of a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def use_cores(workers_here, online=False):
    """Share this machine's cores among its workers: Ray sets one thread a logical CPU.

    Where pictures are encoded on the way, one is left to that: threads that wait for each other lose more than they gain.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores - online) // workers_here))
