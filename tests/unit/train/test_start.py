"""What a new run starts from: another run's state, or the weights that people have. No Ray, one process."""

import dataclasses
import json
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import sample, storage
from helpers.latents.manifest import DataSets
from helpers.model.denoisers import build_denoiser, load_denoiser_config
from helpers.production.checks import training
from helpers.train import checkpoint, run_folder, start
from tests.steps import MIDDLE, STEPS, everything, same, save, train

pytestmark = pytest.mark.usefixtures("one_thread")
ENCODER = {"model": "tiny-sd", "revision": "1"}
DATA = [{"written": 48, "encoder": ENCODER, "files_crc32": 7, "proportion": 1.0, "made_with": {}}]
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
CONSTANT = {"lr_schedule": "constant", "warmup_steps": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory, recipe, build_step, rows):
    """`(config, state, its lines of all steps)` of a run with a constant rate that has saved step `MIDDLE`."""
    values = {"storage": str(tmp_path_factory.mktemp("runs")), "run_name": "first", "max_steps": MIDDLE, **CONSTANT}
    config, state = recipe(**values), build_step(**values)
    lines = train(state, rows, 0, MIDDLE)
    name = run_folder.checkpoint_name(MIDDLE, 1)
    save(storage.join(config.run_uri, name), state, MIDDLE)
    saved = everything(state)
    storage.write_json(storage.join(config.run_uri, "config.json"), {"parameters": config.to_dict(), "data": DATA})
    storage.write_text(storage.join(config.run_uri, "metrics.jsonl"), "{}\n")
    return config, saved, lines + train(state, rows, MIDDLE), everything(state)


@pytest.fixture
def second(first, recipe):
    """A function that makes the config of another run in the same storage."""
    config, *_ = first
    return lambda **values: recipe(**{"storage": config.storage, "run_name": "second", **CONSTANT, **values})


def checkpoint_of(first):
    (uri,) = run_folder.list_checkpoints(first[0].run_uri)
    return uri


# ---- its own run


def test_a_run_with_a_constant_rate_may_grow_and_is_bitwise_the_longer_one(first, build_step, rows):
    config, _, lines, at_end = first
    grown = dataclasses.replace(config, max_steps=STEPS)
    start.check_resume(grown, start.read_earlier(config)["parameters"])
    point = run_folder.choose_resume_point(grown.run_uri)
    assert point == {"checkpoint": checkpoint_of(first), "step": MIDDLE}
    state = build_step(**grown.to_dict())
    assert checkpoint.load(point["checkpoint"], state) == MIDDLE
    assert train(state, rows, MIDDLE) == lines[MIDDLE:] and same(everything(state), at_end)


def test_a_resumed_run_computes_with_its_own_parameters(first, second, build_step):
    changed = {"learning_rate": 5e-4, "weight_decay": 0.3, "adam_beta2": 0.9, "ema_decay": 0.5}
    state = build_step(**second(max_steps=STEPS, **changed).to_dict())
    checkpoint.load(checkpoint_of(first), state)
    (group,) = state.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (5e-4, 0.3, (0.9, 0.9)) and state.ema.decay == 0.5
    assert same(everything(state), first[1])


def test_a_run_whose_denoisers_file_has_changed_is_refused_by_name(first, tmp_path):
    config, path = first[0], tmp_path / "mine.json"
    values = load_denoiser_config(config.unet_config)
    path.write_text(json.dumps({**values, "act_fn": "gelu"}))
    changed = dataclasses.replace(config, unet_config=str(path))
    with pytest.raises(
        ValueError, match=r"unet_config='.*mine.json' was begun with act_fn='silu', not 'gelu': restore"
    ):
        start.check_resume(changed, changed.to_dict(), values)
    path.write_text(json.dumps(values))
    start.check_resume(changed, changed.to_dict(), values)


def test_an_export_has_the_denoiser_that_was_trained_whatever_its_file_says_now(first, tmp_path):
    values, path = load_denoiser_config(first[0].unet_config), tmp_path / "mine.json"
    path.write_text(json.dumps({**values, "act_fn": "gelu"}))
    config = dataclasses.replace(first[0], storage=str(tmp_path), unet_config=str(path))
    content = {"parameters": config.to_dict(), "denoiser": values}
    storage.write_json(storage.join(config.run_uri, "config.json"), content)
    loaded = sample.load_denoiser(config, run_folder.as_checkpoint(checkpoint_of(first)))
    assert loaded.config["act_fn"] == "silu"


