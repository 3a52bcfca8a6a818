"""What the evaluation of a checkpoint finds and leaves, and which checkpoint is the best."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray.train
import torch.distributed as dist
from PIL import Image

from helpers import storage
from helpers.config import TrainingConfig
from helpers.latents.manifest import DataSets, write_manifest
from helpers.lesson import captioned_shapes
from helpers.model.denoisers import build_denoiser
from helpers.production.extras import results, scores
from helpers.production.extras.evaluate import Evaluate
from helpers.train import checkpoint
from helpers.train.step import TrainStep
from tests.benchmarks import made_up
from tests.latents import SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["a large red circle in the centre on a blue background", "a small white square", "a triangle"]


class CLIP:
    """A stand-in: an image's embedding is its mean colour, a text's the first axis."""

    def __init__(self, model, device="cpu"):
        if model == "broken":
            raise ValueError("'broken' is no CLIP")

    def images(self, images):
        colours = np.stack([image.mean(axis=(0, 1)) + 1 for image in images]).astype(np.float32)
        return colours / np.linalg.norm(colours, axis=1, keepdims=True)

    def texts(self, texts):
        return np.eye(3, dtype=np.float32)[[0] * len(texts)]


@pytest.fixture(autouse=True)
def clip(monkeypatch):
    monkeypatch.setattr(scores, "CLIP", CLIP)


@pytest.fixture
def build_run(tmp_path, build_manifest, build_latents):
    """A function that gives the config of a run with six held-out rows; keywords change it."""

    def build(held_out=6, **changes):
        values = {"storage": str(tmp_path), "resolution": 32, "checkpoint_every": 10, "max_steps": 40}
        config = TrainingConfig(**{**values, **changes})
        manifest = build_manifest(encoder={"model": "tiny-sd", "revision": "0", "precision": "fp32"})
        write_manifest(config.latents_uri, manifest, [])
        rows = storage.join(config.run_uri, "validation", "rows.parquet")
        storage.write_text(rows, "")
        pq.write_table(build_latents(held_out), rows)
        return config

    return build


def settings(**changes):
    return Evaluate(**{"every": 10, "prompts": PROMPTS, "sampling_steps": 1, **changes})


def evaluate_denoiser(config, seed=0, step=10, **changes):
    return scores.evaluate_denoiser(build_denoiser("tiny", seed=seed).eval(), settings(**changes), config, step)


def test_an_evaluation_leaves_losses_scores_and_images(build_run):
    config = build_run()
    found = evaluate_denoiser(config, agreement=lambda images, prompts: {"all": 0.25, "shape": 0.5})
    assert found == storage.read_json(f"{config.run_uri}/validation/000000010.json") and "failed" not in found
    assert found["rows"] == 6 and found["prompts"] == 3 and 0 < found["clip_score"] <= 100 and found["cmmd"] >= 0
    assert found["agreement"] == 0.25 and found["agreement_by_attribute"] == {"all": 0.25, "shape": 0.5}
    by_noise = found["loss_by_noise"]
    assert list(map(int, by_noise)) == sorted(map(int, by_noise)) and len(by_noise) == 8
    assert np.mean(list(by_noise.values())) == pytest.approx(found["unweighted"])
    folder = f"{config.run_uri}/evaluation/000000010"
    assert json.loads(storage.read_text(f"{folder}/prompts.json")) == PROMPTS
    names = [storage.name(uri) for uri in storage.list_files(folder, ".png")]
    assert names == ["00.png", "01.png", "02.png", "grid.png"]
    assert Image.open(f"{folder}/grid.png").size == (96, 32) and Image.open(f"{folder}/02.png").size == (32, 32)
    assert results.scores(config.run_uri)["validation_loss"].tolist() == [found["validation_loss"]]


def test_a_validation_set_has_losses_of_its_own_names_beside_those_of_held_out_rows(build_run, tmp_path):
    """By which the best may be kept: of those on the same set, which a resumed run may replace."""
    made_up.write_latents(f"{tmp_path}/set", 70, SHAPES, 50)
    config, uri = build_run(), f"{tmp_path}/set"
    found = evaluate_denoiser(config, prompts=[], validation_uri=uri)
    without = evaluate_denoiser(build_run(run_name="without"), prompts=[])
    names = {"validation_loss", "unweighted", "rows", "loss_by_noise"}
    assert {name: found[name] for name in names} == {name: without[name] for name in names}
    added = {"loss", "unweighted", "rows", "loss_by_noise", "uri"}
    assert found.keys() - without.keys() == {f"validation_set_{name}" for name in added}
    assert found["validation_set_rows"] == 70 and found["validation_set_loss"] != found["validation_loss"]
    (shown,) = results.scores(config.run_uri).to_dict("records")
    by_noise = [shown[f"validation_set_loss_by_noise/{timestep:04d}"] for timestep in range(62, 1000, 125)]
    assert np.mean(by_noise) == pytest.approx(shown["validation_set_unweighted"])
    better = {"step": 20, "validation_set_loss": found["validation_set_loss"] / 2}
    results.write_result(config.run_uri, {**better, "validation_set_uri": "another"})
    assert results.is_best(config.run_uri, found, "validation_set_loss")
    results.write_result(config.run_uri, {**better, "validation_set_uri": uri})
    assert not results.is_best(config.run_uri, found, "validation_set_loss")


def test_the_same_weights_give_the_same_evaluation(build_run):
    """The second time, CMMD's embeddings of held-out rows come from the run's folder."""
    config = build_run(seed=7)
    first, again, other = (
        evaluate_denoiser(config, seed, step, prompts=PROMPTS[:2]) for seed, step in ((0, 10), (0, 20), (1, 30))
    )
    names = ["loss_by_noise", "validation_loss", "clip_score", "cmmd"]
    assert [first[name] for name in names] == [again[name] for name in names]
    assert first["loss_by_noise"] != other["loss_by_noise"]


def test_what_fails_is_noted_and_the_rest_is_found(build_run, capsys):
    found = evaluate_denoiser(build_run(), clip_model="broken", agreement=lambda *_: {"all": 1.0})
    assert found["agreement"] == 1.0 and found["validation_loss"] > 0
    assert found["failed"].keys() == {"clip_score", "cmmd"}
    assert "evaluation of step 10, cmmd failed: ValueError: 'broken' is no CLIP" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_is_the_same_by_the_trainers_and_by_a_task(tmp_path, build_run, strategy):
    """In bf16, whose errors would hide what a checkpoint is better by: within a hundredth of that to fp32."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        config = build_run(precision="bf16", strategy=strategy)
        state = TrainStep(config, DataSets.open(config.proportions).first)
        folder, stager = f"{config.run_uri}/checkpoint-000000010-001", checkpoint.open_stager()
        checkpoint.async_save(folder, state, step=10, stager=stager)()
        with state.averaged() as denoiser:
            by_trainers = scores.losses(denoiser, state.manifest, config, "", 10)
    finally:
        dist.destroy_process_group()
    by_task = scores.evaluate_checkpoint(ray.train.Checkpoint(folder), settings(prompts=[]), config)
    in_fp32 = evaluate_denoiser(dataclasses.replace(config, precision="fp32"), config.seed, prompts=[])
    loss, error = in_fp32["validation_loss"], abs(in_fp32["validation_loss"] - by_trainers["validation_loss"])
    assert 0 < error < 0.01 * loss
    assert abs(by_task["validation_loss"] - by_trainers["validation_loss"]) < 0.01 * error


