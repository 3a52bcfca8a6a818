"""What evaluating checkpoints costs the training, where the trainers use every GPU and evaluate themselves.

    python -m tests.benchmarks.validation_cost [--rows 1000] [--evaluations 3]

This process is one trainer, with the tiny models, whose batch, held-out rows, prompts and steps between evaluations are
those of the profile of phase 2. Measured are the pauses of `OnWorkers`, as shares of the time between two evaluations
(goal: under 2 %), and what each reads and loads. Many trainers share rows and prompts as they share the batch, so the
share stays, but for gathering sharded weights and waiting for the slowest.
"""

import collections
import tempfile
import time

import diffusers
import pyarrow as pa
import pyarrow.parquet as pq
import transformers

from helpers import storage
from helpers.config.notebook import TrainingConfig
from helpers.evaluation import at_checkpoints
from helpers.latents import held_out
from helpers.latents.manifest import read_manifest
from helpers.lesson import full_run
from helpers.runtime import session
from helpers.train.step import TrainStep, Unit
from tests.benchmarks import record
from tests.pipelines import draw_and_encode

NAMES = ("manifest.json", "files.json", "from_pretrained")


def count_calls(counted):
    """Count in `counted` the JSON files that this process reads, by name, and its `from_pretrained` calls."""
    read, kinds = storage.read_json, (diffusers.ModelMixin, transformers.PreTrainedModel)
    storage.read_json = lambda uri: counted.update([storage.name(uri)]) or read(uri)
    for kind in (*kinds, transformers.PreTrainedTokenizerBase):

        def from_pretrained(cls, *arguments, inner=kind.from_pretrained.__func__, **options):
            counted["from_pretrained"] += 1
            return inner(cls, *arguments, **options)

        kind.from_pretrained = classmethod(from_pretrained)


def main():
    given, counted, found = record.options(__doc__, rows=1000, evaluations=3), collections.Counter(), []
    profile = full_run.read_profile("full-sd2-512")
    sizes = {name: profile[name] for name in ("global_batch_size", "validate_every", "checkpoint_every")}
    with tempfile.TemporaryDirectory() as folder:
        session.connect("local")
        draw_and_encode(folder, given.rows)
        config = TrainingConfig(storage=folder, resolution=32, micro_batch_size=64, **sizes)
        manifest, rows = read_manifest(config.latents_uri), held_out.first(config, held_out.NUM_ROWS)
        rows = pa.concat_tables([rows] * (config.global_batch_size // len(rows) + 1))
        uri = storage.join(config.run_uri, held_out.FOLDER, "rows.parquet")
        storage.write_text(uri, "")
        pq.write_table(rows[: held_out.NUM_ROWS], uri)
        trainer, batch = TrainStep(config, manifest), rows[: config.global_batch_size].combine_chunks()
        started = time.perf_counter()
        trainer.step(0, [Unit.from_arrow(batch, manifest, manifest.latents(32), 0)])
        between = config.validate_every * (time.perf_counter() - started)
        count_calls(counted)
        on_workers = at_checkpoints.OnWorkers(rows["caption"].to_pylist()[: at_checkpoints.NUM_PROMPTS])
        for number in range(1, given.evaluations + 1):
            counted.clear()
            started = time.perf_counter()
            with trainer.averaged() as denoiser:
                on_workers(denoiser, config, number * config.validate_every)
            pause = time.perf_counter() - started
            found.append({"pause": pause, "share": pause / between, **{name: counted[name] for name in NAMES}})
            print(found[-1], flush=True)
    last = ", ".join(f"{name} {found[0][name]} and {found[-1][name]} times" for name in NAMES)
    said = f"{found[0]['share']:.3%} and {found[-1]['share']:.3%} of the time (goal 2 %); {last}"
    what = f"pause of the trainers for the first and a later evaluation, every {config.validate_every:,} steps"
    record.write("validation_cost", {what: said}, evaluations=found, seconds_between=between)


if __name__ == "__main__":
    main()
