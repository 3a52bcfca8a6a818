import json
import re

import pytest

from helpers import config, storage
from helpers.config import OnlineConfig, PreprocessingConfig, TrainingConfig, check_sections, pool_size

BAD_PREPROCESSING = [
    (
        {"encoder_revision": "v1"},
        "encoder_revision='v1' is that of a hub id, and encoder_model='tiny-sd' is a folder: leave it None.",
    ),
    ({"encoder_revision": ""}, "encoder_revision='' must be a text, or None."),
    ({"encoder_precision": "int8"}, "encoder_precision='int8' is unknown: choose one of 'fp32', 'fp16' or 'bf16'."),
    ({"input_format": "csv"}, "input_format='csv' is unknown: choose one of 'parquet', 'webdataset' or 'imagefolder'."),
    ({"num_transform_workers": 0}, "num_transform_workers=0 must be a whole number of at least 1."),
    ({"num_transform_workers": "two"}, "num_transform_workers='two' must be a whole number"),
    *[
        (
            {"num_encoders": encoders},
            f"num_encoders={encoders!r} must be a whole number of at least 1, or a pair (least, most) of them.",
        )
        for encoders in (-1, True, 0, (0, 2), (3, 2), [1, 2, 3], "2", 1.5)
    ],
    ({"encoder_batch_size": 1.5}, "encoder_batch_size=1.5 must be a whole number of at least 1."),
    ({"latents": "std"}, "latents='std' is unknown: choose one of 'moments' or 'mean'."),
    ({"text_precision": "int8"}, "text_precision='int8' is unknown: choose one of 'fp16' or 'fp8'."),
    ({"dollars_per_hour": -1}, "dollars_per_hour=-1 must be a number of at least 0."),
    ({"max_pixels": 0}, "max_pixels=0 must be a whole number of at least 1."),
    ({"max_pixels": None}, "max_pixels=None must be a whole number of at least 1."),
    (
        {"max_aspect_ratio": 0.5},
        "max_aspect_ratio=0.5 must be a number of at least 1 (longer side / shorter side), or None.",
    ),
    ({"max_aspect_ratio": "2"}, "max_aspect_ratio='2' must be a number of at least 1"),
    ({"upscale": 1}, "upscale=1 must be True or False."),
    ({"limit": 0}, "limit=0 must be a whole number of at least 1."),
    ({"limit": "all"}, "limit='all' must be a whole number of at least 1."),
    ({"gpus_per_encoder": -0.5}, "gpus_per_encoder=-0.5 must be 0 (CPU), a share of a GPU, or more."),
    ({"gpus_per_encoder": "one"}, "gpus_per_encoder='one' must be 0 (CPU), a share of a GPU, or more."),
    ({"gpus_per_encoder": float("nan")}, "gpus_per_encoder=nan must be 0 (CPU), a share of a GPU, or more."),
    *[
        (
            {"resolutions": sizes},
            f"resolutions={sizes!r} must be a list of sizes of at least 8 pixels, such as [64].",
        )
        for sizes in ([], 64, "64", [64, 4], [64.0], ["64"], [True], None)
    ],
    *[
        (
            {"aspect_ratios": ratios},
            f"aspect_ratios={ratios!r} must be a list of numbers of more than 0 (width / height)",
        )
        for ratios in ([], [0], [1, -2], 1.5, "1", [float("nan")])
    ],
    (
        {"aspect_ratios": [1, 20], "resolutions": [32, 64]},
        "aspect_ratios=[1.0, 20.0] and size_multiple=16 come to 144 x 0 pixels at resolution 32, which has a side of ",
    ),
    (
        {"aspect_ratios": [1, 1.1], "resolutions": [64, 68]},
        "aspect_ratios=[1.0, 1.1] and size_multiple=16 come to 64 x 64 pixels at resolution 68, which is one of 64 ",
    ),
    ({"size_multiple": 0}, "size_multiple=0 must be a whole number of at least 1."),
    ({"validation_share": 1}, "validation_share=1 must be a share: at least 0, less than 1."),
    ({"dollars_per_hour": float("inf")}, "dollars_per_hour=inf must be a number of at least 0."),
    ({"dollars_per_hour": True}, "dollars_per_hour=True must be a number of at least 0."),
    ({"row_filter": None}, "row_filter=None must be a text."),
    ({"storage": None}, "storage=None must be a text."),
    ({"image_column": 3}, "image_column=3 must be a text."),
    ({"encoder_accelerator_type": 5}, "encoder_accelerator_type=5 must be a text, or None."),
]

