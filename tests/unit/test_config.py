import json
import re

import pytest

from helpers import config
from helpers.config import OnlineConfig, PreprocessingConfig, TrainingConfig, check_sections

BAD_PREPROCESSING = [
    ({"encoder_precision": "int8"}, "encoder_precision='int8' is unknown: choose one of 'fp32', 'fp16', 'bf16'."),
    ({"input_format": "csv"}, "input_format='csv' is unknown: choose one of 'parquet', 'webdataset', 'imagefolder'."),
    ({"num_transform_workers": 0}, "num_transform_workers=0 must be a whole number of at least 1."),
    ({"num_transform_workers": "two"}, "num_transform_workers='two' must be a whole number"),
    ({"num_encoders": -1}, "num_encoders=-1 must be a whole number of at least 1."),
    ({"num_encoders": True}, "num_encoders=True must be a whole number of at least 1."),
    ({"encoder_batch_size": 1.5}, "encoder_batch_size=1.5 must be a whole number of at least 1."),
    ({"latents": "std"}, "latents='std' is unknown: choose one of 'moments', 'mean'."),
    ({"text_precision": "int8"}, "text_precision='int8' is unknown: choose one of 'fp16', 'fp8'."),
    ({"dollars_per_hour": -1}, "dollars_per_hour=-1 must be a number of at least 0."),
    ({"max_pixels": 0}, "max_pixels=0 must be a whole number of at least 1."),
    ({"max_pixels": None}, "max_pixels=None must be a whole number of at least 1."),
    (
        {"max_aspect_ratio": 0.5},
        "max_aspect_ratio=0.5 must be a number of at least 1 (longer side / shorter), or None.",
    ),
    ({"max_aspect_ratio": "2"}, "max_aspect_ratio='2' must be a number of at least 1"),
    ({"upscale": 1}, "upscale=1 must be True or False."),
    ({"limit": 0}, "limit=0 must be a whole number of at least 1."),
    ({"limit": "all"}, "limit='all' must be a whole number of at least 1."),
    ({"gpus_per_encoder": -0.5}, "gpus_per_encoder=-0.5 must be 0 (CPU), a share of a GPU, or more."),
    ({"gpus_per_encoder": "one"}, "gpus_per_encoder='one' must be 0 (CPU), a share of a GPU, or more."),
    ({"gpus_per_encoder": float("nan")}, "gpus_per_encoder=nan must be 0 (CPU), a share of a GPU, or more."),
    ({"resolutions": []}, "resolutions=[] names no size to encode: give at least one, such as [64]."),
    ({"resolutions": 64}, "resolutions=64 must be a list of sizes, such as [64]."),
    ({"resolutions": "64"}, "resolutions='64' must be a list of sizes, such as [64]."),
    ({"resolutions": [64, 4]}, "resolutions=[64, 4]: 4 is no size of 8 pixels or more."),
    ({"resolutions": [64.0]}, "resolutions=[64.0]: 64.0 is no size of 8 pixels or more."),
    ({"resolutions": ["64"]}, "resolutions=['64']: '64' is no size of 8 pixels or more."),
    ({"row_filter": None}, "row_filter=None must be a text."),
    ({"storage": None}, "storage=None must be a text."),
    ({"image_column": 3}, "image_column=3 must be a text."),
    ({"encoder_accelerator_type": 5}, "encoder_accelerator_type=5 must be a text, or None."),
]

