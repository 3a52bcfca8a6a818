"""nbval runs all cells of all notebooks, with every section, shrunk by the values of their parameters alone.

Their Rays start workers as those of the tests do (`tests/preloaded.py`): starting is what a shrunk notebook waits for.
"""

import os
import subprocess
import sys

import papermill
import pytest

from tests import preloaded
from tests.execute_notebooks import NOTEBOOKS, ROOT
from tests.faults import slow

PREPROCESSING, TRAINING, ONLINE, EVALUATION, SCALING = NOTEBOOKS
DATA = {"limit": 200, "validation_share": 0.1}
TWO = [f"a large {shape} at the top on a blue background" for shape in ("red circle", "white square")]
RUN = {"max_steps": 4, "warmup_steps": 1, "checkpoint_every": 2, "global_batch_size": 16, "validation_share": 0.1}
RUN |= {"resolution": 32, "extras": {"evaluate": {"every": 2, "prompts": TWO, "sampling_steps": 2}}}
SHRUNK = {PREPROCESSING: DATA, TRAINING: RUN, ONLINE: {**DATA, **RUN}, EVALUATION: {}, SCALING: {"measured_steps": 1}}
MAIN = [PREPROCESSING, TRAINING, ONLINE]
READS = {PREPROCESSING: [], TRAINING: MAIN[:1], ONLINE: MAIN[:1], EVALUATION: MAIN[:2], SCALING: MAIN[:2]}

PRELOADED = f"""
from ray._private import ray_constants

ray_constants.SETUP_WORKER_FILENAME = {preloaded.__file__!r}
"""


@pytest.fixture(scope="module")
def run(no_shared_cluster, tmp_path_factory):
    """A function that runs a notebook once, after those that it reads from, in a folder with the helpers."""
    folder, done = tmp_path_factory.mktemp("notebooks"), set()
    for name in ("helpers", "tests"):
        (folder / name).symlink_to(ROOT / name)
    startup = folder / "ipython" / "profile_default" / "startup"  # run by each kernel first
    startup.mkdir(parents=True)
    (startup / "preloaded.py").write_text(PRELOADED)
    environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython")}

    def run(name):
        if name in done:
            return
        for other in READS[name]:
            run(other)
        copy = folder / name.rpartition("/")[2]
        papermill.execute_notebook(ROOT / name, copy, SHRUNK[name], prepare_only=True, progress_bar=False)
        command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=1200", "-q", "--durations=12"]
        ended = subprocess.run([*command, copy.name], cwd=folder, capture_output=True, text=True, env=environment)
        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
        print(ended.stdout)
        done.add(name)

    return run


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*MAIN, *(pytest.param(name, marks=slow) for name in (EVALUATION, SCALING))])
def test_a_notebook_runs(run, name):
    run(name)
