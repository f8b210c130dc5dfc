"""The allocation solver against POT's `sinkhorn_log` and plain alternating scaling, in one run.

    python benchmarks/allocation.py [--repeats N] [--problems N]

All three solve the same projection (METHOD section 5) to the same tolerance, 1e-10 on every row sum of W.
The baseline is Python Optimal Transport's log-domain Sinkhorn; its plan P has row sums lambda and column sums
1 / T, so W = T P, and its stopping threshold is divided by T to mean the same. Plain alternating scaling is
written out here: POT looks at its error every tenth sweep only, this one at every sweep. Then `--problems`
random problems are solved and counted: zero budgets, budgets down to 1e-6, exponents spread up to 700.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import ot
from numpy.typing import NDArray
from scipy.special import logsumexp

from recast_engine.allocation import allocate
from recast_engine.errors import NotConverged

Array = NDArray[np.float64]

TOLERANCE = 1e-10
SWEEPS = 100_000  # after which a baseline counts as having given up
SIZES = ((8, 50), (16, 1000))
WIDTHS = {"smooth": 0.3, "peaked": 0.05, "very peaked": 0.02}


def alternating(shape: Array, budgets: Array) -> tuple[Array, int]:
    """Rows and columns scaled in turn by log-sum-exp: the matrix and the sweeps it took."""
    steps = shape.shape[1]
    log_sums = np.log(steps * budgets)
    columns = np.zeros(steps)
    sweep, matrix = 0, np.exp(shape)
    while sweep < SWEEPS and np.abs(matrix.sum(axis=1) - steps * budgets).max() > TOLERANCE:
        rows = log_sums - logsumexp(shape + columns, axis=1)
        columns = -logsumexp(shape + rows[:, None], axis=0)
        matrix = np.exp(shape + rows[:, None] + columns)
        sweep += 1
    return matrix, sweep


def pot(shape: Array, budgets: Array) -> tuple[Array, int]:
    """POT's log-domain Sinkhorn: the matrix and the sweeps it took."""
    steps = shape.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "did not converge": the sweeps say so
        plan, log = ot.bregman.sinkhorn_log(
            budgets,
            np.full(steps, 1.0 / steps),
            -shape,
            reg=1.0,
            numItermax=SWEEPS,
            stopThr=TOLERANCE / steps,
            log=True,
        )
    return steps * plan, int(log["niter"]) + 1


def gains_of(width: float, rewards: int, steps: int) -> Array:
    """Bumps over the steps, one per reward, ``width`` of the whole range wide."""
    centres = np.linspace(0.1, 0.9, rewards)[:, None]
    return np.exp(-0.5 * ((np.linspace(0, 1, steps) - centres) / width) ** 2)


def seconds(actions: list[Callable[[], object]], repeats: int) -> list[float]:
    """The median time of each action, the actions taken in turn so that a busy machine slows all alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def compare(repeats: int) -> None:
    """Print times, ratios and the largest difference of the matrices."""
    print(
        f"{'problem':<12}{'R':>3}{'T':>6}{'ours ms':>9}{'POT ms':>9}{'POT/ours':>9}{'plain ms':>10}"
        f"{'plain/ours':>11}{'Newton':>8}{'POT sweeps':>11}{'|ours-POT|':>12}{'|ours-plain|':>13}"
    )
    for rewards, steps in SIZES:
        budgets = np.random.default_rng(0).dirichlet(np.ones(rewards))
        for problem, width in WIDTHS.items():
            gains = gains_of(width, rewards, steps)
            shape = steps * gains / gains.sum(axis=1, keepdims=True)
            ours = allocate(gains, budgets, tolerance=TOLERANCE)
            (theirs, sweeps), (plain, _) = pot(shape, budgets), alternating(shape, budgets)
            fast, peer, slow = seconds(
                [
                    lambda g=gains, b=budgets: allocate(g, b, tolerance=TOLERANCE),
                    lambda s=shape, b=budgets: pot(s, b),
                    lambda s=shape, b=budgets: alternating(s, b),
                ],
                repeats,
            )
            print(
                f"{problem:<12}{rewards:>3}{steps:>6}{fast * 1e3:>9.2f}{peer * 1e3:>9.1f}{peer / fast:>8.1f}x"
                f"{slow * 1e3:>10.1f}{slow / fast:>10.1f}x{ours.iterations:>8}{sweeps:>11}"
                f"{np.abs(ours.matrix - theirs).max():>12.1e}{np.abs(ours.matrix - plain).max():>13.1e}"
            )


def random_problem(rng: np.random.Generator) -> tuple[Array, Array, float]:
    """Gains, budgets (some zero, down to 1e-6) and a temperature that spreads exponents up to 700."""
    rewards, steps = int(rng.integers(2, 17)), int(rng.choice([2, 5, 10, 25, 50, 100]))
    budgets = 10.0 ** rng.uniform(-6, 0, rewards)
    budgets[rng.random(rewards) < 0.2] = 0.0
    budgets[0] = budgets[0] or 1.0
    gains = np.exp(rng.normal(0.0, rng.uniform(0.1, 4.0), (rewards, steps)))
    shape = steps * gains / gains.sum(axis=1, keepdims=True)
    spread = float(np.ptp(shape))
    return gains, budgets, spread / 10.0 ** rng.uniform(-1, np.log10(700.0))


def survive(problems: int) -> None:
    """Solve random problems; print how many failed and the worst error of a marginal."""
    rng = np.random.default_rng(1)
    failed, worst, start = 0, 0.0, time.perf_counter()
    for _ in range(problems):
        gains, budgets, temperature = random_problem(rng)
        try:
            matrix = allocate(gains, budgets, temperature=temperature, tolerance=TOLERANCE).matrix
        except NotConverged:
            failed += 1
            continue
        shares = budgets / budgets.sum()
        rows = np.abs(matrix.sum(axis=1) - matrix.shape[1] * shares).max()
        worst = max(worst, float(rows), float(np.abs(matrix.sum(axis=0) - 1.0).max()))
    print(
        f"\n{problems} random problems: {failed} failed, worst marginal error {worst:.1e}, "
        f"{time.perf_counter() - start:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="timings per problem; the median counts")
    parser.add_argument("--problems", type=int, default=10_000, help="random problems to solve")
    options = parser.parse_args()
    compare(options.repeats)
    survive(options.problems)


if __name__ == "__main__":
    main()
