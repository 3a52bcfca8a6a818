import contextlib
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

from helpers.config.notebook import TrainingConfig
from helpers.distributed import local
from helpers.evaluation.validation_loss import validation_loss
from helpers.latents import schema
from helpers.latents.manifest import DataSets
from helpers.latents.read import UNIT
from helpers.model.denoisers import build_denoiser, load_denoiser_config
from helpers.model.sharding import has_compiler
from helpers.train import checkpoint, loop, sources
from helpers.train.step import TrainStep, Unit
from tests.conftest import SHAPES
from tests.processes import start_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, MIDDLE, STEPS, COLUMN = 8, 3, 6, "image_latents_64"
# What is masked differs between the parts of a batch, and so between workers.
KEEP = ~np.isin(np.arange(BATCH * STEPS) % 11, [1, 5, 6])
NAN, INFINITY = 0x7E00, 0x7C00  # as bits of fp16


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A function that makes a config: a U-Net of one level, the same parts as "tiny" at a third of the time."""
    path = tmp_path_factory.mktemp("unet") / "unet.json"
    one_level = {
        "block_out_channels": [32],
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
        "attention_head_dim": [2],
    }
    path.write_text(json.dumps({**load_denoiser_config("tiny"), **one_level}))

    def build(**values):
        small = {"global_batch_size": BATCH, "units_per_step": 4, "warmup_steps": 2, "max_steps": 50}
        return TrainingConfig(**{"unet_config": str(path), "learning_rate": 1e-3, **small, **values})

    return build


def with_bits(table, bits, rows, column=COLUMN):
    """The table with the latents of some rows, or another column, replaced by one fp16 bit pattern."""
    values, _ = schema.from_binary(table[column], SHAPES[column])
    values = values.copy()
    values.view(np.uint16)[rows] = bits
    return table.set_column(table.column_names.index(column), column, schema.to_binary(values))


def with_keep(table, keep):
    return table.set_column(table.column_names.index("keep"), "keep", pa.array(keep))


@pytest.fixture(scope="module")
def rows(build_latents):
    """The run's rows; what is masked has NaN in its latents, as a null may."""
    return with_bits(build_latents(BATCH * STEPS), NAN, ~KEEP).append_column("keep", pa.array(KEEP))


@pytest.fixture(scope="module")
def manifest(build_manifest):
    return build_manifest()


def units(config, manifest, rows, step, rank=0, world=1):
    """A worker's units of a global batch, dealt as the worker loop does."""
    return [
        Unit.from_arrow(
            rows.slice(step * BATCH + slot * config.unit_rows, config.unit_rows),
            manifest,
            manifest.latents(config.resolution),
            slot * config.unit_rows,
        )
        for slot in range(rank, config.units_per_step, world)
    ]


def train(state, manifest, rows, first=0, last=STEPS, rank=0, world=1):
    config = state.config
    return [state.step(step, units(config, manifest, rows, step, rank, world)) for step in range(first, last)]


def held_out(rows):
    """Seven rows that are not masked, which no number of ranks here divides."""
    return rows.filter(rows["keep"])[:7]


def parts(state):
    return {"model": state.model, "optimizer": state.optimizer, "ema": state.ema}


def save(folder, state, step):
    begin_save(folder, state, step)()


def begin_save(folder, state, step):
    stager = checkpoint.open_stager()
    return checkpoint.async_save(folder, **parts(state), step=step, stager=stager, group=checkpoint.cpu_group())


def column(lines, name="loss"):
    return np.array([line[name] for line in lines])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def everything(state):
    """Copies of this rank's part of all that a checkpoint holds: weights, moments, counters of steps, averages."""
    moments = [value for one in state.optimizer.state.values() for value in one.values()]
    tensors = [*state.denoiser.parameters(), *moments, *state.ema.state_dict().values()]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in tensors]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ---- strategies, by processes of a gloo group


