"""Ray Data alone under Ray Train, as the guides on loading data and on handling failures say.

Tried: files in a seeded order and a local shuffle buffer; blocks in order; a checkpoint with step and epoch, restored
by `ray.train.get_checkpoint`. The iterator has no state (Ray's issue 37633), so the restarted workers begin the epoch
again.
"""

import json
import pathlib
import sys
import tempfile

import ray
import ray.train
import torch.distributed as dist
from ray import cloudpickle
from ray.train.torch import TorchTrainer

from helpers import cluster
from tests.benchmarks import made_up, read_speed
from tests.benchmarks.resume_peers import ranks
from tests.benchmarks.resume_peers.this_project import write

for module in (sys.modules[__name__], ranks, read_speed, made_up):
    cloudpickle.register_pickle_by_value(module)


class Collate(read_speed.ToTensors):
    """A batch's tensors, and its ids."""

    def __call__(self, table):
        return {**super().__call__(table), "id": table["id"].to_pylist()}


def train_per_worker(given):
    """What each training worker runs."""
    run = ranks.Run(given.run, dist.get_rank(), dist.get_world_size(), given.save_every, given.halt)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            run.step, run.first_epoch = json.loads(pathlib.Path(folder, "progress.json").read_text())
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(run.first_epoch, ranks.EPOCHS):
        shuffle = {"local_shuffle_buffer_size": 1000, "local_shuffle_seed": ranks.SEED + epoch}
        batches = shard.iter_torch_batches(batch_size=run.rank_batch, drop_last=True, collate_fn=Collate(), **shuffle)
        for batch in run.together(batches):
            run.note(epoch, batch)
            if run.saves_now:
                with tempfile.TemporaryDirectory() as folder:
                    pathlib.Path(folder, "progress.json").write_text(json.dumps([run.step, epoch]))
                    saved = ray.train.Checkpoint.from_directory(folder) if run.rank == 0 else None
                    ray.train.report({}, checkpoint=saved)


def train(given):
    cluster.connect(num_cpus=given.world + 2)
    rows = ray.data.read_parquet(f"{given.data}/data", shuffle=ray.data.FileShuffleConfig(seed=ranks.SEED))
    in_order = ray.data.ExecutionOptions(preserve_order=True)
    TorchTrainer(
        train_per_worker,
        train_loop_config=given,
        datasets={"train": rows},
        dataset_config=ray.train.DataConfig(execution_options=in_order),
        scaling_config=ray.train.ScalingConfig(num_workers=given.world),
        run_config=ray.train.RunConfig(name="exact", storage_path=given.run),
    ).fit()


if __name__ == "__main__":
    given = ranks.options()
    write(given.data, given.rows) if given.what == "write" else train(given)