def test_a_warm_up_as_long_as_the_run_is_said(second, monkeypatch):
    monkeypatch.setattr(training, "plan_run", lambda data, config: types.SimpleNamespace(shapes=[], shape_steps=[]))
    for steps, said in ((4, False), (5, True), (6, True)):
        notes = training.notes(second(warmup_steps=steps, max_steps=5), DataSets({}, {}))
        assert any("the learning rate only rises" in note for note in notes) == said


def test_paths_of_models_and_runs_are_resolved_as_other_paths(first, second, tmp_path, monkeypatch):
    """Workers run in folders of their own."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(second().unet_config, "mine.json")
    assert second(unet_config="mine.json").unet_config == str(tmp_path / "mine.json")
    (tmp_path / "runs").symlink_to(storage.join(first[0].storage, "runs"))
    for given in ("runs/first", "runs/first@3"):
        assert second(init_from=given).init_from == str(tmp_path / given)
    assert second(init_from="org/model@3").init_from == "org/model@3"


def test_max_steps_grows_with_a_constant_rate_only(second):
    begun = second(max_steps=50, lr_schedule="cosine").to_dict()
    for now in ({"max_steps": 60, "lr_schedule": "cosine"}, {"max_steps": 40}, {"max_steps": 60}):
        with pytest.raises(ValueError, match="begun with (max_steps=50|lr_schedule='cosine')"):
            start.check_resume(second(**now), begun)
    with pytest.raises(ValueError, match="begun with max_steps=50, not 40"):
        start.check_resume(second(max_steps=40), second(max_steps=50).to_dict())


# ---- init_from


@pytest.fixture(scope="module")
def published(tmp_path_factory, recipe):
    """`(folder of a pipeline, its U-Net's weights)`."""
    folder, unet = tmp_path_factory.mktemp("pipeline"), build_denoiser(recipe().unet_config, seed=7)
    unet.save_pretrained(folder / "unet")
    storage.write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline"})
    scheduler = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", **BETAS}
    storage.write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    return folder, unet.state_dict()


def check(config, encoder=ENCODER):
    """Raises ValueError as `monitor.open_run` does."""
    manifest = types.SimpleNamespace(scaling_factor=0.18215, shift_factor=0.0, encoder=encoder, vae_model="tiny-sd")
    data = DataSets({"": manifest}, {"": 1.0})
    start.refuse(config, data, [training.first_weights_fit])


def weights_from(config):
    """The weights that a worker begins with."""
    check(config)
    denoiser = build_denoiser(config.unet_config)
    runs_uri = storage.join(config.storage, "runs")
    folder = checkpoint.find_weights(config.init_from, config.unet_config, runs_uri)
    checkpoint.load_initial_weights(folder, denoiser, config.init_weights)
    return denoiser.state_dict()


@pytest.mark.parametrize("which", ["model", "ema"])
def test_a_run_starts_from_the_weights_of_a_run_or_a_checkpoint(first, second, which):
    loaded = checkpoint.load_weights(checkpoint_of(first), build_denoiser(first[0].unet_config), which).state_dict()
    for given in ("first", f"first@{MIDDLE}", first[0].run_uri, checkpoint_of(first)):
        found = weights_from(second(init_from=given, init_weights=which))
        assert all(torch.equal(found[name], loaded[name]) for name in loaded)


def test_a_run_starts_from_a_pipeline_or_a_denoiser(published, second, tmp_path):
    folder, weights = published
    build_denoiser(second().unet_config, seed=7).save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for given in (folder, folder / "unet", tmp_path / "parts"):
        found = weights_from(second(init_from=str(given)))
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_pickled_weights_are_refused_and_never_opened(published, second, tmp_path):
    shutil.copytree(published[0] / "unet", tmp_path / "unet")
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "unet/diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^init_from='.*/unet': .* holds no weights in safetensors, [^\n]*\.$"):
        check(second(init_from=str(tmp_path / "unet")))


def with_config(folder, target, **changes):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    changed = {name: value for name, value in {**config, **changes}.items() if value != "left out"}
    (target / "config.json").write_text(json.dumps(changed))
    return str(target)


@pytest.mark.parametrize(
    "change",
    [
        {"timestep_post_act": "silu"},
        {"_class_name": "PRXTransformer2DModel"},
    ],
    ids=str,
)
def test_a_denoiser_of_another_meaning_is_refused_though_its_shapes_agree(published, second, tmp_path, change):
    given = with_config(published[0] / "unet", tmp_path / "unet", **change)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"^init_from='.*/unet' is a denoiser with {name}={value}, and [^\n]*\.$"):
        check(second(init_from=given))


def test_a_config_means_the_same_in_other_words(published, second, tmp_path):
    """With the class's defaults left out, one value in place of a list, or another size for drawing."""
    ours = load_denoiser_config(second().unet_config)
    same = {"attention_head_dim": 2, "layers_per_block": [ours["layers_per_block"]], "sample_size": 99}
    same |= {"act_fn": "left out", "dropout": "left out", "_use_default_values": ["act_fn"]}
    check(second(init_from=with_config(published[0] / "unet", tmp_path / "unet", **same)))
    assert (
        training.same_setting([4, 4], 4)
        and not training.same_setting([4, 8], 4)
        and not training.same_setting([4, 4], [4])
    )


