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

from helpers import encoder, evaluate, ingest, online, preprocess, run_setup, storage, train, train_step
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.data_io import inputs
from helpers.lesson import captioned_shapes
from helpers.runtime import fault_tolerance, metrics_log, monitoring


def build_pipeline(job, config, transform=preprocess.transform, latent_encoder=encoder.LatentEncoder, on=None):
    """`pipeline(segment)` of Preprocessing.ipynb; `on`: an accelerator type that encoders are placed on."""

    def pipeline(segment):
        return (
            inputs.read_rows(segment, config)
            .map_batches(
                functools.partial(transform, config=config),
                batch_format="pyarrow",
                batch_size=256,
                compute=TaskPoolStrategy(size=config.num_transform_workers),
            )
            .map_batches(
                latent_encoder,
                fn_constructor_args=encoder.arguments(config),
                batch_format="pyarrow",
                fn_constructor_kwargs={"batch_size": config.encoder_batch_size},
                batch_size=8 * config.encoder_batch_size,
                compute=ActorPoolStrategy(size=config.num_encoders),
                num_cpus=0.5,
                **({"accelerator_type": on} if on else {}),
            )
            .map_batches(
                preprocess.write_latents,
                fn_kwargs=job.write_arguments(segment),
                batch_format="pyarrow",
                batch_size=1024,
                num_cpus=0.25,
            )
        )

    return pipeline


def encode(config, progress=None, **changes):
    """Run a whole preprocessing job, or with other parts (see `build_pipeline`); returns its manifest."""
    job = preprocess.prepare(config)
    return job.run(build_pipeline(job, config, **changes), progress)


def draw_and_encode(storage_uri, num_rows):
    """Drawn pictures, encoded at 32 pixels: data for `short_run`. Returns the storage."""
    config = PreprocessingConfig(storage=str(storage_uri), resolutions=[32])
    captioned_shapes.write_parquet(config.raw_uri, num_rows)
    encode(config)
    return config.storage


def short_run(storage_uri, name, **changes):
    """The parameters of a run of some seconds, two units a step, that saves every ten steps and is not validated."""
    return TrainingConfig(
        **{
            "storage": storage_uri,
            "run_name": name,
            "resolution": 32,
            "global_batch_size": 32,
            "units_per_step": 2,
            "max_steps": 40,
            "warmup_steps": 4,
            "checkpoint_every": 10,
            "validate_every": 0,
            "validation_share": 0.05,
            **changes,
        }
    )


def bare(config, num_steps):
    """The run that Ray should reproduce, without Ray: [(loss, samples_crc32)] of its first steps, in this process."""
    manifests = ingest.read_manifests(config)
    plan = ingest.plan_run(manifests, config)
    chunks = plan.chunk_range(0, num_steps)
    read = functools.partial(
        ingest.read_latents, resolution=config.resolution, validation_share=config.validation_share
    )
    tables = ingest.read_chunks(
        {"id": range(len(chunks))}, plan=plan, first_chunk=chunks.start, first_step=0, num_steps=num_steps, read=read
    )
    units = {}
    for table in tables:
        units.update(ingest.split_units(table, config.unit_rows))
    manifest = next(iter(manifests.values()))
    alone, found = train_step.TrainStep(config, manifest), []
    for step in range(num_steps):
        batch = [
            train_step.Unit.from_arrow(
                units[step * config.units_per_step + slot],
                manifest,
                config.resolution_at(step),
                slot * config.unit_rows,
            )
            for slot in range(config.units_per_step)
        ]
        found.append(
            (alone.step(step, batch)["loss"], metrics_log.samples_crc32([i for unit in batch for i in unit.ids]))
        )
    return found


def online_stream(
    plan,
    first_step,
    num_steps,
    *,
    resolution,
    validation_share,
    config,
    seed=0,
    num_encoders=1,
    latent_encoder=None,
    on=None,
    gpus=None,
):
    """`stream` of Online_Preprocessing_and_Training.ipynb; `latent_encoder()`: another class and its keyword arguments."""
    transform = functools.partial(online.transform, config=config, units_per_epoch=plan.units_per_epoch, seed=seed)
    kind, options = latent_encoder() if latent_encoder else (encoder.LatentEncoder, {})
    return (
        online.raw_rows(plan, first_step, num_steps, config=config, validation_share=validation_share)
        .map_batches(transform, batch_size=None, batch_format="pyarrow", compute=TaskPoolStrategy(size=1))
        .map_batches(
            kind,
            fn_constructor_args=encoder.arguments(config),
            batch_size=plan.block_rows,
            batch_format="pyarrow",
            num_cpus=0.5,
            num_gpus=gpus,
            fn_constructor_kwargs={"batch_size": config.encoder_batch_size, **options},
            compute=ActorPoolStrategy(size=num_encoders),
            **({"accelerator_type": on} if on else {}),
        )
    )


def fit(config, validate=True, loop=train.train_loop_per_worker, scaling=None, stream=ingest.latents_dataset):
    """Run the training of Training.ipynb, or with other parts; returns Ray Train's result."""
    run_setup.open_run(config)
    validation = ValidationConfig(evaluate.validate, ValidationTaskConfig(fn_kwargs={"config": config.to_dict()}))
    trainer = TorchTrainer(
        loop,
        train_loop_config=config.to_dict(),
        scaling_config=ScalingConfig(num_workers=config.num_training_workers, **(scaling or {})),
        run_config=RunConfig(
            name=config.run_name,
            storage_path=storage.join(config.storage, "runs"),
            failure_config=FailureConfig(max_failures=config.max_failures),
            callbacks=[fault_tolerance.RecordFailures(config.run_uri)],
            checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoints_kept),
        ),
        datasets={"train": functools.partial(train.build_train_dataset, config, stream)} if stream else None,
        dataset_config=DataConfig(execution_options=ingest.execution_options(config)),
        validation_config=validation if validate and config.validate_every else None,
    )
    with monitoring.interruptible():
        return trainer.fit()
