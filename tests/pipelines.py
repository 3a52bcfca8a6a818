"""The notebooks' two main cells as functions, for tests that run them with other parameters."""

import functools

from ray.data import ActorPoolStrategy, TaskPoolStrategy
from ray.train import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
)
from ray.train.torch import TorchTrainer

from helpers import encoder, evaluate, ingest, preprocess, sources, storage, train


def build_pipeline(job, config):
    """`pipeline(segment)` of Preprocessing.ipynb."""

    def pipeline(segment):
        return (
            sources.read_rows(segment, config)
            .map_batches(
                functools.partial(preprocess.transform, config=config), batch_format="pyarrow", batch_size=256,
                compute=TaskPoolStrategy(size=config.num_transform_workers),
            )
            .map_batches(
                encoder.LatentEncoder, fn_constructor_args=encoder.arguments(config), batch_format="pyarrow",
                batch_size=config.encoder_batch_size, compute=ActorPoolStrategy(size=config.num_encoders), num_cpus=0.5,
            )
            .map_batches(
                preprocess.write_latents, fn_kwargs=job.write_arguments(segment), batch_format="pyarrow",
                batch_size=1024, num_cpus=0.25,
            )
        )  # fmt: skip

    return pipeline


def encode(config, progress=None):
    """Run a whole preprocessing job; returns its manifest."""
    job = preprocess.prepare(config)
    return job.run(build_pipeline(job, config), progress)


def fit(config, validate=True):
    """Run the training of Training.ipynb; returns Ray Train's result."""
    train.open_run(config)
    validation = ValidationConfig(evaluate.validate, ValidationTaskConfig(fn_kwargs={"config": config.to_dict()}))
    return TorchTrainer(
        train.train_loop_per_worker,
        train_loop_config=config.to_dict(),
        scaling_config=ScalingConfig(num_workers=config.num_training_workers),
        run_config=RunConfig(
            name=config.run_name, storage_path=storage.join(config.storage, "runs"),
            failure_config=FailureConfig(max_failures=config.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoints_kept),
        ),
        datasets={"train": functools.partial(train.remaining_steps, config)},
        dataset_config=DataConfig(execution_options=ingest.execution_options()),
        validation_config=validation if validate and config.validate_every else None,
    ).fit()  # fmt: skip
