"""Sharded, replicated or compiled, on any number of ranks: training is that of one process."""

import numpy as np
import pytest
import torch

from helpers.distributed import has_compiler
from helpers.evaluate import validation_loss
from helpers.model.denoisers import build_denoiser
from helpers.train import checkpoint
from helpers.train.step import TrainStep
from tests.processes import start_ranks
from tests.steps import (
    MIDDLE,
    STEPS,
    column,
    group,
    held_out,
    save,
    train,
    train_in_groups,
    two_losses_from,
    whole,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# name: (ranks, what differs in the config). Three ranks share four units, so one computes a masked one more.
RUNS = {
    "ddp": (2, {"strategy": "ddp", "micro_batch_size": 1}),
    "fsdp": (2, {"strategy": "fsdp", "activation_checkpointing": True}),
    "fsdp-full": (3, {"strategy": "fsdp-full", "micro_batch_size": 1}),
    "hsdp": (4, {"strategy": "hsdp"}),  # two nodes of two ranks
    "ddp on 3": (3, {"strategy": "ddp"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, recipe, build_step, manifest, rows):
    """`(what each rank found by run, the folder of the checkpoints)`, with one process's checkpoint "alone"."""
    folder = tmp_path_factory.mktemp("runs")
    state = build_step()
    train(state, rows, 0, MIDDLE)
    save(folder / "alone", state, MIDDLE)
    asked, previous = {}, "alone"
    for name, (ranks, changes) in RUNS.items():
        config = recipe(num_training_workers=ranks, **changes)
        asked[name] = config, manifest, rows, str(folder / previous)
        previous = name
    return train_in_groups(folder, asked), folder


@pytest.fixture(params=RUNS)
def run(request, runs):
    """`(what each rank of the run found, its checkpoint)`."""
    return runs[0][request.param], runs[1] / request.param


def test_it_trains_as_one_process_does(one, run):
    for found in run[0]:
        assert found["lines"] == run[0][0]["lines"]  # of the whole batch, on every rank
        for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3), ("learning_rate", 0)):
            np.testing.assert_allclose(column(found["lines"], name), column(one[0], name), rtol=tolerance)


def test_it_validates_as_one_process_does(run, recipe, manifest, rows):
    """By all ranks together, with the averaged weights."""
    denoiser = checkpoint.load_weights(run[1], build_denoiser(recipe().unet_config))
    expected = validation_loss(denoiser, manifest, held_out(rows), recipe())
    for found in run[0]:
        assert found["validated"] == pytest.approx(expected, rel=1e-5)


def test_it_resumes_bitwise_from_its_own_checkpoint(run):
    """But for DDP on more than two ranks: after its first step it regroups gradients and sums in another order."""
    for found in run[0]:
        if run[1].name == "ddp on 3":
            np.testing.assert_allclose(column(found["resumed"]), column(found["lines"])[MIDDLE:], rtol=1e-5)
        else:
            assert found["resumed"] == found["lines"][MIDDLE:] and found["same_state"]


def test_checkpoints_do_not_depend_on_who_wrote_them(one, run, recipe, manifest, rows):
    """It goes on from the checkpoint of the run before it in the table, and one process from its own."""
    expected = column(one[0])[MIDDLE : MIDDLE + 2]
    np.testing.assert_allclose(run[0][0]["continued"], expected, rtol=1e-5)
    np.testing.assert_allclose(two_losses_from(run[1], recipe(), manifest, rows), expected, rtol=1e-5)


@pytest.mark.parametrize("which", ["model", "ema"])
def test_it_has_the_weights_and_averages_of_one_process(run, recipe, which):
    def read(folder):
        return checkpoint.load_weights(folder, build_denoiser(recipe().unet_config, seed=9), which).state_dict()

    expected = read(run[1].parent / "alone")
    for name, value in read(run[1]).items():
        assert (value - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_a_nan_of_one_rank_raises_on_all_and_changes_nothing(run):
    """Bitwise: neither weights, moments and their counters of steps, nor averages."""
    for found in run[0]:
        assert "is nan" in found["refused"] and found["unchanged"]


# ---- compiled


def compiled_worker(rank, folder, configs, manifest, rows):
    """One of two processes that train eager and compiled: losses of all steps, and the gradients of the first."""
    torch.set_num_threads(1)
    found = {}
    with group(folder, "compiled", rank, 2):
        for name, config in configs.items():
            state, gradients = TrainStep(config, manifest), []

            def keep(*_, state=state, gradients=gradients):
                gradients.append({name: whole(p.grad).clone() for name, p in state.denoiser.named_parameters()})

            state.optimizer.register_step_pre_hook(keep)
            found[name] = column(train(state, rows, 0, STEPS, rank, 2)), gradients[0]
    if rank == 0:
        torch.save(found, f"{folder}/compiled.pt")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_compiled_strategies_have_the_gradients_of_eager_ones(tmp_path, recipe, manifest, rows):
    configs = {
        (strategy, compiled): recipe(strategy=strategy, compile_unet=compiled, num_training_workers=2)
        for strategy in ("ddp", "fsdp")
        for compiled in (False, True)
    }
    start_ranks(compiled_worker, (str(tmp_path), configs, manifest, rows), nprocs=2)
    found = torch.load(tmp_path / "compiled.pt", weights_only=False)
    expected_losses, expected = found["ddp", False]
    for (strategy, compiled), (values, gradients) in found.items():
        np.testing.assert_allclose(values, expected_losses, rtol=1e-3 if compiled else 1e-5, err_msg=strategy)
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, (strategy, compiled, name)


# ---- a group of one


def test_a_group_of_one_trains_as_no_group_does(one, group_of_one, build_step, rows):
    assert train(build_step(), rows, 0, 2) == one[0][:2]


def test_one_worker_that_shards_in_bf16_trains_saves_and_goes_on(one, group_of_one, tmp_path, build_step, rows):
    """As one GPU does with strategy "fsdp": sharded over itself, for a denoiser in bf16 beside fp32 weights."""
    values = {"strategy": "fsdp", "precision": "bf16"}
    state, again = build_step(**values), build_step(**values)
    found = train(state, rows, 0, MIDDLE)
    save(tmp_path / "c", state, MIDDLE)
    found += train(state, rows, MIDDLE)
    assert train(again, rows, checkpoint.load(tmp_path / "c", again)) == found[MIDDLE:]
    assert column(found) == pytest.approx(column(one[0]), rel=0.02) and (column(found) != column(one[0])).any()
    denoiser = checkpoint.load_weights(tmp_path / "c", build_denoiser(state.config.unet_config, seed=9), "model")
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.float32}
