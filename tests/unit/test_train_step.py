import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import types
import warnings

import numpy as np
import pyarrow as pa
import pytest
import ray.train
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import checkpoint, ingest, schema, train_step
from helpers import train as worker_loop
from helpers.config import TrainingConfig
from helpers.train_step import TrainStep, Unit
from helpers.unet import build_unet, has_compiler, load_unet_config
from tests.conftest import SHAPES
from tests.processes import start_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, STEPS, COLUMN = 8, 6, "image_latents_64"
# What is masked differs between the halves of a batch, and so between two workers.
KEEP = ~np.isin(np.arange(BATCH * STEPS) % 11, [1, 5, 6])


def recipe(**values):
    values = {
        "global_batch_size": BATCH,
        "units_per_step": 2,
        "warmup_steps": 2,
        "max_steps": 50,
        "learning_rate": 1e-3,
        **values,
    }
    return TrainingConfig(**values)


def with_bits(table, bits, rows, column=COLUMN):
    """The table with the latents of some rows, or another column, replaced by one fp16 bit pattern."""
    values, _ = schema.from_binary(table[column], SHAPES[column])
    values = values.copy()
    values.view(np.uint16)[rows] = bits
    return table.set_column(table.column_names.index(column), column, schema.to_binary(values))


@pytest.fixture(scope="module")
def rows(build_latents):
    """The run's rows; what is masked has NaN in its latents, as a null may."""
    return with_bits(build_latents(BATCH * STEPS), 0x7E00, ~KEEP).append_column("keep", pa.array(KEEP))


@pytest.fixture(scope="module")
def manifest(build_manifest):
    return build_manifest()


def units(config, manifest, rows, step, rank=0, world=1):
    """A worker's units of a global batch, dealt as the worker loop does."""
    return [
        Unit.from_arrow(
            rows.slice(step * BATCH + slot * config.unit_rows, config.unit_rows),
            manifest,
            config.resolution,
            slot * config.unit_rows,
        )
        for slot in range(rank, config.units_per_step, world)
    ]


def train(state, manifest, rows, first=0, last=STEPS, rank=0, world=1):
    config = state.config
    return [state.step(step, units(config, manifest, rows, step, rank, world)) for step in range(first, last)]


def weights(state):
    return {name: parameter.detach().clone() for name, parameter in state.unet.named_parameters()}


def parts(state):
    return {"model": state.model, "optimizer": state.optimizer, "ema": state.ema}


def losses(metrics):
    return np.array([line["loss"] for line in metrics])


