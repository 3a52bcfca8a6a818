"""Training throughput while checkpoints are evaluated on another node, as a share of that without evaluation.

    python -m tests.benchmarks.validation_cost [--steps 900] [--rounds 3] [--seconds 2] [--rows 1000]

One machine plays a cluster of two Ray nodes: the trainer's, and one with the resource "spare" for evaluations. The
trainer has one core to itself and everything else runs on the others, as on two machines. An evaluation is played: it
sleeps for `--seconds`. What is left to cost: Ray Train's part, the start of the tasks' processes, reading the
checkpoint, writing the results. Both runs save the same three checkpoints. Rates are rows over elapsed time after the
first twenty steps, checkpoints included (`metrics_log.throughput`). The goal is 0.97. Needs at least two cores and an
otherwise idle machine.
"""

import functools
import os
import sys
import tempfile
import time

from ray import cloudpickle

from helpers import train
from helpers.config import TrainingConfig
from helpers.evaluation import at_checkpoints
from helpers.runtime import metrics_log, results
from tests.benchmarks import record
from tests.faults import add_node, simulated_cluster
from tests.pipelines import draw_and_encode, fit

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def loop_on_core(core, values, **options):
    """The worker loop, on one of this machine's cores."""
    os.sched_setaffinity(0, {core})
    train.train_loop_per_worker(values, **options)


def play(saved, config, prompts, agreement, seconds):
    """In place of `at_checkpoints.evaluate_checkpoint`: fetches the checkpoint, takes its time, writes its result."""
    config, step = TrainingConfig.from_dict(config), at_checkpoints.step_of_name(saved.path)
    with saved.as_directory():
        time.sleep(seconds)
    result = {"step": step, "validation_loss": 1 / step, "unweighted": 1.0, "rows": 0, "seconds": seconds}
    results.write(config.run_uri, result)
    return result


def rate(config, seconds, core):
    """Images a second of a run on the core; its evaluations take `seconds` each."""
    on_spare = {"num_cpus": 0, "resources": {"spare": 1}}
    evaluation = {"work": functools.partial(play, seconds=seconds), "where": on_spare}
    fit(config, loop=functools.partial(loop_on_core, core), evaluation=evaluation)
    made = sum("validation_loss" in result for result in results.read(config.run_uri))
    if config.validate_every and not made:
        raise SystemExit("No checkpoint was evaluated: the rates say nothing.")
    return metrics_log.throughput(metrics_log.read_metrics(config.run_uri))[0]


def main():
    given = record.options(__doc__, steps=900, rounds=3, seconds=2.0, rows=1000)
    core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("This machine has one core: two are needed, one of them for the trainer alone.")
    os.sched_setaffinity(0, others)  # which the processes that Ray starts inherit
    with simulated_cluster(4) as cluster, tempfile.TemporaryDirectory() as folder:
        add_node(cluster, num_cpus=0, resources={"spare": 1})
        storage, every = draw_and_encode(folder, given.rows), max(1, given.steps // 3)
        common = dict(storage=storage, resolution=32, max_steps=given.steps, checkpoint_every=every)

        def run(number, validate_every):
            name = f"{'with' if validate_every else 'without'}-{number}"
            config = TrainingConfig(**common, run_name=name, validate_every=validate_every, validation_share=0.05)
            return rate(config, given.seconds, core)

        measures = {
            "without": functools.partial(run, validate_every=0),
            "with": functools.partial(run, validate_every=every),
        }
        rates = record.in_turns(given.rounds, measures)
    ratio, said = record.compare(rates, "with", "without")
    print(f"{said} (goal 0.97)")
    what = f"training while another node evaluates 3 checkpoints, {given.seconds:g} s each"
    record.write("validation_cost", {what: f"{said} (goal 0.97)"}, images_per_second=rates, ratio=ratio)


if __name__ == "__main__":
    main()