@pytest.mark.parametrize(
    ("scheduler", "objective"),
    [
        ({"_class_name": "DDIMScheduler", "prediction_type": "epsilon"}, "epsilon"),
        ({"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction"}, "flow"),
    ],
    ids=str,
)
def test_another_objective_is_refused(published, second, tmp_path, scheduler, objective):
    folder = shutil.copytree(published[0], tmp_path / "pipeline")
    storage.write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    for given in (folder, folder / "unet"):
        with pytest.raises(ValueError, match=f"with prediction_type='{objective}', not 'v_prediction'"):
            check(second(init_from=str(given)))
    with pytest.raises(ValueError, match="^init_from='first' was trained with prediction_type='v_prediction', not"):
        check(second(init_from="first", prediction_type="epsilon"))


@pytest.mark.parametrize("change", [{"beta_end": 0.02}, {"rescale_betas_zero_snr": True}], ids=str)
def test_another_noise_schedule_is_refused(published, second, tmp_path, change):
    folder = shutil.copytree(published[0], tmp_path / "pipeline")
    scheduler = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", **BETAS, **change}
    storage.write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    with pytest.raises(ValueError, match=r"^init_from=.* was trained with another noise schedule than .*\.$"):
        check(second(init_from=str(folder)))
    with pytest.raises(ValueError, match="^init_from='first' was trained with another noise schedule"):
        check(second(init_from="first", zero_terminal_snr=True, min_snr_gamma=None))


def test_another_vae_is_refused(published, second, tmp_path):
    folder = shutil.copytree(published[0], tmp_path / "pipeline")
    storage.write_json(folder / "vae" / "config.json", {"scaling_factor": 0.13025})
    with pytest.raises(ValueError, match=r"latents of a VAE with scaling_factor=0.13025, and this data's has 0.18215"):
        check(second(init_from=str(folder)))
    check(second(init_from="first"), encoder={**ENCODER, "revision": "another commit of the same model"})
    with pytest.raises(ValueError, match="^init_from='first' was trained on latents of 'tiny-sd', and this data is of"):
        check(second(init_from="first"), encoder={"model": "org/other", "revision": "2"})


def test_the_step_of_another_run_is_pinned_when_a_run_begins(first, second):
    """A restart before the first checkpoint begins from the same weights, though the other run has gone on."""
    runs_uri = storage.join(first[0].storage, "runs")
    pinned = start.pin_weights("first", None, runs_uri)
    assert pinned == f"{first[0].run_uri}@{MIDDLE}" == start.pin_weights(f"first@{MIDDLE}", None, runs_uri)
    earlier = f"{first[0].run_uri}@1"
    assert start.pin_weights("first", earlier, runs_uri) == earlier
    assert start.pin_weights(f"first@{MIDDLE}", earlier, runs_uri) == pinned
    assert checkpoint.find_weights(pinned, second().unet_config, runs_uri) == checkpoint_of(first)


