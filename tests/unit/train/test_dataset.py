"""What Ray's own processes of a run load."""

import functools
import subprocess
import sys

import pytest
from ray import cloudpickle

from helpers.config import TrainingConfig
from helpers.lesson import captioned_shapes
from helpers.production.extras import evaluate, failures
from helpers.train.source import StepSource

LOAD = """
import sys
from ray import cloudpickle
cloudpickle.loads(sys.stdin.buffer.read())
print([name for name in ("torch", "diffusers", "transformers") if name in sys.modules])
"""


def source_of(config):
    source = StepSource(config)
    source.data = None  # else opened, from latents that are not here
    return source.datasets


HANDED_OVER = {
    "the process of stored data": source_of,
    "the controller, as callbacks": lambda config: failures.RecordFailures(config.run_uri),
    "the controller, and the task that waits for an evaluation": lambda config: functools.partial(
        evaluate.validate, evaluate=evaluate.Evaluate(agreement=captioned_shapes.agreement), config=config
    ),
}


@pytest.mark.parametrize("hand_over", HANDED_OVER.values(), ids=list(HANDED_OVER))
def test_rays_own_processes_of_a_run_load_no_model_code(hand_over, tmp_path):
    """PyTorch and diffusers cost each of them 300 MB, and seconds before the first step."""
    handed = cloudpickle.dumps(hand_over(TrainingConfig(storage=str(tmp_path))))
    done = subprocess.run([sys.executable, "-c", LOAD], input=handed, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"
