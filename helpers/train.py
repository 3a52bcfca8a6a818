"""The training function of a Ray Train worker, with its data, checkpoints, metrics and faults."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray.autoscaler.v2.sdk import get_cluster_status

from . import checkpoint, distributed, schema, storage
from .manifest import read_manifest, read_manifests
from .plan import Plan, load_plan, plan_run
from .read import join_blocks, latents_dataset, worker_units
from .runtime import fault_tolerance
from .runtime.meter import Meter
from .runtime.metrics_log import MetricsLog
from .train_step import TrainStep, Unit, choose_kernels
from .training_config import TrainingConfig

RESUME = "resume.json"  # in a run's folder: where the current group of workers resumes
Stream = Callable[[Plan, int, int], ray.data.Dataset]  # a plan, first step, end step -> its blocks


def train_loop_per_worker(config: dict, source: StepSource | None = None, evaluate: Callable | None = None) -> None:
    """What each training worker runs: restore the checkpoint, then one step after another until the source ends.

    Args:
        config: `TrainingConfig.to_dict()`.
        source: where the steps come from; None: the dataset that a `StepSource` made for `config`.
        evaluate: `evaluate(unet, config, step)` computes with the averaged weights, on all workers between two steps,
            what Ray Train's validation needs where no GPU is left for it (`evaluation.at_checkpoints.OnWorkers`).
            None: such checkpoints are not evaluated.
    """
    source = source or StepSource(TrainingConfig.from_dict(config))
    config = source.config
    source.start()
    manifest = read_manifest(next(iter(config.proportions)))
    device = ray.train.torch.get_device()
    distributed.use_cores(ray.train.get_context().get_local_world_size(), online=bool(manifest.online))

    choose_kernels(config)  # before the first matrix product, which fixes cuBLAS's workspace
    if fault_tolerance.end_if_sick(config, device):
        return
    train_step = TrainStep(config, manifest, device)
    step = restore(train_step, source.resume_point)
    log = MetricsLog(config.run_uri) if distributed.rank() == 0 else None
    meter = Meter(config, manifest, device)
    writer = MetricsWriter(log)
    checkpoints = CheckpointManager(train_step, log, evaluate)
    rejects = Rejects(config)
    preemption = fault_tolerance.PreemptionNotice(device)
    write_worker_info(config, log)

    compiled_for = set()  # the columns of latents: the U-Net is compiled for each shape
    record_hang = functools.partial(fault_tolerance.record_hang, config.run_uri)
    with fault_tolerance.Watchdog(config.hang_timeout, record_hang) as watchdog:
        started, checkpoint_seconds = time.perf_counter(), 0.0
        for units, data_seconds in source.steps(step, rejects):
            latents = units[0].latents_spec
            if latents not in compiled_for:
                watchdog.beat(slow=True)
                compiled_for.add(latents)
            try:
                with meter.watch():
                    metrics = train_step.step(step, units)
            except FloatingPointError as error:
                # Ray Train would start the workers again, to fail at the same step. They return; the driver raises.
                if log:
                    fault_tolerance.end_run(config.run_uri, str(error))
                break
            step += 1
            num_kept, seconds = metrics.pop("num_kept"), time.perf_counter() - started
            speed = meter.step_record(latents, seconds, data_seconds, checkpoint_seconds, num_kept)
            writer.write(step, metrics, units, num_kept, speed)
            watchdog.beat()
            checkpoint_seconds = 0.0
            if step % config.checkpoint_every == 0 or step == source.end_step or preemption.arrived(seconds):
                watchdog.beat(slow=True)  # the upload before this one may not be finished
                rejects.write(step)
                writer.wait()
                checkpoint_seconds = checkpoints.save(step)
                watchdog.beat()
            started = time.perf_counter()
        writer.wait()
        if log:
            storage.retry(log.flush)
    checkpoints.uploaded.wait()
    if checkpoints.lost and step == source.end_step:  # no other one holds what the run was to reach: start again
        raise RuntimeError(checkpoints.lost)


# ---- data


class StepSource:
    """Where the steps of a run come from: stored latents, or raw rows that are encoded on the way.

    The driver gives `datasets` to Ray Train, the workers call `start`, `resume_point` and `steps`, in this order.

    Args:
        config: of the run.
        stream: `stream(plan, first_step, end_step)` returns the plan's blocks of these steps as a Ray dataset.
        first_step, end_step: the run's steps that come from here (None: to the last); the plan counts from them.
    """

    def __init__(
        self, config: TrainingConfig, stream: Stream = latents_dataset, first_step: int = 0, end_step: int | None = None
    ):
        self.config, self.stream, self.first_step = config, stream, first_step
        self.end_step = config.max_steps if end_step is None else end_step

    @property
    def datasets(self) -> dict[str, Callable[[], ray.data.Dataset]]:
        """For `TorchTrainer(datasets=...)`."""
        return {"train": self.dataset}

    def dataset(self) -> ray.data.Dataset:
        """The data from the step at which the run resumes.

        Ray Train calls it for each group of workers, before the group starts, so this is where the checkpoint is
        chosen; the workers read the choice (`resume_point`). Raises RuntimeError if the run would resume before
        `first_step`.
        """
        step = choose_resume_point(self.config)["step"]
        if step < self.first_step:
            raise RuntimeError(
                f"The checkpoints of run_name={self.config.run_name!r} after step {self.first_step} are damaged: it "
                f"resumes at step {step}, whose pictures are encoded on the way: run it again."
            )
        plan = load_plan(self.config)
        row_bytes = max(manifest.row_bytes for manifest in read_manifests(self.config.proportions).values())
        return join_blocks(self.stream(plan, step - self.first_step, self.end_step - self.first_step), plan, row_bytes)

    def start(self) -> None:
        """Called before the model is built: Ray Data's processes start meanwhile."""
        ray.train.get_dataset_shard("train")

    def resume_point(self) -> dict:
        """{"checkpoint", "step"}: where this group of workers resumes; for rank 0."""
        return storage.read_json(storage.join(self.config.run_uri, RESUME))

    def steps(self, step: int, rejects: Rejects) -> Iterator[tuple[list[Unit], float]]:
        """Yield `(this worker's units, seconds it waited for data)` of each of the run's steps from `step` on.

        A worker that gets no unit yields a masked one, which tells the step's shape. While a step is trained on, a
        thread makes the tensors of the next one. Raises RuntimeError if the dataset does not start at `step` or is out
        of order.
        """
        config, manifests = self.config, read_manifests(self.config.proportions)
        plan, manifest = plan_run(manifests, config), next(iter(manifests.values()))
        shard, thread = ray.train.get_dataset_shard("train"), ThreadPoolExecutor(1)
        blocks = shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=4)
        steps = range(step - self.first_step, self.end_step - self.first_step)
        tables = worker_units(blocks, plan, steps, distributed.rank(), distributed.world_size())

        def prepare(step: int) -> tuple[list[Unit], list[pa.Table]]:
            received, latents = next(tables), plan.latents_at(step)
            units = []
            for number, rows in received.items():
                first_position = number % config.units_per_step * config.unit_rows
                units.append(Unit.from_arrow(rows, manifest, latents, first_position))
            masked_rows = config.micro_batch_size or config.unit_rows
            return units or [Unit.masked(manifest, latents, masked_rows)], list(received.values())

        coming = thread.submit(prepare, steps.start)
        for step in steps:
            started = time.perf_counter()
            units, received = coming.result()
            if step + 1 < steps.stop:
                coming = thread.submit(prepare, step + 1)
            for rows in received:  # not in `prepare`: rejects of a step that is not done belong to the next checkpoint
                rejects.add(rows)
            yield units, time.perf_counter() - started


