"""Monotone clean-up of measured curves: what the data-processing inequality promises of the true ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

VARIANCE_FLOOR = 1e-6  # of the largest variance of the curve


def non_increasing(values: Array, variances: Array) -> Array:
    """Weighted least-squares fit of a curve that does not increase and is not negative.

    The isotonic regression in its min-max form (Robertson, Wright & Dykstra 1988),

        fit_l = min_{u <= l} max_{v >= l} Av(u, v),

    Av(u, v) the weighted mean over u..v with weights 1 / variance, then cut at 0, which is the exact
    projection under the bound as well.

    Args:
        values: (..., L), one curve per row.
        variances: (L,) >= 0.
    """
    floor = max(VARIANCE_FLOOR * float(variances.max()), np.finfo(float).tiny)
    weights = floor / np.maximum(variances, floor)
    length = values.shape[-1]
    start = np.zeros((*values.shape[:-1], 1))
    sums = np.concatenate([start, np.cumsum(weights * values, axis=-1)], axis=-1)
    totals = np.concatenate([[0.0], np.cumsum(weights)])
    first, last = np.meshgrid(np.arange(length), np.arange(length), indexing="ij")
    valid = first <= last
    spans = np.where(valid, totals[last + 1] - totals[first], 1.0)
    means = np.where(valid, (sums[..., last + 1] - sums[..., first]) / spans, -np.inf)
    highest = np.maximum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
    highest = np.where(valid, highest, np.inf)
    lowest = np.minimum.accumulate(highest, axis=-2)
    fit: Array = np.maximum(np.diagonal(lowest, axis1=-2, axis2=-1), 0.0)
    return fit


def largest_violation(values: Array, resampled: Array) -> float:
    """Largest rise of a curve from a lower to a higher noise level, in bootstrap standard errors of the rise.

    Args:
        values: (L,) raw curve by ascending noise level.
        resampled: (B, L) bootstrap replicates of it.

    Returns:
        0 for a curve that never rises.
    """
    worst = 0.0
    for lower in range(len(values) - 1):
        rises = values[lower + 1 :] - values[lower]
        errors = (resampled[:, lower + 1 :] - resampled[:, [lower]]).std(axis=0)
        resolution = 1e-9 * max(1.0, float(np.abs(values).max()))
        worst = max(worst, float((rises / np.maximum(errors, resolution)).max()))
    return worst
