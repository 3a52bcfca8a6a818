import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import config as parameters
from helpers import storage
from helpers.config import PreprocessingConfig, TrainingConfig, pool_size
from helpers.notebook import choose_sections
from helpers.online.config import OnlineConfig
from helpers.train import start

FLOW = {"prediction_type": "flow"}

# ---- bad input

# {parameter: (bad values, how the text of what they must be begins)}
ONE = {
    "storage": ([None], "a text"),
    "image_column": ([3], "a text"),
    "encoder_revision": (["", 5], "a text, or None"),
    "vae_model": (["", 5], "a model, or None"),
    "upscale": ([1, "no"], "True or False"),
    "encoder_batch_size": ([0, 1.5, True, "two"], "a whole number of at least 1"),
    "limit": ([0, "all"], "a whole number of at least 1, or None"),
    "max_failures": ([-2, 0.5], "a whole number of at least 0, or -1 for no limit"),
    "dollars_per_hour": ([-1, True, float("inf")], "a number of at least 0"),
    "validation_share": ([1, -0.1, "10 %", float("nan")], "a share: at least 0, less than 1"),
    "max_aspect_ratio": ([0.5, "2"], "a number of at least 1 (longer side / shorter side), or None"),
    "gpus_per_encoder": ([-0.5, "one", float("nan")], "0 (CPU), a share of a GPU, or more"),
    "num_encoders": ([-1, True, 0, (0, 2), (3, 2), [1, 2, 3], (1, 2.5), [], "2", 1.5], "a whole number of at least 1"),
    "resolutions": ([[], 64, "64", [64, 4], [64.0], ["64"], [True], None], "a list of sizes of at least 8 pixels"),
    "aspect_ratios": ([[], [0], [1, -2], 1.5, "1", [float("nan")]], "a list of numbers of more than 0"),
    "random_crop": ([0, -0.5, 1.5, "0.8", True, float("nan")], "a share of the shorter side: more than 0, at most 1"),
    "learning_rate": ([0, "fast", float("nan")], "a number of more than 0"),
    "min_snr_gamma": ([0, "5"], "a number of more than 0, None for no weights, or 'auto'"),
    "hang_timeout": ([0, "soon"], "a number of more than 0"),
    "guidance_scale": ([0.5], "a number of at least 1 (no guidance)"),
    "sampling_steps": ([0, 1001], "a whole number from 1 to 1000"),
    "prompts": ([3, ["a cat", None]], "texts, a file, or None"),
    "clip_model": ([3], "a CLIP's folder or hub id, or None"),
    "licence": (["", 3, "proprietary", "MIT OR"], "an SPDX id such as 'Apache-2.0' or 'LicenseRef-Name', or None"),
    "init_from": ([5, ""], "a run, the folder or hub id of a checkpoint, pipeline or denoiser, or None"),
    "continue_from": ([5, ""], "a run's name or folder, perhaps with @step, or None"),
    "run_name": (
        ["", "größe", "日", "a\tb", ".", "..", "a/b", "../a", "a b", "a\\b", None],
        "a plain ASCII folder name without slashes or spaces",
    ),
    "latents_uri": (
        [3, {}, {"/a": -1, "/b": 2}, {"/a": 0, "/b": 2}, {"/a": "half", "/b": 2}, {3: 1}],
        "a folder, a URI, or a mapping",
    ),
    "resolution": (
        [0, "64", True, 64.0, {}, {64: 0}, {"big": 1}, {0: 1}, {64: "x"}, {64: float("nan")}],
        "a size in pixels, or a mapping of sizes to shares",
    ),
}
# {how the sentence begins: the parameters that it refuses}
SEVERAL = {
    "encoder_revision='v1' is that of a hub id, and encoder_model='tiny-sd' is a": {"encoder_revision": "v1"},
    "aspect_ratios=[1.0, 20.0] come to 144 x 0 pixels at": {"aspect_ratios": [1, 20]},
    "aspect_ratios=[1.0, 1.1] come to 64 x 64 pixels at resolution 68, which is one of 64": {
        "aspect_ratios": [1, 1.1],
        "resolutions": [64, 68],
    },
    "width_column='w' and height_column=None: name both columns or neither": {"width_column": "w"},
    "aspect_ratios=[1.0, 2.0], while encoding online, need width_column": {"aspect_ratios": [1, 2]},
    "best_by='cmmd' needs a CLIP: give clip_model": {"best_by": "cmmd", "clip_model": None},
    "best_by='validation_set_loss' needs a validation_uri: give one": {"best_by": "validation_set_loss"},
    "latents_uri: the proportion 1e-09 of /b is less than": {"latents_uri": {"/a": 1, "/b": 1e-9}},
    "latents_uri={'/a': 1.0, '/a/': 1.0} names the same folder twice": {"latents_uri": {"/a": 1, "/a/": 1}},
    "global_batch_size=64 does not divide into units_per_step=5 equal units: change": {"units_per_step": 5},
    "global_batch_size=64 does not divide into units_per_step=3 equal units (where none is given: the most": {
        "num_training_workers": 3
    },
    "micro_batch_size=24 does not divide a unit of 32 rows": {"units_per_step": 2, "micro_batch_size": 24},
    "validate_every=300 must be a multiple of": {"validate_every": 300, "checkpoint_every": 250},
    "deterministic=True excludes compile_unet=True": {"deterministic": True, "compile_unet": True},
    "deterministic=True excludes attention='flash'": {"deterministic": True, "attention": "flash"},
    "min_snr_gamma=5.0 weights epsilon and v, not prediction_type='flow'": {**FLOW, "min_snr_gamma": 5.0},
    "timestep_sampling='importance' goes by min-SNR": {**FLOW, "timestep_sampling": "importance"},
    "timestep_sampling='logit_normal' and timestep_shift are for flow, not": {"timestep_sampling": "logit_normal"},
    "timestep_sampling='logit_normal' and timestep_shift are for flow": {"timestep_shift": 3.0},
    "zero_terminal_snr=True needs v_prediction": {"prediction_type": "epsilon", "zero_terminal_snr": True},
    "min_snr_gamma=5.0 with zero_terminal_snr=True gives the last timestep weight 0, and sampling begins there": {
        "zero_terminal_snr": True,
        "min_snr_gamma": 5.0,
    },
    "sampler='ddim' cannot sample prediction_type='flow': choose 'dpm++'": {**FLOW, "sampler": "ddim"},
    "sampler='heun' is unknown: choose one of 'auto', 'ddim', 'dpm++', 'euler' or 'unipc'": {"sampler": "heun"},
    "sampling_steps=1000: sampler='ddim' takes 1 to 999 with timestep_shift=1": {"sampling_steps": 1000},
    "sampling_steps=1: sampler='euler' takes 2 to 999": {"sampling_steps": 1, "sampler": "euler"},
    "sampling_steps=333: sampler='dpm++' takes 1 to 332 with timestep_shift=3": {
        **FLOW,
        "timestep_shift": 3.0,
        "sampling_steps": 333,
    },
    "num_training_workers=8 is more than units_per_step=2, and a worker without": {
        "num_training_workers": 8,
        "units_per_step": 2,
    },
    "num_training_workers=(1, 4) is more than units_per_step=2": {
        "num_training_workers": (1, 4),
        "units_per_step": 2,
    },
}
FIELDS = {kind: {field.name: field for field in dataclasses.fields(kind)} for kind in (OnlineConfig, TrainingConfig)}


