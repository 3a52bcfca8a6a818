"""Images a second of a run at 64 pixels, of whose data 62 % is smaller, against data of which every row is as large.

    python -m tests.benchmarks.small_rows [--steps 150] [--rounds 3] [--rows 20000]

62 % of MosaicML's pictures are smaller than the second phase's 512 pixels. Random latents, the tiny U-Net, one worker
with all cores. The two take turns; the ratio of their medians is printed. The goal: 0.97, and no masked row. Wants an
otherwise idle machine.
"""

import functools
import tempfile

from helpers.config.notebook import TrainingConfig
from helpers.runtime import session
from helpers.train.metrics import read_metrics
from helpers.train.profiling import throughput
from tests.benchmarks import made_up, record
from tests.pipelines import fit

SHAPES = {"image_latents_32": (2, 4, 4, 4), "image_latents_64": (2, 4, 8, 8), "caption_embeddings": (24, 128)}
SMALLER = {"large": 0.0, "small": 0.62}


def rate(number, *, storage, name, steps):
    """Images a second of a run on the latents `name`."""
    config = TrainingConfig(
        storage=storage,
        latents_uri=f"{storage}/{name}",
        run_name=f"{name}-{number}",
        max_steps=steps,
        validate_every=0,
        checkpoint_every=steps,
    )
    fit(config)
    metrics = read_metrics(config.run_uri)
    assert metrics["samples_seen"].iloc[-1] == steps * config.global_batch_size
    assert not metrics["masked_rows"].any()
    return throughput(metrics)[0]


def main():
    given = record.options(__doc__, steps=150, rounds=3, rows=20_000)
    session.connect()
    with tempfile.TemporaryDirectory() as folder:
        measures = {}
        for name, share in SMALLER.items():
            made_up.write_latents(f"{folder}/{name}", given.rows, SHAPES, 1024, share)
            measures[name] = functools.partial(rate, storage=folder, name=name, steps=given.steps)
        rates = record.in_turns(given.rounds, measures)
    ratio, said = record.compare(rates, "small", "large")
    what = "training where 62 % of the rows are smaller"
    record.write("small_rows", {what: said}, images_per_second=rates, ratio=ratio)


if __name__ == "__main__":
    main()
