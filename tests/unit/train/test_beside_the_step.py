"""What runs beside a step: the next step's tensors, and the metrics' writer."""

import threading
import types

import pyarrow as pa
import pytest
import ray.train

from helpers.latents.manifest import DataSets
from helpers.latents.read import UNIT
from helpers.train import metrics
from helpers.train.source import StepSource
from helpers.train.step import Unit
from tests.steps import BATCH


def test_the_next_steps_tensors_are_made_in_a_thread(monkeypatch, recipe, manifest, build_latents):
    """While a step is trained on; but its rejects are counted when it is begun, as a checkpoint before it needs."""
    blocks = [build_latents(BATCH).append_column(UNIT, pa.array([number] * BATCH)) for number in range(3)]
    shard = types.SimpleNamespace(iter_batches=lambda **options: iter(blocks))
    monkeypatch.setattr(ray.train, "get_dataset_shard", lambda name: shard)
    worker = types.SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(ray.train, "get_context", lambda: worker)
    made, threads, rejected, from_arrow = [threading.Event() for _ in blocks], [], [], Unit.from_arrow

    def record(table, *arguments):
        unit = from_arrow(table, *arguments)
        threads.append(threading.current_thread())
        made[table[UNIT][0].as_py()].set()
        return unit

    monkeypatch.setattr(Unit, "from_arrow", record)
    config = recipe(units_per_step=1, max_steps=3)
    source = StepSource(config)
    source.data = DataSets({config.latents_uri: manifest}, config.proportions)
    monkeypatch.setattr(source, "note_rejects", lambda rows: rejected.append(rows[UNIT][0].as_py()))
    for step, (mine, _) in enumerate(source.steps(0)):
        assert len(mine) == 1 and rejected == list(range(step + 1))
        assert step == 2 or made[step + 1].wait(60)
    assert step == 2 and threading.main_thread() not in threads


def test_metrics_that_cannot_be_written_stop_the_worker(tmp_path, monkeypatch):
    log = metrics.StepLog(str(tmp_path), BATCH)

    def refuse(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(log.file, "write", refuse)
    log.write(1, {"loss": 1.0}, [])
    with pytest.raises(OSError, match="the disk is full"):
        log.write(2, {"loss": 1.0}, [])