class Rejects:
    """Rows that this worker received but that could not be encoded on the way (online), for the run's `rejects/`.

    `write` is called before the checkpoint that covers the steps; a step that is done again writes the same file name.
    """

    def __init__(self, config: TrainingConfig):
        self.run_uri, self.tables = config.run_uri, []

    def add(self, rows: pa.Table) -> None:
        if schema.REASON in rows.column_names:
            rejected = rows.filter(pc.not_equal(rows[schema.REASON], ""))
            if rejected.num_rows:
                self.tables.append(rejected.select([schema.ID, schema.REASON, schema.SOURCE]))

    def write(self, step: int) -> None:
        if self.tables:
            filesystem, path = storage.open_filesystem(storage.join(self.run_uri, "rejects"))
            filesystem.create_dir(path)
            name = f"{path}/{step:09d}-{distributed.rank():05d}.parquet"
            pq.write_table(pa.concat_tables(self.tables), name, filesystem=filesystem)
            self.tables = []


class MetricsWriter:
    """Gathers the ids of each global batch on rank 0 and writes the step's metrics, in a thread, during the next step.

    One line at a time, because a worker that dies would take the lines that are not yet written with it. `log`: rank
    0's; None on the other ranks.
    """

    def __init__(self, log: MetricsLog | None):
        self.log, self.group, self.pool = log, checkpoint.cpu_group(), ThreadPoolExecutor(1)
        self.written = None  # the last line's Future

    def write(self, step: int, metrics: dict, units: list[Unit], num_kept: int, speed: dict) -> None:
        """Call it on all ranks, with this rank's units."""
        self.wait()
        ids = [i for unit in units for i in unit.ids]
        self.written = self.pool.submit(self.gather_and_write, step, metrics, ids, num_kept, speed)

    def gather_and_write(self, step: int, metrics: dict, ids: list, num_kept: int, speed: dict) -> None:
        ranks = distributed.gather_objects(ids, self.group)
        if ranks:
            self.log.write(step, metrics, itertools.chain.from_iterable(ranks), num_kept, **speed)

    def wait(self) -> None:
        """Until the last line is written; raises what writing it raised."""
        if self.written:
            self.written.result()


