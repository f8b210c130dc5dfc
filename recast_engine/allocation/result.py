"""The allocation matrix with everything that is measured on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast_engine.config import AllocationMethod

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Allocation:
    """How much of each reward acts at each denoising step (METHOD sections 2 and 5).

    Attributes:
        matrix: W, (R, T) float64, non-negative; t = 0 is the noisiest step.
        budgets: lambda, (R,) normalised to sum 1.
        method: how W was made.
        temperature: tau of the affinities.
        row_residual: max_i |sum_t W[i,t] - T lambda_i|, measured on ``matrix``.
        column_residual: max_t |sum_i W[i,t] - 1|, measured on ``matrix``; ``rowwise`` does not promise it.
        iterations: steps of the solver; 0 for closed forms.
        converged: the constraints that ``method`` promises hold to the tolerance.
        kl_from_static: sum_it W[i,t] log(W[i,t] / lambda_i) in nats, summed over the T steps.
        demand: (T,) sum_i lambda_i s[i,t]: what the budgets ask of each step before the projection.
        demand_ratio: max / min of ``demand`` over all steps but the first; inf when some later step is asked
            for nothing, None when there is no later step or none is asked for anything.
    """

    matrix: Array
    budgets: Array
    method: AllocationMethod
    temperature: float
    row_residual: float
    column_residual: float
    iterations: int
    converged: bool
    kl_from_static: float
    demand: Array
    demand_ratio: float | None

    @property
    def steps(self) -> int:
        """T."""
        return int(self.matrix.shape[1])

    def diagnostics(self) -> dict[str, Any]:
        """What is stored beside the matrix, as plain JSON data: an infinite ratio becomes None."""
        ratio = self.demand_ratio
        return {
            "row_residual": self.row_residual,
            "column_residual": self.column_residual,
            "iterations": self.iterations,
            "converged": self.converged,
            "kl_from_static": self.kl_from_static,
            "demand": self.demand.tolist(),
            "demand_ratio": ratio if ratio is not None and math.isfinite(ratio) else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; rows and budgets in the order of the rewards that were given."""
        return {
            "method": self.method,
            "temperature": self.temperature,
            "steps": self.steps,
            "budgets": self.budgets.tolist(),
            "matrix": self.matrix.tolist(),
            "diagnostics": self.diagnostics(),
        }
