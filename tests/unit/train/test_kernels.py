"""What a step computes with: kernels, memory layout, compiled code; and how often the host waits for the device."""

import json
import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.distributed import local
from helpers.evaluate import validation_loss
from helpers.model.denoisers import load_denoiser_config
from tests.steps import column, held_out, train, units

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kernels(monkeypatch, build_step):
    """What the process computes with: a function that reads it. As by default afterwards."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cuda = torch.backends.cuda

    def read():
        attention = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return (*attention, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())

    before = read()
    yield read
    build_step()
    assert read() == before


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (True, True, True, False, False)),
        ({"attention": "cudnn"}, (True, False, False, False, False)),
        ({"attention": "flash"}, (False, True, False, False, False)),
        ({"attention": "efficient"}, (False, False, True, False, False)),
        ({"deterministic": True}, (False, False, False, False, True)),
    ],
    ids=str,
)
def test_a_run_computes_with_the_kernels_of_its_config(one, kernels, build_step, rows, values, expected):
    """And has the losses of any other; every operation of a step has a deterministic implementation, on a CPU."""
    state = build_step(**values)
    assert kernels() == expected and torch.backends.cuda.math_sdp_enabled()
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == expected[-1]
    assert torch.compiler.config.cache_key_tag == state.config.attention
    np.testing.assert_allclose(column(train(state, rows, 0, 2)), column(one[0])[:2], rtol=1e-5)


@pytest.mark.parametrize("values", [{"strategy": "fsdp", "precision": "bf16"}, {}], ids=str)
def test_an_evaluation_changes_no_modules_mode_layout_or_compiled_code(
    group_of_one, graphs, tmp_path, build_step, rows, values
):
    """The nine blocks of Stable Diffusion 2, narrow: nine graphs before it, of any sizes, and none after it."""
    narrow = {"block_out_channels": [32] * 4, "attention_head_dim": [2] * 4, "cross_attention_dim": 128}
    narrow |= {"layers_per_block": 1}
    (tmp_path / "unet.json").write_text(json.dumps({**load_denoiser_config("sd2-base"), **narrow}))
    state = build_step(unet_config=str(tmp_path / "unet.json"), compile_unet=True, **values)
    frozen = state.denoiser.mid_block.eval()  # in another mode than the rest
    train(state, rows, 0, 2)

    def look():
        modes = [module.training for module in state.denoiser.modules()]
        tensors = [*state.denoiser.parameters(), *state.ema.state_dict().values()]
        return modes, [(tensor.stride(), local(tensor).data_ptr()) for tensor in tensors]

    before, made = look(), len(graphs)
    with state.averaged() as denoiser:
        assert not any(module.training for module in denoiser.modules())
        validation_loss(denoiser, state.manifest, held_out(rows), state.config)
    assert look() == before and not frozen.training
    train(state, rows, 2, 4)
    assert made == len(graphs) == 9


class CountSyncs(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: values that it reads, and sizes that depend on values."""

    number = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        self.number += operation.overloadpacket.__name__ in waits
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("values", [{}, {"strategy": "fsdp", "precision": "bf16"}], ids=str)
def test_the_host_waits_for_the_device_once_a_step(group_of_one, build_step, rows, values):
    """At most: `tolist` at the end of the step, which the mode does not see on a CPU."""
    state = build_step(micro_batch_size=1, **values)
    assert isinstance(next(state.model.parameters()), DTensor) == bool(values)
    train(state, rows, 0, 2)  # the EMA begins with a copy
    batch = units(state, rows, 2)
    with CountSyncs() as counted:
        state.step(2, batch)
        assert torch.tensor(1).item() == 1
    assert counted.number - 1 <= 1
