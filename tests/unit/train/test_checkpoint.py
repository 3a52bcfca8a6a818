"""Checkpoints of one process: a resumed run is bitwise the run that was not interrupted."""

import threading

import pytest

from helpers.train import checkpoint, run_folder
from tests.steps import MIDDLE, everything, same, save, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ema_start", [3, 4])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, one, build_step, rows, ema_start):
    state = build_step(ema_start=ema_start)
    straight = train(state, rows, 0, MIDDLE)
    save(tmp_path, state, MIDDLE)
    straight += train(state, rows, MIDDLE)
    assert straight == one[0]  # neither saving nor the EMA changes a run
    restored = build_step(ema_start=ema_start, checkpoint_every=3)
    assert checkpoint.load(tmp_path, restored) == run_folder.step_of(tmp_path) == MIDDLE
    assert train(restored, rows, MIDDLE) == straight[MIDDLE:]
    assert same(everything(state), everything(restored))


@pytest.mark.parametrize("ema_start", [0, 100])
def test_two_async_saves_with_a_step_between_each_go_on_with_the_runs_losses(
    tmp_path, monkeypatch, one, build_step, rows, ema_start
):
    """Each holds its own step, though it is written when the next one is done; both are copied into the same memory.

    On a GPU this memory is pinned: `gpu_checks` does the same there.
    """
    trained, write = threading.Event(), checkpoint.dcp.FileSystemWriter.write_data
    stager, held, places = checkpoint.open_stager(), {}, []
    stage = stager.stage

    def write_late(*arguments):
        trained.wait()
        return write(*arguments)

    def record(state):
        made = stage(state)
        moments = made["moments"]["conv_in.weight"]
        tensors = [tensor for kind in (made["model"], made["ema"], moments) for tensor in kind.values()]
        places.append([tensor.data_ptr() for tensor in tensors])
        return made

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", write_late)
    monkeypatch.setattr(stager, "stage", record)
    state = build_step(ema_start=ema_start)
    found = train(state, rows, 0, 2)
    for step in (2, 3):
        held[step] = everything(state)
        finish = checkpoint.async_save(tmp_path / str(step), state, step=step, stager=stager)
        found += train(state, rows, step, step + 1)
        assert run_folder.find_corruption(tmp_path / str(step))  # not there before it is finished
        trained.set()
        finish()
        trained.clear()
    stager.close()
    assert found + train(state, rows, 4) == one[0] and places[0] == places[1]
    for step in (2, 3):
        restored = build_step(ema_start=ema_start)
        assert checkpoint.load(tmp_path / str(step), restored) == step
        assert same(everything(restored), held[step]) and train(restored, rows, step) == one[0][step:]
