"""Whether a killed run goes on with the batches of an undisturbed one: this project and other tools, on the same rows.

    python -m tests.benchmarks.resume_exactness [--rows 20000] [--tools this-project litdata ...] [--resume-on 2 4 1]

Rows have the shapes of SD2's latents and embeddings at 256 pixels, in each tool's own format. Two workers read two
epochs, shuffled, in global batches of 64, and note the ids of each step; a step computes nothing. A second run is
killed by SIGKILL in the middle of the second epoch, and goes on from its last checkpoint until the epoch's end: on
two workers, on four and on one. Checkpoints are 50 steps apart, or a quarter of an epoch if that is less.

Counted, against the undisturbed run, from the checkpoint's step on: global batches with other rows; rows that the
second epoch trained on twice or never (rows between the checkpoint and the kill count once); seconds from the
start of the processes to the first batch, imports included; rows that were read again before the first batch and
dropped, where a tool shows it; lines that a user writes for it, beside the checkpoint itself, from the scripts in
`resume_peers`. A script's docstring says what was tried, and the results repeat it.

A tool that needs other packages has an environment of its own in --environments; a missing one is asked for. Stored
results of tools that are not in --tools stay, if they are of as many rows; each says its options and its revision.
"""

import ast
import collections
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import psutil

from tests.benchmarks import record

FOLDER = pathlib.Path(__file__).with_name("resume_peers")
PACKAGE = "tests.benchmarks.resume_peers"
# FIRST: workers of the undisturbed run and of the killed one; WORKERS: of those that resume.
FIRST, WORKERS, BATCH, EPOCHS = 2, (2, 4, 1), 64, 2
SETTLED = 5  # seconds that halted workers get to finish a checkpoint, before they are killed
LONGEST = 1800  # seconds of one run


class Tool(NamedTuple):
    """`script` and `packages`: None if there is nothing to run, or if this project's environment has them.

    `page`: of the documentation, about resuming. `workers`: with how many the tool offers to go on.
    """

    script: str | None
    packages: str | None
    page: str
    workers: tuple[int, ...] = WORKERS


TOOLS = {
    "this-project": Tool("this_project", None, "helpers/latents/plan.py"),
    "mosaicml-streaming": Tool(
        "mosaicml",
        "mosaicml-streaming==0.13.0 numpy==2.1.3 torch==2.13.0",
        "https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/elastic_determinism.html",
    ),
    "litdata": Tool(
        "litdata_loader",
        "litdata==0.2.76 torch==2.13.0",
        "https://github.com/Lightning-AI/litData#pause-resume",
    ),
    "torchdata": Tool(
        "hugging_face",
        "torchdata==0.11.0 datasets==5.2.0 torch==2.13.0",
        "https://github.com/meta-pytorch/data/blob/v0.11.0/torchdata/stateful_dataloader/README.md",
        workers=(2,),
    ),
    "webdataset": Tool(None, None, "https://github.com/webdataset/webdataset/blob/main/FAQ.md", workers=()),
    "ray-data": Tool("ray_data", None, "https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html"),
}
TITLE = "## Exact resume beside others"
COUNTS = {  # column: form of its numbers
    "batches that differ": "{:,}",
    "rows twice": "{:,}",
    "rows never": "{:,}",
    "rows read again": "{:,}",
    "first batch, s": "{:.0f}",
}


# ---- environments, and what a script says


def python_of(name, environments):
    """The Python that runs a tool's script. Raises SystemExit with the command that makes a missing environment."""
    packages = TOOLS[name].packages
    if packages is None:
        return sys.executable
    folder = pathlib.Path(environments).expanduser() / name
    if not (folder / "bin" / "python").exists():
        made = f"python3 -m venv {folder} && {folder}/bin/pip install --no-compile {packages}"
        raise SystemExit(f"{name} needs an environment of its own: {made}")
    return str(folder / "bin" / "python")


def what_was_tried(script):
    return ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text()))


def resume_lines(script):
    """Lines between `# resume:` and `# end`."""
    count, counts = 0, False
    for line in map(str.strip, (FOLDER / f"{script}.py").read_text().splitlines()):
        counts = line == "# resume:" or (counts and line != "# end")
        count += counts and line != "# resume:"
    return count


