"""Two profiles side by side: does timing agree, did totals change, and what would it do to an allocation?

Serves sensitivity checks (another seed, another proposal) and drift (before and after a training).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast_engine.allocation import allocate
from recast_engine.errors import InvalidArgument
from recast_engine.profiling.profile import Curve, Profile

Array = NDArray[np.float64]

SAME_TIMING, SIMILAR_TIMING = 0.9, 0.7
"""Correlations of gains from which on a verdict says "the same" and "similar" steps. Published: the curves
from two external generators correlate at 0.847 to 0.919, and were taken as agreeing (METHOD section 7)."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RewardComparison:
    """One reward in profiles a and b.

    Attributes:
        correlation: Pearson's, of the gains on the common steps; None where one of them is constant.
        total_a, total_b: D(0).
        change: total_b - total_a.
        apart_at: the noise level where the curves' intervals are furthest apart; None where they overlap
            everywhere.
        largest_weight_change, at_step: largest |W_b - W_a| in the reward's row, and its step from 1; None for
            a reward without a budget.
        verdict: the same in words.
    """

    correlation: float | None
    total_a: Interval
    total_b: Interval
    change: Interval
    apart_at: float | None
    largest_weight_change: float | None
    at_step: int | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Profiles a and b on common steps and under common budgets.

    Attributes:
        rewards: those in both, by id.
        left_out: rewards in only one of them.
        budgets: of the allocations, normalised.
        largest_weight_change: max |W_b - W_a|, in row ``reward`` at step ``at_step`` (from 1).
        mean_weight_change: mean |W_b - W_a| over the rewards with a budget and all steps.
    """

    rewards: Mapping[str, RewardComparison]
    left_out: tuple[str, ...]
    budgets: Mapping[str, float]
    largest_weight_change: float
    reward: str
    at_step: int
    mean_weight_change: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        data = asdict(self)
        return {**data, "left_out": list(self.left_out)}


def compare(
    a: Profile,
    b: Profile,
    sigmas: Sequence[float] | Array,
    *,
    budgets: Mapping[str, float] | None = None,
    temperature: float = 1.0,
) -> Comparison:
    """Compare what two profiles say about the rewards that both measured.

    Args:
        sigmas: (T + 1,) noise levels of a sampler: gains of both profiles are resampled to its steps.
        budgets: weights of common rewards for the two ``recast`` allocations; None: all alike.
        temperature: of the allocations.

    Raises:
        InvalidArgument: no common reward, a budget for another reward, or what ``allocate`` refuses.
    """
    common = [reward for reward in a.rewards if reward in b.rewards]
    if not common:
        raise InvalidArgument(
            f"profiles: no common reward; one has {', '.join(a.rewards)}, the other {', '.join(b.rewards)}"
        )
    wanted = dict.fromkeys(common, 1.0) if budgets is None else dict(budgets)
    if foreign := [reward for reward in wanted if reward not in common]:
        raise InvalidArgument(f"budgets: {', '.join(foreign)} not measured by both profiles")
    gains = [dict(zip(p.rewards, p.gains(sigmas), strict=True)) for p in (a, b)]
    matrices = [
        allocate([rows[reward] for reward in wanted], list(wanted.values()), temperature=temperature)
        for rows in gains
    ]
    change = np.abs(matrices[1].matrix - matrices[0].matrix)
    active = [row for row, weight in enumerate(wanted.values()) if weight > 0]
    row, step = (int(place) for place in np.unravel_index(change.argmax(), change.shape))
    weight_changes = dict(zip(wanted, change, strict=True))
    return Comparison(
        rewards={
            reward: _compare_reward(
                reward, a, b, gains[0][reward], gains[1][reward], weight_changes.get(reward)
            )
            for reward in common
        },
        left_out=tuple(r for r in dict.fromkeys((*a.rewards, *b.rewards)) if r not in common),
        budgets=dict(zip(wanted, matrices[0].budgets.tolist(), strict=True)),
        largest_weight_change=float(change.max()),
        reward=list(wanted)[row],
        at_step=step + 1,
        mean_weight_change=float(change[active].mean()),
    )


def pearson(first: Array, second: Array) -> float | None:
    """Pearson's correlation of two series; None where one of them is constant."""
    x, y = first - first.mean(), second - second.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    resolution = 1e-12 * len(x) * float(np.abs(first).max()) * float(np.abs(second).max())
    return float(np.clip(x @ y / norm, -1.0, 1.0)) if norm > resolution else None


