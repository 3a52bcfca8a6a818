"""Images a second on 1, 2, 4, ... workers, the share of a step that is communication, and a prediction beyond.

    python -m tests.benchmarks.scaling [--workers 1 2 4] [--strategy ddp fsdp] [--rounds 3]  # tiny U-Net, CPU
    python -m tests.benchmarks.scaling --unet sd2-base --resolution 256 --workers 8 16 32 --gpus --batch 128 \\
        --precision bf16 --compile --address auto --storage /shared/folder

--batch is a worker's, so the global batch grows with the workers (weak scaling), and efficiency is images/s a worker
over that of the fewest workers; numbers of workers take turns, medians are printed. On a CPU each worker has the same
threads however many there are: the cores over the most workers, at least one; workers beyond the cores share them and
cannot scale. Bus bandwidth is that of an all-reduce, 2 (n - 1) / n of its bytes a second, as nccl-tests counts it: it
tells whether EFA is on. --gpus: one a worker, of the kind --accelerator-type. --storage: a folder that every node
reaches. The prediction holds for sd2-base (865.9 M parameters) at --step-seconds (128 images at the documents' 185
images/s) and --bandwidth, GB/s of a node's network (by default with EFA, and without).
"""

import itertools
import statistics
import tempfile

import pandas as pd
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

from helpers import distributed, storage
from helpers.config.notebook import TrainingConfig
from helpers.lesson import ablations, estimates, network, published_results
from helpers.runtime import session
from helpers.train import profiling, setup
from tests.benchmarks import record


def measure_per_worker(values):
    """What every worker runs; rank 0 writes what it found."""
    config, context = TrainingConfig.from_dict(values["config"]), ray.train.get_context()
    distributed.use_cores(values["most_workers"])
    found = ablations.measure_step(config, get_device(), steps=values["steps"])
    bandwidth = float("nan")
    if distributed.world_size() > 1:
        size = 2**30 if get_device().type == "cuda" else 2**22
        bandwidth = network.measure_bandwidth(get_device(), [size])[0]["bus bandwidth, GB/s"]
    if context.get_world_rank() == 0:
        found["hardware"] = profiling.hardware(get_device())
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
        step_seconds=0.69,
        bandwidth=[published_results.FACTS[f"network of a node, {kind}"].value for kind in ("EFA", "TCP")],
    )
    session.connect(given.address, max(given.workers) + 1)
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy in given.strategy:
            found = {count: [] for count in given.workers}
            for number, count in itertools.product(range(given.rounds), given.workers):
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
                found[count].append(measure(config, steps=given.steps, most_workers=max(given.workers)))
            rows = []
            for count, runs in found.items():
                rate, talk, bandwidth = (
                    statistics.median(run[what] for run in runs)
                    for what in ("images/s", "communication", "bus bandwidth, GB/s")
                )
                rows.append(
                    {
                        "workers": count,
                        "images/s": rate,
                        "a worker": rate / count,
                        "efficiency": rate / count / (rows[0]["a worker"] if rows else rate / count),
                        "communication": talk,
                        "bus bandwidth, GB/s": bandwidth,
                    }
                )
            what = f"{given.unet} at {given.resolution}, {strategy}, {given.precision}, batch {given.batch} a worker"
            print(f"{what} ({runs[0]['hardware']})")
            print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)
            tables[strategy] = {"what": what, "on": runs[0]["hardware"], "rows": rows}
    for bandwidth in given.bandwidth:
        for strategy in ("ddp", "fsdp"):
            print(
                f"\npredicted: 865.9 M parameters, {strategy}, {given.step_seconds} s a step, {bandwidth} GB/s a node"
            )
            table = estimates.predict_scaling(865_910_724, given.step_seconds, bandwidth, strategy=strategy)
            print(table.round(3).to_string(index=False))
    record.write(
        "scaling",
        {
            f"{table['what']}, on {', '.join(map(str, given.workers))} workers": ", ".join(
                f"{row['images/s']:.0f}" for row in table["rows"]
            )
            + " images/s; efficiency "
            + ", ".join(f"{row['efficiency']:.2f}" for row in table["rows"])
            for table in tables.values()
        },
        strategies=tables,
    )


if __name__ == "__main__":
    main()
