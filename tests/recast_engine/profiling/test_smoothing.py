"""The smooth monotone clean-up against closed forms, a general optimiser and the staircase it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from recast_engine.profiling.cleanup import non_increasing
from recast_engine.profiling.curves import estimate_curve
from recast_engine.profiling.levels import noise_levels
from recast_engine.profiling.smoothing import ROUGHNESS, smooth_non_increasing

LEVELS = np.array(noise_levels(9))
UNITS = 10**9  # a covariance known exactly


def independent_gains(errors: np.ndarray) -> np.ndarray:
    """Covariance of a curve whose gains have independent ``errors``."""
    sums = np.triu(np.ones((len(errors), len(errors))))
    return np.asarray(sums @ np.diag(errors**2) @ sums.T)


def steep(levels: np.ndarray) -> np.ndarray:
    """D of a reward that is decided late: half of it is gone at sigma 0.2."""
    return np.asarray(0.04 * (1 - levels) ** 3)


def test_exact_values_are_met() -> None:
    values = steep(LEVELS)[:-1]
    np.testing.assert_allclose(
        smooth_non_increasing(values, np.zeros((8, 8)), LEVELS, UNITS), values, rtol=1e-4, atol=1e-7
    )


def test_nothing_measured_gives_a_flat_density() -> None:
    """Errors far above any shape: only the total is left, and gains are as wide as their levels are apart."""
    values = np.array([0.03, 0.031, 0.02, 0.021, 0.012, 0.012, 0.004, 0.001])
    errors = np.full(8, 10.0)
    fit = smooth_non_increasing(values, independent_gains(errors), LEVELS, UNITS)
    gains = -np.diff(np.append(fit, 0.0))
    np.testing.assert_allclose(gains / gains.sum(), np.diff(LEVELS), atol=2e-4)


def test_a_reward_without_spread_stays_zero() -> None:
    assert not smooth_non_increasing(np.zeros(8), np.zeros((8, 8)), LEVELS, 20).any()


def test_never_rises_and_never_falls_below_zero() -> None:
    rng = np.random.default_rng(0)
    for units in (3, 14, 200):
        for _ in range(50):
            errors = np.exp(rng.normal(-5, 1, 8))
            values = steep(LEVELS)[:-1] + np.cumsum(rng.normal(0, errors)[::-1])[::-1]
            fit = smooth_non_increasing(values, independent_gains(errors), LEVELS, units)
            assert np.all(np.diff(fit) <= 1e-15)
            assert np.all(fit >= 0)


def test_all_raw_values_below_zero_give_no_gain() -> None:
    values = -np.linspace(0.03, 0.001, 8)
    fit = smooth_non_increasing(values, independent_gains(np.full(8, 1e-6)), LEVELS, UNITS)
    np.testing.assert_allclose(fit, 0.0, atol=1e-9)


def test_the_scale_of_a_reward_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    errors = np.full(8, 0.002)
    values = steep(LEVELS)[:-1] + np.cumsum(rng.normal(0, errors)[::-1])[::-1]
    one = smooth_non_increasing(values, independent_gains(errors), LEVELS, 48)
    other = smooth_non_increasing(1000 * values, independent_gains(1000 * errors), LEVELS, 48)
    np.testing.assert_allclose(other, 1000 * one, rtol=1e-6, atol=1e-9)


def test_is_the_constrained_optimum_at_the_likeliest_roughness() -> None:
    """On three levels, written out: the gains' marginal likelihood, then bounded least squares."""
    levels = np.array([0.0, 0.5, 1.0])
    values, errors = np.array([0.03, 0.004]), np.array([0.003, 0.002])
    fit = smooth_non_increasing(values, independent_gains(errors), levels, UNITS)

    size, cells = 0.03, 40
    width = 1 / cells
    gains = np.array([0.026, 0.004]) / size
    sums = np.kron(np.eye(2), np.full(cells // 2, width))
    centres = (np.arange(cells) + 0.5) * width
    wiener = np.minimum.outer(centres, centres) - centres[0]  # a Wiener process that starts in the first cell
    likelihood = []
    for roughness in ROUGHNESS:
        covariance = np.diag((errors / size) ** 2) + roughness * sums @ wiener @ sums.T
        contrast = np.array([1.0, -1.0])  # the flat density gives both gains alike, so this is free of it
        variance = contrast @ covariance @ contrast
        likelihood.append(-0.5 * (contrast @ gains) ** 2 / variance - 0.5 * np.log(variance))
    roughness = ROUGHNESS[int(np.argmax(likelihood))]
    smooth = np.diff(np.eye(cells), axis=0) / np.sqrt(roughness * width)
    design = np.vstack([sums / (errors / size)[:, None], smooth])
    target = np.concatenate([gains / (errors / size), np.zeros(cells - 1)])
    density = lsq_linear(design, target, bounds=(0, np.inf), tol=1e-14).x
    expected = size * np.array([sums.sum(axis=0) @ density, sums[1] @ density])
    np.testing.assert_allclose(fit, expected, rtol=1e-5)


@pytest.mark.parametrize("prompts", [16, 48])
def test_timing_is_closer_to_the_truth_than_a_staircase(prompts: int) -> None:
    """Shapes s = g / mean g over 25 steps, of curves known in closed form, from the scores up.

    Scores of an image and its rollout correlate with (1 - sigma)^1.5: D = log(1 + (1 - sigma)^1.5 / 25).
    """
    rng = np.random.default_rng(2)
    kept = (1 - LEVELS) ** 1.5
    exact = np.log1p(kept / 25)
    errors: dict[str, list[float]] = {"smooth": [], "isotonic": []}
    for _ in range(40):
        clean, fresh = rng.normal(size=(2, prompts, 8))
        noise = rng.normal(size=(prompts, 8))  # shared by the levels, as in a profile
        share = np.sqrt(kept)[1:-1, None, None]
        noised = share * clean + np.sqrt(1 - share**2) * noise
        rollouts = share * noised + np.sqrt(1 - share**2) * fresh
        for cleanup, found in errors.items():
            curve = estimate_curve(
                clean,
                rollouts[..., None],
                levels=LEVELS,
                alpha=2.0,
                advantage_clip=5.0,
                rng=np.random.default_rng(0),
                cleanup=cleanup,
            )
            shapes = [np.array(curve.gain) / curve.total, -np.diff(exact) / exact[0]]
            density = [shape / np.diff(LEVELS) for shape in shapes]
            found.append(float(np.abs(density[0] - density[1]).mean()))
    assert np.mean(errors["smooth"]) < 0.75 * np.mean(errors["isotonic"])


def test_more_images_lead_to_the_truth() -> None:
    """The prior gives way: the error falls as the measurement's errors do."""
    rng = np.random.default_rng(3)
    exact = steep(LEVELS)
    distances = []
    for error in (1e-2, 1e-3, 1e-4):
        errors = np.full(8, error)
        rows = []
        for _ in range(30):
            values = exact[:-1] + np.cumsum(rng.normal(0, errors)[::-1])[::-1]
            fit = smooth_non_increasing(values, independent_gains(errors), LEVELS, 100)
            rows.append(np.abs(fit - exact[:-1]).mean())
        distances.append(np.mean(rows))
    assert distances[1] < 0.2 * distances[0]
    assert distances[2] < 0.2 * distances[1]


def test_a_jump_that_is_well_measured_is_kept() -> None:
    """All of D falls between two neighbouring levels, 20 standard errors high."""
    values = np.array([0.02, 0.02, 0.02, 0.02, 0.0, 0.0, 0.0, 0.0])
    errors = np.full(8, 0.001)
    fit = smooth_non_increasing(values, independent_gains(errors), LEVELS, 200)
    gains = -np.diff(np.append(fit, 0.0))
    assert gains[3] > 0.8 * gains.sum()
    assert np.abs(non_increasing(values, errors**2) - fit).max() < 3 * 0.001 * np.sqrt(8)