def kind_of(values):
    return TrainingConfig if values.keys() <= FIELDS[TrainingConfig].keys() else OnlineConfig


@pytest.mark.parametrize(
    ("sentence", "values"),
    [
        *((f"{name}={value!r} must be {text}", {name: value}) for name, (bad, text) in ONE.items() for value in bad),
        *SEVERAL.items(),
    ],
    ids=str,
)
def test_a_bad_parameter_is_refused_in_one_sentence(sentence, values):
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}.*\.$"):
        kind_of(values)(**values)


@pytest.mark.parametrize("kind", FIELDS)
def test_every_parameter_is_checked(kind):
    for name in FIELDS[kind]:
        with pytest.raises(ValueError, match=rf"^{name}=<object .*> (must be .+|is unknown: choose one of .+)\.$"):
            kind(**{name: object()})


def test_a_change_of_what_was_begun_is_refused():
    before, now = {"a": [1, 2], "b": None, "c": 1}, {"a": (1, 2), "c": 3, "d": 4}
    parameters.refuse_change("run_name='x'", before, {"a": (1, 2), "c": 1}, "give another")
    parameters.refuse_change("run_name='x'", before, now, "give another", names=["a", "b"])
    with pytest.raises(ValueError, match="^run_name='x' was begun with c=1, not 3: give another.$"):
        parameters.refuse_change("run_name='x'", before, now, "give another")


def test_unknown_parameters_are_refused():
    with pytest.raises(ValueError, match="^learning_rat=1 is not a parameter of TrainingConfig: see"):
        TrainingConfig(learning_rat=1)


