"""Kernels whose Rays start workers as those of the tests do: starting is what a shrunk notebook waits for."""

import pytest

from tests import preloaded

STARTUP = f"""
from ray._private import ray_constants

ray_constants.SETUP_WORKER_FILENAME = {preloaded.__file__!r}
"""


@pytest.fixture(scope="module")
def preloaded_kernels(preloaded_workers, tmp_path_factory):
    """Each kernel that a module starts runs `STARTUP` first."""
    folder = tmp_path_factory.mktemp("ipython")
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "preloaded.py").write_text(STARTUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder))
        yield
