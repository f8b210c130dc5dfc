from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recast_engine.errors import ConfigError
from recast_engine.profiling import renyi_self_tilted
from recast_engine.profiling.curves import estimate_curve
from recast_engine.profiling.estimator import scaled_deviation

Array = NDArray[np.float64]

DIMENSION, SHIFT, WIDTH = 4, 0.8, 2.0  # d, a in every coordinate, s^2 of METHOD section 4
METHOD_VALUES = {0.0: 0.4489, 0.25: 0.3855, 0.5: 0.1782, 0.75: 0.0298}


def reward(points: Array) -> Array:
    return np.exp(-((points - SHIFT) ** 2).sum(axis=-1) / (2 * WIDTH))


def exact(sigma: float, alpha: float) -> float:
    """D_alpha of N(m, u I) from N(0, v I), both noised to sigma (van Erven & Harremoës, Gaussian case)."""
    mean = (1 - sigma) * SHIFT / (1 + WIDTH)
    tilted = (1 - sigma) ** 2 * WIDTH / (1 + WIDTH) + sigma**2
    base = (1 - sigma) ** 2 + sigma**2
    if alpha == 1.0:
        return DIMENSION / 2 * (tilted / base + mean**2 / base - 1 + math.log(base / tilted))
    mixed = (1 - alpha) * tilted + alpha * base
    log_ratio = math.log(mixed) - (1 - alpha) * math.log(tilted) - alpha * math.log(base)
    return DIMENSION * (alpha * mean**2 / (2 * mixed) + log_ratio / (2 * (1 - alpha)))


def draw(
    rng: np.random.Generator, prompts: int, images: int, rollouts: int, sigma: float
) -> tuple[Array, Array]:
    """Optimalities of clean draws of N(0, I) and of exact posterior draws given x_sigma."""
    clean = rng.normal(size=(prompts, images, DIMENSION))
    if sigma == 0.0:
        return reward(clean), np.repeat(reward(clean)[:, :, None], rollouts, axis=2)
    noised = (1 - sigma) * clean + sigma * rng.normal(size=clean.shape)
    spread = (1 - sigma) ** 2 + sigma**2
    fresh = rng.normal(size=(prompts, images, rollouts, DIMENSION))
    posterior = ((1 - sigma) / spread * noised)[:, :, None] + sigma / math.sqrt(spread) * fresh
    return reward(clean), reward(posterior)


def test_the_closed_form_is_the_one_method_quotes() -> None:
    for sigma, value in METHOD_VALUES.items():
        assert exact(sigma, 2.0) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize("sigma", METHOD_VALUES)
@pytest.mark.parametrize(("prompts", "images", "rollouts"), [(1, 4096, 1), (64, 64, 1), (256, 4, 2)])
def test_gaussian_values_within_three_standard_errors(
    sigma: float, prompts: int, images: int, rollouts: int
) -> None:
    rng = np.random.default_rng(1)
    estimate = renyi_self_tilted(*draw(rng, prompts, images, rollouts, sigma))
    assert abs(estimate.value - METHOD_VALUES[sigma]) < 3 * estimate.standard_error
    assert 0.0 < estimate.standard_error < 0.1
    assert (estimate.prompts, estimate.images) == (prompts, prompts * images)


@pytest.mark.parametrize(("prompts", "images"), [(1, 512), (64, 16), (16, 8)])
@pytest.mark.parametrize("sigma", [0.0, 0.5, 0.75])
def test_intervals_cover_the_truth_at_their_nominal_rate(prompts: int, images: int, sigma: float) -> None:
    """400 repetitions: the share covered has a standard error of 1.1%; 95% -+ 3.5% is three of them."""
    rng = np.random.default_rng(2)
    truth, repetitions = exact(sigma, 2.0), 400
    covered, values, errors = 0, [], []
    for _ in range(repetitions):
        estimate = renyi_self_tilted(*draw(rng, prompts, images, 1, sigma))
        low, high = estimate.interval()
        covered += low <= truth <= high
        values.append(estimate.value)
        errors.append(estimate.standard_error)
    assert 0.915 <= covered / repetitions <= 0.985
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)
    assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(repetitions) + 0.003


def test_no_bias_from_few_images_per_prompt() -> None:
    """Two images per prompt: a plug-in mean would be wrong by half the variance."""
    estimate = renyi_self_tilted(*draw(np.random.default_rng(3), 40_000, 2, 1, 0.25))
    assert estimate.standard_error < 0.004
    assert abs(estimate.value - METHOD_VALUES[0.25]) < 3 * estimate.standard_error


