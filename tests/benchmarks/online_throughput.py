"""Training throughput over the number of encoders against the planner's prediction, with both at a fixed speed.

    python -m tests.benchmarks.online_throughput [--encoders 1 2 4 8 9 10 11 12 16] [--seconds 40]

Encoders and trainer are played: each waits as long as its service time says, so that two cores can be sixteen
encoders. All else is real: the plan over Parquet files, Ray Data's actor pool, Ray Train's worker and its data
feed. Offline, the same trainer reads the latents that the encoders would have made. Encoders begin when the trainer
does, so that nothing is made ahead while it starts. Rates are those of the second half of the steps, when all
encoders have come up, but for the last eight: those that the worker had prefetched, behind which nothing is waited
for any more.
"""

import functools
import os
import sys
import tempfile
import time

from ray import cloudpickle
from ray.data import ActorPoolStrategy

from helpers import cluster
from helpers.latents.read import latents_dataset
from helpers.lesson import estimates
from helpers.train import metrics
from tests.benchmarks import made_up, record
from tests.pipelines import fit, short_run

BATCH, TRAINER_SECONDS, ENCODER_SECONDS = 64, 0.1, 1.0  # one trainer is as fast as ten encoders
# Workers cannot import this module: what they need of it travels with the function that they run.
for module in (sys.modules[__name__], made_up):
    cloudpickle.register_pickle_by_value(module)


class PlayedEncoder:
    """Takes `ENCODER_SECONDS` for a global batch, whatever is in it, from when the file `started` is there."""

    def __init__(self, started):
        self.started = started

    def __call__(self, rows):
        while not os.path.exists(self.started):
            time.sleep(0.05)
        time.sleep(ENCODER_SECONDS * len(rows) / BATCH)
        return rows


def online_stream(plan, first_step, end_step, *, num_encoders, started):
    """Planned rows through `num_encoders` played encoders; one CPU task reads."""
    return latents_dataset(plan, first_step, end_step).map_batches(
        PlayedEncoder,
        fn_constructor_args=[started],
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=num_encoders),
        num_cpus=0.01,
    )


def loop(started, config, **options):
    open(started, "w").close()
    made_up.train_in(TRAINER_SECONDS, config, **options)


def measure(uri, name, num_steps, stream=None):
    """(images a second, share of the time that the trainer waits for data)"""
    length = {"max_steps": num_steps, "checkpoint_every": num_steps}
    size = {"resolution": 32, "global_batch_size": BATCH, "units_per_step": 1, "validation_share": 0}
    config = short_run(uri, name, latents_uri=uri, **length, **size)
    fit(config, loop=functools.partial(loop, f"{uri}/{name}"), stream=stream)
    return metrics.throughput(metrics.read_metrics(config.run_uri)[:-8], skip=num_steps // 2)


def main():
    given = record.options(__doc__, encoders=[1, 2, 4, 8, 9, 10, 11, 12, 16], seconds=40.0)
    cluster.connect(num_cpus=8)
    trainer_rate, encoder_rate, rows = BATCH / TRAINER_SECONDS, BATCH / ENCODER_SECONDS, []
    with tempfile.TemporaryDirectory() as uri:
        # So wide that each step's rows travel by themselves, as they do at the full size, and not eight steps together.
        shapes = {"image_latents_32": (2, 4, 4, 4), "caption_embeddings": (140, 128)}
        job = {"online": {"encoder": "played"}}  # blocks are as small as those that encoders get
        made_up.write_latents(uri, 4_000, shapes, rows_per_file=1_000, job=job)
        ceiling, _ = measure(uri, "offline", int(given.seconds / TRAINER_SECONDS))
        for count in given.encoders:
            expected = estimates.online_throughput(count, encoder_rate, trainer_rate)
            name = f"online-{count}"
            stream = functools.partial(online_stream, num_encoders=count, started=f"{uri}/{name}")
            rate, waits = measure(uri, name, max(24, int(given.seconds * expected / BATCH)), stream)
            rows.append({"encoders": count, "expected": expected, "measured": rate, "trainer waits": waits})
    rates = [row["measured"] for row in rows]
    record.write(
        "online_throughput",
        {
            f"online with {', '.join(map(str, given.encoders))} simulated encoders of {encoder_rate:.0f}, a trainer of "
            f"{trainer_rate:.0f} images/s, over the planner's prediction": ", ".join(
                f"{row['measured'] / row['expected']:.2f}" for row in rows
            ),
            "the same with the most encoders against stored latents": f"{rates[-1]:.0f} of {ceiling:.0f} images/s: "
            f"{rates[-1] / ceiling:.2f}",
        },
        runs=rows,
    )


if __name__ == "__main__":
    main()
