"""What a config is: its checks, what resuming fixes, what follows from other parameters."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import config as parameters
from helpers import storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.lesson import sections
from helpers.online.config import OnlineConfig
from helpers.train import start

FLOW = {"prediction_type": "flow"}
NAN = float("nan")
# One parameter of each kind: wrong values.
ONE = {
    "storage": [3.5, None],
    "unet_config": [True],
    "input_format": ["csv"],
    "use_gpu": [2, "perhaps"],
    "max_steps": [0, -1, 1.5, "many", True, "True"],
    "seed": [-1, 1.5, 2**63, 10**30],
    "num_encoders": [0, [1, 2, 3], "(0, 1)"],
    "validation_share": [1, -0.1, "1"],
    "num_training_workers": ["(1, 2)"],
    "learning_rate": [0, "fast", NAN],
    "resolutions": [[], [4], 64, "64", ["small"]],
    "extras": [["watchdog"], {"watchdog": 60}, {3: None}],
    "init_from": [5.5, ""],
    "run_name": ["", "o\u0308", "..", "a/b", "a b", "lr@5", "$x$", "a|b", "a\n", "a%2F", "x" * 230, None, 1e5],
    "latents_uri": [3.5, {}, {"/a": 0, "/b": 2}],
    "resolution": [0, "a", {}, {64: 0}, {"big": 1}],
}
# What is refused together, and how the sentence begins.
SEVERAL = [
    ({"aspect_ratios": [1, 20]}, "aspect_ratios=[1.0, 20.0] come to {32: [(32, 32), (144, 0)]"),
    ({"aspect_ratios": [1, 1.1], "resolutions": [64, 68]}, "aspect_ratios=[1.0, 1.1] come to {64: [(64, 64)], 68: ["),
    ({"caption_column": ["a", "a"]}, "caption_column=('a', 'a')"),
    ({"caption_column": ["a", "b"], "max_captions": 2}, "max_captions=2"),
    ({"width_column": "w"}, "width_column='w' and height_column=None"),
    ({"latents_uri": {"/a": 1, "/b": 1e-9}}, "latents_uri: the proportion 1e-09 of /b"),
    ({"latents_uri": {"/a": 1, "/a/": 1}}, "latents_uri={'/a': 1.0, '/a/': 1.0}"),
    ({"caption_shares": [0.5, 0.6]}, "caption_shares=[0.5, 0.6]"),
    ({"units_per_step": 5}, "global_batch_size=64 does not divide into units_per_step=5"),
    ({"units_per_step": 2, "micro_batch_size": 24}, "micro_batch_size=24"),
    ({"num_training_workers": 8, "units_per_step": 2}, "num_training_workers=8 is more than units_per_step=2"),
    ({"deterministic": True, "attention": "flash"}, "deterministic=True excludes attention='flash'"),
    ({**FLOW, "min_snr_gamma": 5.0}, "min_snr_gamma=5.0"),
    ({**FLOW, "timestep_sampling": "importance"}, "timestep_sampling='importance'"),
    ({"timestep_shift": 3.0}, "timestep_sampling='logit_normal' and timestep_shift"),
    ({"prediction_type": "epsilon", "zero_terminal_snr": True}, "zero_terminal_snr=True needs v_prediction"),
    ({"zero_terminal_snr": True, "min_snr_gamma": 5.0}, "min_snr_gamma=5.0 with zero_terminal_snr=True"),
]
FIELDS = {kind: {field.name: field for field in dataclasses.fields(kind)} for kind in (OnlineConfig, TrainingConfig)}


def kind_of(values):
    return TrainingConfig if values.keys() <= FIELDS[TrainingConfig].keys() else OnlineConfig


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, wrong in ONE.items() for value in wrong], ids=str)
def test_a_wrong_value_is_refused_in_one_sentence(name, value):
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{name}={value!r}')} [^\n]*\.$"):
        kind_of({name: value})(**{name: value})


@pytest.mark.parametrize(("kind", "name"), [(TrainingConfig, "min_snr_gamma"), (OnlineConfig, "limit")])
def test_the_sentence_about_a_wrong_value_says_that_none_is_allowed(kind, name):
    with pytest.raises(ValueError, match=r"or None\.$"):
        kind(**{name: "none"})


# What papermill's options make of what is typed -> what is meant.
TYPED = [
    ("learning_rate", "1e-4", 1e-4),
    ("learning_rate", 1, 1.0),
    ("run_name", 2024, "2024"),
    ("num_training_workers", "2", 2),
    ("max_steps", 1e3, 1000),
    ("use_gpu", "false", False),
    ("resolution", {"32": "1e-1", 64: 0.9}, {32: 0.1, 64: 0.9}),
    ("caption_shares", ["0.25", 0.75], (0.25, 0.75)),
    ("latents_uri", {"/a": "1e0", "/b": 1}, {"/a": 0.5, "/b": 0.5}),
]


@pytest.mark.parametrize(("name", "given", "meant"), TYPED, ids=str)
def test_a_value_is_read_as_its_parameters_type_and_the_notebook_has_what_was_read(name, given, meant):
    namespace = {name: given, "storage": "relative", "attention": "auto", "min_snr_gamma": "auto"}
    before = dict(namespace)
    config = TrainingConfig.from_parameters(namespace)
    assert getattr(config, name) == meant and type(getattr(config, name)) is type(meant)
    assert namespace == {**before, name: given if isinstance(given, (list, dict)) else meant}


def test_what_papermill_reads_as_another_type_leads_to_the_option_that_keeps_it():
    with pytest.raises(ValueError, match=r'^run_name=100000.0 .*"papermill -r" passes a text'):
        TrainingConfig(run_name=1e5)
    with pytest.raises(ValueError, match=r'^caption_shares=.* .*"papermill -y" passes a list'):
        TrainingConfig(caption_shares="[0.25, 0.75]")


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(FIELDS[TrainingConfig])),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text("[](){}:,'-1e.", max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        ),
    ),
)
def test_whatever_is_given_is_taken_or_refused_in_one_sentence(name, value):
    try:
        TrainingConfig(**{name: value})
    except ValueError as error:
        assert type(error) is ValueError and str(error).endswith(".") and name.split("_")[0] in str(error)


@pytest.mark.parametrize(("values", "sentence"), SEVERAL, ids=str)
def test_values_that_do_not_go_together_are_refused_in_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*\.$"):
        kind_of(values)(**values)


@pytest.mark.parametrize("kind", FIELDS)
def test_every_parameter_is_checked(kind):
    for name in FIELDS[kind]:
        with pytest.raises(ValueError, match=rf"^{name}=<object .*>"):
            kind(**{name: object()})


@pytest.mark.parametrize("given", [(3, 1), [3, 1]], ids=str)
@pytest.mark.parametrize("name", ["num_encoders", "num_training_workers"])
def test_a_range_of_workers_that_begins_with_the_larger_number_is_refused(name, given):
    with pytest.raises(
        ValueError, match=rf"^{re.escape(f'{name}={given!r}')} .*\(1, 3\): the least number comes first\.$"
    ):
        kind_of({name: given})(**{name: given})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"storage": "s3://your-bucket/sd2"}, "storage: 's3://your-bucket/sd2' still has the placeholder your-bucket"),
        ({"vae_model": "a/b@REPLACE_WITH_COMMIT"}, "vae_model: 'a/b@REPLACE_WITH_COMMIT' still has"),
        ({"extras": {"evaluate": {"clip_model": "a/b@REPLACE_WITH_COMMIT"}}}, "extras: 'a/b@REPLACE_WITH_COMMIT'"),
    ],
    ids=str,
)
def test_what_a_profile_leaves_open_is_refused_by_the_first_cell(given, sentence):
    """A CLIP would be loaded for the first time after hours of training."""
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*\.$"):
        PreprocessingConfig.from_parameters(given)
    if "vae_model" not in given:
        with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*\.$"):
            start.training_config({"storage": "storage", "run_name": "a", "units_per_step": None, **given})


def test_an_unknown_section_is_refused():
    sections.choose_sections([], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='fault' .*'faults', 'workers'"):
        sections.choose_sections(["fault"], ["faults", "workers"])
    with pytest.raises(ValueError, match="sections='faults' must be a list"):
        sections.choose_sections("faults", ["faults", "workers"])


# ---- what a config is


def stored(config):
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize(
    "config",
    [
        OnlineConfig(resolutions=[64, 32, 64], limit=10, gpus_per_encoder=0.5, num_encoders=(1, 2), size_multiple=8),
        TrainingConfig(latents_uri={"/a": 1, "/b": 6}, resolution={64: 3, 32: 1}, min_snr_gamma=None, learning_rate=1),
        TrainingConfig(extras={"watchdog": {"timeout": 60}, "meter": None}),
    ],
)
def test_a_config_survives_json(config):
    again = type(config)(**stored(config))
    assert again == config and stored(again) == stored(config)


def test_a_derived_field_is_no_parameter():
    assert PreprocessingConfig.from_parameters({"text_cleaning": "ftfy"}).text_cleaning == "none"
    with pytest.raises(ValueError, match="^text_cleaning is not a parameter"):
        sections.check_names(["# Parameters\ntext_cleaning = 'ftfy'\n"])


def test_relative_folders_are_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training, preprocessing = TrainingConfig(), PreprocessingConfig(input_uri="my/data")
    assert training.storage == str(tmp_path / "storage") and training.run_uri == f"{training.storage}/runs/run"
    assert preprocessing.input_uri == str(tmp_path / "my/data")
    assert preprocessing.raw_uri == f"{training.storage}/raw" and PreprocessingConfig().input_uri == ""
    assert preprocessing.latents_uri == training.latents_uri == f"{training.storage}/latents"
    monkeypatch.chdir("/")
    assert TrainingConfig(**training.to_dict()) == training


def test_ratios_that_come_to_one_shape_are_one_shape():
    ratios = [0.5, 0.67, 0.75, 1, 1.33, 1.5, 2]
    assert PreprocessingConfig(aspect_ratios=ratios, resolutions=[64, 32, 64]).shapes == {
        32: [(16, 48), (32, 32), (48, 16)],
        64: [(48, 96), (48, 80), (64, 64), (80, 48), (96, 48)],
    }
    fine = PreprocessingConfig(aspect_ratios=ratios, resolutions=[256], size_multiple=64).shapes[256]
    assert fine == [(192, 384), (192, 320), (256, 256), (320, 192), (384, 192)]


# ---- resuming


def test_a_change_of_what_was_begun_is_refused():
    before, now = {"a": [1, 2], "b": None, "c": 1}, {"a": (1, 2), "c": 3, "d": 4}
    parameters.refuse_change("run_name='x'", before, {"a": (1, 2), "c": 1}, "give another")
    parameters.refuse_change("run_name='x'", before, now, "give another", names=["a", "b"])
    with pytest.raises(ValueError, match="^run_name='x' was begun with c=1, not 3: give another.$"):
        parameters.refuse_change("run_name='x'", before, now, "give another")


@pytest.mark.parametrize("name", FIELDS[TrainingConfig])
def test_a_run_is_resumed_with_what_fixes_what_it_learns(name):
    config = TrainingConfig()
    earlier = {**stored(config), name: "another", "gone_since": 3}
    if FIELDS[TrainingConfig][name].metadata["fixes"] is None:
        start.check_resume(config, earlier)
        return
    with pytest.raises(ValueError, match=rf"^run_name='run' was [a-z]* with {name}='another', not [^\n]*\.$"):
        start.check_resume(config, earlier)


@pytest.mark.parametrize(("workers", "units"), [(1, 1), ((1, 2), 2), (4, 4)])
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
    with pytest.raises(ValueError, match="^num_training_workers=3 is more than units_per_step=2"):
        config(3)
    assert config(1, name="other").units_per_step == 1
    with pytest.raises(ValueError, match="^run_name='run' .*units_per_step=2, not 4"):
        config(1, units=4)  # the cell that checks parameters, before data is looked at


# ---- what follows from the objective


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        ({}, (5.0, "importance")),
        ({"prediction_type": "epsilon"}, (5.0, "importance")),
        (FLOW, (None, "logit_normal")),
        ({"zero_terminal_snr": True}, (None, "uniform")),
        ({"min_snr_gamma": 3.0}, (3.0, "importance")),
        ({**FLOW, "timestep_sampling": "uniform"}, (None, "uniform")),
    ],
)
def test_the_objective_alone_is_a_choice_and_what_was_chosen_is_stored(values, resolved):
    config = stored(TrainingConfig(**values))
    assert (config["min_snr_gamma"], config["timestep_sampling"]) == resolved
