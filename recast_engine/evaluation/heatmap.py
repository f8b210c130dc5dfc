"""An allocation matrix as a picture: when, along the denoising trajectory, each reward acts."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

INK, FAINT = "#1d2433", "#6b7385"
_STOPS = ["#f4f6fb", "#b9cdf3", "#6f95e0", "#2f5fc0", "#142f6e"]
COLORS = LinearSegmentedColormap.from_list("allocation", _STOPS)
ANNOTATED = 16
"""Cells carry their value up to this many steps."""


def _budgets(allocation: Mapping[str, Any]) -> list[float]:
    """Budgets in the order of the rewards, from a list or a mapping."""
    budgets = allocation["budgets"]
    if isinstance(budgets, Mapping):
        return [float(budgets.get(reward, 0.0)) for reward in allocation["rewards"]]
    return [float(value) for value in budgets]


def _draw_matrix(axes: Any, matrix: NDArray[np.float64], names: Sequence[str]) -> Any:
    steps = matrix.shape[1]
    image = axes.imshow(matrix, aspect="auto", cmap=COLORS, vmin=0, vmax=max(1e-9, float(matrix.max())))
    axes.set_yticks(range(len(names)), names, fontsize=9)
    every = max(1, steps // 20)
    axes.set_xticks(range(0, steps, every), range(1, steps + 1, every), fontsize=8)
    axes.set_xticks(np.arange(-0.5, steps), minor=True)
    axes.set_yticks(np.arange(-0.5, len(names)), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if steps <= ANNOTATED:
        dark = 0.55 * float(matrix.max())
        for (row, column), value in np.ndenumerate(matrix):
            color = "white" if value > dark else INK
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    return image


def _draw_demand(axes: Any, demand: Sequence[float]) -> None:
    """Bars of how much gain the budgets ask of each step; 1 is an even share."""
    axes.bar(range(len(demand)), demand, width=0.92, color="#b9cdf3")
    axes.axhline(1.0, color=FAINT, linewidth=0.8, linestyle=":")
    axes.set_ylabel("demand", fontsize=8, color=FAINT)
    axes.tick_params(length=0, labelsize=8, colors=FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_sigmas(axes: Any, sigmas: Sequence[float], steps: int) -> None:
    top = axes.secondary_xaxis("top")
    shown = range(0, steps, max(1, steps // 10))
    top.set_xticks(list(shown), [f"σ {sigmas[step]:.2f}" for step in shown], fontsize=7)
    top.tick_params(length=0, colors=FAINT)
    top.spines["top"].set_visible(False)


def heatmap_figure(allocation: Mapping[str, Any]) -> Figure:
    """The figure of a stored allocation.

    Args:
        allocation: ``rewards`` (R names), ``budgets`` (list or mapping), ``matrix`` (R x T), and optionally
            ``sigmas`` (T + 1), shown above the steps, ``diagnostics.demand`` (T), drawn below, ``method``.
    """
    matrix = np.asarray(allocation["matrix"], dtype=np.float64)
    rows, steps = matrix.shape
    sigmas, demand = allocation.get("sigmas"), allocation.get("diagnostics", {}).get("demand")
    height = 1.6 + 0.62 * rows + (1.0 if demand else 0.0)
    figure = Figure(figsize=(min(14.0, 3.2 + 0.55 * steps), height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if demand:
        axes, lowest = figure.subplots(2, 1, sharex=True, height_ratios=[0.62 * rows + 0.6, 1.0])
        _draw_demand(lowest, demand)
    else:
        axes = lowest = figure.subplots()
    budgets = zip(allocation["rewards"], _budgets(allocation), strict=True)
    image = _draw_matrix(axes, matrix, [f"{name}\nbudget {budget:.0%}" for name, budget in budgets])
    if sigmas:
        _draw_sigmas(axes, sigmas, steps)
    lowest.set_xlabel("denoising step, from noise to image", fontsize=9, color=INK)
    method = f" ({allocation['method']})" if allocation.get("method") else ""
    title = f"Which reward acts when{method}"
    axes.set_title(title, fontsize=11, color=INK, loc="left", pad=22 if sigmas else 8)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.04)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=FAINT)
    return figure


def heatmap_png(allocation: Mapping[str, Any], *, dpi: int = 130) -> bytes:
    """The figure of ``heatmap_figure`` as PNG bytes."""
    buffer = io.BytesIO()
    heatmap_figure(allocation).savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def save_heatmap(allocation: Mapping[str, Any], path: Path) -> Path:
    """Write the figure as PNG; returns ``path``."""
    path.write_bytes(heatmap_png(allocation))
    return path
