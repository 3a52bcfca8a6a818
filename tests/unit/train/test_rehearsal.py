"""What differs on GPUs, rehearsed without any: the full U-Net's step on fake tensors, and 32 ranks, one of them here.

Convolutions of fake CUDA tensors and DDP cannot be rehearsed so: `python -m tests.benchmarks.gpu_checks` tries them.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.config import TrainingConfig
from helpers.distributed import local
from helpers.lesson import ablations, estimates
from helpers.model import sharding
from helpers.train.step import TrainStep

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS, RANKS_PER_NODE = 32, 8


# ---- shapes and dtypes


# ---- memory on 32 ranks


@pytest.fixture
def ranks(monkeypatch):
    """This process as rank 0 of 32, eight a node, whose collectives do nothing; its meshes are no fake tensors."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS_PER_NODE))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    meshes = {
        (RANKS,): init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",)),
        (RANKS // RANKS_PER_NODE, RANKS_PER_NODE): init_device_mesh(
            "cpu", (RANKS // RANKS_PER_NODE, RANKS_PER_NODE), mesh_dim_names=("replicate", "shard")
        ),
    }
    monkeypatch.setattr(sharding, "init_device_mesh", lambda kind, shape, **_: meshes[shape])
    monkeypatch.setattr(sharding, "shard_size", lambda device: RANKS_PER_NODE)  # asks every rank
    # Fake tensors have no values to draw.
    monkeypatch.setattr(
        sharding, "allocate_weights", lambda denoiser, name, seed, device, _: denoiser.to_empty(device=device)
    )
    yield
    dist.destroy_process_group()


def held_on_rank_0(name, strategy):
    """Bytes by kind, as `estimates.memory` names them, of a forward pass, a backward pass and an update of AdamW.

    Asserts dtypes on the way.
    """
    config = TrainingConfig(
        unet_config=name,
        resolution=256,
        global_batch_size=2 * RANKS,
        units_per_step=RANKS,
        num_training_workers=RANKS,
        strategy=strategy,
        precision="bf16",
        ema_start=10**9,
        timestep_sampling="uniform",  # fake tensors have no weights to read
    )
    manifest, (unit,) = ablations.random_batch(config, 0, RANKS)
    gathered, dtypes = [], set()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = TrainStep(config, manifest)

        def in_forward(module, inputs):
            gathered.append(sum(p.nbytes for p in state.denoiser.parameters() if not isinstance(p, DTensor)))
            dtypes.update(p.dtype for p in module.parameters(recurse=False))

        for module in state.denoiser.modules():
            module.register_forward_pre_hook(in_forward)
        for field in ("moments", "text", "keep_U"):
            setattr(unit, field, mode.from_tensor(getattr(unit, field)))
        losses = state.row_losses(unit, 0)
        assert losses.shape == (2,) and losses.dtype == torch.float32
        losses.sum().backward()
        parameters = list(state.denoiser.parameters())
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in parameters)
        held = {"gradients": sum(local(p.grad).nbytes for p in parameters)}
        state.optimizer.step()
        moments = [value for one in state.optimizer.state.values() for key, value in one.items() if key != "step"]
        held["optimizer"] = sum(local(value).nbytes for value in moments)
        held["parameters"] = sum(local(p).nbytes for p in parameters)
    assert torch.bfloat16 in dtypes  # what a block computes with, norms included
    return {**held, "gathered": max(gathered)}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("tiny", "fsdp"),
        pytest.param("tiny", "fsdp-full", marks=pytest.mark.slow),
        pytest.param("tiny", "hsdp", marks=pytest.mark.slow),
        pytest.param("sd2-base", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_32_holds_the_bytes_that_were_estimated(ranks, name, strategy):
    expected = estimates.memory(name, strategy, RANKS, precision="bf16", ranks_per_node=RANKS_PER_NODE)
    assert held_on_rank_0(name, strategy) == expected
    table = estimates.memory_table(name, ranks=(RANKS,), precision="bf16").set_index("strategy")
    assert table.loc[strategy, "all"] * 2**30 == pytest.approx(sum(expected.values()))
