"""Budgets and gains in, allocation matrix out."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recast_engine.allocation.projection import project
from recast_engine.allocation.result import Allocation
from recast_engine.config import AllocationMethod
from recast_engine.errors import InvalidArgument, NotConverged

Array = NDArray[np.float64]

MAX_EXPONENT = 1e12  # beyond it, float64 no longer resolves differences between affinities


def allocate(
    gains: ArrayLike,
    budgets: ArrayLike,
    *,
    method: AllocationMethod = "recast",
    temperature: float = 1.0,
    tolerance: float = 1e-10,
) -> Allocation:
    """Spread every reward's budget over the denoising steps.

    With s = T g / sum_t g (rows of zeros become ones) and affinities K = exp(s / temperature), ``recast``
    returns the unique W = diag(u) K diag(v) with

        sum_t W[i,t] = T lambda_i,    sum_i W[i,t] = 1,    W >= 0,

    the matrix under these constraints that is closest to K in KL; ``rowwise`` scales each row of K to its
    budget and leaves the columns as they fall; ``static`` is W[i,t] = lambda_i. Source: METHOD sections 2
    and 5.

    Args:
        gains: g, (R, T) finite and >= 0, in sampling order (the noisiest step first).
        budgets: (R,) finite and >= 0, not all 0; normalised to lambda here.
        method: "recast", "rowwise" or "static".
        temperature: tau > 0; tau -> infinity gives static weighting.
        tolerance: on the absolute error of every row sum (relative where the sum is below 1).

    Returns:
        The matrix and its diagnostics; residuals are measured on the matrix.

    Raises:
        InvalidArgument: the text names the argument.
        NotConverged: the projection missed ``tolerance``.
    """
    shape = _shape(_gains(gains))
    shares = _budgets(budgets, len(shape))
    _check_options(method, temperature, tolerance)
    iterations = 0
    if method == "static":
        matrix = np.repeat(shares[:, None], shape.shape[1], axis=1)
    elif method == "rowwise":
        matrix = _rowwise(_exponents(shape, temperature), shares)
    else:
        matrix, iterations = _recast(_exponents(shape, temperature), shares, tolerance)
    return _measured(matrix, shape, shares, method, temperature, tolerance, iterations)


def _gains(gains: ArrayLike) -> Array:
    array = _numbers("gains", gains)
    if array.ndim != 2 or 0 in array.shape:
        raise InvalidArgument(f"gains must have shape (rewards, steps), got {array.shape}")
    return array


def _budgets(budgets: ArrayLike, rewards: int) -> Array:
    array = _numbers("budgets", budgets)
    if array.shape != (rewards,):
        raise InvalidArgument(
            f"budgets must have shape ({rewards},) like the rows of gains, got {array.shape}"
        )
    largest = array.max()
    if largest == 0:
        raise InvalidArgument("budgets: at least one must be positive")
    relative = array / largest
    shares: Array = relative / math.fsum(relative)
    return shares


def _numbers(name: str, values: ArrayLike) -> Array:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must be an array of numbers: {error}") from None
    if not np.all(np.isfinite(array)):
        raise InvalidArgument(f"{name} must be finite")
    if np.any(array < 0):
        raise InvalidArgument(f"{name} must not be negative")
    return array


def _check_options(method: str, temperature: float, tolerance: float) -> None:
    if method not in get_args(AllocationMethod):
        raise InvalidArgument(
            f"method must be one of {', '.join(get_args(AllocationMethod))}, got {method!r}"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidArgument(f"temperature must be positive and finite, got {temperature}")
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise InvalidArgument(f"tolerance must be positive and finite, got {tolerance}")


def _shape(gains: Array) -> Array:
    """s = T g / sum_t g: rows of mean 1; rows without any gain are flat."""
    largest = gains.max(axis=1, keepdims=True)
    relative = np.divide(gains, largest, out=np.ones_like(gains), where=largest > 0)
    shape: Array = relative / relative.mean(axis=1, keepdims=True)
    return shape


def _exponents(shape: Array, temperature: float) -> Array:
    if shape.max() / MAX_EXPONENT > temperature:
        raise InvalidArgument(f"temperature {temperature} is too small: exponents exceed {MAX_EXPONENT:g}")
    exponents: Array = shape / temperature
    return exponents


def _rowwise(exponents: Array, shares: Array) -> Array:
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    matrix: Array = weights * (shares * exponents.shape[1] / weights.sum(axis=1))[:, None]
    return matrix


def _recast(exponents: Array, shares: Array, tolerance: float) -> tuple[Array, int]:
    steps = exponents.shape[1]
    active = shares > 0
    matrix = np.zeros_like(exponents)
    found = project(exponents[active], steps * shares[active], tolerance)
    matrix[active] = np.exp(found.log_matrix)
    if not found.converged:
        error = np.abs(matrix.sum(axis=1) - steps * shares).max()
        raise NotConverged(
            f"allocation: row sums are off by {error:.1e} after {found.iterations} iterations, tolerance "
            f"{tolerance:.1e}; raise the tolerance or the temperature"
        )
    return matrix, found.iterations


def _measured(
    matrix: Array,
    shape: Array,
    shares: Array,
    method: AllocationMethod,
    temperature: float,
    tolerance: float,
    iterations: int,
) -> Allocation:
    steps = matrix.shape[1]
    row_residual = float(np.abs(matrix.sum(axis=1) - steps * shares).max())
    column_residual = float(np.abs(matrix.sum(axis=0) - 1.0).max())
    promised = row_residual if method == "rowwise" else max(row_residual, column_residual)
    demand: Array = shares @ shape
    return Allocation(
        matrix=matrix,
        budgets=shares,
        method=method,
        temperature=float(temperature),
        row_residual=row_residual,
        column_residual=column_residual,
        iterations=iterations,
        converged=promised <= tolerance,
        kl_from_static=_kl(matrix, shares),
        demand=demand,
        demand_ratio=_ratio(demand[1:]),
    )


def _kl(matrix: Array, shares: Array) -> float:
    used = matrix > 0
    static = np.broadcast_to(shares[:, None], matrix.shape)
    terms = matrix[used] * np.log(matrix[used] / static[used])
    return max(0.0, float(terms.sum()))


def _ratio(demand: Array) -> float | None:
    if demand.size == 0 or demand.max() == 0:
        return None
    smallest = float(demand.min())
    return float(demand.max()) / smallest if smallest > 0 else math.inf