BAD_TRAINING = [
    ({"init_from": 5}, "init_from=5 must be a text, or None."),
    ({"init_from": ""}, "init_from='' must be a text, or None."),
    ({"training_accelerator_type": 4}, "training_accelerator_type=4 must be a text, or None."),
    ({"prediction_type": "sample"}, "prediction_type='sample' is unknown: choose one of 'v_prediction', 'epsilon'."),
    ({"strategy": "zero"}, "strategy='zero' is unknown: choose one of 'ddp'"),
    ({"precision": "fp8"}, "precision='fp8' is unknown: choose one of 'fp32', 'bf16'"),
    ({"lr_schedule": "linear"}, "lr_schedule='linear' is unknown: choose one of 'cosine', 'constant'."),
    *[
        ({name: 0}, f"{name}=0 must be a whole number of at least 1.")
        for name in (
            "resolution",
            "global_batch_size",
            "units_per_step",
            "max_steps",
            "num_training_workers",
            "checkpoint_every",
            "checkpoints_kept",
        )
    ],
    *[
        ({name: 1}, f"{name}=1 must be a share: at least 0, less than 1.")
        for name in (
            "caption_dropout",
            "validation_share",
            "ema_decay",
            "adam_beta2",
        )
    ],
    ({"caption_dropout": -0.1}, "caption_dropout=-0.1 must be a share: at least 0, less than 1."),
    ({"caption_dropout": "10 %"}, "caption_dropout='10 %' must be a share: at least 0, less than 1."),
    ({"validation_share": float("nan")}, "validation_share=nan must be a share: at least 0, less than 1."),
    *[
        ({name: -1}, f"{name}=-1 must be a whole number of at least 0.")
        for name in (
            "warmup_steps",
            "ema_start",
            "validate_every",
            "max_failures",
            "seed",
        )
    ],
    ({"seed": 0.5}, "seed=0.5 must be a whole number of at least 0."),
    ({"learning_rate": 0}, "learning_rate=0 must be more than 0."),
    ({"learning_rate": float("nan")}, "learning_rate=nan must be more than 0."),
    ({"learning_rate": "fast"}, "learning_rate='fast' must be more than 0."),
    ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a number of at least 0."),
    ({"min_snr_gamma": 0}, "min_snr_gamma=0 must be more than 0, or None for no weighting."),
    ({"min_snr_gamma": "5"}, "min_snr_gamma='5' must be more than 0, or None for no weighting."),
    *[
        ({"run_name": name}, f"run_name={name!r} must be a plain folder name without slashes or spaces.")
        for name in ("", ".", "..", "a/b", "../a", "a b", "a\\b")
    ],
    ({"run_name": None}, "run_name=None must be a text."),
    ({"use_gpu": "no"}, "use_gpu='no' must be True or False."),
    ({"compile_unet": 1}, "compile_unet=1 must be True or False."),
    ({"latents_uri": 3}, "latents_uri=3 must be a folder, a URI, or a mapping of several to shares."),
    ({"latents_uri": {}}, "latents_uri={} names no data set: give at least one folder and its proportion."),
    ({"latents_uri": {"/a": -1, "/b": 2}}, "latents_uri: the proportion -1 of /a must be a number of more than 0."),
    ({"latents_uri": {"/a": 0, "/b": 2}}, "latents_uri: the proportion 0 of /a must be a number of more than 0."),
    (
        {"latents_uri": {"/a": "half", "/b": 2}},
        "latents_uri: the proportion 'half' of /a must be a number of more than 0.",
    ),
    (
        {"latents_uri": {"/a": 1, "/b": 1e-9}},
        "latents_uri: the proportion 1e-09 of /b is less than a thousandth: leave it out.",
    ),
    (
        {"latents_uri": {"/a": 1, "/a/": 1}},
        "latents_uri={'/a': 1, '/a/': 1} names the same folder twice: give each once.",
    ),
    ({"hang_timeout": 0}, "hang_timeout=0 must be a number of seconds of more than 0."),
    *[
        (
            {"num_training_workers": workers},
            f"num_training_workers={workers!r} must be a whole number of at least 1, or a pair (least, most) of them.",
        )
        for workers in (0, "2", (2, 1), (0, 2), (1, 2, 3), (1, 2.5), [])
    ],
    (
        {"num_training_workers": (2, 4), "units_per_step": 4},
        "units_per_step=4 does not divide among num_training_workers=(2, 4), which may come down to 3: make it a "
        "multiple of every count of workers.",
    ),
    (
        {"global_batch_size": 64, "units_per_step": 3},
        "global_batch_size=64 does not divide into units_per_step=3 equal units: change one of the two.",
    ),
    (
        {"units_per_step": 4, "num_training_workers": 3},
        "units_per_step=4 does not divide among num_training_workers=3: make it a multiple of every count of workers.",
    ),
    (
        {"num_training_workers": 2},
        "units_per_step=1 does not divide among num_training_workers=2: make it a multiple of every count of workers.",
    ),
    (
        {"global_batch_size": 64, "units_per_step": 2, "micro_batch_size": 24},
        "micro_batch_size=24 does not divide a unit of 32 rows (global_batch_size / units_per_step): change one",
    ),
    ({"micro_batch_size": 0}, "micro_batch_size=0 must be a whole number of at least 1."),
    (
        {"validate_every": 300, "checkpoint_every": 250},
        "validate_every=300 must be a multiple of checkpoint_every=250: validation runs on checkpoints, beside the training (0: never).",
    ),
]


