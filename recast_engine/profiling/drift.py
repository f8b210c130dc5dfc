"""Has a running curve left the profile that an allocation rests on? A test with a known false-alarm rate.

Two things are compared for every reward, each by a t statistic whose standard errors have prompts as units:

*Total.* D(0) of all images in the window against the reference's; that the scale of the scores is estimated
as well is part of both errors.

*Timing.* What is left of D(0) at each inner level, rho = D(sigma) / D(0), and its area over sigma, which
gathers small shifts of one direction. It is this that an allocation depends on. Both divergences come from
the same images, so what makes one prompt or image louder than another cancels, and so does the scale.
Without a division that could fail for a saturated reward: D(sigma) - rho_reference D(0) = 0.

With L levels these are L comparisons a reward; two-sided p-values, with Welch-Satterthwaite degrees of
freedom, are multiplied by their number and by the number of rewards watched (Bonferroni).

A stage is looked at several times. The j-th look may raise an alarm with probability at most
``FALSE_ALARMS`` / (j (j + 1)), which sums to ``FALSE_ALARMS`` over any number of looks, and looks use
separate images (``Window.renewed_since``). So a stage without drift is re-projected with probability at most
5%, however long it is (simulated in the tests).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from recast_engine.profiling.profile import Curve, Profile
from recast_engine.profiling.running import Running, Window

Array = NDArray[np.float64]

FALSE_ALARMS = 0.05
"""Probability of re-projecting a stage in which nothing drifts, at most."""

LOGARITHM_FROM = 4.0
"""Totals this many standard errors from 0 are compared by logarithm: their errors are relative and skewed."""

_TINY = float(np.finfo(float).tiny)


@dataclass(frozen=True)
class Drift:
    """A running window against a reference.

    Attributes:
        totals: D(0) of every reward with enough prompts in the window.
        statistics: largest |t| of every reward watched.
        p_values: of every reward watched, corrected for its comparisons and for the number of rewards.
    """

    totals: dict[str, float]
    statistics: dict[str, float]
    p_values: dict[str, float]

    def drifted(self, look: int) -> tuple[str, ...]:
        """Rewards that have left the reference by more than noise, at look number ``look`` (from 1)."""
        limit = FALSE_ALARMS / (look * (look + 1))
        return tuple(reward for reward, p in self.p_values.items() if p <= limit)


def drift(window: Window, reference: Profile, watched: Sequence[str]) -> Drift:
    """Compare ``window`` with ``reference`` in the rewards ``watched`` that have enough prompts in it."""
    totals: dict[str, float] = {}
    found: dict[str, tuple[float, float]] = {}
    for reward in watched:
        running = window.running(reward)
        if running is None or not running.enough:
            continue
        totals[reward] = float(running.raw()[0])
        statistics, p_values = compare(running, reference.curves[reward], window.levels)
        found[reward] = float(np.abs(statistics).max()), float(p_values.min() * len(p_values))
    return Drift(
        totals,
        {reward: statistic for reward, (statistic, _) in found.items()},
        {reward: min(1.0, p * len(found)) for reward, (_, p) in found.items()},
    )


def compare(running: Running, reference: Curve, levels: Sequence[float]) -> tuple[Array, Array]:
    """t statistics and two-sided p-values: total, L - 2 inner levels, area; (L,) each."""
    differences, own, known, freedom, given = (
        np.concatenate([first, second])
        for first, second in zip(_total(running, reference), _timing(running, reference, levels), strict=True)
    )
    variance = np.maximum(own + known, _TINY)
    freedom = variance**2 / np.maximum(own**2 / freedom + known**2 / given, _TINY)
    statistics = np.where(own + known > 0, differences / np.sqrt(variance), 0.0)
    return statistics, 2.0 * stdtr(freedom, -np.abs(statistics))


def _total(running: Running, reference: Curve) -> tuple[Array, Array, Array, Array, Array]:
    """Difference of totals, its variance from the window and from the reference, and the degrees of freedom
    of the two; (1,) each.

    Prompts act on a variance by their squares, so few of them carry much of its error, whose own error is
    then large: degrees of freedom are those of influences with the kurtosis found.
    """
    influence = running.influence()[0]
    value, before = float(running.raw()[0]), reference.divergence_raw[0]
    own, known = float((influence**2).sum()), reference.standard_error[0] ** 2
    change, prompts = value - before, running.levels[0].prompts
    if value > LOGARITHM_FROM * own**0.5 and before > LOGARITHM_FROM * known**0.5:
        change, own, known = math.log(value / before), own / value**2, known / before**2
    kurtosis = _excess_kurtosis(influence[running.levels[0].usable])
    freedom, given = (2 / (2 / (n - 1) + kurtosis / n) for n in (prompts, max(reference.prompts, 2)))
    return tuple(np.array([number]) for number in (change, own, known, freedom, given))  # type: ignore[return-value]


def _excess_kurtosis(values: Array) -> float:
    squares = values**2
    spread = float(squares.mean()) ** 2
    return max(float((squares**2).mean()) / spread - 3.0, 0.0) if spread > 0 else 0.0


def _timing(
    running: Running, reference: Curve, levels: Sequence[float]
) -> tuple[Array, Array, Array, Array, Array]:
    """As ``_total``, for the L - 2 inner levels and the area: (L - 1,) each."""
    start = reference.divergence_raw[0]
    survival = np.array(reference.divergence_raw[1:-1]) / start if start > 0 else np.zeros(len(levels) - 2)
    error = np.array(reference.survival_error[1:-1] or _independent_errors(reference, survival))
    ones = np.ones(len(running.spread.count))
    levels_here, levels_clean = running.levels[1 : 1 + running.inner], running.levels[1 + running.inner :]
    here, clean = (
        np.array([float(level.divergence(ones)) for level in part]) for part in (levels_here, levels_clean)
    )
    influence = np.array([level.influence() for level in levels_here])
    influence -= survival[:, None] * np.array([level.influence() for level in levels_clean])
    widths = (np.array(levels[2:]) - np.array(levels[:-2])) / 2
    weights = np.vstack([np.eye(len(widths)), widths])
    own = ((weights @ influence) ** 2).sum(axis=1)
    known = (weights @ (np.maximum(clean, 0.0) * error)) ** 2
    prompts = np.array([float(level.prompts) for level in levels_here])
    given = np.full(len(own), max(reference.prompts, 2) - 1.0)
    return weights @ (here - survival * clean), own, known, np.append(prompts, prompts.sum()) - 1.0, given


def _independent_errors(reference: Curve, survival: Array) -> Array:
    """Errors of D(sigma) / D(0) for a curve without ``survival_error``, too large: as if independent."""
    if reference.divergence_raw[0] <= 0:
        return np.zeros(len(survival))
    errors = np.array(reference.standard_error)
    return np.asarray(np.hypot(errors[1:-1], survival * errors[0]) / reference.divergence_raw[0])
