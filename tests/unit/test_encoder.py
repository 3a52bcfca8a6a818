"""What `LatentEncoder` computes in."""

import numpy as np
import pytest
import torch

from helpers import encoder, preprocess
from helpers.config import PreprocessingConfig


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_a_cpu_computes_in_fp32(one_thread, monkeypatch, precision):
    """And the manifest, by which a job is resumed wherever it goes on, names what was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    half, full = (PreprocessingConfig(resolutions=[32], encoder_precision=name) for name in (precision, "fp32"))
    pixels = np.random.default_rng(0).integers(0, 256, size=(2, 32, 32, 3), dtype=np.uint8)
    found, expected = (encoder.LatentEncoder(*encoder.arguments(config)) for config in (half, full))
    assert {p.dtype for net in (found.vae, found.text_encoder) for p in net.parameters()} == {torch.float32}
    np.testing.assert_array_equal(found.encode_images(pixels), expected.encode_images(pixels))
    assert preprocess.describe(half)["encoder"]["precision"] == precision