STRATEGIES = ["ddp", "fsdp", "fsdp-full", "hsdp"]
# name: (ranks, what differs in the config). Three ranks share four units, so one computes a masked one more.
RUNS = {
    "ddp": (2, {"strategy": "ddp", "channels_last": True, "micro_batch_size": 1}),
    "fsdp": (2, {"strategy": "fsdp", "channels_last": True, "activation_checkpointing": True}),
    "fsdp-full": (3, {"strategy": "fsdp-full", "micro_batch_size": 1}),
    "hsdp": (4, {"strategy": "hsdp"}),  # two nodes of two ranks
    "ddp on 3": (3, {"strategy": "ddp"}),
}


@contextlib.contextmanager
def group(folder, name, rank, world):
    """A gloo group of `world` ranks, two on each node but for the last of an odd number."""
    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == world - 1 and world % 2 else "2"
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_strategy(folder, name, config, manifest, rows, rank, world):
    """What a rank finds; it leaves the checkpoint `name`, of step MIDDLE."""
    state = TrainStep(config, manifest)
    drawn = build_denoiser(config.unet_config).state_dict()
    assert all(torch.equal(whole(value), drawn[name]) for name, value in state.denoiser.named_parameters())
    lines = train(state, manifest, rows, 0, MIDDLE, rank, world)
    writing = begin_save(f"{folder}/{name}", state, MIDDLE)
    with state.averaged() as denoiser:  # between two steps, whose losses stay
        validated = validation_loss(denoiser, manifest, held_out(rows), config)
    lines += train(state, manifest, rows, MIDDLE, STEPS, rank, world)
    writing()
    restored = TrainStep(config, manifest)
    step = checkpoint.load(f"{folder}/{name}", **parts(restored))
    resumed = train(restored, manifest, rows, step, STEPS, rank, world)
    same_state = same(everything(state), everything(restored))
    # At last only the last rank meets a NaN.
    before = everything(state)
    bad = with_bits(with_keep(rows, [True] * len(rows)), NAN if rank == world - 1 else 0, slice(0, BATCH))
    skipped = state.step(STEPS, units(config, manifest, bad, 0, rank, world))
    unchanged = same(everything(state), before)
    return {
        "lines": lines,
        "validated": validated,
        "resumed": resumed,
        "same_state": same_state,
        "skipped": skipped,
        "unchanged": unchanged,
    }


def continue_from(folder, name, config, manifest, rows, rank, world):
    """Losses of two steps from a checkpoint: they show its weights, then its optimizer state."""
    state = TrainStep(config, manifest)
    step = checkpoint.load(f"{folder}/{name}", **parts(state))
    return column(train(state, manifest, rows, step, step + 2, rank, world)).tolist()


def worker(rank, folder, configs, manifest, rows):
    """One of four processes, which take part in the runs of so many ranks."""
    torch.set_num_threads(1)
    found, previous = {}, "alone"
    for name, (world, _) in RUNS.items():
        if rank < world:
            with group(folder, f"group of {name}", rank, world):
                config = TrainingConfig.from_dict(configs[name])
                found[name] = run_strategy(folder, name, config, manifest, rows, rank, world)
                found[name]["continued"] = continue_from(folder, previous, config, manifest, rows, rank, world)
        previous = name
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def one(recipe, manifest, rows):
    """One process without a process group: the reference. `(lines, state)` after all steps."""
    state = TrainStep(recipe(), manifest)
    return train(state, manifest, rows), state


@pytest.fixture(scope="module")
def runs(tmp_path_factory, recipe, manifest, rows):
    """`(what each rank found by run, the folder of the checkpoints)`, with one process's checkpoint "alone"."""
    folder = tmp_path_factory.mktemp("runs")
    state = TrainStep(recipe(), manifest)
    train(state, manifest, rows, 0, MIDDLE)
    save(folder / "alone", state, MIDDLE)
    options = {"max_skipped_steps": 1}
    configs = {
        name: recipe(num_training_workers=ranks, **options, **changes).to_dict()
        for name, (ranks, changes) in RUNS.items()
    }
    start_ranks(worker, (str(folder), configs, manifest, rows), nprocs=4)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {name: [found[name] for found in ranks if name in found] for name in RUNS}, folder


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
    alone = continue_from(run[1].parent, run[1].name, recipe(), manifest, rows, 0, 1)
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