def test_by_hand() -> None:
    """Two images, one prompt: S = (.2*.4 + .8*.6)/2, U = (.2*.6 + .8*.4)/2."""
    estimate = renyi_self_tilted([[0.2, 0.8]], [[0.4, 0.6]])
    assert estimate.value == pytest.approx(math.log(0.28 / 0.22))


def test_scale_of_a_prompts_optimality_does_not_matter() -> None:
    """D compares r with its own mean, so a prompt on which all images do worse counts the same."""
    clean, rollout = draw(np.random.default_rng(4), 1, 500, 1, 0.5)
    plain = renyi_self_tilted(clean, rollout).value
    scales = np.array([[1.0], [0.2], [0.5]])
    scaled = renyi_self_tilted(scales * clean, scales[:, :, None] * rollout)
    assert scaled.value == pytest.approx(plain, abs=1e-12)


def test_differences_between_prompts_are_not_discriminability() -> None:
    """Optimality constant within every prompt: no positive policy differs from the model."""
    constant = np.repeat(np.linspace(0.1, 0.9, 8)[:, None], 5, axis=1)
    estimate = renyi_self_tilted(constant, constant)
    assert estimate.value == pytest.approx(0.0, abs=1e-12)
    assert estimate.standard_error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 3.0])
def test_other_orders_at_level_zero_have_no_plug_in_bias(alpha: float) -> None:
    clean, rollout = draw(np.random.default_rng(5), 100, 60, 1, 0.0)
    estimate = renyi_self_tilted(clean, rollout, alpha=alpha)
    assert abs(estimate.value - exact(0.0, alpha)) < 3 * estimate.standard_error
    assert estimate.standard_error < 0.05


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 3.0])
def test_plug_in_bias_of_other_orders_vanishes_with_rollouts(alpha: float) -> None:
    estimate = renyi_self_tilted(*draw(np.random.default_rng(6), 60, 40, 128, 0.5), alpha=alpha)
    assert abs(estimate.value - exact(0.5, alpha)) < 3 * estimate.standard_error + 0.01


def test_order_one_is_the_limit() -> None:
    clean, rollout = draw(np.random.default_rng(7), 20, 30, 8, 0.25)
    at_one = renyi_self_tilted(clean, rollout, alpha=1.0).value
    beside = renyi_self_tilted(clean, rollout, alpha=1.0 + 1e-5).value
    assert beside == pytest.approx(at_one, abs=1e-4)


def test_more_rollouts_narrow_the_interval() -> None:
    clean, rollout = draw(np.random.default_rng(8), 200, 8, 8, 0.75)
    many = renyi_self_tilted(clean, rollout).standard_error
    assert many < 0.5 * renyi_self_tilted(clean, rollout[:, :, 0]).standard_error


def test_missing_values_are_left_out_with_their_pairs() -> None:
    clean, rollout = draw(np.random.default_rng(9), 6, 8, 1, 0.25)
    holed, holed_rollout = clean.copy(), rollout.copy()
    holed[:, 0] = np.nan
    holed_rollout[:, 1] = np.nan
    expected = renyi_self_tilted(clean[:, 2:], rollout[:, 2:])
    found = renyi_self_tilted(holed, holed_rollout)
    assert found.value == pytest.approx(expected.value, abs=1e-12)
    assert found.standard_error == pytest.approx(expected.standard_error, abs=1e-12)
    assert found.images == 36


def test_prompts_without_two_usable_images_are_left_out() -> None:
    clean, rollout = draw(np.random.default_rng(10), 5, 4, 1, 0.25)
    holed = clean.copy()
    holed[0, 1:] = np.nan
    found = renyi_self_tilted(holed, rollout)
    assert found.value == pytest.approx(renyi_self_tilted(clean[1:], rollout[1:]).value, abs=1e-12)
    assert found.prompts == 4


def test_one_usable_prompt_takes_its_error_from_its_images() -> None:
    clean, rollout = draw(np.random.default_rng(11), 3, 200, 1, 0.25)
    holed = np.where(np.arange(3)[:, None] == 1, clean, np.nan)
    found, alone = renyi_self_tilted(holed, rollout), renyi_self_tilted(clean[1:2], rollout[1:2])
    assert found.value == pytest.approx(alone.value, abs=1e-12)
    assert found.standard_error == pytest.approx(alone.standard_error, abs=1e-12)
    assert found.standard_error > 0.01


