import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import sample
from helpers.config import TrainingConfig
from helpers.model import diffusion

SHAPE = (4, 8, 8)
FIELDS = ("posterior_BCHW", "noise_BCHW", "timesteps_B", "dropped_B")


def same(one, other, rows=slice(None)):
    return all(torch.equal(getattr(one, field)[rows], getattr(other, field)) for field in FIELDS)


# ---- random numbers by position


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 10**7),
    st.lists(st.integers(0, 5000), min_size=1, max_size=12, unique=True),
    st.data(),
)
def test_random_numbers_depend_on_seed_step_and_position_only(seed, step, positions, data):
    whole = diffusion.random_draws(seed, step, np.array(positions), SHAPE, caption_dropout=0.5)
    middle = data.draw(st.integers(0, len(positions)))
    for rows in (slice(0, middle), slice(middle, None), slice(None, None, 2)):
        part = diffusion.random_draws(seed, step, np.array(positions)[rows], SHAPE, caption_dropout=0.5)
        assert same(whole, part, rows)


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = diffusion.random_draws(0, 0, np.arange(4), SHAPE)
    assert not first.dropped_B.any()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    np.random.seed(3)
    assert same(first, diffusion.random_draws(0, 0, np.arange(4), SHAPE))


def test_the_random_numbers_are_pinned():
    """A resume on a new version must go on with the same noise."""
    draws = diffusion.random_draws(7, 123, np.arange(5), (1, 1, 2), caption_dropout=0.5)
    assert diffusion.hash_positions(7, 123, np.arange(3), 1).tolist() == [
        16597996799735605858,
        15543615266629991582,
        3838793239512037789,
    ]
    assert draws.timesteps_B.tolist() == [858, 582, 789, 350, 419]
    assert draws.dropped_B.tolist() == [False, False, False, True, True]


