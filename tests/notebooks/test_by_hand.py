"""The hand-written cells, without this project: a script of them alone encodes, trains, resumes and draws."""

import re

import numpy as np
import pytest
from diffusers import StableDiffusionPipeline

from helpers.lesson import captioned_shapes
from tests import by_hand


def test_the_script_is_short_and_needs_nothing_of_helpers(tmp_path):
    script, cells = by_hand.assemble(tmp_path), by_hand.cells()
    assert sum(bool(line.strip()) for cell in cells for line in cell.splitlines()) <= 200
    assert "import helpers" not in script and "from helpers" not in script
    assert max(len(cell.splitlines()) for cell in cells) <= 30


@pytest.mark.slow
def test_the_hand_written_cells_encode_train_resume_and_draw(tmp_path):
    """And their sampler draws what diffusers' draws. Sharded, in bf16; in the notebook nbval runs them with DDP."""
    captioned_shapes.write_data_set(tmp_path / "raw", 200, spoilt_share=0.05)
    printed = by_hand.run(
        tmp_path, batch_size=16, checkpoint_every=2, stop_at=4, max_steps=6, strategy="fsdp", bf16=True
    )
    assert "200 rows read, 190 written, 10 dropped" in printed
    assert [line for line in printed.splitlines() if line.startswith("{'step'")] == ["{'step': 4}", "{'step': 6}"]
    assert int(re.search(r"largest difference of a pixel: (\d+) of 255", printed)[1]) <= 2
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    (picture,) = pipeline("a red circle", height=64, width=64, num_inference_steps=2, output_type="np").images
    assert picture.shape == (64, 64, 3) and np.isfinite(picture).all()
