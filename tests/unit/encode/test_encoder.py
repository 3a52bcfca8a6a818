"""The actor, and its use on plain arrays. No Ray."""

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from helpers.config import PreprocessingConfig
from helpers.encode import encoder, prepare, stages
from helpers.encode.captions import caption_ids
from helpers.latents import schema
from tests.unit.latents.test_buckets import raw_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def random_pixels(num_rows=3, side=32):
    return np.random.default_rng(num_rows).integers(0, 256, size=(num_rows, side, side, 3), dtype=np.uint8)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_plain_arrays_are_encoded_as_the_networks_do(batch_size):
    latent_encoder = encoder.LatentEncoder("tiny-sd", batch_size=batch_size)
    moments, finite = latent_encoder.encode_images(random_pixels())
    assert (moments.shape, moments.dtype) == ((3, 2, 4, 4, 4), np.float16) and finite.all()
    ids = caption_ids(["a red circle", "", "two squares"], PreprocessingConfig())
    embeddings, finite = latent_encoder.encode_captions(ids)
    assert (embeddings.shape, embeddings.dtype) == ((3, 24, 128), np.float16) and finite.all()
    pixels = torch.from_numpy(random_pixels()).permute(0, 3, 1, 2) / 127.5 - 1
    posterior = latent_encoder.vae.encode(pixels).latent_dist
    np.testing.assert_allclose(moments[:, 0], posterior.mean, rtol=0.01, atol=0.02)
    np.testing.assert_allclose(moments[:, 1], posterior.std, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_a_cpu_computes_in_fp32(monkeypatch, precision):
    """And the manifest, by which a job is resumed wherever it goes on, names what was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    half = encoder.LatentEncoder("tiny-sd", precision=precision)
    assert {p.dtype for part in (half.vae, half.text_encoder) for p in part.parameters()} == {torch.float32}
    config = PreprocessingConfig(resolutions=[32], encoder_precision=precision)
    assert prepare.describe_encoder(config)["encoder"]["precision"] == precision


@pytest.mark.parametrize("overflowing", ["moments", "embeddings"])
def test_a_row_that_overflows_half_precision_is_rejected(monkeypatch, overflowing):
    """The second batch of three rows, by its last values; a picture that was rejected before keeps its reason."""
    config = PreprocessingConfig(resolutions=[32], encoder_batch_size=3)
    rows = stages.transform(raw_rows([(40, 40)] * 4 + [(8, 8)] + [(40, 40)] * 4), config=config)
    actor, batches = encoder.LatentEncoder(**prepare.encoder_arguments(config)), []
    encode = getattr(actor, overflowing)

    def overflow(inputs):
        values = encode(inputs)
        batches.append(len(values))
        if len(batches) == 2:
            values[:, -1] = torch.inf
        return values

    monkeypatch.setattr(actor, overflowing, overflow)
    found = actor(rows)
    reasons = ["", "", "", "no finite", "smaller", "no finite", "no finite", "", ""]
    assert batches == [3, 3, 2]
    assert all(
        reason in text and bool(reason) == bool(text)
        for reason, text in zip(reasons, found["reason"].to_pylist(), strict=True)
    )
    for column in ("image_latents_32", schema.EMBEDDINGS):
        assert pc.is_valid(found[column]).to_pylist() == [reason == "" for reason in reasons]


# ---- what it computes with


def test_channels_last_is_for_one_small_size_on_gpus_and_changes_no_latents():
    chosen = [
        prepare.encoder_arguments(PreprocessingConfig(resolutions=resolutions, gpus_per_encoder=gpus))["channels_last"]
        for resolutions, gpus in (([256], 1), ([256], 0), ([512], 1), ([32, 64], 1))
    ]
    assert chosen == [True, False, False, False]
    fast, plain = encoder.LatentEncoder("tiny-sd", channels_last=True), encoder.LatentEncoder("tiny-sd")
    assert fast.vae.encoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    found, expected = (made.encode_images(random_pixels())[0] for made in (fast, plain))
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_a_compiled_encoder_is_compiled_once_for_each_shape(monkeypatch):
    """Also where a call leaves fewer rows than a batch, which happens whenever rows are rejected."""
    compile_module, sizes = torch.nn.Module.compile, []

    def record(graph, arguments):
        sizes.append([value.shape for value in arguments if getattr(value, "ndim", 0) == 4])
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compile_module(module, backend=record))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        fast = encoder.LatentEncoder("tiny-sd", batch_size=4, compile=True)
        plain = encoder.LatentEncoder("tiny-sd", batch_size=4)
        for num_rows, size in ((4, 32), (6, 32), (1, 32), (3, 64)):
            pixels = random_pixels(num_rows, size)
            found, expected = fast.encode_images(pixels), plain.encode_images(pixels)
            assert found[0].shape == expected[0].shape and found[1].shape == (num_rows,)
            np.testing.assert_allclose(found[0], expected[0], atol=2e-3)
    torch.compiler.reset()
    assert len(sizes) == 2