def test_rare_rewards_stay_finite() -> None:
    clean = np.zeros((4, 6))
    clean[0, :2] = 1.0
    estimate = renyi_self_tilted(clean, clean[:, ::-1])
    assert estimate.value == pytest.approx(-math.log(24))
    assert math.isfinite(estimate.standard_error)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
def test_a_prompt_where_nothing_succeeds_counts_with_nothing(alpha: float) -> None:
    """Moments are averaged over prompts before the ratio, so a prompt with Z = 0 adds 0 to both."""
    clean, rollout = draw(np.random.default_rng(13), 4, 20, 3, 0.25)
    zeros = np.zeros((1, 20))
    found = renyi_self_tilted(
        np.concatenate([clean, zeros]), np.concatenate([rollout, zeros[..., None].repeat(3, 2)]), alpha=alpha
    )
    assert found.value == pytest.approx(renyi_self_tilted(clean, rollout, alpha=alpha).value, abs=1e-9)
    assert found.prompts == 5


def test_tensors_are_accepted() -> None:
    clean, rollout = draw(np.random.default_rng(12), 3, 5, 1, 0.25)
    tensors = renyi_self_tilted(torch.from_numpy(clean), torch.from_numpy(rollout))
    assert tensors == renyi_self_tilted(clean, rollout)


@pytest.mark.parametrize("prompts", [1, 16])
def test_rollouts_that_all_miss_the_reward_survive_in_nothing(prompts: int) -> None:
    """r' = 0 everywhere: its covariance with r is 0, so D = 0, not 0 / 0 or a ratio of roundings."""
    clean = np.random.default_rng(0).uniform(0.3, 0.7, (prompts, 8))
    for rollout in (np.zeros(clean.shape), np.zeros((*clean.shape, 3))):
        found = renyi_self_tilted(clean, rollout, centred=True)
        assert found.value == pytest.approx(0.0, abs=1e-3)
        assert found.standard_error == pytest.approx(0.0, abs=1e-3)


def test_a_unit_that_cannot_be_left_out_has_no_part_in_the_jackknife() -> None:
    """Without it the estimate is 0 / 0; the others' variance is that of three."""
    deviation = scaled_deviation(np.array([1.0, np.nan, 2.0, 3.0]))
    np.testing.assert_allclose(deviation, [-math.sqrt(2 / 3), 0.0, 0.0, math.sqrt(2 / 3)])
    np.testing.assert_array_equal(scaled_deviation(np.array([1.0, np.nan])), 0.0)


def test_a_saturated_reward_has_a_curve() -> None:
    """Nearly all clean images score 1 and every rollout 0.8: far beyond the clip, and no reason to fail."""
    clean = np.ones((16, 4))
    clean[0, 0] = 0.9
    rollouts = np.full((2, 16, 4, 1), 0.8)
    curve = estimate_curve(
        clean,
        rollouts,
        levels=(0.0, 0.4, 0.8, 1.0),
        alpha=2.0,
        advantage_clip=5.0,
        rng=np.random.default_rng(0),
    )
    np.testing.assert_allclose(curve.divergence_raw[1:], 0.0, atol=1e-3)
    assert np.isfinite([*curve.ci_high, *curve.gain_high, *curve.survival_error]).all()


@pytest.mark.parametrize(
    ("clean", "rollout", "alpha", "text"),
    [
        ([0.1, 0.2], [0.1, 0.2], 2.0, "clean"),
        ([[0.1, 0.2]], [[0.1, 0.2, 0.3]], 2.0, "rollout"),
        ([[0.1, 1.2]], [[0.1, 0.2]], 2.0, "clean"),
        ([[0.1, 0.2]], [[-0.1, 0.2]], 2.0, "rollout"),
        ([[0.1, 0.2]], [[np.inf, 0.2]], 2.0, "rollout"),
        ([[0.1, 0.2]], [[0.1, 0.2]], 0.0, "alpha"),
        ([[0.1, 0.2]], [[0.1, 0.2]], math.nan, "alpha"),
        ([[0.1], [0.2]], [[0.1], [0.2]], 2.0, "two images"),
        ([[np.nan, 0.2]], [[0.1, 0.2]], 2.0, "two images"),
        ([[0.0, 0.0]], [[0.0, 0.0]], 2.0, "vanishes"),
        ([[0.0, 0.0]], [[0.0, 0.0]], 1.0, "vanishes"),
    ],
)
def test_bad_input_names_the_argument(clean: object, rollout: object, alpha: float, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        renyi_self_tilted(clean, rollout, alpha=alpha)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