def write_worker_info(config: TrainingConfig, log: MetricsLog | None) -> None:
    """Rank 0 writes `workers.json`: rank, node and process of each worker of this attempt. Call it on all ranks."""
    node_id = ray.get_runtime_context().get_node_id()
    workers = distributed.gather_objects({"rank": distributed.rank(), "node_id": node_id, "pid": os.getpid()})
    if log:
        storage.write_json(storage.join(config.run_uri, "workers.json"), {"attempt": log.attempt, "workers": workers})


# ---- resume


def last_step(config: TrainingConfig) -> int:
    """Steps done at the run's newest complete checkpoint; 0 without one."""
    uri = checkpoint.last_complete(config.run_uri)
    return 0 if uri is None else checkpoint.step_of(uri)


def choose_resume_point(config: TrainingConfig) -> dict:
    """Choose the newest complete checkpoint and write the choice to the run's `resume.json`.

    {"checkpoint": its name, None to start from step 0, "step": steps done}. Called once for each group of workers: when
    its dataset is built, or by rank 0 if it has none. A checkpoint that is completed later, by the upload of a worker
    that is being replaced, changes nothing for the group.
    """
    uri = checkpoint.last_complete(config.run_uri)
    point = {"checkpoint": uri and storage.name(uri), "step": 0 if uri is None else checkpoint.step_of(uri)}
    storage.write_json(storage.join(config.run_uri, RESUME), point)
    return point


def restore(train_step: TrainStep, resume_point: Callable[[], dict]) -> int:
    """Load the checkpoint of the resume point, else what `init_from` names; returns the steps done. For all ranks."""
    config = train_step.config

    def checkpoint_to_resume():
        name = resume_point()["checkpoint"]
        return name and as_checkpoint(storage.join(config.run_uri, name))

    with checkpoint_dir(checkpoint_to_resume) as folder:
        if folder:
            return checkpoint.load(folder, model=train_step.model, optimizer=train_step.optimizer, ema=train_step.ema)
    if config.init_from is not None:
        with checkpoint_dir(lambda: first_checkpoint(config) or as_checkpoint(config.init_from)) as folder:
            checkpoint.load_initial_weights(folder, train_step.unet)
    return 0


@contextlib.contextmanager
def checkpoint_dir(find: Callable[[], ray.train.Checkpoint | None]) -> Iterator[str | None]:
    """The local folder of the checkpoint that `find()` returns on rank 0, or None. Call it on all ranks.

    Rank 0 broadcasts the checkpoint, so all ranks load the same one, and each node downloads it once.
    """
    found = find() if distributed.rank() == 0 else None
    found = ray.train.collective.broadcast_from_rank_zero(found)
    if found is None:
        yield None
        return
    with found.as_directory() as folder:
        ray.train.collective.barrier()  # a worker that comes after the others left would download it again
        yield folder


def as_checkpoint(uri: str) -> ray.train.Checkpoint:
    """A folder as Ray Train's `Checkpoint`."""
    filesystem, path = storage.open_filesystem(uri)
    return ray.train.Checkpoint(path, filesystem)


def last_checkpoint(config: TrainingConfig) -> ray.train.Checkpoint | None:
    """The run's newest complete checkpoint; None without one."""
    uri = checkpoint.last_complete(config.run_uri)
    return uri and as_checkpoint(uri)


def first_checkpoint(config: TrainingConfig) -> ray.train.Checkpoint | None:
    """The newest complete checkpoint of the run that `init_from` names; None if this storage has no such run."""
    if config.init_from is None or "/" in config.init_from:
        return None
    uri = checkpoint.last_complete(storage.join(config.storage, "runs", config.init_from))
    return uri and as_checkpoint(uri)


# ---- checkpoints


