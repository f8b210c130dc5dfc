"""Smooth monotone clean-up of measured curves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

Array = NDArray[np.float64]

CELLS = 40
ROUGHNESS = np.geomspace(1e-4, 1e4, 49)  # variance of the density per unit of sigma, in squares of D's size
VARIANCE_FLOOR = 1e-10  # of the square of D's size


def smooth_non_increasing(values: Array, covariance: Array, levels: Array, units: int) -> Array:
    """The smoothest non-increasing curve that the measurement allows.

    D falls with a density h(sigma) = -dD/dsigma >= 0. With a flat prior on its height and a Wiener process
    for its shape, h is a smoothing spline; how rough it may be is what makes the measurement likeliest
    (generalised maximum likelihood: Wahba, "A Comparison of GCV and GML", Annals of Statistics 13, 1985).
    h >= 0 is then imposed by non-negative least squares. Exact values are met exactly; where noise leaves
    the shape open the fit tends to a flat density, for which an allocation is static weighting. A staircase,
    the isotonic regression, instead gives every chance step the weight of a finding.

    The covariance of the gains is taken half way between theory and sample: as the posterior mean under an
    inverse Wishart prior with its own diagonal, since a sample covariance from few units is nearly singular.

    Args:
        values: (L - 1,) D at all levels but the last, where it is 0.
        covariance: (L - 1, L - 1) of their errors.
        levels: (L,) ascending to 1.
        units: prompts (or images) that the covariance was estimated from.

    Returns:
        (L - 1,) fitted values.
    """
    size = max(float(np.abs(values).max()), float(np.sqrt(np.max(np.diag(covariance)))))
    if size == 0.0:
        return np.zeros_like(values)
    to_gains = np.eye(len(values)) - np.eye(len(values), k=1)
    gains = to_gains @ values / size
    noise = _cholesky(to_gains @ covariance @ to_gains.T / size**2, units)

    edges = np.union1d(np.linspace(0.0, 1.0, CELLS + 1), levels)
    widths: Array = np.diff(edges)
    centres: Array = (edges[1:] + edges[:-1]) / 2
    place = np.searchsorted(levels, centres, side="right") - 1
    sums = np.where(place == np.arange(len(values))[:, None], widths, 0.0)  # density -> gains

    steps = np.diff(centres)
    wiener = np.tril(np.ones((len(centres), len(steps))), -1) * np.sqrt(steps)
    roughness = _likeliest(gains, noise, sums @ wiener, sums.sum(axis=1))
    design = np.concatenate(
        [
            solve_triangular(noise, sums, lower=True),
            np.diff(np.eye(len(centres)), axis=0) / np.sqrt(roughness * steps)[:, None],
        ]
    )
    target = np.concatenate([solve_triangular(noise, gains, lower=True), np.zeros(len(steps))])
    density, _ = nnls(design, target)
    fitted: Array = np.cumsum((sums @ density)[::-1])[::-1] * size
    return fitted


def _cholesky(covariance: Array, units: int) -> Array:
    """Lower factor of the covariance, regularised."""
    prior = len(covariance) + 1
    variances = np.diag(np.diag(covariance))
    regular = (units * covariance + prior * variances) / (units + prior)
    return np.asarray(np.linalg.cholesky(regular + VARIANCE_FLOOR * np.eye(len(covariance))))


def _likeliest(gains: Array, noise: Array, shape: Array, height: Array) -> float:
    """The roughness under which the gains are likeliest, their height left open.

    Args:
        noise: Cholesky factor of the gains' covariance.
        shape: (L - 1, cells - 1) gains of unit Wiener steps of the density.
        height: (L - 1,) gains of a unit flat density.
    """
    whitened = solve_triangular(noise, np.column_stack([gains, height, shape]), lower=True)
    left, scales, _ = np.linalg.svd(whitened[:, 2:])
    data, flat = (left.T @ whitened[:, column] for column in (0, 1))
    variances = 1.0 + ROUGHNESS[:, None] * scales**2
    information = (flat**2 / variances).sum(axis=1)
    best = (flat * data / variances).sum(axis=1) / information
    misfit = ((data - best[:, None] * flat) ** 2 / variances).sum(axis=1)
    likelihood = -0.5 * (misfit + np.log(variances).sum(axis=1) + np.log(information))
    return float(ROUGHNESS[int(np.argmax(likelihood))])
