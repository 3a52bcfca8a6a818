"""Training throughput while checkpoints are evaluated on another node, as a share of that without evaluation.

    python -m tests.benchmarks.validation_cost [--steps 900] [--rounds 3] [--seconds 2] [--rows 1000]

One machine plays a cluster of two Ray nodes: the trainer's, and one with the resource "spare" for evaluations. The
trainer has one core to itself and everything else runs on the others, as on two machines. An evaluation is played: it
sleeps for `--seconds`. What is left to cost: Ray Train's part, the start of the tasks' processes, reading the
checkpoint, writing the results. Both runs save the same three checkpoints. Rates are rows over elapsed time after the
first twenty steps, checkpoints included (`metrics_log.throughput`). The goal is 0.97. Needs at least two cores and an
otherwise idle machine.
"""

import argparse
import functools
import os
import statistics
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


def loop_on_core(core, values):
    """The worker loop, on one of this machine's cores."""
    os.sched_setaffinity(0, {core})
    train.train_loop_per_worker(values)


def play(saved, config, prompts, agreement, seconds):
    """In place of `at_checkpoints.evaluate_checkpoint`: fetches the checkpoint, takes its time, writes its result."""
    config, step = TrainingConfig.from_dict(config), at_checkpoints.step_of_name(saved.path)
    with saved.as_directory():
        time.sleep(seconds)
    result = {"step": step, "validation_loss": 1 / step, "unweighted": 1.0, "rows": 0, "seconds": seconds}
    results.write(config.run_uri, result)
    return result


def rate(config, seconds, core):
    """(images a second, evaluations that were made, evaluations that were skipped)"""
    on_spare = {"num_cpus": 0, "resources": {"spare": 1}}
    evaluation = {"work": functools.partial(play, seconds=seconds), "where": on_spare}
    fit(config, loop=functools.partial(loop_on_core, core), evaluation=evaluation)
    found = results.read(config.run_uri)
    made = sum("validation_loss" in result for result in found)
    return metrics_log.throughput(metrics_log.read_metrics(config.run_uri))[0], made, len(found) - made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one played evaluation")
    parser.add_argument("--rows", type=int, default=1000)
    arguments = parser.parse_args()
    core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("This machine has one core: two are needed, one of them for the trainer alone.")
    os.sched_setaffinity(0, others)  # which the processes that Ray starts inherit
    rates = {"without": [], "with": []}
    with simulated_cluster(4) as cluster, tempfile.TemporaryDirectory() as folder:
        add_node(cluster, num_cpus=0, resources={"spare": 1})
        storage, every = draw_and_encode(folder, arguments.rows), max(1, arguments.steps // 3)
        common = dict(storage=storage, resolution=32, max_steps=arguments.steps, checkpoint_every=every)
        for number in range(arguments.rounds):
            for name, validate_every in (("without", 0), ("with", every)):
                run = dict(run_name=f"{name}-{number}", validate_every=validate_every, validation_share=0.05)
                found, made, skipped = rate(TrainingConfig(**common, **run), arguments.seconds, core)
                if validate_every and not made:
                    raise SystemExit("No checkpoint was evaluated: the rates say nothing.")
                rates[name].append(found)
                print(f"{name} evaluation: {found:.0f} images/s, {made} made, {skipped} skipped", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["with"] / medians["without"]
    said = f"{medians['with']:.0f} of {medians['without']:.0f} images/s: {ratio:.3f} (goal 0.97)"
    print(said)
    what = f"training while another node evaluates {made} checkpoints, {arguments.seconds:g} s each"
    record.write("validation_cost", {what: said}, images_per_second=rates, ratio=ratio)


if __name__ == "__main__":
    main()
