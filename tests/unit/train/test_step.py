"""A step of one process: its loss, its update, what is masked or skipped."""

import numpy as np
import pytest
import torch

from helpers.latents import schema
from helpers.train.step import Unit
from tests.latents import SHAPES
from tests.steps import COLUMN, INFINITY, KEEP, NAN, column, everything, same, train, units, with_bits, with_keep

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_loss_is_the_mean_over_unmasked_rows(build_step, rows):
    state = build_step()
    batch = units(state, rows, 0)
    with torch.no_grad():
        per_row = torch.cat([state.row_losses(unit, 0) for unit in batch])
    keep = torch.cat([unit.keep_U for unit in batch])
    assert (per_row[~keep] == 0).all() and (per_row[keep] > 0).all() and not keep.all()
    line = state.step(0, batch)
    assert line["loss"] == pytest.approx(per_row[keep].mean().item(), rel=1e-5)
    assert line["learning_rate"] == pytest.approx(state.config.learning_rate / 2) and line["grad_norm"] > 0


def test_the_gradient_is_clipped_to_a_norm_of_one(build_step, rows):
    state, norms = build_step(), []

    def look(optimizer, *_):
        norm = torch.stack([parameter.grad.norm() for parameter in state.denoiser.parameters()]).norm()
        norms.append((norm / optimizer.grad_scale).item())

    state.optimizer.register_step_pre_hook(look)
    (line,) = train(state, with_bits(rows, np.float16(100).view(np.uint16), slice(None)), 0, 1)
    assert line["grad_norm"] > 1 and norms == [pytest.approx(1, rel=1e-3)]
    assert all(parameter.grad is None for parameter in state.denoiser.parameters())


@pytest.mark.parametrize("values", [{"micro_batch_size": 1}, {"units_per_step": 1}, {"units_per_step": 8}], ids=str)
def test_the_size_of_micro_batches_and_units_and_the_layout_change_nothing(one, build_step, rows, values):
    found = train(build_step(**values), rows)
    np.testing.assert_allclose(column(found), column(one[0]), rtol=1e-5)


def test_training_twice_gives_the_same_bits_and_another_seed_another_run(one, build_step, rows):
    torch.manual_seed(99)
    state = build_step()
    assert train(state, rows) == one[0] and same(everything(state), everything(one[1]))
    assert train(build_step(seed=1), rows, 0, 1)[0]["loss"] != one[0][0]["loss"]


# ---- masked rows and captions


def test_masked_rows_do_not_matter_whatever_their_bits_are(one, build_step, rows):
    state = build_step()
    changed = with_bits(with_bits(rows, INFINITY, ~KEEP), NAN, ~KEEP, schema.EMBEDDINGS)
    assert train(state, changed) == one[0] and same(everything(state), everything(one[1]))


def test_a_fully_masked_batch_has_no_loss_and_no_gradient(build_step, rows):
    (line,) = train(build_step(), with_keep(rows, [False] * len(rows)), 0, 1)
    assert (line["loss"], line["grad_norm"]) == (0, 0)


def test_without_a_keep_column_rows_without_latents_are_masked(manifest, build_latents):
    table, valid = build_latents(4), np.array([True, False, True, True])
    values, _ = schema.from_binary(table[COLUMN], SHAPES[COLUMN])
    table = table.set_column(table.column_names.index(COLUMN), COLUMN, schema.to_binary(values, valid))
    unit = Unit.from_arrow(table, manifest, manifest.latents(64), 12)
    assert unit.keep_U.tolist() == valid.tolist() and unit.positions_U.tolist() == [12, 13, 14, 15]
    assert unit.ids == [0, 1, 2, 3] and unit.moments.shape == (4, 2, 4, 8, 8) and unit.text.shape == (4, 6, 128)
    assert unit.moments.dtype == unit.text.dtype == torch.float16 and unit.latents_spec == manifest.latents(64)
    pieces = list(unit.split(3))
    assert [piece.ids for piece in pieces] == [[0, 1, 2], [3]] and pieces[1].positions_U.tolist() == [15]


def test_dropped_captions_are_trained_as_the_empty_one(build_step, rows):
    """With nearly every caption dropped, the captions themselves do not matter."""
    state, seen = build_step(caption_dropout=0.999999), []

    def look(module, arguments, named):
        seen.append(named["encoder_hidden_states"])

    state.denoiser.register_forward_pre_hook(look, with_kwargs=True)
    train(state, rows, 0, 1)
    empty = torch.from_numpy(state.manifest.empty_caption.astype(np.float32))
    assert seen and all(torch.equal(text, empty.expand_as(text)) for text in seen)


# ---- values that are not finite


@pytest.mark.parametrize("good_steps", [0, 1])
def test_a_loss_that_is_not_finite_raises_and_changes_nothing(build_step, rows, good_steps):
    """Neither at a step later on nor at the very first one: the same step with good rows goes on."""
    state, other = build_step(), build_step()
    bad = with_bits(rows, NAN, np.flatnonzero(KEEP)[0])
    for each in (state, other):
        train(each, rows, 0, good_steps)
    with pytest.raises(FloatingPointError, match="loss at step 1 is nan"):
        state.step(1, units(state, bad, 0))
    assert train(state, rows, 1, 3) == train(other, rows, 1, 3)
    assert same(everything(state), everything(other))


def test_an_infinite_gradient_raises_before_any_weight_changes(build_step, rows):
    """Or the weights would be NaN, and so a checkpoint of this very step."""
    state = build_step()
    train(state, rows, 0, 1)
    before = everything(state)
    state.denoiser.conv_in.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(FloatingPointError, match="gradient at step 1 is (inf|nan)"):
        train(state, rows, 1, 2)
    assert same(everything(state), before)
