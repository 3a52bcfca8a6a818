"""What the evaluation of a checkpoint finds and leaves, and which checkpoint is the best."""

import collections
import dataclasses
import json
import types

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray.train
import torch.distributed as dist
from PIL import Image

from helpers import distributed, storage
from helpers.config import TrainingConfig
from helpers.encode import captions, encoder
from helpers.latents.manifest import DataSets, write_manifest
from helpers.lesson import captioned_shapes
from helpers.model.denoisers import build_denoiser
from helpers.production.extras import at_checkpoints, evaluate, results, settings
from helpers.train import checkpoint, checkpoint_io
from helpers.train.step import TrainStep
from tests.benchmarks import made_up
from tests.latents import SHAPES

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["a large red circle in the centre on a blue background", "a small white square", "a triangle"]


class CLIP:
    """A stand-in: a picture's embedding is its mean colour, a text's the first axis."""

    def __init__(self, model, device="cpu"):
        if model == "broken":
            raise ValueError("'broken' is no CLIP")

    def images(self, pictures):
        colours = np.stack([picture.mean(axis=(0, 1)) + 1 for picture in pictures]).astype(np.float32)
        return colours / np.linalg.norm(colours, axis=1, keepdims=True)

    def texts(self, texts):
        return np.eye(3, dtype=np.float32)[[0] * len(texts)]


@pytest.fixture(autouse=True)
def clip(monkeypatch):
    module = types.SimpleNamespace(
        CLIP=CLIP,
        clip_score=lambda images, texts: float(100 * (images * texts).sum(1).mean()),
        cmmd=lambda x, y: float(((x.mean(0) - y.mean(0)) ** 2).sum()),
    )
    monkeypatch.setattr(at_checkpoints, "scores", module)
    at_checkpoints.load_clip.cache_clear()


@pytest.fixture
def build_run(tmp_path, build_manifest, build_latents):
    """A function that gives the config of a run with six held-out rows; keywords change it."""

    def build(held_out=6, **changes):
        values = {"storage": str(tmp_path), "resolution": 32, "sampling_steps": 1, "checkpoint_every": 10}
        config = TrainingConfig(**{**values, "validate_every": 10, "max_steps": 40, **changes})
        manifest = build_manifest(encoder={"model": "tiny-sd", "revision": "0", "precision": "fp32"})
        write_manifest(config.latents_uri, manifest, [])
        rows = storage.join(config.run_uri, "validation", "rows.parquet")
        storage.write_text(rows, "")
        pq.write_table(build_latents(held_out), rows)
        return config

    return build


def evaluate_denoiser(config, seed=0, step=10, prompts=PROMPTS, agreement=None):
    evaluation = settings.Evaluation(config, prompts, agreement)
    return at_checkpoints.evaluate_denoiser(build_denoiser("tiny", seed=seed).eval(), evaluation, step)


def test_an_evaluation_leaves_losses_scores_and_pictures(build_run):
    config = build_run()
    found = evaluate_denoiser(config, agreement=lambda pictures, prompts: {"all": 0.25, "shape": 0.5})
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
    config = build_run(validation_uri=f"{tmp_path}/set", best_by="validation_set_loss")
    found = evaluate_denoiser(config, prompts=[])
    without = evaluate_denoiser(build_run(run_name="without"), prompts=[])
    names = {"validation_loss", "unweighted", "rows", "loss_by_noise"}
    assert {name: found[name] for name in names} == {name: without[name] for name in names}
    added = {"loss", "unweighted", "rows", "loss_by_noise", "uri"}
    assert found.keys() - without.keys() == {f"validation_set_{name}" for name in added}
    assert found["validation_set_rows"] == 70 and found["validation_set_loss"] != found["validation_loss"]
    (scores,) = results.scores(config.run_uri).to_dict("records")
    by_noise = [scores[f"validation_set_loss_by_noise/{timestep:04d}"] for timestep in range(62, 1000, 125)]
    assert np.mean(by_noise) == pytest.approx(scores["validation_set_unweighted"])
    better = {"step": 20, "validation_set_loss": found["validation_set_loss"] / 2}
    results.write_result(config.run_uri, {**better, "validation_set_uri": "another"})
    assert results.is_best(config.run_uri, found, config.best_by)
    results.write_result(config.run_uri, {**better, "validation_set_uri": config.validation_uri})
    assert not results.is_best(config.run_uri, found, config.best_by)


def test_the_same_weights_give_the_same_evaluation(build_run):
    config = build_run(seed=7)
    first, again, other = (
        evaluate_denoiser(config, seed, step, PROMPTS[:1]) for seed, step in ((0, 10), (0, 20), (1, 30))
    )
    names = ["loss_by_noise", "validation_loss", "clip_score", "cmmd"]
    assert [first[name] for name in names] == [again[name] for name in names]
    assert first["loss_by_noise"] != other["loss_by_noise"]


