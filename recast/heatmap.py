"""An allocation matrix as coloured cells in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

LOW, EVEN, HIGH = (49, 76, 149), (58, 58, 62), (222, 132, 48)
"""Colours of a step that gets less than, exactly, or more than the reward's static weight."""
NAME_WIDTH, BUDGET_WIDTH = 12, 9
TOLERANCE = 1e-9


def budget_error(allocation: dict[str, Any]) -> float:
    """Largest distance between a budget and its row sum divided by the number of steps."""
    matrix = np.asarray(allocation["matrix"], dtype=np.float64)
    budgets = np.array([allocation["budgets"][reward] for reward in allocation["rewards"]])
    return float(np.abs(matrix.sum(axis=1) / allocation["steps"] - budgets).max())


def lift(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Position of every cell between 0 and about twice its row's mean, as -1..1.

    Args:
        matrix: (R, T) allocation.

    Returns:
        (R, T): -1 where a reward does not act, 0 at its static weight, 1 at twice that and above. A row
        without budget is all 0.
    """
    mean = matrix.mean(axis=1, keepdims=True)
    ratio = np.divide(matrix, mean, out=np.ones_like(matrix), where=mean > 0)
    clipped: NDArray[np.float64] = np.clip(ratio - 1.0, -1.0, 1.0)
    return clipped


def terminal(allocation: dict[str, Any], width: int) -> Group:
    """The matrix for a terminal of ``width`` columns: rewards down, steps across, noisiest first."""
    matrix = np.asarray(allocation["matrix"], dtype=np.float64)
    cell, bins = _layout(matrix.shape[1], width)
    shown = np.stack([chunk.mean(axis=1) for chunk in np.array_split(matrix, bins, axis=1)], axis=1)
    table = Table(box=None, padding=0, pad_edge=False, show_header=True)
    table.add_column("", width=NAME_WIDTH, no_wrap=True)
    table.add_column(_steps_header(allocation["steps"], cell * bins), no_wrap=True)
    table.add_column("budget", width=BUDGET_WIDTH, justify="right")
    table.add_column("sum/T", width=BUDGET_WIDTH, justify="right")
    colours = lift(matrix)
    colours = np.stack([chunk.mean(axis=1) for chunk in np.array_split(colours, bins, axis=1)], axis=1)
    for row, reward in enumerate(allocation["rewards"]):
        cells = Text()
        for value, colour in zip(shown[row], colours[row], strict=True):
            cells.append(f"{value:^{cell}.2f}" if cell >= 5 else " " * cell, style=_style(float(colour)))
        budget = allocation["budgets"][reward]
        table.add_row(reward[:NAME_WIDTH], cells, f"{budget:.4f}", f"{matrix[row].mean():.4f}")
    return Group(table, Text(_caption(allocation, bins), style="dim"))


def show(console: Console, allocation: dict[str, Any]) -> None:
    """Print the matrix."""
    console.print(terminal(allocation, console.width))


def _layout(steps: int, width: int) -> tuple[int, int]:
    """Width of a cell and number of columns: numbers where they fit, else blocks, else averaged blocks."""
    room = max(width - NAME_WIDTH - 2 * BUDGET_WIDTH, 10)
    for cell in (6, 5, 2, 1):
        if cell * steps <= room:
            return cell, steps
    return 1, room


def _steps_header(steps: int, width: int) -> Text:
    left, right = "step 1", str(steps)
    return Text(
        left + " " * max(1, width - len(left) - len(right)) + right if width > 9 else "steps", style="dim"
    )


def _caption(allocation: dict[str, Any], bins: int) -> str:
    diagnostics = allocation["diagnostics"]
    grouped = (
        "" if bins == allocation["steps"] else f"; {allocation['steps']} steps averaged into {bins} columns"
    )
    return (
        f"blue: less than the static weight, orange: more; step 1 is the noisiest{grouped}\n"
        f"{allocation['method']}: KL from static {diagnostics['kl_from_static']:.4f}, "
        f"demand ratio {_number(diagnostics['demand_ratio'])}, "
        f"largest residual {max(diagnostics['row_residual'], diagnostics['column_residual']):.1e}"
    )


def _number(value: float | Sequence[float] | None) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "-"


def _style(lift_: float) -> str:
    end = HIGH if lift_ > 0 else LOW
    red, green, blue = (round(a + (b - a) * abs(lift_)) for a, b in zip(EVEN, end, strict=True))
    return f"rgb(255,255,255) on rgb({red},{green},{blue})"