def test_an_unknown_section_is_refused():
    choose_sections([], ["faults", "workers"]), choose_sections(["workers"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='fault' is unknown: choose one of 'faults', 'workers'"):
        choose_sections(["fault"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='faults' must be a list of 'faults', 'workers'"):
        choose_sections("faults", ["faults", "workers"])


# ---- what a config is


def stored(config):
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize(
    "config",
    [
        OnlineConfig(),
        OnlineConfig(resolutions=[64, 32, 64], limit=10, gpus_per_encoder=0.5, num_encoders=(1, 2)),
        PreprocessingConfig(encoder_model="org/model", encoder_revision="v1"),
        TrainingConfig(),
        TrainingConfig(min_snr_gamma=None, global_batch_size=96, num_training_workers=2, learning_rate=1),
        TrainingConfig(latents_uri={"/a": 1, "/b": 6}, resolution={64: 3, 32: 1}, trackers=["wandb"], prompts=["a"]),
    ],
)
def test_parameters_survive_json(config):
    again = type(config)(**stored(config))
    assert again == config and stored(again) == stored(config)


def test_parameters_are_taken_from_a_notebooks_variables():
    namespace = {"run_name": "mine", "seed": 3, "storage": "/x", "resolutions": [8], "_": 1, "json": json}
    assert TrainingConfig.from_parameters(namespace) == TrainingConfig(run_name="mine", seed=3, storage="/x")


def test_parameters_cannot_be_assigned_again():
    with pytest.raises(AttributeError):
        TrainingConfig().seed = 1


def test_relative_folders_are_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training, preprocessing = TrainingConfig(), PreprocessingConfig(input_uri="my/data")
    assert training.storage == str(tmp_path / "storage") and training.run_uri == f"{training.storage}/runs/run"
    assert preprocessing.input_uri == str(tmp_path / "my/data")
    assert preprocessing.raw_uri == f"{training.storage}/raw" and PreprocessingConfig().input_uri == ""
    assert preprocessing.latents_uri == training.latents_uri == f"{training.storage}/latents"
    monkeypatch.chdir("/")
    assert TrainingConfig(**training.to_dict()) == training


def test_latents_may_lie_elsewhere_than_the_rest():
    assert TrainingConfig(storage="/x", latents_uri="s3://c/latents/").latents_uri == "s3://c/latents"
    assert PreprocessingConfig(storage="s3://b/x").latents_uri == "s3://b/x/latents"
    assert TrainingConfig(storage="s3://b/x").latents_uri == "s3://b/x/latents"


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 512), st.floats(0.01, 100), min_size=1))
def test_resolutions_and_their_shares(shares):
    config = TrainingConfig(resolution=shares)
    assert config.resolutions == sorted(shares) and config.largest_resolution == max(shares)
    assert sum(config.resolution_shares.values()) == pytest.approx(1)
    total = sum(shares.values())
    assert config.resolution_shares == pytest.approx({size: share / total for size, share in shares.items()})


def test_ratios_that_come_to_one_shape_are_one_shape():
    ratios = [0.5, 0.67, 0.75, 1, 1.33, 1.5, 2]
    assert PreprocessingConfig(aspect_ratios=ratios, resolutions=[64, 32, 64]).shapes == {
        32: [(16, 48), (32, 32), (48, 16)],
        64: [(48, 96), (48, 80), (64, 64), (80, 48), (96, 48)],
    }
    fine = PreprocessingConfig(aspect_ratios=ratios, resolutions=[256], size_multiple=64).shapes[256]
    assert fine == [(192, 384), (192, 320), (256, 256), (320, 192), (384, 192)]
    assert PreprocessingConfig(resolutions=[8, 72]).shapes == {8: [(8, 8)], 72: [(72, 72)]}


def test_encoders_are_so_many_or_between_the_least_and_the_most():
    assert pool_size(3) == {"min_size": 3, "max_size": 3} and pool_size([2, 8]) == {"min_size": 2, "max_size": 8}
    assert PreprocessingConfig(num_encoders=[2, 8]).most_encoders == 8 and PreprocessingConfig().most_encoders == 1


# ---- resuming


@pytest.mark.parametrize("name", FIELDS[TrainingConfig])
def test_a_run_is_resumed_with_what_fixes_what_it_learns(name):
    config = TrainingConfig()
    earlier = {**stored(config), name: "another", "gone_since": 3}
    if FIELDS[TrainingConfig][name].metadata["fixes"] is None:
        start.check_resume(config, earlier)
        return
    with pytest.raises(ValueError) as error:
        start.check_resume(config, earlier)
    assert str(error.value) == (
        f"run_name='run' was started with {name}='another', not {getattr(config, name)!r}: set it back to resume the "
        "run, or give another run_name."
    )


def test_machines_and_cadences_may_change_and_data_model_and_recipe_may_not():
    fixed = TrainingConfig().fixed("rows", "latents", "run").keys()
    assert not fixed & {"num_training_workers", "strategy", "compile_unet", "use_gpu", "checkpoint_every"}
    assert fixed > {"validation_share", "resolution", "unet_config", "prediction_type", "global_batch_size", "seed"}
    assert fixed > {"units_per_step", "max_steps", "lr_schedule", "precision"}


def test_a_run_of_another_version_can_be_resumed():
    earlier = stored(TrainingConfig())
    del earlier["adam_beta2"]
    start.check_resume(TrainingConfig(), earlier)


@pytest.mark.parametrize(("workers", "units"), [(1, 1), (2, 2), ((1, 2), 2), (4, 4)])
def test_units_are_by_default_as_many_as_the_most_workers(workers, units):
    config = TrainingConfig(num_training_workers=workers)
    assert config.units_per_step == config.to_dict()["units_per_step"] == units
    assert config.unit_rows == config.global_batch_size // units


def test_a_resume_on_other_workers_keeps_the_units(tmp_path):
    def config(workers, name="run", units=None):
        values = {"storage": str(tmp_path), "run_name": name, "num_training_workers": workers, "units_per_step": units}
        return start.training_config(values)

    earlier = config(2)
    storage.write_json(f"{earlier.run_uri}/config.json", {"parameters": earlier.to_dict()})
    assert config(4).units_per_step == 4  # the run has not taken a step
    storage.write_text(f"{earlier.run_uri}/metrics.jsonl", "{}\n")
    start.check_resume(config(1), stored(earlier))
    assert config(1).units_per_step == config((1, 2)).units_per_step == 2
    with pytest.raises(ValueError, match="^num_training_workers=3 is more than units_per_step=2, and a worker"):
        config(3)
    assert config(1, name="other").units_per_step == 1
    with pytest.raises(ValueError, match="^run_name='run' was started with units_per_step=2, not 4: set it back"):
        config(1, units=4)  # the cell that checks parameters, before data is looked at


# ---- what depends on the objective

NAMES = ("min_snr_gamma", "timestep_sampling", "sampler")
# What notebooks without these parameters had, before they were "auto".
BEFORE = {"min_snr_gamma": 5.0, "timestep_sampling": "importance", "sampler": "ddim"}


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        ({}, (5.0, "importance", "ddim")),
        ({"prediction_type": "epsilon"}, (5.0, "importance", "ddim")),
        ({"prediction_type": "flow"}, (None, "logit_normal", "dpm++")),
        ({"zero_terminal_snr": True}, (None, "uniform", "ddim")),
        ({"min_snr_gamma": None}, (None, "uniform", "ddim")),
        ({"min_snr_gamma": 3.0}, (3.0, "importance", "ddim")),
        ({"prediction_type": "flow", "timestep_sampling": "uniform"}, (None, "uniform", "dpm++")),
        ({"prediction_type": "flow", "sampler": "unipc"}, (None, "logit_normal", "unipc")),
    ],
)
def test_the_objective_alone_is_a_choice_and_what_was_chosen_is_stored(values, resolved):
    config = TrainingConfig(**values)
    assert tuple(stored(config)[name] for name in NAMES) == tuple(getattr(config, name) for name in NAMES) == resolved


def test_a_run_from_before_auto_is_resumed_with_the_new_defaults():
    """Its config.json has values, which stay; "auto" is the same for a notebook's run."""
    for earlier in (
        {**stored(TrainingConfig()), **BEFORE},
        {**stored(TrainingConfig()), "timestep_sampling": "uniform"},
    ):
        assert stored(TrainingConfig(**earlier)) == earlier
    start.check_resume(TrainingConfig(), {**stored(TrainingConfig()), **BEFORE})


def test_all_parameters_that_do_not_go_with_the_objective_are_named_at_once():
    with pytest.raises(ValueError, match="^min_snr_gamma=5.0 .*timestep_sampling='importance' .*sampler='ddim' "):
        TrainingConfig(prediction_type="flow", **BEFORE)


def test_the_first_difference_is_between_values_as_json_stores_them():
    before = {"a": [1, 2], "b": None, "c": 1}
    assert parameters.first_difference(before, {"a": (1, 2), "c": 1}) is None
    assert parameters.first_difference(before, {"a": (1, 2), "c": 3, "d": 4}) == ("c", 1, 3)
    assert parameters.first_difference(before, {"a": (1, 2), "c": 3, "d": 4}, names=["a", "d"]) == ("d", None, 4)