def test_what_fails_is_noted_and_the_rest_is_found(build_run, capsys):
    found = evaluate_denoiser(build_run(clip_model="broken"), prompts=PROMPTS[:1], agreement=lambda *_: {"all": 1.0})
    assert found["agreement"] == 1.0 and found["validation_loss"] > 0
    assert found["failed"].keys() == {"clip_score", "cmmd"}
    assert "evaluation of step 10, cmmd failed: ValueError: 'broken' is no CLIP" in capsys.readouterr().out


def test_without_prompts_captions_of_held_out_rows_are_drawn(build_run):
    config = build_run(clip_model=None)
    assert evaluate_denoiser(config, prompts=None).keys() & {"clip_score", "cmmd"} == set()
    shown = json.loads(storage.read_text(f"{config.run_uri}/evaluation/000000010/prompts.json"))
    assert shown == [f"caption {number}" for number in range(6)]


def test_the_small_clip_judges_only_what_it_knows(build_run, build_manifest):
    photographs = build_manifest(encoder={"model": "another", "revision": "0", "precision": "fp32"})
    assert not at_checkpoints.uses_clip(build_run(), photographs)


def test_several_ranks_draw_what_one_draws(build_run, monkeypatch):
    evaluator = at_checkpoints.Evaluator(build_denoiser("tiny").eval(), settings.Evaluation(build_run(), PROMPTS))
    alone, parts = evaluator.draw(), []
    for ranks in (2, 8):  # more than there are prompts and held-out rows
        monkeypatch.setattr(distributed, "world_size", lambda ranks=ranks: ranks)
        for rank in range(ranks):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            parts.append(evaluator.draw())
    assert [len(share.drawn) for share in parts] == [2] * 2 + [1] * 8  # as many, for sharded weights
    for kind, count in (("drawn", 3), ("real", 6)):
        for some in (parts[:2], parts[2:]):
            together = [image for share in some for image in getattr(share, kind)][:count]
            for one, other in zip(getattr(alone, kind), together, strict=True):
                assert np.abs(one.astype(int) - other).max() <= 1


@pytest.fixture
def counted(monkeypatch):
    """Counts the files that are read and the models that are loaded, by name."""
    counted = collections.Counter()

    def count(owner, name, label):
        inner = getattr(owner, name)

        def counting(*arguments, **options):
            if label(arguments) != "lease.json":  # earlier tests' leases are renewed by threads
                counted[label(arguments)] += 1
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    count(storage, "read_bytes", lambda arguments: storage.name(arguments[0]))
    for owner, name in ((encoder, "load_vae"), (encoder, "load_text_encoder"), (captions, "load_tokenizer")):
        count(owner, name, lambda arguments, name=name: name)
    count(CLIP, "__init__", lambda arguments: "CLIP")
    return counted


def test_a_task_scores_what_the_trainers_computed(build_run, monkeypatch, counted):
    """Three times: models and manifest are read once a process; the best is known when its scores are there."""
    straight = evaluate_denoiser(build_run(run_name="straight"))
    config, steps = build_run(best_by="clip_score"), (10, 20, 30)
    at_checkpoints.load_clip.cache_clear()
    counted.clear()
    on_workers = at_checkpoints.OnWorkers(PROMPTS)
    for step in steps:
        on_workers(build_denoiser("tiny").eval(), config, step)
    assert counted == {"load_vae": 1, "load_text_encoder": 1, "load_tokenizer": 1, "manifest.json": 1}
    assert all(
        {"unfinished", "to_score", "validation_loss"} <= one.keys() for one in results.read_results(config.run_uri)
    )
    monkeypatch.setattr(ray, "remote", lambda **options: lambda call: types.SimpleNamespace(remote=call))
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    saved = [checkpoint_at(config, step) for step in steps]
    for one, axis in zip(saved, (0, 1, 0), strict=True):
        monkeypatch.setattr(CLIP, "texts", lambda self, texts, axis=axis: np.eye(3)[[axis] * len(texts)])
        evaluate.validate(one, settings.Evaluation(config))
    found = results.read_results(config.run_uri)
    assert counted["CLIP"] == 1 and not counted["files.json"]
    # CLIP computes on another number of threads there.
    scored = {name: pytest.approx(straight[name], rel=1e-6) for name in ("clip_score", "cmmd") if name in straight}
    assert found[0] == {**straight, **scored, "seconds": found[0]["seconds"]}
    assert not any({"unfinished", "to_score", "failed", "skipped"} & one.keys() for one in found)
    (kept,) = checkpoint.list_checkpoints(storage.join(config.run_uri, checkpoint.BEST))
    assert checkpoint.step_of(kept) == max(found, key=lambda one: (one["clip_score"], one["step"]))["step"]
    assert not storage.list_files(f"{config.run_uri}/evaluation/000000030", ".npz")


