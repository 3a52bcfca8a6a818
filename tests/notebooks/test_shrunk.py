"""nbval runs all cells of all notebooks, with every section, shrunk by the values of their parameters alone."""

import os
import subprocess
import sys

import papermill
import pytest

from tests.execute_notebooks import NOTEBOOKS, ROOT
from tests.faults import slow

PREPROCESSING, TRAINING, ONLINE, EVALUATION, SCALING = NOTEBOOKS
DATA = {"limit": 200, "validation_share": 0.1}
TWO = [f"a large {shape} at the top on a blue background" for shape in ("red circle", "white square")]
RUN = {"max_steps": 4, "warmup_steps": 1, "checkpoint_every": 2, "global_batch_size": 16, "validation_share": 0.1}
RUN |= {"resolution": 32, "extras": {"evaluate": {"every": 2, "prompts": TWO, "sampling_steps": 2}}}
SHRUNK = {PREPROCESSING: DATA, TRAINING: RUN, ONLINE: {**DATA, **RUN}, EVALUATION: {}, SCALING: {"measured_steps": 1}}
MAIN = [PREPROCESSING, TRAINING, ONLINE]
# The notebooks that one reads from, and their sections whose files it reads.
DATA_OF, RUN_OF = {PREPROCESSING: ["by-hand"]}, {TRAINING: []}
READS = {PREPROCESSING: {}, TRAINING: DATA_OF, ONLINE: DATA_OF, EVALUATION: RUN_OF, SCALING: RUN_OF}
# Compiling takes a minute; where there is no compiler, its row is left out.
ENVIRONMENTS = {SCALING: {"PATH": f"{sys.prefix}/bin:/usr/sbin"}}


@pytest.fixture(scope="module")
def run(no_shared_cluster, preloaded_kernels, tmp_path_factory):
    """A function that runs a notebook once, after those that it reads from, in a folder with the helpers."""
    folder, done = tmp_path_factory.mktemp("notebooks"), set()
    for name in ("helpers", "tests"):
        (folder / name).symlink_to(ROOT / name)

    def run(name, **sections):
        if name in done:
            return
        for other, read in READS[name].items():
            run(other, sections=read)
        copy = folder / name.rpartition("/")[2]
        given = {**SHRUNK[name], **sections}
        papermill.execute_notebook(ROOT / name, copy, given, prepare_only=True, progress_bar=False)
        command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=1200", "-q", "--durations=12"]
        variables = {**os.environ, **ENVIRONMENTS.get(name, {})}
        ended = subprocess.run([*command, copy.name], cwd=folder, capture_output=True, text=True, env=variables)
        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
        print(ended.stdout)
        done.add(name)

    return run


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*MAIN, *(pytest.param(name, marks=slow) for name in (EVALUATION, SCALING))])
def test_a_notebook_runs(run, name):
    run(name)
