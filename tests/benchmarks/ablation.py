"""Images a second as one thing after another is switched on: the documents' ablation on hardware of your own.

    python -m tests.benchmarks.ablation   # the tiny U-Net, two workers, this CPU
    python -m tests.benchmarks.ablation --unet sd2-base --resolution 256 512 --workers 8 --gpus --batch 256 \\
        --micro-batch 16 --address auto --storage /shared/folder

Random latents, full training steps, all rows in one fit. Printed beside the published Tables 3.a and 3.b, which name
the network (EFA) where this names number formats and layouts. --address: of a Ray cluster; without it one is started
here.
"""

import argparse
import tempfile

import pandas as pd
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from helpers import run_setup, storage
from helpers.config import TrainingConfig
from helpers.lesson import ablations, published_results
from helpers.runtime import session
from tests.benchmarks import record


def measure(config, steps):
    """(a frame with a row a setting, the workers' hardware)"""
    trainer = TorchTrainer(
        ablations.ablation_per_worker,
        train_loop_config={"config": config.to_dict(), "steps": steps},
        scaling_config=ScalingConfig(
            num_workers=config.num_training_workers,
            use_gpu=config.use_gpu,
            accelerator_type=config.training_accelerator_type,
        ),
        run_config=RunConfig(**run_setup.run_folder(config)),
    )
    trainer.fit()
    found = storage.read_json(storage.join(config.run_uri, "ablation.json"))
    return pd.DataFrame(found["rows"]).set_index("setting"), found["hardware"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="tiny")
    parser.add_argument("--resolution", type=int, nargs="+", default=[64])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU a worker")
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accelerator-type", default=None, help="of the workers' GPUs, for example A100")
    parser.add_argument("--address", default="local")
    parser.add_argument("--storage", default=None, help="a folder that every node reaches")
    given = parser.parse_args()
    if given.address == "local":
        session.connect("local", **({} if given.gpus else {"num_cpus": given.workers + 1}))
    else:
        session.connect(given.address)
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        for resolution in given.resolution:
            table, hardware = measure(
                TrainingConfig(
                    storage=given.storage or folder,
                    run_name=f"ablation-{resolution}",
                    unet_config=given.unet,
                    resolution=resolution,
                    num_training_workers=given.workers,
                    use_gpu=given.gpus,
                    training_accelerator_type=given.accelerator_type,
                    global_batch_size=given.batch,
                    units_per_step=given.workers,
                    micro_batch_size=given.micro_batch,
                ),
                given.steps,
            )
            print(f"{given.unet} at {resolution}, {given.workers} workers ({hardware}), batch {given.batch}")
            print(table.round(3).to_string(), flush=True)
            tables[resolution] = table
    for resolution in (256, 512):
        print(f"\npublished, {resolution} pixels (blog, Tables 3.a and 3.b)")
        print(published_results.published_ablation(resolution).round(2).to_string())
    record.write(
        "ablation",
        {
            f"{given.unet} at {resolution} pixels, from the plain step to the fastest": (
                f"{table['images/s'].iloc[0]:.0f} to {table['images/s'].max():.0f} images/s"
            )
            for resolution, table in tables.items()
        },
        tables={resolution: table.reset_index().to_dict("records") for resolution, table in tables.items()},
    )


if __name__ == "__main__":
    main()