def test_draws_are_normal_and_uniform():
    parts = [diffusion.random_draws(0, step, np.arange(512), SHAPE, caption_dropout=0.1) for step in range(8)]
    for field in ("posterior_BCHW", "noise_BCHW"):
        values = torch.cat([getattr(part, field) for part in parts]).double().flatten()
        assert abs(values.mean()) < 5 / np.sqrt(len(values)) and abs(values.std() - 1) < 5 / np.sqrt(2 * len(values))
        assert abs((values**4).mean() - 3) < 0.1  # kurtosis of a normal distribution
    posterior, noise = (torch.cat([getattr(part, field) for part in parts]).flatten() for field in FIELDS[:2])
    assert abs((posterior * noise).mean()) < 5 / np.sqrt(len(noise))  # independent of each other
    timesteps = torch.cat([part.timesteps_B for part in parts]).numpy()
    assert timesteps.dtype == np.int64 and timesteps.min() >= 0 and timesteps.max() <= 999
    counts = np.bincount(timesteps // 100, minlength=10)
    assert (((counts - 409.6) ** 2) / 409.6).sum() < 30  # chi-squared, 9 degrees of freedom: 1 in 2,000
    dropped = torch.cat([part.dropped_B for part in parts]).double().mean().item()
    assert abs(dropped - 0.1) < 5 * np.sqrt(0.1 * 0.9 / 4096)


def test_important_timesteps_are_drawn_more_often():
    """As often as `timestep_density` says: chi-squared over its ten bins of the same probability."""
    schedule = diffusion.noise_schedule()
    density_T = diffusion.timestep_density(schedule, 5.0, "importance")
    assert density_T.mean() == pytest.approx(1) and density_T.argmax() == (
        diffusion.loss_weights(schedule, torch.arange(1000), 5.0).argmax().item()
    )
    timesteps = diffusion.random_draws(0, 0, np.arange(20_000), (1, 1, 1), density_T=density_T).timesteps_B.numpy()
    assert timesteps.min() >= 0 and timesteps.max() <= 999
    cumulative_T = np.cumsum(density_T) / 1000
    bins = np.searchsorted(cumulative_T, np.arange(1, 10) / 10)
    expected = np.diff(np.concatenate([[0], cumulative_T[bins], [1]])) * 20_000
    found = np.bincount(np.searchsorted(bins, timesteps), minlength=10)
    assert ((found - expected) ** 2 / expected).sum() < 30  # 9 degrees of freedom: 1 in 2,000
    assert diffusion.timestep_density(schedule, 5.0, "uniform") is None
    np.testing.assert_allclose(diffusion.timestep_density(schedule, None, "importance"), 1)


# ---- latents and captions


# ---- the objective, against NumPy


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Models here are no classes of diffusers."""

    def call(model, noisy, timesteps_B, text, mask_BL):
        return model(noisy, timesteps_B, text, return_dict=False)[0]

    monkeypatch.setattr(diffusion, "denoise", call)


ALPHAS = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)


class Recorder(torch.nn.Module):
    """Stands in for the denoiser: predicts as it is told, and keeps its inputs."""

    def __init__(self, prediction):
        super().__init__()
        self.prediction = prediction

    def forward(self, noisy, timesteps, text, return_dict):
        self.noisy, self.timesteps, self.text = noisy, timesteps, text
        return (self.prediction,)


@pytest.mark.parametrize("gamma", [None, 5.0, 0.5])
@pytest.mark.parametrize("prediction_type", ["v_prediction", "epsilon"])
def test_noise_targets_weights_and_losses_match_the_equations(prediction_type, gamma):
    timesteps = np.array([0, 1, 250, 500, 998, 999])
    random = np.random.default_rng(0)
    latents, noise, prediction = random.normal(size=(3, 6, *SHAPE)).astype(np.float32)
    draws = diffusion.Draws(None, torch.from_numpy(noise), torch.from_numpy(timesteps), None)
    denoiser, text = Recorder(torch.from_numpy(prediction)), torch.randn(6, 3, 2)
    found = diffusion.row_losses(
        denoiser, diffusion.noise_schedule(prediction_type), torch.from_numpy(latents), text, draws, gamma
    )

    signal, sigma = (np.sqrt(part)[timesteps, None, None, None] for part in (ALPHAS, 1 - ALPHAS))
    target = noise if prediction_type == "epsilon" else signal * noise - sigma * latents
    snr = ALPHAS[timesteps] / (1 - ALPHAS[timesteps])
    weight = np.ones(6)
    if gamma is not None:  # Hang et al., 2023: min(SNR, gamma) on the clean latents' error
        weight = np.minimum(snr, gamma) / (snr if prediction_type == "epsilon" else snr + 1)
    expected = weight * ((prediction - target) ** 2).mean(axis=(1, 2, 3))
    assert np.abs(denoiser.noisy.numpy() - (signal * latents + sigma * noise)).max() < 1e-4
    assert torch.equal(denoiser.timesteps, draws.timesteps_B) and denoiser.text is text
    assert found.shape == (6,) and found.dtype == torch.float32
    assert np.allclose(found.numpy(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("prediction_type", ["v_prediction", "epsilon"])
def test_min_snr_weights_are_the_same_objective_for_v_and_epsilon(prediction_type):
    """An error in x0 is weighted by min(SNR, gamma) whatever the network predicts."""
    schedule, timesteps = diffusion.noise_schedule(prediction_type), torch.arange(1000)
    weights = diffusion.loss_weights(schedule, timesteps, 5.0).double().numpy()
    alphas = schedule.alphas_cumprod.double().numpy()
    snr = alphas / (1 - alphas)
    # x0 from v: sqrt(a) x_t - sqrt(1 - a) v; x0 from epsilon: (x_t - sqrt(1 - a) epsilon) / sqrt(a)
    error_of_x0 = (1 - alphas) if prediction_type == "v_prediction" else (1 - alphas) / alphas
    assert np.allclose(weights / error_of_x0, np.minimum(snr, 5.0), rtol=1e-3)
    assert (diffusion.loss_weights(schedule, timesteps, None) == 1).all()


# ---- EMA


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.b, self.a = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))

    @torch.no_grad()
    def move(self, step):
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.normal_(generator=generator)


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("decay", [0.5, 0.995])
def test_the_ema_matches_a_plain_loop(decay, start):
    model = Model()
    ema, expected = diffusion.EMA(model, decay, start), None
    for step in range(1, 60):
        model.move(step)
        ema.update(step)
        values = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
        if step > start and expected is not None:
            kept = min(decay, (1 + step - start) / (10 + step - start))
            values = {name: kept * expected[name] + (1 - kept) * value for name, value in values.items()}
        expected = values if step > start else None
        assert (ema.shadow is None) == (step <= start)  # before its start it takes no memory
        for name, value in (expected or values).items():
            assert (ema.state_dict()[name] - value).abs().max() < 1e-5


@pytest.mark.parametrize("start, stop", [(0, 5), (8, 5), (5, 5), (4, 5)])
def test_the_ema_resumes_from_its_state_in_any_order_of_names(start, stop):
    model = Model()
    straight, broken = diffusion.EMA(model, 0.9, start), diffusion.EMA(model, 0.9, start)
    for step in range(1, 15):
        model.move(step)
        straight.update(step)
        broken.update(step)
        if step == stop:
            state = {name: tensor.clone() for name, tensor in reversed(list(broken.state_dict().items()))}
            broken = diffusion.EMA(model, 0.9, start)
            broken.load_state_dict(state, step)
            state["a"].zero_()  # the state that was given is not kept
    assert all(torch.equal(straight.state_dict()[name], tensor) for name, tensor in broken.state_dict().items())


# ---- the learning rate


def test_the_rate_warms_up_linearly_then_falls_as_a_cosine():
    rates = [diffusion.lr_multiplier(step, 10, 110) for step in range(110)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10) and rates[10] == 1
    assert rates[60] == pytest.approx(0.5) and 0 < rates[-1] < 0.001 and rates[10:] == sorted(rates[10:], reverse=True)
    assert [diffusion.lr_multiplier(step, 10, 110) for step in (110, 500)] == pytest.approx([0, 0])


def test_a_constant_rate_stays_and_a_short_run_still_trains():
    assert diffusion.lr_multiplier(0, 0, 100) == 1
    assert [diffusion.lr_multiplier(step, 2, 100, "constant") for step in (0, 1, 2, 10**6)] == [0.5, 1, 1, 1]
    shorter_than_its_warm_up = [diffusion.lr_multiplier(step, 60, 10) for step in (0, 9)]
    assert shorter_than_its_warm_up == pytest.approx([1 / 60, 1 / 6])
    assert 0 <= diffusion.lr_multiplier(60, 60, 10) <= 1


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_interpolates_and_predicts_as_diffusers_scheduler_says(shift):
    """`FlowMatchEulerDiscreteScheduler`: its timesteps, sigmas and noisy latents; the target is noise - latents."""
    generator, reference = torch.Generator().manual_seed(0), FlowMatchEulerDiscreteScheduler(shift=shift)
    latents, noise = torch.randn(2, 1000, 4, 2, 2, generator=generator).unbind(0)
    numbers, schedule = torch.arange(1000), diffusion.FlowSchedule(shift, num_positions=4)
    descending = numbers.flip(0)  # diffusers counts from noise
    times = schedule.times(numbers, latents)
    torch.testing.assert_close(1000 * times, reference.timesteps[descending], rtol=1e-5, atol=1e-3)
    expected = reference.scale_noise(latents, reference.timesteps[descending], noise)
    torch.testing.assert_close(schedule.add_noise(latents, noise, numbers), expected, rtol=1e-5, atol=1e-5)
    draws, told = diffusion.Draws(noise, noise, numbers, torch.zeros(1000, dtype=torch.bool)), []

    def denoiser(noisy, timesteps_B, text, return_dict):
        told.append(timesteps_B)
        return (noise - latents,)

    assert diffusion.row_losses(denoiser, schedule, latents, None, draws).abs().max() == 0
    torch.testing.assert_close(told[0], 1000 * times)


def test_flow_shifts_by_the_root_of_the_number_of_positions():
    """Esser et al., 2024, equation 23: a quarter of the positions have half the shift."""
    numbers, schedule = torch.arange(1000), diffusion.FlowSchedule(3.0, num_positions=64)
    assert schedule.alphas_cumprod[-1] == 0 and (schedule.alphas_cumprod.diff() < 0).all()
    smaller = diffusion.FlowSchedule(1.5, num_positions=16)
    small, large = torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 8, 8)
    assert torch.equal(schedule.times(numbers, small), smaller.times(numbers, small))
    assert (schedule.times(numbers, large) >= schedule.times(numbers, small)).all()


def test_logit_normal_timesteps_are_as_frequent_as_diffusers_draws_them():
    density_T = diffusion.timestep_density(diffusion.FlowSchedule(), None, "logit_normal")
    generator = torch.Generator().manual_seed(0)
    options = {"logit_mean": 0.0, "logit_std": 1.0, "generator": generator}
    drawn = compute_density_for_timestep_sampling("logit_normal", 200_000, **options).numpy()
    counts = np.bincount((drawn * 10).astype(int), minlength=10)
    expected = density_T.reshape(10, 100).sum(axis=1) * len(drawn) / 1000
    assert ((counts - expected) ** 2 / expected).sum() < 27.88  # the 99.9 % quantile of chi-squared, 9 degrees
    assert density_T.mean() == pytest.approx(1)


def test_with_zero_terminal_snr_the_last_timestep_is_noise_alone():
    schedule = diffusion.noise_schedule("v_prediction", zero_terminal_snr=True)
    latents, noise = torch.randn(2, 1, 4, 2, 2, generator=torch.Generator().manual_seed(0)).unbind(0)
    last = torch.tensor([999])
    torch.testing.assert_close(schedule.add_noise(latents, noise, last), noise)
    torch.testing.assert_close(schedule.get_velocity(latents, noise, last), -latents)
    assert diffusion.loss_weights(schedule, last, 5.0) == 0
    assert diffusion.timestep_density(schedule, 5.0, "importance")[-1] == 0


def predict_perfectly(noisy, timestep, latents, alphas_T):
    """The prediction of a model that knows the latents: of flow if there are no `alphas_T`, else of v."""
    if alphas_T is None:
        time = timestep / 1000
        return (noisy - (1 - time) * latents) / time - latents
    alpha = alphas_T[timestep.long()]
    noise = (noisy - alpha.sqrt() * latents) / (1 - alpha).sqrt()
    return alpha.sqrt() * noise - (1 - alpha).sqrt() * latents


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("dpm++", "flow", {"timestep_shift": 2.0}),
        ("unipc", "flow", {}),
        *((name, "v_prediction", {}) for name in sample.SAMPLERS),
        *((name, "v_prediction", {"zero_terminal_snr": True}) for name in sample.SAMPLERS),
    ],
)
@pytest.mark.parametrize("steps", [2, 20, 61, 350])
def test_a_stock_sampler_arrives_at_the_latents_that_a_perfect_model_knows(name, kind, options, steps):
    sampler = sample.build_sampler(TrainingConfig(prediction_type=kind, **options), name, steps)
    sampler.set_timesteps(steps)
    alphas_T = None if kind == "flow" else diffusion.noise_schedule(kind, **options).alphas_cumprod
    latents, noisy = torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    noisy = noisy * sampler.init_noise_sigma
    for timestep in sampler.timesteps:
        predicted = predict_perfectly(sampler.scale_model_input(noisy, timestep), timestep, latents, alphas_T)
        noisy = sampler.step(predicted, timestep, noisy).prev_sample
    torch.testing.assert_close(noisy, latents, rtol=0, atol=0.12)


def draw_blindly(sampler):
    """What a sampler makes of noise if every prediction is a tenth of its input."""
    noisy = torch.full((1, 4, 2, 2), 0.5) * sampler.init_noise_sigma
    for timestep in sampler.timesteps:
        noisy = sampler.step(sampler.scale_model_input(noisy, timestep) / 10, timestep, noisy).prev_sample
    return noisy


@pytest.mark.parametrize("name", sample.SAMPLERS)
@pytest.mark.parametrize("options", [{}, {"zero_terminal_snr": True}])
def test_a_sampler_begins_at_the_noisiest_timestep_and_takes_each_once_or_the_number_of_steps_is_refused(name, options):
    refused = []
    for steps in [*range(1, 1000, 13), 20, 61, 350, 600, 999, 1000]:
        try:
            sampler = sample.build_sampler(TrainingConfig(**options), name, steps)
        except ValueError as error:
            assert f"sampling_steps={steps}" in str(error)
            refused.append(steps)
            continue
        sampler.set_timesteps(steps)
        timesteps = sampler.timesteps.round().tolist()
        assert timesteps[0] == 999 and len(timesteps) == steps and timesteps == sorted(set(timesteps), reverse=True)
        assert steps not in (1, 350, 999) or draw_blindly(sampler).isfinite().all()
    assert refused == ([1, 1000] if name == "euler" else [1000])


@pytest.mark.parametrize("name", ["dpm++", "unipc"])
@pytest.mark.parametrize(("shift", "most"), [(1.0, 998), (3.0, 332)])
def test_a_sampler_of_flow_begins_once_at_the_noisiest_timestep_or_the_number_of_steps_is_refused(name, shift, most):
    config = TrainingConfig(prediction_type="flow", timestep_shift=shift)
    for steps in (1, 2, 20, 61, 331, most):
        sampler = sample.build_sampler(config, name, steps)
        sampler.set_timesteps(steps)
        timesteps = sampler.timesteps.tolist()
        assert (timesteps[0], timesteps.count(999), len(timesteps)) == (999, 1, steps)
        assert draw_blindly(sampler).isfinite().all()
    with pytest.raises(ValueError, match=f"takes 1 to {most} "):
        sample.build_sampler(config, name, most + 1)
