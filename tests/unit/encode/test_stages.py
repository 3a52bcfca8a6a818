"""What the processes that read, transform and write load, and keep."""

import subprocess
import sys

import pyarrow as pa

from helpers.config import PreprocessingConfig
from helpers.encode import captions, stages
from helpers.latents import schema
from helpers.raw import inputs

STAGES = """
import io, sys, tempfile
import pyarrow as pa
from PIL import Image
from helpers.config import PreprocessingConfig
from helpers.encode import stages
from helpers.latents import schema
from helpers.online import encode as online
from helpers.production.data.exclusions import Exclusions
from helpers.production.decode import isolated
from helpers.raw import inputs

config = PreprocessingConfig(resolutions=[32])
photograph = io.BytesIO()
Image.new("RGB", (100, 75)).save(photograph, "JPEG")
columns = {inputs.ID: [1], inputs.CAPTION: ["a caption"], inputs.IMAGE: [photograph.getvalue()], inputs.ERROR: [None]}
options = {"decode": isolated.decoder(tempfile.mkdtemp()), "excluded": Exclusions().is_excluded}
rows = stages.transform(pa.table({**columns, inputs.SOURCE: ["a"], inputs.NOTE: [""]}), config=config, **options)
calls = pa.array([{"started": 0.0, "ended": 0.0}])
stages.write_latents(
    rows.append_column("encoder_call", calls).append_column("image_latents_32", pa.nulls(1, pa.binary(256))),
    latents_uri=tempfile.mkdtemp(),
    segment_index=0,
    columns=[schema.ColumnSpec("image_latents_32", (2, 4, 4, 4))],
)
print({"torch", "diffusers"} & sys.modules.keys())
"""


def test_stages_around_the_encoder_load_no_pytorch():
    """Ray keeps their processes, and each would hold 230 MiB for nothing."""
    done = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr


def test_a_rejected_caption_is_not_tokenized(tmp_path, monkeypatch):
    """Tokenizing 64 KiB takes 50 ms and much memory."""
    seen, clean = [], captions.clean
    monkeypatch.setattr(captions, "clean", lambda text, how: seen.append(text) or clean(text, how))
    rows = {inputs.ID: [1], inputs.CAPTION: ["long " * 2**14], inputs.IMAGE: [b"x"], inputs.ERROR: [""]}
    table = pa.table({**rows, inputs.SOURCE: ["a.parquet"], inputs.NOTE: [""]})
    (row,) = stages.transform(table, config=PreprocessingConfig(storage=str(tmp_path))).to_pylist()
    assert row[schema.REASON] == "caption of more than 65536 bytes" and seen == [""]
