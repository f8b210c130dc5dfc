"""Paired comparison of two subjects that drew the same prompts with the same seeds.

The prompt is the unit: images of one prompt share its difficulty, so they are averaged first, the bootstrap
resamples whole prompts, and wins are counted over prompts. Nothing here pools metrics of different scales.

Sources: expanded percentile bootstrap (Hesterberg, arXiv 1411.5279); exact sign test (binomial with 1/2, ties
left out); Holm's step-down correction (Holm, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

Floats = NDArray[np.float64]

DRAWS = 4000
"""Bootstrap resamples."""
CONFIDENCE = 0.95
TIE = 1e-9
"""Prompt differences up to this size are ties: below any score's resolution, above rounding."""

_CHUNK = 2_000_000  # resampled values held at once


@dataclass(frozen=True)
class MeanInterval:
    """A mean over prompts and its bootstrap interval; None where too little was scored.

    Attributes:
        prompts: prompts with at least one finite value; an interval takes two.
        images: finite values behind them.
    """

    mean: float | None
    low: float | None
    high: float | None
    prompts: int
    images: int


@dataclass(frozen=True)
class PairedDifference:
    """Subject minus baseline.

    Attributes:
        mean, low, high: mean difference over prompts and its bootstrap interval, as in ``MeanInterval``.
        prompts, images: prompts and image pairs in which both were scored.
        wins, ties, losses: prompts on which the subject's mean is higher, equal, lower.
        p_value: two-sided exact sign test over prompts; None without prompts.
    """

    mean: float | None
    low: float | None
    high: float | None
    prompts: int
    images: int
    wins: int
    ties: int
    losses: int
    p_value: float | None


def prompt_means(values: Floats) -> Floats:
    """Mean of the finite values of each row of (P, K): (P,), NaN for a row without any."""
    finite = np.isfinite(values)
    counts = finite.sum(axis=1)
    sums = np.where(finite, values, 0.0).sum(axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return means


def bootstrap_interval(
    units: Floats, *, seed: int, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Expanded percentile interval of the mean of ``units`` (P,) with P >= 2; a function of ``seed``.

    The plain percentile interval is too short for few units: it lacks both the factor P / (P - 1) of the
    variance and Student's tails. The percentiles are moved outwards to make up for both (Hesterberg, arXiv
    1411.5279, section 4.2): to the normal quantiles at -/+ sqrt(P / (P - 1)) t_{P-1}.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(units))
    means = np.concatenate(
        [
            units[rng.integers(0, len(units), (min(rows, draws - start), len(units)))].mean(axis=1)
            for start in range(0, draws, rows)
        ]
    )
    freedom = len(units) - 1
    reach = math.sqrt(len(units) / freedom) * float(stdtrit(freedom, (1 + confidence) / 2))
    tail = float(ndtr(-reach))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def mean_interval(values: Floats, *, seed: int, draws: int = DRAWS) -> MeanInterval:
    """Mean over prompts of ``values`` (P, K), NaN where nothing was scored, with a bootstrap interval."""
    units = prompt_means(values)
    units = units[np.isfinite(units)]
    images = int(np.isfinite(values).sum())
    if len(units) == 0:
        return MeanInterval(None, None, None, 0, 0)
    mean = float(units.mean())
    if len(units) == 1:
        return MeanInterval(mean, None, None, 1, images)
    low, high = bootstrap_interval(units, seed=seed, draws=draws)
    return MeanInterval(mean, low, high, len(units), images)


def paired_difference(
    subject: Floats, baseline: Floats, *, seed: int, draws: int = DRAWS
) -> PairedDifference:
    """Compare two (P, K) tables of the same P prompts and K seeds, leaving out pairs with a NaN.

    Raises:
        ValueError: the tables differ in shape.
    """
    if subject.shape != baseline.shape:
        raise ValueError(f"tables of shape {subject.shape} and {baseline.shape} cannot be paired")
    differences = subject - baseline
    summary = mean_interval(differences, seed=seed, draws=draws)
    units = prompt_means(differences)
    wins, losses = int((units > TIE).sum()), int((units < -TIE).sum())
    return PairedDifference(
        summary.mean,
        summary.low,
        summary.high,
        summary.prompts,
        summary.images,
        wins=wins,
        ties=summary.prompts - wins - losses,
        losses=losses,
        p_value=sign_test(wins, losses) if summary.prompts else None,
    )


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of ``wins`` against ``losses`` under a fair coin; 1 when there is neither.

    min(1, 2 P(X <= min(wins, losses))), X binomial(wins + losses, 1/2), in exact integers.
    """
    trials = wins + losses
    term = tail = 1
    for k in range(min(wins, losses)):
        term = term * (trials - k) // (k + 1)
        tail += term
    return min(1.0, float(2 * tail / 2**trials))


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's adjusted p-values over the tests that have one; None stays None.

    The i-th smallest of m becomes the largest of (m - j + 1) p_j over j <= i, at most 1.
    """
    known = sorted((p, name) for name, p in p_values.items() if p is not None and not math.isnan(p))
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    running = 0.0
    for rank, (p, name) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[name] = running
    return adjusted
