"""Images a second of a run at 64 pixels, of whose data 62 % is smaller, against data of which every row is as large.

    python -m tests.benchmarks.small_rows [--steps 150] [--rounds 3] [--rows 20000]

62 % of MosaicML's pictures are smaller than the second phase's 512 pixels. Random latents, the tiny U-Net, one worker
with all cores. The two take turns; the ratio of their medians is printed. The goal: 0.97, and no masked row. Wants an
otherwise idle machine.
"""

import argparse
import statistics
import tempfile

from helpers.config import TrainingConfig
from helpers.runtime import metrics_log, session
from tests.benchmarks import made_up, record
from tests.pipelines import fit

SHAPES = {"image_latents_32": (2, 4, 4, 4), "image_latents_64": (2, 4, 8, 8), "caption_embeddings": (24, 128)}
SMALLER = {"every row is as large": 0.0, "62 % are smaller": 0.62}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000)
    arguments = parser.parse_args()
    session.connect()
    rates = {name: [] for name in SMALLER}
    with tempfile.TemporaryDirectory() as folder:
        for number, share in enumerate(SMALLER.values()):
            made_up.write_latents(f"{folder}/{number}", arguments.rows, SHAPES, 1024, share)
        for turn in range(arguments.rounds):
            for number, name in enumerate(SMALLER):
                config = TrainingConfig(
                    storage=folder,
                    latents_uri=f"{folder}/{number}",
                    run_name=f"data-{number}-round-{turn}",
                    max_steps=arguments.steps,
                    validate_every=0,
                    checkpoint_every=arguments.steps,
                )
                fit(config)
                metrics = metrics_log.read_metrics(config.run_uri)
                assert metrics["samples_seen"].iloc[-1] == arguments.steps * config.global_batch_size
                assert not metrics["masked_rows"].any()
                rates[name].append(metrics_log.throughput(metrics)[0])
            said = ", ".join(f"{name}: {found[-1]:.0f}" for name, found in rates.items())
            print(f"round {turn + 1}: {said} images/s", flush=True)
    large, small = (statistics.median(found) for found in rates.values())
    print(f"{small:.0f} of {large:.0f} images/s, ratio {small / large:.3f}")
    record.write(
        "small_rows",
        {"training where 62 % of the rows are smaller": f"{small:.0f} of {large:.0f} images/s: {small / large:.2f}"},
        images_per_second=rates,
        ratio=small / large,
    )


if __name__ == "__main__":
    main()
