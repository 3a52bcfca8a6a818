"""`Encoder` and `LatentEncoder`. No Ray."""

import time

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from helpers.config import PreprocessingConfig
from helpers.encode import encoder, prepare, stages
from helpers.encode.captions import load_tokenizer, tokenize
from helpers.encode.job import timeline
from helpers.latents import schema
from tests.unit.latents.test_buckets import raw_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def random_batch(num_rows=3):
    random = np.random.default_rng(0)
    pixels = {
        f"pixels{size}": random.integers(0, 256, size=(num_rows, side, side, 3), dtype=np.uint8)
        for size, side in (("", 32), ("_64", 64))
    }
    captions = tokenize(["a red circle", "", "two squares"][:num_rows], load_tokenizer("tiny-sd"))
    return {"name": np.arange(num_rows), **pixels, "caption_ids": captions}


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_dict_of_arrays_is_encoded_without_a_schema(batch_size):
    """Several sizes at once; what is neither pixels nor token ids stays."""
    batch, latent_encoder = random_batch(), encoder.Encoder("tiny-sd", batch_size=batch_size)
    found = latent_encoder(batch)
    assert {name: (values.shape, values.dtype.name) for name, values in found.items()} == {
        "name": ((3,), "int64"),
        "latents": ((3, 2, 4, 4, 4), "float16"),
        "latents_64": ((3, 2, 4, 8, 8), "float16"),
        "embeddings": ((3, 24, 128), "float16"),
        "finite": ((3,), "bool"),
    }
    assert found["finite"].all()
    pixels = torch.from_numpy(batch["pixels"]).permute(0, 3, 1, 2) / 127.5 - 1
    posterior = latent_encoder.vae.encode(pixels).latent_dist
    np.testing.assert_allclose(found["latents"][:, 0], posterior.mean, rtol=0.01, atol=0.02)
    np.testing.assert_allclose(found["latents"][:, 1], posterior.std, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_a_cpu_computes_in_fp32(monkeypatch, precision):
    """And the manifest, by which a job is resumed wherever it goes on, names what was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    half, full = (encoder.Encoder("tiny-sd", name) for name in (precision, "fp32"))
    assert {p.dtype for part in (half.vae, half.text_encoder) for p in part.parameters()} == {torch.float32}
    np.testing.assert_array_equal(half(random_batch())["latents"], full(random_batch())["latents"])
    config = PreprocessingConfig(resolutions=[32], encoder_precision=precision)
    assert prepare.describe_encoder(config)["encoder"]["precision"] == precision


@pytest.mark.parametrize("overflowing", ["moments", "embeddings"])
def test_a_row_that_overflows_half_precision_is_rejected(monkeypatch, overflowing):
    """The second batch of three rows, by its last values; a picture that was rejected before keeps its reason."""
    config = PreprocessingConfig(resolutions=[32], encoder_batch_size=3)
    rows = stages.transform(raw_rows([(40, 40)] * 4 + [(8, 8)] + [(40, 40)] * 4), config=config)
    actor, batches = encoder.LatentEncoder(**prepare.encoder_arguments(config)), []
    encode = getattr(actor.encoder, overflowing)

    def overflow(inputs):
        values = encode(inputs)
        batches.append(len(values))
        if len(batches) == 2:
            values[:, -1] = torch.inf
        return values

    monkeypatch.setattr(actor.encoder, overflowing, overflow)
    found = actor(rows)
    reasons = ["", "", "", "no finite", "smaller", "no finite", "no finite", "", ""]
    assert batches == [3, 3, 2]
    assert all(
        reason in text and bool(reason) == bool(text)
        for reason, text in zip(reasons, found["reason"].to_pylist(), strict=True)
    )
    for column in ("image_latents_32", schema.EMBEDDINGS):
        assert pc.is_valid(found[column]).to_pylist() == [reason == "" for reason in reasons]


def test_a_clock_that_is_set_back_leaves_a_calls_times_in_order(monkeypatch):
    """It once gave a job's timeline an end before its start: an IndexError, after the segment was encoded."""
    config = PreprocessingConfig(resolutions=[32])
    actor = encoder.LatentEncoder(**prepare.encoder_arguments(config))
    rows, calls, now = stages.transform(raw_rows([(40, 40)]), config=config), [], iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    for _ in range(3):
        calls += actor(rows)["encoder_call"].to_pylist()
    times = [call[name] for call in calls for name in ("started", "ended")]
    assert times == sorted(times) and len(timeline(calls)) == int(times[-1] - times[0])


# ---- what it computes with


def test_channels_last_is_applied_by_the_config_and_changes_no_latents():
    config = PreprocessingConfig(channels_last=True, resolutions=[32])
    fast, plain = encoder.Encoder(**prepare.encoder_options(config)), encoder.Encoder("tiny-sd")
    assert fast.vae.encoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    batch = random_batch()
    np.testing.assert_allclose(fast(batch)["latents"], plain(batch)["latents"], atol=2e-3)


def test_without_a_compiler_an_encoder_is_not_compiled_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    fast = encoder.Encoder("tiny-sd", batch_size=4, compiled=True)
    said = "compile_encoder=True is skipped: there is no C++ compiler (g++ or clang++) on this machine.\n"
    assert capsys.readouterr().out == said and fast.vae.encoder._compiled_call_impl is None and not fast.compiled


def test_a_compiled_encoder_is_compiled_once_for_each_shape(monkeypatch):
    """Also where a call leaves fewer rows than a batch, which happens whenever rows are rejected."""
    compile_module, sizes = torch.nn.Module.compile, []

    def record(graph, arguments):
        sizes.append([value.shape for value in arguments if getattr(value, "ndim", 0) == 4])
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compile_module(module, backend=record))
    monkeypatch.setattr("shutil.which", lambda name: name)  # recording needs no C++ compiler
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        config = PreprocessingConfig(compile_encoder=True, encoder_batch_size=4)
        fast, plain = encoder.Encoder(**prepare.encoder_options(config)), encoder.Encoder("tiny-sd", batch_size=4)
        for num_rows, size in ((4, 32), (6, 32), (1, 32), (3, 64)):
            pixels = np.random.default_rng(num_rows).integers(0, 256, (num_rows, size, size, 3), dtype=np.uint8)
            found, expected = fast.encode_images(pixels), plain.encode_images(pixels)
            assert found[0].shape == expected[0].shape and found[1].shape == (num_rows,)
            np.testing.assert_allclose(found[0], expected[0], atol=2e-3)
    torch.compiler.reset()
    assert len(sizes) == 2
