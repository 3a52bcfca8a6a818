"""The simulator against real runs with real kills: restarts, downtime, repeated steps.

    python -m tests.benchmarks.simulated_faults [--steps 240] [--seconds 0.2]

A cluster of nodes on this machine trains with two workers, one a node, whose steps only take time (a unit `--seconds`);
all else is real: plan, stream, checkpoints, uploads, Ray Train's restarts. In the first run a worker is killed twice;
it gives what the simulator is told: seconds of a step, of a checkpoint and of its upload, and of a restart. Another run
loses workers at other steps, and two elastic ones a node, which comes back before and after Ray Train has started a
smaller group: the simulator is told at which steps, and must say the rest. How long a restart takes varies
with what else the cores do: run it on a machine that is idle.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
import pandas as pd
import ray
import torch
from ray import cloudpickle
from ray.train import ScalingConfig

from helpers import storage, train
from helpers.config import TrainingConfig
from helpers.lesson import fault_injection, planner, simulator
from helpers.runtime import metrics_log, monitoring
from helpers.train_step import TrainStep
from tests.benchmarks import made_up, record
from tests.faults import add_node, simulated_cluster
from tests.pipelines import fit

TRAINER, RESIZE_SECONDS = {"trainer": 1}, 5
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def played_loop(file, unit_seconds, values):
    """The worker loop, with steps that take a time for each unit; rank 0 notes when each one began and ended."""
    context, group = ray.train.get_context(), time.time_ns()

    def played_step(self, step, units):
        began = time.time()
        time.sleep(unit_seconds * len(units))
        if context.get_world_size() > 1:  # as the gradients': a worker does not go on without the others
            torch.distributed.all_reduce(torch.zeros(1))
        if context.get_world_rank() == 0:
            with open(file, "a") as lines:
                lines.write(f"{group} {step + 1} {began} {time.time()} {context.get_world_size()}\n")
        num_kept = sum(int(unit.keep_U.sum()) for unit in units)
        return {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.0, "num_kept": num_kept}

    TrainStep.step = played_step
    train.train_loop_per_worker(values)


def read_steps(file):
    """A frame: group, step, began, ended, workers of each step so far."""
    lines = [line.split() for line in pathlib.Path(file).read_text().splitlines()] if os.path.exists(file) else []
    rows = [(int(g), int(s), float(b), float(e), int(w)) for g, s, b, e, w in lines]
    return pd.DataFrame(rows, columns=["group", "step", "began", "ended", "workers"])


class RealRun:
    """A run on the nodes, during which `faults` happen: [(step, action)], in order; an action returns `Loss` fields."""

    def __init__(self, cluster, folder, name, faults, *, workers, steps, unit_seconds):
        self.config = TrainingConfig(
            storage=folder,
            latents_uri=folder,
            run_name=name,
            resolution=32,
            global_batch_size=8,
            units_per_step=2,
            num_training_workers=workers,
            max_steps=steps,
            checkpoint_every=max(2, steps // 8),
            validate_every=0,
            validation_share=0,
            max_failures=10,
        )
        self.cluster, self.faults, self.unit_seconds = cluster, list(faults), unit_seconds
        self.file, self.losses, self.uploads, self.seen = f"{folder}/{name}.steps", [], [], 0

    def run(self):
        with monitoring.poll_in_background(self.watch_uploads, every=0.1):
            with monitoring.poll_in_background(self.act, every=0.05):
                scaling = functools.partial(
                    ScalingConfig,
                    resources_per_worker={"CPU": 1, **TRAINER},
                    elastic_resize_monitor_interval_s=RESIZE_SECONDS,
                )
                fit(
                    self.config,
                    loop=functools.partial(played_loop, self.file, self.unit_seconds),
                    ScalingConfig=scaling,
                )
        self.steps = read_steps(self.file)
        stalls = metrics_log.read_metrics(self.config.run_uri)["checkpoint_seconds"]
        self.stall = float(stalls[stalls > 0].median())
        return self

    def watch_uploads(self):
        step = train.last_step(self.config)
        if step > self.seen:
            self.uploads.append((step, time.time()))
            self.seen = step

    def act(self):
        steps = read_steps(self.file)
        if self.faults and len(steps) and steps["step"].iloc[-1] >= self.faults[0][0]:
            _, action = self.faults.pop(0)
            fields = action(self)  # which takes a while: the loss is at its end
            self.losses.append((time.time(), fields))

    # ---- faults

    def second_worker(self):
        return storage.read_json(storage.join(self.config.run_uri, "workers.json"))["workers"][1]

    def kill_worker(self):
        fault_injection.kill(self.second_worker()["node_id"], self.second_worker()["pid"])
        return {}

    def lose_node(self, seconds):
        (node,) = [one for one in self.cluster.worker_nodes if one.node_id == self.second_worker()["node_id"]]
        self.cluster.remove_node(node, allow_graceful=False)
        lost = time.time()
        while time.time() < lost + seconds:
            time.sleep(0.1)
        add_node(self.cluster, resources=TRAINER)
        return {"machine": 1, "back_after": time.time() - lost, "since": lost}

    # ---- what was seen

    @property
    def first(self):
        return self.steps["began"].iloc[0]

    def given_losses(self):
        """What the simulator is told: `simulator.Loss` of each fault, at the step that was being done."""
        found = []
        for when, fields in self.losses:
            when = fields.get("since", when)
            before = self.steps[self.steps["ended"] <= when]
            told = {name: value for name, value in fields.items() if name != "since"}
            found.append(simulator.Loss(before["step"].iloc[-1] + 0.5, **told))
        return found

    def restarts(self):
        """[(seconds without a step, steps that are done again)] of each restart, from the loss or the last step."""
        groups, found = [mine for _, mine in self.steps.groupby("group", sort=False)], []
        times = [fields.get("since", when) for when, fields in self.losses]
        for before, after in zip(groups, groups[1:], strict=False):
            ended, began = before["ended"].iloc[-1], after["began"].iloc[0]
            lost = max((when for when in times if before["began"].iloc[0] < when < began), default=ended)
            found.append((began - max(lost, ended), before["step"].iloc[-1] + 1 - after["step"].iloc[0]))
        return found

    def upload_seconds(self):
        """From the end of the step to the complete checkpoint, less what training waited."""
        ended = self.steps.drop_duplicates("step", keep="last").set_index("step")["ended"]
        seconds = [when - ended[step] for step, when in self.uploads if step in ended]
        return max(0.0, statistics.median(seconds) - self.stall)

    def seen_outcome(self):
        restarts = self.restarts()
        return {
            "restarts": len(restarts),
            "down, s": sum(down for down, _ in restarts),
            "repeated steps": sum(again for _, again in restarts),
            "in all, s": self.steps["ended"].iloc[-1] - self.first,
        }


def simulated(run, faults, unit_seconds):
    """What the simulator says of a run's losses."""
    fleet = simulator.Fleet(count=2, workers_each=1, dollars_per_hour=1.0, faults=faults)
    stage = simulator.Training(
        config=run.config, fleet=fleet, unit_seconds=unit_seconds, resize_seconds=float(RESIZE_SECONDS)
    )
    found = simulator.simulate_stage(stage, np.random.default_rng(0), run.given_losses())
    return {
        "restarts": found.restarts,
        "down, s": found.down_seconds,
        "repeated steps": found.repeated,
        "in all, s": 3600 * found.hours - faults.checkpoint_seconds - faults.upload_seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a unit; a step has two")
    given = parser.parse_args()
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    with simulated_cluster(3) as cluster, tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            add_node(cluster, resources=TRAINER)
        shapes = {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (6, 128)}
        made_up.write_latents(folder, 2_000, shapes, rows_per_file=500)
        real = functools.partial(RealRun, cluster, folder, steps=given.steps, unit_seconds=given.seconds)

        def at(*places, action=RealRun.kill_worker):
            """In checkpoint intervals, towards their end, when the upload is complete: how long it takes varies."""
            return [(round(place * (given.steps // 8)), action) for place in places]

        first = real("first", at(1.7, 5.7), workers=2).run()
        killed = real("killed", at(0.7, 2.7, 4.7), workers=2).run()
        runs = [first, killed]
        for name, seconds in (("elastic-30s", 30), ("elastic-100s", 100)):  # Ray Train waits for 60 s
            away = functools.partial(RealRun.lose_node, seconds=seconds)
            runs.append(real(name, at(2.7, action=away), workers=(1, 2)).run())

    pace = (first.steps["began"].shift(-1) - first.steps["began"])[
        first.steps["group"].shift(-1) == first.steps["group"]
    ]
    faults = planner.Faults(
        failures_per_day=0.0,
        restart_seconds=statistics.median(down for down, _ in first.restarts()),
        checkpoint_seconds=first.stall,
        upload_seconds=first.upload_seconds(),
    )
    print(f"a step {pace.median():.3f} s; {faults}")
    rows = []
    for run in runs:
        seen, said = run.seen_outcome(), simulated(run, faults, pace.median())
        rows += [
            {"run": run.config.run_name, "what": what, "real": seen[what], "simulated": said[what]} for what in seen
        ]
    table = pd.DataFrame(rows)
    table["simulated / real"] = table["simulated"] / table["real"]
    print(table.round(3).to_string(index=False))
    for run in runs:
        print(run.config.run_name, [(round(down, 2), int(again)) for down, again in run.restarts()])
    record.write(
        "simulated_faults",
        {
            f"simulated over real, {name}: {', '.join(mine['what'])}": ", ".join(
                f"{ratio:.2f}" for ratio in mine["simulated / real"]
            )
            for name, mine in table[table["run"] != "first"].groupby("run", sort=False)
        },
        told=dataclasses.asdict(faults),
        step_seconds=pace.median(),
        rows=rows,
    )


if __name__ == "__main__":
    main()
