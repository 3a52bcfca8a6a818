"""What holds for Stable Diffusion's U-Net holds for every denoiser and objective."""

import dataclasses
import json

import diffusers
import numpy as np
import pyarrow as pa
import pytest
import torch

from helpers.config import PreprocessingConfig, TrainingConfig
from helpers.encode import prepare
from helpers.latents import schema
from helpers.latents.manifest import DataSets, encode_embedding
from helpers.lesson import ablations, estimates
from helpers.model import denoisers
from helpers.model.denoisers import PRESETS, build_denoiser, load_denoiser_config
from helpers.model.sharding import build_model
from helpers.production.card import model_card
from helpers.production.checks import training
from helpers.sample import denoiser_of, export_pipeline, generate, pipeline_of_run
from helpers.train.step import TrainStep, Unit
from tests.latents import SHAPES, refuse
from tests.models import tiny_model
from tests.steps import MIDDLE, column, train, train_in_groups

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "unet": {**load_denoiser_config("tiny"), "block_out_channels": [32, 32], "attention_head_dim": [2, 2]},
    "prx": {
        **load_denoiser_config("tiny-transformer"),
        "hidden_size": 32,
        "num_heads": 2,
        "depth": 2,
        "axes_dim": [8, 8],
    },
}
FLOW = {"prediction_type": "flow"}
# name: (denoiser, what differs in the config)
COMBINATIONS = {
    "unet, flow": ("unet", FLOW),
    "unet, zero terminal SNR": ("unet", {"zero_terminal_snr": True}),
    "prx, flow, shifted": ("prx", {**FLOW, "timestep_shift": 3.0}),
    "prx, epsilon": ("prx", {"prediction_type": "epsilon"}),
}
RUNS = {2: {"strategy": "fsdp", "activation_checkpointing": True}, 4: {"strategy": "ddp", "micro_batch_size": 1}}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """{name of a denoiser: path of its config.json}"""
    folder = tmp_path_factory.mktemp("configs")
    for name, values in SMALL.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return {name: str(folder / f"{name}.json") for name in SMALL}


@pytest.fixture(scope="module")
def padded(build_manifest, build_latents):
    """`(manifest, rows)` with padded captions; what is masked differs between workers."""
    return build_manifest(), build_latents(48).append_column("keep", pa.array(np.arange(48) % 11 != 5))


@pytest.fixture(scope="module")
def ragged(padded):
    """The same with captions of one to six tokens, stored without padding; the empty one has two."""
    manifest, rows = padded
    columns = [dataclasses.replace(spec, ragged=spec.name == schema.EMBEDDINGS) for spec in manifest.columns]
    empty = encode_embedding(manifest.empty_caption[:2])
    manifest = dataclasses.replace(manifest, columns=columns, empty_caption_embedding=empty)
    values, _ = padded[0].embeddings.decode(rows[schema.EMBEDDINGS])
    text = manifest.embeddings.encode(values, None, 1 + np.arange(48) % 6)
    return manifest, rows.set_column(rows.column_names.index(schema.EMBEDDINGS), schema.EMBEDDINGS, text)


@pytest.fixture
def data(name, request):
    """`(manifest, rows)` as a combination's denoiser takes them."""
    masks = COMBINATIONS[name][0] != "unet"
    return request.getfixturevalue("ragged" if masks else "padded")


@pytest.fixture(scope="module")
def recipe(configs):
    """A function: name of a combination -> its config."""

    def build(name, **values):
        denoiser, changes = COMBINATIONS[name]
        small = {"global_batch_size": 8, "units_per_step": 4, "warmup_steps": 2, "max_steps": 50}
        rest = {"learning_rate": 1e-3, **changes, **values}
        return TrainingConfig(unet_config=configs[denoiser], **small, **rest)

    return build


@pytest.fixture(scope="module")
def runs(tmp_path_factory, recipe, padded, ragged):
    """{"combination on ranks": what each rank found}"""
    asked = {}
    for name in COMBINATIONS:
        for ranks, changes in RUNS.items():
            config = recipe(name, num_training_workers=ranks, **changes)
            asked[f"{name} on {ranks}"] = config, *(padded if name.startswith("unet") else ragged)
    return train_in_groups(tmp_path_factory.mktemp("runs"), asked)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_any_strategy_on_any_number_of_workers_trains_and_validates_as_one_process_and_resumes(
    name, runs, recipe, data
):
    alone = train(TrainStep(recipe(name), data[0]), data[1])
    assert len({line["loss"] for line in alone}) == len(alone)
    for ranks in RUNS:
        for found in runs[f"{name} on {ranks}"]:
            np.testing.assert_allclose(column(found["lines"]), column(alone), rtol=1e-5)
            np.testing.assert_allclose(column(found["resumed"]), column(found["lines"])[MIDDLE:], rtol=1e-5)
            assert ranks == 4 or (found["resumed"] == found["lines"][MIDDLE:] and found["same_state"])
            assert found["validated"] == runs[f"{name} on {ranks}"][0]["validated"]
            assert "is nan" in found["refused"] and found["unchanged"]


