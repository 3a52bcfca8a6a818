"""Everything about one GPU in nine minutes: the training step at both sizes, encoding, and checks; JSON and Markdown.

    python -m tests.benchmarks.gpu_all [--minutes 9] [--parts step-512 encode step-256 checks]

Each part is a process of its own (`gpu_step`, `gpu_encode`, `gpu_checks`), so one that crashes or hangs costs its own
time only. `gpu_all.json` and `gpu_all.md` are written into `tests/benchmarks/results`, or the folder BENCHMARK_RESULTS,
every few seconds while the parts run, so that what was measured survives whatever ends this process.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pandas as pd

from tests.benchmarks import record


@dataclasses.dataclass(frozen=True)
class Part:
    """A benchmark to run: its module, its arguments, its share of the time, and what to try it on a CPU with."""

    module: str
    arguments: str
    share: float
    on_cpu: str
    takes_minutes: bool = True


PARTS = {
    "step-512": Part(
        "gpu_step",
        "--resolution 512 --batch 64 96 128",
        0.42,
        "--unet tiny --resolution 32 --batch 2 --steps 1",
    ),
    "encode": Part(
        "gpu_encode",
        "",
        0.18,
        "--model tiny-sd --resolutions 32 --batch 2 --seconds 0.05",
    ),
    "step-256": Part(
        "gpu_step",
        "--resolution 256 --batch 256 384 512",
        0.26,
        "--unet tiny --resolution 64 --batch 2 --steps 1",
    ),
    "checks": Part(
        "gpu_checks",
        "",
        0.14,
        "--unet tiny --resolution 32",
        takes_minutes=False,
    ),
}


def run(name, part, seconds, folder, merge):
    """Run a part for `seconds` at most; `merge()` every few seconds. Returns what became of it."""
    arguments = part.arguments.split() if record.hardware()["gpu"] else part.on_cpu.split()
    if part.takes_minutes:  # a setting that has begun may still end
        arguments += ["--minutes", f"{0.8 * seconds / 60:.2f}"]
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", f"tests.benchmarks.{part.module}", *arguments],
        env={**os.environ, "BENCHMARK_RESULTS": str(folder / name)},
        cwd=record.ROOT,
    )
    until = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < until:
        try:
            child.wait(timeout=min(5, max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            merge()
    if child.poll() is None:
        child.kill()
        child.wait()
        return "stopped: out of time"
    return "ended" if child.returncode == 0 else f"failed with exit code {child.returncode}"


def read(folder, parts):
    """{name of a part: its results so far}"""
    files = {name: folder / name / f"{part.module}.json" for name, part in parts.items()}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def tables(results):
    """Markdown: a heading and a table for each part, the fastest setting first."""
    lines = []
    for name, found in results.items():
        details = found["details"]
        settings = details.get("settings", details.get("checks"))
        for title, rows in settings.items() if isinstance(settings, dict) else [(None, settings)]:
            lines += [f"## {name}" + (f", {title} pixels" if title else ""), "", *found["summary"].values(), ""]
            frame = pd.DataFrame(rows)
            speed = frame.columns.intersection(["images/s", "rows/s"])
            frame = frame.sort_values(list(speed), ascending=False) if len(speed) else frame
            lines += [" | ".join(["", *cells, ""]).strip() for cells in markdown(frame)] + [""]
        if rates := details.get("ceilings"):
            lines += ["Ceilings: " + ", ".join(f"{kind} {rate / 1e12:.3g} T/s" for kind, rate in rates.items()), ""]
    return lines


def markdown(frame):
    yield list(frame.columns)
    yield ["---"] * len(frame.columns)
    for row in frame.itertuples(index=False):
        yield [f"{cell:.4g}" if isinstance(cell, float) else str(cell).replace("|", "/") for cell in row]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="in all")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    parts, ended = {name: PARTS[name] for name in given.parts}, {}
    until = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)

        def merge():
            results = read(folder, parts)
            summary = {what: value for found in results.values() for what, value in found["summary"].items()}
            record.write("gpu_all", summary, parts={n: found["details"] for n, found in results.items()}, ended=ended)
            machine = record.hardware()
            text = [f"# {machine['gpu'] or machine['cpu']}", "", *(f"- {n}: {how}" for n, how in ended.items()), ""]
            (record.folder() / "gpu_all.md").write_text("\n".join(text + tables(results)))

        for number, (name, part) in enumerate(parts.items()):
            left = sum(other.share for other in list(parts.values())[number:])
            seconds = max(1.0, (until - time.monotonic()) * part.share / left)
            print(f"== {name}: {seconds:.0f} s at most", flush=True)
            ended[name] = run(name, part, seconds, folder, merge)
            merge()
            print(f"== {name}: {ended[name]}", flush=True)
    print((record.folder() / "gpu_all.md").read_text())


if __name__ == "__main__":
    main()
