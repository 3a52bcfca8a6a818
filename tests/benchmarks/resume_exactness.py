"""Whether a killed run goes on with the batches of an undisturbed one, on other numbers of workers too.

    python -m tests.benchmarks.resume_exactness [--rows 20000] [--resume-on 2 4 1]

Rows have the shapes of SD2's latents and embeddings at 256 pixels. Two workers read two epochs in global batches of 64
and note the ids of each step; a step computes nothing. A second run is killed by SIGKILL in the middle of the second
epoch. It goes on from its last checkpoint until the epoch's end. Checkpoints are 50 steps apart, or a quarter of an
epoch if that is less.

Counted, from the checkpoint's step on: global batches with other rows than in the undisturbed run; rows that the second
epoch trained on twice or never; rows that were read again before the first batch and dropped; seconds from the start of
the driver to the first batch. The stored results of other tools, of as many rows, stay.
"""

import collections
import contextlib
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import psutil
import torch.distributed as dist
from ray import cloudpickle

from helpers import cluster, storage
from helpers.model.denoisers import load_denoiser_config
from helpers.train import loop
from helpers.train.step import TrainStep
from tests.benchmarks import made_up, record
from tests.latents import plan_for
from tests.pipelines import fit, short_run

FIRST, BATCH, EPOCHS, TOOL = 2, 64, 2, "this-project"  # FIRST: workers of the undisturbed run and of the killed one
SETTLED = 5  # seconds that halted workers get to finish a checkpoint, before they are killed
LONGEST = 1800  # seconds of one run
COUNTS = ["batches that differ", "rows twice", "rows never", "rows read again", "first batch, s"]
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


# ---- one run: a driver and its workers