@pytest.mark.parametrize("name", SMALL)
def test_a_denoiser_made_on_the_meta_device_computes_as_one_made_at_once(name, configs):
    made, _ = build_model(configs[name], seed=3)
    plain = build_denoiser(configs[name], seed=3)
    assert dict(made.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([10, 900]), torch.randn(2, 6, 128)
    for one, other in zip(made.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(one[1], other[1]), one[0]
    with torch.no_grad():
        assert torch.equal(denoisers.denoise(made, *inputs), denoisers.denoise(plain, *inputs))


def by_hand(model, noisy, timesteps, text, mask):
    """The call of each class as its pipeline makes it."""
    if isinstance(model, diffusers.UNet2DConditionModel):
        return model(noisy, timesteps, encoder_hidden_states=text).sample
    return model(noisy, timestep=timesteps / 1000, encoder_hidden_states=text, attention_mask=mask).sample


def awake(model):
    """Weights that are zero at first, as PRX's modulation, would hide what the inputs do."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_a_denoiser_is_called_as_by_hand_and_padding_that_is_masked_changes_nothing(name, configs):
    model = awake(build_denoiser(configs[name]))
    noisy, timesteps, text = torch.randn(3, 4, 8, 8), torch.tensor([0.0, 500.5, 999.0]), torch.randn(3, 6, 128)
    mask = torch.arange(6) < torch.tensor([[2], [6], [4]])
    predicted = denoisers.denoise(model, noisy, timesteps, text, mask)
    assert torch.equal(predicted, by_hand(model, noisy, timesteps, text, mask))
    if denoisers.adapter_of(model).masks_padding:
        for row, length in enumerate((2, 6, 4)):
            alone = noisy[row : row + 1], timesteps[row : row + 1], text[row : row + 1, :length]
            torch.testing.assert_close(predicted[row : row + 1], denoisers.denoise(model, *alone), rtol=1e-5, atol=1e-5)


def test_padding_that_is_masked_is_not_trained_on(recipe, ragged):
    """Whatever its values are, no loss changes; a caption's tokens do change it."""
    manifest, rows = ragged
    state, unit = (
        TrainStep(recipe("prx, epsilon"), manifest),
        Unit.from_arrow(rows[:6], manifest, manifest.latents(64), 0),
    )
    awake(state.denoiser)
    expected = state.row_losses(unit, 0)
    unit.text[~unit.mask_UL] = 100.0
    torch.testing.assert_close(state.row_losses(unit, 0), expected)
    unit.text[:, 0] = 100.0
    assert (state.row_losses(unit, 0) != expected)[unit.keep_U].any()


# ---- presets


@pytest.mark.parametrize(
    ("name", "size", "parameters", "gigaflops"),
    [
        ("tiny", 8, 852_580, 0.044),
        ("small", 8, 86_828_676, 1.61),
        ("sd2-base", 32, 865_910_724, 181),
        ("sd2-base", 64, 865_910_724, 804),
    ],
)
def test_presets_have_the_published_size_and_cost(name, size, parameters, gigaflops):
    """Of Stable Diffusion 2 at 256 and at 512 pixels; counted without memory, by the blocks of the forward pass."""
    blocks = estimates.count_flops(name, (4, size, size), (77, load_denoiser_config(name)["cross_attention_dim"]))
    assert blocks["parameters"].sum() == parameters
    assert blocks["gflops"].sum() == pytest.approx(gigaflops, rel=0.01)


def test_an_unknown_denoiser_is_refused_in_one_sentence(tmp_path):
    for name in ("huge", str(tmp_path), str(tmp_path / "none.json")):
        with pytest.raises(ValueError, match="unknown: choose 'tiny'"):
            load_denoiser_config(name)


@pytest.mark.parametrize("text", ["not json", json.dumps({"_class_name": "AutoencoderKL", "latent_channels": 4}), "[]"])
def test_a_config_of_another_model_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="^unet_config='.*config.json' configures (no model|AutoencoderKL): give"):
        load_denoiser_config(str(tmp_path / "config.json"))


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(1)
    first = build_denoiser("tiny", seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = build_denoiser("tiny", seed=3).state_dict(), build_denoiser("tiny", seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


# ---- what goes together


@pytest.mark.parametrize(
    ("denoiser", "encoder", "changes", "message"),
    [
        (
            "unet",
            {"vae_class": "AutoencoderDC", "text_encoder_class": "T5EncoderModel"},
            {},
            "DC, not .*T5EncoderModel",
        ),
        ("unet", {"shift_factor": 0.1}, {}, "shift_factor=0.1 it does not apply"),
        ("prx", {"text_cleaning": "none"}, {}, "cleaned by 'none'"),
        ("prx", {"ragged": False}, {}, "maximum_tokens=None"),
        ("unet", {"ragged": True}, {}, "maximum_tokens"),
    ],
)
def test_what_no_pipeline_of_diffusers_draws_is_refused_in_one_sentence(
    configs, padded, ragged, denoiser, encoder, changes, message
):
    cleaning = "ftfy" if denoiser == "prx" else "none"
    fits = {"shift_factor": 0.0, "text_cleaning": cleaning, "ragged": denoiser != "unet", **encoder}
    manifest, _ = ragged if fits.pop("ragged") else padded
    job = {"text_cleaning": fits.pop("text_cleaning")}
    shift = fits.pop("shift_factor")
    manifest = dataclasses.replace(manifest, encoder={**manifest.encoder, **fits}, job=job, shift_factor=shift)
    config = TrainingConfig(unet_config=configs[denoiser], **changes)
    with pytest.raises(ValueError, match=rf"^unet_config='[^\n]*{message}[^\n]*\.$"):
        refuse(manifest, config, "/data")


def find_faults(unet_config):
    return training.denoiser_is_supported(TrainingConfig(unet_config=unet_config), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_class_embeds": 10}, "alone: class_labels should be provided"),
        ({"time_cond_proj_dim": 16}, "1 parameters get no gradient, such as time_embedding.cond_proj.weight"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_a_config_that_cannot_be_trained_or_sampled_is_one_sentence(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL["unet"], **changes}))
    (fault,) = find_faults(str(path))
    assert fault.startswith(f"unet_config='{path}' cannot be trained or sampled") and fault.endswith(".")
    assert message in fault and "\n" not in fault


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_trained(name):
    assert not list(find_faults(name))


@pytest.mark.parametrize(
    ("shapes", "values", "message"),
    [
        ({}, {"resolution": 128}, "resolution=128"),
        ({}, {"unet_config": "sd2-base"}, "unet_config='sd2-base' takes captions 1024 wide"),
        ({"image_latents_64": (2, 16, 8, 8)}, {}, "unet_config='tiny' takes 4 latent channels"),
        ({"image_latents_72": (2, 4, 9, 9)}, {"resolution": 72}, "resolution=72 .* multiples of 16"),
    ],
)
def test_latents_that_do_not_fit_are_refused_in_one_sentence(build_manifest, shapes, values, message):
    manifest = build_manifest(shapes={**SHAPES, **shapes}, resolutions=[32, 64, 72][: 2 + len(shapes)])
    with pytest.raises(ValueError, match=rf"^{message}[^\n]*\.$"):
        refuse(manifest, TrainingConfig(latents_uri="/data", **values), "/data")


# ---- the export


def with_encoders(config, folder, vae, text):
    """`(config, manifest)` of a run whose data was encoded by tiny models of these classes."""
    shift = {} if vae == "AutoencoderDC" else {"shift_factor": 0.1 if text == "T5GemmaEncoder" else None}
    model = tiny_model(folder / "encoders", vae, text, **shift)
    raw = PreprocessingConfig(encoder_model=model, resolutions=[64], latents="mean", maximum_tokens=24)
    described = prepare.describe_encoder(raw)
    channels, text_shape = described["columns"][0].shape[1], described["columns"][-1].shape
    values = load_denoiser_config(config.unet_config)
    values |= {"in_channels": channels, "context_in_dim": text_shape[-1], "out_channels": channels}
    (folder / "denoiser.json").write_text(json.dumps(values))
    config = dataclasses.replace(config, unet_config=str(folder / "denoiser.json"))
    return config, dataclasses.replace(ablations.random_batch(TrainingConfig())[0], **described)


@pytest.mark.parametrize(
    ("name", "encoders"),
    [
        *((name, None) for name in COMBINATIONS),
        ("prx, flow, shifted", ("AutoencoderKL", "T5EncoderModel")),
        ("prx, flow, shifted", ("AutoencoderDC", "T5GemmaEncoder")),
    ],
)
def test_plain_diffusers_draws_from_the_export_by_its_readme_what_this_project_draws(name, encoders, recipe, tmp_path):
    config = recipe(name, resolution=64)
    if encoders:
        config, manifest = with_encoders(config, tmp_path, *encoders)
    else:
        manifest, _ = ablations.random_batch(config, num_tokens=24)
        manifest.encoder["model"] = "tiny-sd"
    pipeline = pipeline_of_run(build_denoiser(config.unet_config), manifest, config)
    awake(denoiser_of(pipeline))
    export_pipeline(pipeline, str(tmp_path))
    prompt = "a large red circle on white"
    ours, _ = generate(pipeline, [prompt, "a small blue ring on black"], resolution=64, steps=3, guidance_scale=2.0)
    readme = model_card(config, DataSets({"/latents": manifest}, {"/latents": 1.0}), 7, steps=3).text
    code = readme.partition("```python\n")[2].partition("```")[0]
    code = code.replace("the path of this folder", str(tmp_path)).replace("a prompt", prompt)
    space = {"generator": [torch.Generator().manual_seed(0)]}
    exec(code.replace(").images", "    generator=generator, output_type='np').images"), space)
    theirs = (space["images"][0] * 255).round().astype(int)
    assert np.abs(theirs - ours).max() <= 1 and np.std(ours) > 1
    assert type(space["pipeline"]).__name__ == denoisers.adapter_of(denoiser_of(pipeline)).pipeline
