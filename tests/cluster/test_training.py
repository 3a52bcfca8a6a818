"""Training on a real Ray: what a run writes, how it resumes, and that it learns."""

import functools
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.train
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file

from helpers import sample, storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.latents import read
from helpers.latents.read import latents_dataset
from helpers.lesson import captioned_shapes, display
from helpers.model.denoisers import build_denoiser
from helpers.online.config import OnlineConfig
from helpers.production import monitor
from helpers.production.checks import training
from helpers.production.extras import NAMES, evaluate, results, scores
from helpers.production.extras.meter import speed_summary
from helpers.train import checkpoint, run_folder
from helpers.train.loop import train_loop_per_worker
from helpers.train.metrics import read_metrics
from tests.faults import die, is_evaluated, loop_with, once, slow, wait_until
from tests.latents import plan_for
from tests.pipelines import TWO_WORKERS, assert_bare, encode, evaluated, fit, prepare_run, short_run


@pytest.fixture(scope="module")
def data(encoded):
    """The storage of the finished job."""
    return encoded[0].storage


def small(data, run_name="first", **changes):
    return short_run(data, run_name, **{"extras": evaluated(20), "max_failures": 0, **changes})


COLUMNS = {"step", "attempt", "loss", "learning_rate", "grad_norm", "images_per_second", "data_wait_share"}
COLUMNS |= {"samples_seen", "samples_crc32", "step_seconds", "images_per_second_per_worker", "mfu"}
COLUMNS |= {"peak_memory_gib", "checkpoint_seconds", "masked_rows", "width", "height"}


