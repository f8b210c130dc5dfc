"""The self-tilted estimator of a Rényi divergence between a noised policy and its reward-tilted self.

METHOD section 4 (b). With r the optimality of a clean image x0 and r' that of a stochastic rollout from
x_sigma, x0 and the rollout are independent draws of the same posterior given x_sigma, so E[r r'] is the
second moment of E[r | x_sigma] without plug-in bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from recast_engine.errors import InvalidArgument

Array = NDArray[np.float64]
Unit = Literal["prompts", "images"]

SMALLEST_MEAN = 1e-6  # floor of a mean optimality (over rollouts: of Z) that a quotient or logarithm takes
SMALLEST_Z = 1e-30  # the same for Z itself: a prompt where every optimality is 0 then counts with 0


@dataclass(frozen=True)
class Estimate:
    """A divergence with its uncertainty.

    Attributes:
        value: D in nats; raw, so it may fall below 0 by noise.
        standard_error: by the jackknife over prompts, or over images where only one prompt is usable.
        prompts: prompts that had at least two usable images.
        images: usable images in them.
    """

    value: float
    standard_error: float
    prompts: int
    images: int

    def interval(self) -> tuple[float, float]:
        """The 95% interval, by Student's t with one degree of freedom less than there are units."""
        units = self.prompts if self.prompts > 1 else self.images
        reach = float(stdtrit(max(units - 1, 1), 0.975)) * self.standard_error
        return self.value - reach, self.value + reach


