"""Results of benchmarks as JSON files: what was measured, by which command, on which hardware, at which revision."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

import ray
import torch

ROOT = pathlib.Path(__file__).parents[2]


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
    folder().mkdir(parents=True, exist_ok=True)
    # Numbers of numpy and pandas become Python's.
    text = json.dumps(found, indent=2, default=lambda value: value.item() if hasattr(value, "item") else str(value))
    (folder() / f"{name}.json").write_text(text + "\n")
