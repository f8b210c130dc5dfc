from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from recast import heatmap
from recast_engine.allocation import allocate

REWARDS = ("clipscore", "hpsv2", "ocr")


def allocation(steps: int, budgets: tuple[float, ...] = (0.5, 0.2, 0.3)) -> dict[str, Any]:
    gains = np.random.default_rng(0).gamma(0.5, size=(3, steps))
    found = allocate(gains, np.array(budgets)).to_dict()
    return {**found, "rewards": list(REWARDS), "budgets": dict(zip(REWARDS, budgets, strict=True))}


def text(matrix: dict[str, Any], width: int, colour: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    heatmap.show(console, matrix)
    return file.getvalue()


@pytest.mark.parametrize(
    ("steps", "width"), [(1, 80), (10, 80), (10, 120), (25, 80), (60, 100), (1000, 80), (25, 40)]
)
def test_the_matrix_fits_the_terminal(steps: int, width: int) -> None:
    lines = text(allocation(steps), width).splitlines()
    assert max(len(line) for line in lines) <= width
    for reward in REWARDS:
        assert sum(line.startswith(reward) for line in lines) == 1


def test_budgets_stand_beside_their_row_sums() -> None:
    line = next(line for line in text(allocation(10), 120).splitlines() if line.startswith("clipscore"))
    assert line.split()[-2:] == ["0.5000", "0.5000"]
    cells = [float(cell) for cell in line.split()[1:-2]]
    assert len(cells) == 10
    assert sum(cells) / 10 == pytest.approx(0.5, abs=0.005)  # cells show two decimals


def test_colours_follow_the_distance_from_static() -> None:
    matrix = allocation(2)
    matrix["matrix"] = [[0.0, 1.0], [0.2, 0.2], [0.8, 0.0]]
    shown = text(matrix, 80, colour=True)
    red, green, blue = heatmap.LOW
    assert f"48;2;{red};{green};{blue}" in shown
    red, green, blue = heatmap.HIGH
    assert f"48;2;{red};{green};{blue}" in shown
    red, green, blue = heatmap.EVEN
    assert f"48;2;{red};{green};{blue}" in shown


def test_lift_is_bounded_and_zero_for_static_and_unfunded_rows() -> None:
    lift = heatmap.lift(np.array([[0.5, 0.5], [0.0, 0.0], [0.0, 2.0], [0.9, 1.1]]))
    np.testing.assert_allclose(lift, [[0, 0], [0, 0], [-1, 1], [-0.1, 0.1]], atol=1e-12)


def test_budget_error_is_the_largest_miss() -> None:
    matrix = allocation(10)
    assert heatmap.budget_error(matrix) < heatmap.TOLERANCE
    matrix["matrix"][1][3] += 1e-3
    assert heatmap.budget_error(matrix) == pytest.approx(1e-4, rel=1e-3)