def test_a_damaged_checkpoint_of_another_run_is_refused_before_workers_start(first, second, tmp_path):
    run = shutil.copytree(first[0].run_uri, tmp_path / "runs" / "first")
    file = next(run.glob("checkpoint-*/*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ValueError, match=r"^init_from='first' is .*, which cannot be used: its file .* is damaged"):
        check(second(storage=str(tmp_path), init_from="first"))


def test_a_run_whose_name_ends_in_a_step_is_that_run(first, second):
    runs_uri = storage.join(first[0].storage, "runs")
    shutil.copytree(first[0].run_uri, f"{runs_uri}/first@7")
    assert run_folder.find_run("first@7", runs_uri) == (f"{runs_uri}/first@7", None)
    assert run_folder.find_run("first@8", runs_uri) == (f"{runs_uri}/first", 8)


@pytest.mark.parametrize("saves", [("1GB", "200KB"), ("200KB", "1GB"), ("100KB", "200KB"), ("200KB", "100KB")])
@pytest.mark.parametrize("copied", [False, True])
def test_weights_that_were_saved_twice_into_one_folder_are_those_that_diffusers_loads(second, tmp_path, saves, copied):
    """`copied`: over the earlier files, which an upload does not delete."""
    folder = tmp_path / "unet"
    for seed, size in enumerate(saves):
        target = tmp_path / f"save {seed}" if copied else folder
        denoiser = build_denoiser(second().unet_config, seed=seed)
        denoiser.save_pretrained(target, max_shard_size=size)
        if copied:
            shutil.copytree(target, folder, dirs_exist_ok=True)
    try:
        found = weights_from(second(init_from=str(folder)))
    except ValueError:
        return
    loaded = type(denoiser).from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], loaded[name]) for name in loaded)


def harm_weights(path, harm):
    weights = load_file(path)
    name = "conv_in.weight"
    if harm == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return
    changed = {
        "shape": lambda tensor: torch.ones(1),
        "nan": lambda tensor: tensor.clone().index_fill_(0, torch.tensor([1]), float("nan")),
        "whole numbers": lambda tensor: tensor.int(),
        "extra": lambda tensor: tensor,
    }
    weights[name] = changed[harm](weights[name])
    save_file(weights | ({"other": torch.ones(1)} if harm == "extra" else {}), path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("cut", "is missing, cut short or no safetensors file"),
        ("shape", r"hold conv_in.weight with shape \[1\], and unet_config=.* has \[32, 4, 3, 3\]"),
        ("nan", "hold numbers in conv_in.weight that are not finite"),
        ("whole numbers", "hold conv_in.weight as torch.int32"),
        ("extra", "hold other, which unet_config=.* does not have"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_workers_start(published, second, tmp_path, harm, said):
    shutil.copytree(published[0] / "unet", tmp_path / "unet")
    harm_weights(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", harm)
    with pytest.raises(ValueError, match=rf"^init_from=[^\n]* {said}[^\n]*\.$"):
        check(second(init_from=str(tmp_path / "unet")))


def test_weights_that_lack_a_tensor_are_refused(published, second, tmp_path):
    """So is a pointer of Git LFS in their place. Silently, the tensor would keep its random values."""
    shutil.copytree(published[0] / "unet", tmp_path / "unet")
    path = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items() if name != "conv_in.weight"}
    save_file(weights, path)
    refused = second(init_from=str(tmp_path / "unet"))
    with pytest.raises(ValueError, match="^init_from=.*: the weights in .*/unet lack conv_in.weight: get them again"):
        check(refused)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="^init_from=.*safetensors is missing, cut short or no safetensors file: get"):
        check(refused)


@pytest.mark.parametrize("harm", ["config.json", "progress.json"])
def test_a_checkpoint_that_says_too_little_of_itself_is_one_sentence(first, second, tmp_path, harm):
    uri = shutil.copytree(checkpoint_of(first), tmp_path / "run" / "checkpoint-000000003-001")
    sentence = "lacks the config.json of its run: copy that file there"
    if harm == "progress.json":
        storage.write_text(storage.join(uri, "progress.json"), "{")
        sentence = "cannot be used: its progress.json is damaged"
    with pytest.raises(ValueError, match=rf"^init_from='.*001' [^\n]*{sentence}\.$"):
        check(second(init_from=str(uri)))
