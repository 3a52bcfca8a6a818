"""What a new run starts from: another run's state, or the weights that people have. No Ray, one process."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import storage
from helpers.config import TrainingConfig
from helpers.model.denoisers import build_denoiser, load_denoiser_config
from helpers.train import checkpoint, checkpoint_io, dataset, setup, start, weights
from tests.steps import MIDDLE, STEPS, everything, same, save, train

pytestmark = pytest.mark.usefixtures("one_thread")
DATA = [{"written": 48, "files_crc32": 7, "proportion": 1.0, "made_with": {}}]
CONSTANT = {"lr_schedule": "constant", "warmup_steps": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory, recipe, build_step, rows):
    """`(config, state, its lines of all steps)` of a run with a constant rate that has saved step `MIDDLE`."""
    values = {"storage": str(tmp_path_factory.mktemp("runs")), "run_name": "first", "max_steps": MIDDLE, **CONSTANT}
    config, state = recipe(**values), build_step(**values)
    lines = train(state, rows, 0, MIDDLE)
    name = checkpoint.checkpoint_name(MIDDLE, 1)
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
    (uri,) = checkpoint.list_checkpoints(first[0].run_uri)
    return uri


# ---- continue_from


def test_a_continued_run_is_bitwise_the_longer_run(first, second, build_step, rows):
    """So is a run with a constant rate, whose own `max_steps` has grown."""
    config, _, lines, at_end = first
    continued = second(continue_from="first", max_steps=STEPS)
    assert start.check_start(continued, DATA) == []
    grown = dataclasses.replace(config, max_steps=STEPS)
    setup.check_resume(grown, setup.read_earlier(config)["parameters"])
    for run in (continued, grown):
        point = dataset.choose_resume_point(run)
        assert point == {"checkpoint": checkpoint_of(first), "step": MIDDLE}
        state = build_step(**run.to_dict())
        assert checkpoint_io.load(point["checkpoint"], state) == MIDDLE
        assert train(state, rows, MIDDLE) == lines[MIDDLE:] and same(everything(state), at_end)


def test_a_runs_own_checkpoints_come_before_those_that_it_continues(first, second, build_step):
    continued = second(run_name="resumed", continue_from="first@3", max_steps=9)
    save(storage.join(continued.run_uri, checkpoint.checkpoint_name(5, 1)), build_step(**continued.to_dict()), 5)
    assert dataset.choose_resume_point(continued)["step"] == 5
    assert start.check_start(dataclasses.replace(continued, continue_from="deleted@3"), DATA) == []


def test_a_continued_run_computes_with_its_own_parameters(first, second, build_step):
    changed = {"learning_rate": 5e-4, "weight_decay": 0.3, "adam_beta2": 0.9, "ema_decay": 0.5}
    state = build_step(**second(continue_from="first", max_steps=STEPS, **changed).to_dict())
    checkpoint_io.load(checkpoint_of(first), state)
    (group,) = state.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (5e-4, 0.3, (0.9, 0.9)) and state.ema.decay == 0.5
    assert same(everything(state), first[1])


@pytest.mark.parametrize(
    ("values", "data", "sentence"),
    [
        ({"global_batch_size": 16}, DATA, "had global_batch_size=8, not 16: its place in the data is not kept"),
        ({"seed": 1}, DATA, "had seed=0, not 1: its place in the data is not kept"),
        ({}, [{**DATA[0], "files_crc32": 8}], "was trained on other data: its place in the data is not kept"),
        ({"ema_start": MIDDLE}, DATA, f"is of step {MIDDLE}, before ema_start={MIDDLE}: its EMA is not kept"),
        ({"num_training_workers": 4, "learning_rate": 1e-5, "lr_schedule": "cosine"}, DATA, None),
    ],
)
def test_what_cannot_be_kept_of_a_continued_run_is_said(second, values, data, sentence):
    said = start.check_start(second(continue_from="first", max_steps=50, **values), data)
    assert [one.startswith(f"continue_from='first' {sentence}") for one in said] == ([True] if sentence else [])


def test_the_place_in_latents_that_the_other_run_has_kept_is_not_kept(first, second):
    uri = storage.join(first[0].storage, "runs", "keeps")
    shutil.copytree(first[0].run_uri, uri)
    assert start.check_start(second(continue_from="keeps", max_steps=50), DATA) == []
    storage.write_json(storage.join(uri, "latents", "manifest.json"), {})
    (said,) = start.check_start(second(continue_from="keeps", max_steps=50), DATA)
    assert said.startswith("continue_from='keeps' was trained on other data: its place in the data is not kept")


def test_a_continued_run_keeps_its_step_and_its_units(first, second, build_step):
    """Also on another number of workers, and when the other run has gone on."""
    uri = storage.join(first[0].storage, "runs", "third")
    shutil.copytree(first[0].run_uri, uri)
    given = {"storage": first[0].storage, "run_name": "fourth", "units_per_step": None, "continue_from": "third"}
    given |= {"global_batch_size": 8, "validate_every": 0, "unet_config": first[0].unet_config}
    config = setup.training_config(given)
    assert (config.continue_from, config.units_per_step) == (f"third@{MIDDLE}", 4)
    save(storage.join(uri, checkpoint.checkpoint_name(8, 1)), build_step(), 8)
    storage.write_json(storage.join(config.run_uri, "config.json"), {"parameters": config.to_dict()})
    storage.write_text(storage.join(config.run_uri, "metrics.jsonl"), "{}\n")
    storage.delete(uri)
    assert setup.training_config(given) == config
    assert setup.training_config({**given, "run_name": "fifth", "continue_from": first[0].run_uri}).continue_from == (
        f"{first[0].run_uri}@{MIDDLE}"
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"continue_from": "nobody"}, "continue_from='nobody': .*/runs/nobody holds no complete checkpoint: check"),
        ({"continue_from": "/no/run"}, "continue_from='/no/run': /no/run holds no complete checkpoint: check"),
        ({"continue_from": "first@2"}, "continue_from='first@2': .* no complete checkpoint of that step, but of 3"),
        ({"max_steps": MIDDLE}, "max_steps=3 is not after step 3 of continue_from='first': make it larger"),
        ({"unet_config": "tiny"}, "continue_from='first' is a denoiser with .*, and unet_config='tiny' has"),
        ({"prediction_type": "epsilon"}, "continue_from='first' was trained with prediction_type='v_prediction', not"),
    ],
)
def test_a_run_that_cannot_be_continued_is_one_sentence(second, values, sentence):
    with pytest.raises(ValueError, match=rf"^{sentence}[^\n]*\.$"):
        start.check_start(second(**{"continue_from": "first", "max_steps": 50, **values}), DATA)


def test_a_run_whose_latents_are_gone_is_not_continued(second):
    config = second(run_name="gone", continue_from="first", max_steps=50)
    with pytest.raises(FileNotFoundError, match="^No latents at latents_uri='.*/latents'"):
        setup.open_run(config)
    assert not storage.exists(config.run_uri)


def test_max_steps_grows_with_a_constant_rate_only(second):
    begun = second(max_steps=50, lr_schedule="cosine").to_dict()
    for now in ({"max_steps": 60, "lr_schedule": "cosine"}, {"max_steps": 40}, {"max_steps": 60}):
        with pytest.raises(ValueError, match="was started with (max_steps=50|lr_schedule='cosine'), not"):
            setup.check_resume(second(**now), begun)
    with pytest.raises(ValueError, match="was started with max_steps=50, not 40"):
        setup.check_resume(second(max_steps=40), second(max_steps=50).to_dict())


# ---- init_from


@pytest.fixture(scope="module")
def published(tmp_path_factory, recipe):
    """`(folder of a pipeline, its U-Net's weights)`."""
    folder, unet = tmp_path_factory.mktemp("pipeline"), build_denoiser(recipe().unet_config, seed=7)
    unet.save_pretrained(folder / "unet")
    storage.write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline"})
    scheduler = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
    storage.write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    return folder, unet.state_dict()


def weights_from(config):
    """The weights that a worker begins with."""
    assert start.check_start(config, DATA) == []
    denoiser = build_denoiser(config.unet_config)
    weights.load_initial_weights(weights.find_weights(config), denoiser, config.init_weights)
    return denoiser.state_dict()


@pytest.mark.parametrize("which", ["model", "ema"])
def test_a_run_starts_from_the_weights_of_a_run_or_a_checkpoint(first, second, which):
    loaded = checkpoint_io.load_weights(checkpoint_of(first), build_denoiser(first[0].unet_config), which).state_dict()
    for given in ("first", f"first@{MIDDLE}", first[0].run_uri, checkpoint_of(first)):
        found = weights_from(second(init_from=given, init_weights=which))
        assert all(torch.equal(found[name], loaded[name]) for name in loaded)


def test_a_run_starts_from_a_pipeline_or_a_denoiser_in_any_variant(published, second, tmp_path):
    folder, weights = published
    build_denoiser(second().unet_config, seed=7).save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for given in (folder, folder / "unet", tmp_path / "parts"):
        found = weights_from(second(init_from=str(given)))
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    half = build_denoiser(second().unet_config, seed=7).half()
    half.save_pretrained(tmp_path / "half", variant="fp16")
    found = weights_from(second(init_from=str(tmp_path / "half")))
    assert all(torch.equal(found[name], weights[name].half().float()) for name in weights)
    shutil.copytree(folder / "unet", tmp_path / "half", dirs_exist_ok=True)  # the full precision is preferred
    found = weights_from(second(init_from=str(tmp_path / "half")))
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_pickled_weights_are_refused_and_never_opened(published, second, tmp_path):
    shutil.copytree(published[0] / "unet", tmp_path / "unet")
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "unet/diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^init_from='.*/unet': .* holds no weights in safetensors, [^\n]*\.$"):
        start.check_start(second(init_from=str(tmp_path / "unet")), DATA)


def with_config(folder, target, **changes):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    changed = {name: value for name, value in {**config, **changes}.items() if value != "left out"}
    (target / "config.json").write_text(json.dumps(changed))
    return str(target)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_head_dim": 4},
        {"act_fn": "gelu"},
        {"flip_sin_to_cos": False},
        {"freq_shift": 1},
        {"timestep_post_act": "silu"},
        {"norm_eps": 1e-6},
        {"resnet_time_scale_shift": "scale_shift"},
        {"_class_name": "PRXTransformer2DModel"},
    ],
    ids=str,
)
def test_a_denoiser_of_another_meaning_is_refused_though_its_shapes_agree(published, second, tmp_path, change):
    given = with_config(published[0] / "unet", tmp_path / "unet", **change)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"^init_from='.*/unet' is a denoiser with {name}={value}, and [^\n]*\.$"):
        start.check_start(second(init_from=given), DATA)


def test_a_config_means_the_same_in_other_words(published, second, tmp_path):
    """With the class's defaults left out, one value in place of a list, or another size for drawing."""
    ours = load_denoiser_config(second().unet_config)
    same = {"attention_head_dim": 2, "layers_per_block": [ours["layers_per_block"]], "sample_size": 99}
    same |= {"act_fn": "left out", "dropout": "left out", "_use_default_values": ["act_fn"]}
    assert (
        start.check_start(second(init_from=with_config(published[0] / "unet", tmp_path / "unet", **same)), DATA) == []
    )
    assert start.same_setting([4, 4], 4) and not start.same_setting([4, 8], 4) and not start.same_setting([4, 4], [4])


