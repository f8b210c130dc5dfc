"""From scores of clean images and rollouts to a reward's curve with intervals. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import Cleanup
from recast_engine.errors import RewardFailure
from recast_engine.profiling.cleanup import largest_violation, non_increasing
from recast_engine.profiling.estimator import (
    SMALLEST_MEAN,
    Moments,
    moments,
    proposal_moments,
    without_common_noise,
    without_noise_of_proposals,
)
from recast_engine.profiling.profile import Curve
from recast_engine.profiling.smoothing import smooth_non_increasing
from recast_engine.profiling.uncertainty import Measured, interval
from recast_engine.rewards.base import spread

Array = NDArray[np.float64]

VIOLATION_SE = 3.0  # about a 5% chance anywhere among the 36 pairs of 9 levels
FEW_PROMPTS = 16


def tilt(clean: Array, rollouts: Array, advantage_clip: float) -> tuple[Array, Array]:
    """Raw scores -> optimalities r = 1/2 + 1/2 clip(A / A_max, -1, 1) (METHOD section 3).

    A is the score minus the mean of the prompt's clean images, over the standard deviation of all clean
    images; rollouts go through the same affine map as the clean images of their prompt.

    A_max sets the size of D, hardly its shape: unclipped, D(sigma) = log(1 + Cov(A, A') / A_max^2), so
    D(sigma) / D(0) depends on A_max only through the logarithm's curvature, less than D(0) / 2, and noise
    scales with the signal. The default is therefore the training's A_max: the curve is that of the very
    tilt that training applies.

    Args:
        clean: (P, K) scores, NaN where there is none.
        rollouts: (..., P, K, M) scores, NaN where there is none.

    Returns:
        Both in [0, 1] with NaN kept; 1/2 everywhere for a reward without spread.
    """
    finite = np.isfinite(clean)
    count = np.maximum(finite.sum(axis=1, keepdims=True), 1)
    centre = np.where(finite, clean, 0.0).sum(axis=1, keepdims=True) / count
    deviation = spread(clean)
    slope = 1.0 / (deviation * advantage_clip) if deviation > 0.0 else 0.0
    return (
        0.5 + 0.5 * np.clip((clean - centre) * slope, -1.0, 1.0),
        0.5 + 0.5 * np.clip((rollouts - centre[:, :, None]) * slope, -1.0, 1.0),
    )


def estimate_curve(
    clean: Array,
    rollouts: Array,
    *,
    levels: Sequence[float],
    alpha: float,
    advantage_clip: float,
    rng: np.random.Generator,
    anchor: Array | None = None,
    cleanup: Cleanup = "smooth",
) -> Curve:
    """The curve of one reward over its noise levels, of which both ends need no rollouts.

    Intervals rest on a bootstrap that draws prompts with their whole groups, the same for all levels
    (``uncertainty``). Where only one prompt is usable, images are drawn.

    Args:
        clean: (P, K) scores, NaN where there is none.
        rollouts: (L - 2, P, K, M) scores at the inner levels, ascending.
        levels: (L,) ascending from 0 to 1.
        rng: draws the bootstrap.
        anchor: (P, K, M) scores of rollouts from pure noise; all NaN or None: there are none. They must have
            the other levels' random numbers, and serve for alpha = 2 (:func:`without_common_noise`).

    Raises:
        RewardFailure: at some level no prompt has two images with scores.
    """

    def levels_at(clip: float) -> list[Moments]:
        start, later = tilt(clean, rollouts, clip)
        pairs = [np.repeat(start[:, :, None], 2, axis=2)]
        pairs += [np.concatenate([start[:, :, None], level], axis=2) for level in later]
        measured = _moments_per_level(pairs, alpha)
        if anchor is None or alpha != 2.0 or len(measured[0].numerator) != len(clean):
            return measured
        pure = np.concatenate([start[:, :, None], tilt(clean, anchor[None], clip)[1][0]], axis=2)
        return without_common_noise(measured, pairs, pure)

    return curve_of(Measured.of(levels_at, advantage_clip, clean), levels, rng, cleanup)


def estimate_proposal_curve(
    clean: Array,
    proposals: Array,
    rollouts: Array,
    *,
    levels: Sequence[float],
    alpha: float,
    advantage_clip: float,
    rng: np.random.Generator,
    anchor: Array | None = None,
    cleanup: Cleanup = "smooth",
) -> Curve:
    """The curve of one reward from an external proposal's images (METHOD section 4 (a)).

    A surrogate: the proposal is no reward's positive policy, so the raw curve may rise with the noise level
    or be negative; it is kept as it is beside the cleaned one.

    Args:
        clean: (P, K) scores of the model's own images, which normalise and give Z.
        proposals: (P, K) scores of the proposal's images, encoded and decoded.
        rollouts: (L - 2, P, K, M) scores of the model's rollouts from them at the inner levels, ascending.
        anchor: (P, K, M) scores of rollouts from pure noise, as for ``estimate_curve``.

    Raises:
        RewardFailure: at some level fewer than two prompts have scores.
    """

    def levels_at(clip: float) -> list[Moments]:
        start, later = tilt(
            clean, np.concatenate([proposals[None, :, :, None].repeat(rollouts.shape[3], 3), rollouts]), clip
        )
        finite = np.isfinite(start)
        count = finite.sum(axis=1)
        sums = np.where(finite, start, 0.0).sum(axis=1)
        partition = np.where(count > 0, np.maximum(sums / np.maximum(count, 1), SMALLEST_MEAN), np.nan)
        measured = [proposal_moments(level, partition, alpha) for level in later]
        if min(level.prompts for level in measured) < 2:
            raise RewardFailure("fewer than two prompts have proposals with scores at every noise level")
        if anchor is None or alpha != 2.0:
            return measured
        pure = proposal_moments(tilt(clean, anchor[None], clip)[1][0], partition, alpha)
        return without_noise_of_proposals(measured, pure)

    return curve_of(Measured.of(levels_at, advantage_clip, clean), levels, rng, cleanup)


def curve_of(
    measured: Measured, levels: Sequence[float], rng: np.random.Generator, cleanup: Cleanup = "smooth"
) -> Curve:
    """Clean up, and put intervals around, the curve at all levels but pure noise, where D = 0."""
    raw, errors = measured.raw(), measured.standard_errors()
    resampled = np.pad(measured.bootstrap(rng), ((0, 0), (0, 1)))
    ended = np.append(raw, 0.0)
    if cleanup == "smooth":
        units = int(measured.units.sum())
        fitted = smooth_non_increasing(raw, measured.covariance(), np.array(levels), units)
    else:
        fitted = non_increasing(raw, errors**2)
    cleaned = np.append(fitted, 0.0)
    low, high = interval(ended, measured.reach(resampled), cleaned)
    gain = -np.diff(cleaned)
    gain_low, gain_high = interval(-np.diff(ended), measured.reach(np.diff(resampled, axis=1)), gain)
    return Curve(
        divergence=_series(cleaned),
        divergence_raw=_series(ended),
        standard_error=_series(np.append(errors, 0.0)),
        ci_low=_series(low),
        ci_high=_series(high),
        gain=_series(gain),
        gain_low=_series(gain_low),
        gain_high=_series(gain_high),
        total=float(cleaned[0]),
        max_violation_se=largest_violation(ended, resampled),
        prompts=min(level.prompts for level in measured.levels),
        images=min(level.images for level in measured.levels),
        survival_error=_series(np.append(measured.survival_errors(), 0.0)),
    )


def curve_warnings(reward: str, curve: Curve) -> list[str]:
    """What a reader of ``curve`` should know before trusting it."""
    texts = []
    if curve.prompts < FEW_PROMPTS:
        texts.append(f"{reward}: only {curve.prompts} prompts could be used; its intervals are rough")
    if curve.total == 0.0:
        texts.append(f"{reward}: all images of a prompt score alike, so nothing can be timed")
        return texts
    if curve.ci_low[1] <= 0.0:
        texts.append(
            f"{reward}: from the first noise level on its curve cannot be told from zero; "
            "use more prompts or images"
        )
    if curve.max_violation_se > VIOLATION_SE:
        texts.append(
            f"{reward}: the raw curve rises with noise by {curve.max_violation_se:.1f} standard errors, "
            "which theory rules out: the rollouts are probably too coarse, use more sampling steps"
        )
    return texts


def proposal_warnings(reward: str, curve: Curve, levels: Sequence[float]) -> list[str]:
    """What a reader of an external proposal's curve should know besides :func:`curve_warnings`."""
    texts = []
    gains = -np.diff(curve.divergence_raw)
    negative = [
        f"{low:.2f} to {high:.2f}"
        for low, high, gain in zip(levels, levels[1:], gains, strict=False)
        if gain < 0
    ]
    if negative:
        texts.append(
            f"{reward}: raw differences of the proposal's curve are negative at noise {', '.join(negative)}; "
            "the proposal is a surrogate for the reward's positive policy"
        )
    if curve.divergence_raw[0] <= 0.0:
        texts.append(
            f"{reward}: the proposal's images do not score above the model's own, so the curve cannot time it"
        )
    return texts


def _moments_per_level(levels: Sequence[Array], alpha: float) -> list[Moments]:
    """Moments of optimalities (P, K, M + 1) at every level, by prompts or, if only one is usable, images."""
    measured = [moments(level, alpha, centred=True, unit="prompts") for level in levels]
    fewest = min(level.prompts for level in measured)
    if fewest == 0:
        raise RewardFailure("no prompt has two images with scores at every noise level")
    if fewest == 1:
        measured = [moments(level, alpha, centred=True, unit="images") for level in levels]
    return measured


def _series(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