class CheckpointManager:
    """Saves checkpoints while training goes on, and has them validated: beside it, or by the workers themselves.

    A Ray task validates where there is a GPU that nobody uses (`evaluation.at_checkpoints`); where there is none it
    would wait until training ends, and keep every checkpoint until then. So the workers do what takes a GPU between two
    steps, and the task the rest. The last checkpoint is left to the task, which gets a GPU of the trainers.

    Training stops only while the state is copied to CPU memory, pinned and kept where there is a GPU. A thread of Ray
    Train then writes it, each worker its own part, and uploads it to the run's folder. A checkpoint counts once all of
    its files are there (`checkpoint.find_corruption`).

    If a worker cannot upload its part, that checkpoint is lost: rank 0 reports a `fault_tolerance.LostCheckpoint`,
    training goes on, and the folder is deleted when the run is started again. After several in a row
    `monitoring.RecordFailures` ends the run; after the last step Ray Train starts the workers again (`max_failures`).

    Args:
        train_step: what is saved.
        log: rank 0's metrics, whose attempt is part of a checkpoint's name; None on the other ranks.
        evaluate: as `train_loop_per_worker` takes it.
    """

    def __init__(self, train_step: TrainStep, log: MetricsLog | None, evaluate: Callable | None = None):
        self.train_step, self.log, self.evaluate = train_step, log, evaluate
        self.group = checkpoint.cpu_group()
        self.stager = checkpoint.open_stager()
        # Ray Train recognises checkpoints in its own folder only by its own file system.
        self.filesystem = ray.train.get_context().get_storage().storage_filesystem
        self.uploaded = threading.Event()  # set unless a checkpoint is being written or uploaded
        self.uploaded.set()
        self.lost = None  # rank 0's: why the last checkpoint was lost

    def save(self, step: int) -> float:
        """Start to save; returns the seconds that training waited, the rest of the previous upload included."""
        started, config, state = time.perf_counter(), self.train_step.config, self.train_step
        self.uploaded.wait()
        due = bool(config.validate_every) and (step % config.validate_every == 0 or step == config.max_steps)
        if due and step < config.max_steps and not has_spare_gpu(state.device, config.training_accelerator_type):
            due = self.evaluate is not None
            if due:
                with state.averaged() as unet:
                    self.evaluate(unet, config, step)
        folder = tempfile.mkdtemp()  # each worker's own, also where several share a node
        parts = dict(model=state.model, optimizer=state.optimizer, ema=state.ema)
        finish = checkpoint.async_save(folder, **parts, step=step, group=self.group, stager=self.stager)
        self.uploaded.clear()
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            # Ray Train takes rank 0's name.
            checkpoint_dir_name=checkpoint.checkpoint_name(step, self.log.attempt) if self.log else None,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=functools.partial(self.upload, finish),
            delete_local_checkpoint_after_upload=False,
            validation=due,
        )
        return time.perf_counter() - started

    def upload(self, finish: Callable[[], None], local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        """In Ray Train's thread: wait until the files are written, then copy them to `name` in the run's folder.

        Raises nothing that the storage raises: Ray Train would call it again, or start all workers again.
        """
        try:
            finish()
            run_uri, error = self.train_step.config.run_uri, None
            uri = storage.join(run_uri, name)
            path = storage.open_filesystem(uri)[1]
            try:
                if self.log:
                    storage.retry(self.log.flush)  # a run that resumes continues the step's samples_seen
                storage.copy_folder(local.path, uri)
            except OSError as refused:
                error = f"{type(refused).__name__}: {refused}"
            ranks = distributed.gather_objects(error, self.group) or []  # Ray Train goes by what rank 0 reports
            self.lost = next((f"{name} could not be uploaded: {error}" for error in ranks if error), None)
            if self.lost:
                fault_tolerance.write_failure(run_uri, self.lost)
                return fault_tolerance.LostCheckpoint(path, self.filesystem, self.lost)
            return ray.train.Checkpoint(path, self.filesystem)
        finally:
            shutil.rmtree(local.path)
            self.uploaded.set()


# ---- validation


def has_spare_gpu(device: torch.device, accelerator_type: str | None = None) -> bool:
    """Whether a Ray task can validate beside the training: on a GPU of the trainers' kind that nobody uses, or on CPUs.

    For all ranks.
    """
    spare = device.type != "cuda"
    if distributed.rank() == 0 and not spare:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        free = [node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)]
        of_kind = [node for node in free if accelerator_type is None or f"accelerator_type:{accelerator_type}" in node]
        spare = any(node.get("GPU", 0) >= 1 for node in of_kind)
    return ray.train.collective.broadcast_from_rank_zero(spare)