BAD_TRAINING = [
    ({"prompts": 3}, "prompts=3 must be texts, a file, or None."),
    ({"prompts": ["a cat", None]}, "prompts=['a cat', None] must be texts, a file, or None."),
    ({"guidance_scale": 0.5}, "guidance_scale=0.5 must be a number of at least 1 (no guidance)."),
    ({"sampling_steps": 0}, "sampling_steps=0 must be a whole number from 1 to 1000."),
    ({"sampler": "heun"}, "sampler='heun' is unknown: choose one of 'ddim', 'dpm++', 'euler' or 'unipc'."),
    ({"clip_model": 3}, "clip_model=3 must be a CLIP's folder or hub id, or None."),
    ({"best_by": "loss"}, "best_by='loss' is unknown: choose one of 'validation_loss', 'unweighted', 'clip_score'"),
    (
        {"best_by": "cmmd", "clip_model": None},
        "best_by='cmmd' needs a CLIP: give clip_model, or keep the best by another.",
    ),
    ({"init_from": 5}, "init_from=5 must be a run, the folder of a U-Net, or None."),
    ({"init_from": ""}, "init_from='' must be a run, the folder of a U-Net, or None."),
    ({"training_accelerator_type": 4}, "training_accelerator_type=4 must be a text, or None."),
    ({"prediction_type": "sample"}, "prediction_type='sample' is unknown: choose one of 'v_prediction' or 'epsilon'."),
    ({"strategy": "zero"}, "strategy='zero' is unknown: choose one of 'ddp'"),
    ({"precision": "fp8"}, "precision='fp8' is unknown: choose one of 'fp32' or 'bf16'"),
    ({"lr_schedule": "linear"}, "lr_schedule='linear' is unknown: choose one of 'cosine' or 'constant'."),
    *[
        ({name: 0}, f"{name}=0 must be a whole number of at least 1.")
        for name in (
            "global_batch_size",
            "units_per_step",
            "max_steps",
            "num_training_workers",
            "profile_step",
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
    ({"run_name": None}, "run_name=None must be a plain folder name without slashes or spaces."),
    ({"use_gpu": "no"}, "use_gpu='no' must be True or False."),
    ({"compile_unet": 1}, "compile_unet=1 must be True or False."),
    *[
        (
            {"latents_uri": uri},
            f"latents_uri={uri!r} must be a folder, a URI, or a mapping of several to their proportions of ",
        )
        for uri in (3, {}, {"/a": -1, "/b": 2}, {"/a": 0, "/b": 2}, {"/a": "half", "/b": 2}, {3: 1})
    ],
    *[
        (
            {"resolution": sizes},
            f"resolution={sizes!r} must be a size in pixels, or a mapping of sizes to their shares of the steps, such",
        )
        for sizes in (0, "64", True, 64.0, {}, {64: 0}, {"big": 1}, {0: 1}, {64: "x"}, {64: float("nan")})
    ],
    (
        {"latents_uri": {"/a": 1, "/b": 1e-9}},
        "latents_uri: the proportion 1e-09 of /b is less than a thousandth: leave it out.",
    ),
    (
        {"latents_uri": {"/a": 1, "/a/": 1}},
        "latents_uri={'/a': 1.0, '/a/': 1.0} names the same folder twice: give each once.",
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
        {"global_batch_size": 64, "units_per_step": 3},
        "global_batch_size=64 does not divide into units_per_step=3 equal units: change one of the two.",
    ),
    (
        {"global_batch_size": 64, "num_training_workers": 3},
        "global_batch_size=64 does not divide into units_per_step=3 equal units (where none is given: the most "
        "workers, or the number that the run began with): change one of the two.",
    ),
    (
        {"global_batch_size": 64, "units_per_step": 2, "micro_batch_size": 24},
        "micro_batch_size=24 does not divide a unit of 32 rows (global_batch_size / units_per_step): change one",
    ),
    ({"micro_batch_size": 0}, "micro_batch_size=0 must be a whole number of at least 1."),
    (
        {"validate_every": 300, "checkpoint_every": 250},
        "validate_every=300 must be a multiple of checkpoint_every=250: validation runs on checkpoints, beside the",
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
def test_a_bad_parameter_is_refused_in_one_sentence(kind, values, message):
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


def test_parameters_are_taken_from_a_notebooks_variables():
    namespace = {"run_name": "mine", "seed": 3, "storage": "/x", "resolutions": [8], "_": 1, "json": json}
    config = TrainingConfig.from_parameters(namespace)
    assert (config.run_name, config.seed, config.storage) == ("mine", 3, "/x")
    assert config == TrainingConfig(run_name="mine", seed=3, storage="/x")
    assert namespace["resolutions"] == [8]


def test_unknown_parameters_are_refused():
    with pytest.raises(ValueError, match="^learning_rat=1 is not a parameter of TrainingConfig: check its spelling.$"):
        TrainingConfig(learning_rat=1)


def test_parameters_cannot_be_assigned_again():
    with pytest.raises(AttributeError):
        TrainingConfig().seed = 1


def test_relative_folders_are_the_notebooks(tmp_path, monkeypatch):
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
    assert TrainingConfig(storage="/x", latents_uri="s3://c/latents/").latents_uri == "s3://c/latents"
    assert PreprocessingConfig(storage="s3://b/x").latents_uri == "s3://b/x/latents"
    # A number of units is given: the run's own, which its `config.json` has, would be looked up in the bucket.
    assert TrainingConfig(storage="s3://b/x", units_per_step=1).latents_uri == "s3://b/x/latents"


def test_no_input_means_the_sample_data():
    assert PreprocessingConfig().input_uri == ""


def test_resolutions_are_sorted_and_unique():
    assert PreprocessingConfig(resolutions=[64, 32, 64]).resolutions == (32, 64)


def test_a_unit_is_the_batch_over_the_units():
    config = TrainingConfig(global_batch_size=4096, units_per_step=64, num_training_workers=32)
    assert config.unit_rows == 64 and config.micro_batch_size is None


# ---- resuming


OTHER = {
    "unet_config": "small",
    "resolution": 32,
    "prediction_type": "epsilon",
    "caption_dropout": 0.2,
    "min_snr_gamma": None,
    "timestep_sampling": "importance",
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
    "trackers": ["tensorboard"],
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
    "max_skipped_steps": 3,
    "hang_timeout": 30,
    "profile_step": 10,
    "prompts": ["a red circle"],
    "guidance_scale": 4.0,
    "sampling_steps": 50,
    "sampler": "dpm++",
    "clip_model": None,
    "best_by": "clip_score",
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


def test_a_run_may_be_resumed_on_other_workers():
    earlier = TrainingConfig(units_per_step=4, num_training_workers=1)
    TrainingConfig(units_per_step=4, num_training_workers=4, micro_batch_size=8).check_resume(stored(earlier))


@pytest.mark.parametrize(("workers", "units"), [(1, 1), (2, 2), ((1, 2), 2), (4, 4)])
def test_units_are_by_default_as_many_as_the_most_workers(workers, units):
    config = TrainingConfig(num_training_workers=workers)
    assert config.units_per_step == config.to_dict()["units_per_step"] == units


def test_a_resume_on_other_workers_keeps_the_units(tmp_path):
    def config(workers, name="run"):
        return TrainingConfig(storage=tmp_path, run_name=name, num_training_workers=workers)

    earlier = config(2)
    storage.write_json(f"{earlier.run_uri}/config.json", {"parameters": earlier.to_dict()})
    assert config(4).units_per_step == 4  # the run has not taken a step
    storage.write_text(f"{earlier.run_uri}/metrics.jsonl", "{}\n")
    later = config(1)
    assert later.units_per_step == 2
    later.check_resume(stored(earlier))
    assert config(1, name="other").units_per_step == 1
    assert config(3).units_per_step == config((24, 32)).units_per_step == 2


def test_every_parameter_is_fixed_or_free_on_resume():
    """A new parameter must be put on one side on purpose."""
    decided = set(OTHER) | config.MAY_CHANGE | {"run_name"}
    assert decided == set(stored(TrainingConfig()))
    assert set(FREE) | {"num_training_workers", "strategy"} == config.MAY_CHANGE


def test_a_run_of_another_version_can_be_resumed():
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


def test_an_unknown_section_is_refused():
    check_sections([], ["faults", "workers"]), check_sections(["workers"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='fault' is unknown: choose one of 'faults', 'workers'"):
        check_sections(["fault"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='faults' must be a list of 'faults', 'workers'"):
        check_sections("faults", ["faults", "workers"])


# ---- mixed resolutions


def test_resolutions_and_their_shares():
    config = TrainingConfig(resolution={64: 3, 32: 1})
    assert config.resolutions == [32, 64] and config.largest_resolution == 64
    assert config.resolution_shares == {64: 0.75, 32: 0.25}
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert TrainingConfig(resolution=32).resolution_shares == {32: 1.0}


def test_a_mixture_that_changes_is_another_run():
    earlier = json.loads(json.dumps(TrainingConfig(resolution={32: 0.5, 64: 0.5}).to_dict()))
    TrainingConfig(resolution={64: 0.5, 32: 0.5}).check_resume(earlier)
    with pytest.raises(ValueError, match="was started with resolution="):
        TrainingConfig(resolution={32: 0.25, 64: 0.75}).check_resume(earlier)


def test_ratios_that_come_to_one_shape_are_one_shape():
    ratios = [0.5, 0.67, 0.75, 1, 1.33, 1.5, 2]
    config = PreprocessingConfig(aspect_ratios=ratios, resolutions=[32, 64])
    assert config.shapes == {
        32: [(16, 48), (32, 32), (48, 16)],
        64: [(48, 96), (48, 80), (64, 64), (80, 48), (96, 48)],
    }
    fine = PreprocessingConfig(aspect_ratios=ratios, resolutions=[256], size_multiple=64).shapes[256]
    assert fine == [(192, 384), (192, 320), (256, 256), (320, 192), (384, 192)]
    assert PreprocessingConfig(resolutions=[8, 72]).shapes == {8: [(8, 8)], 72: [(72, 72)]}


def test_encoders_are_so_many_or_between_the_least_and_the_most():
    assert pool_size(3) == {"min_size": 3, "max_size": 3} and pool_size([2, 8]) == {"min_size": 2, "max_size": 8}
    assert PreprocessingConfig(num_encoders=[2, 8]).most_encoders == 8 and PreprocessingConfig().most_encoders == 1
    assert (
        OnlineConfig.from_dict(json.loads(json.dumps(OnlineConfig(num_encoders=(1, 2)).to_dict()))).most_encoders == 2
    )


def test_online_shapes_need_width_and_height_columns():
    for given in ({"width_column": "w"}, {"height_column": "h"}):
        with pytest.raises(ValueError, match=r"^width_column=.* and height_column=.*: name both columns or neither\.$"):
            OnlineConfig(**given)
    with pytest.raises(ValueError, match=r"^aspect_ratios=\[1.*, 2.*\], while encoding online, need width_column and"):
        OnlineConfig(aspect_ratios=[1, 2])
    assert OnlineConfig(aspect_ratios=[1, 2], width_column="w", height_column="h").shapes[32] == [(32, 32), (48, 16)]