# ---- the best


@pytest.mark.parametrize(
    ("best_by", "values", "best"),
    [
        ("validation_loss", [0.3, 0.2, 0.25], 1),
        ("clip_score", [20.0, 30.0, 25.0], 1),
        ("agreement", [0.5, None, 0.4], 0),
    ],
)
def test_the_best_is_that_of_the_best_score(build_run, best_by, values, best):
    config, kept = build_run(), None
    for number, value in enumerate(values):
        result = {"step": 10 * number, "validation_loss": -number if best_by != "validation_loss" else value}
        result |= {} if value is None else {best_by: value}
        results.write_result(config.run_uri, result)
        if results.is_best(config.run_uri, result, best_by):
            kept = number
    assert kept == best


# ---- what the driver settles


def test_a_file_of_prompts_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "prompts.txt").write_bytes("ein grüner Kreis".encode("latin-1"))
    with pytest.raises(ValueError, match=r"prompts='.*prompts\.txt' is no text in UTF-8 .*byte 6"):
        scores.read_prompts(f"{tmp_path}/prompts.txt")


def test_the_driver_settles_prompts_and_hands_over_the_evaluation(build_run, tmp_path):
    config = build_run()
    (tmp_path / "prompts.txt").write_text("\ufeffa red circle\r\n\n  a blue square, small ")
    given = settings(prompts=f"{tmp_path}/prompts.txt", best_by="agreement", agreement=captioned_shapes.agreement)
    made = given.trainer_options(config)["validation_config"]
    settled = dataclasses.replace(given, prompts=["a red circle", "a blue square, small"])
    assert made.fn.keywords == {"evaluate": settled, "config": config}
    assert made.ray_remote_kwargs == {"num_cpus": 0, "max_retries": -1}


def test_a_run_of_which_no_row_is_held_out_is_told(build_run, monkeypatch, capsys):
    monkeypatch.setattr(scores, "held_out_rows", lambda config: None)
    settings().trainer_options(build_run())
    assert "No rows are held out (validation_share=0.02)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best_by": "agreement"}, "best_by='agreement' needs agreement"),
        ({"best_by": "cmmd", "clip_model": None}, "best_by='cmmd' needs clip_model"),
        ({"best_by": "validation_set_loss"}, "needs validation_uri"),
        ({"sampling_steps": 1000}, "sampling_steps=1000"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_by_the_driver(build_run, changes, said):
    with pytest.raises(ValueError, match=said):
        settings(**changes).trainer_options(build_run())
