"""An online run that keeps what its first epoch encodes: the others read it, also if a worker is killed on the way.

A driver that is killed, at each moment at which something is committed: `tests/unit/train/test_kept.py`.
"""

import sys

import pytest
from ray import cloudpickle

from helpers import storage
from helpers.latents.manifest import DataSets, read_manifest
from helpers.lesson import captioned_shapes
from helpers.online.config import OnlineConfig
from helpers.train import metrics, step
from helpers.train.kept import FOLDER
from tests.faults import attempts_of, die, loop_with, slow
from tests.latents import plan_for
from tests.pipelines import assert_bare, fit_parts, read_alone, short_run, train_alone

STEPS = 9  # two epochs and some
# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def raw(cluster, tmp_path_factory):
    """Raw rows of which some are spoilt, and which do not fill whole batches."""
    folder = str(tmp_path_factory.mktemp("storage"))
    config = OnlineConfig(storage=folder, resolutions=[32], encoder_batch_size=8, keep_latents=True)
    captioned_shapes.write_data_set(config.raw_uri, 170, spoilt_share=0.05, rows_per_file=60)
    return config


def run_of(raw, name, **changes):
    values = {"latents_uri": storage.join(raw.storage, "online"), "max_steps": STEPS, "checkpoint_every": 2}
    return short_run(raw.storage, name, **{**values, "max_failures": 5, **changes})


def kept(config):
    uri = storage.join(config.run_uri, FOLDER)
    return uri, read_manifest(uri)


def bare(raw, config):
    """[(loss, samples_crc32)] of a run, without Ray: an epoch encoded, then steps of stored latents."""
    manifest = DataSets.open(config.proportions).first
    plan, (uri, kept_manifest) = plan_for(config), kept(config)
    kept_plan = plan_for(short_run(raw.storage, "any", latents_uri=uri))
    alone, epoch = step.TrainStep(config, manifest), plan.steps_per_epoch
    first = train_alone(alone, manifest, plan, read_alone(plan, epoch, raw, config.seed), range(epoch))
    others = read_alone(kept_plan, STEPS - epoch)
    return first + train_alone(alone, kept_manifest, kept_plan, others, range(epoch, STEPS))


@slow
def test_a_run_that_keeps_latents_is_a_bare_loop_also_if_a_worker_is_killed_in_the_first_epoch(raw, tmp_path):
    """That each row is encoded once where nothing happens: `tests/unit/train/test_kept.py`."""
    config, flag = run_of(raw, "killed"), tmp_path / "killed"
    fit_parts(raw, config, loop_with((die, 3, 0, flag)))
    assert flag.exists()
    found, (_, manifest), plan = metrics.read_metrics(config.run_uri), kept(config), plan_for(config)
    assert plan.steps_per_epoch + 1 in attempts_of(config)
    assert manifest.read == plan.num_rows and manifest.written > 140
    assert not found["masked_rows"][plan.steps_per_epoch :].any()
    assert_bare(config, bare(raw, config))
