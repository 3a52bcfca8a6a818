"""`encoder_revision`: which commit of a model on the hub encodes; the hub is a cache in its layout, and offline."""

import json
import shutil

import huggingface_hub.constants
import pyarrow as pa
import pytest

from helpers import encoder, images, preprocess, resumable_job
from helpers.config import OnlineConfig, PreprocessingConfig
from tests.faults import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
COMMITS = {"v1": "a" * 40, "main": "b" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`org/model` with a tag and another commit, whose latents have another scale and captions are shorter."""
    folder = tmp_path / "hub" / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    for name, commit in COMMITS.items():
        (folder / "refs" / name).write_text(commit)
        shutil.copytree(ROOT / "helpers" / "tiny-sd", folder / "snapshots" / commit)
    newer = folder / "snapshots" / COMMITS["main"]
    for path, name, value in (
        (newer / "vae" / "config.json", "scaling_factor", 7.0),
        (newer / "tokenizer" / "tokenizer_config.json", "model_max_length", 12),
        (newer / "text_encoder" / "config.json", "bos_token_id", 5),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder.parent))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    images.load_tokenizer.cache_clear()
    yield "org/model"
    images.load_tokenizer.cache_clear()


def config(hub, revision, **options):
    return PreprocessingConfig(encoder_model=hub, encoder_revision=revision, resolutions=[32], **options)


def test_every_part_of_the_encoder_is_of_the_revision(hub):
    for revision, scale, tokens, start in (("v1", None, 24, 0), (None, 7.0, 12, 5), (COMMITS["v1"], None, 24, 0)):
        found = encoder.LatentEncoder(*encoder.arguments(config(hub, revision)))
        assert (found.vae.config.scaling_factor == 7.0) == (scale == 7.0)
        assert found.columns[-1].shape[0] == tokens
        assert (found.text_encoder.config.bos_token_id == 5) == (start == 5)


def test_the_commit_stands_in_the_manifest(hub):
    for revision, commit in (("v1", COMMITS["v1"]), (COMMITS["v1"], COMMITS["v1"]), (None, COMMITS["main"])):
        made = preprocess.describe(config(hub, revision))
        model = f"{hub}@{revision}" if revision else hub
        assert made["encoder"] == {"model": model, "revision": commit, "precision": "fp32"}
        assert (made["scaling_factor"] == 7.0) == (revision is None)


def test_another_revision_is_refused_on_resume(hub, tmp_path):
    def job(revision):
        made = preprocess.describe(config(hub, revision))
        segments = [resumable_job.Segment(0, ["a"], 1)]
        return resumable_job.Job(str(tmp_path / "latents"), {}, made, plan=lambda: segments, id_type=pa.int64())

    job("v1").save()
    job("v1")
    with pytest.raises(ValueError, match=rf"other parameters \(encoder=.*{COMMITS['v1']}.* not .*{COMMITS['main']}"):
        job(None)


def test_a_missing_revision_is_one_sentence(hub):
    with pytest.raises(ValueError, match=r"^encoder_model='org/model@v2' holds no model in diffusers layout"):
        preprocess.describe(config(hub, "v2"))


def test_a_config_with_a_revision_survives_its_dict(hub):
    for cls in (PreprocessingConfig, OnlineConfig):
        made = cls(encoder_model=hub, encoder_revision="v1")
        again = cls.from_dict(json.loads(json.dumps(made.to_dict())))
        assert again == made and again.encoder_model == "org/model@v1"