@pytest.mark.parametrize("which", ["model", "ema"])
def test_it_has_the_weights_and_averages_of_one_process(run, recipe, which):
    def read(folder):
        return checkpoint.load_weights(folder, build_denoiser(recipe().unet_config, seed=9), which).state_dict()

    expected = read(run[1].parent / "alone")
    for name, value in read(run[1]).items():
        assert (value - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_all_ranks_skip_a_step_in_which_one_has_a_nan(run):
    """Bitwise, nothing changes: neither weights, moments and their counters of steps, nor averages."""
    for found in run[0]:
        assert np.isnan(found["skipped"]["loss"]) and found["skipped"]["skipped_steps"] == 1
        assert found["unchanged"]


def compiled_worker(rank, folder, configs, manifest, rows):
    """One of two processes that train eager and compiled: losses of all steps, and the gradients of the first."""
    torch.set_num_threads(1)
    found = {}
    with group(folder, "compiled", rank, 2):
        for name, config in configs.items():
            state, gradients = TrainStep(TrainingConfig.from_dict(config), manifest), []

            def keep(*_, state=state, gradients=gradients):
                gradients.append({name: whole(p.grad).clone() for name, p in state.denoiser.named_parameters()})

            state.optimizer.register_step_pre_hook(keep)
            found[name] = column(train(state, manifest, rows, 0, STEPS, rank, 2)), gradients[0]
    if rank == 0:
        torch.save(found, f"{folder}/compiled.pt")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
def test_compiled_strategies_have_the_gradients_of_eager_ones(tmp_path, recipe, manifest, rows):
    configs = {
        (strategy, compiled): recipe(strategy=strategy, compile_unet=compiled, num_training_workers=2).to_dict()
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


def test_a_group_of_one_trains_as_no_group_does(one, group_of_one, recipe, manifest, rows):
    assert train(TrainStep(recipe(), manifest), manifest, rows, 0, 2) == one[0][:2]


def test_one_worker_that_shards_in_bf16_trains_saves_and_goes_on(one, group_of_one, tmp_path, recipe, manifest, rows):
    """As one GPU does with strategy "fsdp": sharded over itself, for the U-Net in bf16 beside fp32 weights."""
    state = TrainStep(recipe(strategy="fsdp", precision="bf16"), manifest)
    found = train(state, manifest, rows, 0, MIDDLE)
    save(tmp_path / "c", state, MIDDLE)
    found += train(state, manifest, rows, MIDDLE)
    again = TrainStep(state.config, manifest)
    assert train(again, manifest, rows, checkpoint.load(tmp_path / "c", **parts(again))) == found[MIDDLE:]
    assert column(found) == pytest.approx(column(one[0]), rel=0.02) and (column(found) != column(one[0])).any()
    denoiser = checkpoint.load_weights(tmp_path / "c", build_denoiser(state.config.unet_config, seed=9), "model")
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.float32}


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("values", [{"strategy": "fsdp", "precision": "bf16"}, {"channels_last": True}], ids=str)
def test_an_evaluation_changes_no_modules_mode_layout_or_compiled_code(
    group_of_one, tmp_path, monkeypatch, recipe, manifest, rows, values
):
    """The nine blocks of Stable Diffusion 2, narrow: nine graphs before it, of any sizes, and none after it."""
    narrow = {"block_out_channels": [32] * 4, "attention_head_dim": [2] * 4, "cross_attention_dim": 128}
    narrow |= {"layers_per_block": 1}
    (tmp_path / "unet.json").write_text(json.dumps({**load_denoiser_config("sd2-base"), **narrow}))
    graphs, compile_module = [], torch.nn.Module.compile

    def compile_by_recording(module, **options):
        compile_module(module, backend=lambda graph, _: graphs.append(graph) or graph.forward, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_recording)
    torch.compiler.reset()
    state = TrainStep(recipe(unet_config=str(tmp_path / "unet.json"), compile_unet=True, **values), manifest)
    frozen = state.denoiser.mid_block.eval()  # in another mode than the rest
    train(state, manifest, rows, 0, 2)

    def look():
        modes = [module.training for module in state.denoiser.modules()]
        tensors = [*state.denoiser.parameters(), *state.ema.state_dict().values()]
        return modes, [(tensor.stride(), local(tensor).data_ptr()) for tensor in tensors]

    before, made = look(), len(graphs)
    with state.averaged() as denoiser:
        assert not any(module.training for module in denoiser.modules())
        validation_loss(denoiser, manifest, held_out(rows), state.config)
    assert look() == before and not frozen.training
    train(state, manifest, rows, 2, 4)
    assert made == len(graphs) == 9
    torch.compiler.reset()


# ---- one process


@pytest.mark.parametrize(
    "values", [{"micro_batch_size": 1}, {"units_per_step": 1}, {"units_per_step": 8}, {"channels_last": True}], ids=str
)
def test_the_size_of_micro_batches_and_units_and_the_layout_change_nothing(one, recipe, manifest, rows, values):
    found = train(TrainStep(recipe(**values), manifest), manifest, rows)
    np.testing.assert_allclose(column(found), column(one[0]), rtol=1e-5)


def test_training_twice_gives_the_same_bits_and_another_seed_another_run(one, recipe, manifest, rows):
    torch.manual_seed(99)
    state = TrainStep(recipe(), manifest)
    assert train(state, manifest, rows) == one[0] and same(everything(state), everything(one[1]))
    assert train(TrainStep(recipe(seed=1), manifest), manifest, rows, 0, 1)[0]["loss"] != one[0][0]["loss"]


@pytest.fixture
def kernels(monkeypatch, recipe, manifest):
    """What the process computes with: a function that reads it. As by default afterwards."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cuda = torch.backends.cuda

    def read():
        attention = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return (*attention, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())

    before = read()
    yield read
    TrainStep(recipe(), manifest)
    assert read() == before


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (True, True, True, False, False)),
        ({"cudnn_benchmark": True}, (True, True, True, True, False)),
        ({"attention": "cudnn"}, (True, False, False, False, False)),
        ({"attention": "flash"}, (False, True, False, False, False)),
        ({"attention": "efficient"}, (False, False, True, False, False)),
        ({"deterministic": True}, (False, False, False, False, True)),
    ],
    ids=str,
)
def test_a_run_computes_with_the_kernels_of_its_config(one, kernels, recipe, manifest, rows, values, expected):
    """And has the losses of any other; every operation of a step has a deterministic implementation, on a CPU."""
    state = TrainStep(recipe(**values), manifest)
    assert kernels() == expected and torch.backends.cuda.math_sdp_enabled()
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == expected[-1]
    assert torch.compiler.config.cache_key_tag == state.config.attention
    np.testing.assert_allclose(column(train(state, manifest, rows, 0, 2)), column(one[0])[:2], rtol=1e-5)


def test_the_loss_is_the_mean_over_unmasked_rows(recipe, manifest, rows):
    state = TrainStep(recipe(), manifest)
    batch = units(state.config, manifest, rows, 0)
    with torch.no_grad():
        per_row = torch.cat([state.row_losses(unit, 0) for unit in batch])
    keep = torch.cat([unit.keep_U for unit in batch])
    assert (per_row[~keep] == 0).all() and (per_row[keep] > 0).all() and not keep.all()
    line = state.step(0, batch)
    assert line["loss"] == pytest.approx(per_row[keep].mean().item(), rel=1e-5)
    assert line["learning_rate"] == pytest.approx(state.config.learning_rate / 2) and line["grad_norm"] > 0


def test_the_gradient_is_clipped_to_a_norm_of_one(recipe, manifest, rows):
    state, norms = TrainStep(recipe(), manifest), []

    def look(optimizer, *_):
        norm = torch.stack([parameter.grad.norm() for parameter in state.denoiser.parameters()]).norm()
        norms.append((norm / optimizer.grad_scale).item())

    state.optimizer.register_step_pre_hook(look)
    (line,) = train(state, manifest, with_bits(rows, np.float16(100).view(np.uint16), slice(None)), 0, 1)
    assert line["grad_norm"] > 1 and norms == [pytest.approx(1, rel=1e-3)]
    assert all(parameter.grad is None for parameter in state.denoiser.parameters())


# ---- beside the step


def test_the_next_steps_tensors_are_made_in_a_thread(monkeypatch, recipe, manifest, build_latents):
    """While a step is trained on; but its rejects are counted when it is begun, as a checkpoint before it needs."""
    blocks = [build_latents(BATCH).append_column(UNIT, pa.array([number] * BATCH)) for number in range(3)]
    shard = types.SimpleNamespace(iter_batches=lambda **options: iter(blocks))
    monkeypatch.setattr(ray.train, "get_dataset_shard", lambda name: shard)
    made, threads, rejected, from_arrow = [threading.Event() for _ in blocks], [], [], Unit.from_arrow

    def record(table, *arguments):
        unit = from_arrow(table, *arguments)
        threads.append(threading.current_thread())
        made[table[UNIT][0].as_py()].set()
        return unit

    monkeypatch.setattr(Unit, "from_arrow", record)
    rejects = types.SimpleNamespace(add=lambda rows: rejected.append(rows[UNIT][0].as_py()))
    config = recipe(units_per_step=1, max_steps=3)
    source = sources.StepSource(config)
    source.data = DataSets({config.latents_uri: manifest}, config.proportions)
    steps = source.steps(0, rejects)
    for step, (mine, _) in enumerate(steps):
        assert len(mine) == 1 and rejected == list(range(step + 1))
        assert step == 2 or made[step + 1].wait(60)
    assert step == 2 and threading.main_thread() not in threads


def test_metrics_that_cannot_be_written_stop_the_worker():
    def write(*arguments, **speed):
        raise OSError("the disk is full")

    writer = loop.MetricsWriter(types.SimpleNamespace(write=write))
    writer.write(1, {"loss": 1.0}, [], 0, {})
    with pytest.raises(OSError, match="the disk is full"):
        writer.write(2, {"loss": 1.0}, [], 0, {})


# ---- masked rows and captions


def test_masked_rows_do_not_matter_whatever_their_bits_are(one, recipe, manifest, rows):
    state = TrainStep(recipe(), manifest)
    changed = with_bits(with_bits(rows, INFINITY, ~KEEP), NAN, ~KEEP, schema.EMBEDDINGS)
    assert train(state, manifest, changed) == one[0] and same(everything(state), everything(one[1]))


def test_a_fully_masked_batch_has_no_loss_and_no_gradient(recipe, manifest, rows):
    (line,) = train(TrainStep(recipe(), manifest), manifest, with_keep(rows, [False] * len(rows)), 0, 1)
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


def test_dropped_captions_are_trained_as_the_empty_one(recipe, manifest, rows):
    """With nearly every caption dropped, the captions themselves do not matter."""
    state, seen = TrainStep(recipe(caption_dropout=0.999999), manifest), []

    def look(module, arguments, named):
        seen.append(named["encoder_hidden_states"])

    state.denoiser.register_forward_pre_hook(look, with_kwargs=True)
    train(state, manifest, rows, 0, 1)
    empty = torch.from_numpy(manifest.empty_caption.astype(np.float32))
    assert seen and all(torch.equal(text, empty.expand_as(text)) for text in seen)


# ---- values that are not finite


@pytest.mark.parametrize("good_steps", [0, 1])
def test_a_skipped_step_changes_nothing_and_is_counted(recipe, manifest, rows, good_steps):
    """Neither a step later on nor the very first one; one more in a row than `max_skipped_steps` ends the run."""
    state, other = (TrainStep(recipe(max_skipped_steps=2), manifest) for _ in range(2))
    bad = with_bits(rows, NAN, np.flatnonzero(KEEP)[0])
    for each in (state, other):
        train(each, manifest, rows, 0, good_steps)
    for number in (1, 2):
        line = state.step(number, units(state.config, manifest, bad, 0))
        assert line["skipped_steps"] == number and np.isnan(line["loss"])
        assert good_steps == 0 or same(everything(state), everything(other))
    assert [train(each, manifest, rows, 3, 4)[0]["skipped_steps"] for each in (state, other)] == [0, 0]
    if good_steps:  # the EMA begins with a copy of the weights after the first step, even if that is skipped
        assert same(everything(state), everything(other))
    for number in (4, 5):
        state.step(number, units(state.config, manifest, bad, 0))
    with pytest.raises(FloatingPointError, match="^The loss at step 6 is nan: .* than max_skipped_steps=2.$"):
        state.step(6, units(state.config, manifest, bad, 0))


def test_an_infinite_gradient_raises_before_any_weight_changes(recipe, manifest, rows):
    """Or the weights would be NaN, and so a checkpoint of this very step."""
    state = TrainStep(recipe(), manifest)
    train(state, manifest, rows, 0, 1)
    before = everything(state)
    state.denoiser.conv_in.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(FloatingPointError, match="^The gradient at step 1 is (inf|nan): check the latents, lower"):
        train(state, manifest, rows, 1, 2)
    assert same(everything(state), before)


class CountSyncs(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: values that it reads, and sizes that depend on values."""

    number = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        self.number += operation.overloadpacket.__name__ in waits
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("values", [{}, {"strategy": "fsdp", "precision": "bf16"}], ids=str)
def test_the_host_waits_for_the_device_once_a_step(group_of_one, recipe, manifest, rows, values):
    """At most: `tolist` at the end of the step, which the mode does not see on a CPU."""
    state = TrainStep(recipe(micro_batch_size=1, **values), manifest)
    assert isinstance(next(state.model.parameters()), DTensor) == bool(values)
    train(state, manifest, rows, 0, 2)  # the EMA begins with a copy
    batch = units(state.config, manifest, rows, 2)
    with CountSyncs() as counted:
        state.step(2, batch)
        assert torch.tensor(1).item() == 1
    assert counted.number - 1 <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_a_gpu_once_a_step(recipe, manifest, rows):
    state = TrainStep(recipe(micro_batch_size=1), manifest, "cuda")
    train(state, manifest, rows, 0, 2)
    batch = units(state.config, manifest, rows, 2)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        state.step(2, batch)
    torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in waits if "synchronizing CUDA operation" in str(one.message)]) <= 1