def test_what_trainers_cannot_draw_leaves_the_losses(build_run, monkeypatch, counted):
    config = build_run()
    monkeypatch.setattr(at_checkpoints, "generate", lambda *_, **__: 1 / 0)
    at_checkpoints.OnWorkers(PROMPTS)(build_denoiser("tiny").eval(), config, 10)
    found = at_checkpoints.score_checkpoint(checkpoint_at(config, 10), settings.Evaluation(config))
    assert found["failed"] == {"drawing": "ZeroDivisionError: division by zero"} and found["validation_loss"] > 0
    assert not {"unfinished", "to_score"} & found.keys()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_is_the_same_by_the_trainers_and_by_a_task(tmp_path, build_run, strategy):
    """In bf16, whose errors would hide what a checkpoint is better by: within a hundredth of that to fp32."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        config = build_run(precision="bf16", strategy=strategy, clip_model=None)
        state = TrainStep(config, DataSets.open(config.proportions).first)
        folder, stager = f"{config.run_uri}/checkpoint-000000010-001", checkpoint_io.open_stager()
        checkpoint_io.async_save(folder, state, step=10, stager=stager)()
        with state.averaged() as denoiser:
            by_trainers = at_checkpoints.Evaluator(denoiser, settings.Evaluation(config, [])).losses(10)
    finally:
        dist.destroy_process_group()
    by_task = at_checkpoints.evaluate_checkpoint(ray.train.Checkpoint(folder), settings.Evaluation(config, []))
    in_fp32 = evaluate_denoiser(dataclasses.replace(config, precision="fp32"), config.seed, prompts=[])
    loss, error = in_fp32["validation_loss"], abs(in_fp32["validation_loss"] - by_trainers["validation_loss"])
    assert 0 < error < 0.01 * loss
    assert abs(by_task["validation_loss"] - by_trainers["validation_loss"]) < 0.01 * error


# ---- which checkpoint, which is the best


def checkpoint_at(config, step):
    uri = storage.join(config.run_uri, f"checkpoint-{step:09d}-001")
    storage.write_json(storage.join(uri, "progress.json"), {"step": step, "files": {}})
    return ray.train.Checkpoint(uri)


def test_a_checkpoint_is_skipped_for_a_newer_one(build_run, capsys):
    config = build_run()
    old, *_ = [checkpoint_at(config, step) for step in (10, 20, 25)]  # 25: after a notice, and not to be evaluated
    incomplete = storage.join(config.run_uri, "checkpoint-000000030-001", "model.distcp")
    storage.write_text(incomplete, "half")
    found = evaluate.validate(old, settings.Evaluation(config))
    assert found == {"step": 10, "skipped": "the checkpoint of step 20 is newer and is evaluated instead"}
    assert (
        results.read_results(config.run_uri) == [found]
        and "evaluation of step 10 skipped: the" in capsys.readouterr().out
    )
    assert len(results.scores(config.run_uri)) == 0


@pytest.mark.parametrize(
    ("best_by", "values", "best"),
    [
        ("validation_loss", [0.3, 0.2, 0.25], 1),
        ("cmmd", [0.3, 0.2, 0.1], 2),
        ("clip_score", [20.0, 30.0, 25.0], 1),
        ("agreement", [0.5, None, 0.4], 0),
    ],
)
def test_the_best_is_that_of_the_best_score(build_run, best_by, values, best):
    config, kept = build_run(best_by=best_by), None
    for number, value in enumerate(values):
        result = {"step": 10 * number, "validation_loss": -number if best_by != "validation_loss" else value}
        result |= {} if value is None else {best_by: value}
        results.write_result(config.run_uri, result)
        if results.is_best(config.run_uri, result, config.best_by):
            kept = number
    assert kept == best


def test_the_best_by_agreement_needs_a_judge(build_run):
    with pytest.raises(ValueError, match="best_by='agreement' needs an agreement function"):
        evaluate.validation_config(build_run(best_by="agreement"))
    config = build_run(best_by="agreement")
    made = evaluate.validation_config(config, PROMPTS, captioned_shapes.agreement)
    assert made.fn.keywords["evaluation"] == settings.Evaluation(config, PROMPTS, captioned_shapes.agreement)
    assert made.ray_remote_kwargs == {"num_cpus": 0, "max_retries": -1}
