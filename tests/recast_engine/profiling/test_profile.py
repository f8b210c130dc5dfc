from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from recast_engine.backbones.catalogue import flow_sigmas
from recast_engine.errors import InvalidArgument, RewardFailure
from recast_engine.profiling import Curve, Profile
from recast_engine.profiling.cleanup import largest_violation, non_increasing
from recast_engine.profiling.curves import curve_warnings, estimate_curve, tilt
from recast_engine.profiling.levels import noise_levels

LEVELS = noise_levels(7)


def retained(sigma: float) -> float:
    return (1 - sigma) ** 2 / ((1 - sigma) ** 2 + sigma**2)


def gaussian_scores(rng: np.random.Generator, prompts: int, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal scores, and rollouts correlated as posterior draws given x_sigma: (L - 2, P, K, 1)."""
    clean = rng.normal(size=(prompts, images))
    inner = [
        retained(sigma) * clean + np.sqrt(1 - retained(sigma) ** 2) * rng.normal(size=clean.shape)
        for sigma in LEVELS[1:-1]
    ]
    return clean, np.stack(inner)[..., None]


def curve_of(clean: np.ndarray, rollouts: np.ndarray, clip: float = 5.0, alpha: float = 2.0) -> Curve:
    rng = np.random.default_rng(0)
    return estimate_curve(clean, rollouts, levels=LEVELS, alpha=alpha, advantage_clip=clip, rng=rng)


def profile_of(**curves: Curve) -> Profile:
    return Profile(tuple(curves), LEVELS, curves, ("a warning",), {"model_evaluations": 3}, {"seed": 1})


@pytest.fixture(scope="module")
def profile() -> Profile:
    rng = np.random.default_rng(0)
    return profile_of(a=curve_of(*gaussian_scores(rng, 40, 8)), b=curve_of(*gaussian_scores(rng, 40, 8)))


def brute_force(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Pool adjacent violators, one at a time, for a non-increasing fit."""
    blocks = [[value, weight, 1] for value, weight in zip(values, weights, strict=True)]
    index = 0
    while index < len(blocks) - 1:
        if blocks[index][0] < blocks[index + 1][0]:
            (v1, w1, n1), (v2, w2, n2) = blocks[index], blocks.pop(index + 1)
            blocks[index] = [(v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2]
            index = max(index - 1, 0)
        else:
            index += 1
    return np.concatenate([[value] * count for value, _, count in blocks])


def test_clean_up_is_the_weighted_isotonic_regression() -> None:
    rng = np.random.default_rng(1)
    variances = rng.uniform(0.1, 2.0, 9)
    values = rng.normal(1.0, 1.0, (50, 9))
    expected = np.array([np.maximum(brute_force(row, 1 / variances), 0.0) for row in values])
    np.testing.assert_allclose(non_increasing(values, variances), expected, atol=1e-12)


def test_clean_up_by_hand() -> None:
    fit = non_increasing(np.array([3.0, 1.0, 2.0, -1.0]), np.array([1.0, 1.0, 0.5, 1.0]))
    np.testing.assert_allclose(fit, [3.0, 5 / 3, 5 / 3, 0.0])


def test_clean_up_leaves_a_monotone_curve_alone() -> None:
    values = np.array([0.5, 0.3, 0.3, 0.0])
    np.testing.assert_allclose(non_increasing(values, np.zeros(4)), values, atol=1e-15)


def test_violation_is_counted_in_standard_errors_of_the_rise() -> None:
    rng = np.random.default_rng(2)
    common = rng.normal(0, 5.0, (4000, 1))
    resampled = common + rng.normal(0, [0.1, 0.1, 0.1], (4000, 3))
    found = largest_violation(np.array([1.0, 1.3, 0.0]), resampled)
    assert found == pytest.approx(0.3 / (0.1 * np.sqrt(2)), rel=0.05)
    assert largest_violation(np.array([1.0, 0.5, 0.0]), resampled) == 0.0


def test_optimality_is_centred_on_the_clean_images_and_scaled_globally() -> None:
    clean = np.array([[1.0, 3.0], [10.0, 14.0]])
    spread = clean.std()
    found, rollouts = tilt(clean, np.array([[[2.0], [99.0]], [[12.0], [np.nan]]]), advantage_clip=2.0)
    np.testing.assert_allclose(found, 0.5 + np.array([[-1.0, 1.0], [-2.0, 2.0]]) / (4 * spread))
    np.testing.assert_allclose(rollouts[:, :, 0], [[0.5, 1.0], [0.5, np.nan]])


def test_a_reward_without_spread_is_one_half_everywhere() -> None:
    clean, rollouts = tilt(np.full((3, 4), 0.1) + 1e-9, np.full((3, 4, 1), 0.1), advantage_clip=5.0)
    assert np.all(clean == 0.5)
    assert np.all(rollouts == 0.5)


def test_centring_small_groups_leaves_no_bias() -> None:
    """K = 3, A_max = 1.5 and 8,000 prompts: without the corrections D(0) would be a third too small."""
    rng = np.random.default_rng(3)
    clean = 0.5 * rng.uniform(-1, 1, size=(8_000, 3)) + rng.normal(size=(8_000, 1))
    rollouts = np.broadcast_to(clean[..., None], (len(LEVELS) - 2, 8_000, 3, 1))
    curve = curve_of(clean, rollouts, clip=1.5)
    variance = 0.25 / 3
    expected = np.log(1 + variance / (1 + variance) / 1.5**2)
    assert abs(curve.divergence_raw[0] - expected) < 3 * curve.standard_error[0]
    assert curve.standard_error[0] < 0.02 * expected


def test_curve_agrees_with_the_closed_form_of_gaussian_scores() -> None:
    curve = curve_of(*gaussian_scores(np.random.default_rng(4), 2000, 8))
    exact = [np.log1p(retained(sigma) / 25) for sigma in LEVELS]
    deviations = (np.array(curve.divergence_raw) - exact)[:-1] / np.array(curve.standard_error)[:-1]
    assert np.abs(deviations).max() < 3.5
    assert curve.total == pytest.approx(exact[0], rel=0.05)
    assert curve.divergence[-1] == curve.divergence_raw[-1] == 0.0


def test_the_shape_hardly_depends_on_the_clip() -> None:
    """tilt's claim: D(sigma) / D(0) changes by less than D(0) / 2, and so does the relative error."""
    scores = gaussian_scores(np.random.default_rng(5), 300, 16)
    training, wide = curve_of(*scores, clip=5.0), curve_of(*scores, clip=500.0)
    shapes = [np.array(curve.divergence_raw) / curve.divergence_raw[0] for curve in (training, wide)]
    assert np.abs(shapes[0] - shapes[1]).max() < training.divergence_raw[0] / 2
    noises = [np.array(curve.standard_error) / curve.divergence_raw[0] for curve in (training, wide)]
    np.testing.assert_allclose(noises[0], noises[1], atol=0.002)


def test_curves_are_monotone_with_intervals_that_hold_them() -> None:
    curve = curve_of(*gaussian_scores(np.random.default_rng(6), 12, 4))
    divergence = np.array(curve.divergence)
    assert np.all(np.diff(divergence) <= 0)
    assert np.all(np.array(curve.ci_low) <= divergence)
    assert np.all(divergence <= np.array(curve.ci_high))
    np.testing.assert_allclose(curve.gain, -np.diff(divergence))
    assert np.all(np.array(curve.gain_low) <= curve.gain)
    assert np.all(np.array(curve.gain) <= curve.gain_high)
    assert np.all(np.array(curve.gain_low) >= 0)


@pytest.mark.parametrize(("prompts", "lowest"), [(48, 0.92), (12, 0.85)])
def test_intervals_cover_the_truth(prompts: int, lowest: float) -> None:
    """300 profiles of 8 images a prompt, every curve and every gain: 95% has a standard error of 1.3%.

    The lowest with 12 prompts is D(0), which hardly varies and is skewed; all others are above 90%.
    """
    rng = np.random.default_rng(7)
    exact = np.array([np.log1p(retained(sigma) / 25) for sigma in LEVELS])
    covered, covered_gains = np.zeros(len(LEVELS) - 1), np.zeros(len(LEVELS) - 1)
    for _ in range(300):
        curve = curve_of(*gaussian_scores(rng, prompts, 8))
        covered += ((np.array(curve.ci_low) <= exact) & (exact <= curve.ci_high))[:-1]
        gain = -np.diff(exact)
        covered_gains += (np.array(curve.gain_low) <= gain) & (gain <= curve.gain_high)
    assert lowest <= min(covered.min(), covered_gains.min()) / 300
    assert 0.92 <= (covered.mean() + covered_gains.mean()) / 600 <= 0.98


def test_the_scale_of_the_scores_is_part_of_the_error() -> None:
    """D(0) hardly varies, since the scale is taken from the same images; nor does its standard error."""
    rng = np.random.default_rng(8)
    curves = [curve_of(*gaussian_scores(rng, 48, 8)) for _ in range(100)]
    scatter = np.std([curve.divergence_raw[:4] for curve in curves], axis=0)
    errors = np.mean([curve.standard_error[:4] for curve in curves], axis=0)
    np.testing.assert_allclose(errors, scatter, rtol=0.3)
    assert errors[0] < 0.04 * np.log1p(1 / 25)  # 0.07 without


def test_what_pure_noise_shares_with_the_levels_is_taken_off() -> None:
    """Common random numbers leave one noise in all high levels; the anchor measures it. No bias comes in."""
    rng = np.random.default_rng(9)
    errors = {True: [], False: []}
    for _ in range(60):
        clean, noise, fresh = (rng.normal(size=(24, 8)) for _ in range(3))
        noised = [(sigma, (1 - sigma) * clean + sigma * noise) for sigma in LEVELS[1:]]
        spread = [(1 - sigma) ** 2 + sigma**2 for sigma in LEVELS[1:]]
        drawn = [(1 - s) / v * x + s / np.sqrt(v) * fresh for (s, x), v in zip(noised, spread, strict=True)]
        rollouts = np.stack(drawn)[..., None]
        for anchored, found in errors.items():
            curve = estimate_curve(
                clean,
                rollouts[:-1],
                levels=LEVELS,
                alpha=2.0,
                advantage_clip=5.0,
                rng=np.random.default_rng(0),
                anchor=rollouts[-1] if anchored else None,
            )
            exact = [np.log1p(retained(sigma) / 25) for sigma in LEVELS]
            found.append(np.array(curve.divergence_raw) - exact)
    with_anchor, without = (np.array(errors[anchored])[:, 2:-1] for anchored in (True, False))
    ratios = with_anchor.std(axis=0) / without.std(axis=0)
    assert np.all(ratios < 0.85)
    assert ratios[-1] < 0.25
    assert np.all(np.abs(with_anchor.mean(axis=0)) < 3.5 * with_anchor.std(axis=0) / np.sqrt(60))


def test_a_curve_that_rises_with_noise_is_reported() -> None:
    clean, rollouts = gaussian_scores(np.random.default_rng(8), 100, 8)
    rollouts[0] = np.random.default_rng(9).normal(size=rollouts[0].shape)
    curve = curve_of(clean, rollouts)
    assert curve.max_violation_se > 3
    assert any("rises with noise" in text for text in curve_warnings("ocr", curve))
    assert np.all(np.diff(curve.divergence) <= 0)


def test_a_clean_curve_carries_no_warning() -> None:
    curve = curve_of(*gaussian_scores(np.random.default_rng(10), 100, 8))
    assert curve_warnings("ocr", curve) == []


def test_a_constant_reward_has_a_flat_curve_and_says_so() -> None:
    clean, rollouts = np.full((10, 4), 0.3), np.full((len(LEVELS) - 2, 10, 4, 1), 0.3)
    curve = curve_of(clean, rollouts)
    assert curve.divergence == (0.0,) * len(LEVELS)
    assert curve.max_violation_se == 0.0
    assert any("score alike" in text for text in curve_warnings("ocr", curve))


def test_missing_scores_never_give_nan() -> None:
    rng = np.random.default_rng(11)
    clean, rollouts = gaussian_scores(rng, 20, 6)
    clean[:10] = np.nan
    rollouts[:, :10] = np.nan
    clean[rng.random(clean.shape) < 0.2] = np.nan
    rollouts[rng.random(rollouts.shape) < 0.2] = np.nan
    curve = curve_of(clean, rollouts)
    json.dumps(profile_of(a=curve).to_dict(), allow_nan=False)
    assert curve.prompts == 10


def test_one_applicable_prompt_resamples_its_images() -> None:
    clean, rollouts = gaussian_scores(np.random.default_rng(12), 5, 64)
    clean[1:] = np.nan
    curve = curve_of(clean, rollouts)
    assert curve.prompts == 1
    assert curve.ci_low[0] < curve.divergence[0] < curve.ci_high[0]
    assert any("only 1 prompts" in text for text in curve_warnings("ocr", curve))


def test_nothing_left_is_a_reward_failure() -> None:
    clean, rollouts = gaussian_scores(np.random.default_rng(13), 5, 4)
    rollouts[2] = np.nan
    with pytest.raises(RewardFailure, match="two images"):
        curve_of(clean, rollouts)


def test_profile_survives_json_exactly(profile: Profile) -> None:
    text = json.dumps(profile.to_dict(), allow_nan=False)
    assert Profile.from_dict(json.loads(text)) == profile


def test_other_data_is_not_a_profile() -> None:
    with pytest.raises(InvalidArgument, match="not a profile"):
        Profile.from_dict({"rewards": ["a"]})


@pytest.mark.parametrize("steps", [1, 2, 10, 25, 1000])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_gains_sum_to_the_total_for_any_schedule(profile: Profile, steps: int, shift: float) -> None:
    gains = profile.gains(flow_sigmas(steps, shift))
    assert gains.shape == (2, steps)
    assert np.all(gains >= 0)
    np.testing.assert_allclose(gains.sum(axis=1), list(profile.totals.values()), atol=1e-12)


def test_gains_on_the_levels_are_the_measured_ones(profile: Profile) -> None:
    gains = profile.gains(LEVELS[::-1])
    np.testing.assert_allclose(gains[0][::-1], profile.curves["a"].gain, atol=1e-15)


def test_part_of_a_schedule_sums_to_the_difference(profile: Profile) -> None:
    gains = profile.gains([0.8, 0.5, 0.3])
    ends = profile.divergence([0.3, 0.8])
    np.testing.assert_allclose(gains.sum(axis=1), ends[:, 0] - ends[:, 1], atol=1e-12)


@pytest.mark.parametrize("sigmas", [[0.0, 0.5, 1.0], [1.0], [1.0, 1.0, 0.0], [1.5, 0.0], [[1.0, 0.0]]])
def test_bad_sigmas_are_refused(profile: Profile, sigmas: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="sigmas"):
        profile.gains(sigmas)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, recast_engine.profiling, recast_engine.allocation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_profile_stored_before_survival_errors_were_is_read(profile: Profile) -> None:
    stored = profile.to_dict()
    for curve in stored["curves"].values():
        del curve["survival_error"]
    old = Profile.from_dict(stored)
    assert [curve.survival_error for curve in old.curves.values()] == [(), ()]
    np.testing.assert_array_equal(old.gains(flow_sigmas(10, 1.0)), profile.gains(flow_sigmas(10, 1.0)))
