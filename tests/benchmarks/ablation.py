"""Images a second as one thing after another is switched on: the documents' ablation on hardware of your own.

    python -m tests.benchmarks.ablation                                                # the tiny U-Net, two workers, this CPU
    python -m tests.benchmarks.ablation --unet sd2-base --resolution 512 --workers 8 --gpus --batch 256 --micro-batch 32 \\
        --address auto --storage /shared/folder

Random latents, full training steps, all rows in one fit. Printed beside the published Tables 3.a and 3.b, which say the
network (EFA) where this says number formats and layouts. --address: of a Ray cluster; a new one on this machine without.
"""

import argparse
import tempfile

import pandas as pd
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from helpers import costs, session, storage, train
from helpers.config import TrainingConfig


def measure(config, steps):
    """A frame with a row a setting."""
    trainer = TorchTrainer(
        train.ablation_per_worker,
        train_loop_config={"config": config.to_dict(), "steps": steps},
        scaling_config=ScalingConfig(num_workers=config.num_training_workers, use_gpu=config.use_gpu),
        run_config=RunConfig(name=config.run_name, storage_path=storage.join(config.storage, "runs")),
    )
    trainer.fit()
    return pd.DataFrame(storage.read_json(storage.join(config.run_uri, "ablation.json"))).set_index("setting")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unet", default="tiny")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU a worker")
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--address", default="local")
    parser.add_argument("--storage", default=None, help="a folder that every node reaches")
    given = parser.parse_args()
    if given.address == "local":
        session.connect("local", **({} if given.gpus else {"num_cpus": given.workers + 1}))
    else:
        session.connect(given.address)
    with tempfile.TemporaryDirectory() as folder:
        table = measure(TrainingConfig(
            storage=given.storage or folder, run_name="ablation", unet_config=given.unet, resolution=given.resolution,
            num_training_workers=given.workers, use_gpu=given.gpus, global_batch_size=given.batch,
            units_per_step=given.workers, micro_batch_size=given.micro_batch,
        ), given.steps)  # fmt: skip
    hardware = torch.cuda.get_device_name() if given.gpus and torch.cuda.is_available() else "CPU"
    print(f"{given.unet} at {given.resolution}, {given.workers} workers ({hardware}), batch {given.batch}, torch {torch.__version__}")
    print(table.round(3).to_string())
    if given.resolution in (256, 512):
        print("\npublished (blog, Tables 3.a and 3.b)")
        print(costs.published_ablation(given.resolution).round(2).to_string())


if __name__ == "__main__":
    main()
