"""Images a second on 1, 2, 4, ... workers, and the share of a step that is communication.

    python -m tests.benchmarks.scaling [--workers 1 2 4] [--strategy ddp fsdp] [--rounds 3]  # tiny U-Net, CPU
    python -m tests.benchmarks.scaling --unet sd2-base --resolution 256 --workers 8 16 32 --gpus --batch 128 \\
        --precision bf16 --compile --address auto --storage /shared/folder

--batch is a worker's, so the global batch grows with the workers (weak scaling), and efficiency is images/s a worker
over that of the fewest workers; numbers of workers take turns, medians are printed. On a CPU each worker has the same
threads however many there are: the cores over the most workers, at least one; workers beyond the cores share them and
cannot scale. Bus bandwidth is that of an all-reduce, 2 (n - 1) / n of its bytes a second, as nccl-tests counts it: it
tells whether EFA is on. --gpus: one a worker, of the kind --accelerator-type. --storage: a folder that every node
reaches.
"""

import itertools
import tempfile

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

from helpers import cluster, distributed, storage
from helpers.config import TrainingConfig
from helpers.lesson import ablations, network
from helpers.train import setup
from tests.benchmarks import record


def measure_per_worker(values):
    """What every worker runs; rank 0 writes what it found."""
    config, context = TrainingConfig(**values["config"]), ray.train.get_context()
    distributed.use_cores(values["most_workers"])
    found = ablations.measure_step(config, get_device(), steps=values["steps"])
    bandwidth = float("nan")
    if distributed.world_size() > 1:
        size = 2**30 if get_device().type == "cuda" else 2**22
        bandwidth = network.measure_bandwidth(get_device(), [size])[0]["bus bandwidth, GB/s"]
    if context.get_world_rank() == 0:
        found["bus bandwidth, GB/s"] = bandwidth
        storage.write_json(storage.join(config.run_uri, "speed.json"), found)


def measure(config, **values):
    TorchTrainer(
        measure_per_worker,
        train_loop_config={"config": config.to_dict(), **values},
        scaling_config=ScalingConfig(
            num_workers=config.num_training_workers,
            use_gpu=config.use_gpu,
            accelerator_type=config.training_accelerator_type,
        ),
        run_config=RunConfig(**setup.run_folder(config)),
    ).fit()
    return storage.read_json(storage.join(config.run_uri, "speed.json"))


def main():
    given = record.options(
        __doc__,
        unet="tiny",
        resolution=64,
        workers=[1, 2, 4],
        strategy=["ddp", "fsdp"],
        precision="fp32",
        compile=False,
        gpus=False,
        batch=32,
        steps=40,
        rounds=3,
        accelerator_type=None,
        address="local",
        storage=None,
    )
    cluster.connect(given.address, max(given.workers) + 1)
    found, summary = {strategy: {count: [] for count in given.workers} for strategy in given.strategy}, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, strategy, count in itertools.product(range(given.rounds), given.strategy, given.workers):
            config = TrainingConfig(
                storage=given.storage or folder,
                run_name=f"scaling-{strategy}-{count}-{number}",
                unet_config=given.unet,
                resolution=given.resolution,
                num_training_workers=count,
                use_gpu=given.gpus,
                strategy=strategy,
                global_batch_size=given.batch * count,
                units_per_step=count,
                precision=given.precision,
                compile_unet=given.compile,
                training_accelerator_type=given.accelerator_type,
            )
            run = measure(config, steps=given.steps, most_workers=max(given.workers))
            found[strategy][count].append((run["images/s"], run["communication"], run["bus bandwidth, GB/s"]))
    for strategy, runs in found.items():
        rates, communication, bandwidths = zip(*record.medians(runs).values(), strict=True)
        each = [rate / count for rate, count in zip(rates, given.workers, strict=True)]
        what = f"{given.unet} at {given.resolution}, {strategy}, {given.precision}, batch {given.batch} a worker, "
        summary[f"{what}on {', '.join(map(str, given.workers))} workers"] = (
            f"{texts(rates, '.0f')} images/s; efficiency {texts([rate / each[0] for rate in each], '.2f')}; "
            f"communication {texts(communication, '.0%')} of a step; bus bandwidth {texts(bandwidths, '.1f')} GB/s"
        )
    record.write("scaling", summary, runs=found)


def texts(values, form):
    return ", ".join(format(value, form) for value in values)


if __name__ == "__main__":
    main()
