"""Jobs, as the README's commands start them: no sections, a profile, one's own images; shrunk by parameters alone."""

import json

import nbformat
import papermill
import pytest

from helpers.lesson import captioned_shapes
from helpers.train.metrics import read_metrics
from tests.execute_notebooks import ROOT
from tests.faults import slow
from tests.pipelines import PREPROCESSING, TRAINING, defaults, profile_with_commits

pytestmark = [slow, pytest.mark.usefixtures("no_shared_cluster", "preloaded_kernels")]
ONE_MACHINE = {"ray_address": "local", "use_gpu": False, "gpus_per_encoder": 0, "compile_unet": False}
ONE_MACHINE |= dict.fromkeys(["num_encoders", "num_transform_workers", "num_training_workers", "units_per_step"], 1)
ONE_MACHINE |= dict.fromkeys(["encoder_accelerator_type", "training_accelerator_type"])
SMALL = {"encoder_model": "tiny-sd", "unet_config": "tiny", "run_name": "a-job", "input_format": "auto"}
SMALL |= {"resolution": 32, "resolutions": [32], "row_filter": "", "validation_share": 0.1, "global_batch_size": 8}
SMALL |= {"micro_batch_size": None, "max_steps": 4, "warmup_steps": 1, "checkpoint_every": 4}


def execute(notebook, saved, **parameters):
    """The executed notebook, which is saved in any case; of `parameters` it gets those that it knows."""
    given = {name: value for name, value in parameters.items() if name in defaults(notebook)}
    papermill.execute_notebook(ROOT / notebook, saved, given, cwd=str(ROOT), progress_bar=False)
    return nbformat.read(saved, as_version=4)


def test_a_profiles_job_trains_on_ones_own_images_and_does_nothing_else(tmp_path):
    images, storage = tmp_path / "images", tmp_path / "storage"
    images.mkdir()
    for number in range(60):
        image, caption = captioned_shapes.draw_sample(number)
        image.save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(caption)
    values = {**profile_with_commits("full-sd2-256"), **ONE_MACHINE, **SMALL}
    values |= {"storage": str(storage), "input_uri": str(images), "sections": []}
    execute(PREPROCESSING, tmp_path / "encoded.ipynb", **values)
    trained = execute(TRAINING, tmp_path / "trained.ipynb", **values)
    assert sorted(path.name for path in storage.iterdir()) == ["latents", "runs"]
    manifest = json.loads((storage / "latents" / "manifest.json").read_text())
    assert manifest["read"] == manifest["written"] == 60
    assert [path.name for path in (storage / "runs").iterdir()] == ["a-job"]
    steps = read_metrics(str(storage / "runs" / "a-job"), all_attempts=True)
    assert steps["step"].tolist() == [1, 2, 3, 4] and steps["attempt"].nunique() == 1
    assert list((storage / "runs" / "a-job" / "samples").iterdir())
    for cell in trained.cells:
        if cell.source.startswith("# section: "):
            assert "".join(output.text for output in cell.outputs).startswith("left out: ")


def test_a_job_without_latents_ends_with_one_sentence(tmp_path):
    """The executed notebook is saved with the error, and with its traceback folded."""
    with pytest.raises(papermill.PapermillExecutionError) as raised:
        execute(TRAINING, tmp_path / "executed.ipynb", storage=str(tmp_path / "nothing"), sections=[])
    assert "papermill Preprocessing.ipynb" in str(raised.value) and len(str(raised.value).strip().splitlines()) < 8
    assert "<details><summary>Traceback</summary>" in (tmp_path / "executed.ipynb").read_text()
