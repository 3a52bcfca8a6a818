"""The hand-written cells, without this project: a script of them alone encodes, trains, resumes and draws."""

import ast
import copy
import re
import types

import numpy as np
import pytest
import ray.train.torch
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from helpers.lesson import captioned_shapes
from tests import by_hand, pipelines


@pytest.mark.slow
def test_the_hand_written_cells_encode_train_resume_and_draw(tmp_path):
    """After the lines that the text names, in a folder with nothing but raw rows. Their sampler is diffusers'."""
    captioned_shapes.write_data_set(tmp_path / "scratch" / "raw", 200, spoilt_share=0.05)
    printed = by_hand.run(
        tmp_path,
        changes={"CrashingLoss(v_loss, at=15)": "CrashingLoss(v_loss, at=3)"},
        **{"max_steps": 6, "checkpoint_every": 2, "stop_at": 4},
    )
    assert "200 rows read, 190 written, 10 dropped" in printed
    assert re.findall(r"'step': (\d+).*'began_at': (\d+)", printed) == [("4", "2")]
    assert "the same rows at 120 of 120 steps" in printed
    assert int(re.search(r"largest difference of a pixel: (\d+) of 255", printed)[1]) <= 2
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    (picture,) = pipeline("a red circle", height=64, width=64, num_inference_steps=2, output_type="np").images
    assert picture.shape == (64, 64, 3) and np.isfinite(picture).all()


def test_the_short_form_of_the_online_notebook_trains_what_trainings_loop_draws(monkeypatch, one_thread):
    """Its first loss is that of `epsilon_loss`, on latents and embeddings of which some are the empty caption's."""
    torch.manual_seed(0)
    np.random.seed(0)
    found = by_hand.run_until(pipelines.ONLINE, "train_func")
    encode = found["Encoder"](lambda: by_hand.MODELS)
    pixels = np.random.randint(0, 256, (48, 64, 64, 3), dtype=np.uint8)
    batch, empty = (encode({"caption": np.full(len(pixels), one), "pixels": pixels}) for one in ("a red circle", ""))
    dropped = [np.allclose(one, empty["text"][0], atol=1e-5) for one in batch["text"]]
    assert 1 <= sum(dropped) <= 12
    batch, first = {name: torch.tensor(values) for name, values in batch.items()}, []

    def prepare_model(unet):
        first.append(copy.deepcopy(unet))
        torch.manual_seed(1)
        return unet

    shard = types.SimpleNamespace(iter_torch_batches=lambda batch_size: [batch, batch])
    monkeypatch.setattr(ray.train, "get_dataset_shard", {"train": shard}.get)
    monkeypatch.setattr(ray.train.torch, "prepare_model", prepare_model)
    losses, weights = found["train_func"](UNet2DConditionModel.load_config(by_hand.MODELS, subfolder="unet"))
    torch.manual_seed(1)
    expected = pipelines.from_notebook(pipelines.TRAINING, "epsilon_loss")(first[0], batch["latents"], batch["text"])
    assert len(losses) == 2 and losses[0] == pytest.approx(expected.item(), rel=1e-5)
    before = first[0].state_dict()
    assert weights.keys() == before.keys() and {type(values) for values in weights.values()} == {np.ndarray}
    assert any(not np.array_equal(values, before[name].numpy()) for name, values in weights.items())


@pytest.mark.slow
def test_the_short_form_of_the_online_notebook_needs_only_what_its_text_names(tmp_path):
    """Ray, a folder of raw rows, one for results, and the models: with these, its cells encode and train elsewhere."""
    captioned_shapes.write_data_set(tmp_path / "scratch" / "raw", 70)
    printed = by_hand.execute(tmp_path, by_hand.short_form())
    losses = ast.literal_eval(re.search(r"^losses: (.*)$", printed, re.MULTILINE)[1])
    assert len(losses) == 3 and losses[0] == pytest.approx(1, abs=0.3)
