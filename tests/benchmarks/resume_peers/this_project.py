"""This project's own training loop through Ray Train, with steps that compute nothing and note their rows.

Tried: the trainer of Training.ipynb; the checkpoints are real ones, of the tiny U-Net, and hold no state of the data.
`units_per_step` is a number that the numbers of workers divide.
"""

import functools
import sys

import torch.distributed as dist
from ray import cloudpickle

from helpers import cluster, storage
from helpers.config import TrainingConfig
from helpers.model.denoisers import load_denoiser_config
from helpers.train import loop
from helpers.train.step import TrainStep
from tests.benchmarks import made_up
from tests.benchmarks.resume_peers import ranks
from tests.latents import plan_for
from tests.pipelines import fit

# Workers cannot import these modules: what they need of them travels with the function that they run.
for module in (sys.modules[__name__], ranks):
    cloudpickle.register_pickle_by_value(module)


def write(folder, rows):
    made_up.write_latents(folder, rows, made_up.SD2_256, rows_per_file=1024)


def train_and_note(config, plan, given, **options):
    """What each training worker runs."""
    run = ranks.Run(given.run, dist.get_rank(), dist.get_world_size(), given.save_every, given.halt)
    steps = []

    def noted_step(self, step, units):
        dist.barrier()
        ids, first_unit = [i for unit in units for i in unit.ids], step * plan.units_per_step
        # The rows of the run's first chunk that are before its first step are read and dropped, once for all ranks.
        dropped = (first_unit - plan.unit_range(plan.chunk_of(first_unit)).start) * plan.unit_rows
        read = len(ids) + (0 if steps or run.rank else dropped)
        steps.append(step)
        run.step = step
        run.note(step // plan.steps_per_epoch, {"id": ids, "read": read})
        return {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.0, "num_kept": len(ids)}

    TrainStep.step = noted_step
    loop.train_loop_per_worker(config, **options)


def train(given):
    data = {"latents_uri": given.data, "resolution": 256, "validate_every": 0, "validation_share": 0}
    recipe = {"global_batch_size": ranks.BATCH, "seed": ranks.SEED, "checkpoint_every": given.save_every}
    # resume:
    recipe["units_per_step"] = 4
    # end
    unet = {**load_denoiser_config("tiny"), "cross_attention_dim": ranks.SHAPES["text"][1]}
    storage.write_json(f"{given.data}/unet.json", unet)
    recipe |= {"unet_config": f"{given.data}/unet.json", "compile_unet": False}
    place = {"storage": given.run, "run_name": "exact", "num_training_workers": given.world}
    plan = plan_for(TrainingConfig(**data, **recipe, **place))
    config = TrainingConfig(**data, **recipe, **place, max_steps=ranks.EPOCHS * plan.steps_per_epoch)
    cluster.connect(num_cpus=given.world + 2)
    fit(config, functools.partial(train_and_note, plan=plan, given=given))


if __name__ == "__main__":
    given = ranks.options()
    write(given.data, given.rows) if given.what == "write" else train(given)
