"""Training on a real Ray: what a run writes, how it resumes, and that it learns."""

import json
import os
import pathlib
import signal
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from diffusers import StableDiffusionPipeline
from ray import cloudpickle
from safetensors.torch import load_file

from helpers import checkpoint, evaluate, online, run_setup, storage, train
from helpers.config import OnlineConfig, PreprocessingConfig, TrainingConfig
from helpers.lesson import captioned_shapes, looks
from helpers.runtime import metrics_log, monitoring, session
from helpers.unet import build_unet
from tests.pipelines import bare, draw_and_encode, encode, fit, short_run

# Workers cannot import this module: what they need of it travels with the function that they run.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    session.connect("local", num_cpus=5)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_and_encode(tmp_path_factory.mktemp("storage"), 400)


def small(data, run_name="first", **changes):
    return short_run(data, run_name, **{"validate_every": 20, "max_failures": 0, **changes})


@pytest.fixture(scope="module")
def run(data):
    """A finished run: (config, Ray Train's result)."""
    config = small(data)
    return config, fit(config)


def test_metrics_have_one_line_a_step_and_the_documented_columns(run):
    config, _ = run
    lines = [json.loads(line) for line in pathlib.Path(config.run_uri, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    columns = {
        "step",
        "attempt",
        "loss",
        "learning_rate",
        "grad_norm",
        "images_per_second",
        "data_wait_share",
        "samples_seen",
        "samples_crc32",
        "step_seconds",
        "images_per_second_per_worker",
        "mfu",
        "peak_memory_gib",
        "communication_share",
        "checkpoint_seconds",
    }
    assert all(set(line) >= columns for line in lines)
    # Checkpoints were saved after steps 10, 20 and 30, and hold up the step that follows.
    assert [line["step"] for line in lines if line["checkpoint_seconds"] > 0] == [11, 21, 31]
    speed = metrics_log.speed_summary({"first": metrics_log.read_metrics(config.run_uri)}).loc["first"]
    assert 0 < speed["MFU"] < 1.5 and 0 <= speed["checkpoints"] < 0.5 and speed["communication"] == 0
    assert all(np.isfinite(line["loss"]) and 0 <= line["data_wait_share"] <= 1 for line in lines)
    seen = [line["samples_seen"] for line in lines]
    assert all(b - a <= config.global_batch_size for a, b in zip(seen, seen[1:], strict=False))


def test_the_loss_falls(run):
    losses = metrics_log.read_metrics(run[0].run_uri)["loss"]
    assert losses.tail(10).mean() < 0.8 * losses.head(5).mean()


def test_the_last_checkpoints_are_kept_and_hold_the_step(run):
    config, result = run
    names = sorted(path.name for path in pathlib.Path(config.run_uri).glob("checkpoint-*"))
    assert names == ["checkpoint-000000030-001", "checkpoint-000000040-001"]
    with result.checkpoint.as_directory() as folder:
        assert checkpoint.step_of(folder) == 40 == train.last_step(config)


def test_the_checkpoint_with_the_lowest_validation_loss_is_kept_apart(run):
    config, _ = run
    validation = evaluate.read_validation(config.run_uri)
    (best,) = checkpoint.list_checkpoints(storage.join(config.run_uri, checkpoint.BEST))
    assert checkpoint.find_corruption(best) is None
    assert checkpoint.step_of(best) == validation.loc[validation["validation_loss"].idxmin(), "step"]


def test_validation_ran_beside_the_training_on_held_out_rows(run):
    validation = evaluate.read_validation(run[0].run_uri)
    assert validation["step"].tolist() == [20, 40]
    assert (validation["rows"] > 5).all() and validation["validation_loss"].is_monotonic_decreasing


def test_config_json_says_what_made_the_run(run):
    config, _ = run
    saved = storage.read_json(storage.join(config.run_uri, "config.json"))
    assert TrainingConfig.from_dict(saved["parameters"]) == config
    assert saved["versions"]["torch"].startswith(torch.__version__.split("+")[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_workers_train_on_the_same_batches_with_the_same_losses_as_a_bare_loop(data, strategy):
    config = small(
        data, num_training_workers=2, strategy=strategy, max_steps=50, run_name=f"two-{strategy}", validate_every=0
    )
    fit(config)
    losses, samples = zip(*bare(config, 50), strict=True)
    found = metrics_log.read_metrics(config.run_uri)
    assert found["samples_crc32"].tolist() == list(samples) and len(set(samples)) == 50
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-5)
    # Whoever wrote the checkpoint, its raw or its averaged weights make a pipeline.
    last, exported = train.last_checkpoint(config), {}
    for which in ("model", "ema"):
        uri = evaluate.export_checkpoint(config.to_dict(), last, which)
        exported[which] = load_file(f"{uri}/unet/diffusion_pytorch_model.safetensors")["conv_in.weight"]
    assert exported["model"].isfinite().all() and not torch.equal(exported["model"], exported["ema"])


def test_an_interrupted_run_leaves_nothing_running_and_resumes_inside_an_epoch_bit_for_bit(run, data):
    """Ctrl-C at step 33; fit again under the same name."""
    straight = metrics_log.read_metrics(run[0].run_uri)
    config = small(data, run_name="interrupted", validate_every=0)

    def interrupt_at_33():
        if len(metrics_log.read_metrics(config.run_uri)) == 33 and train.last_step(config) == 30:
            os.kill(os.getpid(), signal.SIGINT)
            return True

    with pytest.raises(KeyboardInterrupt), monitoring.poll_in_background(interrupt_at_33, every=0.1):
        fit(config, loop=stops_after_33)
    # All CPUs at once can only be had when no worker and no task is left.
    assert ray.get(ray.remote(num_cpus=5)(lambda: True).remote(), timeout=120)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train.last_step(config) == 30
    fit(config)
    every = metrics_log.read_metrics(config.run_uri, all_attempts=True)
    resumed = metrics_log.read_metrics(config.run_uri)
    assert every.groupby("step")["attempt"].max().loc[31:33].tolist() == [2, 2, 2]
    for column in ("step", "loss", "grad_norm", "samples_crc32", "samples_seen"):
        assert resumed[column].tolist() == straight[column].tolist(), column


def stops_after_33(values):
    """A worker that never goes on, so that the interrupt finds it where it should."""
    write = metrics_log.MetricsLog.write

    def write_and_stop(self, done, *arguments, **speed):
        write(self, done, *arguments, **speed)
        if done == 33:
            threading.Event().wait()

    metrics_log.MetricsLog.write = write_and_stop
    train.train_loop_per_worker(values)


def test_a_finished_run_stays_as_it_is_when_it_is_run_again(run):
    config, _ = run
    before = pathlib.Path(config.run_uri, "metrics.jsonl").read_text()
    again = fit(config)
    assert pathlib.Path(config.run_uri, "metrics.jsonl").read_text() == before
    assert storage.name(again.checkpoint.path) == "checkpoint-000000040-001"


def test_a_run_starts_from_the_weights_of_another(run, data):
    config = small(data, run_name="second-phase", init_from="first", max_steps=3, learning_rate=1e-6, validate_every=0)
    fit(config)
    first, second = (metrics_log.read_metrics(c.run_uri)["loss"] for c in (run[0], config))
    assert second.iloc[0] < 0.7 * first.iloc[0]
    # Its average too, which three small steps hardly move.
    before, after = (evaluate.load_unet(c, train.last_checkpoint(c)).state_dict() for c in (run[0], config))
    assert all(torch.allclose(after[name], before[name], atol=1e-3) for name in before)


def test_a_run_starts_from_a_unet_in_diffusers_layout_given_by_a_relative_path(data, tmp_path, monkeypatch):
    build_unet("tiny", seed=5).save_pretrained(tmp_path / "unet")
    monkeypatch.chdir(tmp_path)
    one_step = {"max_steps": 1, "learning_rate": 1e-9, "checkpoint_every": 1, "validate_every": 0}
    config = small(data, run_name="from-a-folder", init_from="./unet", **one_step)
    fit(config)
    given = build_unet("tiny", seed=5).state_dict()
    found = evaluate.load_unet(config, train.last_checkpoint(config)).state_dict()
    assert all(torch.allclose(found[name], given[name], atol=1e-6) for name in given)
    with pytest.raises(
        ValueError, match=r"init_from='.*/unet' is a U-Net with .*, and unet_config='small' has .*: start from one of"
    ):
        run_setup.check_init_from(small(data, run_name="other", init_from="./unet", unet_config="small"))


def test_a_run_may_mix_resolutions_a_step_each_and_is_validated_at_the_largest(tmp_path):
    encoded = PreprocessingConfig(storage=str(tmp_path), resolutions=[32, 64])
    captioned_shapes.write_parquet(encoded.raw_uri, 300)
    encode(encoded)
    config = small(str(tmp_path), resolution={32: 0.5, 64: 0.5}, max_steps=12, validate_every=12, checkpoint_every=6)
    fit(config)
    metrics = metrics_log.read_metrics(config.run_uri)
    assert metrics["resolution"].tolist() == [config.resolution_at(step) for step in range(12)]
    assert set(metrics["resolution"]) == {32, 64} and np.isfinite(metrics["loss"]).all()
    losses, samples = zip(*bare(config, 12), strict=True)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    assert metrics["samples_crc32"].tolist() == list(samples)
    assert evaluate.read_validation(config.run_uri)["step"].tolist() == [12]
    with pytest.raises(ValueError, match="^resolution=128 is not in .*, which holds 32, 64: choose one of these"):
        run_setup.open_run(small(str(tmp_path), resolution={32: 0.5, 128: 0.5}, run_name="larger"))


def test_the_pipeline_is_opened_by_stock_diffusers_and_draws_the_same_picture(run):
    config, result = run
    uri = evaluate.export_checkpoint(config.to_dict(), result.checkpoint)
    opened = StableDiffusionPipeline.from_pretrained(uri)
    opened.set_progress_bar_config(disable=True)
    prompt = captioned_shapes.held_out_prompts(1)[0]
    mine = evaluate.sample(config.to_dict(), [prompt], result.checkpoint)[0]
    theirs = evaluate.generate(opened, [prompt], resolution=32)[0]
    np.testing.assert_array_equal(mine, theirs)
    with result.checkpoint.as_directory() as folder:
        averaged = checkpoint.load_weights(folder, build_unet("tiny"), "ema").state_dict()
    exported = load_file(f"{uri}/unet/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(exported[name], averaged[name]) for name in averaged)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"resolution": 64, "run_name": "new"}, r"resolution=64 is not in .*, which holds 32"),
        ({"unet_config": "sd2-base", "run_name": "new"}, r"takes captions 1024 wide, and .* holds captions 128 wide"),
        (
            {"unet_config": "huge", "run_name": "new"},
            r"unet_config='huge' is unknown: choose 'tiny', 'small', 'sd2-base'",
        ),
        ({"global_batch_size": 4096, "run_name": "new"}, r"global_batch_size=4096 is more than the 400 rows"),
        ({"learning_rate": 1.0}, r"run_name='first' was started with learning_rate=0.003, not 1.0"),
        ({"init_from": "nobody", "run_name": "new"}, r"init_from='nobody' is neither a run with a checkpoint"),
        ({"latents_uri": {"/no/such/folder": 1}, "run_name": "new"}, r"[Nn]o latents at .*/no/such/folder"),
    ],
)
def test_wrong_parameters_are_one_sentence_before_any_worker_starts(run, data, change, sentence):
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        run_setup.open_run(small(data, **change))


def test_data_that_changed_under_a_runs_name_is_refused_and_named(run, data, tmp_path):
    config, _ = run
    manifest = storage.read_json(f"{config.latents_uri}/manifest.json")

    def latents_with(**changes):
        storage.write_json(tmp_path / "manifest.json", {**manifest, **changes})
        return small(data, latents_uri=str(tmp_path))

    run_setup.open_run(latents_with())  # the same data at another place
    with pytest.raises(
        ValueError, match=r"made with row_filter='', not 'width > 8': set it back to resume the run, or give"
    ):
        run_setup.open_run(latents_with(job={**manifest["job"], "row_filter": "width > 8"}))
    (segment,) = manifest["segments"]
    with pytest.raises(
        ValueError, match="run_name='first' was started on other data than .* holds now: give another run_name"
    ):
        renamed = [{**file, "name": f"new-{file['name']}"} for file in segment["files"]]
        run_setup.open_run(latents_with(segments=[{**segment, "files": renamed}]))
    with pytest.raises(
        ValueError, match="resolution=32: none of the pictures of .* is as large: choose a smaller one, or encode"
    ):
        run_setup.open_run(latents_with(segments=[{**segment, "at": {"image_latents_32": 0}}]))


def test_prompts_for_ones_own_data_are_its_own_captions_where_no_row_is_held_out(run, data, tmp_path):
    assert (
        looks.held_out_prompts(small(data, validation_share=0.0, validate_every=0), 4)[1] is captioned_shapes.agreement
    )
    rows = pa.table({"caption": ["a dog", "a cat"], "hash": [1, 2], "jpg": [b"", b""]})
    pq.write_table(rows, tmp_path / "raw.parquet")
    raw = OnlineConfig(storage=str(tmp_path), input_uri=str(tmp_path / "raw.parquet"), resolutions=[32])
    config = small(str(tmp_path), latents_uri=str(tmp_path / "online"), validation_share=0.0, validate_every=0)
    online.prepare(raw, config)
    assert looks.held_out_prompts(config, 4) == (["a dog", "a cat"], None)


def test_one_call_frees_the_disk(tmp_path):
    for folder in ("raw", "latents", "online", "runs", "mine"):
        storage.write_text(tmp_path / folder / "file", "12345")
    assert session.free_disk(tmp_path) == 20
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_training_without_latents_names_the_command_that_makes_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="papermill Preprocessing.ipynb"):
        run_setup.open_run(small(str(tmp_path)))
