"""Other autoencoders and text encoders, and captions that are stored without padding. No Ray."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import PRXPipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import sample
from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import encoder, prepare
from helpers.encode.captions import caption_ids, load_tokenizer
from helpers.latents import read, schema
from helpers.model import diffusion
from helpers.model.denoisers import load_denoiser_config
from helpers.train.step import TrainStep, Unit
from tests.latents import plan_for, read_steps, refuse
from tests.models import CHANNELS, DOWNSAMPLING, WIDTH, tiny_model
from tests.unit.encode.test_several_captions import encode, write_raw

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["CLIPTextModel", "T5EncoderModel", "T5GemmaEncoder"]
CAPTIONS = ["a red circle above the blue square", "", "a", "two large green triangles & a small one, left of it " * 2]
LATENTS = {"AutoencoderKL": "moments", "AutoencoderDC": "mean"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function that gives the folder of a tiny model of two classes."""
    made = {}

    def build(vae="AutoencoderKL", text="T5EncoderModel"):
        if (vae, text) not in made:
            made[vae, text] = tiny_model(tmp_path_factory.mktemp("model"), vae, text)
        return made[vae, text]

    return build


def pixels_of(num_rows, side=32):
    return np.random.default_rng(0).integers(0, 256, (num_rows, side, side, 3), dtype=np.uint8)


# ---- the networks


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderDC"])
def test_latents_are_those_of_the_class_itself(model, name):
    """Shifted and scaled as diffusers' pipelines do before their denoisers see them."""
    made, vae = encoder.LatentEncoder(model(name)), encoder.load_vae(model(name))
    found, finite = made.encode_images(pixels_of(3))
    pixels = torch.from_numpy(pixels_of(3)).permute(0, 3, 1, 2) / 127.5 - 1
    encoded = vae.encode(pixels)
    expected = encoded.latent if name == "AutoencoderDC" else encoded.latent_dist.mean
    side = 32 // DOWNSAMPLING[name]
    assert found.shape == (3, 1 if name == "AutoencoderDC" else 2, CHANNELS[name], side, side) and finite.all()
    assert encoder.downsampling(encoder.vae_config(model(name))) == DOWNSAMPLING[name]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-3, atol=1e-3)
    description = prepare.describe_encoder(config_of(model(name), latents=LATENTS[name]))
    scales = description["scaling_factor"], description["shift_factor"]
    drawn = diffusion.sample_latents(torch.from_numpy(found[:, :1]), torch.zeros(expected.shape), *scales)
    shift = getattr(vae.config, "shift_factor", 0)
    torch.testing.assert_close(drawn, (expected - shift) * vae.config.scaling_factor, rtol=1e-3, atol=1e-3)
    assert (shift != 0) == (name == "AutoencoderKL")
    assert sample.reconstruct(model(name), found).shape == (3, 32, 32, 3)


