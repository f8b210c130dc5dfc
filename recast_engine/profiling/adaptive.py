"""Which levels the next round of an adaptive profile measures how often. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recast_engine.profiling.assembly import reward_curve
from recast_engine.profiling.curves import tilt
from recast_engine.profiling.levels import rollout_steps
from recast_engine.profiling.plan import Plan
from recast_engine.profiling.scores import ScoreTable

Array = NDArray[np.float64]

MAX_ROLLOUTS = 8
"""Rollouts of an image from one level in an adaptive round."""


def rollouts_wanted(plan: Plan, table: ScoreTable) -> tuple[int, ...] | None:
    """Rollouts (L - 1,) of every new image from the levels above 0, or None: the target is reached.

    New images serve all levels with common random numbers, so each level gets at least one rollout; those
    whose intervals are wide because few rollouts see each noised image get more. With V_l(M) the variance
    that one image with M rollouts leaves at level l, relative to the reward's D(0), worst over rewards, and
    s_l a rollout's model evaluations, M minimises (Neyman's allocation; Cochran 1977, section 5.5)

        sum_l V_l(M_l) * (S + sum_l s_l M_l),

    one rollout at a time. V_l(M) is the measured variance of D_l, times the share that :func:`_shares` says M
    rollouts leave of it.
    """
    adaptive = plan.estimator.adaptive
    curves = [reward_curve(plan, table, index) for index in range(len(plan.rewards))]
    totals = np.array([max(curve.divergence_raw[0], np.finfo(float).tiny) for curve in curves])
    reach = np.array([np.subtract(curve.ci_high, curve.ci_low) / 2 for curve in curves]) / totals[:, None]
    timed = np.array([curve.total > 0.0 for curve in curves])
    target = None if adaptive is None else adaptive.target_width
    if target is not None and not np.any(reach[timed] > target):
        return None
    errors = np.array([curve.standard_error[1:-1] for curve in curves]) / totals[:, None]
    shares = np.array([_shares(plan, table, index) for index in range(len(plan.rewards))])
    variances = (errors[timed, :, None] ** 2 * shares[timed]).max(axis=0, initial=0.0)  # (L - 2, MAX)
    counts = _allocate(plan, variances)
    return (*counts, max(counts) if plan.estimator.anchor else 0)


def _allocate(plan: Plan, variances: Array) -> tuple[int, ...]:
    """Greedy minimum of variance times cost over rollouts at the inner levels."""
    steps = plan.estimator.sampling_steps
    prices = np.array([rollout_steps(sigma, steps) for sigma in plan.levels[1:-1]])
    counts = np.ones(len(prices), dtype=int)
    levels = np.arange(len(prices))
    while True:
        variance, cost = variances[levels, counts - 1].sum(), steps + prices @ counts
        more = np.minimum(counts, MAX_ROLLOUTS - 1)
        gained = variances[levels, counts - 1] - variances[levels, more]
        products = (variance - gained) * (cost + prices)
        best = int(np.argmin(np.where(gained > 0, products, np.inf)))
        if gained[best] <= 0 or products[best] >= variance * cost:
            return tuple(int(count) for count in counts)
        counts[best] += 1


def _shares(plan: Plan, table: ScoreTable, index: int) -> Array:
    """(L - 2, MAX_ROLLOUTS) variance of an image's mean product with M rollouts, over that so far.

    With v the variance of E[r | x_sigma] and e that of r about it, n = M + 1 draws leave, for Gaussians,

        2 v^2 + 4 v e / n + 2 e^2 / (n (n - 1)).
    """
    clean, rollouts = tilt(table.clean[index], table.rollouts[index, :-1], plan.estimator.advantage_clip)
    clean, rollouts = clean - 0.5, rollouts - 0.5
    whole = np.nanmean(clean**2)
    kept = np.array([np.nanmean(clean[:, :, None] * level) for level in rollouts])
    kept = np.clip(kept, 0.0, whole)[:, None]
    drawn = np.isfinite(rollouts)
    so_far = np.array([level.sum() / max(level.any(axis=2).sum(), 1) for level in drawn])[:, None]

    def variance(count: Array) -> Array:
        draws = count + 1.0
        lost = whole - kept
        return np.asarray(2 * kept**2 + 4 * kept * lost / draws + 2 * lost**2 / (draws * (draws - 1)))

    return np.asarray(variance(np.arange(1.0, MAX_ROLLOUTS + 1)[None]) / np.maximum(variance(so_far), 1e-300))
