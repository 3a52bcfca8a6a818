"""Jobs as a cluster runs them: `sections: []`, profiles of each kind, shrunk by parameters alone."""

import json
import pathlib
import shutil

import nbformat
import papermill
import pytest

from helpers.lesson import captioned_shapes
from helpers.train.metrics import read_metrics
from tests.faults import slow
from tests.notebooks.test_notebooks import section_of
from tests.pipelines import PREPROCESSING, TRAINING, defaults, profile_with_commits
from tests.unit.config.test_profiles import PROFILES
from tests.unit.model.test_denoisers import SMALL

ROOT = pathlib.Path(__file__).parents[2]
MODELS = ["encoder_model", "vae_model", "text_encoder_model", "clip_model"]
NO_NAME = [
    "image_column",
    "caption_column",
    "id_column",
    "width_column",
    "height_column",
    "caption_shares",
    "init_from",
]
NO_NAME += ["encoder_revision", "vae_revision", "text_encoder_revision", "prompts", "micro_batch_size"]
ONE_MACHINE = {"ray_address": "local", "use_gpu": False, "gpus_per_encoder": 0, "compile_unet": False}
ONE_MACHINE |= dict.fromkeys(["num_encoders", "num_transform_workers", "num_training_workers", "units_per_step"], 1)
ONE_MACHINE |= dict.fromkeys(["encoder_accelerator_type", "training_accelerator_type"])
SMALL_RUN = {"limit": 160, "validation_share": 0.1, "resolution": 32, "resolutions": [32], "global_batch_size": 8}
SMALL_RUN |= {"max_steps": 4, "warmup_steps": 1, "checkpoint_every": 4, "validate_every": 0, "sampling_steps": 2}
SMALL_RUN |= {"aspect_ratios": [1], "row_filter": "", "max_captions": 1, "input_format": "auto"}
SHRUNK = {**dict.fromkeys(NO_NAME), **dict.fromkeys(MODELS), **ONE_MACHINE, **SMALL_RUN}
SHRUNK |= {"encoder_model": "tiny-sd", "clip_model": "tiny-clip", "run_name": "a-job", "sections": []}


def execute(notebook, folder, **parameters):
    """The executed notebook; of `parameters` it gets those that it knows."""
    known = defaults(notebook)
    given = {name: value for name, value in parameters.items() if name in known}
    saved = folder / f"executed-{notebook}"
    papermill.execute_notebook(ROOT / notebook, saved, parameters=given, cwd=str(ROOT), progress_bar=False)
    return nbformat.read(saved, as_version=4)


@pytest.fixture(scope="module")
def pictures(no_shared_cluster, tmp_path_factory):
    """A folder of drawn pictures. Notebooks start a Ray of their own."""
    folder = tmp_path_factory.mktemp("pictures")
    captioned_shapes.write_data_set(str(folder), 160)
    return folder


@pytest.fixture(scope="module")
def latents_for(pictures, tmp_path_factory):
    """A function: a denoiser -> the folder of latents that Preprocessing.ipynb encodes for it, once."""
    made = {}

    def encode(unet_config):
        if unet_config not in made:
            folder = tmp_path_factory.mktemp("latents")
            values = {**SHRUNK, "unet_config": unet_config, "storage": str(folder), "input_uri": str(pictures)}
            execute(PREPROCESSING, folder, **values)
            assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["latents"]  # nothing is drawn
            made[unet_config] = folder / "latents"
        return made[unet_config]

    return encode


@pytest.fixture(scope="module")
def pixart(tmp_path_factory):
    """The config.json of a small PixArt-Sigma."""
    path = tmp_path_factory.mktemp("pixart") / "config.json"
    path.write_text(json.dumps(SMALL["pixart"]))
    return path


def assert_only_a_run(storage, executed):
    """What a job did: 4 steps of one run of Ray Train, started once, and no cell that only teaches."""
    assert [path.name for path in storage.iterdir()] == ["runs"]
    assert [path.name for path in (storage / "runs").iterdir()] == ["a-job"]
    steps = read_metrics(str(storage / "runs" / "a-job"), all_attempts=True)
    assert steps["step"].tolist() == [1, 2, 3, 4] and steps["attempt"].nunique() == 1
    assert list((storage / "runs" / "a-job" / "samples").iterdir())
    for cell in executed.cells:
        if cell.cell_type == "code" and section_of(cell):
            printed = "".join(output.text for output in cell.outputs)  # in pieces, where the machine is busy
            assert printed.startswith("left out: ") and printed.count("\n") == 1


RUN = ["full-sd2-256", "full-today-512"]
# Once they are shrunk. nbval runs the online notebook with the transformer of `full-today-256`.
SAME = {"8xa100": "full-sd2-256", "full-sd2-512": "full-sd2-256", "full-today-256": "full-today-512"}


def test_a_profile_whose_job_is_not_run_is_one_that_is_run_but_for_the_start_of_its_average_and_its_shift():
    """And those for one machine are the notebook's own values, which README's commands run, with others of these."""
    assert {*RUN, *SAME, "one-gpu", "laptop"} == {*PROFILES}
    values = {name: {**profile_with_commits(name), **SHRUNK, "ema_start": 0, "timestep_shift": 1} for name in PROFILES}
    known = defaults(TRAINING).keys() - {"latents_uri", "storage"}
    for other, like in SAME.items():
        assert all(values[other].get(name) == values[like].get(name) for name in known), other
    for name in known - {"unet_config", "learning_rate"}:
        own = values["one-gpu"].get(name)
        assert own is None or own in (defaults(TRAINING)[name], values["full-sd2-256"].get(name)), name


@slow
@pytest.mark.parametrize("profile", RUN)
def test_a_profiles_job_trains_from_latents_anywhere_and_does_nothing_else(profile, latents_for, pixart, tmp_path):
    """Today's profile trains with flow, and a small PixArt-Sigma in place of its PRX."""
    given = profile_with_commits(profile)
    unet_config = str(pixart) if profile == "full-today-512" else "tiny"
    latents = latents_for(unet_config)
    values = {**given, **SHRUNK, "unet_config": unet_config, "storage": str(tmp_path / "empty")}
    values["latents_uri"] = str(latents)
    if profile == "full-sd2-256":
        shutil.copytree(latents, tmp_path / "more")
        values["latents_uri"] = {str(latents): 0.8, str(tmp_path / "more"): 0.2}
    assert_only_a_run(tmp_path / "empty", execute(TRAINING, tmp_path, **values))