# ---- runs


def start(name, python, world, **options):
    """The processes of a run: one a rank, as torchrun starts them, or Ray's driver; their output goes to a file."""
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words = ["train", f"--world={world}", *words]
    with open(f"{options['run']}/output.txt", "a") as output:
        where = {"cwd": record.ROOT, "stdout": output, "stderr": output}
        if TOOLS[name].packages is None:
            return [subprocess.Popen([python, "-m", f"{PACKAGE}.{TOOLS[name].script}", *words], **where)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        processes = []
        for rank in range(world):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [python, str(FOLDER / f"{TOOLS[name].script}.py"), *words]
            env = {**os.environ, **{key: str(value) for key, value in ranks.items()}}
            processes.append(subprocess.Popen(command, env=env, **where))
        return processes


def finish(processes, run, world, halt=0):
    """Wait until a run ends, or until its ranks halt and are killed with all their processes."""
    given_up = time.monotonic() + LONGEST
    while not (halt and len(read_steps(run, world)) and max(read_steps(run, world)) + 1 >= halt):
        codes = [process.poll() for process in processes]
        if any(codes) or time.monotonic() > given_up:
            kill(processes)
            said = pathlib.Path(run, "output.txt").read_text().strip().splitlines() or ["nothing said"]
            raise RuntimeError(f"exit codes {codes}: {said[-1]}")
        if not halt and codes.count(0) == len(codes):
            return
        time.sleep(0.5)
    time.sleep(SETTLED)
    kill(processes)


def kill(processes):
    """SIGKILL to processes and all that they started."""
    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in processes:
        process.wait()


class Step(NamedTuple):
    """The lines of a step of all ranks, together. `read`: rows read and dropped before it; None if unknown."""

    epoch: int
    ids: list
    at: float
    dropped: int | None


def read_steps(run, world):
    """{step: `Step`} of the steps that all ranks have noted."""
    lines = collections.defaultdict(list)
    for path in pathlib.Path(run).glob("rank-*.jsonl"):
        for text in path.read_text().split("\n")[:-1]:
            line = json.loads(text)
            lines[line["step"]].append(line)
    return {step: join(of_ranks) for step, of_ranks in lines.items() if len(of_ranks) == world}


def join(lines):
    ids = sorted(row for line in lines for row in line["ids"])
    known = all(line["read"] is not None for line in lines)
    dropped = sum(line["read"] - len(line["ids"]) for line in lines) if known else None
    return Step(lines[0]["epoch"], ids, max(line["at"] for line in lines), dropped)


def compare(undisturbed, killed, resumed):
    """Counts of a run that was killed and resumed, against an undisturbed one; all as of `read_steps`."""
    begin, last = min(resumed), EPOCHS - 1

    def rows_of_last_epoch(steps):
        return collections.Counter(row for step in steps for row in step.ids if step.epoch == last)

    numbers = {step for step in undisturbed if step >= begin} | resumed.keys()
    other = [n for n in numbers if getattr(undisturbed.get(n), "ids", 0) != getattr(resumed.get(n), "ids", 1)]
    expected = rows_of_last_epoch(undisturbed.values())
    rows = rows_of_last_epoch([*(killed[n] for n in killed if n < begin), *resumed.values()])
    return {
        "resumed at step": begin,
        "batches": len(numbers),
        "batches that differ": len(other),
        "rows twice": max(0, (rows.total() - len(rows)) - (expected.total() - len(expected))),
        "rows never": max(0, len(expected) - len(rows)),
        "rows read again": resumed[begin].dropped,
    }


def measure(name, given):
    """Everything about a tool, as a row of the results."""
    tool = TOOLS[name]
    row = {"page": tool.page, "offers": list(tool.workers), "options": " ".join(sys.argv[1:])}
    row["revision"] = record.revision()
    if not tool.script:
        return row
    python, steps = python_of(name, given.environments), given.rows // BATCH
    halt, save_every = steps + steps // 2, min(50, steps // 4)
    halt += halt % save_every == 0  # not at a checkpoint
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_TMPDIR"] = folder
        data, run, killed = (f"{folder}/{part}" for part in ("data", "run", "killed"))
        words = ["write", f"--data={data}", f"--rows={given.rows}"]
        script = ["-m", f"{PACKAGE}.{tool.script}"] if tool.packages is None else [FOLDER / f"{tool.script}.py"]
        subprocess.run([python, *script, *words], check=True, cwd=record.ROOT, stdout=subprocess.DEVNULL)

        def go(world, halt=0):
            started = time.time()
            processes = start(name, python, world, data=data, run=run, save_every=save_every, halt=halt)
            finish(processes, run, world, halt)
            return read_steps(run, world), started

        def prepare(source=None):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(source, run) if source else os.makedirs(run)
            for path in pathlib.Path(run).glob("rank-*.jsonl"):
                path.unlink()

        prepare()
        undisturbed, _ = go(FIRST)
        prepare()
        before, _ = go(FIRST, halt)
        shutil.copytree(run, killed)
        row["runs"] = []
        for world in (world for world in tool.workers if world in given.resume_on):
            prepare(killed)
            resumed, started = go(world)
            seconds = resumed[min(resumed)].at - started
            found = {"workers": world, **compare(undisturbed, before, resumed), "first batch, s": seconds}
            print(name, json.dumps(found), flush=True)
            row["runs"].append(found)
    differ = sum(undisturbed[step].ids != before[step].ids for step in before)
    row |= {"batches that differ before the kill": differ, "killed after steps": len(before)}
    return row | {"lines": resume_lines(tool.script), "tried": what_was_tried(tool.script)}


# ---- results


def cells(row):
    """{column: text}; several numbers are those on two, four and one workers, in this order."""
    runs = {run["workers"]: run for run in row.get("runs", [])}
    missing = f"[not offered]({row['page']})"

    def text(world, column):
        value = runs[world][column]
        return "not counted" if value is None else COUNTS[column].format(value)

    def texts(column):
        found = [text(world, column) for world in runs] + [missing] * (len(row["offers"]) < len(WORKERS))
        return ", ".join(dict.fromkeys(found) if set(found) == {"not counted"} else found)

    return {
        "tool": row["tool"],
        **{column: texts(column) for column in COUNTS},
        "lines": str(row.get("lines", missing)),
    }


def summarise(rows):
    """One line for all tools."""
    column = next(iter(COUNTS))
    counts = {row["tool"]: ", ".join(str(run[column]) for run in row.get("runs", [])) for row in rows}
    text = "; ".join(f"{tool} {count or 'not offered'}" for tool, count in counts.items())
    return {f"{column} after a killed run has resumed on two, four and one workers": text}


def table(rows):
    """The lines of README.md's section."""
    found = [cells(row) for row in rows]
    lines = [
        f"| {' | '.join(row)} |" for row in (found[0].keys(), ["---"] * len(found[0]), *(r.values() for r in found))
    ]
    return ["", TITLE, "", *lines]


def earlier_rows(rows_of_data):
    """The stored results of tools with as many rows of data."""
    path = record.folder() / "resume_exactness.json"
    details = json.loads(path.read_text())["details"] if path.exists() else {}
    return details["rows"] if details.get("rows_of_data") == rows_of_data else []


def main():
    given = record.options(
        __doc__,
        rows=20_000,
        tools=list(TOOLS),
        resume_on=list(WORKERS),
        environments=os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/resume-exactness",
    )
    if unknown := set(given.tools) - TOOLS.keys():
        raise SystemExit(f"--tools {' '.join(sorted(unknown))}: there are {', '.join(TOOLS)}.")
    for name in given.tools:
        python_of(name, given.environments)
    rows = record.Rows("resume_exactness", summarise, rows_of_data=given.rows)
    rows.rows = [row for row in earlier_rows(given.rows) if row["tool"] not in given.tools]
    for name in given.tools:
        rows.add({"tool": name}, lambda name=name: measure(name, given))


if __name__ == "__main__":
    main()