def note_steps(config, given, plan, **options):
    """What each training worker runs: steps that compute nothing, and a line for each in `rank-R.jsonl`."""
    started = []

    def noted(self, step, units):
        dist.barrier()
        ids, first_unit = [int(row) for unit in units for row in unit.ids], step * plan.units_per_step
        # The rows of the first chunk that lie before the run's first step are read and dropped, once for all ranks.
        dropped = (first_unit - plan.unit_range(plan.chunk_range(step, step + 1).start).start) * plan.unit_rows
        dropped = 0 if started or dist.get_rank() else dropped
        started.append(step)
        line = {"step": step, "epoch": step // plan.steps_per_epoch, "at": time.time(), "ids": ids, "dropped": dropped}
        with open(f"{given['notes']}/rank-{dist.get_rank()}.jsonl", "a") as lines:
            lines.write(json.dumps(line) + "\n")
        if step + 1 == given["halt"]:
            time.sleep(LONGEST)
        return {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.0, "num_kept": len(ids)}

    TrainStep.step = noted
    loop.train_loop_per_worker(config, **options)


def drive(given):
    """The driver of one run. `given`: data, storage, notes, world, save_every, halt."""
    width = made_up.SD2_256["caption_embeddings"][1]
    storage.write_json(f"{given['data']}/unet.json", {**load_denoiser_config("tiny"), "cross_attention_dim": width})
    build = functools.partial(
        short_run,
        given["storage"],
        "exact",
        latents_uri=given["data"],
        unet_config=f"{given['data']}/unet.json",
        resolution=256,
        validation_share=0,
        global_batch_size=BATCH,
        units_per_step=4,
        checkpoint_every=given["save_every"],
        num_training_workers=given["world"],
    )
    plan = plan_for(build())
    cluster.connect(num_cpus=given["world"] + 2)
    fit(build(max_steps=EPOCHS * plan.steps_per_epoch), functools.partial(note_steps, given=given, plan=plan))


def run_driver(given):
    """Run a driver until it ends, or until its workers halt and all its processes are killed; (steps, its start)."""
    shutil.rmtree(given["notes"], ignore_errors=True)
    os.makedirs(given["notes"])
    started, world, halt = time.time(), given["world"], given["halt"]
    command = [sys.executable, "-m", "tests.benchmarks.resume_exactness", "--driver", json.dumps(given)]
    with open(f"{given['storage']}.txt", "a") as output:
        options = {"stdout": output, "stderr": output, "start_new_session": True}
        driver = subprocess.Popen(command, cwd=record.ROOT, **options)
    while driver.poll() is None and time.time() < started + LONGEST:
        if halt and max(read_steps(given["notes"], world), default=0) + 1 == halt:
            time.sleep(SETTLED)
            break
        time.sleep(0.5)
    kill(driver)
    if driver.returncode and not halt:
        raise RuntimeError(pathlib.Path(f"{given['storage']}.txt").read_text().strip().splitlines()[-1])
    return read_steps(given["notes"], world), started


def kill(driver):
    """SIGKILL to a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    driver.wait()


# ---- counting


def read_steps(notes, world):
    """{step: {"epoch", "ids": those of all ranks, "at", "dropped"}} of the steps that all ranks have noted."""
    lines = collections.defaultdict(list)
    for path in pathlib.Path(notes).glob("rank-*.jsonl"):
        for line in map(json.loads, path.read_text().split("\n")[:-1]):
            lines[line["step"]].append(line)
    return {
        step: {
            "epoch": ranks[0]["epoch"],
            "ids": sorted(row for rank in ranks for row in rank["ids"]),
            "at": max(rank["at"] for rank in ranks),
            "dropped": sum(rank["dropped"] for rank in ranks),
        }
        for step, ranks in lines.items()
        if len(ranks) == world
    }


def compare(undisturbed, killed, resumed):
    """Counts of a run that was killed and resumed, against an undisturbed one; all as of `read_steps`."""
    begin = min(resumed)

    def rows_of_last_epoch(steps):
        return collections.Counter(row for step in steps if step["epoch"] == EPOCHS - 1 for row in step["ids"])

    numbers = {step for step in undisturbed if step >= begin} | resumed.keys()
    ids = {name: {n: steps[n]["ids"] for n in steps} for name, steps in (("a", undisturbed), ("b", resumed))}
    expected = rows_of_last_epoch(undisturbed.values())
    rows = rows_of_last_epoch([*(killed[n] for n in killed if n < begin), *resumed.values()])
    return {
        "resumed at step": begin,
        "batches": len(numbers),
        "batches that differ": sum(ids["a"].get(n) != ids["b"].get(n) for n in numbers),
        "rows twice": max(0, (rows.total() - len(rows)) - (expected.total() - len(expected))),
        "rows never": max(0, len(expected) - len(rows)),
        "rows read again": resumed[begin]["dropped"],
    }


def measure(rows, resume_on):
    """The numbers of this project, as a row of the results."""
    steps = rows // BATCH
    halt, save_every = steps + steps // 2, min(50, steps // 4)
    halt += halt % save_every == 0  # not at a checkpoint
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_TMPDIR"] = folder
        made_up.write_latents(f"{folder}/data", rows, made_up.SD2_256, rows_per_file=1024)
        given = {"data": f"{folder}/data", "notes": f"{folder}/notes", "save_every": save_every, "world": FIRST}
        undisturbed, _ = run_driver({**given, "storage": f"{folder}/undisturbed", "halt": 0})
        killed, _ = run_driver({**given, "storage": f"{folder}/killed", "halt": halt})
        runs = []
        for world in resume_on:
            again = shutil.copytree(f"{folder}/killed", f"{folder}/on-{world}")
            resumed, started = run_driver({**given, "storage": again, "world": world, "halt": 0})
            counts = compare(undisturbed, killed, resumed)
            runs.append({"workers": world, **counts, "first batch, s": resumed[min(resumed)]["at"] - started})
            print(json.dumps(runs[-1]), flush=True)
    differ = sum(undisturbed[step]["ids"] != killed[step]["ids"] for step in killed)
    return {"runs": runs, "batches that differ before the kill": differ, "revision": record.revision(), "lines": 1}


# ---- results


def summarise(rows):
    """One line for all tools."""
    counts = {row["tool"]: ", ".join(str(run[COUNTS[0]]) for run in row.get("runs", [])) for row in rows}
    text = "; ".join(f"{tool} {count or 'not offered'}" for tool, count in counts.items())
    return {f"{COUNTS[0]} after a killed run has resumed on two, four and one workers": text}


def table(rows):
    """The lines of README.md's section; several numbers are those on two, four and one workers."""
    lines = ["", "## Exact resume beside others", "", f"| tool | {' | '.join(COUNTS)} | lines |", "|---" * 7 + "|"]
    for row in rows:
        missing, runs = f"[not offered]({row.get('page')})", row.get("runs", [])
        cells = [
            ", ".join("not counted" if run[count] is None else f"{run[count]:,.0f}" for run in runs) for count in COUNTS
        ]
        lines.append(f"| {row['tool']} | {' | '.join(cell or missing for cell in cells)} | {row.get('lines', '')} |")
    return lines


def others(rows):
    """The stored results of other tools with as many rows of data."""
    path = record.folder() / "resume_exactness.json"
    details = json.loads(path.read_text())["details"] if path.exists() else {"rows": []}
    return [row for row in details["rows"] if row["tool"] != TOOL and details["rows_of_data"] == rows]


def main():
    given = record.options(__doc__, rows=20_000, resume_on=[2, 4, 1], driver=None)
    if given.driver:
        return drive(json.loads(given.driver))
    results = record.Rows("resume_exactness", summarise, rows_of_data=given.rows)
    kept = others(given.rows)
    results.add({"tool": TOOL}, lambda: measure(given.rows, given.resume_on))
    results.rows += kept
    results.write()


if __name__ == "__main__":
    main()