# ---- checkpoints of one process


@pytest.mark.parametrize("ema_start", [0, 3, 4, 100])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, one, recipe, manifest, rows, ema_start):
    state = TrainStep(recipe(ema_start=ema_start), manifest)
    straight = train(state, manifest, rows, 0, MIDDLE)
    save(tmp_path, state, MIDDLE)
    straight += train(state, manifest, rows, MIDDLE)
    assert straight == one[0]  # neither saving nor the EMA changes a run
    restored = TrainStep(recipe(ema_start=ema_start, checkpoint_every=3, validate_every=0), manifest)
    assert checkpoint.load(tmp_path, **parts(restored)) == checkpoint.step_of(tmp_path) == MIDDLE
    assert train(restored, manifest, rows, MIDDLE) == straight[MIDDLE:]
    assert same(everything(state), everything(restored))


@pytest.mark.parametrize("ema_start", [0, 100])
def test_two_async_saves_with_a_step_between_each_go_on_with_the_runs_losses(
    tmp_path, monkeypatch, one, recipe, manifest, rows, ema_start
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
        tensors = [
            *made["model"].values(),
            *made["ema"].values(),
            *made["optimizer"]["state"]["conv_in.weight"].values(),
        ]
        places.append([tensor.data_ptr() for tensor in tensors])
        return made

    monkeypatch.setattr(checkpoint.dcp.FileSystemWriter, "write_data", write_late)
    monkeypatch.setattr(stager, "stage", record)
    state = TrainStep(recipe(ema_start=ema_start), manifest)
    found = train(state, manifest, rows, 0, 2)
    for step in (2, 3):
        held[step] = everything(state)
        finish = checkpoint.async_save(tmp_path / str(step), **parts(state), step=step, stager=stager)
        found += train(state, manifest, rows, step, step + 1)
        assert checkpoint.find_corruption(tmp_path / str(step))  # not there before it is finished
        trained.set()
        finish()
        trained.clear()
    stager.close()
    assert found + train(state, manifest, rows, 4) == one[0] and places[0] == places[1]
    for step in (2, 3):
        restored = TrainStep(recipe(ema_start=ema_start), manifest)
        assert checkpoint.load(tmp_path / str(step), **parts(restored)) == step
        assert same(everything(restored), held[step]) and train(restored, manifest, rows, step) == one[0][step:]
