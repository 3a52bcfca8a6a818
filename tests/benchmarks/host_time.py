"""Host time between backward and the next step: clip, AdamW and EMA on sharded parameters against plain ones.

    python -m tests.benchmarks.host_time [--steps 10] [--layers 2]

The U-Net has the 686 parameters of Stable Diffusion 2, each of a few numbers, so that what is timed is PyTorch's
dispatch on the host, and not the arithmetic, which a GPU would do meanwhile. CPU time of one thread.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from helpers.config import TrainingConfig
from helpers.lesson import ablations
from helpers.train_step import TrainStep
from helpers.unet import load_unet_config
from tests.benchmarks import record


def measure(unet_config, strategy, steps):
    """(number of parameters, milliseconds of CPU time of `TrainStep.update`: the median step)."""
    # In bf16 one process shards over itself.
    config = TrainingConfig(unet_config=unet_config, strategy=strategy, precision="bf16", global_batch_size=1)
    state = TrainStep(config, ablations.random_batch(config)[0])
    parameters, seconds = list(state.model.parameters()), []
    assert isinstance(parameters[0], DTensor) == (strategy != "ddp")
    for step in range(steps + 2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        started = time.process_time()
        state.update(step, torch.zeros(()), learning_rate=1e-3)
        seconds.append(time.process_time() - started)
    return len(parameters), 1e3 * statistics.median(seconds[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2, help="of each of the U-Net's blocks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    small = dict(
        block_out_channels=[4, 8, 16, 16], attention_head_dim=[1] * 4, norm_num_groups=4, cross_attention_dim=8
    )
    with tempfile.TemporaryDirectory() as folder:
        unet = pathlib.Path(folder, "unet.json")
        unet.write_text(json.dumps({**load_unet_config("sd2-base"), **small, "layers_per_block": arguments.layers}))
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        number, plain = measure(str(unet), "ddp", arguments.steps)
        _, sharded = measure(str(unet), "fsdp", arguments.steps)
        dist.destroy_process_group()
    ratio = sharded / plain
    print(f"{number} parameters: {plain:.1f} ms on plain tensors, {sharded:.1f} ms on shards, {ratio:.2f} times")
    name = f"host time of clip, AdamW and EMA, {number} sharded parameters against plain ones"
    record.write(
        "host_time", {name: f"{sharded:.1f} against {plain:.1f} ms: {ratio:.2f}"}, plain=plain, sharded=sharded
    )


if __name__ == "__main__":
    main()
