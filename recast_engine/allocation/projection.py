"""KL projection of affinities onto fixed row sums and unit column sums, in the log domain.

The wanted matrix is W = diag(u) exp(L) diag(v) with row sums a and column sums 1. Given the R log row factors
f, the column factors follow by log-sum-exp, and f minimises the smooth convex

    Phi(f) = sum_t log sum_i exp(f_i + L[i,t]) - sum_i a_i f_i,
    grad Phi = W 1 - a,    hess Phi = diag(W 1) - W W^T,

a graph Laplacian of R nodes. Sources: Cuturi, arXiv 1306.0895; Schmitzer, arXiv 1610.06519 (log domain and
annealing of the exponents); Sun & Tran-Dinh, arXiv 1703.04599 (the damping, which needs no line search).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ANNEAL_SPREAD = 32.0  # exponents spread at most this far are solved without annealing
ANNEAL_FACTOR = 2.0
ANNEAL_TOLERANCE = 1e-6  # of each row sum, on the way to the full exponents
NEWTON_STEPS = 200  # a level
ALTERNATING_STEPS = 100_000


@dataclass(frozen=True, eq=False)
class Projection:
    """log W (R, T), the steps taken, and whether every row sum met the tolerance."""

    log_matrix: Array
    iterations: int
    converged: bool


def project(exponents: Array, row_sums: Array, tolerance: float) -> Projection:
    """Damped Newton with annealed exponents; alternating scaling goes on from there if it stalls.

    Args:
        exponents: L, (R, T) finite.
        row_sums: a, (R,) positive, summing to T.
        tolerance: of each row sum, relative where the row sum is below 1.
    """
    shifted = exponents - exponents.max(axis=1, keepdims=True)
    found = newton(shifted, row_sums, tolerance)
    if found.converged:
        return found
    mended = alternating(found.log_matrix, row_sums, tolerance)
    return Projection(mended.log_matrix, found.iterations + mended.iterations, mended.converged)


def newton(exponents: Array, row_sums: Array, tolerance: float) -> Projection:
    """Damped Newton on Phi, the exponents scaled up in stages where they spread widely.

    As the scale b grows, the optimal f tends to b F + c with F the potentials of the linear program that
    remains at infinite b, so each stage starts from the line through the two before it.
    """
    spread = float(np.ptp(exponents))
    stages = max(0, int(np.ceil(np.log(max(spread, 1.0) / ANNEAL_SPREAD) / np.log(ANNEAL_FACTOR))))
    scale_before, before = 0.0, np.log(row_sums)
    potentials = before
    iterations = 0
    for stage in range(stages, -1, -1):
        scale = ANNEAL_FACTOR**-stage
        log_matrix = normalise_columns(exponents * scale + potentials[:, None])
        limit = tolerance if stage == 0 else ANNEAL_TOLERANCE
        shift, log_matrix, steps, converged = _newton_level(log_matrix, row_sums, limit)
        iterations += steps
        found = potentials + shift
        slope = (found - before) / (scale - scale_before)
        potentials = found + slope * scale * (ANNEAL_FACTOR - 1.0)
        scale_before, before = scale, found
    return Projection(log_matrix, iterations, converged)


def _newton_level(log_matrix: Array, row_sums: Array, tolerance: float) -> tuple[Array, Array, int, bool]:
    """Newton from a column-normalised start; returns the sum of its steps, log W, their number, success.

    log W itself is updated, not recomputed from the potentials, which keeps full relative accuracy where
    potentials are large. At least one step is taken: a stage that accepted its start would leave to a later
    stage, where rows may be decoupled to machine precision, what only this one can mend.
    """
    total = np.zeros_like(row_sums)
    limit = tolerance * np.minimum(row_sums, 1.0)
    matrix = np.exp(log_matrix)
    for step in range(NEWTON_STEPS):
        sums = matrix.sum(axis=1)
        close = bool(np.all(np.abs(sums - row_sums) <= limit))
        if close and step > 0:
            return total, log_matrix, step, True
        move = _newton_step(matrix, row_sums - sums)
        if move is None:
            return total, log_matrix, step, close
        total = total + move
        log_matrix, matrix = _stochastic_columns(log_matrix + move[:, None])
    return total, log_matrix, NEWTON_STEPS, False


def _newton_step(matrix: Array, missing: Array) -> Array | None:
    """The damped Newton step, or None where rows are decoupled to machine precision.

    Phi is quasi-self-concordant: along d, |Phi'''| <= range(d) Phi''. Hence a step of length log(1 + range) /
    range is certain to decrease Phi, and tends to the full step near the solution.
    """
    laplacian = -(matrix @ matrix.T)
    np.fill_diagonal(laplacian, 0.0)
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))  # as a sum of positive terms: no cancellation
    ground = int(np.argmax(matrix.sum(axis=1)))
    free = np.arange(len(missing)) != ground
    move = np.zeros_like(missing)
    scale = np.sqrt(np.diag(laplacian)[free])
    if not np.all(scale > 0.0):
        return None
    reduced = laplacian[np.ix_(free, free)] / scale / scale[:, None]
    try:
        move[free] = np.linalg.solve(reduced, missing[free] / scale) / scale
    except np.linalg.LinAlgError:
        return None
    length = float(np.ptp(move))
    if not np.isfinite(length):
        return None
    return move if length < 1e-8 else move * (np.log1p(length) / length)


def alternating(exponents: Array, row_sums: Array, tolerance: float) -> Projection:
    """Plain alternating scaling of rows and columns (Sinkhorn), ending on columns."""
    log_sums = np.log(row_sums)
    limit = tolerance * np.minimum(row_sums, 1.0)
    log_matrix = normalise_columns(exponents)
    for step in range(ALTERNATING_STEPS):
        log_rows = log_sum_exp(log_matrix, axis=1)
        if np.all(np.abs(np.exp(log_rows) - row_sums) <= limit):
            return Projection(log_matrix, step, True)
        log_matrix = normalise_columns(log_matrix + (log_sums - log_rows)[:, None])
    return Projection(log_matrix, ALTERNATING_STEPS, False)


def log_sum_exp(values: Array, axis: int) -> Array:
    """log sum exp along ``axis``; the arguments are finite."""
    top = values.max(axis=axis, keepdims=True)
    total: Array = np.log(np.exp(values - top).sum(axis=axis)) + top.squeeze(axis)
    return total


def normalise_columns(log_matrix: Array) -> Array:
    """The same columns scaled to sum 1."""
    return _stochastic_columns(log_matrix)[0]


def _stochastic_columns(log_matrix: Array) -> tuple[Array, Array]:
    """log W and W of columns scaled to sum 1, for the price of one exponential."""
    shifted = log_matrix - log_matrix.max(axis=0)
    matrix = np.exp(shifted)
    sums = matrix.sum(axis=0)
    return shifted - np.log(sums), matrix / sums
