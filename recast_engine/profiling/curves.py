"""From scores of clean images and rollouts to a reward's curve with intervals. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recast_engine.errors import RewardFailure
from recast_engine.profiling.cleanup import largest_violation, non_increasing
from recast_engine.profiling.estimator import Moments, jackknife, moments, without_common_noise
from recast_engine.profiling.profile import Curve

Array = NDArray[np.float64]

RESAMPLES = 1000
BOOTSTRAP_NUMBERS = 2_000_000  # weights held at once, which bounds memory for large prompt sets
RELATIVE_NOISE = 1e-6  # scores are float32: a spread below this share of their size is rounding
VIOLATION_SE = 3.0  # about a 5% chance anywhere among the 36 pairs of 9 levels
FEW_PROMPTS = 8


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
    scores = clean[finite]
    spread = float(scores.std()) if scores.size else 0.0
    alive = scores.size > 0 and spread > RELATIVE_NOISE * float(np.abs(scores).max())
    slope = 1.0 / (spread * advantage_clip) if alive else 0.0
    return (
        0.5 + 0.5 * np.clip((clean - centre) * slope, -1.0, 1.0),
        0.5 + 0.5 * np.clip((rollouts - centre[:, :, None]) * slope, -1.0, 1.0),
    )


def estimate_curve(
    clean: Array,
    rollouts: Array,
    *,
    alpha: float,
    advantage_clip: float,
    rng: np.random.Generator,
    anchor: Array | None = None,
) -> Curve:
    """The curve of one reward over levels 0 < ... < 1, of which both ends need no rollouts.

    Intervals are percentiles of a bootstrap that draws prompts with their whole groups, the same for all
    levels, and cleans every replicate like the estimate. Where only one prompt is usable, images are drawn.

    Args:
        clean: (P, K) scores, NaN where there is none.
        rollouts: (L - 2, P, K, M) scores at the inner levels, ascending.
        rng: draws the bootstrap.
        anchor: (P, K, M) scores of rollouts from pure noise; all NaN or None: there are none. They must have
            the other levels' random numbers, and serve for alpha = 2 (:func:`without_common_noise`).

    Raises:
        RewardFailure: at some level no prompt has two images with scores.
    """
    measured = _moments_per_level(*tilt(clean, rollouts, advantage_clip), alpha)
    if anchor is not None and alpha == 2.0:
        measured = _anchored(measured, *tilt(clean, anchor[None], advantage_clip))
    raw = np.array([level.divergence(np.ones(len(level.numerator))) for level in measured])
    errors = np.array([jackknife(level) for level in measured])
    resampled = _bootstrap(measured, raw, rng)
    cleaned = np.append(non_increasing(raw, errors**2), 0.0)
    replicates = np.pad(non_increasing(resampled, errors**2), ((0, 0), (0, 1)))
    low, high = _interval(replicates, cleaned)
    gain = -np.diff(cleaned)
    gain_low, gain_high = _interval(-np.diff(replicates, axis=1), gain)
    return Curve(
        divergence=_series(cleaned),
        divergence_raw=_series(np.append(raw, 0.0)),
        standard_error=_series(np.append(errors, 0.0)),
        ci_low=_series(low),
        ci_high=_series(high),
        gain=_series(gain),
        gain_low=_series(gain_low),
        gain_high=_series(gain_high),
        total=float(cleaned[0]),
        max_violation_se=largest_violation(np.append(raw, 0.0), np.pad(resampled, ((0, 0), (0, 1)))),
        prompts=min(level.prompts for level in measured),
        images=min(level.images for level in measured),
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


def _moments_per_level(clean: Array, rollouts: Array, alpha: float) -> list[Moments]:
    levels = [np.repeat(clean[:, :, None], 2, axis=2)]
    levels += [np.concatenate([clean[:, :, None], level], axis=2) for level in rollouts]
    measured = [moments(level, alpha, centred=True, unit="prompts") for level in levels]
    fewest = min(level.prompts for level in measured)
    if fewest == 0:
        raise RewardFailure("no prompt has two images with scores at every noise level")
    if fewest == 1:
        measured = [moments(level, alpha, centred=True, unit="images") for level in levels]
    return measured


def _anchored(measured: list[Moments], clean: Array, anchor: Array) -> list[Moments]:
    """``measured`` without the noise it shares with optimalities ``anchor`` (1, P, K, M) from pure noise."""
    known = moments(np.concatenate([clean[:, :, None], anchor[0]], axis=2), 2.0, centred=True, unit="prompts")
    if any(len(level.numerator) != len(known.numerator) for level in measured):  # units are images
        return measured
    return [without_common_noise(level, known) for level in measured]


def _bootstrap(measured: Sequence[Moments], raw: Array, rng: np.random.Generator) -> Array:
    """(B, L) replicates of the raw curve; units that no level can use are never drawn."""
    units = np.any([level.usable for level in measured], axis=0)
    count = int(units.sum())
    replicates = np.empty((RESAMPLES, len(measured)))
    at_once = max(1, BOOTSTRAP_NUMBERS // len(units))
    for start in range(0, RESAMPLES, at_once):
        rows = replicates[start : start + at_once]
        weights = np.zeros((len(rows), len(units)))
        weights[:, units] = rng.multinomial(count, np.full(count, 1.0 / count), size=len(rows))
        rows[:] = np.stack([level.divergence(weights) for level in measured], axis=1)
    return np.where(np.isfinite(replicates), replicates, raw)


def _interval(replicates: Array, estimate: Array) -> tuple[Array, Array]:
    low, high = np.percentile(replicates, [2.5, 97.5], axis=0)
    return np.minimum(low, estimate), np.maximum(high, estimate)


def _series(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
