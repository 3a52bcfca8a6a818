"""What the scripts of this folder share: ranks that step together, and a line of row ids for each step.

It needs PyTorch alone, because each peer has an environment of its own. `Run.save` and `Run.saved` stand for the
checkpoint that a user writes anyway; what resuming the data adds stands between `# resume:` and `# end`.
"""

import argparse
import json
import os
import pathlib
import time

import numpy as np
import torch
import torch.distributed as dist

EPOCHS, BATCH, SEED = 2, 64, 0
SHAPES = {"latents": (2, 4, 32, 32), "text": (77, 1024)}  # of SD2 at 256 pixels, in half precision


def made_up_row(number):
    """{"id": the number, "latents", "text": bytes}"""
    random = np.random.default_rng(number)
    return {"id": number, **{name: random.bytes(2 * int(np.prod(shape))) for name, shape in SHAPES.items()}}


def collate(rows):
    """{"id": numbers, "read": rows that the reading process had read by then, the tensors by name}"""
    tensors = {
        name: torch.from_numpy(np.stack([np.frombuffer(row[name], np.float16).reshape(shape) for row in rows]))
        for name, shape in SHAPES.items()
    }
    return {"id": torch.tensor([row["id"] for row in rows]), "read": rows[-1].get("read"), **tensors}


class Run:
    """A rank's part of a run.

    Args:
        folder: of the run: checkpoints, and `rank-R.jsonl` with a line for each step.
        rank, world: of the run's processes.
        save_every: steps between checkpoints.
        halt: steps after which the rank waits to be killed; 0: none.
    """

    def __init__(self, folder, rank, world, save_every, halt):
        self.folder, self.rank, self.world, self.save_every, self.halt = folder, rank, world, save_every, halt
        self.step, self.first_epoch = 0, 0

    @property
    def rank_batch(self):
        return BATCH // self.world

    def together(self, batches):
        """Yield the batches, all ranks at once, until one of the ranks has no more."""
        batches = iter(batches)
        while True:
            batch = next(batches, None)
            more = torch.tensor(int(batch is not None))
            dist.all_reduce(more, dist.ReduceOp.MIN)
            if not more:
                return
            yield batch

    def note(self, epoch, batch):
        """Write the line of a step; wait to be killed if it is the step to halt at."""
        line = {"step": self.step, "epoch": epoch, "at": time.time(), "ids": [int(row) for row in batch["id"]]}
        with open(f"{self.folder}/rank-{self.rank}.jsonl", "a") as lines:
            lines.write(json.dumps({**line, "read": batch.get("read")}) + "\n")
        self.step += 1
        if self.step == self.halt:
            time.sleep(3600)

    @property
    def saves_now(self):
        return self.step % self.save_every == 0

    def save(self, epoch, of_rank=False, **state):
        """Write a checkpoint of rank 0, or of each rank."""
        if of_rank or self.rank == 0:
            path = f"{self.folder}/saved-{self.rank}-{self.step:06d}"
            torch.save({"step": self.step, "epoch": epoch, **state}, f"{path}.part")
            os.replace(f"{path}.part", f"{path}.pt")

    def saved(self, of_rank=False):
        """The newest checkpoint, or None; the run goes on at its step and epoch."""
        paths = sorted(pathlib.Path(self.folder).glob(f"saved-{self.rank if of_rank else 0}-*.pt"))
        if not paths:
            return None
        state = torch.load(paths[-1], weights_only=False)
        self.step, self.first_epoch = state["step"], state["epoch"]
        return state


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["write", "train"])
    parser.add_argument("--data")
    parser.add_argument("--run")
    for name in ("rows", "world", "save-every", "halt"):
        parser.add_argument(f"--{name}", type=int, default=0)
    return parser.parse_args()


def main(write, train):
    """`write(folder, rows)` the data, or `train(folder, run)` as one rank, whose number torchrun's variables give."""
    given = options()
    if given.what == "write":
        write(given.data, given.rows)
        return
    dist.init_process_group("gloo")
    train(given.data, Run(given.run, dist.get_rank(), dist.get_world_size(), given.save_every, given.halt))
    dist.barrier()
    os._exit(0)  # the lines are written; worker processes of a loader need not end first
