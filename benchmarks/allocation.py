"""Seconds of the allocation solver against plain alternating log-domain scaling.

    python benchmarks/allocation.py [--repeats N]

The baseline is written out here: rows and columns scaled in turn by log-sum-exp until every row sum is within
the tolerance. Both solve the same projection (METHOD section 5) to the same tolerance.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from recast_engine.allocation import allocate

Array = NDArray[np.float64]

TOLERANCE = 1e-10
BASELINE_LIMIT = 20_000
SIZES = ((8, 50), (16, 1000))
PROBLEMS = ("smooth", "peaked", "very peaked")


def alternating(shape: Array, budgets: Array) -> tuple[Array, int]:
    """Plain alternating scaling: the matrix and the sweeps it took (BASELINE_LIMIT when it gave up)."""
    steps = shape.shape[1]
    log_sums = np.log(steps * budgets)
    rows, columns = np.zeros(len(budgets)), np.zeros(steps)
    sweeps, error = 0, np.inf
    while error > TOLERANCE and sweeps < BASELINE_LIMIT:
        rows = log_sums - logsumexp(shape + columns, axis=1)
        columns = -logsumexp(shape + rows[:, None], axis=0)
        matrix = np.exp(shape + rows[:, None] + columns)
        error = np.abs(matrix.sum(axis=1) - steps * budgets).max()
        sweeps += 1
    return matrix, sweeps


def gains_of(problem: str, rewards: int, steps: int) -> Array:
    """Bumps over the steps, one per reward, as wide as ``problem`` says."""
    centres = np.linspace(0.1, 0.9, rewards)[:, None]
    width = {"smooth": 0.3, "peaked": 0.05, "very peaked": 0.02}[problem]
    return np.exp(-0.5 * ((np.linspace(0, 1, steps) - centres) / width) ** 2)


def seconds(action: Callable[[], object], repeats: int) -> float:
    """The fastest of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(
        f"{'problem':<14}{'R':>4}{'T':>6}{'ours ms':>10}{'steps':>7}{'plain ms':>11}{'sweeps':>8}{'ratio':>9}"
    )
    for rewards, steps in SIZES:
        budgets = np.random.default_rng(0).dirichlet(np.ones(rewards))
        for problem in PROBLEMS:
            gains = gains_of(problem, rewards, steps)
            shape = steps * gains / gains.sum(axis=1, keepdims=True)
            ours = allocate(gains, budgets, tolerance=TOLERANCE)
            _, sweeps = alternating(shape, budgets)
            fast = seconds(lambda g=gains, b=budgets: allocate(g, b, tolerance=TOLERANCE), repeats)
            slow = seconds(lambda s=shape, b=budgets: alternating(s, b), repeats)
            capped = ">" if sweeps == BASELINE_LIMIT else ""
            print(
                f"{problem:<14}{rewards:>4}{steps:>6}{fast * 1e3:>10.2f}{ours.iterations:>7}"
                f"{slow * 1e3:>11.2f}{capped + str(sweeps):>8}{slow / fast:>8.1f}x"
            )


if __name__ == "__main__":
    main()