@pytest.mark.parametrize(
    "kind, values, message",
    [
        *[(PreprocessingConfig, *case) for case in BAD_PREPROCESSING],
        *[(TrainingConfig, *case) for case in BAD_TRAINING],
    ],
    ids=str,
)
def test_a_bad_parameter_is_named_with_its_value_and_what_to_change(kind, values, message):
    with pytest.raises(ValueError) as error:
        kind(**values)
    text = str(error.value)
    assert text.startswith(message.rstrip(".")) and text.endswith(".") and "\n" not in text


@pytest.mark.parametrize("kind", [PreprocessingConfig, TrainingConfig])
def test_the_defaults_are_good_and_survive_json(kind):
    config = kind()
    again = kind.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "config",
    [
        PreprocessingConfig(resolutions=[64, 32, 64], limit=10, gpus_per_encoder=0.5, row_filter="width > 3"),
        TrainingConfig(
            min_snr_gamma=None,
            global_batch_size=96,
            units_per_step=4,
            num_training_workers=2,
            micro_batch_size=12,
            validate_every=0,
            learning_rate=1,
            caption_dropout=0,
        ),
    ],
)
def test_changed_parameters_survive_json(config):
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_notebooks_variables_of_the_same_names_are_taken_and_no_others():
    namespace = {"run_name": "mine", "seed": 3, "storage": "s3://bucket/x", "resolutions": [8], "_": 1, "json": json}
    config = TrainingConfig.from_parameters(namespace)
    assert (config.run_name, config.seed, config.storage) == ("mine", 3, "s3://bucket/x")
    assert config == TrainingConfig(run_name="mine", seed=3, storage="s3://bucket/x")
    assert namespace["resolutions"] == [8]


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="learning_rat"):
        TrainingConfig(learning_rat=1)


def test_parameters_cannot_be_assigned_again():
    with pytest.raises(AttributeError):
        TrainingConfig().seed = 1


def test_relative_folders_are_those_of_the_notebook_not_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training, preprocessing = TrainingConfig(), PreprocessingConfig(input_uri="my/data")
    assert training.storage == str(tmp_path / "storage") and training.latents_uri == str(tmp_path / "storage/latents")
    assert training.run_uri == str(tmp_path / "storage/runs/run") and preprocessing.raw_uri == str(
        tmp_path / "storage/raw"
    )
    assert preprocessing.input_uri == str(tmp_path / "my/data") and preprocessing.latents_uri == training.latents_uri
    monkeypatch.chdir("/")
    assert TrainingConfig.from_dict(training.to_dict()) == training


def test_latents_may_lie_elsewhere_than_the_rest():
    assert TrainingConfig(storage="s3://b/x", latents_uri="s3://c/latents/").latents_uri == "s3://c/latents"
    assert TrainingConfig(storage="s3://b/x").latents_uri == "s3://b/x/latents"


def test_no_input_means_the_sample_data():
    assert PreprocessingConfig().input_uri == ""


def test_resolutions_are_sorted_and_each_taken_once():
    assert PreprocessingConfig(resolutions=[64, 32, 64]).resolutions == (32, 64)


def test_a_unit_is_the_batch_over_the_units_and_the_micro_batch_a_whole_unit_by_default():
    config = TrainingConfig(global_batch_size=4096, units_per_step=64, num_training_workers=32)
    assert config.unit_rows == 64 and config.micro_batch_size is None


# ---- resuming


OTHER = {
    "unet_config": "small",
    "resolution": 32,
    "prediction_type": "epsilon",
    "caption_dropout": 0.2,
    "min_snr_gamma": None,
    "ema_start": 10,
    "ema_decay": 0.9,
    "global_batch_size": 128,
    "units_per_step": 2,
    "max_steps": 2000,
    "learning_rate": 1e-4,
    "warmup_steps": 10,
    "lr_schedule": "constant",
    "adam_beta2": 0.9,
    "weight_decay": 0.0,
    "seed": 1,
    "precision": "bf16",
    "validation_share": 0.1,
    "init_from": "another",
}
FREE = {
    "storage": "/elsewhere",
    "latents_uri": "/elsewhere/latents",
    "use_gpu": True,
    "training_accelerator_type": "A100",
    "micro_batch_size": 16,
    "compile_unet": True,
    "channels_last": True,
    "activation_checkpointing": True,
    "checkpoint_every": 500,
    "checkpoints_kept": 5,
    "validate_every": 0,
    "max_failures": 0,
    "hang_timeout": 30,
}


