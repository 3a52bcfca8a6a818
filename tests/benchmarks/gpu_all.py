"""Everything about one GPU, in calls of at most nine minutes each; JSON and Markdown.

    python -m tests.benchmarks.gpu_all                                  # lists the calls
    python -m tests.benchmarks.gpu_all checks-eager --out FOLDER        # one of them, or several
    python -m tests.benchmarks.gpu_all --merge FOLDER [FOLDER ...]      # their results, wherever they were written

The cheap calls come first: those that compile nothing, then those that compile for minutes when no cache is there. Each
part is a process of its own (`gpu_checks`, `gpu_step`, `gpu_encode`), which writes each result when it is there into
FOLDER/PART; after --minutes it is ended, whatever it does. `--merge` makes `gpu_all.json` and `gpu_all.md`, in --out.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pandas as pd

from tests.benchmarks import record


@dataclasses.dataclass(frozen=True)
class Part:
    """A benchmark's module, its arguments, and those to try it on a CPU with."""

    module: str
    arguments: str
    on_cpu: str


TINY_STEP = "--unet tiny --resolution 32 --batch 2 4 --steps 1"
TINY_ENCODE = "--model tiny-sd --resolutions 32 --batch 2 --seconds 0.05"
TINY_CHECKS = "--unet tiny --resolution 32"
PARTS = {
    "checks-eager": Part("gpu_checks", "--checks layouts memory bf16 checkpoints repeats", TINY_CHECKS),
    "encode-eager": Part("gpu_encode", "", TINY_ENCODE),
    "step-512-eager": Part("gpu_step", "--resolution 512 --batch 64 96 128", TINY_STEP),
    "step-256-eager": Part("gpu_step", "--resolution 256 --batch 256 384 512", TINY_STEP),
    # Cold, each size of each setting compiles for 100 to 200 s: two fit into a call.
    "step-512": Part("gpu_step", "--compiled --settings base --resolution 512 --batch 64 128", TINY_STEP),
    "step-256": Part("gpu_step", "--compiled --settings base --resolution 256 --batch 256 512", TINY_STEP),
    "encode": Part("gpu_encode", "--compiled --batch 32", TINY_ENCODE),
    "attention-512": Part("gpu_step", "--compiled --settings cudnn flash --resolution 512 --batch 64", TINY_STEP),
    "checks-compiled": Part("gpu_checks", "--checks graphs compiled-fsdp compiled-ddp", TINY_CHECKS),
}


def run(part, folder, seconds):
    """Run a part for `seconds` at most, its results in `folder`. Returns what became of it."""
    arguments = part.arguments
    if not record.hardware()["gpu"]:
        arguments += f" {part.on_cpu}"  # of an option that is given twice the second counts
    command = [sys.executable, "-u", "-m", f"tests.benchmarks.{part.module}", *arguments.split()]
    try:
        environment = {**os.environ, "BENCHMARK_RESULTS": str(folder.absolute())}
        code = subprocess.run(command, env=environment, cwd=record.ROOT, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return "ended after its time"
    return f"exit code {code}"


def merge(folders, out):
    """Write `gpu_all.json` and `gpu_all.md` of the parts' results in `folders`; of a part, the last folder's count."""
    parts = {}
    for name, part in PARTS.items():
        for folder in folders:
            file = folder / name / f"{part.module}.json"
            if file.is_file():
                parts[name] = json.loads(file.read_text())
    if not parts:
        raise SystemExit(f"{', '.join(map(str, folders))}: no results of {', '.join(PARTS)}.")
    gpus = {str(found["hardware"]["gpu"]) for found in parts.values()}
    if len(gpus) > 1:
        raise SystemExit(f"These results are of several GPUs, which are not compared: {', '.join(sorted(gpus))}.")
    summary = {what: value for found in parts.values() for what, value in found["summary"].items()}
    # Hardware, versions and revision are those of the newest part.
    found = max(parts.values(), key=lambda found: found["date"])
    found = {**found, "command": "python -m tests.benchmarks.gpu_all", "summary": summary, "details": {"parts": parts}}
    record.replace(out / "gpu_all.json", json.dumps(found, indent=2) + "\n")
    text = f"# {found['hardware']['gpu'] or found['hardware']['cpu']}, torch {found['versions']['torch']}"
    record.replace(out / "gpu_all.md", "\n".join([text, "", *tables(parts)]))
    return (out / "gpu_all.md").read_text()


def tables(parts):
    """Markdown: a heading and a table for each part, the fastest setting first, and what was left."""
    lines = []
    for name, found in parts.items():
        details = found["details"]
        lines += [f"## {name}", "", f"`{found['command']}`", ""]
        lines += [f"{what}: {value}" for what, value in found["summary"].items()]
        rows = sorted(details["rows"], key=lambda row: -row.get("images/s", 0))
        kinds = [row.pop("kinds", None) for row in rows]
        lines += [*markdown(rows), *markdown(kinds[0] if rows and kinds[0] else [])]
        lines += [f"failed: {failed}" for failed in details["failed"]]
        if details["in_progress"]:
            lines += [f"ended while measuring: {details['in_progress']}"]
        if rates := details.get("ceilings"):
            lines += ["ceilings: " + ", ".join(f"{kind} {rate / 1e12:.3g} T/s" for kind, rate in rates.items())]
        lines += [""]
    return lines


def markdown(rows):
    frame = pd.DataFrame(rows)
    cells = [list(frame.columns), ["---"] * len(frame.columns), *frame.itertuples(index=False)] if rows else []
    texts = [[f"{one:.4g}" if isinstance(one, float) else str(one).replace("|", "/") for one in row] for row in cells]
    return ["", *(f"| {' | '.join(row)} |" for row in texts), ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=pathlib.Path, default=record.folder(), help="results; or BENCHMARK_RESULTS")
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", default=[])
    parser.add_argument("--minutes", type=float, default=8.5, help="for each part")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    for name in given.parts:
        print(f"== {name}: {run(PARTS[name], given.out / name, 60 * given.minutes)}", flush=True)
    if given.parts or given.merge:
        folders = [*given.merge, given.out] if given.parts else given.merge
        print(merge(folders, given.out))
    else:
        print("\n".join(f"python -m tests.benchmarks.gpu_all {name} --out {given.out}" for name in PARTS))


if __name__ == "__main__":
    main()
