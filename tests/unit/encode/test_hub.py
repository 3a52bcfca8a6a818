"""Models of the hub: which commit a job or run loads, and how often the hub is asked. One on loopback; no Ray."""

import collections
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants

from helpers.config import PreprocessingConfig
from helpers.encode import captions, encoder, prepare
from helpers.lesson import captioned_shapes
from helpers.model.denoisers import build_denoiser
from helpers.train import checkpoint, start
from tests.faults import ROOT
from tests.hub_server import MODEL, HubServer

pytestmark = pytest.mark.usefixtures("one_thread")
TINY_SD = ROOT / "helpers" / "models" / "tiny-sd"
NODE = """
import multiprocessing, sys
from helpers.config import PreprocessingConfig
from helpers.encode import captions, encoder, prepare

context, model = multiprocessing.get_context("fork"), sys.argv[1]
start = context.Barrier(8)

def load(number):
    start.wait(300)  # so each process loads once, all at the same time
    if number < 2:
        encoder.LatentEncoder(model)
    else:
        captions.load_tokenizer(model)
        prepare.encoder_arguments(PreprocessingConfig(encoder_model=model))

with context.Pool(8) as pool:
    pool.map(load, range(8), chunksize=1)
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with tiny-sd, which this process asks; its cache is empty."""
    server = HubServer(TINY_SD)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "driver" / "hub"))
    captions.load_tokenizer.cache_clear()
    yield server
    server.stop()


@pytest.fixture
def newer(tmp_path):
    """Another version of the model: its latents have another scale, its captions another start."""
    folder = shutil.copytree(TINY_SD, tmp_path / "newer")
    for name, change in {"vae/config": {"scaling_factor": 7.0}, "text_encoder/config": {"bos_token_id": 5}}.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return folder


def config_of(tmp_path, kind=PreprocessingConfig, **options):
    columns = {"input_format": "parquet", "image_column": "jpg", "caption_column": "caption", "id_column": "hash"}
    given = {"storage": str(tmp_path / "storage"), "encoder_model": MODEL, "resolutions": [32], **columns}
    config = kind(**{**given, **options})
    if not os.path.exists(config.raw_uri):
        captioned_shapes.write_data_set(config.raw_uri, 20)
    return config


@pytest.mark.slow
def test_a_node_downloads_each_file_once_whatever_the_number_of_its_processes(hub, tmp_path):
    """Six processes load tokenizer and configs and two load models at once, with an empty cache."""
    model = prepare.derive(config_of(tmp_path)).encoder_model
    before = len(hub.requests)
    looked_up = [path for _, path in hub.requests if path.startswith("/api/models/")]
    place = {"HF_HOME": str(tmp_path / "node"), "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", NODE, model], cwd=ROOT, env={**os.environ, **place}, check=True)
    asked = collections.Counter(request for request in hub.requests[before:] if MODEL in request[1])
    files = [file for part in ("vae", "text_encoder", "tokenizer") for file in (TINY_SD / part).iterdir()]
    files.append(TINY_SD / "model_index.json")
    assert len(looked_up) == 2  # the commit and its list of files
    assert set(asked.values()) == {1}
    assert asked.total() == 1 + 2 * len(files)  # the list, and of each file its head and its bytes


def test_a_job_goes_on_with_the_commit_that_it_began_with(hub, newer, tmp_path):
    config = config_of(tmp_path)
    job, first = prepare.prepare_job(config), hub.refs["main"]
    job.save()
    second = hub.move("main", newer)
    assert config.encoder_model == MODEL
    assert job.config.encoder_model == prepare.encoder_arguments(job.config)["model"] == f"{MODEL}@{first}"
    assert job.description["encoder"]["model"] == job.description["encoder"]["text_encoder_model"] == f"{MODEL}@{first}"
    resumed = prepare.prepare_job(config_of(tmp_path))
    assert resumed.description == job.description and resumed.config == job.config
    newest = {"encoder_model": f"{MODEL}@main"}
    with pytest.raises(ValueError, match=rf"was begun with encoder=.*{first}.* not .*{second}"):
        prepare.prepare_job(config_of(tmp_path, **newest))
    another = prepare.prepare_job(config_of(tmp_path, latents_uri=str(tmp_path / "another"), **newest))
    assert another.description["scaling_factor"] == 7.0
    model = dataclasses.replace(another.config, limit=5).encoder_model
    assert model == f"{MODEL}@{second}"
    assert encoder.LatentEncoder(model).text_encoder.config.bos_token_id == 5


def test_a_run_starts_from_a_model_of_the_hub_and_keeps_its_commit(hub, newer, tmp_path, monkeypatch):
    """Workers of another node download it again."""
    unet = build_denoiser("tiny", seed=3)
    unet.save_pretrained(newer / "unet")
    commit = hub.move("v2", newer)
    given = {"storage": str(tmp_path), "run_name": "run", "units_per_step": None, "clip_model": None}
    given |= {"init_from": f"{MODEL}@v2"}
    config = start.training_config(given)
    assert config.init_from == f"{MODEL}@{commit}"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another node"))
    denoiser = build_denoiser("tiny")
    checkpoint.load_initial_weights(checkpoint.find_weights(config.init_from, "tiny", ""), denoiser)
    assert all(torch.equal(tensor, unet.state_dict()[name]) for name, tensor in denoiser.state_dict().items())
    asked = {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path}
    assert asked == {"config.json", "scheduler_config.json", "diffusion_pytorch_model.safetensors"}


def test_a_hub_that_is_not_reached_is_one_sentence(hub, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=rf"^encoder_model='{MODEL}@v9' is neither .* given by {hub.url}"):
        prepare.prepare_job(config_of(tmp_path, encoder_model=f"{MODEL}@v9"))
    hub.stop()
    config = config_of(tmp_path)
    with pytest.raises(ValueError, match=rf"^encoder_model='{MODEL}' is neither .*could not be reached"):
        prepare.prepare_job(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=rf"^'{MODEL}@{0:040}' is neither .* nor given by {hub.url}: check"):
        captions.load_tokenizer(f"{MODEL}@{0:040}")
    assert not os.path.exists(config.latents_uri)


def test_a_model_in_the_image_is_used_without_a_request(hub, newer, tmp_path, monkeypatch):
    """By the Dockerfile's own command; also where `main` has moved since, and offline."""
    dockerfile = (ROOT / "helpers/clusters/Dockerfile").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^RUN (if .*ENCODER_MODEL.*)$", dockerfile, re.MULTILINE)
    image = {"HF_HOME": str(tmp_path / "driver"), "HF_ENDPOINT": hub.url, "ENCODER_MODEL": MODEL}
    image["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, **image}, check=True)
    first, before = hub.refs["main"], len(hub.requests)
    hub.move("main", newer)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    job = prepare.prepare_job(config_of(tmp_path))
    assert job.description["encoder"]["revision"] == first
    encoder.LatentEncoder(job.config.encoder_model)
    assert len(hub.requests) == before