@dataclass(frozen=True, eq=False)
class Moments:
    """Two numbers per unit whose means over units give D, so that jackknife and bootstrap need no images.

    Attributes:
        numerator, denominator: (U,) NaN where the unit is not usable.
        prompts, images: how many were usable.
        alpha: order of the divergence.
    """

    numerator: Array
    denominator: Array
    prompts: int
    images: int
    alpha: float

    @property
    def usable(self) -> NDArray[np.bool_]:
        """(U,) units that carry information."""
        return np.isfinite(self.numerator)

    def divergence(self, weights: Array) -> Array:
        """D under unit weights: (..., U) -> (...). NaN where no usable unit has any weight."""
        return self._combined(
            weights @ np.where(self.usable, self.numerator, 0.0),
            weights @ np.where(self.usable, self.denominator, 0.0),
        )

    def left_out(self) -> Array:
        """D without each usable unit in turn: (usable units,)."""
        numerator, denominator = self.numerator[self.usable], self.denominator[self.usable]
        return self._combined(numerator.sum() - numerator, denominator.sum() - denominator)

    def influence(self) -> Array:
        """(U,) what leaving each unit out does to D, scaled so that the sum of squares is its variance.

        The jackknife's: 0 for units that are not usable; a weighted sum of several divergences over the same
        units has the same weighted sum of influences.
        """
        influence = np.zeros(len(self.numerator))
        influence[self.usable] = scaled_deviation(self.left_out())
        return influence

    def _combined(self, numerator: Array, denominator: Array) -> Array:
        """log(numerator / denominator) / (alpha - 1), or their ratio for alpha = 1.

        N images cannot resolve a ratio of moments beyond N or below 1 / N, so it is held between the two.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.asarray(numerator / denominator)
        if self.alpha == 1.0:
            return ratio
        images = max(self.images, 1)  # without any, the ratio is NaN and stays it
        return np.asarray(np.log(np.clip(ratio, 1.0 / images, images)) / (self.alpha - 1.0))


def renyi_self_tilted(
    clean: ArrayLike, rollout: ArrayLike, *, alpha: float = 2.0, centred: bool = False
) -> Estimate:
    """D_alpha(p+_sigma || p_sigma) from optimalities of clean images and of their rollouts.

    For alpha = 2 and prompts c with images k,

        D = log( mean_c S_c / mean_c U_c ),
        S_c = mean_k r_k r'_k            -> E[r r'] = Cov(r, r') + Z^2,
        U_c = mean_{k != l} r_k r'_l     -> Z^2, from different images, which are independent,

    both without bias, and S_c - U_c is the within-prompt sample covariance (divisor K - 1). Moments are
    averaged over prompts before the ratio, not the ratio over prompts: a ratio inside a prompt of few images
    would be biased by 1 / K, here the bias is 1 / (P K), far below the standard error. With U_c from both
    sides a rollout sampler that shifts the mean reward does not pass for divergence. With M rollouts per
    image all pairs of the M + 1 posterior draws are used.

    Other orders re-weight with r / Z and plug in the mean over rollouts (METHOD section 4):

        D = 1 / (alpha - 1) log( mean_c mean_k r_k rbar_k^(alpha-1) / mean_c Z_c^alpha ),
        D = mean_c mean_k r_k log(rbar_k / Z_c) / mean_c Z_c                     for alpha = 1,

    with the 1 / K bias of Z_c^alpha removed to first order; the plug-in bias of rbar shrinks as 1 / M only.

    At sigma = 0 the rollout is the clean image itself: pass ``rollout = clean``.

    Args:
        clean: r, (P, K) in [0, 1], P prompts of K images. NaN: failed or not applicable.
        rollout: r', (P, K) or (P, K, M) in [0, 1]. NaN entries are left out together with their pairs.
        alpha: order > 0.
        centred: the optimalities were made from scores minus the clean images' own mean in each prompt
            (METHOD section 3). The clean mean is then known, not estimated, and products of different
            images are biased by -Cov / K; this removes the bias.

    Raises:
        InvalidArgument: shapes or values out of range, no prompt with two usable images, or optimalities of
            clean images that vanish everywhere, which leaves no positive policy.
    """
    values = _checked(clean, rollout, alpha)
    found = moments(values, alpha, centred=centred, unit="prompts")
    if found.prompts == 1:
        found = moments(values, alpha, centred=centred, unit="images")
    count = len(found.numerator)
    if found.prompts == 0:
        raise InvalidArgument("clean, rollout: no prompt has two images with finite optimality")
    if np.nanmean(values[:, :, 0]) <= SMALLEST_MEAN:
        raise InvalidArgument("clean: the optimality vanishes on (almost) all images")
    value = float(found.divergence(np.ones(count)))
    return Estimate(value, jackknife(found), found.prompts, found.images)


def proposal_moments(values: Array, partition: Array, alpha: float) -> Moments:
    """Moments of an external proposal's images, by prompts (METHOD section 4 (a)).

        D = 1 / (alpha - 1) log( mean_c mean_k (rbar_k / Z_c)^(alpha-1) ),
        D = mean_c mean_k log(rbar_k / Z_c)                                for alpha = 1

    rbar is the mean over an image's rollouts. For alpha = 2 it enters linearly, and the ratio is that of the
    means over prompts, so that few images in Z_c do not bias it. For other orders plugging rbar in biases
    the mean by (alpha - 1)(alpha - 2) / 2 Var(rbar) / Z^2, the logarithm by -Var(rbar) / (2 Z^2), which
    shrinks as 1 / rollouts.

    Args:
        values: (P, K, M) optimalities of rollouts, NaN where there is none.
        partition: (P,) Z_c > 0, the mean optimality of the model's own images; NaN where there is none.
    """
    present = np.isfinite(values)
    used = present.any(axis=2) & np.isfinite(partition)[:, None]
    prompts = used.any(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(present, values, 0.0).sum(axis=2) / present.sum(axis=2)
        ratio = np.maximum(mean / partition[:, None], SMALLEST_MEAN)
        part = mean if alpha == 2.0 else np.log(ratio) if alpha == 1.0 else ratio ** (alpha - 1.0)
        numerator = np.where(used, part, 0.0).sum(axis=1) / used.sum(axis=1)
    numerator = np.where(prompts, numerator, np.nan)
    denominator = np.where(prompts, partition if alpha == 2.0 else 1.0, np.nan)
    return Moments(numerator, denominator, int(prompts.sum()), int(used.sum()), alpha)


def without_noise_of_proposals(measured: Sequence[Moments], anchor: Moments) -> list[Moments]:
    """The same as :func:`without_common_noise` for an external proposal; alpha = 2.

    From pure noise the rollouts are the model's own draws, whatever the proposal: rbar - Z is noise of
    mean 0. Here beta is the regression through 0 over all other prompts.
    """
    shared = np.nan_to_num(anchor.numerator - anchor.denominator)
    found = []
    for level in measured:
        both = level.usable & anchor.usable
        own = np.where(both, np.nan_to_num(level.numerator - level.denominator), 0.0)
        own = np.where(both, own - own.sum() / max(int(both.sum()), 1), 0.0)
        cross, square = own * shared, np.where(both, shared, 0.0) ** 2
        others = np.maximum(square.sum() - square, np.finfo(float).tiny)
        beta = np.clip((cross.sum() - cross) / others, 0.0, 1.0)
        found.append(replace(level, numerator=level.numerator - np.where(both, beta * shared, 0.0)))
    return found


def without_common_noise(
    measured: Sequence[Moments], levels: Sequence[Array], anchor: Array
) -> list[Moments]:
    """``measured`` without the noise that the levels share with ``anchor``, whose divergence is known: 0.

    From pure noise the rollout is independent of the image, so a prompt's covariance there, C_1 = S - U, is
    noise of mean 0. Measured with the same random numbers as C_l, it is a control variate (Glasserman 2003,
    section 4.1): C_l - beta C_1. For each prompt beta is the regression coefficient over the images of all
    *other* prompts, held to [0, 1]; being independent of the prompt's own C_1, it adds no bias. Prompts that
    the anchor lacks stay as they are.

    Args:
        measured: moments of order 2 by prompts.
        levels: optimalities (P, K, M + 1) that they were made of.
        anchor: (P, K, M + 1) the same from pure noise.
    """
    known = moments(anchor, 2.0, centred=True, unit="prompts")
    shared = _image_covariances(anchor)
    found = []
    for level, values in zip(measured, levels, strict=True):
        both = level.usable & known.usable
        own = _image_covariances(values)
        cross = np.where(both, (own * shared).sum(axis=1), 0.0)
        square = np.where(both, (np.where(own != 0.0, shared, 0.0) ** 2).sum(axis=1), 0.0)
        others = np.maximum(square.sum() - square, np.finfo(float).tiny)
        beta = np.clip((cross.sum() - cross) / others, 0.0, 1.0)
        correction = np.where(both, beta * (known.numerator - known.denominator), 0.0)
        found.append(replace(level, numerator=level.numerator - correction))
    return found


def _image_covariances(values: Array) -> Array:
    """(P, K) parts of S - U per image, 0 where an image cannot be used."""
    found = moments(values, 2.0, centred=True, unit="images")
    parts = np.nan_to_num(found.numerator - found.denominator, nan=0.0)
    return parts.reshape(values.shape[:2])


def scaled_deviation(left_out: Array) -> Array:
    """Estimates without each unit in turn -> deviations whose sum of squares is the jackknife variance.

    A unit without which there is no estimate (NaN) is left out of both, and has deviation 0.
    """
    finite = np.isfinite(left_out)
    count = int(finite.sum())
    if count < 2:
        return np.zeros(len(left_out))
    return np.where(finite, np.sqrt((count - 1) / count) * (left_out - left_out[finite].mean()), 0.0)


def jackknife(found: Moments) -> float:
    """Standard error of D over units, by leaving out each in turn."""
    return float(np.sqrt((found.influence() ** 2).sum()))


def _checked(clean: ArrayLike, rollout: ArrayLike, alpha: float) -> Array:
    """(P, K, M + 1): the clean optimality first, then those of the rollouts."""
    first, others = np.asarray(clean, dtype=np.float64), np.asarray(rollout, dtype=np.float64)
    if first.ndim != 2 or 0 in first.shape:
        raise InvalidArgument(f"clean must have shape (prompts, images), got {first.shape}")
    if others.ndim == 2:
        others = others[:, :, None]
    if others.ndim != 3 or others.shape[:2] != first.shape or others.shape[2] == 0:
        raise InvalidArgument(f"rollout must have shape {first.shape} or {first.shape} + (rollouts,)")
    if not (math.isfinite(alpha) and alpha > 0):
        raise InvalidArgument(f"alpha must be positive and finite, got {alpha}")
    for name, array in (("clean", first), ("rollout", others)):
        if np.any((array < 0) | (array > 1)):
            raise InvalidArgument(f"{name} must hold optimalities in [0, 1]")
    return np.concatenate([first[:, :, None], others], axis=2)


def moments(values: Array, alpha: float, *, centred: bool, unit: Unit) -> Moments:
    """Moments of optimalities ``values`` (P, K, M + 1), one pair of numbers per prompt or per image.

    The numbers per image are first-order expansions (Hájek projections) around the moments of all images;
    they serve where a single prompt leaves no other unit to resample.
    """
    present = np.isfinite(values)
    centring = present[:, :, 0].sum(axis=1)  # images whose scores made the prompt's mean
    enough = present.sum(axis=2) >= 2 if alpha == 2.0 else present[:, :, 0] & present[:, :, 1:].any(axis=2)
    enough &= enough.sum(axis=1, keepdims=True) >= 2
    present = present & enough[:, :, None]
    values = np.where(present, values, 0.0)
    prompts = enough.any(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        pair = _second_order(values, present) if alpha == 2.0 else _any_order(values, present, alpha, centred)
    numerator, denominator, image_numerator, image_denominator = pair
    if alpha == 2.0:
        lift = (numerator - denominator) / np.maximum(centring, 1) if centred else np.zeros(len(prompts))
        # where all rollouts have optimality 0, so has their covariance: D = 0, not 0 / 0 or rounding's ratio
        lift = lift + np.maximum(SMALLEST_MEAN**2 - denominator, 0.0)
        numerator, denominator = numerator + lift, denominator + lift
        image_numerator, image_denominator = (
            image_numerator + lift[:, None],
            image_denominator + lift[:, None],
        )
    if unit == "images":
        numerator = np.where(enough, image_numerator, np.nan).ravel()
        denominator = np.where(enough, image_denominator, np.nan).ravel()
    else:
        numerator = np.where(prompts, numerator, np.nan)
        denominator = np.where(prompts, denominator, np.nan)
    return Moments(numerator, denominator, int(prompts.sum()), int(enough.sum()), alpha)


def _second_order(values: Array, present: NDArray[np.bool_]) -> tuple[Array, Array, Array, Array]:
    """S_c, U_c (P,) and their parts per image (P, K); absent entries of ``values`` are 0."""
    drawn = present.sum(axis=2, keepdims=True)
    count = present / np.sqrt(np.maximum(drawn * (drawn - 1), 1))  # images weigh alike, however many rollouts
    values = values * count
    same, same_count = _same_image_pairs(values), _same_image_pairs(count)
    numerator = same.sum(axis=1) / same_count.sum(axis=1)
    denominator = _different_image_pairs(values) / _different_image_pairs(count)
    mean = values.sum(axis=2) / count.sum(axis=2)
    used = count.any(axis=2)
    centre = np.sum(mean, axis=1, keepdims=True, where=used) / used.sum(axis=1, keepdims=True)
    image_denominator = denominator[:, None] + 2 * centre * (mean - centre)
    return numerator, denominator, same / same_count, image_denominator


def _same_image_pairs(values: Array) -> Array:
    """(P, K): sum over i != j of v_ki v_kj."""
    pairs: Array = values.sum(axis=2) ** 2 - (values**2).sum(axis=2)
    return pairs


def _different_image_pairs(values: Array) -> Array:
    """(P,): sum over images k != l and draws i != j of v_ki v_lj."""
    pairs: Array = (
        values.sum(axis=(1, 2)) ** 2
        - (values.sum(axis=1) ** 2).sum(axis=1)
        - (values.sum(axis=2) ** 2).sum(axis=1)
        + (values**2).sum(axis=(1, 2))
    )
    return pairs


def _any_order(
    values: Array, present: NDArray[np.bool_], alpha: float, centred: bool
) -> tuple[Array, Array, Array, Array]:
    """Numerator and denominator of order ``alpha``, per prompt (P,) and per image (P, K)."""
    clean = values[:, :, 0]
    count = present[:, :, 0].sum(axis=1)
    partition = clean.sum(axis=1) / count
    mean = values[:, :, 1:].sum(axis=2) / present[:, :, 1:].sum(axis=2)
    safe = np.maximum(partition, SMALLEST_Z)
    mean = np.maximum(mean, SMALLEST_MEAN * safe[:, None])
    deviation = np.where(present[:, :, 0], clean - partition[:, None], 0.0)
    noise = 0.0 if centred else (deviation**2).sum(axis=1) / ((count - 1) * count)
    if alpha == 1.0:
        part = np.where(present[:, :, 0], clean * np.log(mean), 0.0)
        normaliser, slope = safe * np.log(safe), np.log(safe) + 1.0
        bias = noise / (2 * safe)
    else:
        part = np.where(present[:, :, 0], clean * mean ** (alpha - 1.0), 0.0)
        normaliser, slope = safe**alpha, alpha * safe ** (alpha - 1.0)
        bias = np.minimum(noise * alpha * (alpha - 1.0) / 2 * safe ** (alpha - 2.0), 0.5 * normaliser)
    numerator, normaliser = part.sum(axis=1) / count, normaliser - bias
    image_normaliser = normaliser[:, None] + slope[:, None] * deviation
    if alpha == 1.0:
        return numerator - normaliser, partition, part - image_normaliser, clean
    return numerator, normaliser, part, image_normaliser
