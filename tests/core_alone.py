"""Encodes, trains on two workers of which one is killed, goes on, and samples, with the core of helpers alone.

`python core_alone.py FOLDER`, where `helpers` without online/, production/ and lesson/ can be imported.
"""

import dataclasses
import functools
import io
import os
import signal
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.train
from PIL import Image
from ray.data import ActorPoolStrategy
from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from helpers import cluster, sample
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder, prepare, stages
from helpers.latents.read import execution_options
from helpers.raw import inputs
from helpers.train import loop, run_folder, start
from helpers.train.extra import Extra, Hook
from helpers.train.metrics import read_metrics
from helpers.train.source import StepSource

ROWS, STEPS, KILLED_AT = 96, 8, 6


def write_images(folder):
    os.makedirs(folder)
    rows = {"image": [], "caption": [], "number": []}
    for number in range(ROWS):
        file = io.BytesIO()
        Image.fromarray(np.full((40, 40, 3), 2 * number, np.uint8)).save(file, "JPEG")
        rows["image"].append(file.getvalue())
        rows["caption"].append(f"grey number {number}")
        rows["number"].append(number)
    pq.write_table(pa.table(rows), f"{folder}/images.parquet")


def pipeline(job, segment):
    model = {"fn_constructor_kwargs": prepare.encoder_arguments(job.config), "batch_size": 64}
    actors = {"compute": ActorPoolStrategy(size=1), "num_cpus": 0.5}
    return (
        inputs.read_rows(segment, job.config)
        .map_batches(functools.partial(stages.transform, config=job.config), batch_size=64, batch_format="pyarrow")
        .map_batches(encoder.LatentEncoder, batch_format="pyarrow", **model, **actors)
        .map_batches(
            stages.write_latents, batch_format="pyarrow", fn_kwargs=job.write_arguments(segment), num_cpus=0.25
        )
    )


@dataclasses.dataclass(frozen=True)
class KillOnce(Extra):
    flag: str

    def __call__(self, run):
        return Kill(self.flag)


class Kill(Hook):
    def __init__(self, flag):
        self.flag = flag

    def before_step(self, step, units):
        if step == KILLED_AT and ray.train.get_context().get_world_rank() == 1 and not os.path.exists(self.flag):
            open(self.flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder):
    cluster.connect("local", num_cpus=4)
    write_images(f"{folder}/raw")
    columns = {"image_column": "image", "caption_column": "caption", "id_column": "number"}
    raw = {"input_uri": f"{folder}/raw", "input_format": "parquet", **columns, "resolutions": [32]}
    job = prepare.prepare_job(PreprocessingConfig(storage=folder, **raw))
    print("encoded:", job.run(functools.partial(pipeline, job)).written)
    short = {"global_batch_size": 16, "max_steps": STEPS, "checkpoint_every": 4, "warmup_steps": 2}
    config = TrainingConfig(storage=folder, resolution=32, num_training_workers=2, strategy="fsdp", **short)
    data, source = start.open_run(config), StepSource(config)
    options = execution_options(data.row_bytes, config.global_batch_size)
    safety = {"failure_config": FailureConfig(1), "checkpoint_config": CheckpointConfig(2)}
    killed = KillOnce(f"{folder}/killed")
    trainer = TorchTrainer(
        functools.partial(loop.train_loop_per_worker, config=config, source=source, extras=[killed]),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(**start.run_location(config), **safety),
        datasets=source.datasets,
        dataset_config=DataConfig(execution_options=options),
    )
    with run_folder.raise_end(config.run_uri):
        trainer.fit()
    attempts = read_metrics(config.run_uri, all_attempts=True)
    again = attempts.groupby("step")["loss"].nunique()
    print("attempts:", attempts["attempt"].max(), "steps:", read_metrics(config.run_uri)["step"].tolist())
    print("losses that differ between attempts:", int((again > 1).sum()))
    (image,) = sample.sample(config, ["grey number 3"], run_folder.last_checkpoint(config), steps=2)
    print("sampled:", image.shape)


if __name__ == "__main__":
    main(sys.argv[1])
