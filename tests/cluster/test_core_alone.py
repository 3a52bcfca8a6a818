"""The core encodes, trains, loses a worker, goes on and samples, with online/, production/ and lesson/ deleted."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("online", "production", "lesson")


@pytest.mark.slow
def test_the_core_works_without_the_rooms_beside_it(no_shared_cluster, tmp_path):
    shutil.copytree(
        ROOT / "helpers", tmp_path / "core" / "helpers", ignore=shutil.ignore_patterns(*ROOMS, "__pycache__")
    )
    shutil.copy(ROOT / "tests" / "core_alone.py", tmp_path / "core")
    command = [sys.executable, "core_alone.py", tmp_path / "storage"]
    done = subprocess.run(command, cwd=tmp_path / "core", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()  # Ray may say in between that a worker died
    assert "encoded: 96" in said and "attempts: 2 steps: [1, 2, 3, 4, 5, 6, 7, 8]" in said
    assert "losses that differ between attempts: 0" in said and "sampled: (32, 32, 3)" in said
