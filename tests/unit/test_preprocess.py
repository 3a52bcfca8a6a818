"""What the processes that read, transform and write load."""

import subprocess
import sys

STAGES = """
import sys, tempfile
import pyarrow as pa
from helpers import online, preprocess, resumable_job, schema
from helpers.config import PreprocessingConfig
from helpers.data_io import inputs

config = PreprocessingConfig(resolutions=[32])
columns = {inputs.ID: [1], inputs.CAPTION: ["a caption"], inputs.IMAGE: [b"broken"], inputs.ERROR: [None]}
rows = preprocess.transform(pa.table({**columns, inputs.SOURCE: ["a"]}), config=config)
calls = pa.array([{"started": 0.0, "ended": 0.0}])
segment = resumable_job.Segment(0, ["a"], 1)
preprocess.write_latents(
    rows.append_column("encoder_call", calls),
    latents_uri=tempfile.mkdtemp(),
    segment=segment,
    columns=[schema.ColumnSpec("image_latents_32", (2, 4, 4, 4))],
    id_type=pa.int64(),
)
print({"torch", "diffusers"} & sys.modules.keys())
"""


def test_stages_around_the_encoder_load_no_pytorch():
    """Ray keeps their processes, and each would hold 230 MiB for nothing."""
    done = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr
