"""What a run's export is outside of this project: in plain diffusers, in older versions, on the hub."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import diffusers
import pytest
import torch
from huggingface_hub import DatasetCard, ModelCard
from safetensors import safe_open

from helpers.config import TrainingConfig
from helpers.encode import captions, encoder
from helpers.latents.manifest import DataSets
from helpers.lesson import ablations
from helpers.model.denoisers import build_denoiser, load_denoiser_config
from helpers.production.card import data_card, model_card
from helpers.sample import export_pipeline, pipeline_of_run
from tests.faults import slow
from tests.models import MOST_TOKENS, WIDTH, tiny_model
from tests.pipelines import untrained_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

FLOW = {"prediction_type": "flow", "min_snr_gamma": None}
EIGHT_TIMES = {  # an autoencoder that makes latents of an eighth of the image's side, as the published ones
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "shift_factor": None,
}
PRX = {
    **load_denoiser_config("tiny-transformer"),
    **{"in_channels": 16, "context_in_dim": WIDTH, "hidden_size": 32, "num_heads": 2, "depth": 1, "axes_dim": [8, 8]},
}
OLD = ("diffusers==0.33.0", "transformers==4.51.0", "huggingface_hub==0.30.2", "tokenizers==0.21.1")
# Run with the old versions: opens each folder in half precision by both classes, and generates by a prompt alone.
OPEN = """
import sys, diffusers, torch, transformers
assert (diffusers.__version__, transformers.__version__) == ("0.33.0", "4.51.0")
for folder in sys.argv[1:]:
    for kind in (diffusers.DiffusionPipeline, diffusers.AutoPipelineForText2Image):
        for dtype in (torch.float16, torch.bfloat16):
            pipeline = kind.from_pretrained(folder, torch_dtype=dtype)
            assert pipeline.text_encoder.dtype == pipeline.vae.dtype == dtype
    image = pipeline("a red circle", num_inference_steps=2).images[0]
    print("drawn", folder, *image.size)
"""


def transformer_pipeline(folder, values, text, resolution):
    """An untrained pipeline of a transformer with this config."""
    path = pathlib.Path(folder, "config.json")
    path.write_text(json.dumps(values))
    model = tiny_model(folder / "encoders", text=text, **EIGHT_TIMES)
    config = TrainingConfig(unet_config=str(path), resolution=resolution, prediction_type="flow")
    manifest, _ = ablations.random_batch(config, num_tokens=MOST_TOKENS)
    manifest.encoder["model"] = model
    return pipeline_of_run(build_denoiser(str(path)), manifest, config)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{name: (folder of an export, the size that its run trained at)}"""
    folder = tmp_path_factory.mktemp("exports")
    (folder / "prx parts").mkdir()
    pipelines = {
        "unet": (untrained_pipeline(TrainingConfig(resolution=32)), 32),
        "unet, flow": (untrained_pipeline(TrainingConfig(resolution=64, **FLOW)), 64),
        "prx": (transformer_pipeline(folder / "prx parts", PRX, "T5GemmaEncoder", 256), 256),
    }
    return {name: (export_pipeline(made, str(folder / name)), size) for name, (made, size) in pipelines.items()}


# ---- the size


@pytest.mark.parametrize("name", ["unet", "unet, flow", "prx"])
def test_a_prompt_alone_draws_the_trained_size(exported, name):
    folder, size = exported[name]
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert pipeline("a red circle", num_inference_steps=1).images[0].size == (size, size)


# ---- the files