def worker(rank, world, folder, config, manifest, rows):
    """A rank of a plain gloo group: trains, saves on the way, and at last meets a NaN that only the last rank holds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    config, manifest = TrainingConfig.from_dict(config), schema.Manifest.from_dict(manifest)
    state = TrainStep(config, manifest)
    metrics = train(state, manifest, rows, 0, 3, rank, world)
    finish = checkpoint.async_save(f"{folder}/checkpoint", **parts(state), step=3, group=checkpoint.cpu_group())
    metrics += train(state, manifest, rows, 3, STEPS, rank, world)
    finish()

    restored = TrainStep(config, manifest)
    step = checkpoint.load(f"{folder}/checkpoint", **parts(restored))
    again = train(restored, manifest, rows, step, STEPS, rank, world)

    before, message, skipped = weights(state), None, None
    bad = with_bits(rows, 0x7E00, slice(BATCH - 1, BATCH)).set_column(
        rows.column_names.index("keep"), "keep", pa.array([True] * len(rows))
    )
    bad = with_bits(bad, 0, slice(0, BATCH - 1))
    try:
        skipped = state.step(STEPS, units(config, manifest, bad, 0, rank, world))
        state.step(STEPS + 1, units(config, manifest, bad, 0, rank, world))
    except FloatingPointError as error:
        message = str(error)
    unchanged = all(torch.equal(before[name], value) for name, value in weights(state).items())
    torch.save(weights(state), f"{folder}/weights-{rank}.pt")
    result = {"metrics": metrics, "again": again, "message": message, "unchanged": unchanged, "skipped": skipped}
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


STRATEGIES = ["ddp", "fsdp", "fsdp-full", "hsdp"]
HELD_OUT = 7  # rows, which two ranks cannot halve


def small_recipe(folder, strategy, world, **values):
    """For a U-Net of one level: the same parts as "tiny" at a third of the time."""
    return recipe(
        unet_config=f"{folder}/unet.json", units_per_step=4, strategy=strategy, num_training_workers=world, **values
    )


def half(folder):
    """Steps before the checkpoint in the middle of a run, and after it."""
    return json.loads(pathlib.Path(folder, "half.json").read_text())


def write_small_unet(folder):
    one_level = {
        "block_out_channels": [32],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
        "attention_head_dim": [2],
    }
    (folder / "unet.json").write_text(json.dumps({**load_unet_config("tiny"), **one_level}))


# Ten steps on two ranks find the same mistakes as fifty on two and four, in a tenth of the time.
@pytest.fixture(
    scope="module",
    params=[(5, [2]), pytest.param((25, [2, 4]), marks=pytest.mark.slow)],
    ids=["2 ranks", "2 and 4 ranks"],
)
def size(request):
    """`(steps before the checkpoint in the middle of a run, and after it; numbers of ranks)`."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, size):
    folder = tmp_path_factory.mktemp("strategies")
    write_small_unet(folder)
    (folder / "half.json").write_text(json.dumps(size[0]))
    return folder


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@contextlib.contextmanager
def group(folder, name, rank, world):
    """A gloo group of `world` ranks, two on each node but for the last of an odd number."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == world - 1 and world % 2 else "2"
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()


def train_and_save(folder, rank, world, manifest, rows):
    """`(losses, gradient norms, losses of validation)` under each strategy, which starts with `build_unet`'s weights.

    With a checkpoint, and validation, in the middle.
    """
    losses, norms, validated, middle = {}, {}, {}, half(folder)
    drawn = build_unet(f"{folder}/unet.json").state_dict()
    for strategy in STRATEGIES:
        state = TrainStep(small_recipe(folder, strategy, world), manifest)
        assert all(torch.equal(whole(value), drawn[name]) for name, value in state.unet.named_parameters())
        found = train(state, manifest, rows, 0, middle, rank, world)
        checkpoint.save(f"{folder}/{strategy}-{world}", **parts(state), step=middle)
        with state.averaged() as unet:  # between two steps, whose losses stay
            validated[f"{strategy}-{world}"] = train_step.validation_loss(unet, manifest, rows[:HELD_OUT], state.config)
        found += train(state, manifest, rows, middle, 2 * middle, rank, world)
        losses[f"{strategy}-{world}"] = [line["loss"] for line in found]
        norms[f"{strategy}-{world}"] = [line["grad_norm"] for line in found]
    return losses, norms, validated


def continue_from(folder, names, rank, world, manifest, rows):
    """Losses of two steps from one checkpoint for each strategy: they show its weights, then its optimizer state."""
    losses = {}
    for strategy, name in zip(STRATEGIES, names, strict=True):
        state = TrainStep(small_recipe(folder, strategy, world), manifest)
        for parameter in state.unet.parameters():
            parameter.data.zero_()
        step = checkpoint.load(f"{folder}/{name}", **parts(state))
        found = train(state, manifest, rows, step, step + 2, rank, world)
        checkpoint.save(f"{folder}/later-{strategy}-{world}", **parts(state), step=step + 2)
        losses[f"{name} -> {strategy}-{world}"] = [line["loss"] for line in found]
    return losses


def train_unevenly(folder, rank, manifest, rows):
    """`(losses of two steps under each strategy, shape of the last one's mesh)` of three ranks on two nodes.

    They share four units, so in each step two of them have fewer than the third.
    """
    found = {}
    with group(folder, "uneven", rank, 3):
        for strategy in STRATEGIES:
            state = TrainStep(small_recipe(folder, strategy, 3), manifest)
            found[strategy] = [line["loss"] for line in train(state, manifest, rows, 0, 2, rank, 3)]
        return found, list(state.unet.conv_in.weight.device_mesh.shape)


def sharded_worker(rank, folder, manifest, rows, worlds):
    """One process: it trains in groups of each of `worlds` ranks, which then resume each other's checkpoints."""
    torch.set_num_threads(1)
    manifest, result = (
        schema.Manifest.from_dict(manifest),
        {"straight": {}, "norms": {}, "validated": {}, "continued": {}},
    )
    for world in worlds:
        if rank < world:
            with group(folder, f"straight-{world}", rank, world):
                trained = train_and_save(folder, rank, world, manifest, rows)
                for name, values in zip(("straight", "norms", "validated"), trained, strict=True):
                    result[name].update(values)
    resumed = {2: ["alone", "ddp-2", "hsdp-2", "fsdp-2"]}
    if 4 in worlds:
        resumed = {2: ["fsdp-full-4", "hsdp-4", "ddp-4", "fsdp-4"], 4: resumed[2]}
    for world, names in resumed.items():
        if rank < world:
            with group(folder, f"continued-{world}", rank, world):
                result["continued"].update(continue_from(folder, names, rank, world, manifest, rows))
    if rank < 3:
        result["uneven"] = train_unevenly(folder, rank, manifest, rows)
    if rank == 0:
        pathlib.Path(folder, "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def alone(folder, manifest, build_latents):
    """`(losses, rows, gradient norms)` of one process without a group; it leaves "alone" and "later-alone"."""
    middle = half(folder)
    rows = build_latents(BATCH * 2 * middle)
    state = TrainStep(small_recipe(folder, "ddp", 1), manifest)
    found = train(state, manifest, rows, 0, middle)
    checkpoint.save(folder / "alone", **parts(state), step=middle)
    found += train(state, manifest, rows, middle, middle + 2)
    checkpoint.save(folder / "later-alone", **parts(state), step=middle + 2)
    found += train(state, manifest, rows, middle + 2, 2 * middle)
    return losses(found), rows, [line["grad_norm"] for line in found]


@pytest.fixture(scope="module")
def strategies(folder, alone, manifest, size):
    """What `sharded_worker` found."""
    arguments = (str(folder), manifest.to_dict(), alone[1], size[1])
    start_ranks(sharded_worker, arguments, nprocs=max(3, *size[1]))
    return json.loads((folder / "result.json").read_text())


def test_every_strategy_trains_as_one_process_does(alone, strategies):
    assert len(strategies["straight"]) in (4, 8)
    for name, found in strategies["straight"].items():
        np.testing.assert_allclose(found, alone[0], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(strategies["norms"][name], alone[2], rtol=1e-3, err_msg=name)


def test_every_strategy_validates_as_one_process_does(folder, alone, strategies, manifest):
    """By all ranks together, with the averaged weights; the steps before and after it are those of the test above."""
    rows = alone[1][:HELD_OUT]
    for name, found in strategies["validated"].items():
        unet = checkpoint.load_weights(f"{folder}/{name}", build_unet(f"{folder}/unet.json"))
        assert found == pytest.approx(train_step.validation_loss(unet, manifest, rows, recipe()), rel=1e-5)


def test_every_strategy_resumes_checkpoints_of_the_others(folder, alone, strategies, manifest):
    """Each from another one's, and one process from all of them: what is in them does not depend on who wrote it."""
    expected, rows, _ = alone
    continued = dict(strategies["continued"])
    for name in strategies["straight"]:
        state = TrainStep(small_recipe(folder, "ddp", 1), manifest)
        step = checkpoint.load(folder / name, **parts(state))
        continued[f"{name} -> alone"] = losses(train(state, manifest, rows, step, step + 2))
    assert len(continued) == 2 * len(strategies["straight"])
    for pair, found in continued.items():
        np.testing.assert_allclose(found, expected[half(folder) : half(folder) + 2], rtol=1e-5, err_msg=pair)


@pytest.mark.parametrize("when", ["", "later-"])
def test_every_strategy_has_the_weights_and_ema_of_one_process(folder, strategies, when):
    """In the middle of a run, and two steps on from the checkpoint of another strategy."""

    def read(name, which):
        return checkpoint.load_weights(
            folder / f"{when}{name}", build_unet(f"{folder}/unet.json", seed=9), which
        ).state_dict()

    expected = {which: read("alone", which) for which in ("model", "ema")}
    assert any(
        (value - expected["ema"][name]).norm() > 1e-2 * value.norm() for name, value in expected["model"].items()
    )
    for strategy in strategies["straight"]:
        for which in ("model", "ema"):
            found = read(strategy, which)
            for name, value in expected[which].items():
                assert (found[name] - value).norm() <= 1e-4 * value.norm(), (strategy, which, name)


def test_three_workers_share_four_units_under_every_strategy(strategies, alone):
    found, _ = strategies["uneven"]
    assert sorted(found) == sorted(STRATEGIES)
    for strategy in found:
        np.testing.assert_allclose(found[strategy], alone[0][:2], rtol=1e-5, err_msg=strategy)


def test_nodes_with_unequal_numbers_of_workers_shard_alike(strategies):
    """Two workers and one, under "hsdp"."""
    assert strategies["uneven"][1] == [3, 1]


def gradients_of(state):
    return {name: whole(parameter.grad).clone() for name, parameter in state.unet.named_parameters()}


def compiled_worker(rank, folder, manifest, rows):
    """One of two processes that train eager and compiled: losses of all steps, and the gradients of the first."""
    torch.set_num_threads(1)
    manifest, result = schema.Manifest.from_dict(manifest), {}
    with group(folder, "compiled", rank, 2):
        for strategy in ("ddp", "fsdp"):
            for compiled in (False, True):
                state = TrainStep(small_recipe(folder, strategy, 2, compile_unet=compiled), manifest)
                taken = []
                state.optimizer.register_step_pre_hook(
                    lambda *_, state=state, taken=taken: taken.append(gradients_of(state))
                )
                found = train(state, manifest, rows, 0, len(rows) // BATCH, rank, 2)
                result[strategy, compiled] = [line["loss"] for line in found], taken[0]
    if rank == 0:
        torch.save(result, f"{folder}/compiled.pt")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_compiled_strategies_have_the_gradients_of_eager_ones(tmp_path, manifest, build_latents):
    write_small_unet(tmp_path)
    start_ranks(compiled_worker, (str(tmp_path), manifest.to_dict(), build_latents(BATCH * 10)), nprocs=2)
    found = torch.load(tmp_path / "compiled.pt")
    expected_losses, expected = found["ddp", False]
    for (strategy, compiled), (values, gradients) in found.items():
        np.testing.assert_allclose(values, expected_losses, rtol=1e-3 if compiled else 1e-5, err_msg=strategy)
        for name, gradient in expected.items():
            assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, (strategy, compiled, name)


@pytest.fixture(scope="module")
def one(manifest, rows):
    """One process without a process group: the reference."""
    state = TrainStep(recipe(), manifest)
    return train(state, manifest, rows), weights(state)


@pytest.fixture(scope="module")
def two(tmp_path_factory, manifest, rows):
    """Two ranks: their results, the folder with their checkpoint, and their weights."""
    folder = tmp_path_factory.mktemp("two")
    config = recipe(num_training_workers=2, micro_batch_size=2, max_skipped_steps=1)
    arguments = (2, str(folder), config.to_dict(), manifest.to_dict(), rows)
    start_ranks(worker, arguments, nprocs=2)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return results, folder, [torch.load(folder / f"weights-{rank}.pt") for rank in range(2)]


# ---- the same training on any number of workers


def test_two_workers_train_as_one_does(one, two):
    metrics, expected = one
    results, _, states = two
    for rank in range(2):
        for name in ("loss", "grad_norm", "learning_rate"):
            found = [line[name] for line in results[rank]["metrics"]]
            assert np.allclose(
                found, [line[name] for line in metrics], rtol=1e-5 if name != "grad_norm" else 1e-4, atol=0
            )
    for name, value in expected.items():
        assert torch.equal(states[0][name], states[1][name])
        assert (states[0][name] - value).norm() <= 1e-3 * value.norm() + 1e-4
    assert results[0]["metrics"][0]["loss"] == results[1]["metrics"][0]["loss"]  # of the whole batch, on every rank


def test_a_group_of_one_trains_as_no_group_does(one, tmp_path, manifest, rows):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert train(TrainStep(recipe(), manifest), manifest, rows, 0, 2) == one[0][:2]
    finally:
        dist.destroy_process_group()


def test_one_worker_that_shards_in_bf16_trains_saves_and_goes_on(one, tmp_path, manifest, rows):
    """As one GPU does with strategy "fsdp": sharded over itself, for the U-Net in bf16 beside fp32 weights."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        state = TrainStep(recipe(strategy="fsdp", precision="bf16"), manifest)
        found = train(state, manifest, rows, 0, 3)
        finish = checkpoint.async_save(tmp_path / "c", **parts(state), step=3, group=checkpoint.cpu_group())
        found += train(state, manifest, rows, 3, STEPS)
        finish()
        again = TrainStep(state.config, manifest)
        assert train(again, manifest, rows, checkpoint.load(tmp_path / "c", **parts(again))) == found[3:]
    finally:
        dist.destroy_process_group()
    assert (
        losses(found) == pytest.approx(losses(one[0]), rel=0.02) and losses(found).tolist() != losses(one[0]).tolist()
    )
    unet = checkpoint.load_weights(tmp_path / "c", build_unet("tiny", seed=9), "model")
    assert {parameter.dtype for parameter in unet.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "values", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"units_per_step": 1}, {"units_per_step": 8}], ids=str
)
def test_the_size_of_micro_batches_and_units_changes_nothing(one, manifest, rows, values):
    found = train(TrainStep(recipe(**values), manifest), manifest, rows)
    assert np.allclose(losses(found), losses(one[0]), rtol=1e-5, atol=0)


def test_training_twice_gives_the_same_bits(one, manifest, rows):
    torch.manual_seed(99)
    state = TrainStep(recipe(), manifest)
    assert train(state, manifest, rows) == one[0]
    assert all(torch.equal(one[1][name], value) for name, value in weights(state).items())


def test_another_seed_is_another_run(one, manifest, rows):
    assert train(TrainStep(recipe(seed=1), manifest), manifest, rows, 0, 1)[0]["loss"] != one[0][0]["loss"]


def test_training_on_the_same_rows_lowers_the_loss(manifest, build_latents):
    config = recipe(learning_rate=3e-3, warmup_steps=5, max_steps=60, lr_schedule="constant")
    state, rows = TrainStep(config, manifest), build_latents(BATCH)
    found = [state.step(step, units(config, manifest, rows, 0))["loss"] for step in range(60)]
    assert np.mean(found[-10:]) < 0.8 * np.mean(found[:10])


# ---- what a step reports


def test_the_loss_is_the_mean_over_unmasked_rows(manifest, rows):
    state = TrainStep(recipe(), manifest)
    mine = units(state.config, manifest, rows, 0)
    with torch.no_grad():
        per_row = torch.cat([state.row_losses(unit, 0) for unit in mine])
    keep = torch.cat([unit.keep_U for unit in mine])
    assert (per_row[~keep] == 0).all() and (per_row[keep] > 0).all() and not keep.all()
    found = state.step(0, mine)
    assert found["loss"] == pytest.approx(per_row[keep].mean().item(), rel=1e-5)
    assert found["learning_rate"] == pytest.approx(state.config.learning_rate / 2) and found["grad_norm"] > 0


def test_the_gradient_is_clipped_to_a_norm_of_one(manifest, rows, monkeypatch):
    state = TrainStep(recipe(), manifest)
    seen = []
    original = state.optimizer.step

    def step(grad_scale, found_inf):
        seen.append((torch.stack([p.grad.norm() for p in state.unet.parameters()]).norm() / grad_scale).item())
        original(grad_scale, found_inf)

    monkeypatch.setattr(state.optimizer, "step", step)
    (line,) = train(state, manifest, with_bits(rows, np.float16(100).view(np.uint16), slice(None)), 0, 1)
    assert seen[0] == pytest.approx(min(1, line["grad_norm"]), rel=1e-3)
    assert all(parameter.grad is None for parameter in state.unet.parameters())


# ---- beside the step


def test_the_next_steps_tensors_are_made_in_a_thread(monkeypatch, manifest, build_latents):
    """While a step is trained on; but its rejects are counted when it is begun, as a checkpoint before it needs."""
    blocks = [build_latents(BATCH).append_column(ingest.UNIT, pa.array([number] * BATCH)) for number in range(3)]
    shard = types.SimpleNamespace(iter_batches=lambda **options: iter(blocks))
    monkeypatch.setattr(ray.train, "get_dataset_shard", lambda name: shard)
    made, threads, rejected, from_arrow = [threading.Event() for _ in blocks], [], [], Unit.from_arrow

    def record(table, *arguments):
        unit = from_arrow(table, *arguments)
        threads.append(threading.current_thread())
        made[table[ingest.UNIT][0].as_py()].set()
        return unit

    monkeypatch.setattr(Unit, "from_arrow", record)
    rejects = types.SimpleNamespace(add=lambda rows: rejected.append(rows[ingest.UNIT][0].as_py()))
    config = recipe(units_per_step=1, max_steps=3)
    monkeypatch.setattr(ingest, "read_manifests", lambda config, heads: dict.fromkeys(config.proportions, manifest))
    steps = worker_loop.train_steps(config, manifest, range(3), rejects)
    for step, (mine, _) in enumerate(steps):
        assert len(mine) == 1 and rejected == list(range(step + 1))
        assert step == 2 or made[step + 1].wait(60)
    assert step == 2 and threading.main_thread() not in threads


def test_metrics_that_cannot_be_written_stop_the_worker():
    def write(*arguments, **speed):
        raise OSError("the disk is full")

    writer = worker_loop.MetricsWriter(types.SimpleNamespace(write=write))
    writer.write(1, {"loss": 1.0}, [], 0, {})
    with pytest.raises(OSError, match="the disk is full"):
        writer.write(2, {"loss": 1.0}, [], 0, {})


# ---- masked rows


def test_masked_rows_do_not_matter_even_when_their_bits_are_nan(one, manifest, rows):
    for bits in (0x0000, 0x3C00, 0x7C00, 0xFFFF):  # zero, one, infinity, NaN
        state = TrainStep(recipe(), manifest)
        changed = with_bits(with_bits(rows, bits, ~KEEP), bits, ~KEEP, schema.EMBEDDINGS)
        assert train(state, manifest, changed) == one[0]
        assert all(torch.equal(one[1][name], value) for name, value in weights(state).items())


def test_a_fully_masked_batch_has_no_loss_and_no_gradient(manifest, rows):
    none = rows.set_column(rows.column_names.index("keep"), "keep", pa.array([False] * len(rows)))
    (line,) = train(TrainStep(recipe(), manifest), manifest, none, 0, 1)
    assert (line["loss"], line["grad_norm"]) == (0, 0)


def test_without_a_keep_column_rows_without_latents_are_masked(manifest, build_latents):
    table, valid = build_latents(4), np.array([True, False, True, True])
    values, _ = schema.from_binary(table[COLUMN], (2, 4, 8, 8))
    table = table.set_column(table.column_names.index(COLUMN), COLUMN, schema.to_binary(values, valid))
    unit = Unit.from_arrow(table, manifest, 64, 12)
    assert unit.keep_U.tolist() == valid.tolist() and unit.positions_U.tolist() == [12, 13, 14, 15]
    assert unit.ids == [0, 1, 2, 3] and unit.moments.shape == (4, 2, 4, 8, 8) and unit.text.shape == (4, 6, 128)
    assert unit.moments.dtype == unit.text.dtype == torch.float16
    pieces = list(unit.split(3))
    assert [piece.ids for piece in pieces] == [[0, 1, 2], [3]] and pieces[1].positions_U.tolist() == [15]


def test_8_bit_captions_are_decoded_on_the_device(manifest, rows):
    """The worker's thread copies bytes; the step sees the fp16 values that `ColumnSpec.decode` gives."""
    column = schema.ColumnSpec(schema.EMBEDDINGS, SHAPES[schema.EMBEDDINGS], "fp8")
    in_8_bits = dataclasses.replace(manifest, columns=[manifest.latents(64), column])
    values, _ = manifest.embeddings.decode(rows[schema.EMBEDDINGS])
    place = rows.column_names.index(schema.EMBEDDINGS)
    stored = rows.set_column(place, schema.EMBEDDINGS, column.encode(values))
    decoded = rows.set_column(place, schema.EMBEDDINGS, schema.to_binary(column.decode(stored[column.name])[0]))
    unit = Unit.from_arrow(stored.slice(0, 4), in_8_bits, 64, 0)
    assert unit.text.dtype == torch.float8_e4m3fn and unit.text.shape == (4, *column.shape)
    assert [piece.scales_U.tolist() for piece in unit.split(3)] == [
        unit.scales_U[:3].tolist(),
        unit.scales_U[3:].tolist(),
    ]
    found = train(TrainStep(recipe(micro_batch_size=2), in_8_bits), in_8_bits, stored, 0, 2)
    assert found == train(TrainStep(recipe(micro_batch_size=2), manifest), manifest, decoded, 0, 2)


def test_dropped_captions_are_trained_as_the_empty_one(manifest, rows):
    """With nearly every caption dropped, the captions themselves do not matter."""
    state, seen = TrainStep(recipe(caption_dropout=0.999999), manifest), []
    state.unet.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[2]))
    train(state, manifest, rows, 0, 1)
    empty = torch.from_numpy(manifest.empty_caption.astype(np.float32))
    assert all(torch.equal(text, empty.expand_as(text)) for text in seen)


# ---- values that are not finite


def test_a_nan_loss_raises_before_any_weight_changes(manifest, build_latents):
    state, rows = TrainStep(recipe(), manifest), build_latents(BATCH)
    train(state, manifest, rows, 0, 1)
    before, average = weights(state), {name: value.clone() for name, value in state.ema.state_dict().items()}
    with pytest.raises(
        FloatingPointError, match="^The loss at step 1 is nan: check the latents, lower learning_rate in a new run"
    ):
        state.step(1, units(state.config, manifest, with_bits(rows, 0x7E00, slice(7, 8)), 0))
    assert all(torch.equal(before[name], value) for name, value in weights(state).items())
    assert all(torch.equal(average[name], value) for name, value in state.ema.state_dict().items())


def test_an_infinite_gradient_raises_before_any_weight_changes(manifest, rows):
    """Or the weights would be NaN, and so a checkpoint of this very step."""
    state = TrainStep(recipe(), manifest)
    before = weights(state)
    state.unet.conv_in.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(FloatingPointError, match="^The gradient at step 0 is (inf|nan)"):
        train(state, manifest, rows, 0, 1)
    assert all(torch.equal(before[name], value) for name, value in weights(state).items())


def test_every_worker_skips_and_stops_when_one_has_a_nan(two):
    for result in two[0]:
        assert np.isnan(result["skipped"]["loss"]) and result["skipped"]["skipped_steps"] == 1
        assert result["message"].startswith(f"The loss at step {STEPS + 1} is nan") and result["unchanged"]


def everything(state):
    """Copies of all that a checkpoint would hold."""
    moments = [value for one in state.optimizer.state.values() for value in one.values()]
    return [tensor.clone() for tensor in [*weights(state).values(), *moments, *state.ema.state_dict().values()]]


def test_a_skipped_step_changes_nothing_and_is_counted(manifest, rows):
    state, other = (TrainStep(recipe(max_skipped_steps=2), manifest) for _ in range(2))
    bad = with_bits(rows, 0x7E00, np.flatnonzero(KEEP)[0])
    for one in (state, other):
        train(one, manifest, rows, 0, 1)
    before = everything(state)
    for number in (1, 2):
        line = state.step(number, units(state.config, manifest, bad, 0))
        assert line["skipped_steps"] == number and np.isnan(line["loss"])
        assert all(map(torch.equal, everything(state), before))
    after = [train(one, manifest, rows, 3, 4) for one in (state, other)]
    assert after[0] == after[1] and after[0][0]["skipped_steps"] == 0
    assert all(map(torch.equal, everything(state), everything(other)))
    for number in (4, 5):
        state.step(number, units(state.config, manifest, bad, 0))
    with pytest.raises(FloatingPointError, match="^The loss at step 6 is nan: .* than max_skipped_steps=2.$"):
        state.step(6, units(state.config, manifest, bad, 0))


class CountSyncs(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: values that it reads, and sizes that depend on values."""

    number = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        self.number += operation.overloadpacket.__name__ in waits
        return operation(*arguments, **(options or {}))


def count_syncs(state, manifest, rows):
    train(state, manifest, rows, 0, 2)  # the EMA begins with a copy
    mine = units(state.config, manifest, rows, 2)
    with CountSyncs() as counted:
        state.step(2, mine)
        assert torch.tensor(1).item() == 1
    return counted.number - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_a_gpu_once_a_step(manifest, rows):
    state = TrainStep(recipe(micro_batch_size=2), manifest, "cuda")
    train(state, manifest, rows, 0, 2)
    mine = units(state.config, manifest, rows, 2)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        state.step(2, mine)
    torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in waits if "synchronizing CUDA operation" in str(one.message)]) <= 1


def test_the_host_waits_for_the_device_once_a_step(tmp_path, manifest, rows):
    """At most: `tolist` at the end of the step, which the mode does not see on a CPU."""
    assert count_syncs(TrainStep(recipe(micro_batch_size=2), manifest), manifest, rows) <= 1
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        sharded = TrainStep(recipe(strategy="fsdp", precision="bf16"), manifest)
        assert isinstance(next(sharded.model.parameters()), DTensor)
        assert count_syncs(sharded, manifest, rows) <= 1
    finally:
        dist.destroy_process_group()


# ---- checkpoints


@pytest.mark.parametrize("ema_start", [0, 3, 4, 100])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, manifest, rows, ema_start):
    state = TrainStep(recipe(ema_start=ema_start), manifest)
    straight = train(state, manifest, rows, 0, 3)
    checkpoint.save(tmp_path / "c", **parts(state), step=3)
    straight += train(state, manifest, rows, 3, STEPS)  # saving changed nothing, as `one` shows

    restored = TrainStep(recipe(ema_start=ema_start, micro_batch_size=4), manifest)
    assert checkpoint.load(tmp_path / "c", **parts(restored)) == checkpoint.step_of(tmp_path / "c") == 3
    assert train(restored, manifest, rows, 3, STEPS) == straight[3:]
    assert all(torch.equal(weights(state)[name], value) for name, value in weights(restored).items())
    averages = state.ema.state_dict(), restored.ema.state_dict()
    assert all(torch.equal(averages[0][name], value) for name, value in averages[1].items())


def test_saving_does_not_change_a_run(tmp_path, one, manifest, rows):
    state = TrainStep(recipe(), manifest)
    found = train(state, manifest, rows, 0, 1)
    for step in range(1, STEPS):
        checkpoint.save(tmp_path / str(step), **parts(state), step=step)
        found += train(state, manifest, rows, step, step + 1)
    assert found == one[0]


@pytest.mark.parametrize("ema_start", [0, 100])
def test_an_async_checkpoint_holds_the_step_it_was_begun_at(tmp_path, monkeypatch, one, manifest, rows, ema_start):
    """Though it is written only when the training is over."""
    trained, write = threading.Event(), checkpoint.dcp.FileSystemWriter.write_data

    def write_late(*arguments):
        trained.wait()
        return write(*arguments)

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", write_late)
    state = TrainStep(recipe(ema_start=ema_start), manifest)
    found = train(state, manifest, rows, 0, 3)
    begun = {"model": weights(state), "ema": {name: value.clone() for name, value in state.ema.state_dict().items()}}
    finish = checkpoint.async_save(tmp_path, **parts(state), step=3)
    found += train(state, manifest, rows, 3, STEPS)
    assert checkpoint.find_corruption(tmp_path)  # not there before it is finished
    trained.set()
    finish()
    assert checkpoint.find_corruption(tmp_path) is None and found == one[0]
    for which, expected in begun.items():
        written = checkpoint.load_weights(tmp_path, build_unet("tiny", seed=9), which)
        assert all(torch.equal(expected[name], value) for name, value in written.named_parameters())
    restored = TrainStep(recipe(ema_start=ema_start), manifest)
    assert train(restored, manifest, rows, checkpoint.load(tmp_path, **parts(restored)), STEPS) == found[3:]


def test_a_kept_stager_copies_into_the_same_memory(tmp_path, monkeypatch, one, manifest, rows):
    """As on a GPU, where this memory is pinned; every checkpoint still holds its own step."""
    stager, places = checkpoint.open_stager(pinned=False), []

    def stage(state):
        made = type(stager).stage(stager, state)
        tensors = [
            *made["model"].values(),
            *made["ema"].values(),
            *made["optimizer"]["state"]["conv_in.weight"].values(),
        ]
        places.append([tensor.data_ptr() for tensor in tensors])
        return made

    monkeypatch.setattr(stager, "stage", stage)
    state = TrainStep(recipe(), manifest)
    found = train(state, manifest, rows, 0, 2)
    for step in (2, 3):
        checkpoint.async_save(tmp_path / str(step), **parts(state), step=step, stager=stager)()
        found += train(state, manifest, rows, step, step + 1)
    assert places[0] == places[1] and found == one[0][:4]
    for step in (2, 3):
        restored = TrainStep(recipe(), manifest)
        assert checkpoint.load(tmp_path / str(step), **parts(restored)) == step
        assert train(restored, manifest, rows, step, 4) == found[step:]
    stager.close()


def test_two_workers_resume_bitwise_from_their_checkpoint(two):
    for result in two[0]:
        assert result["again"] == result["metrics"][3:]


def test_a_checkpoint_of_two_workers_resumes_on_one(two, one, manifest, rows):
    state = TrainStep(recipe(), manifest)
    assert checkpoint.load(two[1] / "checkpoint", **parts(state)) == 3
    assert np.allclose(losses(train(state, manifest, rows, 3)), losses(one[0])[3:], rtol=1e-5, atol=0)


def test_ema_or_last_weights_load_into_a_plain_unet(tmp_path, manifest, rows):
    state = TrainStep(recipe(ema_decay=0.9), manifest)
    train(state, manifest, rows)
    checkpoint.save(tmp_path / "c", **parts(state), step=STEPS)
    average, last = (
        dict(checkpoint.load_weights(tmp_path / "c", build_unet("tiny", seed=9), which).named_parameters())
        for which in ("ema", "model")
    )
    assert all(torch.equal(average[name], value) for name, value in state.ema.state_dict().items())
    assert all(torch.equal(last[name], value) for name, value in weights(state).items())
    assert any(not torch.equal(average[name], last[name]) for name in last)
    default = checkpoint.load_weights(tmp_path / "c", build_unet("tiny", seed=9))
    assert all(torch.equal(average[name], value) for name, value in default.named_parameters())


# ---- validation


def test_the_validation_loss_is_reproducible_and_weighs_rows(manifest, build_latents):
    unet, rows = build_unet("tiny"), build_latents(80)
    found = train_step.validation_loss(unet, manifest, rows, recipe(), timesteps_per_row=2)
    torch.manual_seed(5)
    assert train_step.validation_loss(unet, manifest, rows, recipe(seed=7), timesteps_per_row=2) == found
    assert all(parameter.grad is None for parameter in unet.parameters())
    per_row, schedule = [], train_step.diffusion.noise_schedule()
    with torch.no_grad():  # a row at a time, by the plain objective
        for row in range(80):
            unit = Unit.from_arrow(rows.slice(row, 1).combine_chunks(), manifest, 64, row)
            for number, timestep in enumerate((250, 750)):
                draws = train_step.diffusion.draw(0, number, unit.positions_U, (4, 8, 8))
                draws.timesteps_B[:] = timestep
                latents = train_step.diffusion.sample_latents(
                    unit.moments, draws.posterior_BCHW, manifest.scaling_factor
                )
                per_row.append(
                    [
                        train_step.diffusion.row_losses(unet, schedule, latents, unit.text.float(), draws, gamma).item()
                        for gamma in (5.0, None)
                    ]
                )
    assert found == pytest.approx(np.mean(per_row, axis=0), rel=1e-4) and found[0] != found[1]


def test_losses_by_noise_are_those_of_each_timestep_alone(manifest, build_latents):
    unet, rows = build_unet("tiny"), build_latents(80)
    by_noise = train_step.losses_by_noise(unet, manifest, rows, recipe(), timesteps_per_row=4)
    assert by_noise[:, 0].tolist() == [125, 375, 625, 875] and (by_noise[:, 1:] > 0).all()
    again = train_step.losses_by_noise(unet, manifest, rows, recipe(seed=7), timesteps_per_row=4)
    np.testing.assert_array_equal(by_noise, again)
    means = train_step.validation_loss(unet, manifest, rows, recipe(), timesteps_per_row=4)
    assert means == tuple(by_noise[:, 1:].mean(axis=0))
    schedule = train_step.diffusion.noise_schedule()
    weights = train_step.diffusion.loss_weights(schedule, torch.tensor([125, 375, 625, 875]), 5.0)
    np.testing.assert_allclose(by_noise[:, 1], by_noise[:, 2] * weights.numpy(), rtol=1e-6)


def test_without_weighting_both_validation_losses_are_the_same(manifest, build_latents):
    weighted, plain = train_step.validation_loss(
        build_unet("tiny"), manifest, build_latents(8), recipe(min_snr_gamma=None), timesteps_per_row=2
    )
    assert weighted == plain > 0


def test_no_validation_rows_give_zero_not_a_crash(manifest, build_latents):
    assert train_step.validation_loss(build_unet("tiny"), manifest, build_latents(3)[:0], recipe()) == (0, 0)
