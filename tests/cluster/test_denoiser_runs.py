"""Runs of transformers, whose captions are stored or encoded without padding: killed, they lose nothing."""

import dataclasses
import json
import pathlib

import pytest

from helpers.config.notebook import OnlineConfig
from helpers.encode import prepare_online
from helpers.sample.from_checkpoint import export_checkpoint
from helpers.train.resume import last_checkpoint
from tests.faults import attempts_of, die, loop_with, slow
from tests.pipelines import assert_bare, encode, fit, online_stream, short_run
from tests.unit.model.test_denoisers import FLOW, SMALL

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def recipe(tmp_path):
    """A function: name of a denoiser -> what its run differs in."""

    def build(name):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(SMALL[name]))
        return {**FLOW, "unet_config": str(path), "max_steps": 24, "checkpoint_every": 8, "max_failures": 1}

    return build


@slow
def test_a_killed_run_of_pixart_over_stored_latents_is_a_bare_loop(encoded, recipe, tmp_path):
    stored = {"latents_uri": str(tmp_path / "latents"), "resolutions": [32]}
    raw = dataclasses.replace(encoded[0], **stored, maximum_tokens=24, text_cleaning="lower")
    manifest = encode(raw)
    assert manifest.embeddings.ragged and manifest.stored_row_bytes < encoded[1].stored_row_bytes
    config = short_run(raw.storage, "pixart", latents_uri=raw.latents_uri, **recipe("pixart"))
    fit(config, loop=loop_with((die, 11, 0, tmp_path / "killed")))
    assert attempts_of(config) == [1, 9]
    assert_bare(config)
    uri = export_checkpoint(config, last_checkpoint(config))
    assert "max_sequence_length=24" in pathlib.Path(uri, "README.md").read_text()


@slow
def test_a_killed_online_run_of_prx_is_a_bare_loop(encoded, recipe, tmp_path):
    values = {"storage": str(tmp_path), "input_uri": encoded[0].raw_uri, "resolutions": [32]}
    raw = OnlineConfig(**values, maximum_tokens=24, text_cleaning="ftfy", encoder_batch_size=8)
    config = short_run(str(tmp_path), "prx", latents_uri=str(tmp_path / "online"), **recipe("prx"))
    loop = loop_with((die, 11, 0, tmp_path / "killed"))
    prepare_online.prepare_run(raw, config)
    fit(config, loop=loop, stream=online_stream(raw, seed=config.seed))
    assert attempts_of(config) == [1, 9]
    assert_bare(config, raw=raw)
