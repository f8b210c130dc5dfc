from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import ot
import pytest
from numpy.typing import NDArray

from recast_engine.allocation import Allocation, allocate, projection
from recast_engine.errors import ConfigError, NotConverged

KINDS = ("uniform", "spread 1e3", "one peak each", "log-normal", "mostly zero", "nearly equal")
GAINS = np.array([[0.5, 0.3, 0.1, 0.1], [0.0, 0.1, 0.2, 0.7], [0.2, 0.2, 0.2, 0.2]])
BUDGETS = np.array([2.0, 1.0, 1.0])


@dataclass(frozen=True, eq=False)
class Problem:
    kind: str
    gains: NDArray[np.float64]
    budgets: NDArray[np.float64]
    temperature: float


def random_problem(rng: np.random.Generator) -> Problem:
    """1-16 rewards, 1-100 steps, budgets down to 1e-6 or zero, temperatures from 1e-6 to 1e6."""
    rewards, steps = int(rng.integers(1, 17)), int(rng.choice([1, 2, 3, 5, 10, 25, 50, 100]))
    kind = KINDS[rng.integers(len(KINDS))]
    budgets = 10.0 ** rng.uniform(-6, 0, rewards) if rng.random() < 0.5 else rng.random(rewards)
    budgets[rng.random(rewards) < 0.15] = 0.0
    if not budgets.any():
        budgets[0] = 1.0
    temperature = 10.0 ** float(rng.choice([0, 0, 0, -1, -2, -3, -6, 2, 6]))
    return Problem(kind, _gains(kind, rewards, steps, rng), budgets, temperature)


def _gains(kind: str, rewards: int, steps: int, rng: np.random.Generator) -> NDArray[np.float64]:
    shape = (rewards, steps)
    if kind == "uniform":
        return rng.random(shape)
    if kind == "spread 1e3":
        return 10.0 ** rng.uniform(-3, 0, shape)
    if kind == "one peak each":
        gains = np.zeros(shape)
        gains[np.arange(rewards), rng.integers(0, steps, rewards)] = 1.0
        return gains
    if kind == "log-normal":
        return np.exp(rng.normal(0, 4, shape))
    if kind == "mostly zero":
        return (rng.random(shape) < 0.2) * rng.random(shape)
    return np.repeat(rng.random((1, steps)), rewards, axis=0) + 1e-9 * rng.random(shape)


def assert_constraints(result: Allocation, budgets: np.ndarray, bound: float = 1e-9) -> None:
    """Both constraints, measured here and not taken from the result."""
    shares = np.asarray(budgets) / np.sum(budgets)
    steps = result.matrix.shape[1]
    assert np.all(result.matrix >= 0)
    assert np.abs(result.matrix.sum(axis=1) - steps * shares).max() <= bound
    assert np.abs(result.matrix.sum(axis=0) - 1.0).max() <= bound
    assert np.all(result.matrix[np.asarray(budgets) == 0] == 0.0)
    assert result.converged