def test_metrics_have_a_line_a_step_and_documented_columns(run):
    config, _ = run
    lines = [json.loads(line) for line in pathlib.Path(config.run_uri, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert all(set(line) >= COLUMNS for line in lines)
    # Checkpoints were saved after steps 10, 20 and 30, and hold up the step that follows.
    assert [line["step"] for line in lines if line["checkpoint_seconds"] > 0] == [11, 21, 31]
    speed = speed_summary({"first": read_metrics(config.run_uri)}).loc["first"]
    assert np.isnan(speed["MFU"]) or 0 < speed["MFU"] < 1.5  # NaN where the peak of the hardware is not known
    assert 0 <= speed["checkpoints"] < 0.5
    assert all(np.isfinite(line["loss"]) and 0 <= line["data_wait_share"] <= 1 for line in lines)
    seen = [line["samples_seen"] for line in lines]
    assert all(b - a <= config.global_batch_size for a, b in zip(seen, seen[1:], strict=False))


def test_the_loss_falls(run):
    losses = read_metrics(run[0].run_uri)["loss"]
    assert losses.tail(10).mean() < 0.8 * losses.head(5).mean()


def test_the_last_checkpoints_are_kept_and_hold_the_step(run):
    config, result = run
    names = sorted(path.name for path in pathlib.Path(config.run_uri).glob("checkpoint-*"))
    assert names == ["checkpoint-000000030-001", "checkpoint-000000040-001"]
    with result.checkpoint.as_directory() as folder:
        assert run_folder.step_of(folder) == 40 == run_folder.last_step(config)


def test_the_best_checkpoint_is_kept_apart(run):
    config, _ = run
    validation = results.scores(config.run_uri)
    (best,) = run_folder.list_checkpoints(storage.join(config.run_uri, run_folder.BEST))
    assert run_folder.find_corruption(best) is None
    assert run_folder.step_of(best) == validation.loc[validation["validation_loss"].idxmin(), "step"]


def test_validation_runs_beside_training_on_held_out_rows(run):
    validation = results.scores(run[0].run_uri)
    assert validation["step"].tolist() == [20, 40]
    assert (validation["rows"] > 5).all() and validation["validation_loss"].is_monotonic_decreasing
    assert (validation["validation_set_rows"] > 10 * validation["rows"]).all()
    assert validation["validation_set_loss"].is_monotonic_decreasing


def validating_loop(folder):
    """The worker loop where there is no GPU to spare; a rank that validates leaves a file."""

    def loop(config, **options):
        compute = scores.losses

        def noted(*arguments, **flags):
            (folder / f"rank {ray.train.get_context().get_world_rank()}").touch(exist_ok=False)
            return compute(*arguments, **flags)

        evaluate.has_spare_gpu = lambda *_: False
        scores.losses = noted
        train_loop_per_worker(config, **options)

    return loop


@slow
def test_training_waits_for_no_evaluation_and_outlives_all(data, tmp_path):
    """The first is killed; the second waits until training is done; so the third is skipped; the last is made."""
    config = short_run(data, "evaluated", extras=evaluated(10, best_by="agreement", clip_model=None))
    killed, waiting = tmp_path / "killed", tmp_path / "waiting"

    def agreement(pictures, prompts):
        once(killed, die)
        once(waiting, functools.partial(wait_until, lambda: run_folder.last_step(config) == config.max_steps))
        return {"all": 0.5}

    first = functools.partial(wait_until, lambda: is_evaluated(config, 10))
    second = functools.partial(wait_until, waiting.exists)
    loop = loop_with((first, 15, 0, tmp_path / "first"), (second, 25, 0, tmp_path / "second"))
    result = fit(config, loop=loop, detector=agreement)
    assert result.error is None and read_metrics(config.run_uri)["attempt"].eq(1).all()
    found = {one["step"]: one for one in results.read_results(config.run_uri)}
    assert list(found) == [10, 20, 30, 40]
    assert found[10].keys() >= {"failed", "validation_loss"} and "agreement" not in found[10]
    assert found[20]["agreement"] == found[40]["agreement"] == 0.5 and found[30].keys() == {"step", "skipped"}
    assert "step 40 is newer" in found[30]["skipped"]
    best = run_folder.list_checkpoints(storage.join(config.run_uri, run_folder.BEST))
    assert [run_folder.step_of(uri) for uri in best] == [40]  # the later one of two equal ones
    kept = {run_folder.step_of(str(one.path)): metrics for one, metrics in result.best_checkpoints}
    assert kept[40]["agreement"] == 0.5 and kept[40]["loss_by_noise"] == found[40]["loss_by_noise"]


def test_config_json_says_what_made_the_run(run):
    config, _ = run
    saved = storage.read_json(storage.join(config.run_uri, "config.json"))
    assert TrainingConfig(**saved["parameters"]) == config
    assert saved["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_two_workers_reproduce_a_bare_loop(run):
    assert_bare(run[0])
    assert read_metrics(run[0].run_uri)["samples_crc32"].is_unique


def test_a_run_with_every_extra_is_the_run_without_any(run, data):
    """Loss for loss: the other run had all that the notebook lists, and was evaluated twice."""
    without = short_run(data, "without", **TWO_WORKERS, extras=dict.fromkeys(NAMES))
    fit(without)
    one, other = (read_metrics(config.run_uri) for config in (run[0], without))
    for column in ("step", "loss", "grad_norm", "learning_rate", "samples_crc32"):
        assert one[column].tolist() == other[column].tolist(), column
    assert "mfu" in one and "mfu" not in other


def test_a_run_of_more_tasks_than_are_listed_reads_the_same(run, monkeypatch):
    """Their numbers are then made one after another, while the first ones read."""
    config, _ = run
    plan = plan_for(config)

    def ids():
        rows = latents_dataset(plan, 3, 3 * plan.steps_per_epoch)
        return [tuple(block["id"].to_pylist()) for block in rows.iter_batches(batch_size=None, batch_format="pyarrow")]

    expected = ids()
    monkeypatch.setattr(read, "LISTED_TASKS", 1)
    assert ids() == expected and len(plan.chunk_range(3, 3 * plan.steps_per_epoch)) == 3 * plan.chunks_per_epoch


@slow
def test_a_second_phase_on_three_workers_is_a_bare_loop(run, data, tmp_path):
    """From another run's weights; in each step another of the three has two of four units; their weights export.

    Without a spare GPU the workers validate in the middle, as a Ray task would, and a Ray task at the end.
    """
    first, result = run
    values = {"strategy": "fsdp", "units_per_step": 4, "resolution": {32: 0.5, 64: 0.5}, "init_from": first.run_name}
    values |= {"max_steps": 12, "checkpoint_every": 6, "extras": evaluated(6), "warmup_steps": 2}
    config = small(data, "second-phase", num_training_workers=3, **values)
    fit(config, loop=validating_loop(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0", "rank 1", "rank 2"]
    metrics = read_metrics(config.run_uri)
    assert set(metrics["resolution"]) == {32, 64} and not metrics["masked_rows"].any()
    assert metrics["samples_seen"].iloc[-1] == 12 * config.global_batch_size

    def load(alone):
        with result.checkpoint.as_directory() as folder:
            checkpoint.load_weights(folder, alone.denoiser, "model")

    assert_bare(config, prepare=load, rtol=3e-5)  # 1.06e-5 was seen after seven steps
    middle, last = results.read_results(config.run_uri)
    assert (middle["step"], last["step"]) == (6, 12) and "clip_score" in last and "clip_score" not in middle
    saved = run_folder.as_checkpoint(run_folder.list_checkpoints(config.run_uri)[1])
    again = scores.evaluate_checkpoint(saved, evaluate.Evaluate(prompts=[]), config)
    assert middle["validation_loss"] == pytest.approx(again["validation_loss"], rel=1e-5)
    # Raw or averaged, the weights that three ranks wrote make a pipeline.
    exported = {}
    for which in ("model", "ema"):
        uri = sample.export_checkpoint(config, run_folder.last_checkpoint(config), which)
        weights = load_file(f"{uri}/unet/diffusion_pytorch_model.safetensors")
        exported[which] = weights["conv_in.weight"].clone()  # the file is mapped, and written again
    assert exported["model"].isfinite().all() and not torch.equal(exported["model"], exported["ema"])


@slow
def test_a_run_with_a_constant_rate_may_get_more_steps_and_is_then_a_bare_loop(data, store):
    """In a store, of which workers that go on download each file once, after it was checked."""

    values = {"latents_uri": storage.join(data, "latents"), "lr_schedule": "constant", "num_training_workers": 2}
    fit(short_run("s3://bucket", "grown", max_steps=8, **values))
    saved = {key: len(data) for (_, key), (data, _) in store.objects.items() if key.endswith(".distcp")}
    saved = {key: size for key, size in saved.items() if "/grown/" in key}
    assert len(saved) == 2 and not any(store.sent[key] for key in saved)  # a file of each worker
    grown = short_run("s3://bucket", "grown", max_steps=16, **values)
    fit(grown)
    assert_bare(grown)
    # Checked when the run is opened, before anything is deleted, and when its workers start; then once for the node.
    assert {key: store.sent[key] for key in saved} == {key: 3 * size for key, size in saved.items()}


@slow
def test_pictures_of_several_shapes_train_as_a_bare_loop(data, tmp_path, monkeypatch):
    """Encoded to the nearest of three shapes; two workers, three units a step; validated and sampled wide.

    From a U-Net in diffusers' layout, given by a relative path.
    """
    build_denoiser("tiny", seed=5).save_pretrained(tmp_path / "unet")
    monkeypatch.chdir(tmp_path)
    raw = PreprocessingConfig(storage=data, latents_uri=str(tmp_path / "latents"), aspect_ratios=[0.67, 1, 1.5])
    encode(raw)
    values = {"latents_uri": raw.latents_uri, "resolution": 64, "global_batch_size": 24, "units_per_step": 3}
    values |= {"num_training_workers": 2, "max_steps": 16, "extras": evaluated(10), "init_from": "./unet"}
    config = small(data, "shapes", **values)
    fit(config)
    metrics = read_metrics(config.run_uri)
    assert set(zip(metrics["width"], metrics["height"], strict=True)) == {(64, 64), (80, 48), (48, 80)}
    assert_bare(
        config, prepare=lambda alone: alone.denoiser.load_state_dict(build_denoiser("tiny", seed=5).state_dict())
    )
    assert metrics["samples_seen"].iloc[-1] == 16 * 24
    # Step 10 is skipped if step 16 is saved before its evaluation begins.
    assert results.scores(config.run_uri)["step"].iloc[-1] == 16


def test_stock_diffusers_opens_the_pipeline_and_draws_the_same(run):
    config, result = run
    uri = sample.export_checkpoint(config, result.checkpoint)
    opened = StableDiffusionPipeline.from_pretrained(uri)
    opened.set_progress_bar_config(disable=True)
    prompt = captioned_shapes.held_out_prompts(1)[0]
    mine = sample.sample(config, [prompt], result.checkpoint)[0]
    theirs = sample.generate(opened, [prompt], resolution=config.largest_resolution)[0]
    np.testing.assert_array_equal(mine, theirs)
    with result.checkpoint.as_directory() as folder:
        averaged = checkpoint.load_weights(folder, build_denoiser("tiny"), "ema").state_dict()
    exported = load_file(f"{uri}/unet/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(exported[name], averaged[name]) for name in averaged)


NEW = {"run_name": "new"}


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        (r"=4096 is more than the rows of .* \(5.. of 32x32\)", {**NEW, "global_batch_size": 4096}),
        ("init_from='nobody': .* holds no complete checkpoint", {**NEW, "init_from": "nobody"}),
        ("[Nn]o latents at .*/no/such/folder", {**NEW, "latents_uri": {"/no/such/folder": 1}}),
    ],
)
def test_wrong_parameters_of_a_run_are_one_sentence(run, data, sentence, change):
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        monitor.open_run(small(data, **change))


def test_data_that_changed_under_a_run_is_refused(run, data, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LISTED_ROWS", -1)  # there is only the manifest
    config, _ = run
    manifest = storage.read_json(f"{config.latents_uri}/manifest.json")

    def latents_with(**changes):
        storage.write_json(tmp_path / "manifest.json", {**manifest, **changes})
        return small(data, **TWO_WORKERS, latents_uri=str(tmp_path))

    monitor.open_run(latents_with())  # the same data at another place
    refused = {
        "begun with row_filter='', not 'width > 8'": {"job": {**manifest["job"], "row_filter": "width > 8"}},
        "'first' on .* was begun with files_crc32=": {"files_crc32": manifest["files_crc32"] + 1},
        "resolution=32: none of the images of .* is as large": {"buckets": {"64": manifest["written"]}},
    }
    for sentence, changes in refused.items():
        with pytest.raises(ValueError, match=sentence):
            monitor.open_run(latents_with(**changes))


def test_prompts_are_captions_where_no_row_is_held_out(run, data, tmp_path):
    none_held_out = {"validation_share": 0.0, "extras": {}}
    assert display.prompts_and_detector(small(data, **none_held_out), 4)[1] is captioned_shapes.agreement
    rows = pa.table({"caption": ["a dog", "a cat"], "hash": [1, 2], "jpg": [b"", b""]})
    pq.write_table(rows, tmp_path / "raw.parquet")
    raw = OnlineConfig(storage=str(tmp_path), input_uri=str(tmp_path / "raw.parquet"), resolutions=[32])
    config = small(str(tmp_path), latents_uri=str(tmp_path / "online"), **none_held_out)
    prepare_run(raw, config)
    assert display.prompts_and_detector(config, 4) == (["a dog", "a cat"], None)