def test_tensors_and_files_have_the_names_that_older_versions_read(exported):
    folder, _ = exported["unet"]
    with safe_open(f"{folder}/text_encoder/model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert len(names) == 52 and all(name.startswith("text_model.") for name in names)
    tokenizer = pathlib.Path(folder, "tokenizer")
    vocab, merges = json.loads((tokenizer / "vocab.json").read_text()), (tokenizer / "merges.txt").read_text()
    assert len(vocab) == 600 and merges.startswith("#version: 0.2\n")
    folder, _ = exported["prx"]
    parts = json.loads(pathlib.Path(folder, "model_index.json").read_text())
    assert parts["tokenizer"] == ["transformers", "GemmaTokenizerFast"]
    options = json.loads(pathlib.Path(folder, "tokenizer", "tokenizer_config.json").read_text())
    assert "extra_special_tokens" not in options  # a list, where older versions want a mapping


@pytest.mark.parametrize("name", ["unet", "prx"])
def test_the_text_encoder_and_tokenizer_come_back_unchanged(exported, name):
    folder, _ = exported[name]
    loaded = diffusers.AutoPipelineForText2Image.from_pretrained(folder)
    model = "tiny-sd" if name == "unet" else str(pathlib.Path(folder).parent / f"{name} parts" / "encoders")
    tokenizer, weights = captions.load_tokenizer(model), encoder.load_text_encoder(model).state_dict()
    assert loaded.tokenizer("a large red circle").input_ids == tokenizer("a large red circle").input_ids
    state = loaded.text_encoder.state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in weights)


@slow
def test_the_versions_of_2025_open_it_in_half_precision_without_a_missing_key_and_draw(exported, tmp_path):
    """diffusers 0.33 and transformers 4.51, in a folder that stands before this environment's packages."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "old"), *OLD]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the old versions cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    folders = [exported[name][0] for name in ("unet", "unet, flow")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "old"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OPEN, *folders]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    drawn = [f"drawn {folder} {size} {size}" for folder, size in map(exported.get, ("unet", "unet, flow"))]
    assert ran.stdout.splitlines() == drawn
    assert not re.search("not used|newly initialized|missing|unexpected|not expected", ran.stderr), ran.stderr


# ---- the card


def data_sets(**encoder):
    manifest, _ = ablations.random_batch(TrainingConfig(), num_tokens=24)
    names = {"model": f"org/vae@{'1' * 40}", "revision": "1" * 40, **encoder}
    manifest = dataclasses.replace(manifest, encoder=names, written=1234, job={"input_uri": "/home/me/pictures"})
    return DataSets({"/latents": manifest}, {"/latents": 1.0})


@pytest.mark.parametrize(
    ("licence", "fields"),
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ("mit or apache-2.0", {"license": "other", "license_name": "MIT OR Apache-2.0"}),
        (None, {}),
    ],
)
def test_the_readme_is_a_model_card_with_licence_data_encoders_and_steps(licence, fields):
    config = TrainingConfig(resolution=32)
    card = model_card(config, data_sets(text_encoder_model="/home/me/clip"), 2400, licence)
    expected = {"library_name": "diffusers", "pipeline_tag": "text-to-image", **fields}
    assert ModelCard(str(card)).data.to_dict() == {**expected, "tags": ["StableDiffusionPipeline"]}
    for line in ("data | 1,234 rows of pictures", f"VAE | org/vae@{'1' * 40}", "text encoder | clip", "steps | 2,400"):
        assert f"| {line} |" in card.text
    assert "| prediction_type | v_prediction |" in card.text and "    height=32,\n" in card.text
    assert "/home/me" not in card.text


def test_latents_get_a_data_card_that_names_no_secret_and_no_folder(tmp_path):
    """Its text is shown as text, and the hub's own class reads its metadata."""
    source = "s3://key:secret@bucket/pictures?token=secret"
    manifest = data_sets(text_encoder_model="/home/me/clip").first
    manifest = dataclasses.replace(manifest, job={"input_uri": source}, rejected={"no | caption": 3})
    card = data_card(manifest, "latents", "apache-2.0")
    found = DatasetCard(str(card)).data.to_dict()
    assert found["license"] == "apache-2.0" and found["size_categories"] == ["1K<n<10K"]
    assert found["configs"] == [{"config_name": "default", "data_files": "data/*.parquet"}]
    lines = ["rows | 1,234", "rejected rows | 3: no \\| caption", f"VAE | org/vae@{'1' * 40}", "text encoder | clip"]
    for line in [*lines, "image_latents_64 | 2 x 4 x 8 x 8"]:
        assert f"| {line} |" in card.text, line
    assert "# Latents of s3://bucket/pictures" in card.text
    assert not re.search("secret|/home/me|key:", str(card))