def survive(problems: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(problems):
        problem = random_problem(rng)
        result = allocate(problem.gains, problem.budgets, temperature=problem.temperature)
        assert_constraints(result, problem.budgets)
        assert np.isfinite(result.kl_from_static)


def test_random_problems_meet_both_constraints() -> None:
    survive(400, seed=0)


@pytest.mark.slow
def test_ten_thousand_random_problems_meet_both_constraints() -> None:
    survive(10_000, seed=1)


@pytest.mark.parametrize("exponent", [1e2, 7e2, 1e4, 1e8])
@pytest.mark.parametrize("smallest", [1e-2, 1e-6])
def test_peaked_gains_with_a_tiny_budget(exponent: float, smallest: float) -> None:
    gains = np.array([[1.0, 1e-3, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    budgets = np.array([0.7 - smallest, smallest, 0.3])
    result = allocate(gains, budgets, temperature=3.0 / exponent)
    assert_constraints(result, budgets)
    assert result.matrix[1].sum() == pytest.approx(3 * smallest, rel=1e-9)


def test_the_matrix_is_a_diagonal_scaling_of_the_affinities() -> None:
    """log W - s / tau must be f_i + g_t: with both constraints this characterises the KL projection."""
    rng = np.random.default_rng(2)
    gains, budgets = rng.random((5, 20)), rng.random(5)
    shape = 20 * gains / gains.sum(axis=1, keepdims=True)
    factors = np.log(allocate(gains, budgets, temperature=0.3).matrix) - shape / 0.3
    centred = factors - factors.mean(axis=0) - factors.mean(axis=1, keepdims=True) + factors.mean()
    assert np.abs(centred).max() < 1e-12


def test_alternating_scaling_gives_the_same_matrix() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        rewards, steps = rng.integers(2, 9), rng.integers(2, 40)
        exponents = rng.exponential(1.0, (rewards, steps))
        row_sums = rng.dirichlet(np.ones(rewards)) * steps
        first = projection.newton(exponents, row_sums, 1e-12)
        second = projection.alternating(exponents, row_sums, 1e-12)
        assert first.converged
        assert second.converged
        np.testing.assert_allclose(np.exp(first.log_matrix), np.exp(second.log_matrix), atol=1e-10)


@pytest.mark.parametrize(("rewards", "steps"), [(2, 3), (8, 50), (16, 200)])
def test_python_optimal_transport_gives_the_same_matrix(rewards: int, steps: int) -> None:
    """POT's log-domain Sinkhorn solves for P = W / T with marginals lambda and 1 / T."""
    rng = np.random.default_rng(rewards)
    gains, budgets = rng.exponential(1.0, (rewards, steps)), rng.dirichlet(np.ones(rewards))
    shape = steps * gains / gains.sum(axis=1, keepdims=True)
    plan = ot.bregman.sinkhorn_log(
        budgets, np.full(steps, 1 / steps), -shape / 0.5, reg=1.0, numItermax=100_000, stopThr=1e-14
    )
    np.testing.assert_allclose(allocate(gains, budgets, temperature=0.5).matrix, steps * plan, atol=1e-8)


def test_two_by_two_by_hand() -> None:
    """R = T = 2, s = ((2, 0), (0, 2)), equal budgets: W = 1 / (1 + e^-2) on the diagonal."""
    matrix = allocate([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0]).matrix
    diagonal = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(matrix, [[diagonal, 1 - diagonal], [1 - diagonal, diagonal]], atol=1e-12)


def test_annealing_does_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    gains, budgets = np.random.default_rng(4).exponential(1.0, (4, 12)), [0.4, 0.3, 0.2, 0.1]
    annealed = allocate(gains, budgets, temperature=0.05).matrix
    monkeypatch.setattr(projection, "ANNEAL_SPREAD", 1e9)
    np.testing.assert_allclose(allocate(gains, budgets, temperature=0.05).matrix, annealed, atol=1e-9)


def test_static_equals_the_budgets_exactly() -> None:
    result = allocate(GAINS, BUDGETS, method="static")
    assert np.array_equal(result.matrix, np.repeat([[0.5], [0.25], [0.25]], 4, axis=1))
    assert result.kl_from_static == 0.0
    assert result.iterations == 0
    assert result.converged


def test_equal_gains_give_static_weighting() -> None:
    result = allocate(np.full((3, 7), 0.2), BUDGETS)
    np.testing.assert_allclose(result.matrix, np.repeat([[0.5], [0.25], [0.25]], 7, axis=1), atol=1e-12)


def test_all_zero_gains_give_static_weighting() -> None:
    np.testing.assert_allclose(
        allocate(np.zeros((2, 3)), [1, 3]).matrix, [[0.25] * 3, [0.75] * 3], atol=1e-12
    )


def test_high_temperature_tends_to_static_and_low_temperature_departs_from_it() -> None:
    distances = [allocate(GAINS, BUDGETS, temperature=tau).kl_from_static for tau in (1e8, 10.0, 1.0, 0.1)]
    assert distances == sorted(distances)
    assert distances[0] < 1e-12
    static = allocate(GAINS, BUDGETS, method="static").matrix
    assert np.abs(allocate(GAINS, BUDGETS, temperature=1e8).matrix - static).max() < 1e-7


def test_one_reward_and_one_step() -> None:
    np.testing.assert_allclose(allocate([[0.1, 0.9, 0.0]], [5.0]).matrix, np.ones((1, 3)), atol=1e-15)
    np.testing.assert_allclose(allocate([[0.1], [0.9]], [1.0, 3.0]).matrix, [[0.25], [0.75]], atol=1e-12)


def test_rowwise_keeps_budgets_and_reports_the_columns_honestly() -> None:
    result = allocate(GAINS, BUDGETS, method="rowwise")
    shares = BUDGETS / 4
    affinity = np.exp(4 * GAINS / GAINS.sum(axis=1, keepdims=True))
    expected = 4 * shares[:, None] * affinity / affinity.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(result.matrix, expected, atol=1e-12)
    assert result.converged
    assert result.row_residual < 1e-12
    assert result.column_residual == pytest.approx(np.abs(expected.sum(axis=0) - 1).max())
    assert result.column_residual > 0.1


def test_diagnostics_are_those_of_the_matrix() -> None:
    result = allocate(GAINS, BUDGETS)
    shares = BUDGETS / 4
    assert result.row_residual == np.abs(result.matrix.sum(axis=1) - 4 * shares).max()
    assert result.column_residual == np.abs(result.matrix.sum(axis=0) - 1).max()
    assert result.kl_from_static == pytest.approx(
        (result.matrix * np.log(result.matrix / shares[:, None])).sum(), abs=1e-14
    )
    shape = np.array([[2.0, 1.2, 0.4, 0.4], [0.0, 0.4, 0.8, 2.8], [1.0, 1.0, 1.0, 1.0]])
    np.testing.assert_allclose(result.demand, shares @ shape)
    assert result.demand_ratio == pytest.approx(result.demand[3] / result.demand[2])


def test_scale_of_gains_and_budgets_does_not_matter() -> None:
    plain = allocate(GAINS, BUDGETS).matrix
    np.testing.assert_allclose(allocate(GAINS * 1e-300, BUDGETS * 1e300).matrix, plain, atol=1e-12)
    np.testing.assert_allclose(allocate(GAINS * 1e300, BUDGETS * 1e-300).matrix, plain, atol=1e-12)


def test_inputs_are_not_changed_and_may_be_lists() -> None:
    gains, budgets = GAINS.copy(), BUDGETS.copy()
    allocate(gains, budgets)
    assert np.array_equal(gains, GAINS)
    assert np.array_equal(budgets, BUDGETS)
    assert np.array_equal(allocate(GAINS.tolist(), BUDGETS.tolist()).matrix, allocate(GAINS, BUDGETS).matrix)


@pytest.mark.parametrize(
    ("gains", "ratio"),
    [([[1.0]], None), ([[1.0, 0.0, 0.0]], None), ([[0.0, 1.0, 0.0]], math.inf), ([[9.0, 2.0, 1.0]], 2.0)],
)
def test_demand_ratio_leaves_out_the_first_step(gains: list[list[float]], ratio: float | None) -> None:
    assert allocate(gains, [1.0]).demand_ratio == ratio


def test_to_dict_is_strict_json() -> None:
    data = allocate([[0.0, 1.0, 0.0]], [1.0]).to_dict()
    back = json.loads(json.dumps(data, allow_nan=False))
    assert back == data
    assert back["diagnostics"]["demand_ratio"] is None
    assert back["matrix"] == [pytest.approx([1.0, 1.0, 1.0])]
    assert back["budgets"] == [1.0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"gains": [1.0, 2.0]}, "gains"),
        ({"gains": np.zeros((0, 3))}, "gains"),
        ({"gains": [["a", "b"]]}, "gains"),
        ({"gains": np.where(GAINS == 0.7, np.nan, GAINS)}, "gains"),
        ({"gains": np.where(GAINS == 0.7, np.inf, GAINS)}, "gains"),
        ({"gains": GAINS - 0.1}, "gains"),
        ({"budgets": [1.0, 1.0]}, "budgets"),
        ({"budgets": [[1.0, 1.0, 1.0]]}, "budgets"),
        ({"budgets": [1.0, np.nan, 1.0]}, "budgets"),
        ({"budgets": [1.0, np.inf, 1.0]}, "budgets"),
        ({"budgets": [1.0, -1.0, 1.0]}, "budgets"),
        ({"budgets": [0.0, 0.0, 0.0]}, "budgets"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"method": "softmax"}, "method"),
    ],
)
def test_bad_input_names_the_argument(change: dict[str, object], name: str) -> None:
    arguments = {"gains": GAINS, "budgets": BUDGETS} | change
    with pytest.raises(ConfigError, match=name) as caught:
        allocate(**arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_the_fallback_finishes_what_newton_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "NEWTON_STEPS", 1)
    assert_constraints(allocate(GAINS, BUDGETS), BUDGETS)


def test_failing_to_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "NEWTON_STEPS", 1)
    monkeypatch.setattr(projection, "ALTERNATING_STEPS", 2)
    with pytest.raises(NotConverged, match="row sums are off by"):
        allocate(GAINS, BUDGETS)