def stored(config):
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize("name", OTHER)
def test_a_run_cannot_be_resumed_with_another(name):
    earlier = TrainingConfig()
    with pytest.raises(ValueError) as error:
        TrainingConfig(**{name: OTHER[name]}).check_resume(stored(earlier))
    assert f"run_name='run' was started with {name}={getattr(earlier, name)!r}, not {OTHER[name]!r}" in str(error.value)


@pytest.mark.parametrize("name", FREE)
def test_a_run_may_be_resumed_with_another(name):
    TrainingConfig(**{name: FREE[name]}).check_resume(stored(TrainingConfig()))


def test_a_run_may_be_resumed_on_another_number_of_workers():
    earlier = TrainingConfig(units_per_step=4, num_training_workers=1)
    TrainingConfig(units_per_step=4, num_training_workers=4, micro_batch_size=8).check_resume(stored(earlier))


def test_every_parameter_is_known_to_stay_or_known_to_be_free():
    """A new parameter must be put on one side on purpose."""
    decided = set(OTHER) | config.MAY_CHANGE | {"run_name"}
    assert decided == set(stored(TrainingConfig()))
    assert set(FREE) | {"num_training_workers", "strategy"} == config.MAY_CHANGE


def test_a_run_of_a_version_with_more_or_fewer_parameters_can_be_resumed():
    earlier = stored(TrainingConfig())
    del earlier["adam_beta2"]
    TrainingConfig().check_resume({**earlier, "gone_since": 3})


# ---- online, sections


@pytest.mark.parametrize("value", [0, -0.5, 1.5, "0.8", True, float("nan")])
def test_a_wrong_random_crop_is_one_sentence(value):
    with pytest.raises(
        ValueError, match=re.escape(f"random_crop={value!r} must be a share of the picture's shorter side")
    ):
        OnlineConfig(random_crop=value)
    with pytest.raises(ValueError, match="horizontal_flip='yes' must be True or False"):
        OnlineConfig(horizontal_flip="yes")


def test_a_section_that_a_notebook_does_not_have_is_named_with_those_it_has():
    check_sections([], ["faults", "workers"]), check_sections(["workers"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='fault' is unknown: choose one of 'faults', 'workers'"):
        check_sections(["fault"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='faults' must be a list, of 'faults', 'workers'"):
        check_sections("faults", ["faults", "workers"])


# ---- mixed resolutions


def test_each_step_has_one_resolution_in_the_proportions_given_in_every_window():
    config = TrainingConfig(resolution={64: 3, 32: 1})
    sizes = [config.resolution_at(step) for step in range(10_000)]
    assert config.resolutions == [32, 64] and config.largest_resolution == 64
    assert all(abs(sizes[start : start + 100].count(32) - 25) <= 2 for start in range(0, 10_000, 7) if start <= 9_900)
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_single_resolution_is_that_of_every_step():
    config = TrainingConfig(resolution=32)
    assert config.resolutions == [32] and config.largest_resolution == config.resolution_at(5) == 32


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({}, "resolution={} names no size"),
        ({64: 0}, "the share 0 of size 64 must be"),
        ({"big": 1}, "'big' is no size in pixels"),
        ({0: 1}, "0 is no size in pixels"),
        ({64: "x"}, "the share 'x' of size 64"),
        (0, "resolution=0 must be a whole number"),
    ],
)
def test_a_wrong_mixture_of_resolutions_is_one_sentence(value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TrainingConfig(resolution=value)


def test_a_mixture_that_changes_is_another_run():
    earlier = json.loads(json.dumps(TrainingConfig(resolution={32: 0.5, 64: 0.5}).to_dict()))
    TrainingConfig(resolution={64: 0.5, 32: 0.5}).check_resume(earlier)
    with pytest.raises(ValueError, match="was started with resolution="):
        TrainingConfig(resolution={32: 0.25, 64: 0.75}).check_resume(earlier)