@pytest.mark.parametrize("text", TEXTS)
def test_masked_text_is_that_of_single_captions_without_padding(model, text):
    folder = model(text=text)
    made, config = encoder.load_text_encoder(folder), config_of(folder, maximum_tokens=20)
    ids_BL, tokenizer = caption_ids(CAPTIONS, config), load_tokenizer(folder)
    with torch.no_grad():
        found = encoder.last_states(made, torch.from_numpy(ids_BL))
    for caption, ids_L, states_LD in zip(CAPTIONS, ids_BL, found, strict=True):
        ids = tokenizer(caption, truncation=True, max_length=20, return_tensors="pt").input_ids
        assert ids_L[ids_L >= 0].tolist() == ids[0].tolist()
        with torch.no_grad():
            expected = made(ids).last_hidden_state[0]
        torch.testing.assert_close(states_LD[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert (states_LD[len(expected) :] == 0).all()


def test_captions_are_prepared_as_the_stock_pipeline_prepares_prompts(model):
    prompts = ["  A RED Circle&amp;amp;", "sch\u00c3\u00b6n &quot;blue&quot; "]
    folder = model(text="T5GemmaEncoder")
    parts = {"tokenizer": load_tokenizer(folder), "vae": encoder.load_vae(model())}
    parts |= {"text_encoder": encoder.load_text_encoder(folder), "transformer": None, "scheduler": None}
    drawing = PRXPipeline(**parts)
    drawing.tokenizer.model_max_length = 24
    stock, mask, *_ = drawing.encode_prompt(
        prompts, do_classifier_free_guidance=False, skip_text_cleaning=True, device=torch.device("cpu")
    )
    config = config_of(folder, maximum_tokens=stock.shape[1], text_cleaning="ftfy")
    ids_BL = caption_ids(prompts, config)
    with torch.no_grad():
        found = encoder.last_states(parts["text_encoder"], torch.from_numpy(ids_BL))
    for ours, ids_L, theirs, mask_L in zip(found, ids_BL, stock, mask, strict=True):
        torch.testing.assert_close(ours[ids_L >= 0], theirs[mask_L.bool()], rtol=1e-5, atol=1e-5)


# ---- a column of rows of different lengths


@st.composite
def captions(draw):
    """(values (B, L, D) of any fp16 bits, zeros beyond each row's tokens; their numbers; which rows there are)."""
    rows, most, width = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_tokens = np.array(draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)))
    bits = draw(st.lists(st.integers(0, 2**16 - 1), min_size=rows * most * width, max_size=rows * most * width))
    values = np.array(bits, np.uint16).reshape(rows, most, width)
    values[np.arange(most) >= num_tokens[:, None]] = 0
    valid = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    return values.view(np.float16), num_tokens, valid


@settings(max_examples=60, deadline=None)
@given(captions(), st.data())
def test_rows_of_any_length_come_back_bit_by_bit(made, data):
    """From files, slices, chunks and in another order."""
    values, num_tokens, valid = made
    spec = schema.ColumnSpec(schema.EMBEDDINGS, values.shape[1:], ragged=True)
    column, stream = spec.encode(values, valid, num_tokens), io.BytesIO()
    assert column.type == spec.arrow_type and column.null_count == (~valid).sum()
    sizes = [0 if value is None else len(value) for value in column.to_pylist()]
    assert sizes == (num_tokens * valid * values.shape[2] * 2).tolist()
    pq.write_table(pa.table({"x": column}), stream, row_group_size=data.draw(st.integers(1, 4)))
    cut = data.draw(st.integers(0, len(column)))
    stored = pq.ParquetFile(stream).read()["x"]
    order = np.array(data.draw(st.lists(st.integers(0, len(column) - 1), min_size=1, max_size=12)))
    chunks = pa.chunked_array([column.slice(0, cut), column.slice(cut)])
    everything = np.arange(len(column))
    taken = [(stored, everything), (chunks, everything), (read.take(chunks, order), order)]
    for found, places in [*taken, (column.slice(cut), everything[cut:])]:
        decoded, present = spec.decode(found)
        assert np.array_equal(present, valid[places])
        assert np.array_equal(decoded.view(np.uint16)[present], values[places].view(np.uint16)[present])
        assert np.array_equal(spec.num_tokens(found), (num_tokens * valid)[places])


# ---- whole jobs


def config_of(folder, kind=PreprocessingConfig, **values):
    return kind(**{"encoder_model": folder, "resolutions": [32], "validation_share": 0.1, **values})


@pytest.fixture(scope="module")
def unet_config(tmp_path_factory):
    """A U-Net for the latents and captions of the tiny model with 16 channels."""
    path = tmp_path_factory.mktemp("unet") / "unet.json"
    sizes = {"in_channels": 16, "out_channels": 16, "cross_attention_dim": WIDTH, "sample_size": 8}
    path.write_text(json.dumps({**load_denoiser_config("tiny"), **sizes}))
    return str(path)


def training(storage, **values):
    sizes = {"resolution": 32, "global_batch_size": 8, "units_per_step": 2, "validation_share": 0.1, "max_steps": 3}
    return TrainingConfig(**{"storage": storage, **sizes, **values})


