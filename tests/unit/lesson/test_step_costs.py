"""Where a step's time goes, by category of work."""

import pytest
import torch

from helpers.lesson import step_costs
from helpers.model.denoisers import build_denoiser

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_have_the_category_of_their_work():
    kinds = {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "aten::scaled_dot_product_attention": "attention",
        "sm90_xmma_fprop_implicit_gemm_bf16": "convolution",
        "nvjet_hsh_128x256": "matrix product",
        "aten::group_norm": "norm",
        "Memcpy DtoD": "copy",
        "triton_poi_fused_convolution_3": "elementwise and rest",
        "triton_red_fused_convolution_native_group_norm_silu_7": "norm",
        "void cudnn::ops::nchwToNhwcKernel": "layout",
        "multi_tensor_apply_kernel": "optimizer",
        "vectorized_elementwise_kernel": "elementwise and rest",
    }
    assert {name: step_costs.op_category(name) for name in kinds} == kinds


def test_a_profile_adds_up_and_names_what_a_unet_does():
    denoiser = build_denoiser("tiny")
    with step_costs.profiled() as events:
        denoiser(
            torch.randn(2, 4, 8, 8), torch.zeros(2).long(), torch.randn(2, 6, 128)
        ).sample.square().mean().backward()
    table = step_costs.time_by_category(events)
    assert table["share"].sum() == pytest.approx(1) and {"convolution", "attention", "norm"} <= set(table["kind"])
    assert step_costs.exposed_communication(events) == 0


def test_communication_that_overlaps_with_compute_is_not_exposed():
    events = [("aten::conv", 0, 60), ("gloo:all_reduce", 50, 80), ("aten::addmm", 80, 90), ("gloo:all_reduce", 95, 100)]
    assert step_costs.exposed_communication(events) == pytest.approx(0.25)
    assert step_costs.exposed_communication([]) == step_costs.exposed_communication(events[:1]) == 0