def difference(a: Interval, b: Interval) -> Interval:
    """b - a for independent estimates, its interval recovered from theirs.

    low = d - sqrt((b - b_low)^2 + (a_high - a)^2), high with the other two arms: Zou & Donner 2008, which
    keeps the asymmetry of bootstrap intervals. Estimates that share prompts or seeds vary together, and the
    interval is then wider than it need be.
    """
    value = b.value - a.value
    return Interval(
        value,
        value - math.hypot(b.value - b.low, a.high - a.value),
        value + math.hypot(b.high - b.value, a.value - a.low),
    )


def _compare_reward(
    reward: str, a: Profile, b: Profile, gains_a: Array, gains_b: Array, weight_change: Array | None
) -> RewardComparison:
    curves = a.curves[reward], b.curves[reward]
    correlation = pearson(gains_a, gains_b)
    totals = [Interval(curve.total, curve.ci_low[0], curve.ci_high[0]) for curve in curves]
    change = difference(*totals)
    apart_at = _apart_at((a.levels, curves[0]), (b.levels, curves[1]))
    return RewardComparison(
        correlation=correlation,
        total_a=totals[0],
        total_b=totals[1],
        change=change,
        apart_at=apart_at,
        largest_weight_change=None if weight_change is None else float(weight_change.max()),
        at_step=None if weight_change is None else int(weight_change.argmax()) + 1,
        verdict=f"{reward}: {_timing(correlation, apart_at)}; {_totals(totals[0], totals[1], change)}",
    )


def _apart_at(a: tuple[Sequence[float], Curve], b: tuple[Sequence[float], Curve]) -> float | None:
    """Where the two curves' intervals, linear between levels, are furthest apart without touching."""
    grid = np.union1d(a[0], b[0])
    (low_a, high_a), (low_b, high_b) = (
        (np.interp(grid, levels, curve.ci_low), np.interp(grid, levels, curve.ci_high))
        for levels, curve in (a, b)
    )
    gap = np.maximum(low_a - high_b, low_b - high_a)
    return float(grid[gap.argmax()]) if gap.max() > 0 else None


def _timing(correlation: float | None, apart_at: float | None) -> str:
    if correlation is None:
        text = "its timing cannot be compared, as one of the profiles has no gain that varies"
    else:
        kind = (
            "the same"
            if correlation >= SAME_TIMING
            else "similar"
            if correlation >= SIMILAR_TIMING
            else "different"
        )
        text = f"acts at {kind} steps (correlation of gains {correlation:.2f})"
    if apart_at is not None:
        return f"{text}, and the curves are apart beyond their intervals, most at sigma {apart_at:.2f}"
    if correlation is not None and correlation >= SAME_TIMING:
        return f"{text}, the curves' intervals overlap everywhere"
    return f"{text}, but the curves' intervals overlap everywhere, so this may be noise"


def _totals(a: Interval, b: Interval, change: Interval) -> str:
    interval = f"change {change.value:+.4f}, 95% interval {change.low:+.4f} to {change.high:+.4f}"
    if change.low <= 0.0 <= change.high:
        return f"no change of its total beyond noise ({a.value:.4f} to {b.value:.4f}; {interval})"
    return (
        f"its total {'rose' if change.value > 0 else 'fell'} from {a.value:.4f} to {b.value:.4f} ({interval})"
    )
