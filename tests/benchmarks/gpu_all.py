"""Everything about one GPU, in calls of at most nine minutes each.

    python -m tests.benchmarks.gpu_all                                  # lists the calls
    python -m tests.benchmarks.gpu_all checks-eager --out FOLDER        # one of them, or several

The cheap calls come first: those that compile nothing, then those that compile for minutes when no cache is there. Each
part is a process of its own (`gpu_checks`, `gpu_step`, `gpu_encode`), which writes each result when it is there into
FOLDER/PART; after --minutes it is ended, whatever it does. `table` shows what lies in tests/benchmarks/results: copy
the folders of other machines there.
"""

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys

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
TINY_PIPELINE = "--rows 700 --steps 12 --unet tiny --batch 16 --precision fp32"
PARTS = {
    "checks-eager": Part("gpu_checks", "--checks layouts memory bf16 checkpoints repeats", TINY_CHECKS),
    "pipeline": Part("gpu_pipeline", "", TINY_PIPELINE),
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=pathlib.Path, default=record.folder(), help="results; or BENCHMARK_RESULTS")
    parser.add_argument("--minutes", type=float, default=8.5, help="for each part")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    for name in given.parts:
        print(f"== {name}: {run(PARTS[name], given.out / name, 60 * given.minutes)}", flush=True)
    if not given.parts:
        print("\n".join(f"python -m tests.benchmarks.gpu_all {name} --out {given.out}" for name in PARTS))


if __name__ == "__main__":
    main()