@pytest.mark.parametrize(("vae", "text"), [("AutoencoderKL", "T5EncoderModel"), ("AutoencoderDC", "T5GemmaEncoder")])
def test_a_job_stores_what_its_encoders_give_and_units_hold_it(model, tmp_path, vae, text):
    """Two captions a row, and each unit's rows have the tokens of the one that its epoch draws; bit by bit."""
    options = {"latents": LATENTS[vae], "maximum_tokens": 16}
    raw = {**write_raw(tmp_path), "caption_column": ["short", "long"], "unet_config": "tiny-transformer"}
    made, rows, config = encode(config_of(model(vae, text), **raw, **options))
    assert made.text_cleaning == "ftfy" and made.embeddings.ragged and made.embeddings.shape == (16, WIDTH)
    assert made.vae_class == vae and made.text_encoder_class == text
    written = {}
    for row in rows.to_pylist():
        for text_column, column in (("caption", "caption_embeddings"), ("caption_2", "caption_embeddings_2")):
            written[row["id"], row[text_column]] = row[column]
    plan, spec, seen = plan_for(training(config.storage, validation_share=0)), made.latents(32), {}
    for block in read_steps(plan, read.latents_reader(plan), 0, 12 * plan.steps_per_epoch):
        for rows in read.split_units(block, plan.unit_rows).values():
            unit, captions = Unit.from_arrow(rows, made, spec, 0), rows["caption"].to_pylist()
            _, text_ULD, keep, mask_UL = unit.to("cpu")
            stored = [written[key] for key in zip(unit.ids, captions, strict=True)]
            assert rows["caption_embeddings"].to_pylist() == stored and keep.all()
            expected, _ = made.embeddings.decode(pa.array(stored, pa.large_binary()))
            assert np.array_equal(text_ULD.numpy(), expected)
            assert np.array_equal(mask_UL, caption_ids(captions, config) >= 0)
            seen |= dict(zip(captions, expected, strict=True))
    assert any("large" in caption for caption in seen) and any("large" not in caption for caption in seen)
    expected, _ = encoder.LatentEncoder(model(vae, text)).encode_captions(caption_ids(list(seen), config))
    np.testing.assert_allclose(np.stack(list(seen.values())), expected, rtol=1e-3, atol=2e-3)
    pieces = list(unit.split(3))
    assert torch.equal(torch.cat([piece.mask_UL for piece in pieces]), unit.mask_UL)


def test_dropped_and_masked_rows_are_trained_with_the_empty_caption_and_its_mask(
    model, tmp_path, unet_config, monkeypatch
):
    """So no row is without a token, which attention could not be computed over."""
    made, *_ = encode(config_of(model(), **write_raw(tmp_path), caption_column="short", maximum_tokens=16))
    assert made.empty_mask.sum() == 1 and made.empty_caption[0].any() and not made.empty_caption[1:].any()
    state = TrainStep(training(str(tmp_path), unet_config=unet_config, caption_dropout=0.5), made)
    seen, row_losses = [], diffusion.row_losses

    def noted(*arguments, mask_BL, **options):
        seen.append((arguments[3], arguments[4].dropped_B, mask_BL))
        return row_losses(*arguments, **options)

    monkeypatch.setattr(diffusion, "row_losses", noted)
    table = pq.read_table(f"{made_uri(tmp_path)}/data").slice(0, 8)
    unit = Unit.from_arrow(table.append_column("keep", pa.array([True] * 6 + [False] * 2)), made, made.latents(32), 0)
    state.row_losses(unit, 0)
    state.row_losses(Unit.masked(made, made.latents(32), 4), 0)
    (text, dropped, mask), (empty_text, _, empty_mask) = seen
    expected = torch.from_numpy(made.empty_mask)
    replaced = dropped | ~unit.keep_U
    assert 2 < replaced.sum() < 8 and (mask.sum(dim=1) > 0).all()
    assert torch.equal(mask, torch.where(replaced[:, None], expected, unit.mask_UL))
    assert (mask.sum(dim=1)[~replaced] > 1).all() and torch.equal(empty_mask, expected.expand(4, -1))
    assert torch.equal(text[replaced][0], torch.from_numpy(made.empty_caption).float())
    assert torch.equal(empty_text[0], text[replaced][0])


def made_uri(tmp_path):
    return f"{tmp_path}/latents"