@pytest.mark.parametrize(
    ("scheduler", "objective"),
    [
        ({"_class_name": "PNDMScheduler"}, "epsilon"),
        ({"_class_name": "DDIMScheduler", "prediction_type": "epsilon"}, "epsilon"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "flow"),
        ({"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction"}, "flow"),
    ],
    ids=str,
)
def test_another_objective_is_refused_unless_a_parameter_says_so(published, second, tmp_path, scheduler, objective):
    folder = shutil.copytree(published[0], tmp_path / "pipeline")
    storage.write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    for given in (folder, folder / "unet"):
        refused = second(init_from=str(given))
        with pytest.raises(
            ValueError, match=rf"with prediction_type='{objective}', not 'v_prediction': set init_other"
        ):
            start.check_start(refused, DATA)
        assert start.check_start(dataclasses.replace(refused, init_other_objective=True), DATA) == []
    with pytest.raises(ValueError, match="^init_from='first' was trained with prediction_type='v_prediction', not"):
        start.check_start(second(init_from="first", prediction_type="epsilon"), DATA)


def test_weights_that_lack_a_tensor_are_refused(published, second, tmp_path):
    """So is a pointer of Git LFS in their place. Silently, the tensor would keep its random values."""
    shutil.copytree(published[0] / "unet", tmp_path / "unet")
    path = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items() if name != "conv_in.weight"}
    save_file(weights, path)
    refused = second(init_from=str(tmp_path / "unet"))
    with pytest.raises(ValueError, match="^init_from=.*: the weights in .*/unet lack conv_in.weight: get them again"):
        start.check_start(refused, DATA)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="^init_from=.*: the weights in .*/unet lack [^ ]*: get them again"):
        start.check_start(refused, DATA)


@pytest.mark.parametrize("harm", ["config.json", "progress.json"])
def test_a_checkpoint_that_says_too_little_of_itself_is_one_sentence(first, second, tmp_path, harm):
    uri = shutil.copytree(checkpoint_of(first), tmp_path / "run" / "checkpoint-000000003-001")
    sentence = "lacks the config.json of its run: copy that file there"
    if harm == "progress.json":
        storage.write_text(storage.join(uri, "progress.json"), "{")
        sentence = "cannot be used: its progress.json is cut short"
    with pytest.raises(ValueError, match=rf"^init_from='.*001' [^\n]*{sentence}\.$"):
        start.check_start(second(init_from=str(uri)), DATA)


def test_a_run_either_continues_or_starts_from_weights():
    with pytest.raises(ValueError, match="^init_from='a' and continue_from='b' exclude each other: give one"):
        TrainingConfig(init_from="a", continue_from="b")
