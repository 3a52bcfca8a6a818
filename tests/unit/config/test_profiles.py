"""The notebooks' parameters cells, the profiles that papermill reads (`-f`), the full run's table and command."""

import ast
import dataclasses
import json
import pathlib
import shlex
import types

import pytest
import yaml

from helpers import storage
from helpers.config.notebook import OnlineConfig, PreprocessingConfig, TrainingConfig
from helpers.lesson import estimates, full_run, published_results
from helpers.model import denoisers
from helpers.model.unet import load_unet_config
from helpers.runtime import progress
from tests.pipelines import ONLINE, PREPROCESSING, TRAINING

ROOT = pathlib.Path(__file__).parents[3]
CONFIGS = {PREPROCESSING: [PreprocessingConfig], TRAINING: [TrainingConfig], ONLINE: [OnlineConfig, TrainingConfig]}
LESSONS = ["helpers/lesson/Evaluation.ipynb", "helpers/lesson/Scaling.ipynb"]
PROFILES = ["8xa100", "full-sd2-256", "full-sd2-512", "full-today-256", "full-today-512", "laptop", "one-gpu"]


def notebook_parameters(notebook):
    """{parameter: (its default, the comment beside it)} of a notebook's parameters cell."""
    cells = json.loads((ROOT / notebook).read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    lines, found = source.splitlines(), {}
    for statement in ast.parse(source).body:
        comment = lines[statement.lineno - 1][statement.end_col_offset :].removeprefix("  # ")
        found[statement.targets[0].id] = ast.literal_eval(statement.value), comment
    return found


PARAMETERS = {notebook: notebook_parameters(notebook) for notebook in CONFIGS}
DEFAULTS = {notebook: {name: one[0] for name, one in found.items()} for notebook, found in PARAMETERS.items()}


@pytest.mark.parametrize("notebook", CONFIGS)
def test_the_comment_beside_a_parameter_is_its_text(notebook):
    """Training and preprocessing have all parameters of their config."""
    texts = {field.name: field.metadata["text"] for config in CONFIGS[notebook] for field in dataclasses.fields(config)}
    comments = {name: comment for name, (_, comment) in PARAMETERS[notebook].items()}
    assert comments.pop("sections") and comments.pop("ray_address") == PARAMETERS[TRAINING]["ray_address"][1]
    assert comments.items() <= texts.items()
    assert notebook == ONLINE or comments == texts


def test_preprocessing_has_the_same_defaults_in_code():
    assert PreprocessingConfig.from_parameters(DEFAULTS[PREPROCESSING]) == PreprocessingConfig(limit=6000)
    online = OnlineConfig.from_parameters({**DEFAULTS[ONLINE], "resolutions": [64]})
    assert online == OnlineConfig(limit=6000, resolutions=[64])


# ---- profiles


def applied(name, notebook):
    """The globals of a notebook after papermill's cell."""
    return {**DEFAULTS[notebook], **full_run.read_profile(name)}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_passes_the_checks_of_all_notebooks(name):
    assert set(full_run.read_profile(name)) <= set().union(*DEFAULTS.values())
    assert PreprocessingConfig.from_parameters(applied(name, PREPROCESSING))
    training = TrainingConfig.from_parameters(applied(name, TRAINING))
    assert training.resolution in full_run.read_profile(name)["resolutions"]
    online = {**applied(name, ONLINE), "resolutions": [training.resolution]}
    assert TrainingConfig.from_parameters(online) and OnlineConfig.from_parameters(online)


def test_the_laptops_profile_is_the_notebooks_defaults():
    for defaults in DEFAULTS.values():
        for name, value in full_run.read_profile("laptop").items():
            assert name == "sections" or defaults.get(name, value) == value, name


def test_an_unknown_profile_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        full_run.read_profile("cloud")
    assert str(error.value) == f"profile='cloud' is unknown: choose one of {str(PROFILES)[1:-1]}."


# ---- names that papermill was given


@pytest.mark.parametrize(
    ("name", "hint"), [("num_enocders", "did you mean num_encoders?"), ("zzz", "check its spelling.")]
)
def test_an_unknown_parameter_is_refused_by_the_first_cell(name, hint):
    cells = ["", "storage = 'storage'  # the parameters cell", f"# Parameters\nrun_name = 'a'\n{name} = 3\n"]
    with pytest.raises(ValueError) as error:
        PreprocessingConfig.from_parameters({"In": cells})
    assert str(error.value) == f"{name} is not a parameter of any notebook: {hint}"


def test_parameters_of_other_notebooks_and_own_variables_pass():
    papermills = "# Parameters\nnum_encoders = 3\nsections = []\nPAPERMILL_OUTPUT_PATH = 'o.ipynb'\n"
    cells = ["", papermills, "mine = 3", "%magic"]
    assert TrainingConfig.from_parameters({"In": cells, "run_name": "a"}).run_name == "a"


def test_the_notebooks_check_names_before_they_start_ray():
    for notebook in (PREPROCESSING, TRAINING, ONLINE):
        cells = json.loads((ROOT / notebook).read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        checks = next(number for number, source in enumerate(code) if ".from_parameters(" in source)
        assert checks < next(number for number, source in enumerate(code) if "session.connect(" in source)
        assert "globals()" in code[checks]


# ---- the full run


def test_the_full_run_says_why_each_value_differs():
    for full in full_run.PARAMETERS.values():
        assert set(full) <= {name for whys in full_run._WHY.values() for name in whys}


@pytest.mark.parametrize(
    ("resolution", "phase"), list(zip(full_run.PARAMETERS, published_results.PHASES[:2].itertuples(), strict=True))
)
def test_the_full_run_is_the_published_one(resolution, phase):
    full = full_run.PARAMETERS[resolution]
    assert full["resolution"] == phase.resolution
    assert full["max_steps"] * full["global_batch_size"] == phase.num_samples
    assert full["num_training_workers"] == 32


@pytest.mark.parametrize("recipe", ["sd2", "today"])
def test_both_phases_are_encoded_alike_and_trained_as_one_run(recipe):
    one, two = (full_run.read_profile(f"full-{recipe}-{resolution}") for resolution in (256, 512))
    by_phase = {"resolution", "num_encoders", "num_transform_workers", "micro_batch_size", "max_steps", "ema_start"}
    by_phase |= {"checkpoint_every", "validate_every", "run_name", "timestep_shift"}
    assert {name for name in two if one.get(name) != two[name]} <= by_phase | {"init_from"}
    assert two["init_from"] == one["run_name"]


@pytest.mark.parametrize("resolution", [256, 512])
def test_todays_transformer_goes_with_the_profiles_encoders_and_shapes(resolution):
    """What needs no weights; the rest is checked when the job starts."""
    profile = full_run.read_profile(f"full-today-{resolution}")
    unet, recipe = load_unet_config(profile["unet_config"]), estimates.RECIPES["today"]
    adapter = denoisers.ADAPTERS[unet["_class_name"]]
    assert unet["in_channels"] == recipe.channels and unet[adapter.text_width] == recipe.text.hidden_size
    assert recipe.text_class.__name__ in adapter.text_encoders and denoisers.KL in adapter.vaes and adapter.shifts
    assert adapter.masks_padding and adapter.text_cleaning == profile["text_cleaning"]
    assert profile["sampler"] in adapter.samplers
    shapes = PreprocessingConfig.from_parameters(applied(f"full-today-{resolution}", PREPROCESSING)).shapes
    sides = [side for size in shapes.values() for shape in size for side in shape]
    assert not [side for side in sides if side % (8 * adapter.divisor(unet))] and len(sides) == 20
    assert all(profile[f"{part}_revision"] for part in ("encoder", "vae"))


def test_the_comparison_shows_only_what_differs_in_groups():
    mine = {"resolution": 64, "global_batch_size": 64, "seed": 7, "precision": "bf16", "limit": 6000}
    table = full_run.compare_parameters({**mine, "num_encoders": 1})
    names = ["limit", "resolution", "num_encoders", "global_batch_size"]
    assert table.index.get_level_values("parameter").tolist() == names
    assert table.loc[("data", "resolution")].tolist()[:3] == [64, 256, 512]
    assert table.loc[("machines", "num_encoders")].tolist()[:3] == [1, 58, 52]
    assert full_run.compare_parameters({"seed": 7}).empty


def test_the_comparison_is_shown_whole_in_a_notebook():
    table = full_run.compare_parameters(dict.fromkeys(set().union(*DEFAULTS.values())))
    assert len(table) > 35 and "…" not in table.to_html() and "..." not in table.to_html()


def test_the_command_is_the_profile_and_the_places_to_change(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = full_run.command("Preprocessing.ipynb", DEFAULTS[PREPROCESSING], 512, "my out.ipynb")
    assert [line.strip(" \\") for line in command.splitlines()] == [
        "papermill Preprocessing.ipynb 'my out.ipynb' --inject-output-path",
        "-f helpers/profiles/full-sd2-512.yaml",
        "-p input_uri s3://your-bucket/laion2B-en",
        "-p storage s3://your-bucket/sd2",
    ]
    assert "input_uri" not in full_run.command("Training.ipynb", DEFAULTS[TRAINING], 256, "out.ipynb")
    found = shlex.split(command.replace("\\\n", " "))
    assert yaml.safe_load(pathlib.Path(found[5]).read_text()) == full_run.PARAMETERS[512]


# ---- the executed notebook


def test_the_executed_notebook_is_kept_with_the_run(tmp_path, monkeypatch):
    written, at_exit = tmp_path / "executed.ipynb", []
    set_by_papermill = {"PAPERMILL_OUTPUT_PATH": str(written)}
    written.write_text("the notebook so far")
    monkeypatch.setattr(progress.atexit, "register", at_exit.append)
    monkeypatch.setattr(progress, "get_ipython", lambda: None)
    progress.keep_executed_notebook(str(tmp_path / "run"))
    assert not at_exit
    monkeypatch.setattr(progress, "get_ipython", lambda: types.SimpleNamespace(user_ns=set_by_papermill))
    progress.keep_executed_notebook(str(tmp_path / "run"))
    written.write_text("the whole notebook")
    at_exit[0]()
    assert storage.read_text(str(tmp_path / "run" / "executed.ipynb")) == "the whole notebook"


@pytest.mark.parametrize("notebook", [TRAINING, ONLINE, *LESSONS])
def test_what_a_notebook_runs_on_a_gpu_is_given_the_runs_config(notebook):
    """By which `session.run_on_device` knows the kind of GPU that the run asks for."""
    for cell in json.loads((ROOT / notebook).read_text())["cells"]:
        if cell["cell_type"] == "code":
            calls = [node for node in ast.walk(ast.parse("".join(cell["source"]))) if isinstance(node, ast.Call)]
            for call in calls:
                given = [ast.unparse(node) for node in (call.func, *call.args)]  # also by `partial`
                if "session.run_on_device" in given:
                    _, function, _, first, *_ = [*given[given.index("session.run_on_device") :], ""]
                    assert first in ("config", "config.to_dict()", "short", "one", "recipe"), function


@pytest.mark.parametrize("notebook", [PREPROCESSING, TRAINING, ONLINE])
def test_the_head_of_a_full_run_builds_no_unet(notebook):
    """Cells hand functions that do to a GPU's machine, by `session.run_on_device`."""
    builders = {"TrainStep", "build_unet", "build_model", "load_unet", "build_pipeline", "export_checkpoint"}
    builders |= {"load_pipeline", "StableDiffusionPipeline"}

    def called_here(node):
        """The names that a cell calls itself, not in a function that it defines."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            return set()
        names = {name for child in ast.iter_child_nodes(node) for name in called_here(child)}
        return names | (set(ast.unparse(node.func).split(".")) if isinstance(node, ast.Call) else set())

    for cell in json.loads((ROOT / notebook).read_text())["cells"]:
        if cell["cell_type"] == "code" and "by-hand" not in cell["metadata"].get("tags", []):  # those use the tiny one
            assert not called_here(ast.parse("".join(cell["source"]))) & builders