def test_autoencoder_and_text_encoder_may_be_from_two_models(model, tmp_path):
    folders = {"vae_model": model("AutoencoderDC"), "text_encoder_model": model(text="T5GemmaEncoder")}
    config = config_of("no/such-model", **write_raw(tmp_path), latents="mean", caption_column="short", **folders)
    made, rows, _ = encode(config)
    assert (made.vae_model, made.text_encoder_model) == tuple(folders.values())
    text, _ = made.embeddings.decode(rows["caption_embeddings"].slice(0, 4))
    ids_BL = caption_ids(rows["caption"].to_pylist()[:4], config)
    expected, _ = encoder.LatentEncoder(folders["text_encoder_model"]).encode_captions(ids_BL)
    np.testing.assert_allclose(text, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("denoiser", "changes", "wanted"),
    [
        ("sd2-base", {}, (None, "none", 64)),
        ("tiny-transformer", {}, (24, "ftfy", 16)),
        ("tiny-transformer", {"maximum_tokens": 12}, (12, "ftfy", 16)),
    ],
)
def test_what_follows_from_the_denoiser_is_derived_and_recorded(tmp_path, denoiser, changes, wanted):
    """No one has to know it; the training's check has nothing against captions and encoders."""
    options = {**write_raw(tmp_path), "caption_column": "short", "unet_config": denoiser, **changes}
    if denoiser == "sd2-base":  # whose captions are wider
        derived = prepare.derive(config_of("tiny-sd", **options))
    else:
        made, _, derived = encode(config_of("tiny-sd", **options))
        refuse(made, training(str(tmp_path), unet_config=denoiser), "/data")
        names = ("maximum_tokens", "text_cleaning", "size_multiple")
        assert tuple(made.job[name] for name in names) == wanted
    assert (derived.maximum_tokens, derived.text_cleaning, derived.size_multiple) == wanted


def overflowing(folder, **options):
    """The folder of a VAE whose activations go beyond fp16's largest number, and what its config.json says."""
    model = tiny_model(folder, text="CLIPTextModel", **options)
    vae = encoder.load_vae(model)
    with torch.no_grad():  # the norms that follow divide by it again
        for convolution in (vae.encoder.conv_in, vae.decoder.conv_in):
            convolution.weight.mul_(1e5)
    vae.save_pretrained(f"{model}/vae")
    return model


def test_a_vae_that_forces_fp32_overflows_neither_in_encoding_nor_in_sampling(tmp_path):
    """As Stable Diffusion XL's in fp16: every row was rejected."""
    pixels = torch.from_numpy(pixels_of(2))
    latents = torch.randn(1, CHANNELS["AutoencoderKL"], 8, 8, generator=torch.Generator().manual_seed(0))
    for forced in (True, False):
        model = overflowing(tmp_path / str(forced), force_upcast=forced)
        half = encoder.LatentEncoder(model)
        half.vae = encoder.load_vae(model, torch.float16)
        assert half.vae.dtype == (torch.float32 if forced else torch.float16)
        assert half.moments(pixels).isfinite().all() == forced
        vae = type(half.vae).from_pretrained(f"{model}/vae", dtype=torch.float16)
        found, expected = sample.decode_latents(vae, latents), sample.decode_latents(model, latents)
        assert (np.abs(found.astype(int) - expected).max() <= 2) == forced and vae.dtype == torch.float16


# ---- what is refused


def test_models_and_parameters_that_do_not_fit_are_one_sentence(model, tmp_path):
    strange = tiny_model(tmp_path / "strange")
    for part, name in (("vae/config.json", "_class_name"), ("model_index.json", "text_encoder")):
        path = tmp_path / "strange" / part
        value = "AutoencoderTiny" if name == "_class_name" else ["transformers", "BertModel"]
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    refused = [
        ({"vae_model": strange}, "AutoencoderTiny"),
        ({"text_encoder_model": strange}, "BertModel"),
        ({"vae_model": model("AutoencoderDC")}, "latents='moments'"),
        ({"vae_model": model("AutoencoderDC"), "latents": "mean", "resolutions": [36]}, "multiples of 8"),
        ({"maximum_tokens": 25}, "maximum_tokens=25"),
        ({"unet_config": "huge"}, "unet_config='huge'"),
        ({"vae_model": str(tmp_path)}, "vae_model='.*' or encoder_model='tiny-sd'"),
    ]
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            prepare.derive(config_of("tiny-sd", **changes))
