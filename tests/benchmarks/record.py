"""What benchmarks share: their options, measuring in turns, and results as JSON files, which say what was measured by
which command, on which hardware and at which revision."""

import argparse
import datetime
import gc
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import ray
import torch

from helpers import storage

ROOT = pathlib.Path(__file__).parents[2]


def options(description, **defaults):
    """The command line's options, as a namespace: `--name` for each default, whose type decides that of the option.

    A list takes several values, False is a switch, None a text.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(option, type=type(default[0]), nargs="+", default=default)
        else:
            parser.add_argument(option, type=str if default is None else type(default), default=default)
    return parser.parse_args()


def in_turns(rounds, measures):
    """{name: the rates that its `measure(round)` returned}; measured in turns, so that a slow minute slows all."""
    rates = {name: [] for name in measures}
    for number in range(rounds):
        for name, measure in measures.items():
            rates[name].append(measure(number))
            print(f"round {number + 1}, {name}: {rates[name][-1]:,.0f}", flush=True)
    return rates


def compare(rates, name, reference):
    """(ratio of the median rates of two measurements, the sentence that says so)"""
    one, other = (statistics.median(rates[key]) for key in (name, reference))
    return one / other, f"{one:.0f} of {other:.0f} images/s: {one / other:.3f}"


def folder():
    """Where results are written: `tests/benchmarks/results`, or what BENCHMARK_RESULTS says."""
    return pathlib.Path(os.environ.get("BENCHMARK_RESULTS", ROOT / "tests" / "benchmarks" / "results"))


def hardware():
    """{"cpu", "cores", "memory_gib", "gpu"} of this machine."""
    info = pathlib.Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def revision():
    """The git commit, with "+" if files differ from it; None outside a clone."""
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes else "")


def write(name, summary, **details):
    """Print what was measured, and write `NAME.json`; see `save`."""
    for what, measured in summary.items():
        print(f"{what}: {measured}", flush=True)
    save(name, summary, **details)


def save(name, summary, **details):
    """Write `NAME.json`.

    `summary`: {what was measured: the measurement as a text}, the lines of the table in README.md; `details`:
    numbers.
    """
    command = " ".join(["python -m", f"tests.benchmarks.{name}", *sys.argv[1:]])
    found = {
        "command": command,
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "ray": ray.__version__, "python": platform.python_version()},
        "revision": revision(),
        "date": datetime.date.today().isoformat(),
        "summary": summary,
        "details": details,
    }
    # Numbers of numpy and pandas become Python's.
    text = json.dumps(found, indent=2, default=lambda value: value.item() if hasattr(value, "item") else str(value))
    storage.write_text(folder() / f"{name}.json", text + "\n")  # whole, also if this process is killed meanwhile


class Rows:
    """Measurements one after another, written after each: a process that is killed leaves all before.

    `NAME.json` has "rows" and "failed". `summarise(rows)` makes the summary.
    """

    def __init__(self, name, summarise, **details):
        self.name, self.summarise, self.details = name, summarise, details
        self.rows, self.failed = [], []

    def add(self, what, measure):
        """The row of `what` (a dict) with what `measure()` returns; None if it fails, which is kept; others go on."""
        row = None
        try:
            row = {**what, **measure()}
            self.rows.append(row)
        except Exception as error:
            self.failed.append({**what, "error": f"{type(error).__name__}: {error}".splitlines()[0][:160]})
        # Outside of `except`, which would keep the memory of what failed.
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        self.write()
        print("failed:" if row is None else "measured:", json.dumps(row or self.failed[-1], default=str), flush=True)
        return row

    def write(self):
        summary = self.summarise(self.rows) if self.rows else {}
        save(self.name, summary, rows=self.rows, failed=self.failed, **self.details)
